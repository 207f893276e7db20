"""What depends on one position alone, in one small kernel, so that no pair pays for it. Logarithms are to the base 2.

Keys: log_w[j,r] = log prior[j,r] - |k_jr|^2 / (2 s2_r). For shifted keys also w = 2^log_w, and of the queries
log_u[i,r] = q_i.b_r / s2 and rho = u_r / u_0. And the last query and key of each batch that takes part, so that padding
is not walked over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.dispatch import block_width
from mgk.ops.triton.host import as_bytes
from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import FIELDS, LOG2E, NEVER, finite, load_tile, sequence

# The light road multiplies w[j] <= 2^4 with exponentials. With every w at least 2^-LIGHT_KEYS and every rho between
# 2^-LIGHT_ROWS and 2^LIGHT_ROWS, a row's sum under a running maximum is at least 2^-100, and an exponential under a
# fixed one at most 2^106: nothing that counts is lost, and nothing overflows.
LIGHT_KEYS, LIGHT_ROWS = tl.constexpr(70.0), tl.constexpr(30.0)
BLOCK = 64


@triton.jit
def key_weights(
    p_k, SHIFT, PRIOR, VARIANCE, inverse_variance, i_h, start, num_keys, positions, skm, skn, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, SHIFTED: tl.constexpr, VARIANCES: tl.constexpr, HEAD_PRIOR: tl.constexpr,
    POSITION_PRIOR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """log_w as a tuple of M vectors."""
    o_n, o_d = start + tl.arange(0, BN), tl.arange(0, BD)
    b_k = load_tile(p_k, start, num_keys, skn, BN, D, BD, True).to(tl.float32)  # [BN, BD]
    log_w = ()
    for r in tl.static_range(M):
        if SHIFTED:
            b_kr = b_k + tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
        else:
            b_kr = load_tile(p_k + r * skm, start, num_keys, skn, BN, D, BD, True).to(tl.float32)
        inverse = inverse_variance
        if VARIANCES:
            inverse = 1.0 / tl.load(VARIANCE + i_h * M + r)
        bias = tl.sum(b_kr * b_kr, 1) * -0.5 * inverse
        if HEAD_PRIOR:
            bias += tl.load(PRIOR + i_h * M + r).to(tl.float32)
        if POSITION_PRIOR:
            bias += tl.load(PRIOR + (i_h * M + r) * positions + o_n, mask=o_n < num_keys, other=0.0).to(tl.float32)
        log_w = log_w + (bias * LOG2E,)
    return log_w


@triton.jit
def bias_kernel(
    K, PRIOR, VARIANCE, MASK, SPAN, KEYS, NARROW_KEYS, FAR_HEADS, inverse_variance, skb, skh, skm, skn, H, num_keys,
    padded_keys, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, VARIANCES: tl.constexpr, HEAD_PRIOR: tl.constexpr,
    POSITION_PRIOR: tl.constexpr, MASKED: tl.constexpr, NARROW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """KEYS (G, M, Nk') takes log_w, -inf where a key takes no part; NARROW_KEYS (G, M, Nk') the w in bfloat16.

    FAR_HEADS (G,2), zeros before, takes a 1 in its first column where a w reaches beyond what may be multiplied with
    exponentials. The second column is for misfits of the forward pass. SPAN is there where rows are packed.
    """
    blocks = tl.cdiv(padded_keys, BN)
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h, o_n = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_n * BN + tl.arange(0, BN)
    positions = num_keys
    origin, _, num_keys = sequence(SPAN, i_b, num_keys, num_keys, SPAN is not None)
    log_w = key_weights(
        K + origin * skb + i_h * skh, None, PRIOR, VARIANCE, inverse_variance, i_h, i_n * BN, num_keys, positions, skm,
        skn, D, BD, M, False, VARIANCES, HEAD_PRIOR, POSITION_PRIOR, BN,
    )  # fmt: skip
    taken = o_n < num_keys
    if MASKED:
        taken = taken & (tl.load(MASK + i_b * num_keys + o_n, mask=taken, other=0) != 0)
    for r in tl.static_range(M):
        p_keys = KEYS + (i_bh.to(tl.int64) * M + r) * padded_keys + o_n
        tl.store(p_keys, tl.where(taken, log_w[r], NEVER), mask=o_n < padded_keys)
        if NARROW:
            w = tl.where(taken, tl.exp2(log_w[r]), 0.0).to(tl.bfloat16)
            tl.store(NARROW_KEYS + (i_bh.to(tl.int64) * M + r) * padded_keys + o_n, w, mask=o_n < padded_keys)
            if tl.max(tl.where(taken, tl.maximum(log_w[r] - 4.0, -LIGHT_KEYS - log_w[r]), -1.0), 0) > 0:
                tl.store(FAR_HEADS + 2 * i_bh, 1.0)


@triton.jit
def shifted_bias_block(
    i_block, i_bh, Q, K, SHIFT, PRIOR, MASK, KEYS, NARROW_KEYS, ROWS, FAR_HEADS, inverse_variance, highest, sqb, sqh,
    sqn, skb, skh, skn, H, num_queries, num_keys, padded_queries, padded_keys, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, HEAD_PRIOR: tl.constexpr, POSITION_PRIOR: tl.constexpr, MASKED: tl.constexpr, HARD: tl.constexpr,
    NARROW: tl.constexpr, BN: tl.constexpr, SPAN=None,
):  # fmt: skip
    """A block of keys, or after these of queries."""
    key_blocks, positions = padded_keys // BN, num_keys
    i_b, i_h, o_d = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), tl.arange(0, BD)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, SPAN is not None)
    if i_block < key_blocks:
        o_n = i_block * BN + tl.arange(0, BN)
        log_w = key_weights(
            K + origin * skb + i_h * skh, SHIFT, PRIOR, None, inverse_variance, i_h, i_block * BN, num_keys, positions,
            0, skn, D, BD, M, True, False, HEAD_PRIOR, POSITION_PRIOR, BN,
        )  # fmt: skip
        top = 0.0
        if HEAD_PRIOR:  # a factor common to the whole head cancels; this one puts the largest weight near 1
            top = tl.load(PRIOR + i_h * M).to(tl.float32)
            for r in tl.static_range(1, M):
                top = tl.maximum(top, tl.load(PRIOR + i_h * M + r).to(tl.float32))
            top = finite(top) * LOG2E
        taken = o_n < num_keys
        if MASKED:
            taken = taken & (tl.load(MASK + i_b * num_keys + o_n, mask=taken, other=0) != 0)
        p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys + o_n
        tl.store(p_keys, tl.where(taken, 0.0, NEVER))
        largest = log_w[0] - top
        for r in tl.static_range(M):
            largest = tl.maximum(largest, log_w[r] - top)
            w = tl.where(taken, tl.exp2(log_w[r] - top), 0.0)
            tl.store(p_keys + (1 + r) * padded_keys, w)
            if NARROW:
                tl.store(NARROW_KEYS + (i_bh.to(tl.int64) * M + r) * padded_keys + o_n, w.to(tl.bfloat16))
            tl.store(p_keys + (1 + M + r) * padded_keys, tl.where(taken, log_w[r] - top, NEVER))
        beyond = tl.where(taken, tl.maximum(largest - 4.0, -LIGHT_KEYS - largest), -1.0)
        if tl.max(beyond, 0) > 0:
            tl.store(FAR_HEADS + 2 * i_bh, 1.0)
    else:
        start = (i_block - key_blocks) * BN
        o_m = start + tl.arange(0, BN)
        p_q = Q + origin * sqb + i_h * sqh
        b_q = load_tile(p_q, start, num_queries, sqn, BN, D, BD, True).to(tl.float32)  # [BN, BD]
        p_rows = ROWS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_queries + o_m
        first = tl.zeros([BN], tl.float32)
        beyond = tl.full([BN], -1.0, tl.float32)
        for r in tl.static_range(M):
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            log_u = tl.sum(b_q * b_b[None, :], 1) * (inverse_variance * LOG2E)
            if r == 0:
                first = log_u
                bound = tl.sum(b_q * b_q, 1) * (0.5 * inverse_variance * LOG2E) - log_u
                tl.store(p_rows, bound)
            lead = log_u - first
            beyond = tl.maximum(beyond, tl.maximum(lead - highest, -LIGHT_ROWS - lead))
            tl.store(p_rows + (1 + r) * padded_queries, lead if HARD else tl.exp2(lead))
            tl.store(p_rows + (1 + M + r) * padded_queries, log_u)
        if tl.max(beyond, 0) > 0:
            tl.store(FAR_HEADS + 2 * i_bh, 1.0)


@triton.jit
def shifted_bias_kernel(
    Q, K, SHIFT, PRIOR, MASK, SPAN, KEYS, NARROW_KEYS, ROWS, FAR_HEADS, inverse_variance, highest, sqb, sqh, sqn, skb,
    skh, skn, H, num_queries, num_keys, padded_queries, padded_keys, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    HEAD_PRIOR: tl.constexpr, POSITION_PRIOR: tl.constexpr, MASKED: tl.constexpr, HARD: tl.constexpr,
    NARROW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """KEYS (G, 1+2M, Nk'): 0 or -inf (hidden), the w, the log_w. NARROW_KEYS (G, M, Nk'): the w in bfloat16. ROWS
    (G, 1+2M, Nq'): the bound, rho, log_u.

    FAR_HEADS (G,2), zeros before, takes a 1 in its first column where a head's numbers reach beyond what the light road
    can hold; the second is for misfits of the forward pass. `highest` is the largest exponent a factor may have.
    SPAN is there where rows are packed.
    """
    blocks = (padded_keys + padded_queries) // BN
    shifted_bias_block(
        tl.program_id(0) % blocks, tl.program_id(0) // blocks, Q, K, SHIFT, PRIOR, MASK, KEYS, NARROW_KEYS, ROWS,
        FAR_HEADS, inverse_variance, highest, sqb, sqh, sqn, skb, skh, skn, H, num_queries, num_keys, padded_queries,
        padded_keys, D, BD, M, HEAD_PRIOR, POSITION_PRIOR, MASKED, HARD, NARROW, BN, SPAN,
    )  # fmt: skip


def key_bias(
    keys: Tensor, narrow_keys: Tensor, far: Tensor, key: Tensor, log_prior: Tensor | None, variance: Tensor | None,
    inverse_variance: float, key_mask: Tensor | None, packed: Tensor | None,
) -> None:  # fmt: skip
    """Fill `keys` (G,M,Nk') and, unless they are empty, `narrow_keys` (G,M,Nk') and `far` (G,2) from `key`.

    `packed` are the spans of packed rows, whose stride is then in place of the batch's; None where there is a batch.
    """
    _, heads, components, num_keys, width = key.shape
    block, first = max(16, min(128, 8192 // block_width(width))), 0 if packed is None else -2
    launch(
        bias_kernel, (triton.cdiv(keys.shape[-1], block) * keys.shape[0],), key, log_prior, variance,
        as_bytes(key_mask), packed, keys, narrow_keys, far, inverse_variance, key.stride(first), *key.stride()[1:4],
        heads, prior_positions(log_prior, num_keys), keys.shape[-1], width, block_width(width), components,
        variance is not None, log_prior is not None and log_prior.dim() == 2,
        log_prior is not None and log_prior.dim() == 3, key_mask is not None, narrow_keys.numel() > 0, block,
        num_warps=4,
    )  # fmt: skip


def shifted_bias(
    keys: Tensor, narrow_keys: Tensor, rows: Tensor, far: Tensor, query: Tensor, key: Tensor, shift: Tensor,
    log_prior: Tensor | None, inverse_variance: float, key_mask: Tensor | None, hard: bool, packed: Tensor | None,
) -> None:  # fmt: skip
    """Fill `keys` (G,1+2M,Nk'), `narrow_keys` (G,M,Nk') if bfloat16, `rows` (G,1+2M,Nq') and `far` (G,2); see above."""
    heads, width = query.shape[1], query.shape[-1]
    blocks, first = (rows.shape[-1] + keys.shape[-1]) // BLOCK, 0 if packed is None else -2
    launch(
        shifted_bias_kernel, (far.shape[0] * blocks,), query, key, shift, log_prior, as_bytes(key_mask), packed, keys,
        narrow_keys, rows, far, inverse_variance, 14.0 if query.dtype == torch.float16 else 30.0,
        query.stride(first), *query.stride()[1:3], key.stride(first), *key.stride()[1:3], heads, query.shape[2],
        prior_positions(log_prior, key.shape[2]), rows.shape[-1], keys.shape[-1], width, block_width(width),
        shift.shape[1], log_prior is not None and log_prior.dim() == 2, log_prior is not None and log_prior.dim() == 3,
        key_mask is not None, hard, narrow_keys.numel() > 0, BLOCK, num_warps=4,
    )  # fmt: skip


def prior_positions(log_prior: Tensor | None, num_keys: int) -> int:
    """How many a prior per position has, which for packed rows may be more than the keys."""
    return num_keys if log_prior is None or log_prior.dim() == 2 else log_prior.shape[-1]


@triton.jit
def ends_of(p_mask, length, BLOCK: tl.constexpr):
    """The first place that a mask takes, one past the last (`length` and 0 if it takes none); the first it does not."""
    first, last = tl.full([BLOCK], 0, tl.int32) + length, tl.zeros([BLOCK], tl.int32)
    hole = first
    for start in range(0, length, BLOCK):
        o = start + tl.arange(0, BLOCK)
        taken = tl.load(p_mask + o, mask=o < length, other=0) != 0
        first = tl.minimum(first, tl.where(taken, o, length))
        last = tl.maximum(last, tl.where(taken, o + 1, 0))
        hole = tl.minimum(hole, tl.where(taken, length, o))
    return tl.min(first, 0), tl.max(last, 0), tl.min(hole, 0)


@triton.jit
def span_kernel(
    QUERY_MASK, KEY_MASK, SPAN, num_queries, num_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    i_b = tl.program_id(0).to(tl.int64)
    last_query, last_key, first_key, hole = num_queries, num_keys, 0, num_keys
    if QUERIES:
        _, last_query, _ = ends_of(QUERY_MASK + i_b * num_queries, num_queries, BLOCK)
    if KEYS:
        first_key, last_key, hole = ends_of(KEY_MASK + i_b * num_keys, num_keys, BLOCK)
    tl.store(SPAN + FIELDS * i_b, last_query)
    tl.store(SPAN + FIELDS * i_b + 1, last_key)
    tl.store(SPAN + FIELDS * i_b + 2, first_key)
    tl.store(SPAN + FIELDS * i_b + 3, hole)


@triton.jit(do_not_specialize=["num_batches"])
def rank_kernel(SPAN, num_batches, BLOCK: tl.constexpr):
    """The last field of row n is the batch with the n-th most pairs."""
    i_b = tl.program_id(0)
    own = tl.load(SPAN + FIELDS * i_b).to(tl.float32) * tl.load(SPAN + FIELDS * i_b + 1)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_batches, BLOCK):
        o = start + tl.arange(0, BLOCK)
        queries = tl.load(SPAN + FIELDS * o, mask=o < num_batches, other=-1).to(tl.float32)
        pairs = queries * tl.load(SPAN + FIELDS * o + 1, mask=o < num_batches, other=1)
        before += ((pairs > own) | ((pairs == own) & (o < i_b))).to(tl.int32)
    tl.store(SPAN + FIELDS * tl.sum(before, 0) + 4, i_b)


@triton.jit
def packed_span_kernel(ENDS, SPAN):
    i_b = tl.program_id(0)
    first = tl.load(ENDS + i_b)
    length = tl.load(ENDS + i_b + 1) - first
    tl.store(SPAN + FIELDS * i_b, length)
    tl.store(SPAN + FIELDS * i_b + 1, length)
    tl.store(SPAN + FIELDS * i_b + 2, 0)
    tl.store(SPAN + FIELDS * i_b + 3, first)


def spans(
    query_mask: Tensor | None, key_mask: Tensor | None, num_queries: int, num_keys: int, ends: Tensor | None = None
) -> Tensor | None:
    """For each batch one past the last query and key that take part, the first key, and the first that is hidden; and
    the batches, those with the most pairs first: (B,5).

    Of packed rows all of a sequence takes part, and in place of the first key that is hidden is its first row.
    """
    masks = [mask for mask in (query_mask, key_mask) if mask is not None]
    if ends is not None:
        result = ends.new_empty(ends.shape[0] - 1, FIELDS.value)
        launch(packed_span_kernel, (result.shape[0],), ends, result, num_warps=1)
    elif masks:
        result = torch.empty(masks[0].shape[0], FIELDS.value, device=masks[0].device, dtype=torch.int32)
        launch(
            span_kernel, (result.shape[0],), as_bytes(query_mask), as_bytes(key_mask), result, num_queries, num_keys,
            query_mask is not None, key_mask is not None, 1024,
        )  # fmt: skip
    else:
        return None
    launch(rank_kernel, (result.shape[0],), result, result.shape[0], 128, num_warps=1)
    return result


@triton.jit
def columns_kernel(NARROW_KEYS, KEY_COLUMNS, padded_keys, M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """NARROW_KEYS (G,M,Nk') side by side: KEY_COLUMNS (G,Nk',COLUMNS)."""
    blocks, o_column = padded_keys // BLOCK, tl.arange(0, COLUMNS)
    i_bh, o_n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    block = tl.zeros([BLOCK, COLUMNS], tl.bfloat16)
    for r in tl.static_range(M):
        vector = tl.load(NARROW_KEYS + (i_bh * M + r) * padded_keys + o_n)
        block = tl.where(o_column[None, :] == r, vector[:, None], block)
    tl.store(KEY_COLUMNS + (i_bh * padded_keys + o_n)[:, None] * COLUMNS + o_column[None, :], block)


def side_by_side(narrow_keys: Tensor, columns: int) -> Tensor:
    """`narrow_keys` (G,M,Nk') as (G,Nk',columns)."""
    groups, components, padded_keys = narrow_keys.shape
    result = narrow_keys.new_empty(groups, padded_keys, columns)
    grid = (groups * padded_keys // 128,)
    launch(columns_kernel, grid, narrow_keys, result, padded_keys, components, columns, 128)
    return result
