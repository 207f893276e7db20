"""Small splits made of numbers that tell where they come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from mgk.data import Images, Pairs, Sequences, Stream
from mgk.data.splits import Documents

SMALL: dict[str, Any] = {"sizes": (60, 20, 20), "lengths": (4, 40)}
"""A ListOps set that takes a moment."""


def sequences(lengths: list[int]) -> Sequences:
    """Row i is i + 1 repeated, and its label i."""
    numbers = np.arange(1, len(lengths) + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(np.repeat(numbers, lengths).astype(np.int32), offsets, labels=numbers - 1)


def pairs(lengths: list[int]) -> Pairs:
    """Pair i is of documents i and i + 1, and its label is i."""
    rows = sequences([*lengths, 3])
    numbers = np.arange(len(lengths))
    return Pairs(Documents(rows.tokens, rows.offsets), np.stack([numbers, numbers + 1], 1), numbers)


def images(count: int) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 4, 3, 2)).astype(np.uint8)
    return Images(pixels, np.arange(count), (0.5, 0.25), (0.5, 0.125))


def text(count: int) -> Stream:
    return Stream(np.arange(count, dtype=np.uint16))
