"""The partition of the (query, key) pairs into blocks that fit the cache, and buffers that blocks reuse.

G heads, g heads of a block, M components, Nq queries, Nk keys; nq, nk queries and keys of a block.
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


class Block(NamedTuple):
    """A range of queries of a range of heads, and the key ranges that they see."""

    heads: slice
    queries: Span
    keys: list[Span]
    offset: int | None  # causal: query i sees the keys up to i + offset

    @property
    def place(self) -> tuple[slice, slice]:
        return self.heads, slice(*self.queries)

    def after_diagonal(self, keys: Span) -> tuple[int, int]:
        """Start and stop of `keys`, relative to the last key that the first query sees."""
        diagonal = keys.stop if self.offset is None else self.queries.start + self.offset
        return keys.start - diagonal, keys.stop - diagonal


def make_blocks(num_queries: int, active: Tensor, is_causal: bool, scores: int) -> Iterator[Block]:
    """All blocks that see a key; blocks of the same heads follow each other.

    Args:
        num_queries: Nq.
        active: bool (G,Nk), keys that take part.
        is_causal: lower-right aligned.
        scores: the number of scores per pair.
    """
    num_heads, num_keys = active.shape
    query_size, key_size = QUERY_BLOCK, max(1, KEY_BLOCK // scores)
    if is_causal:  # shorter blocks compute fewer hidden pairs at the diagonal
        query_size = min(QUERY_BLOCK, max(1, QUERY_BLOCK // 4, num_queries // 8))
    numbers = min(query_size, num_queries) * min(key_size, num_keys) * scores
    if not num_heads or not numbers:
        return
    step = max(1, BLOCK_NUMBERS // numbers) * torch.get_num_threads()
    lengths = (active * torch.arange(1, num_keys + 1)).amax(1).tolist()  # one past the last active key
    offset = num_keys - num_queries if is_causal else None
    for first in range(0, num_heads, step):
        heads = slice(first, min(first + step, num_heads))
        for start in range(0, num_queries, query_size):
            queries, stop = Span(start, min(start + query_size, num_queries)), max(lengths[heads])
            stop = stop if offset is None else min(stop, queries.stop + offset)
            keys = [Span(key, min(key + key_size, stop)) for key in range(0, stop, key_size)]
            if keys:
                yield Block(heads, queries, keys, offset)


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
        if target.is_contiguous():
            target.baddbmm_(left, right)
        else:
            target.add_(self.bmm("product", left, right))

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
