"""Blocks of the size that users get: sums over several of them, and the smallest numbers that they work with."""

from __future__ import annotations

import math

import pytest
import torch

import mgk
from mgk.ops.blockwise.attend import backward_rows
from mgk.ops.blockwise.blocks import KEY_BLOCK
from tests.ops.common import Case, call, without


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_an_m_step_over_several_blocks_of_keys(variant: str) -> None:
    """Causal, with more keys than queries: the rows and the keys of a block both start behind 0."""
    case = Case(variant, B=1, H=1, M=2, Nq=KEY_BLOCK // 2 + 100, Nk=KEY_BLOCK + 40, D=4, prior=None, is_causal=True)
    inputs = {name: tensor.detach() for name, tensor in without(case.inputs(), "value").items()}
    options = without(case.options(), "e_step")
    found, wanted = (
        call(mgk.ops.prior_statistics, inputs, impl=impl, **options) for impl in ("blockwise", "reference")
    )
    for one, two in zip(found, wanted, strict=True):  # sums of hundreds of numbers up to 1
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_works_with_normal_numbers(dtype: torch.dtype) -> None:
    """Its weights sum to 1, and the least of them times a small gradient is not denormal, which is slow on a CPU."""
    offset, total = torch.zeros(1, 2, dtype=dtype), torch.full((1, 2), 4.0, dtype=dtype)
    moved, factor, lowest = backward_rows(offset, total, late=False)
    torch.testing.assert_close((moved - offset).exp(), total)
    assert factor is None
    assert math.exp(lowest) * 1e-18 >= torch.finfo(dtype).tiny
    same, factor, lowest = backward_rows(offset, total, late=True)  # weights up to e^-lowest
    assert torch.equal(same, offset)
    assert factor is not None
    assert torch.equal(factor, total)
    assert math.exp(lowest) >= torch.finfo(dtype).tiny
