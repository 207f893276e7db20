"""`return_lse`, the log of the row sums, and `merge_attention`, which joins partial results by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    attend_with_lse,
    cases,
    dense_lse,
    gradients,
    pick_keys,
)


def finite(lse: Tensor) -> Tensor:
    """Zero where a row sees no key."""
    return lse.masked_fill(lse == -torch.inf, 0)


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases())
def test_equals_the_dense_formula(impl: str, case: Case) -> None:
    """Values and gradients, with those of the output at the same time."""
    inputs, options = case.inputs(), case.options()
    output, lse = attend_with_lse(inputs, impl, **options)
    exact = dense_lse(inputs, options)
    assert torch.equal(lse == -torch.inf, exact == -torch.inf)
    assert_same(finite(lse), finite(exact), inputs)
    assert torch.equal(output, attend(inputs, impl, **options))
    together = torch.cat([output, finite(lse)[..., None]], -1)
    apart = torch.cat([attend(inputs, impl, **options), finite(exact)[..., None]], -1)
    assert_same(together, apart, inputs)


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e5])
@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_numbers(variant: str, e_step: str, variance: str | None, scale: float) -> None:
    """Every path of blockwise, up to the late subtraction of the maximum. Errors are those of exponents of scale^2."""
    case = Case(variant, H=2, G=1, Nq=9, Nk=11, variance=variance, e_step=e_step)
    inputs, options = case.inputs(scale=scale), case.options()
    (_, lse), (_, exact) = (attend_with_lse(inputs, impl, **options) for impl in ("blockwise", "reference"))
    assert_close("lse", lse / scale**2, exact / scale**2, 1e-13)
    found, wanted = gradients(lse, inputs), gradients(exact, inputs)
    for name, grad in found.items():
        size = 1 + wanted[name].abs().max()
        assert_close(f"gradient of {name}", grad / size, wanted[name] / size, max(1e-11, 1e-14 * scale**2))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("e_step", E_STEPS)
def test_an_empty_row_has_no_gradient(impl: str, e_step: str) -> None:
    """Also where its incoming gradient is NaN, as after -inf - logsumexp([-inf])."""
    case = Case(Nq=9, Nk=4, is_causal=True, e_step=e_step, variance="tensor", prior="head")
    inputs = case.inputs()
    _, lse = attend_with_lse(inputs, impl, **case.options())
    empty = lse == -torch.inf
    assert bool(empty[:, :, :5].all())
    assert not bool(empty[:, :, 5:].any())
    upstream = torch.where(empty, torch.nan, 1.0)
    for name, grad in gradients(lse, inputs, upstream).items():
        assert bool(grad.isfinite().all()), name
        if name == "query":
            assert not bool(grad[:, :, :5].any())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("masked_query", [False, True])
def test_rows_that_see_nothing_are_minus_infinity(impl: str, masked_query: bool) -> None:
    inputs = Case(B=2).inputs()
    none = torch.zeros(2, 5 if masked_query else 7, dtype=torch.bool)
    output, lse = attend_with_lse(inputs, impl, **{"query_mask" if masked_query else "key_mask": none})
    assert bool((lse == -torch.inf).all())
    assert not bool(output.any())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_is_in_float32_for_half_precision(impl: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    output, lse = attend_with_lse(Case().inputs(dtype), impl)
    assert (output.dtype, lse.dtype, lse.shape) == (dtype, expected, (2, 2, 5))


@pytest.mark.parametrize("impl", IMPLS)
def test_dropout_does_not_change_it(impl: str) -> None:
    inputs = Case(Nq=9, Nk=11).inputs()
    _, lse = attend_with_lse(inputs, impl, dropout_p=0.5)
    assert_same(lse, attend_with_lse(inputs, impl)[1], inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("e_step", E_STEPS)
def test_an_unused_prior_has_a_zero_gradient(impl: str, e_step: str) -> None:
    inputs = Case(prior="head", e_step=e_step).inputs()
    (grad,) = torch.autograd.grad(attend_with_lse(inputs, impl, e_step=e_step)[1].sum(), inputs["log_prior"])
    assert bool(grad.any()) == (e_step == "soft")


def parts_of(inputs: Inputs, ends: list[int], impl: str, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Attention to the keys before each of `ends` and after the one before."""
    parts, mask = [], options["key_mask"]
    for start, end in zip([0, *ends], [*ends, inputs["key"].shape[-2]], strict=True):
        own = options | {"key_mask": None if mask is None else mask[:, start:end]}
        parts.append(attend_with_lse(pick_keys(inputs, slice(start, end)), impl, **own))
    return parts


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(is_causal=False), ends=st.lists(st.integers(0, 10), max_size=4))
def test_merging_any_partition_of_the_keys_is_the_whole(impl: str, case: Case, ends: list[int]) -> None:
    """Values and gradients, also with parts that hold no key or no visible one."""
    inputs, options = case.inputs(), case.options()
    ends = sorted(min(end, case.Nk) for end in ends)
    output, lse = mgk.merge_attention(*parts_of(inputs, ends, impl, options))
    whole, whole_lse = attend_with_lse(inputs, impl, **options)
    assert_same(output, whole, inputs, 1e-9)
    assert torch.equal(lse == -torch.inf, whole_lse == -torch.inf)
    assert_same(finite(lse), finite(whole_lse), inputs, 1e-9)


def test_merging_is_associative_and_knows_no_order() -> None:
    inputs = Case(Nk=12).inputs()
    a, b, c = parts_of(inputs, [3, 8], "blockwise", Case(Nk=12).options())
    first = mgk.merge_attention(mgk.merge_attention(a, b), c)
    second = mgk.merge_attention(c, mgk.merge_attention(b, a))
    for one, other in zip(first, second, strict=True):
        assert_same(one, other, inputs)


def test_windows_tile_the_causal_keys() -> None:
    """The last 4 keys, and those before them, which are a causal mask for a shorter sequence of keys."""
    case = Case(Nq=9, Nk=9, prior="head")
    inputs = case.inputs()
    near = attend_with_lse(inputs, "blockwise", is_causal=True, window=4)
    far = attend_with_lse(pick_keys(inputs, slice(0, 5)), "blockwise", is_causal=True)
    output, lse = mgk.merge_attention(near, far)
    whole, whole_lse = attend_with_lse(inputs, "blockwise", is_causal=True)
    assert_same(output, whole, inputs)
    assert_same(lse, whole_lse, inputs)


def test_merging_far_apart_sums_does_not_overflow() -> None:
    output = torch.tensor([[[[1.0]]], [[[2.0]]]])
    parts = [(output[:1], torch.full((1, 1, 1), 1e4)), (output[1:], torch.full((1, 1, 1), -1e4))]
    merged, lse = mgk.merge_attention(*parts)
    assert (merged.item(), lse.item()) == (1.0, 1e4)
    merged, lse = mgk.merge_attention(*parts[:1], *parts[:1])
    assert merged.item() == 1.0
    assert lse.item() == pytest.approx(1e4 + math.log(2))


def test_merging_does_not_hide_nan() -> None:
    good, bad = torch.ones(1, 1, 2, 1), torch.tensor([[[[math.nan], [1.0]]]])
    lse = torch.tensor([[[0.0, math.nan]]])
    merged, total = mgk.merge_attention((good, torch.zeros(1, 1, 2)), (bad, lse))
    assert bool(merged.isnan().all())
    assert total.isnan().flatten().tolist() == [False, True]


PART = (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((), ValueError, "^parts: expected at least one"),
        ((PART[0],), TypeError, r"^parts\[0\]: expected a pair"),
        ((PART, (PART[0],)), TypeError, r"^parts\[1\]: expected a pair"),
        ((PART, (PART[0], None)), TypeError, r"^parts\[1\]\[1\]: expected a torch.Tensor"),
        ((PART, (PART[0][..., :2], PART[1])), ValueError, r"^parts\[1\]\[0\]: .*the first part"),
        (((PART[0], PART[1][:, :1]),), ValueError, r"^parts\[0\]\[1\]: .*to go with the output"),
        (((PART[0], PART[1].double()),), TypeError, r"^parts\[0\]\[1\]: expected torch.float32"),
        ((PART, (PART[0].double(), PART[1].double())), TypeError, r"^parts\[1\]\[0\]: expected the dtype"),
        (((PART[0][0], PART[1][0]),), ValueError, r"^parts\[0\]\[1\]: expected shape \(H,Tq\)"),
    ],
)
def test_wrong_parts_are_errors(parts: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mgk.merge_attention(*parts)


def test_it_is_one_graph() -> None:
    """torch.compile sees operators whose fake outputs have the right shapes."""
    inputs = Case(H=2, G=1).inputs()

    def joined(x: Inputs) -> Tensor:
        parts = [attend_with_lse(pick_keys(x, at), "blockwise") for at in (slice(0, 3), slice(3, 7))]
        output, lse = mgk.merge_attention(*parts)
        return output * lse[..., None]

    compiled = torch.compile(joined, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(each(inputs).square().sum(), list(inputs.values())) for each in (compiled, joined)]
    for name, found, wanted in zip(inputs, *results, strict=True):
        assert_close(name, found, wanted, 1e-10)
