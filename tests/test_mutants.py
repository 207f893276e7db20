"""The list of `make mutants` fits the code, and its runner tells a killed mutant from a survivor and from an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant, misfit, outcome


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.file.split('/')[-1]}: {mutant.old.strip()[:40]}"
)
def test_its_text_occurs_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.old != mutant.new
    assert misfit(mutant) == ""


def test_outcomes(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def two():\n    return 1 + 1\n")
    (tmp_path / "test_code.py").write_text("from code import two\n\ndef test_two():\n    assert two() == 2\n")
    (tmp_path / "test_code.py").write_text(
        "import pathlib\n\ndef test_two():\n    space = {}\n    exec(pathlib.Path('code.py').read_text(), space)\n"
        "    assert space['two']() == 2\n"
    )
    for old, new, expected in (
        ("1 + 1", "1 - 1", "killed"),
        ("1 + 1", "1 * 2", "survived"),
        ("1 + 2", "", "error: expected its text once"),
    ):
        assert outcome(Mutant("code.py", old, new, "test_code.py"), tmp_path).startswith(expected)
        assert "1 + 1" in (tmp_path / "code.py").read_text()
    assert outcome(Mutant("code.py", "1 + 1", "0", "test_none.py"), tmp_path) == "error: no such test: test_none.py"
