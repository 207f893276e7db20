"""The safe road for shifted keys: query blocks whose rows the factorisation cannot hold, one exponential per component.

One program per head looks at the flags of its query blocks and, as a rule, finds none and ends. Nothing here is tuned:
it is the price of a row whose heavy keys sit in another component than its own, and it keeps that row exact. The blocks
are those of the forward kernel; what the fast kernels left for their rows is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.primitives import NEVER, key_range, load_tile, load_vector, load_vectors, store_tile, zeros_tuple
from mgk.ops.triton.shifted import FOREVER, SAFE, U, forward_step, key_step, query_step


@triton.jit
def forward_kernel(
    Q, K, V, KEYS, OUT, ROWS, CONFLICT, SPAN, QUERY_MASK, SEED, scale, threshold, inverse_keep,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, H, num_queries, num_keys, padded_queries, padded_keys,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SPANS: tl.constexpr, MASK_QUERIES: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Outputs and row sums of the flagged blocks."""
    i_bh, blocks, offset = tl.program_id(0), padded_queries // BM, num_keys - num_queries
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    _, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPANS)
    p_k, p_v = K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
    p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_bh.to(tl.int64) * (2 + 2 * M) * padded_queries
    for i_m in range(0, blocks):
        o_m = i_m * BM + tl.arange(0, BM)
        lse = tl.full([BM], FOREVER, tl.float32)
        if tl.load(CONFLICT + i_bh * blocks + i_m) != 0:
            b_q = load_tile(Q + i_b * sqb + i_h * sqh, i_m * BM, num_queries, sqn, BM, D, BD, True)  # [BM, BD]
            log_u = load_vectors(p_rows + (U + M) * padded_queries, i_m * BM, padded_queries, BM, M)
            stop = last_key
            if CAUSAL:
                stop = tl.minimum(stop, i_m * BM + BM + offset)
            m, l = tl.full([BM], NEVER, tl.float32), tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, BV], tl.float32)
            for start in tl.range(0, stop, BN, num_stages=1):
                acc, m, l = forward_step(
                    start, b_q, acc, m, l, log_u, log_u, p_k, p_v, p_keys, SEED, i_bh, i_m, offset, scale, threshold,
                    inverse_keep, num_keys, padded_keys, skn, svn, D, DV, BD, BV, M, False, True, CAUSAL, True, DROPOUT,
                    PRECISION, BM, BN,
                )  # fmt: skip
            part = (l > 0) & (o_m < num_queries)
            if MASK_QUERIES:
                part = part & (tl.load(QUERY_MASK + i_b * num_queries + o_m, mask=o_m < num_queries, other=0) != 0)
            out = tl.where(part[:, None], acc / tl.where(l > 0, l, 1.0)[:, None], 0.0)
            store_tile(OUT + i_b * sob + i_h * soh, out, i_m * BM, num_queries, son, BM, DV, BV)
            lse = tl.where(part, m + tl.log2(l), FOREVER)
        tl.store(p_rows + SAFE * padded_queries + o_m, lse)


@triton.jit
def backward_kernel(
    Q, K, SHIFT, V, KEYS, ROWS, CONFLICT, SPAN, SEED, DO, DELTA, DQ, DK, DV_, DLW, PART, scale, threshold, inverse_keep,
    inverse_variance, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdb, sdh, sdn, seb, seh, sen, sfb, sfh,
    sfn, H, num_queries, num_keys, padded_queries, padded_keys, query_parts, parts,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SPANS: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    FLAGS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The flagged blocks' dq, and their share of everybody else's gradients, added to what is there."""
    i_bh, blocks, offset = tl.program_id(0), padded_queries // BM, num_keys - num_queries
    o_f, o_d = tl.arange(0, FLAGS), tl.arange(0, BD)
    flags = tl.load(CONFLICT + i_bh * blocks + o_f, mask=o_f < blocks, other=0)
    if tl.max(flags, 0) == 0:
        return
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPANS)
    p_q, p_do = Q + i_b * sqb + i_h * sqh, DO + i_b * sgb + i_h * sgh
    p_k, p_v = K + i_b * skb + i_h * skh, V + i_b * svb + i_h * svh
    p_dk, p_dv = DK + i_b * seb + i_h * seh, DV_ + i_b * sfb + i_h * sfh
    p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys
    p_rows = ROWS + i_bh.to(tl.int64) * (2 + 2 * M) * padded_queries
    p_delta = DELTA + i_bh.to(tl.int64) * padded_queries
    p_part = PART + i_bh.to(tl.int64) * parts * M * (BD + 1)

    for i_m in range(0, blocks):
        if tl.load(CONFLICT + i_bh * blocks + i_m) != 0:
            b_q = load_tile(p_q, i_m * BM, num_queries, sqn, BM, D, BD, True)  # [BM, BD]
            b_do = load_tile(p_do, i_m * BM, num_queries, sgn, BM, DV, BV, True)  # [BM, BV]
            safe, delta = load_vector(p_rows + SAFE * padded_queries, i_m * BM, BM), load_vector(p_delta, i_m * BM, BM)
            log_u = load_vectors(p_rows + (U + M) * padded_queries, i_m * BM, padded_queries, BM, M)
            stop = last_key
            if CAUSAL:
                stop = tl.minimum(stop, i_m * BM + BM + offset)
            b_dq, dlog_u = tl.zeros([BM, BD], tl.float32), zeros_tuple([BM], M)
            for start in tl.range(0, stop, BN, num_stages=1):
                b_dq, dlog_u = query_step(
                    start, b_q, b_do, b_dq, dlog_u, log_u, log_u, safe, delta, p_k, p_v, p_keys, SEED, i_bh, i_m, offset,
                    scale, threshold, inverse_keep, num_keys, padded_keys, skn, svn, D, DV, BD, BV, M, False, True,
                    CAUSAL, True, DROPOUT, PRECISION, BM, BN,
                )  # fmt: skip
            for r in tl.static_range(M):
                b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
                b_dq += dlog_u[r][:, None] * b_b[None, :]
                pull = tl.sum(dlog_u[r][:, None] * b_q.to(tl.float32), 0) * inverse_variance
                tl.store(p_part + r * (BD + 1) + o_d, tl.load(p_part + r * (BD + 1) + o_d) + pull)
                tl.debug_barrier()
            store_tile(DQ + i_b * sdb + i_h * sdh, b_dq * inverse_variance, i_m * BM, num_queries, sdn, BM, D, BD)

    p_part += query_parts * M * (BD + 1)
    for i_n in range(0, tl.cdiv(last_key, BN)):
        o_n = i_n * BN + tl.arange(0, BN)
        b_k = load_tile(p_k, i_n * BN, num_keys, skn, BN, D, BD, True)  # [BN, BD]
        b_v = load_tile(p_v, i_n * BN, num_keys, svn, BN, DV, BV, True)  # [BN, BV]
        log_w = load_vectors(p_keys + (1 + M) * padded_keys, i_n * BN, padded_keys, BN, M)
        b_dk, b_dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BV], tl.float32)
        dlog_w = zeros_tuple([BN], M)
        for start in tl.range(0, last_query, BM, num_stages=1):
            if tl.load(CONFLICT + i_bh * blocks + start // BM) != 0:
                b_dk, b_dv, dlog_w = key_step(
                    start, b_k, b_v, b_dk, b_dv, dlog_w, log_w[0], log_w, log_w, p_q, p_do, p_rows, p_delta, SEED, i_bh,
                    i_n, offset, scale, threshold, inverse_keep, num_queries, padded_queries, sqn, sgn, D, DV, BD, BV, M,
                    False, True, CAUSAL, True, DROPOUT, PRECISION, BM, BN,
                )  # fmt: skip
        for r in tl.static_range(M):
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            pull = dlog_w[r][:, None] * (b_k.to(tl.float32) + b_b[None, :])
            b_dk -= pull
            p_r = p_part + r * (BD + 1)
            tl.store(p_r + o_d, tl.load(p_r + o_d) - tl.sum(pull, 0) * inverse_variance)
            tl.store(p_r + BD, tl.load(p_r + BD) + tl.sum(dlog_w[r], 0))
            tl.debug_barrier()
            if POSITIONS:
                p_dlw = DLW + (i_bh.to(tl.int64) * M + r) * num_keys + o_n
                tl.store(p_dlw, tl.load(p_dlw, mask=o_n < num_keys) + dlog_w[r], mask=o_n < num_keys)
        b_dk = b_dk * inverse_variance + load_tile(p_dk, i_n * BN, num_keys, sen, BN, D, BD, True).to(tl.float32)
        b_dv += load_tile(p_dv, i_n * BN, num_keys, sfn, BN, DV, BV, True).to(tl.float32)
        store_tile(p_dk, b_dk, i_n * BN, num_keys, sen, BN, D, BD)
        store_tile(p_dv, b_dv, i_n * BN, num_keys, sfn, BN, DV, BV)
