"""Mixture-key attention block by block: memory linear in N, forward and backward, for the CPU.

Two kernels over (G = B*H) heads, both in the log domain, both stabilised by a constant m_i per query that cancels:

    mixture   l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]      M products and M exponentials per pair
    shifted   l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]             one product and one exponential per pair

q comes divided by the variance, and everything that depends on one position alone comes as a bias, computed by ordinary
differentiable code in `mgk_attention` and `smgk_attention`; so the gradients of priors, shifts and variances are those
of the biases. The derivations are in docs/math.md.

How a block stays exact. m_i starts as an upper bound of the exponents that costs nothing (a Gaussian is at most 1). If
a row's sum falls under `TINY` the bound was too loose for it: the block is done again with the exact row maximum.
For shifted keys the factors exp(log_u), exp(log_w) can still hide a row whose heavy keys sit in another component; then
the block is done as a mixture. Rows above `TINY` lost nothing but terms 1e12 times smaller than themselves.

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.reference import Variance, compute_dtype

TINY = {torch.float32: 1e-25, torch.float64: 1e-280}
QUERY_BLOCK = 128
KEY_BLOCK = 512
BLOCK_NUMBERS = 1 << 18  # of one block of scores: what stays in the second-level cache beside its companions


class Block(NamedTuple):
    """Heads, queries and the key blocks they see. `hidden` says which pairs of a key block causality hides."""

    heads: slice
    queries: slice
    keys: list[slice]
    seed: int


def blocks(num_heads: int, num_queries: int, last_key: Tensor, is_causal: bool, num_keys: int) -> Iterator[Block]:
    """Walk over the heads and queries. `last_key` (G,) is one past the last key that takes part in each head."""
    query_block, key_block = min(QUERY_BLOCK, num_queries), min(KEY_BLOCK, num_keys)
    together = max(1, min(num_heads, BLOCK_NUMBERS // max(1, query_block * key_block)))
    last = last_key.tolist()
    for head in range(0, num_heads, together):
        heads = slice(head, min(head + together, num_heads))
        stop = max(last[heads])
        for query in range(0, num_queries, query_block):
            queries = slice(query, min(query + query_block, num_queries))
            seen = min(stop, queries.stop + num_keys - num_queries) if is_causal else stop
            keys = [slice(key, min(key + key_block, seen)) for key in range(0, seen, key_block)]
            yield Block(heads, queries, keys, head * num_queries + query)


def hide_future(scores: Tensor, block: Block, keys: slice, offset: int, fill: float) -> None:
    """Overwrite the pairs that causality hides: key j is seen from query j - offset on."""
    if keys.stop - 1 > block.queries.start + offset:
        query = torch.arange(block.queries.start + offset, block.queries.stop + offset)
        scores.masked_fill_(torch.arange(keys.start, keys.stop) > query[:, None], fill)


def dropout_mask(like: Tensor, probability: float, seed: int, block: Block, keys: slice) -> Tensor:
    """1/(1-p) where a weight is kept, else 0: a function of the seed and the place, the same forward and backward."""
    generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (1 + block.seed) + keys.start) % (1 << 63))
    return torch.empty_like(like).bernoulli_(1 - probability, generator=generator).div_(1 - probability)


def append(tensor: Tensor, *columns: Tensor | float) -> Tensor:
    """Further columns for a product: [x, c] . [y, d] = x.y + c d."""
    parts = [c[..., None] if isinstance(c, Tensor) else tensor.new_full((*tensor.shape[:-1], 1), c) for c in columns]
    return torch.cat([tensor, *parts], -1)


class Mixture:
    """Block by block over l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]."""

    def __init__(self, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, hard: bool) -> None:
        self.query, self.row_bias, self.hard = query, row_bias, hard  # (G,Nq,D), (G,M,Nq)
        self.key, self.key_bias = key, key_bias  # (G,M,Nk,D), (G,M,Nk)

    def scores(self, block: Block, keys: slice, row_max: Tensor) -> Iterator[tuple[int, Tensor]]:
        query = self.query[block.heads, block.queries]
        for r in range(self.key.shape[1]):
            row = row_max.neg()
            if self.row_bias is not None:
                row = row + self.row_bias[block.heads, r, block.queries]
            key = append(self.key[block.heads, r, keys], self.key_bias[block.heads, r, keys], 1.0)
            yield r, torch.bmm(append(query, 1.0, row), key.mT)

    def weights(self, block: Block, keys: slice, row_max: Tensor) -> tuple[Tensor, list[Tensor]]:
        """sum_r exp(l - m), or max_r; and each component's own part of it."""
        parts = [scores for _, scores in self.scores(block, keys, row_max)]
        if not self.hard:
            for part in parts:
                part.exp_()
            return sum(parts[1:], parts[0]), parts
        largest, won_by = parts[0], torch.zeros_like(parts[0], dtype=torch.uint8)
        for r, part in enumerate(parts[1:], 1):
            won_by.masked_fill_(part > largest, r)
            largest = torch.maximum(largest, part)
        weight = largest.exp_()
        return weight, [weight * (won_by == r) for r in range(len(parts))]

    def total(self, block: Block, keys: slice, row_max: Tensor) -> Tensor:
        """As `weights`, without keeping the parts."""
        result = None
        for _, scores in self.scores(block, keys, row_max):
            if not self.hard:
                scores.exp_()
            if result is None:
                result = scores
            elif self.hard:
                result = torch.maximum(result, scores, out=result)
            else:
                result += scores
        assert result is not None
        return result.exp_() if self.hard else result

    def exponent(self, block: Block, keys: slice) -> Tensor:
        zero = self.query.new_zeros(self.query[block.heads, block.queries].shape[:-1])
        result = None
        for _, scores in self.scores(block, keys, zero):
            result = scores if result is None else torch.maximum(result, scores)
        assert result is not None
        return result
