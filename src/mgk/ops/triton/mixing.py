"""Small block functions of the kernels for shifted keys: how the components' factors and exponents are combined."""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.primitives import NEVER, larger, unit_column, where_larger


@triton.jit
def mixed(rho, w, KEYS_DOWN: tl.constexpr, M: tl.constexpr, BEST: tl.constexpr = False):
    """w_0[j] + sum_r rho_r[i] w_r[j], or the largest of these.  # [BM, BN], or [BN, BM] with the keys down"""
    result = w[0][:, None] if KEYS_DOWN else w[0][None, :]
    for r in tl.static_range(1, M):
        other = w[r][:, None] * rho[r][None, :] if KEYS_DOWN else rho[r][:, None] * w[r][None, :]
        result = larger(tl.broadcast_to(result, other.shape), other) if BEST else result + other
    return result


@triton.jit
def cast_tuple(vectors, dtype: tl.constexpr, M: tl.constexpr):
    result = ()
    for r in tl.static_range(M):
        result = result + (vectors[r].to(dtype),)
    return result


@triton.jit
def exp2_tuple(vectors, M: tl.constexpr):
    result = ()
    for r in tl.static_range(M):
        result = result + (tl.exp2(vectors[r]),)
    return result


@triton.jit
def bid(lead, log_w, KEYS_DOWN: tl.constexpr):
    if KEYS_DOWN:
        result = log_w[:, None] + lead[None, :]
    else:
        result = log_w[None, :] + lead[:, None]
    return result


@triton.jit
def only_shown(x, shown, MASKED: tl.constexpr):
    """If MASKED, -inf for pairs that are not `shown`, also where x is NaN."""
    if MASKED:
        x = tl.where(shown, x, NEVER)
    return x


@triton.jit
def exponents(s, scale, log_u, log_w, shown, KEYS_DOWN: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr):
    """s scale + log_u[i,r] + log_w[j,r] of each component, if MASKED -inf for pairs that are not `shown`.

    Every pass adds the terms in this order, and subtracts a maximum or a log-sum-exp last: terms of 1e10 are rounded
    by hundreds, but the largest exponent of a row is still 0.
    """
    result = ()
    for r in tl.static_range(M):
        result = result + (only_shown(s * scale + bid(log_u[r], log_w[r], KEYS_DOWN), shown, MASKED),)
    return result


@triton.jit
def best_bid(like, lead, log_w, KEYS_DOWN: tl.constexpr, M: tl.constexpr):
    """max_r(log_w[j,r] + lead[i,r]) with lead[0] = 0, and the component that has it, the first one if several do."""
    best = tl.broadcast_to(log_w[0][:, None] if KEYS_DOWN else log_w[0][None, :], like.shape)
    won = tl.zeros(like.shape, tl.int32)
    for r in tl.static_range(1, M):
        other = bid(lead[r], log_w[r], KEYS_DOWN)
        won = tl.where(other > best, r, won)
        best = tl.maximum(best, other)
    return best, won


@triton.jit
def second_share(ds, sums, lead, gap, KEYS_DOWN: tl.constexpr):
    """Sums along `ds` of what is the second component's, added to the second column: pairs whose lead is above the gap.

    In float16, which tells leads of 2 to 4 from gaps a thousandth away; weights in bfloat16 would be mistaken for equal
    five times as far from it.
    """
    gap, lead = (gap[:, None], lead[None, :]) if KEYS_DOWN else (gap[None, :], lead[:, None])
    share = where_larger(tl.broadcast_to(gap, ds.shape), tl.broadcast_to(lead, ds.shape), ds)
    return tl.dot(share, unit_column(1, ds.shape[1], ds.dtype), sums)


@triton.jit
def lead_over_second(log_w):
    """What a query must lead by for the second component to win, as float16 can hold it."""
    return tl.clamp(log_w[0] - log_w[1], -60000.0, 60000.0).to(tl.float16)


@triton.jit
def weight(x):
    """2^x of a row whose weights sum to 1, however much rounding of huge exponents says otherwise. NaN stays NaN."""
    return tl.exp2(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def weight_of(x, CLAMP: tl.constexpr):
    """The same. Products of half precision round alike in every pass, so that no exponent is above 0; those of float32
    do not, nor do the squares of the queries that variances of the components' own need.
    """
    if CLAMP:
        result = weight(x)
    else:
        result = tl.exp2(x)
    return result
