"""Small kernels for what depends on one position alone, so that it is not computed for every pair.

For keys: log_w[j,r] = log prior[j,r] - |k_jr|^2 / (2 s2_r). For shifted keys also w = 2^log_w, and for queries
log_u[i,r] = q_i.b_r / s2 and rho = u_r / u_0. Logarithms are to the base 2. `spans` finds the last unmasked query and
key of each batch, so that the attention kernels skip padding.

B batch, H query heads, of which GROUP read the same head of keys, M components, Nq queries, Nk keys (Nq' and Nk'
padded), D width of a head, G = B H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.dispatch import block_width
from mgk.ops.triton.host import as_bytes
from mgk.ops.triton.launch import launch
from mgk.ops.triton.loads import constants, head_pointer, load_shift
from mgk.ops.triton.primitives import FIELDS, LOG2E, NEVER, finite, key_origin, load_tile, sequence

# The fast path multiplies w[j] <= 2^4 with exponentials. With every w at least 2^-FAST_KEYS and every rho between
# 2^-FAST_ROWS and 2^FAST_ROWS, a row's sum with a running maximum is at least 2^-100, and an exponential with a
# fixed maximum at most 2^106: no significant term underflows, and none overflows.
FAST_KEYS, FAST_ROWS = tl.constexpr(70.0), tl.constexpr(30.0)
BLOCK = 64


@triton.jit
def key_weights(
    p_k, SHIFT, PRIOR, VARIANCE, inverse_variance, i_h, start, num_keys, positions, stride_n, stride_m, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, PRIOR_AXES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return log_w of a block of keys as a tuple of M vectors. All are NaN if one of the key's numbers is not finite:
    the norm of infinity would be a weight of zero, and a maximum over the components ignores NaN.
    """
    o_n = start + tl.arange(0, BN)
    b_k = load_tile(p_k, start, num_keys, stride_n, BN, D, BD, True).to(tl.float32)  # [BN, BD]
    log_w, poison = (), tl.zeros([BN], tl.float32)
    for r in tl.static_range(M):
        if SHIFT is not None:
            b_kr = b_k + load_shift(SHIFT, i_h * M + r, D, BD)[None, :]
        else:
            b_kr = load_tile(p_k + r * stride_m, start, num_keys, stride_n, BN, D, BD, True).to(tl.float32)
        inverse = inverse_variance
        if VARIANCE is not None:
            inverse = 1.0 / tl.load(VARIANCE + i_h * M + r)
        bias = tl.sum(b_kr * b_kr, 1) * -0.5 * inverse
        if PRIOR_AXES == 2:
            bias += tl.load(PRIOR + i_h * M + r).to(tl.float32)
        if PRIOR_AXES == 3:
            bias += tl.load(PRIOR + (i_h * M + r) * positions + o_n, mask=o_n < num_keys, other=0.0).to(tl.float32)
        poison += tl.sum(b_kr * 0.0, 1) + inverse * 0.0
        log_w = log_w + (bias * LOG2E,)
    result = ()
    for r in tl.static_range(M):
        result = result + (log_w[r] + poison,)
    return result


@triton.jit
def visible_keys(MASK, i_b, o_n, num_keys, MASKED: tl.constexpr):
    """Return which of the keys `o_n` exist and are not masked."""
    visible = o_n < num_keys
    if MASKED:
        visible = visible & (tl.load(MASK + i_b * num_keys + o_n, mask=visible, other=0) != 0)
    return visible


@triton.jit
def bias_kernel(
    K, SHIFT, PRIOR, VARIANCE, MASK, SPAN, KEYS, FACTORS, OVERFLOW, inverse_variance, sk, H, num_keys, padded_keys,
    S: tl.constexpr,
):  # fmt: skip
    """Store log_w, -inf for masked keys, in KEYS (G,M,Nk') and w in bfloat16 in FACTORS (G,M,Nk').

    OVERFLOW (G/GROUP,2), zero before, gets a 1 in its first column for a head with a w that is out of range for the
    fast path. The forward pass writes the second column. SPAN is passed for packed rows alone.
    """
    blocks = tl.cdiv(padded_keys, S.BN)
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h, o_n = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_n * S.BN + tl.arange(0, S.BN)
    positions = num_keys
    _, _, num_keys = sequence(SPAN, i_b, num_keys, num_keys, SPAN is not None)
    origin = key_origin(SPAN, i_b, SPAN is not None)
    log_w = key_weights(
        head_pointer(K, sk, origin, i_h // S.GROUP), SHIFT, PRIOR, VARIANCE, inverse_variance, i_h, i_n * S.BN,
        num_keys, positions, sk[2], sk[3], S.D, S.BD, S.M, S.PRIOR_AXES, S.BN,
    )  # fmt: skip
    visible = visible_keys(MASK, i_b, o_n, num_keys, MASK is not None)
    for r in tl.static_range(S.M):
        o_keys = (i_bh.to(tl.int64) * S.M + r) * padded_keys + o_n
        tl.store(KEYS + o_keys, tl.where(visible, log_w[r], NEVER), mask=o_n < padded_keys)
        if S.NARROW:
            w = tl.where(visible, tl.exp2(log_w[r]), 0.0).to(tl.bfloat16)
            tl.store(FACTORS + o_keys, w, mask=o_n < padded_keys)
            fits = (log_w[r] <= 4.0) & (log_w[r] >= -FAST_KEYS)  # NaN does not
            if tl.max((visible & ~fits).to(tl.int32), 0) > 0:
                tl.store(OVERFLOW + 2 * (i_bh // S.GROUP), 1.0)


@triton.jit
def shifted_bias_block(
    i_block, i_bh, Q, K, SHIFT, PRIOR, MASK, KEYS, FACTORS, ROWS, OVERFLOW, inverse_variance, highest, sqb, sqh,
    sqn, skb, skh, skn, H, num_queries, num_keys, padded_queries, padded_keys, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, HEAD_PRIOR: tl.constexpr, POSITION_PRIOR: tl.constexpr, MASKED: tl.constexpr, HARD: tl.constexpr,
    NARROW: tl.constexpr, BN: tl.constexpr, SPAN=None, GROUP: tl.constexpr = 1,
):  # fmt: skip
    """Do the work of `shifted_bias_kernel` for one block of keys or, from `key_blocks` on, of queries."""
    key_blocks, positions = padded_keys // BN, num_keys
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    origin, num_queries, num_keys = sequence(SPAN, i_b, num_queries, num_keys, SPAN is not None)
    if i_block < key_blocks:
        o_n = i_block * BN + tl.arange(0, BN)
        first_row = key_origin(SPAN, i_b, SPAN is not None)
        log_w = key_weights(
            K + first_row * skb + i_h // GROUP * skh, SHIFT, PRIOR, None, inverse_variance, i_h, i_block * BN, num_keys,
            positions, skn, 0, D, BD, M, 2 if HEAD_PRIOR else 3 if POSITION_PRIOR else 0, BN,
        )  # fmt: skip
        top = 0.0
        if HEAD_PRIOR:  # a factor of the full head cancels; this one puts the largest weight near 1
            top = tl.load(PRIOR + i_h * M).to(tl.float32)
            for r in tl.static_range(1, M):
                top = tl.maximum(top, tl.load(PRIOR + i_h * M + r).to(tl.float32))
            top = finite(top) * LOG2E
        visible = visible_keys(MASK, i_b, o_n, num_keys, MASKED)
        p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys + o_n
        tl.store(p_keys, tl.where(visible, 0.0, NEVER))
        largest, fits = log_w[0] - top, visible
        for r in tl.static_range(M):
            fits = fits & (log_w[r] - top <= 4.0)  # NaN does not fit
            largest = tl.maximum(largest, log_w[r] - top)
            w = tl.where(visible, tl.exp2(log_w[r] - top), 0.0)
            tl.store(p_keys + (1 + r) * padded_keys, w)
            if NARROW:
                tl.store(FACTORS + (i_bh.to(tl.int64) * M + r) * padded_keys + o_n, w.to(tl.bfloat16))
            tl.store(p_keys + (1 + M + r) * padded_keys, tl.where(visible, log_w[r] - top, NEVER))
        if tl.max((visible & ~(fits & (largest >= -FAST_KEYS))).to(tl.int32), 0) > 0:
            tl.store(OVERFLOW + 2 * (i_bh // GROUP), 1.0)
    else:
        start = (i_block - key_blocks) * BN
        o_m = start + tl.arange(0, BN)
        p_q = Q + origin * sqb + i_h * sqh
        b_q = load_tile(p_q, start, num_queries, sqn, BN, D, BD, True).to(tl.float32)  # [BN, BD]
        p_rows = ROWS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_queries + o_m
        scale, poison = inverse_variance * LOG2E, tl.sum(b_q * 0.0, 1)  # NaN if one of the numbers is not finite
        first, fits = tl.zeros([BN], tl.float32), tl.full([BN], 1, tl.int1)
        for r in tl.static_range(M):
            log_u = tl.sum(b_q * load_shift(SHIFT, i_h * M + r, D, BD)[None, :], 1) * scale + poison
            if r == 0:
                first = log_u
                bound = tl.sum(b_q * b_q, 1) * (0.5 * inverse_variance * LOG2E) - log_u
                tl.store(p_rows, bound)
            lead = log_u - first
            fits = fits & (lead <= highest) & (lead >= -FAST_ROWS)
            tl.store(p_rows + (1 + r) * padded_queries, lead if HARD else tl.exp2(lead))
            tl.store(p_rows + (1 + M + r) * padded_queries, log_u)
        if tl.max((~fits).to(tl.int32), 0) > 0:
            tl.store(OVERFLOW + 2 * (i_bh // GROUP), 1.0)


@triton.jit
def shifted_bias_kernel(
    Q, K, SHIFT, PRIOR, MASK, SPAN, KEYS, FACTORS, ROWS, OVERFLOW, inverse_variance, highest, sq, sk, H,
    num_queries, num_keys, padded_queries, padded_keys, S: tl.constexpr,
):  # fmt: skip
    """Store what shifted.py needs for each key and query.

    KEYS (G,1+2M,Nk'): 0 or -inf (masked), w, log_w. FACTORS (G,M,Nk'): w in bfloat16. ROWS (G,1+2M,Nq'): an upper
    bound of the row's logits, rho, log_u. OVERFLOW is as in `bias_kernel`; `highest` is the largest exponent of a rho.
    SPAN is passed for packed rows alone.
    """
    blocks = (padded_keys + padded_queries) // S.BN
    shifted_bias_block(
        tl.program_id(0) % blocks, tl.program_id(0) // blocks, Q, K, SHIFT, PRIOR, MASK, KEYS, FACTORS, ROWS,
        OVERFLOW, inverse_variance, highest, sq[0], sq[1], sq[2], sk[0], sk[1], sk[2], H, num_queries, num_keys,
        padded_queries, padded_keys, S.D, S.BD, S.M, S.PRIOR_AXES == 2, S.PRIOR_AXES == 3, MASK is not None, S.HARD,
        S.NARROW, S.BN, SPAN, S.GROUP,
    )  # fmt: skip


def prior_axes(log_prior: Tensor | None) -> int:
    """Return 0 without a prior, 2 for one per head (H,M), 3 for one per position (H,M,Nk)."""
    return 0 if log_prior is None else log_prior.dim()


def key_bias(
    keys: Tensor, factors: Tensor, overflow: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    variance: Tensor | None, inverse_variance: float, key_mask: Tensor | None, packed: Tensor | None, heads: int,
) -> None:  # fmt: skip
    """Fill `keys` (G,M,Nk') and, unless they are empty, `factors` (G,M,Nk') and `overflow`; see `bias_kernel`.

    `key` is (B,H/GROUP,M,Nk,D), or (B,H/GROUP,1,Nk,D) with a `shift` (H,M,D).
    `packed` holds the spans of packed rows, for which the row stride takes the place of the batch stride, or is None.
    """
    _, key_heads, _, num_keys, width = key.shape
    block, first = max(16, min(128, 8192 // block_width(width))), 0 if packed is None else -2
    launch(
        bias_kernel, (triton.cdiv(keys.shape[-1], block) * keys.shape[0],), key, shift, log_prior,
        variance, as_bytes(key_mask), packed, keys, factors, overflow, inverse_variance,
        (key.stride(first), key.stride(1), key.stride(3), key.stride(2)), heads, prior_positions(log_prior, num_keys),
        keys.shape[-1], num_warps=4,
        S=constants(
            D=width, BD=block_width(width), M=keys.shape[1], PRIOR_AXES=prior_axes(log_prior),
            NARROW=factors.numel() > 0, BN=block, GROUP=heads // key_heads,
        ),
    )  # fmt: skip


def shifted_bias(
    keys: Tensor, factors: Tensor, rows: Tensor, overflow: Tensor, query: Tensor, key: Tensor, shift: Tensor,
    log_prior: Tensor | None, inverse_variance: float, key_mask: Tensor | None, hard: bool, packed: Tensor | None,
) -> None:  # fmt: skip
    """Fill `keys`, `factors` unless empty, `rows` and `overflow`; see `shifted_bias_kernel` and `key_bias`."""
    heads, width, first = query.shape[1], query.shape[-1], 0 if packed is None else -2
    launch(
        shifted_bias_kernel, (keys.shape[0] * (rows.shape[-1] + keys.shape[-1]) // BLOCK,), query, key, shift,
        log_prior, as_bytes(key_mask), packed, keys, factors, rows, overflow, inverse_variance,
        14.0 if query.dtype == torch.float16 else 30.0, (query.stride(first), *query.stride()[1:3]),
        (key.stride(first), *key.stride()[1:3]), heads, query.shape[2], prior_positions(log_prior, key.shape[2]),
        rows.shape[-1], keys.shape[-1], num_warps=4,
        S=constants(
            D=width, BD=block_width(width), M=shift.shape[1], PRIOR_AXES=prior_axes(log_prior), HARD=hard,
            NARROW=factors.numel() > 0, BN=BLOCK, GROUP=heads // key.shape[1],
        ),
    )  # fmt: skip


def prior_positions(log_prior: Tensor | None, num_keys: int) -> int:
    """Return the number of positions of a prior per position, which may exceed a packed sequence, else `num_keys`."""
    return num_keys if log_prior is None or log_prior.dim() == 2 else log_prior.shape[-1]


@triton.jit
def mask_range(p_mask, length, BLOCK: tl.constexpr):
    """Return the first unmasked position, one past the last (`length` and 0 if there is none), and the first masked."""
    first, last = tl.full([BLOCK], 0, tl.int32) + length, tl.zeros([BLOCK], tl.int32)
    first_masked = first
    for start in range(0, length, BLOCK):
        o = start + tl.arange(0, BLOCK)
        visible = tl.load(p_mask + o, mask=o < length, other=0) != 0
        first = tl.minimum(first, tl.where(visible, o, length))
        last = tl.maximum(last, tl.where(visible, o + 1, 0))
        first_masked = tl.minimum(first_masked, tl.where(visible, length, o))
    return tl.min(first, 0), tl.max(last, 0), tl.min(first_masked, 0)


@triton.jit
def span_kernel(QUERY_MASK, KEY_MASK, QUERY_ENDS, KEY_ENDS, SPAN, num_queries, num_keys, BLOCK: tl.constexpr):
    """Store all fields of SPAN (B,FIELDS) but the fifth; see `spans`."""
    i_b = tl.program_id(0).to(tl.int64)
    last_query, last_key, first_key, fourth, masked_query = num_queries, num_keys, 0, num_keys, num_queries
    if QUERY_ENDS is not None:
        fourth = tl.load(QUERY_ENDS + i_b)
        masked_query = tl.load(KEY_ENDS + i_b)
        last_query = tl.load(QUERY_ENDS + i_b + 1) - fourth
        last_key = tl.load(KEY_ENDS + i_b + 1) - masked_query
    if QUERY_MASK is not None:
        _, last_query, masked_query = mask_range(QUERY_MASK + i_b * num_queries, num_queries, BLOCK)
    if KEY_MASK is not None:
        first_key, last_key, fourth = mask_range(KEY_MASK + i_b * num_keys, num_keys, BLOCK)
    tl.store(SPAN + FIELDS * i_b, last_query)
    tl.store(SPAN + FIELDS * i_b + 1, last_key)
    tl.store(SPAN + FIELDS * i_b + 2, first_key)
    tl.store(SPAN + FIELDS * i_b + 3, fourth)
    tl.store(SPAN + FIELDS * i_b + 5, masked_query)


@triton.jit(do_not_specialize=["num_batches"])
def rank_kernel(SPAN, num_batches, BLOCK: tl.constexpr):
    """Store in the fifth field of row n the batch with the n-th most pairs."""
    i_b = tl.program_id(0)
    own = tl.load(SPAN + FIELDS * i_b).to(tl.float32) * tl.load(SPAN + FIELDS * i_b + 1)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_batches, BLOCK):
        o = start + tl.arange(0, BLOCK)
        queries = tl.load(SPAN + FIELDS * o, mask=o < num_batches, other=-1).to(tl.float32)
        pairs = queries * tl.load(SPAN + FIELDS * o + 1, mask=o < num_batches, other=1)
        before += ((pairs > own) | ((pairs == own) & (o < i_b))).to(tl.int32)
    tl.store(SPAN + FIELDS * tl.sum(before, 0) + 4, i_b)


def spans(
    query_mask: Tensor | None, key_mask: Tensor | None, num_queries: int, num_keys: int, ends: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Return (B,6), int32, or None if nothing is masked or packed.

    The fields are, for each batch, one past the last unmasked query, one past the last unmasked key, the first unmasked
    key, the first masked key, in row n the batch with the n-th most pairs, and the first masked query. For packed rows
    with the cumulative lengths `ends` (B+1,) and those of the keys, if they differ, whose sequences have no masks, the
    fourth field is the first row of the queries and the sixth that of the keys.
    """
    given = next((tensor for tensor in (ends, query_mask, key_mask) if tensor is not None), None)
    if given is None:
        return None
    batch = given.shape[0] - (ends is not None)
    result = given.new_empty(batch, FIELDS.value, dtype=torch.int32)
    key_ends = ends if key_ends is None else key_ends
    launch(
        span_kernel,
        (batch,),
        as_bytes(query_mask),
        as_bytes(key_mask),
        ends,
        ends if key_ends is None else key_ends,
        result,
        num_queries,
        num_keys,
        1024,
    )
    launch(rank_kernel, (batch,), result, batch, 128, num_warps=1)
    return result


@triton.jit
def columns_kernel(FACTORS, KEY_COLUMNS, padded_keys, M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Transpose FACTORS (G,M,Nk') to KEY_COLUMNS (G,Nk',COLUMNS), padded with zeros."""
    blocks, o_column = padded_keys // BLOCK, tl.arange(0, COLUMNS)
    i_bh, o_n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    block = tl.zeros([BLOCK, COLUMNS], tl.bfloat16)
    for r in tl.static_range(M):
        vector = tl.load(FACTORS + (i_bh * M + r) * padded_keys + o_n)
        block = tl.where(o_column[None, :] == r, vector[:, None], block)
    tl.store(KEY_COLUMNS + (i_bh * padded_keys + o_n)[:, None] * COLUMNS + o_column[None, :], block)


def side_by_side(factors: Tensor, columns: int) -> Tensor:
    """Return `factors` (G,M,Nk') transposed to (G,Nk',columns), padded with zeros."""
    groups, components, padded_keys = factors.shape
    result = factors.new_empty(groups, padded_keys, columns)
    grid = (groups * padded_keys // 128,)
    launch(columns_kernel, grid, factors, result, padded_keys, components, columns, 128)
    return result
