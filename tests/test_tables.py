"""A table says the same in Markdown and in LaTeX, whatever its cells contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgk.tables import Table

TABLE = Table(["model", "a|b"], [["sMGK_4", "1 %"], ["x & y", "2.0 ± 0.1"]], "Costs & gains")


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "Costs & gains",
        "",
        "| model  |      a\\|b |",
        "|--------|----------:|",
        "| sMGK_4 |       1 % |",
        "| x & y  | 2.0 ± 0.1 |",
    ]


def test_latex() -> None:
    latex = TABLE.latex()
    assert r"sMGK\_4 & 1 \% \\" in latex
    assert r"x \& y & 2.0 $\pm$ 0.1 \\" in latex
    assert r"\caption{Costs \& gains}" in latex
    assert r"\begin{tabular}{lr}" in latex
    assert latex.count(r"\begin") == latex.count(r"\end") == 2


def test_files(tmp_path: Path) -> None:
    paths = TABLE.write(tmp_path / "a" / "costs.v1")
    assert [path.name for path in paths] == ["costs.v1.md", "costs.v1.tex"]
    assert paths[0].read_text() == TABLE.markdown()


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match="rows: expected 2 cells as in the header, got 1"):
        Table(["a", "b"], [["1"]])
