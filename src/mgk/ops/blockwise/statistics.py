"""The sums over queries that the M-steps divide, block by block. No gradient flows through them.

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import make_blocks
from mgk.ops.blockwise.forms import flatten_heads, mixture_form, require_cpu, shifted_form, spread_infinities
from mgk.ops.common import Variance, compute_dtype, shifted_keys, zero_masked


def prior_statistics(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_i gamma[i,j,r] as (H,M,Nk), and the number of visible queries of each key, (Nk,)."""
    require_cpu(query)
    batch, heads, num_queries, _ = query.shape
    num_keys, dtype = key.shape[-2], compute_dtype(query.dtype)
    real = torch.ones(batch, num_queries, dtype=dtype) if query_mask is None else query_mask.to(dtype)
    used = torch.ones(batch, num_keys, dtype=dtype) if key_mask is None else key_mask.to(dtype)
    # later[i] counts the real queries from i on. With a causal mask, key j is seen from query j - (Nk - Nq) on.
    later = torch.cat([real.flip(-1).cumsum(-1).flip(-1), real.new_zeros(batch, 1)], -1)
    first = torch.arange(num_keys) - (num_keys - num_queries) if is_causal else torch.zeros(num_keys, dtype=torch.long)
    count = (later[:, first.clamp(0, num_queries)] * used).sum(0)
    weight, *_ = component_sums(query, key, shift, log_prior, variance, is_causal, key_mask, query_mask, False)
    return weight.view(batch, heads, *weight.shape[1:]).sum(0), count


def component_statistics(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    require_cpu(query)
    sums = component_sums(query, key, None, log_prior, variance, is_causal, key_mask, query_mask, True)
    weight, mean, square = (part.reshape(*query.shape[:2], *part.shape[1:]) for part in sums)
    return weight, mean, square


def component_sums(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None, moments: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums over visible queries of gamma (G,M,Nk), and with `moments` of gamma q (G,M,Nk,D) and gamma |q|^2 (G,M,Nk).

    For shifted keys with one variance q.k cancels: gamma = softmax_r(log_u + log_w), without a score product.
    """
    query, key = zero_masked(query, query_mask), zero_masked(key, key_mask)
    query = query.masked_fill(query.isinf(), torch.nan)  # a bias of -inf would mean a removed component
    products = shift is None or isinstance(variance, Tensor)
    if shift is None or isinstance(variance, Tensor):
        key = key if shift is None else shifted_keys(key, shift)
        scaled, keys, row, column, _ = mixture_form(query, key, log_prior, variance, key_mask)
    else:
        scaled, keys, row, column, _ = shifted_form(query, key, shift, log_prior, variance, key_mask)
    scaled, keys, column = spread_infinities(scaled, keys, column)
    queries = flatten_heads(query)
    powers = queries.new_ones(*queries.shape[:2], 1)
    if query_mask is not None:
        powers = query_mask.to(powers.dtype).repeat_interleave(query.shape[1], 0)[..., None]
    if moments:
        powers = torch.cat([queries, queries.square().sum(-1, keepdim=True), powers], -1) * powers  # q, |q|^2, 1
    sums, active = powers.new_zeros(*column.shape, powers.shape[-1]), column.amax(1) != -torch.inf
    for block in make_blocks(queries.shape[1], active, is_causal, column.shape[1]):
        heads, rows = block.place
        for at in block.keys:
            span = slice(*at)
            logits = column[heads, :, None, span]
            if row is not None:
                logits = logits + row[heads, :, rows, None]
            if products:
                logits = logits + scaled[heads, None, rows] @ keys[heads, :, span].mT
            largest = logits.amax(1, keepdim=True)
            gamma = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp_()
            gamma = gamma.div_(gamma.sum(1, keepdim=True).clamp(min=1e-30))  # the sum is at least 1, or 0
            if block.offset is not None:
                gamma = gamma.tril(rows.start + block.offset - span.start)
            sums[heads, :, span] += gamma.mT @ powers[heads, None, rows]
    return sums[..., -1], sums[..., :-2], sums[..., -2 if moments else -1]
