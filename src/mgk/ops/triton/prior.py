"""The M-step for the prior: sum_i gamma[i,j,r] with gamma = softmax_r l[i,j,r], one tile of pairs at a time.

    l[i,j,r] = row[i,r] + bias[j,r] + q_i.k_jr / s2_r        up to terms that do not depend on r

For shifted keys with one variance q_i.k_j is the same in every component: no product is needed, and two components are
a sigmoid of one number per query plus one per key. Each program has a block of keys and loops over the queries; the
sums of the batches are added afterwards, in a fixed order.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.dispatch import block_width
from mgk.ops.options import Options
from mgk.ops.triton.bias import spans
from mgk.ops.triton.host import as_bytes, dense, dot_precision
from mgk.ops.triton.launch import launch
from mgk.ops.triton.loads import (
    NO_STRIDES,
    active_rows,
    add_log_prior,
    component_scale,
    constants,
    head_pointer,
    key_strides,
    load_active,
    load_shift,
    num_components,
    offset,
    per_position,
    split_variance,
)
from mgk.ops.triton.primitives import NEVER, key_range, spread_infinities, zeros_tuple


@triton.jit
def row_kernel(Q, SHIFT, VARIANCE, ROW, variance, sq, H, num_queries, S: tl.constexpr):
    """Store row[i,r] = (q_i.b_r - |q_i|^2 / 2) / s2_r in ROW (B,H,M,Nq). With one variance the norm cancels."""
    blocks = tl.cdiv(num_queries, S.BM)
    i_m, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m = i_m * S.BM + tl.arange(0, S.BM)
    p_q = head_pointer(Q, sq, i_b, i_h.to(tl.int64))
    b_q = load_active(p_q, i_m * S.BM, o_m < num_queries, sq[2], S.BM, S.D, S.BD).to(tl.float32)  # [BM, BD]
    for r in tl.static_range(S.M):
        row = tl.sum(b_q * 0.0, 1)  # NaN if one of the numbers is not finite
        if SHIFT is not None:
            row += tl.sum(b_q * load_shift(SHIFT, i_h * S.M + r, S.D, S.BD)[None, :], 1)
        if VARIANCE is not None:
            row -= 0.5 * tl.sum(b_q * b_q, 1)
        row *= component_scale(variance, VARIANCE, i_h * S.M + r)
        tl.store(ROW + (i_bh.to(tl.int64) * S.M + r) * num_queries + o_m, row, mask=o_m < num_queries)


@triton.jit
def pair_shares(lead):
    """Return the shares of two components whose logits differ by `lead`, each with a small relative error."""
    small = tl.exp2(-tl.abs(lead))
    big = 1.0 / (1.0 + small)
    small *= big
    return tl.where(lead > 0, small, big), tl.where(lead > 0, big, small)


@triton.jit
def shares(x, M: tl.constexpr):
    """Return exp2(x_r) / sum_r exp2(x_r)."""
    largest = x[0]
    for r in tl.static_range(1, M):
        largest = tl.maximum(largest, x[r])
    terms, total, gamma = (), tl.zeros(x[0].shape, tl.float32), ()
    for r in tl.static_range(M):
        terms = terms + (tl.exp2(x[r] - largest),)
        total += terms[r]
    for r in tl.static_range(M):
        gamma = gamma + (terms[r] / total,)
    return gamma


@triton.jit
def prior_step(
    start, sums, b_k, bias, scale, p_q, p_row, p_query_mask, o_n, diagonal, num_queries, stride_q,
    ONE_KEY: tl.constexpr, PRODUCT: tl.constexpr, MASKED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the shares of one query tile to the sums, keys down and queries across. Masked queries are not read."""
    o_m = start + tl.arange(0, S.BM)
    real = active_rows(p_query_mask, o_m, num_queries)
    weight = real.to(tl.float32)[None, :]
    if MASKED:
        weight = tl.where(o_n[:, None] <= o_m[None, :] + diagonal, weight, 0.0)
    row, s = (), ()
    for r in tl.static_range(S.M):
        if p_row is None:
            row = row + (tl.zeros([S.BM], tl.float32),)
        else:
            row = row + (tl.load(p_row + r * num_queries + o_m, mask=real, other=0.0),)
        if PRODUCT:
            if r == 0:
                b_q = spread_infinities(load_active(p_q, start, real, stride_q, S.BM, S.D, S.BD))  # [BM, BD]
            if r == 0 or not ONE_KEY:
                product = tl.dot(b_k[r], tl.trans(b_q), input_precision=S.PRECISION)  # [BN, BM]
            s = s + (product * scale[r],)
    if S.M == 2:
        lead = (bias[1] - bias[0])[:, None] + (row[1] - row[0])[None, :]
        if PRODUCT:
            lead += s[1] - s[0]
        gamma = pair_shares(lead)
    else:
        x = ()
        for r in tl.static_range(S.M):
            logits = bias[r][:, None] + row[r][None, :]
            if PRODUCT:
                logits += s[r]
            x = x + (logits,)
        gamma = shares(x, S.M)
    new = ()
    for r in tl.static_range(S.M):
        part = gamma[r] * weight
        if MASKED:
            part = tl.where(weight > 0, part, 0.0)
        if PRODUCT:
            part = tl.sum(part, 1)
        new = new + (sums[r] + part,)
    return new


@triton.jit
def prior_kernel(
    Q, K, SHIFT, PRIOR, VARIANCE, ROW, KEY_MASK, QUERY_MASK, SPAN, TOTAL, variance, sq, sk, sp, H, num_queries,
    num_keys, CAUSAL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store sum_i gamma[i,j,r] of a block of keys in TOTAL (B,H,M,Nk)."""
    PRODUCT: tl.constexpr = SHIFT is None or VARIANCE is not None
    blocks = tl.cdiv(num_keys, S.BN)
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_n = i_n * S.BN + tl.arange(0, S.BN)
    p_q, p_k = head_pointer(Q, sq, i_b, i_h.to(tl.int64)), head_pointer(K, sk, i_b, i_h.to(tl.int64))
    p_row = offset(ROW, i_bh.to(tl.int64) * S.M * num_queries)
    p_query_mask = offset(QUERY_MASK, i_b * num_queries)
    p_prior = offset(PRIOR, i_h.to(tl.int64) * sp[0])

    keys, bias, scale = (), (), ()
    active, poison = tl.zeros([S.BN], tl.int1), tl.zeros([S.BN], tl.float32)  # NaN if a number is not finite
    for r in tl.static_range(S.M):
        c = component_scale(variance, VARIANCE, i_h * S.M + r)
        if SHIFT is None or r == 0:
            p_kr = p_k + tl.cast(sk[3], tl.int64) * r
            b_k = load_active(p_kr, i_n * S.BN, o_n < num_keys, sk[2], S.BN, S.D, S.BD)  # [BN, BD]
        b_kr = b_k.to(tl.float32)
        if SHIFT is None:
            norm = tl.sum(b_kr * b_kr, 1)
        else:
            b_b = load_shift(SHIFT, i_h * S.M + r, S.D, S.BD)[None, :]
            norm = tl.sum(b_b * (2.0 * b_kr + b_b), 1)  # |k + b|^2 without |k|^2, which cancels
            if PRODUCT:
                norm = tl.sum((b_kr + b_b) * (b_kr + b_b), 1)
            b_kr += b_b
        poison += tl.sum(b_kr * 0.0, 1)
        log_w = add_log_prior(norm * (-0.5 * c), p_prior, sp, r, o_n, num_keys)
        active = active | (log_w != NEVER)
        keys, bias, scale = keys + (b_k,), bias + (log_w,), scale + (c,)
    active = active | (poison != 0)
    finite_bias = ()
    for r in tl.static_range(S.M):  # a key without components gets zeros at the end; until then any finite bias will do
        finite_bias = finite_bias + (tl.where(active, bias[r], 0.0) + poison,)

    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPAN is not None)
    diagonal = num_keys - num_queries
    begin, full, stop = 0, 0, last_query  # the tiles from `full` on need no causal mask
    if i_n * S.BN >= last_key:
        stop = 0
    if CAUSAL:
        begin = tl.maximum(i_n * S.BN - diagonal, 0) // S.BM * S.BM
        full = tl.minimum(tl.cdiv(tl.maximum(i_n * S.BN + S.BN - 1 - diagonal, 0), S.BM) * S.BM, stop)
    # Without a product nothing crosses threads before the end. A product needs the registers, and sums rows cheaply.
    sums = zeros_tuple([S.BN] if PRODUCT else [S.BN, S.BM], S.M)
    if CAUSAL:
        for start in range(begin, full, S.BM):
            sums = prior_step(
                start, sums, keys, finite_bias, scale, p_q, p_row, p_query_mask, o_n, diagonal, num_queries, sq[2],
                SHIFT is not None, PRODUCT, True, S,
            )  # fmt: skip
    for start in range(tl.maximum(begin, full), stop, S.BM):
        sums = prior_step(
            start, sums, keys, finite_bias, scale, p_q, p_row, p_query_mask, o_n, diagonal, num_queries, sq[2],
            SHIFT is not None, PRODUCT, False, S,
        )  # fmt: skip

    if KEY_MASK is not None:
        active = active & (tl.load(KEY_MASK + i_b * num_keys + o_n, mask=o_n < num_keys, other=0) != 0)
    for r in tl.static_range(S.M):
        total = sums[r] if PRODUCT else tl.sum(sums[r], 1)
        p_total = TOTAL + (i_bh.to(tl.int64) * S.M + r) * num_keys
        tl.store(p_total + o_n, tl.where(active, total, 0.0), mask=o_n < num_keys)


def prior_statistics(query: Tensor, key: Tensor, shift: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """Return sum_i gamma[i,j,r] over the batch (H,M,Nk) and the number of queries that see a key (Nk,), in float32."""
    log_prior, variance, (is_causal, _, key_mask, query_mask), *_ = options
    (batch, heads, num_queries, _), num_keys = query.shape, key.shape[-2]
    total = query.new_empty(batch, heads, num_components(key, shift), num_keys, dtype=torch.float32)
    if total.numel() and num_queries:
        launch_prior(dense(query), dense(key), shift, log_prior, variance, is_causal, key_mask, query_mask, total)
    else:
        total.zero_()
    return total.sum(0), visible_queries(query, num_keys, is_causal, key_mask, query_mask)


def launch_prior(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: float | Tensor,
    is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None, total: Tensor,
) -> None:  # fmt: skip
    """Fill `total` (B,H,M,Nk)."""
    (batch, heads, num_queries, width), (components, num_keys) = query.shape, total.shape[2:]
    number, per_component = split_variance(variance)
    shift = None if shift is None else shift.contiguous()
    prior = None if log_prior is None else per_position(log_prior, num_keys)
    key_mask, query_mask = (None if mask is None else mask.contiguous() for mask in (key_mask, query_mask))
    sizes: dict[str, Any] = {"D": width, "BD": block_width(width), "M": components}
    row = None
    if shift is not None or per_component is not None:
        row, block = total.new_empty(batch, heads, components, num_queries), max(16, 4096 // sizes["BD"])
        launch(
            row_kernel, (triton.cdiv(num_queries, block) * batch * heads,), query, shift, per_component, row, number,
            query.stride()[:3], heads, num_queries, constants(**sizes, BM=block),
        )  # fmt: skip
    queries, keys = tile(components, sizes["BD"], key.element_size(), shift is None or per_component is not None)
    launch(
        prior_kernel, (triton.cdiv(num_keys, keys) * batch * heads,), query, key, shift, prior, per_component, row,
        as_bytes(key_mask), as_bytes(query_mask), spans(query_mask, key_mask, num_queries, num_keys), total, number,
        query.stride()[:3], key_strides(key), NO_STRIDES if prior is None else prior.stride(), heads, num_queries,
        num_keys, is_causal, constants(**sizes, BM=queries, BN=keys, PRECISION=dot_precision(query)), num_stages=2,
    )  # fmt: skip


def tile(components: int, block: int, element_size: int, product: bool) -> tuple[int, int]:
    """Return the queries and keys of a tile; `block` is the block width of the keys."""
    if not product:  # the sums of a tile stay in registers
        return 64, 16 if components > 2 or block > 128 else 32
    queries = 64 if element_size == 2 else max(16, min(64, 2048 // block))
    fit = 32768 // (components * block * element_size)  # the keys of a block stay in shared memory
    return queries, next(keys for keys in (64, 32, 16) if keys <= max(16, fit))


def visible_queries(
    query: Tensor, num_keys: int, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """Return how many unmasked queries of all batches see a key (Nk,)."""
    batch, num_queries = query.shape[0], query.shape[2]
    first = torch.zeros(num_keys, dtype=torch.long, device=query.device)
    if is_causal:
        first = (torch.arange(num_keys, device=query.device) - (num_keys - num_queries)).clamp(min=0)
    if query_mask is None:
        seen = (num_queries - first).expand(batch, -1)
    else:
        before = torch.nn.functional.pad(query_mask.cumsum(1), (1, 0))  # (B,Nq+1): unmasked queries before a position
        seen = before[:, -1:] - before[:, first]
    return (seen if key_mask is None else seen * key_mask).sum(0).to(torch.float32)
