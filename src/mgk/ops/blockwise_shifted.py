"""The two kernels of shifted keys, l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r], for `blockwise.py`.

G heads, g of them at a time, M components, Nq queries, Nk keys, D width of a head; nq, nk those of a block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops.blockwise_kernels import (
    LOWEST,
    Block,
    Kernel,
    Mixture,
    Scratch,
    Span,
    Views,
    last_positions,
    prefix_maxima,
)

if TYPE_CHECKING:
    from mgk.ops.blockwise_attend import WeightGradient


class Shifted(Kernel):
    """Both kernels: what they are made from, and the gradients of it."""

    def __init__(
        self, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, key_bias: Tensor, scale: float, lowest: float,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        """Query (G,Nq,D), key (G,Nk,D), log_u (G,M,Nq), log_w (G,M,Nk), key_bias (G,Nk)."""
        super().__init__(query, key[:, None], None, key_bias[:, None], scale, lowest, scratch)
        self.log_u, self.log_w = log_u, log_w

    def start_backward(self) -> None:
        super().start_backward()
        self.grad_log_u, self.grad_log_w = torch.zeros_like(self.log_u), torch.zeros_like(self.log_w)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of query, key, log_u and log_w."""
        return self.grad_query, self.grad_key[:, 0], self.grad_log_u, self.grad_log_w


def as_mixture(kernel: Shifted) -> Mixture:
    """The same exponents, without factors."""
    key = kernel.key.expand(-1, kernel.log_u.shape[1], -1, -1)
    return Mixture(kernel.query, key, kernel.log_u, kernel.log_w, kernel.scale, False, kernel.lowest, kernel.scratch)


class ShiftedSoft(Shifted):
    """exp l = exp(q.k) * sum_r u[i,r] w[j,r], with u = exp(log_u - shift) and w = exp log_w where that fits.

    Else u and w are scaled to a largest entry of 1, and the scales c_j and a_i are biases: exp(q.k + c_j + a_i).
    """

    def __init__(
        self, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, scale: float, lowest: float, scratch: Scratch
    ) -> None:
        super().__init__(query, key, log_u, log_w, log_w.amax(1), scale, lowest, scratch)

    def bound(self, most: Tensor) -> Tensor:
        """Of q.k + c_j + a_i: the largest components of row and key need not be the same."""
        least, largest = self.log_u.aminmax(dim=1)
        return super().bound(most) + largest - least

    def start(self, shift: Tensor) -> None:
        log_u, log_w = self.log_u - shift[:, None], self.log_w
        removed = log_w == -torch.inf
        self.extra = 0.0, 0.0
        self.factored = self.in_range(log_u, torch.where(removed, self.largest_bias[..., None], log_w))
        if not self.factored:
            scale = self.log_u.amax(1)
            log_u, log_w = self.log_u - scale[:, None], log_w - self.key_bias
            self.extra = log_u.min().item() + log_w.masked_fill(removed, 0).min().item(), 0.0
            super().start(shift - scale)
            log_u, log_w = (x.clamp(min=LOWEST[x.dtype]) for x in (log_u, log_w))
        self.narrow = self.factored or self.narrow
        self.all_u, self.all_w = log_u.exp(), log_w.exp().masked_fill_(removed, 0)

    def enter(self, heads: slice) -> None:
        if self.factored:
            self.set_operands(self.key[heads, 0], self.query[heads], self.scale)
        else:
            super().enter(heads)
        u, w = self.all_u[heads], self.all_w[heads]
        self.u, self.w = last_positions(u), last_positions(w)
        self.transposed_w = Views(lambda at: w[:, :, at.start : at.stop].mT)

    def enter_backward(self, heads: slice) -> None:
        super().enter_backward(heads)
        self.grad_rows = last_positions(self.grad_log_u[heads])
        self.grad_columns = last_positions(self.grad_log_w[heads])

    def exponent(self, block: Block, keys: Span) -> Tensor:
        return self.scores(block, keys)

    def mix(self, block: Block, keys: Span) -> Tensor:
        return self.scratch.bmm("mix", self.transposed_w[keys], self.u[block.queries])

    def mixed(self, left: Tensor, right: Tensor, block: Block, keys: Span) -> Tensor:
        """The product, into the first."""
        left *= right
        return left if self.narrow else self.hide(left.clamp_(min=math.exp(self.lowest)), block, keys)

    def weights(self, block: Block, keys: Span) -> Tensor:
        unmixed = self.hide_future(self.exponential(self.exponent(block, keys)), block, keys)
        return self.mixed(unmixed, self.mix(block, keys), block, keys)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.grad_query, self.grad_key[:, 0], self.grad_log_u * self.all_u, self.grad_log_w * self.all_w

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        # That of a hidden key may be so large that times the slope it is infinite.
        weights = self.hide(self.exponential(self.exponent(block, keys)), block, keys)
        product = self.mixed(self.mix(block, keys), weights, block, keys)
        slope = grad.slope(block, keys, product)
        product *= slope
        weights *= slope  # dl[i,j,r] = u[i,r] w[j,r] weights[i,j]; `gradients` has what is missing here
        self.grad_rows[block.queries].add_(torch.bmm(self.w[keys], weights))
        self.grad_columns[keys].add_(torch.bmm(self.u[block.queries], weights.mT))
        return product


class ShiftedHard(Shifted):
    """max_r(log_u + log_w) = log_u[i,1] + log_w[j,0] + max_r(lead[i,r] + rise[j,r]).

    With the differences lead = log_u[i,r] - log_u[i,1] and rise = log_w[j,r] - log_w[j,0], two components take one
    broadcast maximum. One component is the same soft and hard, and takes none.
    """

    def __init__(
        self, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, scale: float, lowest: float, scratch: Scratch
    ) -> None:
        super().__init__(query, key, log_u, log_w, log_w[:, 0], scale, lowest, scratch)
        self.base = min(1, log_u.shape[1] - 1)
        self.lead = log_u - log_u[:, self.base, None]
        self.rise = (log_w - self.key_bias).masked_fill(log_w == -torch.inf, 0)
        ends = [(x.amin((0, 2)), x.amax((0, 2))) for x in (self.lead, self.rise)]
        least, most = ((lead_end + rise_end).max().item() for lead_end, rise_end in zip(*ends, strict=True))
        self.extra = least, most

    def start(self, shift: Tensor) -> None:
        super().start(shift - self.log_u[:, self.base])

    def enter(self, heads: slice) -> None:
        super().enter(heads)
        lead, rise = self.lead[heads], self.rise[heads]
        self.leads = Views(lambda at: lead[:, :, None, at.start : at.stop])
        self.rises = Views(lambda at: rise[:, :, at.start : at.stop, None])

    def enter_backward(self, heads: slice) -> None:
        super().enter_backward(heads)
        self.rows_of = [last_positions(part) for part in self.grad_log_u[heads].unbind(1)]
        self.columns_of = [last_positions(part) for part in self.grad_log_w[heads].unbind(1)]

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first component has what the others leave; rows of the gradient sum to 0."""
        self.grad_log_u[:, 0] = -self.grad_log_u[:, 1:].sum(1)
        self.grad_log_w[:, 0] -= self.grad_log_w[:, 1:].sum(1)
        return super().gradients()

    def bids(self, block: Block, keys: Span) -> list[Tensor]:
        """What each component bids for each pair, on one scale; broadcastable to (g,nk,nq)."""
        lead, rise = self.leads[block.queries], self.rises[keys]
        return [lead[:, 0], rise[:, 1], *(lead[:, r] + rise[:, r] for r in range(2, lead.shape[1]))]

    def exponent(self, block: Block, keys: Span) -> Tensor:
        if not self.base:
            return self.scores(block, keys)
        largest, *others = self.bids(block, keys)
        out = self.scratch("score", largest.shape[0], keys.size, block.queries.size)
        for other in others:
            largest = torch.maximum(largest, other, out=out)
        return out.baddbmm_(self.keys[keys], self.queries[block.queries])

    def weights(self, block: Block, keys: Span) -> Tensor:
        return self.hide(self.exponential(self.exponent(block, keys)), block, keys)

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        """All of a pair's gradient goes to the winner, the first one among equals; here that of the first is of all."""
        weights = self.weights(block, keys)
        grad_score = left = weights.mul_(grad.slope(block, keys, weights))
        self.columns_of[0][keys].add_(grad_score.sum(2))
        if self.base:
            bids = self.bids(block, keys)
            best = prefix_maxima(bids[:-1], self.scratch, grad_score.shape)
            for r in range(len(bids) - 1, 0, -1):  # the last component that beat all before it won
                won = torch.gt(bids[r], best[r - 1], out=self.scratch("won", *grad_score.shape)).mul_(left)
                left = left - won if r > 1 else left
                self.rows_of[r][block.queries].add_(won.sum(1))
                self.columns_of[r][keys].add_(won.sum(2))
        return grad_score
