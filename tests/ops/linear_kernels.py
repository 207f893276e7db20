"""Helpers for the tests of the linear-attention kernels, causal (scan.py) or not (linear.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops import linear, linear_forms
from tests.ops.common import Case, Inputs, component_keys
from tests.ops.triton_env import DEVICE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_TILE = {"BN": 16, "num_warps": 4, "num_stages": 1}


def incoming(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient that depends on the shape alone and is exact in `dtype`."""
    angles = torch.linspace(-1, 4, output.numel(), dtype=torch.float64)
    return angles.cos().view(output.shape).to(dtype).to(output.device, output.dtype)


def numbers(case: Case, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Inputs:
    """Return the inputs of a case; shifts and priors are float32, as parameters are."""
    return {
        name: tensor.detach().to(torch.float32 if name in ("shift", "log_prior") else dtype)
        for name, tensor in case.inputs(scale=scale).items()
    }


def leaves_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE).requires_grad_() for name, tensor in numbers(case, dtype).items()}


def size_of_output(inputs: Inputs, mask: Tensor | None = None, *, is_causal: bool) -> Tensor:
    """Return the output for the absolute values of `value`."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    checked = linear._check(query, key, inputs.get("shift"), value.abs(), inputs.get("log_prior"), "elu", mask)
    features = linear_forms.prepare(query, key, inputs.get("shift"), *checked[1:])
    sums = linear_forms.dense(*features, linear_forms.with_ones(checked[0], mask, query), is_causal)
    total = sums[..., -1:].detach()
    return torch.where(total == 0, 0, sums[..., :-1] / torch.where(total == 0, 1, total))


def sizes_of_terms(output: Tensor, leaves: Inputs) -> dict[str, float]:
    """Return the size of the terms behind each result, for sums that cancel; `output` is that of `size_of_output`.

    With values and incoming gradients of one sign, all terms of a gradient through the numerator have one sign; those
    through the denominator are as large.
    """
    grads = torch.autograd.grad(output, list(leaves.values()), incoming(output, output.dtype).abs())
    return {name: float(x.detach().norm()) for name, x in zip(["output", *leaves], (output, *grads), strict=True)}


def assert_rounded(
    got: dict[str, Tensor], exact: dict[str, Tensor], sizes: dict[str, float], inputs: Inputs
) -> dict[str, Tensor]:
    """Check that the errors are rounding errors, and return `got`.

    Relative to the terms of a sum these are one rounding of the largest exponent in float32 and, in half precision, one
    of a factor to eleven bits; then one rounding of the result.
    """
    dtype = inputs["query"].dtype
    largest = [inputs["query"], component_keys(inputs), *(inputs[name] for name in ("log_prior",) if name in inputs)]
    exponent = sum(float(x[x.isfinite()].abs().max()) for x in largest if x.numel())
    rounding = torch.finfo(torch.float32).eps * (1 + exponent) + (2**-11 if dtype != torch.float32 else 0)
    for name, want in exact.items():
        bound = rounding * sizes[name] + torch.finfo(dtype).eps / 2 * float(want.norm())
        error = float((got[name] - want).norm())
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"
    return got
