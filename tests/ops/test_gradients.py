"""Gradients against finite differences, for every float argument of every form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mgk
from tests.ops.common import E_STEPS, IMPLS, VARIANTS, Case, Inputs, attend, dense_log_weights, gradients, without

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
