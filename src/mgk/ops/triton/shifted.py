"""Generic kernels for shifted keys, l[i,j,r] = q_i.k_j/s2 + log_u[i,r] + log_w[j,r], logarithms to the base 2.

FAST path: 2^l = 2^(q.k/s2) * (w_0[j] + sum_r rho_r[i] w_r[j]) * 2^log_u_0[i]: one matrix product and one exponential
per pair, a multiply-add per further component, and one multiplication. It holds the numbers of ordinary networks. A
kernel of bias.py measures the range of each head; the programs of a head that would overflow end at once, and a second
launch computes that head on the FALLBACK path: one product, and one exponential per component, right for all numbers.
Hard E-step: max_r(log_u + log_w) = log_u[i,0] + max(log_w[j,0], log_w[j,r] + lead[i,r]).

FIXED row maximum: no component's log-weight exceeds its prior, so |q_i|^2/2s2 - log_u_0[i] bounds a row before any key
is seen. Subtracting it needs no running maximum and no rescaling. A row so far from all keys that its sum comes near
underflow is detected at the end, and the head is left to the second launch. float16 has too few exponents for this and
keeps the running maximum.

NARROW mixing (bfloat16): the mixing factors are multiplied in bfloat16, two at a time, and the sums over a row or
column of a tile are a matrix product with a few more columns. The hard E-step then has a fast path too (FAST_HARD;
backward for two components): the largest term in place of the sum.

KEYS (G, 1+2M, Nk'): 0 or -inf where hidden, the w, the log_w. ROWS (G, 1+2M, Nq'): the bound, later the log-sum-exp
(+inf where a query sees no key; less log_u_0, except on the FALLBACK path), the rho (hard: the leads), the log_u. Both
are padded to whole tiles. They are computed beforehand: each warp holds these vectors, so that a loop would compute
them 32 times. docs/math.md derives all of it; docs/kernels.md says what limits it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops import dispatch
from mgk.ops.triton.mixing import (
    best_bid,
    bid,
    cast_tuple,
    exp2_tuple,
    exponents,
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
    split_columns,
    spread_infinities,
    store_tile,
    unit_column,
    where_tuple,
    window_tiles,
    zeros_tuple,
)

FAST, FALLBACK = tl.constexpr(dispatch.FAST), tl.constexpr(dispatch.FALLBACK)
HARD, FAST_HARD = tl.constexpr(dispatch.HARD), tl.constexpr(dispatch.FAST_HARD)
FOREVER = tl.constexpr(float("inf"))


@triton.constexpr_function
def is_fast(path):
    return path in (FAST, FAST_HARD)


@triton.constexpr_function
def is_hard(path):
    return path in (HARD, FAST_HARD)


@triton.jit
def forward_step(start, state, b_q, rows, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr):
    """Add one key tile to the running sums. `rows`: the rho; FALLBACK: the log_u; HARD: the leads."""
    M: tl.constexpr = C.M
    acc, m, l = state
    p_k, p_v, p_keys, p_narrow, p_seed = pointers
    i_bh, i_m, offset, num_keys, padded_keys, stride_k, stride_v = place
    scale, threshold, _, _ = numbers
    o_m, o_n = i_m * C.BM + tl.arange(0, C.BM), start + tl.arange(0, C.BN)
    HIDES: tl.constexpr = MASKED and C.KEY_MASK
    visible = load_vector(p_keys, start, C.BN) == 0 if MASKED else None
    shown = None
    if MASKED:
        shown = shown_pairs(o_m, o_n, offset, visible, C.CAUSAL, C.KEY_MASK or not C.EVEN, C.WINDOW)
    b_k = load_rows(p_k, start, num_keys, stride_k, visible, C.BN, C.D, C.BD, MASKED, HIDES)  # [BN, BD]
    s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)  # [BM, BN]
    if MASKED and is_fast(C.PATH):
        s = tl.where(shown, s, NEVER)
    if is_fast(C.PATH):
        m_safe = m
        if not C.FIXED:
            m, m_safe, alpha = online_softmax(tl.max(s, 1) * scale, m)
        p = tl.exp2(s * scale - m_safe[:, None])
        if C.NARROW:
            p, w = p.to(b_k.dtype), load_vectors(p_narrow, start, padded_keys, C.BN, M)
        else:
            w = load_vectors(p_keys + padded_keys, start, padded_keys, C.BN, M)
        p = p * mixed(rows, w, False, M, C.PATH == FAST_HARD)
    else:
        log_w = load_vectors(p_keys + (1 + M) * padded_keys, start, padded_keys, C.BN, M)
        if C.PATH == HARD:
            best = log_w[0][None, :] + tl.zeros_like(s)
            for r in tl.static_range(1, M):
                best = tl.maximum(best, bid(rows[r], log_w[r], False))
            x = only_shown(s * scale + best, shown, MASKED)
            if C.FIXED:
                p = tl.exp2(x - m[:, None])
            else:
                m, m_safe, alpha = online_softmax(tl.max(x, 1), m)
                p = tl.exp2(x - m_safe[:, None])
        else:
            x = exponents(s, scale, rows, log_w, shown, False, MASKED, M)
            x_max = tl.max(x[0], 1)
            for r in tl.static_range(1, M):
                x_max = tl.maximum(x_max, tl.max(x[r], 1))
            m, m_safe, alpha = online_softmax(x_max, m)
            p = tl.exp2(x[0] - m_safe[:, None])
            for r in tl.static_range(1, M):
                p += tl.exp2(x[r] - m_safe[:, None])
    if not C.FIXED:
        l, acc = l * alpha, acc * alpha[:, None]
    if C.NARROW:
        l = tl.dot(p, unit_column(0, C.BN, b_k.dtype), l)
    else:
        l += tl.sum(p, 1)
    if C.DROPOUT:  # what is kept is divided by its share at the end
        p = p * dropout(p_seed, i_bh, i_m * C.BM, start, threshold, 1.0, False, C.BM, C.BN).to(p.dtype)
    b_v = load_rows(p_v, start, num_keys, stride_v, visible, C.BN, C.DV, C.BV, MASKED, HIDES)  # [BN, BV]
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=C.PRECISION)
    return acc, m, l


@triton.jit
def forward_block(i_m, i_bh, tensors, numbers, strides, sizes, C: tl.constexpr):
    M: tl.constexpr = C.M
    OVERFLOW, SPAN, Q, K, V, KEYS, FACTORS, OUT, ROWS, QUERY_MASK, SEED = tensors
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son = strides
    H, num_queries, num_keys, padded_queries, padded_keys = sizes
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    o_m = i_m * C.BM + tl.arange(0, C.BM)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    p_k, p_v = K + first_key * skb + i_h // C.GROUP * skh, V + first_key * svb + i_h // C.GROUP * svh
    p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_queries
    b_q = load_tile(Q + origin * sqb + i_h * sqh, i_m * C.BM, num_queries, sqn, C.BM, C.D, C.BD, True)  # [BM, BD]
    rows = load_vectors(
        p_rows + (1 + M if C.PATH == FALLBACK else 1) * padded_queries, i_m * C.BM, padded_queries, C.BM, M
    )
    p_narrow = FACTORS
    if not is_fast(C.PATH):
        b_q = spread_infinities(b_q)
    if C.PATH == FAST_HARD:
        rows = exp2_tuple(rows, M)
    if C.NARROW:
        rows = cast_tuple(rows, b_q.dtype, M)
        p_narrow += i_bh.to(tl.int64) * M * padded_keys

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, C.CAUSAL, C.KEY_MASK, C.BM, C.BN)
    begin, inner = 0, 0
    if C.WINDOW:
        begin, inner = window_tiles(i_m, offset, stop, C.WINDOW, C.BM, C.BN)
    if C.FIXED:
        m = load_vector(p_rows, i_m * C.BM, C.BM)
    else:
        m = tl.full([C.BM], NEVER, tl.float32)
    l, acc = tl.zeros([C.BM, SUMS] if C.NARROW else [C.BM], tl.float32), tl.zeros([C.BM, C.BV], tl.float32)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(full >= C.BN)
    pointers = (p_k, p_v, p_keys, p_narrow, SEED)
    place = (i_bh, i_m, offset, num_keys, padded_keys, skn, svn)
    for start in range(inner, full, C.BN):
        acc, m, l = forward_step(start, (acc, m, l), b_q, rows, pointers, place, numbers, False, C)
    if C.WINDOW:
        first, tail = (inner - begin) // C.BN, tl.maximum(inner, full)
        for i in tl.range(0, first + tl.cdiv(tl.maximum(stop - tail, 0), C.BN), num_stages=1):
            start = edge_tile(i, first, begin, tail, C.BN)
            acc, m, l = forward_step(start, (acc, m, l), b_q, rows, pointers, place, numbers, True, C)
    elif C.CAUSAL or C.KEY_MASK or not C.EVEN:
        for start in tl.range(full, stop, C.BN, num_stages=1):
            acc, m, l = forward_step(start, (acc, m, l), b_q, rows, pointers, place, numbers, True, C)

    if C.NARROW:
        l = tl.sum(l, 1)
    if C.DROPOUT:
        acc *= numbers[2]
    takes_part = o_m < num_queries
    if C.MASK_QUERIES:
        takes_part = takes_part & (tl.load(QUERY_MASK + i_b * num_queries + o_m, mask=o_m < num_queries, other=0) != 0)
    if C.FIXED or C.PATH == FAST:
        sees = takes_part & sees_a_key(SPAN, i_b, o_m, offset, num_keys, C.CAUSAL, C.SPANS, C.WINDOW)
        if C.FIXED:
            flag_bad_sums(OVERFLOW, i_bh // C.GROUP, l, sees)
        else:  # float16 rounds each of N weights by up to 2^-25, which should be below 2^-11 of their sum
            flag_bad_sums(OVERFLOW, i_bh // C.GROUP, l, sees, 2.0**-14 * tl.sqrt(num_keys.to(tl.float32)), 2.0**15)
    takes_part = takes_part & (l != 0)  # NaN does: it must be seen
    out = tl.where(takes_part[:, None], acc / tl.where(l == 0, 1.0, l)[:, None], 0.0)
    store_tile(OUT + origin * sob + i_h * soh, out, i_m * C.BM, num_queries, son, C.BM, C.DV, C.BV)
    tl.store(p_rows + o_m, tl.where(takes_part, m + tl.log2(l), FOREVER))


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
def query_step(
    start, state, b_q, b_do, rows, lse, delta, pointers, place, numbers, MASKED: tl.constexpr, C: tl.constexpr
):
    """Add one key tile's share of dq and of dlog_u after the first component (on the FAST path without its rho).

    `rows`: the rho (FAST_HARD: and the lead); FALLBACK: the log_u; HARD: the leads. `du` has a
    vector per component, or with narrow mixing is one block of columns.
    """
    M: tl.constexpr = C.M
    b_dq, du = state
    p_k, p_v, p_keys, p_narrow, p_columns, p_seed = pointers
    i_bh, i_m, offset, num_keys, padded_keys, stride_k, stride_v = place
    scale, threshold, inverse_keep, _ = numbers
    o_m, o_n = i_m * C.BM + tl.arange(0, C.BM), start + tl.arange(0, C.BN)
    HIDES: tl.constexpr = MASKED and C.KEY_MASK
    visible = load_vector(p_keys, start, C.BN) == 0 if MASKED else None
    shown = None
    if MASKED:
        shown = shown_pairs(o_m, o_n, offset, visible, C.CAUSAL, C.KEY_MASK or not C.EVEN, C.WINDOW)
    b_k = load_rows(p_k, start, num_keys, stride_k, visible, C.BN, C.D, C.BD, MASKED, HIDES)  # [BN, BD]
    b_v = load_rows(p_v, start, num_keys, stride_v, visible, C.BN, C.DV, C.BV, MASKED, HIDES)  # [BN, BV]
    s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)  # [BM, BN]
    if MASKED and is_fast(C.PATH):
        s = tl.where(shown, s, NEVER)
    slope = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)  # [BM, BN]
    if C.DROPOUT:
        slope *= dropout(p_seed, i_bh, i_m * C.BM, start, threshold, inverse_keep, False, C.BM, C.BN)
    slope -= delta[:, None]
    new = (du[0],)
    if is_fast(C.PATH):
        g = tl.exp2(s * scale - lse[:, None]) * slope
        if C.PATH == FAST_HARD:
            g, rho = g.to(b_k.dtype), cast_tuple(rows, b_k.dtype, M)
            w = load_vectors(p_narrow, start, padded_keys, C.BN, M)
            ds = g * mixed(rho, w, False, M, True)
            new = (second_share(ds, new[0], rows[2], load_vector(p_columns, start, C.BN), False),)
        elif C.NARROW:
            g = g.to(b_k.dtype)
            w = load_vectors(p_narrow, start, padded_keys, C.BN, M)
            if MASKED:  # in a loop without a pipeline Triton 3.6 makes this product read beyond the shared memory
                for r in tl.static_range(1, M):
                    share = tl.sum((g * w[r][None, :]).to(tl.float32), 1)
                    new = (new[0] + tl.where(tl.arange(0, COLUMNS)[None, :] == r, share[:, None], 0.0),)
            elif M > 1:
                b_w = load_tile(p_columns, start, padded_keys, COLUMNS, C.BN, COLUMNS, COLUMNS, False)  # [BN, COLUMNS]
                new = (tl.dot(g, b_w, du[0]),)
            ds = g * mixed(cast_tuple(rows, b_k.dtype, M), w, False, M)
        else:
            w = load_vectors(p_keys + padded_keys, start, padded_keys, C.BN, M)
            for r in tl.static_range(1, M):
                new = new + (du[r] + tl.sum(g * w[r][None, :], 1),)
            ds = g * mixed(rows, w, False, M)
    else:
        log_w = load_vectors(p_keys + (1 + M) * padded_keys, start, padded_keys, C.BN, M)
        if C.PATH == HARD:
            best, won = best_bid(slope, rows, log_w, False, M)
            x = only_shown(s * scale + best, shown, MASKED)
            ds = weight_of(x - lse[:, None], b_k.dtype == tl.float32) * slope
            for r in tl.static_range(1, M):
                share = tl.where(won == r, ds, 0.0)
                if C.NARROW:
                    new = (tl.dot(share.to(b_k.dtype), unit_column(r, C.BN, b_k.dtype), new[0]),)
                else:
                    new = new + (du[r] + tl.sum(share, 1),)
        else:
            x = exponents(s, scale, rows, log_w, shown, False, MASKED, M)
            ds = weight(x[0] - lse[:, None]) * slope
            for r in tl.static_range(1, M):
                part = weight(x[r] - lse[:, None]) * slope
                ds += part
                new = new + (du[r] + tl.sum(part, 1),)
    b_dq = tl.dot(ds.to(b_k.dtype), b_k, b_dq, input_precision=C.PRECISION)
    return b_dq, new


@triton.jit
def store_row_stats(
    p_row_stats, p_columns, o_m, lse, delta, rows, padded_queries, dtype: tl.constexpr, M: tl.constexpr,
    AS_COLUMNS: tl.constexpr, AS_VECTORS: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store what the key pass needs of each query: the log-sum-exp, delta and the rest of `rows`, side by side; or, for
    the Hopper kernel, as vectors along the queries, the rest in 16 bits. AS_COLUMNS: 1 and the rest in bfloat16, too.
    """
    if AS_VECTORS:
        tl.store(p_row_stats + o_m, lse)
        tl.store(p_row_stats + padded_queries + o_m, delta)
        p_narrow = (p_row_stats + 2 * padded_queries).to(tl.pointer_type(tl.bfloat16)) + o_m
        tl.store(p_narrow, rows[1].to(tl.bfloat16))
        if M == 3:
            tl.store(p_narrow + padded_queries, rows[2].to(tl.float16).to(tl.bfloat16, bitcast=True))
    else:
        p_row_stats += o_m * WIDTH
        tl.store(p_row_stats, lse)
        tl.store(p_row_stats + 1, delta)
        for r in tl.static_range(1, M):
            tl.store(p_row_stats + 1 + r, rows[r])
    if AS_COLUMNS:
        o_column = tl.arange(0, COLUMNS)[None, :]
        block = tl.where(o_column == 0, tl.full([BM, COLUMNS], 1.0, tl.float32), 0.0)
        for r in tl.static_range(1, M):
            block = tl.where(o_column == r, rows[r][:, None], block)
        tl.store(p_columns + o_m[:, None] * COLUMNS + o_column, block.to(dtype))


@triton.jit
def query_block(i_m, i_bh, tensors, numbers, strides, sizes, C: tl.constexpr):
    """dq, what the key pass needs, and the block's share of dshift."""
    M: tl.constexpr = C.M
    (
        _,
        SPAN,
        Q,
        K,
        SHIFT,
        V,
        KEYS,
        FACTORS,
        KEY_COLUMNS,
        OUT,
        ROWS,
        SEED,
        DO,
        GRAD_LSE,
        ROW_STATS,
        ROW_COLUMNS,
        DQ,
        PART,
    ) = tensors
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sdb, sdh, sdn = strides
    H, num_queries, num_keys, padded_queries, padded_keys, _, parts = sizes
    inverse_variance = numbers[3]
    i_b, i_h, i_g = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, C.PACKED)
    offset = num_keys - num_queries
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, C.SPANS)
    o_m, o_d = i_m * C.BM + tl.arange(0, C.BM), tl.arange(0, C.BD)
    first_key = key_origin(SPAN, i_b, C.PACKED)
    p_k, p_v = K + first_key * skb + i_h // C.GROUP * skh, V + first_key * svb + i_h // C.GROUP * svh
    p_keys = KEYS + i_g * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_g * (1 + 2 * M) * padded_queries
    lse = load_vector(p_rows, i_m * C.BM, C.BM)
    MASKS: tl.constexpr = C.SPANS and not C.PACKED
    real = lse != FOREVER  # sees a key and is not masked
    p_q, p_do = Q + origin * sqb + i_h * sqh, DO + origin * sgb + i_h * sgh
    b_q = load_rows(p_q, i_m * C.BM, num_queries, sqn, real, C.BM, C.D, C.BD, True, MASKS)  # [BM, BD]
    b_do = load_rows(p_do, i_m * C.BM, num_queries, sgn, real, C.BM, C.DV, C.BV, True, MASKS)  # [BM, BV]
    b_o = load_tile(OUT + origin * sob + i_h * soh, i_m * C.BM, num_queries, son, C.BM, C.DV, C.BV, True)  # [BM, BV]
    delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    grad_lse = tl.zeros([C.BM], tl.float32)
    if C.LSE:
        grad_lse = load_vector(GRAD_LSE + i_g * padded_queries, i_m * C.BM, C.BM)
        delta -= grad_lse
    rows = load_vectors(
        p_rows + (1 + M if C.PATH == FALLBACK else 1) * padded_queries, i_m * C.BM, padded_queries, C.BM, M
    )
    p_narrow, p_columns, p_row_columns = FACTORS, KEY_COLUMNS, ROW_COLUMNS
    AS_COLUMNS: tl.constexpr = C.NARROW and C.PATH == FAST
    KEPT: tl.constexpr = 3 if C.PATH == FAST_HARD else M
    if C.NARROW and is_fast(C.PATH):
        p_narrow += i_g * M * padded_keys
    if C.PATH == FAST_HARD:
        rows = exp2_tuple(rows, M) + (rows[1].to(tl.float16),)
        p_columns += i_g * padded_keys
    if AS_COLUMNS:
        p_columns += i_g * COLUMNS * padded_keys
        p_row_columns += i_g * COLUMNS * padded_queries
    store_row_stats(
        ROW_STATS + i_g * C.WIDTH * padded_queries, p_row_columns, o_m, lse, delta, rows, padded_queries, b_q.dtype,
        KEPT, AS_COLUMNS, C.AS_VECTORS, C.WIDTH, C.BM,
    )  # fmt: skip

    full, stop = key_tiles(i_m, i_b, SPAN, offset, last_query, last_key, num_keys, C.CAUSAL, C.KEY_MASK, C.BM, C.BN)
    begin, inner = 0, 0
    if C.WINDOW:
        begin, inner = window_tiles(i_m, offset, stop, C.WINDOW, C.BM, C.BN)
    b_dq = tl.zeros([C.BM, C.BD], tl.float32)
    if C.NARROW:
        du = zeros_tuple([C.BM, COLUMNS if C.PATH == FAST else SUMS], 1)
    else:
        du = zeros_tuple([C.BM], M)
    if C.EVEN and not C.SPANS and not C.CAUSAL:
        tl.assume(full >= C.BN)
    pointers = (p_k, p_v, p_keys, p_narrow, p_columns, SEED)
    place = (i_bh, i_m, offset, num_keys, padded_keys, skn, svn)
    for start in range(inner, full, C.BN):
        b_dq, du = query_step(start, (b_dq, du), b_q, b_do, rows, lse, delta, pointers, place, numbers, False, C)
    if C.WINDOW:
        first, tail = (inner - begin) // C.BN, tl.maximum(inner, full)
        for i in tl.range(0, first + tl.cdiv(tl.maximum(stop - tail, 0), C.BN), num_stages=1):
            start = edge_tile(i, first, begin, tail, C.BN)
            b_dq, du = query_step(start, (b_dq, du), b_q, b_do, rows, lse, delta, pointers, place, numbers, True, C)
    elif C.CAUSAL or C.KEY_MASK or not C.EVEN:
        for start in tl.range(full, stop, C.BN, num_stages=1):
            b_dq, du = query_step(start, (b_dq, du), b_q, b_do, rows, lse, delta, pointers, place, numbers, True, C)
    if C.NARROW:
        du = split_columns(du[0], M)
    dlog_u, rest = (), grad_lse  # rows of dl sum to this, mostly 0: the first has what the others leave
    for r in tl.static_range(1, M):
        part = du[r] * rows[r] if C.PATH == FAST else du[r]
        rest -= part
        dlog_u = dlog_u + (part,)
    dlog_u = (rest,) + dlog_u

    p_part = PART + (i_g * parts + i_m) * M * (C.BD + 1)
    b_q = load_tile(p_q, i_m * C.BM, num_queries, sqn, C.BM, C.D, C.BD, True, True)
    if MASKS:
        real = load_vector(p_rows, i_m * C.BM, C.BM) != FOREVER
        b_q, dlog_u = tl.where(real[:, None], b_q, 0.0), where_tuple(real, dlog_u, M)
    for r in tl.static_range(M):
        b_b = tl.load(SHIFT + (i_h * M + r) * C.D + o_d, mask=o_d < C.D, other=0.0).to(tl.float32)
        b_dq += dlog_u[r][:, None] * b_b[None, :]
        tl.store(p_part + r * (C.BD + 1) + o_d, tl.sum(dlog_u[r][:, None] * b_q.to(tl.float32), 0) * inverse_variance)
        tl.store(p_part + r * (C.BD + 1) + C.BD, 0.0)
    if MASKS:
        b_dq = tl.where(real[:, None], b_dq, 0.0)
    store_tile(DQ + origin * sdb + i_h * sdh, b_dq * inverse_variance, i_m * C.BM, num_queries, sdn, C.BM, C.D, C.BD)


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
