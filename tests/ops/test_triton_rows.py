"""Sums of columns, products with a bias, with ReLU and dropout, and zeros, against PyTorch in float64.

T rows, E width of the input, F of the output.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.ops.triton_env import DEVICE, strict_memory

# isort: split
from mgk.ops.triton import rows
from mgk.ops.triton.rows import clear_rows, column_sums, linear_relu, linear_rows


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a program, several programs, several blocks of columns."""
    for name, value in {"TILE": 256, "PROGRAMS": 3, "FEW": 5, "WIDTH": 32}.items():
        monkeypatch.setattr(rows, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 64), (77, 20), (5, 70), (6, 33), (1, 1), (0, 8)])
def test_column_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """In float32, whatever the input: sums of at most 300 terms of the order of 1."""
    x = normal(*shape).to(dtype)
    with strict_memory():
        sums = column_sums(x)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), x.double().sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(sums, column_sums(x.T.contiguous().T))  # rows may be strided


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50, 12), (3, 20, 12), (0, 12)])
def test_linear_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """PyTorch's own numbers, and a gradient of the bias that is rounded to the type of the bias alone."""
    x, weight = normal(*shape).to(dtype).requires_grad_(), normal(7, 12, seed=1).to(dtype).requires_grad_()
    bias, grad = normal(7, seed=2).requires_grad_(), normal(*shape[:-1], 7, seed=3).to(dtype)
    output = linear_rows(x, weight, bias)
    wanted = linear(x, weight, bias.to(dtype))
    assert torch.equal(output, wanted)
    got = torch.autograd.grad(output, [x, weight, bias], grad)
    expected = torch.autograd.grad(wanted, [x, weight], grad)
    torch.testing.assert_close(got[:2], expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(got[2].double(), grad.double().flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)


def test_operators_pass_the_checks_of_torch() -> None:
    x, weight, bias = normal(20, 12).requires_grad_(), normal(7, 12).requires_grad_(), normal(7).requires_grad_()
    torch.library.opcheck(linear_rows.op, (x, weight, bias))
    torch.library.opcheck(rows.linear_rows_backward.op, (normal(20, 7), x.detach(), weight.detach()))
    seed = torch.tensor([7], device=DEVICE)
    torch.library.opcheck(linear_relu.op, (x, weight, bias, seed, 0.25))
    inner = linear_relu(x, weight, bias, seed, 0.25).detach()
    torch.library.opcheck(rows.linear_relu_backward.op, (normal(20, 7), inner, x.detach(), weight.detach(), 0.25))


def relu_case(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """x, weight, and the bias in float32."""
    x, weight = normal(*shape).to(dtype), normal(70, shape[-1], seed=1).to(dtype)
    return [each.requires_grad_() for each in (x, weight, normal(70, seed=2))]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50, 12), (3, 20, 12), (0, 12)])
def test_linear_relu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Without dropout PyTorch's own numbers; gradients are sums of dozens of terms of the order of 10."""
    leaves = relu_case(shape, dtype)
    with strict_memory():
        output = linear_relu(*leaves, None, 0.0)
    wanted = linear(leaves[0], leaves[1], leaves[2].to(dtype)).relu()
    assert torch.equal(output, wanted)
    grad = normal(*output.shape, seed=3).to(dtype)
    with strict_memory():
        got = torch.autograd.grad(output, leaves, grad)
    expected = torch.autograd.grad(wanted, leaves[:2], grad)
    torch.testing.assert_close(got[:2], expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    sums = (grad * (wanted > 0)).double().flatten(0, -2).sum(0)
    torch.testing.assert_close(got[2].double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_linear_relu_with_dropout(p: float) -> None:
    """What is kept is scaled, forward and backward; as much is dropped as should be, and another seed drops others."""
    leaves, seeds = (
        relu_case((3000, 12), torch.float32),
        [torch.tensor([seed], device=DEVICE) for seed in (5, 5, 1 << 40)],
    )
    output, again, other = (linear_relu(*leaves, seed, p) for seed in seeds)
    assert torch.equal(output, again)
    whole = linear(*leaves).relu()
    kept = output != 0
    torch.testing.assert_close(output, kept * whole / (1 - p), rtol=1e-6, atol=0)
    positive = whole > 0
    number, share = int(positive.sum()), float(kept[positive].float().mean())
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / number) ** 0.5
    both = float((kept & (other != 0))[positive].float().mean())
    assert abs(both - (1 - p) ** 2) < 5 * (p * (1 - p) / number) ** 0.5
    grad = normal(*output.shape, seed=3)
    got = torch.autograd.grad(output, leaves, grad)
    expected = torch.autograd.grad(whole, leaves, grad * kept / (1 - p))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)  # sums of 3000 terms of the order of 10


def test_linear_relu_hides_no_nan() -> None:
    x, weight, bias = relu_case((4, 12), torch.float32)
    with torch.no_grad():
        x[2] = torch.nan
    assert linear_relu(x, weight, bias, None, 0.0)[2].isnan().all()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("first", [0, 1, 33, 49, 50])
@pytest.mark.parametrize("shape", [(50, 2, 8), (50, 3, 5), (50, 300)])
def test_clear_rows(shape: tuple[int, ...], first: int) -> None:
    x = normal(*shape)
    expected = x.clone()
    expected[first:] = 0
    with strict_memory():
        clear_rows(x, torch.tensor([first], dtype=torch.int32, device=DEVICE))
    assert torch.equal(x, expected)
