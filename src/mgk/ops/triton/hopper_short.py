"""Kernels for shifted keys, short sequences and narrow heads on Hopper GPUs, in Gluon: four warps compute a head.

Triton gives a product of 64 rows to four warps together, which synchronise before and after it; with products as small
as these, they do little else (short.py). Here each warp has 16 rows and products of its own, and weights go from one
product to the next in registers. A head is kept in shared memory, which is only read between its beginning and its
end, so that no warp waits for another.

The mixing stays outside of the loops: with e = 2^(q.k/s2 - bound) the output is sum_r rho_r [sum_j e w_r v], divided
by the same sum with ones in place of v. The backward pass is that of short.py, except that both sides compute the
scores: first a warp has 16 keys and loops over the queries, then the other way round. The hard E-step gives e to the
winning component. Two components, bfloat16. Heads that would overflow, masks, dropout and other widths use short.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mgk.ops.triton import bias, primitives
from mgk.ops.triton.hopper_common import (
    column_of,
    has_bad_sum,
    range_of,
    run,
    seen_keys,
    strides,
    where_larger,
    without,
)

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # before a loop, or the compiler puts one into it
BLOCK = gl.constexpr(64)  # queries or keys of a tile, 16 for each warp
COLUMNS = gl.constexpr(8)  # of the products that sum rows
LOG2E = gl.constexpr(primitives.LOG2E.value)
FAST_KEYS, FAST_ROWS = gl.constexpr(bias.FAST_KEYS.value), gl.constexpr(bias.FAST_ROWS.value)
# Of products of one warp, what is on their left and right, and vectors along their rows and columns; of shared memory.
PRODUCT = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
MMA, LEFT, RIGHT, ROW, COLUMN = map(
    gl.constexpr,
    (
        PRODUCT, gl.DotOperandLayout(0, PRODUCT, 2), gl.DotOperandLayout(1, PRODUCT, 2), gl.SliceLayout(1, PRODUCT),
        gl.SliceLayout(0, PRODUCT),
    ),
)  # fmt: skip
THIN, LINE = map(gl.constexpr, (gl.SwizzledSharedLayout(8, 1, 1, [1, 0]), gl.SwizzledSharedLayout(1, 1, 1, [0])))
COUNTS = ("H", "num_queries", "num_keys")


@gluon.jit
def place_of(p_base, i_b, i_h, stride_b, stride_h):
    return p_base + i_b * stride_b + i_h * stride_h


@gluon.jit
def rows_of(p_base, t, num_rows, stride, D: gl.constexpr, layout: gl.constexpr):
    """Where tile t of a matrix lies, and which of its rows there are."""
    o_row = t * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    o_column = gl.arange(0, D, gl.SliceLayout(0, layout))
    return p_base + o_row.to(gl.int64)[:, None] * stride + o_column[None, :], (o_row < num_rows)[:, None]


@gluon.jit
def load_block(p_base, t, num_rows, stride, D: gl.constexpr, layout: gl.constexpr):
    p_block, real = rows_of(p_base, t, num_rows, stride, D, layout)
    return gl.load(p_block, mask=real, other=0.0)


@gluon.jit
def store_block(p_base, block, t, num_rows, stride, D: gl.constexpr):
    p_block, real = rows_of(p_base, t, num_rows, stride, D, MMA)
    gl.store(p_block, block.to(gl.bfloat16), mask=real)


@gluon.jit
def rows_times(b_x, y_s):
    """Rows on the left times those of a tile."""
    return mma_v2(b_x, y_s.permute((1, 0)).load(RIGHT), gl.zeros([BLOCK, BLOCK], gl.float32, MMA))


@gluon.jit
def weights_of(s, scale, bound, o_m, t, whole, num_queries, num_keys, CAUSAL: gl.constexpr, EVEN: gl.constexpr):
    """e of a tile of queries and tile t of the keys."""
    e = gl.exp2(s * scale - bound[:, None])
    if CAUSAL or not EVEN:
        if t >= whole:
            o_n = t * BLOCK + gl.arange(0, BLOCK, COLUMN)
            e = gl.where(seen_keys(o_m, o_n, num_queries, num_keys, CAUSAL, EVEN), e, 0.0)
    return e


@gluon.jit
def shares(x, lead, gap, BEST: gl.constexpr):
    """What the components have of x, as left sides of products: both all of it, or the one that wins."""
    first = x.to(gl.bfloat16)
    second = first
    if BEST:
        second = where_larger(gap, lead, first)
        first = without(first, second)
    return gl.convert_layout(first, LEFT), gl.convert_layout(second, LEFT)


@gluon.jit
def log_weights(b_k, p_shift, p_prior, t, r: gl.constexpr, inverse_variance, num_keys, D: gl.constexpr,
                PRIOR_AXES: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """log_w of a block of keys, as in bias.py."""
    o_n = t * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    key = b_k + gl.load(p_shift + r * D + gl.arange(0, D, gl.SliceLayout(0, layout))).to(gl.float32)[None, :]
    log_w = gl.sum(key * key, 1) * -0.5 * inverse_variance
    if PRIOR_AXES == 2:
        log_w += gl.load(p_prior + r).to(gl.float32)
    if PRIOR_AXES == 3:
        log_w += gl.load(p_prior + r * num_keys + o_n, mask=o_n < num_keys, other=0.0).to(gl.float32)
    return log_w * LOG2E


@gluon.jit
def columns_of(x, y, layout: gl.constexpr):
    """Two vectors as the first columns of a block.  # [BLOCK, COLUMNS]"""
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return gl.where((o_c == 0)[None, :], x[:, None], gl.where((o_c == 1)[None, :], y[:, None], 0.0)).to(gl.bfloat16)


@gluon.jit
def outputs(
    shared, p_out, p_rows, p_overflow, numbers, D: gl.constexpr, TQ: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr,
    BEST: gl.constexpr,
):  # fmt: skip
    """The output and LSE; and whether a fixed maximum bad any, see primitives.flag_bad_sums."""
    q_s, k_s, v0_s, v1_s, c_s, bound_s, rho_s, lead_s, gap_s = shared
    scale, son, num_queries, num_keys = numbers
    o_row, bad_sums = gl.arange(0, BLOCK, ROW), gl.zeros([BLOCK], gl.int32, ROW)
    for i in range(TQ):
        o_m, b_q = i * BLOCK + o_row, q_s.index(i).load(LEFT)
        bound, rho = bound_s.index(i).load(ROW), rho_s.index(i).load(ROW)
        lead = lead_s.index(i).load(ROW)[:, None].broadcast_to([BLOCK, BLOCK])
        acc_0, acc_1 = gl.zeros([BLOCK, D], gl.float32, MMA), gl.zeros([BLOCK, D], gl.float32, MMA)
        sums_0, sums_1 = gl.zeros([BLOCK, COLUMNS], gl.float32, MMA), gl.zeros([BLOCK, COLUMNS], gl.float32, MMA)
        whole, count = range_of(i, num_queries, num_keys, BLOCK, BLOCK, CAUSAL)
        for t in range(count):
            s = rows_times(b_q, k_s.index(t))
            e = weights_of(s, scale, bound, o_m, t, whole, num_queries, num_keys, CAUSAL, EVEN)
            gap = gap_s.index(t).load(COLUMN)[None, :].broadcast_to([BLOCK, BLOCK])
            e_0, e_1 = shares(e, lead, gap, BEST)
            b_c = c_s.index(t).load(RIGHT)
            acc_0, acc_1 = mma_v2(e_0, v0_s.index(t).load(RIGHT), acc_0), mma_v2(e_1, v1_s.index(t).load(RIGHT), acc_1)
            sums_0 = mma_v2(e_0, b_c, sums_0)
            if BEST:
                sums_1 = mma_v2(e_1, b_c, sums_1)
        if not BEST:
            sums_1 = sums_0
        total = column_of(sums_0, 0, MMA) + rho * column_of(sums_1, 1, MMA)
        bad_sums = bad_sums | has_bad_sum(total, o_m, num_queries, num_keys, CAUSAL).to(gl.int32)
        some = (total > 0) & (o_m < num_queries)
        gl.store(p_rows + o_m, gl.where(some, bound + gl.log2(total), float("inf")))
        output = (acc_0 + acc_1 * rho[:, None]) / gl.where(some, total, 1.0)[:, None]
        store_block(p_out, gl.where(some[:, None], output, 0.0), i, num_queries, son, D)
    gl.store(p_overflow + 1, gl.max(bad_sums, 0).to(gl.float32))


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    Q, K, SHIFT, V, PRIOR, KEYS, OUT, ROWS, OVERFLOW, scale, inverse_variance, sqb, sqh, sqn, skb, skh, skn, svb, svh,
    svn, sob, soh, son, H, num_queries, num_keys, padded_queries, padded_keys, D: gl.constexpr, TQ: gl.constexpr,
    TK: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, BEST: gl.constexpr, PRIOR_AXES: gl.constexpr,
):  # fmt: skip
    """Forward of one head: the output, and what `backward_kernel` reads of KEYS and ROWS.

    Sets both flags of OVERFLOW; of a head that would overflow it computes nothing more.
    """
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(2 * D, 16, 2)
    along: gl.constexpr = gl.SliceLayout(1, flat)
    i_bh = gl.program_id(0)
    i_b, i_h, i_g = (i_bh // H).to(gl.int64), (i_bh % H).to(gl.int64), i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [TQ, BLOCK, D], tile)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, D], tile)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, D], tile)  # w_0 v
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, D], tile)
    c_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, COLUMNS], THIN)  # w_0 and w_1
    bound_s = gl.allocate_shared_memory(gl.float32, [TQ, BLOCK], LINE)
    rho_s = gl.allocate_shared_memory(gl.float32, [TQ, BLOCK], LINE)
    lead_s = gl.allocate_shared_memory(gl.float16, [TQ, BLOCK], LINE)
    gap_s = gl.allocate_shared_memory(gl.float16, [TK, BLOCK], LINE)
    p_rows, p_keys = ROWS + i_g * 5 * padded_queries, KEYS + i_g * 5 * padded_keys
    p_shift, p_prior, p_overflow = SHIFT + i_h * 2 * D, PRIOR, OVERFLOW + 2 * i_bh
    o_d, beyond = gl.arange(0, D, gl.SliceLayout(0, flat)), gl.full([BLOCK], -1.0, gl.float32, along)
    top = 0.0
    if PRIOR_AXES == 2:
        p_prior = PRIOR + i_h * 2
        top = gl.maximum(gl.load(p_prior).to(gl.float32), gl.load(p_prior + 1).to(gl.float32))
        top = gl.where(top == float("-inf"), 0.0, top) * LOG2E
    if PRIOR_AXES == 3:
        p_prior = PRIOR + i_h * 2 * num_keys
    for t in gl.static_range(TK):
        o_n = t * BLOCK + gl.arange(0, BLOCK, along)
        b_k = load_block(place_of(K, i_b, i_h, skb, skh), t, num_keys, skn, D, flat)
        b_v = load_block(place_of(V, i_b, i_h, svb, svh), t, num_keys, svn, D, flat).to(gl.float32)
        key, taken = b_k.to(gl.float32), o_n < num_keys
        log_0 = log_weights(key, p_shift, p_prior, t, 0, inverse_variance, num_keys, D, PRIOR_AXES, flat) - top
        log_1 = log_weights(key, p_shift, p_prior, t, 1, inverse_variance, num_keys, D, PRIOR_AXES, flat) - top
        largest = gl.maximum(log_0, log_1)
        beyond = gl.maximum(beyond, gl.where(taken, gl.maximum(largest - 4.0, -FAST_KEYS - largest), -1.0))
        w_0, w_1 = gl.where(taken, gl.exp2(log_0), 0.0), gl.where(taken, gl.exp2(log_1), 0.0)
        gl.store(p_keys + padded_keys + o_n, w_0)
        gl.store(p_keys + 2 * padded_keys + o_n, w_1)
        if BEST:
            gl.store(p_keys + 3 * padded_keys + o_n, log_0)
            gl.store(p_keys + 4 * padded_keys + o_n, log_1)
            gap_s.index(t).store((log_0 - log_1).to(gl.float16))
        k_s.index(t).store(b_k)
        v0_s.index(t).store((b_v * w_0[:, None]).to(gl.bfloat16))
        v1_s.index(t).store((b_v * w_1[:, None]).to(gl.bfloat16))
        c_s.index(t).store(columns_of(w_0, w_1, flat))
    b_0, b_1 = gl.load(p_shift + o_d).to(gl.float32), gl.load(p_shift + D + o_d).to(gl.float32)
    for t in gl.static_range(TQ):
        o_m = t * BLOCK + gl.arange(0, BLOCK, along)
        b_q = load_block(place_of(Q, i_b, i_h, sqb, sqh), t, num_queries, sqn, D, flat)
        query, unit = b_q.to(gl.float32), inverse_variance * LOG2E
        first = gl.sum(query * b_0[None, :], 1) * unit
        lead = gl.sum(query * b_1[None, :], 1) * unit - first
        rho = gl.exp2(lead)
        beyond = gl.maximum(beyond, gl.maximum(lead - FAST_ROWS, -FAST_ROWS - lead))
        gl.store(p_rows + 2 * padded_queries + o_m, lead if BEST else rho)
        q_s.index(t).store(b_q)
        bound_s.index(t).store(gl.sum(query * query, 1) * (0.5 * unit) - first)
        rho_s.index(t).store(rho)
        if BEST:
            lead_s.index(t).store(lead.to(gl.float16))
    overflows = gl.max(beyond, 0) > 0
    gl.store(p_overflow, overflows.to(gl.float32))
    if overflows:
        gl.store(p_overflow + 1, 0.0)
    else:
        shared = (q_s, k_s, v0_s, v1_s, c_s, bound_s, rho_s, lead_s, gap_s)
        numbers = (scale, son, num_queries, num_keys)
        p_out = place_of(OUT, i_b, i_h, sob, soh)
        outputs(shared, p_out, p_rows, p_overflow, numbers, D, TQ, CAUSAL, EVEN, BEST)


@gluon.jit
def key_side(
    shared, pointers, numbers, D: gl.constexpr, TQ: gl.constexpr, TK: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk, dv, dshift and dlog_w."""
    q_s, g_s, k_s, v_s, qr_s, gr_s, c_s, lse_s, delta_s, lead_s = shared
    p_keys, p_shift, p_dk, p_dv, p_dlw, p_part = pointers
    scale, inverse_variance, sdn, sen, num_queries, num_keys, padded_keys = numbers
    o_d, o_row, o_column = gl.arange(0, D, COLUMN), gl.arange(0, BLOCK, ROW), gl.arange(0, BLOCK, COLUMN)
    b_0, b_1 = gl.load(p_shift + o_d).to(gl.float32), gl.load(p_shift + D + o_d).to(gl.float32)
    offset = num_keys - num_queries
    dshift_0, dshift_1 = gl.zeros([BLOCK, D], gl.float32, MMA), gl.zeros([BLOCK, D], gl.float32, MMA)
    dprior_0, dprior_1 = gl.zeros([BLOCK], gl.float32, ROW), gl.zeros([BLOCK], gl.float32, ROW)
    for j in range(TK):
        o_n = j * BLOCK + o_row
        b_k, b_v = k_s.index(j).load(LEFT), v_s.index(j).load(LEFT)
        w_0, w_1 = gl.load(p_keys + padded_keys + o_n), gl.load(p_keys + 2 * padded_keys + o_n)
        gap = (gl.load(p_keys + 3 * padded_keys + o_n) - gl.load(p_keys + 4 * padded_keys + o_n)).to(gl.float16)
        gap = gap[:, None].broadcast_to([BLOCK, BLOCK])
        q_0, q_1 = gl.zeros([BLOCK, D], gl.float32, MMA), gl.zeros([BLOCK, D], gl.float32, MMA)
        v_0, v_1 = gl.zeros([BLOCK, D], gl.float32, MMA), gl.zeros([BLOCK, D], gl.float32, MMA)
        sums_0, sums_1 = gl.zeros([BLOCK, COLUMNS], gl.float32, MMA), gl.zeros([BLOCK, COLUMNS], gl.float32, MMA)
        begin, visible = 0, 0
        if CAUSAL:
            begin = gl.maximum(j * BLOCK - offset, 0) // BLOCK
            visible = gl.cdiv(gl.maximum(j * BLOCK + BLOCK - 1 - offset, 0), BLOCK)
        for t in range(begin, TQ):
            s, slope = rows_times(b_k, q_s.index(t)), rows_times(b_v, g_s.index(t))
            e = gl.exp2(s * scale - lse_s.index(t).load(COLUMN)[None, :])
            if CAUSAL:
                if t < visible:
                    e = gl.where(o_n[:, None] <= t * BLOCK + o_column[None, :] + offset, e, 0.0)
            if not EVEN:
                if j == TK - 1:
                    e = gl.where((o_n < num_keys)[:, None], e, 0.0)
            g = e * (slope - delta_s.index(t).load(COLUMN)[None, :])
            lead = lead_s.index(t).load(COLUMN)[None, :].broadcast_to([BLOCK, BLOCK])
            g_0, g_1 = shares(g, lead, gap, BEST)
            e_0, e_1 = shares(e, lead, gap, BEST)
            b_c = c_s.index(t).load(RIGHT)
            q_0, q_1 = mma_v2(g_0, q_s.index(t).load(RIGHT), q_0), mma_v2(g_1, qr_s.index(t).load(RIGHT), q_1)
            v_0, v_1 = mma_v2(e_0, g_s.index(t).load(RIGHT), v_0), mma_v2(e_1, gr_s.index(t).load(RIGHT), v_1)
            sums_0 = mma_v2(g_0, b_c, sums_0)
            if BEST:
                sums_1 = mma_v2(g_1, b_c, sums_1)
        if not BEST:
            sums_1 = sums_0
        dlog_w_0, dlog_w_1 = column_of(sums_0, 0, MMA) * w_0, column_of(sums_1, 1, MMA) * w_1
        key = k_s.index(j).load(MMA).to(gl.float32)
        pull_0 = q_0 * w_0[:, None] - dlog_w_0[:, None] * (key + b_0[None, :])
        pull_1 = q_1 * w_1[:, None] - dlog_w_1[:, None] * (key + b_1[None, :])
        store_block(p_dk, (pull_0 + pull_1) * inverse_variance, j, num_keys, sdn, D)
        store_block(p_dv, v_0 * w_0[:, None] + v_1 * w_1[:, None], j, num_keys, sen, D)
        dshift_0, dshift_1, dprior_0, dprior_1 = (
            dshift_0 + pull_0, dshift_1 + pull_1, dprior_0 + dlog_w_0, dprior_1 + dlog_w_1,
        )  # fmt: skip
        if POSITIONS:
            gl.store(p_dlw + o_n, dlog_w_0, mask=o_n < num_keys)
            gl.store(p_dlw + num_keys + o_n, dlog_w_1, mask=o_n < num_keys)
    gl.store(p_part + o_d, gl.sum(dshift_0, 0) * inverse_variance)
    gl.store(p_part + D + 1 + o_d, gl.sum(dshift_1, 0) * inverse_variance)
    gl.store(p_part + D, gl.sum(dprior_0, 0))
    gl.store(p_part + 2 * D + 1, gl.sum(dprior_1, 0))


@gluon.jit
def query_side(
    shared, p_dq, numbers, D: gl.constexpr, TQ: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    BEST: gl.constexpr,
):  # fmt: skip
    """dq."""
    q_s, g_s, k_s, v_s, k0_s, k1_s, rho_s, lse_s, delta_s, lead_s, gap_s = shared
    scale, inverse_variance, sxn, num_queries, num_keys = numbers
    o_row = gl.arange(0, BLOCK, ROW)
    for i in range(TQ):
        o_m, b_q, b_g = i * BLOCK + o_row, q_s.index(i).load(LEFT), g_s.index(i).load(LEFT)
        lse, delta, rho = lse_s.index(i).load(ROW), delta_s.index(i).load(ROW), rho_s.index(i).load(ROW)
        lead = lead_s.index(i).load(ROW)[:, None].broadcast_to([BLOCK, BLOCK])
        dq_0, dq_1 = gl.zeros([BLOCK, D], gl.float32, MMA), gl.zeros([BLOCK, D], gl.float32, MMA)
        whole, count = range_of(i, num_queries, num_keys, BLOCK, BLOCK, CAUSAL)
        for t in range(count):
            s, slope = rows_times(b_q, k_s.index(t)), rows_times(b_g, v_s.index(t))
            e = weights_of(s, scale, lse, o_m, t, whole, num_queries, num_keys, CAUSAL, EVEN)
            gap = gap_s.index(t).load(COLUMN)[None, :].broadcast_to([BLOCK, BLOCK])
            g_0, g_1 = shares(e * (slope - delta[:, None]), lead, gap, BEST)
            dq_0, dq_1 = mma_v2(g_0, k0_s.index(t).load(RIGHT), dq_0), mma_v2(g_1, k1_s.index(t).load(RIGHT), dq_1)
        store_block(p_dq, (dq_0 + dq_1 * rho[:, None]) * inverse_variance, i, num_queries, sxn, D)


@gluon.jit(do_not_specialize=COUNTS)
def backward_kernel(
    Q, K, SHIFT, V, KEYS, OUT, ROWS, OVERFLOW, DO, DQ, DK, DV, DLW, PART, scale, inverse_variance, sqb, sqh, sqn, skb,
    skh, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sxb, sxh, sxn, sdb, sdh, sdn, seb, seh, sen, H, num_queries,
    num_keys, padded_queries, padded_keys, D: gl.constexpr, TQ: gl.constexpr, TK: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """PART (G,2,D+1) takes dshift and, last, the sum of dlog_w."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(2 * D, 16, 2)
    along: gl.constexpr = gl.SliceLayout(1, flat)
    T: gl.constexpr = TQ if TQ > TK else TK
    i_bh = gl.program_id(0)
    i_b, i_h, i_g = (i_bh // H).to(gl.int64), (i_bh % H).to(gl.int64), i_bh.to(gl.int64)
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        q_s = gl.allocate_shared_memory(gl.bfloat16, [TQ, BLOCK, D], tile)
        g_s = gl.allocate_shared_memory(gl.bfloat16, [TQ, BLOCK, D], tile)
        k_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, D], tile)
        v_s = gl.allocate_shared_memory(gl.bfloat16, [TK, BLOCK, D], tile)
        x_s = gl.allocate_shared_memory(gl.bfloat16, [T, BLOCK, D], tile)  # rho q, then w_0 (k + b_0)
        y_s = gl.allocate_shared_memory(gl.bfloat16, [T, BLOCK, D], tile)  # rho do, then w_1 (k + b_1)
        c_s = gl.allocate_shared_memory(gl.bfloat16, [TQ, BLOCK, COLUMNS], THIN)  # 1 and rho
        lse_s = gl.allocate_shared_memory(gl.float32, [TQ, BLOCK], LINE)
        delta_s = gl.allocate_shared_memory(gl.float32, [TQ, BLOCK], LINE)
        rho_s = gl.allocate_shared_memory(gl.float32, [TQ, BLOCK], LINE)
        lead_s = gl.allocate_shared_memory(gl.float16, [TQ, BLOCK], LINE)
        gap_s = gl.allocate_shared_memory(gl.float16, [TK, BLOCK], LINE)
        p_rows, p_keys = ROWS + i_g * 5 * padded_queries, KEYS + i_g * 5 * padded_keys
        p_shift, p_part = SHIFT + i_h * 2 * D, PART + i_g * 2 * (D + 1)
        for t in gl.static_range(TQ):
            o_m = t * BLOCK + gl.arange(0, BLOCK, along)
            b_q = load_block(place_of(Q, i_b, i_h, sqb, sqh), t, num_queries, sqn, D, flat)
            b_g = load_block(place_of(DO, i_b, i_h, sgb, sgh), t, num_queries, sgn, D, flat)
            b_o = load_block(place_of(OUT, i_b, i_h, sob, soh), t, num_queries, son, D, flat)
            lead = gl.load(p_rows + 2 * padded_queries + o_m)
            rho = gl.exp2(lead) if BEST else lead
            q_s.index(t).store(b_q)
            g_s.index(t).store(b_g)
            x_s.index(t).store((b_q.to(gl.float32) * rho[:, None]).to(gl.bfloat16))
            y_s.index(t).store((b_g.to(gl.float32) * rho[:, None]).to(gl.bfloat16))
            lse_s.index(t).store(gl.load(p_rows + o_m))
            delta_s.index(t).store(gl.sum(b_g.to(gl.float32) * b_o.to(gl.float32), 1))
            rho_s.index(t).store(rho)
            if BEST:
                lead_s.index(t).store(lead.to(gl.float16))
            c_s.index(t).store(columns_of(gl.full([BLOCK], 1.0, gl.float32, along), rho, flat))
        for t in gl.static_range(TK):
            o_n = t * BLOCK + gl.arange(0, BLOCK, along)
            k_s.index(t).store(load_block(place_of(K, i_b, i_h, skb, skh), t, num_keys, skn, D, flat))
            v_s.index(t).store(load_block(place_of(V, i_b, i_h, svb, svh), t, num_keys, svn, D, flat))
            if BEST:
                gap = gl.load(p_keys + 3 * padded_keys + o_n) - gl.load(p_keys + 4 * padded_keys + o_n)
                gap_s.index(t).store(gap.to(gl.float16))
        barrier()
        shared = (q_s, g_s, k_s, v_s, x_s, y_s, c_s, lse_s, delta_s, lead_s)
        pointers = (
            p_keys, p_shift, place_of(DK, i_b, i_h, sdb, sdh), place_of(DV, i_b, i_h, seb, seh),
            DLW + i_g * 2 * num_keys, p_part,
        )  # fmt: skip
        numbers = (scale, inverse_variance, sdn, sen, num_queries, num_keys, padded_keys)
        key_side(shared, pointers, numbers, D, TQ, TK, CAUSAL, EVEN, BEST, POSITIONS)

        o_d = gl.arange(0, D, gl.SliceLayout(0, flat))
        b_0, b_1 = gl.load(p_shift + o_d).to(gl.float32), gl.load(p_shift + D + o_d).to(gl.float32)
        for t in gl.static_range(TK):
            o_n, b_k = t * BLOCK + gl.arange(0, BLOCK, along), k_s.index(t).load(flat).to(gl.float32)
            w_0, w_1 = gl.load(p_keys + padded_keys + o_n), gl.load(p_keys + 2 * padded_keys + o_n)
            x_s.index(t).store(((b_k + b_0[None, :]) * w_0[:, None]).to(gl.bfloat16))
            y_s.index(t).store(((b_k + b_1[None, :]) * w_1[:, None]).to(gl.bfloat16))
        barrier()
        shared = (q_s, g_s, k_s, v_s, x_s, y_s, rho_s, lse_s, delta_s, lead_s, gap_s)
        numbers = (scale, inverse_variance, sxn, num_queries, num_keys)
        query_side(shared, place_of(DQ, i_b, i_h, sxb, sxh), numbers, D, TQ, CAUSAL, EVEN, BEST)


def registers(name: str, width: int) -> int:
    """The register limit: three programs share a multiprocessor, or two where shared memory allows no more."""
    return 255 if name == "backward_kernel" and width > 16 else 168


def constants(name: str, p: Problem) -> dict[str, Any]:
    width, block = p.width, BLOCK.value
    return {
        "D": width, "TQ": -(-p.query.shape[2] // block), "TK": -(-p.key.shape[2] // block), "CAUSAL": p.causal,
        "EVEN": p.key.shape[2] % block == 0, "BEST": p.hard, "maxnreg": registers(name, width),
    }  # fmt: skip


def forward(p: Problem, log_prior: Tensor | None, saved: Saved) -> None:
    """Output, and what `backward` needs, of the heads that fit; the others are flagged."""
    output, rows, keys, _, overflow = saved
    run(
        forward_kernel, 1, 1, p.query, p.query, p.key, p.shift, p.value, log_prior, keys, output, rows, overflow,
        p.numbers[0], 1 / p.variance, *strides(p.query, p.key, p.value, output), p.heads, p.query.shape[2],
        p.key.shape[2], rows.shape[-1], keys.shape[-1], PRIOR_AXES=0 if log_prior is None else log_prior.dim(),
        **constants("forward_kernel", p),
    )  # fmt: skip


def backward(p: Problem, saved: Saved, grad: Tensor, grads: list[Tensor], part: Tensor) -> None:
    """Gradients of the heads that fit, as those of short.py."""
    output, rows, keys, _, overflow = saved
    run(
        backward_kernel, 1, 1, p.query, p.query, p.key, p.shift, p.value, keys, output, rows, overflow, grad, *grads,
        part, p.numbers[0], 1 / p.variance, *strides(p.query, p.key, p.value, output, grad, *grads[:3]), p.heads,
        p.query.shape[2], p.key.shape[2], rows.shape[-1], keys.shape[-1], POSITIONS=grads[3].dim() > 1,
        **constants("backward_kernel", p),
    )  # fmt: skip
