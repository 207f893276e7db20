"""The sums over queries that the M-steps divide, block by block. No gradient flows through them.

B batch, H query heads, G heads of keys (H is a multiple of G), M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.blockwise.blocks import Block, Reach, Span, make_blocks
from mgk.ops.blockwise.forms import flatten_heads, mixture_form, require_cpu, shifted_form, spread_infinities
from mgk.ops.blockwise.kernels import Terms
from mgk.ops.common import compute_dtype, zero_masked
from mgk.ops.options import Options


def prior_statistics(query: Tensor, key: Tensor, shift: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """sum_i gamma[i,j,r] as (H,M,Nk), and the number of visible queries of each key, (Nk,)."""
    require_cpu(query)
    weight, *_ = component_sums(query, key, shift, options, False)
    return weight.view(*query.shape[:2], *weight.shape[1:]).sum(0), visible_queries(query, key.shape[-2], options)


def visible_queries(query: Tensor, num_keys: int, options: Options) -> Tensor:
    """How many real queries of all batch entries see a key, (Nk,)."""
    is_causal, window, key_mask, query_mask = options.visibility
    (batch, _, num_queries, _), dtype = query.shape, compute_dtype(query.dtype)
    real = torch.ones(batch, num_queries, dtype=dtype) if query_mask is None else query_mask.to(dtype)
    used = torch.ones(batch, num_keys, dtype=dtype) if key_mask is None else key_mask.to(dtype)
    # before[i] counts the real queries before i. With a causal mask, key j is seen from query j - (Nk - Nq) on.
    before = torch.nn.functional.pad(real.cumsum(-1), (1, 0))
    first = torch.arange(num_keys) - (num_keys - num_queries) if is_causal else torch.zeros(num_keys, dtype=torch.long)
    stop = torch.full_like(first, num_queries) if window is None else first + window
    seen = before[:, stop.clamp(0, num_queries)] - before[:, first.clamp(0, num_queries)]
    return (seen * used).sum(0)


def component_statistics(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    require_cpu(query)
    sums = component_sums(query, key, None, options, True)
    weight, mean, square = (part.reshape(*query.shape[:2], *part.shape[1:]) for part in sums)
    return weight, mean, square


def component_sums(
    query: Tensor, key: Tensor, shift: Tensor | None, options: Options, moments: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over visible queries of gamma (B*H,M,Nk), and with `moments` of gamma q (...,D) and gamma |q|^2.

    For shifted keys with one variance q.k cancels: gamma = softmax_r(log_u + log_w), without a score product.
    """
    _, variance, (is_causal, window, key_mask, query_mask), *_ = options
    query, key = zero_masked(query, query_mask), zero_masked(key, key_mask)
    form = mixture_form(query, key, options) if shift is None else shifted_form(query, key, shift, options)
    terms = spread_infinities(form.terms)
    products = shift is None or isinstance(variance, Tensor)
    queries, column = flatten_heads(query), terms.key_bias
    powers = queries.new_ones(*queries.shape[:2], 1)
    if query_mask is not None:
        powers = query_mask.to(powers.dtype).repeat_interleave(query.shape[1], 0)[..., None]
    if moments:
        powers = torch.cat([queries, queries.square().sum(-1, keepdim=True), powers], -1) * powers  # q, |q|^2, 1
    sums, active = powers.new_zeros(*column.shape, powers.shape[-1]), column.amax(1) != -torch.inf
    reach = Reach(queries.shape[1], column.shape[2], is_causal, window)
    for block in make_blocks(active, reach, terms.groups, column.shape[1]):
        heads, rows = block.place
        for at in block.keys:
            gamma = block_responsibilities(terms, block, at, products)
            sums[heads, :, slice(*at)] += gamma.mT @ powers[heads, None, rows]
    return sums[..., -1], sums[..., :-2], sums[..., -2 if moments else -1]


def block_responsibilities(terms: Terms, block: Block, at: Span, products: bool) -> Tensor:
    """gamma of a block, (h,M,nq,nk): zero for keys that are not visible."""
    (heads, rows), span, reach = block.place, slice(*at), block.reach
    logits = terms.key_bias[heads, :, None, span]
    if terms.row_bias is not None:
        logits = logits + terms.row_bias[heads, :, rows, None]
    if products:
        products_of_components = terms.query[heads, None, rows] @ terms.groups.of(terms.key, heads)[:, :, span].mT
        if terms.scale is not None:
            products_of_components = products_of_components * terms.scale[heads, :, None, None]
        logits = logits + products_of_components
    largest = logits.amax(1, keepdim=True)
    gamma = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp_()
    gamma = gamma.div_(gamma.sum(1, keepdim=True).clamp(min=1e-30))  # the sum is at least 1, or 0
    diagonal = rows.start + reach.offset - at.start
    if reach.causal:
        gamma = gamma.tril(diagonal)
    return gamma if reach.window is None else gamma.triu(diagonal - reach.window + 1)
