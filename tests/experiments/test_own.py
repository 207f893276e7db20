"""Components with values of their own: the formula, its laws, and the module that a row of the study trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mgk
from experiments.lm.own import OwnValueAttention, dense_own_values, give_own_values, more_flops, own_value_attention
from mgk.models import LanguageModelConfig, build
from mgk.nn import MixtureAttention

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of a few terms of size 1


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query (2,3,7,4), key and value (2,3,2,7,4), log_prior (3,2)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return normal(2, 3, 7, 4), normal(2, 3, 2, 7, 4), normal(2, 3, 2, 7, 4), normal(3, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_the_formula_and_so_are_its_gradients(is_causal: bool) -> None:
    given = inputs()
    output = own_value_attention(*given, is_causal=is_causal)
    expected = dense_own_values(*given, is_causal=is_causal)
    torch.testing.assert_close(output, expected, **EXACT)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for found, wanted in zip(*(torch.autograd.grad(x, given, weight) for x in (output, expected)), strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


def test_with_equal_values_it_is_the_mixture() -> None:
    query, key, value, log_prior = inputs()
    shared = value[:, :, 0]
    found = own_value_attention(query, key, torch.stack([shared, shared], 2), log_prior, is_causal=True)
    torch.testing.assert_close(found, mgk.mgk_attention(query, key, shared, log_prior, is_causal=True), **EXACT)


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_a_module_with_its_values_copied_is_the_module_it_was(variant: str) -> None:
    """And with another value for the second component it is not."""
    torch.manual_seed(0)
    before = MixtureAttention(8, 2, variant=variant, causal=True, qk_norm=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = before(x)[0]
    old = before.value_proj
    after = OwnValueAttention.of(before)
    with torch.no_grad():  # heads, components, width of a head
        for name in ("weight", "bias"):
            parts = getattr(old, name).view(2, 1, 4, *getattr(old, name).shape[1:])
            getattr(after.value_proj, name).copy_(parts.expand(2, 2, *parts.shape[2:]).flatten(0, 2))
    torch.testing.assert_close(after(x)[0], expected, **EXACT)
    with torch.no_grad():
        after.value_proj.weight[4:8] += 1
    assert not torch.allclose(after(x)[0], expected)


def test_a_model_has_wider_values_and_learns_them() -> None:
    config = LanguageModelConfig(
        attention="smgk", heads=2, head_dim=8, layers=2, width=16, hidden=16, vocabulary=11, cutoffs=(), max_length=6,
        positions="rotary", norm="pre", qk_norm=True, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = build(config)
    before = sum(p.numel() for p in model.parameters())
    give_own_values(model)
    assert sum(p.numel() for p in model.parameters()) == before + 2 * 16 * 16
    tokens = torch.randint(0, 11, (3, 7))
    model.loss({"tokens": tokens[:, :-1], "target": tokens[:, 1:]})["loss"].backward()
    assert all(
        layer.attention.value_proj.weight.grad.abs().min(1).values.max() > 0 for layer in model.encoder.stack.layers
    )
    # Softmax with 4 heads costs 20 pairs' FLOPs of width 8 a pair, sMGK with 2 heads as with one score product; both
    # per layer, with 21 visible pairs, and six FLOPs a position for each of the 16 * 16 weights of the projection.
    softmax, shifted = (
        4 * 21 * (4 * 8 + 10 * 8),
        2 * 21 * ((2 * 8 + 4 + 16) + (3 * (16 + 4) + 32)) + 3 * 2 * 2 * 8 * 2 * 12,
    )
    assert more_flops(config, 6) == 2 * (softmax - shifted + 6 * 6 * 16 * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "softmax"}, "variant: expected mgk or smgk"),
        ({"num_kv_heads": 1}, "without grouped queries"),
        ({"prior": "em"}, "learned priors"),
        ({"e_step": "hard"}, "e_step: expected soft"),
        ({"learn_variance": True}, "e_step: expected soft, with the fixed variance"),
    ],
)
def test_other_modules_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OwnValueAttention.of(MixtureAttention(8, 2, **options))


def test_padding_is_refused() -> None:
    module = OwnValueAttention.of(MixtureAttention(8, 2))
    with pytest.raises(ValueError, match="key_padding_mask: expected none"):
        module(torch.randn(1, 3, 8), key_padding_mask=torch.tensor([[False, False, True]]))
