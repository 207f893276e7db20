"""Inputs for the tests of every implementation, the dense formula, and what it means that two computations agree.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, D width of a head, Dv width of a
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import mgk
from mgk.ops import native

IMPLS = ("reference", "blockwise", *([] if native.MISSING else ["native"]))
VARIANTS = ("mgk", "smgk")
E_STEPS = ("soft", "hard")

Inputs = dict[str, Tensor]  # by the names of the arguments
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes, the optional arguments that are there, and the seed of the numbers."""

    variant: str = "smgk"
    B: int = 2
    H: int = 2
    G: int | None = None  # None: H
    M: int = 2
    Nq: int = 5
    Nk: int = 7
    D: int = 4
    Dv: int = 3
    prior: str | None = "position"  # None, "head" (H,M) or "position" (H,M,Nk)
    variance: str | None = None  # None or "tensor" (H,M)
    e_step: str = "soft"
    is_causal: bool = False
    window: int | None = None
    masked: bool = False
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu", scale: float = 1.0) -> Inputs:
        """Leaves that require grad; query, key and shift have entries of the standard deviation `scale`."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        groups = self.H if self.G is None else self.G
        numbers = {"query": scale * normal(self.B, self.H, self.Nq, self.D)}
        if self.variant == "mgk":
            numbers["key"] = scale * normal(self.B, groups, self.M, self.Nk, self.D)
        else:
            numbers["key"] = scale * normal(self.B, groups, self.Nk, self.D)
            numbers["shift"] = scale * normal(self.H, self.M, self.D)
        numbers["value"] = normal(self.B, groups, self.Nk, self.Dv)
        if self.prior:
            numbers["log_prior"] = normal(self.H, self.M, *([self.Nk] if self.prior == "position" else []))
        if self.variance:
            numbers["variance"] = math.sqrt(self.D) * (0.3 * normal(self.H, self.M)).exp()
        return {name: tensor.to(device, dtype).requires_grad_() for name, tensor in numbers.items()}

    def options(self, device: str = "cpu") -> Options:
        given = {"e_step": self.e_step, "is_causal": self.is_causal, "key_mask": self.key_mask(device)}
        return given if self.window is None else given | {"window": self.window}

    def key_mask(self, device: str = "cpu") -> Tensor | None:
        """About half of the keys; a batch entry may lose all of them."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return (torch.rand(self.B, self.Nk, generator=generator) < 0.6).to(device) if self.masked else None


def cases(**fixed: Any) -> st.SearchStrategy[Case]:
    """Ragged cases of every kind; `fixed` replaces what is drawn by a value or by another strategy."""
    free: dict[str, Any] = {
        "variant": st.sampled_from(VARIANTS),
        "B": st.integers(1, 2),
        "H": st.integers(1, 3),
        "M": st.integers(1, 4),
        "Nq": st.integers(1, 10),
        "Nk": st.integers(1, 10),
        "D": st.integers(1, 6),
        "Dv": st.integers(1, 5),
        "prior": st.sampled_from([None, "head", "position"]),
        "variance": st.sampled_from([None, "tensor"]),
        "e_step": st.sampled_from(E_STEPS),
        "is_causal": st.booleans(),
        "masked": st.booleans(),
        "seed": st.integers(0, 999),
    }
    given = {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in fixed.items()}
    return st.builds(Case, **(free | given))


def attend(inputs: Inputs, impl: str, **options: Any) -> Tensor:
    function: Callable[..., Tensor] = mgk.smgk_attention if "shift" in inputs else mgk.mgk_attention
    return function(**inputs, impl=impl, **options)


def attend_with_lse(inputs: Inputs, impl: str, **options: Any) -> tuple[Tensor, Tensor]:
    function: Callable[..., Any] = mgk.smgk_attention if "shift" in inputs else mgk.mgk_attention
    output, lse = function(**inputs, impl=impl, return_lse=True, **options)
    return output, lse


def call(function: Callable[..., Any], inputs: Inputs, **options: Any) -> Any:
    """Any other function, with the inputs by name."""
    return function(**inputs, **options)


def without(inputs: Inputs, *names: str) -> Inputs:
    return {name: tensor for name, tensor in inputs.items() if name not in names}


def expanded(inputs: Inputs) -> Inputs:
    """The same inputs with a copy of keys and values for each query head."""
    heads = inputs["query"].shape[1]
    copies = {
        name: inputs[name].repeat_interleave(heads // inputs[name].shape[1], 1)
        for name in ("key", "value")
        if name in inputs
    }
    return inputs | copies


def component_keys(inputs: Inputs) -> Tensor:
    """(B,H,M,Nk,D), whatever the variant."""
    key = expanded(inputs)["key"]
    return key[:, :, None] + inputs["shift"].to(key.dtype)[None, :, :, None] if "shift" in inputs else key


def pick_components(inputs: Inputs, index: Sequence[int]) -> Inputs:
    """The same inputs with the components `index`, in that order."""
    picked = dict(inputs)
    for name in ("shift", "log_prior", "variance"):
        if name in inputs:
            picked[name] = inputs[name][:, list(index)]
    if "shift" not in inputs:
        picked["key"] = inputs["key"][:, :, list(index)]
    return picked


def pick_keys(inputs: Inputs, index: slice | Tensor) -> Inputs:
    """The same inputs with some of the Nk positions."""
    picked = {**inputs, "key": inputs["key"][..., index, :]}
    if "value" in inputs:
        picked["value"] = inputs["value"][:, :, index]
    if "log_prior" in inputs and inputs["log_prior"].dim() == 3:
        picked["log_prior"] = inputs["log_prior"][..., index]
    return picked


def pick_queries(inputs: Inputs, index: slice) -> Inputs:
    return {**inputs, "query": inputs["query"][:, :, index]}


def identity_values(inputs: Inputs) -> Inputs:
    """With these the output is the attention weights themselves."""
    query, keys = inputs["query"], inputs["key"].shape[-2]
    identity = torch.eye(keys, dtype=query.dtype, device=query.device)
    return {**inputs, "value": identity.expand(*query.shape[:2], -1, -1)}


def visible(inputs: Inputs, options: Options, query_mask: Tensor | None = None) -> Tensor:
    """Which query sees which key, written with loops: bool (B,1,Nq,Nk)."""
    batch, queries, keys = inputs["query"].shape[0], inputs["query"].shape[2], inputs["key"].shape[-2]
    mask, last = options.get("key_mask"), keys - queries if options.get("is_causal", False) else keys
    window = options.get("window") or keys + queries + last
    shown = torch.ones(batch, keys, dtype=torch.bool) if mask is None else mask
    real = torch.ones(batch, queries, dtype=torch.bool) if query_mask is None else query_mask
    seen = [
        [
            [one and other and i + last - window < j <= i + last for j, other in enumerate(to)]
            for i, one in enumerate(of)
        ]
        for of, to in zip(real.tolist(), shown.tolist(), strict=True)
    ]
    return torch.tensor(seen, dtype=torch.bool).view(batch, 1, queries, keys)


def dense_log_weights(inputs: Inputs, *, with_prior: bool = True) -> Tensor:
    """l[i,j,r] with the distance taken as a difference, not by its expansion: (B,H,M,Nq,Nk)."""
    query, key = inputs["query"], component_keys(inputs)
    distance = (query[:, :, None, :, None] - key[:, :, :, None]).square().sum(-1)
    variance = inputs.get("variance", torch.tensor(math.sqrt(query.shape[-1]), dtype=query.dtype))
    logits = -distance / (2 * (variance[..., None, None] if variance.dim() else variance))
    if with_prior and "log_prior" in inputs:
        prior = inputs["log_prior"]
        logits = logits + (prior[..., None, None] if prior.dim() == 2 else prior[:, :, None])
    elif with_prior:
        logits = logits - math.log(logits.shape[2])
    return logits


def dense_weights(inputs: Inputs, options: Options) -> Tensor:
    """A of Eqn 9 or 12 in one line of torch each; independent of the library: (B,H,Nq,Nk)."""
    soft = options.get("e_step", "soft") == "soft"
    logits = dense_log_weights(inputs, with_prior=soft)
    logits = logits.logsumexp(2) if soft else logits.amax(2)
    seen = visible(inputs, options)
    hidden = ~seen & seen.any(-1, keepdim=True)  # a row that sees nothing keeps finite logits, and is zeroed after
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) * seen


def dense_lse(inputs: Inputs, options: Options) -> Tensor:
    """The log of the row sums of Eqn 9 or 12, -inf for a row that sees nothing: (B,H,Nq)."""
    soft = options.get("e_step", "soft") == "soft"
    logits = dense_log_weights(inputs, with_prior=soft)
    logits = logits.logsumexp(2) if soft else logits.amax(2)
    seen = visible(inputs, options)
    some = seen.any(-1)
    lse = logits.masked_fill(~seen & some[..., None], -torch.inf).logsumexp(-1)
    return lse.masked_fill(~some, -torch.inf)


def gradients(output: Tensor, leaves: Inputs, upstream: Tensor | None = None) -> Inputs:
    """Gradients of `output` in one random direction."""
    if upstream is None:
        generator = torch.Generator().manual_seed(7)
        upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    grads = torch.autograd.grad(
        output, list(leaves.values()), upstream, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )  # NaN is equal to nothing here


def assert_same(left: Tensor, right: Tensor, leaves: Inputs, tolerance: float = 1e-10) -> None:
    """Two ways to compute one function of `leaves` agree, gradients included.

    In float64 the exponents of the cases above stay below 1e3, so each weight is right to 1e3 * 2e-16, and sums of
    at most 1e2 of them, times numbers below 1e1, to 1e-10.
    """
    assert_close("output", left, right, tolerance)
    left_grads, right_grads = gradients(left, leaves), gradients(right, leaves)
    for name in leaves:
        assert_close(f"gradient of {name}", left_grads[name], right_grads[name], tolerance)
