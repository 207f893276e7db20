"""The key side of the backward pass for projected keys: dk, dv, and the gradients of prior, variance and shift. See
projected.py, and shifted_keys.py for how query heads share a head of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.loads import (
    load_shift,
)
from mgk.ops.triton.mixing import (
    weight_of,
)
from mgk.ops.triton.primitives import (
    COUNTS,
    LOG2E,
    NEVER,
    SUMS,
    dropout,
    edge_tile,
    for_each_block,
    key_origin,
    key_range,
    load_columns,
    load_rows,
    load_tile,
    load_vectors,
    query_tiles,
    reached,
    sequence,
    split_columns,
    store_tile,
    unit_column,
    where_tuple,
    zeros_tuple,
)
from mgk.ops.triton.projected import (
    FOREVER,
    any_component,
    factored_parts,
    inverse_variances,
    summed,
    winner,
)


@triton.jit
def key_step(
    start, state, keys, b_v, log_w, w, inverse, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr
):
    """Add one query tile's share of dk, dv and the key biases, transposed: keys are rows."""
    M: tl.constexpr = C.M
    FACTORED: tl.constexpr = C.NARROW and not C.HARD
    b_dk, b_dv, dw = state
    p_q, p_do, p_row_stats, p_seed = pointers
    i_bh, i_n, offset, num_queries, stride_q, stride_g = place
    _, threshold, inverse_keep = numbers
    o_m, o_n = start + tl.arange(0, C.BM), i_n * C.BN + tl.arange(0, C.BN)
    HIDES: tl.constexpr = MASKED and C.SPANS and not C.PACKED  # some queries are masked
    real = load_columns(p_row_stats, start, C.BM, C.WIDTH)[0] != FOREVER if HIDES else None
    b_q = load_rows(p_q, start, num_queries, stride_q, real, C.BM, C.D, C.BD, MASKED, HIDES)  # [BM, BD]
    CLAMP: tl.constexpr = b_q.dtype == tl.float32 or C.VARIANCES
    b_do = load_rows(p_do, start, num_queries, stride_g, real, C.BM, C.DV, C.BV, MASKED, HIDES)  # [BM, BV]
    slope = tl.dot(b_v, tl.trans(b_do), input_precision=C.PRECISION)  # [BN, BM]
    known = load_columns(p_row_stats, start, C.BM, C.WIDTH)
    lse, delta = known[0], known[1]
    if C.DROPOUT:  # the weights that are kept are divided by their share at the end
        drop = dropout(p_seed, i_bh, start, i_n * C.BN, threshold, 1.0, True, C.BM, C.BN)
        slope = slope * drop * inverse_keep
    slope -= delta[None, :]
    x = ()
    for r in tl.static_range(M):
        if r == 0 or not C.SHARED:
            s = tl.dot(keys[r], tl.trans(b_q), input_precision=C.PRECISION)
        y = s * (inverse[r] * LOG2E)
        if not FACTORED:
            y += log_w[r][:, None]
        if C.VARIANCES:
            y += known[2 + r][None, :]
        if C.CAUSAL and MASKED:
            y = tl.where(reached(o_m, o_n, offset, C.WINDOW, True), y, NEVER)
        x = x + (y,)
    if C.HARD:
        best, won = winner(x, M)
        total = weight_of(best - lse[None, :], CLAMP)
        whole = total * slope
    elif FACTORED:
        parts = factored_parts(x, lse, w, b_q.dtype, True, M)
        total, slope = summed(parts, M), slope.to(b_q.dtype)
    else:
        total = tl.zeros_like(slope)
    dk, db, columns, mixed = (), (), dw[0], tl.zeros_like(slope)
    for r in tl.static_range(M):
        if C.HARD:
            ds = tl.where(won == r, whole, 0.0)
        elif FACTORED:
            ds = parts[r] * slope
        else:
            part = weight_of(x[r] - lse[None, :], CLAMP)
            total += part
            ds = part * slope
        if C.NARROW:
            columns = tl.dot(ds.to(b_q.dtype), unit_column(r, C.BM, b_q.dtype), columns)
        else:
            db = db + (dw[r] + tl.sum(ds, 1),)
        if C.SHARED:
            mixed += ds * inverse[r]
        else:
            dk = dk + (tl.dot(ds.to(b_q.dtype), b_q, b_dk[r], input_precision=C.PRECISION),)
    if C.SHARED:
        dk = (tl.dot(mixed.to(b_q.dtype), b_q, b_dk[0], input_precision=C.PRECISION),)
    if C.NARROW:
        db = (columns,)
    if C.DROPOUT:
        total = total * drop.to(total.dtype)
    b_dv = tl.dot(total.to(b_do.dtype), b_do, b_dv, input_precision=C.PRECISION)
    return dk, b_dv, db


@triton.jit
def key_head(i_n, i_b, i_h, grads, tiles, lengths, tensors, numbers, strides, sizes, C: tl.constexpr):
    """Add what one query head contributes to dk and dv; store its share of dlog_prior, dvariance and dshift.

    Where variances differ within a group, its sum is kept apart until it is complete.
    """
    M: tl.constexpr = C.M
    PARTS: tl.constexpr = 2 + C.D if C.SHARED else 2
    KEYS: tl.constexpr = 1 if C.SHARED else M
    APART: tl.constexpr = C.VARIANCES and C.GROUP > 1 and not C.SHARED
    b_dk, b_dv = grads
    keys, b_v, p_k = tiles
    origin, num_queries, num_keys, last_query, last_key = lengths
    _, SPAN, Q, _, SHIFT, _, LW, FACTORS, VARIANCE, SEED, DO, ROW_STATS, _, _, DLW, PART = tensors
    sqb, sqh, sqn, _, _, skm, skn, _, _, _, sgb, sgh, sgn, _, _, _, _, _, _, _ = strides
    H, _, positions, padded_queries, padded_keys, query_parts, parts = sizes
    i_bh, offset = i_b * H + i_h, num_keys - num_queries
    o_n, o_d = i_n * C.BN + tl.arange(0, C.BN), tl.arange(0, C.BD)
    p_q, p_do = Q + origin * sqb + i_h * sqh, DO + origin * sgb + i_h * sgh
    log_w = load_vectors(LW + i_bh * M * padded_keys, i_n * C.BN, padded_keys, C.BN, M)
    w = log_w
    if C.NARROW and not C.HARD:
        w = load_vectors(FACTORS + i_bh * M * padded_keys, i_n * C.BN, padded_keys, C.BN, M)
    inverse = inverse_variances(VARIANCE, i_h, numbers[0], M, C.VARIANCES)

    begin, visible, whole, stop = query_tiles(
        i_n, i_b, SPAN, offset, last_query, last_key, num_queries, C.CAUSAL, C.SPANS and not C.PACKED, C.BM, C.BN,
        C.WINDOW,
    )  # fmt: skip
    others = b_dk
    if APART:
        b_dk = zeros_tuple([C.BN, C.BD], KEYS)
    dw = zeros_tuple([C.BN, SUMS], 1) if C.NARROW else zeros_tuple([C.BN], M)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(whole >= C.BM)
    pointers = (p_q, p_do, ROW_STATS + i_bh * padded_queries * C.WIDTH, SEED)
    place = (i_bh.to(tl.int32), i_n, offset, num_queries, sqn, sgn)
    for start in range(visible, whole, C.BM):
        b_dk, b_dv, dw = key_step(
            start, (b_dk, b_dv, dw), keys, b_v, log_w, w, inverse, pointers, place, numbers, False, C
        )
    if C.CAUSAL or C.SPANS or not C.EVEN:
        diagonal, tail = tl.cdiv(visible - begin, C.BM), tl.maximum(visible, whole)
        for i in tl.range(0, diagonal + tl.cdiv(tl.maximum(stop - tail, 0), C.BM), num_stages=1):
            start = edge_tile(i, diagonal, begin, tail, C.BM)
            b_dk, b_dv, dw = key_step(
                start, (b_dk, b_dv, dw), keys, b_v, log_w, w, inverse, pointers, place, numbers, True, C
            )
    if C.NARROW:
        dw = split_columns(dw[0], M)
    seen = any_component(log_w, M)
    if C.KEY_MASK or not C.EVEN:  # a hidden key has whatever is in its own rows
        dw = where_tuple(seen, dw, M)

    grad, result = b_dk[0], ()
    for r in tl.static_range(M):
        p_part = PART + ((i_bh * parts + query_parts + i_n) * M + r) * PARTS
        tl.store(p_part, tl.sum(dw[r], 0))
        if r == 0 or not C.SHARED:
            b_k = load_tile(p_k + r * skm, i_n * C.BN, num_keys, skn, C.BN, C.D, C.BD, True, True).to(tl.float32)
            if C.KEY_MASK:
                b_k = tl.where(seen[:, None], b_k, 0.0)
        if C.SHARED:
            b_kr = b_k + load_shift(SHIFT, i_h * M + r, C.D, C.BD)[None, :]  # [BN, BD]
            pull = dw[r][:, None] * b_kr * inverse[r]
            grad -= pull
            tl.store(p_part + 1, tl.sum(tl.sum(pull * b_kr, 1), 0) * 0.5 * inverse[r])
            tl.store(p_part + 2 + o_d, -tl.sum(pull, 0), mask=o_d < C.D)
        else:
            pull = dw[r][:, None] * b_k
            if C.VARIANCES:
                moment = tl.sum(b_k * (0.5 * pull - b_dk[r]), 1)
                if C.KEY_MASK or not C.EVEN:
                    moment = tl.where(seen, moment, 0.0)
                tl.store(p_part + 1, tl.sum(moment, 0) * inverse[r] * inverse[r])
            grad = b_dk[r] - pull
            if C.VARIANCES:
                grad *= inverse[r]
            if APART:
                grad += others[r]
            result = result + (grad,)
        if C.POSITIONS:
            tl.store(DLW + (i_bh * M + r) * positions + o_n, dw[r], mask=o_n < num_keys)
    if C.SHARED:
        result = (grad,)
    return result, b_dv


@triton.jit
def key_block(i_n, i_bg, tensors, numbers, strides, sizes, C: tl.constexpr):
    """dk and dv of one head of keys, summed over the query heads that read it."""
    M: tl.constexpr = C.M
    KEYS: tl.constexpr = 1 if C.SHARED else M
    HEADS: tl.constexpr = C.GROUP
    _, SPAN, _, K, _, V, LW, _, _, _, _, _, DK, GRAD_V, _, _ = tensors
    _, _, _, skb, skh, skm, skn, svb, svh, svn, _, _, _, sdb, sdh, sdm, sdn, seb, seh, sen = strides
    H, num_queries, num_keys, _, padded_keys, _, _ = sizes
    inverse_variance, _, inverse_keep = numbers
    key_heads = H // HEADS
    i_b, i_g = (i_bg // key_heads).to(tl.int64), (i_bg % key_heads).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    seen = tl.zeros([C.BN], tl.int1)
    for i in tl.static_range(HEADS):  # of which some may have lost all components of a key
        p_lw = LW + (i_bg.to(tl.int64) * HEADS + i) * M * padded_keys
        seen = seen | any_component(load_vectors(p_lw, i_n * C.BN, padded_keys, C.BN, M), M)
    p_k, p_v = K + first_key * skb + i_g * skh, V + first_key * svb + i_g * svh
    b_v = load_rows(p_v, i_n * C.BN, num_keys, svn, seen, C.BN, C.DV, C.BV, True, C.KEY_MASK)  # [BN, BV]
    keys = ()
    for r in tl.static_range(KEYS):
        b_k = load_rows(p_k + r * skm, i_n * C.BN, num_keys, skn, seen, C.BN, C.D, C.BD, True, C.KEY_MASK)  # [BN, BD]
        keys = keys + (b_k,)

    b_dk, b_dv = zeros_tuple([C.BN, C.BD], KEYS), tl.zeros([C.BN, C.BV], tl.float32)
    tiles, lengths = (keys, b_v, p_k), (origin, num_queries, num_keys, last_query, last_key)
    if HEADS == 1:
        b_dk, b_dv = key_head(i_n, i_b, i_g, (b_dk, b_dv), tiles, lengths, tensors, numbers, strides, sizes, C)
    else:
        for i in range(HEADS):
            i_h = i_g * HEADS + i
            b_dk, b_dv = key_head(i_n, i_b, i_h, (b_dk, b_dv), tiles, lengths, tensors, numbers, strides, sizes, C)
    if C.KEY_MASK or not C.EVEN:  # a hidden key has whatever is in its own rows
        b_dv, b_dk = tl.where(seen[:, None], b_dv, 0.0), where_tuple(seen[:, None], b_dk, KEYS)
    if C.DROPOUT:
        b_dv *= inverse_keep
    p_dk = DK + first_key * sdb + i_g * sdh
    for r in tl.static_range(KEYS):
        grad = b_dk[r]
        if not C.VARIANCES:
            grad *= inverse_variance
        store_tile(p_dk + r * sdm, grad, i_n * C.BN, num_keys, sdn, C.BN, C.D, C.BD)
    store_tile(GRAD_V + first_key * seb + i_g * seh, b_dv, i_n * C.BN, num_keys, sen, C.BN, C.DV, C.BV)


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    tensors, numbers, strides, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys, query_parts,
    parts, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values, one program for each block of them."""
    sizes = (H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts)
    for_each_block(key_block, tensors, numbers, strides, sizes, BATCHES, section, padded_keys // C.BN, C.BN, False, C)
