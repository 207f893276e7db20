"""A disk that is full, and one that returns other bits than were written."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Limit the size of files to `most` bytes, which fails like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def flipped(path: Path, seed: int) -> Iterator[None]:
    """Flip one bit of a file, at random."""
    content = path.read_bytes()
    changed = bytearray(content)
    bit = random.Random(seed).randrange(8 * len(content))
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(content)
