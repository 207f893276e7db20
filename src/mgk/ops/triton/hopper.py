"""Kernels for shifted keys on Hopper GPUs, in Gluon: two warp groups compute, one warp loads.

Triton waits for each matrix product before it continues. Here two warp groups of four warps, each with half of a block
of 128 queries (or keys), loop over the tiles of the other side independently: while one computes exponentials, the
products of the other run. One more warp copies tiles into a ring buffer in shared memory. The arithmetic is that of
the FAST path of shifted.py, for two components in bfloat16. Heads that would overflow, masks, dropout, other widths and
other GPUs use the generic kernels.

Triton's interpreter does not run Gluon: without a GPU the tests run these kernels in an emulation of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mgk.ops.triton.hopper_common import (
    BLOCK,
    COLUMNS,
    COUNTS,
    HALF,
    ROW16,
    ROW32,
    barriers,
    column_of,
    columns,
    copy,
    even,
    has_bad_sum,
    larger,
    lines,
    multiply,
    multiply_add,
    pass_turn,
    range_of,
    run,
    seen_keys,
    strides,
    take_turn,
    tiles,
    unit_columns,
    where_larger,
    work_of,
)

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem

# (kernel, width): the tile of the other side, how many of those the ring holds, and whether the scores of the next are
# asked for before the sums of this one are there, if there are registers for both
SIZES = {
    ("forward_kernel", 64): (128, 5, True), ("forward_kernel", 128): (64, 5, True),
    ("query_kernel", 64): (128, 5, False), ("query_kernel", 128): (64, 4, True),
    ("key_kernel", 32): (128, 4, False), ("key_kernel", 64): (64, 6, True), ("key_kernel", 128): (64, 4, False),
}  # fmt: skip
# Vectors along the queries that the key side reads lie where the other kernels have numbers side by side: LSE, delta,
# and where a third would be, two narrow ones: rho in bfloat16, and the bits of the lead in float16.
NARROW = gl.constexpr(4)


@gluon.jit
def mixed(rho, w_0, w_1, BEST: gl.constexpr):
    """w_0 + rho w_1, or the larger of the two."""
    if BEST:
        result = larger(w_0, multiply(rho, w_1))
    else:
        result = multiply_add(rho, w_1, w_0)
    return result


@gluon.jit
def load_keys(
    loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BEST: gl.constexpr,
    FORWARD: gl.constexpr,
):  # fmt: skip
    """The block of queries, then tile after tile of keys."""
    q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, gap_desc = loads
    q_s, g_s, k_ring, v_ring, c_ring, w_ring, gap_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_m, count, padded_keys = where
    mbarrier.expect(ready, (2 if FORWARD else 4) * BM * D)
    copy(q_desc, [i_b, i_h, i_m * BM, 0], ready, q_s)
    if not FORWARD:
        copy(g_desc, [i_b, i_h, i_m * BM, 0], ready, g_s)
    for t in range(count):
        stage, start = t % STAGES, t * BN
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BN * (4 * D + 4 + (0 if FORWARD else 2 if BEST else 2 * COLUMNS)))
        copy(k_desc, [i_b, i_h, start, 0], bar, k_ring.index(stage))
        copy(v_desc, [i_b, i_h, start, 0], bar, v_ring.index(stage))
        copy(w_desc, [2 * i_bh, start], bar, w_ring.index(2 * stage))
        copy(w_desc, [2 * i_bh + 1, start], bar, w_ring.index(2 * stage + 1))
        if BEST and not FORWARD:
            copy(gap_desc, [i_bh, start], bar, gap_ring.index(stage))
        if not BEST and not FORWARD:
            copy(c_desc, [i_bh * padded_keys + start, 0], bar, c_ring.index(stage))


@gluon.jit
def forward_block(
    part: gl.constexpr, shared, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """The output of 64 queries and their LSE."""
    q_s, _, k_ring, v_ring, c_ring, w_ring, _, full, empty, ready, turn = shared
    p_out, p_rows, p_overflow, scale, stride_o, num_queries, num_keys, i_m, whole, count, padded_queries = rest
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    q_half = q_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    o_m = i_m * BM + part * HALF + gl.arange(0, HALF, row)
    bound, rho = gl.load(p_rows + o_m), gl.load(p_rows + 2 * padded_queries + o_m)
    if BEST:
        rho = gl.exp2(rho)
    rho = rho.to(gl.bfloat16)[:, None].broadcast_to([HALF, BN])
    acc = gl.zeros([HALF, D], gl.float32, wide)
    sums = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s = warpgroup_mma(q_half, k_ring.index(0).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        w_0 = w_ring.index(2 * stage).load(mma).broadcast_to([HALF, BN])
        w_1 = w_ring.index(2 * stage + 1).load(mma).broadcast_to([HALF, BN])
        mix = mixed(rho, w_0, w_1, BEST)
        s = warpgroup_mma_wait(0, deps=(s,))
        e = gl.exp2(s * scale - bound[:, None])
        if CAUSAL or not EVEN:
            if t >= whole:
                e = gl.where(seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN), e, 0.0)
        p = multiply(e.to(gl.bfloat16), mix)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        sums = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, thin, 2)), c_ring, sums, is_async=True)
        b_v, b_k = v_ring.index(stage).reshape([BN, D]), k_ring.index(after % STAGES).reshape([BN, D])
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_v, acc, is_async=True)
        if not EARLY:
            sums, acc = warpgroup_mma_wait(0, deps=(sums, acc))
        s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        pass_turn(turn, part)
        if EARLY:
            sums, acc = warpgroup_mma_wait(1, deps=(sums, acc))
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s,))

    total = gl.sum(sums, 1)  # the other columns are 0
    here = gl.convert_layout(total, row)
    if gl.max(has_bad_sum(here, o_m, num_queries, num_keys, CAUSAL).to(gl.int32), 0) > 0:
        gl.store(p_overflow + 1, 1.0)
    gl.store(p_rows + o_m, gl.where((here > 0) & (o_m < num_queries), bound + gl.log2(here), float("inf")))
    total = gl.convert_layout(total, gl.SliceLayout(1, wide))
    output = gl.where((total > 0)[:, None], acc / gl.where(total > 0, total, 1.0)[:, None], 0.0)
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), gl.arange(0, HALF, gl.SliceLayout(1, wide))
    o_r = (i_m * BM + part * HALF + o_r).to(gl.int64)
    gl.store(p_out + o_r[:, None] * stride_o + o_d[None, :], output.to(gl.bfloat16), mask=(o_r < num_queries)[:, None])


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_desc, k_desc, v_desc, w_desc, OUT, ROWS, OVERFLOW, scale, sob, soh, son, groups, section, H, num_queries,
    num_keys, padded_queries, padded_keys, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, BN], w_desc.layout)
    c_ring = unit_columns(0, BN)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows = ROWS + i_bh.to(gl.int64) * 5 * padded_queries
    p_out, p_overflow = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh, OVERFLOW + 2 * i_bh
    if gl.load(p_overflow) == 0:
        shared = (q_s, q_s, k_ring, v_ring, c_ring, w_ring, w_ring, full, empty, ready, turn)
        rest = (p_out, p_rows, p_overflow, scale, son, num_queries, num_keys, i_m, whole, count, padded_queries)
        loads = (q_desc, q_desc, k_desc, v_desc, w_desc, w_desc, w_desc)
        where = (i_b, i_h, i_bh, i_m, count, padded_keys)
        gl.warp_specialize(
            [
                (forward_block, (gl.constexpr(0), shared, rest, BM, BN, D, STAGES, EARLY, EVEN, CAUSAL, BEST)),
                (forward_block, (gl.constexpr(1), shared, rest, BM, BN, D, STAGES, EARLY, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, BEST, gl.constexpr(True))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def query_block(
    part: gl.constexpr, shared, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """dq of 64 queries, what the key side needs of them, and their share of dshift."""
    q_s, g_s, k_ring, v_ring, c_ring, w_ring, gap_ring, full, empty, ready, turn = shared
    p_shift, p_out, p_rows, p_known, p_narrow, p_row_columns, p_dq, p_part = rest[:8]
    scale, inverse_variance, stride_o, stride_d, num_queries, num_keys, i_m, whole, count, padded_queries = rest[8:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    first = i_m * BM + part * HALF
    q_half = q_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    g_half = g_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    o_m = first + gl.arange(0, HALF, row)
    lse, rho = gl.load(p_rows + o_m), gl.load(p_rows + 2 * padded_queries + o_m)
    lead = rho
    if BEST:
        rho = gl.exp2(lead)
    o_f, o_d = first + gl.arange(0, HALF, gl.SliceLayout(1, flat)), gl.arange(0, D, gl.SliceLayout(0, flat))
    p_block = p_out + o_f.to(gl.int64)[:, None] * stride_o + o_d[None, :]
    b_o = gl.load(p_block, mask=(o_f < num_queries)[:, None], other=0.0).to(gl.float32)
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(b_o * g_half.load(flat).to(gl.float32), 1), row)
    gl.store(p_known + o_m, lse)
    gl.store(p_known + padded_queries + o_m, delta)
    gl.store(p_narrow + o_m, rho.to(gl.bfloat16))
    if BEST:
        gl.store(p_narrow + padded_queries + o_m, lead.to(gl.float16).to(gl.bfloat16, bitcast=True))
    else:
        o_l, o_c = first + gl.arange(0, HALF, gl.SliceLayout(1, lines)), gl.arange(0, COLUMNS, gl.SliceLayout(0, lines))
        columns = gl.where((o_c == 1)[None, :], gl.convert_layout(rho, gl.SliceLayout(1, lines))[:, None], 0.0)
        columns = gl.where((o_c == 0)[None, :], 1.0, columns).to(gl.bfloat16)
        gl.store(p_row_columns + o_l[:, None] * COLUMNS + o_c[None, :], columns)

    dq = gl.zeros([HALF, D], gl.float32, wide)
    du = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    narrow_rho = rho.to(gl.bfloat16)[:, None].broadcast_to([HALF, BN])
    narrow_lead = lead.to(gl.float16)[:, None].broadcast_to([HALF, BN])
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_k, b_v = k_ring.index(0).reshape([BN, D]), v_ring.index(0).reshape([BN, D])
    s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        w_0 = w_ring.index(2 * stage).load(mma).broadcast_to([HALF, BN])
        w_1 = w_ring.index(2 * stage + 1).load(mma).broadcast_to([HALF, BN])
        mix = mixed(narrow_rho, w_0, w_1, BEST)
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        e = gl.exp2(s * scale - lse[:, None])
        if CAUSAL or not EVEN:
            if t >= whole:
                e = gl.where(seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN), e, 0.0)
        g = (e * (slope - delta[:, None])).to(gl.bfloat16)
        ds = multiply(g, mix)
        if BEST:
            g = where_larger(gap_ring.index(stage).load(mma).broadcast_to([HALF, BN]), narrow_lead, ds)
            b_c = c_ring
        else:
            b_c = c_ring.index(stage)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_k = k_ring.index(stage).reshape([BN, D])
        du = warpgroup_mma(gl.convert_layout(g, gl.DotOperandLayout(0, thin, 2)), b_c, du, is_async=True)
        dq = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_k, dq, is_async=True)
        if not EARLY:
            du, dq = warpgroup_mma_wait(0, deps=(du, dq))
        b_k, b_v = k_ring.index(after % STAGES).reshape([BN, D]), v_ring.index(after % STAGES).reshape([BN, D])
        s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if EARLY:
            du, dq = warpgroup_mma_wait(2, deps=(du, dq))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))

    second = column_of(du, 1, wide)  # rows of dl sum to 0: the first component has what the second leaves
    if not BEST:
        second = second * gl.convert_layout(rho, gl.SliceLayout(1, wide))
    o_d = gl.arange(0, D, gl.SliceLayout(0, wide))
    b_b = gl.load(p_shift + D + o_d).to(gl.float32) - gl.load(p_shift + o_d).to(gl.float32)
    dq = (dq + second[:, None] * b_b[None, :]) * inverse_variance
    o_r = (first + gl.arange(0, HALF, gl.SliceLayout(1, wide))).to(gl.int64)
    gl.store(p_dq + o_r[:, None] * stride_d + o_d[None, :], dq.to(gl.bfloat16), mask=(o_r < num_queries)[:, None])
    share = gl.sum(second[:, None] * q_half.load(wide).to(gl.float32), 0) * inverse_variance
    p_part += (2 * i_m + part) * 2 * (D + 1)
    gl.store(p_part + o_d, -share)
    gl.store(p_part + D + 1 + o_d, share)
    gl.store(p_part + D, 0.0)
    gl.store(p_part + 2 * D + 1, 0.0)


@gluon.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, gap_desc, SHIFT, OUT, ROWS, OVERFLOW, ROW_STATS, NARROW_ROWS,
    ROW_COLUMNS, DQ, PART, scale, inverse_variance, sob, soh, son, sdb, sdh, sdn, groups, section, H, num_queries,
    num_keys, padded_queries, padded_keys, parts, width, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h, i_g = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, BN], w_desc.layout)
    if BEST:
        gap_ring = gl.allocate_shared_memory(gl.float16, [STAGES, 1, BN], gap_desc.layout)
        c_ring = unit_columns(1, BN)
    else:
        gap_ring = w_ring
        c_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, COLUMNS], c_desc.layout)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_known = ROWS + i_g * 5 * padded_queries, ROW_STATS + i_g * width * padded_queries
    p_narrow = NARROW_ROWS + (2 * i_g * width + NARROW) * padded_queries
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    p_dq = DQ + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_columns, p_part = ROW_COLUMNS, PART + i_g * parts * 2 * (D + 1)
    if not BEST:
        p_columns += i_g * COLUMNS * padded_queries
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_s, g_s, k_ring, v_ring, c_ring, w_ring, gap_ring, full, empty, ready, turn)
        rest = (
            SHIFT + i_h * 2 * D, p_out, p_rows, p_known, p_narrow, p_columns, p_dq, p_part, scale, inverse_variance,
            son, sdn, num_queries, num_keys, i_m, whole, count, padded_queries,
        )  # fmt: skip
        loads = (q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, gap_desc)
        where = (i_b, i_h, i_bh, i_m, count, padded_keys)
        gl.warp_specialize(
            [
                (query_block, (gl.constexpr(0), shared, rest, BM, BN, D, STAGES, EARLY, EVEN, CAUSAL, BEST)),
                (query_block, (gl.constexpr(1), shared, rest, BM, BN, D, STAGES, EARLY, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, BEST, gl.constexpr(False))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def load_queries(
    loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BEST: gl.constexpr
):
    """The block of keys, then tile after tile of queries."""
    q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc = loads
    q_ring, g_ring, k_s, v_s, c_ring, _, r_ring, n_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_n, first, count, padded_queries, width = where
    mbarrier.expect(ready, 4 * BN * D)
    copy(k_desc, [i_b, i_h, i_n * BN, 0], ready, k_s)
    copy(v_desc, [i_b, i_h, i_n * BN, 0], ready, v_s)
    for t in range(count):
        stage, start = t % STAGES, first + t * BM
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BM * (4 * D + 8 + (4 if BEST else 2 + 2 * COLUMNS)))
        copy(q_desc, [i_b, i_h, start, 0], bar, q_ring.index(stage))
        copy(g_desc, [i_b, i_h, start, 0], bar, g_ring.index(stage))
        copy(n_desc, [2 * i_bh * width + NARROW, start], bar, n_ring.index(2 * stage))
        for r in gl.static_range(2):
            copy(r_desc, [i_bh * width + r, start], bar, r_ring.index(2 * stage + r))
        if BEST:
            copy(n_desc, [2 * i_bh * width + NARROW + 1, start], bar, n_ring.index(2 * stage + 1))
        else:
            copy(c_desc, [i_bh * padded_queries + start, 0], bar, c_ring.index(stage))


@gluon.jit
def key_block(
    part: gl.constexpr, shared, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and their share of dshift and dlog_prior; keys down and queries across."""
    q_ring, g_ring, k_s, v_s, c_ring, c_other, r_ring, n_ring, full, empty, ready, turn = shared
    p_shift, p_keys, p_dk, p_dv, p_dlw, p_part, scale, inverse_variance, stride_k, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, positions = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    start_n = i_n * BN + part * HALF
    k_half = k_s.reshape([BN, D]).slice(part * HALF, HALF, 0)
    v_half = v_s.reshape([BN, D]).slice(part * HALF, HALF, 0)
    o_n = start_n + gl.arange(0, HALF, row)
    w_0 = gl.load(p_keys + padded_keys + o_n).to(gl.bfloat16)[:, None].broadcast_to([HALF, BM])
    w_1 = gl.load(p_keys + 2 * padded_keys + o_n).to(gl.bfloat16)[:, None].broadcast_to([HALF, BM])
    gap = w_0
    if BEST:  # what a query must lead by for the second component to win
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
    s = warpgroup_mma(k_half, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(v_half, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, start, after = t % STAGES, first + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        e = gl.exp2(s * scale - r_ring.index(2 * stage).load(mma))
        g = (e * (slope - r_ring.index(2 * stage + 1).load(mma))).to(gl.bfloat16)
        p = e.to(gl.bfloat16)
        if CAUSAL:
            if start < masked:
                seen = o_n[:, None] <= (start + o_m)[None, :]
                p, g = gl.where(seen, p, gl.zeros_like(p)), gl.where(seen, g, gl.zeros_like(g))
        rho = n_ring.index(2 * stage).load(mma).broadcast_to([HALF, BM])
        mix = mixed(rho, w_0, w_1, BEST)
        p, ds = multiply(p, mix), multiply(g, mix)
        if BEST:
            lead = n_ring.index(2 * stage + 1).load(mma).to(gl.float16, bitcast=True).broadcast_to([HALF, BM])
            g = where_larger(gap, lead, ds)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_g, dv, is_async=True)
        if BEST:
            dw = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, thin, 2)), c_ring, dw, is_async=True)
            b_c = c_other
        else:
            b_c = c_ring.index(stage)
        dw = warpgroup_mma(gl.convert_layout(g, gl.DotOperandLayout(0, thin, 2)), b_c, dw, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_q, dk, is_async=True)
        if not EARLY:
            dv, dw, dk = warpgroup_mma_wait(0, deps=(dv, dw, dk))
        b_q, b_g = q_ring.index(after % STAGES).reshape([BM, D]), g_ring.index(after % STAGES).reshape([BM, D])
        s = warpgroup_mma(k_half, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        slope = warpgroup_mma(v_half, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
        if EARLY:
            dv, dw, dk = warpgroup_mma_wait(2, deps=(dv, dw, dk))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))

    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), start_n + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    real = o_r < num_keys
    gl.store(p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :], dv.to(gl.bfloat16), mask=real[:, None])
    first_share, second = column_of(dw, 0, wide), column_of(dw, 1, wide)
    if BEST:
        first_share -= second
    else:
        first_share *= gl.load(p_keys + padded_keys + o_r)
        second *= gl.load(p_keys + 2 * padded_keys + o_r)
    b_k = k_half.load(wide).to(gl.float32)
    p_part += (2 * i_n + part) * 2 * (D + 1)
    for r in gl.static_range(2):
        dlog_w = gl.where(real, second if r == 1 else first_share, 0.0)
        b_b = gl.load(p_shift + r * D + o_d).to(gl.float32)
        pull = dlog_w[:, None] * (b_k + b_b[None, :])
        dk -= pull
        gl.store(p_part + r * (D + 1) + o_d, -gl.sum(pull, 0) * inverse_variance)
        gl.store(p_part + r * (D + 1) + D, gl.sum(dlog_w, 0))
        if POSITIONS:
            gl.store(p_dlw + r * positions + o_r, dlog_w, mask=real)
    dk = (dk * inverse_variance).to(gl.bfloat16)
    gl.store(p_dk + o_r.to(gl.int64)[:, None] * stride_k + o_d[None, :], dk, mask=real[:, None])


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc, SHIFT, KEYS, OVERFLOW, DK, DV, DLW, PART, scale,
    inverse_variance, sdb, sdh, sdn, seb, seh, sen, groups, section, H, num_queries, num_keys, positions,
    padded_queries, padded_keys, query_parts, parts, width, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], g_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BN, D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BM], r_desc.layout)
    n_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, BM], n_desc.layout)
    if BEST:
        c_ring, c_other = unit_columns(0, BM), unit_columns(1, BM)
    else:
        c_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, COLUMNS], c_desc.layout)
        c_other = c_ring
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    offset, first, masked = num_keys - num_queries, 0, 0
    if CAUSAL:
        first = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - first, 0), BM)
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    p_keys, p_part = KEYS + i_g * 5 * padded_keys, PART + (i_g * parts + query_parts) * 2 * (D + 1)
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_ring, g_ring, k_s, v_s, c_ring, c_other, r_ring, n_ring, full, empty, ready, turn)
        rest = (
            SHIFT + i_h * 2 * D, p_keys, p_dk, p_dv, DLW + i_g * 2 * positions, p_part, scale, inverse_variance, sdn,
            sen, num_queries, num_keys, i_n, first, masked, count, padded_keys, positions,
        )  # fmt: skip
        loads = (q_desc, g_desc, k_desc, v_desc, c_desc, r_desc, n_desc)
        where = (i_b, i_h, i_bh, i_n, first, count, padded_queries, width)
        gl.warp_specialize(
            [
                (key_block, (gl.constexpr(0), shared, rest, BM, BN, D, STAGES, EARLY, CAUSAL, BEST, POSITIONS)),
                (key_block, (gl.constexpr(1), shared, rest, BM, BN, D, STAGES, EARLY, CAUSAL, BEST, POSITIONS)),
                (load_queries, (loads, shared, where, BM, BN, D, STAGES, BEST)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def sizes(name: str, width: int) -> dict[str, Any]:
    other, stages, early = SIZES[name, width]
    queries, keys = (other, BLOCK) if name == "key_kernel" else (BLOCK, other)
    return {"BM": queries, "BN": keys, "STAGES": stages, "EARLY": early, "D": width}


def forward(p: Problem, saved: Saved) -> None:
    """Output and log-sum-exp of the heads that fit; heads that are found not to are flagged."""
    output, rows, _, factors, overflow = saved
    size, query, key = sizes("forward_kernel", p.width), p.query, p.key
    keys = size["BN"]
    run(
        forward_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK), tiles(key, keys), tiles(p.value, keys),
        lines(factors, keys, ROW16), output, rows, overflow, p.numbers[0], *strides(output), p.groups, p.section,
        p.heads, query.shape[2], key.shape[2], rows.shape[-1], factors.shape[-1], **size, EVEN=even(query, key),
        CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def query_side(
    p: Problem, saved: Saved, grad: Tensor, columns_: tuple[Tensor | None, Tensor | None], row_stats: Tensor,
    grad_query: Tensor, part: Tensor,
) -> None:  # fmt: skip
    """dq, `row_stats` as vectors along the queries, and the first entries of `part`, of the heads that fit."""
    output, rows, _, factors, overflow = saved
    (key_columns, row_columns), query, key = columns_, p.query, p.key
    size = sizes("query_kernel", p.width)
    keys = size["BN"]
    weights = lines(factors, keys, ROW16)
    run(
        query_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK), tiles(grad, BLOCK), tiles(key, keys),
        tiles(p.value, keys), weights if p.hard else columns(key_columns, keys), weights,
        lines(key_columns, keys, ROW16) if p.hard else weights, p.shift, output, rows, overflow, row_stats,
        row_stats.view(torch.bfloat16), factors if row_columns is None else row_columns, grad_query, part,
        p.numbers[0], 1 / p.variance, *strides(output, grad_query), p.groups, p.section, p.heads, query.shape[2],
        key.shape[2], rows.shape[-1], factors.shape[-1], part.shape[2], row_stats.shape[-1], **size,
        EVEN=even(query, key), CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def key_side(
    p: Problem, saved: Saved, grad: Tensor, row_columns: Tensor | None, row_stats: Tensor, grads: list[Tensor],
    part: Tensor,
) -> None:  # fmt: skip
    """dk, dv, the gradient of a prior per position and the rest of `part`, of the heads that fit."""
    _, _, keys, _, overflow = saved
    _, grad_key, grad_value, grad_bias = grads
    size, query, key = sizes("key_kernel", p.width), p.query, p.key
    queries = size["BM"]
    groups, length, _ = row_stats.shape
    vectors = lines(row_stats.view(groups, -1, length), queries, ROW32)
    narrow = lines(row_stats.view(torch.bfloat16).view(groups, -1, length), queries, ROW16)
    run(
        key_kernel, key.shape[2], BLOCK, query, tiles(query, queries), tiles(grad, queries), tiles(key, BLOCK),
        tiles(p.value, BLOCK), vectors if row_columns is None else columns(row_columns, queries), vectors, narrow,
        p.shift, keys, overflow, grad_key, grad_value, grad_bias, part, p.numbers[0], 1 / p.variance,
        *strides(grad_key, grad_value), groups, p.section, p.heads, query.shape[2], key.shape[2], p.positions, length,
        keys.shape[-1], length // HALF.value, part.shape[2], row_stats.shape[-1], **size, CAUSAL=p.causal,
        BEST=p.hard, POSITIONS=grad_bias.dim() > 1,
    )  # fmt: skip
