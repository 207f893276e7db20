"""The M-step for the prior: sum_i gamma[i,j,r] with gamma = softmax_r l[i,j,r], one tile of pairs at a time.

    l[i,j,r] = row[i,r] + bias[j,r] + q_i.k_jr / s2_r        up to what does not depend on r

Shifted keys with one variance have q_i.k_j in every component: no product is left, and two components are a sigmoid of
one number per query plus one per key. Each program owns a block of keys and walks over the queries; the sums of the
batches are added up afterwards, in a fixed order.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.dispatch import block_width
from mgk.ops.triton.bias import spans
from mgk.ops.triton.decode import (
    alive_places,
    component_scale,
    load_alive,
    per_position,
    with_prior,
)
from mgk.ops.triton.host import as_bytes, dense, dot_precision
from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import NEVER, key_range, zeros_tuple


@triton.jit
def row_kernel(
    Q, SHIFT, VARIANCE, ROW, variance, sqb, sqh, sqn, H, num_queries, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """row[i,r] = (q_i.b_r - |q_i|^2 / 2) / s2_r as (B,H,M,Nq); with one variance the norm is in every component."""
    blocks = tl.cdiv(num_queries, BM)
    i_m, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, BD)
    p_q = Q + i_b * sqb + i_h.to(tl.int64) * sqh
    b_q = load_alive(p_q, i_m * BM, o_m < num_queries, sqn, BM, D, BD).to(tl.float32)  # [BM, BD]
    for r in tl.static_range(M):
        row = tl.zeros([BM], tl.float32)
        if SHIFT is not None:
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            row += tl.sum(b_q * b_b[None, :], 1)
        if VARIANCE is not None:
            row -= 0.5 * tl.sum(b_q * b_q, 1)
        row *= component_scale(variance, VARIANCE, i_h * M + r)
        tl.store(ROW + (i_bh.to(tl.int64) * M + r) * num_queries + o_m, row, mask=o_m < num_queries)


@triton.jit
def pair_shares(lead):
    """Two components, of which the second is ahead by `lead`: their shares, each right to a few roundings of itself."""
    small = tl.exp2(-tl.abs(lead))
    big = 1.0 / (1.0 + small)
    small *= big
    return tl.where(lead > 0, small, big), tl.where(lead > 0, big, small)


@triton.jit
def shares(x, M: tl.constexpr):
    """exp2(x_r) / sum_r exp2(x_r)."""
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
    start, sums, b_k, bias, scale, p_q, p_row, p_query_mask, o_n, offset, num_queries, stride_q, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, ONE_KEY: tl.constexpr, PRODUCT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One query tile's share of the sums, keys down and queries across. Queries that are not real are not read."""
    o_m = start + tl.arange(0, BM)
    real = alive_places(p_query_mask, o_m, num_queries)
    weight = real.to(tl.float32)[None, :]
    if MASKED:
        weight = tl.where(o_n[:, None] <= o_m[None, :] + offset, weight, 0.0)
    row, s = (), ()
    for r in tl.static_range(M):
        if p_row is None:
            row = row + (tl.zeros([BM], tl.float32),)
        else:
            row = row + (tl.load(p_row + r * num_queries + o_m, mask=real, other=0.0),)
        if PRODUCT:
            if r == 0:
                b_q = load_alive(p_q, start, real, stride_q, BM, D, BD)  # [BM, BD]
            if r == 0 or not ONE_KEY:
                product = tl.dot(b_k[r], tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
            s = s + (product * scale[r],)
    if M == 2:
        lead = (bias[1] - bias[0])[:, None] + (row[1] - row[0])[None, :]
        if PRODUCT:
            lead += s[1] - s[0]
        gamma = pair_shares(lead)
    else:
        x = ()
        for r in tl.static_range(M):
            logits = bias[r][:, None] + row[r][None, :]
            if PRODUCT:
                logits += s[r]
            x = x + (logits,)
        gamma = shares(x, M)
    new = ()
    for r in tl.static_range(M):
        part = gamma[r] * weight
        if PRODUCT:
            part = tl.sum(part, 1)
        new = new + (sums[r] + part,)
    return new


@triton.jit
def prior_kernel(
    Q, K, SHIFT, PRIOR, VARIANCE, ROW, KEY_MASK, QUERY_MASK, SPAN, TOTAL, variance, sqb, sqh, sqn, skb, skh, skm, skn,
    sph, spm, spn, H, num_queries, num_keys, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    PRODUCT: tl.constexpr = SHIFT is None or VARIANCE is not None
    blocks = tl.cdiv(num_keys, BN)
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_n, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, BD)
    p_q, p_k = Q + i_b * sqb + i_h.to(tl.int64) * sqh, K + i_b * skb + i_h.to(tl.int64) * skh
    p_row, p_query_mask, p_prior = ROW, QUERY_MASK, PRIOR
    if ROW is not None:
        p_row = ROW + i_bh.to(tl.int64) * M * num_queries
    if QUERY_MASK is not None:
        p_query_mask = QUERY_MASK + i_b * num_queries
    if PRIOR is not None:
        p_prior = PRIOR + i_h.to(tl.int64) * sph

    keys, bias, scale = (), (), ()
    alive = tl.zeros([BN], tl.int1)
    for r in tl.static_range(M):
        c = component_scale(variance, VARIANCE, i_h * M + r)
        if SHIFT is None or r == 0:
            b_k = load_alive(p_k + tl.cast(skm, tl.int64) * r, i_n * BN, o_n < num_keys, skn, BN, D, BD)  # [BN, BD]
        b_kr = b_k.to(tl.float32)
        if SHIFT is None:
            norm = tl.sum(b_kr * b_kr, 1)
        else:
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
            norm = tl.sum(b_b * (2.0 * b_kr + b_b), 1)  # |k + b|^2 without |k|^2, which is in every component
            if PRODUCT:
                norm = tl.sum((b_kr + b_b) * (b_kr + b_b), 1)
        log_w = with_prior(norm * (-0.5 * c), p_prior, spm, spn, r, o_n, num_keys)
        alive = alive | (log_w > NEVER)
        keys, bias, scale = keys + (b_k,), bias + (log_w,), scale + (c,)
    finite_bias = ()
    for r in tl.static_range(M):  # a key without components is computed with any numbers, and gets zeros
        finite_bias = finite_bias + (tl.where(alive, bias[r], 0.0),)

    last_query, last_key = key_range(SPAN, i_b, num_queries, num_keys, SPAN is not None)
    offset = num_keys - num_queries
    begin, full, stop = 0, 0, last_query  # the tiles from `full` on need no causal mask
    if i_n * BN >= last_key:
        stop = 0
    if CAUSAL:
        begin = tl.maximum(i_n * BN - offset, 0) // BM * BM
        full = tl.minimum(tl.cdiv(tl.maximum(i_n * BN + BN - 1 - offset, 0), BM) * BM, stop)
    # Without a product nothing crosses a thread before the end; a product wants the registers, and sums rows cheaply.
    sums = zeros_tuple([BN] if PRODUCT else [BN, BM], M)
    if CAUSAL:
        for start in range(begin, full, BM):
            sums = prior_step(
                start, sums, keys, finite_bias, scale, p_q, p_row, p_query_mask, o_n, offset, num_queries, sqn, D, BD,
                M, SHIFT is not None, PRODUCT, True, PRECISION, BM,
            )  # fmt: skip
    for start in range(tl.maximum(begin, full), stop, BM):
        sums = prior_step(
            start, sums, keys, finite_bias, scale, p_q, p_row, p_query_mask, o_n, offset, num_queries, sqn, D, BD, M,
            SHIFT is not None, PRODUCT, False, PRECISION, BM,
        )  # fmt: skip

    if KEY_MASK is not None:
        alive = alive & (tl.load(KEY_MASK + i_b * num_keys + o_n, mask=o_n < num_keys, other=0) != 0)
    for r in tl.static_range(M):
        total = sums[r] if PRODUCT else tl.sum(sums[r], 1)
        p_total = TOTAL + (i_bh.to(tl.int64) * M + r) * num_keys
        tl.store(p_total + o_n, tl.where(alive, total, 0.0), mask=o_n < num_keys)


def prior_statistics(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: float | Tensor,
    is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_i gamma[i,j,r] over the batch, (H,M,Nk), and the visible queries per key, (Nk,), both float32."""
    (batch, heads, num_queries, _), num_keys = query.shape, key.shape[-2]
    components = key.shape[2] if shift is None else shift.shape[1]
    total = query.new_empty(batch, heads, components, num_keys, dtype=torch.float32)
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
    block = block_width(width)
    number, per_component = variance, None
    if isinstance(variance, Tensor):
        number, per_component = 1.0, variance.contiguous()
    shift = None if shift is None else shift.contiguous()
    prior = None if log_prior is None else per_position(log_prior, num_keys)
    queries, keys = tile(components, block, key.element_size(), shift is None or per_component is not None)
    key_strides = *key.stride()[:2], key.stride(2) if shift is None else 0, key.stride(-2)
    key_mask, query_mask = (None if mask is None else mask.contiguous() for mask in (key_mask, query_mask))
    masks = as_bytes(key_mask), as_bytes(query_mask)
    row, span = None, spans(query_mask, key_mask, num_queries, num_keys)
    if shift is not None or per_component is not None:
        row = query.new_empty(batch, heads, components, num_queries, dtype=torch.float32)
        row_queries = max(16, 4096 // block)
        launch(
            row_kernel, (triton.cdiv(num_queries, row_queries) * batch * heads,), query, shift, per_component, row,
            number, *query.stride()[:3], heads, num_queries, width, block, components, row_queries,
        )  # fmt: skip
    launch(
        prior_kernel, (triton.cdiv(num_keys, keys) * batch * heads,), query, key, shift, prior, per_component, row,
        *masks, span, total, number, *query.stride()[:3], *key_strides,
        *((0, 0, 0) if prior is None else prior.stride()), heads, num_queries, num_keys, width, block, components,
        is_causal, dot_precision(), queries, keys, num_stages=2,
    )  # fmt: skip


def tile(components: int, block: int, element_size: int, product: bool) -> tuple[int, int]:
    """Queries and keys of a tile; `block` is the block width of the keys."""
    if not product:  # the sums of a tile stay in registers
        return 64, 16 if components > 2 or block > 128 else 32
    queries = 64 if element_size == 2 else max(16, min(64, 2048 // block))
    fit = 32768 // (components * block * element_size)  # the keys of a block stay in shared memory
    return queries, next(keys for keys in (64, 32, 16) if keys <= max(16, fit))


def visible_queries(
    query: Tensor, num_keys: int, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """How many queries of all batches see a key, (Nk,): real ones, from the key's own position on."""
    batch, num_queries = query.shape[0], query.shape[2]
    first = torch.zeros(num_keys, dtype=torch.long, device=query.device)
    if is_causal:
        first = (torch.arange(num_keys, device=query.device) - (num_keys - num_queries)).clamp(min=0)
    if query_mask is None:
        seen = (num_queries - first).expand(batch, -1)
    else:
        before = torch.nn.functional.pad(query_mask.cumsum(1), (1, 0))  # (B,Nq+1): real queries before a position
        seen = before[:, -1:] - before[:, first]
    return (seen if key_mask is None else seen * key_mask).sum(0).to(torch.float32)
