"""The equations as the paper writes them: the reference of every test, and dense matrices for inspection.

These functions need memory for (B, H, M, Nq, Nk) numbers. They work in any float dtype (half precision is computed in
float32) and can be differentiated any number of times.

B batch, H query heads, G heads of keys and values (H is a multiple of G), M components, Nq queries, Nk keys, D width of
a head, Dv that of a value; i query, j key, r component.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.common import compute_dtype, for_each_query_head, shifted_keys, unused, zero_masked
from mgk.ops.options import Options, Result, Variance, Visibility


def visible_pairs(query: Tensor, num_keys: int, visibility: Visibility) -> Tensor:
    """Which query sees which key: bool, broadcastable to (B,1,Nq,Nk). The causal mask is lower-right aligned."""
    num_queries, device = query.shape[2], query.device
    is_causal, window, key_mask, query_mask = visibility
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    if is_causal:
        visible = visible.tril(num_keys - num_queries)
    if window is not None:
        visible = visible.triu(num_keys - num_queries - window + 1)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if query_mask is not None:
        visible = visible & query_mask[:, None, :, None]
    return visible


def zero_unseen(query: Tensor, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the queries (B,H,Nq,D) and keys (B,H,M,Nk,D) of no visible pair: NaN there must not reach a gradient."""
    return (
        query.masked_fill(~visible.any(-1)[..., None], 0),
        key.masked_fill(~visible.any(-2)[:, :, None, :, None], 0),
    )


def log_weights(query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance) -> Tensor:
    """l[i,j,r] = log prior[j,r] - |q_i - k_jr|^2 / (2 s2_r), Eqns 7-9, as (B,H,M,Nq,Nk)."""
    dtype = compute_dtype(query.dtype)
    # An infinity counts as NaN: the expanded distance would be NaN for some of its pairs and infinite for others.
    query, key = (x.to(dtype).masked_fill(x.isinf(), torch.nan) for x in (query, key))
    query = query[:, :, None]  # (B,H,1,Nq,D) beside (B,H,M,Nk,D)
    distance = query.square().sum(-1)[..., :, None] - 2 * query @ key.mT + key.square().sum(-1)[..., None, :]
    if isinstance(variance, Tensor):
        variance = variance.to(dtype)[None, :, :, None, None]
    weights = -distance / (2 * variance)
    if log_prior is not None:
        prior = log_prior.to(dtype)
        weights = weights + (prior[None, :, :, None, None] if prior.dim() == 2 else prior[None, :, :, None, :])
    return weights


def attention_weights(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, hard: bool, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """A[i,j] of Eqn 9 (soft: the sum over components) or Eqn 12 (hard: the maximum, without the prior).

    Also the log of the row sums that the weights were divided by, (B,H,Nq); -inf for a row that sees no key.
    """
    query, key = zero_unseen(query, key, visible)
    if not hard:
        logits = log_weights(query, key, log_prior, variance)
    else:
        logits = log_weights(query, key, None, variance).max(dim=2, keepdim=True).values
        if log_prior is not None:
            logits = logits + unused(log_prior)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    if logits.shape[-1] == 0:  # no keys
        return logits.sum(2), logits.sum((2, 4)) - torch.inf
    # A row constant cancels in the quotient. With the largest logit at 0 nothing overflows, and the sum of a row that
    # sees a key is at least 1. A row that sees no key has the sum 0 and gets zeros.
    largest = logits.detach().amax((2, 4), keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    terms = (logits - largest).exp().sum(2)  # (B,H,Nq,Nk)
    total = terms.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (largest[:, :, 0] + total.log()).masked_fill(empty, -torch.inf)
    return terms / total, lse.squeeze(-1)


def responsibilities(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, visible: Tensor
) -> Tensor:
    """gamma[i,j,r] of Eqn 11, normalised over r alone; zero for pairs that are not visible: (B,H,M,Nq,Nk)."""
    logits = log_weights(*zero_unseen(query, key, visible), log_prior, variance)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    largest = logits.detach().amax(2, keepdim=True)
    terms = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp()
    total = terms.sum(2, keepdim=True)
    return terms / total.masked_fill(total == 0, 1)


def prior_statistics(query: Tensor, key: Tensor, shift: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """The sums of the M-step: sum_i gamma[i,j,r], (H,M,Nk), and the number of visible queries per key, (Nk,)."""
    key = for_each_query_head(key, query.shape[1]) if shift is None else shifted_keys(key, shift)
    visible = visible_pairs(query, key.shape[-2], options.visibility)
    total = responsibilities(query, key, options.log_prior, options.variance, visible).sum((0, 3))
    count = visible.expand(query.shape[0], 1, query.shape[2], key.shape[-2]).sum((0, 1, 2))
    return total, count.to(total.dtype)


def component_statistics(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    key = for_each_query_head(key, query.shape[1])
    query = zero_masked(query, options.visibility.query_mask)
    visible = visible_pairs(query, key.shape[-2], options.visibility)
    gamma = responsibilities(query, key, options.log_prior, options.variance, visible).mT  # (B,H,M,Nk,Nq)
    query = query.to(gamma.dtype)[:, :, None]
    return gamma.sum(-1), gamma @ query, (gamma @ query.square().sum(-1, keepdim=True)).squeeze(-1)


def mgk_attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Result:
    """h_i = sum_j A[i,j] v_j, Eqn 10, and the log of the row sums of Eqn 9."""
    key, value = (for_each_query_head(x, query.shape[1]) for x in (key, value))
    log_prior, variance, visibility, hard, dropout_p, _ = options
    value = zero_masked(value, visibility.key_mask)
    visible = visible_pairs(query, key.shape[-2], visibility)
    weights, lse = attention_weights(query, key, log_prior, variance, hard, visible)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    output = (weights @ value.to(weights.dtype)).to(query.dtype)
    return zero_masked(output, visibility.query_mask), lse


def smgk_attention(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, options: Options) -> Result:
    """MGK on the keys k_j + b_r."""
    return mgk_attention(query, shifted_keys(key, shift), value, options)
