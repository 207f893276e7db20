"""Projected keys for wide heads on Hopper, in Gluon, as hopper.py has shifted ones: two warp groups that take turns.

The arithmetic is that of projected.py for two components of one variance: narrow in bfloat16. In float16, which has too
few exponents for factors, weights are computed in float32 from exponents, and bounded as in hopper.py.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mgk.ops.dispatch import block_width
from mgk.ops.triton import hopper_projected_wide
from mgk.ops.triton.hopper_common import (
    BLOCK,
    COLUMNS,
    COUNTS,
    HALF,
    ROW16,
    ROW32,
    barriers,
    bound_of,
    copy,
    even,
    has_bad_sum,
    inside,
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
from mgk.ops.triton.hopper_projected_keys import key_kernel

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
    FACTORED: gl.constexpr, FORWARD: gl.constexpr,
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
        mbarrier.expect(bar, BN * (6 * D + (4 if FACTORED else 8)))
        for r in gl.static_range(2):
            copy(k_desc, [i_b, i_h, r, start, 0], bar, k_ring.index(2 * stage + r))
            copy(w_desc, [2 * i_bh + r, start], bar, w_ring.index(2 * stage + r))
        copy(v_desc, [i_b, i_h, start, 0], bar, v_ring.index(stage))


@gluon.jit
def forward_block(
    part: gl.constexpr, shared, more, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, WV: gl.constexpr,
    STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """The output of 64 queries and their LSE."""
    q_s, _, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    c_s = more[0]
    dtype: gl.constexpr = q_s.dtype
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
    if dtype == gl.float16:
        s_0, s_1 = warpgroup_mma_wait(0, deps=(s_0, s_1))
        x = gl.maximum(s_0 * scale + w_ring.index(0).load(mma), s_1 * scale + w_ring.index(1).load(mma))
        bound = bound_of(x, seen_keys(o_m, o_n, num_queries, num_keys, CAUSAL, EVEN))
        s_0, s_1 = warpgroup_mma_init(s_0), warpgroup_mma_init(s_1)
    for t in range(count):
        stage, after = t % STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        s_0, s_1 = warpgroup_mma_wait(0, deps=(s_0, s_1))
        w_0, w_1 = w_ring.index(2 * stage).load(mma), w_ring.index(2 * stage + 1).load(mma)
        if dtype == gl.float16 and not BEST:
            p = gl.exp2(s_0 * scale + w_0 - bound[:, None]) + gl.exp2(s_1 * scale + w_1 - bound[:, None])
            p = p.to(dtype)
        elif BEST:
            p = gl.exp2(gl.maximum(s_0 * scale + w_0, s_1 * scale + w_1) - bound[:, None]).to(dtype)
        else:
            e_0 = gl.exp2(s_0 * scale - bound[:, None]).to(gl.bfloat16)
            e_1 = gl.exp2(s_1 * scale - bound[:, None]).to(gl.bfloat16)
            p = multiply_add(e_1, w_1.broadcast_to([HALF, BN]), multiply(e_0, w_0.broadcast_to([HALF, BN])))
        if CAUSAL or (not EVEN and dtype == gl.bfloat16):  # in float16 the weights of what is no key are exponents
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
    p_block = p_out + o_r[:, None] * stride_o + o_d[None, :]
    gl.store(p_block, output.to(dtype), mask=inside(o_r < num_queries, o_d, WV, D))


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_desc, k_desc, v_desc, w_desc, OUT, ROWS, OVERFLOW, scale, sob, soh, son, groups, section, H, num_queries,
    num_keys, padded_queries, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """D is the width of a block, W and WV are those of a head and a value; zeros fill the rest of a block."""
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H
    q_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, BM, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES, 1, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 1, BN], w_desc.layout)
    c_s = unit_columns(0, BN, q_desc.dtype)
    FACTORED: gl.constexpr = w_desc.dtype == gl.bfloat16
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
                (forward_block, (gl.constexpr(0), shared, (c_s,), rest, BM, BN, D, WV, STAGES, EVEN, CAUSAL, BEST)),
                (forward_block, (gl.constexpr(1), shared, (c_s,), rest, BM, BN, D, WV, STAGES, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, FACTORED, gl.constexpr(True))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def query_block(
    part: gl.constexpr, shared, rest, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    """dq of 64 queries, and what the key side needs of them."""
    q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn = shared
    p_out, p_rows, p_known, p_dq, scale, inverse_variance, stride_o, stride_d = rest[:8]
    num_queries, num_keys, i_m, whole, count, padded_queries = rest[8:]
    dtype: gl.constexpr = q_s.dtype
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
    b_o = gl.load(p_block, mask=inside(o_f < num_queries, o_d, WV, D), other=0.0).to(gl.float32)
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
            g = (e * (slope - delta[:, None])).to(dtype)
            ds_1 = second_of(x_0, x_1, g)
            ds_0 = without(g, ds_1)
        elif dtype == gl.float16:
            g = slope - delta[:, None]
            ds_0 = (gl.exp2(s_0 * scale + w_0 - lse[:, None]) * g).to(dtype)
            ds_1 = (gl.exp2(s_1 * scale + w_1 - lse[:, None]) * g).to(dtype)
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
    gl.store(p_dq + at, (dq * inverse_variance).to(dtype), mask=inside(o_r < num_queries, o_d, W, D))


@gluon.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_desc, g_desc, k_desc, v_desc, w_desc, OUT, ROWS, OVERFLOW, ROW_STATS, DQ, scale, inverse_variance, sob, soh,
    son, sdb, sdh, sdn, groups, section, H, num_queries, num_keys, padded_queries, width, BM: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, W: gl.constexpr, WV: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    CAUSAL: gl.constexpr, BEST: gl.constexpr,
):  # fmt: skip
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, BM), groups, section)
    i_m, i_b, i_h, i_g = gl.cdiv(num_queries, BM) - 1 - i_block, i_bh // H, i_bh % H, i_bh.to(gl.int64)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, BM, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(g_desc.dtype, [1, 1, BM, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES, 1, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BN, D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 1, BN], w_desc.layout)
    FACTORED: gl.constexpr = w_desc.dtype == gl.bfloat16
    full, empty, ready, turn = barriers(STAGES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, BM, BN, CAUSAL)
    p_rows, p_known = ROWS + i_g * padded_queries, ROW_STATS + i_g * width * padded_queries
    p_out = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh
    p_dq = DQ + i_b.to(gl.int64) * sdb + i_h.to(gl.int64) * sdh
    if gl.load(OVERFLOW + 2 * i_bh) + gl.load(OVERFLOW + 2 * i_bh + 1) == 0:
        shared = (q_s, g_s, k_ring, v_ring, w_ring, full, empty, ready, turn)
        rest = (
            p_out, p_rows, p_known, p_dq, scale, inverse_variance, son, sdn, num_queries, num_keys, i_m, whole, count,
            padded_queries,
        )  # fmt: skip
        loads, where = (q_desc, g_desc, k_desc, v_desc, w_desc), (i_b, i_h, i_bh, i_m, count)
        gl.warp_specialize(
            [
                (query_block, (gl.constexpr(0), shared, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL, BEST)),
                (query_block, (gl.constexpr(1), shared, rest, BM, BN, D, W, WV, STAGES, EVEN, CAUSAL, BEST)),
                (load_keys, (loads, shared, where, BM, BN, D, STAGES, FACTORED, gl.constexpr(False))),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def sizes(name: str, width: int, head: int = 0, value: int = 0) -> dict[str, Any]:
    """`width` of a block; `head` and `value` where they are less."""
    other, stages = SIZES[name, width]
    block = HALF.value if name == "key_kernel" and width == 128 else BLOCK
    queries, keys = (other, block) if name == "key_kernel" else (BLOCK, other)
    return {"BM": queries, "BN": keys, "STAGES": stages, "D": width, "W": head or width, "WV": value or width}


def sizes_of(name: str, p: Problem) -> dict[str, Any]:
    head, value = p.width, p.value.shape[-1]
    return sizes(name, max(map(block_width, (head, value))), head, value)


def weights(keys: Tensor, factors: Tensor, width: int) -> TensorDescriptor:
    """What is multiplied with the exponentials of scores or, without such factors, added to the scores."""
    return lines(factors, width, ROW16) if factors.numel() else lines(keys, width, ROW32)


def forward(p: Problem, saved: Saved) -> None:
    """Output and log-sum-exp of the heads that fit; heads that are found not to are flagged."""
    output, rows, keys, factors, overflow = saved
    size, query, key = sizes_of("forward_kernel", p), p.query, p.key
    tile, width = size["BN"], size["D"]
    run(
        forward_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(key, tile, width),
        tiles(p.value, tile, width),
        weights(keys, factors, tile), output, rows, overflow, p.numbers[0], *strides(output), p.groups,
        p.section, p.heads, query.shape[2], key.shape[3], rows.shape[-1], **size, EVEN=even(query, key),
        CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def query_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grad_query: Tensor) -> None:
    """dq, and `row_stats` as vectors along the queries, of the heads that fit."""
    output, rows, keys, factors, overflow = saved
    size, query, key = sizes_of("query_kernel", p), p.query, p.key
    tile, width = size["BN"], size["D"]
    run(
        query_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(grad, BLOCK, width),
        tiles(key, tile, width), tiles(p.value, tile, width), weights(keys, factors, tile), output, rows, overflow,
        row_stats, grad_query, p.numbers[0], 1 / p.variance, *strides(output, grad_query), p.groups, p.section,
        p.heads, query.shape[2], key.shape[3], rows.shape[-1], row_stats.shape[-1], **size, EVEN=even(query, key),
        CAUSAL=p.causal, BEST=p.hard,
    )  # fmt: skip


def key_side(p: Problem, saved: Saved, grad: Tensor, row_stats: Tensor, grads: list[Tensor], part: Tensor) -> None:
    """dk, dv, the gradient of a prior per position and `part`, of the heads that fit."""
    _, _, keys, factors, overflow = saved
    _, grad_key, grad_value, grad_bias = grads
    size, query, key = sizes_of("key_kernel", p), p.query, p.key
    queries, block, width = size["BM"], size["BN"], size["D"]
    vectors = lines(row_stats.view(row_stats.shape[0], -1, row_stats.shape[1]), queries, ROW32)
    kernel = hopper_projected_wide.key_kernel if block == HALF.value else key_kernel
    run(
        kernel, key.shape[3], block, query, tiles(query, queries, width), tiles(grad, queries, width),
        tiles(key, block, width), tiles(p.value, block, width), vectors,
        factors if factors.numel() else keys, overflow, grad_key, grad_value, grad_bias, part, p.numbers[0],
        1 / p.variance, *strides(grad_key, grad_value), p.groups, p.section, p.heads, query.shape[2],
        key.shape[3], p.positions, keys.shape[-1], part.shape[2], row_stats.shape[-1], **size, CAUSAL=p.causal,
        BEST=p.hard, POSITIONS=grad_bias.dim() > 1,
    )  # fmt: skip
