"""Blocks of pairs, and the kernels that `blockwise.py` runs over them: exponentials of

    Mixture       l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]     M products and M exponentials per pair
    ShiftedSoft   l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]            one product and one exponential per pair
    ShiftedHard   the largest over r of the same                          (both in blockwise_shifted.py)

A hidden key has the bias -inf. The derivations are in docs/math.md.

How a block is fast: keys run down and queries across, (g,nk,nq), so that most products have few rows and many columns,
which is what BLAS does best; biases are columns of the score product; blocks fit the cache, and their memory is used
again. Exponentials and products of numbers that float32 cannot hold normally take a hundred times as long: where norms
and biases alone do not exclude them, weights are kept above exp(LOWEST).

G heads, g of them at a time, M components, Nq queries, Nk keys, D width of a head; nq, nk those of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mgk.ops.blockwise_attend import WeightGradient

LOWEST = {torch.float32: -75.0, torch.float64: -700.0}  # with room for values: exp(-87) is not normal
HIGHEST = {torch.float32: 88.0, torch.float64: 709.0}  # of what a sum comes to
LOWEST_BACKWARD = {torch.float32: -45.0, torch.float64: -300.0}  # of weights that sum to 1, times gradients
QUERY_BLOCK = 384  # BLAS likes multiples of 48
KEY_BLOCK = 384
BLOCK_NUMBERS = 1 << 18  # scores per thread: small enough for its cache, large enough to drown Python's share


class Span(NamedTuple):
    """Some positions in a row; unlike a slice, a key of dictionaries."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """Some queries of some heads, and the key blocks they see."""

    heads: slice
    queries: Span
    keys: list[Span]
    offset: int | None  # causal: query i sees the keys up to i + offset

    @property
    def place(self) -> tuple[slice, slice]:
        return self.heads, slice(*self.queries)

    def after_diagonal(self, keys: Span) -> tuple[int, int]:
        """How far some keys start and stop after the last key that the first query sees."""
        diagonal = keys.stop if self.offset is None else self.queries.start + self.offset
        return keys.start - diagonal, keys.stop - diagonal


def query_step(num_queries: int, is_causal: bool) -> int:
    """Short causal blocks leave less of the diagonal to hide."""
    return min(QUERY_BLOCK, max(1, QUERY_BLOCK // 4, num_queries // 8)) if is_causal else QUERY_BLOCK


def make_blocks(num_queries: int, alive: Tensor, is_causal: bool, scores: int) -> Iterator[Block]:
    """Blocks that see a key, those of the same heads in a row.

    As many heads at a time as keep the cores busy and the caches warm. `alive` (G,Nk) says which keys take part,
    `scores` are the scores per pair.
    """
    num_heads, num_keys = alive.shape
    query_size, key_size = query_step(num_queries, is_causal), max(1, KEY_BLOCK // scores)
    numbers = min(query_size, num_queries) * min(key_size, num_keys) * scores
    if not num_heads or not numbers:
        return
    step = max(1, BLOCK_NUMBERS // numbers) * torch.get_num_threads()
    ends = (alive * torch.arange(1, num_keys + 1)).amax(1).tolist()  # one past the last key that takes part
    offset = num_keys - num_queries if is_causal else None
    for first in range(0, num_heads, step):
        heads = slice(first, min(first + step, num_heads))
        for start in range(0, num_queries, query_size):
            queries, stop = Span(start, min(start + query_size, num_queries)), max(ends[heads])
            stop = stop if offset is None else min(stop, queries.stop + offset)
            keys = [Span(key, min(key + key_size, stop)) for key in range(0, stop, key_size)]
            if keys:
                yield Block(heads, queries, keys, offset)


class Views(dict[Span, Tensor]):
    """Parts of a tensor along its positions, made once: to make one takes as long as to start a product."""

    def __init__(self, make: Callable[[Span], Tensor]) -> None:
        self.make = make

    def __missing__(self, span: Span) -> Tensor:
        view = self[span] = self.make(span)
        return view


def positions(tensor: Tensor) -> Views:
    """Of a (g,N,...) tensor."""
    return Views(lambda at: tensor[:, at.start : at.stop])


def last_positions(tensor: Tensor) -> Views:
    """Of a (...,N) tensor."""
    return Views(lambda at: tensor[..., at.start : at.stop])


class Scratch:
    """Memory for blocks, taken once: fresh pages for every block would cost more than what is computed in them."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.memory: dict[str, Tensor] = {}
        self.views: dict[tuple[str, int, int, int], Tensor] = {}
        self.split: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, name: str, heads: int, rows: int, columns: int) -> Tensor:
        view = self.views.get((name, heads, rows, columns))
        if view is None:
            numbers = heads * rows * columns
            if name not in self.memory or self.memory[name].numel() < numbers:
                self.memory[name] = self.like.new_empty(numbers)
            view = self.memory[name][:numbers].view(heads, rows, columns)
            self.views[name, heads, rows, columns] = view
        return view

    def bmm(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, out=self(name, left.shape[0], left.shape[1], right.shape[2]))

    def add_product(self, target: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        if target.is_contiguous():
            target.baddbmm_(left, right, alpha=scale)
        else:
            target.add_(self.bmm("product", left, right), alpha=scale)

    def components(self, view: Tensor, number: int) -> tuple[Tensor, ...]:
        """Those of a (g*M,...) tensor that came from here: M times (g,...)."""
        if id(view) not in self.split:
            self.split[id(view)] = view.view(-1, number, *view.shape[1:]).unbind(1)
        return self.split[id(view)]

    def triangle(self, size: int) -> Tensor:
        """(1,size,size) with 1 where the key (row) is not after the query (column), else 0."""
        if ("triangle", 1, size, size) not in self.views:
            self.views["triangle", 1, size, size] = self.like.new_ones(1, size, size).triu()
        return self.views["triangle", 1, size, size]


class Kernel:
    """Scores as one product of bordered keys and queries, [k, key_bias, 1] . [scale q, 1, row_bias - shift].

    Components are a batch like heads: G*M matrices. `start` is for all heads, `enter` for those of the next blocks.
    """

    def __init__(
        self, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, scale: float, lowest: float,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        """Query (G,Nq,D), key (G,M,Nk,D), row_bias (G,M,Nq), key_bias (G,M,Nk)."""
        self.query, self.key, self.row_bias, self.scale, self.scratch = query, key, row_bias, scale, scratch
        self.lowest, self.highest, self.components = lowest, math.inf, key.shape[1]
        self.extra = 0.0, 0.0  # the least and most that a kernel adds to an exponent
        hidden = key_bias == -torch.inf
        self.visible = (~hidden).to(key.dtype)[..., None] if bool(hidden.any()) else None  # (G,M,Nk,1)
        largest = key_bias.flatten(1).amax(1, keepdim=True)
        self.largest_bias = largest.masked_fill(largest == -torch.inf, 0)  # (G,1)
        self.key_bias = (
            key_bias if self.visible is None else torch.where(hidden, self.largest_bias[..., None], key_bias)
        )
        norms = [torch.linalg.vector_norm(x, dim=-1).flatten(1).amax(1) for x in (query, key)]
        self.reach = (norms[0] * norms[1]).max().item() * scale

    def leave_room(self, value: Tensor) -> None:
        """For sums of weights times `value` (G,Nk,Dv), where weights may be above 1."""
        ends = [abs(end.item()) for end in value.aminmax()] if value.numel() else []
        self.highest = HIGHEST[value.dtype] - math.log(max([1.0, *ends])) - math.log(value.shape[1])

    def bound(self, most: Tensor) -> Tensor:
        """Of all exponents, (G,Nq), for free: a Gaussian is at most 1; `most` (G,1) bounds the log priors."""
        squares = self.query.square().sum(-1) * (self.scale / 2)
        return most + (squares if self.row_bias is None else torch.zeros_like(squares))

    def start(self, shift: Tensor) -> None:
        """Take exponents less `shift` (G,Nq) from here on."""
        self.rows = -shift[:, None] if self.row_bias is None else self.row_bias - shift[:, None]
        self.narrow = self.in_range(self.rows, self.key_bias)

    def in_range(self, rows: Tensor, keys: Tensor) -> bool:
        """No pair has an exponent, biases included, that is too low or too high, and neither has a bias alone."""
        ends = [[end.item() for end in bias.aminmax()] for bias in (rows, keys)]
        least, most = (sum(end) for end in zip(*ends, self.extra, strict=True))
        most = max(most + self.reach, *(abs(end) for pair in ends for end in pair))
        return bool(least - self.reach > self.lowest and most < min(-LOWEST[rows.dtype], self.highest))

    def enter(self, heads: slice) -> None:
        """Make ready for blocks of these heads."""
        query, key = self.query[heads], self.key[heads]
        num_heads, components, num_keys, width = key.shape
        keys = self.scratch(f"keys {components}", num_heads * components, num_keys, width + 2)
        split = keys.view(num_heads, components, num_keys, width + 2)
        split[..., :width], split[..., width], split[..., width + 1] = key, self.key_bias[heads], 1.0
        queries = self.scratch(f"queries {components}", num_heads * components, query.shape[1], width + 2)
        split = queries.view(num_heads, components, query.shape[1], width + 2)
        torch.mul(query[:, None].expand(-1, components, -1, -1), self.scale, out=split[..., :width])
        split[..., width], split[..., width + 1] = 1.0, self.rows[heads]
        self.set_operands(keys, queries, 1.0)

    def set_operands(self, keys: Tensor, queries: Tensor, scale: float) -> None:
        """Keys (g*M,Nk,D and more), queries (g*M,Nq,D and more), and the scale of their product."""
        width = self.key.shape[-1]
        self.keys = positions(keys)
        self.queries = Views(lambda at: queries[:, at.start : at.stop].mT)
        self.plain_keys = Views(lambda at: keys[:, at.start : at.stop, :width].mT)
        self.product_scale = scale

    def scores(self, block: Block, keys: Span) -> Tensor:
        """Exponents of all components, (g*M,nk,nq)."""
        left, right = self.keys[keys], self.queries[block.queries]
        out = self.scratch("score", left.shape[0], left.shape[1], right.shape[2])
        return out.baddbmm_(left, right, beta=0, alpha=self.product_scale)

    def exponential(self, exponent: Tensor) -> Tensor:
        return (exponent if self.narrow else exponent.clamp_(self.lowest, -LOWEST[exponent.dtype])).exp_()

    def hide(self, weights: Tensor, block: Block, keys: Span) -> Tensor:
        """0 for hidden keys and the future, in weights (g*M,nk,nq) of all components or (g,nk,nq) of all together."""
        if self.visible is not None:
            visible = self.visible[block.heads, :, slice(*keys)]
            weights *= visible.flatten(0, 1) if weights.shape[0] > visible.shape[0] else visible[:, 0]
        return self.hide_future(weights, block, keys)

    def hide_future(self, weights: Tensor, block: Block, keys: Span) -> Tensor:
        start, stop = block.after_diagonal(keys)
        if stop > 1:
            some = weights[:, max(0, -start) :]
            some *= self.scratch.triangle(block.queries.size)[:, max(0, start) : stop]
        return weights

    def exponent(self, block: Block, keys: Span) -> Tensor:
        """The exponent of a pair, or the largest of its components': (g,nk,nq)."""
        raise NotImplementedError

    def weights(self, block: Block, keys: Span) -> Tensor:
        """exp(l - m), summed over the components or of the largest: (g,nk,nq)."""
        raise NotImplementedError

    def row_maximum(self, block: Block) -> Tensor:
        """The largest exponent of each row over the keys it sees, (g,nq); 0 where it sees none."""
        largest = torch.stack([self.largest_seen(block, keys) for keys in block.keys]).amax(0)
        return largest.masked_fill_(largest == -torch.inf, 0)

    def largest_seen(self, block: Block, keys: Span) -> Tensor:
        """The largest exponent of each row over some keys, (g,nq)."""
        return self.only_seen(self.exponent(block, keys), block, keys).amax(1)

    def only_seen(self, exponent: Tensor, block: Block, keys: Span) -> Tensor:
        """-inf where `hide` puts 0."""
        if self.visible is None and block.after_diagonal(keys)[1] <= 1:
            return exponent
        return exponent.masked_fill_(self.hide(torch.ones_like(exponent), block, keys) == 0, -torch.inf)

    def start_backward(self) -> None:
        self.grad_query, self.grad_key = torch.zeros_like(self.query), torch.zeros_like(self.key)

    def enter_backward(self, heads: slice) -> None:
        self.enter(heads)
        grad_key = self.grad_key[heads].flatten(0, 1)
        query = self.query[heads, None].expand(-1, self.components, -1, -1).flatten(0, 1)
        self.grad_keys = positions(grad_key)
        self.plain_queries = positions(query)

    def backward(self, block: Block, grad: WeightGradient) -> None:
        """Add what the pairs of a block give to the gradients of query and key; of the biases, the kernels do."""
        queries = self.plain_queries[block.queries]
        grad_query = self.scratch("grad query", queries.shape[0], queries.shape[2], queries.shape[1])
        for keys in block.keys:
            grad_score = self.grad_score(block, keys, grad)
            grad_query.baddbmm_(self.plain_keys[keys], grad_score, beta=int(keys.start > 0))
            self.scratch.add_product(self.grad_keys[keys], grad_score, queries, self.scale)
        total = (
            grad_query.view(-1, self.components, *grad_query.shape[1:]).sum(1) if self.components > 1 else grad_query
        )
        torch.mul(total.mT, self.scale, out=self.grad_query[block.place])

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        """The gradients of `scores`, (g*M,nk,nq); adds up those of the biases."""
        raise NotImplementedError


class Mixture(Kernel):
    """l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]."""

    def __init__(
        self, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, scale: float, hard: bool,
        lowest: float, scratch: Scratch,
    ) -> None:  # fmt: skip
        """Query (G,Nq,D), key (G,M,Nk,D), row_bias (G,M,Nq), key_bias (G,M,Nk)."""
        super().__init__(query, key, row_bias, key_bias, scale, lowest, scratch)
        self.hard = hard

    def together(self, operator: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        """(g*M,nk,nq) -> (g,nk,nq), the components one after the other."""
        total, *others = self.scratch.components(tensor, self.components)
        out = self.scratch("together", *total.shape)
        for other in others:
            total = operator(total, other, out=out)
        return total

    def exponent(self, block: Block, keys: Span) -> Tensor:
        return self.together(torch.maximum, self.scores(block, keys))

    def largest_seen(self, block: Block, keys: Span) -> Tensor:
        scores = self.only_seen(self.scores(block, keys), block, keys)  # a component may be removed, others not
        return self.together(torch.maximum, scores).amax(1)

    def weights(self, block: Block, keys: Span) -> Tensor:
        if self.hard:
            return self.hide(self.exponential(self.exponent(block, keys)), block, keys)
        return self.together(torch.add, self.hide(self.exponential(self.scores(block, keys)), block, keys))

    def start_backward(self) -> None:
        super().start_backward()
        self.grad_key_bias = torch.zeros_like(self.key_bias)
        self.grad_row_bias = self.query.new_empty(0) if self.row_bias is None else torch.zeros_like(self.row_bias)

    def enter_backward(self, heads: slice) -> None:
        super().enter_backward(heads)
        self.grad_columns = last_positions(self.grad_key_bias[heads].flatten(0, 1))
        if self.row_bias is not None:
            self.grad_rows = last_positions(self.grad_row_bias[heads].flatten(0, 1))

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of query, key, row_bias (empty if there is none) and key_bias."""
        return self.grad_query, self.grad_key, self.grad_row_bias, self.grad_key_bias

    def grad_score(self, block: Block, keys: Span, grad: WeightGradient) -> Tensor:
        scores = self.scores(block, keys)
        parts = self.scratch.components(scores, self.components)
        if self.hard:
            best = prefix_maxima(parts, self.scratch, parts[0].shape)
            weights = self.scratch("together", *parts[0].shape).copy_(best[-1])
            self.hide(self.exponential(weights), block, keys)
            left = grad.slope(block, keys, weights).mul_(weights)
            for part, earlier in zip(parts[:0:-1], best[-2::-1], strict=True):
                left -= part.gt_(earlier).mul_(left)  # the last component that beat all before it won
            parts[0].copy_(left)
        else:
            self.hide(self.exponential(scores), block, keys)
            slope = grad.slope(block, keys, self.together(torch.add, scores))
            for part in parts:
                part *= slope
        self.grad_columns[keys].add_(scores.sum(2))
        if self.row_bias is not None:
            self.grad_rows[block.queries].add_(scores.sum(1))
        return scores


def prefix_maxima(values: Sequence[Tensor], scratch: Scratch, shape: Sequence[int]) -> list[Tensor]:
    """The largest of the first, of the first two, ..."""
    best = list(values[:1])
    for r, value in enumerate(values[1:]):
        best.append(torch.maximum(best[-1], value, out=scratch(f"maximum {r}", *shape)))
    return best
