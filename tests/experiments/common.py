"""Made-up records, and cells small enough to be trained in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.cells import records
from experiments.cells.inside import pack_map
from experiments.reproduce import grid
from experiments.reproduce.grid import TASKS, Cell, Record, Row, Task
from mgk.train.config import Config, to_dict
from tests.train.common import tiny

INSIDE = {"length": 512, "examples": 8, "effective_heads": [1.5, 1.0]}


def with_maps(heads: int) -> dict[str, Any]:
    """Return what a record with maps has measured; all weight is on the diagonal."""
    return INSIDE | {"rank": [300.0, 200.0], "map_layers": [1, 6], "maps": [[pack_map(torch.eye(4))] * heads] * 2}


def made_up(task: str, row: Row, seed: int, test: float, **changes: Any) -> Record:
    """A record as a session would have written it; ListOps leaves the plateau at step 2,000 + 100 * seed, or never."""
    cell = Cell(task, row, seed)
    metric = TASKS[task].metric
    left = 2000 + 100 * seed
    curve = {"step": [1000, left, 5000], "loss": [2.0, 1.9, 1.8]}
    if metric == "accuracy":
        curve["accuracy"] = [0.17, test / 100, test / 100]
    values: dict[str, Any] = {
        "recipe": task, "attention": row.attention, "heads": row.heads, "option": row.option, "seed": seed,
        "metric": metric, "dev": test, "test": test, "best_step": 5000, "steps": 5000,
        "parameters": 100_000 + 10_000 * row.heads, "flops": 10**9 * row.heads,
        "seconds_per_step": 0.001 * row.heads, "jobs": 1, "peak_bytes": row.heads * 2**20, "gpu": "GPU 1",
        "versions": {"python": "3.12", "torch": "2.11"}, "commit": "abc1234", "command": cell.command,
        "data": {"name": TASKS[task].config.data.name, "digest": "0123456789abcdef", "options": {}}, "starts": 1,
        "inside": INSIDE | {"rank": [300.0 + seed, 200.0]},
        "curve": {"train": {"step": [1000, 5000], "loss": [2.0, 1.8]}, "valid": curve},
        "configuration": to_dict(cell.config),
    }  # fmt: skip
    return Record(cell, values | changes)


def seeds(task: str, row: Row, tests: list[float], **changes: Any) -> list[Record]:
    return [made_up(task, row, seed, test, **changes) for seed, test in enumerate(tests)]


def written(results: Path, found: list[Record]) -> Path:
    for record in found:
        records.write(results, record.cell, record.values)
    return results


SOFTMAX, SMGK = Row("softmax", 2), Row("smgk", 1)
CELLS = [Cell("listops", row, seed) for seed in (0, 1) for row in (SOFTMAX, SMGK)]


def small_listops(monkeypatch: Any, config: Config | None = None) -> None:
    """Make `listops` a task that trains in seconds."""
    monkeypatch.setitem(grid.TASKS, "listops", Task(config or tiny(steps=8), "accuracy", "Small.", plateau=True))
