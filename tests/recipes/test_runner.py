"""Jobs run in order or side by side, stop when told to, and leave no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from mgk.recipes.runner import Deadline, Failure, Stop, run_jobs, share_cores, stoppable

Jobs = dict[int, Callable[[], Any]]


def fail(reason: str) -> None:
    raise RuntimeError(reason)


def stop() -> None:
    raise Stop


def ignore_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_does_not_stop_the_others(processes: int) -> None:
    seen: list[tuple[int, str]] = []
    jobs: Jobs = {0: partial(abs, -1), 1: partial(fail, "a\n b"), 2: partial(abs, -3)}
    found = run_jobs(jobs, processes=processes, on_failure=lambda key, reason: seen.append((key, reason)))
    assert found == {0: 1, 1: Failure("RuntimeError: a b"), 2: 3}
    assert seen == [(1, "RuntimeError: a b")]


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_was_stopped_stops_the_others(processes: int) -> None:
    jobs: Jobs = {0: stop, 1: partial(time.sleep, 600), 2: partial(abs, -3)}
    assert run_jobs(jobs, processes=processes) == {}
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("quick_processes")
def test_a_worker_that_dies_is_a_failure() -> None:
    died = Failure("its process died with exit status 11")
    jobs: Jobs = {0: partial(os._exit, 11), 1: partial(abs, -3)}
    assert run_jobs(jobs, processes=2) == {0: died, 1: 3}


@pytest.mark.usefixtures("quick_processes")
def test_a_worker_that_does_not_stop_is_killed_at_the_end_of_the_budget() -> None:
    began = time.monotonic()
    assert run_jobs({0: ignore_sigterm}, deadline=Deadline(2 / 60)) == {}
    assert time.monotonic() - began < 60
    assert multiprocessing.active_children() == []


def test_no_run_starts_shortly_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(120)
    assert deadline.end - deadline.start_by == pytest.approx(30)
    now = deadline.end - 20
    monkeypatch.setattr("mgk.recipes.runner.time.monotonic", lambda: now)
    assert run_jobs({0: partial(fail, "started")}, deadline=deadline) == {}


@pytest.mark.usefixtures("quick_processes")
def test_a_run_starts_only_if_its_time_is_left() -> None:
    """The long one stays; the ones after it use the time."""
    jobs: Jobs = {0: partial(abs, -1), 1: partial(abs, -2), 2: partial(abs, -3)}
    assert run_jobs(jobs, deadline=Deadline(10), needs={0: 1.0, 1: 10.0}) == {0: 1, 2: 3}


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_a_budget_must_be_positive(budget: float) -> None:
    with pytest.raises(ValueError, match="budget: expected minutes above 0, got"):
        Deadline(budget)


def test_sigterm_raises_stop_once() -> None:
    def killed() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt the cleanup

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stop), stoppable():
        killed()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("given", "expected"), [(None, 4), ("16", 16)])
def test_worker_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: int) -> None:
    threads = [16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    share_cores(4)
    assert threads == [expected]
