"""`num_kv_heads`: heads of keys and values that several query heads read, as if each had a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.nn import MixtureAttention
from mgk.variants import PROJECTED, VARIANTS

H, G, D = 6, 2, 4


def make(variant: str, **options: Any) -> MixtureAttention:
    torch.manual_seed(0)
    return MixtureAttention(24, H, variant=variant, num_kv_heads=G, **options).double()


def with_copies(module: MixtureAttention) -> MixtureAttention:
    """The module without groups that has each projection of keys and values once per query head."""
    other = MixtureAttention(24, H, variant=module.variant).double()
    state = module.state_dict()
    for name in ("key_proj", "value_proj"):
        for kind in ("weight", "bias"):
            rows = state[f"{name}.{kind}"].unflatten(0, (G, -1))
            state[f"{name}.{kind}"] = rows.repeat_interleave(H // G, 0).flatten(0, 1)
    other.load_state_dict(state)
    return other


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    padding = torch.arange(7) >= torch.tensor([7, 4])[:, None]
    return torch.randn(2, 7, 24, generator=generator, dtype=torch.float64), padding


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_copies_of_the_projections(variant: str, is_causal: bool) -> None:
    module, (x, padding) = make(variant), inputs()
    options: dict[str, Any] = {"key_padding_mask": padding, "is_causal": is_causal, "need_weights": True}
    for found, wanted in zip(module(x, **options), with_copies(module)(x, **options), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_equals_one_call_and_stores_no_copies(variant: str) -> None:
    module, (x, _) = make(variant), inputs()
    cache = module.new_cache(2)
    steps = torch.cat([module(x[:, at], cache=cache)[0] for at in (slice(0, 3), slice(3, 4), slice(4, 7))], 1)
    torch.testing.assert_close(steps, module(x, is_causal=True)[0], rtol=1e-10, atol=1e-10)
    if variant in ("softmax", "mgk", "smgk"):
        keys = module.num_components if variant in PROJECTED and variant == "mgk" else 1
        assert cache.bytes == 2 * G * 7 * D * (keys + 1) * 8


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_an_m_step_learns_a_prior_for_each_query_head(variant: str) -> None:
    module, (x, _) = make(variant, prior="em"), inputs()
    module(x)
    assert module.prior.shape == (H, 2)
    assert len(set(module.prior[:, 0].tolist())) == H


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 4}, "^num_kv_heads: expected a divisor of num_heads = 6, got 4"),
        ({"num_kv_heads": 0}, "^num_kv_heads: expected at least 1, got 0"),
        ({"num_kv_heads": 2, "means": "em"}, "^means: expected 'sgd' with num_kv_heads = 2"),
        (
            {"num_kv_heads": 2, "variant": "smlk", "mixing": "keys"},
            "^mixing: expected 'features' with num_kv_heads = 2",
        ),
    ],
)
def test_wrong_numbers_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureAttention(24, H, **options)
