"""Batches as pure functions of the step: a run that stops, resumes or uses several processes sees the same data.

n examples, B examples of a batch over all processes, N tokens of its rows.

Training reads an endless sequence of examples, epoch after epoch, each epoch a permutation drawn from (seed, epoch).
Step k is its k-th slice of B examples. So all batches have B examples, and each epoch has every example once. If B does
not divide n, a batch may hold the end of one epoch and the start of the next.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import numpy as np
import torch

from mgk.data.splits import AnySplit, Array, Batch, Pairs, Sequences, Stream
from mgk.ops.arguments import check_count, check_flag, describe

BUCKET_BATCHES = 50  # examples are sorted by length within this many batches: similar lengths, yet random batches


class _Plan:
    """The arguments that `Batches` and `Evaluation` share."""

    def __init__(
        self, split: AnySplit, batch_size: int, max_length: int | None, pad_multiple: int, rank: int, world: int
    ) -> None:
        self.split, self.batch_size = split, check_count("batch_size", batch_size)
        self.pad_multiple, self.world = check_count("pad_multiple", pad_multiple), check_count("world", world)
        if not 0 <= rank < world:
            raise ValueError(f"rank: expected 0 to {world - 1} for world = {world}, got {describe(rank)}")
        self.rank, self.max_length = rank, max_length
        if max_length is not None:
            check_count("max_length", max_length)
        elif isinstance(split, Stream):
            raise ValueError("max_length: expected the number of tokens of a window of the text, got None")
        self.window = max_length or 0  # of a stream

    def _padded(self, lengths: Array) -> int:
        """Length to which rows of these lengths are padded or cut."""
        length = -(-max(1, int(lengths.max())) // self.pad_multiple) * self.pad_multiple
        return length if self.max_length is None else min(length, self.max_length)


class Batches(_Plan):
    """Training batches: `batches[step]` for any step >= 0, independent of earlier accesses.

    With `bucket`, examples of similar length share a batch. Rows are padded to the longest of the batch, rounded up to
    a multiple of `pad_multiple`, and cut at `max_length`. Process `rank` of `world` gets its B / world rows. With
    `pack`, the tokens of sequences and pairs have no padding, and their number is rounded up to a multiple of it.

    A `Stream` is cut into B tracks of equal length, and step k gives the k-th window of `max_length` tokens of each;
    `seed`, `bucket` and `pad_multiple` have no effect there.
    """

    def __init__(
        self,
        split: AnySplit,
        batch_size: int,
        *,
        seed: int = 0,
        max_length: int | None = None,
        bucket: bool = True,
        pad_multiple: int = 1,
        pack: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(split, batch_size, max_length, pad_multiple, rank, world)
        self.seed, self.bucket = seed, check_flag("bucket", bucket)
        self.options = {"pack": check_count("pack", pack)} if pack else {}
        if pack and not isinstance(split, Sequences | Pairs):
            raise ValueError(f"pack: expected 0 for {type(split).__name__.lower()}, which have no padding, got {pack}")
        if batch_size % world:
            raise ValueError(f"batch_size: expected a multiple of world = {world}, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed: expected at least 0, got {seed}")
        if isinstance(split, Stream):
            self.track = (len(split) - 1) // batch_size
            self.windows = self.track // self.window
            if self.windows < 1:
                raise ValueError(
                    f"batch_size: expected at most the {(len(split) - 1) // self.window} windows of {max_length} tokens"
                    f" in the text, got {batch_size}"
                )
        elif len(split) == 0:
            raise ValueError("split: expected at least one example, got none")
        else:
            self.lengths = split.lengths
        self._orders: dict[int, Array] = {}  # orders of the last two epochs

    @property
    def steps_per_epoch(self) -> float:
        return self.windows if isinstance(self.split, Stream) else len(self.split) / self.batch_size

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise ValueError(f"step: expected at least 0, got {step}")
        mine = slice(*(self.batch_size // self.world * r for r in (self.rank, self.rank + 1)))
        rows = self.rows(step)
        if isinstance(self.split, Stream):
            return self.split.batch(rows[mine], self.window)
        return self.split.batch(rows[mine], self._padded(self.lengths[rows]), **self.options)

    def rows(self, step: int) -> Array:
        """(B,), the examples of a step over all processes; of a text, the first token of each window."""
        if isinstance(self.split, Stream):
            return np.arange(self.batch_size) * self.track + step % self.windows * self.window
        place = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epoch, index = place // len(self.lengths), place % len(self.lengths)
        return np.concatenate([self._order(e)[index[epoch == e]] for e in np.unique(epoch).tolist()])

    def _order(self, epoch: int) -> Array:
        """(n,), the examples of an epoch in reading order."""
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = self._draw(epoch)
        return self._orders[epoch]

    def _draw(self, epoch: int) -> Array:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.lengths))
        if not self.bucket:
            return order
        size = self.batch_size
        head = min(-epoch * len(order) % size, len(order))  # these complete the last batch of the previous epoch
        full = (len(order) - head) // size
        middle = order[head : head + full * size]
        for start in range(0, len(middle), BUCKET_BATCHES * size):
            window = middle[start : start + BUCKET_BATCHES * size]
            window[:] = window[np.argsort(self.lengths[window], kind="stable")]
        middle[:] = random.permutation(middle.reshape(full, size)).reshape(-1)
        return order


class Evaluation(_Plan):
    """Evaluation batches: every example of a split once, in order of length.

    All processes get the same number of batches, and none is empty: if fewer examples than processes are left at the
    end, they join the previous batch. `limit` is a maximum number of examples, evenly spread. A `Stream` is cut into
    windows of `max_length` tokens that do not overlap; an incomplete window at its end is not read.
    """

    def __init__(
        self,
        split: AnySplit,
        batch_size: int,
        *,
        max_length: int | None = None,
        pad_multiple: int = 1,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(split, batch_size, max_length, pad_multiple, rank, world)
        if isinstance(split, Stream):
            self.items = np.arange(0, len(split) - self.window, self.window)
            self.lengths = np.full(len(self.items), self.window)
        else:
            self.lengths, self.items = split.lengths, np.arange(len(split))
        if batch_size < world:
            raise ValueError(f"batch_size: expected at least world = {world}, got {batch_size}")
        places = np.arange(len(self.items))
        if limit is not None and check_count("limit", limit) < len(places):
            places = np.arange(limit) * len(places) // limit
        if len(places) == 0:
            needed = (
                f"more than a window of {max_length} tokens" if isinstance(split, Stream) else "at least one example"
            )
            raise ValueError(f"split: expected {needed}, got {len(split)}")
        if len(places) < world:
            raise ValueError(f"world: expected at most one process for each of {len(places)} examples, got {world}")
        self.order = places[np.argsort(self.lengths[places], kind="stable")]
        full, rest = divmod(len(places), batch_size)
        self.count = max(1, full + (rest >= world))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self.count:
            raise IndexError(f"step: expected 0 to {self.count - 1}, got {step}")
        stop = (step + 1) * self.batch_size if step < self.count - 1 else len(self.order)
        rows = self.order[step * self.batch_size : stop]
        mine = np.array_split(rows, self.world)[self.rank]
        return self.split.batch(self.items[mine], self._padded(self.lengths[rows]))


evaluation = Evaluation  # for use as a function: `for batch in evaluation(split, 32)`


def stream(
    batches: Batches | Evaluation, start: int = 0, stop: int | None = None, *, workers: int = 0, pin: bool = False
) -> Iterator[Batch]:
    """Iterate over `batches[start], ..., batches[stop - 1]`, prepared in advance by `workers` processes.

    With `pin` they are in page-locked memory, from which a copy to the GPU does not block. Global random state is not
    changed.
    """
    if stop is None:
        if isinstance(batches, Batches):
            raise ValueError("stop: expected a step, as training batches have no end, got None")
        stop = len(batches)
    loader: torch.utils.data.DataLoader[Batch] = torch.utils.data.DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        sampler=range(start, stop),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_obey_parent_only,
        generator=torch.Generator(),  # otherwise it draws from the global one, and a resumed run would differ
    )
    return iter(loader)


def _obey_parent_only(worker: int) -> None:
    """Ignore signals that a terminal or a scheduler sends to all processes; only SIGTERM from the parent, or its death,
    ends a worker. The parent still needs batches until it has finished its step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere the sender of a signal is unknown
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, daemon=True).start()
    threading.Thread(target=end_with_parent, daemon=True).start()  # last: threads inherit what is blocked


def end_with_parent() -> None:
    """Wait for the end of the parent process, then kill this one: nobody would take its results.

    PyTorch's own check takes whoever is the parent when it begins, so a worker whose parent died before stays forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _end_when_told() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
