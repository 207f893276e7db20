"""The equations as the paper writes them: the reference of every test, and dense matrices for inspection.

These functions need memory for (B, H, M, Nq, Nk) numbers. They work in any float dtype (half precision is computed in
float32) and can be differentiated any number of times.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv that of a value; i query, j key, r component.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.common import Variance, compute_dtype, shifted_keys, unused, zero_masked


def visible_pairs(
    query: Tensor, num_keys: int, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None = None
) -> Tensor:
    """Which query sees which key: bool, broadcastable to (B,1,Nq,Nk). The causal mask is lower-right aligned."""
    num_queries, device = query.shape[2], query.device
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    if is_causal:
        visible = visible.tril(num_keys - num_queries)
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
    query: Tensor,
    key: Tensor,
    log_prior: Tensor | None,
    variance: Variance,
    e_step: str,
    visible: Tensor,
) -> Tensor:
    """A[i,j] of Eqn 9 (soft: the sum over components) or Eqn 12 (hard: the maximum, without the prior)."""
    query, key = zero_unseen(query, key, visible)
    if e_step == "soft":
        logits = log_weights(query, key, log_prior, variance)
    else:
        logits = log_weights(query, key, None, variance).max(dim=2, keepdim=True).values
        if log_prior is not None:
            logits = logits + unused(log_prior)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    if logits.shape[-1] == 0:  # no keys
        return logits.sum(2)
    # A row constant cancels in the quotient. With the largest logit at 0 nothing overflows, and the sum of a row that
    # sees a key is at least 1. A row that sees no key has the sum 0 and gets zeros.
    largest = logits.detach().amax((2, 4), keepdim=True)
    terms = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp().sum(2)  # (B,H,Nq,Nk)
    total = terms.sum(-1, keepdim=True)
    return terms / total.masked_fill(total == 0, 1)


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


def prior_statistics(
    query: Tensor,
    key: Tensor,
    shift: Tensor | None,
    log_prior: Tensor | None,
    variance: Variance,
    is_causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The sums of the M-step: sum_i gamma[i,j,r], (H,M,Nk), and the number of visible queries per key, (Nk,)."""
    key = key if shift is None else shifted_keys(key, shift)
    visible = visible_pairs(query, key.shape[-2], is_causal, key_mask, query_mask)
    total = responsibilities(query, key, log_prior, variance, visible).sum((0, 3))
    count = visible.expand(query.shape[0], 1, query.shape[2], key.shape[-2]).sum((0, 1, 2))
    return total, count.to(total.dtype)


def component_statistics(
    query: Tensor,
    key: Tensor,
    log_prior: Tensor | None,
    variance: Variance,
    is_causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    query = zero_masked(query, query_mask)
    visible = visible_pairs(query, key.shape[-2], is_causal, key_mask, query_mask)
    gamma = responsibilities(query, key, log_prior, variance, visible).mT  # (B,H,M,Nk,Nq)
    query = query.to(gamma.dtype)[:, :, None]
    return gamma.sum(-1), gamma @ query, (gamma @ query.square().sum(-1, keepdim=True)).squeeze(-1)


def mgk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_prior: Tensor | None,
    variance: Variance,
    e_step: str,
    is_causal: bool,
    key_mask: Tensor | None,
    dropout_p: float,
    query_mask: Tensor | None = None,
) -> Tensor:
    """h_i = sum_j A[i,j] v_j, Eqn 10."""
    value = zero_masked(value, key_mask)
    visible = visible_pairs(query, key.shape[-2], is_causal, key_mask, query_mask)
    weights = attention_weights(query, key, log_prior, variance, e_step, visible)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    return zero_masked((weights @ value.to(weights.dtype)).to(query.dtype), query_mask)


def smgk_attention(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, *arguments: object) -> Tensor:
    """MGK on the keys k_j + b_r."""
    return mgk_attention(query, shifted_keys(key, shift), value, *arguments)  # type: ignore[arg-type]
