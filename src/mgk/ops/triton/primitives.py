"""Small jitted pieces that the kernels share.

Names inside kernels: i_ program index, o_ offsets, b_ block in registers; comments give the shapes of blocks. All
logarithms are to the base 2, so that one hardware instruction computes the exponential.

BM queries and BN keys of a tile, BD and BV the widths D and Dv rounded up to a power of two, M components.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from mgk.ops import dispatch

NEVER = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
COLUMNS = tl.constexpr(16)  # of the products that sum rows with weights
SUMS = tl.constexpr(dispatch.SUMS)  # of those that sum without: the least a product has
# Arguments whose values are not worth a kernel of their own: another batch size compiles nothing.
COUNTS = ("BATCHES", "section", "H", "num_queries", "num_keys", "query_parts", "parts")
PAD = tl.constexpr(128)  # what vectors along the queries or keys are padded to: whole tiles of any size in use
FIELDS = tl.constexpr(6)  # of what is known of the masks of a batch, see `spans`
ALL, FITTING, OVERFLOWING = (tl.constexpr(heads) for heads in (dispatch.ALL, dispatch.FITTING, dispatch.OVERFLOWING))


@triton.jit
def load_tile(
    p_base, start, num_rows, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    AGAIN: tl.constexpr = False,
):  # fmt: skip
    """Rows `start` and on of a matrix whose last dimension is contiguous, zero outside of it.  # [ROWS, BLOCK]

    The pointer of the tile is one number and the offsets inside it do not change: a loop keeps them in registers. A
    block that is needed before a loop and after it is loaded AGAIN, past the nearest cache, so as not to stay there.
    """
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    p_tile = p_base + tl.full((), start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
    if AGAIN:
        mask = (start + o_row < num_rows)[:, None] & (o_column < WIDTH)[None, :]
        block = tl.load(p_tile, mask=mask, other=0.0, cache_modifier=".cg")
    elif MASKED and WIDTH != BLOCK:
        block = tl.load(p_tile, mask=(start + o_row < num_rows)[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    elif MASKED:
        block = tl.load(p_tile, mask=(start + o_row < num_rows)[:, None], other=0.0)
    elif WIDTH != BLOCK:
        block = tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(p_tile)
    return block


@triton.jit
def load_rows(
    p_base, start, num_rows, stride, visible, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """`load_tile`, which in tiles that HIDE rows reads those that are `visible`: 0 times a hidden NaN would be NaN."""
    if HIDES:
        o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
        p_tile = p_base + tl.full((), start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
        block = tl.load(p_tile, mask=visible[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    else:
        block = load_tile(p_base, start, num_rows, stride, ROWS, WIDTH, BLOCK, MASKED)
    return block


@triton.jit
def store_tile(p_base, block, start, num_rows, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (start + o_row < num_rows)[:, None] & (o_column < WIDTH)[None, :]
    p_tile = p_base + tl.full((), start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
    tl.store(p_tile, block.to(p_base.dtype.element_ty), mask=mask)


@triton.jit
def load_vectors(p_base, start, stride, SIZE: tl.constexpr, M: tl.constexpr):
    """SIZE entries of M rows that are `stride` apart, as a tuple of M vectors. Rows are padded: no mask is needed."""
    vectors = ()
    for r in tl.static_range(M):
        vectors = vectors + (tl.load(p_base + r * stride + start + tl.arange(0, SIZE)),)
    return vectors


@triton.jit
def zeros_tuple(shape: tl.constexpr, M: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(M):
        blocks = blocks + (tl.zeros(shape, tl.float32),)
    return blocks


@triton.jit
def where_tuple(condition, blocks, M: tl.constexpr):
    result = ()
    for r in tl.static_range(M):
        result = result + (tl.where(condition, blocks[r], 0.0),)
    return result


@triton.jit
def split_columns(block, M: tl.constexpr):
    """The first M columns of a block that has more, as a tuple of M vectors."""
    o_column, result = tl.arange(0, block.shape[1]), ()
    for r in tl.static_range(M):
        result = result + (tl.sum(tl.where(o_column[None, :] == r, block, 0.0), 1),)
    return result


@triton.jit
def unit_column(r: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Ones in column r, zeros elsewhere: a product with it sums rows into that column.  # [ROWS, SUMS]"""
    return tl.where((tl.arange(0, SUMS) == r)[None, :], tl.full([ROWS, SUMS], 1.0, dtype), 0.0).to(dtype)


@triton.jit
def load_columns(p_base, start, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH adjacent numbers for each of ROWS, as a tuple of WIDTH vectors.

    A loop copies such a block once, and each thread reads what it needs. A vector with fewer numbers than threads would
    be fetched by every warp, with one address per number.
    """
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    blocks = (tl.load(p_base + start * WIDTH + (o_row[:, None] * WIDTH + o_column[None, :])),)
    for level in tl.static_range(6):
        if WIDTH >> level > 1:  # even places first, then odd ones, until none are left: that puts them in order
            even, odd = (), ()
            for i in tl.static_range(1 << level):
                block = blocks[i]
                if WIDTH >> level > 2:
                    block = tl.reshape(block, [ROWS, WIDTH >> (level + 1), 2])
                one, other = tl.split(block)
                even, odd = even + (one,), odd + (other,)
            blocks = even + odd
    return blocks


@triton.constexpr_function
def has_ptx():
    """Whether kernels may contain instructions of NVIDIA GPUs. The target is known when a kernel is compiled."""
    return not INTERPRETED.value and is_cuda()


@triton.jit
def larger(x, y):
    """The larger one of two bfloat16, two at a time; Triton's own maximum widens them first."""
    if not has_ptx():
        result = tl.where(y > x, y, x)
    else:
        result = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.bfloat16, True, 2)
    return result


@triton.jit
def where_larger(x, y, z):
    """z where y is larger than x, else 0, two at a time; x and y of float16, z of bfloat16."""
    if not has_ptx():
        result = tl.where(y > x, z, 0.0).to(z.dtype)
    else:
        result = tl.inline_asm_elementwise(
            "{.reg .b32 mask; set.gt.u32.f16x2 mask, $2, $1; and.b32 $0, $3, mask;}", "=r,r,r,r",
            [x, y, z], tl.bfloat16, True, 2,
        )  # fmt: skip
    return result


@triton.jit
def multiply_add(x, y, z):
    """x y + z of bfloat16, two at a time; the compiler may pair them the other way round, and turn them back later."""
    if not has_ptx():
        result = x * y + z
    else:
        result = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], tl.bfloat16, True, 2)
    return result


@triton.jit
def multiply(x, y):
    """x y of bfloat16, two at a time, as a multiply-add of -0, which every GPU with bfloat16 has."""
    if not has_ptx():
        result = x * y
    else:
        result = tl.inline_asm_elementwise(
            "{.reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero;}", "=r,r,r", [x, y],
            tl.bfloat16, True, 2,
        )  # fmt: skip
    return result


@triton.jit
def widened(x):
    """As float32; bfloat16 two at a time, in one instruction less."""
    if not has_ptx() or x.dtype != tl.bfloat16:
        result = x.to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    return result


@triton.jit
def finite(x):
    """-inf, the maximum of nothing, becomes 0. NaN stays NaN."""
    return tl.where(x == NEVER, 0.0, x)


@triton.jit
def not_hidden(x):
    """NaN in place of -inf, which comes of an infinite key and would hide it."""
    return tl.where(x == NEVER, float("nan"), x)


@triton.jit
def spread_infinities(x):
    """NaN in place of infinity, whose product with a key might be minus infinity: a weight of zero."""
    wide = x.to(tl.float32)
    return tl.where(wide - wide == 0, wide, float("nan")).to(x.dtype)


@triton.jit
def hash32(x):
    """A bijection of 32-bit numbers in which every bit of x moves every bit of the result."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def block_of(place):
    """Which of the blocks of `dropout` a query or a key is in; its bits 0, 3 and 4 say where in it."""
    return ((place >> 5) * 4 + ((place >> 1) & 3)).to(tl.uint32)


@triton.jit
def factor_of(place, KEY: tl.constexpr):
    """An odd number for each of the eight places in a block."""
    return hash32(((place & 1) + ((place >> 2) & 6) + (8 if KEY else 0)).to(tl.uint32) * 0x9E3779B1) | 1


@triton.jit
def dropout(
    p_seed, i_head, first_query, first_key, threshold, inverse_keep, KEYS_DOWN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The dropout factor of each pair of a tile, a function of the seed and the position; `threshold` is p * 2^32.

    Blocks of eight queries and eight keys share a hash, which is multiplied by a number of the query's place in it and
    one of the key's. What a thread has of a row of a product lies 1 and 8 apart, in one block, whichever of queries and
    keys lie along it: one multiplication is left to each pair. Tiles begin at multiples of 16.
    """
    ROWS: tl.constexpr = BN if KEYS_DOWN else BM
    WIDTH: tl.constexpr = BM if KEYS_DOWN else BN
    BLOCKS: tl.constexpr = WIDTH // 32 if WIDTH > 32 else 1
    EIGHTS: tl.constexpr = 4 if WIDTH > 32 else WIDTH // 8
    seed, first = tl.load(p_seed), first_query if KEYS_DOWN else first_key
    salt = hash32(hash32(i_head.to(tl.uint32) ^ (seed >> 32).to(tl.uint32)) ^ seed.to(tl.uint32))
    o_row = (first_key if KEYS_DOWN else first_query) + tl.arange(0, ROWS)
    o_block = first // 32 * 32 + 32 * tl.arange(0, BLOCKS)[:, None] + 2 * tl.arange(0, 4)[None, :]
    o_within = 8 * tl.arange(0, EIGHTS)[:, None] + tl.arange(0, 2)[None, :]
    if WIDTH < 32:
        o_within += first % 32
    row = block_of(o_row) * (0x9E3779B1 if KEYS_DOWN else 0x85EBCA6B) + salt
    x = row[:, None, None] + (block_of(o_block) * (0x85EBCA6B if KEYS_DOWN else 0x9E3779B1))[None, :, :]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * factor_of(o_row, KEYS_DOWN)[:, None, None]  # [ROWS, BLOCKS, 4]
    x = x[:, :, None, :, None] * factor_of(o_within, not KEYS_DOWN)[None, None, :, None, :]
    x = tl.reshape(x, [ROWS, WIDTH])
    if not has_ptx():
        result = tl.where(x >= threshold.to(tl.uint32), inverse_keep, 0.0)
    else:  # the same; LLVM would gather the truth values in words of 64 bits and spread them again
        result = tl.inline_asm_elementwise(
            "{.reg .pred keep; setp.ge.u32 keep, $1, $2; selp.f32 $0, $3, 0f00000000, keep;}", "=f,r,r,f",
            [x, threshold, inverse_keep], tl.float32, True, 1,
        )  # fmt: skip
    return result


@triton.jit
def sequence(p_span, i_batch, num_queries, num_keys, PACKED: tl.constexpr):
    """Where the queries of a sequence begin, as a multiple of the batch stride, and how many queries and keys it has.

    Packed sequences are rows of one batch entry: a sequence begins at a row, and the batch stride is that of a row.
    """
    origin = i_batch
    if PACKED:
        num_queries, num_keys = tl.load(p_span + FIELDS * i_batch), tl.load(p_span + FIELDS * i_batch + 1)
        origin = tl.load(p_span + FIELDS * i_batch + 3).to(tl.int64)
    return origin, num_queries, num_keys


@triton.jit
def key_origin(p_span, i_batch, PACKED: tl.constexpr):
    """Where the keys of a sequence begin, as `sequence` says it of the queries."""
    origin = i_batch
    if PACKED:
        origin = tl.load(p_span + FIELDS * i_batch + 5).to(tl.int64)
    return origin


@triton.jit
def is_behind(p_span, i_batch, start, QUERIES: tl.constexpr, PACKED: tl.constexpr):
    """Whether a block begins after the last tile, of any size, of its packed sequence's queries or keys."""
    behind = False
    if PACKED:
        behind = start >= tl.cdiv(tl.load(p_span + FIELDS * i_batch + (0 if QUERIES else 1)), PAD) * PAD
    return behind


@triton.jit
def key_range(p_span, i_batch, num_queries, num_keys, SPANS: tl.constexpr):
    """One past the last query and the last key of this sequence that a mask leaves visible."""
    if SPANS:
        num_queries, num_keys = tl.load(p_span + FIELDS * i_batch), tl.load(p_span + FIELDS * i_batch + 1)
    return num_queries, num_keys


@triton.jit
def sees_a_key(
    p_span, i_batch, o_m, offset, num_keys, CAUSAL: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr = 0
):
    """Which of the queries `o_m` are real and see at least one key."""
    first_key, last_query, last_key = 0, 2147483647, num_keys
    if SPANS:
        last_query, first_key = tl.load(p_span + FIELDS * i_batch), tl.load(p_span + FIELDS * i_batch + 2)
        last_key = tl.load(p_span + FIELDS * i_batch + 1)
    sees = (o_m < last_query) & (first_key < num_keys)
    if CAUSAL:
        sees = sees & (o_m + offset >= first_key)
    if WINDOW:
        sees = sees & (o_m + offset - WINDOW < last_key - 1)
    return sees


@triton.jit
def reached(o_m, o_n, offset, WINDOW: tl.constexpr, KEYS_DOWN: tl.constexpr):
    """Which pairs of a tile a causal mask shows, with its WINDOW if that is not 0."""
    if KEYS_DOWN:
        o_n, o_last = o_n[:, None], o_m[None, :] + offset
    else:
        o_n, o_last = o_n[None, :], o_m[:, None] + offset
    shown = o_n <= o_last
    if WINDOW:
        shown = shown & (o_n > o_last - WINDOW)
    return shown


@triton.jit
def shown_pairs(
    o_m, o_n, offset, visible, CAUSAL: tl.constexpr, CHECK: tl.constexpr, WINDOW: tl.constexpr,
    KEYS_DOWN: tl.constexpr = False,
):  # fmt: skip
    """Which pairs of a tile take part: by the causal mask, and if CHECK by what is known of the columns."""
    shown = None
    if CAUSAL:
        shown = reached(o_m, o_n, offset, WINDOW, KEYS_DOWN)
    if CHECK and CAUSAL:
        shown = shown & visible[None, :]
    elif CHECK:
        shown = visible[None, :]
    return shown


@triton.jit
def load_vector(p_base, start, SIZE: tl.constexpr):
    return tl.load(p_base + start + tl.arange(0, SIZE))


@triton.jit
def online_softmax(x_max, m):
    """New row maximum, the one to subtract (finite), and the factor for what was summed so far."""
    m_new = tl.maximum(m, x_max)
    m_safe = finite(m_new)
    return m_new, m_safe, tl.exp2(m - m_safe)


@triton.jit
def key_tiles(
    i_m, i_batch, p_span, offset, last_query, last_key, num_keys, CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Where the key tiles of a query block that need no mask end, and where its keys end."""
    stop = last_key
    if CAUSAL:
        stop = tl.minimum(stop, i_m * BM + BM + offset)
    if i_m * BM >= last_query:
        stop = 0
    full = tl.minimum(tl.cdiv(tl.maximum(stop, 0), BN), num_keys // BN) * BN
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(i_m * BM + offset + 1, 0) // BN * BN)
    if KEY_MASK:
        full = tl.minimum(full, tl.load(p_span + FIELDS * i_batch + 3) // BN * BN)
    return full, stop


@triton.jit
def window_tiles(i_m, offset, stop, WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where the key tiles begin that the window of a query block reaches, and those that it hides nothing of."""
    inner = tl.cdiv(tl.maximum(i_m * BM + BM + offset - WINDOW, 0), BN)
    inner = tl.minimum(inner, tl.cdiv(tl.maximum(stop, 0), BN)) * BN
    return tl.minimum(tl.maximum(i_m * BM + offset - WINDOW + 1, 0) // BN * BN, inner), inner


@triton.jit
def edge_tile(i, first, begin, second, SIZE: tl.constexpr):
    """Where tile i of two runs of tiles starts, of which the first has `first` tiles from `begin` on."""
    return tl.where(i < first, begin + i * SIZE, second + (i - first) * SIZE)


@triton.jit
def query_tiles(
    i_n, i_batch, p_span, offset, last_query, last_key, num_queries, CAUSAL: tl.constexpr, MASKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Where the query tiles of a key block begin; need no causal mask; end as full tiles, unmasked; and end."""
    stop = last_query
    if i_n * BN >= last_key:
        stop = 0
    if WINDOW:
        stop = tl.minimum(stop, tl.maximum(i_n * BN + BN - 1 - offset + WINDOW, 0))
    whole = tl.minimum(tl.cdiv(stop, BM), num_queries // BM) * BM
    if WINDOW:
        whole = tl.minimum(whole, tl.maximum(i_n * BN - offset + WINDOW, 0) // BM * BM)
    if MASKS:
        whole = tl.minimum(whole, tl.load(p_span + FIELDS * i_batch + 5) // BM * BM)
    begin = stop * 0
    visible = begin
    if CAUSAL:
        begin = tl.minimum(tl.maximum(i_n * BN - offset, 0) // BM * BM, stop)
        visible = tl.minimum(tl.cdiv(tl.maximum(i_n * BN + BN - 1 - offset, 0), BM) * BM, stop)
    return begin, visible, whole, stop


@triton.jit
def work_of(item, blocks, groups, section, p_span, H, SPANS: tl.constexpr):
    """Block and head of a work item: `section` heads at a time, the first blocks of all of these first.

    So long rows start first, and still few heads' keys are in the cache at once. Sequences that differ in length come
    longest first, for the same reason: what starts last should be short.
    """
    first = item // (blocks * section) * section
    width = tl.minimum(section, groups - first)
    rest = item - first * blocks
    i_bh = first + rest % width
    if SPANS:
        i_bh = tl.load(p_span + FIELDS * (i_bh // H) + 4) * H + i_bh % H
    return rest // width, i_bh


@triton.jit
def would_overflow(p_overflow, i_bh, LATE: tl.constexpr = True):
    """Whether a head is left to the fallback launch. LATE: also read the flags that the forward pass itself sets; while
    its programs run, warps of one program might read different values, and no matrix product survives that.
    """
    flags = tl.load(p_overflow + 2 * i_bh)
    if LATE:
        flags += tl.load(p_overflow + 2 * i_bh + 1)
    return flags > 0


@triton.jit
def any_overflows(p_overflow, groups, BLOCK: tl.constexpr):
    found = 0.0
    for start in range(0, 2 * groups, BLOCK):
        o = start + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.max(tl.load(p_overflow + o, mask=o < 2 * groups, other=0.0), 0))
    return found > 0


@triton.jit
def flag_bad_sums(p_overflow, i_bh, l, sees, least=2.0**-90, most=2.0**90):
    """Leave this head to the fallback launch if a row that sees a key has a sum near overflow or underflow, or NaN."""
    if tl.max((sees & ~((l >= least) & (l <= most))).to(tl.int32), 0) > 0:
        tl.store(p_overflow + 2 * i_bh + 1, 1.0)


@triton.jit
def for_each_block(
    block: tl.constexpr, tensors, numbers, strides, sizes, BATCHES, section, blocks, SIZE: tl.constexpr,
    QUERIES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Run `block` on one block of one head; or, of the heads that would overflow, share all blocks among few programs.

    The first two of `tensors` are the overflow flags and the spans, the first of `sizes` is H. Blocks of QUERIES start
    with the last one, which sees the most keys; other blocks belong to heads of keys, which GROUP query heads share,
    and so do the flags. While forward programs (WIDTH is 0) still flag heads whose sums do not fit, those flags are not
    read: warps of one program might read different values.
    """
    OVERFLOW, SPAN = tensors[0], tensors[1]
    SHARE: tl.constexpr = C.GROUP if QUERIES else 1
    H = sizes[0] // (C.GROUP // SHARE)
    groups = BATCHES * H
    if C.HEADS == OVERFLOWING:
        if any_overflows(OVERFLOW, groups // SHARE, 128):
            for item in range(tl.program_id(0), blocks * groups, tl.num_programs(0)):
                i_block, i_bh = work_of(item, blocks, groups, section, SPAN, H, C.SPANS)
                if QUERIES:
                    i_block = blocks - 1 - i_block
                overflows = would_overflow(OVERFLOW, i_bh // SHARE)
                if overflows and not is_behind(SPAN, i_bh // H, i_block * SIZE, QUERIES, C.PACKED):
                    block(i_block, i_bh, tensors, numbers, strides, sizes, C)
    else:
        i_block, i_bh = work_of(tl.program_id(0), blocks, groups, section, SPAN, H, C.SPANS)
        if QUERIES:
            i_block = blocks - 1 - i_block
        fits = C.HEADS == ALL or not would_overflow(OVERFLOW, i_bh // SHARE, C.WIDTH > 0)
        if fits and not is_behind(SPAN, i_bh // H, i_block * SIZE, QUERIES, C.PACKED):
            block(i_block, i_bh, tensors, numbers, strides, sizes, C)
