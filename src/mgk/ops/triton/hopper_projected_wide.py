"""The key side of projected keys for heads wider than 64 on Hopper GPUs; see hopper_projected.py.

The sums of dk_0, dk_1 and dv of 64 keys are 192 registers a thread. One warp group has them and nothing else. Two more
take turns with the tiles of queries: each computes the scores and weights of every second tile, and hands the weights
and the gradients of the scores over through shared memory. So no product is computed twice.

Of p and ds_0 there are two places, one for each of the two warp groups, and of ds_1 there is one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mgk.ops.triton.hopper_common import (
    COLUMNS,
    COUNTS,
    HALF,
    column_of,
    inside,
    multiply,
    ring_barriers,
    second_of,
    unit_columns,
    without,
    work_of,
)
from mgk.ops.triton.hopper_projected_keys import load_queries, store_key


@gluon.jit
def hand_over(kind: gl.constexpr, BM: gl.constexpr):
    """Where p, ds_0 and ds_1 of 64 keys go, and barriers that they are there or read."""
    layout: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, 2)
    p_s = gl.allocate_shared_memory(kind, [2, HALF, BM], layout)
    ds_0_s = gl.allocate_shared_memory(kind, [2, HALF, BM], layout)
    ds_1_s = gl.allocate_shared_memory(kind, [HALF, BM], layout)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return p_s, ds_0_s, ds_1_s, full, empty


@gluon.jit
def shares_of(s_0, s_1, lse, w_0, w_1, scale, dtype: gl.constexpr, BEST: gl.constexpr):
    """The share of each component in the weights; one of the two is 0 in a hard E-step."""
    if BEST:
        x_0, x_1 = s_0 * scale + w_0, s_1 * scale + w_1
        e = gl.exp2(gl.maximum(x_0, x_1) - lse).to(dtype)
        e_1 = second_of(x_0, x_1, e)
        e_0 = without(e, e_1)
    elif dtype == gl.float16:
        e_0, e_1 = gl.exp2(s_0 * scale + w_0 - lse).to(dtype), gl.exp2(s_1 * scale + w_1 - lse).to(dtype)
    else:
        e_0, e_1 = gl.exp2(s_0 * scale - lse).to(dtype), gl.exp2(s_1 * scale - lse).to(dtype)
        e_0, e_1 = multiply(e_0, w_0.broadcast_to(s_0.shape)), multiply(e_1, w_1.broadcast_to(s_0.shape))
    return e_0, e_1


@gluon.jit
def weight_part(
    part: gl.constexpr, shared, handed, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """Weights and gradients of the scores of every second tile of queries, and their sums over the queries."""
    q_ring, g_ring, k_s, v_s, r_ring, full, _, ready, _ = shared
    p_s, ds_0_s, ds_1_s, handed_full, handed_empty = handed
    p_keys, scale, num_queries, num_keys, i_n, first, masked, count, padded_keys = rest
    dtype: gl.constexpr = k_s.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_0, k_1, v_all = k_s.index(0).reshape([BN, D]), k_s.index(1).reshape([BN, D]), v_s.reshape([BN, D])
    o_n = i_n * BN + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    w_0, w_1 = gl.load(p_keys + o_n)[:, None], gl.load(p_keys + padded_keys + o_n)[:, None]
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    o_m = gl.arange(0, BM, gl.SliceLayout(0, mma)) + (num_keys - num_queries)
    mbarrier.wait(ready, 0)
    for t in range(part, count, 2):
        stage, turn = t % STAGES, t // 2 & 1
        mbarrier.wait(full.index(stage), t // STAGES & 1)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        s_0 = warpgroup_mma(k_0, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s_1 = warpgroup_mma(k_1, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s_0, s_1 = warpgroup_mma_wait(0, deps=(s_0, s_1))
        e_0, e_1 = shares_of(s_0, s_1, r_ring.index(2 * stage).load(mma), w_0, w_1, scale, dtype, BEST)
        slope = warpgroup_mma(v_all, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
        start = first + t * BM
        if CAUSAL:
            if start < masked:
                seen = o_n[:, None] <= (start + o_m)[None, :]
                e_0, e_1 = gl.where(seen, e_0, gl.zeros_like(e_0)), gl.where(seen, e_1, gl.zeros_like(e_1))
        p = e_0 + e_1
        slope = warpgroup_mma_wait(0, deps=(slope,))
        g = slope - r_ring.index(2 * stage + 1).load(mma)
        if dtype == gl.float16:
            ds_0, ds_1 = (e_0.to(gl.float32) * g).to(dtype), (e_1.to(gl.float32) * g).to(dtype)
        else:
            ds_0, ds_1 = multiply(e_0, g.to(dtype)), multiply(e_1, g.to(dtype))
        mbarrier.wait(handed_empty.index(part), turn ^ 1)
        p_s.index(part).store(p)
        ds_0_s.index(part).store(ds_0)
        fence_async_shared()
        mbarrier.arrive(handed_full.index(part))
        mbarrier.wait(handed_empty.index(2), (t & 1) ^ 1)
        ds_1_s.store(ds_1)
        fence_async_shared()
        mbarrier.arrive(handed_full.index(2))


@gluon.jit
def grad_part(
    shared, more, handed, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr,
    STAGES: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and their share of dlog_prior."""
    q_ring, g_ring, k_s, _, _, full, empty, _, _ = shared
    p_s, ds_0_s, ds_1_s, handed_full, handed_empty = handed
    c_0, c_1 = more
    p_dk, p_dv, p_dlw, p_part, inverse_variance, stride_m, stride_k, stride_v, num_keys, i_n, count, positions = rest
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dw = warpgroup_mma_init(gl.zeros([HALF, COLUMNS], gl.float32, thin))
    dk_0 = warpgroup_mma_init(gl.zeros([HALF, D], gl.float32, wide))
    dk_1 = warpgroup_mma_init(gl.zeros([HALF, D], gl.float32, wide))
    dv = warpgroup_mma_init(gl.zeros([HALF, D], gl.float32, wide))
    for t in range(count):
        stage = t % STAGES
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        mbarrier.wait(full.index(stage), t // STAGES & 1)
        mbarrier.wait(handed_full.index(t & 1), t // 2 & 1)
        dv = warpgroup_mma(p_s.index(t & 1), b_g, dv, is_async=True)
        dk_0 = warpgroup_mma(ds_0_s.index(t & 1), b_q, dk_0, is_async=True)
        dk_1 = warpgroup_mma_wait(2, deps=(dk_1,))
        if t > 0:  # the tile before has been read; in this order, see `weight_part`
            mbarrier.arrive(handed_empty.index(2))
            mbarrier.arrive(handed_empty.index((t & 1) ^ 1))
            mbarrier.arrive(empty.index((t - 1) % STAGES))
        mbarrier.wait(handed_full.index(2), t & 1)
        dw = warpgroup_mma(ds_0_s.index(t & 1), c_0, dw, is_async=True)
        dw = warpgroup_mma(ds_1_s, c_1, dw, is_async=True)
        dk_1 = warpgroup_mma(ds_1_s, b_q, dk_1, is_async=True)
    dv, dw, dk_0, dk_1 = warpgroup_mma_wait(0, deps=(dv, dw, dk_0, dk_1))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), i_n * BN + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    p_block = p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :]
    gl.store(p_block, dv.to(k_s.dtype), mask=inside(o_r < num_keys, o_d, WV, D))
    for r in gl.static_range(2):
        store_key(
            dk_1 if r == 1 else dk_0, column_of(dw, r, wide), k_s.index(r).reshape([BN, D]), p_dk + r * stride_m,
            p_dlw + r * positions, p_part + i_n * 4 + 2 * r, inverse_variance, stride_k, o_r, o_d, num_keys, D, W,
            POSITIONS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, r_desc, KEYS, OVERFLOW, DK, DV, DLW, PART, scale, inverse_variance, sdb, sdh, sdm,
    sdn, seb, seh, sen, groups, section, H, num_queries, num_keys, positions, padded_keys, parts, width,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """As `hopper_projected_keys.key_kernel`, for blocks of 64 keys."""
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BM, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, 1, BM, D], g_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, BN, D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BM], r_desc.layout)
    more = (unit_columns(0, BM, q_desc.dtype), unit_columns(1, BM, q_desc.dtype))
    full, empty = ring_barriers(STAGES, 1)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    handed = hand_over(q_desc.dtype, BM)
    fence_async_shared()
    offset, first, masked = num_keys - num_queries, 0, 0
    if CAUSAL:
        first = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - first, 0), BM)
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, ready)
        known = (
            KEYS + i_g * 2 * padded_keys, scale, num_queries, num_keys, i_n, first, masked, count, padded_keys,
        )  # fmt: skip
        results = (
            p_dk, p_dv, DLW + i_g * 2 * positions, PART + i_g * parts * 4, inverse_variance, sdm, sdn, sen, num_keys,
            i_n, count, positions,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, r_desc), (i_b, i_h, i_bh, i_n, first, count, width)
        gl.warp_specialize(
            [
                (grad_part, (shared, more, handed, results, BM, BN, D, W, WV, STAGES, POSITIONS)),
                (weight_part, (gl.constexpr(0), shared, handed, known, BM, BN, D, STAGES, CAUSAL, BEST)),
                (weight_part, (gl.constexpr(1), shared, handed, known, BM, BN, D, STAGES, CAUSAL, BEST)),
                (load_queries, (loads, shared, where, BM, BN, D, STAGES)),
            ],
            [4, 4, 1], [128, 128, 24],
        )  # fmt: skip
