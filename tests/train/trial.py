"""Kill training at random, again and again, and compare with an undisturbed run, bit for bit.

    python -m tests.train.trial --seeds 30                    one process, before any change of a file
    python -m tests.train.trial --kills 20 --processes 4      four processes with sharded weights, any of them

For a longer look than tests/train/test_kill.py takes.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import mgk.data
from mgk.train import checkpoint, train
from mgk.train import replace as change
from tests.killing import killed
from tests.train.common import LISTOPS, losses, prepare, tiny
from tests.train.test_distributed import FOUR, killed_together, together
from tests.train.test_kill import SHORT, SIZES, image, make_repeatable


def one_process(seed: int, folder: Path, root: Path) -> str:
    """Train with random settings, killed up to eight times; return what differs."""
    draw = random.Random(seed)
    steps = draw.randrange(3, 12)
    settings: dict[str, Any] = SHORT | {
        "seed": seed,
        "steps": steps,
        "eval_every": draw.randrange(1, 5),
        "log_every": draw.randrange(1, 5),
        "save__steps": draw.choice((0, 0, 1, 2, 3)),
        "save__newest": draw.randrange(1, 4),
        "save__every": draw.choice((0, 2, 3)),
    }
    config = tiny(**settings)
    scores = {step: draw.choice((0.1, 0.2, 0.3)) for step in range(steps + 1)}

    def run(where: Path) -> None:
        assert train(config, where / "run", data_root=root, resume=True).finished

    with pytest.MonkeyPatch.context() as patch:
        make_repeatable(patch, scores)
        run(folder / "undisturbed")
        kills = sum(killed(lambda: run(folder / "killed"), folder / "killed", draw.randrange(1, 70)) for _ in range(8))
        run(folder / "killed")
    same = image(folder / "killed" / "run") == image(folder / "undisturbed" / "run")
    print(f"seed {seed}: {kills} kills in {steps} steps: {'the same' if same else 'DIFFERENT'}", flush=True)
    return "" if same else f"seed {seed}"


def several_processes(processes: int, kills: int, folder: Path, root: Path) -> str:
    """Train with several processes, of which one is killed at a time, at random."""
    draw = random.Random(processes)
    config = change(FOUR, steps=4 + 2 * kills, eval_every=3, save__steps=1)
    together(config, folder / "undisturbed", root, world=processes)
    run, done = folder / "killed", 0
    while done < kills:
        found = checkpoint.find(run) if run.exists() else None
        step = 0 if found is None else checkpoint.verify(found)["step"]
        victim, during = draw.randrange(processes), draw.choice(("step", "change"))
        moment = step + draw.randrange(1, 3) if during == "step" else draw.randrange(2, 8 if victim else 60)
        killed_together(config, run, root, processes, victim=victim, moment=moment, during=during)
        done += 1
        print(f"kill {done}: process {victim} during a {during}, after step {step}", flush=True)
    together(config, run, root, world=processes, resume=True)
    same = all(losses(run, event) == losses(folder / "undisturbed", event) for event in ("train", "valid", "test"))
    print(f"{kills} kills of {processes} processes: {'the same' if same else 'DIFFERENT'}", flush=True)
    return "" if same else f"{processes} processes"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.train.trial", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    different = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.processes > 1:
            different = [several_processes(chosen.processes, chosen.kills, folder, prepare(folder / "data"))]
        else:
            mgk.data.prepare("listops", root=folder / "data", **(LISTOPS | {"sizes": SIZES}))
            for seed in range(chosen.seeds):
                for part in ("undisturbed", "killed"):
                    (folder / str(seed) / part).mkdir(parents=True)
                different.append(one_process(seed, folder / str(seed), folder / "data"))
    return 1 if any(different) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
