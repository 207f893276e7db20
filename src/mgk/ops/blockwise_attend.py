"""Attention and its gradient, block by block, with any kernel of `blockwise_kernels.py`.

How a block stays exact: the weights are exp(l - m_i), and any m_i cancels. Where norms and biases show that no weight
can leave the range of normal numbers, it is the largest bias of a key. Else it starts as an upper bound that costs
nothing (a Gaussian is at most 1). Where a row's sum then falls under `TINY`, the bound was too loose, and the block is
done again with the exact row maximum. For shifted keys the factors can still hide a row whose heavy keys sit in another
component; such a block is done as a mixture. What a row above `TINY` loses is 1e-12 of it for each key.

Backward takes m_i + log of the row sum for m_i, so that weights sum to 1. Where m_i is so large that rounding would
take that log away, it keeps m_i, whose exponents are those of forward to the last bit, and divides the gradient of the
output by the sums instead.

G heads, g of them at a time, M components, Nq queries, Nk keys, Dv width of a value; nq, nk those of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise_kernels import Block, Kernel, Scratch, Span, Views, last_positions, make_blocks, positions

TINY = {torch.float32: 1e-20, torch.float64: 1e-280}
LARGE = 1e3  # of m_i: log of a row sum then has an error of 6e-5 in float32


class Dropout(NamedTuple):
    probability: float
    seed: int

    def kept(self, like: Tensor, block: Block, keys: Span) -> Tensor:
        """1/(1-p) where a weight stays, else 0: a function of seed and place, so the same forward and backward."""
        kept = torch.empty_like(like)
        for head, part in enumerate(kept, block.heads.start):
            place = (head * 1_000_003 + block.queries.start) * 1_000_003 + keys.start
            generator = torch.Generator().manual_seed((self.seed + 0x9E3779B97F4A7C15 * (place + 1)) % (1 << 63))
            part.bernoulli_(1 - self.probability, generator=generator)
        return kept.div_(1 - self.probability)


class WeightGradient:
    """From the gradient of the output to the slope dA - delta of the weights, and on the way that of the values."""

    def __init__(self, value: Tensor, output: Tensor, grad: Tensor, dropout: Dropout, scratch: Scratch) -> None:
        """Value (G,Nk,Dv), output and its gradient (G,Nq,Dv)."""
        self.value, self.grad, self.dropout, self.scratch = value, grad.contiguous(), dropout, scratch
        self.delta = torch.linalg.vecdot(grad, output)[..., None]
        self.grad_value = torch.zeros_like(value)

    def enter(self, heads: slice) -> None:
        """Make ready for blocks of these heads."""
        value, grad, grad_value = self.value[heads], self.grad[heads], self.grad_value[heads]
        width = value.shape[-1]
        grads = self.scratch("grads", grad.shape[0], grad.shape[1], width + 1)
        grads[..., :width] = grad
        torch.neg(self.delta[heads], out=grads[..., width:])
        values = self.scratch("values", value.shape[0], value.shape[1], width + 1)
        values[..., :width], values[..., width:] = value, 1.0
        self.grads = Views(lambda at: grads[:, at.start : at.stop].mT)
        self.plain_grads = positions(grad)
        self.values = positions(values)
        self.grad_values = positions(grad_value)

    def slope(self, block: Block, keys: Span, weights: Tensor) -> Tensor:
        """For the weights (g,nk,nq) of a block."""
        slope = self.scratch.bmm("slope", self.values[keys], self.grads[block.queries])
        if self.dropout.probability:
            kept, delta = self.dropout.kept(weights, block, keys), self.delta[block.place].mT
            slope.add_(delta).mul_(kept).sub_(delta)
            weights = weights * kept
        self.scratch.add_product(self.grad_values[keys], weights, self.plain_grads[block.queries])
        return slope


class Forward:
    """Sums of values (G,Nq,Dv) and of weights (G,Nq), filled block by block."""

    def __init__(self, query: Tensor, value: Tensor, dropout: Dropout, scratch: Scratch) -> None:
        self.value, self.dropout, self.scratch, self.width = value, dropout, scratch, value.shape[-1]
        self.output = value.new_zeros(*query.shape[:2], self.width)
        self.total = value.new_zeros(query.shape[:2])

    def run(self, kernel: Kernel, blocks: Sequence[Block]) -> None:
        for heads, group in groupby(blocks, attrgetter("heads")):
            kernel.enter(heads)
            value = self.value[heads]
            bordered = self.scratch("values", value.shape[0], self.width + 1, value.shape[1])
            bordered[:, : self.width], bordered[:, self.width] = value.mT, 1.0  # the last row sums the weights
            self.run_heads(kernel, group, last_positions(bordered))

    def run_heads(self, kernel: Kernel, blocks: Iterable[Block], values: Views) -> None:
        for block in blocks:
            undropped: Tensor | float = 0.0
            for keys in block.keys:
                weights = kernel.weights(block, keys)
                if self.dropout.probability:
                    undropped = undropped + weights.sum(1)
                    weights *= self.dropout.kept(weights, block, keys)
                sums = self.scratch("sums", weights.shape[0], self.width + 1, weights.shape[2])
                sums.baddbmm_(values[keys], weights, beta=int(keys.start > 0))
            self.total[block.place] = undropped if self.dropout.probability else sums[:, self.width]
            self.output[block.place] = sums[:, : self.width].mT


def attend(
    roads: Sequence[Callable[[], Kernel]], query: Tensor, value: Tensor, most: Tensor, alive: Tensor, is_causal: bool,
    scores: int, dropout: Dropout, scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (G,Nq,Dv), m_i and the row sums (G,Nq; 0 and 1 where a row sees no key), and the road each row took.

    `most` (G,1) bounds the log priors, `alive` (G,Nk) says which keys take part, `scores` are the scores per pair.
    """
    forward = Forward(query, value, dropout, scratch)
    total, shift = forward.total, torch.zeros_like(forward.total)
    road_taken = torch.zeros_like(total, dtype=torch.uint8)
    pending = list(make_blocks(query.shape[1], alive, is_causal, scores))
    if pending:
        kernel = roads[0]()
        kernel.leave_room(value)
        shift = shift + kernel.largest_bias
        kernel.start(shift)
        if kernel.narrow:  # nothing can be lost
            forward.run(kernel, pending)
            pending = []
        else:
            shift, unsure = kernel.bound(most), sees_a_key(query.shape[1], alive, is_causal)
    for road, exact in ((0, False), *((road, True) for road in range(len(roads)))):
        pending = [block for block in pending if bool(unsure[block.place].any())]
        if not pending:
            break
        kernel = roads[road]()
        if exact:
            kernel.start(torch.zeros_like(shift))
            for heads, group in groupby(pending, attrgetter("heads")):
                kernel.enter(heads)
                for block in group:
                    shift[block.place] = kernel.row_maximum(block)
        kernel.start(shift)
        forward.run(kernel, pending)
        for block in pending:
            road_taken[block.place] = road
        unsure = unsure & (total < TINY[total.dtype])
    empty = total == 0
    total.masked_fill_(empty, 1)
    return forward.output.div_(total[..., None]), shift.masked_fill(empty, 0), total, road_taken


def is_large(shift: Tensor) -> bool:
    """Whether backward keeps m_i."""
    return bool((shift.abs() > LARGE).any())


def attend_backward(
    kernels: Sequence[Kernel], road_taken: Tensor | None, shift: Tensor, alive: Tensor, is_causal: bool, scores: int,
    grad: WeightGradient,
) -> None:  # fmt: skip
    """Fill the gradients of the kernels and of `grad`, recomputing the weights block by block."""
    for kernel in kernels:
        kernel.start(shift)
        kernel.start_backward()
    for heads, group in groupby(make_blocks(shift.shape[1], alive, is_causal, scores), attrgetter("heads")):
        grad.enter(heads)
        for kernel in kernels:
            kernel.enter_backward(heads)
        for block in group:
            road = 0 if road_taken is None else int(road_taken[block.place].max())
            kernels[road].backward(block, grad)


def sees_a_key(num_queries: int, alive: Tensor, is_causal: bool) -> Tensor:
    """Whether a row sees a key that takes part, (G,Nq)."""
    num_keys = alive.shape[1]
    seen = torch.nn.functional.pad(alive.cumsum(-1), (1, 0))  # keys that take part, up to each
    last = torch.arange(num_queries) + 1 + num_keys - num_queries if is_causal else torch.full((num_queries,), num_keys)
    return seen[:, last.clamp(min=0)] > 0
