"""Find the fastest tile sizes on this GPU: `python -m benchmarks.tune`. Copy the best into ops/dispatch.py by hand.

Worker processes first compile every candidate, and leave out those that spill registers or need too much shared memory.
Then a pass is timed with the tile of one kernel replaced and the others as `mgk.ops.dispatch` chooses them, on the same
tensors. The tile that it chooses now is always among the candidates and is marked with a star.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mgk.ops import dispatch, tiles
from mgk.ops.common import capability
from mgk.ops.dispatch import PASSES, Call
from mgk.ops.measure import capture, cuda_milliseconds
from mgk.ops.tiles import Tile
from mgk.ops.triton import launch_projected, launch_shifted, operators
from mgk.ops.triton.launch import launch

FAMILIES = ("shifted", "projected")


class Problem(NamedTuple):
    """B batch, H heads, N positions, D width of a head and a value, M components."""

    family: str
    dtype: str
    hard: bool
    width: int
    components: int
    batch: int
    heads: int
    length: int
    causal: bool

    @property
    def label(self) -> str:
        size = f"B {self.batch} H {self.heads} N {self.length} D {self.width} M {self.components}"
        return f"{self.family} {'hard' if self.hard else 'soft'} {self.dtype} {size}{' causal' if self.causal else ''}"

    @property
    def call(self) -> Call:
        return Call(
            family=self.family, dtype=self.dtype, capability=capability(torch.device("cuda")), queries=self.length,
            keys=self.length, width=self.width, value_width=self.width, components=self.components, hard=self.hard,
        )  # fmt: skip


Job = tuple[Problem, str, Tile]


def passes(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Return the forward and the backward pass as functions without arguments."""
    batch, heads, length, width, components = (
        problem.batch, problem.heads, problem.length, problem.width, problem.components
    )  # fmt: skip

    def make(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=getattr(torch, problem.dtype))

    query, value = make(batch, heads, length, width), make(batch, heads, length, width)
    prior = torch.zeros(heads, components, device="cuda")
    if problem.family == "shifted":
        shift = torch.randn(heads, components, width, device="cuda")
        tensors: tuple[Any, ...] = (query, make(batch, heads, length, width), shift, value, prior, *[None] * 5)
        run, run_backward = operators.shifted_forward, operators.shifted_backward
    else:
        tensors = (query, make(batch, heads, components, length, width), None, value, prior, *[None] * 6)
        run, run_backward = operators.projected_forward, operators.projected_backward
    options = width**0.5, problem.hard, problem.causal, 0, 0.0, 0, 0, False
    results = run(*tensors, *options)
    grad = torch.randn_like(results[0])
    return {
        "forward": lambda: run(*tensors, *options),
        "backward": lambda: run_backward(grad, *tensors, results[0], *results[2:], None, *options),
    }


def candidates(problem: Problem, kind: str) -> list[Tile]:
    """Return the tiles that may fit by the estimates of `mgk.ops.dispatch`, which need not be exact."""
    shape = problem.call.shape
    limit = tiles.shared_memory(shape.capability, shape.hip)
    found = [dispatch.choose_tile(problem.family, kind, problem.call)]
    for outer, inner, warps, stages in product((128, 64, 32, 16), (128, 64, 32, 16), (4, 8), (1, 2, 3)):
        tile = Tile(*((inner, outer) if kind == "key" else (outer, inner)), warps, stages, tiles.MAX_REGISTERS)
        fits = tiles.registers(kind, tile, shape) <= 1.7 * tiles.REGISTERS
        if fits and tiles.shared_bytes(kind, tile, shape) <= 1.2 * limit and tile not in found:
            found.append(tile)
    return found


def exchange(problem: Problem, kernel: str, tile: Tile) -> str:
    """Let a kernel use this tile, and return the pass that the kernel belongs to."""
    dispatch.override.clear()
    dispatch.override[problem.family, kernel] = tile
    dispatch.plan.cache_clear()
    return "forward" if kernel == "forward" else "backward"


def replace_launch(new: Callable[..., None]) -> None:
    """Replace the launches of attention kernels, but not of those for heads that would overflow: these are skipped."""

    def fitting(kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        if not any(each.HEADS.value == dispatch.OVERFLOWING for each in args if hasattr(each, "HEADS")):
            new(kernel, grid, *args, **constants)

    for launcher in (launch_shifted, launch_projected):
        vars(launcher)["launch"] = fitting


def spilled(job: Job) -> int | None:
    """Compile the kernels of a pass with one tile replaced. Return the bytes that one spills; None if it cannot run."""
    problem, kernel, tile = job
    most = 0

    def compile_only(kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        nonlocal most
        compiled = kernel.warmup(*args, grid=grid, **constants)
        compiled._init_handles()
        if hasattr(compiled.metadata, "num_warps") and any(hasattr(each, "PATH") for each in args):
            chosen = next(each for each in args if hasattr(each, "PATH"))
            if (chosen.BM.value, chosen.BN.value) == (tile.queries, tile.keys):
                most = max(most, 4 * compiled.n_spills)

    try:
        replace_launch(compile_only)
        passes(problem._replace(batch=1, heads=1))[exchange(problem, kernel, tile)]()
    except Exception:  # too large for this GPU
        return None
    return most


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtypes", nargs="*", choices=dispatch.TRITON_DTYPES, default=("bfloat16",))
    parser.add_argument("--widths", nargs="*", type=int, default=(32, 64, 128))
    parser.add_argument("--components", nargs="*", type=int, default=(2,))
    parser.add_argument("--passes", nargs="*", choices=PASSES, default=PASSES)
    parser.add_argument("--e-steps", nargs="*", choices=("soft", "hard"), default=("soft",))
    parser.add_argument("--size", nargs=3, type=int, default=(4, 8, 4096), metavar=("B", "H", "N"))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 for float32")
    parser.add_argument("--best", type=int, default=4, help="how many tiles to print")
    parser.add_argument("--spilled", type=int, default=64, help="bytes per thread that a candidate may spill")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--output", default="tune.json")
    options = parser.parse_args()
    allow(options.tf32)
    problems = [
        Problem(family, dtype, step == "hard", width, components, *options.size, options.causal)  # type: ignore[call-arg]
        for family, dtype, step, width, components in product(
            options.families, options.dtypes, options.e_steps, options.widths, options.components
        )
    ]
    jobs = [(each, kind, tile) for each in problems for kind in options.passes for tile in candidates(each, kind)]
    with multiprocessing.get_context("spawn").Pool(options.processes, allow, (options.tf32,)) as pool:
        spills = dict(zip(jobs, pool.map(spilled, jobs, chunksize=1), strict=True))
    replace_launch(launch)
    found = {}
    for problem in problems:
        work = passes(problem)
        for kind in options.passes:
            now, times = dispatch.choose_tile(problem.family, kind, problem.call), []
            for tile in candidates(problem, kind):
                bytes_spilled = spills[problem, kind, tile]
                if tile == now or (bytes_spilled is not None and bytes_spilled <= options.spilled):
                    times.append((milliseconds(problem, kind, tile, work), tile, bytes_spilled))
            dispatch.override.clear()
            found[f"{problem.label} {kind}"] = sorted(times)
            print(f"{problem.label}, {kind}: {len(times)} of {len(candidates(problem, kind))} tiles fit")
            for place, (time, tile, bytes_spilled) in enumerate(sorted(times)):
                if place < options.best or tile == now:
                    print(
                        f"  {'*' if tile == now else ' '} {time:9.4f} ms  {tuple(tile)}  {bytes_spilled} bytes spilled"
                    )
            Path(options.output).write_text(json.dumps(found))


def allow(tf32: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


def milliseconds(problem: Problem, kind: str, tile: Tile, work: dict[str, Callable[[], Any]]) -> float:
    """Time a pass; a tile that cannot run takes forever."""
    try:
        return cuda_milliseconds(capture(work[exchange(problem, kind, tile)]), 1)
    except Exception as error:
        print(f"{problem.label} {kind} {tuple(tile)}: {type(error).__name__}", flush=True)
        return float("inf")


if __name__ == "__main__":
    main()
