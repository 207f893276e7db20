"""A run that is killed again and again, without cleanup, ends like an undisturbed one; a signal to the run and its
workers leaves a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from mgk.train import checkpoint, train
from mgk.train.learner import Learner
from tests.train.common import log, losses, tiny, weights

CONFIG = tiny(steps=40, eval_every=5, log_every=3)
KILLS = 6


def start(run: Path, data_root: Path, moment: int) -> None:
    """Train, but die by SIGKILL at step or disk write number `moment`."""
    left = [moment]

    def deadly(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    Learner.update = deadly(Learner.update)  # type: ignore[method-assign]
    for name in ("fsync", "rename", "replace", "symlink"):
        setattr(os, name, deadly(getattr(os, name)))
    train(CONFIG, run, data_root=data_root, resume=True)


def test_kills_at_random_moments_change_nothing(data_root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # a start takes no time
    chance = random.Random(0)
    run = tmp_path / "killed"
    for moment in [chance.randrange(1, 30) for _ in range(KILLS)] + [0]:
        process = context.Process(target=start, args=(run, data_root, moment))
        process.start()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if moment else 0)
    train(CONFIG, tmp_path / "undisturbed", data_root=data_root)
    assert weights(run) == weights(tmp_path / "undisturbed")
    assert losses(run) == losses(tmp_path / "undisturbed")
    assert losses(run, "test") == losses(tmp_path / "undisturbed", "test")


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_run_killed_while_it_starts_can_be_started_again(moment: int, data_root: Path, tmp_path: Path) -> None:
    """At every call that writes config.json and run.json, and after."""
    process = multiprocessing.get_context("fork").Process(target=start, args=(tmp_path / "run", data_root, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    train(tiny(steps=2), tmp_path / "run", data_root=data_root, resume=True)  # also with another configuration
    assert [line["step"] for line in log(tmp_path / "run")] == [2]


def wait_at_step_3(run: Path, data_root: Path, there: Any) -> None:
    """Train with workers, in a process group; at step 3, send a message and wait for an answer."""
    os.setsid()
    update = Learner.update

    def waiting(self: Learner, step: int, batch: Any) -> None:
        update(self, step, batch)
        if step + 1 == 3:
            there.send(step)
            there.recv()

    Learner.update = waiting  # type: ignore[method-assign]
    assert train(tiny(workers=2), run, data_root=data_root).step == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_group_leaves_the_checkpoint_of_its_step(
    number: signal.Signals, data_root: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=wait_at_step_3, args=(tmp_path / "run", data_root, there))
    process.start()
    here.recv()
    assert process.pid is not None
    os.killpg(process.pid, number)
    here.send(None)
    process.join()
    assert process.exitcode == 0
    assert checkpoint.load(tmp_path / "run" / "last").step == 3
