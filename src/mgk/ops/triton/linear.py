"""Linear attention without a causal mask, phi = elu + 1, Eqn 14: sums over the keys, which every query then reads.

    phi(x) = (1 + max(x,0)) exp(min(x,0))     phi'(x) = exp(min(x,0))
    K_jf = sum_r prior[j,r] phi(k_jrf) exp(-c_f)     S = sum_j K_j v_j^T     z = sum_j K_j
    R_if = phi(q_if) exp(c_f - m_i)                  h_i = R_i S / R_i.z

c_f is the largest exponent of the keys and m_i the largest of a query. Both cancel; with them the largest term of every
sum is at least 1 (ops/linear.py). Backward, with g_i the gradient of h_i and P_i = R_i / R_i.z:

    delta_i = g_i.h_i = sum_f P_if g_i.S_f         dS = sum_i P_i g_i^T                dz = -sum_i P_i delta_i
    dq_if = R'_if (g_i.S_f - delta_i z_f) / R_i.z  (R' has phi' in place of phi)
    G_jf = v_j.dS_f + dz_f     dv_j = K_j dS       dk_jrf = K'_jrf G_jf                dlog_prior_jr = sum_f K_jrf G_jf

The keys and the queries of a head are split between programs, each of which loops over its tiles. Every program writes
sums of its own, which are added in a fixed order. A state holds S^T, z and c as rows of one matrix (Dv+2,D). The
kernels call the sums S^T `sums`; their parameter S holds the compile-time constants of `settings`.

A batch may be one packed row of B sequences, each attending to itself: sequence b has the rows CU_SEQLENS[b] to
CU_SEQLENS[b+1]. Rows after the last sequence are neither read nor written. Programs are split as for the longest one.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value, G = B H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.dispatch import block_width
from mgk.ops.operator import operator
from mgk.ops.triton.bias import prior_positions, spans
from mgk.ops.triton.host import as_bytes, contiguous, dense, dot_precision, empty_like_layout, lengths, zero_gradients
from mgk.ops.triton.launch import launch
from mgk.ops.triton.loads import (
    active_rows,
    constants,
    head_pointer,
    key_strides,
    load_active,
    load_shift,
    num_components,
    offset,
)
from mgk.ops.triton.primitives import NEVER, key_range, load_tile, store_tile, zeros_tuple

LOWEST = tl.constexpr(-8e37)  # the largest exponent of no keys: finite, so that differences are not NaN
COUNTS = ("H", "num_queries", "positions", "tiles", "splits")
PROGRAMS = 528  # four for each multiprocessor of an H200
JOIN_FEATURES = 16  # features for which one program of `join_kernel` adds the splits


@triton.jit
def dot_operand(x, PRECISION: tl.constexpr):
    """Return x in float32, rounded to TF32 if a product is to use it.

    A product would truncate it to TF32 and make all sums too small. Half-precision numbers fit into TF32.
    """
    result = x.to(tl.float32)
    if x.dtype == tl.float32 and PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        result = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # NaN stays NaN
    return result


@triton.jit
def split_range(i_split, tiles, stop, BLOCK: tl.constexpr):
    """Return where split `i_split`, of `tiles` tiles, begins and where it ends, at most at `stop`."""
    return i_split * tiles * BLOCK, tl.minimum((i_split + 1) * tiles * BLOCK, stop)


@triton.jit
def locate(H, CU_SEQLENS, length):
    """Return this program's index b H + h, batch and head, and where in the batch its sequence begins and its length.

    The length is `length` unless rows are packed.
    """
    i_bh, first = tl.program_id(0), 0
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    if CU_SEQLENS is not None:
        first = tl.load(CU_SEQLENS + i_b)
        i_b, first, length = 0, first.to(tl.int64), tl.load(CU_SEQLENS + i_b + 1) - first
    return i_bh.to(tl.int64), i_b, i_h, first, length


@triton.jit
def features(x):
    """Return mantissa and exponent of phi(x), 1 + max(x, 0) and min(x, 0). NaN and infinity have a mantissa of NaN."""
    return x * 0.0 + 1.0 + tl.maximum(x, 0.0), tl.where(x > 0, 0.0, x)


@triton.jit
def load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, strides, S: tl.constexpr, BN: tl.constexpr):
    """Load a tile's component keys as M blocks [BN, BD] and their log-priors as M vectors, -inf for masked keys.

    Masked keys are not read. A uniform prior cancels and is left out.
    """
    o_n, b_k = start + tl.arange(0, BN), load_active(p_k, start, active, strides[2], BN, S.D, S.BD).to(tl.float32)
    keys, log_prior = (), ()
    for r in tl.static_range(S.M):
        b_kr, prior = b_k, tl.zeros([BN], tl.float32)
        if SHIFT is not None:
            b_kr = b_k + load_shift(SHIFT, i_h * S.M + r, S.D, S.BD)[None, :]
        elif r > 0:
            p_kr = p_k + tl.cast(strides[3], tl.int64) * r
            b_kr = load_active(p_kr, start, active, strides[2], BN, S.D, S.BD).to(tl.float32)
        if S.PRIOR_AXES == 2:
            prior += tl.load(PRIOR + i_h * S.M + r).to(tl.float32)
        if S.PRIOR_AXES == 3:
            prior += tl.load(PRIOR + (i_h * S.M + r) * positions + o_n, mask=active, other=0.0).to(tl.float32)
        keys, log_prior = keys + (b_kr,), log_prior + (tl.where(active, prior, NEVER),)
    return keys, log_prior


@triton.jit
def component(keys, log_prior, r: tl.constexpr):
    """Return mantissa and exponent of prior[j,r] phi(k_jr).  # [BN, BD] each"""
    mantissa, exponent = features(keys[r])
    return mantissa, exponent + log_prior[r][:, None]


@triton.jit
def largest_exponent(keys, log_prior, S: tl.constexpr):
    """Return the largest exponent of the components of each key.  # [BN, BD]"""
    _, largest = component(keys, log_prior, 0)
    for r in tl.static_range(1, S.M):
        _, exponent = component(keys, log_prior, r)
        largest = tl.maximum(largest, exponent)
    return largest


@triton.jit
def mix_keys(keys, log_prior, change, S: tl.constexpr):
    """Return sum_r prior[j,r] phi(k_jr) exp(change).  # [BN, BD]"""
    mantissa, exponent = component(keys, log_prior, 0)
    b_k = mantissa * tl.exp(exponent + change)
    for r in tl.static_range(1, S.M):
        mantissa, exponent = component(keys, log_prior, r)
        b_k += mantissa * tl.exp(exponent + change)
    return b_k


@triton.jit
def read_weights(mantissa, exponent, c, PRECISION: tl.constexpr):
    """Return R and R' of a tile of queries [BN, BD] as operands of a product, and m [BN]."""
    power = exponent + c
    m = tl.max(power, 1)
    slope = tl.exp(power - m[:, None])
    return dot_operand(mantissa * slope, PRECISION), slope, m


@triton.jit
def store_key_gradients(
    keys, log_prior, change, d_phi, dshift, dprior, p_dk, p_dprior, SHIFT, start, num_keys, positions, strides,
    S: tl.constexpr,
):  # fmt: skip
    """Store dk and, for a prior per position, dlog_prior of a tile, whose gradients G are `d_phi` [BN, BD].

    `change` is added to the exponents of the keys. Returns `dshift` and `dprior`, M vectors each, with this tile added.
    """
    o_n, b_dk = start + tl.arange(0, S.BN), tl.zeros([S.BN, S.BD], tl.float32)
    new_dshift, new_dprior = (), ()
    for r in tl.static_range(S.M):
        mantissa, exponent = component(keys, log_prior, r)
        active = (log_prior[r] != NEVER)[:, None]
        b_dkr = tl.where(active, tl.exp(exponent + change) * d_phi, 0.0)  # NaN of others must not reach a masked key
        if SHIFT is None:
            store_tile(p_dk + tl.cast(strides[3], tl.int64) * r, b_dkr, start, num_keys, strides[2], S.BN, S.D, S.BD)
            new_dshift = new_dshift + (dshift[r],)
        else:
            b_dk += b_dkr
            new_dshift = new_dshift + (dshift[r] + tl.sum(b_dkr, 0),)
        if S.PRIOR_AXES == 0:
            new_dprior = new_dprior + (dprior[r],)
        else:
            b_dprior = tl.sum(tl.where(active, mantissa * b_dkr, 0.0), 1)
            new_dprior = new_dprior + (dprior[r] + b_dprior,)
            if S.PRIOR_AXES == 3:
                tl.store(p_dprior + r * positions + o_n, b_dprior, mask=o_n < num_keys)
    if SHIFT is not None:
        store_tile(p_dk, b_dk, start, num_keys, strides[2], S.BN, S.D, S.BD)
    return new_dshift, new_dprior


@triton.jit
def store_head_gradients(PART, i_part, dshift, dprior, S: tl.constexpr):
    """Store the sums for shifts and, in the last column, for priors of a head: PART[i_part] of shape (M,D+1)."""
    o_d = tl.arange(0, S.BD)
    for r in tl.static_range(S.M):
        p_part = PART + (i_part * S.M + r) * (S.D + 1)
        tl.store(p_part + o_d, dshift[r], mask=o_d < S.D)
        tl.store(p_part + S.D, tl.sum(dprior[r], 0))


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(K, SHIFT, V, PRIOR, MASK, SPAN, CU_SEQLENS, STATE, sk, sv, H, positions, tiles, S: tl.constexpr):
    """Store the sums over each split of the keys, with a c_f of their own, in STATE (splits,G,Dv+2,D).

    `positions` is the number of keys and, always, of positions of a prior; packed sequences have fewer keys.
    """
    i_bh, i_b, i_h, first, num_keys = locate(H, CU_SEQLENS, positions)
    i_split, o_d = tl.program_id(1), tl.arange(0, S.BD)
    _, last_key = key_range(SPAN, i_b, 0, num_keys, SPAN is not None)
    begin, stop = split_range(i_split, tiles, last_key, S.BN)
    p_k, p_v = head_pointer(K, sk, i_b, i_h, first), head_pointer(V, sv, i_b, i_h, first)
    p_mask = offset(MASK, i_b * num_keys)

    c, z = tl.full([S.BD], LOWEST, tl.float32), tl.zeros([S.BD], tl.float32)
    sums = tl.zeros([S.BV, S.BD], tl.float32)  # S^T
    for start in range(begin, stop, S.BN):
        active = active_rows(p_mask, start + tl.arange(0, S.BN), num_keys)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        b_v = dot_operand(load_active(p_v, start, active, sv[2], S.BN, S.DV, S.BV), S.PRECISION)  # [BN, BV]
        c_new = tl.maximum(c, tl.max(largest_exponent(keys, log_prior, S), 0))
        b_k = dot_operand(mix_keys(keys, log_prior, -c_new[None, :], S), S.PRECISION)
        before = tl.exp(c - c_new)
        z = z * before + tl.sum(b_k, 0)
        sums = tl.dot(tl.trans(b_v), b_k, sums * before[None, :], input_precision=S.PRECISION)
        c = c_new

    p_state = STATE + (i_split.to(tl.int64) * tl.num_programs(0) + i_bh) * ((S.DV + 2) * S.D)
    store_tile(p_state, sums, 0, S.DV, S.D, S.BV, S.D, S.BD)
    tl.store(p_state + S.DV * S.D + o_d, z, mask=o_d < S.D)
    tl.store(p_state + (S.DV + 1) * S.D + o_d, c, mask=o_d < S.D)


@triton.jit(do_not_specialize=COUNTS)
def join_kernel(PARTS, STATE, splits, S: tl.constexpr, BLOCK: tl.constexpr):
    """Add the splits PARTS (splits,G,Dv+2,D) to STATE (G,Dv+2,D), BLOCK features of a head per program."""
    i_bh, groups = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    o_d, o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S.BV)
    real, o_sums = o_d < S.D, o_v[:, None] * S.D + o_d[None, :]
    block = (o_v < S.DV)[:, None] & real[None, :]
    c = tl.full([BLOCK], LOWEST, tl.float32)
    for i_split in range(0, splits):
        p_part = PARTS + (i_split * groups + i_bh) * ((S.DV + 2) * S.D)
        c = tl.maximum(c, tl.load(p_part + (S.DV + 1) * S.D + o_d, mask=real, other=LOWEST))
    z, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([S.BV, BLOCK], tl.float32)
    for i_split in range(0, splits):
        p_part = PARTS + (i_split * groups + i_bh) * ((S.DV + 2) * S.D)
        share = tl.exp(tl.load(p_part + (S.DV + 1) * S.D + o_d, mask=real, other=LOWEST) - c)
        z += share * tl.load(p_part + S.DV * S.D + o_d, mask=real, other=0.0)
        sums += share[None, :] * tl.load(p_part + o_sums, mask=block, other=0.0)
    p_state = STATE + i_bh * ((S.DV + 2) * S.D)
    tl.store(p_state + o_sums, sums, mask=block)
    tl.store(p_state + S.DV * S.D + o_d, z, mask=real)
    tl.store(p_state + (S.DV + 1) * S.D + o_d, c, mask=real)


@triton.jit
def load_state(p_state, S: tl.constexpr):
    """Load S^T [BV, BD], z and c [BD]. Features beyond D are not read; their c is -inf."""
    o_d = tl.arange(0, S.BD)
    sums = dot_operand(load_tile(p_state, 0, S.DV, S.D, S.BV, S.D, S.BD, True), S.PRECISION)
    z = tl.load(p_state + S.DV * S.D + o_d, mask=o_d < S.D, other=0.0)
    return sums, z, tl.load(p_state + (S.DV + 1) * S.D + o_d, mask=o_d < S.D, other=NEVER)


@triton.jit
def read_state(p_q, start, num_queries, z, c, strides, S: tl.constexpr):
    """Return R and R' of a tile of queries [BN, BD], and 1 / R.z, zero where no key is visible."""
    b_q = load_tile(p_q, start, num_queries, strides[2], S.BN, S.D, S.BD, True).to(tl.float32)  # [BN, BD]
    mantissa, exponent = features(b_q)
    reads, slope, _ = read_weights(mantissa, exponent, c[None, :], S.PRECISION)
    total = tl.sum(reads * z[None, :], 1)
    return reads, slope, tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(Q, STATE, OUT, CU_SEQLENS, sq, so, H, num_queries, tiles, S: tl.constexpr):
    """Store the output of each split of the queries in OUT."""
    i_bh, i_b, i_h, first, num_queries = locate(H, CU_SEQLENS, num_queries)
    begin, stop = split_range(tl.program_id(1), tiles, num_queries, S.BN)
    p_q, p_out = head_pointer(Q, sq, i_b, i_h, first), head_pointer(OUT, so, i_b, i_h, first)
    sums, z, c = load_state(STATE + i_bh * ((S.DV + 2) * S.D), S)
    for start in range(begin, stop, S.BN):
        reads, _, inverse = read_state(p_q, start, num_queries, z, c, sq, S)
        b_o = tl.dot(reads, tl.trans(sums), input_precision=S.PRECISION) * inverse[:, None]
        store_tile(p_out, b_o, start, num_queries, so[2], S.BN, S.DV, S.BV)


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(Q, STATE, DO, DQ, DSTATE, CU_SEQLENS, sq, sdo, sdq, H, num_queries, tiles, S: tl.constexpr):
    """Store dq in DQ, and dS^T and dz of each split of the queries in DSTATE (splits,G,Dv+1,D)."""
    i_bh, i_b, i_h, first, num_queries = locate(H, CU_SEQLENS, num_queries)
    i_split, o_d = tl.program_id(1), tl.arange(0, S.BD)
    begin, stop = split_range(i_split, tiles, num_queries, S.BN)
    p_q, p_do = head_pointer(Q, sq, i_b, i_h, first), head_pointer(DO, sdo, i_b, i_h, first)
    p_dq = head_pointer(DQ, sdq, i_b, i_h, first)
    sums, z, c = load_state(STATE + i_bh * ((S.DV + 2) * S.D), S)
    d_sums, dz = tl.zeros([S.BV, S.BD], tl.float32), tl.zeros([S.BD], tl.float32)
    for start in range(begin, stop, S.BN):
        b_do = dot_operand(load_tile(p_do, start, num_queries, sdo[2], S.BN, S.DV, S.BV, True), S.PRECISION)  # [BN, BV]
        reads, slope, inverse = read_state(p_q, start, num_queries, z, c, sq, S)
        shares = dot_operand(reads * inverse[:, None], S.PRECISION)  # P
        product = tl.dot(b_do, sums, input_precision=S.PRECISION)  # [BN, BD]: g_i.S_f
        delta = tl.sum(reads * product, 1) * inverse
        b_dq = slope * (product - delta[:, None] * z[None, :]) * inverse[:, None]
        store_tile(p_dq, b_dq, start, num_queries, sdq[2], S.BN, S.D, S.BD)
        d_sums = tl.dot(tl.trans(b_do), shares, d_sums, input_precision=S.PRECISION)
        dz -= tl.sum(shares * delta[:, None], 0)  # g and so delta are zero for queries beyond the last
    p_state = DSTATE + (i_split.to(tl.int64) * tl.num_programs(0) + i_bh) * ((S.DV + 1) * S.D)
    store_tile(p_state, d_sums, 0, S.DV, S.D, S.BV, S.D, S.BD)
    tl.store(p_state + S.DV * S.D + o_d, dz, mask=o_d < S.D)


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    K, SHIFT, V, PRIOR, MASK, SPAN, CU_SEQLENS, STATE, DSTATE, DK, DV, DPRIOR, PART, sk, sv, sdk, sdv, H, positions,
    tiles, S: tl.constexpr,
):  # fmt: skip
    """Store DK, DV and, for a prior per position, DPRIOR (G,M,positions).

    PART (splits,G,M,D+1) takes the sums over each split for the shifts and, in the last column, the priors of a head.
    """
    i_bh, i_b, i_h, first, num_keys = locate(H, CU_SEQLENS, positions)
    i_split, o_d = tl.program_id(1), tl.arange(0, S.BD)
    _, last_key = key_range(SPAN, i_b, 0, num_keys, SPAN is not None)
    begin, stop = split_range(i_split, tiles, last_key, S.BN)
    p_k, p_v = head_pointer(K, sk, i_b, i_h, first), head_pointer(V, sv, i_b, i_h, first)
    p_dk, p_dv = head_pointer(DK, sdk, i_b, i_h, first), head_pointer(DV, sdv, i_b, i_h, first)
    p_mask = offset(MASK, i_b * num_keys)
    p_dprior, p_state = DPRIOR + i_bh * S.M * positions, DSTATE + i_bh * ((S.DV + 1) * S.D)
    d_sums = dot_operand(load_tile(p_state, 0, S.DV, S.D, S.BV, S.D, S.BD, True), S.PRECISION)  # [BV, BD]
    dz = tl.load(p_state + S.DV * S.D + o_d, mask=o_d < S.D, other=0.0)
    # exp(-inf) makes features beyond D zero, whatever the prior.
    c = tl.load(STATE + i_bh * ((S.DV + 2) * S.D) + (S.DV + 1) * S.D + o_d, mask=o_d < S.D, other=float("inf"))
    dshift, dprior = zeros_tuple([S.BD], S.M), zeros_tuple([S.BN], S.M)
    for start in range(begin, stop, S.BN):
        active = active_rows(p_mask, start + tl.arange(0, S.BN), num_keys)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        b_v = dot_operand(load_active(p_v, start, active, sv[2], S.BN, S.DV, S.BV), S.PRECISION)  # [BN, BV]
        d_phi = tl.dot(b_v, d_sums, input_precision=S.PRECISION) + dz[None, :]  # [BN, BD]: G
        dshift, dprior = store_key_gradients(
            keys, log_prior, -c[None, :], d_phi, dshift, dprior, p_dk, p_dprior, SHIFT, start, num_keys, positions,
            sdk, S,
        )  # fmt: skip
        b_k = dot_operand(mix_keys(keys, log_prior, -c[None, :], S), S.PRECISION)
        b_dv = tl.dot(b_k, tl.trans(d_sums), input_precision=S.PRECISION)
        b_dv = tl.where(active[:, None], b_dv, 0.0)
        store_tile(p_dv, b_dv, start, num_keys, sdv[2], S.BN, S.DV, S.BV)

    _, end = split_range(i_split, tiles, num_keys, S.BN)
    if SPAN is not None:  # zeros for the tiles after the last key that is not masked
        for start in range(tl.maximum(begin, tl.cdiv(last_key, S.BN) * S.BN), end, S.BN):
            o_n = start + tl.arange(0, S.BN)
            store_tile(p_dv, tl.zeros([S.BN, S.BV], tl.float32), start, num_keys, sdv[2], S.BN, S.DV, S.BV)
            for r in tl.static_range(S.M if SHIFT is None else 1):
                p_dkr = p_dk + tl.cast(sdk[3], tl.int64) * r
                store_tile(p_dkr, tl.zeros([S.BN, S.BD], tl.float32), start, num_keys, sdk[2], S.BN, S.D, S.BD)
            if S.PRIOR_AXES == 3:
                for r in tl.static_range(S.M):
                    tl.store(p_dprior + r * positions + o_n, tl.zeros([S.BN], tl.float32), mask=o_n < num_keys)
    store_head_gradients(PART, i_split * tl.num_programs(0) + i_bh, dshift, dprior, S)


def linear_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    cu_seqlens: Tensor | None = None, max_seqlen: int = 0,
) -> Tensor:  # fmt: skip
    """Query (B,H,Nq,D), key (B,H,M,Nk,D), or (B,H,Nk,D) with shift (H,M,D), value (B,H,Nk,Dv) -> (B,H,Nq,Dv).

    With `cu_seqlens`, int32 (B+1,), the batch is one packed row: sequence b has the rows cu_seqlens[b] to
    cu_seqlens[b+1], at most `max_seqlen`. There is no key mask then, and a prior per position (H,M,Np) needs
    Np >= max_seqlen. Rows after the last sequence are ignored and get zeros.
    """
    output: Tensor = linear_forward(
        dense(query), dense(key), contiguous(shift), dense(value), contiguous(log_prior), contiguous(key_mask),
        contiguous(cu_seqlens), max_seqlen,
    )[0]  # fmt: skip
    return output


def split(length: int, block: int, groups: int, packed: bool) -> tuple[int, int]:
    """Return into how many splits a length is divided, at least one, and how many tiles of `block` each has.

    There are no more splits than keep a GPU busy, since each writes a state that must be added. In packed rows most
    sequences are shorter than the longest, so that many splits are empty; more of them balance the work.
    """
    blocks, programs = triton.cdiv(length, block), PROGRAMS * (4 if packed else 1)
    tiles = triton.cdiv(blocks, max(1, min(blocks, programs // max(1, groups))))
    return max(1, triton.cdiv(blocks, max(1, tiles))), tiles


def tile(query: Tensor, value: Tensor, components: int) -> dict[str, int]:
    """Return the positions of a tile, as many as fit into the registers, and the launch options.

    With prefetching (`num_stages` > 1) the compiler computes most exponentials twice, once for each layout.
    """
    width = max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    single = (2 if torch.version.hip else 1) * (query.dtype == torch.float32)  # AMD GPUs have 64 threads in a warp
    halved = (width > 64) + (components > 2) + single
    return {"BN": max(16, 64 >> halved), "num_warps": 4 if width <= 32 else 8, "num_stages": 1}


def settings(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, tile: dict[str, int]
) -> dict[str, Any]:
    """Return the launch options and the constants S: widths, their blocks BD and BV, components, tile size BN, ..."""
    width, value_width, options = query.shape[-1], value.shape[-1], dict(tile)
    sizes = constants(
        D=width, DV=value_width, BD=block_width(width), BV=block_width(value_width), M=num_components(key, shift),
        BN=options.pop("BN"), PRIOR_AXES=0 if log_prior is None else log_prior.dim(),
        # TF32 holds half precision, with three more bits than bfloat16: its errors vanish in the output's rounding.
        PRECISION=dot_precision(query, tf32=query.dtype != torch.float32),
    )  # fmt: skip
    return {"S": sizes, **options}


@operator("triton_linear")
def linear_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the state (G,Dv+2,D)."""
    batch, num_queries, num_keys = lengths(query, key, cu_seqlens, max_seqlen, max_seqlen)
    output, state = linear_results(query, value, cu_seqlens)
    if output.numel():
        own = tile(query, value, num_components(key, shift))
        how, packed = settings(query, key, shift, value, log_prior, own), cu_seqlens is not None
        heads, groups = query.shape[1], batch * query.shape[1]
        splits, tiles = split(num_keys, own["BN"], groups, packed)
        parts = state.new_empty(splits, *state.shape) if splits > 1 else state
        launch(
            key_kernel, (groups, splits), key, shift, value, log_prior, as_bytes(key_mask),
            spans(None, key_mask, num_queries, num_keys), cu_seqlens, parts, key_strides(key), value.stride()[:3],
            heads, prior_positions(log_prior, num_keys), tiles, **how,
        )  # fmt: skip
        if splits > 1:
            grid = groups, triton.cdiv(query.shape[-1], JOIN_FEATURES)
            launch(join_kernel, grid, parts, state, splits, S=how["S"], BLOCK=JOIN_FEATURES)
        splits, tiles = split(num_queries, own["BN"], groups, packed)
        launch(
            query_kernel, (groups, splits), query, state, output, cu_seqlens, query.stride()[:3], output.stride()[:3],
            heads, num_queries, tiles, **how,
        )  # fmt: skip
    return output, state


@operator("triton_linear_backward")
def linear_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, state: Tensor, max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, and two more.

    (H,M,D+1) holds those of the shift and, in the last column, of a prior per head; (B,H,M,Nk) those of a prior per
    position, empty without one.
    """
    batch, num_queries, num_keys = lengths(query, key, cu_seqlens, max_seqlen, max_seqlen)
    heads, width, components = query.shape[1], query.shape[-1], num_components(key, shift)
    groups, packed, own = batch * heads, cu_seqlens is not None, tile(query, value, components)
    how = settings(query, key, shift, value, log_prior, own)
    grad_query, grad_key, grad_value, grad_prior = new_gradients(query, key, value, log_prior, cu_seqlens)
    splits, tiles = split(num_queries, own["BN"], groups, packed)
    grad_state = state.new_empty(splits, groups, value.shape[-1] + 1, width)
    launch(
        query_gradient_kernel, (groups, splits), query, state, grad, grad_query, grad_state, cu_seqlens,
        query.stride()[:3], grad.stride()[:3], grad_query.stride()[:3], heads, num_queries, tiles, **how,
    )  # fmt: skip
    splits, tiles = split(num_keys, own["BN"], groups, packed)
    part = state.new_empty(splits, batch, heads, components, width + 1)
    launch(
        key_gradient_kernel, (groups, splits), key, shift, value, log_prior, as_bytes(key_mask),
        spans(None, key_mask, num_queries, num_keys), cu_seqlens, state, grad_state.sum(0), grad_key, grad_value,
        grad_prior, part, key_strides(key), value.stride()[:3], key_strides(grad_key), grad_value.stride()[:3], heads,
        prior_positions(log_prior, num_keys), tiles, **how,
    )  # fmt: skip
    return grad_query, grad_key, grad_value, part.sum((0, 1)), grad_prior


def linear_results(query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate the output and the state."""
    (batch, heads, num_queries, width), value_width = query.shape, value.shape[-1]
    output = empty_like_layout(query, batch, heads, num_queries, value_width)
    if cu_seqlens is not None:
        batch, output = cu_seqlens.shape[0] - 1, output.zero_()  # no program writes rows after the last sequence
    return output, query.new_empty(batch * heads, value_width + 2, width, dtype=torch.float32)


def new_gradients(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Allocate the gradients of query, key, value and a prior per position: (B,H,M,Nk), (0,) without one."""
    batch = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (batch, *log_prior.shape) if log_prior is not None and log_prior.dim() == 3 else (0,)
    grads = [*map(torch.empty_like, (query, key, value)), query.new_empty(shape, dtype=torch.float32)]
    return grads if cu_seqlens is None else [grad.zero_() for grad in grads]  # no program writes beyond a sequence


@linear_forward.register_fake
def _(
    query: Tensor, key: Tensor, shift: Any, value: Tensor, log_prior: Any, key_mask: Any, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return linear_results(query, value, cu_seqlens)


@linear_backward.register_fake
def fake_gradients(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Any, cu_seqlens: Tensor | None = None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *grads, grad_prior = new_gradients(query, key, value, log_prior, cu_seqlens)
    components, heads, width = num_components(key, shift), query.shape[1], query.shape[-1]
    return *grads, query.new_empty(heads, components, width + 1, dtype=torch.float32), grad_prior


def input_gradients(
    grads: tuple[Tensor, ...], shift: Tensor | None, log_prior: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, shift, value and log_prior from the results of a backward operator."""
    grad_query, grad_key, grad_value, total, positions = grads
    grad_shift = None if shift is None else total[..., :-1].to(shift.dtype)
    grad_prior = None
    if log_prior is not None:
        grad_prior = (positions.sum(0) if log_prior.dim() == 3 else total[..., -1]).to(log_prior.dtype)
    return grad_query, grad_key, grad_shift, grad_value, grad_prior


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.max_seqlen = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def linear_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, *_rest = ctx.saved_tensors
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior), *[None] * 3
    grads = linear_backward(dense(grad), *ctx.saved_tensors, ctx.max_seqlen)
    return *input_gradients(grads, shift, log_prior), *[None] * 3


linear_forward.register_autograd(linear_autograd, setup_context=keep_for_backward)


def sums_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """Count adding each key once to the sums of values and denominators, and reading them once for each query."""
    batch, heads, num_queries, width = query
    return 2 * batch * heads * width * (value[-1] + 1) * (num_queries + key[-2])


@register_flop_formula(torch.ops.mgk.triton_linear)
def _(query: tuple[int, ...], key: tuple[int, ...], shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return sums_flops(query, key, value)


@register_flop_formula(torch.ops.mgk.triton_linear_backward)
def _(
    grad: Any, query: tuple[int, ...], key: tuple[int, ...], shift: Any, value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * sums_flops(query, key, value)
