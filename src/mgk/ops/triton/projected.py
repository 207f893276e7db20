"""Generic kernels for projected keys, l[i,j,r] = q_i.k_jr/s2_r + row_bias[i,r] + key_bias[j,r].

M score products, and one product with the values.

The key bias log prior - |k_jr|^2/(2 s2_r) comes from bias.py. With one variance the row bias is the same for all
components and cancels; with a variance per component (VARIANCES) it is -|q_i|^2/(2 s2_r), computed here.

SHARED: shifted keys k_j + b_r with a variance per component. q_i.k_j is one score product for all components, the row
bias is -(|q_i|^2/2 - q_i.b_r)/s2_r, and dq and dk are one product each. The gradient of a variance needs the sums of
dl times q_i.k_j over each row.

FIXED row maximum: no component's log-weight exceeds its prior, so |q_i|^2/2s2 (0 with the row biases) bounds a row
before any key is seen; see shifted.py. A head with a row that this does not fit is left to a second launch.

NARROW (bfloat16): the key bias is a factor w_r[j], multiplied in bfloat16, two at a time, and the sums over a row or
column of a tile are a matrix product with a few more columns. Heads whose w would overflow go to the second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.loads import load_shift
from mgk.ops.triton.mixing import weight_of
from mgk.ops.triton.primitives import (
    COUNTS,
    LOG2E,
    NEVER,
    SUMS,
    dropout,
    edge_tile,
    flag_bad_sums,
    for_each_block,
    key_origin,
    key_range,
    key_tiles,
    load_rows,
    load_tile,
    load_vector,
    load_vectors,
    online_softmax,
    sees_a_key,
    sequence,
    shown_pairs,
    spread_infinities,
    store_tile,
    unit_column,
    where_tuple,
    window_tiles,
    zeros_tuple,
)

FOREVER = tl.constexpr(float("inf"))


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
def half_norms(b_q, SHIFT, i_h, C: tl.constexpr):
    """|q|^2/2, less q.b_r of shifted keys.  # M x [BM]"""
    M: tl.constexpr = C.M
    result, b_q = (), b_q.to(tl.float32)
    norm = tl.sum(b_q * b_q, 1) * 0.5
    for r in tl.static_range(M):
        half = norm
        if C.SHARED:
            half = norm - tl.sum(b_q * load_shift(SHIFT, i_h * M + r, C.D, C.BD)[None, :], 1)
        result = result + (half,)
    return result


@triton.jit
def row_biases(b_q, SHIFT, i_h, inverse, C: tl.constexpr):
    """In base 2; they are not used where they cancel.  # M x [BM]"""
    M: tl.constexpr = C.M
    half, result = half_norms(b_q, SHIFT, i_h, C), ()
    for r in tl.static_range(M):
        result = result + (half[r] * (-LOG2E * inverse[r]),)
    return result


@triton.jit
def any_component(log_w, M: tl.constexpr):
    """Which keys are visible: they have a component left."""
    visible = log_w[0] != NEVER
    for r in tl.static_range(1, M):
        visible = visible | (log_w[r] != NEVER)
    return visible


@triton.jit
def tile_scores(start, b_q, row, inverse, pointers, place, MASKED: tl.constexpr, C: tl.constexpr):
    """l in base 2 (FACTORED: less its key bias), -inf where hidden; the keys; the last product; the visible keys.

    M x [BM, BN], M x [BN, BD] (SHARED: one), [BM, BN], [BN]
    """
    M: tl.constexpr = C.M
    FACTORED: tl.constexpr = C.NARROW and not C.HARD
    p_k, _, p_lw, _, _ = pointers
    _, i_m, offset, num_keys, padded_keys, stride_km, stride_k, _ = place
    o_m, o_n = i_m * C.BM + tl.arange(0, C.BM), start + tl.arange(0, C.BN)
    visible = o_n < num_keys
    CHECKS: tl.constexpr = MASKED and (C.KEY_MASK or not C.EVEN)
    if CHECKS or not FACTORED:
        log_w = load_vectors(p_lw, start, padded_keys, C.BN, M)
    if CHECKS:
        visible = any_component(log_w, M)
    shown = shown_pairs(o_m, o_n, offset, visible, C.CAUSAL, CHECKS, C.WINDOW) if MASKED else None
    result, keys = (), ()
    for r in tl.static_range(M):
        if r == 0 or not C.SHARED:
            b_k = load_rows(
                p_k + r * stride_km, start, num_keys, stride_k, visible, C.BN, C.D, C.BD, MASKED, MASKED and C.KEY_MASK
            )  # [BN, BD]
            s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
            keys = keys + (b_k,)
        x = s * (inverse[r] * LOG2E)
        if not FACTORED:
            x += log_w[r][None, :]
        if C.VARIANCES:
            x += row[r][:, None]
        if MASKED:
            x = tl.where(shown, x, NEVER)
        result = result + (x,)
    return result, keys, s, visible


@triton.jit
def factored_parts(x, m, w, dtype: tl.constexpr, KEYS_DOWN: tl.constexpr, M: tl.constexpr):
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
def forward_step(start, state, b_q, row, inverse, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr):
    M: tl.constexpr = C.M
    FACTORED: tl.constexpr = C.NARROW and not C.HARD
    acc, m, l = state
    _, p_v, _, p_w, p_seed = pointers
    i_bh, i_m, _, num_keys, padded_keys, _, _, stride_v = place
    x, _, _, visible = tile_scores(start, b_q, row, inverse, pointers, place, MASKED, C)
    if FACTORED:
        p = summed(factored_parts(x, m, load_vectors(p_w, start, padded_keys, C.BN, M), b_q.dtype, False, M), M)
    else:
        largest = x[0]
        for r in tl.static_range(1, M):
            largest = tl.maximum(largest, x[r])
        m_safe = m
        if not C.FIXED:
            m, m_safe, alpha = online_softmax(tl.max(largest, 1), m)
            l, acc = l * alpha, acc * alpha[:, None]
        if C.HARD:
            p = tl.exp2(largest - m_safe[:, None])
        else:
            p = tl.exp2(x[0] - m_safe[:, None])
            for r in tl.static_range(1, M):
                p += tl.exp2(x[r] - m_safe[:, None])
    if C.NARROW:
        p = p.to(b_q.dtype)
        l = tl.dot(p, unit_column(0, C.BN, b_q.dtype), l)
    else:
        l += tl.sum(p, 1)
    if C.DROPOUT:  # what is kept is divided by its share at the end
        p = p * dropout(p_seed, i_bh, i_m * C.BM, start, numbers[1], 1.0, False, C.BM, C.BN).to(p.dtype)
    b_v = load_rows(
        p_v, start, num_keys, stride_v, visible, C.BN, C.DV, C.BV, MASKED, MASKED and C.KEY_MASK
    )  # [BN, BV]
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=C.PRECISION)
    return acc, m, l


@triton.jit
def forward_block(i_m, i_bh, tensors, numbers, strides, sizes, C: tl.constexpr):
    M: tl.constexpr = C.M
    OVERFLOW, SPAN, Q, K, SHIFT, V, LW, FACTORS, VARIANCE, OUT, LSE, QUERY_MASK, SEED = tensors
    sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son = strides
    H, num_queries, num_keys, padded_queries, padded_keys = sizes
    inverse_variance, _, inverse_keep = numbers
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    o_m = i_m * C.BM + tl.arange(0, C.BM)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    p_k, p_v = K + first_key * skb + i_h // C.GROUP * skh, V + first_key * svb + i_h // C.GROUP * svh
    p_lw, p_row = LW + i_bh.to(tl.int64) * M * padded_keys, i_bh.to(tl.int64) * padded_queries
    p_w = FACTORS
    if C.NARROW and not C.HARD:
        p_w += i_bh.to(tl.int64) * M * padded_keys
    b_q = load_tile(Q + origin * sqb + i_h * sqh, i_m * C.BM, num_queries, sqn, C.BM, C.D, C.BD, True)  # [BM, BD]
    if not C.FIXED:
        b_q = spread_infinities(b_q)
    inverse = inverse_variances(VARIANCE, i_h, inverse_variance, M, C.VARIANCES)
    row = row_biases(b_q, SHIFT, i_h, inverse, C)

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, C.CAUSAL, C.KEY_MASK, C.BM, C.BN)
    begin, inner = 0, 0
    if C.WINDOW:
        begin, inner = window_tiles(i_m, offset, stop, C.WINDOW, C.BM, C.BN)
    if C.FIXED and C.VARIANCES:
        m = tl.zeros([C.BM], tl.float32)
    elif C.FIXED:
        m = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) * (0.5 * LOG2E * inverse_variance)
    else:
        m = tl.full([C.BM], NEVER, tl.float32)
    l, acc = tl.zeros([C.BM, SUMS] if C.NARROW else [C.BM], tl.float32), tl.zeros([C.BM, C.BV], tl.float32)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(full >= C.BN)
    pointers = (p_k, p_v, p_lw, p_w, SEED)
    place = (i_bh, i_m, offset, num_keys, padded_keys, skm, skn, svn)
    for start in range(inner, full, C.BN):
        acc, m, l = forward_step(start, (acc, m, l), b_q, row, inverse, pointers, place, numbers, False, C)
    if C.WINDOW:
        first, tail = (inner - begin) // C.BN, tl.maximum(inner, full)
        for i in tl.range(0, first + tl.cdiv(tl.maximum(stop - tail, 0), C.BN), num_stages=1):
            start = edge_tile(i, first, begin, tail, C.BN)
            acc, m, l = forward_step(start, (acc, m, l), b_q, row, inverse, pointers, place, numbers, True, C)
    elif C.CAUSAL or C.KEY_MASK or not C.EVEN:
        for start in tl.range(full, stop, C.BN, num_stages=1):
            acc, m, l = forward_step(start, (acc, m, l), b_q, row, inverse, pointers, place, numbers, True, C)
    if C.NARROW:
        l = tl.sum(l, 1)
    if C.DROPOUT:
        acc *= inverse_keep
    takes_part = o_m < num_queries
    if C.MASK_QUERIES:
        takes_part = takes_part & (tl.load(QUERY_MASK + i_b * num_queries + o_m, mask=o_m < num_queries, other=0) != 0)
    if C.FIXED:
        sees = takes_part & sees_a_key(SPAN, i_b, o_m, offset, num_keys, C.CAUSAL, C.SPANS, C.WINDOW)
        flag_bad_sums(OVERFLOW, i_bh // C.GROUP, l, sees)
    takes_part = takes_part & (l != 0)  # NaN does: it must be seen
    out = tl.where(takes_part[:, None], acc / tl.where(l == 0, 1.0, l)[:, None], 0.0)
    store_tile(OUT + origin * sob + i_h * soh, out, i_m * C.BM, num_queries, son, C.BM, C.DV, C.BV)
    tl.store(LSE + p_row + o_m, tl.where(takes_part, m + tl.log2(l), FOREVER))


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    tensors, numbers, strides, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys,
    C: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, one program for each block of queries."""
    sizes = (H, num_queries, num_keys, padded_queries, padded_keys)
    for_each_block(
        forward_block, tensors, numbers, strides, sizes, BATCHES, section, padded_queries // C.BM, C.BM, True, C
    )


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
    start, state, b_q, b_do, row, inverse, lse, delta, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr
):
    """Add one key tile's share of dq (times s2, with one variance), of the row biases and (SHARED) of dl times q.k."""
    M: tl.constexpr = C.M
    FACTORED: tl.constexpr = C.NARROW and not C.HARD
    CLAMP: tl.constexpr = b_q.dtype == tl.float32 or C.VARIANCES
    b_dq, drow, moment = state
    _, p_v, _, p_w, p_seed = pointers
    i_bh, i_m, _, num_keys, padded_keys, _, _, stride_v = place
    _, threshold, inverse_keep = numbers
    x, keys, s, visible = tile_scores(start, b_q, row, inverse, pointers, place, MASKED, C)
    b_v = load_rows(
        p_v, start, num_keys, stride_v, visible, C.BN, C.DV, C.BV, MASKED, MASKED and C.KEY_MASK
    )  # [BN, BV]
    slope = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)  # [BM, BN]
    if C.DROPOUT:
        slope *= dropout(p_seed, i_bh, i_m * C.BM, start, threshold, inverse_keep, False, C.BM, C.BN)
    slope -= delta[:, None]
    new, moments, total = (), (), tl.zeros_like(slope)
    if FACTORED:
        parts = factored_parts(x, lse, load_vectors(p_w, start, padded_keys, C.BN, M), b_q.dtype, False, M)
        slope = slope.to(b_q.dtype)
    if C.HARD:
        best, won = winner(x, M)
        whole = weight_of(best - lse[:, None], CLAMP) * slope
    for r in tl.static_range(M):
        if C.HARD:
            ds = tl.where(won == r, whole, 0.0)
        elif FACTORED:
            ds = parts[r] * slope
        else:
            ds = weight_of(x[r] - lse[:, None], CLAMP) * slope
        if C.SHARED:
            moments = moments + (moment[r] + tl.sum(ds * s, 1),)
        else:
            moments = moments + (moment[r],)
        if C.VARIANCES:
            new = new + (drow[r] + tl.sum(ds, 1),)
            ds *= inverse[r]
        else:
            new = new + (drow[r],)
        if C.SHARED:
            total += ds
        else:
            b_dq = tl.dot(ds.to(b_q.dtype), keys[r], b_dq, input_precision=C.PRECISION)
    if C.SHARED:
        b_dq = tl.dot(total.to(b_q.dtype), keys[0], b_dq, input_precision=C.PRECISION)
    return b_dq, new, moments


@triton.jit
def query_block(i_m, i_bh, tensors, numbers, strides, sizes, C: tl.constexpr):
    """dq, delta, and the block's share of dvariance and dshift."""
    M: tl.constexpr = C.M
    PARTS: tl.constexpr = 2 + C.D if C.SHARED else 2
    _, SPAN, Q, K, SHIFT, V, LW, FACTORS, VARIANCE, OUT, LSE, SEED, DO, GRAD_LSE, ROW_STATS, DQ, PART = tensors
    sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sdb, sdh, sdn = strides
    H, num_queries, num_keys, padded_queries, padded_keys, _, parts = sizes
    inverse_variance, _, _ = numbers  # as in the other passes, so that the interpreter rounds alike
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    o_m = i_m * C.BM + tl.arange(0, C.BM)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    p_k, p_v = K + first_key * skb + i_h // C.GROUP * skh, V + first_key * svb + i_h // C.GROUP * svh
    p_lw, p_row = LW + i_bh.to(tl.int64) * M * padded_keys, i_bh.to(tl.int64) * padded_queries
    p_w = FACTORS
    if C.NARROW and not C.HARD:
        p_w += i_bh.to(tl.int64) * M * padded_keys
    lse, p_row_stats = load_vector(LSE + p_row, i_m * C.BM, C.BM), ROW_STATS + (p_row + o_m) * C.WIDTH
    MASKS: tl.constexpr = C.SPANS and not C.PACKED
    real = lse != FOREVER  # sees a key and is not masked
    p_q, p_do = Q + origin * sqb + i_h * sqh, DO + origin * sgb + i_h * sgh
    b_q = load_rows(p_q, i_m * C.BM, num_queries, sqn, real, C.BM, C.D, C.BD, True, MASKS)  # [BM, BD]
    b_do = load_rows(p_do, i_m * C.BM, num_queries, sgn, real, C.BM, C.DV, C.BV, True, MASKS)  # [BM, BV]
    b_o = load_tile(OUT + origin * sob + i_h * soh, i_m * C.BM, num_queries, son, C.BM, C.DV, C.BV, True)  # [BM, BV]
    delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    if C.LSE:
        delta -= load_vector(GRAD_LSE + p_row, i_m * C.BM, C.BM)
    tl.store(p_row_stats, lse)
    tl.store(p_row_stats + 1, delta)
    inverse = inverse_variances(VARIANCE, i_h, inverse_variance, M, C.VARIANCES)
    row = row_biases(b_q, SHIFT, i_h, inverse, C)
    if C.VARIANCES:
        for r in tl.static_range(M):
            tl.store(p_row_stats + 2 + r, row[r])

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, C.CAUSAL, C.KEY_MASK, C.BM, C.BN)
    begin, inner = 0, 0
    if C.WINDOW:
        begin, inner = window_tiles(i_m, offset, stop, C.WINDOW, C.BM, C.BN)
    b_dq, drow = tl.zeros([C.BM, C.BD], tl.float32), zeros_tuple([C.BM], M)
    moment = zeros_tuple([C.BM], M)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(full >= C.BN)
    pointers = (p_k, p_v, p_lw, p_w, SEED)
    place = (i_bh, i_m, offset, num_keys, padded_keys, skm, skn, svn)
    for start in range(inner, full, C.BN):
        b_dq, drow, moment = query_step(
            start, (b_dq, drow, moment), b_q, b_do, row, inverse, lse, delta, pointers, place, numbers, False, C
        )
    if C.WINDOW:
        first, tail = (inner - begin) // C.BN, tl.maximum(inner, full)
        for i in tl.range(0, first + tl.cdiv(tl.maximum(stop - tail, 0), C.BN), num_stages=1):
            start = edge_tile(i, first, begin, tail, C.BN)
            b_dq, drow, moment = query_step(
                start, (b_dq, drow, moment), b_q, b_do, row, inverse, lse, delta, pointers, place, numbers, True, C
            )
    elif C.CAUSAL or C.KEY_MASK or not C.EVEN:
        for start in tl.range(full, stop, C.BN, num_stages=1):
            b_dq, drow, moment = query_step(
                start, (b_dq, drow, moment), b_q, b_do, row, inverse, lse, delta, pointers, place, numbers, True, C
            )
    if MASKS:
        real = load_vector(LSE + p_row, i_m * C.BM, C.BM) != FOREVER
        drow, moment = where_tuple(real, drow, M), where_tuple(real, moment, M)
    if C.VARIANCES:
        o_d, half = tl.arange(0, C.BD), half_norms(b_q, SHIFT, i_h, C)
        p_part = PART + (i_bh.to(tl.int64) * parts + i_m) * M * PARTS
        for r in tl.static_range(M):
            pull, share = (drow[r] * inverse[r])[:, None] * b_q.to(tl.float32), drow[r] * half[r]
            b_dq -= pull
            if C.SHARED:
                share -= moment[r]
                b_dq += (drow[r] * inverse[r])[:, None] * load_shift(SHIFT, i_h * M + r, C.D, C.BD)[None, :]
                tl.store(p_part + r * PARTS + 2 + o_d, tl.sum(pull, 0), mask=o_d < C.D)
            tl.store(p_part + r * PARTS, 0.0)
            tl.store(p_part + r * PARTS + 1, tl.sum(share, 0) * inverse[r] * inverse[r])
    else:
        b_dq *= inverse_variance
    if MASKS:  # after the shift was added, which may be infinite
        b_dq = tl.where(real[:, None], b_dq, 0.0)
    store_tile(DQ + origin * sdb + i_h * sdh, b_dq, i_m * C.BM, num_queries, sdn, C.BM, C.D, C.BD)


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    tensors, numbers, strides, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys, query_parts,
    parts, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, one program for each block of them."""
    sizes = (H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts)
    for_each_block(
        query_block, tensors, numbers, strides, sizes, BATCHES, section, padded_queries // C.BM, C.BM, True, C
    )
