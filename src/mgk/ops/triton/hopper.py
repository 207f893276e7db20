"""The forward kernel for shifted keys on Hopper GPUs, in Gluon: two warp groups compute, one warp loads.

Triton waits for each matrix product before it continues. Here two warp groups of four warps, each with half of a block
of 128 queries (or keys), loop over the tiles of the other side independently: while one computes exponentials, the
products of the other run. One more warp copies tiles into a ring buffer in shared memory. The arithmetic is that of
the FAST path of shifted.py, with narrow mixing. Heads that would overflow, masks, dropout and other GPUs use the
generic kernels.

The copy engine fills tiles of D columns with zeros where heads (of width DK) or values (DV) are narrower.

float16 (not FIXED) has too few exponents for the sizes of w and of rho, which become exponents:
2^l = 2^(q.k/s2 + top[j] + top[i]) sum_r u_r[i] w_r[j], where the largest w of each key and the largest u of each query
are 1. If every u is at least LEAST, a sum is between that and M; a head with a smaller one is flagged. The forward
pass keeps rho in place of u, and bounds a row by its largest weight in the first tile of keys (`bound_of`).

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
    warpgroup_mma_init,
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
    bound_of,
    contraction,
    copy,
    even,
    has_bad_sum,
    inside,
    larger,
    lines,
    multiply,
    multiply_add,
    pass_turn,
    product,
    range_of,
    ring_barriers,
    run,
    seen_keys,
    strides,
    take_turn,
    tiles,
    unit_columns,
    work_of,
)
from mgk.ops.triton.loads import constants

if TYPE_CHECKING:
    from mgk.ops.triton.launch_shifted import Saved
    from mgk.ops.triton.problem import Problem

# (kernel, width): the tile of the other side, how many of those the ring holds, and whether the scores of the next are
# asked for before the sums of this one are there, if there are registers for both
SIZES = {
    ("forward_kernel", 64): (128, 5, True), ("forward_kernel", 128): (64, 5, True),
    ("query_kernel", 64): (128, 5, False), ("query_kernel", 128): (64, 4, True),
    ("key_kernel", 32): (128, 4, False), ("key_kernel", 64): (64, 6, True), ("key_kernel", 128): (64, 4, False),
    ("forward_kernel", 256): (64, 2, False), ("query_kernel", 256): (32, 3, False), ("key_kernel", 256): (64, 2, True),
}  # fmt: skip
MANY = (64, 8, True)  # of the forward kernel at a width of 64 for more than two components
# The same with a ring of its own for the values, where there is memory for few tiles: what is read first is free first
SPLIT = {("forward_kernel", 256): 2, ("query_kernel", 256): 2}


LEAST = gl.constexpr(2.0**-12)
LEAST_LINE = gl.constexpr(64)  # numbers of two bytes that a copy takes; shorter lines are copied as float32


@gluon.jit
def mixed(rho, w, FIRST: gl.constexpr, M: gl.constexpr, BEST: gl.constexpr):
    """sum_r rho_r w_r, or the largest of these. `rho` begins with the one of component FIRST; one before it is 1."""
    result = w[0]
    if FIRST == 0:
        result = multiply(rho[0], result)
    for r in gl.static_range(1, M):
        if BEST:
            result = larger(result, multiply(rho[r - FIRST], w[r]))
        else:
            result = multiply_add(rho[r - FIRST], w[r], result)
    return result


@gluon.jit
def load_rows(p_rows, o_m, stride, M: gl.constexpr, BEST: gl.constexpr):
    """rho of each component; the first is 1."""
    rho = ()
    for r in gl.static_range(M):
        b_rho = gl.load(p_rows + (1 + r) * stride + o_m)
        rho = rho + (gl.exp2(b_rho) if BEST else b_rho,)
    return rho


@gluon.jit
def load_shares(p_rows, o_m, stride, M: gl.constexpr):
    """Each component's factor as a share of the largest, and the logarithm of that."""
    logs = ()
    for r in gl.static_range(M):
        logs = logs + (gl.load(p_rows + (1 + M + r) * stride + o_m),)
    top = gl.maximum(logs[0], -1e30)  # a key that does not exist has -inf
    for r in gl.static_range(1, M):
        top = gl.maximum(top, logs[r])
    shares = ()
    for r in gl.static_range(M):
        shares = shares + (gl.exp2(logs[r] - top),)
    return shares, top


@gluon.jit
def down(vectors, SIZE: gl.constexpr, kind: gl.constexpr, FIRST: gl.constexpr, M: gl.constexpr):
    """Vectors along the rows, from the one of component FIRST on, as blocks."""
    blocks = ()
    for r in gl.static_range(FIRST, M):
        blocks = blocks + (vectors[r].to(kind)[:, None].broadcast_to([HALF, SIZE]),)
    return blocks


@gluon.jit
def across(ring, first, layout: gl.constexpr, SIZE: gl.constexpr, M: gl.constexpr):
    """M vectors along the columns, in shared memory, as blocks."""
    blocks = ()
    for r in gl.static_range(M):
        line = ring.index(first + r).load(layout)
        if SIZE < LEAST_LINE:
            line = line.to(gl.bfloat16)
        blocks = blocks + (line.broadcast_to([HALF, SIZE]),)
    return blocks


@gluon.jit
def load_keys(loads, shared, where, FORWARD: gl.constexpr, C: gl.constexpr):
    """The block of queries, then tile after tile of keys."""
    M: gl.constexpr = C.M
    EXTRA: gl.constexpr = 4 if not C.FIXED else 2 if C.BEST and not FORWARD else 0  # bytes of a line of tops, or gaps
    SUMMED: gl.constexpr = M > 1 and not C.BEST and not FORWARD
    SINGLE: gl.constexpr = C.BN < LEAST_LINE
    WEIGHTS: gl.constexpr = (4 if SINGLE else 2) * M + (2 * C.SUMS if SUMMED else 0)  # bytes for a key
    q_desc, g_desc, k_desc, v_desc, c_desc, w_desc, gap_desc = loads
    q_s, g_s, k_ring, v_ring, c_ring, w_ring, gap_ring, full, empty, ready, _, v_full, v_empty = shared
    i_b, i_h, i_bh, i_m, count, padded_keys = where
    mbarrier.expect(ready, (2 if FORWARD else 4) * C.BM * C.D)
    copy(q_desc, [i_b, i_h, i_m * C.BM, 0], ready, q_s)
    if not FORWARD:
        copy(g_desc, [i_b, i_h, i_m * C.BM, 0], ready, g_s)
    for t in range(count):
        stage, start = t % C.STAGES, t * C.BN
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (t // C.STAGES & 1) ^ 1)
        mbarrier.expect(bar, C.BN * ((2 if C.SPLIT else 4) * C.D + WEIGHTS + EXTRA))
        copy(k_desc, [i_b, i_h, start, 0], bar, k_ring.index(stage))
        for r in gl.static_range(M):
            line = (1 + 2 * M) * i_bh + 1 + r if SINGLE else M * i_bh + r
            copy(w_desc, [line, start], bar, w_ring.index(M * stage + r))
        if EXTRA > 0:
            copy(gap_desc, [i_bh, start], bar, gap_ring.index(stage))
        if SUMMED:
            place = [M * i_bh, start] if C.SPLIT else [i_bh * padded_keys + start, 0]
            copy(c_desc, place, bar, c_ring.index(stage))
        v_bar = v_full.index(t % C.VALUES)
        if C.SPLIT:
            mbarrier.wait(v_empty.index(t % C.VALUES), (t // C.VALUES & 1) ^ 1)
            mbarrier.expect(v_bar, 2 * C.BN * C.D)
        copy(v_desc, [i_b, i_h, start, 0], v_bar, v_ring.index(t % C.VALUES))


@gluon.jit
def forward_block(part: gl.constexpr, shared, rest, C: gl.constexpr):
    """The output of 64 queries and their LSE."""
    D: gl.constexpr = C.D
    BN: gl.constexpr = C.BN
    M: gl.constexpr = C.M
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    q_s, _, k_ring, v_ring, c_ring, w_ring, top_ring, full, empty, ready, turn, v_full, v_empty = shared
    p_out, p_rows, p_overflow, scale, stride_o, num_queries, num_keys, i_m, whole, count, padded_queries = rest
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    q_half = q_s.reshape([C.BM, D]).slice(part * HALF, HALF, 0)
    o_m = i_m * C.BM + part * HALF + gl.arange(0, HALF, row)
    bound, factors = gl.load(p_rows + o_m), load_rows(p_rows, o_m, padded_queries, M, C.BEST)
    rho = down(factors, BN, kind, C.FIRST, M)
    acc = gl.zeros([HALF, D], gl.float32, wide)
    sums = gl.zeros([HALF, COLUMNS], gl.float32, thin)
    zero = gl.zeros([HALF, BN], gl.float32, mma)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s = product(q_half, k_ring.index(0).reshape([BN, D]), zero, C.K_FIRST, C.K_REST)
    if not C.FIXED:
        s = warpgroup_mma_wait(0, deps=(s,))
        seen = seen_keys(o_m, o_n, num_queries, num_keys, C.CAUSAL, C.EVEN)
        bound = bound_of(s * scale + top_ring.index(0).load(mma), seen)
        s = warpgroup_mma_init(s)
    for t in range(count):
        stage, after = t % C.STAGES, gl.minimum(t + 1, count - 1)  # after the last one, the last one again
        mix = mixed(rho, across(w_ring, M * stage, mma, BN, M), C.FIRST, M, C.BEST)
        s = warpgroup_mma_wait(0, deps=(s,))
        x = s * scale
        if not C.FIXED:
            x = x + top_ring.index(stage).load(mma)
        x = x - bound[:, None]
        if C.SPLIT:
            mbarrier.arrive(empty.index(stage))
        if C.CAUSAL or not C.EVEN:
            if t >= whole:
                seen = seen_keys(o_m, t * BN + o_n, num_queries, num_keys, C.CAUSAL, C.EVEN)
                x = gl.where(seen, x, float("-inf"))
        p = multiply(gl.exp2(x).to(kind), mix)
        if C.SPLIT:
            mbarrier.wait(v_full.index(t % C.VALUES), t // C.VALUES & 1)
        mbarrier.wait(full.index(after % C.STAGES), after // C.STAGES & 1)
        take_turn(turn, part, t)
        sums = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, thin, 2)), c_ring, sums, is_async=True)
        b_v, b_k = v_ring.index(t % C.VALUES).reshape([BN, D]), k_ring.index(after % C.STAGES).reshape([BN, D])
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, wide, 2)), b_v, acc, is_async=True)
        if not C.EARLY:
            sums, acc = warpgroup_mma_wait(0, deps=(sums, acc))
        s = product(q_half, b_k, zero, C.K_FIRST, C.K_REST)
        pass_turn(turn, part)
        if C.EARLY:
            sums, acc = warpgroup_mma_wait(C.UNDER_WAY, deps=(sums, acc))
        mbarrier.arrive(v_empty.index(t % C.VALUES))
    warpgroup_mma_wait(0, deps=(s,))

    total = gl.sum(sums, 1)  # the other columns are 0
    here = gl.convert_layout(total, row)
    bad = has_bad_sum(here, o_m, num_queries, num_keys, C.CAUSAL)
    if not C.FIXED:
        most = factors[0]
        for r in gl.static_range(1, M):
            most = gl.maximum(most, factors[r])
        for r in gl.static_range(M):
            bad = bad | ((factors[r] >= LEAST * most) == 0)
    if gl.max(bad.to(gl.int32), 0) > 0:
        gl.store(p_overflow + 1, 1.0)
    gl.store(p_rows + o_m, gl.where((here > 0) & (o_m < num_queries), bound + gl.log2(here), float("inf")))
    total = gl.convert_layout(total, gl.SliceLayout(1, wide))
    output = gl.where((total > 0)[:, None], acc / gl.where(total > 0, total, 1.0)[:, None], 0.0)
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), gl.arange(0, HALF, gl.SliceLayout(1, wide))
    o_r = (i_m * C.BM + part * HALF + o_r).to(gl.int64)
    p_block = p_out + o_r[:, None] * stride_o + o_d[None, :]
    gl.store(p_block, output.to(kind), mask=inside(o_r < num_queries, o_d, C.DV, D))


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_desc, k_desc, v_desc, w_desc, top_desc, OUT, ROWS, OVERFLOW, scale, sob, soh, son, groups, section, H,
    num_queries, num_keys, padded_queries, padded_keys, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.STAGES
    M: gl.constexpr = C.M
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    i_block, i_bh = work_of(gl.program_id(0), gl.cdiv(num_queries, C.BM), groups, section)
    i_m, i_b, i_h = gl.cdiv(num_queries, C.BM) - 1 - i_block, i_bh // H, i_bh % H
    q_s = gl.allocate_shared_memory(kind, [1, 1, C.BM, C.D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(kind, [STAGES, 1, 1, C.BN, C.D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(kind, [C.VALUES, 1, 1, C.BN, C.D], v_desc.layout)
    w_ring = gl.allocate_shared_memory(kind, [M * STAGES, 1, C.BN], w_desc.layout)
    top_ring, c_ring = w_ring, unit_columns(0, C.BN, kind)
    if not C.FIXED:
        top_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C.BN], top_desc.layout)
    full, empty, ready, turn = barriers(STAGES)
    v_full, v_empty = full, empty
    if C.SPLIT:
        v_full, v_empty = ring_barriers(C.VALUES)
    fence_async_shared()
    whole, count = range_of(i_m, num_queries, num_keys, C.BM, C.BN, C.CAUSAL)
    p_rows = ROWS + i_bh.to(gl.int64) * (1 + 2 * M) * padded_queries
    p_out, p_overflow = OUT + i_b.to(gl.int64) * sob + i_h.to(gl.int64) * soh, OVERFLOW + 2 * i_bh
    if gl.load(p_overflow) == 0:
        shared = (q_s, q_s, k_ring, v_ring, c_ring, w_ring, top_ring, full, empty, ready, turn, v_full, v_empty)
        rest = (p_out, p_rows, p_overflow, scale, son, num_queries, num_keys, i_m, whole, count, padded_queries)
        loads = (q_desc, q_desc, k_desc, v_desc, w_desc, w_desc, top_desc)
        where = (i_b, i_h, i_bh, i_m, count, padded_keys)
        gl.warp_specialize(
            [
                (forward_block, (gl.constexpr(0), shared, rest, C)),
                (forward_block, (gl.constexpr(1), shared, rest, C)),
                (load_keys, (loads, shared, where, gl.constexpr(True), C)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def share_kernel(KEYS, SHARES, TOPS, padded_keys, M: gl.constexpr, SIZE: gl.constexpr):
    """SHARES (G,M,Nk') in float16 and TOPS (G,Nk') of all keys; see `load_shares`."""
    along: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    blocks = padded_keys // SIZE
    i_g = (gl.program_id(0) // blocks).to(gl.int64)
    o_n = gl.program_id(0) % blocks * SIZE + gl.arange(0, SIZE, along)
    shares, top = load_shares(KEYS + i_g * (1 + 2 * M) * padded_keys, o_n, padded_keys, M)
    gl.store(TOPS + i_g * padded_keys + o_n, top)
    for r in gl.static_range(M):
        gl.store(SHARES + (i_g * M + r) * padded_keys + o_n, shares[r].to(gl.float16))


def settings(
    name: str, width: int, value_width: int, components: int, hard: bool, fixed: bool, **others: Any
) -> dict[str, Any]:
    """The compile-time constants C of a kernel, by name.

    FIRST: the first component whose row factor is not always 1. LINES: how many narrow vectors the key side reads.
    SPLIT: the values have a ring of their own, of VALUES tiles. SUMS: columns of the product that sums over keys.
    UNDER_WAY: how many products the scores (and slopes) of a tile are.
    """
    first = int(fixed or components == 1 or name == "forward_kernel")
    block = max(block_width(width), block_width(value_width))
    other, stages, early = SIZES[name, block]
    if (name, block) == ("forward_kernel", 64) and fixed and components > 2:
        other, stages, early = MANY
    split, block_keys = SPLIT.get((name, block)), HALF.value if block > 128 else BLOCK
    queries, keys = (other, block_keys) if name == "key_kernel" else (BLOCK, other)
    spans = (contraction(width, block), contraction(value_width, block))
    under_way = sum(1 + (rest > 0) for _, rest in (spans[:1] if name == "forward_kernel" else spans))
    return {
        "BM": queries, "BN": keys, "STAGES": stages, "EARLY": early, "D": block, "DK": width, "DV": value_width,
        "M": components, "BEST": hard, "FIXED": fixed, "FIRST": first, "LINES": 2 if hard else components - first,
        "K_FIRST": spans[0][0], "K_REST": spans[0][1], "V_FIRST": spans[1][0], "V_REST": spans[1][1],
        "SPLIT": split is not None, "VALUES": split or stages, "SUMS": 8 if split and not hard else COLUMNS.value,
        "UNDER_WAY": under_way, "PART": block + 1, **others,
    }  # fmt: skip


def settings_of(p: Problem, name: str, **others: Any) -> dict[str, Any]:
    fixed = p.query.dtype != torch.float16
    return settings(name, p.width, p.value.shape[-1], p.components, p.hard, fixed, CAUSAL=p.causal, **others)


def key_factors(p: Problem, saved: Saved) -> tuple[Tensor, Tensor | None]:
    """The keys' factors and, in float16, their tops."""
    _, _, keys, factors, _ = saved
    if p.query.dtype != torch.float16:
        return factors, None
    groups, length = keys.shape[0], keys.shape[-1]
    factors, tops = p.empty(groups, p.components, length, dtype=torch.float16), p.empty(groups, length)
    run(share_kernel, length, BLOCK, p.query, keys, factors, tops, length, M=p.components, SIZE=BLOCK)
    return factors, tops


def forward(p: Problem, saved: Saved) -> None:
    """Output and log-sum-exp of the heads that fit; heads that are found not to are flagged."""
    output, rows, _, _, overflow = saved
    factors, tops = key_factors(p, saved)
    query, key = p.query, p.key
    size = settings_of(p, "forward_kernel", EVEN=even(query, key))
    keys, width = size["BN"], size["D"]
    weights = lines(factors, keys, ROW16)
    run(
        forward_kernel, query.shape[2], BLOCK, query, tiles(query, BLOCK, width), tiles(key, keys, width),
        tiles(p.value, keys, width), weights, weights if tops is None else lines(tops, keys, ROW32), output, rows,
        overflow, p.numbers[0], *strides(output), p.groups, p.section, p.heads, query.shape[2], key.shape[2],
        rows.shape[-1], factors.shape[-1], C=constants(**size),
    )  # fmt: skip
