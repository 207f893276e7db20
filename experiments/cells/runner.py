"""Fill cells: train each and write its record, until all are done or the budget is spent.

A finished cell is a record, written atomically. An unfinished one is the folder of a run, which the next session
resumes from its last checkpoint. A lock keeps two sessions from training the same cell. See `mgk.recipes.runner` for
how trainings run side by side and stop.

Batches are made in the training process: that takes a millisecond, for which the GPU does not wait, and an evaluation
need not start processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import mgk.data
from experiments.cells import records
from experiments.cells.cell import Adapt, Cell
from mgk.files import beside, locked, tidy
from mgk.ops.arguments import check_count
from mgk.recipes.runner import Deadline, Failure, Stop, run_jobs
from mgk.train import checkpoint, train
from mgk.train.config import Config, replace
from mgk.train.data import load


@dataclass(frozen=True)
class Session:
    """What all cells of a session share."""

    results: Path
    runs: Path
    data_root: Path | None
    jobs: int
    device: Literal["auto", "cpu", "cuda"]
    quiet: bool

    def finished(self, cell: Cell) -> bool:
        return records.path_of(self.results, cell).exists()

    def lock(self, cell: Cell) -> Path:
        return beside(self.runs / cell.name, "lock")

    def share(self, cell: Cell) -> float:
        """Return which share of a cell's steps its last checkpoint has behind it."""
        last = self.runs / cell.name / "last"
        return float(checkpoint.read_facts(last)["step"]) / cell.config.steps if last.exists() else 0.0

    def tell(self, cell: Cell, line: str) -> None:
        if not self.quiet:
            print(f"{cell.name}: {line}", flush=True)


@dataclass(frozen=True)
class Tally:
    """The outcome of a session: names of cells."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Cells for the next session, begun or not."""
    absent: dict[str, str] = field(default_factory=dict)
    """Recipes without data, and what prepares it."""


def run_cells(
    cells: Sequence[Cell],
    *,
    budget: float | None = None,
    jobs: int = 1,
    results: Path,
    runs: Path,
    data_root: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    quiet: bool = True,
    minutes: Callable[[Cell], float] | None = None,
) -> Tally:
    """Fill cells in their order, until all are filled or the budget is spent. The same call resumes later.

    Args:
        cells: the cells, most important first.
        budget: minutes; None is no limit.
        jobs: trainings at a time on one device.
        results: folder of the records.
        runs: folder of the runs.
        data_root: folder of the prepared data sets; ListOps is generated there if it is missing.
        device: where to train.
        quiet: show no progress.
        minutes: how long a cell takes; with it, no cell starts that would not end within the budget.
    """
    check_count("jobs", jobs)
    deadline = None if budget is None else Deadline(budget)
    session = Session(results, runs, data_root, jobs, device, quiet)
    recorded = [cell for cell in cells if session.finished(cell)]
    wrong = {cell.name: why for cell in recorded if (why := records.wrong(results, cell)) is not None}
    todo, absent = present([cell for cell in cells if cell not in recorded], data_root)
    outcomes = run_jobs(
        {cell: partial(fill, cell, config, session) for cell, config in todo},
        processes=jobs,
        deadline=deadline,
        needs={cell: minutes(cell) * (1 - session.share(cell)) for cell, _ in todo} if minutes else None,
        on_failure=lambda cell, reason: session.tell(cell, f"failed: {reason}"),
    )
    finished = [cell.name for cell, _ in todo if session.finished(cell)]
    failures = {cell.name: outcome.reason for cell, outcome in outcomes.items() if isinstance(outcome, Failure)}
    failed = {name: reason for name, reason in failures.items() if name not in finished}
    left = [cell.name for cell, _ in todo if cell.name not in finished and cell.name not in failed]
    return Tally(finished, failed | wrong, left, absent)


def present(cells: Sequence[Cell], data_root: Path | None) -> tuple[list[tuple[Cell, Config]], dict[str, str]]:
    """Return the cells whose data is prepared, with their configurations, and advice for the other tasks.

    ListOps is generated if it is missing: its seed determines it.
    """
    kept: list[tuple[Cell, Config]] = []
    absent: dict[str, str] = {}
    checked: set[str] = set()
    for cell in cells:
        config = cell.config
        if cell.task not in checked and cell.task not in absent:
            try:
                if config.data.name == "listops" and not config.data.options:
                    mgk.data.prepare("listops", root=data_root)
                load(config, data_root)
                checked.add(cell.task)
            except ValueError as error:  # no data, or data that does not fit the model
                absent[cell.task] = str(error)
        if cell.task in checked:
            kept.append((cell, config))
    return kept, absent


def fill(cell: Cell, config: Config, session: Session) -> None:
    """Train a cell and write its record, unless another process is training it or has finished it."""
    began, run = time.monotonic(), session.runs / cell.name
    with locked(session.lock(cell), wait=False) as ours:
        if not ours:
            return
        record = records.path_of(session.results, cell)
        tidy(record.parent, record.name)  # of a process that was killed while it wrote the record
        if session.finished(cell):
            return
        config = replace(config, workers=0, device=session.device)
        session.tell(cell, "resumes" if (run / "last").exists() else "starts")
        adapt = cell.adapt
        if cell.pretraining is not None:
            before, change = cell.pretraining
            first = beside(run, "pretraining")
            finish(cell, replace(before, workers=0, device=session.device), first, session, change)
            adapt = partial(load_encoder, first)
        finish(cell, config, run, session, adapt)
        values = records.make(cell, run, jobs=session.jobs, data_root=session.data_root)
        records.write(session.results, cell, values)
        session.tell(cell, f"test {values['test']:.4g} after {time.monotonic() - began:.0f} s")


def finish(cell: Cell, config: Config, run: Path, session: Session, adapt: Adapt | None = None) -> None:
    """Train or resume a run to its end; raise `Stop` if it is told to stop."""
    quiet = session.quiet or session.jobs > 1
    result = train(config, run, resume=True, data_root=session.data_root, quiet=quiet, adapt=adapt)
    if not result.finished:
        session.tell(cell, f"stopped at step {result.step} of {config.steps}")
        raise Stop


@torch.no_grad()
def load_encoder(run: Path, model: nn.Module) -> None:
    """Start from the encoder of a finished run: its best checkpoint."""
    best = checkpoint.find(run, "best")
    if best is None:
        raise ValueError(f"{run}: expected a finished run, found no checkpoint")
    name = "encoder."
    weights = {key.removeprefix(name): w for key, w in checkpoint.load(best).weights.items() if key.startswith(name)}
    model.encoder.load_state_dict(weights)  # type: ignore[union-attr, operator]
