"""Softmax attention of packed rows is that of the padded ones, wherever the padding is; no number beyond it is read.

B batch, H heads, N positions, D width of a head, T = B N rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.nn import Block, MixtureAttention, softmax
from tests.nn.common import EXACT, normal

LENGTHS = (7, 3, 0, 5)
RIGHT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
MASKS = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "holes": normal(4, 7, seed=5) > 0,
    "none": torch.ones(4, 7, dtype=torch.bool),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Kernel(torch.autograd.Function):
    """`softmax.flash` sequence by sequence; what the kernel does not write is NaN, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v, ends)
        ctx.is_causal = is_causal
        return Kernel.attend(q, k, v, ends, is_causal)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, is_causal: bool) -> Tensor:
        output = torch.full_like(q, math.nan)
        for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            if stop > start:
                attended = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
                output[start:stop] = attended.transpose(0, 1)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ends = ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            output = Kernel.attend(inputs[0], inputs[1], inputs[2], ends, ctx.is_causal)
            written = int(ends[-1])
            grads = torch.autograd.grad(output[:written], inputs, grad[:written])
        for each in grads:
            each[written:] = math.nan
        return *grads, None, None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pack on this machine too; returns the dropouts asked for."""
    asked: list[float] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, dropout_p: float) -> Tensor:
        assert longest == 7
        assert ends.dtype == torch.int32
        asked.append(dropout_p)
        return Kernel.apply(q, k, v, ends, causal)  # type: ignore[no-untyped-call, no-any-return]

    monkeypatch.setattr(softmax, "flash", flash)
    monkeypatch.setattr(softmax, "can_be_packed", lambda query, value: True)
    return asked


@pytest.mark.parametrize("place", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_is_masked(place: str, is_causal: bool, kernel: list[float]) -> None:
    """Values and gradients at the real tokens, zeros at the others."""
    mask, results = MASKS[place], []
    for query_mask in (mask, None):  # packed, and as ever
        inputs = [normal(4, 2, 7, 8, seed=s).requires_grad_() for s in range(3)]
        output = softmax.softmax_attention(
            *inputs, is_causal=is_causal, key_mask=mask, dropout_p=0.0, impl="reference", query_mask=query_mask
        )
        real = mask[:, None, :, None]
        assert query_mask is None or not output[~real.expand_as(output)].any()
        torch.autograd.backward((output * normal(4, 2, 7, 8, seed=3)).masked_fill(~real, 0).sum())
        results.append([output.masked_fill(~real, 0), *(x.grad for x in inputs)])
    torch.testing.assert_close(results[0], results[1], **EXACT)
    assert kernel == [0.0]


def test_a_layer_packs_its_padding_away(kernel: list[float]) -> None:
    """In training, with dropout; and padding does not reach the gradients of the weights."""
    torch.manual_seed(0)
    attention = MixtureAttention(12, 3, variant="softmax", dropout=0.25, dtype=torch.float64)
    block = Block(attention, 16, norm="pre").double().train()
    grads = []
    for scale in (1.0, 1e6):
        x = normal(4, 7, 12)
        x[~RIGHT] *= scale
        block.zero_grad()
        block(x, ~RIGHT)[RIGHT].square().sum().backward()
        grads.append([p.grad for p in block.parameters()])
    torch.testing.assert_close(grads[0], grads[1], **EXACT)
    assert kernel == [0.25, 0.25]


def test_other_masks_are_not_packed(kernel: list[float]) -> None:
    """Queries that are not padded where the keys are, or are not said to be, keep their outputs."""
    attention = MixtureAttention(12, 3, variant="softmax", dtype=torch.float64).eval()
    x = normal(4, 7, 12)
    alone, _ = attention(x, key_padding_mask=~RIGHT)
    other, _ = attention(x, key_padding_mask=~RIGHT, query_padding_mask=RIGHT)
    assert kernel == []
    assert alone[1, 3:].any()
    torch.testing.assert_close(other[~RIGHT], alone[~RIGHT], **EXACT)


@gpu
@pytest.mark.parametrize("place", ["right", "left", "holes"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_real_kernel(place: str, is_causal: bool) -> None:
    """Half precision against float64: an error of a few roundings (2^-8), of numbers of the order of 1 to 10."""
    mask, results = MASKS[place].cuda(), []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [normal(4, 2, 7, 8, seed=s).bfloat16().to("cuda", dtype).requires_grad_() for s in range(3)]
        output = softmax.softmax_attention(
            *inputs, is_causal=is_causal, key_mask=mask, dropout_p=0.0, impl="reference", query_mask=mask
        )
        output = output.masked_fill(~mask[:, None, :, None], 0)
        torch.autograd.backward((output * normal(4, 2, 7, 8, seed=3).to(output)).sum())
        results.append([x.double() for x in (output, *(x.grad for x in inputs))])  # type: ignore[union-attr]
    torch.testing.assert_close(*results, rtol=0.04, atol=0.04)
    assert softmax.can_be_packed(*(torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
