"""The key side of shifted keys for heads wider than 128 on Hopper GPUs; see hopper_backward.py.

dk and dv of 64 keys are 256 registers a thread, so that a block has 64 keys, and each of the two warp groups one of
the two. The one with dv computes the exponentials, and hands them to the other through shared memory. Queries and
gradients of outputs have rings of their own: those of the last tile are free at different times.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from mgk.ops.triton.hopper import across, down, load_rows, mixed
from mgk.ops.triton.hopper_common import (
    COLUMNS,
    HALF,
    NARROW,
    copy,
    inside,
    log_grad,
    multiply,
    pass_turn,
    product,
    pull_of,
    ring_barriers,
    store_share,
    take_turn,
    where_larger,
)


@gluon.jit
def hand_over(BM: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr):
    """The exponentials of two tiles, barriers that they are there or read, and those of the ring of gradients; and
    what the other warp group hands back at the end.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, 2)
    e_ring = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BM], layout)
    e_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    e_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(e_full.index(i), count=1)
        mbarrier.init(e_empty.index(i), count=1)
    g_full, g_empty = ring_barriers(STAGES)
    logs = gl.allocate_shared_memory(gl.float32, [M, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    return e_ring, e_full, e_empty, g_full, g_empty, logs, done


@gluon.jit
def load_wide_queries(loads, shared, handed, where, C: gl.constexpr):
    """The block of keys, then tile after tile of queries with all vectors along them, and of gradients."""
    LINES: gl.constexpr = C.LINES
    SUMMED: gl.constexpr = C.M > 1 and not C.BEST
    q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc = loads
    q_ring, g_ring, k_s, v_s, c_ring, _, r_ring, n_ring, full, empty, ready, _ = shared
    g_full, g_empty = handed[3], handed[4]
    i_b, i_h, i_bh, i_n, first, count, padded_queries, width = where
    mbarrier.expect(ready, 4 * C.BN * C.D)
    copy(k_desc, [i_b, i_h, i_n * C.BN, 0], ready, k_s)
    copy(v_desc, [i_b, i_h, i_n * C.BN, 0], ready, v_s)
    for t in range(count):
        stage, start, phase = t % C.STAGES, first + t * C.BM, (t // C.STAGES & 1) ^ 1
        bar, g_bar = full.index(stage), g_full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, C.BM * (2 * C.D + 8 + 2 * LINES + (2 * COLUMNS if SUMMED else 0)))
        copy(q_desc, [i_b, i_h, start, 0], bar, q_ring.index(stage))
        for r in gl.static_range(2):
            copy(r_desc, [i_bh * width + r, start], bar, r_ring.index(2 * stage + r))
        for r in gl.static_range(LINES):
            copy(n_desc, [2 * i_bh * width + NARROW + r, start], bar, n_ring.index(LINES * stage + r))
        if SUMMED:
            copy(c_desc, [i_bh * padded_queries + start, 0], bar, c_ring.index(stage))
        mbarrier.wait(g_empty.index(stage), phase)
        mbarrier.expect(g_bar, 2 * C.BM * C.D)
        copy(g_desc, [i_b, i_h, start, 0], g_bar, g_ring.index(stage))


@gluon.jit
def value_part(shared, handed, rest, C: gl.constexpr):
    """dv of 64 keys, the exponentials, and their share of dshift and dlog_prior; keys down and queries across."""
    D: gl.constexpr = C.D
    BM: gl.constexpr = C.BM
    M: gl.constexpr = C.M
    LINES: gl.constexpr = C.LINES
    q_ring, g_ring, k_s, _, _, _, r_ring, n_ring, full, empty, ready, turn = shared
    e_ring, e_full, e_empty, g_full, g_empty, logs, done = handed
    p_shift, p_keys, _, p_dv, _, p_part, scale, inverse_variance, _, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, _ = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_all, o_n = k_s.reshape([HALF, D]), i_n * HALF + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    w = down(load_rows(p_keys, o_n, padded_keys, M, False), BM, gl.bfloat16, 0, M)
    dv = gl.zeros([HALF, D], gl.float32, wide)
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    o_m = gl.arange(0, BM, gl.SliceLayout(0, mma)) + (num_keys - num_queries)
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_q = q_ring.index(0).reshape([BM, D])
    s = product(k_all, b_q, zero, C.K_FIRST, C.K_REST)
    for t in range(count):
        stage, start, after = t % C.STAGES, first + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        mix = mixed(across(n_ring, LINES * stage, mma, BM, M - C.FIRST), w, C.FIRST, M, C.BEST)
        s = warpgroup_mma_wait(0, deps=(s,))
        e = gl.exp2(s * scale - r_ring.index(2 * stage).load(mma)).to(gl.bfloat16)
        if C.CAUSAL:
            if start < masked:
                e = gl.where(o_n[:, None] <= (start + o_m)[None, :], e, gl.zeros_like(e))
        mbarrier.wait(e_empty.index(t & 1), (t // 2 & 1) ^ 1)
        e_ring.index(t & 1).store(e)
        mbarrier.arrive(e_full.index(t & 1))
        mbarrier.arrive(empty.index(stage))
        mbarrier.wait(g_full.index(stage), t // C.STAGES & 1)
        p = multiply(e, mix)
        take_turn(turn, 0, t)
        b_q, b_g = q_ring.index(after % C.STAGES).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_g, dv, is_async=True)
        mbarrier.wait(full.index(after % C.STAGES), after // C.STAGES & 1)
        s = product(k_all, b_q, zero, C.K_FIRST, C.K_REST)
        dv = warpgroup_mma_wait(1 if C.K_REST == 0 else 2, deps=(dv,))
        pass_turn(turn, 0)
        mbarrier.arrive(g_empty.index(stage))
    warpgroup_mma_wait(0, deps=(s,))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), i_n * HALF + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    p_block = p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :]
    gl.store(p_block, dv.to(gl.bfloat16), mask=inside(o_r < num_keys, o_d, C.DV, D))
    b_k, p_part = k_all.load(wide).to(gl.float32), p_part + i_n * M * C.PART
    mbarrier.wait(done, 0)
    for r in gl.static_range(M):
        dlog_w = logs.index(r).load(gl.SliceLayout(1, wide))
        store_share(pull_of(dlog_w, b_k, p_shift, o_d, r, C), dlog_w, p_part, o_d, inverse_variance, r, C)


@gluon.jit
def grad_part(shared, handed, rest, C: gl.constexpr):
    """dk of 64 keys, and their part of the gradient of a prior per position."""
    D: gl.constexpr = C.D
    BM: gl.constexpr = C.BM
    M: gl.constexpr = C.M
    LINES: gl.constexpr = C.LINES
    q_ring, g_ring, k_s, v_s, c_ring, c_other, r_ring, n_ring, full, empty, ready, turn = shared
    e_ring, e_full, e_empty, g_full, g_empty, logs, done = handed
    p_shift, p_keys, p_dk, _, p_dlw, _, _, inverse_variance, stride_k, _ = rest[:10]
    _, num_keys, i_n, _, _, count, padded_keys, positions = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    k_all, v_all = k_s.reshape([HALF, D]), v_s.reshape([HALF, D])
    o_n = i_n * HALF + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    weights = load_rows(p_keys, o_n, padded_keys, M, False)
    w = down(weights, BM, gl.bfloat16, 0, M)
    gap = w[0]
    if C.BEST:  # what a query must lead by for the second component to win
        gap = gl.load(p_keys + 3 * padded_keys + o_n) - gl.load(p_keys + 4 * padded_keys + o_n)
        gap = gl.minimum(gl.maximum(gap, -60000.0), 60000.0).to(gl.float16)[:, None].broadcast_to([HALF, BM])
    dk = gl.zeros([HALF, D], gl.float32, wide)
    dw = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    mbarrier.wait(ready, 0)
    mbarrier.wait(g_full.index(0), 0, pred=count > 0)
    b_g = g_ring.index(0).reshape([BM, D])
    slope = product(v_all, b_g, zero, C.V_FIRST, C.V_REST)
    for t in range(count):
        stage, after = t % C.STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        mbarrier.wait(full.index(stage), t // C.STAGES & 1)
        mix = mixed(across(n_ring, LINES * stage, mma, BM, M - C.FIRST), w, C.FIRST, M, C.BEST)
        mbarrier.wait(e_full.index(t & 1), t // 2 & 1)
        e = e_ring.index(t & 1).load(mma)
        slope = warpgroup_mma_wait(0, deps=(slope,))
        mbarrier.arrive(e_empty.index(t & 1))
        mbarrier.arrive(g_empty.index(stage))
        g = (e.to(gl.float32) * (slope - r_ring.index(2 * stage + 1).load(mma))).to(gl.bfloat16)
        ds = multiply(g, mix)
        if C.BEST:
            lead = n_ring.index(2 * stage + 1).load(mma).to(gl.float16, bitcast=True).broadcast_to([HALF, BM])
            g = where_larger(gap, lead, ds)
        take_turn(turn, 1, t)
        b_c = c_other
        if C.BEST:
            dw = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, thin, 2)), c_ring, dw, is_async=True)
        elif M > 1:
            b_c = c_ring.index(stage)
        dw = warpgroup_mma(gl.convert_layout(g, gl.DotOperandLayout(0, thin, 2)), b_c, dw, is_async=True)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(after % C.STAGES).reshape([BM, D])
        dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_q, dk, is_async=True)
        mbarrier.wait(g_full.index(after % C.STAGES), after // C.STAGES & 1)
        slope = product(v_all, b_g, zero, C.V_FIRST, C.V_REST)
        dw, dk = warpgroup_mma_wait(1 if C.V_REST == 0 else 2, deps=(dw, dk))
        pass_turn(turn, 1)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(slope,))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), i_n * HALF + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    real, grads = o_r < num_keys, ()
    for r in gl.static_range(M):
        grads = grads + (log_grad(dw, weights, real, r, wide, C),)
        logs.index(r).store(grads[r])
        if C.POSITIONS:
            gl.store(p_dlw + r * positions + o_r, grads[r], mask=real)
    mbarrier.arrive(done)
    b_k = k_all.load(wide).to(gl.float32)
    for r in gl.static_range(M):
        dk -= pull_of(grads[r], b_k, p_shift, o_d, r, C)
    p_block = p_dk + o_r.to(gl.int64)[:, None] * stride_k + o_d[None, :]
    gl.store(p_block, (dk * inverse_variance).to(gl.bfloat16), mask=inside(real, o_d, C.DK, D))


@gluon.jit
def wide_key_block(part: gl.constexpr, shared, handed, rest, C: gl.constexpr):
    if part == 0:
        value_part(shared, handed, rest, C)
    else:
        grad_part(shared, handed, rest, C)
