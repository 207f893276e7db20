"""One or a few queries against a long cache: the keys are split between programs, and a second kernel joins the parts.

What bounds it is the reading of the cache, so every key and value is read once and nothing is prepared beforehand.
One query is not worth a matrix product: it takes the distance |q - k_jr|^2 as it stands, on the plain units. Few
queries take a product and the biases -|k_jr|^2 / 2 s2_r from the tile that is there anyway.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.common import MAX_QUERIES
from mgk.ops.triton.host import dense, dot_precision
from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import LOG2E, NEVER, finite, load_tile, online_softmax, widened

PROGRAMS, MASKED_PROGRAMS = 8, 32  # per multiprocessor: several tiles are under way while one is computed
SPLIT_TILES = 4  # a split has at least so many key tiles, or joining costs more than it brings
MAX_SPLITS = 256
JOINED = 16  # splits joined at a time
NUMBERS, WARPS, STAGES = 4096, 4, 3  # numbers of a tile of keys or of values


@triton.jit
def component_scale(variance, p_variance, i_component):
    """log2(e) / s2 of a component: of all of them, or its own where there is a tensor."""
    if p_variance is not None:
        variance = tl.load(p_variance + i_component).to(tl.float32)
    return LOG2E / variance


@triton.jit
def with_prior(x, p_prior, stride_component, stride_key, r, o_n, num_keys):
    """Add log2 prior[j,r] to a vector over keys."""
    if p_prior is not None:
        b_prior = tl.load(p_prior + r * stride_component + o_n * stride_key, mask=o_n < num_keys, other=0.0)
        x += b_prior.to(tl.float32) * LOG2E
    return x


@triton.jit
def alive_places(p_mask, o_places, num_places):
    """Which keys or queries take part. The others are not even read."""
    alive = o_places < num_places
    if p_mask is not None:
        alive = alive & (tl.load(p_mask + o_places, mask=alive, other=0) != 0)
    return alive


@triton.jit
def load_alive(p_base, start, alive, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `start` and on of a matrix, those that take part (None: all); zero elsewhere.  # [ROWS, BLOCK]"""
    if alive is None:
        tile = load_tile(p_base, start, 0, stride, ROWS, WIDTH, BLOCK, False)
    else:
        o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
        p_tile = p_base + tl.cast(start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
        tile = tl.load(p_tile, mask=alive[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def none_hidden(p_mask, begin, end, BLOCK: tl.constexpr):
    rest = begin + (end - begin) // BLOCK * BLOCK
    o_n = rest + tl.arange(0, BLOCK)
    least = tl.load(p_mask + o_n, mask=o_n < end, other=1)
    for start in range(begin, rest, BLOCK):
        least = tl.minimum(least, tl.load(p_mask + start + tl.arange(0, BLOCK)))  # 16 bytes at once
    return tl.min(least.to(tl.int32), 0) > 0


@triton.jit
def one_query_tiles(
    m, l, acc, p_k, p_v, p_prior, p_mask, centre, scale, bias, begin, end, num_keys, skm, skn, svn, spm, spn,
    SHIFTED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, M: tl.constexpr,
    HARD: tl.constexpr, ASK: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some more keys, AHEAD tiles at a time. Each of the BN places of a tile keeps a maximum, a sum and a row of values
    of its own. ASK: which keys there are.
    """
    for first in tl.range(begin, end, BN * AHEAD, num_stages=STAGES):
        logits, values, best = (), (), tl.full([BN], NEVER, tl.float32)
        for i in tl.static_range(AHEAD):
            start = first + i * BN
            o_n = start + tl.arange(0, BN)
            alive = alive_places(p_mask, o_n, end) if ASK else None
            b_k = load_alive(p_k, start, alive, skn, BN, D, BD)  # [BN, BD]
            values = values + (load_alive(p_v, start, alive, svn, BN, DV, BV),)  # [BN, BV]
            for r in tl.static_range(M):
                if not SHIFTED and r > 0:
                    b_k = load_alive(p_k + tl.cast(skm, tl.int64) * r, start, alive, skn, BN, D, BD)  # [BN, BD]
                difference = widened(b_k) - centre[r][None, :]
                x = tl.sum(difference * difference, 1) * scale[r] + bias[r]
                x = with_prior(x, p_prior, spm, spn, r, o_n, num_keys)
                if ASK:
                    x = tl.where(alive, x, NEVER)
                logits = logits + (x,)
                best = tl.maximum(best, x)
        m, m_safe, alpha = online_softmax(best, m)
        l, acc = l * alpha, acc * alpha[:, None]
        for i in tl.static_range(AHEAD):
            p, largest = tl.zeros([BN], tl.float32), logits[i * M]
            for r in tl.static_range(M):
                if HARD:
                    largest = tl.maximum(largest, logits[i * M + r])
                else:
                    p += tl.exp2(logits[i * M + r] - m_safe)
            if HARD:
                p = tl.exp2(largest - m_safe)
            l += p
            acc += p[:, None] * widened(values[i])
    return m, l, acc


@triton.jit(do_not_specialize=["num_keys", "splits"])
def one_query_kernel(
    Q, K, SHIFT, V, PRIOR, VARIANCE, MASK, OUT, LSE, variance, sqb, sqh, skb, skh, skm, skn, svb, svh, svn, sph, spm,
    spn, smb, H, num_keys, splits, split_keys, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    M: tl.constexpr, HARD: tl.constexpr, POSITIONS: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One split. Its mask is read first: asking it before every tile would hold up the reading of that tile."""
    i_s, i_bh = tl.program_id(0) % splits, tl.program_id(0) // splits
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_d, o_v = tl.arange(0, BD), tl.arange(0, BV)
    p_k, p_v = K + i_b * skb + i_h.to(tl.int64) * skh, V + i_b * svb + i_h.to(tl.int64) * svh
    p_prior = None
    if POSITIONS:
        p_prior = PRIOR + i_h.to(tl.int64) * sph
    b_q = tl.load(Q + i_b * sqb + i_h.to(tl.int64) * sqh + o_d, mask=o_d < D, other=0.0).to(tl.float32)

    centre, scale, bias = (), (), ()  # q - b_r, from which a key's distance is that of q to k_jr
    for r in tl.static_range(M):
        b_g = b_q
        if SHIFT is not None:
            b_g = b_q - tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        centre = centre + (b_g,)
        scale = scale + (-0.5 * component_scale(variance, VARIANCE, i_h * M + r),)
        if PRIOR is not None and not POSITIONS:
            bias = bias + (tl.load(PRIOR + i_h.to(tl.int64) * sph + r * spm).to(tl.float32) * LOG2E,)
        else:
            bias = bias + (0.0,)

    begin = i_s * split_keys
    end = tl.minimum(begin + split_keys, num_keys)
    full = begin + (end - begin) // (BN * AHEAD) * (BN * AHEAD)
    p_mask = MASK
    if MASK is not None:
        p_mask = MASK + i_b * smb
        if not none_hidden(p_mask, begin, end, 2048):
            full = begin
    m, l = tl.full([BN], NEVER, tl.float32), tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, BV], tl.float32)
    m, l, acc = one_query_tiles(
        m, l, acc, p_k, p_v, p_prior, None, centre, scale, bias, begin, full, num_keys, skm, skn, svn, spm, spn,
        SHIFT is not None, D, DV, BD, BV, M, HARD, False, BN, AHEAD, STAGES,
    )  # fmt: skip
    m, l, acc = one_query_tiles(
        m, l, acc, p_k, p_v, p_prior, p_mask, centre, scale, bias, full, end, num_keys, skm, skn, svn, spm, spn,
        SHIFT is not None, D, DV, BD, BV, M, HARD, True, BN, 1, 1,
    )  # fmt: skip

    m_all = tl.max(m, 0)
    weight = tl.exp2(m - finite(m_all))
    l_all = tl.sum(l * weight, 0)
    l_all = tl.where(l_all > 0, l_all, 1.0)  # no keys: zeros, and -inf for their logarithm
    out = tl.sum(acc * weight[:, None], 0) / l_all
    i_part = tl.program_id(0).to(tl.int64)
    tl.store(OUT + i_part * DV + o_v, out.to(OUT.dtype.element_ty), mask=o_v < DV)
    tl.store(LSE + i_part, m_all + tl.log2(l_all))


@triton.jit(do_not_specialize=["num_keys", "num_queries", "splits"])
def few_queries_kernel(
    Q, K, SHIFT, V, PRIOR, VARIANCE, MASK, OUT, LSE, variance, sqb, sqh, sqn, skb, skh, skm, skn, svb, svh, svn, sph,
    spm, spn, smb, H, num_queries, num_keys, splits, split_keys, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, M: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Softmax over the keys of one split, l[i,j,r] = q_i.k_j / s2_r + row[i,r] + bias[j,r]."""
    i_s, i_bh = tl.program_id(0) % splits, tl.program_id(0) // splits
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m, o_d, o_v = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    p_k, p_v = K + i_b * skb + i_h.to(tl.int64) * skh, V + i_b * svb + i_h.to(tl.int64) * svh
    p_prior = PRIOR
    if PRIOR is not None:
        p_prior = PRIOR + i_h.to(tl.int64) * sph
    p_mask = MASK
    if MASK is not None:
        p_mask = MASK + i_b * smb
    m_q = (o_m < num_queries)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(Q + i_b * sqb + i_h.to(tl.int64) * sqh + o_m[:, None] * sqn + o_d[None, :], mask=m_q, other=0.0)

    shift, row, scale = (), (), ()
    for r in tl.static_range(M):
        c = component_scale(variance, VARIANCE, i_h * M + r)
        b_b = tl.zeros([BD], tl.float32)
        log_u = tl.zeros([BM], tl.float32)
        if SHIFT is not None:
            b_b = tl.load(SHIFT + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            log_u += tl.sum(b_q.to(tl.float32) * b_b[None, :], 1) * c
        if VARIANCE is not None:  # otherwise it is one number for the whole row, which cancels
            log_u -= tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) * (0.5 * c)
        shift, row, scale = shift + (b_b,), row + (log_u,), scale + (c,)

    m, l = tl.full([BM], NEVER, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    begin, offset = i_s * split_keys, num_keys - num_queries
    for start in range(begin, tl.minimum(begin + split_keys, num_keys), BN):
        o_n = start + tl.arange(0, BN)
        alive = alive_places(p_mask, o_n, num_keys)
        b_k = load_alive(p_k, start, alive, skn, BN, D, BD)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        logits, best = (), tl.full([BM, BN], NEVER, tl.float32)
        for r in tl.static_range(M):
            if SHIFT is None and r > 0:
                b_k = load_alive(p_k + tl.cast(skm, tl.int64) * r, start, alive, skn, BN, D, BD)  # [BN, BD]
                s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
            b_kr = b_k.to(tl.float32) + shift[r][None, :]
            bias = tl.sum(b_kr * b_kr, 1) * (-0.5 * scale[r])
            bias = tl.where(alive, with_prior(bias, p_prior, spm, spn, r, o_n, num_keys), NEVER)
            x = s * scale[r] + row[r][:, None] + bias[None, :]
            if CAUSAL:
                x = tl.where(o_n[None, :] <= o_m[:, None] + offset, x, NEVER)
            logits = logits + (x,)
            best = tl.maximum(best, x)
        m, m_safe, alpha = online_softmax(tl.max(best, 1), m)
        if HARD:
            p = tl.exp2(best - m_safe[:, None])
        else:
            p = tl.exp2(logits[0] - m_safe[:, None])
            for r in tl.static_range(1, M):
                p += tl.exp2(logits[r] - m_safe[:, None])
        l = l * alpha + tl.sum(p, 1)
        b_v = load_alive(p_v, start, alive, svn, BN, DV, BV)  # [BN, BV]
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)

    i_part = tl.program_id(0).to(tl.int64) * num_queries
    l = tl.where(l > 0, l, 1.0)
    m_out = (o_m < num_queries)[:, None] & (o_v < DV)[None, :]
    p_out = OUT + i_part * DV + o_m[:, None] * DV + o_v[None, :]
    tl.store(p_out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=m_out)
    tl.store(LSE + i_part + o_m, m + tl.log2(l), mask=o_m < num_queries)


@triton.jit(do_not_specialize=["num_queries", "splits"])
def join_kernel(
    PART, LSE, OUT, num_queries, splits, DV: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr
):
    """Mean of the splits' outputs, weighted with their sums.  PART (BH,splits,Nq,Dv), LSE (BH,splits,Nq)"""
    i_bh, i_m = (tl.program_id(0) // num_queries).to(tl.int64), tl.program_id(0) % num_queries
    o_all, o_v = tl.arange(0, SPLITS), tl.arange(0, BV)
    p_row = i_bh * splits * num_queries + i_m
    lse = tl.load(LSE + p_row + o_all * num_queries, mask=o_all < splits, other=NEVER)
    m = finite(tl.max(lse, 0))
    total = tl.sum(tl.exp2(lse - m), 0)
    out = tl.zeros([BV], tl.float32)
    for start in range(0, splits, BS):
        o_s = start + tl.arange(0, BS)
        part = tl.load(LSE + p_row + o_s * num_queries, mask=o_s < splits, other=NEVER)
        p_part = PART + p_row * DV + (o_s * num_queries * DV)[:, None] + o_v[None, :]
        b_o = tl.load(p_part, mask=(o_s < splits)[:, None] & (o_v < DV)[None, :], other=0.0)  # [BS, BV]
        out += tl.sum(b_o * tl.exp2(part - m)[:, None], 0)
    out = out / tl.where(total > 0, total, 1.0)
    tl.store(OUT + tl.program_id(0).to(tl.int64) * DV + o_v, out.to(OUT.dtype.element_ty), mask=o_v < DV)


def decode_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, variance: float | Tensor,
    hard: bool, is_causal: bool, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Forward only: query (B,H,Nq,D) with Nq <= 16, key (B,H,M,Nk,D), or (B,H,Nk,D) with shift (H,M,D) -> (B,H,Nq,Dv).

    Causal is lower-right aligned: the last query sees every key.
    """
    batch, heads, num_queries, width = query.shape
    num_keys, value_width = value.shape[-2:]
    if num_queries > MAX_QUERIES:
        raise ValueError(f"query: expected at most {MAX_QUERIES} queries to decode, got {num_queries}")
    out = query.new_empty(batch, heads, num_queries, value_width)
    if out.numel() == 0 or num_keys == 0:
        return out.zero_()
    components = key.shape[2] if shift is None else shift.shape[1]
    query, key, value = (dense(tensor) for tensor in (query, key, value))
    least = 1 if num_queries == 1 else 16  # a product wants 16 of everything
    block_d, block_v = (max(least, triton.next_power_of_2(size)) for size in (width, value_width))
    # No more keys than half the threads: what there is one of per key then stays where the key's row is reduced.
    block_keys = min(16 * WARPS, max(16, NUMBERS // max(block_d, block_v)))
    programs = PROGRAMS if key_mask is None else MASKED_PROGRAMS
    splits, split_keys = key_splits(batch * heads, num_keys, block_keys, programs, query.device)
    part, lse = out, query.new_empty(batch * heads, splits, num_queries, dtype=torch.float32)
    if splits > 1:
        part = query.new_empty(batch * heads, splits, num_queries, value_width, dtype=torch.float32)

    prior = None if hard or log_prior is None else per_position(log_prior, num_keys)
    mask = None if key_mask is None else dense(key_mask.view(torch.uint8))
    number, own = (1.0, variance.contiguous()) if isinstance(variance, Tensor) else (variance, None)
    shift = None if shift is None else shift.contiguous()
    tensors = query, key, shift, value, prior, own, mask, part, lse, number
    strides = (
        *key.stride()[:2], key.stride(2) if shift is None else 0, key.stride(-2), *value.stride()[:3],
        *((0, 0, 0) if prior is None else prior.stride()), 0 if mask is None else mask.stride(0),
    )  # fmt: skip
    sizes = (width, value_width, block_d, block_v, components, hard)
    grid = (batch * heads * splits,)
    tile_bytes = block_keys * ((components if shift is None else 1) * block_d + block_v) * key.element_size()
    if num_queries == 1:
        # On an H200 with a cache of 32,768 keys: 0.242 ms, masked 0.248; one tile at a time, one stage: 0.26 and 0.28.
        most = 96 * 1024 // tile_bytes
        ahead, stages = (1, max(1, min(STAGES, most))) if key_mask is not None or most < 4 else (2, 2)
        launch(
            one_query_kernel, grid, *tensors, *query.stride()[:2], *strides, heads, num_keys, splits, split_keys,
            *sizes, prior is not None and prior.stride(2) != 0, block_keys, ahead, stages, num_warps=WARPS,
        )  # fmt: skip
    else:
        warps = WARPS if block_d * key.element_size() < 1024 else 8
        launch(
            few_queries_kernel, grid, *tensors, *query.stride()[:3], *strides, heads, num_queries, num_keys, splits,
            split_keys, *sizes, is_causal, dot_precision(), MAX_QUERIES, block_keys, num_warps=warps,
            num_stages=max(1, min(STAGES, 128 * 1024 // tile_bytes)),
        )  # fmt: skip
    if splits > 1:
        launch(
            join_kernel, (batch * heads * num_queries,), part, lse, out, num_queries, splits, value_width, block_v,
            triton.next_power_of_2(splits), JOINED,
        )  # fmt: skip
    return out


def key_splits(heads: int, num_keys: int, block_keys: int, programs: int, device: torch.device) -> tuple[int, int]:
    """How many splits, and how many keys each has: whole tiles, and no split without any."""
    tiles = triton.cdiv(num_keys, block_keys)
    splits = min(programs * multiprocessors(device) // heads, tiles // SPLIT_TILES, MAX_SPLITS)
    split_tiles = triton.cdiv(tiles, max(1, splits))
    return triton.cdiv(tiles, split_tiles), split_tiles * block_keys


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def per_position(log_prior: Tensor, num_keys: int) -> Tensor:
    """(H,M) seen as (H,M,Nk)."""
    return log_prior if log_prior.dim() == 3 else log_prior[..., None].expand(-1, -1, num_keys)
