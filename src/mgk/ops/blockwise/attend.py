"""Attention and its gradient, block by block, with any kernel of `kernels.py` and `shifted.py`.

How results stay exact: the weights are exp(l - m_i), and any row offset m_i cancels in the normalisation.

1. If norms and biases show that no weight can leave the range of normal numbers, m_i is the largest key bias.
2. Otherwise m_i starts as an upper bound that costs nothing (a Gaussian is at most 1).
3. If a row's sum is then below `TINY`, the bound was too loose, and its block is computed again with the exact maximum.
4. For shifted keys the factors can still underflow where query and key prefer different components. Such a block is
   computed again as a mixture, without factors.

A row with a sum above `TINY` loses at most 1e-12 of it for each key.

5. Where terms of l are so large that rounding a sum with m_i moves it by much, m_i is the exact maximum of the sum of
   the other terms and is subtracted last ("late"), so that the largest exponent is 0. It then leaves out terms that a
   kernel shares between the keys of a row.

Backward uses m_i plus the log of the row sum as the offset, so that weights sum to 1. If m_i is so large that rounding
would lose that log, backward keeps m_i, and divides the gradient of the output by the sums instead.

H query heads and G heads of keys and values of all batch entries, Nq queries, Nk keys, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, Reach, Scratch, column_views, make_blocks
from mgk.ops.blockwise.kernels import LOWEST, LOWEST_BACKWARD, Kernel
from mgk.ops.blockwise.shifted import ShiftedSoft
from mgk.ops.blockwise.weights import Dropout, WeightGradient

TINY = {torch.float32: 1e-20, torch.float64: 1e-280}
LARGE = 1e3  # of m_i: the log of a row sum then has an error of 6e-5 in float32
LATE = {torch.float32: 1e4, torch.float64: 1e12}  # of the terms of l, from which on m_i is subtracted last


class Forward:
    """Sums of weighted values (H,Nq,Dv) and of weights (H,Nq), filled block by block."""

    def __init__(self, query: Tensor, value: Tensor, dropout: Dropout, scratch: Scratch) -> None:
        self.value, self.dropout, self.scratch, self.width = value, dropout, scratch, value.shape[-1]
        self.output = value.new_zeros(*query.shape[:2], self.width)
        self.total = value.new_zeros(query.shape[:2])

    def run(self, kernel: Kernel, blocks: Sequence[Block]) -> None:
        for heads, group in groupby(blocks, attrgetter("heads")):
            kernel.select(heads)
            value = kernel.groups.of(self.value, heads)
            extended = self.scratch("values", value.shape[0], self.width + 1, value.shape[1])
            extended[:, : self.width], extended[:, self.width] = value.mT, 1.0  # the last row sums the weights
            values = column_views(extended.expand(heads.stop - heads.start, -1, -1))
            for block in group:
                undropped: Tensor | float = 0.0
                for keys in block.keys:
                    weights = kernel.weights(block, keys)
                    if self.dropout.probability:
                        undropped = undropped + weights.sum(1)
                        weights *= self.dropout.kept(weights, block, keys)
                    sums = self.scratch("sums", weights.shape[0], self.width + 1, weights.shape[2])
                    sums.baddbmm_(values[keys], weights, beta=int(keys is not block.keys[0]))
                self.total[block.place] = undropped if self.dropout.probability else sums[:, self.width]
                self.output[block.place] = sums[:, : self.width].mT


def attend(
    kernel: Kernel, value: Tensor, bound: Tensor, active: Tensor, reach: Reach, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (H,Nq,Dv), the log of the row sums (H,Nq), and what backward needs of each row, (3,H,Nq).

    The last are m_i, the row sum (0 and 1 where a row sees no key), and 1 where the row was computed as a mixture, plus
    2 where m_i was subtracted late.
    `bound` (H,Nq) bounds the exponents l, `active` (H,Nk) says which keys take part.
    """
    forward = Forward(kernel.query, value, dropout, kernel.scratch)
    total = forward.total
    as_mixture, left_out = torch.zeros_like(total), torch.zeros_like(total)
    blocks = list(make_blocks(active, reach, kernel.groups, kernel.components))
    kernel.limit_weights(value)
    offset = kernel.largest_bias.expand_as(total).contiguous()
    kernel.set_row_offset(offset)
    if kernel.in_range:
        forward.run(kernel, blocks)
    else:
        offset, uncertain = kernel.bound(bound), sees_a_key(active, reach)
        late = not kernel.magnitude() <= LATE[total.dtype]  # of NaN, too: it must not decide for other heads
        for attempt, exact in attempts(kernel, late):
            blocks = [block for block in blocks if bool(uncertain[block.place].any())]
            if not blocks:
                break
            if exact:
                set_exact_maximum(attempt, offset, blocks, late)
            attempt.set_row_offset(offset, late)
            forward.run(attempt, blocks)
            for block in blocks:
                as_mixture[block.place] = (attempt is not kernel) + 2 * late
                left_out[block.place] = 0 if attempt.left_out is None else attempt.left_out[block.place]
            uncertain = uncertain & (total < TINY[total.dtype])
    empty = total == 0
    total.masked_fill_(empty, 1)
    lse = (offset + left_out + total.log()).masked_fill_(empty, -torch.inf)
    rows = torch.stack([offset.masked_fill(empty, 0), total, as_mixture])
    return forward.output.div_(total[..., None]), lse, rows


def attempts(kernel: Kernel, late: bool) -> Iterator[tuple[Kernel, bool]]:
    """Kernels to try in turn, and whether with the exact row maximum."""
    if not late:
        yield kernel, False
    yield kernel, True
    if isinstance(kernel, ShiftedSoft):
        yield kernel.as_mixture(), True


def set_exact_maximum(kernel: Kernel, offset: Tensor, blocks: Sequence[Block], late: bool) -> None:
    """Write the largest exponent of the rows of `blocks` to `offset` (H,Nq)."""
    kernel.set_row_offset(torch.zeros_like(offset), late)
    for heads, group in groupby(blocks, attrgetter("heads")):
        kernel.select(heads)
        for block in group:
            offset[block.place] = kernel.row_maximum(block)


def sees_a_key(active: Tensor, reach: Reach) -> Tensor:
    """Whether a row sees an active key, (H,Nq)."""
    seen = torch.nn.functional.pad(active.cumsum(-1), (1, 0))  # active keys before each position
    first, stop = reach.bounds()
    return seen[:, stop] > seen[:, first]


class RowGradients(NamedTuple):
    """What backward works with: the row offset, how much weights are too large, and the lowest exponent."""

    offset: Tensor  # (H,Nq)
    excess: Tensor | None  # (H,Nq); None is 1
    lowest: float

    def divided(self, grad: Tensor) -> Tensor:
        """The gradient (H,Nq,...) of what a row sums, for weights that are too large."""
        return grad if self.excess is None else grad / self.excess.view(*self.excess.shape, *[1] * (grad.dim() - 2))


def backward_rows(offset: Tensor, total: Tensor, late: bool) -> RowGradients:
    if late or bool((offset.abs() > LARGE).any()):
        return RowGradients(offset, total, LOWEST[offset.dtype])
    return RowGradients(offset + total.log(), None, LOWEST_BACKWARD[offset.dtype])


def attend_backward(
    kernels: Sequence[Kernel], as_mixture: Tensor, active: Tensor, reach: Reach, grad: WeightGradient
) -> None:
    """Compute the weights again and fill the gradients of `kernels` and `grad`. `as_mixture` (H,Nq) picks a kernel."""
    blocks = make_blocks(active, reach, kernels[0].groups, kernels[0].components)
    for heads, group in groupby(blocks, attrgetter("heads")):
        grad.select(heads)
        for kernel in kernels:
            kernel.select_backward(heads)
        for block in group:
            which = int(as_mixture[block.place].max()) % 2 if len(kernels) > 1 else 0
            kernels[which].backward(block, grad)
