"""Tile sizes of the generic kernels for any GPU, by estimates of the registers and shared memory that they need.

`python -m benchmarks.cross_compile` compiles the kernels for all GPUs and says what they really need.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

HOPPER = (9, 0)
# KiB of shared memory that a program can have, by compute capability
SHARED_MEMORY = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
# Outer and inner positions of a tile, in the order they are tried. A program holds the outer, and loops over the inner.
SIZES = ((128, 64), (64, 64), (128, 32), (64, 32), (32, 32), (64, 16), (32, 16), (16, 16))
REGISTERS = 210  # estimated for a thread, above which kernels were seen to spill
MAX_REGISTERS = 255  # what a thread has; unless ptxas is told, it may use 32 of them and spill the rest


class Tile(NamedTuple):
    """Block sizes of a generic kernel, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # a limit per thread, where one more program per multiprocessor pays for it


class Shape(NamedTuple):
    """What the size of a tile depends on: the width of blocks of heads and values, components, dtype and GPU."""

    width: int
    keys: int  # per position: one for each component, if they are projected
    factors: int  # per position: one for each component, if they share a key
    single: bool  # float32
    capability: tuple[int, int] | None
    hip: bool


def block_width(width: int) -> int:
    """The width of a block in registers: matrix products need powers of two, and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def shared_memory(capability: tuple[int, int] | None, hip: bool = False) -> int:
    """How many bytes of shared memory a program can have."""
    if capability is None:  # an AMD GPU; or Triton's interpreter, which has no limit
        return 1024 * (64 if hip else 227)
    return 1024 * SHARED_MEMORY.get(capability, 99)


@lru_cache(maxsize=1024)
def largest_tile(kind: str, shape: Shape) -> Tile:
    """The first of SIZES that fits into the registers, or needs the fewest, of those that fit into shared memory."""
    limit, tiles = shared_memory(shape.capability, shape.hip), list[Tile]()
    for least, (outer, inner), warps, stages in product((2, 1), SIZES, (4,) if shape.hip else (4, 8), (3, 2, 1)):
        tile = Tile(*((inner, outer) if kind == "key" else (outer, inner)), warps, stages, MAX_REGISTERS)
        if stages >= least and not wasted(outer, warps, shape) and shared_bytes(kind, tile, shape) <= limit:
            tiles.append(tile)
    if not tiles:
        dtype = "float32" if shape.single else "half precision"
        raise ValueError(
            f"query: no tile for {shape.keys} components of width {shape.width} in {dtype} fits into "
            f"{limit:,} bytes of shared memory: use half precision, fewer components or impl='reference'"
        )
    need = partial(registers, kind, shape=shape)
    return next((tile for tile in tiles if need(tile) <= REGISTERS), min(tiles, key=need))


def wasted(outer: int, warps: int, shape: Shape) -> bool:
    """Whether warps would hold the same numbers of float32 twice, or more of either type than fit into registers."""
    held = outer * shape.width * min(2, shape.keys)
    if shape.single:
        return (outer > 32 and warps > 4) or (outer > 16 and held > 4096)
    return shape.width > 128 and held > 16384


def numbers(kind: str, shape: Shape) -> tuple[int, int, int]:
    """How many numbers a pass holds of an outer position in sums and as operands, and loads of an inner position."""
    width, on_keys = shape.width, (shape.keys + 1) * shape.width
    return {
        "forward": (width, width, on_keys),
        "query": (width, 2 * width, on_keys),
        "key": (on_keys, on_keys, 2 * width),
    }[kind]


def registers(kind: str, tile: Tile, shape: Shape) -> float:
    """An estimate for a thread, fitted to what compilers for NVIDIA GPUs report."""
    outer, inner = (tile.keys, tile.queries) if kind == "key" else (tile.queries, tile.keys)
    threads = tile.warps * (48 if shape.hip else 32)  # AMD GPUs have 64, which need more registers
    rows = min(threads, threads // tile.warps * outer // 16)  # threads that hold different rows of an operand
    sums, operands, loaded = numbers(kind, shape)
    pairs = inner * (shape.keys + (2 if kind == "forward" else 3))
    several = inner * max(0, shape.factors * shape.keys - 2) / 5  # factors and biases of the inner positions
    if not shape.single:
        return outer * (1.25 * sums + pairs) / threads + 0.35 * outer * operands / rows + several
    # Products of float32 split each number in two, also those of the inner tile.
    split = 0.67 * outer * operands / rows + inner * loaded / 150
    return outer * (1.05 * sums + 2.3 * pairs) / threads + split + several


def shared_bytes(kind: str, tile: Tile, shape: Shape) -> int:
    """An upper bound: the inner tiles that are loaded ahead, the outer tile, and copies of a block of weights."""
    outer, inner = (tile.keys, tile.queries) if kind == "key" else (tile.queries, tile.keys)
    size, (_, operands, loaded) = 4 if shape.single else 2, numbers(kind, shape)
    # Asynchronous products read tiles while others are loaded.
    ahead = tile.stages if shape.capability in (HOPPER, (10, 0)) else max(1, tile.stages - 1)
    copied, blocks = 0, 2
    if shape.width > 128 or shape.factors * shape.keys > 2:
        copied, blocks = inner * shape.width // (2 if shape.width > 128 else 8), 3
    if size == 4:  # to be transposed
        copied, blocks = (2 * inner * shape.width, 1) if shape.keys == 1 else (inner * shape.width, 2)
        copied *= shape.keys if kind == "key" and shape.keys > 1 else 1
    if shape.hip:  # the outer tile is in registers, and so is what is not loaded ahead
        operands, loaded, copied = 0, loaded if tile.stages > 1 else shape.width, 0
    tiles = ahead * inner * loaded + outer * operands + copied + blocks * outer * inner
    return size * tiles + (64 * inner if kind == "key" else 512)
