"""The backward kernels for shifted keys on Hopper GPUs; see hopper.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mgk.ops.triton.hopper import LEAST_LINE, across, down, load_keys, load_rows, load_shares, mixed, settings_of
from mgk.ops.triton.hopper_common import (
    BLOCK,
    COLUMNS,
    COUNTS,
    HALF,
    NARROW,
    ROW16,
    ROW32,
    barriers,
    column_of,
    columns,
    copy,
    even,
    inside,
    lines,
    load_line,
    multiply,
    pass_turn,
    product,
    range_of,
    ring_barriers,
    run,
    seen_keys,
    store_keys,
    strides,
    take_turn,
    tiles,
    unit_columns,
    where_larger,
    work_of,
)
from mgk.ops.triton.hopper_wide import hand_over, load_wide_queries, wide_key_block
from mgk.ops.triton.loads import constants

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem


@gluon.jit
def store_columns(p_columns, o_m, rho, kind: gl.constexpr, M: gl.constexpr):
    """Each rho, side by side: a product with them sums what the key side needs."""
    side: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    o_c, o_l = gl.arange(0, COLUMNS, gl.SliceLayout(0, side)), gl.convert_layout(o_m, gl.SliceLayout(1, side))
    block = gl.zeros([HALF, COLUMNS], gl.float32, side)
    for r in gl.static_range(M):
        block = gl.where((o_c == r)[None, :], gl.convert_layout(rho[r], gl.SliceLayout(1, side))[:, None], block)
    gl.store(p_columns + o_l[:, None] * COLUMNS + o_c[None, :], block.to(kind))


@gluon.jit
def query_block(part: gl.constexpr, shared, rest, C: gl.constexpr):
    """dq of 64 queries, what the key side needs of them, and their share of dshift."""
    D: gl.constexpr = C.D
    BN: gl.constexpr = C.BN
    M: gl.constexpr = C.M
    FIRST: gl.constexpr = C.FIRST
    SUMS: gl.constexpr = C.SUMS
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    q_s, g_s, k_ring, v_ring, c_ring, w_ring, extra_ring, full, empty, ready, turn, v_full, v_empty = shared
    p_shift, p_out, p_rows, p_known, p_narrow, p_row_columns, p_dq, p_part = rest[:8]
    scale, inverse_variance, stride_o, stride_d, num_queries, num_keys, i_m, whole, count, padded_queries = rest[8:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    first = i_m * C.BM + part * HALF
    q_half = q_s.reshape([C.BM, D]).slice(part * HALF, HALF, 0)
    g_half = g_s.reshape([C.BM, D]).slice(part * HALF, HALF, 0)
    o_m = first + gl.arange(0, HALF, row)
    lse = gl.load(p_rows + o_m)
    if C.FIXED:
        rho = load_rows(p_rows, o_m, padded_queries, M, C.BEST)
    else:
        rho, top = load_shares(p_rows, o_m, padded_queries, M)
        lse = lse - (top - gl.load(p_rows + (1 + M) * padded_queries + o_m))
    o_f, o_d = first + gl.arange(0, HALF, gl.SliceLayout(1, flat)), gl.arange(0, D, gl.SliceLayout(0, flat))
    p_block = p_out + o_f.to(gl.int64)[:, None] * stride_o + o_d[None, :]
    b_o = gl.load(p_block, mask=inside(o_f < num_queries, o_d, C.DV, D), other=0.0).to(gl.float32)
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(b_o * g_half.load(flat).to(gl.float32), 1), row)
    gl.store(p_known + o_m, lse)
    gl.store(p_known + padded_queries + o_m, delta)
    for r in gl.static_range(FIRST, M):
        gl.store(p_narrow + (r - FIRST) * padded_queries + o_m, rho[r].to(kind))
    narrow_lead = delta
    if C.BEST:
        narrow_lead = gl.load(p_rows + 2 * padded_queries + o_m).to(gl.float16)
        gl.store(p_narrow + padded_queries + o_m, narrow_lead.to(gl.bfloat16, bitcast=True))
        narrow_lead = narrow_lead[:, None].broadcast_to([HALF, BN])
    elif M > 1:
        store_columns(p_row_columns, o_m, rho, kind, M)

    dq = gl.zeros([HALF, D], gl.float32, wide)
    du = gl.zeros([HALF, SUMS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    narrow_rho = down(rho, BN, kind, FIRST, M)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    mbarrier.wait(v_full.index(0), 0, pred=count > 0)
    b_k, b_v = k_ring.index(0).reshape([BN, D]), v_ring.index(0).reshape([BN, D])
    s = product(q_half, b_k, zero, C.K_FIRST, C.K_REST)
    slope = product(g_half, b_v, zero, C.V_FIRST, C.V_REST)
    for t in range(count):
        stage, after = t % C.STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        mix = mixed(narrow_rho, across(w_ring, M * stage, mma, BN, M), FIRST, M, C.BEST)
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        if C.SPLIT:
            mbarrier.arrive(v_empty.index(t % C.VALUES))
        x = s * scale
        if not C.FIXED:
            x = x + extra_ring.index(stage).load(mma)
        e = gl.exp2(x - lse[:, None])
        if C.CAUSAL or not C.EVEN:
            if t >= whole:
                e = gl.where(seen_keys(o_m, t * BN + o_n, num_queries, num_keys, C.CAUSAL, C.EVEN), e, 0.0)
        g = (e * (slope - delta[:, None])).to(kind)
        ds = multiply(g, mix)
        if C.BEST:
            g = where_larger(extra_ring.index(stage).load(mma).broadcast_to([HALF, BN]), narrow_lead, ds)
        mbarrier.wait(full.index(after % C.STAGES), after // C.STAGES & 1)
        take_turn(turn, part, t)
        b_k = k_ring.index(stage).reshape([BN, D])
        if M > 1:
            b_c = c_ring if C.BEST else c_ring.index(stage).permute((1, 0)) if C.SPLIT else c_ring.index(stage)
            du = warpgroup_mma(gl.convert_layout(g, gl.DotOperandLayout(0, thin, 2)), b_c, du, is_async=True)
        dq = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_k, dq, is_async=True)
        if not C.EARLY:
            du, dq = warpgroup_mma_wait(0, deps=(du, dq))
        b_k, b_v = k_ring.index(after % C.STAGES).reshape([BN, D]), v_ring.index(after % C.VALUES).reshape([BN, D])
        s = product(q_half, b_k, zero, C.K_FIRST, C.K_REST)
        if C.SPLIT:
            mbarrier.wait(v_full.index(after % C.VALUES), after // C.VALUES & 1)
        slope = product(g_half, b_v, zero, C.V_FIRST, C.V_REST)
        if C.EARLY:
            du, dq = warpgroup_mma_wait(C.UNDER_WAY, deps=(du, dq))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))

    o_d = gl.arange(0, D, gl.SliceLayout(0, wide))
    b_q, p_part = q_half.load(wide).to(gl.float32), p_part + (2 * i_m + part) * M * C.PART
    remaining = gl.zeros([D], gl.float32, gl.SliceLayout(0, wide))
    for r in gl.static_range(1, M):  # rows of dl sum to 0: the first component has what the others leave
        dlog_u = column_of(du, r, wide)
        if not C.BEST:
            dlog_u = dlog_u * gl.convert_layout(rho[r], gl.SliceLayout(1, wide))
        b_b = load_line(p_shift + r * C.DK, o_d, C.DK, D) - load_line(p_shift, o_d, C.DK, D)
        dq = dq + dlog_u[:, None] * b_b[None, :]
        share = gl.sum(dlog_u[:, None] * b_q, 0) * inverse_variance
        gl.store(p_part + r * C.PART + o_d, share, mask=o_d < C.DK)
        remaining -= share
    gl.store(p_part + o_d, remaining, mask=o_d < C.DK)
    o_r = (first + gl.arange(0, HALF, gl.SliceLayout(1, wide))).to(gl.int64)
    dq = (dq * inverse_variance).to(kind)
    gl.store(p_dq + o_r[:, None] * stride_d + o_d[None, :], dq, mask=inside(o_r < num_queries, o_d, C.DK, D))


@gluon.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, extra_desc, SHIFT, OUT, ROWS, OVERFLOW, ROW_STATS, NARROW_ROWS,
    ROW_COLUMNS, DQ, PART, scale, inverse_variance, sob, soh, son, sdb, sdh, sdn, groups, section, H, num_queries,
    num_keys, padded_queries, padded_keys, parts, width, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.STAGES
    BN: gl.constexpr = C.BN
    M: gl.constexpr = C.M
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, C.BM), groups, section)
    i_m, i_b, i_h, i_g = gl.cdiv(num_queries, C.BM) - 1 - i_block, i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(kind, [1, 1, C.BM, C.D], q_desc.layout)
    g_s = gl.allocate_shared_memory(kind, [1, 1, C.BM, C.D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(kind, [STAGES, 1, 1, BN, C.D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(kind, [C.VALUES, 1, 1, BN, C.D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [M * STAGES, 1, BN], w_desc.layout)
    extra_ring, c_ring = w_ring, w_ring
    if not C.FIXED:
        extra_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], extra_desc.layout)
    if C.BEST:
        extra_ring = gl.allocate_shared_memory(gl.float16, [STAGES, 1, BN], extra_desc.layout)
        c_ring = unit_columns(1, BN)
    elif M > 1 and C.SPLIT:
        c_ring = gl.allocate_shared_memory(kind, [STAGES, C.SUMS, BN], c_desc.layout)
    elif M > 1:
        c_ring = gl.allocate_shared_memory(kind, [STAGES, BN, COLUMNS], c_desc.layout)
    full, empty, ready, turn = barriers(STAGES)
    v_full, v_empty = full, empty
    if C.SPLIT:
        v_full, v_empty = ring_barriers(C.VALUES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, C.BM, BN, C.CAUSAL)
    p_rows, p_known = ROWS + i_g * (1 + 2 * M) * padded_queries, ROW_STATS + i_g * width * padded_queries
    p_narrow = NARROW_ROWS + (2 * i_g * width + NARROW) * padded_queries
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    p_dq = DQ + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_columns, p_part = ROW_COLUMNS, PART + i_g * parts * M * C.PART
    if not C.BEST:
        p_columns += i_g * COLUMNS * padded_queries
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_s, g_s, k_ring, v_ring, c_ring, w_ring, extra_ring, full, empty, ready, turn, v_full, v_empty)
        rest = (
            SHIFT + i_h * M * C.DK, p_out, p_rows, p_known, p_narrow, p_columns, p_dq, p_part, scale, inverse_variance,
            son, sdn, num_queries, num_keys, i_m, whole, count, padded_queries,
        )  # fmt: skip
        loads = (q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, extra_desc)
        where = (i_b, i_h, i_bh, i_m, count, padded_keys)
        gl.warp_specialize(
            [
                (query_block, (gl.constexpr(0), shared, rest, C)),
                (query_block, (gl.constexpr(1), shared, rest, C)),
                (load_keys, (loads, shared, where, gl.constexpr(False), C)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def load_queries(loads, shared, where, C: gl.constexpr):
    """The block of keys, then tile after tile of queries."""
    LINES: gl.constexpr = C.LINES
    SUMMED: gl.constexpr = C.M > 1 and not C.BEST
    q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc = loads
    q_ring, g_ring, k_s, v_s, c_ring, _, r_ring, n_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_n, first, count, padded_queries, width = where
    mbarrier.expect(ready, 4 * C.BN * C.D)
    copy(k_desc, [i_b, i_h, i_n * C.BN, 0], ready, k_s)
    copy(v_desc, [i_b, i_h, i_n * C.BN, 0], ready, v_s)
    for t in range(count):
        stage, start = t % C.STAGES, first + t * C.BM
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // C.STAGES & 1) ^ 1)
        mbarrier.expect(bar, C.BM * (4 * C.D + 8 + 2 * LINES + (2 * COLUMNS if SUMMED else 0)))
        copy(q_desc, [i_b, i_h, start, 0], bar, q_ring.index(stage))
        copy(g_desc, [i_b, i_h, start, 0], bar, g_ring.index(stage))
        for r in gl.static_range(2):
            copy(r_desc, [i_bh * width + r, start], bar, r_ring.index(2 * stage + r))
        for r in gl.static_range(LINES):
            copy(n_desc, [2 * i_bh * width + NARROW + r, start], bar, n_ring.index(LINES * stage + r))
        if SUMMED:
            copy(c_desc, [i_bh * padded_queries + start, 0], bar, c_ring.index(stage))


@gluon.jit
def key_block(part: gl.constexpr, shared, rest, C: gl.constexpr):
    """dk and dv of 64 keys, and their share of dshift and dlog_prior; keys down and queries across."""
    D: gl.constexpr = C.D
    BM: gl.constexpr = C.BM
    M: gl.constexpr = C.M
    LINES: gl.constexpr = C.LINES
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    q_ring, g_ring, k_s, v_s, c_ring, c_other, r_ring, n_ring, full, empty, ready, turn = shared
    _, p_keys, _, p_dv, _, _, scale, _, _, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, _ = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    start_n = i_n * C.BN + part * HALF
    k_half = k_s.reshape([C.BN, D]).slice(part * HALF, HALF, 0)
    v_half = v_s.reshape([C.BN, D]).slice(part * HALF, HALF, 0)
    o_n = start_n + gl.arange(0, HALF, row)
    if C.FIXED:
        weights = load_rows(p_keys, o_n, padded_keys, M, False)
        top = o_n
    else:
        weights, top = load_shares(p_keys, o_n, padded_keys, M)
    w = down(weights, BM, kind, 0, M)
    gap = w[0]
    if C.BEST:  # what a query must lead by for the second component to win
        gap = gl.load(p_keys + 3 * padded_keys + o_n) - gl.load(p_keys + 4 * padded_keys + o_n)
        gap = gl.minimum(gl.maximum(gap, -60000.0), 60000.0).to(gl.float16)[:, None].broadcast_to([HALF, BM])
    dk = gl.zeros([HALF, D], gl.float32, wide)
    dv = gl.zeros([HALF, D], gl.float32, wide)
    dw = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    o_m = gl.arange(0, BM, gl.SliceLayout(0, mma)) + (num_keys - num_queries)
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_q, b_g = q_ring.index(0).reshape([BM, D]), g_ring.index(0).reshape([BM, D])
    s = product(k_half, b_q, zero, C.K_FIRST, C.K_REST)
    slope = product(v_half, b_g, zero, C.V_FIRST, C.V_REST)
    for t in range(count):
        stage, start, after = t % C.STAGES, first + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        x = s * scale
        if not C.FIXED:
            x = x + top[:, None]
        e = gl.exp2(x - r_ring.index(2 * stage).load(mma))
        g = (e * (slope - r_ring.index(2 * stage + 1).load(mma))).to(kind)
        p = e.to(kind)
        if C.CAUSAL:
            if start < masked:
                seen = o_n[:, None] <= (start + o_m)[None, :]
                p, g = gl.where(seen, p, gl.zeros_like(p)), gl.where(seen, g, gl.zeros_like(g))
        mix = mixed(across(n_ring, LINES * stage, mma, BM, M - C.FIRST), w, C.FIRST, M, C.BEST)
        p, ds = multiply(p, mix), multiply(g, mix)
        if C.BEST:
            lead = n_ring.index(2 * stage + 1).load(mma).to(gl.float16, bitcast=True).broadcast_to([HALF, BM])
            g = where_larger(gap, lead, ds)
        mbarrier.wait(full.index(after % C.STAGES), after // C.STAGES & 1)
        take_turn(turn, part, t)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_g, dv, is_async=True)
        b_c = c_other
        if C.BEST:
            dw = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, thin, 2)), c_ring, dw, is_async=True)
        elif M > 1:
            b_c = c_ring.index(stage)
        dw = warpgroup_mma(gl.convert_layout(g, gl.DotOperandLayout(0, thin, 2)), b_c, dw, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_q, dk, is_async=True)
        if not C.EARLY:
            dv, dw, dk = warpgroup_mma_wait(0, deps=(dv, dw, dk))
        b_q, b_g = q_ring.index(after % C.STAGES).reshape([BM, D]), g_ring.index(after % C.STAGES).reshape([BM, D])
        s = product(k_half, b_q, zero, C.K_FIRST, C.K_REST)
        slope = product(v_half, b_g, zero, C.V_FIRST, C.V_REST)
        if C.EARLY:
            dv, dw, dk = warpgroup_mma_wait(C.UNDER_WAY, deps=(dv, dw, dk))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))

    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), start_n + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    p_block = p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :]
    gl.store(p_block, dv.to(kind), mask=inside(o_r < num_keys, o_d, C.DV, D))
    store_keys(dk, dw, weights, k_half, rest, start_n, 2 * i_n + part, C)


@gluon.jit
def key_part(part: gl.constexpr, shared, handed, rest, C: gl.constexpr):
    if C.BN == HALF:
        wide_key_block(part, shared, handed, rest, C)
    else:
        key_block(part, shared, rest, C)


@gluon.jit
def load_part(loads, shared, handed, where, C: gl.constexpr):
    if C.BN == HALF:
        load_wide_queries(loads, shared, handed, where, C)
    else:
        load_queries(loads, shared, where, C)


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc, SHIFT, KEYS, OVERFLOW, DK, DV, DLW, PART, scale,
    inverse_variance, sdb, sdh, sdn, seb, seh, sen, groups, section, H, num_queries, num_keys, positions,
    padded_queries, padded_keys, query_parts, parts, width, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.STAGES
    BM: gl.constexpr = C.BM
    BN: gl.constexpr = C.BN
    M: gl.constexpr = C.M
    LINES: gl.constexpr = C.LINES
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(kind, [STAGES, 1, 1, BM, C.D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(kind, [STAGES, 1, 1, BM, C.D], g_desc.layout)
    k_s = gl.allocate_shared_memory(kind, [1, 1, BN, C.D], k_desc.layout)
    v_s = gl.allocate_shared_memory(kind, [1, 1, BN, C.D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BM], r_desc.layout)
    n_ring = r_ring
    if LINES > 0:
        n_ring = gl.allocate_shared_memory(kind, [LINES * STAGES, 1, BM], n_desc.layout)
    if C.BEST:
        c_ring, c_other = unit_columns(0, BM), unit_columns(1, BM)
    elif M > 1:
        c_ring = gl.allocate_shared_memory(kind, [STAGES, BM, COLUMNS], c_desc.layout)
        c_other = c_ring
    else:
        c_ring = unit_columns(0, BM, kind)
        c_other = c_ring
    full, empty, ready, turn = barriers(STAGES)
    handed = (full, empty)
    if BN == HALF:
        handed = hand_over(BM, STAGES, M)
    fence_async_shared()
    offset, first, masked = num_keys - num_queries, 0, 0
    if C.CAUSAL:
        first = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - first, 0), BM)
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    p_keys, p_part = KEYS + i_g * (1 + 2 * M) * padded_keys, PART + (i_g * parts + query_parts) * M * C.PART
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_ring, g_ring, k_s, v_s, c_ring, c_other, r_ring, n_ring, full, empty, ready, turn)
        rest = (
            SHIFT + i_h * M * C.DK, p_keys, p_dk, p_dv, DLW + i_g * M * positions, p_part, scale, inverse_variance, sdn,
            sen, num_queries, num_keys, i_n, first, masked, count, padded_keys, positions,
        )  # fmt: skip
        loads = (q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc)
        where = (i_b, i_h, i_bh, i_n, first, count, padded_queries, width)
        gl.warp_specialize(
            [
                (key_part, (gl.constexpr(0), shared, handed, rest, C)),
                (key_part, (gl.constexpr(1), shared, handed, rest, C)),
                (load_part, (loads, shared, handed, where, C)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def query_side(
    p: Problem, saved: Saved, tops: Tensor | None, grad: Tensor, columns_: tuple[Tensor | None, Tensor | None],
    row_stats: Tensor, grad_query: Tensor, part: Tensor,
) -> None:  # fmt: skip
    """dq, `row_stats` as vectors along the queries, and the first entries of `part`, of the heads that fit."""
    output, rows, log_weights, factors, overflow = saved
    (key_columns, row_columns), query, key = columns_, p.query, p.key
    size = settings_of(p, "query_kernel", EVEN=even(query, key))
    keys, width = size["BN"], size["D"]
    weights = lines(log_weights, keys, ROW32) if keys < LEAST_LINE.value else lines(factors, keys, ROW16)
    sums = weights
    if not p.hard:
        sums = tiles(factors.flatten(0, 1), size["SUMS"], keys) if size["SPLIT"] else columns(key_columns, keys)
    extra = lines(key_columns, keys, ROW16) if p.hard else weights if tops is None else lines(tops, keys, ROW32)
    run(
        query_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(grad, BLOCK, width),
        tiles(key, keys, width), tiles(p.value, keys, width), sums, weights, extra, p.shift, output, rows, overflow,
        row_stats, row_stats.view(factors.dtype), factors if row_columns is None else row_columns, grad_query, part,
        p.numbers[0], 1 / p.variance, *strides(output, grad_query), p.groups, p.section, p.heads, query.shape[2],
        key.shape[2], rows.shape[-1], factors.shape[-1], part.shape[2], row_stats.shape[-1], C=constants(**size),
    )  # fmt: skip


def key_side(
    p: Problem, saved: Saved, grad: Tensor, row_columns: Tensor | None, row_stats: Tensor, grads: list[Tensor],
    part: Tensor,
) -> None:  # fmt: skip
    """dk, dv, the gradient of a prior per position and the rest of `part`, of the heads that fit."""
    _, _, keys, _, overflow = saved
    _, grad_key, grad_value, grad_bias = grads
    query, key = p.query, p.key
    size = settings_of(p, "key_kernel", POSITIONS=grad_bias.dim() > 1)
    queries, block, width = size["BM"], size["BN"], size["D"]
    groups, length, _ = row_stats.shape
    vectors = lines(row_stats.view(groups, -1, length), queries, ROW32)
    narrow = lines(row_stats.view(query.dtype).view(groups, -1, length), queries, ROW16)
    run(
        key_kernel, key.shape[2], block, query, tiles(query, queries, width), tiles(grad, queries, width),
        tiles(key, block, width), tiles(p.value, block, width),
        vectors if row_columns is None else columns(row_columns, queries), vectors, narrow, p.shift, keys, overflow,
        grad_key, grad_value, grad_bias, part, p.numbers[0], 1 / p.variance, *strides(grad_key, grad_value), groups,
        p.section, p.heads, query.shape[2], key.shape[2], p.positions, length, keys.shape[-1], length // HALF.value,
        part.shape[2], row_stats.shape[-1], C=constants(**size),
    )  # fmt: skip
