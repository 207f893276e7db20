"""Run many trainings, one after the other or several at a time in worker processes, until all have ended.

A run that raises an error, or whose worker process dies, is a `Failure`; the others continue. SIGTERM, Ctrl-C or the
end of the budget stops everything: no further run starts, and each training under way writes a checkpoint and returns.
The same call, later, resumes them.

A worker process runs one job. Several at a time pay off if one training leaves the GPU idle between kernels, or mostly
idle in small ones. Processes take turns on a GPU; if `nvidia-cuda-mps-control -d` has been started, they share it.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from mgk.data.batches import end_with_parent

GRACE = 15.0  # seconds before the end of a budget at which runs are told to stop
START = 15.0  # seconds that a run needs to make progress: with less time left, none starts
REPEAT = 5.0  # seconds after which a worker that still runs is told to stop again

Key = TypeVar("Key")
T = TypeVar("T")
Job = Callable[[], T]


class Stop(BaseException):
    """Raised in a job that is told to stop. It is not an Exception, so that no error handler catches it."""


@dataclass(frozen=True)
class Failure:
    """A job that raised an error or whose process died."""

    reason: str


class Deadline:
    """The end of a budget in minutes (None: no end), and the times before it at which runs stop and no more start."""

    def __init__(self, budget: float | None = None) -> None:
        if budget is not None and not budget > 0:
            raise ValueError(f"budget: expected minutes above 0, got {budget}")
        seconds = math.inf if budget is None else 60 * budget
        self.end = time.monotonic() + seconds
        self.stop_at = self.end - min(GRACE, seconds / 10)
        self.start_by = self.stop_at - min(START, seconds / 10)


def run_jobs(
    jobs: Mapping[Key, Job[T]],
    *,
    processes: int = 1,
    deadline: Deadline | None = None,
    needs: Mapping[Key, float] | None = None,
    on_failure: Callable[[Key, str], None] | None = None,
) -> dict[Key, T | Failure]:
    """Run jobs in their order and return the outcomes of those that ended; jobs that were stopped have none.

    One process without a deadline is this one. If a failure makes the GPU unusable for this process, as an illegal
    memory access does, the remaining jobs run in worker processes. A worker still running at the deadline is killed.

    Args:
        jobs: functions without arguments, which can be pickled. A job that has stopped early raises `Stop`.
        processes: worker processes at a time.
        deadline: when to stop.
        needs: minutes that jobs take. A job starts only if so much time is left.
        on_failure: called with the key and the reason of each failure as it happens.
    """
    outcomes: dict[Key, T | Failure] = {}
    waiting = dict(jobs)

    def note(key: Key, outcome: T | Failure) -> None:
        outcomes[key] = outcome
        if isinstance(outcome, Failure) and on_failure is not None:
            on_failure(key, outcome.reason)

    with suppress(Stop), stoppable():
        usable = processes == 1 and deadline is None
        while usable and waiting:
            key = next(iter(waiting))
            note(key, attempt(waiting.pop(key)))
            usable = release_device()
        run_in_processes(waiting, processes, deadline or Deadline(), needs or {}, note)
    return outcomes


def attempt(job: Job[T]) -> T | Failure:
    try:
        return job()
    except Exception as error:  # PyTorch, Triton and Python raise errors of many types
        return Failure(f"{type(error).__name__}: {' '.join(str(error).split())}")


def run_in_processes(
    waiting: dict[Key, Job[T]],
    processes: int,
    deadline: Deadline,
    needs: Mapping[Key, float],
    note: Callable[[Key, T | Failure], None],
) -> None:
    def possible() -> Iterator[Key]:
        left = deadline.start_by - time.monotonic()
        return (key for key in waiting if 60 * needs.get(key, 0.0) < left)

    context = multiprocessing.get_context("spawn")
    processes = min(processes, len(waiting))
    running: dict[Any, tuple[Any, Key]] = {}  # by the pipe through which the outcome comes
    try:
        while waiting or running:
            while len(running) < processes and (key := next(possible(), None)) is not None:
                receiver, sender = context.Pipe(duplex=False)
                worker = context.Process(target=work, args=(sender, processes, waiting.pop(key)))
                running[receiver] = worker, key
                worker.start()
                sender.close()
            left = deadline.stop_at - time.monotonic()
            ready: list[Any] = wait(list(running), None if math.isinf(left) else max(left, 0.0)) if running else []
            if not ready:
                return  # the budget is spent
            for receiver in ready:
                worker, key = running[receiver]
                try:
                    outcome = receiver.recv()
                    worker.join()
                except EOFError:
                    worker.join()
                    if worker.exitcode == 0:
                        raise Stop from None  # it was told to stop, and so are we
                    outcome = Failure(f"its process died with exit status {worker.exitcode}")
                del running[receiver]
                note(key, outcome)
    finally:
        stop([worker for worker, _ in running.values() if worker.pid is not None], deadline.end)


def work(sender: Connection, processes: int, job: Job[Any]) -> None:
    """Run one job in a worker process and send its outcome; send nothing if it was told to stop."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent sends SIGTERM
    share_cores(processes)
    with suppress(Stop), stoppable():
        sender.send(attempt(job))


def stop(workers: list[Any], end: float) -> None:
    """Tell workers to stop, wait until they have, and kill those that run at time `end`."""
    while workers := [worker for worker in workers if worker.is_alive()]:
        left = end - time.monotonic()
        for worker in workers:
            worker.terminate() if left > 0 else worker.kill()
        wait([worker.sentinel for worker in workers], min(REPEAT, left) if left > 0 else None)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stop` at the first SIGTERM. A training under way handles the signal itself, and returns.

    Python delivers signals to the main thread only; in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def handle(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Stop

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        armed = False
        signal.signal(signal.SIGTERM, before)


def share_cores(processes: int) -> None:
    """Use this process's share of the threads, unless OMP_NUM_THREADS is set.

    With all threads in each of several processes, a step of 5 ms took 100.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def release_device() -> bool:
    """Free the GPU memory of the last run; return whether the GPU still works for this process."""
    gc.collect()  # CUDA graphs and their memory
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True
