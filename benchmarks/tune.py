"""Find the fastest tile sizes on this GPU: `python -m benchmarks.tune`. Copy the best into ops/dispatch.py by hand.

Worker processes first compile every candidate. Then a pass is timed with the tile of one kernel replaced and the others
as in the table, on the same tensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda import CASES, graph_milliseconds
from mgk.ops import dispatch
from mgk.ops.measure import Case
from mgk.ops.triton import launch_projected, launch_shifted, operators

Candidate = tuple[int, ...]  # queries, keys, warps, stages, and optionally the most registers per thread
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
    ("projected", "forward"): {
        16: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2)],
        32: [(128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2)],
        64: [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)],
        128: [(128, 64, 8, 3), (64, 64, 4, 3)],
    },
    ("projected", "query"): {
        16: [(64, 64, 4, 3), (128, 64, 4, 3)],
        32: [(64, 64, 4, 3), (64, 64, 4, 2)],
        64: [(64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
    },
    ("projected", "key"): {
        16: [(32, 64, 4, 3), (64, 64, 4, 3)],
        32: [(64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 3, 168)],
        64: [(64, 64, 4, 3), (32, 64, 4, 3), (32, 64, 4, 2)],
        128: [(16, 128, 8, 2), (16, 64, 4, 3), (32, 128, 8, 1)],
    },
}
FAMILIES = ("shifted", "projected")


def passes(family: str, hard: bool, case: Case) -> dict[str, Callable[[], Any]]:
    """Return the forward and the backward pass with half the heads, as functions without arguments."""
    batch, heads, length, width = case.batch, case.heads // 2, case.length, case.width

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
        run, run_backward = operators.shifted_forward, operators.shifted_backward
    else:
        tensors = (query, make(batch, heads, 2, length, width), None, value, prior, *[None] * 5)
        run, run_backward = operators.projected_forward, operators.projected_backward
    options = width**0.5, hard, case.is_causal, 0.0, 0
    results = run(*tensors, *options)
    grad = torch.randn_like(results[0])
    return {
        "forward": lambda: run(*tensors, *options),
        "backward": lambda: run_backward(grad, *tensors, *results, *options),
    }


def exchange(family: str, kernel: str, tile: Candidate) -> str:
    """Let a kernel use this tile, and return the pass that the kernel belongs to."""
    dispatch.override.clear()
    dispatch.override[family, kernel] = dispatch.Tile(*tile)
    dispatch.plan.cache_clear()
    return "forward" if kernel.endswith("forward") else "backward"


def skip_overflowing_heads() -> None:
    """Skip the launches for heads that would overflow: their kernels would be compiled too, but do nothing."""
    for launcher in (launch_shifted, launch_projected):
        every: Any = vars(launcher)["launch"]

        def fitting(kernel: Any, grid: tuple[int, ...], /, *args: Any, every: Any = every, **constants: Any) -> None:
            if not any(each.HEADS.value == dispatch.OVERFLOWING for each in args if hasattr(each, "HEADS")):
                every(kernel, grid, *args, **constants)

        if every.__name__ != "fitting":
            vars(launcher)["launch"] = fitting


def compile_one(job: tuple[str, bool, Case, str, Candidate]) -> None:
    """Compile the kernels of a pass with one tile replaced."""
    family, hard, case, kernel, tile = job
    try:
        skip_overflowing_heads()
        passes(family, hard, case)[exchange(family, kernel, tile)]()
    except Exception:  # too large for this GPU; the error is reported when it is timed
        return


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(CASES))), help="indices in cuda.CASES")
    parser.add_argument("--e-steps", nargs="*", choices=("soft", "hard"), default=("soft",))
    parser.add_argument("--output", default="tune.json")
    options = parser.parse_args()
    groups = [(f, e == "hard", CASES[i]) for f in options.families for e in options.e_steps for i in options.shapes]
    jobs = [
        (*group, kernel, tile)
        for group in groups
        for (family, kernel), by_width in CANDIDATES.items()
        if family == group[0]
        for tile in by_width.get(group[2].width, [])
    ]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    skip_overflowing_heads()
    found: dict[str, list[tuple[float, Candidate]]] = {}
    for family, hard, case in groups:
        work = passes(family, hard, case)
        for (owner, kernel), by_width in CANDIDATES.items():
            if owner != family or case.width not in by_width:
                continue
            times = []
            for tile in by_width[case.width]:
                try:
                    times.append((graph_milliseconds(work[exchange(family, kernel, tile)], 1), tile))
                except Exception as error:
                    print(f"{family} {case.label} {kernel} {tile}: {type(error).__name__}", flush=True)
            title = f"{family} {'hard' if hard else 'soft'} {case.label} {kernel}"
            found[title] = sorted(times)
            print(title, "  ".join(f"{time:.4f} {tile}" for time, tile in found[title]), flush=True)
            Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
