"""The same table for people (Markdown) and for papers (LaTeX)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Cells are text already; the first column names the row, the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"rows: expected {len(self.header)} cells as in the header, got {len(row)}: {row}")

    def markdown(self) -> str:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "| "
            + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
            + " |"
            for r in rows
        ]
        rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
        return "\n".join([*([self.title, ""] if self.title else []), lines[0], rule, *lines[1:]]) + "\n"

    def latex(self) -> str:
        """Needs the package booktabs."""
        lines = [" & ".join(map(escape, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "l" + "r" * (len(self.header) - 1)
        body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
        tabular = f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"
        if not self.title:
            return tabular
        return f"\\begin{{table}}\n\\centering\n\\caption{{{escape(self.title)}}}\n{tabular}\\end{{table}}\n"

    def write(self, stem: str | Path) -> list[Path]:
        """STEM.md and STEM.tex."""
        stem = Path(stem)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(stem.name + ending) for ending in (".md", ".tex")]
        for path, text in zip(paths, (self.markdown(), self.latex()), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths


def escape(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)
