"""The key side of the backward pass for shifted keys: dk, dv, and the gradients of shift and prior. See shifted.py.

A program sums over the query heads that read its head of keys, so that nothing is copied for them and nothing is added
up in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.mixing import (
    best_bid,
    cast_tuple,
    exponents,
    lead_over_second,
    mixed,
    only_shown,
    second_share,
    weight,
    weight_of,
)
from mgk.ops.triton.primitives import (
    COLUMNS,
    COUNTS,
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
    load_vector,
    load_vectors,
    multiply,
    multiply_add,
    query_tiles,
    sequence,
    shown_pairs,
    split_columns,
    store_tile,
    unit_column,
    where_tuple,
    zeros_tuple,
)
from mgk.ops.triton.shifted import (
    FAST,
    FAST_HARD,
    FOREVER,
    HARD,
    is_fast,
    is_hard,
)


@triton.jit
def key_step(start, state, b_k, b_v, w, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr):
    """Add one query tile's share of dk, dv and dlog_w (on the FAST path without its w), transposed: keys are rows.

    `w`: the w (FAST_HARD: and the gap); other paths: the log_w. `dw` has a vector per
    component, or with narrow mixing is one block of columns.
    """
    M: tl.constexpr = C.M
    b_dk, b_dv, dw = state
    p_q, p_do, p_rows, p_row_stats, p_columns, p_seed = pointers
    i_bh, i_n, offset, num_queries, padded_queries, stride_q, stride_g = place
    scale, threshold, inverse_keep, _ = numbers
    o_m, o_n = start + tl.arange(0, C.BM), i_n * C.BN + tl.arange(0, C.BN)
    HIDES: tl.constexpr = MASKED and C.SPANS and not C.PACKED  # some queries are masked
    CHECKS: tl.constexpr = HIDES or (MASKED and C.CAUSAL)
    real, shown = load_columns(p_row_stats, start, C.BM, C.WIDTH)[0] != FOREVER if HIDES else None, None
    b_q = load_rows(p_q, start, num_queries, stride_q, real, C.BM, C.D, C.BD, MASKED, HIDES)  # [BM, BD]
    b_do = load_rows(p_do, start, num_queries, stride_g, real, C.BM, C.DV, C.BV, MASKED, HIDES)  # [BM, BV]
    s = tl.dot(b_k, tl.trans(b_q), input_precision=C.PRECISION)  # [BN, BM]
    if CHECKS:
        shown = shown_pairs(o_m, o_n, offset, real, C.CAUSAL, HIDES, C.WINDOW, True)
        if is_fast(C.PATH):
            s = tl.where(shown, s, NEVER)
    slope = tl.dot(b_v, tl.trans(b_do), input_precision=C.PRECISION)  # [BN, BM]
    known = load_columns(p_row_stats, start, C.BM, C.WIDTH)
    lse, delta, rows = known[0], known[1], ()
    for r in tl.static_range(M):
        rows = rows + (known[1 + r],)  # the first are all 1, or 0, and not asked for
    drop = 1.0
    if C.DROPOUT:
        drop = dropout(p_seed, i_bh, start, i_n * C.BN, threshold, inverse_keep, True, C.BM, C.BN)
        slope *= drop
    slope -= delta[None, :]
    new = ()
    if is_fast(C.PATH):
        e = tl.exp2(s * scale - lse[None, :])
        g = e * slope
        if C.PATH == FAST_HARD:
            e, g = (e * drop).to(b_q.dtype), g.to(b_q.dtype)
            mix = mixed(cast_tuple(rows, b_q.dtype, M), cast_tuple(w, b_q.dtype, M), True, M, True)
            p, ds = multiply(e, mix), multiply(g, mix)
            sums = tl.dot(ds, unit_column(0, C.BM, b_q.dtype), dw[0])
            new = (second_share(ds, sums, known[3].to(tl.float16), w[2], True),)
        elif C.NARROW:
            e, g = (e * drop).to(b_q.dtype), g.to(b_q.dtype)
            b_r = load_tile(p_columns, start, padded_queries, COLUMNS, C.BM, COLUMNS, COLUMNS, False)  # [BM, COLUMNS]
            new = new + (tl.dot(g, b_r, dw[0]),)
            mix = tl.broadcast_to(w[0].to(b_q.dtype)[:, None], s.shape)
            for r in tl.static_range(1, M):
                column, row = w[r].to(b_q.dtype)[:, None], rows[r].to(b_q.dtype)[None, :]
                mix = multiply_add(tl.broadcast_to(column, s.shape), tl.broadcast_to(row, s.shape), mix)
            p, ds = multiply(e, mix), multiply(g, mix)
        else:
            new = new + (dw[0] + tl.sum(g, 1),)
            for r in tl.static_range(1, M):
                new = new + (dw[r] + tl.sum(g * rows[r][None, :], 1),)
            mix = mixed(rows, w, True, M)
            p, ds = e * mix, g * mix
    elif C.PATH == HARD:
        best, won = best_bid(slope, rows, w, True, M)
        x = only_shown(s * scale + best, shown, CHECKS)
        p = weight_of(x - lse[None, :], b_k.dtype == tl.float32)
        ds = p * slope
        if C.NARROW:
            new = new + (tl.dot(ds.to(b_q.dtype), unit_column(0, C.BM, b_q.dtype), dw[0]),)
        else:
            new = new + (dw[0] + tl.sum(ds, 1),)
        for r in tl.static_range(1, M):
            share = tl.where(won == r, ds, 0.0)
            if C.NARROW:
                new = (tl.dot(share.to(b_q.dtype), unit_column(r, C.BM, b_q.dtype), new[0]),)
            else:
                new = new + (dw[r] + tl.sum(share, 1),)
    else:
        log_u = load_vectors(p_rows + (1 + M) * padded_queries, start, padded_queries, C.BM, M)
        p, ds = tl.zeros_like(s), tl.zeros_like(s)
        x = exponents(s, scale, log_u, w, shown, True, CHECKS, M)
        for r in tl.static_range(M):
            part = weight(x[r] - lse[None, :])
            p += part
            part *= slope
            ds += part
            new = new + (dw[r] + tl.sum(part, 1),)
    if C.DROPOUT and not (C.NARROW and C.PATH != HARD):
        p *= drop
    b_dv = tl.dot(p.to(b_do.dtype), b_do, b_dv, input_precision=C.PRECISION)
    b_dk = tl.dot(ds.to(b_q.dtype), b_q, b_dk, input_precision=C.PRECISION)
    return b_dk, b_dv, new


@triton.jit
def key_head(i_n, i_b, i_h, grads, tiles, lengths, tensors, numbers, strides, sizes, C: tl.constexpr):
    """Add what one query head contributes to dk and dv; store the block's share of its dshift and dlog_prior."""
    M: tl.constexpr = C.M
    b_dk, b_dv = grads
    b_k, b_v, p_k = tiles
    origin, num_queries, num_keys, last_query, last_key = lengths
    _, SPAN, Q, _, SHIFT, _, KEYS, ROWS, ROW_COLUMNS, SEED, DO, ROW_STATS, _, _, DLW, PART = tensors
    sqb, sqh, sqn, _, _, skn, _, _, _, sgb, sgh, sgn, _, _, _, _, _, _ = strides
    H, _, positions, padded_queries, padded_keys, query_parts, parts = sizes
    inverse_variance, offset = numbers[3], num_keys - num_queries
    i_bh = i_b * H + i_h
    o_n, o_d = i_n * C.BN + tl.arange(0, C.BN), tl.arange(0, C.BD)
    p_q, p_do = Q + origin * sqb + i_h * sqh, DO + origin * sgb + i_h * sgh
    p_row_stats = ROW_STATS + i_bh * C.WIDTH * padded_queries
    p_keys = KEYS + i_bh * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_bh * (1 + 2 * M) * padded_queries
    w = load_vectors(p_keys + (1 if is_fast(C.PATH) else 1 + M) * padded_keys, i_n * C.BN, padded_keys, C.BN, M)
    if C.PATH == FAST_HARD:
        w += (lead_over_second(load_vectors(p_keys + (1 + M) * padded_keys, i_n * C.BN, padded_keys, C.BN, M)),)

    begin, visible, whole, stop = query_tiles(
        i_n, i_b, SPAN, offset, last_query, last_key, num_queries, C.CAUSAL, C.SPANS and not C.PACKED, C.BM, C.BN,
        C.WINDOW,
    )  # fmt: skip
    p_columns = ROW_COLUMNS
    if C.NARROW and C.PATH == FAST:
        p_columns += i_bh * COLUMNS * padded_queries
    if C.NARROW:
        dw = zeros_tuple([C.BN, COLUMNS if C.PATH == FAST else SUMS], 1)
    else:
        dw = zeros_tuple([C.BN], M)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(whole >= C.BM)
    pointers = (p_q, p_do, p_rows, p_row_stats, p_columns, SEED)
    place = (i_bh.to(tl.int32), i_n, offset, num_queries, padded_queries, sqn, sgn)
    for start in range(visible, whole, C.BM):
        b_dk, b_dv, dw = key_step(start, (b_dk, b_dv, dw), b_k, b_v, w, pointers, place, numbers, False, C)
    if C.CAUSAL or C.SPANS or not C.EVEN:
        diagonal, tail = tl.cdiv(visible - begin, C.BM), tl.maximum(visible, whole)
        for i in tl.range(0, diagonal + tl.cdiv(tl.maximum(stop - tail, 0), C.BM), num_stages=1):
            start = edge_tile(i, diagonal, begin, tail, C.BM)
            b_dk, b_dv, dw = key_step(start, (b_dk, b_dv, dw), b_k, b_v, w, pointers, place, numbers, True, C)
    if C.NARROW:
        dw = split_columns(dw[0], M)
    dlog_w = ()
    if is_hard(C.PATH):  # the first component has what the others leave of the whole
        rest = dw[0]
        for r in tl.static_range(1, M):
            rest -= dw[r]
        dlog_w = dlog_w + (rest,)
        for r in tl.static_range(1, M):
            dlog_w = dlog_w + (dw[r],)
    else:
        for r in tl.static_range(M):
            dlog_w = dlog_w + (dw[r] * w[r] if C.PATH == FAST else dw[r],)
    b_k = load_tile(p_k, i_n * C.BN, num_keys, skn, C.BN, C.D, C.BD, True, True)
    if C.KEY_MASK or not C.EVEN:  # a hidden key has whatever is in its own rows
        seen = load_vector(p_keys, i_n * C.BN, C.BN) == 0
        b_k, dlog_w = tl.where(seen[:, None], b_k, 0.0), where_tuple(seen, dlog_w, M)

    p_part = PART + (i_bh * parts + query_parts + i_n) * M * (C.BD + 1)
    for r in tl.static_range(M):
        b_b = tl.load(SHIFT + (i_h * M + r) * C.D + o_d, mask=o_d < C.D, other=0.0).to(tl.float32)
        pull = dlog_w[r][:, None] * (b_k.to(tl.float32) + b_b[None, :])
        b_dk -= pull
        tl.store(p_part + r * (C.BD + 1) + o_d, -tl.sum(pull, 0) * inverse_variance)
        tl.store(p_part + r * (C.BD + 1) + C.BD, tl.sum(dlog_w[r], 0))
        if C.POSITIONS:
            tl.store(DLW + (i_bh * M + r) * positions + o_n, dlog_w[r], mask=o_n < num_keys)
    return b_dk, b_dv


@triton.jit
def key_block(i_n, i_bg, tensors, numbers, strides, sizes, C: tl.constexpr):
    """dk and dv of one head of keys, summed over the query heads that read it."""
    _, SPAN, _, K, _, V, KEYS, _, _, _, _, _, DK, GRAD_V, _, _ = tensors
    _, _, _, skb, skh, skn, svb, svh, svn, _, _, _, sdb, sdh, sdn, seb, seh, sen = strides
    H, num_queries, num_keys, _, padded_keys, _, _ = sizes
    HEADS: tl.constexpr = C.GROUP
    key_heads = H // HEADS
    i_b, i_g = (i_bg // key_heads).to(tl.int64), (i_bg % key_heads).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    p_seen = KEYS + i_bg.to(tl.int64) * HEADS * (1 + 2 * C.M) * padded_keys  # the same in all heads of the group
    seen, p_k = load_vector(p_seen, i_n * C.BN, C.BN) == 0, K + first_key * skb + i_g * skh
    b_k = load_rows(p_k, i_n * C.BN, num_keys, skn, seen, C.BN, C.D, C.BD, True, C.KEY_MASK)  # [BN, BD]
    p_v = V + first_key * svb + i_g * svh
    b_v = load_rows(p_v, i_n * C.BN, num_keys, svn, seen, C.BN, C.DV, C.BV, True, C.KEY_MASK)  # [BN, BV]

    b_dk, b_dv = tl.zeros([C.BN, C.BD], tl.float32), tl.zeros([C.BN, C.BV], tl.float32)
    tiles, lengths = (b_k, b_v, p_k), (origin, num_queries, num_keys, last_query, last_key)
    if HEADS == 1:
        b_dk, b_dv = key_head(i_n, i_b, i_g, (b_dk, b_dv), tiles, lengths, tensors, numbers, strides, sizes, C)
    else:
        for i in range(HEADS):
            i_h = i_g * HEADS + i
            b_dk, b_dv = key_head(i_n, i_b, i_h, (b_dk, b_dv), tiles, lengths, tensors, numbers, strides, sizes, C)
    if C.KEY_MASK or not C.EVEN:
        seen = load_vector(p_seen, i_n * C.BN, C.BN) == 0
        b_dk, b_dv = tl.where(seen[:, None], b_dk, 0.0), tl.where(seen[:, None], b_dv, 0.0)
    p_dk = DK + first_key * sdb + i_g * sdh
    store_tile(p_dk, b_dk * numbers[3], i_n * C.BN, num_keys, sdn, C.BN, C.D, C.BD)
    store_tile(GRAD_V + first_key * seb + i_g * seh, b_dv, i_n * C.BN, num_keys, sen, C.BN, C.DV, C.BV)


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    tensors, numbers, strides, BATCHES, section, H, num_queries, num_keys, padded_queries, padded_keys, query_parts,
    parts, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values, one program for each block of them."""
    sizes = (H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts)
    for_each_block(key_block, tensors, numbers, strides, sizes, BATCHES, section, padded_keys // C.BN, C.BN, False, C)
