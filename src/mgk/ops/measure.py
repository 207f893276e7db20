"""Measure attention: problems with their inputs, a check of results against float64, and the time of a call.

`mgk demo`, `mgk bench` and the benchmarks of a checkout share this module.

B batch, H heads, M components, N positions, D width of a head (of a value too).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from mgk.ops import api, graph, reference
from mgk.ops.common import shifted_keys
from mgk.ops.options import Visibility

DIRECTIONS = ("forward", "forward+backward")
CHECKED_QUERIES = 1024  # the dense formula for more queries would need too much memory
NEAR_TIE = 1e-4  # difference of two log-weights: far above float32 rounding, far below what matters
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class WrongResultError(RuntimeError):
    """A result disagrees with the float64 reference, so it is not timed."""


@dataclass(frozen=True)
class Case:
    """One attention problem. The baseline uses all `heads`, a mixture half of them; the same for `kv_heads`."""

    name: str
    batch: int
    heads: int
    length: int
    width: int
    is_causal: bool = False
    kv_heads: int | None = None  # heads of keys and values of the baseline; None is `heads`
    window: int | None = None  # of a causal mask

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "length", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.heads % 2:
            raise ValueError(f"heads: expected an even number, which a mixture can halve, got {self.heads}")
        if self.kv_heads is not None and (self.kv_heads % 2 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads: expected an even divisor of heads = {self.heads}, got {self.kv_heads}")

    @property
    def label(self) -> str:
        """E.g. "32, 8, 4096, 32 causal": B, H, N, D. With heads of keys and values: "32, 8/2, 4096, 32"."""
        heads = f"{self.heads}" if self.kv_heads is None else f"{self.heads}/{self.kv_heads}"
        seen = f" window {self.window}" if self.window else " causal" if self.is_causal else ""
        return f"{self.batch}, {heads}, {self.length}, {self.width}{seen}"


@dataclass(frozen=True)
class Method:
    """How a case is computed: "sdpa" with all heads, "mgk" or "smgk" with half of them."""

    operator: str
    e_step: str = "soft"
    components: int = 2
    variances: bool = False  # one learned variance per component

    @property
    def name(self) -> str:
        """E.g. "smgk soft", "mgk soft M=3" or "smgk soft variances"."""
        if self.operator == "sdpa":
            return self.operator
        components = "" if self.components == 2 else f" M={self.components}"
        return f"{self.operator} {self.e_step}{components}{' variances' if self.variances else ''}"


BASELINE = Method("sdpa")
MIXTURES = (Method("smgk", "soft"), Method("smgk", "hard"), Method("mgk", "soft"), Method("mgk", "hard"))


def make_inputs(
    case: Case, method: Method, *, device: str, dtype: torch.dtype, std: float = 1.0, seed: int = 0
) -> dict[str, Tensor]:
    """Return normal inputs that require grad. Shifts and priors are float32 or wider, as they are in a model."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def leaf(*shape: int) -> Tensor:
        return (std * normal(*shape)).to(dtype).requires_grad_()

    share = 1 if method == BASELINE else 2
    heads, kv_heads = case.heads // share, (case.kv_heads or case.heads) // share
    components = (method.components,) if method.operator == "mgk" else ()
    inputs = {
        "query": leaf(case.batch, heads, case.length, case.width),
        "key": leaf(case.batch, kv_heads, *components, case.length, case.width),
    }
    if method.operator == "smgk":
        inputs["shift"] = normal(heads, method.components, case.width).to(wide).requires_grad_()
    inputs["value"] = leaf(case.batch, kv_heads, case.length, case.width)
    if method != BASELINE and method.e_step == "soft":  # the hard E-step does not use the prior
        inputs["log_prior"] = normal(heads, method.components).to(wide).log_softmax(-1).requires_grad_()
    if method.variances:
        inputs["variance"] = (
            (case.width**0.5 * (0.1 * normal(heads, method.components)).exp()).to(wide).requires_grad_()
        )
    return inputs


def attend(method: Method, inputs: dict[str, Tensor], *, is_causal: bool, **options: Any) -> Tensor:
    """Compute the attention. Mixtures take further options, such as `impl`; the baseline ignores them."""
    if method == BASELINE:
        return scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], is_causal=is_causal)
    operator: Callable[..., Tensor] = getattr(api, f"{method.operator}_attention")
    return operator(**inputs, e_step=method.e_step, is_causal=is_causal, **options)


def gradients(out: Tensor, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every input, given that of the output."""
    return dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad), strict=True))


def make_call(
    case: Case, method: Method, inputs: dict[str, Tensor], direction: str, impl: str = "auto"
) -> Callable[[], object]:
    """Return what is timed: a forward pass without gradients, or a forward pass and the gradients of all inputs."""
    grad = torch.ones_like(inputs["query"])

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(method, inputs, is_causal=case.is_causal, impl=impl)

    def both() -> dict[str, Tensor]:
        return gradients(attend(method, inputs, is_causal=case.is_causal, impl=impl), inputs, grad)

    return forward if direction == "forward" else both


def check(case: Case, method: Method, inputs: dict[str, Tensor], impl: str = "auto") -> float:
    """Return the largest relative error of output and gradients against float64, or raise `WrongResultError`.

    The gradient of the output is zero except for the last queries of the last head in the last batch element. The
    gradients of the full call then equal those of that slice, which the dense formula can compute at any length.
    An error may be four times that of the dense formula in the dtype of the inputs, plus 32 roundings.
    """
    rows = min(case.length, CHECKED_QUERIES)
    exact = {name: last(name, tensor, rows).double().requires_grad_() for name, tensor in inputs.items()}
    eager = {name: last(name, tensor, rows).clone().requires_grad_() for name, tensor in inputs.items()}
    if "log_prior" in exact:  # one prior per key: its gradient then holds the terms of a sum that may cancel
        exact["log_prior"] = exact["log_prior"].detach()[..., None].repeat(1, 1, case.length).requires_grad_()
    normal = torch.randn(1, 1, rows, case.width, generator=torch.Generator().manual_seed(1))

    out = attend(method, inputs, is_causal=case.is_causal, impl=impl)
    grad = torch.zeros_like(out)
    grad[-1:, -1:, -rows:] = normal.to(out) * without_near_ties(method, exact)
    found = {"output": out, **gradients(out, inputs, grad)}
    expected, low = (
        {"output": dense, **gradients(dense, tensors, grad[-1:, -1:, -rows:].to(dense.dtype))}
        for tensors in (exact, eager)
        for dense in [attend_densely(method, tensors, is_causal=case.is_causal)]
    )
    largest = 0.0
    for name, truth in expected.items():
        error = relative_error(last(name, found[name], rows), truth)
        limit = 4 * relative_error(low[name], truth) + 32 * torch.finfo(out.dtype).eps
        if not error <= limit:  # also true for NaN
            what = name if name == "output" else f"the gradient of {name}"
            raise WrongResultError(
                f"{method.name} on {case.name}: {what} has an error of {error:.1e} relative to its largest entry; "
                f"rounding explains at most {limit:.1e}; a wrong result is not timed"
            )
        largest = max(largest, error)
    return largest


def last(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Return the last head of the last batch element, and only the last rows of queries and outputs."""
    tensor = tensor.detach()[-1:]
    if name in ("shift", "log_prior", "variance"):  # no batch dimension: the first one is the head
        return tensor
    return tensor[:, -1:, -rows:] if name in ("query", "output") else tensor[:, -1:]


def attend_densely(method: Method, inputs: dict[str, Tensor], *, is_causal: bool, window: int | None = None) -> Tensor:
    """Compute the dense formula. Its causal mask is lower-right aligned, so the last queries suffice."""
    if method != BASELINE:
        return attend(method, inputs, is_causal=is_causal, window=window, impl="reference")
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    scores = query @ key.mT / query.shape[-1] ** 0.5
    visible = reference.visible_pairs(query, key.shape[-2], Visibility(is_causal, window))
    out: Tensor = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    return out


def without_near_ties(method: Method, exact: dict[str, Tensor]) -> Tensor | float:
    """Return 0 for queries where two components nearly tie, as the hard E-step's gradient jumps there: (1,1,Nq,1)."""
    if method.e_step == "soft":
        return 1.0
    key = shifted_keys(exact["key"], exact["shift"]) if "shift" in exact else exact["key"]
    with torch.no_grad():
        logits = reference.log_weights(exact["query"], key, None, exact["query"].shape[-1] ** 0.5)
    first, second = logits.topk(2, dim=2).values.unbind(2)
    return ((first - second).amin(-1, keepdim=True) > NEAR_TIE).to(first)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected entry.

    If `expected` has one more dimension, it holds the terms of a sum. The divisor is then the sum of their absolute
    values, because that is what rounding scales with, however much of the sum cancels.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    unit = expected.abs()
    if expected.dim() > actual.dim():
        expected, unit = expected.sum(-1), unit.sum(-1)
    return float((actual - expected).abs().amax() / unit.amax())


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock time of one call: the mean over as many as take 20 ms."""
    start, calls, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < 0.02:
        work()
        calls, elapsed = calls + 1, time.perf_counter() - start
    return elapsed / calls


def capture(work: Callable[[], Any]) -> Callable[[], None]:
    """Record `work` in a CUDA graph and return its replay, whose time does not include Python or launches."""
    device = torch.device("cuda", torch.cuda.current_device())
    with graph.side_stream(device):
        for _ in range(2):
            work()
    return graph.capture(work, device, advice="time it eagerly")[0].replay


def cuda_milliseconds(work: Callable[[], Any], rounds: int = 3) -> float:
    """Return the median over rounds of the mean time of a call; a round repeats it for about 25 ms."""
    return in_turns({"": work}, rounds)[""]


def in_turns(works: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """The same for several calls: in every round each has its turn, so that a slower GPU slows all of them."""
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)

    def mean(work: Callable[[], Any], count: int) -> float:
        start.record()
        for _ in range(count):
            work()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / count

    def repetitions(work: Callable[[], Any]) -> int:
        work()
        return max(3, min(300, int(25 / max(mean(work, 1), 1e-3))))

    counts = {name: repetitions(work) for name, work in works.items()}
    times = [{name: mean(work, counts[name]) for name, work in works.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in times) for name in works}
