"""Low precision: errors against float64 no larger than eager code in the same dtype commits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.common import E_STEPS, IMPLS, VARIANTS, Case, Inputs, attend, component_keys, gradients, visible

pytestmark = [pytest.mark.usefixtures("small_blocks"), pytest.mark.parametrize("impl", IMPLS)]

SHAPE = Case(B=2, H=2, M=2, Nq=33, Nk=47, D=16, Dv=24, prior="position", variance="tensor", seed=9)


def eager(inputs: Inputs, case: Case) -> Tensor:
    """Eqns 9, 10 and 12 with every step rounded to the dtype of the inputs: no float32 anywhere."""
    query, key = inputs["query"][:, :, None], component_keys(inputs)
    distance = query.square().sum(-1)[..., :, None] - 2 * query @ key.mT + key.square().sum(-1)[..., None, :]
    variance = inputs.get("variance", torch.tensor(math.sqrt(case.D), dtype=query.dtype))
    logits = -distance / (2 * (variance[..., None, None] if variance.dim() else variance))
    if case.e_step == "hard":
        logits = logits.amax(2)
    else:
        prior = inputs.get("log_prior", torch.zeros(case.H, case.M, dtype=query.dtype))
        logits = (logits + (prior[..., None, None] if prior.dim() == 2 else prior[:, :, None])).logsumexp(2)
    weights = logits.masked_fill(~visible(inputs, case.options()), -torch.inf).softmax(-1)
    return weights @ inputs["value"]


@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_eager_code(
    impl: str, dtype: torch.dtype, variant: str, e_step: str, variance: str | None
) -> None:
    """Output and gradients; the band is one rounding of a result to the dtype. Hard ties are the eager code's own."""
    case = replace(SHAPE, variant=variant, e_step=e_step, variance=variance, is_causal=True)
    inputs = case.inputs(dtype)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    upstream = torch.randn(2, 2, 33, 24, generator=torch.Generator().manual_seed(4)).to(dtype)

    def results(output: Tensor, leaves: Inputs) -> Inputs:
        return {"output": output.detach(), **gradients(output, leaves, upstream.to(output))}

    wanted = results(attend(exact, "reference", **case.options()), exact)
    ours = results(attend(inputs, impl, **case.options()), inputs)
    theirs = results(eager(inputs, case), inputs)
    for name, target in wanted.items():
        assert ours[name].dtype == dtype
        band = torch.finfo(dtype).eps * float(target.abs().max())
        error, allowed = (float((result[name].double() - target).abs().max()) for result in (ours, theirs))
        assert error <= 2 * allowed + band, name


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_is_rounded_once(impl: str, dtype: torch.dtype, variant: str, e_step: str) -> None:
    """Accumulation is float32: the result is the exact one rounded to the dtype, but for 1e-5 before the rounding."""
    case = replace(SHAPE, variant=variant, e_step=e_step)
    inputs = {name: tensor.detach() for name, tensor in case.inputs(dtype).items()}
    exact = attend({name: tensor.double() for name, tensor in inputs.items()}, "reference", **case.options())
    output = attend(inputs, impl, **case.options()).double()
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
    assert ((output - exact).abs() <= allowed).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_does_not_round_the_exponents(impl: str, variant: str) -> None:
    """Inside a bfloat16 autocast region, float32 inputs are still computed in float32."""
    inputs = replace(SHAPE, variant=variant).inputs(torch.float32)
    outside = attend(inputs, impl)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attend(inputs, impl)
    assert torch.equal(inside, outside)
