"""Attention of one or a few queries to a long cache. The keys are split between programs; a second kernel joins them.

Reading the cache takes the time, so every key and value is read once and nothing is computed in advance. For one query
a matrix product does not pay: the kernel computes the distance |q - k_jr|^2 directly. For a few queries it uses a
product, and takes the biases -|k_jr|^2 / 2 s2_r from the tile that is loaded anyway.

With `Pages` each row of the batch has a length of its own, and its keys are in pages of a pool. A kernel loads a whole
tile from one page where tiles cannot cross pages, and otherwise looks up the page of every key.

B batch, P pages, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.dispatch import MAX_DECODE_QUERIES
from mgk.ops.options import Options, Pages
from mgk.ops.triton.host import dense, dot_precision
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
from mgk.ops.triton.primitives import (
    LOG2E,
    NEVER,
    finite,
    not_hidden,
    online_softmax,
    reached,
    spread_infinities,
    widened,
)

PROGRAMS, MASKED_PROGRAMS = 8, 32  # per multiprocessor: several tiles are loaded while one is computed
SPLIT_TILES = 4  # key tiles of a split at least, or joining costs more than splitting gains
MAX_SPLITS = 256
JOINED = 16  # splits joined at a time
NUMBERS, WARPS, STAGES = 4096, 4, 3  # numbers in a tile of keys or of values


@triton.jit
def all_visible(p_mask, begin, end, BLOCK: tl.constexpr):
    """Return whether the mask hides no key from `begin` to `end`."""
    rest = begin + (end - begin) // BLOCK * BLOCK
    o_n = rest + tl.arange(0, BLOCK)
    least = tl.load(p_mask + o_n, mask=o_n < end, other=1)
    for start in range(begin, rest, BLOCK):
        least = tl.minimum(least, tl.load(p_mask + start + tl.arange(0, BLOCK)))  # 16 bytes at once
    return tl.min(least.to(tl.int32), 0) > 0


@triton.jit
def split_and_head(splits, GROUP: tl.constexpr):
    """Which split of the keys of which query head this program reads: the GROUP heads of a split are neighbours."""
    i_item = tl.program_id(0) // GROUP
    return i_item % splits, i_item // splits * GROUP + tl.program_id(0) % GROUP


@triton.jit
def load_keys(p_base, p_table, start, active, strides, WIDTH: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    """Load the keys or values from `start` on, of one head, or of one head in the pages of a row.  # [BN, BLOCK]"""
    if S.PAGE == 0:
        tile = load_active(p_base, start, active, strides[2], S.BN, WIDTH, BLOCK)
    elif S.WHOLE:  # a tile lies in one page
        p_page = p_base + tl.load(p_table + start // S.PAGE).to(tl.int64) * strides[0]
        tile = load_active(p_page, start % S.PAGE, active, strides[2], S.BN, WIDTH, BLOCK)
    else:
        o_n, o_column = start + tl.arange(0, S.BN), tl.arange(0, BLOCK)
        there = o_n >= 0 if active is None else active
        page = tl.load(p_table + o_n // S.PAGE, mask=there, other=0).to(tl.int64)
        p_row = p_base + (page * strides[0] + o_n % S.PAGE * strides[2])
        tile = tl.load(p_row[:, None] + o_column[None, :], mask=there[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def largest_of(x, y):
    """The larger one, NaN if one is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def one_query_tiles(
    m, l, acc, p_k, p_v, p_prior, p_mask, p_table, centre, scale, bias, begin, end, num_keys, sk, sv, sp,
    SHIFTED: tl.constexpr, CHECK: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end`, AHEAD tiles at a time.

    Each of the BN positions of a tile has its own maximum m, sum l and row of values acc. CHECK: keys may be masked or
    beyond the end.
    """
    for first in tl.range(begin, end, S.BN * AHEAD, num_stages=STAGES):
        logits, values, best = (), (), tl.full([S.BN], NEVER, tl.float32)
        for i in tl.static_range(AHEAD):
            start = first + i * S.BN
            o_n = start + tl.arange(0, S.BN)
            active = active_rows(p_mask, o_n, end) if CHECK else None
            b_k = load_keys(p_k, p_table, start, active, sk, S.D, S.BD, S)  # [BN, BD]
            values = values + (load_keys(p_v, p_table, start, active, sv, S.DV, S.BV, S),)  # [BN, BV]
            for r in tl.static_range(S.M):
                if not SHIFTED and r > 0:
                    p_kr = p_k + tl.cast(sk[3], tl.int64) * r
                    b_k = load_keys(p_kr, p_table, start, active, sk, S.D, S.BD, S)  # [BN, BD]
                if S.SOFTMAX:
                    x = not_hidden(tl.sum(widened(b_k) * centre[r][None, :], 1) * (-2.0 * scale[r]))
                else:
                    difference = widened(b_k) - centre[r][None, :]
                    x = not_hidden(tl.sum(difference * difference, 1) * scale[r]) + bias[r]
                x = add_log_prior(x, p_prior, sp, r, o_n, num_keys)
                if CHECK:
                    x = tl.where(active, x, NEVER)
                logits = logits + (x,)
                best = tl.maximum(best, x)
        m, m_safe, alpha = online_softmax(best, m)
        l, acc = l * alpha, acc * alpha[:, None]
        for i in tl.static_range(AHEAD):
            p, largest = tl.zeros([S.BN], tl.float32), logits[i * S.M]
            for r in tl.static_range(S.M):
                if S.HARD:
                    largest = largest_of(largest, logits[i * S.M + r])
                else:
                    p += tl.exp2(logits[i * S.M + r] - m_safe)
            if S.HARD:
                p = tl.exp2(largest - m_safe)
            l += p
            acc += p[:, None] * widened(values[i])
    return m, l, acc


@triton.jit(do_not_specialize=["num_keys", "splits"])
def one_query_kernel(
    Q, K, SHIFT, V, PRIOR, VARIANCE, MASK, LENGTHS, TABLE, OUT, LSE, variance, sq, sk, sv, sp, stride_mask,
    stride_table, H, num_keys, splits, split_keys, POSITIONS: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of one split. POSITIONS: the prior is one per position.

    Query heads that read the same keys do so in neighbouring programs, at about the same time. The mask of a split is
    read first: checking it before every tile would delay the loading of that tile.
    """
    i_s, i_bh = split_and_head(splits, S.GROUP)
    i_b, i_h, i_component = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh % H * S.M
    o_d, o_v = tl.arange(0, S.BD), tl.arange(0, S.BV)
    i_pool = i_b * 0 if S.PAGE else i_b  # all rows share the pages
    p_k, p_v = head_pointer(K, sk, i_pool, i_h // S.GROUP), head_pointer(V, sv, i_pool, i_h // S.GROUP)
    p_table = offset(TABLE, i_b * stride_table)
    p_head_prior = offset(PRIOR, i_h * sp[0])
    b_q = tl.load(head_pointer(Q, sq, i_b, i_h) + o_d, mask=o_d < S.D, other=0.0).to(tl.float32)

    centre, scale, bias = (), (), ()  # q - b_r: its distance to k_j is that of q to k_jr
    for r in tl.static_range(S.M):
        b_g = b_q
        if SHIFT is not None:
            b_g = b_q - load_shift(SHIFT, i_component + r, S.D, S.BD)
        centre = centre + (b_g,)
        scale = scale + (-0.5 * component_scale(variance, VARIANCE, i_component + r),)
        if PRIOR is not None and not POSITIONS:
            bias = bias + (tl.load(p_head_prior + r * sp[1]).to(tl.float32) * LOG2E,)
        else:
            bias = bias + (0.0,)

    begin = i_s * split_keys
    if LENGTHS is not None:
        num_keys = tl.load(LENGTHS + i_b)
        if S.WINDOW:
            begin += tl.maximum(num_keys - S.WINDOW, 0)
    end = tl.maximum(tl.minimum(begin + split_keys, num_keys), begin)  # a shorter row has empty splits
    full = begin + (end - begin) // (S.BN * AHEAD) * (S.BN * AHEAD)
    p_mask = offset(MASK, i_b * stride_mask)
    p_prior = p_head_prior if POSITIONS else None
    if MASK is not None:
        if not all_visible(p_mask, begin, end, 2048):
            full = begin
    m, l = tl.full([S.BN], NEVER, tl.float32), tl.zeros([S.BN], tl.float32)
    acc = tl.zeros([S.BN, S.BV], tl.float32)
    m, l, acc = one_query_tiles(
        m, l, acc, p_k, p_v, p_prior, None, p_table, centre, scale, bias, begin, full, num_keys, sk, sv, sp,
        SHIFT is not None, False, AHEAD, STAGES, S,
    )  # fmt: skip
    m, l, acc = one_query_tiles(
        m, l, acc, p_k, p_v, p_prior, p_mask, p_table, centre, scale, bias, full, end, num_keys, sk, sv, sp,
        SHIFT is not None, True, 1, 1, S,
    )  # fmt: skip

    m_all = tl.max(m, 0)
    weight = tl.exp2(m - finite(m_all))
    l_all = tl.sum(l * weight, 0)
    l_all = tl.where(l_all == 0, 1.0, l_all)  # without keys: zeros, and -inf as their logarithm
    out = tl.sum(acc * weight[:, None], 0) / l_all
    i_part = i_bh.to(tl.int64) * splits + i_s
    tl.store(OUT + i_part * S.DV + o_v, out.to(OUT.dtype.element_ty), mask=o_v < S.DV)
    tl.store(LSE + i_part, m_all + tl.log2(l_all))


@triton.jit(do_not_specialize=["num_keys", "num_queries", "splits"])
def few_queries_kernel(
    Q, K, SHIFT, V, PRIOR, VARIANCE, MASK, LENGTHS, TABLE, OUT, LSE, variance, sq, sk, sv, sp, stride_mask,
    stride_table, H, num_queries, num_keys, splits, split_keys, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of one split with l[i,j,r] = q_i.k_j / s2_r + row[i,r] + bias[j,r]."""
    i_s, i_bh = split_and_head(splits, S.GROUP)
    i_b, i_h, i_component = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh % H * S.M
    o_m, o_v = tl.arange(0, BM), tl.arange(0, S.BV)
    i_pool = i_b * 0 if S.PAGE else i_b
    p_k, p_v = head_pointer(K, sk, i_pool, i_h // S.GROUP), head_pointer(V, sv, i_pool, i_h // S.GROUP)
    p_table = offset(TABLE, i_b * stride_table)
    p_prior = offset(PRIOR, i_h * sp[0])
    p_mask = offset(MASK, i_b * stride_mask)
    b_q = load_active(head_pointer(Q, sq, i_b, i_h), 0, o_m < num_queries, sq[2], BM, S.D, S.BD)  # [BM, BD]
    b_q = spread_infinities(b_q)

    shift, row, scale = (), (), ()
    for r in tl.static_range(S.M):
        c = component_scale(variance, VARIANCE, i_component + r)
        b_b = tl.zeros([S.BD], tl.float32)
        log_u = tl.zeros([BM], tl.float32)
        if SHIFT is not None:
            b_b = load_shift(SHIFT, i_component + r, S.D, S.BD)
            log_u += tl.sum(b_q.to(tl.float32) * b_b[None, :], 1) * c
        if VARIANCE is not None:  # otherwise |q_i|^2 is the same for all components and cancels
            log_u -= tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) * (0.5 * c)
        shift, row, scale = shift + (b_b,), row + (log_u,), scale + (c,)

    m, l = tl.full([BM], NEVER, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, S.BV], tl.float32)
    begin = i_s * split_keys
    if LENGTHS is not None:
        num_keys = tl.load(LENGTHS + i_b)
        if S.WINDOW:
            begin += tl.maximum(num_keys - num_queries + 1 - S.WINDOW, 0)
    diagonal = num_keys - num_queries
    for start in range(begin, tl.minimum(begin + split_keys, num_keys), S.BN):
        o_n = start + tl.arange(0, S.BN)
        active = active_rows(p_mask, o_n, num_keys)
        b_k = load_keys(p_k, p_table, start, active, sk, S.D, S.BD, S)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        logits, best = (), tl.full([BM, S.BN], NEVER, tl.float32)
        for r in tl.static_range(S.M):
            if SHIFT is None and r > 0:
                p_kr = p_k + tl.cast(sk[3], tl.int64) * r
                b_k = load_keys(p_kr, p_table, start, active, sk, S.D, S.BD, S)  # [BN, BD]
                s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
            b_kr = b_k.to(tl.float32) + shift[r][None, :]
            bias = not_hidden(tl.sum(b_kr * b_kr, 1) * (0.0 if S.SOFTMAX else -0.5 * scale[r]))
            bias = add_log_prior(bias, p_prior, sp, r, o_n, num_keys)
            x = tl.where(active[None, :], s * scale[r] + row[r][:, None] + bias[None, :], NEVER)
            if CAUSAL:
                x = tl.where(reached(o_m, o_n, diagonal, S.WINDOW, False), x, NEVER)
            logits = logits + (x,)
            best = largest_of(best, x)
        m, m_safe, alpha = online_softmax(tl.max(best, 1), m)
        if S.HARD:
            p = tl.exp2(best - m_safe[:, None])
        else:
            p = tl.exp2(logits[0] - m_safe[:, None])
            for r in tl.static_range(1, S.M):
                p += tl.exp2(logits[r] - m_safe[:, None])
        l = l * alpha + tl.sum(p, 1)
        b_v = load_keys(p_v, p_table, start, active, sv, S.DV, S.BV, S)  # [BN, BV]
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)

    i_part = (i_bh.to(tl.int64) * splits + i_s) * num_queries
    l = tl.where(l == 0, 1.0, l)
    m_out = (o_m < num_queries)[:, None] & (o_v < S.DV)[None, :]
    p_out = OUT + i_part * S.DV + o_m[:, None] * S.DV + o_v[None, :]
    tl.store(p_out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=m_out)
    tl.store(LSE + i_part + o_m, m + tl.log2(l), mask=o_m < num_queries)


@triton.jit(do_not_specialize=["num_queries", "splits"])
def join_kernel(
    PART, LSE, OUT, num_queries, splits, DV: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr
):
    """Average the outputs of the splits, weighted by their sums.  PART (BH,splits,Nq,Dv), LSE (BH,splits,Nq)"""
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
    out = out / tl.where(total == 0, 1.0, total)
    tl.store(OUT + tl.program_id(0).to(tl.int64) * DV + o_v, out.to(OUT.dtype.element_ty), mask=o_v < DV)


def decode_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, pages: Pages | None = None,
    softmax: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward only: query (B,H,Nq,D) with Nq <= 16, key (B,G,M,Nk,D), or (B,G,Nk,D) with shift (H,M,D) -> (B,H,Nq,Dv).

    Also the log of the row sums (B,H,Nq), empty if it is not asked for. The causal mask is lower-right aligned: the
    last query sees every key. With `pages`, key (P,G,[M,]page,D) and value (P,G,page,Dv), without a key mask.
    `softmax`: the score of a key (B,G,1,Nk,D) is its product with the query, not their distance.
    """
    if pages is None:
        key, value, options = within_window(query.shape[2], key, value, options)
    log_prior, variance, (is_causal, window, key_mask, _), hard, _, return_lse = options
    batch, heads, num_queries, width = query.shape
    value_width, num_keys = value.shape[-1], value.shape[-2] if pages is None else pages.max_k
    if num_queries > MAX_DECODE_QUERIES:
        raise ValueError(f"query: expected at most {MAX_DECODE_QUERIES} queries to decode, got {num_queries}")
    out = query.new_empty(batch, heads, num_queries, value_width)
    if out.numel() == 0 or num_keys == 0:
        return out.zero_(), out.new_full(out.shape[:3] if return_lse else (0,), -torch.inf, dtype=torch.float32)
    query, key, value = (dense(tensor) for tensor in (query, key, value))
    least = 1 if num_queries == 1 else 16  # a product needs at least 16 rows and columns
    block_d, block_v = (max(least, triton.next_power_of_2(size)) for size in (width, value_width))
    # At most half as many keys as threads: vectors over keys then stay in the threads that reduce the keys' rows.
    block_keys = min(16 * WARPS, max(16, NUMBERS // max(block_d, block_v)))
    programs = PROGRAMS if key_mask is None else MASKED_PROGRAMS
    read = num_keys if pages is None or window is None else min(num_keys, window + num_queries - 1)
    splits, split_keys = key_splits(batch * heads, read, block_keys, programs, query.device)
    part, lse = out, query.new_empty(batch * heads, splits, num_queries, dtype=torch.float32)
    if splits > 1:
        part = query.new_empty(batch * heads, splits, num_queries, value_width, dtype=torch.float32)

    prior = None if hard or log_prior is None else per_position(log_prior, num_keys)
    mask = None if key_mask is None else dense(key_mask.view(torch.uint8))
    number, per_component = split_variance(variance)
    shift = None if shift is None else shift.contiguous()
    components = num_components(key, shift)
    begins_inside = window is not None and (num_queries > 1 or pages is not None)
    page = 0 if pages is None else value.shape[-2]
    sizes = constants(
        D=width, DV=value_width, BD=block_d, BV=block_v, M=components, HARD=hard, BN=block_keys,
        GROUP=heads // key.shape[1], WINDOW=window if begins_inside else 0, PAGE=page,
        WHOLE=page % block_keys == 0 and not begins_inside, SOFTMAX=softmax,
    )  # fmt: skip
    used, table = (None, None) if pages is None else (pages.used.contiguous(), dense(pages.table))
    arguments = (
        query, key, shift, value, prior, per_component, mask, used, table, part, lse, number, query.stride()[:3],
        key_strides(key), value.stride()[:3], NO_STRIDES if prior is None else prior.stride(),
        0 if mask is None else mask.stride(0), 0 if table is None else table.stride(0),
    )  # fmt: skip
    tile_bytes = block_keys * ((components if shift is None else 1) * block_d + block_v) * key.element_size()
    if num_queries == 1:
        # On an H200 with a cache of 32,768 keys: 0.242 ms, masked 0.248; one tile at a time, one stage: 0.26 and 0.28.
        most = 96 * 1024 // tile_bytes
        ahead, stages = (1, max(1, min(STAGES, most))) if key_mask is not None or most < 4 else (2, 2)
        launch(
            one_query_kernel, (batch * heads * splits,), *arguments, heads, num_keys, splits, split_keys,
            prior is not None and prior.stride(2) != 0, ahead, stages, sizes, num_warps=WARPS,
        )  # fmt: skip
    else:
        launch(
            few_queries_kernel, (batch * heads * splits,), *arguments, heads, num_queries, num_keys, splits, split_keys,
            is_causal, dot_precision(query), MAX_DECODE_QUERIES, sizes,
            num_warps=WARPS if block_d * key.element_size() < 1024 else 8,
            num_stages=max(1, min(STAGES, 128 * 1024 // tile_bytes)),
        )  # fmt: skip
    if splits > 1:
        launch(
            join_kernel, (batch * heads * num_queries,), part, lse, out, num_queries, splits, value_width, block_v,
            triton.next_power_of_2(splits), JOINED,
        )  # fmt: skip
    if not return_lse:
        return out, lse.new_empty(0)
    natural = (lse / LOG2E.value).logsumexp(1).view(batch, heads, num_queries)
    if num_queries > 1 and per_component is None and not softmax:  # one query is computed from distances, norm included
        norm = query.float().square().sum(-1) / (2 * number)
        natural = (natural - norm).masked_fill(natural == -torch.inf, -torch.inf)
    return out, natural


def within_window(num_queries: int, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Options]:
    """Leave out the keys that the windows of all queries hide, as views."""
    prior, visibility = options.log_prior, options.visibility
    hidden = 0 if visibility.window is None else value.shape[2] - visibility.window - num_queries + 1
    if hidden <= 0:
        return key, value, options
    if prior is not None and prior.dim() == 3:
        prior = prior[..., hidden:]
    if visibility.key_mask is not None:
        visibility = visibility._replace(key_mask=visibility.key_mask[:, hidden:])
    return key[..., hidden:, :], value[:, :, hidden:], options._replace(log_prior=prior, visibility=visibility)


def key_splits(heads: int, num_keys: int, block_keys: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return the number of splits and of keys of a split: full tiles, and no split is empty."""
    tiles = triton.cdiv(num_keys, block_keys)
    splits = min(programs * multiprocessors(device) // heads, tiles // SPLIT_TILES, MAX_SPLITS)
    split_tiles = triton.cdiv(tiles, max(1, splits))
    return triton.cdiv(tiles, split_tiles), split_tiles * block_keys


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
