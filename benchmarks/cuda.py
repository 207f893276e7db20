"""Mixture attention at half the heads against the best SDPA backend at all of them, on one GPU, in one run.

Both sides are replayed from CUDA graphs, so that launches do not count; the eager ratio stands beside. Nothing is timed
before it agreed with the float64 formula. Needs nothing but torch, Triton and safetensors, so that it runs on a bare
GPU machine: `python -m benchmarks.cuda`.

B batch, H heads of the baseline (a mixture has half), N positions, D width of a head.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mgk
from mgk.environment import commit
from mgk.files import write_json, write_text

Shape = tuple[int, int, int, int, bool]
SHAPES: tuple[Shape, ...] = (
    (32, 8, 4096, 32, False),
    (96, 8, 256, 16, True),
    (8, 16, 4096, 64, False),
    (4, 16, 8192, 64, True),
    (4, 16, 8192, 128, True),
)
METHODS = (("smgk", "soft"), ("smgk", "hard"), ("mgk", "soft"), ("mgk", "hard"))
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPE = torch.bfloat16
# An H200, as measured: exponentials and bf16 products per second, bytes per second of a copy.
LIMITS = {"exponentials": 132 * 16 * 1.83e9, "products": 790e12, "bytes": 4.3e12}


def inputs(kind: str, shape: Shape, heads: int, std: float = 1.0) -> dict[str, Tensor]:
    batch, _, length, width, _ = shape

    def make(*size: int) -> Tensor:
        return (std * torch.randn(size, device="cuda")).to(DTYPE).requires_grad_()

    result = {"query": make(batch, heads, length, width)}
    result["key"] = make(batch, heads, *([2] if kind == "mgk" else []), length, width)
    if kind == "smgk":
        result["shift"] = torch.randn(heads, 2, width, device="cuda", requires_grad=True)
    result["value"] = make(batch, heads, length, width)
    if kind != "sdpa":
        result["log_prior"] = torch.full((heads, 2), 0.5, device="cuda").log().requires_grad_()
    return result


def call(kind: str, e_step: str, shape: Shape, tensors: dict[str, Tensor], **options: Any) -> Tensor:
    if kind == "sdpa":
        return scaled_dot_product_attention(**tensors, is_causal=shape[-1])  # type: ignore[arg-type]
    operator = mgk.mgk_attention if kind == "mgk" else mgk.smgk_attention
    return operator(**tensors, e_step=e_step, is_causal=shape[-1], **options)  # type: ignore[arg-type]


def both(kind: str, e_step: str, shape: Shape, tensors: dict[str, Tensor], grad: Tensor, **options: Any) -> Any:
    output = call(kind, e_step, shape, tensors, **options)
    return output, *torch.autograd.grad(output, list(tensors.values()), grad)


def warm(job: tuple[str, str, Shape]) -> None:
    """Compile what a job needs, in a process of its own: the timing process then finds it on disk."""
    kind, e_step, shape = job
    tensors = inputs(kind, shape, shape[1] // 2)
    both(kind, e_step, shape, tensors, torch.randn_like(tensors["value"]))


def error(kind: str, e_step: str, shape: Shape, std: float = 1.0) -> dict[str, float]:
    """Relative error of values and gradients against float64, over that of the same formula in bfloat16, eagerly."""
    torch.manual_seed(0)
    small = (1, 2, min(512, shape[2]), *shape[3:])
    tensors = inputs(kind, small, 2, std)
    grad = torch.randn_like(tensors["value"])
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    wanted = both(kind, e_step, small, exact, grad.double(), impl="reference")
    got = both(kind, e_step, small, tensors, grad)
    eager = eager_low_precision(kind, e_step, small, tensors, grad)
    report = {}
    for name, want, have, low in zip(["output", *tensors], wanted, got, eager, strict=True):
        if name != "log_prior":  # a sum over all pairs that cancels: judged by the tests, against the size of its terms
            norm = want.norm() + 1e-30
            report[name] = float((have.double() - want).norm() / norm / ((low.double() - want).norm() / norm + 1e-4))
    return report


def eager_low_precision(kind: str, e_step: str, shape: Shape, tensors: dict[str, Tensor], grad: Tensor) -> Any:
    """The formula as one would write it in bfloat16."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    if kind == "smgk":
        key = key[:, :, None] + leaves["shift"].to(DTYPE)[None, :, :, None]
    s2 = query.shape[-1] ** 0.5
    scores = (query[:, :, None] @ key.mT - key.square().sum(-1)[..., None, :] / 2) / s2
    if e_step == "soft":
        scores = (scores + leaves["log_prior"].to(DTYPE)[None, :, :, None, None]).logsumexp(2)
    else:
        scores = scores.amax(2)
    if shape[-1]:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    output = scores.softmax(-1) @ value
    grads = torch.autograd.grad(output, list(leaves.values()), grad, allow_unused=True)
    return output, *[torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values(), strict=True)]


def graph_milliseconds(work: Callable[[], Any], rounds: int = 3) -> float:
    """Median of the mean time of a replay, of as many replays as take a few hundredths of a second."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return time_it(graph.replay, rounds)


def time_it(work: Callable[[], Any], rounds: int = 3) -> float:
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    work()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    count = max(3, min(300, int(25 / max(start.elapsed_time(stop), 1e-3))))
    times: list[float] = []
    for _ in range(rounds):
        start.record()
        for _ in range(count):
            work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / count)
    return statistics.median(times)


def measure(kind: str, e_step: str, shape: Shape) -> dict[str, float]:
    """Milliseconds forward and forward+backward, from graphs and eagerly, and the peak beyond the inputs in MiB."""
    torch.cuda.empty_cache()
    heads = shape[1] if kind == "sdpa" else shape[1] // 2
    tensors = inputs(kind, shape, heads)
    grad = torch.randn_like(tensors["value"])

    def forward() -> Tensor:
        return call(kind, e_step, shape, tensors)

    def train() -> Any:
        return both(kind, e_step, shape, tensors, grad)

    with torch.no_grad():
        result = {"forward": graph_milliseconds(forward)}
    result["train"] = graph_milliseconds(train)
    result["eager_train"] = time_it(train)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train()
    result["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return result


def compare(shapes: tuple[Shape, ...], methods: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        baseline: dict[str, dict[str, float]] = {}
        for name, backend in BACKENDS.items():
            try:
                with sdpa_kernel(backend):
                    baseline[name] = measure("sdpa", "", shape)
            except RuntimeError as reason:  # a backend that does not take this shape
                print(f"{name} at {shape}: {str(reason).splitlines()[0]}", flush=True)
        best = {
            key: min(times[key] for times in baseline.values())
            for key in ("forward", "train", "eager_train", "peak_mib")
        }
        print(f"{shape} sdpa {best}", flush=True)
        for kind, e_step in methods:
            row: dict[str, Any] = {"shape": shape, "method": f"{kind} {e_step}", "error": error(kind, e_step, shape)}
            wrong = {name: value for name, value in row["error"].items() if not value <= 2}
            if wrong:
                print(
                    f"{shape} {kind} {e_step}: not timed, error over twice that of eager bfloat16: {wrong}", flush=True
                )
            else:
                row |= {"milliseconds": measure(kind, e_step, shape), "baseline": baseline}
                row["speedup"] = {
                    key: best[key] / row["milliseconds"][key] for key in ("forward", "train", "eager_train")
                }
                row["memory"] = row["milliseconds"]["peak_mib"] / best["peak_mib"]
                row["of_the_limit"] = {
                    key: max(floor(kind, e_step, shape, key == "train").values()) / row["milliseconds"][key]
                    for key in ("forward", "train")
                }
                numbers = {key: round(value, 3) for key, value in row["milliseconds"].items()}
                print(
                    f"{shape} {kind} {e_step} {numbers} "
                    + " ".join(f"{k} {v:.2f}x" for k, v in row["speedup"].items()),
                    flush=True,
                )
            rows.append(row)
    return rows


def floor(kind: str, e_step: str, shape: Shape, train: bool) -> dict[str, float]:
    """The least milliseconds that exponentials, products and memory allow our algorithm; the largest one binds.

    Exponentials: one a pair, M for soft MGK; the backward pass takes them twice, once by rows and once by columns.
    """
    batch, heads, length, width, causal = shape
    pairs = batch * heads / 2 * length**2 / (2 if causal else 1)
    score = 2 if kind == "mgk" else 1  # score products and their gradients, for each component
    products, exponentials = 2 * width * (score + 1), score if e_step == "soft" else 1
    tensors = 3 + score
    if train:
        products += 2 * width * (2 * score + 1) + 2 * width * (2 * score + 2)
        exponentials *= 3
        tensors *= 3
    moved = tensors * batch * heads / 2 * length * width * 2
    counts = {"exponentials": pairs * exponentials, "products": pairs * products, "bytes": moved}
    return {name: 1e3 * count / LIMITS[name] for name, count in counts.items()}


def numerics(shape: Shape = (1, 2, 512, 64, True)) -> dict[str, dict[str, float]]:
    """The error over that of eager bfloat16, for entries of standard deviation 1, 6 and 30: at most 2 is wanted."""
    result = {}
    for std in (1.0, 6.0, 30.0):
        for kind, e_step in METHODS:
            result[f"{kind} {e_step} std {std:g}"] = error(kind, e_step, shape, std)
    return result


def decode(batch: int = 16, heads: int = 16, cache: int = 32768, width: int = 64) -> dict[str, Any]:
    """One query against a long cache."""
    shape = (batch, heads, cache, width, True)
    times: dict[str, float] = {}
    with torch.no_grad():
        for name, backend in BACKENDS.items():
            tensors = inputs("sdpa", shape, heads)
            tensors["query"] = tensors["query"][:, :, -1:].contiguous()
            try:
                with sdpa_kernel(backend):
                    times[f"sdpa {name}"] = graph_milliseconds(lambda: call("sdpa", "", (*shape[:4], False), tensors))  # noqa: B023
            except RuntimeError as reason:
                print(f"{name}, one query: {str(reason).splitlines()[0]}", flush=True)
        best = min(times.values())
        for kind, e_step in METHODS:
            tensors = inputs(kind, shape, heads // 2)
            tensors["query"] = tensors["query"][:, :, -1:].contiguous()
            times[f"{kind} {e_step}"] = graph_milliseconds(lambda: call(kind, e_step, shape, tensors))  # noqa: B023
    ours = {f"{kind} {e_step}": best / times[f"{kind} {e_step}"] for kind, e_step in METHODS}
    return {"shape": shape, "milliseconds": times, "speedup": ours}


def m_step(shape: Shape = SHAPES[0]) -> dict[str, float]:
    """The M-step for the priors beside a forward pass of the same kind, milliseconds."""
    result = {}
    for kind in ("smgk", "mgk"):
        tensors = {name: tensor.detach() for name, tensor in inputs(kind, shape, shape[1] // 2).items()}
        value = tensors.pop("value")
        result[f"{kind} M-step"] = graph_milliseconds(lambda: mgk.update_prior(**tensors))  # type: ignore[arg-type]  # noqa: B023
        with torch.no_grad():
            result[f"{kind} forward"] = graph_milliseconds(
                lambda: call(kind, "soft", shape, {**tensors, "value": value})  # noqa: B023
            )
    return result


def padded(shape: Shape = SHAPES[0]) -> dict[str, float]:
    """A batch of lengths as IMDb's bytes have them, against the same batch without padding."""
    batch, heads, length, _, _ = shape
    tensors = inputs("smgk", shape, heads // 2)
    grad = torch.randn_like(tensors["value"])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(batch).log_normal_(7.0, 0.65, generator=generator).clamp(100, length).long()
    lengths = (lengths.double() * (batch * length / 2 / lengths.sum())).clamp(max=length).long()  # half of it padding
    mask = (torch.arange(length)[None] < lengths[:, None]).cuda()
    whole = graph_milliseconds(lambda: both("smgk", "soft", shape, tensors, grad))
    short = graph_milliseconds(lambda: both("smgk", "soft", shape, tensors, grad, key_mask=mask, query_mask=mask))
    return {
        "share of real tokens": float(mask.float().mean()),
        "whole": whole,
        "padded": short,
        "speedup": whole / short,
    }


def growth(lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)) -> dict[str, dict[str, float]]:
    """Milliseconds forward+backward per 2^15 tokens as N grows: sixteen heads of softmax against eight of ours."""
    result = {}
    for length in lengths:
        shape = (max(1, 2**15 // length), 16, length, 64, False)
        share = 2**15 / (shape[0] * length)
        times = {}
        for name, kind, heads in (("flash", "sdpa", 16), ("cudnn", "sdpa", 16), ("smgk", "smgk", 8), ("mgk", "mgk", 8)):
            torch.cuda.empty_cache()
            tensors = inputs(kind, shape, heads)
            grad = torch.randn_like(tensors["value"])
            with sdpa_kernel(BACKENDS[name]) if kind == "sdpa" else nullcontext():
                times[name] = share * time_it(lambda: both(kind, "soft", shape, tensors, grad), 1)  # noqa: B023
        result[str(length)] = times
    return result


def module_times(shape: Shape, variant: str) -> dict[str, float]:
    """Milliseconds forward+backward of a whole attention layer, projections included."""
    from mgk.nn import MixtureAttention

    torch.cuda.empty_cache()
    torch._dynamo.reset()  # every shape is one more compilation of the same code, and eight is the limit
    batch, heads, length, width, causal = shape
    count = heads if variant == "softmax" else heads // 2
    layer = MixtureAttention(heads * width, count, variant=variant, head_dim=width, causal=causal).to("cuda", DTYPE)
    x = torch.randn(batch, length, heads * width, device="cuda", dtype=DTYPE, requires_grad=True)
    grad, leaves = torch.randn_like(x), [x, *layer.parameters()]
    times: dict[str, float] = {}
    for name, module in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        train = lambda: torch.autograd.grad(module(x)[0], leaves, grad)  # noqa: B023, E731
        times |= {name: time_it(train), f"{name}, graph": graph_milliseconds(train)}
    return times


def modules(shapes: tuple[Shape, ...]) -> list[dict[str, Any]]:
    """sMGK at half the heads against softmax at all of them."""
    rows = []
    for shape in shapes:
        times = {variant: module_times(shape, variant) for variant in ("softmax", "smgk")}
        speedup = {name: times["softmax"][name] / ours for name, ours in times["smgk"].items()}
        rows.append({"shape": shape, "milliseconds": times, "speedup": speedup})
        print("module", shape, speedup, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Speed-ups forward+backward (forward) as Markdown."""
    names = [f"{kind} {e_step}" for kind, e_step in METHODS]
    lines = ["| B, H, N, D | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        cells = {row["method"]: row["speedup"] for row in rows if tuple(row["shape"]) == shape and "speedup" in row}
        text = [f"{cells[n]['train']:.2f} ({cells[n]['forward']:.2f})" if n in cells else "-" for n in names]
        lines.append(f"| {', '.join(map(str, shape[:4]))}{' causal' if shape[4] else ''} | " + " | ".join(text) + " |")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "mgk": mgk.__version__, "commit": commit(), "dtype": str(DTYPE),
    }  # fmt: skip


PARTS: dict[str, Callable[[], Any]] = {
    "operators": lambda: compare(SHAPES, METHODS),
    "decode": decode,
    "numerics": numerics,
    "padded": padded,
    "growth": growth,
    "m_step": m_step,
    "modules": lambda: modules(SHAPES),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results/bench-cuda.json; for some parts a file of their own")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    some = () if options.parts == list(PARTS) else options.parts
    path = options.output or Path("results") / f"{'-'.join(('bench', 'cuda', *some))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment()}
    if "operators" in options.parts:
        jobs = [(kind, e_step, shape) for shape in SHAPES for kind, e_step in METHODS]
        with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
            pool.map(warm, jobs, chunksize=1)
    for name in options.parts:
        result[name] = PARTS[name]()
        if name != "operators":
            print(name, result[name], flush=True)
        write_json(path, result)  # what is measured stays, whatever comes next
    if "operators" in result:
        print(table(result["operators"]))
        write_text(path.with_suffix(".md"), table(result["operators"]) + "\n")


if __name__ == "__main__":
    main()
