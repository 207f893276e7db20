"""Find tile sizes on the GPU at hand: `python -m benchmarks.tune`. The winners go by hand into ops/triton/tiles.py.

Every candidate is first compiled by worker processes; then a pass is timed with one kernel's tile exchanged and the
others as in the table, on the same tensors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda import SHAPES, Shape, graph_milliseconds

Candidate = tuple[int, ...]  # queries, keys, warps, stages, and perhaps a cap on registers
CANDIDATES: dict[tuple[str, str], dict[int, list[Candidate]]] = {  # by family, kernel and width
    ("shifted", "short forward"): {
        16: [(64, 64, 4, 3, 168), (64, 64, 4, 2, 168), (64, 64, 4, 3, 144), (64, 32, 4, 3, 128), (64, 64, 4, 1, 168)],
    },
    ("shifted", "short backward"): {
        16: [(32, 64, 4, 2, 168), (32, 64, 4, 1, 168), (32, 64, 4, 3, 168), (16, 64, 4, 2, 168), (32, 32, 4, 2, 168)],
    },
    ("shifted", "forward"): {
        32: [(128, 64, 4, 3), (128, 64, 4, 3, 168), (64, 128, 4, 2), (64, 64, 4, 3)],
        64: [(128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3)],
        128: [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    },
    ("shifted", "query"): {
        32: [(64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3)],
        64: [(64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
    },
    ("shifted", "key"): {
        32: [(32, 64, 4, 3, 128), (64, 64, 4, 3, 168), (64, 64, 4, 2, 168), (64, 64, 4, 2)],
        64: [(64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2)],
        128: [(32, 128, 8, 3), (32, 128, 8, 2), (32, 64, 4, 2)],
    },
    ("mixture", "forward"): {
        16: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2)],
        32: [(128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2)],
        64: [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)],
        128: [(128, 64, 8, 3), (64, 64, 4, 3)],
    },
    ("mixture", "query"): {
        16: [(64, 64, 4, 3), (128, 64, 4, 3)],
        32: [(64, 64, 4, 3), (64, 64, 4, 2)],
        64: [(64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
    },
    ("mixture", "key"): {
        16: [(32, 64, 4, 3), (64, 64, 4, 3)],
        32: [(64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 3, 168)],
        64: [(64, 64, 4, 3), (32, 64, 4, 3), (32, 64, 4, 2)],
        128: [(16, 128, 8, 2), (16, 64, 4, 3), (32, 128, 8, 1)],
    },
}
FAMILIES = ("shifted", "mixture")


def passes(family: str, hard: bool, shape: Shape) -> dict[str, Callable[[], Any]]:
    """The forward and the backward pass as functions without arguments, at half the heads."""
    from mgk.ops import triton as ours

    batch, heads, length, width, causal = shape
    heads //= 2

    def make(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    query, value, prior = (
        make(batch, heads, length, width),
        make(batch, heads, length, width),
        torch.zeros(heads, 2, device="cuda"),
    )
    if family == "shifted":
        shift = torch.randn(heads, 2, width, device="cuda")
        tensors: tuple[Any, ...] = (query, make(batch, heads, length, width), shift, value, prior, *[None] * 4)
        run, run_backward = ours.shifted_forward, ours.shifted_backward
    else:
        tensors = (query, make(batch, heads, 2, length, width), value, prior, *[None] * 5)
        run, run_backward = ours.mixture_forward, ours.mixture_backward
    options = width**0.5, hard, causal, 0.0, 0
    results = run(*tensors, *options)
    grad = torch.randn_like(results[0])
    return {
        "forward": lambda: run(*tensors, *options),
        "backward": lambda: run_backward(grad, *tensors, *results, *options),
    }


def exchange(family: str, kernel: str, tile: Candidate) -> str:
    """Let a kernel take this tile, and say which pass it is part of."""
    from mgk.ops.triton.tiles import Tile, override

    override.clear()
    override[family, kernel] = Tile(*tile)
    return "forward" if kernel.endswith("forward") else "backward"


def without_far_heads() -> None:
    """Leave out the launches for heads that reach far: a candidate would be compiled for them too, and not run."""
    ours: Any = importlib.import_module("mgk.ops.triton")
    every = ours.launch

    def near(kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        if constants.get("HEADS") != ours.FAR:
            every(kernel, grid, *args, **constants)

    if every.__name__ != "near":
        ours.launch = near


def compile_one(job: tuple[str, bool, Shape, str, Candidate]) -> None:
    family, hard, shape, kernel, tile = job
    try:
        without_far_heads()
        passes(family, hard, shape)[exchange(family, kernel, tile)]()
    except Exception:  # too large for the chip; it will fail again, in the open, when it is timed
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--e-steps", nargs="*", choices=("soft", "hard"), default=("soft",))
    parser.add_argument("--output", default="tune.json")
    options = parser.parse_args()
    groups = [(f, e == "hard", SHAPES[i]) for f in options.families for e in options.e_steps for i in options.shapes]
    jobs = [
        (*group, kernel, tile)
        for group in groups
        for (family, kernel), by_width in CANDIDATES.items()
        if family == group[0]
        for tile in by_width.get(group[2][3], [])
    ]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    without_far_heads()
    found: dict[str, list[tuple[float, Candidate]]] = {}
    for family, hard, shape in groups:
        work = passes(family, hard, shape)
        for (owner, kernel), by_width in CANDIDATES.items():
            if owner != family or shape[3] not in by_width:
                continue
            times = []
            for tile in by_width[shape[3]]:
                try:
                    times.append((graph_milliseconds(work[exchange(family, kernel, tile)], 1), tile))
                except Exception as error:
                    print(f"{family} {shape} {kernel} {tile}: {type(error).__name__}", flush=True)
            title = f"{family} {'hard' if hard else 'soft'} {shape} {kernel}"
            found[title] = sorted(times)
            print(title, "  ".join(f"{time:.4f} {tile}" for time, tile in found[title]), flush=True)
            Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
