"""The M-steps for priors (`prior_statistics`, `update_prior`) and for means and variances (`update_components`)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mgk
from tests.ops.common import (
    IMPLS,
    Case,
    Inputs,
    Options,
    assert_close,
    call,
    cases,
    component_keys,
    dense_log_weights,
    visible,
    without,
)

pytestmark = [pytest.mark.usefixtures("small_blocks"), pytest.mark.parametrize("impl", IMPLS)]


def mixtures(case: Case, query_mask: bool) -> tuple[Inputs, Options]:
    inputs = {name: tensor.detach() for name, tensor in without(case.inputs(), "value").items()}
    real = torch.rand(case.B, case.Nq, generator=torch.Generator().manual_seed(case.seed + 2)) < 0.7
    options = {**without(case.options(), "e_step"), "query_mask": real if query_mask else None}
    return inputs, options


def seen_pairs(inputs: Inputs, options: Options) -> Tensor:
    return visible(inputs, options, options["query_mask"])[:, :, None]  # (B,1,1,Nq,Nk)


def per_position(prior: Tensor, keys: int) -> Tensor:
    return prior if prior.dim() == 3 else prior[..., None].expand(-1, -1, keys)


def likelihood(inputs: Inputs, options: Options) -> Tensor:
    """sum over b and i of log sum_r prior[j,r] f_r(q_i), over what is visible: (H,Nk)."""
    return (dense_log_weights(inputs).logsumexp(2) * seen_pairs(inputs, options)[:, :, 0]).sum((0, 2))


@given(case=cases(), query_mask=st.booleans())
def test_update_prior_is_the_mean_responsibility(impl: str, case: Case, query_mask: bool) -> None:
    """A key that no query sees keeps its prior; what comes out is normalised."""
    inputs, options = mixtures(case, query_mask)
    seen = seen_pairs(inputs, options)
    total = (dense_log_weights(inputs).softmax(2) * seen).sum((0, 3))
    count = seen.sum((0, 1, 2, 3))
    before = inputs.get("log_prior", torch.full((case.H, case.M), -math.log(case.M), dtype=torch.float64))
    expected = torch.where(count > 0, (total / count.clamp(min=1)).log(), per_position(before, case.Nk))

    statistics = call(mgk.prior_statistics, inputs, impl=impl, **options)
    assert_close("total", statistics[0], total, 1e-10)
    assert_close("count", statistics[1], count.double(), 0)
    updated = call(mgk.update_prior, inputs, impl=impl, **options)
    assert_close("prior", updated, expected, 1e-10)
    assert_close("sum of priors", updated.exp().sum(1)[:, count > 0], torch.ones_like(total[:, 0, count > 0]), 1e-12)


@given(case=cases(), query_mask=st.booleans())
def test_prior_update_never_lowers_the_likelihood(impl: str, case: Case, query_mask: bool) -> None:
    """Of any single key; and of all keys together, when one prior per head is fitted to all of them."""
    inputs, options = mixtures(case, query_mask)
    if "log_prior" in inputs:
        inputs["log_prior"] = inputs["log_prior"].log_softmax(1)
    else:
        inputs["log_prior"] = torch.full((case.H, case.M), -math.log(case.M), dtype=torch.float64)
    updated = {**inputs, "log_prior": call(mgk.update_prior, inputs, impl=impl, **options)}
    assert (likelihood(updated, options) >= likelihood(inputs, options) - 1e-10).all()

    pooled = {**inputs, "log_prior": per_position(inputs["log_prior"], case.Nk).logsumexp(-1).log_softmax(1)}
    total, count = call(mgk.prior_statistics, pooled, impl=impl, **options)
    if count.sum() > 0:
        better = {**pooled, "log_prior": (total.sum(-1) / count.sum()).log()}
        assert (likelihood(better, options).sum(-1) >= likelihood(pooled, options).sum(-1) - 1e-10).all()


@given(case=cases(), query_mask=st.booleans())
def test_update_components_is_the_weighted_mean_and_variance(impl: str, case: Case, query_mask: bool) -> None:
    inputs, options = mixtures(case, query_mask)
    gamma = dense_log_weights(inputs).softmax(2) * seen_pairs(inputs, options)  # (B,H,M,Nq,Nk)
    query, key = inputs["query"][:, :, None], component_keys(inputs)
    weight = gamma.sum(3)[..., None]
    expected_key = torch.where(weight > 0, gamma.mT @ query / weight.clamp(min=1e-300), key)
    scatter = (gamma * (query[..., :, None, :] - expected_key[..., None, :, :]).square().sum(-1)).sum((0, 3, 4))
    mass = gamma.sum((0, 3, 4))
    before = inputs.get("variance", torch.full((case.H, case.M), math.sqrt(case.D), dtype=torch.float64))
    expected_variance = torch.where(mass > 0, scatter / (case.D * mass.clamp(min=1e-300)), before)

    new_key, new_variance = call(mgk.update_components, inputs, impl=impl, **options)
    assert_close("key", new_key, expected_key, 1e-9)
    assert_close("variance", new_variance, expected_variance, 1e-9)


@given(case=cases(B=st.just(2), Nq=st.integers(5, 10)), query_mask=st.booleans())
def test_full_m_step_never_lowers_the_likelihood(impl: str, case: Case, query_mask: bool) -> None:
    """Means, variances and then the density's factor s2^(-D/2) in the prior, as the docstring says; in two steps."""
    inputs, options = mixtures(case, query_mask)
    options["is_causal"] = False  # a key seen by one query alone is fitted perfectly: its variance is zero
    prior = per_position(inputs.pop("log_prior", torch.zeros(case.H, case.M).double()), case.Nk).log_softmax(1)
    variance = inputs.pop("variance", torch.full((case.H, case.M), math.sqrt(case.D), dtype=torch.float64))

    def density(key: Tensor, variance: Tensor) -> Inputs:
        factor = -case.D / 2 * variance.log()
        return {"query": inputs["query"], "key": key, "variance": variance, "log_prior": prior + factor[..., None]}

    model = density(component_keys(inputs), variance)
    for _ in range(2):
        new_key, new_variance = call(mgk.update_components, model, impl=impl, **options)
        if not (new_variance > 1e-6).all():  # too few real queries to fit
            return
        better = density(new_key, new_variance)
        assert (likelihood(better, options).sum(-1) >= likelihood(model, options).sum(-1) - 1e-9).all()
        model = better


def test_m_steps_carry_no_gradient(impl: str) -> None:
    inputs = without(Case(variance="tensor").inputs(), "value")
    results = [
        *call(mgk.prior_statistics, inputs, impl=impl),
        call(mgk.update_prior, inputs, impl=impl),
        *call(mgk.update_components, inputs, impl=impl),
    ]
    assert not any(tensor.requires_grad for tensor in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_m_steps_of_low_precision_accumulate_in_float32(impl: str, dtype: torch.dtype) -> None:
    """The inputs are rounded once, to `dtype`; everything after is float32: a hundred roundings of 1e-7."""
    inputs = {name: tensor.detach() for name, tensor in without(Case(Nq=40, Nk=9).inputs(dtype), "value").items()}
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    updated, expected = (call(mgk.update_prior, x, impl=name) for x, name in ((inputs, impl), (exact, "reference")))
    assert updated.dtype == torch.float32
    assert_close("prior", updated.double(), expected, 1e-5)
    components = zip(
        call(mgk.update_components, inputs, impl=impl),
        call(mgk.update_components, exact, impl="reference"),
        strict=True,
    )
    for actual, wanted in components:
        assert actual.dtype == torch.float32
        assert_close("components", actual.double(), wanted, 1e-5)


def test_statistics_of_batches_add_up(impl: str) -> None:
    inputs, options = mixtures(Case(B=2, masked=True, is_causal=True, seed=5), query_mask=True)
    whole = call(mgk.prior_statistics, inputs, impl=impl, **options)
    parts = []
    for b in range(2):
        own = {name: tensor[b : b + 1] if name in ("query", "key") else tensor for name, tensor in inputs.items()}
        masks = {name: mask[b : b + 1] for name, mask in options.items() if name.endswith("mask")}
        parts.append(call(mgk.prior_statistics, own, impl=impl, is_causal=True, **masks))
    for both, first, second in zip(whole, *parts, strict=True):
        assert_close("statistics", both, first + second, 1e-12)


def test_far_queries_lose_no_digits(impl: str) -> None:
    """The step is the same wherever the origin is: 1e4 away it would cost sum |q|^2 - N |k|^2 eight digits."""
    inputs, _ = mixtures(Case(variant="mgk", Nq=20, seed=4), query_mask=False)
    moved = {**inputs, "query": inputs["query"] + 1e4, "key": inputs["key"] + 1e4}
    key, variance = call(mgk.update_components, inputs, impl=impl)
    moved_key, moved_variance = call(mgk.update_components, moved, impl=impl)
    assert_close("key", moved_key - 1e4, key, 1e-9)  # 1e4 * 2e-16, and the rounding of the inputs
    assert_close("variance", moved_variance, variance, 1e-9)
