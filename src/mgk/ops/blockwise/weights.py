"""What is done with the attention weights of a block: dropout, and the gradient with respect to them.

H query heads and G heads of values of all batch entries, h heads of a block, Nq queries, Nk keys, Dv width of a value;
nq, nk queries and keys of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, HeadGroups, Scratch, Span, row_views, transposed_views


class Dropout(NamedTuple):
    probability: float
    seed: int

    def kept(self, like: Tensor, block: Block, keys: Span) -> Tensor:
        """1/(1-p) for weights that stay, 0 for others. Seed and position decide, so backward draws the same mask."""
        kept = torch.empty_like(like)
        for head, part in enumerate(kept, block.heads.start):
            place = (head * 1_000_003 + block.queries.start) * 1_000_003 + keys.start
            generator = torch.Generator().manual_seed((self.seed + 0x9E3779B97F4A7C15 * (place + 1)) % (1 << 63))
            part.bernoulli_(1 - self.probability, generator=generator)
        return kept.div_(1 - self.probability)


class WeightGradient:
    """Computes the gradient of the weights before normalisation, dA - delta, and collects that of the values."""

    def __init__(self, value: Tensor, grad: Tensor, delta: Tensor, dropout: Dropout, scratch: Scratch) -> None:
        """Value (G,Nk,Dv), the gradient of the output (H,Nq,Dv), delta (H,Nq)."""
        self.value, self.grad, self.dropout, self.scratch = value, grad.contiguous(), dropout, scratch
        self.groups = HeadGroups(grad.shape[0] // max(1, value.shape[0]))
        self.delta = delta[..., None]
        self.grad_value = torch.zeros_like(value)

    def select(self, heads: slice) -> None:
        """Prepare for blocks of these heads."""
        grad = self.grad[heads]
        value, grad_value = (self.groups.of(x, heads) for x in (self.value, self.grad_value))
        width = value.shape[-1]
        grads = self.scratch("grads", grad.shape[0], grad.shape[1], width + 1)
        grads[..., :width] = grad
        torch.neg(self.delta[heads], out=grads[..., width:])
        values = self.scratch("values", value.shape[0], value.shape[1], width + 1)
        values[..., :width], values[..., width:] = value, 1.0
        self.extended_grads, self.grads = transposed_views(grads), row_views(grad)
        self.extended_values = row_views(values.expand(grad.shape[0], -1, -1))
        self.grad_values = row_views(grad_value)

    def of(self, block: Block, keys: Span, weights: Tensor) -> Tensor:
        """The gradient (h,nk,nq) for the weights (h,nk,nq) of a block."""
        grad_weights = self.scratch.bmm("grad weights", self.extended_values[keys], self.extended_grads[block.queries])
        if self.dropout.probability:
            kept, delta = self.dropout.kept(weights, block, keys), self.delta[block.place].mT
            grad_weights.add_(delta).mul_(kept).sub_(delta)
            weights = weights * kept
        self.scratch.add_product(self.grad_values[keys], weights, self.grads[block.queries])
        return grad_weights
