"""Find tile sizes on the GPU at hand: `python -m mgk.bench.tune`. The winners go by hand into ops/triton/tiles.py.

Every candidate is first compiled by worker processes, then timed alone; a kernel's time is that of its whole pass with
the other kernel of the pass held fixed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch

SHAPES = ((32, 8, 4096, 32, False), (96, 8, 256, 16, True), (8, 16, 4096, 64, False), (4, 16, 8192, 64, True),
          (4, 16, 8192, 128, True))  # fmt: skip
CANDIDATES = {  # queries, keys, warps, stages: what the compiler's reports left over (docs/kernels.md)
    ("shifted", "forward"): [(128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)],
    ("shifted", "query"): [(64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 2)],
    ("shifted", "key"): [(64, 64, 4, 3), (32, 128, 4, 3), (128, 64, 4, 2), (64, 128, 8, 2)],
    ("mixture", "forward"): [(128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 2)],
    ("mixture", "query"): [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)],
    ("mixture", "key"): [(64, 64, 4, 3), (64, 128, 8, 3), (64, 64, 8, 2)],
}


def inputs(family: str, shape: tuple[int, int, int, int, bool], small: bool) -> tuple[Any, ...]:
    batch, heads, length, width, _ = shape
    batch, heads, length = (1, 1, 256) if small else (batch, heads // 2, length)

    def make(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    query, value = make(batch, heads, length, width), make(batch, heads, length, width)
    prior = torch.zeros(heads, 2, device="cuda")
    if family == "shifted":
        return query, make(batch, heads, length, width), torch.randn(heads, 2, width, device="cuda"), value, prior
    return query, make(batch, heads, 2, length, width), value, prior


def passes(family: str, hard: bool, shape: tuple[int, int, int, int, bool], small: bool) -> dict[str, Any]:
    """The forward and the backward pass as functions without arguments."""
    from mgk.ops import triton as ours

    tensors, causal = inputs(family, shape, small), shape[-1]
    extra = [None] * (3 if family == "shifted" else 4)  # masks, seed (and variances)
    options = shape[3] ** 0.5, hard, causal, 0.0
    run = ours.shifted_forward if family == "shifted" else ours.mixture_forward
    run_backward = ours.shifted_backward if family == "shifted" else ours.mixture_backward

    def forward() -> Any:
        return run(*tensors, *extra, *options)

    results = forward()
    grad = torch.randn_like(results[0])
    return {"forward": forward, "backward": lambda: run_backward(grad, *tensors, *extra, *results, *options)}


def compile_one(job: tuple[str, bool, tuple[int, int, int, int, bool], str, tuple[int, ...]]) -> None:
    from mgk.ops import triton as ours
    from mgk.ops.triton.tiles import Tile

    family, hard, shape, kernel, tile = job
    ours.tile_override.clear()
    if kernel:
        ours.tile_override[family, kernel] = Tile(*tile)
    try:
        passes(family, hard, shape, small=True)["forward" if kernel == "forward" else "backward"]()
    except Exception:  # too large for the chip; it will fail again, in the open, when it is timed
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=["shifted", "mixture"])
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--out", default="tune.json")
    options = parser.parse_args()
    jobs = [
        (family, options.hard, SHAPES[index], kernel, tile)
        for index in options.shapes
        for (family, kernel), tiles in CANDIDATES.items()
        if family in options.families
        for tile in tiles
    ]
    defaults = [(family, options.hard, SHAPES[i], "", ()) for i in options.shapes for family in options.families]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, work in (("defaults", defaults), ("candidates", jobs)):  # each kernel is compiled once
            for count, _ in enumerate(pool.imap_unordered(compile_one, work), 1):
                print(f"\rcompiled {count} of {len(work)} {name}", end="", flush=True)
    print()

    from triton.testing import do_bench_cudagraph

    from mgk.ops import triton as ours
    from mgk.ops.triton.tiles import Tile

    found: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
    for family, hard, shape, kernel, tile in jobs:
        ours.tile_override.clear()
        ours.tile_override[family, kernel] = Tile(*tile)
        try:
            run = passes(family, hard, shape, small=False)["forward" if kernel == "forward" else "backward"]
            time = do_bench_cudagraph(run, 15, return_mode="median")
        except Exception as error:
            print(f"{family} {shape} {kernel} {tile}: {type(error).__name__}", flush=True)
            continue
        print(f"{time:.3f} {family} {shape} {kernel} {tile}", flush=True)
        found.setdefault(f"{family} {'hard' if hard else 'soft'} {shape} {kernel}", []).append((time, tile))
    for title, times in found.items():
        times.sort()
        print(title, "  ".join(f"{time:.3f} {tile}" for time, tile in times[:4]), f"  worst {times[-1][0]:.3f}")
    Path(options.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
