"""Kernels for shifted keys and short sequences: one program computes a head, in one launch each way.

Forward is that of bias.py and shifted.py, one after the other. A head that would overflow is computed again at once.

Backward loops over key tiles and, for each, over the query tiles that see it; what a query tile gets of each key tile
is summed in memory that the program has to itself. So a pair has five products and one exponential instead of seven
and two, and the mixing leaves the loop: with e = 2^(q.k/s2 - LSE) and
g = e (v.do - delta), and d_rj = (w_r [sum_i g rho_r q] - dlog_w_r (k + b_r)) / s2, it is

    dv = sum_r w_r [sum_i e rho_r do]     dlog_w_r = w_r [sum_i g rho_r]     dk = sum_r d_rj
    dq = sum_r rho_r [sum_j g w_r (k + b_r)] / s2     dshift_r = sum_j d_rj

A product can add a vector to all rows of a tile: three columns of bfloat16 hold all bits of the log-sum-exp, three more
those of delta. Hard E-step: the winner's weight in place of the mixture. FALLBACK: one exponential per component.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.bias import shifted_bias_block
from mgk.ops.triton.mixing import best_bid, exponents, only_shown, weight
from mgk.ops.triton.primitives import (
    ALL,
    COLUMNS,
    COUNTS,
    NEVER,
    SUMS,
    dropout,
    load_rows,
    load_tile,
    load_vector,
    load_vectors,
    split_columns,
    store_tile,
    unit_column,
    would_overflow,
    zeros_tuple,
)
from mgk.ops.triton.shifted import FALLBACK, FAST, FOREVER, HARD, forward_block

LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, but times zero it is zero


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    tensors, SHIFT, PRIOR, MASK, numbers, strides, H, num_queries, num_keys, padded_queries, padded_keys,
    FAST_C: tl.constexpr, FALLBACK_C: tl.constexpr, PRIOR_AXES: tl.constexpr,
):  # fmt: skip
    """The forward pass of one head, with the settings of the fast path and of the fallback path."""
    OVERFLOW, _, Q, K, _, KEYS, FACTORS, _, ROWS, _, _ = tensors
    i_bh, sizes = tl.program_id(0), (H, num_queries, num_keys, padded_queries, padded_keys)
    if FAST_C.HEADS == ALL:
        tl.store(OVERFLOW + 2 * i_bh + tl.arange(0, 2), tl.zeros([2], tl.float32))
        tl.debug_barrier()
    if FAST_C.HEADS == ALL or would_overflow(OVERFLOW, i_bh):
        for i_block in range(0, (padded_keys + padded_queries) // FAST_C.BN):
            shifted_bias_block(
                i_block, i_bh, Q, K, SHIFT, PRIOR, MASK, KEYS, FACTORS, ROWS, OVERFLOW, numbers[3], 30.0,
                strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], H, num_queries, num_keys,
                padded_queries, padded_keys, FAST_C.D, FAST_C.BD, FAST_C.M, PRIOR_AXES == 2, PRIOR_AXES == 3,
                FAST_C.KEY_MASK, FALLBACK_C.PATH == HARD, True, FAST_C.BN,
            )  # fmt: skip
    tl.debug_barrier()
    if FAST_C.HEADS == ALL and not would_overflow(OVERFLOW, i_bh, False):
        for i_m in range(0, padded_queries // FAST_C.BM):
            forward_block(i_m, i_bh, tensors, numbers, strides, sizes, FAST_C)
    tl.debug_barrier()
    if would_overflow(OVERFLOW, i_bh):
        for i_m in range(0, padded_queries // FAST_C.BM):
            forward_block(i_m, i_bh, tensors, numbers, strides, sizes, FALLBACK_C)


@triton.jit
def three_columns(block, vector, first: tl.constexpr):
    """`vector` into three columns of [ROWS, COLUMNS], as bfloat16 numbers that add up to it."""
    o_column, rest = tl.arange(0, COLUMNS)[None, :], vector
    for part in tl.static_range(3):
        narrow = rest.to(tl.bfloat16).to(tl.float32)
        block = tl.where(o_column == first + part, narrow[:, None], block)
        rest -= narrow
    return block


@triton.jit
def three_ones(first: tl.constexpr, ROWS: tl.constexpr):
    """What a product with such columns sums them by.  # [ROWS, COLUMNS]"""
    o_column = tl.arange(0, COLUMNS)[None, :]
    chosen = (o_column >= first) & (o_column < first + 3)
    return tl.where(chosen, tl.full([ROWS, COLUMNS], 1.0, tl.bfloat16), 0.0).to(tl.bfloat16)


@triton.jit
def prepare(
    p_q,
    p_do,
    p_out,
    p_rows,
    p_delta,
    p_rest,
    p_dq,
    scale,
    num_queries,
    padded_queries,
    strides,
    PATH: tl.constexpr,
    C: tl.constexpr,
):
    """delta; zeros where dq is added up; and what else the loop needs of a query side by side: the columns of sums
    (the rho), those of LSE and delta, rho_r q and rho_r do.
    """
    M: tl.constexpr = C.M
    stride_q, stride_g, stride_o = strides
    o_d, o_v, o_column = tl.arange(0, C.BD), tl.arange(0, C.BV), tl.arange(0, COLUMNS)
    for start in range(0, num_queries, C.BM):
        o_m = start + tl.arange(0, C.BM)
        real = load_vector(p_rows, start, C.BM) != FOREVER  # sees a key and is not masked
        b_q = load_rows(p_q, start, num_queries, stride_q, real, C.BM, C.D, C.BD, True, C.SPANS)  # [BM, BD]
        b_do = load_rows(p_do, start, num_queries, stride_g, real, C.BM, C.DV, C.BV, True, C.SPANS)  # [BM, BV]
        b_o = load_tile(p_out, start, num_queries, stride_o, C.BM, C.DV, C.BV, True)  # [BM, BV]
        delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
        tl.store(p_delta + o_m, delta)
        tl.store(p_dq + o_m[:, None] * C.BD + o_d[None, :], tl.zeros([C.BM, C.BD], tl.float32))
        p_row = p_rest + o_m[:, None] * C.WIDTH
        columns = tl.where(o_column[None, :] == 0, tl.full([C.BM, COLUMNS], 1.0, tl.float32), 0.0)
        columns = three_columns(columns, tl.maximum(-load_vector(p_rows, start, C.BM) / scale, LOWEST), SUMS)
        columns = three_columns(columns, -delta, SUMS + 3)
        if PATH == FAST:
            for r in tl.static_range(1, M):
                rho = load_vector(p_rows + (1 + r) * padded_queries, start, C.BM)[:, None]
                columns = tl.where(o_column[None, :] == r, rho, columns)
                p_r = p_row + COLUMNS + (r - 1) * (C.BD + C.BV)
                tl.store(p_r + o_d[None, :], (b_q.to(tl.float32) * rho).to(tl.bfloat16))
                tl.store(p_r + C.BD + o_v[None, :], (b_do.to(tl.float32) * rho).to(tl.bfloat16))
        tl.store(p_row + o_column[None, :], columns.to(tl.bfloat16))


@triton.jit
def backward_step(
    start,
    sums,
    b_k,
    b_v,
    b_kr,
    log_w,
    seen,
    pointers,
    place,
    numbers,
    PATH: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """One query tile: its share of `sums` (of g q and e do, each per component, and of g), and what it gets of dq."""
    M: tl.constexpr = C.M
    p_q, p_do, p_rows, p_delta, p_rest, p_dq, p_seed = pointers
    i_bh, i_n, offset, stride_q, stride_g, num_queries, padded_queries = place
    scale, threshold, inverse_keep, _ = numbers
    g_q, e_do, g_sum = sums
    p_tile = p_rest + start * C.WIDTH
    real = load_vector(p_rows, start, C.BM) != FOREVER if C.SPANS else None
    b_q = load_rows(p_q, start, num_queries, stride_q, real, C.BM, C.D, C.BD, not C.EVEN, C.SPANS)  # [BM, BD]
    b_do = load_rows(p_do, start, num_queries, stride_g, real, C.BM, C.DV, C.BV, not C.EVEN, C.SPANS)  # [BM, BV]
    b_c = load_tile(p_tile, 0, C.BM, C.WIDTH, C.BM, COLUMNS, COLUMNS, False)  # [BM, COLUMNS]
    s, slope = tl.zeros([C.BN, C.BM], tl.float32), tl.zeros([C.BN, C.BM], tl.float32)
    if PATH != FALLBACK:
        s = tl.dot(three_ones(SUMS, C.BN), tl.trans(b_c))
    s = tl.dot(b_k, tl.trans(b_q), s)
    CHECKS: tl.constexpr = MASKED or C.KEY_MASK or not C.EVEN or C.SPANS
    shown = tl.full([C.BN, 1], 1, tl.int1)
    if MASKED:
        o_m, o_n = start + tl.arange(0, C.BM), i_n * C.BN + tl.arange(0, C.BN)
        shown = o_n[:, None] <= o_m[None, :] + offset
    if C.KEY_MASK or not C.EVEN:
        shown = shown & seen[:, None]
    if C.SPANS:
        shown = shown & real[None, :]
    if CHECKS and PATH == FAST:
        s = tl.where(shown, s, NEVER)
    drop = 1.0
    if C.DROPOUT:
        drop = dropout(p_seed, i_bh, start, i_n * C.BN, threshold, inverse_keep, True, C.BM, C.BN)
        slope = tl.dot(b_v, tl.trans(b_do)) * drop - load_vector(p_delta, start, C.BM)[None, :]
    else:
        slope = tl.dot(b_v, tl.trans(b_do), tl.dot(three_ones(SUMS + 3, C.BN), tl.trans(b_c)))  # [BN, BM]
    new_q, new_do, new_sum, dq = (), (), (), tl.zeros([C.BM, C.BD], tl.float32)
    if PATH == FAST:
        e = tl.exp2(s * scale)
        g, e = (e * slope).to(b_q.dtype), (e * drop).to(b_q.dtype)
        new_q, new_do = (tl.dot(g, b_q, g_q[0]),), (tl.dot(e, b_do, e_do[0]),)
        dq = tl.dot(tl.trans(g), b_kr[0])
        for r in tl.static_range(1, M):
            p_r = p_tile + COLUMNS + (r - 1) * (C.BD + C.BV)
            new_q = new_q + (tl.dot(g, load_tile(p_r, 0, C.BM, C.WIDTH, C.BM, C.BD, C.BD, False), g_q[r]),)
            new_do = new_do + (tl.dot(e, load_tile(p_r + C.BD, 0, C.BM, C.WIDTH, C.BM, C.BV, C.BV, False), e_do[r]),)
            rho = load_vector(p_rows + (1 + r) * padded_queries, start, C.BM)
            dq += tl.dot(tl.trans(g), b_kr[r]) * rho[:, None]
        b_c = load_tile(p_tile, 0, C.BM, C.WIDTH, C.BM, SUMS, SUMS, False)  # [BM, SUMS]
        new_sum = (tl.dot(g, b_c, g_sum[0]),)
    elif C.HARD:  # the first component has what the others leave
        best, won = best_bid(s, load_vectors(p_rows + padded_queries, start, padded_queries, C.BM, M), log_w, True, M)
        x = only_shown(s * scale + best, shown, CHECKS)
        if PATH == FALLBACK:
            x -= load_vector(p_rows, start, C.BM)[None, :]
        total = tl.exp2(x)
        g_all = total * slope
        g = g_all.to(b_q.dtype)
        new_q, new_do = (tl.dot(g, b_q, g_q[0]),), (tl.dot((total * drop).to(b_q.dtype), b_do, e_do[0]),)
        dq, row_sums = tl.dot(tl.trans(g), b_kr[0]), tl.dot(g, unit_column(0, C.BM, b_q.dtype), g_sum[0])
        for r in tl.static_range(1, M):
            g = tl.where(won == r, g_all, 0.0).to(b_q.dtype)
            new_q = new_q + (tl.dot(g, b_q, g_q[r]),)
            row_sums = tl.dot(g, unit_column(r, C.BM, b_q.dtype), row_sums)
            dq = tl.dot(tl.trans(g), b_kr[r], dq)
        new_sum = (row_sums,)
    else:
        log_u = load_vectors(p_rows + (1 + M) * padded_queries, start, padded_queries, C.BM, M)
        lse, total = load_vector(p_rows, start, C.BM), tl.zeros_like(s)
        x = exponents(s, scale, log_u, log_w, shown, True, CHECKS, M)
        for r in tl.static_range(M):
            part = weight(x[r] - lse[None, :])
            total += part
            g = (part * slope).to(b_q.dtype)
            new_q = new_q + (tl.dot(g, b_q, g_q[r]),)
            new_sum = new_sum + (tl.dot(g, unit_column(0, C.BM, b_q.dtype), g_sum[r]),)
            dq = tl.dot(tl.trans(g), b_kr[r], dq)
        new_do = (tl.dot((total * drop).to(b_q.dtype), b_do, e_do[0]),)
    p_sum = p_dq + start * C.BD + (tl.arange(0, C.BM)[:, None] * C.BD + tl.arange(0, C.BD)[None, :])
    tl.store(p_sum, tl.load(p_sum) + dq)  # a transposed g waits for all threads: what they stored before is there
    return new_q, new_do, new_sum


@triton.jit
def backward_head(i_bh, tensors, numbers, strides, sizes, PATH: tl.constexpr, C: tl.constexpr):
    M: tl.constexpr = C.M
    _, Q, K, SHIFT, V, KEYS, OUT, ROWS, SEED, DO, DELTA, REST, DQ_SUM, DQ, DK, GRAD_V, DLW, PART = tensors
    (
        sqb,
        sqh,
        sqn,
        skb,
        skh,
        skn,
        svb,
        svh,
        svn,
        sob,
        soh,
        son,
        sgb,
        sgh,
        sgn,
        sxb,
        sxh,
        sxn,
        sdb,
        sdh,
        sdn,
        seb,
        seh,
        sen,
    ) = strides
    H, num_queries, num_keys, padded_queries, padded_keys = sizes
    scale, _, _, inverse_variance = numbers
    i_b, i_h, i_g = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    offset, end, o_d = num_keys - num_queries, tl.cdiv(num_queries, C.BM) * C.BM, tl.arange(0, C.BD)
    p_keys = KEYS + i_g * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_g * (1 + 2 * M) * padded_queries
    p_delta, p_dq = DELTA + i_g * padded_queries, DQ_SUM + i_g * padded_queries * C.BD
    p_rest = REST + i_g * padded_queries * C.WIDTH
    p_q, p_do = Q + i_b * sqb + i_h * sqh, DO + i_b * sgb + i_h * sgh
    prepare(
        p_q,
        p_do,
        OUT + i_b * sob + i_h * soh,
        p_rows,
        p_delta,
        p_rest,
        p_dq,
        scale,
        num_queries,
        padded_queries,
        (sqn, sgn, son),
        PATH,
        C,
    )
    tl.debug_barrier()

    dshift, dprior = zeros_tuple([C.BD], M), zeros_tuple([1], M)
    for i_n in range(0, tl.cdiv(num_keys, C.BN)):
        o_n = i_n * C.BN + tl.arange(0, C.BN)
        seen = load_vector(p_keys, i_n * C.BN, C.BN) == 0
        p_k, p_v = K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
        b_k = load_rows(p_k, i_n * C.BN, num_keys, skn, seen, C.BN, C.D, C.BD, True, C.KEY_MASK)  # [BN, BD]
        b_v = load_rows(p_v, i_n * C.BN, num_keys, svn, seen, C.BN, C.DV, C.BV, True, C.KEY_MASK)  # [BN, BV]
        w = load_vectors(p_keys + (1 if PATH == FAST else 1 + M) * padded_keys, i_n * C.BN, padded_keys, C.BN, M)
        b_kr, first = (), tl.zeros([C.BD], tl.float32)
        for r in tl.static_range(M):
            b_b = tl.load(SHIFT + (i_h * M + r) * C.D + o_d, mask=o_d < C.D, other=0.0).to(tl.float32)
            if PATH == FAST:
                key = (b_k.to(tl.float32) + b_b[None, :]) * w[r][:, None]
            elif C.HARD and r > 0:
                key = tl.zeros([C.BN, C.BD], tl.float32) + (b_b - first)[None, :]
            else:
                key = b_k.to(tl.float32) + b_b[None, :]
            if r == 0:
                first = b_b
            b_kr = b_kr + (key.to(b_k.dtype),)
        sums = (
            zeros_tuple([C.BN, C.BD], M), zeros_tuple([C.BN, C.BV], M if PATH == FAST else 1),
            zeros_tuple([C.BN, SUMS], 1 if PATH == FAST or C.HARD else M),
        )  # fmt: skip
        begin, visible = end * 0, end * 0
        if C.CAUSAL:
            begin = tl.minimum(tl.maximum(i_n * C.BN - offset, 0) // C.BM * C.BM, end)
            visible = tl.minimum(tl.cdiv(tl.maximum(i_n * C.BN + C.BN - 1 - offset, 0), C.BM) * C.BM, end)
        pointers = (p_q, p_do, p_rows, p_delta, p_rest, p_dq, SEED)
        place = (i_bh, i_n, offset, sqn, sgn, num_queries, padded_queries)
        for start in range(visible, end, C.BM):
            sums = backward_step(start, sums, b_k, b_v, b_kr, w, seen, pointers, place, numbers, PATH, False, C)
        if C.CAUSAL:
            for start in tl.range(begin, visible, C.BM, num_stages=1):
                sums = backward_step(start, sums, b_k, b_v, b_kr, w, seen, pointers, place, numbers, PATH, True, C)

        g_q, e_do, g_sum = sums
        b_dk, b_dv, all_q, all_sum = tl.zeros([C.BN, C.BD], tl.float32), tl.zeros([C.BN, C.BV], tl.float32), g_q[0], ()
        if PATH == FAST or C.HARD:
            all_sum = split_columns(g_sum[0], M)
        else:
            for r in tl.static_range(M):
                all_sum = all_sum + (tl.sum(g_sum[r], 1),)
        rest_sum = all_sum[0]
        for r in tl.static_range(1, M):
            all_q -= g_q[r]
            rest_sum -= all_sum[r]
        new_shift, new_prior = (), ()
        for r in tl.static_range(M):
            b_b = tl.load(SHIFT + (i_h * M + r) * C.D + o_d, mask=o_d < C.D, other=0.0).to(tl.float32)
            if C.HARD and r == 0:
                pull, dlog_w = all_q, rest_sum
            else:
                pull, dlog_w = g_q[r], all_sum[r]
            if PATH == FAST:
                pull, dlog_w = pull * w[r][:, None], dlog_w * w[r]
                b_dv += e_do[r] * w[r][:, None]
            if C.KEY_MASK:  # a hidden key has zeros, unless a query that it meets has NaN
                pull, dlog_w = tl.where(seen[:, None], pull, 0.0), tl.where(seen, dlog_w, 0.0)
            pull -= dlog_w[:, None] * (b_k.to(tl.float32) + b_b[None, :])
            b_dk += pull
            new_shift = new_shift + (dshift[r] + tl.sum(pull, 0),)
            new_prior = new_prior + (dprior[r] + tl.sum(dlog_w, 0),)
            if C.POSITIONS:
                tl.store(DLW + (i_g * M + r) * num_keys + o_n, dlog_w, mask=o_n < num_keys)
        if PATH != FAST:
            b_dv = e_do[0]
        if C.KEY_MASK:
            b_dk, b_dv = tl.where(seen[:, None], b_dk, 0.0), tl.where(seen[:, None], b_dv, 0.0)
        dshift, dprior = new_shift, new_prior
        store_tile(DK + i_b * sdb + i_h * sdh, b_dk * inverse_variance, i_n * C.BN, num_keys, sdn, C.BN, C.D, C.BD)
        store_tile(GRAD_V + i_b * seb + i_h * seh, b_dv, i_n * C.BN, num_keys, sen, C.BN, C.DV, C.BV)

    p_part = PART + i_g * M * (C.BD + 1)
    for r in tl.static_range(M):
        tl.store(p_part + r * (C.BD + 1) + o_d, dshift[r] * inverse_variance)
        tl.store(p_part + r * (C.BD + 1) + C.BD + tl.arange(0, 1), dprior[r])
    tl.debug_barrier()
    for start in range(0, num_queries, C.BM):
        p_sum = p_dq + start * C.BD + (tl.arange(0, C.BM)[:, None] * C.BD + o_d[None, :])
        b_dq = tl.load(p_sum) * inverse_variance
        if C.SPANS:
            b_dq = tl.where((load_vector(p_rows, start, C.BM) != FOREVER)[:, None], b_dq, 0.0)
        store_tile(DQ + i_b * sxb + i_h * sxh, b_dq, start, num_queries, sxn, C.BM, C.D, C.BD)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    tensors, numbers, strides, H, num_queries, num_keys, padded_queries, padded_keys, C: tl.constexpr,
):  # fmt: skip
    """All gradients of one head. DELTA (G,Nq'), REST (G,Nq',WIDTH) and DQ_SUM (G,Nq',BD) are scratch memory."""
    i_bh, sizes = tl.program_id(0), (H, num_queries, num_keys, padded_queries, padded_keys)
    if would_overflow(tensors[0], i_bh):
        backward_head(i_bh, tensors, numbers, strides, sizes, FALLBACK, C)
    elif C.HEADS == ALL:
        backward_head(i_bh, tensors, numbers, strides, sizes, HARD if C.HARD else FAST, C)
