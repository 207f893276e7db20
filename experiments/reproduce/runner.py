"""A sitting: cells one after the other, or several side by side, until all are done or the time is up.

Each process walks the same list and takes the first cell that is neither finished nor another's: a lock that the
system frees when its process dies, whatever it dies of. What is finished is a record, written in one step; what is not
is the folder of a run, which the next sitting continues from its last checkpoint.

A process asks itself to stop, by SIGTERM, some time before the end of the budget: within training that means a
checkpoint after the step or the evaluation it is in, elsewhere (start-up, the test split, the record) it stops at once,
as the last checkpoint is enough. One that evaluates beyond the end is killed there by its parent; a process alone, with
one job, has none and ends that much later.

A cell that fails is noted, and the others go on; also where it takes the process with it, or the GPU from the process,
as an illegal access does: then another process goes on.

Side by side pays where one training leaves the GPU idle between kernels, or much of it idle in small ones. Processes
share a GPU by turns, or, where `nvidia-cuda-mps-control -d` has been started, truly at the same time. Batches are made
in the training process: that takes a millisecond, which the GPU does not wait for, and evaluations need not start
processes.
"""

from __future__ import annotations

import fcntl
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch

import mgk.data
from experiments.reproduce import records
from experiments.reproduce.grid import Cell
from mgk.files import write_text
from mgk.train import train
from mgk.train.config import Config, replace
from mgk.train.data import load
from mgk.train.run import share_cores

RESULTS = Path("results") / "cells"
RUNS = Path("runs") / "reproduce"
GRACE = 15.0  # seconds before the end at which runs are told to stop
START = 15.0  # seconds that a run needs to get anywhere: with less, none is begun
AGAIN = 5.0  # seconds after which a process that did not hear is told again


class Stop(BaseException):
    """The time is up. No error: nothing that handles errors may catch it."""


@dataclass(frozen=True)
class Place:
    """What all processes of a sitting share."""

    results: Path
    runs: Path
    data_root: Path | None
    stop_at: float  # of time.monotonic(), which all processes of a machine share
    start: float
    jobs: int
    device: Literal["auto", "cpu", "cuda"]
    quiet: bool
    sitting: str

    def finished(self, cell: Cell) -> bool:
        return records.path_of(self.results, cell).exists()

    def beside(self, cell: Cell, ending: str) -> Path:
        """A file that belongs to a run, but not into its folder."""
        path = self.runs / f"{cell.name}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}")

    def failure(self, cell: Cell) -> str | None:
        """Why a cell failed in this very sitting; in the next it is tried again."""
        path = self.beside(cell, "failed")
        sitting, _, reason = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("", "", "")
        return reason.strip() if sitting == self.sitting else None

    def bury(self, cell: Cell, reason: str) -> None:
        """Of a process that died: what it was at has failed, unless it had said how it ended."""
        if not self.finished(cell) and self.failure(cell) is None:
            self.fail(cell, reason)

    def fail(self, cell: Cell, reason: str) -> None:
        write_text(self.beside(cell, "failed"), f"{self.sitting}\n{reason}\n")
        tell(self, f"{cell.name}: failed: {reason}")


@dataclass(frozen=True)
class Tally:
    """What a sitting came to."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Begun or not: for the next sitting."""
    absent: dict[str, str] = field(default_factory=dict)
    """Recipes without data, and what prepares it."""


Job = tuple[Cell, Config]


def sit(
    cells: Sequence[Cell],
    *,
    budget: float | None = None,
    jobs: int = 1,
    results: Path = RESULTS,
    runs: Path = RUNS,
    data_root: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    quiet: bool = True,
) -> Tally:
    """Fill cells in their order, until all are filled or the budget is spent. The same call goes on later.

    Args:
        cells: see `experiments.reproduce.cells`.
        budget: minutes; None is as long as it takes.
        jobs: trainings side by side on one device.
        results: where records are, and go.
        runs: where the folders of runs are, and go.
        data_root: where prepared data sets are; ListOps is generated there if it is missing.
        device: where to train.
        quiet: show no progress.
    """
    began = time.monotonic()
    if jobs < 1:
        raise ValueError(f"jobs: expected at least 1, got {jobs}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget: expected minutes above 0, got {budget}")
    seconds = math.inf if budget is None else 60 * budget
    grace = min(GRACE, seconds / 10)
    there = [cell for cell in cells if records.path_of(results, cell).exists()]
    wrong = {cell.name: why for cell in there if (why := records.wrong(results, cell)) is not None}
    todo, absent = present([cell for cell in cells if cell not in there], data_root)
    place = Place(
        results, runs, data_root, began + seconds - grace, min(START, seconds / 10), jobs, device, quiet,
        f"{os.getpid()}-{time.time_ns()}",
    )  # fmt: skip
    if jobs > 1 or not work(todo, place):
        side_by_side(todo, place, grace)
    left = [cell for cell, _ in todo if not place.finished(cell)]
    failed = {cell.name: reason for cell in left if (reason := place.failure(cell)) is not None}
    return Tally(
        [cell.name for cell, _ in todo if place.finished(cell)],
        failed | wrong,
        [cell.name for cell in left if cell.name not in failed],
        absent,
    )


def present(cells: Sequence[Cell], data_root: Path | None) -> tuple[list[Job], dict[str, str]]:
    """Cells whose data is there, and what to do about the rest. ListOps is made on the spot: its seed says all."""
    kept: list[Job] = []
    absent: dict[str, str] = {}
    sound: set[str] = set()
    for cell in cells:
        config = cell.config
        if cell.task not in sound and cell.task not in absent:
            try:
                if config.data.name == "listops" and not config.data.options:
                    mgk.data.prepare("listops", root=data_root)
                load(config, data_root)
                sound.add(cell.task)
            except ValueError as error:  # no data, or other data than the model is for
                absent[cell.task] = str(error)
        if cell.task in sound:
            kept.append((cell, config))
    return kept, absent


def side_by_side(todo: Sequence[Job], place: Place, grace: float) -> None:
    """Processes of their own: a GPU is shared by processes, a Python interpreter is not."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, Any] = {}  # and the number of the cell that each is at
    end = place.stop_at + grace

    def begin() -> None:
        at = context.RawValue("i", -1)
        worker = context.Process(target=serve, args=(todo, place, at))
        workers[worker] = at
        worker.start()

    try:
        with alarm(math.inf):  # told to stop, we tell them
            for _ in range(min(place.jobs, len(todo))):
                begin()
            while workers and time.monotonic() < end:
                ended = wait([w.sentinel for w in workers], None if math.isinf(end) else end - time.monotonic())
                for worker in [w for w in workers if w.sentinel in ended]:
                    worker.join()
                    at = workers.pop(worker).value
                    if worker.exitcode and at >= 0:  # a cell less to do each time, so this ends
                        place.bury(todo[at][0], f"its process died with exit status {worker.exitcode}")
                        begin()
    except Stop:
        pass
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            if worker.pid is not None:
                worker.join(0 if time.monotonic() > end else GRACE)
                worker.kill()
                worker.join()


def serve(todo: Sequence[Job], place: Place, at: Any) -> None:
    """A process of `side_by_side`; `at` is memory that its parent reads."""
    share_cores(min(place.jobs, len(todo)))
    if not work(todo, place, at):
        raise SystemExit(1)


def work(todo: Sequence[Job], place: Place, at: Any = None) -> bool:
    """One process of a sitting; False if the GPU is lost to it, and cells are left."""
    try:
        with alarm(place.stop_at):
            for number, (cell, config) in enumerate(todo):
                if time.monotonic() + place.start > place.stop_at:
                    break
                with claimed(place.beside(cell, "lock")) as mine:
                    if not mine or place.finished(cell) or place.failure(cell) is not None:
                        continue
                    if at is not None:
                        at.value = number
                    if not fill(cell, config, place):
                        break
                    if not answers():
                        return False
    except Stop:
        pass
    return True


def fill(cell: Cell, config: Config, place: Place) -> bool:
    """Train a cell and write its record; False if it was told to stop. An error is noted, and the others go on."""
    began, run = time.monotonic(), place.runs / cell.name
    config = replace(config, workers=0, device=place.device)
    tell(place, f"{cell.name}: {'goes on' if (run / 'last').exists() else 'begins'}")
    try:
        result = train(config, run, resume=True, data_root=place.data_root, quiet=place.quiet or place.jobs > 1)
        if not result.finished:
            tell(place, f"{cell.name}: stopped at step {result.step} of {config.steps}")
            return False
        values = records.make(cell, run, jobs=place.jobs, data_root=place.data_root)
        records.write(place.results, cell, values)
        tell(place, f"{cell.name}: test {values['test']:.4g} after {time.monotonic() - began:.0f} s")
    except Exception as error:  # PyTorch, Triton and Python each have names of their own for what goes wrong
        place.fail(cell, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return True


def answers() -> bool:
    """Whether the GPU still works for this process. What the run before left in its memory is freed."""
    gc.collect()  # graphs and their memory, before the next run or another process wants it
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def tell(place: Place, line: str) -> None:
    if not place.quiet:
        print(line, flush=True)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the lock is ours, for as long as we are in here."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def alarm(stop_at: float) -> Iterator[None]:
    """Raise Stop at a time, or at SIGTERM; a training that is under way takes the signal itself, and returns.

    Only a main thread can be told; in another one the caller looks at the clock between cells.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed, done = True, threading.Event()

    def stop(number: int, frame: Any) -> None:
        if armed:
            raise Stop

    def ring() -> None:
        wait = max(0.0, stop_at - time.monotonic())
        while not done.wait(wait):
            os.kill(os.getpid(), signal.SIGTERM)
            wait = AGAIN

    before = signal.signal(signal.SIGTERM, stop)
    thread = threading.Thread(target=ring, daemon=True)
    try:
        if not math.isinf(stop_at):
            thread.start()
        yield
    finally:
        armed = False
        done.set()
        if thread.ident is not None:
            thread.join()  # it rings no more: the handler can go
        signal.signal(signal.SIGTERM, before)
