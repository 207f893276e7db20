"""When a run writes checkpoints, and how: in the background where a device computes meanwhile.

On a CPU a checkpoint is written at once. On a GPU the tensors are copied to page-locked memory, which takes
milliseconds, and a thread writes them while training goes on. If weights are sharded, every process does so with its
shards. A checkpoint counts only when it is complete, so a process that is killed meanwhile resumes from the one before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mgk.files import beside
from mgk.train import checkpoint
from mgk.train.checkpoint import Checkpoint, DiskFullError
from mgk.train.learner import Learner, local
from mgk.train.run import Run

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MARGIN = 2**20  # bytes for the small files of a checkpoint


class Saver:
    """Writes the checkpoints of one run; `background` is None where it pays: on a GPU, and for sharded weights."""

    def __init__(self, fabric: Fabric, run: Run, learner: Learner, *, background: bool | None = None) -> None:
        self.fabric, self.run, self.learner, self.rhythm = fabric, run, learner, run.config.save
        cuda = fabric.device.type == "cuda"
        background = cuda or learner.sharded if background is None else background
        self.group = dist.new_group(backend="gloo") if learner.sharded else None
        self.thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self.staged: dict[str, Tensor] = {}  # on the host, used again for every checkpoint
        self.pending: Future[None] | None = None
        self.saved_at = time.monotonic()

    def due(self, step: int, logs: bool) -> bool:
        """Return whether a checkpoint is due by steps or by time. Processes agree on the time when they log."""
        if self.rhythm.steps and step % self.rhythm.steps == 0:
            return True
        if not self.rhythm.minutes:
            return False
        late = time.monotonic() - self.saved_at >= 60 * self.rhythm.minutes
        if self.fabric.world_size == 1:
            return late
        return logs and bool(self.fabric.broadcast(late))

    @property
    def with_evaluations(self) -> bool:
        """Whether every evaluation writes a checkpoint, because no other rhythm is set."""
        return not (self.rhythm.steps or self.rhythm.minutes)

    def save(self, step: int, progress: dict[str, Any], facts: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint, or begin to. Waits for the previous one. Collective."""
        self.wait()
        state = self.learner.sums_of_all() | {"progress": progress}
        tensors = self.learner.tensors()
        self.run.flush_log()
        if self.run.writes:
            needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) + MARGIN
            self.run.when_it_fits(partial(check_space, self.run.folder, needed))
        if self.thread is not None and (self.run.writes or self.group is not None):
            tensors = self.stage(tensors)
        if self.group is not None:
            work: Callable[[], None] = partial(self.write_shards, step, tensors, state, facts, best)
        elif self.run.writes:
            work = partial(self.run.when_it_fits, partial(self.write, step, tensors, state, facts, best))
        else:
            work = do_nothing
        if self.thread is None:
            work()
        else:
            self.pending = self.thread.submit(work)
        self.saved_at = time.monotonic()

    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the host, to page-locked memory if they are on a GPU, so that training can change them."""
        cuda = self.fabric.device.type == "cuda"
        copies = {}
        for name, tensor in tensors.items():
            shard = local(tensor)
            if name not in self.staged:
                self.staged[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=cuda)
            self.staged[name].copy_(shard, non_blocking=cuda)
            copies[name] = self.staged[name]
        if cuda:
            torch.cuda.current_stream().synchronize()
        if self.group is not None:
            from mgk.train import sharded

            return {name: sharded.like(tensors[name], copy) for name, copy in copies.items()}
        return copies

    def write(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], facts: dict[str, Any], best: bool
    ) -> None:
        weights, optimiser = checkpoint.nested(tensors)
        content = Checkpoint(step, weights, state | optimiser, facts)
        checkpoint.save(self.run.folder, content, best=best, keep=self.run.keep)

    def write_shards(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], facts: dict[str, Any], best: bool
    ) -> None:
        """Write the shards of all processes; the first one writes the rest and renames the folder when all is there."""
        from mgk.train import sharded

        if not self.run.writes:
            dist.barrier(self.group)
            folder = beside(checkpoint.folder_of(self.run.folder, step), "partial")
            sharded.write(folder / checkpoint.SHARDED, tensors, self.group)
            return

        def fill(folder: Path) -> dict[str, Any]:
            torch.save(state, folder / checkpoint.STATE)
            dist.barrier(self.group)  # the folder exists
            return sharded.write(folder / checkpoint.SHARDED, tensors, self.group)

        checkpoint.write(self.run.folder, step, fill, facts, best=best, keep=self.run.keep)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint into the learner; return its state, or {} if it has only weights. Collective."""
        if self.group is None or not (folder / checkpoint.SHARDED).exists():
            found = checkpoint.load(folder)
            whole = "optimiser" in found.state
            self.learner.load(found.weights, found.state if whole else None)
            return found.state if whole else {}
        from mgk.train import sharded

        checkpoint.verify(folder, self.fabric.global_rank, self.fabric.world_size)
        state = checkpoint.read_state(folder)
        self.learner.create_state(sharded.shapes(folder / checkpoint.SHARDED))
        sharded.read(folder / checkpoint.SHARDED, self.learner.tensors(), self.group)
        self.learner.load_sums(state)
        return state

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise its error."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise an error if the disk of a folder has too little space for a checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFullError(
            f"{folder}: a checkpoint needs {needed / 2**20:,.0f} MiB, the disk has {free / 2**20:,.0f}; free disk "
            "space and continue from the last checkpoint with --resume"
        )


def do_nothing() -> None:
    """The part of other processes in a checkpoint that one process writes."""
