"""Attention on one GPU, against the fastest backend of SDPA; run by `python -m benchmarks.attention --device cuda`.

Both sides are replayed from CUDA graphs, so that launches do not count; the speed-up of eager calls is reported too.
Nothing is timed before its error has been compared with that of the formula in bfloat16. Needs only torch, Triton and
safetensors.

B batch, H heads of the baseline (a mixture has half), N positions, D width of a head.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import mgk
from mgk.environment import environment
from mgk.files import write_json, write_text
from mgk.nn import MixtureAttention
from mgk.ops import measure
from mgk.ops.measure import BACKENDS, BASELINE, MIXTURES, Case, Method, capture, cuda_milliseconds
from mgk.tables import Table

CASES = (
    Case("lra-4096", batch=32, heads=8, length=4096, width=32),
    Case("wikitext", batch=96, heads=8, length=256, width=16, is_causal=True),
    Case("wide", batch=8, heads=16, length=4096, width=64),
    Case("long", batch=4, heads=16, length=8192, width=64, is_causal=True),
    Case("long-wide", batch=4, heads=16, length=8192, width=128, is_causal=True),
)
LENGTHS = (4096, 8192, 16384, 32768, 65536)
CACHE = Case("cache", batch=16, heads=16, length=32768, width=64)
DEVICE, DTYPE = "cuda", torch.bfloat16
# Rates of an H200, as measured: exponentials and bf16 products per second, bytes per second of a copy.
LIMITS = {"exponentials": 132 * 16 * 1.83e9, "products": 790e12, "bytes": 4.3e12}


def inputs_of(case: Case, method: Method, std: float = 1.0) -> dict[str, Tensor]:
    return measure.make_inputs(case, method, device=DEVICE, dtype=DTYPE, std=std)


def attend(case: Case, method: Method, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    return measure.attend(method, inputs, is_causal=case.is_causal, **options)


def attend_and_grad(
    case: Case, method: Method, inputs: dict[str, Tensor], grad: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs."""
    output = attend(case, method, inputs, **options)
    return {"output": output, **measure.gradients(output, inputs, grad)}


def graph_milliseconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Return the time of a replay of the work's CUDA graph."""
    return cuda_milliseconds(capture(work), rounds)


def shape_of(case: Case) -> tuple[int, int, int, int, bool]:
    """Return B, H, N, D and whether the case is causal, as the JSON file has them."""
    return dataclasses.astuple(case)[1:]


def compile_kernels(job: tuple[Case, Method]) -> None:
    """Compile the kernels of a job in a process of its own; the timing process then finds them on disk."""
    inputs = inputs_of(*job)
    attend_and_grad(*job, inputs, torch.randn_like(inputs["value"]))


def error(case: Case, method: Method, std: float = 1.0) -> dict[str, float]:
    """Return the relative error against float64 of output and gradients, divided by that of eager bfloat16 code."""
    small = Case(case.name, 1, 4, min(512, case.length), case.width, case.is_causal)
    inputs = inputs_of(small, method, std)
    grad = torch.randn_like(inputs["value"])
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    expected = attend_and_grad(small, method, exact, grad.double(), impl="reference")
    found = attend_and_grad(small, method, inputs, grad)
    eager = eager_low_precision(small, method, inputs, grad)
    result = {}
    for name, want in expected.items():
        if name != "log_prior":  # a sum over all pairs that cancels: tests compare it with the size of its terms
            norm = want.detach().norm() + 1e-30
            ours, theirs = ((each[name] - want).detach().norm() / norm for each in (found, eager))
            result[name] = float(ours / (theirs + 1e-4))
    return result


def eager_low_precision(case: Case, method: Method, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Compute the formula as one would write it in bfloat16."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    if method.operator == "smgk":
        key = key[:, :, None] + leaves["shift"].to(DTYPE)[None, :, :, None]
    s2 = query.shape[-1] ** 0.5
    scores = (query[:, :, None] @ key.mT - key.square().sum(-1)[..., None, :] / 2) / s2
    if method.e_step == "soft":
        scores = (scores + leaves["log_prior"].to(DTYPE)[None, :, :, None, None]).logsumexp(2)
    else:
        scores = scores.amax(2)
    if case.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    output = scores.softmax(-1) @ value
    return {"output": output, **measure.gradients(output, leaves, grad)}


def measure_one(case: Case, method: Method) -> dict[str, float]:
    """Return the milliseconds of both directions, from graphs and eagerly, and the peak memory beyond the inputs."""
    torch.cuda.empty_cache()
    inputs = inputs_of(case, method)
    grad = torch.randn_like(inputs["value"])

    def train() -> dict[str, Tensor]:
        return attend_and_grad(case, method, inputs, grad)

    with torch.no_grad():
        result = {"forward": graph_milliseconds(lambda: attend(case, method, inputs))}
    return result | {
        "train": graph_milliseconds(train), "eager_train": cuda_milliseconds(train), "peak_mib": peak_mib(train),
    }  # fmt: skip


def peak_mib(work: Callable[[], object]) -> float:
    """Return how much memory a call needs at its peak beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def each_backend(what: str, work: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of `work` with every SDPA backend that supports it."""
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = work()
        except RuntimeError as reason:
            print(f"{name}, {what}: {str(reason).splitlines()[0]}", flush=True)
    return found


def operators() -> list[dict[str, Any]]:
    """Compare every mixture with the best backend on every case. A wrong result is not timed."""
    jobs = [(case, method) for case in CASES for method in MIXTURES]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        pool.map(compile_kernels, jobs, chunksize=1)
    rows = []
    for case in CASES:
        baseline = each_backend(case.label, lambda: measure_one(case, BASELINE))  # noqa: B023
        rows += [compare(case, method, baseline) for method in MIXTURES]
    return rows


def compare(case: Case, method: Method, baseline: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return errors, times and speed-ups of one mixture on one case."""
    row: dict[str, Any] = {"shape": shape_of(case), "method": method.name, "error": error(case, method)}
    wrong = {name: value for name, value in row["error"].items() if not value <= 2}
    if wrong:
        print(f"{case.label} {method.name}: not timed, error over twice that of eager bfloat16: {wrong}", flush=True)
        return row
    ours = measure_one(case, method)
    best = {name: min(times[name] for times in baseline.values()) for name in ours}
    row |= {
        "milliseconds": ours,
        "baseline": baseline,
        "speedup": {name: best[name] / ours[name] for name in ("forward", "train", "eager_train")},
        "memory": ours["peak_mib"] / best["peak_mib"],
        "of_the_limit": {
            name: max(least_milliseconds(case, method, name == "train").values()) / ours[name]
            for name in ("forward", "train")
        },
    }
    print(case.label, method.name, {name: f"{value:.2f}x" for name, value in row["speedup"].items()}, flush=True)
    return row


def least_milliseconds(case: Case, method: Method, train: bool) -> dict[str, float]:
    """Return the least time that exponentials, products and memory allow our algorithm; the largest one is the limit.

    Exponentials: one per pair, M for soft MGK. The backward pass computes them twice, once by rows and once by columns.
    """
    pairs = case.batch * case.heads / 2 * case.length**2 / (2 if case.is_causal else 1)
    score = 2 if method.operator == "mgk" else 1  # score products, and their gradients, of each component
    products, exponentials = 2 * case.width * (score + 1), score if method.e_step == "soft" else 1
    tensors = 3 + score
    if train:
        products += 2 * case.width * (2 * score + 1) + 2 * case.width * (2 * score + 2)
        exponentials *= 3
        tensors *= 3
    moved = tensors * case.batch * case.heads / 2 * case.length * case.width * 2
    counts = {"exponentials": pairs * exponentials, "products": pairs * products, "bytes": moved}
    return {name: 1e3 * count / LIMITS[name] for name, count in counts.items()}


def numerics() -> dict[str, dict[str, float]]:
    """Return the error relative to eager bfloat16 for inputs of standard deviation 1, 6 and 30; the limit is 2."""
    case = Case("numerics", batch=1, heads=4, length=512, width=64, is_causal=True)
    return {f"{method.name} std {std:g}": error(case, method, std) for std in (1.0, 6.0, 30.0) for method in MIXTURES}


def decode() -> dict[str, Any]:
    """Time one query against a long cache."""

    def milliseconds(method: Method) -> float:
        inputs = inputs_of(CACHE, method)
        inputs["query"] = inputs["query"][:, :, -1:].contiguous()
        causal = method != BASELINE  # SDPA aligns the causal mask upper-left, and one query would see one key
        return graph_milliseconds(lambda: measure.attend(method, inputs, is_causal=causal))

    with torch.no_grad():
        backends = each_backend("one query", lambda: milliseconds(BASELINE))
        ours = {method.name: milliseconds(method) for method in MIXTURES}
    best = min(backends.values())
    return {
        "shape": (*shape_of(CACHE)[:4], True),
        "milliseconds": {f"sdpa {name}": value for name, value in backends.items()} | ours,
        "speedup": {name: best / value for name, value in ours.items()},
    }


def m_step() -> dict[str, float]:
    """Return the milliseconds of the M-step for the priors and of a forward pass with the same inputs."""
    result = {}
    for operator in ("smgk", "mgk"):
        method = Method(operator)
        inputs = {name: tensor.detach() for name, tensor in inputs_of(CASES[0], method).items()}
        without_value: Any = {name: tensor for name, tensor in inputs.items() if name != "value"}
        result[f"{operator} M-step"] = graph_milliseconds(lambda: mgk.update_prior(**without_value))  # noqa: B023
        with torch.no_grad():
            result[f"{operator} forward"] = graph_milliseconds(lambda: attend(CASES[0], method, inputs))  # noqa: B023
    return result


def padded() -> dict[str, float]:
    """Compare a batch with lengths like those of IMDb's reviews with the same batch without padding."""
    case, method = CASES[0], Method("smgk")
    inputs = inputs_of(case, method)
    grad = torch.randn_like(inputs["value"])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(case.batch).log_normal_(7.0, 0.65, generator=generator).clamp(100, case.length).long()
    lengths = (lengths.double() * (case.batch * case.length / 2 / lengths.sum())).clamp(max=case.length).long()
    mask = (torch.arange(case.length)[None] < lengths[:, None]).to(DEVICE)  # about half of it is padding
    masks = {"key_mask": mask, "query_mask": mask}
    full = graph_milliseconds(lambda: attend_and_grad(case, method, inputs, grad))
    short = graph_milliseconds(lambda: attend_and_grad(case, method, inputs, grad, **masks))
    share = float(mask.float().mean())
    return {"share of real tokens": share, "whole": full, "padded": short, "speedup": full / short}


def growth() -> dict[str, dict[str, float]]:
    """Return milliseconds forward+backward per 2^15 tokens as N grows, softmax with 16 heads and mixtures with 8."""
    result = {}
    for length in LENGTHS:
        case = Case("growth", max(1, 2**15 // length), 16, length, 64)
        times = {}
        for name in ("flash", "cudnn", "smgk", "mgk"):
            torch.cuda.empty_cache()
            method = BASELINE if name in BACKENDS else Method(name)
            inputs = inputs_of(case, method)
            grad = torch.randn_like(inputs["value"])
            with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
                milliseconds = cuda_milliseconds(lambda: attend_and_grad(case, method, inputs, grad), 1)  # noqa: B023
            times[name] = milliseconds * 2**15 / (case.batch * length)
        result[str(length)] = times
    return result


def modules() -> list[dict[str, Any]]:
    """Compare attention layers, projections included: sMGK with half the heads and softmax with all of them."""
    rows = []
    for case in CASES:
        times = {variant: module_times(case, variant) for variant in ("softmax", "smgk")}
        speedup = {name: times["softmax"][name] / ours for name, ours in times["smgk"].items()}
        rows.append({"shape": shape_of(case), "milliseconds": times, "speedup": speedup})
        print("module", case.label, speedup, flush=True)
    return rows


def module_times(case: Case, variant: str) -> dict[str, float]:
    """Return milliseconds forward+backward of an attention layer, eager and compiled, with and without CUDA graphs."""
    torch.cuda.empty_cache()
    torch._dynamo.reset()  # every shape compiles the same code again, and Dynamo stops after eight times
    heads, width = case.heads if variant == "softmax" else case.heads // 2, case.heads * case.width
    layer = MixtureAttention(width, heads, variant=variant, head_dim=case.width, causal=case.is_causal)
    layer = layer.to(DEVICE, DTYPE)
    x = torch.randn(case.batch, case.length, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    grad, leaves = torch.randn_like(x), [x, *layer.parameters()]
    times: dict[str, float] = {}
    for name, module in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        train = lambda: torch.autograd.grad(module(x)[0], leaves, grad)  # noqa: B023, E731
        times |= {name: cuda_milliseconds(train), f"{name}, graph": graph_milliseconds(train)}
    return times


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the speed-ups forward+backward (forward) as Markdown."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        speed = row.get("speedup")
        text = f"{speed['train']:.2f} ({speed['forward']:.2f})" if speed else "-"
        lines.setdefault(Case("", *row["shape"]).label, {})[row["method"]] = text
    names = [method.name for method in MIXTURES]
    body = [[label, *(cells.get(name, "-") for name in names)] for label, cells in lines.items()]
    return Table(["B, H, N, D", *names], body).markdown()


PARTS: dict[str, Callable[[], Any]] = {
    "operators": operators,
    "decode": decode,
    "numerics": numerics,
    "padded": padded,
    "growth": growth,
    "m_step": m_step,
    "modules": modules,
}


def main(parts: Sequence[str], path: Path) -> None:
    """Measure the named parts. The file is written after each, so that an error later loses nothing."""
    result: dict[str, Any] = {"environment": {**environment(), "dtype": str(DTYPE).removeprefix("torch.")}}
    for name in parts:
        result[name] = PARTS[name]()
        print(table(result[name]) if name == "operators" else f"{name} {result[name]}", flush=True)
        write_json(path, result)
    if "operators" in result:
        write_text(path.with_suffix(".md"), table(result["operators"]))
