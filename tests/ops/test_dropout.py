"""Dropout on the attention weights: the share, the scale, the seed, and one mask for forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mgk
from tests.ops.common import (
    E_STEPS,
    IMPLS,
    VARIANTS,
    Case,
    Inputs,
    assert_close,
    assert_same,
    attend,
    call,
    identity_values,
    without,
)

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.parametrize("impl", IMPLS),
    pytest.mark.parametrize("e_step", E_STEPS),
    pytest.mark.parametrize("variant", VARIANTS),
]

P = 0.3


def seeded(inputs: Inputs, impl: str, seed: int, e_step: str, is_causal: bool = False, p: float = P) -> Tensor:
    torch.manual_seed(seed)
    return attend(inputs, impl, e_step=e_step, is_causal=is_causal, dropout_p=p)


def dense(inputs: Inputs, e_step: str, is_causal: bool = False) -> Tensor:
    weights: Tensor = call(mgk.attention_weights, without(inputs, "value"), e_step=e_step, is_causal=is_causal)
    return weights


def test_kept_weights_are_scaled_and_the_share_is_right(impl: str, e_step: str, variant: str) -> None:
    """Each weight is 0 or A/(1-p); no row, column, head or block is favoured beyond five binomial deviations."""
    inputs = Case(variant, B=2, H=3, Nq=40, Nk=50).inputs()
    weights, dropped = dense(inputs, e_step), seeded(identity_values(inputs), impl, 1, e_step)
    kept = dropped != 0
    assert_close("weights", dropped, kept * weights / (1 - P), 1e-12)
    for axes in ((), (3,), (2,), (1, 2, 3), (0, 2, 3)):
        share = kept.double().mean(axes) if axes else kept.double().mean()
        draws = kept.numel() / share.numel()
        assert ((share - (1 - P)).abs() <= 5 * math.sqrt(P * (1 - P) / draws)).all()


def test_weights_fall_independently(impl: str, e_step: str, variant: str) -> None:
    """Neighbours in a row, a column, the next block and any other head agree as often as strangers do."""
    inputs = Case(variant, B=2, H=3, Nq=40, Nk=50).inputs()
    kept = (seeded(identity_values(inputs), impl, 2, e_step) != 0).flatten(0, 1)
    agree = P**2 + (1 - P) ** 2
    for axis, step in (*((0, head) for head in range(1, 6)), (1, 1), (1, 4), (2, 1), (2, 3)):
        size = kept.shape[axis] - step
        same = (kept.narrow(axis, 0, size) == kept.narrow(axis, step, size)).double()
        assert abs(float(same.mean()) - agree) <= 5 * math.sqrt(agree * (1 - agree) / same.numel())


def test_seed_decides_the_mask(impl: str, e_step: str, variant: str) -> None:
    inputs = Case(variant, Nq=20, Nk=20).inputs()
    first, again, other = (seeded(inputs, impl, seed, e_step) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    torch.manual_seed(3)
    following, next_one = (attend(inputs, impl, e_step=e_step, dropout_p=P) for _ in range(2))
    assert torch.equal(following, first)
    assert not torch.allclose(next_one, first)


@pytest.mark.parametrize("is_causal", [False, True])
def test_backward_uses_the_mask_of_forward(impl: str, e_step: str, variant: str, is_causal: bool) -> None:
    """Output and gradients are those of (A * mask / (1-p)) V, with the mask that identity values make visible."""
    inputs = Case(variant, M=3, Nq=9, Nk=11, Dv=5, variance="tensor").inputs()
    kept = seeded(identity_values(inputs), impl, 5, e_step, is_causal).detach() != 0
    expected = (dense(inputs, e_step, is_causal) * kept / (1 - P)) @ inputs["value"]
    assert_same(seeded(inputs, impl, 5, e_step, is_causal), expected, inputs)


def test_random_numbers_between_forward_and_backward_do_not_matter(impl: str, e_step: str, variant: str) -> None:
    inputs = Case(variant).inputs()
    plain = torch.autograd.grad(seeded(inputs, impl, 6, e_step).square().sum(), inputs["value"])[0]
    disturbed = seeded(inputs, impl, 6, e_step).square().sum()
    torch.manual_seed(99)
    torch.rand(10)
    assert torch.equal(torch.autograd.grad(disturbed, inputs["value"])[0], plain)


def test_probability_zero_draws_nothing(impl: str, e_step: str, variant: str) -> None:
    inputs = Case(variant).inputs()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    without_dropout = attend(inputs, impl, e_step=e_step)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seeded(inputs, impl, 7, e_step, p=0.0), without_dropout)
