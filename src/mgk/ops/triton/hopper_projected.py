"""Projected keys for wide heads on Hopper, in Gluon, as hopper.py has shifted ones: two warp groups that take turns.

The arithmetic is that of mixture.py, narrow, for two components of one variance in bfloat16. On the key side the sums
of dk_0, dk_1 and dv are 96 registers a thread at D = 64; at D = 128 they would be 192, which is too many: there a block
has 64 keys. With a soft E-step each of the two warp groups has one component of all of them, and the two dv are added
at the end; a hard one needs both scores, so each has half of the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mgk.ops.triton.hopper_common import (
    BLOCK,
    COLUMNS,
    COUNTS,
    HALF,
    ROW16,
    ROW32,
    barriers,
    column_of,
    copy,
    even,
    has_bad_sum,
    lines,
    multiply,
    multiply_add,
    pass_turn,
    range_of,
    run,
    scores,
    second_of,
    seen_keys,
    strides,
    take_turn,
    tiles,
    unit_columns,
    without,
    work_of,
)

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem

# (kernel, width): the tile of the other side, and how many of those the ring holds
SIZES = {
    ("forward_kernel", 32): (128, 4), ("forward_kernel", 64): (128, 3), ("forward_kernel", 128): (64, 3),
    ("query_kernel", 32): (64, 5), ("query_kernel", 64): (64, 4), ("query_kernel", 128): (64, 3),
    ("key_kernel", 32): (64, 5), ("key_kernel", 64): (64, 3), ("key_kernel", 128): (64, 4),
}  # fmt: skip


@gluon.jit
def load_keys(
    loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    BEST: gl.constexpr, FORWARD: gl.constexpr,
):  # fmt: skip
    """The block of queries, then tile after tile of keys."""
    q_desc, g_desc, k_desc, v_desc, w_desc = loads
    q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_m, count = where
    mbarrier.expect(ready, (2 if FORWARD else 4) * BM * D)
    copy(q_desc, [i_b, i_h, i_m * BM, 0], ready, q_s)
    if not FORWARD:
        copy(g_desc, [i_b, i_h, i_m * BM, 0], ready, g_s)
    for t in range(count):
        stage, start = t % STAGES, t * BN
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BN * (6 * D + (8 if BEST else 4)))
        for r in gl.static_range(2):
            copy(k_desc, [i_b, i_h, r, start, 0], bar, k_ring.index(2 * stage + r))
            copy(w_desc, [2 * i_bh + r, start], bar, w_ring.index(2 * stage + r))
        copy(v_desc, [i_b, i_h, start, 0], bar, v_ring.index(stage))


@gluon.jit
def forward_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """The output of 64 queries and their LSE."""
    q_s, _, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    c_s = more[0]
    p_out, p_rows, p_overflow, scale, stride_o, num_queries, num_keys, i_m, whole, count = rest
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    q_half = q_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    o_m = i_m * BM + part * HALF + gl.arange(0, HALF, row)
    acc = gl.zeros([HALF, D], gl.float32, wide)
    sums = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    mbarrier.wait(ready, 0)
    b_q = q_half.load(flat).to(gl.float32)
    bound = gl.convert_layout(gl.sum(b_q * b_q, 1), row) * (0.5 * scale)  # no weight is above its prior
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s_0, s_1 = scores(q_half, k_ring, 0, zero, BN, D)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        s_0, s_1 = warpgroup_mma_wait(0, deps=(s_0, s_1))
        w_0, w_1 = w_ring.index(2 * stage).load(mma), w_ring.index(2 * stage + 1).load(mma)
        if BEST:
            p = gl.exp2(gl.maximum(s_0 * scale + w_0, s_1 * scale + w_1) - bound[:, None]).to(gl.bfloat16)
        else:
            e_0 = gl.exp2(s_0 * scale - bound[:, None]).to(gl.bfloat16)
            e_1 = gl.exp2(s_1 * scale - bound[:, None]).to(gl.bfloat16)
            p = multiply_add(e_1, w_1.broadcast_to([HALF, BN]), multiply(e_0, w_0.broadcast_to([HALF, BN])))
        if CAUSAL or not EVEN:
            if t >= whole:
                seen = seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN)
                p = gl.where(seen, p, gl.zeros_like(p))
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        sums = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, thin, 2)), c_s, sums, is_async=True)
        b_v = v_ring.index(stage).reshape([BN, D])
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_v, acc, is_async=True)
        s_0, s_1 = scores(q_half, k_ring, after % STAGES, zero, BN, D)
        sums, acc = warpgroup_mma_wait(2, deps=(sums, acc))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s_0, s_1))

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
    num_keys, padded_queries, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 1, BN], w_desc.layout)
    c_s = unit_columns(0, BN)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_overflow = ROWS + i_bh.to(gl.int64) * padded_queries, OVERFLOW + 2 * i_bh
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    if gl.load(p_overflow) == 0:
        shared = (q_s, q_s, k_ring, v_ring, w_ring, full, empty, ready, turn)
        rest = (p_out, p_rows, p_overflow, scale, son, num_queries, num_keys, i_m, whole, count)
        loads, where = (q_desc, q_desc, k_desc, v_desc, w_desc), (i_b, i_h, i_bh, i_m, count)
        gl.warp_specialize(
            [
                (forward_block, (gl.constexpr(0), shared, (c_s,), rest, BM, BN, D, STAGES, EVEN, CAUSAL, BEST)),
                (forward_block, (gl.constexpr(1), shared, (c_s,), rest, BM, BN, D, STAGES, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, BEST, gl.constexpr(True))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def query_block(
    part: gl.constexpr, shared, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """dq of 64 queries, and what the key side needs of them."""
    q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    p_out, p_rows, p_known, p_dq, scale, inverse_variance, stride_o, stride_d = rest[:8]
    num_queries, num_keys, i_m, whole, count, padded_queries = rest[8:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    row: gl.constexpr = gl.SliceLayout(1, mma)
    first = i_m * BM + part * HALF
    q_half = q_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    g_half = g_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    o_m = first + gl.arange(0, HALF, row)
    lse = gl.load(p_rows + o_m)
    o_f, o_d = first + gl.arange(0, HALF, gl.SliceLayout(1, flat)), gl.arange(0, D, gl.SliceLayout(0, flat))
    p_block = p_out + o_f.to(gl.int64)[:, None] * stride_o + o_d[None, :]
    b_o = gl.load(p_block, mask=(o_f < num_queries)[:, None], other=0.0).to(gl.float32)
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(b_o * g_half.load(flat).to(gl.float32), 1), row)
    gl.store(p_known + o_m, lse)
    gl.store(p_known + padded_queries + o_m, delta)
    dq = gl.zeros([HALF, D], gl.float32, wide)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s_0, s_1 = scores(q_half, k_ring, 0, zero, BN, D)
    b_v = v_ring.index(0).reshape([BN, D])
    slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        s_0, s_1, slope = warpgroup_mma_wait(0, deps=(s_0, s_1, slope))
        w_0, w_1 = w_ring.index(2 * stage).load(mma), w_ring.index(2 * stage + 1).load(mma)
        if BEST:
            x_0, x_1 = s_0 * scale + w_0, s_1 * scale + w_1
            e = gl.exp2(gl.maximum(x_0, x_1) - lse[:, None])
            g = (e * (slope - delta[:, None])).to(gl.bfloat16)
            ds_1 = second_of(x_0, x_1, g)
            ds_0 = without(g, ds_1)
        else:
            g = (slope - delta[:, None]).to(gl.bfloat16)
            e_0 = gl.exp2(s_0 * scale - lse[:, None]).to(gl.bfloat16)
            e_1 = gl.exp2(s_1 * scale - lse[:, None]).to(gl.bfloat16)
            ds_0 = multiply(multiply(e_0, w_0.broadcast_to([HALF, BN])), g)
            ds_1 = multiply(multiply(e_1, w_1.broadcast_to([HALF, BN])), g)
        if CAUSAL or not EVEN:
            if t >= whole:
                seen = seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN)
                ds_0, ds_1 = gl.where(seen, ds_0, gl.zeros_like(ds_0)), gl.where(seen, ds_1, gl.zeros_like(ds_1))
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        k_0, k_1 = k_ring.index(2 * stage).reshape([BN, D]), k_ring.index(2 * stage + 1).reshape([BN, D])
        dq = warpgroup_mma(gl.convert_layout(ds_0, operand), k_0, dq, is_async=True)
        dq = warpgroup_mma(gl.convert_layout(ds_1, operand), k_1, dq, is_async=True)
        s_0, s_1 = scores(q_half, k_ring, after % STAGES, zero, BN, D)
        b_v = v_ring.index(after % STAGES).reshape([BN, D])
        slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(3, deps=(dq,))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s_0, s_1, slope))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), first + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    at = o_r.to(gl.int64)[:, None] * stride_d + o_d[None, :]
    gl.store(p_dq + at, (dq * inverse_variance).to(gl.bfloat16), mask=(o_r < num_queries)[:, None])


@gluon.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_desc, g_desc, k_desc, v_desc, w_desc, OUT, ROWS, OVERFLOW, ROW_STATS, DQ, scale, inverse_variance, sob, soh,
    son, sdb, sdh, sdn, groups, section, H, num_queries, num_keys, padded_queries, width, BM: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h, i_g = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 1, BN], w_desc.layout)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_known = ROWS + i_g * padded_queries, ROW_STATS + i_g * width * padded_queries
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    p_dq = DQ + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    if BEST or gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn)
        rest = (
            p_out, p_rows, p_known, p_dq, scale, inverse_variance, son, sdn, num_queries, num_keys, i_m, whole, count,
            padded_queries,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, w_desc), (i_b, i_h, i_bh, i_m, count)
        gl.warp_specialize(
            [
                (query_block, (gl.constexpr(0), shared, rest, BM, BN, D, STAGES, EVEN, CAUSAL, BEST)),
                (query_block, (gl.constexpr(1), shared, rest, BM, BN, D, STAGES, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, BEST, gl.constexpr(False))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


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
    dk, dw, k_s, p_dk, p_dlw, p_part, inverse_variance, stride, o_r, num_keys, D: gl.constexpr, POSITIONS: gl.constexpr
):
    """dk of one component, and its share of dlog_prior."""
    wide: gl.constexpr = dk.type.layout
    o_d, real = gl.arange(0, D, gl.SliceLayout(0, wide)), o_r < num_keys
    dw = gl.where(real, dw, 0.0)
    grad = ((dk - dw[:, None] * k_s.load(wide).to(gl.float32)) * inverse_variance).to(gl.bfloat16)
    gl.store(p_dk + o_r.to(gl.int64)[:, None] * stride + o_d[None, :], grad, mask=real[:, None])
    gl.store(p_part, gl.sum(dw, 0))
    gl.store(p_part + 1, 0.0)
    if POSITIONS:
        gl.store(p_dlw + o_r, dw, mask=real)


@gluon.jit
def key_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, all columns or a half, and their share of dlog_prior; keys down and queries across."""
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn = shared
    c_0, c_1, _, _ = more
    p_keys, p_dk, p_dv, p_dlw, p_part, scale, inverse_variance, stride_m, stride_k, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, positions = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    WIDTH: gl.constexpr = D if BN > HALF else D // 2
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    thin_operand: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    LINE: gl.constexpr = part * (BN - HALF)  # the first of this warp group's keys, and of its columns
    COLUMN: gl.constexpr = part * (D - WIDTH)
    k_0 = k_s.index(0).reshape([BN, D]).slice(LINE, HALF, 0)
    k_1 = k_s.index(1).reshape([BN, D]).slice(LINE, HALF, 0)
    v_half = v_s.reshape([BN, D]).slice(LINE, HALF, 0)
    start_n = i_n * BN + LINE
    o_n = start_n + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    w_0, w_1 = gl.load(p_keys + o_n)[:, None], gl.load(p_keys + padded_keys + o_n)[:, None]
    dk_0 = gl.zeros([HALF, WIDTH], gl.float32, wide)
    dk_1 = gl.zeros([HALF, WIDTH], gl.float32, wide)
    dv = gl.zeros([HALF, WIDTH], gl.float32, wide)
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
            p, g = e.to(gl.bfloat16), (e * (slope - delta)).to(gl.bfloat16)
            if CAUSAL:
                if start < masked:
                    seen = o_n[:, None] <= (start + o_m)[None, :]
                    p, g = gl.where(seen, p, gl.zeros_like(p)), gl.where(seen, g, gl.zeros_like(g))
            ds_1 = second_of(x_0, x_1, g)
            ds_0 = without(g, ds_1)
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
        b_q = q_ring.index(stage).reshape([BM, D]).slice(COLUMN, WIDTH, 1)
        b_g = g_ring.index(stage).reshape([BM, D]).slice(COLUMN, WIDTH, 1)
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
    o_d, o_r = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, wide)), gl.arange(0, HALF, gl.SliceLayout(1, wide))
    o_r += start_n
    gl.store(
        p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :], dv.to(gl.bfloat16), mask=(o_r < num_keys)[:, None]
    )
    p_part += start_n // HALF * 4  # halves of the columns have the same number for it
    for r in gl.static_range(2):
        store_key(
            dk_1 if r == 1 else dk_0, column_of(dw, r, wide), (k_1 if r == 1 else k_0).slice(COLUMN, WIDTH, 1),
            p_dk + r * stride_m + COLUMN, p_dlw + r * positions, p_part + 2 * r, inverse_variance, stride_k, o_r,
            num_keys, WIDTH, POSITIONS,
        )  # fmt: skip


@gluon.jit
def component_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk of one component of 64 keys, what it adds to their dv, and its share of dlog_prior."""
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn = shared
    c_0, _, x_s, done = more
    p_keys, p_dk, p_dv, p_dlw, p_part, scale, inverse_variance, stride_m, stride_k, stride_v = rest[:10]
    num_queries, num_keys, i_n, first, masked, count, padded_keys, positions = rest[10:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    k_own, v_all = k_s.index(part).reshape([BN, D]), v_s.reshape([BN, D])
    o_n = i_n * BN + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    weight = gl.load(p_keys + part * padded_keys + o_n)[:, None].to(gl.bfloat16).broadcast_to([HALF, BM])
    dk = gl.zeros([HALF, D], gl.float32, wide)
    dv = gl.zeros([HALF, D], gl.float32, wide)
    dw = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BM], gl.float32, mma)
    o_m = gl.arange(0, BM, gl.SliceLayout(0, mma)) + (num_keys - num_queries)
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_q, b_g = q_ring.index(0).reshape([BM, D]), g_ring.index(0).reshape([BM, D])
    s = warpgroup_mma(k_own, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(v_all, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, start, after = t % STAGES, first + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        lse, delta = r_ring.index(2 * stage).load(mma), r_ring.index(2 * stage + 1).load(mma)
        p = multiply(gl.exp2(s * scale - lse).to(gl.bfloat16), weight)
        if CAUSAL:
            if start < masked:
                p = gl.where(o_n[:, None] <= (start + o_m)[None, :], p, gl.zeros_like(p))
        ds = multiply(p, (slope - delta).to(gl.bfloat16))
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, operand), b_g, dv, is_async=True)
        dw = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, thin, 2)), c_0, dw, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), b_q, dk, is_async=True)
        dv, dw, dk = warpgroup_mma_wait(0, deps=(dv, dw, dk))
        b_q, b_g = q_ring.index(after % STAGES).reshape([BM, D]), g_ring.index(after % STAGES).reshape([BM, D])
        s = warpgroup_mma(k_own, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        slope = warpgroup_mma(v_all, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), i_n * BN + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    if part == 1:
        x_s.store(dv)
        mbarrier.arrive(done)
    else:
        mbarrier.wait(done, 0)
        dv += x_s.load(wide)
        gl.store(
            p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :],
            dv.to(gl.bfloat16),
            mask=(o_r < num_keys)[:, None],
        )
    store_key(
        dk, column_of(dw, 0, wide), k_own, p_dk + part * stride_m, p_dlw + part * positions,
        p_part + i_n * 4 + 2 * part, inverse_variance, stride_k, o_r, num_keys, D, POSITIONS,
    )  # fmt: skip


@gluon.jit
def key_part(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    if BN == HALF and not BEST:
        component_block(part, shared, more, rest, BM, BN, D, STAGES, CAUSAL, POSITIONS)
    else:
        key_block(part, shared, more, rest, BM, BN, D, STAGES, CAUSAL, BEST, POSITIONS)


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, r_desc, KEYS, OVERFLOW, DK, DV, DLW, PART, scale, inverse_variance, sdb, sdh, sdm,
    sdn, seb, seh, sen, groups, section, H, num_queries, num_keys, positions, padded_keys, parts, width,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    BEST: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], g_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BN, D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BM], r_desc.layout)
    c_0, c_1 = unit_columns(0, BM), unit_columns(1, BM)
    full, empty, ready, turn = barriers(STAGES)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    if BN == HALF and not BEST:
        x_s = gl.allocate_shared_memory(gl.float32, [BN, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    else:
        x_s = c_0
    fence_async_shared()
    offset, first, masked = num_keys - num_queries, 0, 0
    if CAUSAL:
        first = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - first, 0), BM)
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    p_keys, p_part = KEYS + i_g * 2 * padded_keys, PART + i_g * parts * 4
    if BEST or gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn)
        more = (c_0, c_1, x_s, done)
        rest = (
            p_keys, p_dk, p_dv, DLW + i_g * 2 * positions, p_part, scale, inverse_variance, sdm, sdn, sen, num_queries,
            num_keys, i_n, first, masked, count, padded_keys, positions,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, r_desc), (i_b, i_h, i_bh, i_n, first, count, width)
        gl.warp_specialize(
            [
                (key_part, (gl.constexpr(0), shared, more, rest, BM, BN, D, STAGES, CAUSAL, BEST, POSITIONS)),
                (key_part, (gl.constexpr(1), shared, more, rest, BM, BN, D, STAGES, CAUSAL, BEST, POSITIONS)),
                (load_queries, (loads, shared, where, BM, BN, D, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def sizes(name: str, width: int) -> dict[str, Any]:
    other, stages = SIZES[name, width]
    block = HALF.value if name == "key_kernel" and width == 128 else BLOCK
    queries, keys = (other, block) if name == "key_kernel" else (BLOCK, other)
    return {"BM": queries, "BN": keys, "STAGES": stages, "D": width}


def weights(keys: Tensor, factors: Tensor, hard: bool, width: int) -> TensorDescriptor:
    """What is added to scores, or multiplied with their exponentials."""
    return lines(keys, width, ROW32) if hard else lines(factors, width, ROW16)


def forward(p: Problem, saved: Saved) -> None:
    """Output and log-sum-exp of the heads that fit; heads that are found not to are flagged."""
    output, rows, keys, factors, overflow = saved
    size, query, key = sizes("forward_kernel", p.width), p.query, p.key
    tile = size["BN"]
    run(
        forward_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK), tiles(key, tile), tiles(p.value, tile),
        weights(keys, factors, p.hard, tile), output, rows, overflow, p.numbers[0], *strides(output), p.groups,
        p.section, p.heads, query.shape[2], key.shape[3], rows.shape[-1], **size, EVEN=even(query, key),
        CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def query_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grad_query: Tensor) -> None:
    """dq, and `row_stats` as vectors along the queries, of the heads that fit."""
    output, rows, keys, factors, overflow = saved
    size, query, key = sizes("query_kernel", p.width), p.query, p.key
    tile = size["BN"]
    run(
        query_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK), tiles(grad, BLOCK), tiles(key, tile),
        tiles(p.value, tile), weights(keys, factors, p.hard, tile), output, rows, overflow, row_stats, grad_query,
        p.numbers[0], 1 / p.variance, *strides(output, grad_query), p.groups, p.section, p.heads, query.shape[2],
        key.shape[3], rows.shape[-1], row_stats.shape[-1], **size, EVEN=even(query, key), CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def key_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grads: list[Tensor], part: Tensor) -> None:
    """dk, dv, the gradient of a prior per position and `part`, of the heads that fit."""
    _, _, keys, factors, overflow = saved
    _, grad_key, grad_value, grad_bias = grads
    size, query, key = sizes("key_kernel", p.width), p.query, p.key
    queries, block = size["BM"], size["BN"]
    vectors = lines(row_stats.view(row_stats.shape[0], -1, row_stats.shape[1]), queries, ROW32)
    run(
        key_kernel, key.shape[3], block, query, tiles(query, queries), tiles(grad, queries), tiles(key, block),
        tiles(p.value, block), vectors, keys if p.hard else factors, overflow, grad_key, grad_value, grad_bias, part,
        p.numbers[0], 1 / p.variance, *strides(grad_key, grad_value), p.groups, p.section, p.heads, query.shape[2],
        key.shape[3], p.positions, keys.shape[-1], part.shape[2], row_stats.shape[-1], **size, CAUSAL=p.causal,
        BEST=p.hard, POSITIONS=grad_bias.dim() > 1,
    )  # fmt: skip
