"""The compile-time constants of the generic attention kernels, as one argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """D and DV are the widths of a head and a value, BD and BV these rounded up to powers of two, BM and BN the queries
    and keys of a tile. For PATH, HEADS, FIXED, NARROW and AS_VECTORS see `mgk.ops.dispatch`.
    """

    D: int
    DV: int
    BD: int
    BV: int
    M: int
    BM: int
    BN: int
    PATH: int
    HEADS: int
    FIXED: bool
    NARROW: bool
    HARD: bool
    CAUSAL: bool
    EVEN: bool  # both lengths are whole tiles
    SPANS: bool  # sequences differ in length, or masks hide some keys or queries
    KEY_MASK: bool
    DROPOUT: bool
    VARIANCES: bool
    PACKED: bool
    PRECISION: str
    MASK_QUERIES: bool = False
    POSITIONS: bool = False  # the prior has one entry per position, and wants its gradient
    AS_VECTORS: bool = False
    WIDTH: int = 0  # numbers per query that one pass leaves for the next
