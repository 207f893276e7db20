"""Bring older records up to date: `python -m experiments.reproduce.migrate`. Running it twice changes nothing.

- The commands in the records name today's modules, not the subcommands and modules of `mgk` that they were run with.
- `results/generate-cuda.json` calls the way in which a model generates its "mode", which was "road".

Numbers, commits and versions stay as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.cells.records import write
from experiments.reproduce import RESULTS, grid
from mgk.files import write_json


def migrate(results: Path = RESULTS) -> int:
    """Rewrite the records in `results` and the benchmark results beside that folder. Return how many files changed."""
    changed = 0
    for record in grid.read_all(results):
        command = record.cell.command
        if record.values["command"] != command:
            write(results, record.cell, record.values | {"command": command})
            changed += 1
    for path in sorted(results.parent.glob("*.json")):
        before = json.loads(path.read_text())
        after = update(before)
        if after != before:
            write_json(path, after)
            changed += 1
    return changed


def update(value: Any) -> Any:
    """Return a result with new names, at any depth."""
    if isinstance(value, list):
        return [update(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {"mode" if name == "road" else name: update(item) for name, item in value.items()}
    if isinstance(command := renamed.get("command"), list):
        renamed["command"] = module_command(command)
    return renamed


def module_command(words: list[str]) -> list[str]:
    """Replace `mgk/bench/NAME.py`, `python -m mgk.bench.NAME` and `python -m mgk.reproduce` by today's commands."""
    if words[0].startswith("mgk/bench/"):
        return ["python", "-m", f"benchmarks.{Path(words[0]).stem}", *words[1:]]
    if words[:2] == ["python", "-m"]:
        module = words[2].replace("mgk.bench.", "benchmarks.").replace("mgk.reproduce", "experiments.reproduce")
        return [*words[:2], module, *words[3:]]
    return words


if __name__ == "__main__":
    print(f"{migrate()} files changed")
