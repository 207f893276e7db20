"""Attention on one GPU, against softmax; run by `python -m benchmarks.attention --device cuda`.

Operators are compared in `benchmarks.operators`; here are decoding, padding, the M-step, growth with N and attention
layers. Both sides are replayed from CUDA graphs. Needs only torch, Triton and safetensors; FlashAttention-4 is measured
where it is installed.

B batch, H heads of the baseline (a mixture has half), N positions, D width of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

import mgk
from benchmarks import first_call, serving
from benchmarks.operators import attend_and_grad, calls, error, explain, inputs_of, measure_problems, table
from benchmarks.problems import CASES as CASES
from benchmarks.problems import DECODER as DECODER
from benchmarks.problems import VARIATIONS, Problem
from mgk.environment import environment
from mgk.files import write_json, write_text
from mgk.nn import MixtureAttention
from mgk.ops import measure
from mgk.ops.measure import BACKENDS, BASELINE, MIXTURES, Method, capture, cuda_milliseconds

LENGTHS = (4096, 8192, 16384, 32768, 65536)
CACHE = Problem("cache", 16, 16, 32768, 64)
DEVICE = "cuda"
PROBLEMS = {"operators": CASES, "variations": VARIATIONS, "decoder": DECODER}


def graph_milliseconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Return the time of a replay of the work's CUDA graph."""
    return cuda_milliseconds(capture(work), rounds)


def each_backend(what: str, work: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of `work` with every SDPA backend that supports it."""
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = work()
        except RuntimeError as reason:
            print(f"{name}, {what}: {explain(reason)}", flush=True)
    return found


def numerics() -> dict[str, dict[str, float]]:
    """Return the error relative to eager bfloat16 for inputs of standard deviation 1, 6 and 30; the limit is 2."""
    case = Problem("numerics", batch=1, heads=4, length=512, width=64, is_causal=True)
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
        "shape": (*CACHE.shape[:4], True),
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
            result[f"{operator} forward"] = graph_milliseconds(lambda: measure.attend(method, inputs, is_causal=False))  # noqa: B023
    return result


def padded() -> dict[str, float]:
    """Compare a batch with lengths like those of IMDb's reviews with the same batch without padding."""
    whole, method = CASES[0], Method("smgk")
    half = dataclasses.replace(whole, padded=True)
    full, short = (graph_milliseconds(calls(problem, method)["train"]) for problem in (whole, half))
    share = float(half.lengths.sum()) / (half.batch * half.length)
    return {"share of real tokens": share, "whole": full, "padded": short, "speedup": full / short}


def growth() -> dict[str, dict[str, float]]:
    """Return milliseconds forward+backward per 2^15 tokens as N grows, softmax with 16 heads and mixtures with 8."""
    result = {}
    for length in LENGTHS:
        case = Problem("growth", max(1, 2**15 // length), 16, length, 64)
        times = {}
        for name in ("flash", "cudnn", "smgk", "mgk"):
            torch.cuda.empty_cache()
            method = BASELINE if name in BACKENDS else Method(name)
            inputs = inputs_of(case, method)
            grad = torch.randn_like(inputs["value"])
            with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
                milliseconds = cuda_milliseconds(lambda: attend_and_grad(method, inputs, grad, is_causal=False), 1)  # noqa: B023
            times[name] = milliseconds * 2**15 / (case.batch * length)
        result[str(length)] = times
    return result


def modules() -> list[dict[str, Any]]:
    """Compare attention layers, projections included: sMGK with half the heads and softmax with all of them."""
    rows = []
    for case in CASES:
        times = {variant: module_times(case, variant) for variant in ("softmax", "smgk")}
        speedup = {name: times["softmax"][name] / ours for name, ours in times["smgk"].items()}
        rows.append({"shape": case.shape, "milliseconds": times, "speedup": speedup})
        print("module", case.label, speedup, flush=True)
    return rows


def module_times(case: Problem, variant: str) -> dict[str, float]:
    """Return milliseconds forward+backward of an attention layer, eager and compiled, with and without CUDA graphs."""
    torch.cuda.empty_cache()
    torch._dynamo.reset()  # every shape compiles the same code again, and Dynamo stops after eight times
    heads, width = case.heads if variant == "softmax" else case.heads // 2, case.heads * case.width
    layer = MixtureAttention(width, heads, variant=variant, head_dim=case.width, causal=case.is_causal)
    layer = layer.to(DEVICE, case.torch_dtype)
    x = torch.randn(case.batch, case.length, width, device=DEVICE, dtype=case.torch_dtype, requires_grad=True)
    grad, leaves = torch.randn_like(x), [x, *layer.parameters()]
    times: dict[str, float] = {}
    for name, module in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        train = lambda: torch.autograd.grad(module(x)[0], leaves, grad)  # noqa: B023, E731
        times |= {name: cuda_milliseconds(train), f"{name}, graph": graph_milliseconds(train)}
    return times


PARTS: dict[str, Callable[..., Any]] = {
    **{name: partial(measure_problems, problems) for name, problems in PROBLEMS.items()},
    "compile_time": first_call.compile_times,
    "decode": decode,
    "serving": serving.measure_serving,
    "numerics": numerics,
    "padded": padded,
    "growth": growth,
    "m_step": m_step,
    "modules": modules,
}


def window_speedup(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast as full causal attention of the same model a window is, where both were measured."""
    times = {(row["case"], row["method"]): row["milliseconds"] for row in rows if "milliseconds" in row}
    return {
        method: {kind: whole[kind] / times["window", method][kind] for kind in ("forward", "train")}
        for (case, method), whole in times.items()
        if case == "no-window" and ("window", method) in times
    }


def versions() -> dict[str, str]:
    """The versions of what softmax is computed with, beside PyTorch."""
    found = {"cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    for name in ("flash-attn-4", "nvidia-cutlass-dsl"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(parts: Sequence[str], path: Path, cases: Sequence[str] = (), anchors: Sequence[str] = ()) -> None:
    """Measure the named parts. The file is written after each, so that an error later loses nothing."""
    made_in = {**environment(), "dtype": "bfloat16"}  # unless a row says otherwise
    made_in["versions"] |= versions()
    result: dict[str, Any] = {"environment": made_in}
    tables = ""
    for name in parts:
        selection = {"cases": cases, "anchors": anchors} if name in PROBLEMS else {}
        result[name] = PARTS[name](**selection)
        if speedup := window_speedup(result[name]) if name == "decoder" else {}:
            result["window over full causal"] = speedup
            print("window over full causal", speedup, flush=True)
        if name in PROBLEMS:
            tables += table(result[name]) + "\n"
        else:
            print(name, result[name], flush=True)
        write_json(path, result)
    if tables:
        print(tables)
        write_text(path.with_suffix(".md"), tables)
