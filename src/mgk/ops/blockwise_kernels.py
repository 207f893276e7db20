"""Block by block over the pairs of queries and keys: what `blockwise.py` is made of.

Two kernels, each for a few heads g at a time, both in the log domain:

    Mixture   l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]      M products and M exponentials per pair
    Shifted   l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]             one product and one exponential per pair

A hidden key has the bias -inf. The derivations are in docs/math.md.

How a block stays exact: the weights are exp(l - m_i), and any m_i cancels. It starts as an upper bound that costs
nothing (a Gaussian is at most 1). Where a row's sum then falls under `TINY`, the bound was too loose, and the block is
done again with the exact row maximum. For shifted keys the factors can still hide a row whose heavy keys sit in another
component; such a block is done as a mixture. What a row above `TINY` loses is 1e-13 of it.

g heads at a time, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TINY = {torch.float32: 1e-25, torch.float64: 1e-280}
QUERY_BLOCK = 256
KEY_BLOCK = 1024
BLOCK_NUMBERS = 1 << 18  # scores per thread: small enough for its cache, large enough to drown Python's share


class Block(NamedTuple):
    """Some queries, and the key blocks they see."""

    queries: slice
    keys: list[slice]
    offset: int | None  # causal: query i sees the keys up to i + offset
    first_head: int

    def hide_future(self, weights: Tensor, keys: slice, fill: float = 0.0) -> Tensor:
        if self.offset is not None and keys.stop - 1 > self.queries.start + self.offset:
            last = torch.arange(self.queries.start, self.queries.stop) + self.offset
            weights.masked_fill_(torch.arange(keys.start, keys.stop) > last[:, None], fill)
        return weights

    def dropout(self, like: Tensor, keys: slice, probability: float, seed: int) -> Tensor:
        """1/(1-p) where a weight stays, else 0: a function of seed and place, so the same forward and backward."""
        place = (self.first_head * 1_000_003 + self.queries.start) * 1_000_003 + keys.start
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % (1 << 63))
        return torch.empty_like(like).bernoulli_(1 - probability, generator=generator).div_(1 - probability)


def query_step(num_queries: int, is_causal: bool) -> int:
    """Short causal blocks leave less of the diagonal to hide."""
    return min(QUERY_BLOCK, max(QUERY_BLOCK // 4, num_queries // 8)) if is_causal else QUERY_BLOCK


def head_groups(num_heads: int, num_queries: int, num_keys: int, is_causal: bool) -> list[slice]:
    """As many heads at a time as keep the cores busy and the caches warm."""
    block = min(query_step(num_queries, is_causal), num_queries) * min(KEY_BLOCK, num_keys)
    size = max(1, BLOCK_NUMBERS * torch.get_num_threads() // max(1, block))
    return [slice(start, min(start + size, num_heads)) for start in range(0, num_heads, size)]


def query_blocks(num_queries: int, num_keys: int, last_key: int, is_causal: bool, first_head: int) -> Iterator[Block]:
    """`last_key` is one past the last key that takes part."""
    offset, step = num_keys - num_queries if is_causal else None, query_step(num_queries, is_causal)
    for start in range(0, num_queries, step):
        queries = slice(start, min(start + step, num_queries))
        stop = last_key if offset is None else min(last_key, queries.stop + offset)
        keys = [slice(key, min(key + KEY_BLOCK, stop)) for key in range(0, stop, KEY_BLOCK)]
        yield Block(queries, keys, offset, first_head)


class Scratch:
    """Memory for blocks, taken once: fresh pages for every block would cost more than what is computed in them."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if (name, shape) not in self.views:
            numbers = math.prod(shape)
            if name not in self.memory or self.memory[name].numel() < numbers:
                self.memory[name] = like.new_empty(numbers)
            self.views[name, shape] = self.memory[name][:numbers].view(shape)
        return self.views[name, shape]

    def bmm(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, out=self(name, left, (left.shape[0], left.shape[1], right.shape[2])))


class Views:
    """Slices of (g,N,...) tensors along N, made once."""

    def __init__(self, tensor: Tensor, transpose: bool = False) -> None:
        self.tensor, self.transpose = tensor, transpose
        self.made: dict[tuple[int, int], Tensor] = {}

    def __getitem__(self, span: slice) -> Tensor:
        if (span.start, span.stop) not in self.made:
            view = self.tensor[:, span]
            self.made[span.start, span.stop] = view.mT if self.transpose else view
        return self.made[span.start, span.stop]


def append(tensor: Tensor, *columns: Tensor | float) -> Tensor:
    """Further columns for a product: [x, c].[y, d] = x.y + c d."""
    parts = [c[..., None] if isinstance(c, Tensor) else tensor.new_full((*tensor.shape[:-1], 1), c) for c in columns]
    return torch.cat([tensor, *parts], -1)


def beats(challenger: Tensor, holder: Tensor, out: Tensor) -> Tensor:
    """1.0 where challenger > holder, else 0.0, without the slow detour over bool."""
    return torch.sub(challenger, holder, out=out).mul_(torch.finfo(out.dtype).max).clamp_(0, 1)


def prefix_maxima(values: list[Tensor], scratch: Scratch, shape: tuple[int, ...]) -> list[Tensor]:
    result = values[:1]
    for r, value in enumerate(values[1:]):
        result.append(torch.maximum(result[-1], value, out=scratch(f"maximum {r}", value, shape)))
    return result


class Mixture:
    """l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]."""

    def __init__(
        self, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, hard: bool, scratch: Scratch
    ) -> None:
        self.query, self.key, self.row_bias, self.hard = query, key, row_bias, hard  # (g,Nq,D), (g,M,Nk,D), (g,M,Nq)
        self.scratch, self.components = scratch, range(key.shape[1])
        # The difference of two components at a hidden key must be a number, so hidden is finite, far below all else.
        key_bias = key_bias.clamp(min=torch.finfo(key_bias.dtype).min / 4)
        self.bordered_key = [Views(append(key[:, r], key_bias[:, r], 1.0), transpose=True) for r in self.components]

    def border(self, rows: slice, shift: Tensor) -> list[Tensor]:
        """What the bordered keys are multiplied with: exponents less `shift`."""
        query = self.query[:, rows]
        if self.row_bias is None:
            return [append(query, 1.0, -shift)] * len(self.components)
        return [append(query, 1.0, row - shift) for row in self.row_bias[:, :, rows].unbind(1)]

    def scores(self, queries: list[Tensor], keys: slice) -> list[Tensor]:
        return [self.scratch.bmm(f"score {r}", queries[r], self.bordered_key[r][keys]) for r in self.components]

    def exponent(self, queries: list[Tensor], block: Block, keys: slice) -> Tensor:
        total, *others = self.scores(queries, keys)
        for other in others:
            torch.maximum(total, other, out=total)
        return total

    def weights(self, queries: list[Tensor], block: Block, keys: slice) -> Tensor:
        """exp(l - m), summed over the components or of the largest: (g,nq,nk)."""
        if self.hard:
            return block.hide_future(self.exponent(queries, block, keys).exp_(), keys)
        total, *others = (score.exp_() for score in self.scores(queries, keys))
        for other in others:
            total += other
        return block.hide_future(total, keys)

    def row_constant(self, rows: slice) -> float:
        return 0.0

    def start_backward(self) -> None:
        self.grad_query, self.grad_key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        self.grad_key_bias = self.key.new_zeros(self.key.shape[:-1])
        self.grad_row_bias = None if self.row_bias is None else torch.zeros_like(self.row_bias)

    def backward(self, queries: list[Tensor], block: Block, keys: slice, grad: WeightGradient) -> None:
        parts = self.scores(queries, keys)
        shape = tuple(parts[0].shape)
        total = self.scratch("total", parts[0], shape)
        if self.hard:
            best = prefix_maxima(parts, self.scratch, shape)
            weights = block.hide_future(torch.exp(best[-1], out=total), keys)
            left = grad.slope(block, keys, weights).mul_(weights)
            for r in reversed(self.components[1:]):  # the last component that beat all before it won
                left -= beats(parts[r], best[r - 1], out=parts[r]).mul_(left)
            parts[0] = left
        else:
            total.zero_()
            for part in parts:
                total += block.hide_future(part.exp_(), keys)
            slope = grad.slope(block, keys, total)
            for part in parts:
                part *= slope
        rows = block.queries
        for r, part in enumerate(parts):  # dl[i,j,r]
            self.grad_query[:, rows] += torch.bmm(part, self.key[:, r, keys])
            self.grad_key[:, r, keys] += torch.bmm(part.mT, self.query[:, rows])
            self.grad_key_bias[:, r, keys] += part.sum(-2)
            if self.grad_row_bias is not None:
                self.grad_row_bias[:, r, rows] += part.sum(-1)


class Shifted:
    """l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r].

    Soft: exp l = exp(q.k + c_j) * sum_r u[i,r] w[j,r] * exp a_i, with u and w scaled to a largest entry of 1.
    Hard: max_r(log_u + log_w) = log_u[i,1] + log_w[j,0] + max(-lead[i,1], rise[j,1], ...), with the differences
    lead = log_u[i,r] - log_u[i,0] and rise = log_w[j,r] - log_w[j,0]: for two components one broadcast maximum.
    """

    def __init__(
        self, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, hard: bool, scratch: Scratch
    ) -> None:
        self.query, self.key, self.log_u, self.log_w = query, key, log_u, log_w  # (g,N,D), (g,N,M)
        self.hard, self.scratch = hard, scratch
        self.bids = hard and log_u.shape[-1] > 1
        if hard:
            key_bias, self.constant = log_w[..., 0], log_u[..., int(self.bids)]
            self.lead = log_u - log_u[..., :1]
            self.rise = (log_w - key_bias[..., None]).masked_fill(key_bias[..., None] == -torch.inf, 0)
        else:
            key_bias, self.constant = log_w.amax(-1), log_u.amax(-1)
            self.u = (log_u - self.constant[..., None]).exp()
            self.w = (log_w - key_bias.masked_fill(key_bias == -torch.inf, 0)[..., None]).exp()
            self.transposed_w = Views(self.w, transpose=True)
        self.bordered_key = Views(append(key, key_bias, 1.0), transpose=True)

    def border(self, rows: slice, shift: Tensor) -> list[Tensor]:
        """What the bordered keys are multiplied with: exponents less `shift`."""
        return [append(self.query[:, rows], 1.0, -shift)]

    def component_bids(self, block: Block, keys: slice) -> list[Tensor]:
        """What each component bids for each pair, on one scale; broadcastable to (g,nq,nk)."""
        lead, rise = self.lead[:, block.queries, None], self.rise[:, None, keys]
        bids = [-lead[..., 1], rise[..., 1]]
        return bids + [rise[..., r] + (lead[..., r] - lead[..., 1]) for r in range(2, lead.shape[-1])]

    def exponent(self, queries: list[Tensor], block: Block, keys: slice) -> Tensor:
        query, key = queries[0], self.bordered_key[keys]
        if self.bids:
            shape = query.shape[0], query.shape[1], key.shape[2]
            return prefix_maxima(self.component_bids(block, keys), self.scratch, shape)[-1].baddbmm_(query, key)
        return self.scratch.bmm("score", query, key)

    def mix(self, block: Block, keys: slice) -> Tensor:
        return self.scratch.bmm("mix", self.u[:, block.queries], self.transposed_w[keys])

    def weights(self, queries: list[Tensor], block: Block, keys: slice) -> Tensor:
        """exp(l - m), summed over the components or of the largest: (g,nq,nk)."""
        weights = self.exponent(queries, block, keys).exp_()
        if not self.hard:
            weights *= self.mix(block, keys)
        return block.hide_future(weights, keys)

    def row_constant(self, rows: slice) -> Tensor:
        return self.constant[:, rows]

    def as_mixture(self) -> Mixture:
        key = self.key[:, None].expand(-1, self.log_u.shape[-1], -1, -1)
        return Mixture(self.query, key, self.log_u.mT, self.log_w.mT, False, self.scratch)

    def start_backward(self) -> None:
        self.grad_query, self.grad_key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        self.grad_log_u, self.grad_log_w = torch.zeros_like(self.log_u), torch.zeros_like(self.log_w)

    def backward(self, queries: list[Tensor], block: Block, keys: slice, grad: WeightGradient) -> None:
        weights = block.hide_future(self.exponent(queries, block, keys).exp_(), keys)
        if self.hard:
            slope = grad.slope(block, keys, weights).mul_(weights)
            parts = self.winners(block, keys, slope)
        else:
            mix = self.mix(block, keys)
            product = torch.mul(weights, mix, out=self.scratch("product", mix, tuple(mix.shape)))
            unmixed = grad.slope(block, keys, product).mul_(weights)
            slope, parts = mix.mul_(unmixed), self.shares(block, keys, unmixed)
        rows, column_rest = block.queries, slope.sum(-2)
        for r, part in parts:  # the first component has what the others leave; rows of dl sum to 0
            row, column = part.sum(-1), part.sum(-2)
            self.grad_log_u[:, rows, r] += row
            self.grad_log_u[:, rows, 0] -= row
            self.grad_log_w[:, keys, r] += column
            column_rest -= column
        self.grad_log_w[:, keys, 0] += column_rest
        self.grad_query[:, rows] += torch.bmm(slope, self.key[:, keys])
        self.grad_key[:, keys] += torch.bmm(slope.mT, self.query[:, rows])

    def shares(self, block: Block, keys: slice, unmixed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """dl[i,j,r] of the components after the first."""
        out = self.scratch("product", unmixed, tuple(unmixed.shape))
        for r in range(1, self.u.shape[-1]):
            yield r, torch.mul(self.u[:, block.queries, None, r], self.w[:, None, keys, r], out=out).mul_(unmixed)

    def winners(self, block: Block, keys: slice, slope: Tensor) -> Iterator[tuple[int, Tensor]]:
        """dl[i,j,r] of the components after the first: all of it goes to the winner, the first one among equals."""
        if not self.bids:
            return
        shape, bids = tuple(slope.shape), self.component_bids(block, keys)
        best, out = prefix_maxima(bids[:-1], self.scratch, shape), self.scratch("product", slope, shape)
        for r in range(len(bids) - 1, 0, -1):  # the last component that beat all before it won
            won = beats(bids[r], best[r - 1], out).mul_(slope)
            slope = slope - won if r > 1 else slope
            yield r, won


Kernel = Mixture | Shifted


class WeightGradient:
    """From the gradient of the output to the slope dA - delta of the weights, and on the way that of the values."""

    def __init__(
        self, value: Tensor, output: Tensor, grad: Tensor, dropout_p: float, seed: int, scratch: Scratch
    ) -> None:
        self.grad, self.dropout_p, self.seed, self.scratch = grad, dropout_p, seed, scratch
        self.delta = (grad * output).sum(-1)
        self.bordered_grad, self.bordered_value = append(grad, -self.delta), Views(append(value, 1.0), transpose=True)
        self.grad_value = torch.zeros_like(value)

    def slope(self, block: Block, keys: slice, weights: Tensor) -> Tensor:
        slope = self.scratch.bmm("slope", self.bordered_grad[:, block.queries], self.bordered_value[keys])
        if self.dropout_p:
            kept = block.dropout(weights, keys, self.dropout_p, self.seed)
            delta = self.delta[:, block.queries, None]
            slope.add_(delta).mul_(kept).sub_(delta)
            weights = weights * kept
        self.grad_value[:, keys] += torch.bmm(weights.mT, self.grad[:, block.queries])
        return slope


def row_maximum(kernel: Kernel, block: Block, zero: Tensor) -> Tensor:
    """The largest exponent of each row over the keys it sees; 0 where it sees none."""
    largest, queries = torch.full_like(zero, -torch.inf), kernel.border(block.queries, zero)
    for keys in block.keys:
        exponent = block.hide_future(kernel.exponent(queries, block, keys), keys, -torch.inf)
        largest = torch.maximum(largest, exponent.amax(-1))
    return largest.masked_fill_(largest < torch.finfo(largest.dtype).min / 8, 0)


def attend(
    roads: list[Callable[[], Kernel]], value: Tensor, bound: Tensor, alive: Tensor, is_causal: bool, dropout_p: float,
    seed: int, first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (g,Nq,Dv), log of the row sums (g,Nq; 0 where a row sees no key), and the road each row took.

    `alive` (g,Nk) says which keys take part. The roads are tried in turn, the first one also with the free bound.
    """
    num_queries, num_keys = bound.shape[1], value.shape[1]
    output, total, shift = value.new_zeros(*bound.shape, value.shape[-1]), torch.zeros_like(bound), bound.clone()
    constant, road_taken = torch.zeros_like(bound), torch.zeros_like(bound, dtype=torch.uint8)
    seen = torch.nn.functional.pad(alive.cumsum(-1), (1, 0))  # keys that take part, up to each
    last = torch.arange(num_queries) + 1 + num_keys - num_queries if is_causal else torch.tensor([num_keys])
    unsure = (seen[:, last.clamp(min=0)] > 0).expand_as(bound)
    pending = list(query_blocks(num_queries, num_keys, last_alive(alive), is_causal, first_head))
    values, every = Views(value), slice(None)
    for road, exact in ((0, False), *((road, True) for road in range(len(roads)))):
        pending = [block for block in pending if block.keys and bool(unsure[:, block.queries].any())]
        if not pending:
            break
        kernel = roads[road]()
        for block in pending:
            rows = block.queries
            if exact:
                shift[:, rows] = row_maximum(kernel, block, torch.zeros_like(shift[:, rows]))
            road_taken[:, rows] = road
        bordered = kernel.border(every, shift)
        constant = torch.where(road_taken == road, kernel.row_constant(every), constant)
        for block in pending:
            rows = block.queries
            queries = [query[:, rows] for query in bordered]
            for index, keys in enumerate(block.keys):
                weights = kernel.weights(queries, block, keys)
                row_sum = weights.sum(-1)
                if dropout_p:
                    weights *= block.dropout(weights, keys, dropout_p, seed)
                part = torch.bmm(weights, values[keys])
                total[:, rows] = row_sum if index == 0 else total[:, rows].add_(row_sum)
                output[:, rows] = part if index == 0 else output[:, rows].add_(part)
        unsure = unsure & (total < TINY[total.dtype])
    empty = total == 0
    output /= total.masked_fill_(empty, 1)[..., None]
    lse = (total.log_() + shift + constant).masked_fill_(empty, 0)
    return output, lse, road_taken


def attend_backward(
    kernels: list[Kernel], road_taken: Tensor, lse: Tensor, alive: Tensor, is_causal: bool, grad: WeightGradient,
    first_head: int,
) -> None:  # fmt: skip
    """Fill the gradients of the kernels and of `grad`, recomputing the weights block by block."""
    every = slice(None)
    bordered = [kernel.border(every, lse - kernel.row_constant(every)) for kernel in kernels]
    for block in query_blocks(lse.shape[1], alive.shape[1], last_alive(alive), is_causal, first_head):
        road = int(road_taken[:, block.queries].max()) if len(kernels) > 1 else 0
        queries = [query[:, block.queries] for query in bordered[road]]
        for keys in block.keys:
            kernels[road].backward(queries, block, keys, grad)


def last_alive(alive: Tensor) -> int:
    """One past the last key that takes part in any of the heads."""
    places = alive.any(0).nonzero()
    return int(places[-1]) + 1 if len(places) else 0
