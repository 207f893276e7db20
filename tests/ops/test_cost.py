"""The cost model against PyTorch's FLOP counter, against brute force, and against the paper's claims."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mgk
from mgk import variants
from mgk.nn import MixtureAttention
from mgk.ops import cost
from mgk.ops.feature_maps import PositiveOrthogonalFeatures
from tests.ops.common import IMPLS

SIZES: dict[str, Any] = {"batch": 2, "heads": 3, "queries": 5, "keys": 7, "head_dim": 4, "value_dim": 6}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def counted(function: Callable[[], Tensor]) -> cost.Flops:
    with FlopCounterMode(display=False) as counter:
        output = function()
        forward = counter.get_total_flops()
        torch.autograd.backward(output.sum())
    return cost.Flops(forward, counter.get_total_flops() - forward)


def operands(d: cost.Dimensions) -> dict[str, Any]:
    key = (d.batch, d.heads, d.keys, d.head_dim)
    tensors = {"query": leaf(d.batch, d.heads, d.queries, d.head_dim), "value": leaf(d.batch, d.heads, d.keys, d.Dv)}
    if d.variant in variants.PROJECTED:
        return tensors | {"key": leaf(*key[:2], d.components, *key[2:])}
    shift = {"shift": leaf(d.heads, d.components, d.head_dim)} if d.variant in variants.SHIFTED else {}
    return tensors | {"key": leaf(*key)} | shift


@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk"])
@pytest.mark.parametrize("components", [1, 3])
def test_reference_is_what_the_counter_sees(variant: str, components: int) -> None:
    d = cost.Dimensions(variant=variant, components=components, **SIZES)
    inputs = operands(d)
    if variant == "softmax":
        with sdpa_kernel(SDPBackend.MATH):
            seen = counted(lambda: torch.nn.functional.scaled_dot_product_attention(**inputs))
    else:
        function = mgk.mgk_attention if variant == "mgk" else mgk.smgk_attention
        seen = counted(lambda: function(**inputs, impl="reference"))
    assert cost.reference_flops(d) == seen


@pytest.mark.parametrize("components", [1, 2, 3])
def test_shifted_keys_cost_one_score_product(components: int) -> None:
    """The factorised formula, written as matrix products, is what `attention_flops` counts, and is sMGK."""
    d = cost.Dimensions(variant="smgk", components=components, **SIZES)
    inputs = operands(d)
    query, key, shift, value = (inputs[name] for name in ("query", "key", "shift", "value"))
    s2 = d.head_dim**0.5

    def factorised() -> Tensor:
        u = (query @ shift.mT / s2).exp()
        w = (-(key @ shift.mT + shift.square().sum(-1)[:, None] / 2) / s2).exp()
        weights = ((query @ key.mT - key.square().sum(-1)[..., None, :] / 2) / s2).exp() * (u @ w.mT)
        return torch.matmul(weights / weights.sum(-1, keepdim=True), value)

    torch.testing.assert_close(factorised(), mgk.smgk_attention(**inputs, impl="reference"))
    seen = counted(factorised)
    assert cost.attention_flops(d).forward == seen.forward
    # Autograd kept the weights where the algorithm computes scores and factors again.
    recomputed = d.batch * d.heads * d.P * 2 * (d.head_dim + components)
    assert cost.attention_flops(d).backward == seen.backward + recomputed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("variant", ["mgk", "smgk"])
@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "reference"])
def test_operators_are_what_the_counter_sees(impl: str, variant: str, e_step: str, causal: bool) -> None:
    d = cost.Dimensions(variant=variant, components=3, causal=causal, e_step=e_step, **SIZES)
    function = mgk.mgk_attention if variant == "mgk" else mgk.smgk_attention
    inputs = operands(d)
    assert cost.attention_flops(d) == counted(lambda: function(**inputs, e_step=e_step, is_causal=causal, impl=impl))


@pytest.mark.parametrize("variant", ["softmax", "mgk"])
@pytest.mark.parametrize("components", [1, 3])
def test_fused_is_the_reference_and_recomputation(variant: str, components: int) -> None:
    d = cost.Dimensions(variant=variant, components=components, **SIZES)
    dense, fused = cost.reference_flops(d), cost.attention_flops(d)
    assert fused.forward == dense.forward
    assert fused.backward == dense.backward + d.batch * d.heads * d.P * 2 * d.head_dim * d.M
    assert fused.total == fused.forward + fused.backward


@pytest.mark.parametrize("variant", variants.LINEAR)
@pytest.mark.parametrize("feature_map", variants.FEATURE_MAPS)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(5, 7, False), (7, 7, True), (5, 9, True), (300, 300, True)])
def test_linear_family_is_what_the_counter_sees(
    variant: str, feature_map: str, queries: int, keys: int, causal: bool
) -> None:
    sizes = SIZES | {"queries": queries, "keys": keys}
    d = cost.Dimensions(variant=variant, feature_map=feature_map, causal=causal, **sizes)
    inputs = operands(d)
    phi = PositiveOrthogonalFeatures(d.head_dim) if feature_map == "favor" else feature_map
    if variant == "linear":
        inputs["key"] = inputs["key"].detach()[:, :, None].requires_grad_()
    function: Callable[..., Tensor] = mgk.smlk_attention if variant == "smlk" else mgk.mlk_attention
    seen = counted(lambda: function(**inputs, feature_map=phi, is_causal=causal, impl="blockwise"))
    assert cost.attention_flops(d) == seen


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_projections_are_what_the_counter_sees(variant: str) -> None:
    """The projections of the module, by themselves; its values are as wide as its keys."""
    d = cost.Dimensions(variant=variant, components=3, embed_dim=10, **(SIZES | {"value_dim": 4}))
    module = MixtureAttention(10, 3, head_dim=4, variant=variant, num_components=3)
    query, key, value, heads = leaf(2, 5, 10), leaf(2, 7, 10), leaf(2, 7, 10), leaf(2, 5, 12)
    parts = [(module.query_proj, query), (module.key_proj, key), (module.value_proj, value), (module.out_proj, heads)]
    seen = counted(lambda: torch.stack([projection(x).sum() for projection, x in parts]))
    assert cost.projection_flops(d) == seen


@pytest.mark.parametrize(("queries", "keys"), list(itertools.product((1, 3, 6), repeat=2)))
def test_visible_pairs(queries: int, keys: int) -> None:
    mask = torch.ones(queries, keys).tril(keys - queries)
    sizes = SIZES | {"queries": queries, "keys": keys}
    assert int(mask.sum()) == cost.Dimensions(variant="mgk", causal=True, **sizes).P
    assert queries * keys == cost.Dimensions(variant="mgk", **sizes).P


def test_exponentials() -> None:
    def of(variant: str, **options: Any) -> int:
        return cost.exponentials(cost.Dimensions(variant=variant, components=3, **SIZES, **options))

    heads, pairs = 2 * 3, 5 * 7
    assert of("softmax") == of("mgk", e_step="hard") == of("smgk", e_step="hard") == heads * pairs
    assert of("mgk") == heads * 3 * pairs
    assert of("smgk") == heads * (pairs + 3 * (5 + 7))
    assert of("linear") == heads * 4 * (5 + 7)
    assert of("mlk") == of("smlk") == heads * 4 * (5 + 3 * 7)
    assert of("mlk", feature_map="favor", features=9) == heads * 9 * (5 + 3 * 7)
    assert of("mlk", feature_map="dpfp") == 0
    assert of("mgk", causal=True) == heads * 3 * (5 * 7 - 10)


def test_half_the_heads() -> None:
    """Design 1: sMGK at half the heads halves the cost of softmax at full heads, but for the width-M factor."""
    sizes: dict[str, Any] = {"queries": 4096, "keys": 4096, "head_dim": 32}
    full = cost.Dimensions(variant="softmax", heads=8, **sizes)
    half = {variant: cost.Dimensions(variant=variant, heads=4, **sizes) for variant in ("smgk", "mgk", "softmax")}
    assert cost.cache_bytes(half["smgk"], 2) * 2 == cost.cache_bytes(full, 2)
    assert cost.cache_bytes(half["mgk"], 2) * 4 == cost.cache_bytes(full, 2) * 3
    grouped = cost.Dimensions(variant="softmax", heads=8, kv_heads=2, **sizes)
    assert cost.cache_bytes(grouped, 2) * 4 == cost.cache_bytes(full, 2)  # keys and values of two heads
    extra = cost.attention_flops(half["smgk"]).forward - cost.attention_flops(half["softmax"]).forward
    assert extra == 4 * (4096**2 * 2 * 2 + 2 * 4096 * 2 * 2 * 32)
    assert cost.attention_flops(half["mgk"]).forward * 4 == cost.attention_flops(full).forward * 3


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"variant": "gauss"}, ValueError, "variant: expected one of"),
    ({"e_step": "firm"}, ValueError, "e_step: expected one of"),
    ({"feature_map": "relu"}, ValueError, "feature_map: expected one of"),
    ({"causal": 1}, TypeError, "causal: expected True or False"),
    *[
        ({name: 0}, ValueError, f"{name}: expected at least 1, got 0")
        for name in (*SIZES, "components", "embed_dim", "features")
    ],
    ({"heads": 1.5}, TypeError, "heads: expected an integer, got float 1.5"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_dimensions(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cost.Dimensions(**({"variant": "mgk"} | SIZES | options))


def test_bad_arguments() -> None:
    d = cost.Dimensions(variant="mlk", **SIZES)
    with pytest.raises(ValueError, match="bytes_per_number: expected at least 1, got 0"):
        cost.cache_bytes(d, 0)
    with pytest.raises(ValueError, match="prior: expected one of sgd, em, uniform, got 'map'"):
        cost.parameters(d, prior="map")
    with pytest.raises(ValueError, match=r"variant: expected softmax, mgk or smgk.*got 'mlk'"):
        cost.reference_flops(d)
