"""The splits of a prepared set, one class per kind of example, and how they make batches.

n examples, B examples of a batch, N tokens of a row, T tokens of all rows or of a packed batch; H, W, C height, width
and channels of an image.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
IGNORED = -100  # a target that does not count
Batch = dict[str, Tensor]
BLOCK = 1 << 20  # entries of a long array that are in memory at a time


@dataclass(frozen=True, eq=False)
class Split:
    """Examples in arrays. A memory-mapped array is pickled as its path, so that a worker process maps the same file."""

    def __getstate__(self) -> dict[str, Any]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: Path(value.filename) if _is_full_file(value) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, np.load(value, mmap_mode="r") if isinstance(value, Path) else value)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    @classmethod
    def restore(cls, arrays: dict[str, Array], facts: dict[str, Any]) -> Self:
        """Build a split from its arrays and, for the other fields, the facts in the manifest."""
        return cls(**arrays, **{each.name: facts[each.name] for each in fields(cls) if each.name not in arrays})


def _is_full_file(value: object) -> bool:  # the base of a slice is another array
    return isinstance(value, np.memmap) and not isinstance(value.base, np.ndarray)


@dataclass(frozen=True, eq=False)
class Documents(Split):
    """Token rows of different lengths: row i is `tokens[offsets[i] : offsets[i + 1]] + shift`; 0 is padding."""

    tokens: Array
    """(T,), all rows, concatenated."""
    offsets: Array
    """(n + 1,)"""
    shift: int = 0
    """1 if every byte may occur (text, pixels), so that 0 is free for padding."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """(n,)"""
        return np.diff(self.offsets)

    def row(self, index: int) -> Array:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64) + self.shift

    def padded(self, indices: Array, length: int, pack: int = 0) -> tuple[Tensor, Tensor]:
        """Return tokens and mask, (B,N) with N = `length`; longer rows are cut.

        With `pack` the tokens are (T,), all rows concatenated without padding. Zeros at the end make T a multiple of
        `pack`, or B N if that is less.
        """
        starts = self.offsets[indices]
        kept = np.minimum(self.offsets[indices + 1] - starts, length)
        mask = np.arange(length) < kept[:, None]
        rows = [self.tokens[start : start + count] for start, count in zip(starts, kept, strict=True)]
        real = np.concatenate([self.tokens[:0], *rows]).astype(np.int64) + self.shift
        if pack:
            tokens = np.zeros(min(-(-len(real) // pack) * pack, mask.size), np.int64)
            tokens[: len(real)] = real
        else:
            tokens = np.zeros(mask.shape, np.int64)
            tokens[mask] = real
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def rows(self, indices: Array) -> tuple[Array, Array]:
        """Return the tokens and offsets of some rows."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths[indices])])
        parts = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        return np.concatenate([self.tokens[:0], *parts]), offsets


@dataclass(frozen=True, eq=False)
class Sequences(Documents):
    """Labelled token rows."""

    labels: Array = field(kw_only=True)
    """(n,)"""

    def batch(self, indices: Array, length: int, pack: int = 0) -> Batch:
        """tokens (B,N), or (T,) with `pack`; mask (B,N) True at tokens; label (B,)"""
        tokens, mask = self.padded(indices, length, pack)
        return {"tokens": tokens, "mask": mask, "label": _labels(self.labels[indices])}

    def select(self, indices: Array) -> Sequences:
        return Sequences(*self.rows(indices), shift=self.shift, labels=self.labels[indices])

    @classmethod
    def from_bytes(cls, examples: Sequence[tuple[bytes, int]], shift: int = 0) -> Self:
        """Build from (tokens, label) pairs, with a byte per token."""
        contents, labels = zip(*examples, strict=True) if examples else ((), ())
        return cls(*concatenate(contents), shift, labels=np.array(labels, np.uint8))


@dataclass(frozen=True, eq=False)
class Pairs(Split):
    """Labelled pairs of documents. A document that occurs in several pairs is stored once."""

    documents: Documents
    pairs: Array
    """(n, 2), indices of documents."""
    labels: Array
    """(n,)"""

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def lengths(self) -> Array:
        """(n,), of the longer document, which determines the cost of a pair."""
        return self.documents.lengths[self.pairs].max(1)  # type: ignore[no-any-return]

    def batch(self, indices: Array, length: int, pack: int = 0) -> Batch:
        """tokens (B,2,N), or (T,) with `pack`; mask (B,2,N); label (B,)"""
        tokens, mask = self.documents.padded(self.pairs[indices].reshape(-1), length, pack)
        shape = (len(indices), 2, length)
        tokens = tokens if pack else tokens.view(shape)
        return {"tokens": tokens, "mask": mask.view(shape), "label": _labels(self.labels[indices])}

    def select(self, indices: Array) -> Pairs:
        used, pairs = np.unique(self.pairs[indices], return_inverse=True)
        documents = Documents(*self.documents.rows(used), shift=self.documents.shift)
        return Pairs(documents, pairs.reshape(-1, 2).astype(self.pairs.dtype), self.labels[indices])

    def arrays(self) -> dict[str, Array]:
        return self.documents.arrays() | super().arrays()

    @classmethod
    def restore(cls, arrays: dict[str, Array], facts: dict[str, Any]) -> Self:
        documents = Documents(arrays["tokens"], arrays["offsets"], facts["shift"])
        return cls(documents, arrays["pairs"], arrays["labels"])


@dataclass(frozen=True, eq=False)
class Translations(Split):
    """Sentences and their translations, as tokens of one vocabulary, in which 0 begins and ends a target."""

    sources: Documents
    targets: Documents

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> Array:
        """(n,), of the longer of both, with the 0 at the start of the target."""
        return np.maximum(self.sources.lengths, self.targets.lengths + 1)  # type: ignore[no-any-return]

    def batch(self, indices: Array, length: int) -> Batch:
        """source and source_mask (B,N); tokens (B,N), 0 and the target; target (B,N), the target, 0, and then -100"""
        source, source_mask = self.sources.padded(indices, length)
        rows, mask = self.targets.padded(indices, length - 1)
        edge = torch.zeros(len(rows), 1, dtype=rows.dtype)
        ends = torch.cat([mask, edge.bool()], 1).sum(1, keepdim=True)  # where the 0 at the end is
        target = torch.cat([rows, edge], 1).masked_fill(torch.arange(length) > ends, IGNORED)
        return {"source": source, "source_mask": source_mask, "tokens": torch.cat([edge, rows], 1), "target": target}

    def select(self, indices: Array) -> Translations:
        return Translations(*(Documents(*part.rows(indices)) for part in (self.sources, self.targets)))

    def arrays(self) -> dict[str, Array]:
        parts = {"source": self.sources, "target": self.targets}
        return {f"{side}_{name}": array for side, part in parts.items() for name, array in part.arrays().items()}

    @classmethod
    def restore(cls, arrays: dict[str, Array], facts: dict[str, Any]) -> Self:
        return cls(*(Documents(arrays[f"{side}_tokens"], arrays[f"{side}_offsets"]) for side in ("source", "target")))


@dataclass(frozen=True, eq=False)
class Images(Split):
    """Labelled images. A batch is normalised with the mean and standard deviation of the training set."""

    pixels: Array
    """uint8 (n,H,W,C)"""
    labels: Array
    """(n,)"""
    mean: Sequence[float]
    """(C,), on the scale 0 to 1."""
    std: Sequence[float]
    """(C,)"""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def lengths(self) -> Array:
        """(n,), all equal."""
        return np.full(len(self), int(np.prod(self.pixels.shape[1:3])))

    def batch(self, indices: Array, length: int) -> Batch:
        """pixels float32 (B,C,H,W), label (B,)"""
        mean, std = (np.asarray(each, np.float32) for each in (self.mean, self.std))
        pixels = (self.pixels[indices].astype(np.float32) / 255 - mean) / std
        channels_first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        return {"pixels": torch.from_numpy(channels_first), "label": _labels(self.labels[indices])}

    def select(self, indices: Array) -> Images:
        return Images(self.pixels[indices], self.labels[indices], self.mean, self.std)


@dataclass(frozen=True, eq=False)
class Stream(Split):
    """One long text."""

    tokens: Array
    """(T,)"""

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, starts: Array, length: int) -> Batch:
        """tokens (B,N) from each start, target (B,N): the next token of each"""
        rows = np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        return {"tokens": torch.from_numpy(rows[:, :-1].copy()), "target": torch.from_numpy(rows[:, 1:].copy())}

    def select(self, indices: Array) -> Stream:
        """Return the first tokens, as many as there are indices: a text is cut, not thinned out."""
        return Stream(self.tokens[: len(indices)])


Examples = Sequences | Pairs | Images | Translations
AnySplit = Examples | Stream
KINDS: dict[str, type[AnySplit]] = {"sequences": Sequences, "pairs": Pairs, "images": Images, "stream": Stream,
                                    "translations": Translations}  # fmt: skip


def join(first: Sequences, second: Sequences) -> Sequences:
    """Concatenate two splits in memory."""
    tokens = np.concatenate([first.tokens, second.tokens])
    offsets = np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]])
    return Sequences(tokens, offsets, first.shift, labels=np.concatenate([first.labels, second.labels]))


def concatenate(contents: Iterable[bytes]) -> tuple[Array, Array]:
    """Return the tokens and offsets of rows given as bytes."""
    rows = list(contents)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return np.frombuffer(b"".join(rows), np.uint8), offsets


def blocks(values: Array) -> Iterator[Array]:
    """Yield an array in parts along its first axis; those of a file that is mapped into memory are dropped again."""
    rows = max(1, BLOCK // max(1, values[:1].size))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]
        if (mapped := getattr(values, "_mmap", None)) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            mapped.madvise(mmap.MADV_DONTNEED)


def thinned(split: AnySplit, limit: int | None) -> AnySplit:
    """Keep at most `limit` examples, evenly spread, since sources are often sorted by class."""
    if limit is None or limit >= len(split):
        return split
    return split.select(np.arange(limit) * len(split) // limit)


def _labels(labels: Array) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
