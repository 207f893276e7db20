"""Checkpoints are complete, or refused with advice. For crashes while they are written, see test_kill.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mgk.files import checksum
from mgk.train import CheckpointError, checkpoint
from mgk.train.checkpoint import Checkpoint
from tests.disk import flipped, small_files


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


def test_readers_see_no_checkpoint_that_is_being_written_or_removed(tmp_path: Path) -> None:
    """Somebody may evaluate a run while it is trained, or after it was killed."""
    checkpoint.save(tmp_path, example(4), best=True)
    for name in (".step-00000009.partial", ".step-00000007.old", "step-00000008.partial", "step-9"):
        shutil.copytree(checkpoint.folder_of(tmp_path, 4), tmp_path / "checkpoints" / name)
    assert checkpoint.steps(tmp_path) == [4]
    assert checkpoint.find(tmp_path) == checkpoint.find(tmp_path, "best") == checkpoint.folder_of(tmp_path, 4)


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


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checkpoint.json"])
def test_any_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(1), best=True)
    folder = checkpoint.folder_of(tmp_path, 1)
    for seed in range(100):
        with (
            flipped(folder / name, seed),
            pytest.raises(CheckpointError, match=f"{name}: (damaged|cannot be read|expected)"),
        ):
            checkpoint.load(folder)
    assert checkpoint.load(folder).step == 1


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"model\.safetensors: damaged"),  # nothing to compare with
        ({"../../../config.json": {}}, r"config\.json: damaged \(expected a file of this folder"),
        ({"/dev/zero": {}}, "/dev/zero: damaged"),
    ],
)
def test_checksums_of_other_files_or_of_none_are_refused(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(1), best=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "best" / "checkpoint.json").write_text(json.dumps({"step": 1, "files": files}))
    with pytest.raises(CheckpointError, match=says):
        checkpoint.load(tmp_path / "best")


@pytest.mark.parametrize("header", [b"\xff" * 8, (1 << 40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]"])
def test_weights_with_an_oversized_or_wrong_header_are_refused(header: bytes, tmp_path: Path) -> None:
    """A stranger's checkpoint, whose checksums are right."""
    folder = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.save(tmp_path, example(1), best=True)
    (folder / "model.safetensors").write_bytes(header)
    files = {name: checksum(folder / name) for name in ("model.safetensors", "state.pt")}
    (folder / "checkpoint.json").write_text(json.dumps({"step": 1, "files": files}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not the weights of a model") as error:
        checkpoint.load(folder)
    assert "\n" not in str(error.value)
