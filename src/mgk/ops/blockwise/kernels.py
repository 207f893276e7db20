"""The kernels that `attend.py` runs over blocks. Each computes the weights exp(l - m_i) of a block and their gradients:

    Mixture        sum_r exp l,  l[i,j,r] = scale[r] q_i.k_jr + row_bias[i,r] + key_bias[j,r]    M exponentials
    HardMixture    max_r exp l                                                                  one exponential
    ShiftedSoft    sum_r exp l,  l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]         one product and exponential
    ShiftedHard    max_r exp l                                                        (both in shifted.py)

The derivations are in docs/math.md.

Why a block is fast: keys are rows and queries are columns, (h,nk,nq), so that most products have few rows and many
columns, the shape that BLAS handles best. Biases are columns of the score product. Exponentials and products of
denormal float32 numbers take a hundred times as long as others: where norms and biases alone do not exclude them,
exponents are clamped to at least LOWEST.

H query heads and G heads of keys (H is a multiple of G) of all batch entries, h heads of a block, M components, Nq
queries, Nk keys, D width of a head; nq, nk queries and keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, HeadGroups, Scratch, Span, column_views, row_views, transposed_views
from mgk.ops.blockwise.weights import WeightGradient

LOWEST = {torch.float32: -75.0, torch.float64: -700.0}  # exp(-87) is denormal; the rest is left for small values
HIGHEST = {torch.float32: 88.0, torch.float64: 709.0}  # of a sum of weights times values
LOWEST_BACKWARD = {torch.float32: -45.0, torch.float64: -300.0}  # of weights that sum to 1, times gradients


class Terms(NamedTuple):
    """What exponents are made of: l[i,j,r] = scale[r] q_i.k_jr + row_bias[i,r] + key_bias[j,r].

    A head of keys serves H/G query heads. The key may be the same for all components.
    """

    query: Tensor  # (H,Nq,D)
    key: Tensor  # (G,M,Nk,D) or (G,1,Nk,D)
    row_bias: Tensor | None  # (H,M,Nq)
    key_bias: Tensor  # (H,M,Nk); -inf hides a key or removes a component
    scale: Tensor | None  # (H,M); None is 1

    @property
    def groups(self) -> HeadGroups:
        return HeadGroups(self.query.shape[0] // max(1, self.key.shape[0]))


class Kernel:
    """Exponents as one product of extended keys and queries: [k, key_bias, 1] . [scale q, 1, row_bias - m].

    Components are batch entries like heads: H*M matrices. `set_row_offset` and `start_backward` are for all heads,
    `select` and `select_backward` for the heads of the next blocks.
    """

    def __init__(self, terms: Terms, lowest: float, scratch: Scratch) -> None:
        self.query, self.key, self.row_bias, key_bias, self.scale = terms
        self.groups, self.scratch = terms.groups, scratch
        self.lowest, self.highest, self.components = lowest, math.inf, key_bias.shape[1]
        self.late: Tensor | None = None
        self.left_out: Tensor | None = None  # of the exponents of a row (H,Nq), beside its offset
        self.extra_range = 0.0, 0.0  # bounds of what a subclass adds to an exponent
        hidden = key_bias == -torch.inf
        self.visible = (~hidden).to(key_bias.dtype)[..., None] if bool(hidden.any()) else None  # (H,M,Nk,1)
        largest = key_bias.flatten(1).amax(1, keepdim=True)
        self.largest_bias = largest.masked_fill(largest == -torch.inf, 0)  # (H,1)
        self.key_bias = (
            key_bias if self.visible is None else torch.where(hidden, self.largest_bias[..., None], key_bias)
        )
        of_query, of_key = (torch.linalg.vector_norm(x, dim=-1).flatten(1).amax(1) for x in (self.query, self.key))
        products = of_query.view(of_key.shape[0], -1) * of_key[:, None]
        if self.scale is not None:
            products = products * self.scale.abs().amax(1).view_as(products)
        self.largest_product = products.max().item()
        self.finite = math.isfinite(self.largest_product + self.largest_bias.sum().item())

    def limit_weights(self, value: Tensor) -> None:
        """Lower the highest exponent that is in range, so that sums of weights times `value` (G,Nk,Dv) are finite."""
        sizes = [abs(end.item()) for end in value.aminmax()] if value.numel() else []
        self.highest = HIGHEST[value.dtype] - math.log(max([1.0, *sizes])) - math.log(value.shape[1])

    def bound(self, bound: Tensor) -> Tensor:
        """An upper bound of the exponents of each row, from that of l (H,Nq)."""
        return bound

    def magnitude(self) -> float:
        """How large the terms of an exponent may be."""
        biases = (self.key_bias,) if self.row_bias is None else (self.key_bias, self.row_bias)
        largest = [max(abs(end.item()) for end in bias.aminmax()) for bias in biases]
        return float(self.largest_product + sum(largest))

    def set_row_offset(self, offset: Tensor, late: bool = False) -> None:
        """Subtract m_i = `offset` (H,Nq) from all exponents from now on, after the product if it is `late`."""
        self.late, early = (offset, torch.zeros_like(offset)) if late else (None, offset)
        self.rows = -early[:, None] if self.row_bias is None else self.row_bias - early[:, None]
        self.in_range = not late and self.are_in_range(self.rows, self.key_bias)

    def are_in_range(self, rows: Tensor, keys: Tensor) -> bool:
        """Whether no exponent of a pair, and no bias by itself, can be too low or too high."""
        ends = [[end.item() for end in bias.aminmax()] for bias in (rows, keys)]
        least, most = (sum(end) for end in zip(*ends, self.extra_range, strict=True))
        most = max(most + self.largest_product, *(abs(end) for pair in ends for end in pair))
        return bool(least - self.largest_product > self.lowest and most < min(-LOWEST[rows.dtype], self.highest))

    def select(self, heads: slice) -> None:
        """Prepare for blocks of these heads."""
        query, key, components = self.scaled_query(heads), self.groups.of(self.key, heads), self.components
        num_heads, (num_keys, width) = query.shape[0], key.shape[2:]
        keys = self.scratch(f"keys {components}", num_heads * components, num_keys, width + 2)
        split = keys.view(num_heads, components, num_keys, width + 2)
        split[..., :width], split[..., width], split[..., width + 1] = key, self.key_bias[heads], 1.0
        queries = self.scratch(f"queries {components}", num_heads * components, query.shape[2], width + 2)
        split = queries.view(num_heads, components, query.shape[2], width + 2)
        split[..., :width], split[..., width], split[..., width + 1] = query, 1.0, self.rows[heads]
        self.set_operands(keys, queries)
        if self.late is not None:
            self.lates = column_views(self.late[heads].repeat_interleave(components, 0)[:, None])

    def scaled_query(self, heads: slice) -> Tensor:
        """The queries of all components, (h,M,Nq,D), or (h,1,Nq,D) where these are the same."""
        query = self.query[heads, None]
        return query if self.scale is None else query * self.scale[heads, :, None, None]

    def set_operands(self, keys: Tensor, queries: Tensor) -> None:
        """Use these keys (h*M,Nk,D or D+2) and queries (h*M,Nq,D or D+2)."""
        self.keys, self.queries = row_views(keys), transposed_views(queries)
        self.plain_keys = transposed_views(keys[..., : self.key.shape[-1]])

    def scores(self, block: Block, keys: Span) -> Tensor:
        """Exponents of all components, (h*M,nk,nq)."""
        scores = self.scratch.bmm("scores", self.keys[keys], self.queries[block.queries])
        return scores if self.late is None else scores.sub_(self.lates[block.queries])

    def exponential(self, exponent: Tensor) -> Tensor:
        return (exponent if self.in_range else exponent.clamp_(self.lowest, -LOWEST[exponent.dtype])).exp_()

    def hide(self, weights: Tensor, block: Block, keys: Span) -> Tensor:
        """Write 0 for keys that are not seen, to weights (h*M,nk,nq) of all components or (h,nk,nq) of pairs."""
        if self.visible is not None:
            visible = self.visible[block.heads, :, slice(*keys)]
            self.keep(weights, visible.flatten(0, 1) if weights.shape[0] > visible.shape[0] else visible[:, 0])
        return self.hide_unreached(weights, block, keys)

    def hide_unreached(self, weights: Tensor, block: Block, keys: Span) -> Tensor:
        """Write 0 for keys after the position of a query, or before its window."""
        start, stop = block.after_diagonal(keys)
        if stop > 1:
            past = self.scratch.triangle(block.queries.size)[:, max(0, start) : stop]
            self.keep(weights[:, max(0, -start) :], past)
        size, start = block.queries.size, block.after_window(keys)
        if start < size:
            within = self.scratch.triangle_below(size)[:, start : start + keys.size]
            self.keep(weights[:, : within.shape[1]], within)
        return weights

    def keep(self, weights: Tensor, kept: Tensor) -> None:
        """Write 0 where `kept` is 0, also in place of NaN."""
        if self.finite:
            weights *= kept
        else:
            weights.masked_fill_(kept == 0, 0)

    def exponent(self, block: Block, keys: Span) -> Tensor:
        """The exponent of a pair, or the largest of its components: (h,nk,nq)."""
        raise NotImplementedError

    def weights(self, block: Block, keys: Span) -> Tensor:
        """The weights of a block before normalisation, (h,nk,nq)."""
        return self.hide(self.exponential(self.exponent(block, keys)), block, keys)

    def row_maximum(self, block: Block) -> Tensor:
        """The largest exponent of each row over the keys it sees, (h,nq); 0 where it sees none."""
        largest = torch.stack([self.largest_seen(block, keys) for keys in block.keys]).amax(0)
        return largest.masked_fill_(largest == -torch.inf, 0)

    def largest_seen(self, block: Block, keys: Span) -> Tensor:
        """The largest exponent of each row over the visible ones of `keys`, (h,nq)."""
        return self.only_seen(self.exponent(block, keys), block, keys).amax(1)

    def only_seen(self, exponent: Tensor, block: Block, keys: Span) -> Tensor:
        """Write -inf where `hide` writes 0."""
        if self.visible is None and block.sees_all(keys):
            return exponent
        return exponent.masked_fill_(self.hide(torch.ones_like(exponent), block, keys) == 0, -torch.inf)

    def start_backward(self, grad_lse: Tensor) -> None:
        """Prepare for all heads. `grad_lse` (H,Nq) is the gradient of the log of the row sums."""
        self.grad_query, self.grad_key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        self.grad_scale = self.query.new_empty(0) if self.scale is None else torch.zeros_like(self.scale)

    def select_backward(self, heads: slice) -> None:
        self.select(heads)
        self.grad_keys = row_views(self.groups.of(self.grad_key, heads).flatten(0, 1))
        self.plain_queries = row_views(self.scaled_query(heads).expand(-1, self.components, -1, -1).flatten(0, 1))
        shared = self.key.shape[1] < self.components  # one key for all components: its gradient is their sum
        self.key_parts = [slice(r, None, self.components) for r in range(self.components)] if shared else [slice(None)]

    def backward(self, block: Block, grad: WeightGradient) -> None:
        """Add the contribution of a block to all gradients."""
        queries = self.plain_queries[block.queries]
        grad_query = self.scratch("grad query", queries.shape[0], queries.shape[2], queries.shape[1])
        for keys in block.keys:
            grad_score = self.grad_score(block, keys, grad)
            grad_query.baddbmm_(self.plain_keys[keys], grad_score, beta=int(keys is not block.keys[0]))
            for part in self.key_parts:
                self.scratch.add_product(self.grad_keys[keys], grad_score[part], queries[part])
        parts = grad_query.view(-1, self.components, *grad_query.shape[1:])  # (h,M,D,nq)
        if self.scale is not None:
            self.grad_scale[block.heads] += (parts * self.query[block.place].mT[:, None]).sum((2, 3))
            parts = parts * self.scale[block.heads, :, None, None]
        self.grad_query[block.place] = parts.sum(1).mT

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        """The gradient of `scores`, (h*M,nk,nq). Also adds to the gradients of the biases."""
        raise NotImplementedError

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, row bias, key bias and scale; empty for a tensor that is not there."""
        raise NotImplementedError


class Mixture(Kernel):
    """The sum over r of exp(q_i.k_jr + row_bias[i,r] + key_bias[j,r])."""

    def combine(self, operator: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        """Reduce the components of a (h*M,nk,nq) buffer to (h,nk,nq)."""
        total, *others = self.scratch.components(tensor, self.components)
        out = self.scratch("combined", *total.shape)
        for other in others:
            total = operator(total, other, out=out)
        return total

    def largest_seen(self, block: Block, keys: Span) -> Tensor:
        scores = self.only_seen(self.scores(block, keys), block, keys)  # some components of a key may be removed
        return self.combine(torch.maximum, scores).amax(1)

    def weights(self, block: Block, keys: Span) -> Tensor:
        return self.combine(torch.add, self.hide(self.exponential(self.scores(block, keys)), block, keys))

    def start_backward(self, grad_lse: Tensor) -> None:
        super().start_backward(grad_lse)
        self.grad_key_bias = torch.zeros_like(self.key_bias)
        self.grad_row_bias = self.query.new_empty(0) if self.row_bias is None else torch.zeros_like(self.row_bias)

    def select_backward(self, heads: slice) -> None:
        super().select_backward(heads)
        self.grad_columns = column_views(self.grad_key_bias[heads].flatten(0, 1))
        if self.row_bias is not None:
            self.grad_rows = column_views(self.grad_row_bias[heads].flatten(0, 1))

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.grad_query, self.grad_key, self.grad_row_bias, self.grad_key_bias, self.grad_scale

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        scores = self.scores(block, keys)
        self.replace_by_gradient(scores, block, keys, grad)
        self.grad_columns[keys].add_(scores.sum(2))
        if self.row_bias is not None:
            self.grad_rows[block.queries].add_(scores.sum(1))
        return scores

    def replace_by_gradient(self, scores: Tensor, block: Block, keys: Span, grad: WeightGradient) -> None:
        """Overwrite the exponents of all components, (h*M,nk,nq), by their gradients."""
        self.hide(self.exponential(scores), block, keys)
        grad_weights = grad.of(block, keys, self.combine(torch.add, scores))
        for part in self.scratch.components(scores, self.components):
            part *= grad_weights


class HardMixture(Mixture):
    """The maximum over r in place of the sum.

    The winner is decided before the row offset is subtracted: beside it, small differences would be rounded away. The
    part of the row bias that all components share becomes part of the offset.
    """

    weights, largest_seen = Kernel.weights, Kernel.largest_seen

    def set_row_offset(self, offset: Tensor, late: bool = False) -> None:
        super().set_row_offset(offset, late)
        self.late = None  # every offset is subtracted after the product here
        if self.row_bias is None:
            self.rows, self.row_offset = torch.zeros_like(self.rows), offset
        else:
            shared = self.row_bias.amax(1)
            self.rows, self.row_offset = self.row_bias - shared[:, None], offset if late else offset - shared
            self.left_out = shared if late else None

    def select(self, heads: slice) -> None:
        super().select(heads)
        self.row_offsets = column_views(self.row_offset[heads, None])

    def exponent(self, block: Block, keys: Span) -> Tensor:
        return self.combine(torch.maximum, self.scores(block, keys)).sub_(self.row_offsets[block.queries])

    def replace_by_gradient(self, scores: Tensor, block: Block, keys: Span, grad: WeightGradient) -> None:
        parts = self.scratch.components(scores, self.components)
        best = prefix_maxima(parts, self.scratch, parts[0].shape)
        weights = torch.sub(best[-1], self.row_offsets[block.queries], out=self.scratch("combined", *parts[0].shape))
        self.hide(self.exponential(weights), block, keys)
        left = grad.of(block, keys, weights).mul_(weights)
        for part, earlier in zip(parts[:0:-1], best[-2::-1], strict=True):
            left -= part.gt_(earlier).mul_(left)  # the winner is the last component that exceeds all before it
        parts[0].copy_(left)


def prefix_maxima(values: Sequence[Tensor], scratch: Scratch, shape: Sequence[int]) -> list[Tensor]:
    """The maximum of the first value, of the first two, ..."""
    best = list(values[:1])
    for r, value in enumerate(values[1:]):
        best.append(torch.maximum(best[-1], value, out=scratch(f"maximum {r}", *shape)))
    return best
