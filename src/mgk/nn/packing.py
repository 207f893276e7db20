"""Batches without their padding: what is done to each token by itself need not be done to padding.

B batch, N positions of a row, T rows of a packed tensor, E width.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.ops.common import without_autocast

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

PARTS = 128  # that a sum is done in, side by side


class Packing:
    """Where the tokens of a mask (B,N) are in a tensor (T,E) that has them one after the other, and back.

    T is at least the number of tokens: what stands behind them means nothing and gets no gradient. The shapes do not
    depend on the mask and nothing is read on the host, so that a CUDA graph can hold it.
    """

    def __init__(self, mask: Bool[Tensor, "b n"], size: int) -> None:
        self.mask, self.shape = mask, mask.shape
        real = mask.flatten()
        place, order = real_first(real)
        self.rows = order[:size]
        self.hidden = ~real
        # Padding reads any row. A token that has no row is out of range, which the gather says aloud.
        self.place = place.masked_fill(self.hidden, 0)

    @cached_property
    def ends(self) -> Int[Tensor, " b+1"]:
        """Where each sequence begins among the rows, and the last one ends."""
        return pad(self.mask.sum(1).cumsum(0), (1, 0)).int()

    @cached_property
    def spare(self) -> Bool[Tensor, " t"]:
        """The rows behind the tokens."""
        return self.hidden[self.rows]

    def pack(self, x: Float[Tensor, "b n e"]) -> Float[Tensor, "t e"]:
        return reorder(x.flatten(0, 1), self.rows, self.place, self.hidden)

    def unpack(self, x: Float[Tensor, "t e"]) -> Float[Tensor, "b n e"]:
        """What comes out where the mask is False means nothing, and must get no gradient."""
        return reorder(x, self.place, self.rows).unflatten(0, self.shape)  # type: ignore[no-untyped-call, no-any-return]

    def sum(self, x: Float[Tensor, "t e"]) -> Float[Tensor, "b e"]:
        """Over the tokens of each sequence."""
        batch, length = self.shape
        if batch > x.shape[1]:  # more zeros and ones than numbers
            return self.unpack(x).masked_fill(~self.mask[..., None], 0).sum(1)
        return sums_of(x, (self.rows // length).masked_fill(self.spare, batch), batch)


def real_first(real: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """The permutation that puts those that are True first, both in their order: where each goes, and which comes."""
    here, count = torch.arange(len(real), device=real.device), real.cumsum(0)
    place = torch.where(real, count - 1, count[-1:] + here - count)
    return place, torch.empty_like(place).scatter_(0, place, here)


def sums_of(x: Float[Tensor, "t e"], group: Int[Tensor, " t"], count: int) -> Float[Tensor, "c e"]:
    """The sum of the rows of each of the groups 0 to C - 1, for a small C; rows of other groups are left out.

    It is a product with zeros and ones, in parts that keep a GPU busy. To scatter would be to sort there, or to add up
    in an order that changes.
    """
    parts = math.gcd(len(x), PARTS)
    member = group.view(parts, 1, -1) == torch.arange(count, device=x.device)[:, None]  # (parts, C, T / parts)
    with without_autocast(x):
        return (member.to(x.dtype) @ x.reshape(parts, -1, x.shape[1])).sum(0)


def reorder(
    x: Float[Tensor, "n ..."], index: Int[Tensor, " t"], inverse: Int[Tensor, " n"], hidden: Tensor | None = None
) -> Float[Tensor, "t ..."]:
    """x[index]; its gradient is one more gather, by `inverse`, where autograd would scatter with atomics.

    No row of x is read twice but by those whose gradient is zero. Rows of x that are `hidden` were not read.
    """
    return Reorder.apply(x, index, inverse, hidden)  # type: ignore[no-untyped-call, no-any-return]


class Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, hidden: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, inverse, hidden)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse, hidden = ctx.saved_tensors
        grad = Reorder.apply(grad, inverse, index, None)  # type: ignore[no-untyped-call]
        return grad if hidden is None else grad.masked_fill(hidden[:, None], 0), None, None, None
