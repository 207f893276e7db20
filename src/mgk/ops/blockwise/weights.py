"""What is done with the attention weights of a block: dropout, and the gradient with respect to them.

G heads, g heads of a block, Nq queries, Nk keys, Dv width of a value; nq, nk queries and keys of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, Scratch, Span, row_views, transposed_views


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

    def __init__(self, value: Tensor, output: Tensor, grad: Tensor, dropout: Dropout, scratch: Scratch) -> None:
        """Value (G,Nk,Dv), output and its gradient (G,Nq,Dv)."""
        self.value, self.grad, self.dropout, self.scratch = value, grad.contiguous(), dropout, scratch
        self.delta = torch.linalg.vecdot(grad, output)[..., None]
        self.grad_value = torch.zeros_like(value)

    def select(self, heads: slice) -> None:
        """Prepare for blocks of these heads."""
        value, grad, grad_value = self.value[heads], self.grad[heads], self.grad_value[heads]
        width = value.shape[-1]
        grads = self.scratch("grads", grad.shape[0], grad.shape[1], width + 1)
        grads[..., :width] = grad
        torch.neg(self.delta[heads], out=grads[..., width:])
        values = self.scratch("values", value.shape[0], value.shape[1], width + 1)
        values[..., :width], values[..., width:] = value, 1.0
        self.extended_grads, self.grads = transposed_views(grads), row_views(grad)
        self.extended_values, self.grad_values = row_views(values), row_views(grad_value)

    def of(self, block: Block, keys: Span, weights: Tensor) -> Tensor:
        """The gradient (g,nk,nq) for the weights (g,nk,nq) of a block."""
        grad_weights = self.scratch.bmm("grad weights", self.extended_values[keys], self.extended_grads[block.queries])
        if self.dropout.probability:
            kept, delta = self.dropout.kept(weights, block, keys), self.delta[block.place].mT
            grad_weights.add_(delta).mul_(kept).sub_(delta)
            weights = weights * kept
        self.scratch.add_product(self.grad_values[keys], weights, self.grads[block.queries])
        return grad_weights
