"""Shifted keys with a variance per component on Hopper, in Gluon: two components in bfloat16, soft E-step.

One score product for both components, whose exponentials differ: l_r = q.k/s2_r + row_r + log_w_r, see projected.py.
The two warp groups take turns as in hopper.py.

dq and dk need the sum of ds_r/s2_r. Inside the backward kernels the first component is the one with the smaller
variance, and RATIO = s2_0/s2_1 <= 1 is a factor of what the second one adds. On the query side it is in the exponent,
on the key side in the weights of the keys. A row of dl sums to 0, and the sum of the first component is taken: where
the second one has nearly all of the weights, the error of its sum is large against what it leaves to the first.
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

from mgk.ops.dispatch import block_width
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
    inside,
    lines,
    load_line,
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
    work_of,
)

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem

LOG2E = gl.constexpr(1.4426950408889634)
# (kernel, width): the tile of the other side, and how many of those the ring holds
SIZES = {
    ("forward_kernel", 64): (64, 8), ("forward_kernel", 128): (64, 5),
    ("query_kernel", 64): (64, 4), ("query_kernel", 128): (64, 4),
    ("key_kernel", 64): (64, 6), ("key_kernel", 128): (64, 4),
}  # fmt: skip


@gluon.jit
def store_line(pointer, o_column, line, WIDTH: gl.constexpr, BLOCK: gl.constexpr):
    if WIDTH < BLOCK:
        gl.store(pointer + o_column, line, mask=o_column < WIDTH)
    else:
        gl.store(pointer + o_column, line)


@gluon.jit
def first_of(p_variance):
    """The component with the smaller variance."""
    return (gl.load(p_variance + 1) < gl.load(p_variance)).to(gl.int32)


@gluon.jit
def row_bias(b_q, p_shift, o_d, inverse, W: gl.constexpr, layout: gl.constexpr):
    """q.b - |q|^2/2, divided by the variance, in base 2."""
    b_b = load_line(p_shift, o_d, W, b_q.shape[1])
    return gl.convert_layout(gl.sum(b_q * b_b[None, :] - 0.5 * b_q * b_q, 1) * (inverse * LOG2E), layout)


@gluon.jit
def load_keys(
    loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    FORWARD: gl.constexpr,
):  # fmt: skip
    """The block of queries, then tile after tile of keys."""
    q_desc, g_desc, k_desc, v_desc, w_desc = loads
    q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_m, count, first = where
    mbarrier.expect(ready, (2 if FORWARD else 4) * BM * D)
    copy(q_desc, [i_b, i_h, i_m * BM, 0], ready, q_s)
    if not FORWARD:
        copy(g_desc, [i_b, i_h, i_m * BM, 0], ready, g_s)
    for t in range(count):
        stage, start = t % STAGES, t * BN
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BN * (4 * D + 4))
        copy(k_desc, [i_b, i_h, start, 0], bar, k_ring.index(stage))
        copy(v_desc, [i_b, i_h, start, 0], bar, v_ring.index(stage))
        copy(w_desc, [2 * i_bh + first, start], bar, w_ring.index(2 * stage))
        copy(w_desc, [2 * i_bh + 1 - first, start], bar, w_ring.index(2 * stage + 1))


@gluon.jit
def forward_block(
    part: gl.constexpr, shared, c_s, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The output of 64 queries and their LSE."""
    q_s, _, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    p_shift, p_variance, p_out, p_rows, p_overflow, stride_o, num_queries, num_keys, i_m, whole, count = rest
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
    o_n, o_d = gl.arange(0, BN, gl.SliceLayout(0, mma)), gl.arange(0, D, gl.SliceLayout(0, flat))
    inverse_0, inverse_1 = 1.0 / gl.load(p_variance), 1.0 / gl.load(p_variance + 1)
    mbarrier.wait(ready, 0)
    b_q = q_half.load(flat).to(gl.float32)
    row_0 = row_bias(b_q, p_shift, o_d, inverse_0, W, row)[:, None]
    row_1 = row_bias(b_q, p_shift + W, o_d, inverse_1, W, row)[:, None]
    scale_0, scale_1 = inverse_0 * LOG2E, inverse_1 * LOG2E
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_k = k_ring.index(0).reshape([BN, D])
    s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        w_0 = w_ring.index(2 * stage).load(mma).broadcast_to([HALF, BN])
        w_1 = w_ring.index(2 * stage + 1).load(mma).broadcast_to([HALF, BN])
        s = warpgroup_mma_wait(0, deps=(s,))
        e_0 = gl.exp2(s * scale_0 + row_0).to(gl.bfloat16)  # no weight is above its prior: no maximum is needed
        e_1 = gl.exp2(s * scale_1 + row_1).to(gl.bfloat16)
        p = multiply_add(e_1, w_1, multiply(e_0, w_0))
        if CAUSAL or not EVEN:
            if t >= whole:
                seen = seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN)
                p = gl.where(seen, p, gl.zeros_like(p))
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        sums = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, thin, 2)), c_s, sums, is_async=True)
        b_v = v_ring.index(stage).reshape([BN, D])
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_v, acc, is_async=True)
        b_k = k_ring.index(after % STAGES).reshape([BN, D])
        s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        pass_turn(turn, part)
        sums, acc = warpgroup_mma_wait(1, deps=(sums, acc))
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s,))

    total = gl.sum(sums, 1)  # the other columns are 0
    here = gl.convert_layout(total, row)
    if gl.max(has_bad_sum(here, o_m, num_queries, num_keys, CAUSAL).to(gl.int32), 0) > 0:
        gl.store(p_overflow + 1, 1.0)
    gl.store(p_rows + o_m, gl.where((here > 0) & (o_m < num_queries), gl.log2(here), float("inf")))
    total = gl.convert_layout(total, gl.SliceLayout(1, wide))
    output = gl.where((total > 0)[:, None], acc / gl.where(total > 0, total, 1.0)[:, None], 0.0)
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), gl.arange(0, HALF, gl.SliceLayout(1, wide))
    o_r = (i_m * BM + part * HALF + o_r).to(gl.int64)
    p_block = p_out + o_r[:, None] * stride_o + o_d[None, :]
    gl.store(p_block, output.to(gl.bfloat16), mask=inside(o_r < num_queries, o_d, WV, D))


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_desc, k_desc, v_desc, w_desc, SHIFT, VARIANCE, OUT, ROWS, OVERFLOW, sob, soh, son, groups, section, H,
    num_queries, num_keys, padded_queries, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, BN], w_desc.layout)
    c_s = unit_columns(0, BN)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_overflow = ROWS + i_bh.to(gl.int64) * padded_queries, OVERFLOW + 2 * i_bh
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    if gl.load(p_overflow) == 0:
        shared = (q_s, q_s, k_ring, v_ring, w_ring, full, empty, ready, turn)
        rest = (
            SHIFT + i_h * 2 * W, VARIANCE + i_h * 2, p_out, p_rows, p_overflow, son, num_queries, num_keys, i_m, whole,
            count,
        )  # fmt: skip
        loads, where = (q_desc, q_desc, k_desc, v_desc, w_desc), (i_b, i_h, i_bh, i_m, count, 0)
        gl.warp_specialize(
            [
                (forward_block, (gl.constexpr(0), shared, c_s, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL)),
                (forward_block, (gl.constexpr(1), shared, c_s, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, gl.constexpr(True))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def query_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dq of 64 queries, what the key side needs of them, and their share of dshift and dvariance."""
    q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    c_0, c_1 = more
    p_shift, p_variance, p_out, p_rows, p_known, p_dq, p_part, stride_o, stride_d = rest[:9]
    num_queries, num_keys, i_m, whole, count, padded_queries, one = rest[9:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    thin_operand: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    row: gl.constexpr = gl.SliceLayout(1, mma)
    begin, other = i_m * BM + part * HALF, 1 - one
    q_half = q_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    g_half = g_s.reshape([BM, D]).slice(part * HALF, HALF, 0)
    o_m = begin + gl.arange(0, HALF, row)
    lse = gl.load(p_rows + o_m)
    o_f, o_d = begin + gl.arange(0, HALF, gl.SliceLayout(1, flat)), gl.arange(0, D, gl.SliceLayout(0, flat))
    p_block = p_out + o_f.to(gl.int64)[:, None] * stride_o + o_d[None, :]
    b_o = gl.load(p_block, mask=inside(o_f < num_queries, o_d, WV, D), other=0.0).to(gl.float32)
    inverse_0, inverse_1 = 1.0 / gl.load(p_variance + one), 1.0 / gl.load(p_variance + other)
    scale_0, scale_1, ratio = inverse_0 * LOG2E, inverse_1 * LOG2E, inverse_1 / inverse_0
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(b_o * g_half.load(flat).to(gl.float32), 1), row)
    b_q = q_half.load(flat).to(gl.float32)
    row_0 = row_bias(b_q, p_shift + one * W, o_d, inverse_0, W, row)
    row_1 = row_bias(b_q, p_shift + other * W, o_d, inverse_1, W, row)
    gl.store(p_known + one * padded_queries + o_m, row_0 - lse)
    gl.store(p_known + other * padded_queries + o_m, row_1 - lse)
    gl.store(p_known + 2 * padded_queries + o_m, delta)
    base_0, base_1 = (row_0 - lse)[:, None], (row_1 - lse + gl.log2(ratio))[:, None]
    dq = gl.zeros([HALF, D], gl.float32, wide)
    sums = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    b_k, b_v = k_ring.index(0).reshape([BN, D]), v_ring.index(0).reshape([BN, D])
    s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        w_0 = w_ring.index(2 * stage).load(mma).broadcast_to([HALF, BN])
        w_1 = w_ring.index(2 * stage + 1).load(mma).broadcast_to([HALF, BN])
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        p_0 = multiply(gl.exp2(s * scale_0 + base_0).to(gl.bfloat16), w_0)
        p_1 = multiply(gl.exp2(s * scale_1 + base_1).to(gl.bfloat16), w_1)
        g = (slope - delta[:, None]).to(gl.bfloat16)
        if CAUSAL or not EVEN:
            if t >= whole:
                seen = seen_keys(o_m, t * BN + o_n, num_queries, num_keys, CAUSAL, EVEN)
                p_0, p_1 = gl.where(seen, p_0, gl.zeros_like(p_0)), gl.where(seen, p_1, gl.zeros_like(p_1))
        ds_0, score = multiply(p_0, g), s.to(gl.bfloat16)
        ds = multiply_add(p_1, g, ds_0)
        moment_0 = multiply(ds_0, score)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_k = k_ring.index(stage).reshape([BN, D])
        sums = warpgroup_mma(gl.convert_layout(ds_0, thin_operand), c_0, sums, is_async=True)
        sums = warpgroup_mma(gl.convert_layout(moment_0, thin_operand), c_1, sums, is_async=True)
        dq = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, wide, 2)), b_k, dq, is_async=True)
        b_k, b_v = k_ring.index(after % STAGES).reshape([BN, D]), v_ring.index(after % STAGES).reshape([BN, D])
        s = warpgroup_mma(q_half, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        slope = warpgroup_mma(g_half, b_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        sums, dq = warpgroup_mma_wait(2, deps=(sums, dq))
        pass_turn(turn, part)
        mbarrier.arrive(empty.index(stage))
    warpgroup_mma_wait(0, deps=(s, slope))

    drow, moment_0, b_q = column_of(sums, 0, wide), column_of(sums, 1, wide), q_half.load(wide).to(gl.float32)
    moment_1 = (gl.sum(dq * b_q, 1) - moment_0) / ratio  # sums of ds_r q.k over the keys; dq has both
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), begin + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    b_0 = load_line(p_shift + one * W, o_d, W, D)
    b_1 = load_line(p_shift + other * W, o_d, W, D)
    pull_0, pull_1 = (drow * inverse_0)[:, None] * b_q, (drow * inverse_1)[:, None] * b_q
    dq = dq * inverse_0 + pull_1 - pull_0 + drow[:, None] * (b_0 * inverse_0 - b_1 * inverse_1)[None, :]
    at = o_r.to(gl.int64)[:, None] * stride_d + o_d[None, :]
    gl.store(p_dq + at, dq.to(gl.bfloat16), mask=inside(o_r < num_queries, o_d, W, D))
    half_0 = gl.convert_layout(row_0 / -scale_0, gl.SliceLayout(1, wide))
    half_1 = gl.convert_layout(row_1 / -scale_1, gl.SliceLayout(1, wide))
    p_part += (2 * i_m + part) * 2 * (W + 2)
    p_0, p_1 = p_part + one * (W + 2), p_part + other * (W + 2)
    gl.store(p_0, 0.0)
    gl.store(p_1, 0.0)
    gl.store(p_0 + 1, gl.sum(drow * half_0 - moment_0, 0) * inverse_0 * inverse_0)
    gl.store(p_1 + 1, gl.sum(-drow * half_1 - moment_1, 0) * inverse_1 * inverse_1)
    store_line(p_0 + 2, o_d, gl.sum(pull_0, 0), W, D)
    store_line(p_1 + 2, o_d, -gl.sum(pull_1, 0), W, D)


@gluon.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_desc, g_desc, k_desc, v_desc, w_desc, SHIFT, VARIANCE, OUT, ROWS, OVERFLOW, ROW_STATS, DQ, PART, sob, soh, son,
    sdb, sdh, sdn, groups, section, H, num_queries, num_keys, padded_queries, parts, width, BM: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h, i_g = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, BN], w_desc.layout)
    more = (unit_columns(0, BN), unit_columns(1, BN))
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_known = ROWS + i_g * padded_queries, ROW_STATS + i_g * width * padded_queries
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    p_dq = DQ + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        first = first_of(VARIANCE + i_h * 2)
        shared = (q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn)
        rest = (
            SHIFT + i_h * 2 * W, VARIANCE + i_h * 2, p_out, p_rows, p_known, p_dq, PART + i_g * parts * 2 * (W + 2),
            son, sdn, num_queries, num_keys, i_m, whole, count, padded_queries, first,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, w_desc), (i_b, i_h, i_bh, i_m, count, first)
        gl.warp_specialize(
            [
                (query_block, (gl.constexpr(0), shared, more, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL)),
                (query_block, (gl.constexpr(1), shared, more, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, gl.constexpr(False))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def load_queries(loads, shared, where, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The block of keys, then tile after tile of queries."""
    q_desc, g_desc, k_desc, v_desc, r_desc = loads
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, _ = shared
    i_b, i_h, i_bh, i_n, begin, count, width, first = where
    mbarrier.expect(ready, 4 * BN * D)
    copy(k_desc, [i_b, i_h, i_n * BN, 0], ready, k_s)
    copy(v_desc, [i_b, i_h, i_n * BN, 0], ready, v_s)
    for t in range(count):
        stage, start = t % STAGES, begin + t * BM
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BM * (4 * D + 12))
        copy(q_desc, [i_b, i_h, start, 0], bar, q_ring.index(stage))
        copy(g_desc, [i_b, i_h, start, 0], bar, g_ring.index(stage))
        copy(r_desc, [i_bh * width + first, start], bar, r_ring.index(3 * stage))
        copy(r_desc, [i_bh * width + 1 - first, start], bar, r_ring.index(3 * stage + 1))
        copy(r_desc, [i_bh * width + 2, start], bar, r_ring.index(3 * stage + 2))


@gluon.jit
def key_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, CAUSAL: gl.constexpr,
    POSITIONS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and their share of dlog_prior, dshift and dvariance; keys down and queries across."""
    q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn = shared
    c_0, c_1 = more
    p_shift, p_variance, p_keys, p_dk, p_dv, p_dlw, p_part, stride_k, stride_v = rest[:9]
    num_queries, num_keys, i_n, begin, masked, count, padded_keys, positions, one = rest[9:]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    thin_operand: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    start_n, other = i_n * BN + part * HALF, 1 - one
    k_half = k_s.reshape([BN, D]).slice(part * HALF, HALF, 0)
    v_half = v_s.reshape([BN, D]).slice(part * HALF, HALF, 0)
    o_n = start_n + gl.arange(0, HALF, gl.SliceLayout(1, mma))
    inverse_0, inverse_1 = 1.0 / gl.load(p_variance + one), 1.0 / gl.load(p_variance + other)
    scale_0, scale_1, ratio = inverse_0 * LOG2E, inverse_1 * LOG2E, inverse_1 / inverse_0
    w_0, w_1 = gl.load(p_keys + one * padded_keys + o_n), gl.load(p_keys + other * padded_keys + o_n)
    v_1 = (w_1.to(gl.float32) * ratio).to(gl.bfloat16)[:, None].broadcast_to([HALF, BM])
    w_0, w_1 = w_0[:, None].broadcast_to([HALF, BM]), w_1[:, None].broadcast_to([HALF, BM])
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
        stage, start, after = t % STAGES, begin + t * BM, gl.minimum(t + 1, count - 1)  # after the last one, itself
        s, slope = warpgroup_mma_wait(0, deps=(s, slope))
        e_0 = gl.exp2(s * scale_0 + r_ring.index(3 * stage).load(mma)).to(gl.bfloat16)
        e_1 = gl.exp2(s * scale_1 + r_ring.index(3 * stage + 1).load(mma)).to(gl.bfloat16)
        g = (slope - r_ring.index(3 * stage + 2).load(mma)).to(gl.bfloat16)
        if CAUSAL:
            if start < masked:
                seen = o_n[:, None] <= (start + o_m)[None, :]
                e_0, e_1 = gl.where(seen, e_0, gl.zeros_like(e_0)), gl.where(seen, e_1, gl.zeros_like(e_1))
        p_0 = multiply(e_0, w_0)
        p, ds_0, ds_1 = multiply_add(e_1, w_1, p_0), multiply(p_0, g), multiply(multiply(e_1, v_1), g)
        ds = multiply_add(p_0, g, ds_1)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        take_turn(turn, part, t)
        b_q, b_g = q_ring.index(stage).reshape([BM, D]), g_ring.index(stage).reshape([BM, D])
        dv = warpgroup_mma(gl.convert_layout(p, operand), b_g, dv, is_async=True)
        dw = warpgroup_mma(gl.convert_layout(ds_0, thin_operand), c_0, dw, is_async=True)
        dw = warpgroup_mma(gl.convert_layout(ds_1, thin_operand), c_1, dw, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), b_q, dk, is_async=True)
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
    p_block = p_dv + o_r.to(gl.int64)[:, None] * stride_v + o_d[None, :]
    gl.store(p_block, dv.to(gl.bfloat16), mask=inside(real, o_d, WV, D))
    b_k, dk = k_half.load(wide).to(gl.float32), dk * inverse_0
    p_part += (2 * i_n + part) * 2 * (W + 2)
    for r in gl.static_range(2):
        component, inverse, dlog_w = one, inverse_0, column_of(dw, r, wide)
        if r == 1:
            component, inverse, dlog_w = other, inverse_1, dlog_w / ratio
        dlog_w = gl.where(real, dlog_w, 0.0)
        b_kr = b_k + load_line(p_shift + component * W, o_d, W, D)[None, :]
        pull = (dlog_w * inverse)[:, None] * b_kr
        dk -= pull
        p_own = p_part + component * (W + 2)
        gl.store(p_own, gl.sum(dlog_w, 0))
        gl.store(p_own + 1, gl.sum(gl.sum(pull * b_kr, 1), 0) * (0.5 * inverse))
        store_line(p_own + 2, o_d, -gl.sum(pull, 0), W, D)
        if POSITIONS:
            gl.store(p_dlw + component * positions + o_r, dlog_w, mask=real)
    p_block = p_dk + o_r.to(gl.int64)[:, None] * stride_k + o_d[None, :]
    gl.store(p_block, dk.to(gl.bfloat16), mask=inside(real, o_d, W, D))


@gluon.jit(do_not_specialize=COUNTS)
def key_kernel(
    q_desc, g_desc, k_desc, v_desc, r_desc, SHIFT, VARIANCE, KEYS, OVERFLOW, DK, DV, DLW, PART, sdb, sdh, sdn, seb, seh,
    sen, groups, section, H, num_queries, num_keys, positions, padded_keys, query_parts, parts, width,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, POSITIONS: gl.constexpr,
):  # fmt: skip
    i_n, i_bh = work_of(gl.program_id(0), gl.cdiv(num_keys, BN), groups, section)
    i_b, i_h, i_g = i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BM, D], g_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BN, D], v_desc.layout)
    r_ring = gl.allocate_shared_memory(gl.float32, [3 * STAGES, 1, BM], r_desc.layout)
    c_0, c_1 = unit_columns(0, BM), unit_columns(1, BM)
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    offset, begin, masked = num_keys - num_queries, 0, 0
    if CAUSAL:
        begin = gl.maximum(i_n * BN - offset, 0) // BM * BM
        masked = i_n * BN + BN - 1 - offset
    count = gl.cdiv(gl.maximum(num_queries - begin, 0), BM)
    EARLY: gl.constexpr = D < 128  # whether the next scores are asked for before the sums are there
    p_dk = DK + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    p_dv = DV + i_b.to(gl.int64) * seb + i_h.to(gl.int64) * seh
    p_keys, p_part = KEYS + i_g * 2 * padded_keys, PART + (i_g * parts + query_parts) * 2 * (W + 2)
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        first = first_of(VARIANCE + i_h * 2)
        shared, more = (q_ring, g_ring, k_s, v_s, r_ring, full, empty, ready, turn), (c_0, c_1)
        rest = (
            SHIFT + i_h * 2 * W, VARIANCE + i_h * 2, p_keys, p_dk, p_dv, DLW + i_g * 2 * positions, p_part, sdn, sen,
            num_queries, num_keys, i_n, begin, masked, count, padded_keys, positions, first,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, r_desc), (i_b, i_h, i_bh, i_n, begin, count, width, first)
        gl.warp_specialize(
            [
                (key_block, (gl.constexpr(0), shared, more, rest, BM, BN, D, W, WV, STAGES, EARLY, CAUSAL, POSITIONS)),
                (key_block, (gl.constexpr(1), shared, more, rest, BM, BN, D, W, WV, STAGES, EARLY, CAUSAL, POSITIONS)),
                (load_queries, (loads, shared, where, BM, BN, D, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def sizes(name: str, width: int, head: int = 0, value: int = 0) -> dict[str, Any]:
    """`width` of a block; `head` and `value` where they are less."""
    other, stages = SIZES[name, width]
    queries, keys = (other, BLOCK) if name == "key_kernel" else (BLOCK, other)
    return {"BM": queries, "BN": keys, "STAGES": stages, "D": width, "W": head or width, "WV": value or width}


def sizes_of(name: str, p: Problem) -> dict[str, Any]:
    head, value = p.width, p.value.shape[-1]
    return sizes(name, max(map(block_width, (head, value))), head, value)


def forward(p: Problem, saved: Saved) -> None:
    """Output and log-sum-exp of the heads that fit; heads that are found not to are flagged."""
    output, rows, _, factors, overflow = saved
    size, query, key = sizes_of("forward_kernel", p), p.query, p.key
    tile, width = size["BN"], size["D"]
    run(
        forward_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(key, tile, width),
        tiles(p.value, tile, width), lines(factors, tile, ROW16), p.shift, p.variances, output, rows, overflow,
        *strides(output), p.groups, p.section, p.heads, query.shape[2], key.shape[2], rows.shape[-1], **size,
        EVEN=even(query, key), CAUSAL=p.causal,
    )  # fmt: skip


def query_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grad_query: Tensor, part: Tensor) -> None:
    """dq, `row_stats` as vectors along the queries, and the first entries of `part`, of the heads that fit."""
    output, rows, _, factors, overflow = saved
    size, query, key = sizes_of("query_kernel", p), p.query, p.key
    tile, width = size["BN"], size["D"]
    run(
        query_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(grad, BLOCK, width),
        tiles(key, tile, width), tiles(p.value, tile, width), lines(factors, tile, ROW16), p.shift, p.variances,
        output, rows, overflow, row_stats, grad_query, part, *strides(output, grad_query), p.groups, p.section,
        p.heads, query.shape[2], key.shape[2], rows.shape[-1], part.shape[2], row_stats.shape[-1], **size,
        EVEN=even(query, key), CAUSAL=p.causal,
    )  # fmt: skip


def key_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grads: list[Tensor], part: Tensor) -> None:
    """dk, dv, the gradient of a prior per position and the rest of `part`, of the heads that fit."""
    _, _, _, factors, overflow = saved
    _, grad_key, grad_value, grad_bias = grads
    size, query, key = sizes_of("key_kernel", p), p.query, p.key
    queries, width, (groups, length, _) = size["BM"], size["D"], row_stats.shape
    run(
        key_kernel, key.shape[2], BLOCK, query, tiles(query, queries, width), tiles(grad, queries, width),
        tiles(key, BLOCK, width), tiles(p.value, BLOCK, width),
        lines(row_stats.view(groups, -1, length), queries, ROW32), p.shift, p.variances, factors, overflow, grad_key,
        grad_value, grad_bias, part, *strides(grad_key, grad_value), groups, p.section, p.heads, query.shape[2],
        key.shape[2], p.positions, factors.shape[-1], length // HALF.value, part.shape[2],
        row_stats.shape[-1], **size, CAUSAL=p.causal, POSITIONS=grad_bias.dim() > 1,
    )  # fmt: skip
