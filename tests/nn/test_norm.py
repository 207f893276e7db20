"""Our LayerNorm is PyTorch's, wherever it takes kernels of our own, which tests/ops/test_triton_norm.py checks.

E width of the model.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mgk.nn import Block, Stack, norm
from mgk.nn.norm import LayerNorm
from tests.nn.common import make, normal, without_and_with
from tests.ops.triton_env import DEVICE

ROUNDED = 2**-18  # sums of some dozens of numbers of the order of 1 in float32


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few rows too, and in Triton's interpreter."""
    monkeypatch.setattr(norm, "pays", lambda x, weight: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("narrow", [True, False])
def test_what_products_read_comes_rounded(narrow: bool) -> None:
    """Under autocast the same bits that a product would have rounded it to; the gradients are of the wide weights."""
    module, reference = LayerNorm(6, narrow=narrow).to(DEVICE), nn.LayerNorm(6).to(DEVICE)
    x = normal(9, 6).float().to(DEVICE)
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        with torch.no_grad():
            other.copy_(nn.init.normal_(parameter))
    assert module(x).dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        output = module(x)
    assert output.dtype == (torch.bfloat16 if narrow else torch.float32)
    wanted = reference(x).to(output.dtype)
    torch.testing.assert_close(output, wanted, rtol=2**-8 if narrow else ROUNDED, atol=ROUNDED)
    grad = normal(9, 6, seed=1).to(DEVICE, output.dtype)
    output.backward(grad)  # type: ignore[no-untyped-call]
    reference(x).backward(grad.float())
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=ROUNDED, atol=ROUNDED)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_layers_with_it(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what products read may be rounded: never the sum that goes from layer to layer."""
    stack = Stack([Block(make("smgk"), 16, norm=order) for _ in range(2)]).float().to(DEVICE)
    without, with_it = without_and_with(norm, stack, monkeypatch)
    torch.testing.assert_close(with_it, without, rtol=16 * ROUNDED, atol=16 * ROUNDED)
    norms = [module for module in stack.modules() if isinstance(module, LayerNorm)]
    assert [module.narrow for module in norms] == ([True] * 4 + [False] if order == "pre" else [False] * 4)


@pytest.mark.usefixtures("kernels")
def test_whoever_looks_at_a_part_of_a_sum_sees_it() -> None:
    block, seen = Block(make("smgk"), 16, norm="post", dropout=0.5).float().to(DEVICE), []
    for part in (block.dropout, block.attention_norm):
        part.register_forward_hook(lambda *call: seen.append(type(call[0])))
    block(normal(2, 5, 12).float().to(DEVICE))
    assert seen.count(nn.Dropout) == 3
    assert seen.count(LayerNorm) == 1


@pytest.mark.usefixtures("kernels")
def test_dropout_in_a_sum_is_drawn_anew() -> None:
    block = Block(make("smgk"), 16, norm="post", dropout=0.5).float().to(DEVICE)
    first, second = (block(normal(2, 5, 12).float().to(DEVICE)) for _ in range(2))
    assert not torch.equal(first, second)
    quiet = [block.eval()(normal(2, 5, 12).float().to(DEVICE)) for _ in range(2)]
    assert torch.equal(*quiet)


def test_it_is_saved_as_pytorchs() -> None:
    nn.LayerNorm(6).load_state_dict(LayerNorm(6, narrow=True).state_dict())


@pytest.mark.parametrize(
    ("rows", "width", "device", "expected"),
    [(8192, 64, "cuda", True), (8191, 64, "cuda", False), (8192, 257, "cuda", False), (8192, 64, "cpu", False)],
)
def test_where_it_pays(rows: int, width: int, device: str, expected: bool) -> None:
    with torch._subclasses.FakeTensorMode():
        assert norm.pays(torch.empty(rows, width, device=device), torch.empty(width, device=device)) == expected
