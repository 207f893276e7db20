"""The key side of hopper_projected.py: gradients of projected keys and of values, for heads of at most 64 numbers.

The sums of dk_0, dk_1 and dv are 96 registers a thread at D = 64. For wider heads see hopper_projected_wide.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mgk.ops.triton.hopper_common import (
    COLUMNS,
    COUNTS,
    HALF,
    barriers,
    column_of,
    copy,
    inside,
    multiply,
    pass_turn,
    second_of,
    take_turn,
    unit_columns,
    without,
    work_of,
)


@gluon.jit
def load_queries(loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The block of keys, then tile after tile of queries."""
    q_desc, g_desc, k_desc, v_desc, r_desc = loads
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_n, first, count, width = where
    mbarrier.expect(ready, 6 * BN * D)
    for r in gl.static_range(2):
        copy(k_desc, [i_b, i_h, r, i_n * BN, 0], ready, k_s.index(r))
    copy(v_desc, [i_b, i_h, i_n * BN, 0], ready, v_s)
    for t in range(count):
        stage, start = t % STAGES, first + t * BM
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BM * (4 * D + 8))
        copy(q_desc, [i_b, i_h, start, 0], bar, q_ring.index(stage))
        copy(g_desc, [i_b, i_h, start, 0], bar, g_ring.index(stage))
        for r in gl.static_range(2):
            copy(r_desc, [i_bh * width + r, start], bar, r_ring.index(2 * stage + r))


@gluon.jit
def store_key(
    dk, dw, k_s, p_dk, p_dlw, p_part, inverse_variance, stride, o_r, o_d, num_keys, D: gl.constexpr, W: gl.constexpr,
    POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk of one component, and its share of dlog_prior."""
    wide: gl.constexpr = dk.type.layout
    real = o_r < num_keys
    dw = gl.where(real, dw, 0.0)
    grad = ((dk - dw[:, None] * k_s.load(wide).to(gl.float32)) * inverse_variance).to(k_s.dtype)
    gl.store(p_dk + o_r.to(gl.int64)[:, None] * stride + o_d[None, :], grad, mask=inside(real, o_d, W, D))
    gl.store(p_part, gl.sum(dw, 0))
    gl.store(p_part + 1, 0.0)
    if POSITIONS:
        gl.store(p_dlw + o_r, dw, mask=real)


@gluon.jit
def key_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and their share of dlog_prior; keys down and queries across."""
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn = shared
    c_0, c_1 = more
    p_keys, p_dk, p_dv, p_dlw, p_part, scale, inverse_variance, stride_m, stride_k, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, positions = rest[10:]
    dtype: gl.constexpr = k_s.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    thin_operand: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    k_0 = k_s.index(0).reshape([BN, D]).slice(part * HALF, HALF, 0)
    k_1 = k_s.index(1).reshape([BN, D]).slice(part * HALF, HALF, 0)
    v_half = v_s.reshape([BN, D]).slice(part * HALF, HALF, 0)
    start_n = i_n * BN + part * HALF
    o_n = start_n + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    w_0, w_1 = gl.load(p_keys + o_n)[:, None], gl.load(p_keys + padded_keys + o_n)[:, None]
    dk_0 = gl.zeros([HALF, D], gl.float32, wide)
    dk_1 = gl.zeros([HALF, D], gl.float32, wide)
    dv = gl.zeros([HALF, D], gl.float32, wide)
    dw = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    o_m = gl.arange(0, BM, gl.SliceLayout(0, mma)) + (num_keys - num_queries)
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_q, b_g = q_ring.index(0).reshape([BM, D]), g_ring.index(0).reshape([BM, D])
    s_0 = warpgroup_mma(k_0, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
    s_1 = warpgroup_mma(k_1, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(v_half, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, start, after = t % STAGES, first + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        s_0, s_1, slope = warpgroup_mma_wait(0, deps=(s_0, s_1, slope))
        lse, delta = r_ring.index(2 * stage).load(mma), r_ring.index(2 * stage + 1).load(mma)
        if BEST:
            x_0, x_1 = s_0 * scale + w_0, s_1 * scale + w_1
            e = gl.exp2(gl.maximum(x_0, x_1) - lse)
            p, g = e.to(dtype), (e * (slope - delta)).to(dtype)
            if CAUSAL:
                if start < masked:
                    seen = o_n[:, None] <= (start + o_m)[None, :]
                    p, g = gl.where(seen, p, gl.zeros_like(p)), gl.where(seen, g, gl.zeros_like(g))
            ds_1 = second_of(x_0, x_1, g)
            ds_0 = without(g, ds_1)
        elif dtype == gl.float16:
            e_0, e_1, g = gl.exp2(s_0 * scale + w_0 - lse), gl.exp2(s_1 * scale + w_1 - lse), slope - delta
            if CAUSAL:
                if start < masked:
                    seen = o_n[:, None] <= (start + o_m)[None, :]
                    e_0, e_1 = gl.where(seen, e_0, 0.0), gl.where(seen, e_1, 0.0)
            p, ds_0, ds_1 = (e_0 + e_1).to(dtype), (e_0 * g).to(dtype), (e_1 * g).to(dtype)
        else:
            e_0 = gl.exp2(s_0 * scale - lse).to(gl.bfloat16)
            e_1 = gl.exp2(s_1 * scale - lse).to(gl.bfloat16)
            if CAUSAL:
                if start < masked:
                    seen = o_n[:, None] <= (start + o_m)[None, :]
                    e_0, e_1 = gl.where(seen, e_0, gl.zeros_like(e_0)), gl.where(seen, e_1, gl.zeros_like(e_1))
            e_0 = multiply(e_0, w_0.to(gl.bfloat16).broadcast_to([HALF, BM]))
            e_1 = multiply(e_1, w_1.to(gl.bfloat16).broadcast_to([HALF, BM]))
            g = (slope - delta).to(gl.bfloat16)
            p, ds_0, ds_1 = e_0 + e_1, multiply(e_0, g), multiply(e_1, g)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, operand), b_g, dv, is_async=True)
        dw = warpgroup_mma(gl.convert_layout(ds_0, thin_operand), c_0, dw, is_async=True)
        dw = warpgroup_mma(gl.convert_layout(ds_1, thin_operand), c_1, dw, is_async=True)
        dk_0 = warpgroup_mma(gl.convert_layout(ds_0, operand), b_q, dk_0, is_async=True)
        dk_1 = warpgroup_mma(gl.convert_layout(ds_1, operand), b_q, dk_1, is_async=True)
        dv, dw, dk_0, dk_1 = warpgroup_mma_wait(0, deps=(dv, dw, dk_0, dk_1))
        b_q, b_g = q_ring.index(after % STAGES).reshape([BM, D]), g_ring.index(after % STAGES).reshape([BM, D])
        s_0 = warpgroup_mma(k_0, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s_1 = warpgroup_mma(k_1, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        slope = warpgroup_mma(v_half, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s_0, s_1, slope))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), start_n + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    p_block = p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :]
    gl.store(p_block, dv.to(dtype), mask=inside(o_r < num_keys, o_d, WV, D))
    p_part += start_n // HALF * 4
    for r in gl.static_range(2):
        store_key(
            dk_1 if r == 1 else dk_0, column_of(dw, r, wide), k_1 if r == 1 else k_0,
            p_dk + r * stride_m, p_dlw + r * positions, p_part + 2 * r, inverse_variance, stride_k, o_r, o_d, num_keys,
            D, W, POSITIONS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, r_desc, KEYS, OVERFLOW, DK, DV, DLW, PART, scale, inverse_variance, sdb, sdh, sdm,
    sdn, seb, seh, sen, groups, section, H, num_queries, num_keys, positions, padded_keys, parts, width,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BM, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, 1, BM, D], g_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, BN, D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BM], r_desc.layout)
    more = (unit_columns(0, BM, q_desc.dtype), unit_columns(1, BM, q_desc.dtype))
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    offset, first, masked = num_keys - num_queries, 0, 0
    if CAUSAL:
        first = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - first, 0), BM)
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    p_keys, p_part = KEYS + i_g * 2 * padded_keys, PART + i_g * parts * 4
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn)
        rest = (
            p_keys, p_dk, p_dv, DLW + i_g * 2 * positions, p_part, scale, inverse_variance, sdm, sdn, sen, num_queries,
            num_keys, i_n, first, masked, count, padded_keys, positions,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, r_desc), (i_b, i_h, i_bh, i_n, first, count, width)
        gl.warp_specialize(
            [
                (key_block, (gl.constexpr(0), shared, more, rest, BM, BN, D, W, WV, STAGES, CAUSAL, BEST, POSITIONS)),
                (key_block, (gl.constexpr(1), shared, more, rest, BM, BN, D, W, WV, STAGES, CAUSAL, BEST, POSITIONS)),
                (load_queries, (loads, shared, where, BM, BN, D, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
