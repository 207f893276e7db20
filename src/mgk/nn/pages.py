"""A decoding cache in pages: rows of different lengths, which come and go (continuous batching).

All layers of a model share one `PageTable`, which says what pages of the pools each row has. Each layer has pools of
its own for keys and values. A row takes a page when it needs one, and returns all of them when it is released.

B rows of a call, P pages, G heads of keys and values, M components, N new positions, D width of a head, Dv width of a
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.nn.cache import KeyValueCache, StackCache, check_same_dtype
from mgk.ops import arguments as check
from mgk.ops.options import Pages

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class PageTable:
    """The pages and the length of each row.

    Args:
        rows: how many rows there are.
        num_pages: P.
        page_size: positions of a page.
        max_length: positions of the longest row.
        window: a row returns the pages that no window of this width reaches; None keeps all.
        device: of the pools.
    """

    def __init__(
        self, rows: int, num_pages: int, page_size: int, max_length: int, window: int | None, device: torch.device
    ) -> None:
        self.page_size, self.max_length, self.window = page_size, max_length, window
        self.table = torch.zeros(rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        self.used = torch.zeros(rows, dtype=torch.int32, device=device)
        self.lengths = [0] * rows  # the same numbers as `used`, on the host
        self.free = list(range(num_pages))[::-1]
        self._pages: list[dict[int, int]] = [{} for _ in range(rows)]  # of each row: place in the row -> page

    def extend(self, rows: Sequence[int], new: int) -> None:
        """Add positions to rows, with the pages that they need. If there are too few pages, nothing changes."""
        for row in rows:
            if self.lengths[row] + new > self.max_length:
                raise ValueError(
                    f"cache: expected at most max_length = {self.max_length} positions in a row, got "
                    f"{self.lengths[row] + new} in row {row}"
                )
        places = [
            (row, place) for row in rows for place in range(*self._places(self.lengths[row], self.lengths[row] + new))
        ]
        if len(places) > len(self.free):
            raise ValueError(
                f"cache: expected {len(places)} free pages for {new} more positions of {len(rows)} rows, got "
                f"{len(self.free)}; release rows, or create a cache with more num_pages"
            )
        for row, place in places:
            self._pages[row][place] = self.free.pop()
        if places:
            numbers = [self._pages[row][place] for row, place in places]
            where = torch.tensor([*zip(*places, strict=True), numbers], device=self.table.device)
            self.table[where[0], where[1]] = where[2].int()
        for row in rows:
            self.lengths[row] += new
        self.used[torch.tensor(rows, device=self.used.device)] += new

    def drop_outside(self, rows: Sequence[int]) -> None:
        """Return the pages before the window of the next position."""
        if self.window is None:
            return
        for row in rows:
            first = (self.lengths[row] - self.window + 1) // self.page_size
            for place in [place for place in self._pages[row] if place < first]:
                self.free.append(self._pages[row].pop(place))

    def release(self, row: int) -> None:
        """Empty a row and return its pages."""
        self.free += self._pages[row].values()
        self._pages[row], self.lengths[row] = {}, 0
        self.used[row] = 0

    def _places(self, length: int, after: int) -> tuple[int, int]:
        """The places of the pages that a row needs to grow to `after` positions."""
        return -(-length // self.page_size), -(-after // self.page_size)


class PagedCache:
    """The cache of a model in pages, from `new_paged_cache`.

    >>> cache = model.new_paged_cache(rows=16, num_pages=4096)
    >>> logits = model(prompt[None], cache=cache.at([3]))  # a new row
    >>> logits = model(tokens, cache=cache.at([0, 3, 7]))  # (3,1): a step of the rows that are alive
    >>> cache.release(3)

    One page per row, `page_size=max_length` and `num_pages=rows`, is a contiguous cache with a length for each row.
    """

    def __init__(
        self, windows: Sequence[int | None], rows: int, num_pages: int, page_size: int, max_length: int | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        for name, value in (("rows", rows), ("num_pages", num_pages), ("page_size", page_size)):
            check.check_count(name, value)
        longest = num_pages * page_size if max_length is None else check.check_count("max_length", max_length)
        widest = None if None in windows else max(window for window in windows if window is not None)
        self.table = PageTable(rows, num_pages, page_size, longest, widest, device)
        self._pools = [Pool(self.table, num_pages) for _ in windows]

    def at(self, rows: Sequence[int]) -> StackCache:
        """The cache of some rows, for a call with a batch of these. All get equally many new positions."""
        total = len(self.table.lengths)
        known = all(check.check_count("rows", row, 0) < total for row in rows)
        if not rows or not known or len(set(rows)) < len(rows):
            raise ValueError(f"rows: expected different numbers from 0 to {total - 1}, got {list(rows)}")
        return StackCache([PagedLayer(pool, list(rows)) for pool in self._pools])

    def release(self, row: int) -> None:
        """Empty a row, which then can be another text, and free its pages."""
        if check.check_count("row", row, 0) >= len(self.table.lengths):
            raise ValueError(f"row: expected a number from 0 to {len(self.table.lengths) - 1}, got {row}")
        self.table.release(row)
        for pool in self._pools:
            pool.lengths[row] = 0

    @property
    def lengths(self) -> list[int]:
        """Positions so far, of each row."""
        return list(self.table.lengths)

    @property
    def free_pages(self) -> int:
        return len(self.table.free)


class Pool:
    """Keys (P,G,[M,]page,D) and values (P,G,page,Dv) of one layer."""

    def __init__(self, table: PageTable, num_pages: int) -> None:
        self.table, self.num_pages = table, num_pages
        self.lengths = [0] * len(table.lengths)  # of what this layer has written
        self.key: Tensor | None = None
        self.value: Tensor | None = None


class PagedLayer(KeyValueCache):
    """The cache of one layer for the rows of a call."""

    def __init__(self, pool: Pool, rows: list[int]) -> None:
        super().__init__(len(rows))
        self.pool, self.rows, self.table = pool, rows, pool.table
        self.index = torch.tensor(rows, device=pool.table.table.device)
        self.length = max(pool.lengths[row] for row in rows)

    def positions(self, new: int) -> Int[Tensor, "b n"]:
        """The positions of the next `new` tokens of each row."""
        lengths = torch.tensor([self.pool.lengths[row] for row in self.rows], device=self.index.device)
        return lengths[:, None] + torch.arange(new, device=self.index.device)

    def write(
        self, key: Float[Tensor, "b g *m n d"], value: Float[Tensor, "b g n dv"]
    ) -> tuple[Float[Tensor, "p g *m page d"], Float[Tensor, "p g page dv"], Pages]:
        """Add new positions, and return the pools and where the positions of these rows are."""
        pool, table, new = self.pool, self.table, key.shape[-2]
        if [pool.lengths[row] for row in self.rows] == [table.lengths[row] for row in self.rows]:
            table.drop_outside(self.rows)
            table.extend(self.rows, new)  # the first layer does it for all
        for row in self.rows:
            pool.lengths[row] += new
        self.length = max(pool.lengths[row] for row in self.rows)
        used, pages = table.used[self.index], table.table[self.index]
        place = used.long()[:, None] - new + torch.arange(new, device=used.device)  # (B,N)
        number, within = pages.gather(1, place // table.page_size).long(), place % table.page_size
        pool.key = self._put(pool.key, key.detach(), number, within)
        pool.value = self._put(pool.value, value.detach(), number, within)
        return pool.key, pool.value, Pages(pages, used, self.length)

    def row(self, index: int, first: int) -> tuple[Tensor, Tensor]:
        """Copies of keys (1,G,[M,]L,D) and values of a row from position `first` on."""
        size, length, pool = self.table.page_size, self.pool.lengths[self.rows[index]], self.pool
        numbers = self.table.table[self.rows[index], first // size : -(-length // size)].long()
        kept = slice(first % size, first % size + length - first)
        assert pool.key is not None
        assert pool.value is not None
        key, value = (x[numbers].movedim(0, -3).flatten(-3, -2)[None, ..., kept, :] for x in (pool.key, pool.value))
        return key, value

    def reorder(self, indices: Tensor) -> None:
        raise TypeError("cache: expected one that is not in pages, for beam search")

    def _put(self, pool: Tensor | None, new: Tensor, number: Tensor, within: Tensor) -> Tensor:
        if pool is None:
            pool = new.new_zeros(self.pool.num_pages, *new.shape[1:-2], self.table.page_size, new.shape[-1])
        check_same_dtype(pool, new)
        pool.movedim(-2, 1)[number, within] = new.movedim(-2, 1)
        return pool

    @property
    def bytes(self) -> int:
        """Bytes of the positions of these rows."""
        pools = [x for x in (self.pool.key, self.pool.value) if x is not None]
        positions = sum(self.pool.lengths[row] for row in self.rows)
        return sum(x[0, ..., 0, :].numel() * x.element_size() for x in pools) * positions
