"""The folder of a run: one process at a time, the rhythm of checkpoints, full disks, damaged files, where it lies."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mgk.environment
from mgk import data
from mgk.files import locked, write_text
from mgk.inspect.runs import Run as Opened
from mgk.train import CheckpointError, checkpoint, engine, evaluate, saving, train
from mgk.train import run as run_module
from mgk.train.config import read as read_config
from mgk.train.data import root_of
from mgk.train.learner import Learner
from tests.train.common import log, losses, prepare, tiny, weights

QUICK: dict[str, Any] = {"steps": 4, "eval_every": 2, "log_every": 1}


@pytest.fixture(scope="module")
def finished(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(**QUICK), run, data_root=data_root)
    return run


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make runs stop after a step, as a signal does."""
    monkeypatch.setattr(engine.Interrupt, "agreed", lambda self, fabric, logs: self.count(), raising=True)
    left = [step]

    def count(self: engine.Interrupt) -> bool:
        left[0] -= 1
        return left[0] == 0

    monkeypatch.setattr(engine.Interrupt, "count", count, raising=False)


def stopped(monkeypatch: pytest.MonkeyPatch, run: Path, data_root: Path, step: int = 3, **changes: Any) -> Path:
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        assert not train(tiny(**(QUICK | changes)), run, data_root=data_root).finished
    return run


def wait_in_a_step(run: Path, data_root: Path, there: Any) -> None:
    def waiting(self: Learner, step: int, batch: Any) -> None:
        there.send(os.getpid())
        there.recv()

    Learner.update = waiting  # type: ignore[method-assign]
    train(tiny(), run, data_root=data_root)


def test_a_second_process_is_told_who_trains_the_run(data_root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=wait_in_a_step, args=(tmp_path / "run", data_root, there))
    process.start()
    number = here.recv()
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"holds a run already|trains this run") as error:
            train(tiny(seed=1), tmp_path / "run", data_root=data_root, resume=resume)
    with pytest.raises(ValueError, match=rf"/run: process {number} on \S+ trains this run; wait until it has ended"):
        train(tiny(), tmp_path / "run", data_root=data_root, resume=True)
    assert "\n" not in str(error.value)
    process.kill()
    process.join()
    assert train(tiny(**QUICK), tmp_path / "run", data_root=data_root, resume=True).finished
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_lock_that_its_holder_removes_is_not_held_twice(tmp_path: Path) -> None:
    """Who waits for a lock file that is removed meanwhile must lock the new one."""
    path = tmp_path / "lock"
    with locked(path) as first:
        assert first
        path.unlink()
        with locked(path, wait=False) as second:
            assert second
            with locked(path, wait=False) as third:
                assert not third


def test_a_lock_goes_with_its_process_even_if_workers_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    here, there = multiprocessing.Pipe()
    with locked(path):
        if (worker := os.fork()) == 0:
            there.send("it runs")
            there.recv()
            os._exit(0)
        here.recv()
    with locked(path, wait=False) as ours:
        assert ours
    here.send("end")
    os.waitpid(worker, 0)


@pytest.mark.parametrize("how", ["copied", "copied without links", "moved", "linked"])
def test_a_run_that_lies_elsewhere_resumes(
    how: str, finished: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, there = stopped(monkeypatch, tmp_path / "a run", data_root), tmp_path / "other place" / "the run"
    there.parent.mkdir()
    if how == "moved":
        run.rename(there)
    elif how == "linked":
        there.symlink_to(run)
    else:
        shutil.copytree(run, there, symlinks=how == "copied")
        shutil.rmtree(run)
    assert train(tiny(**QUICK), there, data_root=data_root, resume=True).finished
    assert weights(there) == weights(finished)
    assert losses(there) == losses(finished)
    assert (there / "last").is_symlink()
    assert evaluate(there, which="last")["step"] == 4


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [4, 12]),
        ({"save__newest": 2}, [4, 8, 12]),
        ({"save__steps": 5}, [4, 12]),  # the best, and the end
        ({"save__steps": 3, "save__newest": 3}, [4, 6, 9, 12]),
        ({"save__steps": 2, "save__every": 6}, [4, 6, 12]),
        ({"save__minutes": 3.0, "save__newest": 9}, [3, 4, 7, 10, 12]),
    ],
)
def test_checkpoints_are_written_in_their_rhythm_and_kept(
    changes: dict[str, Any], kept: list[int], data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step takes a minute here; the best evaluation is the first."""
    minutes = [0]
    update, keep_best = Learner.update, engine.State.keep_best

    def counted(self: Learner, step: int, batch: Any) -> None:
        minutes[0] += 1
        update(self, step, batch)

    def first(self: engine.State) -> bool:
        self.valid = self.valid | {"accuracy": 1 / self.step}
        return keep_best(self)

    monkeypatch.setattr(Learner, "update", counted)
    monkeypatch.setattr(engine.State, "keep_best", first)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 60.0 * minutes[0]))
    train(tiny(**changes), tmp_path / "run", data_root=data_root)
    assert checkpoint.steps(tmp_path / "run") == kept
    assert checkpoint.read_facts(tmp_path / "run" / "best")["step"] == 4
    assert checkpoint.read_facts(tmp_path / "run" / "last")["step"] == 12


def test_a_checkpoint_in_the_background_has_the_weights_of_its_step(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written after the next update, at the latest possible time."""
    config = tiny(**QUICK, save__newest=9)
    train(config, tmp_path / "at once", data_root=data_root)
    updated = threading.Event()
    update, save = Learner.update, checkpoint.save

    def noted(self: Learner, step: int, batch: Any) -> None:
        update(self, step, batch)
        updated.set()

    def late(run: Path, content: checkpoint.Checkpoint, **options: Any) -> None:
        assert updated.wait(60)
        save(run, content, **options)

    def stage(self: saving.Saver, tensors: Any) -> Any:
        updated.clear()
        if self.learner.now == 3:
            updated.set()  # no other update follows
        return staged(self, tensors)

    staged = saving.Saver.stage
    monkeypatch.setattr(saving.Saver, "stage", stage)
    monkeypatch.setattr(Learner, "update", noted)
    monkeypatch.setattr(checkpoint, "save", late)
    monkeypatch.setattr(engine, "Saver", partial(saving.Saver, background=True))
    train(config, tmp_path / "background", data_root=data_root)
    for step in (2, 4):
        one, two = (checkpoint.load(checkpoint.folder_of(tmp_path / name, step)) for name in ("at once", "background"))
        assert one.weights.keys() == two.weights.keys()
        assert all(torch.equal(tensor, two.weights[name]) for name, tensor in one.weights.items())
        assert str(one.state) == str(two.state)


def test_the_best_is_that_of_the_highest_accuracy_and_of_equals_the_first() -> None:
    state = engine.State()
    found = []
    for step, valid in enumerate(
        [{"loss": 2.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.5}, {"loss": 3.0, "accuracy": 0.6}], 1
    ):
        state.step, state.valid = step, valid
        found.append(state.keep_best())
    assert found == [True, False, True]
    assert (state.best_step, state.best_valid) == (3, {"loss": 3.0, "accuracy": 0.6})
    state = engine.State(step=1, valid={"loss": 2.0, "perplexity": 7.4})
    assert state.keep_best()
    assert state.best == -2.0


@pytest.mark.parametrize("where", ["space", "checkpoint", "log"])
def test_a_full_disk_pauses_the_run_and_loses_nothing(
    where: str, finished: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tries = [0]

    def full(real: Callable[..., Any], error: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tries[0] += 1
            return error() if tries[0] in (2, 3) else real(*arguments, **options)

        return call

    def refused() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "space":
        monkeypatch.setattr(shutil, "disk_usage", full(shutil.disk_usage, lambda: SimpleNamespace(free=1000)))
    elif where == "checkpoint":
        monkeypatch.setattr("mgk.train.checkpoint.save_file", full(save_file, refused))
    else:
        monkeypatch.setattr(run_module, "open", full(open, refused), raising=False)
    waits: list[float] = []
    monkeypatch.setattr(run_module, "time", SimpleNamespace(sleep=waits.append))
    assert train(tiny(**QUICK), tmp_path / "run", data_root=data_root).finished
    assert weights(tmp_path / "run") == weights(finished)
    assert losses(tmp_path / "run") == losses(finished)
    assert len(waits) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paused until there is space")]
    assert "free disk space" in line


def test_a_full_disk_does_not_keep_a_run_that_is_asked_to_stop(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(run_module, "time", SimpleNamespace(sleep=lambda seconds: os.kill(os.getpid(), 15)))
    with pytest.raises(CheckpointError, match=r"/run: a checkpoint needs 1 MiB, the disk has 0; free disk space"):
        train(tiny(**QUICK), tmp_path / "run", data_root=data_root)


def test_a_log_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    run_module.append(path, "one\n")

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(content[:2])  # as much as there is space for

    monkeypatch.setattr(run_module, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
    with pytest.raises(checkpoint.DiskFullError, match=r"log\.jsonl: cannot be written \(No space left on device\)"):
        run_module.append(path, "two\n")
    assert path.read_text() == "one\n"


def test_every_file_of_a_checkpoint_is_on_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flushed(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        events.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    content = checkpoint.Checkpoint(5, {"a": torch.ones(2)}, {"x": 1}, {})
    checkpoint.save(tmp_path, content, best=True)
    before = events[: events.index("rename to step-00000005")]
    names = ["model.safetensors", "state.pt", "checkpoint.json", ".step-00000005.partial"]
    assert set(names) <= set(before)
    assert before[-1] == ".step-00000005.partial"  # the names in the folder, after its files
    assert "checkpoints" in events[events.index("rename to step-00000005") :]
    events.clear()
    write_text(tmp_path / "text", "words")
    assert events == [f".text.{os.getpid()}.partial", tmp_path.name]


def test_all_files_of_a_checkpoint_have_the_same_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path, checkpoint.Checkpoint(5, {"a": torch.ones(2)}, {}, {}), best=True)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "best").resolve().iterdir()}
    assert modes == {0o640}


def test_broken_log_lines_are_dropped_and_the_others_stay(
    finished: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stopped(monkeypatch, tmp_path / "run", data_root) / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    broken = [b'{"event": "tra\n', b'{"event": "\xff"}\n', b'{"event": "train"}\n', b"7\n", b"\n"]
    path.write_bytes(b"".join([lines[0], *broken, *lines[1:], lines[0][:9]]))
    train(tiny(**QUICK), tmp_path / "run", data_root=data_root, resume=True)
    assert losses(tmp_path / "run") == losses(finished)
    assert "log.jsonl: dropped 6 lines that cannot be read: 2, 3, 4, 5, 6, ..." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.json", "result.json", "last/checkpoint.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_the_message_for_a_damaged_file_names_it(
    name: str, text: str, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(monkeypatch, tmp_path / "run", data_root)
    (run / name).write_text(text)
    if (name, text) == ("run.json", "{}"):  # a run without the record of its starts
        assert train(tiny(**QUICK), run, data_root=data_root, resume=True).finished
        return
    with pytest.raises(ValueError, match=Path(name).name) as error:
        train(tiny(**QUICK), run, data_root=data_root, resume=True)
    assert str(run) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("starts", [7, [7], [{"data_root": ["a"]}], [{"data": "x"}]])
def test_a_record_of_starts_that_is_none_is_named(starts: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    with pytest.raises(ValueError, match=r"run\.json: expected the record of the starts of a run"):
        root_of(tmp_path, None)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"model": 3}'])
def test_a_configuration_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"/config\.json: "):
        read_config(tmp_path / "config.json")


def test_a_damaged_state_does_not_advise_to_load_it_unsafely(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, checkpoint.Checkpoint(5, {"a": torch.ones(2)}, {}, {}), best=True)
    folder = checkpoint.folder_of(tmp_path, 5)
    torch.save({"x": Path}, folder / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt: not a state that mgk has written") as error:
        checkpoint.read_state(folder)
    assert "weights_only" not in str(error.value)


def test_a_lost_best_checkpoint_is_not_reported(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(monkeypatch, tmp_path / "run", data_root)
    shutil.rmtree((run / "best").resolve())
    result = train(tiny(**QUICK), run, data_root=data_root, resume=True)
    assert result.best_step == 4
    assert log(run, "note")[0]["text"] == "the best checkpoint, of step 2, is gone"
    assert evaluate(run, device="cpu")["accuracy"] == result.test["accuracy"]


def test_a_run_remembers_where_its_data_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = prepare(tmp_path / "elsewhere")
    monkeypatch.setenv("MGK_DATA", str(tmp_path / "empty"))
    run = stopped(monkeypatch, tmp_path / "run", root)
    assert train(tiny(**QUICK), run, resume=True).finished
    assert evaluate(run, device="cpu")["step"] == 4 or evaluate(run, device="cpu")["step"] == 2
    assert Opened.open(run).prepared.path.parent == root
    root.rename(tmp_path / "empty")  # then the default counts
    assert Opened.open(run).prepared.path.parent == data.root()


def test_the_commit_of_another_project_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MGK_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "another project"], check=True)
    module = tmp_path / "venv" / "mgk" / "environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(mgk.environment, "__file__", str(module))
    assert mgk.environment.commit() == "unknown"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "this project"], check=True)
    assert mgk.environment.commit() not in ("unknown", "")
