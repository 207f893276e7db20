"""The kernel for the M-step of the prior, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mgk.ops import reference
from mgk.ops.options import Options, Visibility
from tests.ops.common import VARIANTS, Case, Inputs, cases, without
from tests.ops.triton_env import DEVICE, rounded_exponent, strict_memory

# isort: split
from mgk.ops.triton import prior

SHAPE = Case(B=2, H=2, M=2, Nq=70, Nk=41, D=20, prior="position", seed=5)


@pytest.fixture(autouse=True, scope="module")
def memory() -> Iterator[None]:
    with strict_memory():
        yield


def numbers(case: Case, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Inputs:
    return {name: tensor.detach() for name, tensor in without(case.inputs(dtype, scale=scale), "value").items()}


def real_queries(case: Case) -> Tensor:
    return torch.rand(case.B, case.Nq, generator=torch.Generator().manual_seed(case.seed + 2)) < 0.7


def call(function: object, inputs: Inputs, case: Case, query_mask: Tensor | None, device: str) -> tuple[Tensor, Tensor]:
    there = {name: tensor.to(device) for name, tensor in inputs.items()}
    masks = [None if mask is None else mask.to(device) for mask in (case.key_mask(), query_mask)]
    visibility = Visibility(case.is_causal, case.window, *masks)
    options = Options(there.get("log_prior"), there.get("variance", case.D**0.5), visibility)
    total, count = function(there["query"], there["key"], there.get("shift"), options)  # type: ignore[operator]
    return total.cpu(), count.cpu()


def run(inputs: Inputs, case: Case, query_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return call(prior.prior_statistics, inputs, case, query_mask, DEVICE)


def exact(inputs: Inputs, case: Case, query_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    double = {name: tensor.double() for name, tensor in inputs.items()}
    return call(reference.prior_statistics, double, case, query_mask, "cpu")


def check(case: Case, inputs: Inputs, query_mask: Tensor | None = None) -> None:
    """Exponents stay below 1e2 here, so each share is right to 1e2 * 6e-8 of itself, and so is their sum."""
    total, count = run(inputs, case, query_mask)
    wanted_total, wanted_count = exact(inputs, case, query_mask)
    assert total.dtype == count.dtype == torch.float32
    torch.testing.assert_close(total.double(), wanted_total, rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(count.double(), wanted_count, rtol=0, atol=0)


@given(case=cases(Nq=st.integers(1, 80), Nk=st.integers(1, 50), D=st.integers(1, 40)), query_mask=st.booleans())
def test_equals_the_formula(case: Case, query_mask: bool) -> None:
    check(case, numbers(case), real_queries(case) if query_mask else None)


@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_again(dtype: torch.dtype, variant: str, variance: str | None) -> None:
    """Products of two half-precision numbers are exact in float32, so only float32 rounding remains."""
    case = replace(SHAPE, variant=variant, variance=variance, is_causal=True, masked=True)
    check(case, numbers(case, dtype))


@pytest.mark.parametrize("components", [2, 3])
@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [6.0, 30.0])
def test_large_numbers_cost_no_more_than_in_eager_float32(
    scale: float, variant: str, variance: str | None, components: int
) -> None:
    """The exponents are thousands; the band is one rounding of the largest of them."""
    case = replace(SHAPE, variant=variant, variance=variance, M=components)
    inputs = numbers(case, scale=scale)
    target = exact(inputs, case)[0]
    eager = call(reference.prior_statistics, inputs, case, None, "cpu")[0]
    allowed = (eager - target).abs().max()
    assert (run(inputs, case)[0] - target).abs().max() <= 2 * allowed + rounded_exponent(inputs)


@pytest.mark.parametrize("components", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_removed_components_have_no_share(variant: str, components: int) -> None:
    """The first, the last, or all components; the queries are counted in any case."""
    case = replace(SHAPE, variant=variant, M=components)
    inputs = numbers(case)
    inputs["log_prior"][:, 0, ::3] = -torch.inf
    inputs["log_prior"][:, -1, ::4] = -torch.inf
    inputs["log_prior"][0, :, ::5] = -torch.inf
    check(case, inputs)
    total, count = run(inputs, case)
    assert (total[:, 0, ::3] == 0).all()
    assert (total[0, :, ::5] == 0).all()
    assert (count == case.B * case.Nq).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_small_shares_keep_their_relative_precision(variant: str) -> None:
    """A component of prior e^-60 keeps a relative error of float32, though 1 minus the other's share would be 0."""
    case = replace(SHAPE, variant=variant, prior="head")
    inputs = numbers(case)
    inputs["log_prior"] = torch.tensor([[0.0, -60.0], [-60.0, 0.0]])
    check(case, inputs)
    assert (exact(inputs, case)[0] < 1e-12).any()


@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_queries_and_keys_are_not_read(variant: str, variance: str | None) -> None:
    """Padding may hold NaN."""
    case = replace(SHAPE, variant=variant, variance=variance, is_causal=True, masked=True)
    inputs, real, mask = numbers(case), real_queries(case), case.key_mask()
    assert mask is not None
    dirty = {name: tensor.clone() for name, tensor in inputs.items()}
    dirty["query"][~real[:, None].expand(-1, case.H, -1)] = torch.nan
    hidden = ~mask[:, None].expand(-1, case.H, -1)
    dirty["key"][hidden[:, :, None].expand(-1, -1, case.M, -1) if variant == "mgk" else hidden] = torch.nan
    for clean, other in zip(run(inputs, case, real), run(dirty, case, real), strict=True):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_at_the_end_and_empty_batches(is_causal: bool) -> None:
    """Full blocks of masked queries; one batch entry has no query at all."""
    case = replace(SHAPE, is_causal=is_causal)
    inputs = numbers(case)
    queries = torch.arange(case.Nq) < torch.tensor([[20], [0]])
    check(case, inputs, queries)
    check(case, inputs, torch.zeros(2, case.Nq, dtype=torch.bool))


@pytest.mark.parametrize("queries", [0, 3])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("keys", [0, 5])
def test_empty_inputs(batch: int, queries: int, keys: int) -> None:
    case = replace(SHAPE, B=batch, Nq=queries, Nk=keys)
    check(case, numbers(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_strides(variant: str) -> None:
    """Slices of longer tensors with layout (B,N,H,D), and tensors whose last dimension is not contiguous."""
    case = replace(SHAPE, variant=variant)
    inputs = numbers(case)
    views, turned = dict(inputs), {**inputs, "query": inputs["query"].mT.contiguous().mT}
    turned["key"] = inputs["key"].mT.contiguous().mT
    for name in ("query", "key"):
        memory = torch.full_like(inputs[name], torch.nan).repeat_interleave(2, -2).transpose(1, -2).contiguous()
        views[name] = memory.transpose(1, -2)[..., : inputs[name].shape[-2], :]
        views[name].copy_(inputs[name])
    check(case, views)
    check(case, turned)


def test_tiles_are_powers_of_two_that_a_product_takes() -> None:
    for arguments in product(range(1, 9), (16, 32, 64, 128, 256), (2, 4), (False, True)):
        for size in prior.tile(*arguments):
            assert size >= 16
            assert size & (size - 1) == 0
