"""The partition of the (query, key) pairs into blocks that fit the cache, and buffers that blocks reuse.

H heads of all batch entries, h heads of a block, M components, Nq queries, Nk keys; nq, nk queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

QUERY_BLOCK = 384  # BLAS is fastest with multiples of 48
KEY_BLOCK = 384
BLOCK_NUMBERS = 1 << 18  # scores per thread: they fit its cache, and outweigh the Python overhead


class Span(NamedTuple):
    """A range of positions. Unlike a slice it is hashable."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class HeadGroups(NamedTuple):
    """Which head of keys and values a query head reads: `size` neighbours read the same one."""

    size: int

    def of(self, tensor: Tensor, heads: slice) -> Tensor:
        """What `heads` of a block read of `tensor`: as many matrices or, without a copy, one for all of them."""
        if self.size == 1:
            return tensor[heads]
        return tensor[heads.start // self.size, None]

    def expanded(self, tensor: Tensor, heads: slice) -> Tensor:
        """The same as one matrix for each of `heads`, without a copy."""
        return self.of(tensor, heads).expand(heads.stop - heads.start, *tensor.shape[1:])


class Reach(NamedTuple):
    """Which keys a query may see: with `causal`, query i those up to i + offset, and of these the last `window`."""

    num_queries: int
    num_keys: int
    causal: bool
    window: int | None

    @property
    def offset(self) -> int:
        return self.num_keys - self.num_queries

    def first(self, queries: Span) -> int:
        """The first key that one of `queries` sees."""
        return 0 if self.window is None else max(0, queries.start + self.offset - self.window + 1)

    def stop(self, queries: Span) -> int:
        """One past the last key that one of `queries` sees."""
        return min(self.num_keys, queries.stop + self.offset) if self.causal else self.num_keys

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The first key and one past the last one of each query, (Nq,)."""
        rows = torch.arange(self.num_queries)
        last = rows + 1 + self.offset if self.causal else torch.full_like(rows, self.num_keys)
        first = torch.zeros_like(rows) if self.window is None else last - self.window
        return first.clamp(min=0), last.clamp(min=0)


class Block(NamedTuple):
    """A range of queries of a range of heads, and the key ranges that they see."""

    heads: slice
    queries: Span
    keys: list[Span]
    reach: Reach

    @property
    def place(self) -> tuple[slice, slice]:
        return self.heads, slice(*self.queries)

    def after_diagonal(self, keys: Span) -> tuple[int, int]:
        """Start and stop of `keys`, relative to the last key that the first query sees."""
        diagonal = self.queries.start + self.reach.offset if self.reach.causal else keys.stop
        return keys.start - diagonal, keys.stop - diagonal

    def after_window(self, keys: Span) -> int:
        """Start of `keys`, relative to the last key that the window hides from the first query."""
        reach, start = self.reach, self.queries.start
        return self.queries.size if reach.window is None else keys.start - (start + reach.offset - reach.window)

    def sees_all(self, keys: Span) -> bool:
        """Whether causal mask and window hide none of `keys` from any query."""
        return self.after_diagonal(keys)[1] <= 1 and self.after_window(keys) >= self.queries.size


def make_blocks(active: Tensor, reach: Reach, groups: HeadGroups, scores: int) -> Iterator[Block]:
    """All blocks that see a key; blocks of the same heads follow each other.

    Args:
        active: bool (H,Nk), keys that take part.
        reach: what a query may see of them. Blocks outside are left out.
        groups: the heads of a block read one head of keys each, or all of them the same one.
        scores: the number of scores per pair.
    """
    (num_heads, num_keys), num_queries = active.shape, reach.num_queries
    query_size, key_size = QUERY_BLOCK, max(1, KEY_BLOCK // scores)
    if reach.causal:  # shorter blocks compute fewer hidden pairs at the diagonal
        query_size = min(QUERY_BLOCK, max(1, QUERY_BLOCK // 4, num_queries // 8))
    numbers = min(query_size, num_queries) * min(key_size, num_keys) * scores
    if not num_heads or not numbers:
        return
    step = max(1, BLOCK_NUMBERS // numbers) * torch.get_num_threads()
    lengths = (active * torch.arange(1, num_keys + 1)).amax(1).tolist()  # one past the last active key
    for heads in head_ranges(num_heads, step, groups):
        for start in range(0, num_queries, query_size):
            queries = Span(start, min(start + query_size, num_queries))
            stop = min(max(lengths[heads]), reach.stop(queries))
            keys = [Span(key, min(key + key_size, stop)) for key in range(reach.first(queries), stop, key_size)]
            if keys:
                yield Block(heads, queries, keys, reach)


def head_ranges(num_heads: int, step: int, groups: HeadGroups) -> Iterator[slice]:
    """At most `step` heads at a time, and where heads share keys only those that share the same ones."""
    whole = num_heads if groups.size == 1 else groups.size
    for start in range(0, num_heads, whole):
        for first in range(start, start + whole, step):
            yield slice(first, min(first + step, start + whole))


class Views(dict[Span, Tensor]):
    """Slices of a tensor by `Span`, cached: making a view takes as long as launching a matrix product."""

    def __init__(self, make: Callable[[Span], Tensor]) -> None:
        self.make = make

    def __missing__(self, span: Span) -> Tensor:
        view = self[span] = self.make(span)
        return view


def row_views(tensor: Tensor) -> Views:
    """Slices along dimension 1, of a (g,N,...) tensor."""
    return Views(lambda at: tensor[:, at.start : at.stop])


def transposed_views(tensor: Tensor) -> Views:
    """Slices along dimension 1 of a (g,N,C) tensor, transposed: (g,C,n)."""
    return Views(lambda at: tensor[:, at.start : at.stop].mT)


def column_views(tensor: Tensor) -> Views:
    """Slices along the last dimension, of a (...,N) tensor."""
    return Views(lambda at: tensor[..., at.start : at.stop])


class Scratch:
    """Named buffers that blocks reuse: allocating fresh pages for every block costs more than computing in them."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.memory: dict[str, Tensor] = {}
        self.views: dict[tuple[str, int, int, int], Tensor] = {}
        self.split: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, name: str, heads: int, rows: int, columns: int) -> Tensor:
        view = self.views.get((name, heads, rows, columns))
        if view is None:
            numbers = heads * rows * columns
            if name not in self.memory or self.memory[name].numel() < numbers:
                self.memory[name] = self.like.new_empty(numbers)
            view = self.memory[name][:numbers].view(heads, rows, columns)
            self.views[name, heads, rows, columns] = view
        return view

    def bmm(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, out=self(name, left.shape[0], left.shape[1], right.shape[2]))

    def add_product(self, target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right to `target`. Where it holds fewer matrices, every run of as many is added to it."""
        for start in range(0, left.shape[0], target.shape[0]):
            part = slice(start, start + target.shape[0])
            if target.is_contiguous():
                target.baddbmm_(left[part], right[part])
            else:
                target.add_(self.bmm("product", left[part], right[part]))

    def components(self, view: Tensor, number: int) -> tuple[Tensor, ...]:
        """The components of a (g*M,...) buffer of this object: M tensors (g,...)."""
        if id(view) not in self.split:
            self.split[id(view)] = view.view(-1, number, *view.shape[1:]).unbind(1)
        return self.split[id(view)]

    def triangle(self, size: int) -> Tensor:
        """(1,size,size) with 1 where the key (row) is not after the query (column), else 0."""
        if ("triangle", 1, size, size) not in self.views:
            self.views["triangle", 1, size, size] = self.like.new_ones(1, size, size).triu()
        return self.views["triangle", 1, size, size]

    def triangle_below(self, size: int) -> Tensor:
        """(1,size,size) with 1 where the key (row) is after the query (column), else 0."""
        if ("triangle below", 1, size, size) not in self.views:
            self.views["triangle below", 1, size, size] = self.like.new_ones(1, size, size).tril(-1)
        return self.views["triangle below", 1, size, size]
