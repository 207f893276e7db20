"""Tile sizes: a small table, found by `python -m benchmarks.tune` on an H200, and a rule for what it does not hold.

Nothing is tuned at run time: the first call on a new shape compiles one kernel per pass and no more.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # a cap per thread, where one more program on a multiprocessor pays for it


# (family, pass, block width) -> tile, for half precision on compute capability 9.0
TABLE: dict[tuple[str, str, int], Tile] = {
    ("shifted", "forward", 16): Tile(64, 64, 4, 3),
    ("shifted", "forward", 32): Tile(128, 64, 4, 3, 168),
    ("shifted", "forward", 64): Tile(128, 64, 4, 3),
    ("shifted", "forward", 128): Tile(64, 64, 4, 3),
    ("shifted", "query", 16): Tile(128, 64, 4, 3),
    ("shifted", "query", 32): Tile(128, 64, 4, 3),
    ("shifted", "query", 64): Tile(64, 64, 4, 3),
    ("shifted", "query", 128): Tile(64, 64, 4, 2),
    ("shifted", "key", 16): Tile(32, 64, 4, 3),
    ("shifted", "key", 32): Tile(64, 64, 4, 3, 168),
    ("shifted", "key", 64): Tile(64, 64, 4, 3),
    ("shifted", "key", 128): Tile(32, 128, 8, 3),
    ("shifted", "short forward", 16): Tile(64, 64, 4, 1, 168),
    ("shifted", "short forward", 32): Tile(64, 64, 4, 3),
    ("shifted", "short backward", 16): Tile(32, 64, 4, 1, 168),
    ("shifted", "short backward", 32): Tile(64, 64, 4, 2),
    ("mixture", "forward", 16): Tile(64, 64, 4, 3),
    ("mixture", "forward", 32): Tile(128, 64, 4, 3),
    ("mixture", "forward", 64): Tile(128, 64, 4, 3),
    ("mixture", "forward", 128): Tile(128, 64, 8, 3),
    ("mixture", "query", 16): Tile(64, 64, 4, 3),
    ("mixture", "query", 32): Tile(64, 64, 4, 3),
    ("mixture", "query", 64): Tile(64, 64, 4, 3),
    ("mixture", "query", 128): Tile(128, 64, 8, 2),
    ("mixture", "key", 16): Tile(32, 64, 4, 3),
    ("mixture", "key", 32): Tile(64, 64, 4, 3, 168),
    ("mixture", "key", 64): Tile(64, 64, 4, 3),
    ("mixture", "key", 128): Tile(32, 128, 8, 1),
}

# What a sweep wants instead, (family, pass) -> tile; see benchmarks.tune.
override: dict[tuple[str, str], Tile] = {}


def choose(family: str, kernel: str, width: int, components: int, element_size: int) -> Tile:
    """`width` is the larger of the block widths of keys and values."""
    if (family, kernel) in override:
        return override[family, kernel]
    small = Tile(64, 32, 4, 2) if kernel != "key" else Tile(32, 64, 4, 2)
    if width > 128 or (element_size > 2 and width > 64):
        return Tile(32, 32, 4, 1) if element_size > 2 or components > 2 else Tile(64, 32, 8, 2)
    if element_size > 2 or (family == "mixture" and components > 2):
        return small
    return TABLE[family, kernel, max(16, width)]
