"""Older results get today's names, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.reproduce import grid
from experiments.reproduce.grid import Row
from experiments.reproduce.migrate import migrate, module_command
from tests.experiments.common import made_up, written


def test_records_and_results_are_migrated_once(tmp_path: Path) -> None:
    record = made_up("listops", Row("smgk", 4), 0, 37.0, command="mgk reproduce all --cells listops/smgk-h4-s0")
    results = written(tmp_path / "cells", [record])
    other = tmp_path / "generate-cuda.json"
    other.write_text(json.dumps({"rows": [{"road": "static", "milliseconds": 3.5}], "command": "mgk compare"}))
    assert migrate(results) == 2
    (found,) = grid.read_all(results)
    assert found.values == json.loads(json.dumps(record.values | {"command": record.cell.command}))
    assert json.loads(other.read_text()) == {
        "rows": [{"mode": "static", "milliseconds": 3.5}],
        "command": "mgk compare",
    }
    assert migrate(results) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mgk/bench/generate.py --tiny", "python -m benchmarks.generate --tiny"),
        ("python -m mgk.bench.train", "python -m benchmarks.train"),
        ("python -m mgk.reproduce steps --heads 8", "python -m experiments.reproduce steps --heads 8"),
        ("python -m benchmarks.train", "python -m benchmarks.train"),
        ("mgk train lra-text", "mgk train lra-text"),
    ],
)
def test_commands_name_modules_that_exist(before: str, after: str) -> None:
    assert module_command(before.split()) == after.split()
