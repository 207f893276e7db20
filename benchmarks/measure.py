"""Mixture attention at half the heads against `scaled_dot_product_attention` at full heads, measured in one run.

A benchmark is a list of cases (shapes) times a list of methods (what computes them) on one device. For every case:

1. every method, the baseline included, must agree with the dense formula in float64, values and gradients, or the run
   stops: there is no number for a wrong result;
2. the peak memory of one call is taken, beyond the inputs: what it computes, what it saves and what it returns;
3. the methods are called in turn, round after round, and each is compared with the baseline of its own round, so that
   a machine that slows down slows down both. The speed-up is the median of those ratios.

One factory, `make_inputs`, feeds all three. A device brings a clock and a memory gauge (`Device`), nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from benchmarks.common import (
    BASELINE,
    DIRECTIONS,
    MIXTURES,
    Case,
    Device,
    Method,
    Report,
    Row,
    attend,
    environment,
    make_inputs,
)
from mgk.ops import reference
from mgk.ops.common import shifted_keys

CHECKED_QUERIES = 1024  # the dense form of more would not fit beside a long case
NEAR_TIE = 1e-4  # of two log-weights: far above what float32 rounds, far below what matters


class WrongResultError(RuntimeError):
    """A method disagrees with the dense formula; it will not be timed."""


def run(
    device: Device,
    cases: Sequence[Case],
    methods: Sequence[Method] = MIXTURES,
    *,
    rounds: int = 5,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
    console: Console | None = None,
) -> Report:
    """Measure every method on every case. With a console, a progress bar shows there."""
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    methods = [BASELINE, *methods]
    steps = len(cases) * (len(methods) * (1 + len(DIRECTIONS)) + len(DIRECTIONS) * rounds)
    rows: list[Row] = []
    made_in = {**environment(device, dtype), "rounds": rounds, "impl": impl}
    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=console is None) as progress:
        task = progress.add_task("", total=steps)
        for case in cases:

            def step(text: str, case: Case = case) -> None:
                progress.update(task, advance=1, description=f"{case.name}: {text}")

            rows += measure(device, case, methods, rounds=rounds, dtype=dtype, impl=impl, step=step)
    return Report(made_in, rows)


def measure(
    device: Device,
    case: Case,
    methods: Sequence[Method],
    *,
    rounds: int,
    dtype: torch.dtype,
    impl: str,
    step: Callable[[str], None],
) -> list[Row]:
    """One case: check, memory, time. The first method is what the others are compared with."""
    inputs, errors, rows = [], [], []
    for method in methods:
        step(f"checking {method.name}")
        inputs.append(make_inputs(case, method, device=device.name, dtype=dtype))
        errors.append(check(case, method, inputs[-1], impl))
    for direction in DIRECTIONS:
        calls = [call_of(case, *pair, direction, impl) for pair in zip(methods, inputs, strict=True)]
        memory = []
        for method, call in zip(methods, calls, strict=True):
            step(f"memory of {method.name}, {direction}")
            memory.append(device.peak_bytes(call))
        times: list[list[float]] = []
        for number in range(rounds):
            step(f"{direction}, round {number + 1} of {rounds}")
            times.append([device.seconds(call) for call in calls])
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


def call_of(case: Case, method: Method, inputs: dict[str, Tensor], direction: str, impl: str) -> Callable[[], object]:
    """What is timed: a forward pass without gradients, or a forward pass and the gradients of all inputs."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(method, inputs, is_causal=case.is_causal, impl=impl)

    incoming = torch.ones_like(inputs["query"])

    def both() -> dict[str, Tensor]:
        return gradients(attend(method, inputs, is_causal=case.is_causal, impl=impl), inputs, incoming)

    return forward if direction == "forward" else both


def gradients(out: Tensor, inputs: dict[str, Tensor], incoming: Tensor) -> dict[str, Tensor]:
    return dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), incoming), strict=True))


def check(case: Case, method: Method, inputs: dict[str, Tensor], impl: str = "auto") -> float:
    """The largest relative error of values and gradients on the very inputs that are timed; raises `WrongResultError`.

    The gradient that comes in is zero but for the last queries of the last head of the last batch. So the gradients of
    the whole call are those of that slice alone, which the dense formula can do at any length. An error may be four
    times what the dense formula itself commits in the dtype of the inputs, plus a band of 32 roundings.
    """
    rows = min(case.length, CHECKED_QUERIES)
    exact = {name: last(name, tensor, rows).double().requires_grad_() for name, tensor in inputs.items()}
    eager = {name: last(name, tensor, rows).clone().requires_grad_() for name, tensor in inputs.items()}
    if "log_prior" in exact:  # one prior per key: the gradient comes as the terms of the sum that may cancel
        exact["log_prior"] = exact["log_prior"].detach()[..., None].repeat(1, 1, case.length).requires_grad_()
    normal = torch.randn(1, 1, rows, case.width, generator=torch.Generator().manual_seed(1))

    out = attend(method, inputs, is_causal=case.is_causal, impl=impl)
    incoming = torch.zeros_like(out)
    incoming[-1:, -1:, -rows:] = normal.to(out) * decided(method, exact)
    found = {"output": out, **gradients(out, inputs, incoming)}
    expected, committed = (
        {"output": dense, **gradients(dense, tensors, incoming[-1:, -1:, -rows:].to(dense.dtype))}
        for tensors in (exact, eager)
        for dense in [attend_densely(method, tensors, is_causal=case.is_causal)]
    )
    largest = 0.0
    for name, truth in expected.items():
        error = relative_error(last(name, found[name], rows), truth)
        limit = 4 * relative_error(committed[name], truth) + 32 * torch.finfo(out.dtype).eps
        if not error <= limit:  # NaN lands here too
            what = name if name == "output" else f"the gradient of {name}"
            raise WrongResultError(
                f"{method.name} on {case.name}: {what} is off by {error:.1e} of its largest entry and at most "
                f"{limit:.1e} is rounding; a wrong result is not timed"
            )
        largest = max(largest, error)
    return largest


def last(name: str, tensor: Tensor, rows: int) -> Tensor:
    """The last head of the last batch, and of queries and outputs the last rows."""
    tensor = tensor.detach()[-1:]
    if name in ("shift", "log_prior"):  # these have no batch: the first axis is the head
        return tensor
    return tensor[:, -1:, -rows:] if name in ("query", "output") else tensor[:, -1:]


def attend_densely(method: Method, inputs: dict[str, Tensor], *, is_causal: bool) -> Tensor:
    """The oracle. Its causal mask is aligned lower right, which lets it do the last queries alone."""
    if method != BASELINE:
        return attend(method, inputs, is_causal=is_causal, impl="reference")
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    scores = query @ key.mT / query.shape[-1] ** 0.5
    visible = reference.visible_pairs(query, key.shape[-2], is_causal, None)
    out: Tensor = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    return out


def decided(method: Method, exact: dict[str, Tensor]) -> Tensor | float:
    """0 for queries with a near tie of two components, where the hard E-step's gradient jumps, else 1: (1,1,Nq,1)."""
    if method.e_step == "soft":
        return 1.0
    key = shifted_keys(exact["key"], exact["shift"]) if "shift" in exact else exact["key"]
    with torch.no_grad():
        logits = reference.log_weights(exact["query"], key, None, exact["query"].shape[-1] ** 0.5)
    first, second = logits.topk(2, dim=2).values.unbind(2)
    return ((first - second).amin(-1, keepdim=True) > NEAR_TIE).to(first)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest entry.

    If `expected` has one more axis, it holds terms that add up to what is expected; the unit is then the sum of their
    sizes, which rounding goes by however much of it cancels.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    unit = expected.abs()
    if expected.dim() > actual.dim():
        expected, unit = expected.sum(-1), unit.sum(-1)
    return float((actual - expected).abs().amax() / unit.amax())
