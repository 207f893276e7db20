"""The README: short, its numbers are those of the records and of its own code, and it can be cited."""

from __future__ import annotations

import re

import pytest
import yaml

import mgk
from benchmarks import report
from tests.pages import ROOT, read_blocks

README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_it_introduces_its_words_before_the_table() -> None:
    table = README.index(report.BEGIN)
    for word in ("component", "prior", "E-step", "M-step"):
        assert README.index(f"**{word}") < table


def test_the_example_prints_the_numbers_of_weights_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in read_blocks(ROOT / "README.md") if block.language == "python")
    exec(compile(block.text, "README.md", "exec"), {})
    assert re.search(r"This prints (\d+) and (\d+)", README).groups() == tuple(capsys.readouterr().out.split())  # type: ignore[union-attr]
    assert len(block.text.splitlines()) <= 10


def test_pages_with_numbers_follow_from_the_records() -> None:
    """If this fails after a change in results/: python -m benchmarks.report."""
    for path, text in report.pages().items():
        assert path.read_text() == text, path.name


def test_citations_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mgk.__version__
    assert re.search(r"version = \{(.+)\}", README).group(1) == mgk.__version__  # type: ignore[union-attr]
    paper = citation["preferred-citation"]
    assert paper["title"] in README
    assert [author["family-names"] for author in paper["authors"]] == re.findall(
        r"([A-Z]\w+), [A-Z]", README.split("author    =")[1].split("booktitle")[0]
    )
