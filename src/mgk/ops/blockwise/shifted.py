"""The two kernels of shifted keys, l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r], for M >= 2.

H query heads of all batch entries, h heads of a block, M components, Nq queries, Nk keys, D width of a head; nq, nk
queries and keys of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, Scratch, Span, Views, column_views
from mgk.ops.blockwise.kernels import LOWEST, Kernel, Mixture, Terms, prefix_maxima
from mgk.ops.blockwise.weights import WeightGradient


class Shifted(Kernel):
    """What both kernels share. The scores have one component; log_u and log_w have M."""

    def __init__(self, terms: Terms, log_u: Tensor, key_bias: Tensor, lowest: float, scratch: Scratch) -> None:
        """The key of `terms` is (G,1,Nk,D), its biases are log_u (H,M,Nq) and log_w (H,M,Nk). key_bias (H,Nk)."""
        super().__init__(terms._replace(row_bias=None, key_bias=key_bias[:, None]), lowest, scratch)
        self.terms, self.log_u, self.log_w = terms, log_u, terms.key_bias

    def as_mixture(self) -> Mixture:
        """A kernel with the same exponents that does not factor them."""
        return Mixture(self.terms, self.lowest, self.scratch)

    def magnitude(self) -> float:
        return super().magnitude() + max(abs(end.item()) for end in self.log_u.aminmax())

    def start_backward(self, grad_lse: Tensor) -> None:
        super().start_backward(grad_lse)
        self.grad_log_u, self.grad_log_w = torch.zeros_like(self.log_u), torch.zeros_like(self.log_w)


class ShiftedSoft(Shifted):
    """exp l = exp(q.k) * sum_r u[i,r] w[j,r], with u = exp(log_u - m) and w = exp log_w where these are in range.

    Otherwise u and w are scaled to a largest entry of 1, and the scales are biases of the exponent q.k.
    """

    def __init__(self, terms: Terms, log_u: Tensor, lowest: float, scratch: Scratch) -> None:
        super().__init__(terms, log_u, terms.key_bias.amax(1), lowest, scratch)

    def bound(self, bound: Tensor) -> Tensor:
        """The scaled exponent combines the largest log_u and the largest log_w, of different components perhaps."""
        least, largest = self.log_u.aminmax(dim=1)
        return bound + largest - least

    def set_row_offset(self, offset: Tensor, late: bool = False) -> None:
        log_u, log_w = self.log_u - offset[:, None], self.log_w
        removed = log_w == -torch.inf
        self.extra_range = 0.0, 0.0
        self.factored = not late and self.are_in_range(log_u, torch.where(removed, self.largest_bias[..., None], log_w))
        if not self.factored:
            scale = self.log_u.amax(1)
            log_u, log_w = self.log_u - scale[:, None], log_w - self.key_bias
            self.extra_range = log_u.min().item() + log_w.masked_fill(removed, 0).min().item(), 0.0
            super().set_row_offset(offset if late else offset - scale, late)
            self.left_out = scale if late else None
            log_u, log_w = (x.clamp(min=LOWEST[x.dtype]) for x in (log_u, log_w))
        self.in_range = self.factored or self.in_range
        self.all_u, self.all_w = log_u.exp(), log_w.exp().masked_fill_(removed, 0)

    def select(self, heads: slice) -> None:
        if self.factored:
            self.set_operands(self.groups.expanded(self.key, heads)[:, 0], self.query[heads])
        else:
            super().select(heads)
        u, w = self.all_u[heads], self.all_w[heads]
        self.u, self.w = column_views(u), column_views(w)
        self.transposed_w = Views(lambda at: w[:, :, at.start : at.stop].mT)

    def select_backward(self, heads: slice) -> None:
        super().select_backward(heads)
        self.grad_rows = column_views(self.grad_log_u[heads])
        self.grad_columns = column_views(self.grad_log_w[heads])

    def exponent(self, block: Block, keys: Span) -> Tensor:
        return self.scores(block, keys)

    def factors(self, block: Block, keys: Span) -> Tensor:
        """sum_r u[i,r] w[j,r], (h,nk,nq)."""
        return self.scratch.bmm("factors", self.transposed_w[keys], self.u[block.queries])

    def multiply(self, left: Tensor, right: Tensor, block: Block, keys: Span) -> Tensor:
        """Multiply `left` by `right` in place, without denormal results."""
        left *= right
        return left if self.in_range else self.hide(left.clamp_(min=math.exp(self.lowest)), block, keys)

    def weights(self, block: Block, keys: Span) -> Tensor:
        exponentials = self.hide_unreached(self.exponential(self.scores(block, keys)), block, keys)
        return self.multiply(exponentials, self.factors(block, keys), block, keys)

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        # Hidden keys are removed first: their exponentials may be so large that a product with them is infinite.
        exponentials = self.hide(self.exponential(self.scores(block, keys)), block, keys)
        weights = self.multiply(self.factors(block, keys), exponentials, block, keys)
        grad_weights = grad.of(block, keys, weights)
        weights *= grad_weights
        exponentials *= grad_weights  # dl[i,j,r] = u[i,r] w[j,r] exponentials[i,j]; `gradients` multiplies by u and w
        self.grad_rows[block.queries].add_(torch.bmm(self.w[keys], exponentials))
        self.grad_columns[keys].add_(torch.bmm(self.u[block.queries], exponentials.mT))
        return weights

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        by_u, by_w = self.grad_log_u * self.all_u, self.grad_log_w * self.all_w
        return self.grad_query, self.grad_key, by_u, by_w, self.grad_scale


class ShiftedHard(Shifted):
    """max_r(log_u + log_w) = log_u[i,1] + log_w[j,0] + max_r(lead[i,r] + rise[j,r]).

    With the differences lead = log_u[i,r] - log_u[i,1] and rise = log_w[j,r] - log_w[j,0], two components need one
    broadcast maximum.
    """

    def __init__(self, terms: Terms, log_u: Tensor, lowest: float, scratch: Scratch) -> None:
        log_w = terms.key_bias
        super().__init__(terms, log_u, log_w[:, 0], lowest, scratch)
        self.lead = log_u - log_u[:, 1, None]
        self.rise = (log_w - self.key_bias).masked_fill(log_w == -torch.inf, 0)
        ends = [(x.amin((0, 2)), x.amax((0, 2))) for x in (self.lead, self.rise)]
        least, most = ((lead_end + rise_end).max().item() for lead_end, rise_end in zip(*ends, strict=True))
        self.extra_range = least, most
        self.finite = self.finite and math.isfinite(least + most)

    def set_row_offset(self, offset: Tensor, late: bool = False) -> None:
        super().set_row_offset(offset if late else offset - self.log_u[:, 1], late)
        self.left_out = self.log_u[:, 1] if late else None

    def start_backward(self, grad_lse: Tensor) -> None:
        super().start_backward(grad_lse)
        self.grad_lse = grad_lse

    def select(self, heads: slice) -> None:
        super().select(heads)
        lead, rise = self.lead[heads], self.rise[heads]
        self.leads = Views(lambda at: lead[:, :, None, at.start : at.stop])
        self.rises = Views(lambda at: rise[:, :, at.start : at.stop, None])

    def select_backward(self, heads: slice) -> None:
        super().select_backward(heads)
        self.grad_rows = [column_views(part) for part in self.grad_log_u[heads].unbind(1)]
        self.grad_columns = [column_views(part) for part in self.grad_log_w[heads].unbind(1)]

    def candidates(self, block: Block, keys: Span) -> list[Tensor]:
        """lead + rise of each component; those of the first two broadcast to (h,nk,nq)."""
        lead, rise = self.leads[block.queries], self.rises[keys]
        return [lead[:, 0], rise[:, 1], *(lead[:, r] + rise[:, r] for r in range(2, lead.shape[1]))]

    def exponent(self, block: Block, keys: Span) -> Tensor:
        largest, *others = self.candidates(block, keys)
        out = self.scratch("scores", largest.shape[0], keys.size, block.queries.size)
        for other in others:
            largest = torch.maximum(largest, other, out=out)
        out.baddbmm_(self.keys[keys], self.queries[block.queries])
        return out if self.late is None else out.sub_(self.lates[block.queries])

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        """The winner of a pair, the first one among equals, gets its gradient; the first entry collects all of it."""
        weights = self.weights(block, keys)
        grad_score = left = weights.mul_(grad.of(block, keys, weights))
        self.grad_columns[0][keys].add_(grad_score.sum(2))
        candidates = self.candidates(block, keys)
        best = prefix_maxima(candidates[:-1], self.scratch, grad_score.shape)
        for r in range(len(candidates) - 1, 0, -1):  # the winner is the last component that exceeds all before it
            won = torch.gt(candidates[r], best[r - 1], out=self.scratch("won", *grad_score.shape)).mul_(left)
            left = left - won if r > 1 else left
            self.grad_rows[r][block.queries].add_(won.sum(1))
            self.grad_columns[r][keys].add_(won.sum(2))
        return grad_score

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The first component gets what the others leave. The gradients of a row's log_u sum to that of its lse."""
        self.grad_log_u[:, 0] = self.grad_lse - self.grad_log_u[:, 1:].sum(1)
        self.grad_log_w[:, 0] -= self.grad_log_w[:, 1:].sum(1)
        return self.grad_query, self.grad_key, self.grad_log_u, self.grad_log_w, self.grad_scale
