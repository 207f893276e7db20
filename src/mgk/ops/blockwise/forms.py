"""The arguments of attention as the operator takes them: queries, keys and biases per head, by differentiable code.

    l[i,j,r] = scale[r] q_i.k_jr + row_bias[i,r] + key_bias[j,r]

Terms that depend on one position alone become biases. The gradients of priors, shifts and variances follow from those
of the biases and of the scale. A hidden key or a removed component has the key bias -inf.

With one variance, queries are divided by it, the scale is 1, and l leaves out the row's own -|q|^2 / (2 s2), which
cancels in the weights (`log_of_sums` puts it back). Otherwise the scale is 1 / s2_r and the row bias holds this term.

B batch, H query heads, G heads of keys and values (H is a multiple of G), M components, Nq queries, Nk keys, D width of
a head. The operator has one axis for batch and heads: B*H for what belongs to query heads, B*G for keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.blockwise.kernels import Terms
from mgk.ops.common import compute_dtype, matmul
from mgk.ops.options import Options, Variance


class Form(NamedTuple):
    """The terms of l, and an upper bound (B*H,Nq) of a row's l: a Gaussian is at most 1, so l is at most the prior."""

    terms: Terms
    bound: Tensor


def mixture_form(query: Tensor, key: Tensor, options: Options) -> Form:
    """Component keys (B,G,M,Nk,D): the key of the form is (B*G,M,Nk,D)."""
    queries, keys = flatten_heads(query), flatten_heads(key)
    squares = for_query_heads(keys.square().sum(-1), queries)  # (B*H,M,Nk)
    s2 = per_head(options.variance, queries)
    key_bias, prior_bound = with_prior(squares / (-2 * s2), options)
    if isinstance(s2, Tensor):
        row_bias = queries.square().sum(-1)[:, None] / (-2 * s2)
        bound = prior_bound.expand(queries.shape[:2]).contiguous()
        return Form(Terms(queries, keys, row_bias, key_bias, s2.squeeze(-1).reciprocal()), bound)
    return Form(Terms(queries / s2, keys, None, key_bias, None), row_bound(queries, s2, prior_bound))


def shifted_form(query: Tensor, key: Tensor, shift: Tensor, options: Options) -> Form:
    """Shifted keys (B,G,Nk,D): the key of the form is (B*G,1,Nk,D).

    The row bias is log_u = q.b / s2, the key bias log_w = log prior - |k + b|^2 / (2 s2).
    """
    dtype, variance = compute_dtype(query.dtype), options.variance
    shift, query, key = shift.to(dtype).masked_fill(shift.isinf(), torch.nan), query.to(dtype), key.to(dtype)
    heads, groups = shift.shape[0], key.shape[1]
    s2_of_shift = variance.to(dtype)[..., None] if isinstance(variance, Tensor) else variance
    log_u = flatten_heads(matmul(shift / s2_of_shift, query.mT))
    of_group = shift.reshape(groups, heads // max(1, groups) * shift.shape[1], shift.shape[2])
    key_shift = matmul(of_group, key.mT).view(key.shape[0], heads, shift.shape[1], key.shape[2])  # b.k
    queries, keys = flatten_heads(query), flatten_heads(key)[:, None]
    half_squares = for_query_heads(keys.square().sum(-1) / 2, queries)  # |k|^2 / 2, (B*H,1,Nk)
    exponent = flatten_heads(key_shift + shift.square().sum(-1, keepdim=True) / 2) + half_squares
    s2 = per_head(variance, queries)
    log_w, prior_bound = with_prior(exponent / -s2, options)
    if isinstance(s2, Tensor):
        row_bias = log_u - queries.square().sum(-1)[:, None] / (2 * s2)
        bound = prior_bound.expand(queries.shape[:2]).contiguous()
        return Form(Terms(queries, keys, row_bias, log_w, s2.squeeze(-1).reciprocal()), bound)
    return Form(Terms(queries / s2, keys, log_u, log_w, None), row_bound(queries, s2, prior_bound))


def log_of_sums(lse: Tensor, query: Tensor, variance: Variance) -> Tensor:
    """The log of the sums of exp l, (B,H,Nq), from that of a form (B*H,Nq). -inf where a row sees no key."""
    lse = lse.view(query.shape[:3])
    if isinstance(variance, Tensor):
        return lse
    whole = lse - query.to(lse.dtype).square().sum(-1) / (2 * variance)
    return whole.masked_fill(lse == -torch.inf, -torch.inf)


def per_head(variance: Variance, queries: Tensor) -> float | Tensor:
    """A number as it is, (H,M) as (B*H,M,1)."""
    if not isinstance(variance, Tensor):
        return variance
    return variance.to(queries.dtype)[..., None].repeat(queries.shape[0] // max(1, variance.shape[0]), 1, 1)


def for_query_heads(of_keys: Tensor, queries: Tensor) -> Tensor:
    """Numbers of key positions (B*G,M,Nk) for each query head, (B*H,M,Nk)."""
    return of_keys.repeat_interleave(queries.shape[0] // max(1, of_keys.shape[0]), 0)


def row_bound(query: Tensor, variance: float, prior_bound: Tensor) -> Tensor:
    """The bound (B*H,Nq) of exponents that leave out the row's own -|q|^2 / (2 s2)."""
    return prior_bound + query.detach().square().sum(-1) / (2 * variance)


def with_prior(key_bias: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Add the prior to a (B*H,M,Nk) bias and hide masked keys. Also the largest log prior of each head, (B*H,1)."""
    log_prior, key_mask = None if options.hard else options.log_prior, options.visibility.key_mask
    prior_bound = key_bias.new_zeros(key_bias.shape[0], 1)
    if log_prior is not None:
        prior = log_prior.to(key_bias.dtype)
        repeat = key_bias.shape[0] // max(1, prior.shape[0])
        if prior.numel():
            largest = prior.detach().flatten(1).amax(-1, keepdim=True)
            prior_bound = largest.masked_fill(largest == -torch.inf, 0).repeat(repeat, 1)
        key_bias = key_bias + (prior[..., None] if prior.dim() == 2 else prior).repeat(repeat, 1, 1)
    if key_mask is not None:
        hidden = (~key_mask).repeat_interleave(key_bias.shape[0] // max(1, key_mask.shape[0]), 0)
        key_bias = key_bias.masked_fill(hidden[:, None], -torch.inf)
    return key_bias, prior_bound


def spread_infinities(terms: Terms) -> Terms:
    """Replace infinities by NaN, also in the bias of such a key: -inf would mean that the key is hidden."""
    query, key = terms.query, terms.key
    if bool((query.sum() + key.sum()).isfinite()):
        return terms
    query, key = (x.masked_fill(x.isinf(), torch.nan) for x in (query, key))
    bad = for_query_heads(key.isnan().any(-1), query)
    return terms._replace(query=query, key=key, key_bias=terms.key_bias.masked_fill(bad, torch.nan))


def flatten_heads(tensor: Tensor) -> Tensor:
    """(B,H,...) -> (B*H,...), contiguous, in the dtype of the computation."""
    return tensor.flatten(0, 1).to(compute_dtype(tensor.dtype)).contiguous()


def require_cpu(query: Tensor) -> None:
    if query.device.type != "cpu":
        raise ValueError(f"impl: expected tensors on the CPU for 'blockwise', got {query.device}")
