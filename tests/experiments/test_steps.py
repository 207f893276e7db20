"""Steps are timed row by row, and the measurements of other tasks are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.cells.steps import read_steps
from experiments.reproduce.main import main
from tests.experiments.common import small_listops


def test_a_step_of_every_row(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_listops(monkeypatch)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"text": {"rows": {"linear-h8": 1.0}}}))
    cells = [f"listops/{name}" for name in ("softmax-h2-s0", "softmax-h2-s1", "smgk-h1-hard-s0")]
    options = ["--results", str(tmp_path / "cells"), "--data-root", str(data_root), "--device", "cpu"]
    assert main(["steps", "--cells", *cells, "text/linear-h8-s0", *options]) == 0
    found = read_steps(path)
    assert found["text"] == {"rows": {"linear-h8": 1.0}}
    assert list(found["listops"]["rows"]) == ["softmax-h2", "smgk-h1-hard"]  # each row once, not once per seed
    assert all(seconds > 0 for seconds in found["listops"]["rows"].values())
    assert found["listops"]["environment"]["gpu"] is None
    printed = capsys.readouterr().out
    assert "listops/smgk-h1-hard: " in printed
    assert "text: skipped: " in printed


def test_without_a_file_there_are_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "steps.json") == {}
