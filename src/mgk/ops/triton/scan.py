"""Causal linear attention, phi = elu + 1, Eqn 14: one walk over the positions of a head, tile by tile.

What linear.py sums over all keys is here a sum over those so far: S, z and c_f are carried from tile to tile. Within a
tile, with K and R as there and one c_f for the keys up to its end,

    W_ij = R_i.K_j for j <= i      L_i = R_i.z + sum_j W_ij      h_i = (R_i S + sum_j W_ij v_j) / L_i

Backward, with g_i the gradient of h_i. The queries walk again and leave the logarithm l_i of L_i without its scale, and
delta_i; the keys walk from the last tile to the first with sums U and y over the queries after them, whose exponents
u_if = min(q_if,0) - l_i have a largest d_f of their own: the mirror image.

    X_if = g_i.S_f + sum_j<=i (g_i.v_j) K_jf     Z_if = z_f + sum_j<=i K_jf
    L_i = sum_f R_if Z_if     delta_i = g_i.h_i = sum_f R_if X_if / L_i     dq_if = R'_if (X_if - delta_i Z_if) / L_i
    Q_if = (1 + max(q_if,0)) exp(u_if - d_f)     U = sum_i Q_i g_i^T     y = sum_i Q_i delta_i
    G_jf = v_j.U_f - y_f + sum_i>=j (g_i.v_j - delta_i) Q_if     dv_j = K_j U + sum_i>=j (K_j.Q_i) g_i
    dk_jrf = K'_jrf G_jf     dlog_prior_jr = sum_f K_jrf G_jf     (K with exp(d_f) in place of exp(-c_f))

How it stays exact. c_f may belong to a key that comes after a query, and R_i.K_j then be small for all that the query
sees; it is exact as long as L_i >= 2^-ROOM. Float32 reaches down to 2^-126, and what it loses below is at most
2^(ROOM-126) of L_i for each pair of mantissas: with 60 bits of room, nothing. Likewise K_j may exceed 2^ROOM where d_f
belongs to a query before the key. A tile with less room than that takes its pairs one key (or query) at a time, each
with the scale of what is seen. That is decided on the device: a CUDA graph can hold all of it.

B batch, H heads, M components, N positions, D width of a head, Dv width of a value, G = B H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.linear_forms import CHUNK
from mgk.ops.operator import operator
from mgk.ops.triton import contiguous, like, no_gradient, strides
from mgk.ops.triton.decode import alive_places, load_alive
from mgk.ops.triton.host import as_bytes, block_width, dense
from mgk.ops.triton.launch import launch
from mgk.ops.triton.linear import (
    LOWEST,
    as_factor,
    key_strides,
    load_keys,
    negative_part,
    new_gradients,
    prior_axes,
    settings,
)
from mgk.ops.triton.primitives import LOG2E, NEVER, load_tile, store_tile, zeros_tuple
from mgk.ops.triton.repeat import repeated

COUNTS = ("H", "positions")
ROOM = 60  # bits


@triton.jit
def query_features(p_q, start, positions, sqn, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Mantissas and exponents of a tile of queries [ROWS, BD]; features beyond D are not read: exp(-inf) of them."""
    b_q = load_tile(p_q, start, positions, sqn, ROWS, D, BD, True).to(tl.float32)
    exponent = negative_part(b_q)
    if D != BD:
        exponent = tl.where((tl.arange(0, BD) < D)[None, :], exponent, NEVER)
    return 1.0 + tl.maximum(b_q, 0.0), exponent


@triton.jit
def largest_exponent(keys, log_prior, M: tl.constexpr):
    """Of the components of each key, [BN, BD]."""
    largest = negative_part(keys[0]) + log_prior[0][:, None]
    for r in tl.static_range(1, M):
        largest = tl.maximum(largest, negative_part(keys[r]) + log_prior[r][:, None])
    return largest


@triton.jit
def mixed(keys, log_prior, change, M: tl.constexpr):
    """sum_r prior phi(k_r) exp(change), [BN, BD]."""
    b_k = (1.0 + tl.maximum(keys[0], 0.0)) * tl.exp(negative_part(keys[0]) + log_prior[0][:, None] + change)
    for r in tl.static_range(1, M):
        b_k += (1.0 + tl.maximum(keys[r], 0.0)) * tl.exp(negative_part(keys[r]) + log_prior[r][:, None] + change)
    return b_k


@triton.jit
def next_keys(keys, log_prior, o_n, c, first, M: tl.constexpr, PRECISION: tl.constexpr):
    """K of a tile [BN, BD], c_f with its keys among them, and the first place so far that has a key."""
    largest = largest_exponent(keys, log_prior, M)
    c = tl.maximum(c, tl.max(largest, 0))
    first = tl.minimum(first, tl.min(tl.where(tl.max(largest, 1) > NEVER, o_n, 2147483647), 0))
    return as_factor(mixed(keys, log_prior, -c[None, :], M), PRECISION), c, first


@triton.jit
def lacks_room(total, o_n, first, ROOM: tl.constexpr):
    """Whether a query that sees a key has next to nothing of it."""
    return tl.min(tl.where(o_n >= first, total, 1.0), 0) < 2.0**-ROOM


@triton.jit
def read_keys(
    b_o, total, m, mantissa, exponent, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, skm, skn, svn,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add the keys of a tile to what its queries read of those before, b_o [BN, BV] and total [BN], which carry
    exp(-m): key by key, with an m_i that grows to be the largest exponent of what is seen.
    """
    for j in range(start, tl.minimum(start + BN, positions)):
        alive = alive_places(p_mask, j + tl.arange(0, 1), positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, j, positions, skm, skn, D, BD, M, PRIOR_AXES, 1)
        b_v = load_alive(p_v, j, alive, svn, 1, DV, BV).to(tl.float32)  # [1, BV]
        for r in tl.static_range(M):
            power = exponent + (negative_part(keys[r]) + log_prior[r][:, None])
            power = tl.where((o_n >= j)[:, None], power, NEVER)
            m_new = tl.maximum(m, tl.max(power, 1))
            before = tl.exp(m - m_new)
            weight = tl.sum(mantissa * (1.0 + tl.maximum(keys[r], 0.0)) * tl.exp(power - m_new[:, None]), 1)
            b_o = b_o * before[:, None] + weight[:, None] * b_v
            total = total * before + weight
            m = m_new
    return b_o, total


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, OUT, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, H, positions,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr,
    PRECISION: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    p_q, p_k, p_v = Q + i_b * sqb + i_h * sqh, K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
    p_out, p_mask = OUT + i_b * sob + i_h * soh, MASK
    if MASK is not None:
        p_mask = MASK + i_b * positions

    c, z = tl.full([BD], LOWEST, tl.float32), tl.zeros([BD], tl.float32)
    sums, first = tl.zeros([BV, BD], tl.float32), positions + BN  # S^T; no place has a key yet
    for start in range(0, positions, BN):
        o_n = start + tl.arange(0, BN)
        alive = alive_places(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_k, c_new, first = next_keys(keys, log_prior, o_n, c, first, M, PRECISION)
        b_v = as_factor(load_alive(p_v, start, alive, svn, BN, DV, BV), PRECISION)  # [BN, BV]
        mantissa, exponent = query_features(p_q, start, positions, sqn, D, BD, BN)

        power = exponent + c_new[None, :]
        reads = as_factor(mantissa * tl.exp(power - tl.max(power, 1)[:, None]), PRECISION)  # R
        before = tl.exp(c - c_new)
        weights = tl.dot(reads, tl.trans(b_k), input_precision=PRECISION)  # [BN, BN]
        weights = as_factor(tl.where(o_n[:, None] >= o_n[None, :], weights, 0.0), PRECISION)
        total = tl.sum(reads * (z * before)[None, :], 1) + tl.sum(weights, 1)
        far, m, c_past = lacks_room(total, o_n, first, ROOM), total, c_new
        if far:
            power, c_past = exponent + c[None, :], c
            m = tl.max(power, 1)
            reads = as_factor(mantissa * tl.exp(power - m[:, None]), PRECISION)
            total = tl.sum(reads * z[None, :], 1)
        past = as_factor(sums * tl.exp(c - c_past)[None, :], PRECISION)
        b_o = tl.dot(reads, tl.trans(past), input_precision=PRECISION)  # [BN, BV]
        if far:
            b_o, total = read_keys(
                b_o, total, m, mantissa, exponent, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, skm,
                skn, svn, D, DV, BD, BV, M, PRIOR_AXES, BN,
            )  # fmt: skip
        else:
            b_o = tl.dot(weights, b_v, b_o, input_precision=PRECISION)
        b_o *= tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        store_tile(p_out, b_o, start, positions, son, BN, DV, BV)
        sums = tl.dot(tl.trans(b_v), b_k, sums * before[None, :], input_precision=PRECISION)
        z = z * before + tl.sum(b_k, 0)
        c = c_new


@triton.jit
def sum_keys(
    x, z, c, b_do, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, skm, skn, svn, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """X, Z and c [BN, BD] of the queries of a tile with its keys in them, from those without: key by key."""
    for j in range(start, tl.minimum(start + BN, positions)):
        alive = alive_places(p_mask, j + tl.arange(0, 1), positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, j, positions, skm, skn, D, BD, M, PRIOR_AXES, 1)
        product = tl.sum(b_do * load_alive(p_v, j, alive, svn, 1, DV, BV).to(tl.float32), 1)  # [BN]: g_i.v_j
        for r in tl.static_range(M):
            exponent = tl.where((o_n >= j)[:, None], negative_part(keys[r]) + log_prior[r][:, None], NEVER)
            c_new = tl.maximum(c, exponent)
            before, b_k = tl.exp(c - c_new), (1.0 + tl.maximum(keys[r], 0.0)) * tl.exp(exponent - c_new)
            x, z, c = x * before + b_k * product[:, None], z * before + b_k, c_new
    return x, z, c


@triton.jit
def queried(mantissa, exponent, z, c):
    """R and R' of a tile of queries [BN, BD], m and L [BN]."""
    power = exponent + c
    m = tl.max(power, 1)
    slope = tl.exp(power - m[:, None])
    reads = mantissa * slope
    return reads, slope, m, tl.sum(reads * z, 1)


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, DO, DQ, KNOWN, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sgb, sgh, sgn, sxb,
    sxh, sxn, H, positions, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr,
    PRIOR_AXES: tl.constexpr, PRECISION: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DQ; KNOWN (2,G,N) takes l, +inf where a query sees no key, and delta."""
    i_bh = tl.program_id(0)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    p_q, p_k, p_v = Q + i_b * sqb + i_h * sqh, K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
    p_do, p_dq, p_mask = DO + i_b * sgb + i_h * sgh, DQ + i_b * sxb + i_h * sxh, MASK
    if MASK is not None:
        p_mask = MASK + i_b * positions
    p_known = KNOWN + i_bh.to(tl.int64) * positions

    c, z = tl.full([BD], LOWEST, tl.float32), tl.zeros([BD], tl.float32)
    sums, first = tl.zeros([BV, BD], tl.float32), positions + BN  # S^T; no place has a key yet
    for start in range(0, positions, BN):
        o_n = start + tl.arange(0, BN)
        alive = alive_places(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_k, c_new, first = next_keys(keys, log_prior, o_n, c, first, M, PRECISION)
        b_v = as_factor(load_alive(p_v, start, alive, svn, BN, DV, BV), PRECISION)  # [BN, BV]
        b_do = as_factor(load_tile(p_do, start, positions, sgn, BN, DV, BV, True), PRECISION)  # [BN, BV]
        mantissa, exponent = query_features(p_q, start, positions, sqn, D, BD, BN)

        before, seen = tl.exp(c - c_new), o_n[:, None] >= o_n[None, :]  # [BN, BN]
        b_z = tl.dot(seen.to(tl.float32), b_k, input_precision=PRECISION) + (z * before)[None, :]  # [BN, BD]: Z
        reads, slope, m, total = queried(mantissa, exponent, b_z, c_new[None, :])
        far, c_past = lacks_room(total, o_n, first, ROOM), c_new
        if far:
            c_past = c
        past = as_factor(sums * tl.exp(c - c_past)[None, :], PRECISION)
        b_x = tl.dot(b_do, past, input_precision=PRECISION)  # [BN, BD]: X
        if far:
            nothing = tl.zeros([BN, BD], tl.float32)
            b_x, b_z, b_c = sum_keys(
                b_x, nothing + z[None, :], nothing + c[None, :], b_do, o_n, p_k, SHIFT, p_v, PRIOR, p_mask,
                i_h, start, positions, skm, skn, svn, D, DV, BD, BV, M, PRIOR_AXES, BN,
            )  # fmt: skip
            reads, slope, m, total = queried(mantissa, exponent, b_z, b_c)
        else:
            pairs = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BN, BN]: g_i.v_j
            pairs = as_factor(tl.where(seen, pairs, 0.0), PRECISION)
            b_x = tl.dot(pairs, b_k, b_x, input_precision=PRECISION)
        inverse = tl.where(total == 0, 0.0, 1.0 / total)
        delta = tl.sum(reads * b_x, 1) * inverse
        b_dq = slope * (b_x - delta[:, None] * b_z) * inverse[:, None]
        store_tile(p_dq, b_dq, start, positions, sxn, BN, D, BD)
        tl.store(p_known + o_n, tl.where(total == 0, float("inf"), m + tl.log(total)), mask=o_n < positions)
        tl.store(p_known + tl.num_programs(0).to(tl.int64) * positions + o_n, delta, mask=o_n < positions)
        sums = tl.dot(tl.trans(b_v), b_k, sums * before[None, :], input_precision=PRECISION)
        z = z * before + tl.sum(b_k, 0)
        c = c_new


@triton.jit
def one_query(
    p_q, p_do, p_log, p_delta, i, o_n, positions, sqn, sgn, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Query i: mantissa [1, BD]; u for the keys o_n that it sees, -inf for others [BN, BD]; gradient [1, BV]; delta."""
    mantissa, exponent = query_features(p_q, i, positions, sqn, D, BD, 1)
    b_do = load_tile(p_do, i, positions, sgn, 1, DV, BV, True).to(tl.float32)
    u = tl.where((o_n <= i)[:, None], exponent - tl.load(p_log + i), NEVER)
    return mantissa, u, b_do, tl.load(p_delta + i)


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, DO, KNOWN, DK, DV_, DPRIOR, PART, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn,
    sgb, sgh, sgn, sdb, sdh, sdm, sdn, seb, seh, sen, H, positions, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr, PRECISION: tl.constexpr,
    ROOM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DK, DV_ and, of a prior per position, DPRIOR (G,M,N); PART (G,M,D+1) takes what the shifts and, last, the priors
    of a head get.
    """
    i_bh = tl.program_id(0)
    i_b, i_h, i_g = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    p_q, p_k, p_v = Q + i_b * sqb + i_h * sqh, K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
    p_do, p_dk, p_dv = DO + i_b * sgb + i_h * sgh, DK + i_b * sdb + i_h * sdh, DV_ + i_b * seb + i_h * seh
    p_dprior, p_mask, o_d = DPRIOR + i_g * M * positions, MASK, tl.arange(0, BD)
    if MASK is not None:
        p_mask = MASK + i_b * positions
    p_log = KNOWN + i_g * positions
    p_delta = p_log + tl.num_programs(0).to(tl.int64) * positions

    d, y = tl.full([BD], LOWEST, tl.float32), tl.zeros([BD], tl.float32)
    sums = tl.zeros([BV, BD], tl.float32)  # U^T
    dshift, dprior = zeros_tuple([BD], M), zeros_tuple([BN], M)
    for back in range(0, positions, BN):
        start = (tl.cdiv(positions, BN) - 1) * BN - back
        o_n = start + tl.arange(0, BN)
        alive = alive_places(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_v = as_factor(load_alive(p_v, start, alive, svn, BN, DV, BV), PRECISION)  # [BN, BV]
        b_do = as_factor(load_tile(p_do, start, positions, sgn, BN, DV, BV, True), PRECISION)  # [BN, BV]
        mantissa, exponent = query_features(p_q, start, positions, sqn, D, BD, BN)
        exponent -= tl.load(p_log + o_n, mask=o_n < positions, other=float("inf"))[:, None]  # u
        delta = tl.load(p_delta + o_n, mask=o_n < positions, other=0.0)

        d_new = tl.maximum(d, tl.max(exponent, 0))
        before, sees = tl.exp(d - d_new), o_n[:, None] <= o_n[None, :]  # [BN, BN], keys down
        room = largest_exponent(keys, log_prior, M) + d_new[None, :]
        far, d_past = tl.max(tl.max(room, 1), 0) * LOG2E > ROOM, d_new
        if far:
            d_past = d
        past = as_factor(sums * tl.exp(d - d_past)[None, :], PRECISION)
        shares = as_factor(mantissa * tl.exp(exponent - d_new[None, :]), PRECISION)  # Q

        d_phi = tl.dot(b_v, past, input_precision=PRECISION) - (y * tl.exp(d - d_past))[None, :]  # [BN, BD]: G
        b_d = tl.zeros([BN, BD], tl.float32) + d_past[None, :]
        if far:
            for i in range(start, tl.minimum(start + BN, positions)):
                one, u, b_doi, delta_i = one_query(
                    p_q, p_do, p_log, p_delta, i, o_n, positions, sqn, sgn, D, DV, BD, BV
                )
                b_d_new = tl.maximum(b_d, u)
                pair = tl.sum(b_v * b_doi, 1) - delta_i
                d_phi = d_phi * tl.exp(b_d - b_d_new) + one * tl.exp(u - b_d_new) * pair[:, None]
                b_d = b_d_new
        else:
            pairs = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - delta[None, :]
            pairs = as_factor(tl.where(sees, pairs, 0.0), PRECISION)
            d_phi = tl.dot(pairs, shares, d_phi, input_precision=PRECISION)

        b_k = as_factor(mixed(keys, log_prior, d_past[None, :], M), PRECISION)
        b_dv = tl.dot(b_k, tl.trans(past), input_precision=PRECISION)
        if far:
            for i in range(start, tl.minimum(start + BN, positions)):
                one, u, b_doi, _ = one_query(p_q, p_do, p_log, p_delta, i, o_n, positions, sqn, sgn, D, DV, BD, BV)
                b_dv += tl.sum(one * mixed(keys, log_prior, u, M), 1)[:, None] * b_doi  # no share is above 1
        else:
            weights = tl.dot(b_k, tl.trans(shares), input_precision=PRECISION)
            weights = as_factor(tl.where(sees, weights, 0.0), PRECISION)
            b_dv = tl.dot(weights, b_do, b_dv, input_precision=PRECISION)
        store_tile(p_dv, b_dv, start, positions, sen, BN, DV, BV)
        sums = tl.dot(tl.trans(b_do), shares, sums * before[None, :], input_precision=PRECISION)
        y = y * before + tl.sum(shares * delta[:, None], 0)
        d = d_new

        # The keys are loaded again, so as not to stay in registers.
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_dk = tl.zeros([BN, BD], tl.float32)
        new_dshift, new_dprior = (), ()
        for r in tl.static_range(M):
            slope = tl.exp(negative_part(keys[r]) + log_prior[r][:, None] + b_d)
            b_dkr = slope * d_phi
            if SHIFT is None:
                store_tile(p_dk + tl.cast(sdm, tl.int64) * r, b_dkr, start, positions, sdn, BN, D, BD)
                new_dshift = new_dshift + (dshift[r],)
            else:
                b_dk += b_dkr
                new_dshift = new_dshift + (dshift[r] + tl.sum(b_dkr, 0),)
            if PRIOR is None:
                new_dprior = new_dprior + (dprior[r],)
            else:
                b_dprior = tl.sum((1.0 + tl.maximum(keys[r], 0.0)) * b_dkr, 1)
                new_dprior = new_dprior + (dprior[r] + b_dprior,)
                if PRIOR_AXES == 3:
                    tl.store(p_dprior + r * positions + o_n, b_dprior, mask=o_n < positions)
        dshift, dprior = new_dshift, new_dprior
        if SHIFT is not None:
            store_tile(p_dk, b_dk, start, positions, sdn, BN, D, BD)

    for r in tl.static_range(M):
        p_part = PART + (i_g * M + r) * (D + 1)
        tl.store(p_part + o_d, dshift[r], mask=o_d < D)
        tl.store(p_part + D, tl.sum(dprior[r], 0))


def scan_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    """Query (B,H,N,D), key (B,H,M,N,D), or (B,H,N,D) with shift (H,M,D), value (B,H,N,Dv) -> (B,H,N,Dv)."""
    return scan_forward(
        dense(query), dense(key), contiguous(shift), dense(value), contiguous(log_prior), contiguous(key_mask)
    )


def tile(query: Tensor, value: Tensor, components: int, backward: bool) -> dict[str, int]:
    """Positions of a tile, so many that what a thread holds of it fits into registers, and how it is computed."""
    width = max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    fits = query.dtype != torch.float32 and components <= 2 and width <= (16 if backward else 64)
    return {"BN": 32 if fits else 16, "num_warps": 4 if width == 16 else 8, "num_stages": 1}


def how_to(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, backward: bool
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    components, how = settings(query, key, shift, value)
    own = tile(query, value, components, backward)
    return {**how, **own, "M": components, "PRIOR_AXES": prior_axes(log_prior), "ROOM": ROOM}


@operator("triton_scan")
@repeated
def scan_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    batch, heads, positions, _ = query.shape
    output = scan_result(query, value)
    if output.numel():
        launch(
            forward_kernel, (batch * heads,), query, key, shift, value, log_prior, as_bytes(key_mask), output,
            *strides(query), *key_strides(key), *strides(value, output), heads, positions,
            **how_to(query, key, shift, value, log_prior, False),
        )  # fmt: skip
    return output


@operator("triton_scan_backward")
@repeated
def scan_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; (H,M,D+1), those of shift and, last, of the prior of a head; and those of a
    prior per position (B,H,M,N), empty where there is none.
    """
    (batch, heads, positions, width), how = query.shape, how_to(query, key, shift, value, log_prior, True)
    grad_query, grad_key, grad_value, grad_prior = new_gradients(query, key, value, log_prior, None)
    known = query.new_empty(2, batch * heads, positions, dtype=torch.float32)
    part = known.new_empty(batch, heads, how["M"], width + 1)
    given = query, key, shift, value, log_prior, as_bytes(key_mask), grad
    steps = *strides(query), *key_strides(key), *strides(value, grad)
    launch(
        query_gradient_kernel, (batch * heads,), *given, grad_query, known, *steps, *strides(grad_query), heads,
        positions, **how,
    )  # fmt: skip
    launch(
        key_gradient_kernel, (batch * heads,), *given, known, grad_key, grad_value, grad_prior, part, *steps,
        *key_strides(grad_key), *strides(grad_value), heads, positions, **how,
    )  # fmt: skip
    return grad_query, grad_key, grad_value, part.sum(0), grad_prior


def scan_result(query: Tensor, value: Tensor) -> Tensor:
    return like(query, *query.shape[:3], value.shape[-1])


@scan_forward.register_fake
def _(query: Tensor, key: Any, shift: Any, value: Tensor, *_: Any) -> Tensor:
    return scan_result(query, value)


@scan_backward.register_fake
def _(
    grad: Any, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    *grads, grad_prior = new_gradients(query, key, value, log_prior, None)
    components = key.shape[2] if shift is None else shift.shape[1]
    total = query.new_empty(query.shape[1], components, query.shape[-1] + 1, dtype=torch.float32)
    return *grads, total, grad_prior


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def scan_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, key_mask = ctx.saved_tensors
    if not grad.numel():
        return *no_gradient(query, key, shift, value, log_prior), None
    *grads, total, positions = scan_backward(dense(grad), query, key, shift, value, log_prior, key_mask)
    grad_query, grad_key, grad_value = grads
    grad_shift = None if shift is None else total[..., :-1].to(shift.dtype)
    grad_prior = None
    if log_prior is not None:
        grad_prior = (positions.sum(0) if log_prior.dim() == 3 else total[..., -1]).to(log_prior.dtype)
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, None


scan_forward.register_autograd(scan_autograd, setup_context=keep_for_backward)


def scan_flops(query: tuple[int, ...], value: tuple[int, ...]) -> int:
    """Of the formula (`mgk.ops.cost`), whose chunks are those of the blockwise form."""
    batch, heads, positions, width = query
    sizes = [min(CHUNK, positions - start) for start in range(0, positions, CHUNK)]
    columns = value[-1] + 1  # the denominator is one
    return batch * heads * sum(4 * width * columns * size + 2 * (width + columns) * size**2 for size in sizes)


@register_flop_formula(torch.ops.mgk.triton_scan)
def _(query: tuple[int, ...], key: Any, shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return scan_flops(query, value)


@register_flop_formula(torch.ops.mgk.triton_scan_backward)
def _(grad: Any, query: tuple[int, ...], key: Any, shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 3 * scan_flops(query, value)
