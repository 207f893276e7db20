"""The command line says what the function does, with or without tyro."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tyro

from mgk.reproduce import TARGETS, TASKS, main
from mgk.reproduce.commands import reproduce

WORDS = ["table1", "--budget", "5", "--jobs", "2", "--recipes", "listops", "text", "--heads", "8", "--seeds", "3"]
MEANT = {"what": "table1", "budget": 5, "jobs": 2, "recipes": ("listops", "text"), "heads": (8,), "seeds": 3}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def record(what: str, **options: Any) -> None:
        found.update(options, what=what)

    monkeypatch.setattr(main, "reproduce", record)
    return found


@pytest.mark.parametrize("words", [WORDS, []])
def test_both_command_lines_mean_the_same(called: dict[str, Any], words: list[str]) -> None:
    tyro.cli(reproduce, args=words)
    first = dict(called)
    called.clear()
    assert main.main(words) == 0
    lists = {"recipes", "heads", "cells"}
    assert first == {name: tuple(value) if name in lists else value for name, value in called.items()}
    if words:
        assert {name: first[name] for name in MEANT} == MEANT


def test_help_names_every_table_and_recipe() -> None:
    text = " ".join((inspect.getdoc(reproduce) or "").split())
    assert all(task in text for task in TASKS)
    assert all(target in str(inspect.signature(reproduce)) for target in TARGETS)


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["table1", "--recipes", "imdb", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("mgk: error: recipes: expected some of listops, text")
