"""What the Hopper kernels share: small block functions in Gluon, and descriptors of tensors for the copy engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mgk.ops.dispatch import block_width
from mgk.ops.triton.launch import launch

copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name since Triton 3.7
BLOCK = 128  # queries or keys of a program, half of them for each of the two warp groups that compute
HALF = gl.constexpr(64)
COLUMNS = gl.constexpr(16)
COUNTS = ("groups", "section", "H", "num_queries", "num_keys", "positions", "query_parts", "parts", "width")
THIN = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
# Vectors along the queries that the key side reads lie where the other kernels have numbers side by side: LSE, delta,
# and where a third would be, narrow ones: each rho but the first and, hard, the bits of the lead in float16. Where
# everything is in float16: each u, and the LSE is less the top.
NARROW = gl.constexpr(4)
SPARE = gl.constexpr(4)
ROW16, ROW32 = gl.NVMMASharedLayout(0, 16, 2), gl.NVMMASharedLayout(0, 32, 2)


@gluon.jit
def multiply_add(x, y, z):
    if x.dtype == gl.float16:
        result = gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], gl.float16, True, 2)
    else:
        result = gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], gl.bfloat16, True, 2)
    return result


@gluon.jit
def multiply(x, y):
    if x.dtype == gl.float16:
        result = gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.float16, True, 2)
    else:
        result = gl.inline_asm_elementwise(
            "{.reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero;}", "=r,r,r", [x, y],
            gl.bfloat16, True, 2,
        )  # fmt: skip
    return result


@gluon.jit
def larger(x, y):
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.bfloat16, True, 2)


@gluon.jit
def where_larger(x, y, z):
    """z where y is larger than x, else 0; x and y of float16, z of bfloat16."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 mask; set.gt.u32.f16x2 mask, $2, $1; and.b32 $0, $3, mask;}", "=r,r,r,r",
        [x, y, z], gl.bfloat16, True, 2,
    )  # fmt: skip


@gluon.jit
def column_of(block, r: gl.constexpr, layout: gl.constexpr):
    """Column r of a product's few columns, in the layout of the rows of another."""
    o_column = gl.arange(0, block.shape[1], gl.SliceLayout(0, block.type.layout))
    return gl.convert_layout(gl.sum(gl.where((o_column == r)[None, :], block, 0.0), 1), gl.SliceLayout(1, layout))


@gluon.jit
def work_of(item, blocks, groups, section):
    """As in primitives.py, for sequences of one length."""
    first = item // (blocks * section) * section
    width = gl.minimum(section, groups - first)
    rest = item - first * blocks
    return rest // width, first + rest % width


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = 2):
    """Barriers: a stage of the ring is full; the warp groups that read it have."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Those of a ring; the block is loaded; whose turn it is."""
    full, empty = ring_barriers(STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    return full, empty, ready, turn


@gluon.jit
def take_turn(turn, part: gl.constexpr, t):
    """Wait for the turn to issue the products of a tile; the first warp group begins. If both issued at once, both
    would wait for products and then both compute.
    """
    mbarrier.wait(turn.index(part), (t & 1) ^ (1 - part))


@gluon.jit
def pass_turn(turn, part: gl.constexpr):
    mbarrier.arrive(turn.index(1 - part))


@gluon.jit
def unit_columns(r: gl.constexpr, ROWS: gl.constexpr, kind: gl.constexpr = gl.bfloat16):
    """Ones in column r: a product with it sums rows."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    o_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, rows))
    ones = gl.full([ROWS, COLUMNS], 1.0, kind, rows)
    return gl.allocate_shared_memory(
        kind, [ROWS, COLUMNS], THIN, gl.where((o_column == r)[None, :], ones, gl.zeros_like(ones))
    )


@gluon.jit
def range_of(i_m, num_queries, num_keys, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles a query block sees, and how many of them hide nothing."""
    whole, count, offset = num_keys // BN, gl.cdiv(num_keys, BN), num_keys - num_queries
    if CAUSAL:
        count = gl.minimum(count, gl.cdiv(gl.maximum(i_m * BM + BM + offset, 0), BN))
        whole = gl.minimum(whole, gl.maximum(i_m * BM + offset + 1, 0) // BN)
    return whole, count


@gluon.jit
def seen_keys(o_m, o_n, num_queries, num_keys, CAUSAL: gl.constexpr, EVEN: gl.constexpr):
    """Which query sees which key, of rows and columns as vectors of the layout of a tile."""
    if CAUSAL:
        seen = o_n[None, :] <= o_m[:, None] + (num_keys - num_queries)
        if not EVEN:
            seen = seen & (o_n < num_keys)[None, :]
    else:
        seen = (o_n[None, :] < num_keys) & (o_m[:, None] >= 0)
    return seen


@gluon.jit
def has_bad_sum(total, o_m, num_queries, num_keys, CAUSAL: gl.constexpr):
    """Which queries that see a key have a sum near overflow or underflow; see primitives.flag_bad_sums."""
    bad = ((total >= 2.0**-90) & (total <= 2.0**90) == 0) & (o_m < num_queries)
    if CAUSAL:
        bad = bad & (o_m + num_keys - num_queries >= 0)
    return bad


@gluon.jit
def bound_of(x, seen):
    """What float16 subtracts from the exponents of each row, of which x are those of the first tile.

    The largest weight in it becomes 2^-SPARE. Later ones may be larger, up to 2^16; where one is not, the sum of the
    row is infinite, which flags its head.
    """
    largest = gl.max(gl.where(seen, x, float("-inf")), 1)
    return gl.where(largest == float("-inf"), 0.0, largest) + SPARE


@gluon.jit
def inside(rows, o_column, WIDTH: gl.constexpr, BLOCK: gl.constexpr):
    """Which numbers of a block are in `rows` and in the first WIDTH columns."""
    mask = rows[:, None]
    if WIDTH < BLOCK:
        mask = mask & (o_column < WIDTH)[None, :]
    return mask


@gluon.jit
def load_line(pointer, o_column, WIDTH: gl.constexpr, BLOCK: gl.constexpr):
    """WIDTH numbers in float32, and zeros behind them."""
    if WIDTH < BLOCK:
        line = gl.load(pointer + o_column, mask=o_column < WIDTH, other=0.0)
    else:
        line = gl.load(pointer + o_column)
    return line.to(gl.float32)


@gluon.jit
def log_grad(dw, weights, real, r: gl.constexpr, wide: gl.constexpr, C: gl.constexpr):
    """The gradient of the logarithm of the weight r of each key."""
    grad = column_of(dw, r, wide)
    if not C.BEST:
        grad = grad * gl.convert_layout(weights[r], gl.SliceLayout(1, wide))
    elif r == 0:
        grad = grad - column_of(dw, 1, wide)
    return gl.where(real, grad, 0.0)


@gluon.jit
def pull_of(dlog_w, b_k, p_shift, o_d, r: gl.constexpr, C: gl.constexpr):
    """What weight r takes from dk."""
    return dlog_w[:, None] * (b_k + load_line(p_shift + r * C.DK, o_d, C.DK, C.D)[None, :])


@gluon.jit
def store_share(pull, dlog_w, p_part, o_d, inverse_variance, r: gl.constexpr, C: gl.constexpr):
    """The share of a block of keys in dshift and dlog_prior of component r."""
    gl.store(p_part + r * C.PART + o_d, -gl.sum(pull, 0) * inverse_variance, mask=o_d < C.DK)
    gl.store(p_part + (r * C.PART + C.PART - 1), gl.sum(dlog_w, 0))


@gluon.jit
def store_keys(dk, dw, weights, k_block, rest, start, place, C: gl.constexpr):
    """dk of the keys from `start` on, and their share of dshift and dlog_prior; `rest` is that of a key block."""
    D: gl.constexpr = C.D
    M: gl.constexpr = C.M
    kind: gl.constexpr = gl.bfloat16 if C.FIXED else gl.float16
    wide: gl.constexpr = dk.type.layout
    p_shift, _, p_dk, _, p_dlw, p_part, _, inverse_variance, stride_k, _, _, num_keys, _, _, _, _, _, positions = rest
    o_d, o_r = gl.arange(0, D, gl.SliceLayout(0, wide)), start + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    b_k, real, p_part = k_block.load(wide).to(gl.float32), o_r < num_keys, p_part + place * M * C.PART
    for r in gl.static_range(M):
        dlog_w = log_grad(dw, weights, real, r, wide, C)
        pull = pull_of(dlog_w, b_k, p_shift, o_d, r, C)
        dk -= pull
        store_share(pull, dlog_w, p_part, o_d, inverse_variance, r, C)
        if C.POSITIONS:
            gl.store(p_dlw + r * positions + o_r, dlog_w, mask=real)
    p_block = p_dk + o_r.to(gl.int64)[:, None] * stride_k + o_d[None, :]
    gl.store(p_block, (dk * inverse_variance).to(kind), mask=inside(real, o_d, C.DK, D))


@gluon.jit
def product(a, b, zero, FIRST: gl.constexpr, REST: gl.constexpr):
    """Products of the rows of a with those of b, under way, over the FIRST and the REST of their columns."""
    if a.shape[1] == FIRST:
        s = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        b_first = b.slice(0, FIRST, 1).permute((1, 0))
        s = warpgroup_mma(a.slice(0, FIRST, 1), b_first, zero, use_acc=False, is_async=True)
        if REST > 0:
            s = warpgroup_mma(a.slice(FIRST, REST, 1), b.slice(FIRST, REST, 1).permute((1, 0)), s, is_async=True)
    return s


def contraction(width: int, block: int) -> tuple[int, int]:
    """FIRST and REST of `product`, so that few of the zeros behind the first `width` columns are multiplied."""
    if width <= block // 2:
        return block_width(width), 0
    rest = [columns for columns in (16, 32, 64) if width <= block // 2 + columns < block]
    return (block // 2, rest[0]) if rest else (block, 0)


def even(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] % BLOCK == key.shape[-2] % BLOCK == 0


def layout(width: int, rank: int) -> Any:
    """Of a tile of `width` columns in shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank)


def tiles(tensor: Tensor, rows: int, width: int = 0) -> TensorDescriptor:
    """Of rows along the last dimension but one; zeros follow where they are shorter than `width`."""
    rank, width = tensor.dim(), width or tensor.shape[-1]
    shape = [*[1] * (rank - 2), rows, width]
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], shape, layout(width, rank))


def lines(tensor: Tensor, width: int, layout: Any) -> TensorDescriptor:
    """Of vectors along a last dimension."""
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor(flat, [*flat.shape], [*flat.stride()], [1, width], layout)


def columns(tensor: Tensor, rows: int) -> TensorDescriptor:
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor(flat, [*flat.shape], [*flat.stride()], [rows, COLUMNS.value], THIN.value)


def run(kernel: Any, length: int, block: int, query: Tensor, *arguments: Any, **constants: Any) -> None:
    """A program for each block of queries, or of keys, of each head."""
    launch(kernel, (-(-length // block) * query.shape[0] * query.shape[1],), *arguments, **constants, num_warps=4)


def strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:-1]]


@gluon.jit
def without(whole, part):
    """`whole` where `part`, which has either all of it or 0, has 0."""
    return gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [whole, part], whole.dtype, True, 2)


@gluon.jit
def second_of(x_0, x_1, whole):
    """`whole`, of 16 bits, where x_1 is larger than x_0, else 0: by the signs of the differences, two at a time."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 a, b; .reg .b32 sign; sub.f32 a, $1, $3; sub.f32 b, $2, $4; "
        "prmt.b32 sign, a, b, 0xffbb; and.b32 $0, $5, sign;}",
        "=r,f,f,f,f,r", [x_0, x_1, whole], whole.dtype, True, 2,
    )  # fmt: skip


@gluon.jit
def scores(b_q, k_ring, stage, zero, BN: gl.constexpr, D: gl.constexpr):
    """Products of queries with both keys of a tile, under way."""
    k_0, k_1 = k_ring.index(2 * stage).reshape([BN, D]), k_ring.index(2 * stage + 1).reshape([BN, D])
    s_0 = warpgroup_mma(b_q, k_0.permute((1, 0)), zero, use_acc=False, is_async=True)
    s_1 = warpgroup_mma(b_q, k_1.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s_0, s_1
