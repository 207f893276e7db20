"""Cross-entropy without stored logits, against PyTorch's in float64.

T rows, V tokens, E width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.ops.triton_env import DEVICE, assert_graph_follows, strict_memory

# isort: split
from mgk.ops.triton import cross_entropy as kernels
from mgk.ops.triton.cross_entropy import losses_of_rows


@pytest.fixture(autouse=True)
def several_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPLIT", 100)


def inputs(rows: int, tokens: int, width: int, scale: float = 1.0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return [x, weight, bias], targets, one of them ignored, and a gradient."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator) for shape in ((rows, width), (tokens, width), (tokens,), (rows,))
    )
    target = torch.randint(tokens, (rows,), generator=generator)
    target[rows // 2 :][:1] = -100
    return [scale * x, weight, bias], target, grad


def run(
    numbers: list[Tensor], target: Tensor, grad: Tensor, span: tuple[int, int] | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return losses and gradients, with x and weight in `dtype` and the bias in float32."""
    kinds = dtype, dtype, torch.float32
    leaves = [each.to(DEVICE, kind).requires_grad_() for each, kind in zip(numbers, kinds, strict=True)]
    where = None if span is None else torch.tensor(span, dtype=torch.int32, device=DEVICE)
    losses = losses_of_rows(leaves[0], leaves[1], leaves[2], target.to(DEVICE), where)
    assert losses.dtype == torch.float32
    grads = torch.autograd.grad(losses, leaves, grad.to(DEVICE))
    assert [each.dtype for each in grads] == [dtype, dtype, torch.float32]
    return [each.detach().cpu().double() for each in (losses, *grads)]


def exact(numbers: list[Tensor], target: Tensor, grad: Tensor, span: tuple[int, int] | None) -> list[Tensor]:
    leaves = [each.double().requires_grad_() for each in numbers]
    losses = cross_entropy(leaves[0] @ leaves[1].T + leaves[2], target, ignore_index=-100, reduction="none")
    if span is not None:
        place = torch.arange(len(target))
        losses = losses * ((place >= span[0]) & (place < span[1]))
    return [losses.detach(), *torch.autograd.grad(losses, leaves, grad.double())]


@pytest.mark.parametrize("span", [None, (0, 0), (5, 6), (17, 90)])
@pytest.mark.parametrize("shape", [(90, 300, 20), (90, 33, 16), (1, 1, 3)])
def test_values_and_gradients(shape: tuple[int, int, int], span: tuple[int, int] | None) -> None:
    """Sums of at most 300 products of the order of 10, in float32."""
    if span is not None and span[1] > shape[0]:
        span = (0, 1)
    case = inputs(*shape)
    with strict_memory():
        found = run(*case, span, torch.float32)
    torch.testing.assert_close(found, exact(*case, span), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [24, 130])
def test_half_precision(dtype: torch.dtype, width: int) -> None:
    """Logits are not rounded; the gradient of one is, to one part in 256 (2048), before it is summed, and so are the
    sums: their error is that of a few such roundings of the largest.
    """
    numbers, target, grad = inputs(90, 300, width)
    numbers = [numbers[0].to(dtype).float() / 4, numbers[1].to(dtype).float(), numbers[2]]
    numbers[0] = numbers[0].to(dtype).float()
    found, wanted = run(numbers, target, grad, (3, 88), dtype), exact(numbers, target, grad, (3, 88))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-4)
    for have, want in zip(found[1:], wanted[1:], strict=True):
        assert float((have - want).abs().max()) <= 4 * torch.finfo(dtype).eps * float(want.abs().max())


def test_every_range_of_numbers() -> None:
    """Logits of some thousands: one token has all the weight, and nothing overflows.

    A loss is off by two roundings of the largest logit, and gradients by as much of themselves.
    """
    case = inputs(40, 300, 20, scale=300.0)
    found, wanted = run(*case, None, torch.float32), exact(*case, None)
    x, weight, _ = case[0]
    off = 2 * torch.finfo(torch.float32).eps * float((x @ weight.T).detach().abs().max())
    for have, want, scale in zip(found, wanted, (1.0, *(float(each.abs().max()) for each in wanted[1:])), strict=True):
        assert have.isfinite().all()
        assert float((have - want).abs().max()) <= off * scale


def test_tokens_with_zero_probability() -> None:
    """A bias of -inf, for a full tile too, removes tokens."""
    numbers, target, grad = inputs(40, 300, 20)
    numbers[2][64:] = -torch.inf
    found = run(numbers, target % 64, grad, None, torch.float32)
    wanted = exact([numbers[0], numbers[1][:64], numbers[2][:64]], target % 64, grad, None)
    assert not found[2][64:].any()
    torch.testing.assert_close(
        [found[0], found[1], found[2][:64]], wanted[:3], rtol=1e-5, atol=2e-4
    )  # fmt: skip


def test_no_rows() -> None:
    numbers, target, grad = inputs(0, 5, 4)
    losses, grad_x, grad_weight, grad_bias = run(numbers, target, grad, None, torch.float32)
    assert losses.shape == (0,)
    assert grad_x.shape == (0, 4)
    assert not grad_weight.any()
    assert not grad_bias.any()


def test_rows_may_be_strided() -> None:
    (x, weight, bias), target, _ = inputs(30, 50, 8)
    x, weight, bias, target = (each.to(DEVICE) for each in (x, weight, bias, target))
    wide = torch.cat([x, x], 1)
    assert torch.equal(
        losses_of_rows(wide[:, 8:], weight.T.contiguous().T, bias, target.repeat_interleave(2)[::2]),
        losses_of_rows(x, weight, bias, target),
    )


def test_the_number_of_splits() -> None:
    assert kernels.split(1, 64) == (1, 1)
    assert kernels.split(199, 64) == (2, 2)
    assert kernels.split(200 * 100, 64) == (8, 40)
    assert kernels.split(9 * 64, 64) == (5, 2)  # no split is left without a tile


def test_operators_pass_the_checks_of_torch() -> None:
    (x, weight, bias), target, grad = inputs(20, 30, 8)
    arguments = [each.to(DEVICE) for each in (x, weight, bias, target)]
    span = torch.tensor([2, 15], dtype=torch.int32, device=DEVICE)
    leaves = [each.clone().requires_grad_() for each in arguments[:3]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels.cross_entropy_forward.op, (*leaves, arguments[3], span), test_utils=tests)
    lse = kernels.cross_entropy_forward(*arguments, None)[1]
    torch.library.opcheck(kernels.cross_entropy_backward.op, (grad.to(DEVICE), *arguments, None, lse))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_graph_captures_it() -> None:
    """A replay uses the span that its tensor holds then."""
    (x, weight, bias), target, grad = inputs(300, 1000, 32)
    leaves = [each.cuda().requires_grad_() for each in (x, weight, bias)]
    target, grad, span = target.cuda(), grad.cuda(), torch.tensor([0, 100], dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        losses = losses_of_rows(leaves[0], leaves[1], leaves[2], target, span)
        return [losses.detach(), *torch.autograd.grad(losses, leaves, grad)]

    assert_graph_follows(step, lambda: span.copy_(torch.tensor([50, 290], dtype=torch.int32)))
