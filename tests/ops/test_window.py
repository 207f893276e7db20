"""A window: a query sees the last `window` keys up to its own position, lower-right aligned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mgk
from mgk.ops.blockwise.blocks import HeadGroups, Reach, make_blocks
from tests.ops.common import (
    E_STEPS,
    IMPLS,
    VARIANTS,
    Case,
    assert_close,
    assert_same,
    attend,
    attend_with_lse,
    call,
    cases,
    component_keys,
    dense_lse,
    dense_weights,
    visible,
    without,
)


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(is_causal=True, window=st.integers(1, 11), Nk=st.integers(1, 12)))
def test_equals_the_dense_formula_with_that_mask(impl: str, case: Case) -> None:
    inputs, options = case.inputs(), case.options()
    output, lse = attend_with_lse(inputs, impl, **options)
    assert_same(output, dense_weights(inputs, options) @ inputs["value"], inputs)
    assert_close("lse", lse, dense_lse(inputs, options), 1e-10)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_long_as_the_sequence_is_causal(variant: str, impl: str) -> None:
    inputs = Case(variant, Nq=6, Nk=9).inputs()
    for window in (9, 10, 1 << 40):
        windowed = attend(inputs, impl, is_causal=True, window=window)
        assert torch.equal(windowed, attend(inputs, impl, is_causal=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_one_returns_the_value_at_the_own_position(variant: str, impl: str) -> None:
    inputs = Case(variant, Nq=6, Nk=9).inputs()
    assert_close("output", attend(inputs, impl, is_causal=True, window=1), inputs["value"][:, :, 3:], 1e-12)


@pytest.mark.parametrize("window", [1, 5, 100, 383, 384, 500])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_the_real_size_agree_with_the_reference(variant: str, e_step: str, window: int) -> None:
    """Both edges within one block and in different ones, aligned and not."""
    case = Case(variant, B=1, H=2, G=1, Nq=391, Nk=805, D=3, masked=True, e_step=e_step, is_causal=True, window=window)
    inputs, options = case.inputs(), case.options()
    assert_same(attend(inputs, "blockwise", **options), attend(inputs, "reference", **options), inputs, 1e-9)


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 900), st.sampled_from([1, 2, 3]))
def test_blocks_hold_each_visible_pair_once_and_few_others(queries: int, keys: int, window: int, scores: int) -> None:
    """A block is at most as wide as the window and its queries: blocks that the window hides are not visited."""
    counts = torch.zeros(queries, keys, dtype=torch.int)
    active = torch.ones(1, keys, dtype=torch.bool)
    for block in make_blocks(active, Reach(queries, keys, True, window), HeadGroups(1), scores):
        assert sum(span.size for span in block.keys) < window + block.queries.size
        for span in block.keys:
            counts[slice(*block.queries), slice(*span)] += 1
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries - window + 1)
    assert bool((counts[seen] == 1).all())
    assert int(counts.max()) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_responsibilities_are_zero_outside(variant: str) -> None:
    case = Case(variant, Nq=6, Nk=9, masked=True, is_causal=True, window=3)
    inputs, options = without(case.inputs(), "value"), case.options()
    seen = visible(inputs, options)
    assert_close("weights", call(mgk.attention_weights, inputs, **options), dense_weights(inputs, options), 1e-12)
    gamma = call(mgk.responsibilities, inputs, **without_e_step(options))
    assert_close("gamma", gamma.sum(2), seen.expand_as(gamma[:, :, 0]).double(), 1e-12)


def without_e_step(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "e_step"}


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(is_causal=True, window=st.integers(1, 11), e_step="soft"))
def test_m_steps_sum_over_the_visible_queries(impl: str, case: Case) -> None:
    inputs, options = without(case.inputs(), "value"), without_e_step(case.options())
    gamma = call(mgk.responsibilities, inputs, **options)
    total, count = call(mgk.prior_statistics, inputs, **options, impl=impl)
    assert_close("sums", total, gamma.sum((0, 3)), 1e-10)
    seen = visible(inputs, options).expand(inputs["query"].shape[0], -1, -1, -1)
    assert_close("counts", count, seen.sum((0, 1, 2)).double(), 0)
    keys, _ = call(mgk.update_components, inputs, **options, impl=impl)
    weight = gamma.sum(3)
    means = (gamma.mT @ inputs["query"][:, :, None]) / weight.clamp(min=1e-300)[..., None]
    assert_close("means", keys, torch.where(weight[..., None] > 1e-9, means, keys), 1e-6)
    assert keys.shape == component_keys(inputs).shape


@pytest.mark.parametrize("function", [mgk.mgk_attention, mgk.attention_weights, mgk.update_prior])
def test_without_a_causal_mask_is_an_error(function: Any) -> None:
    inputs = Case("mgk").inputs()
    with pytest.raises(ValueError, match=r"^window: expected None without is_causal=True, got 2"):
        function(**inputs if function is mgk.mgk_attention else without(inputs, "value"), window=2)
