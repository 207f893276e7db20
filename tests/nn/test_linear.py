"""Products with a bias are PyTorch's, also where a kernel sums for it (tests/ops/test_triton_rows.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mgk.nn import Block, linear
from mgk.nn.linear import through
from tests.nn.common import KINDS, make, normal, without_and_with
from tests.ops.triton_env import DEVICE

ROUNDED = 2**-18  # sums of some dozens of numbers of the order of 1 in float32


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(make(kind), 16, norm="pre").float().to(DEVICE).eval()
    without, with_it = without_and_with(linear, block, monkeypatch)
    torch.testing.assert_close(with_it, without, rtol=16 * ROUNDED, atol=16 * ROUNDED)


def test_layers_with_an_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU and dropout in the kernel; without dropout the same numbers as PyTorch's."""
    results = []
    block = Block(make("softmax"), 16, norm="post", activation="relu", dropout=0.3).float().to(DEVICE)
    for own in (False, True):
        monkeypatch.setattr(linear, "activation_pays", lambda *_, own=own: own)
        block.eval().zero_grad()
        output = block(normal(2, 5, 12).float().to(DEVICE))
        torch.autograd.backward(output, normal(2, 5, 12, seed=1).float().to(DEVICE))
        results.append([output.detach(), *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(*results, rtol=16 * ROUNDED, atol=16 * ROUNDED)
    torch.manual_seed(0)
    first, second = (block.train()(normal(2, 5, 12).float().to(DEVICE)) for _ in range(2))
    assert not torch.equal(first, second)


def test_whoever_looks_at_an_activation_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "activation_pays", lambda *_: True)
    block, seen = Block(make("softmax"), 16, norm="pre", activation="relu").float().to(DEVICE), []
    block.activation.register_forward_hook(lambda *call: seen.append(call[2]))
    block(normal(2, 5, 12).float().to(DEVICE))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("rows", "width", "device", "expected"),
    [(8192, 256, "cuda", True), (8191, 256, "cuda", False), (8192, 255, "cuda", False), (8192, 256, "cpu", False)],
)
def test_where_an_activation_pays(rows: int, width: int, device: str, expected: bool) -> None:
    with torch._subclasses.FakeTensorMode():
        x, bias = torch.empty(rows, 64, device=device), torch.empty(width, device=device, requires_grad=True)
        weight = torch.empty(width, 64, device=device)
        assert linear.activation_pays(x, weight, bias) == expected
        assert not linear.activation_pays(x, weight, None)
        with torch.no_grad():
            assert not linear.activation_pays(x, weight, bias)


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits forward; backward the bias alone differs, as it is rounded less."""
    x, module = normal(9, 6).float().to(DEVICE), nn.Linear(6, 4).to(DEVICE)
    grad, results = normal(9, 4, seed=1).to(DEVICE, torch.bfloat16), []
    for own in (False, True):
        monkeypatch.setattr(linear, "pays", lambda x, bias, own=own: own)
        module.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            output = through(module, x)
        torch.autograd.backward(output, grad)
        results.append((output, module.weight.grad, module.bias.grad))
    (output, weight, bias), (own_output, own_weight, own_bias) = results
    assert own_output.dtype == torch.bfloat16
    assert torch.equal(own_output, output)
    torch.testing.assert_close(own_weight, weight, rtol=0, atol=0)
    torch.testing.assert_close(own_bias, grad.float().sum(0), rtol=ROUNDED, atol=ROUNDED)
    torch.testing.assert_close(own_bias, bias, rtol=2**-7, atol=2**-7)


def test_others_are_called() -> None:
    """What somebody has put in its place, and whoever wants to see the call."""
    x, seen = normal(3, 6), []
    module = nn.Linear(6, 4, dtype=torch.float64)
    module.register_forward_hook(lambda *call: seen.append(call[2]))
    assert torch.equal(through(module, x), seen[0])
    assert torch.equal(through(nn.Sequential(module, nn.ReLU()), x), seen[1].relu())
    replaced: Any = nn.Linear(6, 4)
    replaced.forward = lambda x: 2 * x
    assert torch.equal(through(replaced, x), 2 * x)


@pytest.mark.parametrize(
    ("rows", "width", "device", "dtype", "expected"),
    [
        (8192, 1024, "cuda", torch.bfloat16, True), (8191, 1024, "cuda", torch.bfloat16, False),
        (8192, 1025, "cuda", torch.bfloat16, False), (8192, 64, "cuda", torch.float64, False),
        (8192, 64, "cpu", torch.bfloat16, False),
    ],
)  # fmt: skip
def test_where_it_pays(rows: int, width: int, device: str, dtype: torch.dtype, expected: bool) -> None:
    with torch._subclasses.FakeTensorMode():
        x, bias = torch.empty(rows, 64, device=device, dtype=dtype), torch.empty(width, device=device)
        assert not linear.pays(x, bias)  # which wants no gradient
        assert linear.pays(x, bias.requires_grad_()) == expected
        with torch.no_grad():
            assert not linear.pays(x, bias)
