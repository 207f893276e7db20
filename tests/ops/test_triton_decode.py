"""Decoding kernels against the reference, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.common import E_STEPS, VARIANTS, Case, Inputs, attend, attend_with_lse, cases
from tests.ops.test_precision import eager
from tests.ops.triton_env import DEVICE, rounded_exponent, strict_memory

# isort: split
from mgk.ops.options import Options, Visibility
from mgk.ops.triton import decode

CACHE = Case(B=2, H=2, M=2, Nq=1, Nk=75, D=20, Dv=24, prior="position", masked=True, seed=3)
FEW = replace(CACHE, Nq=5, is_causal=True)


@pytest.fixture(autouse=True, scope="module")
def many_splits() -> Iterator[None]:
    """Make small caches span several tiles and several splits."""
    with pytest.MonkeyPatch.context() as patch, strict_memory():
        patch.setattr(decode, "SPLIT_TILES", 1)
        patch.setattr(decode, "multiprocessors", lambda device: 2)
        yield


def numbers(case: Case, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Inputs:
    return {name: tensor.detach() for name, tensor in case.inputs(dtype, scale=scale).items()}


def run(inputs: Inputs, case: Case, key_mask: Tensor | None = None) -> Tensor:
    return run_with_lse(inputs, case, key_mask)[0]


def run_with_lse(inputs: Inputs, case: Case, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what the kernels compute, on the CPU."""
    there = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    mask = case.key_mask() if key_mask is None else key_mask
    visibility = Visibility(case.is_causal, case.window, None if mask is None else mask.to(DEVICE))
    options = Options(
        there.get("log_prior"), there.get("variance", case.D**0.5), visibility, case.e_step == "hard", return_lse=True
    )
    results = decode.decode_attention(there["query"], there["key"], there.get("shift"), there["value"], options)
    return results[0].cpu(), results[1].cpu()


def exact(inputs: Inputs, case: Case) -> Tensor:
    return attend({name: tensor.double() for name, tensor in inputs.items()}, "reference", **case.options())


def error(output: Tensor, target: Tensor) -> float:
    """Return the largest error, NaN if there is one."""
    return float((output.double() - target).abs().max())


@given(
    case=cases(
        Nq=st.sampled_from([1, 1, 2, 7, 16]), Nk=st.integers(1, 110), D=st.integers(1, 40), Dv=st.integers(1, 40),
        H=st.sampled_from([1, 3, 6]),
    ),
    group=st.sampled_from([1, 1, 3]), window=st.sampled_from([None, 1, 9, 60]),
)  # fmt: skip
def test_equals_the_formula(case: Case, group: int, window: int | None) -> None:
    """Exponents stay below 1e2 here, so a weight is right to 1e2 * 6e-8, and so is a mean of values of size 1."""
    case = replace(case, G=max(1, case.H // group), window=window, is_causal=case.is_causal or window is not None)
    inputs = numbers(case)
    double = {name: tensor.double() for name, tensor in inputs.items()}
    output, lse = run_with_lse(inputs, case)
    wanted, wanted_lse = attend_with_lse(double, "reference", **case.options())
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-5)
    if case.prior is None and case.e_step == "soft":
        wanted_lse = wanted_lse + math.log(case.M)  # the public functions subtract it for a uniform prior
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=5e-5)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", [CACHE, FEW], ids=["one", "few"])
@pytest.mark.parametrize("scale", [6.0, 30.0])
def test_large_numbers_cost_no_more_than_in_eager_float32(scale: float, base: Case, variant: str, e_step: str) -> None:
    """Exponents of thousands, and components without a prior. The band is one rounding of the largest exponent."""
    case = replace(base, variant=variant, e_step=e_step)
    inputs = numbers(case, scale=scale)
    inputs["log_prior"][:, 0, ::3] = -torch.inf
    inputs["log_prior"][0, :, ::5] = -torch.inf
    target = exact(inputs, case)
    allowed = error(attend(inputs, "reference", **case.options()), target)
    assert error(run(inputs, case), target) <= 2 * allowed + rounded_exponent(inputs)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", [CACHE, replace(FEW, variance="tensor")], ids=["one", "few"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_at_most_twice_that_of_eager_code(
    dtype: torch.dtype, base: Case, variant: str, e_step: str
) -> None:
    """The band is one rounding of a result to the dtype."""
    case = replace(base, variant=variant, e_step=e_step, masked=False)
    inputs = numbers(case, dtype)
    target, output = exact(inputs, case), run(inputs, case)
    assert output.dtype == dtype
    band = torch.finfo(dtype).eps * float(target.abs().max())
    assert error(output, target) <= 2 * error(eager(inputs, case), target) + band


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_query_is_rounded_once(variant: str, e_step: str) -> None:
    """No intermediate result is in half precision."""
    case = replace(CACHE, variant=variant, e_step=e_step)
    inputs = numbers(case, torch.bfloat16)
    target = exact(inputs, case)
    allowed = target.abs() * torch.finfo(torch.bfloat16).eps / 2 + 1e-5
    assert ((run(inputs, case).double() - target).abs() <= allowed).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", [CACHE, FEW], ids=["one", "few"])
def test_masked_keys_are_not_read(base: Case, variant: str) -> None:
    """They may hold NaN, as uninitialised memory does."""
    case = replace(base, variant=variant)
    inputs, mask = numbers(case), case.key_mask()
    assert mask is not None
    dirty = {name: tensor.clone() for name, tensor in inputs.items()}
    hidden = ~mask[:, None].expand(-1, case.H, -1)
    dirty["value"][hidden] = torch.nan
    dirty["key"][hidden[:, :, None].expand(-1, -1, case.M, -1) if variant == "mgk" else hidden] = torch.nan
    assert torch.equal(run(dirty, case), run(inputs, case))


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_splits_with_all_some_and_no_keys_visible(variant: str, e_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is read once per split; without masked keys two tiles are read at a time, except for ragged ends."""
    monkeypatch.setattr(decode, "NUMBERS", 512)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    case = replace(CACHE, variant=variant, e_step=e_step, Nk=301, masked=False, prior="head")
    inputs = numbers(case)
    mask = torch.zeros(2, 301, dtype=torch.bool)
    mask[0, 90:201] = True
    mask[1, :301] = True
    for seen in (None, mask):
        options = case.options() | ({} if seen is None else {"key_mask": seen})
        target = attend({name: tensor.double() for name, tensor in inputs.items()}, "reference", **options)
        assert error(run(inputs, case, seen), target) <= 1e-5


@pytest.mark.parametrize("base", [CACHE, FEW], ids=["one", "few"])
def test_a_query_without_keys_gets_zeros(base: Case) -> None:
    """All masked in one batch entry; more causal queries than keys; no keys at all."""
    inputs, mask = numbers(base), torch.ones(2, base.Nk, dtype=torch.bool)
    mask[0] = False
    output = run(inputs, base, mask)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()

    short = replace(FEW, Nk=3, masked=False)
    output = run(numbers(short), short)
    assert (output[:, :, :2] == 0).all()
    assert (output[:, :, 2:] != 0).all()

    none = replace(base, Nk=0, masked=False, prior="head")
    assert torch.equal(run(numbers(none), none), torch.zeros(2, 2, base.Nq, 24))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", [CACHE, FEW], ids=["one", "few"])
def test_any_strides(base: Case, variant: str) -> None:
    """A slice of a longer cache with layout (B,N,H,D), and tensors whose last dimension is not contiguous."""
    case = replace(base, variant=variant)
    inputs = numbers(case)
    wanted, views = run(inputs, case), dict(inputs)
    for name in ("query", "key", "value"):
        memory = torch.full_like(inputs[name], torch.nan).repeat_interleave(2, -2).transpose(1, -2).contiguous()
        views[name] = memory.transpose(1, -2)[..., : inputs[name].shape[-2], :]
        views[name].copy_(inputs[name])
    turned = {**inputs, "value": inputs["value"].mT.contiguous().mT, "key": inputs["key"].mT.contiguous().mT}
    for same in (views, turned):
        torch.testing.assert_close(run(same, case), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("base", [CACHE, FEW], ids=["one", "few"])
def test_the_number_of_splits_does_not_matter(base: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split writes the output itself; many are joined in several rounds. float32 sums differ by their rounding."""
    inputs = numbers(base)
    monkeypatch.setattr(decode, "MAX_SPLITS", 1)
    alone = run(inputs, base)
    monkeypatch.setattr(decode, "MAX_SPLITS", 256)
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(decode, "NUMBERS", 512)
    monkeypatch.setattr(decode, "JOINED", 2)
    assert decode.key_splits(4, base.Nk, 16, decode.PROGRAMS, torch.device(DEVICE))[0] > 2 * decode.JOINED
    torch.testing.assert_close(run(inputs, base), alone, rtol=0, atol=1e-5)


@given(heads=st.integers(1, 300), keys=st.integers(1, 10**6), block=st.sampled_from([16, 32, 64]))
def test_splits_cover_the_keys_and_none_is_empty(heads: int, keys: int, block: int) -> None:
    splits, split_keys = decode.key_splits(heads, keys, block, decode.PROGRAMS, torch.device(DEVICE))
    assert split_keys % block == 0
    assert (splits - 1) * split_keys < keys <= splits * split_keys


def test_too_many_queries_are_an_error() -> None:
    case = replace(CACHE, Nq=17)
    with pytest.raises(ValueError, match="query: expected at most 16"):
        run(numbers(case), case)
