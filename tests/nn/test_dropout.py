"""ReLU with dropout from a hash: its rate, its gradient, and the independence of its elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mgk.nn import Block, block
from mgk.nn.dropout import hash32, relu_dropout
from tests.nn.common import make, normal

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPE = (64, 1000)


def kept(p: float, seed: int = 0) -> Tensor:
    """Which elements are kept, as 0 and 1."""
    torch.manual_seed(seed)
    return (relu_dropout(torch.ones(SHAPE), p) > 0).double()


def test_hash_is_lowbias32() -> None:
    """The definition with Python's integers."""

    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    found = hash32(torch.tensor(numbers, dtype=torch.int64).to(torch.int32))
    assert found.dtype == torch.int32
    assert [number % 2**32 for number in found.tolist()] == [lowbias32(number) for number in numbers]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    mask, sigma = kept(p), math.sqrt(p * (1 - p))
    assert abs(mask.mean() - (1 - p)) < 5 * sigma / math.sqrt(mask.numel())
    for dim, count in ((0, SHAPE[0]), (1, SHAPE[1])):  # 1064 means, of which a normal one is 6 sigma off in 1 of 5e5
        assert ((mask.mean(dim) - (1 - p)).abs() < 6 * sigma / math.sqrt(count) + 1 / count).all()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_and_calls_are_uncorrelated(p: float) -> None:
    """The mean of the product of two standardised masks is 0 +- 1/sqrt(count)."""
    mask, other = ((kept(p, seed) - (1 - p)) / math.sqrt(p * (1 - p)) for seed in (0, 1))
    pairs = [(mask.flatten()[lag:], mask.flatten()[:-lag]) for lag in (1, 2, 16, SHAPE[1])]
    for one, two in [*pairs, (mask, other)]:
        assert (one * two).mean().abs() < 5 / math.sqrt(one.numel())
    torch.manual_seed(3)
    assert not torch.equal(relu_dropout(torch.ones(SHAPE), p), relu_dropout(torch.ones(SHAPE), p))


@each_dtype
@pytest.mark.parametrize("p", [0.1, 0.25])
def test_values_and_gradient(dtype: torch.dtype, p: float) -> None:
    x = normal(*SHAPE).to(dtype).requires_grad_()
    grad = normal(*SHAPE, seed=1).to(dtype)
    torch.manual_seed(0)
    y = relu_dropout(x, p)
    y.backward(grad)  # type: ignore[no-untyped-call]
    assert y.dtype == dtype
    assert x.grad is not None
    scale = 1 / (1 - p)
    assert torch.equal(y, torch.where(kept(p).bool(), x.relu() * scale, 0))
    assert torch.equal(x.grad, torch.where(y > 0, grad * scale, 0))


def test_nan_stays() -> None:
    x = torch.full(SHAPE, torch.nan, requires_grad=True)
    y = relu_dropout(x, 0.5)
    assert y.isnan().all()
    y.backward(torch.ones(SHAPE))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert (x.grad == 2).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch.compile itself
@each_dtype
def test_one_graph(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    compiled = torch.compile(relu_dropout, fullgraph=True, backend="aot_eager")
    results = []
    for function in (relu_dropout, compiled):
        torch.manual_seed(0)
        x = normal(5, 7).to(dtype).requires_grad_()
        y = function(x, 0.5)
        y.sum().backward()  # type: ignore[no-untyped-call]
        results.append([y, x.grad])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activation", "dropout", "training", "expected"),
    [("relu", 0.5, True, [0.5]), ("gelu", 0.5, True, []), ("relu", 0.0, True, []), ("relu", 0.5, False, [])],
)
def test_where_a_layer_uses_it(
    activation: str, dropout: float, training: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training with ReLU and dropout, on CUDA, while torch.compile traces; never in eager code."""
    layer = Block(make("smgk"), 16, norm="pre", activation=activation, dropout=dropout).float().train(training)
    layer.up = layer.down = nn.Identity()  # type: ignore[assignment]
    calls: list[float] = []

    def note(x: Tensor, p: float) -> Tensor:
        calls.append(p)
        return x.relu()

    monkeypatch.setattr(block, "relu_dropout", note)
    with torch._subclasses.FakeTensorMode():
        on_cpu, on_gpu = torch.empty(2, 5, 12), torch.empty(2, 5, 12, device="cuda")
        layer._feed_forward(on_gpu)
        assert calls == []
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        layer._feed_forward(on_gpu)
        layer._feed_forward(on_cpu)
        assert calls == expected
