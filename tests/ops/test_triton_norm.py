"""LayerNorm's kernels against PyTorch's LayerNorm in float64.

T rows, E width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm as exact_norm

from tests.ops.triton_env import DEVICE, strict_memory

# isort: split
from mgk.ops.triton import norm
from mgk.ops.triton.norm import layer_norm


def inputs(*shape: int, offset: float = 0.0, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = shape[-1]
    numbers = [torch.randn(size, generator=generator) for size in (shape, (width,), (width,))]
    numbers[0] = offset + scale * numbers[0]
    return [each.to(DEVICE).requires_grad_() for each in numbers]


def with_gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.device))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 64), (3, 41, 20), (5, 256), (300, 12), (1, 7)])
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a sum of T or E products of the order of 1, in float32; the output is rounded once more."""
    monkeypatch.setattr(norm, "TILE", 256)  # several tiles, of which a program has
    monkeypatch.setattr(norm, "PROGRAMS", 3)  # more than one
    leaves = inputs(*shape, offset=3.0)
    with strict_memory():
        got = with_gradients(layer_norm(*leaves, 1e-5, dtype)[0], leaves)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    output = exact_norm(exact[0], shape[-1:], exact[1], exact[2], 1e-5)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).double().to(DEVICE)
    wanted = [output.detach(), *torch.autograd.grad(output, exact, grad)]
    assert got[0].dtype == dtype
    for have, want, eps in zip(got, wanted, [torch.finfo(dtype).eps, *[2**-23] * 3], strict=True):
        assert float((have.double() - want).abs().max()) <= (eps + 2**-18) * (1 + float(want.abs().max()))


def test_large_numbers_with_a_small_spread() -> None:
    """The variance is that of the differences: 1e4 and 1 would leave no bits of a mean of squares."""
    leaves = inputs(40, 64, offset=1e4)
    exact = exact_norm(leaves[0].double(), (64,), leaves[1].double(), leaves[2].double(), 1e-5)
    got = layer_norm(*leaves, 1e-5, torch.float32)[0].double()
    assert float((got - exact).detach().abs().max()) < 1e-2


def test_no_rows() -> None:
    leaves = inputs(0, 8)
    output, grad_x, grad_weight, grad_bias = with_gradients(layer_norm(*leaves, 1e-5, torch.float32)[0], leaves)
    assert output.shape == grad_x.shape == (0, 8)
    assert not grad_weight.any()
    assert not grad_bias.any()


def test_rows_may_be_strided() -> None:
    leaves = inputs(6, 10, 8)
    x = leaves[0].detach().transpose(0, 1).requires_grad_()
    got = with_gradients(layer_norm(x, *leaves[1:], 1e-5, torch.float32)[0], [x, *leaves[1:]])
    dense = x.detach().contiguous().requires_grad_()
    wanted = with_gradients(layer_norm(dense, *leaves[1:], 1e-5, torch.float32)[0], [dense, *leaves[1:]])
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_operators_pass_the_checks_of_torch() -> None:
    x, weight, bias = inputs(40, 24)
    torch.library.opcheck(layer_norm.op, (x, weight, bias, 1e-5, torch.bfloat16))
    output, moments = layer_norm(x, weight, bias, 1e-5, torch.float32)
    arguments = (output.detach(), x.detach(), weight.detach(), moments)
    torch.library.opcheck(norm.layer_norm_backward.op, arguments)
