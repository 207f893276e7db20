"""Compare mixtures of half the heads with the fastest softmax of all heads, on the problems of `benchmarks.problems`.

All sides are replayed from CUDA graphs, in turns, so that launches do not count; eager calls are timed too. No mixture
is timed before its error has been compared with that of the formula in the same dtype. What does not run is recorded
with the reason.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import softmax
from benchmarks.problems import Problem
from benchmarks.softmax import ANCHORS, Contender
from mgk.ops import measure, reference
from mgk.ops.common import for_each_query_head
from mgk.ops.measure import BACKENDS, BASELINE, Method, capture, in_turns
from mgk.ops.options import Visibility
from mgk.tables import Table

DEVICE = "cuda"
WORKERS = 14  # processes that compile
TIMES = ("forward", "backward", "train", "eager_train")
# Rates of an H200, as measured: exponentials and bf16 products per second, bytes per second of a copy.
LIMITS = {"exponentials": 132 * 16 * 1.83e9, "products": 790e12, "bytes": 4.3e12}


def measure_problems(
    problems: Sequence[Problem], cases: Sequence[str] = (), anchors: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Compare the mixtures with the best softmax on every problem, or on those named. All anchors if none is named."""
    anchors = anchors or tuple(ANCHORS)
    chosen = [problem for problem in problems if not cases or problem.name in cases]
    if chosen:
        compile_all(chosen, anchors)
    rows = []
    for problem in chosen:
        with problem.precision():
            rows += compare(problem, anchors)
        print(table(rows[-len(problem.methods) :]), flush=True)
    return rows


def compile_all(problems: Sequence[Problem], anchors: Sequence[str]) -> None:
    """Compile all kernels in worker processes. The timing process then finds them on disk."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes
    compiled = [name for name in anchors if name not in BACKENDS]
    jobs: list[tuple[Problem, str | Method]] = []
    for problem in problems:
        names: list[str | Method] = [*problem.methods, *compiled]
        jobs += [(problem, name) for name in names]
    workers = min(len(jobs), os.cpu_count() or 1, WORKERS)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            list(pool.map(compile_kernels, jobs))
        except BrokenProcessPool as reason:  # a compiler crashed; the timing process compiles the rest
            print(f"not all kernels were compiled beforehand: {explain(reason)}", flush=True)


def compile_kernels(job: tuple[Problem, str | Method]) -> None:
    """Run a contender once, and its check."""
    problem, each = job
    try:
        with problem.precision():
            calls(problem, each)
            if isinstance(each, Method):
                error(problem, each)
    except Exception as reason:  # the timing process records it
        print(f"{problem.name}, {each}: {explain(reason)}", flush=True)


def explain(reason: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(reason).__name__}: {(str(reason).strip() or 'no message').splitlines()[0][:200]}"


def compare(problem: Problem, anchors: Sequence[str]) -> list[dict[str, Any]]:
    """Return errors, times and speed-ups of all mixtures on one problem. A wrong result is not timed."""
    torch._dynamo.reset()  # every shape compiles FlexAttention again, and Dynamo stops after eight times
    torch.cuda.empty_cache()
    rows = [row_of(problem, method) for method in problem.methods]
    right = [row["method"] for row in rows if "failed" not in row]
    contenders = [method for method in problem.methods if method.name in right]
    times, failed = measure_in_turns(problem, [*anchors, *contenders])
    baseline = {name: times[name] for name in anchors if name in times}
    without = {name: failed[name] for name in anchors if name in failed}
    for row, method in zip(rows, problem.methods, strict=True):
        row |= {"baseline": baseline, "without": without}
        if method.name in failed:
            row["failed"] = failed[method.name]
        elif method.name in times:
            row["milliseconds"] = times[method.name]
            row |= speedups(problem, method, times[method.name], baseline) if baseline else {}
    return rows


def row_of(problem: Problem, method: Method) -> dict[str, Any]:
    """Return what was measured and the error; "failed" says why it is not timed."""
    names = ("dtype", "tf32", "dropout", "padded", "kv_heads", "window")
    features = {name: getattr(problem, name) for name in names}
    row: dict[str, Any] = {"case": problem.name, "shape": problem.shape, **features, "method": method.name}
    try:
        row["error"] = error(problem, method)
    except Exception as reason:
        return row | {"failed": explain(reason)}
    wrong = {name: value for name, value in row["error"].items() if not value <= 2}
    return row | ({"failed": f"error over twice that of eager {problem.dtype}: {wrong}"} if wrong else {})


def measure_in_turns(
    problem: Problem, names: Sequence[str | Method]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the milliseconds and the peak MiB beyond the inputs of all that run, and why the others do not."""
    works: dict[str, dict[str, Callable[[], object]]] = {}
    found: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for each in names:
        name = each.name if isinstance(each, Method) else each
        try:
            eager = calls(problem, each)
            works[name] = {kind: capture(work) for kind, work in eager.items()} | {"eager_train": eager["train"]}
            found[name] = {"peak_mib": peak_mib(eager["train"])}
        except Exception as reason:  # whatever it raises, it does not run
            failed[name] = explain(reason)
            works.pop(name, None)
    for kind in ("forward", "train", "eager_train"):
        for name, milliseconds in in_turns({name: work[kind] for name, work in works.items()}).items():
            found[name][kind] = milliseconds
    for times in found.values():
        times["backward"] = times["train"] - times["forward"]
    return found, failed


def speedups(
    problem: Problem, method: Method, ours: dict[str, float], baseline: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Compare the times of a mixture with the best of each kind."""
    best = {kind: min(baseline, key=lambda name: baseline[name][kind]) for kind in ours}
    result = {
        "best": best,
        "speedup": {kind: baseline[best[kind]][kind] / ours[kind] for kind in TIMES},
        "memory": ours["peak_mib"] / baseline[best["peak_mib"]]["peak_mib"],
        "tflops": {
            name: {kind: problem.tflops(kind, times[kind]) for kind in TIMES}
            for name, times in {method.name: ours, **baseline}.items()
        },
    }
    if problem.dtype == "bfloat16":
        result["of_the_limit"] = {
            kind: max(least_milliseconds(problem, method, kind == "train").values()) / ours[kind]
            for kind in ("forward", "train")
        }
    return result


def inputs_of(problem: Problem, method: Method, std: float = 1.0) -> dict[str, Tensor]:
    return measure.make_inputs(problem, method, device=DEVICE, dtype=problem.torch_dtype, std=std)


def options_of(problem: Problem) -> dict[str, Any]:
    """The options of a mixture that softmax's problem implies."""
    mask = problem.mask(DEVICE)
    masks = {} if mask is None else {"key_mask": mask, "query_mask": mask}
    return {"is_causal": problem.is_causal, "window": problem.window, "dropout_p": problem.dropout, **masks}


def attend_and_grad(method: Method, inputs: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs."""
    output = measure.attend(method, inputs, **options)
    return {"output": output, **measure.gradients(output, inputs, grad)}


def contender(problem: Problem, name: str | Method) -> Contender:
    """Return what computes a problem, a mixture or a softmax anchor, and what it is differentiated by."""
    if isinstance(name, Method):
        inputs = inputs_of(problem, name)
        return partial(measure.attend, name, inputs, **options_of(problem)), inputs
    inputs = inputs_of(problem, BASELINE)
    attend, leaves = ANCHORS[name](problem, inputs)
    with torch.no_grad():
        softmax.check(problem, inputs, attend())
    return attend, leaves


def calls(problem: Problem, name: str | Method) -> dict[str, Callable[[], object]]:
    """Return a forward pass without gradients and one with those of all inputs, after a first call of each."""
    attend, leaves = contender(problem, name)
    forward = torch.no_grad()(attend)
    grad = torch.randn_like(forward())

    def train() -> object:
        return torch.autograd.grad(attend(), list(leaves.values()), grad)

    train()
    return {"forward": forward, "train": train}


def peak_mib(work: Callable[[], object]) -> float:
    """Return how much memory a call needs at its peak beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def error(problem: Problem, method: Method, std: float = 1.0) -> dict[str, float]:
    """Return the relative error against float64 of output and gradients, divided by that of eager code.

    Computed on a part of the problem.
    """
    small = problem.small
    options = options_of(small)
    inputs = inputs_of(small, method, std)
    grad = torch.randn_like(inputs["query"])
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    expected = attend_and_grad(method, exact, grad.double(), **options, impl="reference")
    found = attend_and_grad(method, inputs, grad, **options)
    eager = eager_low_precision(small, method, inputs, grad)
    result = {}
    for name, want in expected.items():
        if name != "log_prior":  # a sum over all pairs that cancels: tests compare it with the size of its terms
            norm = want.detach().norm() + 1e-30
            ours, theirs = ((each[name] - want).detach().norm() / norm for each in (found, eager))
            result[name] = float(ours / (theirs + 1e-4))
    return result


def eager_low_precision(problem: Problem, method: Method, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Compute the formula as one would write it in the dtype of the inputs."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    query, heads = leaves["query"], leaves["query"].shape[1]
    key, value = (for_each_query_head(leaves[name], heads) for name in ("key", "value"))
    if method.operator == "smgk":
        key = key[:, :, None] + leaves["shift"].to(query)[None, :, :, None]
    s2: float | Tensor = query.shape[-1] ** 0.5
    scores = query[:, :, None] @ key.mT - key.square().sum(-1)[..., None, :] / 2
    if method.variances:  # the query's norm no longer cancels
        s2 = leaves["variance"].to(query)[None, :, :, None, None]
        scores = scores - query.square().sum(-1)[:, :, None, :, None] / 2
    scores = scores / s2
    if method.e_step == "soft":
        scores = (scores + leaves["log_prior"].to(query)[None, :, :, None, None]).logsumexp(2)
    else:
        scores = scores.amax(2)
    mask = problem.mask(DEVICE)
    visible = reference.visible_pairs(query, key.shape[-2], Visibility(problem.is_causal, problem.window, mask))
    output = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    if mask is not None:
        output = output * mask[:, None, :, None]
    return {"output": output, **measure.gradients(output, leaves, grad)}


def least_milliseconds(problem: Problem, method: Method, train: bool) -> dict[str, float]:
    """Return the least time that exponentials, products and memory allow our algorithm; the largest one is the limit.

    Exponentials: one per pair, M for soft MGK and for several variances. The backward pass computes them twice, once by
    rows and once by columns.
    """
    pairs = problem.pairs * problem.heads / 2
    score = method.components if method.operator == "mgk" else 1  # score products, and their gradients
    several = method.e_step == "soft" and (method.operator == "mgk" or method.variances)
    products, exponentials = 2 * problem.width * (score + 1), method.components if several else 1
    tensors = 3 + score
    if train:
        products += 2 * problem.width * (2 * score + 1) + 2 * problem.width * (2 * score + 2)
        exponentials *= 3
        tensors *= 3
    moved = tensors * int(problem.lengths.sum()) * problem.heads / 2 * problem.width * 2
    counts = {"exponentials": pairs * exponentials, "products": pairs * products, "bytes": moved}
    return {name: 1e3 * count / LIMITS[name] for name, count in counts.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the speed-ups over the best softmax, and TFLOP/s forward+backward of both at full heads, as Markdown."""
    header = ["case", "B, H, N, D", "method", "forward", "backward", "both", "best softmax", "its TFLOP/s", "ours"]
    body = []
    for row in rows:
        cells = ["-"] * 6
        if "speedup" in row:
            best = row["best"]["train"]
            speeds = [f"{row['speedup'][kind]:.2f}" for kind in ("forward", "backward", "train")]
            cells = [*speeds, best, *(f"{row['tflops'][name]['train']:.0f}" for name in (best, row["method"]))]
        batch, heads, length, width, causal = row["shape"]
        label = Problem("", batch, heads, length, width, causal, row.get("kv_heads"), row.get("window")).label
        body.append([row["case"], label, row["method"], *cells])
    reasons = {f"{row['case']}, {row['method']}: {row['failed']}\n" for row in rows if "failed" in row}
    reasons |= {f"{row['case']}, {name}: {why}\n" for row in rows for name, why in row["without"].items()}
    return Table(header, body, left=(0, 1, 2)).markdown() + "".join(
        ["\nNot measured:\n\n", *sorted(reasons)] * bool(reasons)
    )
