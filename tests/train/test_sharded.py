"""A sharded checkpoint that is damaged or forged is refused with one line, and reading it runs no code."""

from __future__ import annotations

import dataclasses
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from mgk.files import checksum, write_json
from mgk.train import CheckpointError, checkpoint, sharded
from tests.disk import flipped

TENSORS = {
    "weights.a": torch.arange(12.0).view(3, 4),
    "weights.b": torch.ones(5, dtype=torch.bfloat16),
    "optimiser.a.step": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as several processes write it."""

    def fill(temporary: Path) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            save(TENSORS, storage_writer=FileSystemWriter(temporary / "sharded"), no_dist=True)  # type: ignore[arg-type]
        torch.save({"x": 1}, temporary / "state.pt")
        return {}

    checkpoint.write(tmp_path, 1, fill, {}, best=True)
    return checkpoint.folder_of(tmp_path, 1)


def test_all_tensors_are_read_back(folder: Path) -> None:
    found = sharded.read_whole(folder / "sharded")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert checkpoint.load(folder).weights.keys() == {"a", "b"}


def test_any_flipped_bit_is_noticed(folder: Path) -> None:
    for path in sorted((folder / "sharded").iterdir()):
        for seed in range(100):
            with flipped(path, seed), pytest.raises(CheckpointError, match=rf"{path.name}: damaged"):
                checkpoint.load(folder)
    assert checkpoint.load(folder).step == 1


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def forge(metadata: Any, what: str, mark: Path) -> Any:
    """Change the metadata of a checkpoint as a stranger might."""
    entries, files = metadata.state_dict_metadata, metadata.storage_data
    if what == "code":
        metadata.planner_data = Evil(os.mkdir, str(mark))
    elif what == "code in torch":
        metadata.planner_data = Evil(torch.save, {}, str(mark))
    elif what == "other file":
        files.update({name: dataclasses.replace(info, relative_path="../state.pt") for name, info in files.items()})
    elif what == "size":
        entries["weights.a"].size = torch.Size([1 << 40, 1 << 10])
    elif what == "kind":
        entries["weights.a"] = 7
    elif what == "nothing":
        return [1]
    return metadata


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("code", "it asks for posix.mkdir"),
        ("code in torch", "it asks for torch.serialization.save"),
        ("other file", r"expected files of this folder, got '\.\./state\.pt'"),
        ("size", "its tensors have 4503599627370514 bytes"),
        ("kind", "expected tensors alone"),
        ("nothing", "no attribute 'storage_data'"),
        ("cut", "truncated"),
    ],
)
def test_forged_metadata_is_refused_in_one_line_and_runs_no_code(
    what: str, says: str, folder: Path, tmp_path: Path
) -> None:
    """The checksums are those of the forged file."""
    path = folder / "sharded" / ".metadata"
    forged = pickle.dumps(forge(pickle.loads(path.read_bytes()), what, tmp_path / "mark"))
    path.write_bytes(forged[:-20] if what == "cut" else forged)
    (folder / "checkpoint.json").write_text('{"step": 1, "files": {}}')
    facts = checkpoint.read_facts(folder)
    facts["files"] = {
        file.relative_to(folder).as_posix(): checksum(file)
        for file in folder.rglob("*")
        if file.is_file() and file.name != "checkpoint.json"
    }
    write_json(folder / "checkpoint.json", facts)
    with pytest.raises(CheckpointError, match=rf"\.metadata: not the metadata of a checkpoint \(.*{says}") as error:
        checkpoint.load(folder)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "mark").exists()
