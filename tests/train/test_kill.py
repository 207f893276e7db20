"""A run that is killed again and again, with no chance to tidy up, ends as one that was left alone."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

from mgk.train import train
from mgk.train.learner import Learner
from tests.train.common import losses, tiny, weights

CONFIG = tiny(steps=40, eval_every=5, log_every=3)
KILLS = 6


def start(run: Path, data_root: Path, moment: int) -> None:
    """Train, but die by SIGKILL at the so-many-th step or call that writes to the disk."""
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
