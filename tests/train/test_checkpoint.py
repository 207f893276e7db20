"""Checkpoints are complete, or refused with advice. For crashes while they are written, see test_kill.py."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mgk.train import CheckpointError, checkpoint
from mgk.train.checkpoint import Checkpoint


def example(step: int) -> Checkpoint:
    weight = torch.full((4, 3), float(step))
    return Checkpoint(step, {"a": weight, "tied": weight, "b": weight[0, :1].clone()}, {"x": [step, "y"]}, {"s": 1.5})


def test_a_saved_checkpoint_is_loaded_and_tied_weights_are_stored_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(3), best=True)
    for name in ("last", "best"):
        found = checkpoint.load(tmp_path / name)
        assert found.step == 3
        assert set(found.weights) == {"a", "b"}
        assert torch.equal(found.weights["a"], torch.full((4, 3), 3.0))
        assert found.state == {"x": [3, "y"]}
        assert found.facts["s"] == 1.5


def test_only_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        checkpoint.save(tmp_path, example(step), best=step == 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000005"]
    assert checkpoint.load(tmp_path / "best").step == 2
    assert checkpoint.load(tmp_path / "last").step == 5


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Limit the size of files to `most` bytes, which fails like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("most", [0, 400])  # in the weights, in the state
def test_a_full_disk_is_one_line_and_loses_nothing(most: int, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(1), best=True)
    with small_files(most), pytest.raises(CheckpointError, match="the checkpoint of step 1 is kept") as error:
        checkpoint.save(tmp_path, example(2), best=True)
    assert "free disk space and continue with --resume" in str(error.value)
    assert checkpoint.load(tmp_path / "last").step == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    checkpoint.save(tmp_path, example(2), best=True)
    assert checkpoint.load(tmp_path / "best").step == 2


def test_other_errors_are_not_reported_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker"):
        checkpoint.save(tmp_path, example(1), best=True)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damage_is_detected_and_the_error_gives_advice(name: str, damage: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(1), best=True)
    checkpoint.save(tmp_path, example(2), best=False)
    path = tmp_path / "last" / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        path.write_bytes(b"\xff" + content[1:])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=f"{name}") as error:
        checkpoint.load(tmp_path / "last")
    damaged = tmp_path / "checkpoints" / "step-00000002"
    assert f"remove {damaged} to continue from step 1" in str(error.value)
    shutil.rmtree(damaged)
    checkpoint.recover(tmp_path, checkpoint.Keep())
    for which in ("last", "best"):
        place = checkpoint.find(tmp_path, which)
        assert place is not None
        assert place == (tmp_path / which).resolve()
        assert checkpoint.load(place).step == 1
