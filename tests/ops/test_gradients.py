"""Gradients against finite differences, for every float argument of every form; and those of bad numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
    attend,
    call,
    cases,
    dense_log_weights,
    gradients,
    visible,
    without,
)

pytestmark = pytest.mark.usefixtures("small_blocks")

SMALL = Case(B=1, H=2, M=2, Nq=4, Nk=5, D=2, Dv=2, masked=True, seed=11)
FORMS = [
    replace(SMALL, prior="position", variance="tensor", is_causal=True),
    replace(SMALL, prior="head", variance=None, is_causal=False),
    replace(SMALL, prior=None, variance="tensor", M=3, H=1, masked=False, is_causal=True),
    replace(SMALL, prior="head", variance="tensor", M=1, Nq=6, Nk=3, is_causal=True),
]


def without_ties(case: Case) -> Inputs:
    """Inputs whose components differ by more than a finite difference moves them, so that the maximum is smooth."""
    inputs = case.inputs()
    if case.M > 1:
        top = dense_log_weights(inputs, with_prior=False).topk(2, dim=2).values
        assert float((top[:, :, 0] - top[:, :, 1]).detach().min()) > 1e-4
    return inputs


def check(inputs: Inputs, function: Any, again: bool = False) -> None:
    names = list(inputs)

    def positional(*tensors: Tensor) -> Any:
        return function(dict(zip(names, tensors, strict=True)))

    checker = torch.autograd.gradgradcheck if again else torch.autograd.gradcheck
    assert checker(positional, tuple(inputs.values()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck(impl: str, variant: str, e_step: str, case: Case) -> None:
    case = replace(case, variant=variant, e_step=e_step)
    check(without_ties(case), lambda inputs: attend(inputs, impl, **case.options()))


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", FORMS[:2], ids=range(2))
def test_reference_differentiates_twice(variant: str, e_step: str, case: Case) -> None:
    case = replace(case, variant=variant, e_step=e_step, Nq=3, Nk=3, H=1)
    check(without_ties(case), lambda inputs: attend(inputs, "reference", **case.options()), again=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("view", ["attention_weights", "responsibilities"])
def test_dense_views_differentiate(view: str, variant: str) -> None:
    case = replace(FORMS[0], variant=variant)
    options = {"is_causal": case.is_causal, "key_mask": case.key_mask()}
    check(without(case.inputs(), "value"), lambda inputs: getattr(mgk, view)(**inputs, **options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_only_what_requires_grad_gets_one(impl: str, variant: str) -> None:
    """Each argument alone has the gradient that it has among the others."""
    inputs = Case(variant=variant, variance="tensor", is_causal=True).inputs()
    together = gradients(attend(inputs, impl, is_causal=True), inputs)
    for name in inputs:
        alone = {other: tensor.detach() for other, tensor in inputs.items()}
        alone[name].requires_grad_()
        grad = gradients(attend(alone, impl, is_causal=True), {name: alone[name]})[name]
        torch.testing.assert_close(grad, together[name], rtol=1e-12, atol=1e-12)
    frozen = {name: tensor.detach() for name, tensor in inputs.items()}
    assert not attend(frozen, impl).requires_grad


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_parameters_may_be_wider_than_the_activations(impl: str, variant: str) -> None:
    """Under mixed precision shift, log_prior and variance stay in float32: so do their gradients."""
    inputs = Case(variant=variant, variance="tensor").inputs(torch.float32)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].detach().bfloat16().requires_grad_()
    output = attend(inputs, impl)
    assert output.dtype == torch.bfloat16
    for name, grad in gradients(output, inputs).items():
        assert grad.dtype == inputs[name].dtype
        assert grad.isfinite().all()
        assert grad.abs().max() > 0


@pytest.mark.parametrize("function", [mgk.attention_weights, mgk.responsibilities])
@pytest.mark.parametrize("variant", VARIANTS)
def test_views_ignore_masked_keys(variant: str, function: Callable[..., Tensor]) -> None:
    """The dense matrices, and their gradients, which masked NaN would reach as 0 * NaN."""
    case = Case(variant, masked=True)
    mask, inputs = case.key_mask(), without(case.inputs(), "value")
    assert mask is not None
    assert not mask.all()
    hidden = ~mask.view(case.B, *[1] * (inputs["key"].dim() - 3), -1, 1)
    dirty = {**inputs, "key": inputs["key"].detach().masked_fill(hidden, math.nan).requires_grad_()}
    found, expected = (call(function, x, key_mask=mask) for x in (dirty, inputs))
    assert_close("view", found, expected, 1e-12)
    wanted = gradients(expected, inputs)
    for name, grad in gradients(found, dirty).items():
        assert_close(name, grad, wanted[name], 1e-10)


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(), name=st.sampled_from(["query", "key", "value", "shift", "grad"]))
def test_gradients_show_a_visible_nan(impl: str, case: Case, name: str) -> None:
    """Every row that sees it has a bad gradient, and so has a key that such a row sees."""
    inputs, options = case.inputs(), case.options()
    name = name if name in (*inputs, "grad") else "key"
    dirty = {each: tensor.detach().clone() for each, tensor in inputs.items()}
    upstream = torch.randn(case.B, case.H, case.Nq, case.Dv, dtype=torch.float64)
    target = upstream if name == "grad" else dirty[name]
    target[(0,) * target.dim()] = math.nan
    leaves = {each: tensor.requires_grad_() for each, tensor in dirty.items()}
    seen = visible(inputs, options)[0, 0]  # (Nq,Nk)
    rows = seen[:, 0] if name in ("key", "value") else seen.any(-1)
    if name in ("query", "grad"):
        rows[1:] = False
    grads = gradients(attend(leaves, impl, **options), leaves, upstream)
    assert not grads["query"][0, 0, rows].isfinite().all(-1).any()
    if name != "value":
        assert not grads["value"][0, 0, (seen & rows[:, None]).any(0)].isfinite().all(-1).any()
