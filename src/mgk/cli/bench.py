"""`mgk bench`: what mixture attention with half the heads gains on this machine.

B batch, H heads of the baseline, N positions, D width of a head.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch.nn.attention import sdpa_kernel

from mgk.environment import environment
from mgk.files import write_json
from mgk.ops import dispatch, measure
from mgk.ops.common import dtype_name
from mgk.ops.measure import BACKENDS, BASELINE, DIRECTIONS, MIXTURES, Case, Method, WrongResultError, make_call
from mgk.tables import Table
from mgk.variants import LABELS

SHAPES = {
    "cpu": ("1,8,4096,32", "4,8,1024,32", "16,8,256,16,causal", "1,8,2048,64,causal", "64,4,64,32"),
    "cuda": ("4,16,8192,64,causal", "32,8,4096,32", "32,8,1024,32", "96,8,256,16,causal"),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One method on one shape. Times are medians over the rounds; a wrong result has none."""

    case: Case
    method: str
    heads: int
    error: float | str
    """The largest relative error against float64, or why the result is wrong."""
    milliseconds: dict[str, float]
    speedup: dict[str, float]
    """Median over the rounds of the baseline's time divided by this method's, by direction."""


def bench(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    shapes: tuple[str, ...] = (),
    rounds: int = 5,
    output: Path | None = None,
    plan: bool = False,
    gpu: str = "",
) -> None:
    """Measure what you gain on this machine: MGK and sMGK with half the heads against PyTorch with all of them.

    Times attention alone, forward and forward+backward, in float32 on a CPU and in bfloat16 on a GPU. The baseline is
    scaled_dot_product_attention; on a GPU, its fastest backend, and both sides run from CUDA graphs. Every result is
    first checked against the float64 reference, and a wrong one is not timed. All methods run once per round, and a
    speed-up is the median over the rounds of the ratio of times within a round.

    For memory, decoding and more shapes, run `python -m benchmarks.attention` from a checkout.

    In Python: `from mgk.cli.bench import compare, parse`, then `compare(parse("4,8,1024,32"), "cpu", rounds=5)`.

    Args:
        device: what to measure; auto is cuda if there is a GPU.
        shapes: B,H,N,D[,causal] of each problem, e.g. `4,8,1024,32 16,8,256,16,causal`; H is the number of heads of
            the baseline. A few of different lengths if not given.
        rounds: how many times each method is timed.
        output: JSON file for all numbers, with the machine, the versions and the commit. Not written if not given.
        plan: time nothing; print which kernels and tiles each call gets on this machine, and why.
        gpu: with --plan, the compute capability of another GPU, e.g. 8.0 (A100), 8.9 (RTX 4090) or 9.0 (H100).
    """
    if rounds < 1:
        raise ValueError(f"--rounds: expected at least 1, got {rounds}")
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if device == "cuda" and not has_gpu and not gpu:
        raise ValueError("--device: expected a machine with a CUDA GPU for cuda, found none")
    cases = [parse(shape) for shape in shapes or SHAPES["cuda" if gpu else device]]
    if plan:
        print("\n".join(plans(cases, device, gpu)))
        return
    made_in = environment()
    rows = [row for case in cases for row in compare(case, device, rounds=rounds)]
    print(table(rows))
    machine = made_in["gpu"] if device == "cuda" else f"{made_in['machine']}, threads: {made_in['threads']}"
    print(f"{machine}; torch {torch.__version__}; {DTYPES[device]}; mgk commit {made_in['commit']}\n")
    print(conclusion(rows))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        found = {"device": device, "rounds": rounds, "rows": [dataclasses.asdict(row) for row in rows]}
        write_json(output, {"environment": made_in} | found)
    if wrong := [row.error for row in rows if isinstance(row.error, str)]:
        raise WrongResultError(wrong[0])


def plans(cases: list[Case], device: str, gpu: str) -> list[str]:
    """What every case gets, line by line; `gpu` is the compute capability of a GPU that need not be there."""
    major, _, minor = gpu.partition(".")
    if gpu and not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"--gpu: expected a compute capability, e.g. 8.0, got {gpu!r}")
    capability = (int(major), int(minor)) if gpu else None
    if device == "cuda" and not gpu:
        capability = torch.cuda.get_device_capability()
    triton = find_spec("triton") is not None
    version = tuple(int(part) for part in metadata.version("triton").split(".")[:2]) if triton else ()
    lines = []
    if capability is not None and triton:
        known = ", ".join(".".join(map(str, each)) for each in dispatch.GLUON_VERSIONS)
        lines.append(
            f"Triton {metadata.version('triton')}; the kernels for Hopper GPUs (9.0) run with Triton {known}, and with "
            "a newer one if a small call, checked once per process, is right"
        )
    for case in cases:
        for family, label in (("shifted", "sMGK"), ("projected", "MGK")):
            call = dispatch.Call(
                family=family, dtype=dtype_name(DTYPES["cuda" if capability else device]),
                device="cuda" if capability else device, capability=capability, triton=triton or bool(gpu),
                gluon=version >= dispatch.GLUON_VERSIONS[0], queries=case.length, keys=case.length, width=case.width,
                value_width=case.width,
            )  # fmt: skip
            lines.append(f"{label}, {case.label}, {call.dtype}:")
            lines += [f"  {name:16}{text}" for name, text in dispatch.describe(call)]
    return lines


def parse(shape: str) -> Case:
    """Convert "B,H,N,D" or "B,H,N,D,causal" to a case."""
    *sizes, end = shape.split(",")
    causal = end == "causal"
    try:
        batch, heads, length, width = map(int, sizes if causal else [*sizes, end])
    except ValueError:
        raise ValueError(f"--shapes: expected B,H,N,D or B,H,N,D,causal, got {shape!r}") from None
    return Case(shape, batch, heads, length, width, causal)


def compare(case: Case, device: str, *, rounds: int) -> list[Row]:
    """Check and time every mixture and the baseline on one problem. The methods alternate within a round."""
    inputs: dict[Method, dict[str, torch.Tensor]] = {}
    errors: dict[Method, float | str] = {}
    for method in (BASELINE, *MIXTURES):
        inputs[method] = measure.make_inputs(case, method, device=device, dtype=DTYPES[device])
        try:
            errors[method] = measure.check(case, method, inputs[method])
        except WrongResultError as error:
            if method == BASELINE:
                raise
            errors[method] = str(error)
    milliseconds: dict[Method, dict[str, float]] = {method: {} for method in inputs}
    speedup: dict[Method, dict[str, float]] = {method: {} for method in inputs}
    for direction in DIRECTIONS:
        works = {
            method: prepare(make_call(case, method, inputs[method], direction), device, method)
            for method in inputs
            if not isinstance(errors[method], str)
        }
        times = [
            {method: min(milliseconds_of(work, device) for work in each) for method, each in works.items()}
            for _ in range(rounds)
        ]
        for method in works:
            milliseconds[method][direction] = statistics.median(each[method] for each in times)
            speedup[method][direction] = statistics.median(each[BASELINE] / each[method] for each in times)
    heads = {method: inputs[method]["query"].shape[1] for method in inputs}
    return [
        Row(case, method.name, heads[method], errors[method], milliseconds[method], speedup[method])
        for method in inputs
    ]


def prepare(work: Callable[[], object], device: str, method: Method) -> list[Callable[[], object]]:
    """Return what is timed of a method, warmed up: on a GPU a CUDA graph, for the baseline one per backend."""
    if device == "cpu":
        work()
        return [work]
    if method != BASELINE:
        return [measure.capture(work)]
    found: list[Callable[[], object]] = []
    for backend in BACKENDS.values():
        try:
            with sdpa_kernel(backend):
                found.append(measure.capture(work))
        except RuntimeError:  # a backend that does not support this shape
            continue
    return found or [measure.capture(work)]


def milliseconds_of(work: Callable[[], object], device: str) -> float:
    """Return the time of a call."""
    return 1e3 * measure.seconds(work) if device == "cpu" else measure.cuda_milliseconds(work, rounds=1)


def table(rows: list[Row]) -> str:
    """Return the Markdown table."""
    header = ["B, H, N, D", "method", "heads"]
    for direction in DIRECTIONS:
        header += [f"{direction} ms", "speed"]
    lines = []
    for row in rows:
        line = [row.case.label, row.method, str(row.heads)]
        for direction in DIRECTIONS:
            time = row.milliseconds.get(direction)
            speed = row.speedup.get(direction)
            line += [
                "-" if time is None else f"{time:,.{1 if time >= 10 else 3}f}",
                "-" if speed is None else f"{speed:.2f}x",
            ]
        lines.append([*line, "wrong" if isinstance(row.error, str) else f"{row.error:.0e}"])
    return Table([*header, "error"], lines).markdown()


def conclusion(rows: list[Row]) -> str:
    """Return one sentence on the speed of the soft mixtures, forward+backward."""
    parts = []
    for operator in ("smgk", "mgk"):
        timed = [row for row in rows if row.method == f"{operator} soft" and row.speedup]
        speeds = [(f"{row.speedup[DIRECTIONS[1]]:.1f}x", f"at {row.case.length:,}") for row in timed]
        if speeds:
            (first, where), *others = speeds
            text = (
                f"{LABELS[operator]} with half the heads is {first} as fast as PyTorch with all heads {where} positions"
            )
            parts.append(", ".join([text, *(" ".join(other) for other in others)]))
    return f"On this machine, forward and backward, {'; '.join(parts)}." if parts else "No result was correct."
