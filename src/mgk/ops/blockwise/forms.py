"""The arguments of attention as the operator takes them: queries, keys and biases per head, by differentiable code.

    l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]

Terms that depend on one position alone become biases. The gradients of priors, shifts and variances follow from those
of the biases. Queries are divided by the variance. A hidden key or a removed component has the key bias -inf.

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.common import Variance, compute_dtype, matmul


def mixture_form(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Component keys: query (G,Nq,D), key (G,M,Nk,D), row_bias (G,M,Nq) or None, key_bias (G,M,Nk), bound (G,Nq).

    `bound` is an upper bound of a row's exponents: a Gaussian is at most 1, so l is at most the largest log prior.
    """
    query, key = flatten_heads(query), flatten_heads(key)
    if isinstance(variance, Tensor):
        s2 = variance.to(query.dtype)[..., None].repeat(query.shape[0] // max(1, variance.shape[0]), 1, 1)  # (G,M,1)
        squares = query.square().sum(-1)
        key_bias, prior_bound = with_prior(-key.square().sum(-1) / (2 * s2), log_prior, key_mask)
        bound = prior_bound.expand_as(squares).contiguous()
        return query, key / s2[..., None], squares[:, None] / (-2 * s2), key_bias, bound
    key_bias, prior_bound = with_prior(key.square().sum(-1) / (-2 * variance), log_prior, key_mask)
    return query / variance, key, None, key_bias, row_bound(query, variance, prior_bound)


def shifted_form(
    query: Tensor, key: Tensor, shift: Tensor, log_prior: Tensor | None, variance: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shifted keys: query (G,Nq,D), key (G,1,Nk,D), log_u (G,M,Nq), log_w (G,M,Nk), bound (G,Nq).

    log_u = q.b / s2 is the row bias, log_w = log prior - |k + b|^2 / (2 s2) the key bias.
    """
    dtype = compute_dtype(query.dtype)
    shift, query, key = shift.to(dtype).masked_fill(shift.isinf(), torch.nan), query.to(dtype), key.to(dtype)
    log_u = flatten_heads(matmul(shift / variance, query.mT))
    key_shift = matmul(shift, key.mT) + shift.square().sum(-1, keepdim=True) / 2  # b.k + |b|^2 / 2
    log_w = flatten_heads((key_shift + key.square().sum(-1)[:, :, None] / 2) / -variance)
    log_w, prior_bound = with_prior(log_w, log_prior, key_mask)
    query = flatten_heads(query)
    bound = row_bound(query, variance, prior_bound)
    return query / variance, flatten_heads(key)[:, None], log_u, log_w, bound


def row_bound(query: Tensor, variance: float, prior_bound: Tensor) -> Tensor:
    """The bound (G,Nq) of exponents that leave out the row's own -|q|^2 / (2 s2)."""
    return prior_bound + query.detach().square().sum(-1) / (2 * variance)


def with_prior(key_bias: Tensor, log_prior: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the prior to a (G,M,Nk) bias and hide masked keys. Also return the largest log prior of each head, (G,1)."""
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


def spread_infinities(query: Tensor, key: Tensor, key_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace infinities by NaN, also in the bias of such a key: -inf would mean that the key is hidden."""
    if bool((query.sum() + key.sum()).isfinite()):
        return query, key, key_bias
    query, key = (x.masked_fill(x.isinf(), torch.nan) for x in (query, key))
    return query, key, key_bias.masked_fill(key.isnan().any(-1), torch.nan)


def flatten_heads(tensor: Tensor) -> Tensor:
    """(B,H,...) -> (G,...), contiguous, in the dtype of the computation."""
    return tensor.flatten(0, 1).to(compute_dtype(tensor.dtype)).contiguous()


def require_cpu(query: Tensor) -> None:
    if query.device.type != "cpu":
        raise ValueError(f"impl: expected tensors on the CPU for 'blockwise', got {query.device}")
