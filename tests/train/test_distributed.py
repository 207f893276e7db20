"""Several processes train like one, and resume when one of them dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported here once, and not by every process
import torch.distributed.fsdp

from mgk.train import CheckpointError, Config, TrainingError, checkpoint, config, evaluate, train
from mgk.train import replace as change
from mgk.train.fabric import library
from mgk.train.learner import Learner
from tests.killing import Killer
from tests.train.common import losses, tiny

PLAIN = {"model__dropout": 0.0, "model__attention_dropout": 0.0}  # dropout is drawn by each process for itself
library()  # likewise
ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def worker(rank: int, world: int, port: int, settings: Config, run: Path, data_root: Path, resume: bool) -> None:
    """Train with the environment that torchrun sets."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, 0, world, world, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    train(settings, run, data_root=data_root, resume=resume)


def together(
    settings: Config, run: Path, data_root: Path, *, world: int = 2, resume: bool = False, work: Any = worker
) -> None:
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        context.Process(target=work, args=(rank, world, port, settings, run, data_root, resume))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck
    assert [process.exitcode for process in processes] == [0] * world


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Other threads of PyTorch do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(tiny(**PLAIN, optimiser__clip=0.5), run, data_root=data_root)
    return run


def die(rank: int, world: int, *arguments: Any, victim: int, moment: int, during: str) -> None:
    """Train as one of several processes; the victim is killed at a step, or at a change of a file."""
    if rank == victim and during == "step":
        update = Learner.update

        def deadly(self: Learner, step: int, batch: Any) -> None:
            if step == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            update(self, step, batch)

        Learner.update = deadly  # type: ignore[method-assign]
    elif rank == victim:
        Killer(arguments[2], moment)
    with suppress(RuntimeError, CheckpointError):  # that another process is lost
        worker(rank, world, *arguments)


def killed_together(settings: Config, run: Path, data_root: Path, world: int, **death: Any) -> None:
    """Start processes of which one is killed. The others must end, too: they cannot go on without it."""
    port, context = free_port(), multiprocessing.get_context("fork")
    work = partial(die, **death)
    processes = [
        context.Process(target=work, args=(rank, world, port, settings, run, data_root, True)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck
    assert processes[death["victim"]].exitcode == -signal.SIGKILL


FOUR = tiny(**PLAIN, strategy="fsdp", save__steps=1, eval_every=4, steps=4, log_every=1)


@pytest.mark.usefixtures("one_thread")
def test_no_death_of_a_sharded_run_loses_anything(data_root: Path, tmp_path: Path) -> None:
    """One of four processes during a step, and the first while it writes; other numbers of processes go on, too.

    `python -m tests.train.trial --processes 4` kills at more places.
    """
    together(FOUR, tmp_path / "undisturbed", data_root, world=4)
    run = tmp_path / "killed"
    for victim, moment, during in ((2, 2, "step"), (0, 40, "change")):
        killed_together(FOUR, run, data_root, 4, victim=victim, moment=moment, during=during)
        found = checkpoint.find(run)
        assert found is not None
        checkpoint.verify(found)
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / name, symlinks=True)
    together(FOUR, run, data_root, world=4, resume=True)
    assert losses(run) == losses(tmp_path / "undisturbed")
    assert losses(run, "test") == losses(tmp_path / "undisturbed", "test")
    assert list(run.rglob("*.partial")) == []
    together(FOUR, tmp_path / "two", data_root, world=2, resume=True)
    train(change(FOUR, strategy="auto"), tmp_path / "one", data_root=data_root, resume=True)
    for other in ("one", "two"):
        assert losses(tmp_path / other) == pytest.approx(losses(run), rel=1e-4)
    assert (tmp_path / "one" / "last" / "model.safetensors").exists()  # so a sharded run is exported


def poison(rank: int, world: int, *arguments: Any) -> None:
    """Make one gradient of one process infinite, and check that no process has made the update."""
    update, learners, before = Learner.update, [], []

    def poisoned(self: Learner, step: int, batch: Any) -> None:
        if step == 2:
            learners.append(self)
            before.append({name: tensor.clone() for name, tensor in self.weights().items()})
            if rank == 1:
                loss = self.model.loss
                self.model.loss = lambda batch: {name: value * torch.inf for name, value in loss(batch).items()}
        update(self, step, batch)

    Learner.update = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"^step 2: not finite"):
        worker(rank, world, *arguments)
    after = learners[0].weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before[0].items())


@pytest.mark.usefixtures("one_thread")
def test_a_gradient_that_is_not_finite_moves_no_shard(data_root: Path, tmp_path: Path) -> None:
    together(change(FOUR, log_every=6), tmp_path / "run", data_root, work=poison)
    assert checkpoint.steps(tmp_path / "run") == [2]


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_processes_have_the_losses_of_one(strategy: str, alone: Path, data_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    together(tiny(**PLAIN, optimiser__clip=0.5, strategy=strategy), run, data_root)
    # Sums of gradients in another order; see test_micro_batches_make_the_same_update.
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(run, "valid") == pytest.approx(losses(alone, "valid"), rel=1e-4)
    assert losses(run, "test") == pytest.approx(losses(alone, "test"), rel=1e-4)
    measured = evaluate(run, data_root=data_root, device="cpu")  # what two processes wrote, one can read
    assert measured["loss"] == pytest.approx(losses(run, "test")[0], rel=1e-5)


def test_torchrun_restarts_a_run_whose_first_process_is_killed_while_it_saves(
    alone: Path, data_root: Path, tmp_path: Path
) -> None:
    run, settings = tmp_path / "run", tmp_path / "config.json"
    settings.write_text(config.dump(tiny(**PLAIN, optimiser__clip=0.5)))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from mgk.train import checkpoint, config, train\n"
        "save_file = checkpoint.save_file\n"
        "def deadly(weights, path):\n"
        "    if 'step-00000008' in str(path) and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save_file(weights, path)\n"
        "checkpoint.save_file = deadly\n"
        "settings = config.read(Path(sys.argv[1]))\n"
        "train(settings, sys.argv[2], data_root=sys.argv[3], resume=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--standalone"]
    done = subprocess.run(
        [*command, str(script), str(settings), str(run), str(data_root)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = json.loads((run / "run.json").read_text())["starts"]
    assert first["processes"] == second["processes"] == 2
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
