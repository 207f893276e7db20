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
from mgk.ops.triton.norm import add_norm, layer_norm


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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, of which a program has more than one."""
    monkeypatch.setattr(norm, "TILE", 256)
    monkeypatch.setattr(norm, "PROGRAMS", 3)


def both(outputs: tuple[Tensor, ...], leaves: list[Tensor], used: tuple[int, ...]) -> list[Tensor]:
    """The sum and its norm, and the gradients, where these of the two are used."""
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in outputs[:2]]
    gradients = torch.autograd.grad([outputs[i] for i in used], leaves, [grads[i] for i in used], allow_unused=True)
    return [
        *(each.detach() for each in outputs[:2]),
        *(torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, gradients, strict=True)),
    ]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)], ids=["both", "norm", "sum"])
@pytest.mark.parametrize("shape", [(70, 64), (3, 41, 20), (5, 256), (0, 8)])
def test_the_norm_of_a_sum(shape: tuple[int, ...], used: tuple[int, ...]) -> None:
    leaves = inputs(*shape)
    leaves.insert(1, inputs(*shape, offset=3.0)[0].detach().bfloat16().requires_grad_())
    x, added, weight, bias = leaves
    with strict_memory():
        got = both(add_norm(x, added, None, weight, bias, 1e-5, 0.0, torch.float32), leaves, used)
    assert torch.equal(got[0], x + added)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    total = exact[0] + exact[1]
    wanted = both((total, exact_norm(total, shape[-1:], exact[2], exact[3], 1e-5)), exact, used)
    for have, want, eps in zip(got, wanted, [2**-23] * 3 + [2**-8] + [2**-23] * 2, strict=True):
        bound = (eps + 2**-18) * (1 + want.abs().amax()) if want.numel() else want
        assert ((have.double() - want).abs() <= bound).all()


@pytest.mark.usefixtures("small")
def test_the_norm_of_a_sum_with_dropout() -> None:
    """What is kept is scaled, forward and backward, and as much is dropped as should be."""
    x, weight, bias = inputs(400, 64)
    added = inputs(400, 64, offset=9.0)[0].detach().requires_grad_()  # of which nothing is 0
    seed, p = torch.tensor([1 << 40], device=DEVICE), 0.25
    total, output, _ = add_norm(x, added, seed, weight, bias, 1e-5, p, torch.float32)
    kept = (total != x).detach()
    assert abs(float(kept.float().mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    leaves = [x, added, weight, bias]
    wanted = x + kept * added / (1 - p)
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    got = torch.autograd.grad([total, output], leaves, [grad, grad])
    expected = torch.autograd.grad([wanted, exact_norm(wanted, (64,), weight, bias, 1e-5)], leaves, [grad, grad])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


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
    added, seed = x.detach().bfloat16().requires_grad_(), torch.tensor([3], device=DEVICE)
    torch.library.opcheck(add_norm.op, (x, added, seed, weight, bias, 1e-5, 0.5, torch.bfloat16))
    output, moments = layer_norm(x, weight, bias, 1e-5, torch.float32)
    arguments = (output.detach(), x.detach(), weight.detach(), moments)
    torch.library.opcheck(norm.layer_norm_backward.op, arguments)
