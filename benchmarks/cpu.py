"""Time and memory of attention on the CPU; run by `python -m benchmarks.attention --device cpu`.

For every case (shape):

1. Every method, the baseline included, is checked against the dense formula in float64, outputs and gradients. A wrong
   result stops the run.
2. The peak memory of one call is measured, beyond the inputs.
3. The methods are called in turn, round after round. Each time is compared with the baseline of the same round, so that
   a machine that slows down affects both. The speed-up is the median of these ratios.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mgk.environment import environment
from mgk.files import write_json
from mgk.ops.measure import BASELINE, DIRECTIONS, MIXTURES, Case, Method, check, make_call, make_inputs, seconds
from mgk.tables import Table

CASES = {
    case.name: case
    for case in (
        Case("lra-1024", batch=4, heads=8, length=1024, width=32),
        Case("lra-2048", batch=2, heads=8, length=2048, width=32),
        Case("lra-4096", batch=1, heads=8, length=4096, width=32),
        Case("wikitext", batch=16, heads=8, length=256, width=16, is_causal=True),
        Case("wide", batch=1, heads=8, length=2048, width=64, is_causal=True),
        *(Case(f"short-{length}", batch=64, heads=4, length=length, width=32) for length in (16, 32, 64)),
    )
}
LEGEND = (
    "fwd: forward; f+b: forward and backward; speed: relative to sdpa in the same round; MiB: peak memory beyond the "
    "inputs; error: against the dense formula in float64"
)


@dataclass(frozen=True)
class Row:
    """One method on one case, in one direction."""

    case: Case
    method: str
    heads: int
    direction: str
    milliseconds: float  # median over the rounds
    speedup: float  # median over the rounds of the baseline's time divided by this one
    speedup_lowest: float
    speedup_highest: float
    extra_bytes: int | None  # peak memory beyond the inputs; None where the system cannot measure it
    error: float  # largest relative error against float64, output and gradients


def main(cases: Sequence[str], rounds: int, path: Path) -> None:
    """Measure the named cases, print a table of each and write the report."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None  # above 0.5, others use the cores too
    made_in = {**environment(), "device": cpu_model(), "load": load, "dtype": "float32", "rounds": rounds}
    rows: list[Row] = []
    for name in cases:
        print(f"{name} ...", flush=True)
        found = measure(CASES[name], rounds=rounds)
        print(table(found), flush=True)
        rows += found
    print(LEGEND)
    write_json(path, {"environment": made_in, "rows": [dataclasses.asdict(row) for row in rows]})


def measure(case: Case, methods: Sequence[Method] = MIXTURES, *, rounds: int = 5, impl: str = "auto") -> list[Row]:
    """Check every method on one case, then measure its memory and its time."""
    methods = [BASELINE, *methods]
    inputs = [make_inputs(case, method, device="cpu", dtype=torch.float32) for method in methods]
    errors = [check(case, method, each, impl) for method, each in zip(methods, inputs, strict=True)]
    rows = []
    for direction in DIRECTIONS:
        calls = [make_call(case, *pair, direction, impl) for pair in zip(methods, inputs, strict=True)]
        memory = [peak_bytes(call) for call in calls]
        times = [[seconds(call) for call in calls] for _ in range(rounds)]
        for index, method in enumerate(methods):
            ratios = [turn[0] / turn[index] for turn in times]
            rows.append(
                Row(
                    case=case,
                    method=method.name,
                    heads=inputs[index]["query"].shape[1],
                    direction=direction,
                    milliseconds=1e3 * statistics.median(turn[index] for turn in times),
                    speedup=statistics.median(ratios),
                    speedup_lowest=min(ratios),
                    speedup_highest=max(ratios),
                    extra_bytes=memory[index],
                    error=errors[index],
                )
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of one case, with both directions of a method in one line."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        memory = "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
        line = lines.setdefault(row.method, [row.method, str(row.heads)])
        line += [f"{row.milliseconds:.1f}", f"{row.speedup:.2f}x", memory]
        if row.direction == DIRECTIONS[-1]:
            line.append(f"{row.error:.0e}")
    header = ["method", "heads", "fwd ms", "speed", "MiB", "f+b ms", "speed", "MiB", "error"]
    case = rows[0].case
    return Table(header, list(lines.values()), f"{case.name}: B, H, N, D = {case.label}").markdown()


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Return how much a call raises the resident memory of this process at its peak; None on other systems than Linux.

    The kernel counts pages of 4 KiB that are written to. A first call pays for one-time allocations. Free memory that
    the C library keeps is returned to the system before the second call, which would otherwise reuse it uncounted.
    """
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not (status.exists() and clear.exists()):
        return None
    call()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return None
    trim(0)
    clear.write_text("5")  # resets the peak

    def read(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) * 1024

    before = read("VmRSS:")
    call()
    return max(0, read("VmHWM:") - before)


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
