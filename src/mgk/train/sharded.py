"""Checkpoints of runs whose weights are sharded over processes, through `torch.distributed.checkpoint`.

    step-00000500/sharded/__0_0.distcp, __1_0.distcp, ...   the shards that each process holds
                          .metadata                         where every tensor is; written last
                  state.pt, checkpoint.json                 as in every checkpoint

Tensors have the names of `Learner.tensors`: "weights.NAME" and "optimiser.NAME.KEY". Any number of processes can read
them, with any way of sharding, and one process can read them whole.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from mgk.files import checksum
from mgk.train.checkpoint import CheckpointError

Tensors = dict[str, Tensor]
METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
           "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")  # fmt: skip
KNOWN = {(METADATA, name) for name in CLASSES} | {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""What the pickle of a checkpoint's metadata refers to, besides types of numbers."""
UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, IndexError, pickle.UnpicklingError)


def like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a shard of this process, on any device, as a tensor that is sharded like another one."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor(shard, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def write(folder: Path, tensors: Tensors, group: Any) -> dict[str, Any]:
    """Write the shards of this process into a folder. Collective; the first process gets the checksums of all files."""
    try:
        save(
            tensors,  # type: ignore[arg-type]
            storage_writer=FileSystemWriter(folder, sync_files=True),
            process_group=group,
        )
    except CheckpointException as error:  # every process gets it; it is no Exception
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{folder}: process {rank} cannot write its shards ({reason}); continue with --resume"
        ) from error
    rank = dist.get_rank(group)
    mine = folder.glob(f"__{rank}_*.distcp")
    sums = {f"{folder.name}/{path.name}": checksum(path) for path in mine}
    found: list[Any] | None = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(sums, found, group=group, group_dst=0)
    return {name: value for part in found or [] for name, value in part.items()}


def read(folder: Path, tensors: Tensors, group: Any) -> None:
    """Read the shards of this process into tensors that exist. Collective."""
    try:
        load(
            tensors,  # type: ignore[arg-type]
            storage_reader=Reader(folder),
            process_group=group,
        )
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder}: process {rank} cannot read its shards ({reason})") from error


def shapes(folder: Path) -> dict[str, Any]:
    """Shape and type of every tensor of a checkpoint, by name."""
    found = Reader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in found.items()}  # type: ignore[union-attr]


def read_whole(folder: Path) -> Tensors:
    """Read all tensors in one process."""
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes(folder).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        try:
            load(tensors, storage_reader=Reader(folder), no_dist=True)  # type: ignore[arg-type]
        except CheckpointException as error:
            raise CheckpointError(f"{folder}: its shards cannot be read ({error.failures[0][0]})") from None
    return tensors


class Reader(FileSystemReader):
    """Reads shards. The metadata is a pickle, which could run any code: only what PyTorch writes is loaded."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = Unpickler(file).load()
            self.check(metadata)
        except UNREADABLE as error:
            told = " ".join(str(error).split())
            raise CheckpointError(f"{path}: not the metadata of a checkpoint ({told})") from None
        metadata.storage_meta.load_id = self.load_id
        return metadata  # type: ignore[no-any-return]

    def check(self, metadata: Any) -> None:
        """Raise an error if something refers to other files, or to more than the files hold."""
        sizes = {path.name: path.stat().st_size for path in Path(self.path).iterdir()}
        names = {info.relative_path for info in metadata.storage_data.values()}
        if not names <= sizes.keys():
            raise ValueError(f"expected files of this folder, got {sorted(names - sizes.keys())[0]!r}")
        entries = metadata.state_dict_metadata.values()
        if not all(isinstance(entry, TensorStorageMetadata) for entry in entries):
            raise ValueError("expected tensors alone")
        needed = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in entries)
        if not 0 <= needed <= sum(sizes.values()):
            raise ValueError(f"its tensors have {needed} bytes, its files {sum(sizes.values())}")


class Unpickler(pickle.Unpickler):
    """Loads the classes of a checkpoint's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
