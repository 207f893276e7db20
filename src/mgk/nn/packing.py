"""Batches without their padding: what is done to each token by itself need not be done to padding.

B batch, N positions of a row, T rows of a packed tensor, E width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class Packing:
    """Where the tokens of a mask (B,N) are in a tensor (T,E) that has them one after the other, and back.

    T is at least the number of tokens: what stands behind them means nothing and gets no gradient. The shapes do not
    depend on the mask and nothing is read on the host, so that a CUDA graph can hold it.
    """

    def __init__(self, mask: Bool[Tensor, "b n"], size: int) -> None:
        self.shape = mask.shape
        real = mask.flatten()
        place, order = real_first(real)
        self.rows = order[:size]
        self.hidden = ~real
        # Padding reads any row. A token that has no row is out of range, which the gather says aloud.
        self.place = place.masked_fill(self.hidden, 0)

    def pack(self, x: Float[Tensor, "b n e"]) -> Float[Tensor, "t e"]:
        return Reorder.apply(x.flatten(0, 1), self.rows, self.place, self.hidden)  # type: ignore[no-untyped-call, no-any-return]

    def unpack(self, x: Float[Tensor, "t e"]) -> Float[Tensor, "b n e"]:
        """What comes out where the mask is False means nothing, and must get no gradient."""
        return Reorder.apply(x, self.place, self.rows, None).unflatten(0, self.shape)  # type: ignore[no-untyped-call, no-any-return]


def real_first(real: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """The permutation that puts those that are True first, both in their order: where each goes, and which comes."""
    place = torch.where(real, real.cumsum(0), real.sum() + (~real).cumsum(0)) - 1
    order = torch.empty_like(place).scatter_(0, place, torch.arange(len(place), device=place.device))
    return place, order


class Reorder(torch.autograd.Function):
    """x[index]; its gradient is one more gather, by `inverse`, where autograd would scatter with atomics.

    No row of x is read twice but by those whose gradient is zero. Rows of x that are `hidden` were not read.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, hidden: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, inverse, hidden)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse, hidden = ctx.saved_tensors
        grad = Reorder.apply(grad, inverse, index, None)  # type: ignore[no-untyped-call]
        return grad if hidden is None else grad.masked_fill(hidden[:, None], 0), None, None, None
