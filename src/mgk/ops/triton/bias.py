"""What depends on one key alone, in one small kernel: log prior[j,r] - |k_jr|^2 / (2 s2_r), in base 2.

And the last query and key of each batch that takes part, so that padding is not walked over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.triton.primitives import LOG2E, NEVER, factors, load_tile


@triton.jit
def bias_kernel(
    K, SHIFT, PRIOR, VARIANCE, MASK, KEYS, inverse_variance, skb, skh, skm, skn, H, num_keys, padded_keys,
    D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, SHIFTED: tl.constexpr, VARIANCES: tl.constexpr,
    HEAD_PRIOR: tl.constexpr, POSITION_PRIOR: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """KEYS (G, M, Nk') takes log_w; with shifted keys KEYS (G, 1+2M, Nk') takes max_r log_w, the factors w and log_w."""
    blocks = tl.cdiv(padded_keys, BN)
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_n, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, BD)
    p_k = K + i_b * skb + i_h * skh
    b_k = load_tile(p_k, i_n * BN, num_keys, skn, BN, D, BD, True).to(tl.float32)  # [BN, BD]
    taken = o_n < num_keys
    if MASKED:
        taken = taken & (tl.load(MASK + i_b * num_keys + o_n, mask=taken, other=0) != 0)
    log_w = ()
    for r in tl.static_range(M):
        if SHIFTED:
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            b_kr = b_k + b_b[None, :]
        else:
            b_kr = load_tile(p_k + r * skm, i_n * BN, num_keys, skn, BN, D, BD, True).to(tl.float32)
        inverse = inverse_variance
        if VARIANCES:
            inverse = 1.0 / tl.load(VARIANCE + i_h * M + r)
        bias = tl.sum(b_kr * b_kr, 1) * -0.5 * inverse
        if HEAD_PRIOR:
            bias += tl.load(PRIOR + i_h * M + r).to(tl.float32)
        if POSITION_PRIOR:
            bias += tl.load(PRIOR + (i_h * M + r) * num_keys + o_n, mask=o_n < num_keys, other=0.0).to(tl.float32)
        log_w = log_w + (tl.where(taken, bias * LOG2E, NEVER),)
    inside = o_n < padded_keys
    if SHIFTED:
        p_keys = KEYS + i_bh.to(tl.int64) * (1 + 2 * M) * padded_keys + o_n
        c, w = factors(log_w, M)
        tl.store(p_keys, c, mask=inside)
        for r in tl.static_range(M):
            tl.store(p_keys + (1 + r) * padded_keys, w[r], mask=inside)
            tl.store(p_keys + (1 + M + r) * padded_keys, log_w[r], mask=inside)
    else:
        for r in tl.static_range(M):
            tl.store(KEYS + (i_bh.to(tl.int64) * M + r) * padded_keys + o_n, log_w[r], mask=inside)


def key_bias(
    keys: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Tensor | None,
    inverse_variance: float, key_mask: Tensor | None,
) -> None:  # fmt: skip
    """Fill `keys`, see the kernel. `key` is (B,H,M,Nk,D), or (B,H,Nk,D) with a shift (H,M,D)."""
    (batch, heads), (num_keys, width) = key.shape[:2], key.shape[-2:]
    components = key.shape[2] if shift is None else shift.shape[1]
    block_width = triton.next_power_of_2(max(width, 16))
    block = max(16, min(128, 8192 // block_width))
    bias_kernel[(triton.cdiv(keys.shape[-1], block) * batch * heads,)](
        key, shift, log_prior, variance, None if key_mask is None else key_mask.view(torch.uint8), keys,
        inverse_variance, key.stride(0), key.stride(1), 0 if shift is not None else key.stride(2), key.stride(-2),
        heads, num_keys, keys.shape[-1], width, block_width, components, shift is not None, variance is not None,
        log_prior is not None and log_prior.dim() == 2, log_prior is not None and log_prior.dim() == 3,
        key_mask is not None, block, num_warps=4,
    )  # fmt: skip


@triton.jit
def span_kernel(
    QUERY_MASK, KEY_MASK, SPAN, num_queries, num_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    i_b = tl.program_id(0).to(tl.int64)
    last_query, last_key = num_queries, num_keys
    if QUERIES:
        last = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_queries, BLOCK):
            o = start + tl.arange(0, BLOCK)
            seen = tl.load(QUERY_MASK + i_b * num_queries + o, mask=o < num_queries, other=0)
            last = tl.maximum(last, tl.where(seen != 0, o + 1, 0))
        last_query = tl.max(last, 0)
    if KEYS:
        last = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_keys, BLOCK):
            o = start + tl.arange(0, BLOCK)
            seen = tl.load(KEY_MASK + i_b * num_keys + o, mask=o < num_keys, other=0)
            last = tl.maximum(last, tl.where(seen != 0, o + 1, 0))
        last_key = tl.max(last, 0)
    tl.store(SPAN + 2 * i_b, last_query)
    tl.store(SPAN + 2 * i_b + 1, last_key)


def spans(query_mask: Tensor | None, key_mask: Tensor | None, num_queries: int, num_keys: int) -> Tensor | None:
    """One past the last query and the last key of each batch that takes part, (B,2) int32; None if all do."""
    if query_mask is None and key_mask is None:
        return None
    masks = [mask for mask in (query_mask, key_mask) if mask is not None]
    result = torch.empty(masks[0].shape[0], 2, device=masks[0].device, dtype=torch.int32)
    bytes_of = [None if mask is None else mask.view(torch.uint8) for mask in (query_mask, key_mask)]
    span_kernel[(result.shape[0],)](
        *bytes_of, result, num_queries, num_keys, query_mask is not None, key_mask is not None, 1024
    )
    return result
