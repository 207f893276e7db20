"""Kernels for projected keys, l[i,j,r] = q_i.k_jr/s2_r + row_bias[i,r] + key_bias[j,r]: M products, one with V.

The key bias log prior - |k_jr|^2/(2 s2_r) comes from `bias.py`. With one variance the row bias is the same for all
components and cancels; with a variance per component (VARIANCES) it is -|q_i|^2/(2 s2_r), computed here.

Fixed row maximum (FIXED): no component's log-weight is above its prior, so that |q_i|^2/2s2 bounds a row before any key
is seen; see shifted.py. A head with a row that this does not fit is left to a second launch.

Narrow (bfloat16): the key bias is a factor w_r[j], multiplied in bfloat16, two at a time, and the sums over a row or
column of a tile are a product with a few more columns. Heads whose w reach too far for that go to the second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.primitives import (
    COUNTS,
    EVERY,
    FAR,
    LOG2E,
    NEVER,
    SUMS,
    any_far,
    dropout,
    flag_misfits,
    is_behind,
    is_far,
    key_range,
    key_tiles,
    load_columns,
    load_tile,
    load_vector,
    load_vectors,
    online_softmax,
    query_tiles,
    sees_a_key,
    sequence,
    split_columns,
    store_tile,
    unit_column,
    where_tuple,
    work_of,
    zeros_tuple,
)


@triton.jit
def inverse_variances(p_variance, i_h, inverse_variance, M: tl.constexpr, VARIANCES: tl.constexpr):
    """1/s2 of each component, as a tuple of numbers."""
    result = ()
    for r in tl.static_range(M):
        if VARIANCES:
            result = result + (1.0 / tl.load(p_variance + i_h * M + r),)
        else:
            result = result + (inverse_variance,)
    return result


@triton.jit
def row_biases(b_q, inverse, M: tl.constexpr, VARIANCES: tl.constexpr):
    """-|q|^2 / 2 s2_r in base 2, or nothing where it cancels.  # M x [BM]"""
    result = ()
    norm = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    for r in tl.static_range(M):
        if VARIANCES:
            result = result + (norm * (-0.5 * LOG2E) * inverse[r],)
        else:
            result = result + (tl.zeros_like(norm),)
    return result


@triton.jit
def tile_scores(
    b_q, p_k, p_lw, start, i_m, offset, row, inverse, num_keys, padded_keys, stride_km, stride_k, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, LIGHT: tl.constexpr, VARIANCES: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """l in base 2 (LIGHT: less its key bias), -inf where hidden, and the keys.  # M x [BM, BN], M x [BN, BD]"""
    o_m, o_n = i_m * BM + tl.arange(0, BM), start + tl.arange(0, BN)
    if MASKED or not LIGHT:
        log_w = load_vectors(p_lw, start, padded_keys, BN, M)
    result, keys = (), ()
    for r in tl.static_range(M):
        b_k = load_tile(p_k + r * stride_km, start, num_keys, stride_k, BN, D, BD, MASKED)  # [BN, BD]
        x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (inverse[r] * LOG2E)
        if not LIGHT:
            x += log_w[r][None, :]
        elif MASKED:
            x += tl.where(log_w[0] == NEVER, NEVER, 0.0)[None, :]
        if VARIANCES:
            x += row[r][:, None]
        if CAUSAL and MASKED:
            x = tl.where(o_n[None, :] <= o_m[:, None] + offset, x, NEVER)
        result, keys = result + (x,), keys + (b_k,)
    return result, keys


@triton.jit
def light_parts(x, m, w, dtype: tl.constexpr, KEYS_DOWN: tl.constexpr, M: tl.constexpr):
    """2^(x_r - m) w_r, narrow, as a tuple."""
    result = ()
    for r in tl.static_range(M):
        if KEYS_DOWN:
            part = tl.exp2(x[r] - m[None, :]).to(dtype) * w[r][:, None]
        else:
            part = tl.exp2(x[r] - m[:, None]).to(dtype) * w[r][None, :]
        result = result + (part,)
    return result


@triton.jit
def summed(parts, M: tl.constexpr):
    result = parts[0]
    for r in tl.static_range(1, M):
        result = result + parts[r]
    return result


@triton.jit
def forward_step(
    start, b_q, acc, m, l, row, inverse, p_k, p_v, p_lw, p_w, p_seed, i_bh, i_m, offset, threshold, num_keys,
    padded_keys, stride_km, stride_k, stride_v, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    M: tl.constexpr, HARD: tl.constexpr, FIXED: tl.constexpr, NARROW: tl.constexpr, VARIANCES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    LIGHT: tl.constexpr = NARROW and not HARD
    x, _ = tile_scores(
        b_q, p_k, p_lw, start, i_m, offset, row, inverse, num_keys, padded_keys, stride_km, stride_k, D, BD, M, LIGHT,
        VARIANCES, CAUSAL, MASKED, PRECISION, BM, BN,
    )  # fmt: skip
    if LIGHT:
        p = summed(light_parts(x, m, load_vectors(p_w, start, padded_keys, BN, M), b_q.dtype, False, M), M)
    else:
        largest = x[0]
        for r in tl.static_range(1, M):
            largest = tl.maximum(largest, x[r])
        m_safe = m
        if not FIXED:
            m, m_safe, alpha = online_softmax(tl.max(largest, 1), m)
            l, acc = l * alpha, acc * alpha[:, None]
        if HARD:
            p = tl.exp2(largest - m_safe[:, None])
        else:
            p = tl.exp2(x[0] - m_safe[:, None])
            for r in tl.static_range(1, M):
                p += tl.exp2(x[r] - m_safe[:, None])
    if NARROW:
        p = p.to(b_q.dtype)
        l = tl.dot(p, unit_column(0, BN, b_q.dtype), l)
    else:
        l += tl.sum(p, 1)
    if DROPOUT:  # what is kept is divided by its share at the end
        p = p * dropout(p_seed, i_bh, i_m * BM, start, threshold, 1.0, False, BM, BN).to(p.dtype)
    b_v = load_tile(p_v, start, num_keys, stride_v, BN, DV, BV, MASKED)  # [BN, BV]
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return acc, m, l


@triton.jit
def forward_block(
    i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, FAR_HEADS, SPAN, QUERY_MASK, SEED, inverse_variance,
    threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, H, num_queries, num_keys,
    padded_queries, padded_keys, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr,
    HARD: tl.constexpr, FIXED: tl.constexpr, NARROW: tl.constexpr, VARIANCES: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SPANS: tl.constexpr, KEY_MASK: tl.constexpr, MASK_QUERIES: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPANS)
    o_m = i_m * BM + tl.arange(0, BM)
    p_k, p_v = K + origin * skb + i_h * skh, V + origin * svb + i_h * svh
    p_lw, p_row = LW + i_bh.to(tl.int64) * M * padded_keys, i_bh.to(tl.int64) * padded_queries
    p_w = NARROW_KEYS
    if NARROW and not HARD:
        p_w += i_bh.to(tl.int64) * M * padded_keys
    b_q = load_tile(Q + origin * sqb + i_h * sqh, i_m * BM, num_queries, sqn, BM, D, BD, True)  # [BM, BD]
    inverse = inverse_variances(VARIANCE, i_h, inverse_variance, M, VARIANCES)
    row = row_biases(b_q, inverse, M, VARIANCES)

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, CAUSAL, KEY_MASK, BM, BN)
    if FIXED:
        m = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) * (0.5 * LOG2E * inverse_variance)
    else:
        m = tl.full([BM], NEVER, tl.float32)
    l, acc = tl.zeros([BM, SUMS] if NARROW else [BM], tl.float32), tl.zeros([BM, BV], tl.float32)
    if EVEN and not SPANS and not CAUSAL:
        tl.assume(full >= BN)
    for start in range(0, full, BN):
        acc, m, l = forward_step(
            start, b_q, acc, m, l, row, inverse, p_k, p_v, p_lw, p_w, SEED, i_bh, i_m, offset, threshold, num_keys,
            padded_keys, skm, skn, svn, D, DV, BD, BV, M, HARD, FIXED, NARROW, VARIANCES, CAUSAL, False, DROPOUT,
            PRECISION, BM, BN,
        )  # fmt: skip
    if CAUSAL or KEY_MASK or not EVEN:
        for start in tl.range(full, stop, BN, num_stages=1):
            acc, m, l = forward_step(
                start, b_q, acc, m, l, row, inverse, p_k, p_v, p_lw, p_w, SEED, i_bh, i_m, offset, threshold, num_keys,
                padded_keys, skm, skn, svn, D, DV, BD, BV, M, HARD, FIXED, NARROW, VARIANCES, CAUSAL, True, DROPOUT,
                PRECISION, BM, BN,
            )  # fmt: skip
    if NARROW:
        l = tl.sum(l, 1)
    if DROPOUT:
        acc *= inverse_keep
    takes_part = o_m < num_queries
    if MASK_QUERIES:
        takes_part = takes_part & (tl.load(QUERY_MASK + i_b * num_queries + o_m, mask=o_m < num_queries, other=0) != 0)
    if FIXED:
        flag_misfits(FAR_HEADS, i_bh, l, takes_part & sees_a_key(SPAN, i_b, o_m, offset, num_keys, CAUSAL, SPANS))
    takes_part = takes_part & (l > 0)
    out = tl.where(takes_part[:, None], acc / tl.where(l > 0, l, 1.0)[:, None], 0.0)
    store_tile(OUT + origin * sob + i_h * soh, out, i_m * BM, num_queries, son, BM, DV, BV)
    tl.store(LSE + p_row + o_m, tl.where(takes_part, m + tl.log2(l), float("inf")))


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, FAR_HEADS, SPAN, QUERY_MASK, SEED, inverse_variance, threshold,
    inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, BATCHES, section, H, num_queries,
    num_keys, padded_queries, padded_keys, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    M: tl.constexpr, HARD: tl.constexpr, HEADS: tl.constexpr, FIXED: tl.constexpr, NARROW: tl.constexpr,
    VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPANS: tl.constexpr, KEY_MASK: tl.constexpr,
    MASK_QUERIES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One block of one head, or, for the heads that need it, all their blocks between a few programs."""
    blocks, groups = padded_queries // BM, BATCHES * H
    if HEADS == FAR:
        if any_far(FAR_HEADS, groups, 128):
            for item in range(tl.program_id(0), blocks * groups, tl.num_programs(0)):
                i_block, i_bh = work_of(item, blocks, groups, section, SPAN, H, SPANS)
                i_m = blocks - 1 - i_block
                if is_far(FAR_HEADS, i_bh) and not is_behind(SPAN, i_bh // H, i_m * BM, PACKED):
                    forward_block(
                        i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, FAR_HEADS, SPAN, QUERY_MASK, SEED,
                        inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn,
                        sob, soh, son, H, num_queries, num_keys, padded_queries, padded_keys, D, DV, BD, BV, M, HARD,
                        FIXED, NARROW, VARIANCES, CAUSAL, EVEN, SPANS, KEY_MASK, MASK_QUERIES, DROPOUT, PRECISION, BM,
                        BN, PACKED,
                    )  # fmt: skip
    else:
        i_block, i_bh = work_of(tl.program_id(0), blocks, groups, section, SPAN, H, SPANS)
        i_m = blocks - 1 - i_block
        if (HEADS == EVERY or not is_far(FAR_HEADS, i_bh, False)) and not is_behind(SPAN, i_bh // H, i_m * BM, PACKED):
            forward_block(
                i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, FAR_HEADS, SPAN, QUERY_MASK, SEED,
                inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh,
                son, H, num_queries, num_keys, padded_queries, padded_keys, D, DV, BD, BV, M, HARD, FIXED, NARROW,
                VARIANCES, CAUSAL, EVEN, SPANS, KEY_MASK, MASK_QUERIES, DROPOUT, PRECISION, BM, BN, PACKED,
            )  # fmt: skip


@triton.jit
def winner(x, M: tl.constexpr):
    """Which component has the largest entry, the first one among equals, and that entry."""
    best, won = x[0], tl.zeros(x[0].shape, tl.int32)
    for r in tl.static_range(1, M):
        won = tl.where(x[r] > best, r, won)
        best = tl.maximum(best, x[r])
    return best, won


@triton.jit
def query_step(
    start, b_q, b_do, b_dq, drow, row, inverse, lse, delta, p_k, p_v, p_lw, p_w, p_seed, i_bh, i_m, offset, threshold,
    inverse_keep, num_keys, padded_keys, stride_km, stride_k, stride_v, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, NARROW: tl.constexpr,
    VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One key tile's share of dq (times s2, with one variance) and of the row biases."""
    b_v = load_tile(p_v, start, num_keys, stride_v, BN, DV, BV, MASKED)  # [BN, BV]
    LIGHT: tl.constexpr = NARROW and not HARD
    x, keys = tile_scores(
        b_q, p_k, p_lw, start, i_m, offset, row, inverse, num_keys, padded_keys, stride_km, stride_k, D, BD, M, LIGHT,
        VARIANCES, CAUSAL, MASKED, PRECISION, BM, BN,
    )  # fmt: skip
    slope = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BN]
    if DROPOUT:
        slope *= dropout(p_seed, i_bh, i_m * BM, start, threshold, inverse_keep, False, BM, BN)
    slope -= delta[:, None]
    new = ()
    if LIGHT:
        parts = light_parts(x, lse, load_vectors(p_w, start, padded_keys, BN, M), b_q.dtype, False, M)
        slope = slope.to(b_q.dtype)
    if HARD:
        best, won = winner(x, M)
        whole = tl.exp2(best - lse[:, None]) * slope
    for r in tl.static_range(M):
        if HARD:
            ds = tl.where(won == r, whole, 0.0)
        elif LIGHT:
            ds = parts[r] * slope
        else:
            ds = tl.exp2(x[r] - lse[:, None]) * slope
        if VARIANCES:
            new = new + (drow[r] + tl.sum(ds, 1),)
            ds *= inverse[r]
        else:
            new = new + (drow[r],)
        b_dq = tl.dot(ds.to(b_q.dtype), keys[r], b_dq, input_precision=PRECISION)
    return b_dq, new


@triton.jit
def query_block(
    i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, SPAN, SEED, DO, KNOWN, DQ, PART, inverse_variance,
    threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sdb, sdh,
    sdn, H, num_queries, num_keys, padded_queries, padded_keys, parts, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, NARROW: tl.constexpr,
    VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPANS: tl.constexpr, KEY_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """dq, delta, and each query block's share of dvariance."""
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPANS)
    o_m = i_m * BM + tl.arange(0, BM)
    p_k, p_v = K + origin * skb + i_h * skh, V + origin * svb + i_h * svh
    p_lw, p_row = LW + i_bh.to(tl.int64) * M * padded_keys, i_bh.to(tl.int64) * padded_queries
    p_w = NARROW_KEYS
    if NARROW and not HARD:
        p_w += i_bh.to(tl.int64) * M * padded_keys
    b_q = load_tile(Q + origin * sqb + i_h * sqh, i_m * BM, num_queries, sqn, BM, D, BD, True)  # [BM, BD]
    b_do = load_tile(DO + origin * sgb + i_h * sgh, i_m * BM, num_queries, sgn, BM, DV, BV, True)  # [BM, BV]
    b_o = load_tile(OUT + origin * sob + i_h * soh, i_m * BM, num_queries, son, BM, DV, BV, True)  # [BM, BV]
    delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    lse, p_known = load_vector(LSE + p_row, i_m * BM, BM), KNOWN + (p_row + o_m) * WIDTH
    tl.store(p_known, lse)
    tl.store(p_known + 1, delta)
    inverse = inverse_variances(VARIANCE, i_h, inverse_variance, M, VARIANCES)
    row = row_biases(b_q, inverse, M, VARIANCES)

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, CAUSAL, KEY_MASK, BM, BN)
    b_dq, drow = tl.zeros([BM, BD], tl.float32), zeros_tuple([BM], M)
    if EVEN and not SPANS and not CAUSAL:
        tl.assume(full >= BN)
    for start in range(0, full, BN):
        b_dq, drow = query_step(
            start, b_q, b_do, b_dq, drow, row, inverse, lse, delta, p_k, p_v, p_lw, p_w, SEED, i_bh, i_m, offset,
            threshold, inverse_keep, num_keys, padded_keys, skm, skn, svn, D, DV, BD, BV, M, HARD, NARROW, VARIANCES,
            CAUSAL, False, DROPOUT, PRECISION, BM, BN,
        )  # fmt: skip
    if CAUSAL or KEY_MASK or not EVEN:
        for start in tl.range(full, stop, BN, num_stages=1):
            b_dq, drow = query_step(
                start, b_q, b_do, b_dq, drow, row, inverse, lse, delta, p_k, p_v, p_lw, p_w, SEED, i_bh, i_m, offset,
                threshold, inverse_keep, num_keys, padded_keys, skm, skn, svn, D, DV, BD, BV, M, HARD, NARROW,
                VARIANCES, CAUSAL, True, DROPOUT, PRECISION, BM, BN,
            )  # fmt: skip
    if VARIANCES:
        norm = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
        p_part = PART + (i_bh.to(tl.int64) * parts + i_m) * M * 2
        for r in tl.static_range(M):
            b_dq -= (drow[r] * inverse[r])[:, None] * b_q.to(tl.float32)
            tl.store(p_part + r * 2, 0.0)
            tl.store(p_part + r * 2 + 1, tl.sum(drow[r] * norm, 0) * 0.5 * inverse[r] * inverse[r])
    else:
        b_dq *= inverse_variance
    store_tile(DQ + origin * sdb + i_h * sdh, b_dq, i_m * BM, num_queries, sdn, BM, D, BD)


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, FAR_HEADS, SPAN, SEED, DO, KNOWN, DQ, PART, inverse_variance,
    threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sdb, sdh,
    sdn, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys, parts, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, HEADS: tl.constexpr,
    NARROW: tl.constexpr, VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPANS: tl.constexpr,
    KEY_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of one head, or, for the heads that need it, all their blocks between a few programs."""
    blocks, groups = padded_queries // BM, BATCHES * H
    if HEADS == FAR:
        if any_far(FAR_HEADS, groups, 128):
            for item in range(tl.program_id(0), blocks * groups, tl.num_programs(0)):
                i_block, i_bh = work_of(item, blocks, groups, section, SPAN, H, SPANS)
                i_m = blocks - 1 - i_block
                if is_far(FAR_HEADS, i_bh) and not is_behind(SPAN, i_bh // H, i_m * BM, PACKED):
                    query_block(
                        i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, SPAN, SEED, DO, KNOWN, DQ, PART,
                        inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn,
                        sob, soh, son, sgb, sgh, sgn, sdb, sdh, sdn, H, num_queries, num_keys, padded_queries,
                        padded_keys, parts, D, DV, BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, EVEN, SPANS, KEY_MASK,
                        DROPOUT, PRECISION, WIDTH, BM, BN, PACKED,
                    )  # fmt: skip
    else:
        i_block, i_bh = work_of(tl.program_id(0), blocks, groups, section, SPAN, H, SPANS)
        i_m = blocks - 1 - i_block
        if (HEADS == EVERY or not is_far(FAR_HEADS, i_bh)) and not is_behind(SPAN, i_bh // H, i_m * BM, PACKED):
            query_block(
                i_m, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, OUT, LSE, SPAN, SEED, DO, KNOWN, DQ, PART,
                inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh,
                son, sgb, sgh, sgn, sdb, sdh, sdn, H, num_queries, num_keys, padded_queries, padded_keys, parts, D, DV,
                BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, EVEN, SPANS, KEY_MASK, DROPOUT, PRECISION, WIDTH, BM, BN,
                PACKED,
            )  # fmt: skip


@triton.jit
def key_step(
    start, keys, b_v, b_dk, b_dv, dw, log_w, w, inverse, p_q, p_do, p_known, p_seed, i_bh, i_n, offset, threshold,
    inverse_keep, num_queries, stride_q, stride_g, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, NARROW: tl.constexpr, VARIANCES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One query tile's share of dk, dv and the key biases, keys down and queries across."""
    o_m, o_n = start + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    b_q = load_tile(p_q, start, num_queries, stride_q, BM, D, BD, MASKED)  # [BM, BD]
    b_do = load_tile(p_do, start, num_queries, stride_g, BM, DV, BV, MASKED)  # [BM, BV]
    slope = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BM]
    known = load_columns(p_known, start, BM, WIDTH)
    lse, delta = known[0], known[1]
    if DROPOUT:  # the weights that are kept are divided by their share at the end
        drop = dropout(p_seed, i_bh, start, i_n * BN, threshold, 1.0, True, BM, BN)
        slope = slope * drop * inverse_keep
    slope -= delta[None, :]
    LIGHT: tl.constexpr = NARROW and not HARD
    row = row_biases(b_q, inverse, M, VARIANCES)
    x = ()
    for r in tl.static_range(M):
        y = tl.dot(keys[r], tl.trans(b_q), input_precision=PRECISION) * (inverse[r] * LOG2E)
        if not LIGHT:
            y += log_w[r][:, None]
        if VARIANCES:
            y += row[r][None, :]
        if CAUSAL and MASKED:
            y = tl.where(o_n[:, None] <= o_m[None, :] + offset, y, NEVER)
        x = x + (y,)
    if HARD:
        best, won = winner(x, M)
        total = tl.exp2(best - lse[None, :])
        whole = total * slope
    elif LIGHT:
        parts = light_parts(x, lse, w, b_q.dtype, True, M)
        total, slope = summed(parts, M), slope.to(b_q.dtype)
    else:
        total = tl.zeros_like(slope)
    dk, db, columns = (), (), dw[0]
    for r in tl.static_range(M):
        if HARD:
            ds = tl.where(won == r, whole, 0.0)
        elif LIGHT:
            ds = parts[r] * slope
        else:
            part = tl.exp2(x[r] - lse[None, :])
            total += part
            ds = part * slope
        if NARROW:
            columns = tl.dot(ds.to(b_q.dtype), unit_column(r, BM, b_q.dtype), columns)
        else:
            db = db + (dw[r] + tl.sum(ds, 1),)
        dk = dk + (tl.dot(ds.to(b_q.dtype), b_q, b_dk[r], input_precision=PRECISION),)
    if NARROW:
        db = (columns,)
    if DROPOUT:
        total = total * drop.to(total.dtype)
    b_dv = tl.dot(total.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    return dk, b_dv, db


@triton.jit
def key_block(
    i_n, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, SPAN, SEED, DO, KNOWN, DK, DV_, DLW, PART, inverse_variance,
    threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sgb, sgh, sgn, sdb, sdh, sdm, sdn, seb,
    seh, sen, H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, NARROW: tl.constexpr,
    VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPANS: tl.constexpr, KEY_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dk, dv, and each key block's share of dlog_prior and dvariance."""
    i_b, i_h, positions = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), num_keys
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPANS)
    o_n = i_n * BN + tl.arange(0, BN)
    p_q, p_do = Q + origin * sqb + i_h * sqh, DO + origin * sgb + i_h * sgh
    p_k, p_row = K + origin * skb + i_h * skh, i_bh.to(tl.int64) * padded_queries
    p_known = KNOWN + p_row * WIDTH
    b_v = load_tile(V + origin * svb + i_h * svh, i_n * BN, num_keys, svn, BN, DV, BV, True)  # [BN, BV]
    log_w = load_vectors(LW + i_bh.to(tl.int64) * M * padded_keys, i_n * BN, padded_keys, BN, M)
    w = log_w
    if NARROW and not HARD:
        w = load_vectors(NARROW_KEYS + i_bh.to(tl.int64) * M * padded_keys, i_n * BN, padded_keys, BN, M)
    keys = ()
    for r in tl.static_range(M):
        keys = keys + (load_tile(p_k + r * skm, i_n * BN, num_keys, skn, BN, D, BD, True),)  # [BN, BD]
    inverse = inverse_variances(VARIANCE, i_h, inverse_variance, M, VARIANCES)

    begin, visible, whole, stop = query_tiles(i_n, offset, last_query, last_key, num_queries, CAUSAL, BM, BN)
    b_dk, b_dv, dw = (
        zeros_tuple([BN, BD], M),
        tl.zeros([BN, BV], tl.float32),
        zeros_tuple([BN, SUMS], 1) if NARROW else zeros_tuple([BN], M),
    )
    if EVEN and not SPANS and not CAUSAL:
        tl.assume(whole >= BM)
    for start in range(visible, whole, BM):
        b_dk, b_dv, dw = key_step(
            start, keys, b_v, b_dk, b_dv, dw, log_w, w, inverse, p_q, p_do, p_known, SEED, i_bh, i_n, offset,
            threshold, inverse_keep, num_queries, sqn, sgn, D, DV, BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, False,
            DROPOUT, PRECISION, WIDTH, BM, BN,
        )  # fmt: skip
    if CAUSAL or not EVEN:
        diagonal, tail = tl.cdiv(visible - begin, BM), tl.maximum(visible, whole)
        for i in tl.range(0, diagonal + tl.cdiv(tl.maximum(stop - tail, 0), BM), num_stages=1):
            start = tl.where(i < diagonal, begin + i * BM, tail + (i - diagonal) * BM)
            b_dk, b_dv, dw = key_step(
                start, keys, b_v, b_dk, b_dv, dw, log_w, w, inverse, p_q, p_do, p_known, SEED, i_bh, i_n, offset,
                threshold, inverse_keep, num_queries, sqn, sgn, D, DV, BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, True,
                DROPOUT, PRECISION, WIDTH, BM, BN,
            )  # fmt: skip
    if NARROW:
        dw = split_columns(dw[0], M)
        if KEY_MASK or not EVEN:  # a hidden key has whatever is in its own rows
            seen = log_w[0] != NEVER
            b_dv, dw = tl.where(seen[:, None], b_dv, 0.0), where_tuple(seen, dw, M)
            b_dk = where_tuple(seen[:, None], b_dk, M)
    if DROPOUT:
        b_dv *= inverse_keep

    p_part = PART + (i_bh.to(tl.int64) * parts + query_parts + i_n) * M * 2
    for r in tl.static_range(M):
        b_k = load_tile(p_k + r * skm, i_n * BN, num_keys, skn, BN, D, BD, True, True).to(tl.float32)  # [BN, BD]
        tl.store(p_part + r * 2, tl.sum(dw[r], 0))
        if VARIANCES:
            moment = tl.sum(b_k * (0.5 * dw[r][:, None] * b_k - b_dk[r]), 1)
            tl.store(p_part + r * 2 + 1, tl.sum(moment, 0) * inverse[r] * inverse[r])
        grad = (b_dk[r] - dw[r][:, None] * b_k) * inverse[r]
        store_tile(DK + origin * sdb + i_h * sdh + r * sdm, grad, i_n * BN, num_keys, sdn, BN, D, BD)
        if POSITIONS:
            tl.store(DLW + (i_bh.to(tl.int64) * M + r) * positions + o_n, dw[r], mask=o_n < num_keys)
    store_tile(DV_ + origin * seb + i_h * seh, b_dv, i_n * BN, num_keys, sen, BN, DV, BV)


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    Q, K, V, LW, NARROW_KEYS, VARIANCE, FAR_HEADS, SPAN, SEED, DO, KNOWN, DK, DV_, DLW, PART, inverse_variance,
    threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sgb, sgh, sgn, sdb, sdh, sdm, sdn, seb,
    seh, sen, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr,
    HEADS: tl.constexpr, NARROW: tl.constexpr, VARIANCES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    SPANS: tl.constexpr, KEY_MASK: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of one head, or, for the heads that need it, all their blocks between a few programs."""
    blocks, groups = padded_keys // BN, BATCHES * H
    if HEADS == FAR:
        if any_far(FAR_HEADS, groups, 128):
            for item in range(tl.program_id(0), blocks * groups, tl.num_programs(0)):
                i_block, i_bh = work_of(item, blocks, groups, section, SPAN, H, SPANS)
                i_n = i_block
                if is_far(FAR_HEADS, i_bh) and not is_behind(SPAN, i_bh // H, i_n * BN, PACKED):
                    key_block(
                        i_n, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, SPAN, SEED, DO, KNOWN, DK, DV_, DLW, PART,
                        inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn,
                        sgb, sgh, sgn, sdb, sdh, sdm, sdn, seb, seh, sen, H, num_queries, num_keys, padded_queries,
                        padded_keys, query_parts, parts, D, DV, BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, EVEN, SPANS,
                        KEY_MASK, DROPOUT, POSITIONS, PRECISION, WIDTH, BM, BN, PACKED,
                    )  # fmt: skip
    else:
        i_block, i_bh = work_of(tl.program_id(0), blocks, groups, section, SPAN, H, SPANS)
        i_n = i_block
        if (HEADS == EVERY or not is_far(FAR_HEADS, i_bh)) and not is_behind(SPAN, i_bh // H, i_n * BN, PACKED):
            key_block(
                i_n, i_bh, Q, K, V, LW, NARROW_KEYS, VARIANCE, SPAN, SEED, DO, KNOWN, DK, DV_, DLW, PART,
                inverse_variance, threshold, inverse_keep, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sgb, sgh,
                sgn, sdb, sdh, sdm, sdn, seb, seh, sen, H, num_queries, num_keys, padded_queries, padded_keys,
                query_parts, parts, D, DV, BD, BV, M, HARD, NARROW, VARIANCES, CAUSAL, EVEN, SPANS, KEY_MASK, DROPOUT,
                POSITIONS, PRECISION, WIDTH, BM, BN, PACKED,
            )  # fmt: skip
