"""Measure the time of a training step of each row, one row after the other, each alone on the device.

Times from training itself cannot be compared, because several trainings share the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.cells.cell import Adapt, Cell
from experiments.cells.runner import present
from mgk.environment import environment
from mgk.files import write_json
from mgk.recipes.runner import release_device
from mgk.train.config import Config, replace
from mgk.train.data import Source
from mgk.train.fabric import launch
from mgk.train.learner import Learner

STEPS = Path("results") / "steps.json"
BATCHES, ROUNDS = 8, 8  # the first batches of the training, and how often they are repeated

Steps = Mapping[str, Mapping[str, Any]]


def measure(
    cells: Sequence[Cell],
    path: Path,
    *,
    data_root: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    again: bool = False,
) -> dict[str, str]:
    """Measure the rows of cells and write them to a file, which keeps its other tasks. Return tasks without data.

    With `again` the first row of a task is measured once more at the end, to see how far times differ within the run.
    """
    todo, absent = present(list({(cell.task, cell.row): cell for cell in cells}.values()), data_root)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for task in dict.fromkeys(cell.task for cell, _ in todo):
        measured: dict[str, Any] = {"environment": environment(), "rows": {}}
        own = [(cell, config) for cell, config in todo if cell.task == task]
        for number, (cell, config) in enumerate([*own, own[0]] if again else own):
            seconds = seconds_per_step(replace(config, device=device, workers=0), data_root, cell.adapt)
            print(f"{task}/{cell.row.name}: {1e3 * seconds:.3f} ms", flush=True)
            if number < len(own):
                measured["rows"][cell.row.name] = seconds
            else:
                measured["again"] = {cell.row.name: seconds}
            release_device()
        found[task] = measured
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return absent


def seconds_per_step(config: Config, data_root: Path | None = None, adapt: Adapt | None = None) -> float:
    """Return the mean time of a step after a warm-up."""
    fabric = launch(config)
    on_gpu = fabric.device.type == "cuda"
    source, learner = Source(config, data_root, pin=on_gpu), Learner(fabric, config, adapt)
    batches = [source.batches[step] for step in range(BATCHES)]

    def rounds(first: int, count: int) -> float:
        began = time.perf_counter()
        for step in range(first * BATCHES, (first + count) * BATCHES):
            learner.update(step, batches[step % BATCHES])
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / (count * BATCHES)

    rounds(0, 3)  # compiles kernels, captures graphs and replays them once
    return rounds(3, ROUNDS)


def read_steps(path: Path) -> Steps:
    """Read the measured steps by task; empty if there is no file."""
    found: Steps = json.loads(path.read_text()) if path.exists() else {}
    return found
