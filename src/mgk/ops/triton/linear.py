"""Linear attention without a causal mask, phi = elu + 1, Eqn 14: sums over the keys, which every query then reads.

    phi(x) = (1 + max(x,0)) exp(min(x,0))     phi'(x) = exp(min(x,0))
    K_jf = sum_r prior[j,r] phi(k_jrf) exp(-c_f)     S = sum_j K_j v_j^T     z = sum_j K_j
    R_if = phi(q_if) exp(c_f - m_i)                  h_i = R_i S / R_i.z

c_f, the largest exponent of the keys, and m_i, the largest of a query's, cancel; with them the largest term of every
sum is at least 1 (ops/linear.py). Backward, with g_i the gradient of h_i and P_i = R_i / R_i.z:

    delta_i = g_i.h_i = sum_f P_if g_i.S_f         dS = sum_i P_i g_i^T                dz = -sum_i P_i delta_i
    dq_if = R'_if (g_i.S_f - delta_i z_f) / R_i.z  (R' has phi' in place of phi)
    G_jf = v_j.dS_f + dz_f     dv_j = K_j dS       dk_jrf = K'_jrf G_jf                dlog_prior_jr = sum_f K_jrf G_jf

The keys of a head, and its queries, are split between programs that walk over tiles. Each leaves sums of its own, which
are added up in a fixed order. A state holds S^T, z and c as rows of one matrix (Dv+2,D).

Packed rows are a batch of one that holds B sequences, each attending to itself: b has the rows ENDS[b] to ENDS[b+1],
and spare rows behind the last sequence are neither read nor written. Programs are split as for the longest sequence.

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
from mgk.ops.triton import contiguous, lengths, like, no_gradient, strides
from mgk.ops.triton.bias import prior_positions, spans
from mgk.ops.triton.decode import alive_places, load_alive
from mgk.ops.triton.host import as_bytes, dense, dot_precision
from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import NEVER, key_range, load_tile, store_tile, zeros_tuple

LOWEST = tl.constexpr(-8e37)  # the largest exponent of no keys: finite, so that differences are numbers
COUNTS = ("H", "num_queries", "positions", "tiles", "splits")
PROGRAMS = 528  # four for each multiprocessor of an H200
JOINED = 16  # features whose splits one program joins


@triton.jit
def as_factor(x, PRECISION: tl.constexpr):
    """x in float32, as a product takes it. TF32 keeps ten bits of a fraction and cuts the others off: they are rounded
    away here, or all sums would come out small. Numbers of half precision fit.
    """
    result = x.to(tl.float32)
    if x.dtype == tl.float32 and PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        result = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # NaN stays what it is
    return result


@triton.jit
def split_range(i_split, tiles, stop, BLOCK: tl.constexpr):
    """The places of a split of so many tiles: where it begins, and where it ends if all do at `stop`."""
    return i_split * tiles * BLOCK, tl.minimum((i_split + 1) * tiles * BLOCK, stop)


@triton.jit
def sequence(ENDS, i_b, length):
    """The batch and the row where a sequence begins, and its length: that of all of them unless they are packed."""
    first = 0
    if ENDS is not None:
        first = tl.load(ENDS + i_b)
        i_b, first, length = 0, first.to(tl.int64), tl.load(ENDS + i_b + 1) - first
    return i_b, first, length


@triton.jit
def negative_part(x):
    """min(x, 0), the exponent of phi. NaN stays."""
    return tl.where(x > 0, 0.0, x)


@triton.jit
def load_keys(
    p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    PRIOR_AXES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile's component keys as M blocks [BN, BD], and as M vectors their log-priors, -inf where a key is hidden.

    Hidden keys are not read, so what they hold does not matter. A uniform prior is a factor that cancels.
    """
    o_n, o_d = start + tl.arange(0, BN), tl.arange(0, BD)
    b_k = load_alive(p_k, start, alive, skn, BN, D, BD).to(tl.float32)
    keys, log_prior = (), ()
    for r in tl.static_range(M):
        b_kr, prior = b_k, tl.zeros([BN], tl.float32)
        if SHIFT is not None:
            b_kr = b_k + tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
        elif r > 0:
            b_kr = load_alive(p_k + tl.cast(skm, tl.int64) * r, start, alive, skn, BN, D, BD).to(tl.float32)
        if PRIOR_AXES == 2:
            prior += tl.load(PRIOR + i_h * M + r).to(tl.float32)
        if PRIOR_AXES == 3:
            prior += tl.load(PRIOR + (i_h * M + r) * positions + o_n, mask=alive, other=0.0).to(tl.float32)
        keys, log_prior = keys + (b_kr,), log_prior + (tl.where(alive, prior, NEVER),)
    return keys, log_prior


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    K, SHIFT, V, PRIOR, MASK, SPAN, ENDS, STATE, skb, skh, skm, skn, svb, svh, svn, H, positions, tiles,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr,
    PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """STATE (splits,G,Dv+2,D) takes the sums over each split of the keys, with a c_f of their own. There are as many
    keys as `positions`, unless packed; a prior per position has as many in any case.
    """
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h, o_d = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), tl.arange(0, BD)
    i_b, first, num_keys = sequence(ENDS, i_b, positions)
    _, last_key = key_range(SPAN, i_b, 0, num_keys, SPAN is not None)
    begin, stop = split_range(i_split, tiles, last_key, BN)
    p_k, p_v = K + i_b * skb + i_h * skh + first * skn, V + i_b * svb + i_h * svh + first * svn
    p_mask = MASK
    if MASK is not None:
        p_mask = MASK + i_b * num_keys

    c, z = tl.full([BD], LOWEST, tl.float32), tl.zeros([BD], tl.float32)
    sums = tl.zeros([BV, BD], tl.float32)  # S^T
    for start in range(begin, stop, BN):
        alive = alive_places(p_mask, start + tl.arange(0, BN), num_keys)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_v = load_alive(p_v, start, alive, svn, BN, DV, BV)  # [BN, BV]
        largest = tl.full([BN, BD], NEVER, tl.float32)
        for r in tl.static_range(M):
            largest = tl.maximum(largest, negative_part(keys[r]) + log_prior[r][:, None])
        c_new = tl.maximum(c, tl.max(largest, 0))
        b_k = tl.zeros([BN, BD], tl.float32)
        for r in tl.static_range(M):
            exponent = negative_part(keys[r]) + log_prior[r][:, None]
            b_k += (1.0 + tl.maximum(keys[r], 0.0)) * tl.exp(exponent - c_new[None, :])
        b_k = as_factor(b_k, PRECISION)
        before = tl.exp(c - c_new)
        z = z * before + tl.sum(b_k, 0)
        b_v = tl.trans(as_factor(b_v, PRECISION))
        sums = tl.dot(b_v, b_k, sums * before[None, :], input_precision=PRECISION)
        c = c_new

    p_state = STATE + (i_split.to(tl.int64) * tl.num_programs(0) + i_bh) * ((DV + 2) * D)
    store_tile(p_state, sums, 0, DV, D, BV, D, BD)
    tl.store(p_state + DV * D + o_d, z, mask=o_d < D)
    tl.store(p_state + (DV + 1) * D + o_d, c, mask=o_d < D)


@triton.jit(do_not_specialize=COUNTS)
def join_kernel(PARTS, STATE, splits, D: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr):
    """STATE (G,Dv+2,D) takes the sums of all splits, PARTS (splits,G,Dv+2,D); BLOCK features of a head."""
    i_bh, groups = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    o_d, o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BV)
    real, o_sums = o_d < D, o_v[:, None] * D + o_d[None, :]
    block = (o_v < DV)[:, None] & real[None, :]
    c = tl.full([BLOCK], LOWEST, tl.float32)
    for i_split in range(0, splits):
        p_part = PARTS + (i_split * groups + i_bh) * ((DV + 2) * D)
        c = tl.maximum(c, tl.load(p_part + (DV + 1) * D + o_d, mask=real, other=LOWEST))
    z, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BV, BLOCK], tl.float32)
    for i_split in range(0, splits):
        p_part = PARTS + (i_split * groups + i_bh) * ((DV + 2) * D)
        share = tl.exp(tl.load(p_part + (DV + 1) * D + o_d, mask=real, other=LOWEST) - c)
        z += share * tl.load(p_part + DV * D + o_d, mask=real, other=0.0)
        sums += share[None, :] * tl.load(p_part + o_sums, mask=block, other=0.0)
    p_state = STATE + i_bh * ((DV + 2) * D)
    tl.store(p_state + o_sums, sums, mask=block)
    tl.store(p_state + DV * D + o_d, z, mask=real)
    tl.store(p_state + (DV + 1) * D + o_d, c, mask=real)


@triton.jit
def reading(b_q, z, c, PRECISION: tl.constexpr):
    """R and R' of a tile of queries [BN, BD], and 1 / R.z, zero where there is no key to read."""
    b_q = b_q.to(tl.float32)
    exponent = negative_part(b_q) + c[None, :]
    slope = tl.exp(exponent - tl.max(exponent, 1)[:, None])
    reads = as_factor((1.0 + tl.maximum(b_q, 0.0)) * slope, PRECISION)
    total = tl.sum(reads * z[None, :], 1)
    return reads, slope, tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def load_state(p_state, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """S^T [BV, BD], and z and c [BD]; features beyond D are not read: exp(-inf) of them."""
    o_d = tl.arange(0, BD)
    sums = as_factor(load_tile(p_state, 0, DV, D, BV, D, BD, True), PRECISION)
    z = tl.load(p_state + DV * D + o_d, mask=o_d < D, other=0.0)
    return sums, z, tl.load(p_state + (DV + 1) * D + o_d, mask=o_d < D, other=NEVER)


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    Q, STATE, OUT, ENDS, sqb, sqh, sqn, sob, soh, son, H, num_queries, tiles, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    i_b, first, num_queries = sequence(ENDS, i_b, num_queries)
    begin, stop = split_range(i_split, tiles, num_queries, BN)
    p_q, p_out = Q + i_b * sqb + i_h * sqh + first * sqn, OUT + i_b * sob + i_h * soh + first * son
    sums, z, c = load_state(STATE + i_bh.to(tl.int64) * ((DV + 2) * D), D, DV, BD, BV, PRECISION)
    for start in range(begin, stop, BN):
        b_q = load_tile(p_q, start, num_queries, sqn, BN, D, BD, True)  # [BN, BD]
        reads, _, inverse = reading(b_q, z, c, PRECISION)
        b_o = tl.dot(reads, tl.trans(sums), input_precision=PRECISION) * inverse[:, None]
        store_tile(p_out, b_o, start, num_queries, son, BN, DV, BV)


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(
    Q, STATE, DO, DQ, DSTATE, ENDS, sqb, sqh, sqn, sgb, sgh, sgn, sxb, sxh, sxn, H, num_queries, tiles,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DQ; DSTATE (splits,G,Dv+1,D) takes dS^T and dz of each split of the queries."""
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h, o_d = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), tl.arange(0, BD)
    i_b, first, num_queries = sequence(ENDS, i_b, num_queries)
    begin, stop = split_range(i_split, tiles, num_queries, BN)
    p_q = Q + i_b * sqb + i_h * sqh + first * sqn
    p_do, p_dq = DO + i_b * sgb + i_h * sgh + first * sgn, DQ + i_b * sxb + i_h * sxh + first * sxn
    sums, z, c = load_state(STATE + i_bh.to(tl.int64) * ((DV + 2) * D), D, DV, BD, BV, PRECISION)
    d_sums, dz = tl.zeros([BV, BD], tl.float32), tl.zeros([BD], tl.float32)
    for start in range(begin, stop, BN):
        b_q = load_tile(p_q, start, num_queries, sqn, BN, D, BD, True)  # [BN, BD]
        b_do = as_factor(load_tile(p_do, start, num_queries, sgn, BN, DV, BV, True), PRECISION)  # [BN, BV]
        reads, slope, inverse = reading(b_q, z, c, PRECISION)
        shares = as_factor(reads * inverse[:, None], PRECISION)  # P
        product = tl.dot(b_do, sums, input_precision=PRECISION)  # [BN, BD]: g_i.S_f
        delta = tl.sum(reads * product, 1) * inverse
        b_dq = slope * (product - delta[:, None] * z[None, :]) * inverse[:, None]
        store_tile(p_dq, b_dq, start, num_queries, sxn, BN, D, BD)
        d_sums = tl.dot(tl.trans(b_do), shares, d_sums, input_precision=PRECISION)
        dz -= tl.sum(shares * delta[:, None], 0)  # queries beyond the last have a delta of zero, as they have a g
    p_state = DSTATE + (i_split.to(tl.int64) * tl.num_programs(0) + i_bh) * ((DV + 1) * D)
    store_tile(p_state, d_sums, 0, DV, D, BV, D, BD)
    tl.store(p_state + DV * D + o_d, dz, mask=o_d < D)


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    K, SHIFT, V, PRIOR, MASK, SPAN, ENDS, STATE, DSTATE, DK, DV_, DPRIOR, PART, skb, skh, skm, skn, svb, svh, svn, sdb,
    sdh, sdm, sdn, seb, seh, sen, H, positions, tiles, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DK, DV_ and, of a prior per position, DPRIOR (G,M,positions); PART (splits,G,M,D+1) takes the sums over each
    split of what the shifts and, last, the priors of a head get.
    """
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h, i_g = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    o_d = tl.arange(0, BD)
    i_b, first, num_keys = sequence(ENDS, i_b, positions)
    _, last_key = key_range(SPAN, i_b, 0, num_keys, SPAN is not None)
    begin, stop = split_range(i_split, tiles, last_key, BN)
    p_k, p_v = K + i_b * skb + i_h * skh + first * skn, V + i_b * svb + i_h * svh + first * svn
    p_dk, p_dv = DK + i_b * sdb + i_h * sdh + first * sdn, DV_ + i_b * seb + i_h * seh + first * sen
    p_mask = MASK
    if MASK is not None:
        p_mask = MASK + i_b * num_keys
    p_dprior = DPRIOR + i_g * M * positions
    p_state = DSTATE + i_g * ((DV + 1) * D)
    d_sums = as_factor(load_tile(p_state, 0, DV, D, BV, D, BD, True), PRECISION)  # [BV, BD]
    dz = tl.load(p_state + DV * D + o_d, mask=o_d < D, other=0.0)
    # Features beyond D are as small as can be, whatever the prior.
    c = tl.load(STATE + i_g * ((DV + 2) * D) + (DV + 1) * D + o_d, mask=o_d < D, other=float("inf"))
    dshift, dprior = zeros_tuple([BD], M), zeros_tuple([BN], M)
    for start in range(begin, stop, BN):
        o_n = start + tl.arange(0, BN)
        alive = alive_places(p_mask, o_n, num_keys)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, alive, i_h, start, positions, skm, skn, D, BD, M, PRIOR_AXES, BN)
        b_v = as_factor(load_alive(p_v, start, alive, svn, BN, DV, BV), PRECISION)  # [BN, BV]
        d_phi = tl.dot(b_v, d_sums, input_precision=PRECISION) + dz[None, :]  # [BN, BD]: G
        b_k, b_dk = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
        new_dshift, new_dprior = (), ()
        for r in tl.static_range(M):
            slope = tl.exp(negative_part(keys[r]) + log_prior[r][:, None] - c[None, :])
            phi = (1.0 + tl.maximum(keys[r], 0.0)) * slope
            b_k += phi
            b_dkr = slope * d_phi
            if SHIFT is None:
                store_tile(p_dk + tl.cast(sdm, tl.int64) * r, b_dkr, start, num_keys, sdn, BN, D, BD)
                new_dshift = new_dshift + (dshift[r],)
            else:
                b_dk += b_dkr
                new_dshift = new_dshift + (dshift[r] + tl.sum(b_dkr, 0),)
            if PRIOR is None:
                new_dprior = new_dprior + (dprior[r],)
            else:
                b_dprior = tl.sum(phi * d_phi, 1)
                new_dprior = new_dprior + (dprior[r] + b_dprior,)
                if PRIOR_AXES == 3:
                    tl.store(p_dprior + r * positions + o_n, b_dprior, mask=o_n < num_keys)
        dshift, dprior = new_dshift, new_dprior
        if SHIFT is not None:
            store_tile(p_dk, b_dk, start, num_keys, sdn, BN, D, BD)
        b_dv = tl.dot(as_factor(b_k, PRECISION), tl.trans(d_sums), input_precision=PRECISION)
        store_tile(p_dv, b_dv, start, num_keys, sen, BN, DV, BV)

    _, end = split_range(i_split, tiles, num_keys, BN)
    if SPAN is not None:  # the tiles after the last key that takes part
        for start in range(tl.maximum(begin, tl.cdiv(last_key, BN) * BN), end, BN):
            o_n = start + tl.arange(0, BN)
            store_tile(p_dv, tl.zeros([BN, BV], tl.float32), start, num_keys, sen, BN, DV, BV)
            for r in tl.static_range(M if SHIFT is None else 1):
                p_dkr = p_dk + tl.cast(sdm, tl.int64) * r
                store_tile(p_dkr, tl.zeros([BN, BD], tl.float32), start, num_keys, sdn, BN, D, BD)
            if PRIOR_AXES == 3:
                for r in tl.static_range(M):
                    tl.store(p_dprior + r * positions + o_n, tl.zeros([BN], tl.float32), mask=o_n < num_keys)
    for r in tl.static_range(M):
        p_part = PART + ((i_split * tl.num_programs(0) + i_g) * M + r) * (D + 1)
        tl.store(p_part + o_d, dshift[r], mask=o_d < D)
        tl.store(p_part + D, tl.sum(dprior[r], 0))


def linear_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    ends: Tensor | None = None, longest: int = 0,
) -> Tensor:  # fmt: skip
    """Query (B,H,Nq,D), key (B,H,M,Nk,D), or (B,H,Nk,D) with shift (H,M,D), value (B,H,Nk,Dv) -> (B,H,Nq,Dv).

    With `ends`, int32 (B+1,), these are batches of one with packed rows: sequence b has the rows ends[b] to ends[b+1],
    no more than `longest`. There is no key mask then, and a prior per position (H,M,Np) has Np >= longest. What is
    behind the last sequence does not matter; it gets zeros.
    """
    result = linear_forward(
        dense(query), dense(key), contiguous(shift), dense(value), contiguous(log_prior), contiguous(key_mask),
        contiguous(ends), longest,
    )  # fmt: skip
    return result[0]


def split(length: int, block: int, groups: int, packed: bool) -> tuple[int, int]:
    """Into how many parts a length is split, and how many tiles of `block` each has.

    No more parts than keep a GPU busy: each is a state to be written and joined. Where only the longest sequence has
    this length most parts are empty, and those that are not should be alike. Of nothing there is one: zeros.
    """
    blocks, programs = triton.cdiv(length, block), PROGRAMS * (4 if packed else 1)
    tiles = triton.cdiv(blocks, max(1, min(blocks, programs // max(1, groups))))
    return max(1, triton.cdiv(blocks, max(1, tiles))), tiles


def settings(query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor) -> tuple[int, dict[str, Any]]:
    """M, and what all kernels are compiled for."""
    width, value_width = query.shape[-1], value.shape[-1]
    components = key.shape[2] if shift is None else shift.shape[1]
    # TF32 holds what half precision does, and three bits more than bfloat16: its errors vanish in those of the output.
    precision = dot_precision() if query.dtype == torch.float32 else "tf32"
    return components, {
        "D": width, "DV": value_width, "BD": block_width(width), "BV": block_width(value_width),
        "PRECISION": precision, **tile(query, value, components),
    }  # fmt: skip


def tile(query: Tensor, value: Tensor, components: int) -> dict[str, int]:
    """Positions of a tile, so many that what a thread holds of it fits into registers, and how it is computed.

    With loads ahead of their use (`num_stages`) the compiler takes most exponentials twice, once for each layout.
    """
    width = max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    halved = (width > 64) + (components > 2) + (query.dtype == torch.float32)
    return {"BN": max(16, 64 >> halved), "num_warps": 4 if width <= 32 else 8, "num_stages": 1}


@operator("triton_linear")
def linear_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    ends: Tensor | None, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and the state (G,Dv+2,D)."""
    heads, width, (batch, num_queries, num_keys) = query.shape[1], query.shape[-1], lengths(query, key, ends, longest)
    output, state = linear_results(query, value, ends)
    if output.numel():
        groups, (components, how) = batch * heads, settings(query, key, shift, value)
        splits, tiles = split(num_keys, how["BN"], groups, ends is not None)
        parts = state.new_empty(splits, *state.shape) if splits > 1 else state
        launch(
            key_kernel, (groups, splits), key, shift, value, log_prior, as_bytes(key_mask),
            spans(None, key_mask, num_queries, num_keys), ends, parts, *key_strides(key), *strides(value), heads,
            prior_positions(log_prior, num_keys), tiles, M=components, PRIOR_AXES=prior_axes(log_prior), **how,
        )  # fmt: skip
        if splits > 1:
            launch(
                join_kernel, (groups, triton.cdiv(width, JOINED)), parts, state, splits, D=width, DV=how["DV"],
                BV=how["BV"], BLOCK=JOINED,
            )  # fmt: skip
        splits, tiles = split(num_queries, how["BN"], groups, ends is not None)
        launch(
            query_kernel, (groups, splits), query, state, output, ends, *strides(query, output), heads, num_queries,
            tiles, **how,
        )  # fmt: skip
    return output, state


@operator("triton_linear_backward")
def linear_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None, ends: Tensor | None, state: Tensor, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; (H,M,D+1), those of shift and, last, of the prior of a head; and those of a
    prior per position (B,H,M,Nk), empty where there is none.
    """
    heads, width, (batch, num_queries, num_keys) = query.shape[1], query.shape[-1], lengths(query, key, ends, longest)
    groups, (components, how) = batch * heads, settings(query, key, shift, value)
    grad_query, grad_key, grad_value, grad_prior = new_gradients(query, key, value, log_prior, ends)
    splits, tiles = split(num_queries, how["BN"], groups, ends is not None)
    grad_state = state.new_empty(splits, groups, how["DV"] + 1, width)
    launch(
        query_gradient_kernel, (groups, splits), query, state, grad, grad_query, grad_state, ends,
        *strides(query, grad, grad_query), heads, num_queries, tiles, **how,
    )  # fmt: skip
    splits, tiles = split(num_keys, how["BN"], groups, ends is not None)
    part = state.new_empty(splits, batch, heads, components, width + 1)
    launch(
        key_gradient_kernel, (groups, splits), key, shift, value, log_prior, as_bytes(key_mask),
        spans(None, key_mask, num_queries, num_keys), ends, state, grad_state.sum(0), grad_key, grad_value, grad_prior,
        part, *key_strides(key), *strides(value), *key_strides(grad_key), *strides(grad_value), heads,
        prior_positions(log_prior, num_keys), tiles, M=components, PRIOR_AXES=prior_axes(log_prior), **how,
    )  # fmt: skip
    return grad_query, grad_key, grad_value, part.sum((0, 1)), grad_prior


def key_strides(key: Tensor) -> list[int]:
    """Of batch, head, component and position; there is one component where keys are shifted."""
    return strides(key) if key.dim() == 5 else [*key.stride()[:2], 0, key.stride(2)]


def prior_axes(log_prior: Tensor | None) -> int:
    return 0 if log_prior is None else log_prior.dim()


def linear_results(query: Tensor, value: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    (batch, heads, num_queries, width), value_width = query.shape, value.shape[-1]
    output = like(query, batch, heads, num_queries, value_width)
    if ends is not None:
        batch, output = ends.shape[0] - 1, output.zero_()  # no program writes to spare rows
    return output, query.new_empty(batch * heads, value_width + 2, width, dtype=torch.float32)


def new_gradients(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, ends: Tensor | None
) -> list[Tensor]:
    """Room for those of query, key and value, and of a prior per position (B,H,M,Nk), (0,) where there is none."""
    batch = query.shape[0] if ends is None else ends.shape[0] - 1
    shape = (batch, *log_prior.shape) if log_prior is not None and log_prior.dim() == 3 else (0,)
    grads = [*map(torch.empty_like, (query, key, value)), query.new_empty(shape, dtype=torch.float32)]
    return grads if ends is None else [grad.zero_() for grad in grads]  # spare rows, and positions after a sequence


@linear_forward.register_fake
def _(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Any, key_mask: Any,
    ends: Tensor | None, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return linear_results(query, value, ends)


@linear_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Any, ends: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *grads, grad_prior = new_gradients(query, key, value, log_prior, ends)
    components = key.shape[2] if shift is None else shift.shape[1]
    total = query.new_empty(query.shape[1], components, query.shape[-1] + 1, dtype=torch.float32)
    return *grads, total, grad_prior


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def linear_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, *rest = ctx.saved_tensors
    if not grad.numel():
        return *no_gradient(query, key, shift, value, log_prior), *[None] * 3
    *grads, total, positions = linear_backward(dense(grad), query, key, shift, value, log_prior, *rest, ctx.longest)
    grad_query, grad_key, grad_value = grads
    grad_shift = None if shift is None else total[..., :-1].to(shift.dtype)
    grad_prior = None
    if log_prior is not None:
        grad_prior = (positions.sum(0) if log_prior.dim() == 3 else total[..., -1]).to(log_prior.dtype)
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, *[None] * 3


linear_forward.register_autograd(linear_autograd, setup_context=keep_for_backward)


def sums_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """Each key is added to the sums once, and each query reads them once: those of the values, and the denominator."""
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
