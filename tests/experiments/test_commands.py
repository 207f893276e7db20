"""The command line passes its options on, and its help is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.reproduce import TARGETS, TASKS, main

WORDS = ["table1", "--budget", "5", "--jobs", "2", "--recipes", "listops", "text", "--heads", "8", "--seeds", "3"]
MEANT = {"what": "table1", "budget": 5, "jobs": 2, "recipes": ["listops", "text"], "heads": [8], "seeds": 3}


def test_options_reach_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(main, "reproduce", lambda options: found.update(vars(options)))
    assert main.main(WORDS) == 0
    assert {name: found[name] for name in MEANT} == MEANT


def test_help_names_every_table_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    assert all(task in text for task in TASKS)
    assert all(target in text for target in TARGETS)


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["table1", "--recipes", "imdb", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: recipes: expected some of listops, text")
