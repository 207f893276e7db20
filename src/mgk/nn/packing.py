"""Packed batches: the tokens of all sequences in one tensor without padding, so that layers do not compute padding.

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

MAX_PARTS = 128  # of a sum that is computed in parallel


class Packing:
    """Maps the tokens of a padded batch with `mask` (B,N) to the rows of a packed tensor (T,E), and back.

    T is at least the number of tokens. The values of spare rows behind the tokens are undefined, and they get no
    gradient. Shapes do not depend on the mask and nothing is read on the host, so a CUDA graph can capture it.

    Args:
        mask: (B,N), True for tokens.
        size: T.
    """

    def __init__(self, mask: Bool[Tensor, "b n"], size: int) -> None:
        self.mask, self.shape, self.max_seqlen = mask, mask.shape, mask.shape[1]
        real = mask.flatten()
        row, order = real_first(real)
        self.position = order[:size]  # of each row in the flattened padded batch, (T,)
        self.padding = ~real
        # The row of each position, (B*N,). Padding reads any row. A token without a row makes the gather fail.
        self.row = row.masked_fill(self.padding, 0)

    @cached_property
    def cu_seqlens(self) -> Int[Tensor, " b+1"]:
        """The first row of each sequence, and the end of the last one."""
        return pad(self.mask.sum(1).cumsum(0), (1, 0)).int()

    @cached_property
    def spare(self) -> Bool[Tensor, " t"]:
        """True for the rows behind the tokens."""
        return torch.arange(len(self.position), device=self.mask.device) >= self.cu_seqlens[-1]

    def pack(self, x: Float[Tensor, "b n e"]) -> Float[Tensor, "t e"]:
        return reorder(x.flatten(0, 1), self.position, self.row, self.padding)

    def unpack(self, x: Float[Tensor, "t e"]) -> Float[Tensor, "b n e"]:
        """Return the padded tensor. Its values at padding are undefined, and their gradient must be zero."""
        return reorder(x, self.row, self.position).unflatten(0, self.shape)  # type: ignore[no-untyped-call, no-any-return]

    def sum(self, x: Float[Tensor, "t e"]) -> Float[Tensor, "b e"]:
        """Return the sum over the tokens of each sequence."""
        batch, length = self.shape
        if batch > x.shape[1]:  # `group_sums` would build a matrix larger than x
            return self.unpack(x).masked_fill(~self.mask[..., None], 0).sum(1)
        return group_sums(x, (self.position // length).masked_fill(self.spare, batch), batch)


def real_first(real: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Return the stable permutation that moves the True entries to the front, and its inverse.

    The first tensor has the new place of each entry, the second has the entry at each new place.
    """
    index, count = torch.arange(len(real), device=real.device), real.cumsum(0)
    place = torch.where(real, count - 1, count[-1:] + index - count)
    return place, torch.empty_like(place).scatter_(0, place, index)


def group_sums(x: Float[Tensor, "t e"], group: Int[Tensor, " t"], count: int) -> Float[Tensor, "c e"]:
    """Return the sums of the rows of the groups 0 to C - 1, for a small C; rows with another group are left out.

    It is a product with a matrix of zeros and ones, in parts that keep a GPU busy. A scatter would sort the rows, or
    add them in an order that changes from run to run.
    """
    parts = math.gcd(len(x), MAX_PARTS)
    member = group.view(parts, 1, -1) == torch.arange(count, device=x.device)[:, None]  # (parts, C, T / parts)
    with without_autocast(x):
        return (member.to(x.dtype) @ x.reshape(parts, -1, x.shape[1])).sum(0)


def reorder(
    x: Float[Tensor, "n ..."], index: Int[Tensor, " t"], inverse: Int[Tensor, " n"], hidden: Tensor | None = None
) -> Float[Tensor, "t ..."]:
    """Return x[index]. Its backward is a gather by `inverse`, where autograd would scatter with atomics.

    A row of x may be read more than once only if all but one of these outputs get a zero gradient. Rows of x where
    `hidden` is True must not be read; their gradient is zero.
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
