"""Small jitted pieces that the kernels share.

Names inside kernels: i_ program index, o_ offsets, b_ block in registers; shapes behind each block. All logarithms are
to the base 2, so that one hardware instruction takes the exponential.

BM queries and BN keys of a tile, BD and BV the widths D and Dv rounded up to a power of two, M components.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    p_base, start, num_rows, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `start` and on of a matrix whose last dimension is contiguous, zero outside of it.  # [ROWS, BLOCK]

    The pointer of the tile is one number and the offsets inside it do not change: a loop keeps them in registers.
    """
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    p_tile = p_base + tl.full((), start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
    if MASKED and WIDTH != BLOCK:
        block = tl.load(p_tile, mask=(start + o_row < num_rows)[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    elif MASKED:
        block = tl.load(p_tile, mask=(start + o_row < num_rows)[:, None], other=0.0)
    elif WIDTH != BLOCK:
        block = tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(p_tile)
    return block


@triton.jit
def store_tile(p_base, block, start, num_rows, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (start + o_row < num_rows)[:, None] & (o_column < WIDTH)[None, :]
    p_tile = p_base + tl.full((), start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
    tl.store(p_tile, block.to(p_base.dtype.element_ty), mask=mask)


@triton.jit
def load_vectors(p_base, start, stride, SIZE: tl.constexpr, M: tl.constexpr):
    """SIZE entries of M rows that lie `stride` apart, as a tuple of M vectors; the rows are padded, so no mask."""
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
def finite(x):
    """-inf, the maximum of nothing, becomes 0."""
    return tl.where(x == NEVER, 0.0, x)


@triton.jit
def hash32(x):
    """A bijection of 32-bit numbers in which every bit of x moves every bit of the result."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(p_seed, i_head, o_query, o_key, threshold):
    """Which pairs dropout keeps, a function of the seed and the place alone; `threshold` is p * 2^31."""
    seed = tl.load(p_seed)
    row = hash32(o_query.to(tl.uint32) ^ hash32(i_head.to(tl.uint32) ^ (seed >> 32).to(tl.uint32)))
    row = hash32(row ^ seed.to(tl.uint32))
    return (hash32(row + o_key.to(tl.uint32) * 0x9E3779B1) >> 1).to(tl.int32) >= threshold


@triton.jit
def key_range(p_span, i_batch, num_queries, num_keys, SPANS: tl.constexpr):
    """How many queries and keys of this batch take part, up to the last that does."""
    if SPANS:
        num_queries, num_keys = tl.load(p_span + 2 * i_batch), tl.load(p_span + 2 * i_batch + 1)
    return num_queries, num_keys


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
def key_tiles(i_m, offset, last_query, last_key, num_keys, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Up to where a query block's key tiles are whole and hide nothing, and where its keys end."""
    stop = last_key
    if CAUSAL:
        stop = tl.minimum(stop, i_m * BM + BM + offset)
    if i_m * BM >= last_query:
        stop = 0
    full = tl.minimum(tl.cdiv(tl.maximum(stop, 0), BN), num_keys // BN) * BN
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(i_m * BM + offset + 1, 0) // BN * BN)
    return full, stop


@triton.jit
def query_tiles(
    i_n, offset, last_query, last_key, num_queries, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Where a key block's queries begin; see all of it; are the last in whole tiles; and end."""
    stop = last_query
    if i_n * BN >= last_key:
        stop = 0
    whole = tl.minimum(tl.cdiv(stop, BM), num_queries // BM) * BM
    begin = stop * 0
    visible = begin
    if CAUSAL:
        begin = tl.minimum(tl.maximum(i_n * BN - offset, 0) // BM * BM, stop)
        visible = tl.minimum(tl.cdiv(tl.maximum(i_n * BN + BN - 1 - offset, 0), BM) * BM, stop)
    return begin, visible, whole, stop
