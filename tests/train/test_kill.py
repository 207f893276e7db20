"""A run that is killed before any change of its files ends like an undisturbed one; a signal to the run and its workers
leaves a checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mgk.data
from mgk.train import checkpoint, engine, train
from mgk.train.learner import Learner
from tests.killing import every_kill
from tests.train.common import LISTOPS, OPTIONS, tiny

SIZES = (24, 4, 4)
SCORES = {1: 0.1, 2: 0.5, 3: 0.3}  # on the validation split: the best is neither the first nor the last
SHORT: dict[str, Any] = {
    "model__width": 8,
    "model__head_dim": 4,
    "data__options": (f"sizes={list(SIZES)}", *OPTIONS[1:]),
    "data__batch": 4,
    "steps": 3,
    "eval_every": 1,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small data")
    mgk.data.prepare("listops", root=root, **(LISTOPS | {"sizes": SIZES}))
    return root


def make_repeatable(patch: pytest.MonkeyPatch, scores: dict[int, float]) -> None:
    """Make the times and the peak memory of runs 0, and their validation scores these."""
    keep_best = engine.State.keep_best

    def keep(self: engine.State) -> bool:
        self.valid = self.valid | {"accuracy": scores[self.step]}
        return keep_best(self)

    patch.setattr(engine.State, "keep_best", keep)
    patch.setattr("mgk.train.engine.time.perf_counter", lambda: 0.0)
    patch.setattr(engine, "peak_bytes", lambda fabric: 0)
    patch.setattr(os, "fsync", lambda descriptor: None)  # the system does not die
    patch.setenv("MGK_COMMIT", "1234567")


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make_repeatable(monkeypatch, SCORES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads do not survive a fork
    yield
    torch.set_num_threads(threads)


def image(run: Path) -> dict[str, Any]:
    """Everything in the folder of a run that must not depend on kills, to the last bit."""
    files = {path.relative_to(run).as_posix(): path for path in run.rglob("*")}
    content: dict[str, Any] = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    for name in [name for name in content if name.endswith("/state.pt")]:  # equal values can be pickled in two ways
        content[name] = repr(torch.load(run / name, weights_only=True))
        facts = json.loads(content.pop(name.replace("state.pt", "checkpoint.json")))
        content[f"{name} facts"] = facts | {"files": facts["files"]["model.safetensors"], "sha256": 0}
    content["links"] = {name: os.readlink(path) for name, path in files.items() if path.is_symlink()}
    result = json.loads(content.pop("result.json"))
    del content["run.json"]  # has every start
    return content | {"folders": {name for name, path in files.items() if path.is_dir()}, "result": result | {"run": 0}}


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize(
    ("changes", "stride"),
    [({}, 1), ({"eval_every": 2, "save__steps": 1, "save__newest": 1, "save__every": 3}, 4)],
    ids=["with evaluations", "by steps"],
)
def test_a_kill_before_any_change_of_a_file_changes_nothing(
    changes: dict[str, Any], stride: int, small_root: Path, tmp_path: Path
) -> None:
    config = tiny(**(SHORT | changes))

    def run(folder: Path) -> None:
        assert train(config, folder / "a run", data_root=small_root, resume=True).finished

    run(tmp_path / "undisturbed")
    expected = image(tmp_path / "undisturbed" / "a run")
    assert expected["result"]["best_step"] == 2
    kills = 0
    for folder in every_kill(run, tmp_path / "killed", stride=stride):
        kills += stride
        run(folder)
        assert image(folder / "a run") == expected, folder
    assert kills > 60


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
