"""Causal linear attention, phi = elu + 1, Eqn 14: one loop over the tiles of a head.

What linear.py sums over all keys is here a sum over the keys so far: S, z and c_f are carried from tile to tile. Within
a tile, with K and R as there and one c_f for the keys up to its end,

    W_ij = R_i.K_j for j <= i      L_i = R_i.z + sum_j W_ij      h_i = (R_i S + sum_j W_ij v_j) / L_i

Backward, with g_i the gradient of h_i. A loop over the queries computes l_i, the logarithm of L_i with its scale, and
delta_i. A loop over the keys, from the last tile to the first, carries sums U and y over the queries after them. It is
the mirror image: the exponents u_if = min(q_if,0) - l_i have a largest d_f.

    X_if = g_i.S_f + sum_j<=i (g_i.v_j) K_jf     Z_if = z_f + sum_j<=i K_jf
    L_i = sum_f R_if Z_if     delta_i = g_i.h_i = sum_f R_if X_if / L_i     dq_if = R'_if (X_if - delta_i Z_if) / L_i
    Q_if = (1 + max(q_if,0)) exp(u_if - d_f)     U = sum_i Q_i g_i^T     y = sum_i Q_i delta_i
    G_jf = v_j.U_f - y_f + sum_i>=j (g_i.v_j - delta_i) Q_if     dv_j = K_j U + sum_i>=j (K_j.Q_i) g_i
    dk_jrf = K'_jrf G_jf     dlog_prior_jr = sum_f K_jrf G_jf     (K with exp(d_f) in place of exp(-c_f))

How it stays exact: c_f may come from a key after a query, and R_i.K_j then be small for all keys that the query sees.
The result is exact as long as L_i >= 2^-HEADROOM: float32 reaches down to 2^-126, and underflow loses at most
2^(HEADROOM-126) of L_i for each pair, which with 60 bits is nothing. Likewise K_j may exceed 2^HEADROOM where d_f comes
from a query before the key. Tiles beyond these limits take a fallback path: one key (or query) at a time, each scaled
by what is visible. The device decides this, so a CUDA graph can capture it.

B batch, H heads, M components, N positions, D width of a head, Dv width of a value, G = B H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.dispatch import block_width
from mgk.ops.linear_forms import CHUNK
from mgk.ops.operator import operator
from mgk.ops.triton.host import as_bytes, contiguous, dense, empty_like_layout, zero_gradients
from mgk.ops.triton.launch import launch
from mgk.ops.triton.linear import (
    LOWEST,
    component,
    dot_operand,
    fake_gradients,
    features,
    input_gradients,
    largest_exponent,
    load_keys,
    locate,
    mix_keys,
    new_gradients,
    read_weights,
    settings,
    store_head_gradients,
    store_key_gradients,
)
from mgk.ops.triton.loads import active_rows, head_pointer, key_strides, load_active, num_components, offset
from mgk.ops.triton.primitives import LOG2E, NEVER, load_tile, store_tile, zeros_tuple

COUNTS = ("H", "positions")
HEADROOM = 60  # bits


@triton.jit
def load_queries(p_q, start, positions, strides, S: tl.constexpr, ROWS: tl.constexpr):
    """Load mantissas and exponents of a tile of queries [ROWS, BD]. Exponents beyond D are -inf."""
    mantissa, exponent = features(load_tile(p_q, start, positions, strides[2], ROWS, S.D, S.BD, True).to(tl.float32))
    if S.D != S.BD:
        exponent = tl.where((tl.arange(0, S.BD) < S.D)[None, :], exponent, NEVER)
    return mantissa, exponent


@triton.jit
def next_keys(keys, log_prior, o_n, c, first, S: tl.constexpr):
    """Return K of a tile [BN, BD], c_f including its keys, and the first position so far that has a visible key."""
    largest = largest_exponent(keys, log_prior, S)
    c = tl.maximum(c, tl.max(largest, 0))
    first = tl.minimum(first, tl.min(tl.where(tl.max(largest, 1) > NEVER, o_n, 2147483647), 0))
    return dot_operand(mix_keys(keys, log_prior, -c[None, :], S), S.PRECISION), c, first


@triton.jit
def exceeds_headroom(total, o_n, first, HEADROOM: tl.constexpr):
    """Return whether L of a query that sees a key is below 2^-HEADROOM."""
    return tl.min(tl.where(o_n >= first, total, 1.0), 0) < 2.0**-HEADROOM


@triton.jit
def load_key(p_k, SHIFT, p_v, PRIOR, p_mask, i_h, j, positions, sk, sv, S: tl.constexpr):
    """Load the components of key j, as `load_keys` does, and its value [1, BV]."""
    active = active_rows(p_mask, j + tl.arange(0, 1), positions)
    keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, j, positions, sk, S, 1)
    return keys, log_prior, load_active(p_v, j, active, sv[2], 1, S.DV, S.BV).to(tl.float32)


@triton.jit
def read_keys(
    b_o, total, m, mantissa, exponent, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, sk, sv,
    S: tl.constexpr,
):  # fmt: skip
    """Add the keys of a tile, one by one, to what its queries read of the keys before.

    That is b_o [BN, BV] and total [BN], both scaled by exp(-m), where m_i becomes the largest visible exponent.
    """
    for j in range(start, tl.minimum(start + S.BN, positions)):
        keys, log_prior, b_v = load_key(p_k, SHIFT, p_v, PRIOR, p_mask, i_h, j, positions, sk, sv, S)
        for r in tl.static_range(S.M):
            key_mantissa, key_exponent = component(keys, log_prior, r)
            power = tl.where((o_n >= j)[:, None], exponent + key_exponent, NEVER)
            m_new = tl.maximum(m, tl.max(power, 1))
            before = tl.exp(m - m_new)
            weight = tl.sum(mantissa * key_mantissa * tl.exp(power - m_new[:, None]), 1)
            weight = tl.where(o_n >= j, weight, 0.0)
            b_o = b_o * before[:, None] + weight[:, None] * b_v
            total = total * before + weight
            m = m_new
    return b_o, total


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, OUT, sq, sk, sv, so, H, positions, S: tl.constexpr, HEADROOM: tl.constexpr
):
    """Store the output of a head in OUT."""
    _i_bh, i_b, i_h, _first, _length = locate(H, None, positions)
    p_q, p_k, p_v = head_pointer(Q, sq, i_b, i_h), head_pointer(K, sk, i_b, i_h), head_pointer(V, sv, i_b, i_h)
    p_out = head_pointer(OUT, so, i_b, i_h)
    p_mask = offset(MASK, i_b * positions)

    c, z = tl.full([S.BD], LOWEST, tl.float32), tl.zeros([S.BD], tl.float32)
    sums, first = tl.zeros([S.BV, S.BD], tl.float32), positions + S.BN  # S^T; no position has a key yet
    for start in range(0, positions, S.BN):
        o_n = start + tl.arange(0, S.BN)
        active = active_rows(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        b_k, c_new, first = next_keys(keys, log_prior, o_n, c, first, S)
        b_v = dot_operand(load_active(p_v, start, active, sv[2], S.BN, S.DV, S.BV), S.PRECISION)  # [BN, BV]
        mantissa, exponent = load_queries(p_q, start, positions, sq, S, S.BN)

        reads, _, _ = read_weights(mantissa, exponent, c_new[None, :], S.PRECISION)  # R
        before = tl.exp(c - c_new)
        weights = tl.dot(reads, tl.trans(b_k), input_precision=S.PRECISION)  # [BN, BN]
        weights = dot_operand(tl.where(o_n[:, None] >= o_n[None, :], weights, 0.0), S.PRECISION)
        total = tl.sum(reads * (z * before)[None, :], 1) + tl.sum(weights, 1)
        slow, m, c_past = exceeds_headroom(total, o_n, first, HEADROOM), total, c_new
        if slow:
            c_past = c
            reads, _slope, m = read_weights(mantissa, exponent, c[None, :], S.PRECISION)
            total = tl.sum(reads * z[None, :], 1)
        past = dot_operand(sums * tl.exp(c - c_past)[None, :], S.PRECISION)
        b_o = tl.dot(reads, tl.trans(past), input_precision=S.PRECISION)  # [BN, BV]
        if slow:
            b_o, total = read_keys(
                b_o, total, m, mantissa, exponent, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, sk, sv, S
            )
        else:
            b_o = tl.dot(weights, b_v, b_o, input_precision=S.PRECISION)
        b_o *= tl.where(total == 0, 0.0, 1.0 / total)[:, None]
        store_tile(p_out, b_o, start, positions, so[2], S.BN, S.DV, S.BV)
        sums = tl.dot(tl.trans(b_v), b_k, sums * before[None, :], input_precision=S.PRECISION)
        z = z * before + tl.sum(b_k, 0)
        c = c_new


@triton.jit
def sum_keys(x, z, c, b_do, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start, positions, sk, sv, S: tl.constexpr):
    """Add the keys of a tile, one by one, to X, Z and c [BN, BD] of its queries."""
    for j in range(start, tl.minimum(start + S.BN, positions)):
        keys, log_prior, b_v = load_key(p_k, SHIFT, p_v, PRIOR, p_mask, i_h, j, positions, sk, sv, S)
        product = tl.sum(b_do * b_v, 1)  # [BN]: g_i.v_j
        for r in tl.static_range(S.M):
            mantissa, exponent = component(keys, log_prior, r)
            sees = (o_n >= j)[:, None]
            exponent = tl.where(sees, exponent, NEVER)
            c_new = tl.maximum(c, exponent)
            before, b_k = tl.exp(c - c_new), tl.where(sees, mantissa * tl.exp(exponent - c_new), 0.0)
            x, z, c = x * before + b_k * product[:, None], z * before + b_k, c_new
    return x, z, c


@triton.jit(do_not_specialize=COUNTS)
def query_gradient_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, DO, DQ, KNOWN, sq, sk, sv, sdo, sdq, H, positions, S: tl.constexpr,
    HEADROOM: tl.constexpr,
):  # fmt: skip
    """Store dq in DQ, and in KNOWN (2,G,N) l, +inf where a query sees no key, and delta."""
    i_bh, i_b, i_h, _first, _length = locate(H, None, positions)
    p_q, p_k, p_v = head_pointer(Q, sq, i_b, i_h), head_pointer(K, sk, i_b, i_h), head_pointer(V, sv, i_b, i_h)
    p_do, p_dq = head_pointer(DO, sdo, i_b, i_h), head_pointer(DQ, sdq, i_b, i_h)
    p_mask = offset(MASK, i_b * positions)
    p_known = KNOWN + i_bh * positions

    c, z = tl.full([S.BD], LOWEST, tl.float32), tl.zeros([S.BD], tl.float32)
    sums, first = tl.zeros([S.BV, S.BD], tl.float32), positions + S.BN  # S^T; no position has a key yet
    for start in range(0, positions, S.BN):
        o_n = start + tl.arange(0, S.BN)
        active = active_rows(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        b_k, c_new, first = next_keys(keys, log_prior, o_n, c, first, S)
        b_v = dot_operand(load_active(p_v, start, active, sv[2], S.BN, S.DV, S.BV), S.PRECISION)  # [BN, BV]
        b_do = dot_operand(load_tile(p_do, start, positions, sdo[2], S.BN, S.DV, S.BV, True), S.PRECISION)  # [BN, BV]
        mantissa, exponent = load_queries(p_q, start, positions, sq, S, S.BN)

        before, sees = tl.exp(c - c_new), o_n[:, None] >= o_n[None, :]  # [BN, BN]
        b_z = tl.dot(sees.to(tl.float32), b_k, input_precision=S.PRECISION) + (z * before)[None, :]  # [BN, BD]: Z
        reads, slope, m = read_weights(mantissa, exponent, c_new[None, :], "ieee")
        total = tl.sum(reads * b_z, 1)
        slow, c_past = exceeds_headroom(total, o_n, first, HEADROOM), c_new
        if slow:
            c_past = c
        past = dot_operand(sums * tl.exp(c - c_past)[None, :], S.PRECISION)
        b_x = tl.dot(b_do, past, input_precision=S.PRECISION)  # [BN, BD]: X
        if slow:
            zeros = tl.zeros([S.BN, S.BD], tl.float32)
            b_x, b_z, b_c = sum_keys(
                b_x, zeros + z[None, :], zeros + c[None, :], b_do, o_n, p_k, SHIFT, p_v, PRIOR, p_mask, i_h, start,
                positions, sk, sv, S,
            )  # fmt: skip
            reads, slope, m = read_weights(mantissa, exponent, b_c, "ieee")
            total = tl.sum(reads * b_z, 1)
        else:
            pairs = tl.dot(b_do, tl.trans(b_v), input_precision=S.PRECISION)  # [BN, BN]: g_i.v_j
            pairs = dot_operand(tl.where(sees, pairs, 0.0), S.PRECISION)
            b_x = tl.dot(pairs, b_k, b_x, input_precision=S.PRECISION)
        inverse = tl.where(total == 0, 0.0, 1.0 / total)
        delta = tl.sum(reads * b_x, 1) * inverse
        b_dq = slope * (b_x - delta[:, None] * b_z) * inverse[:, None]
        store_tile(p_dq, b_dq, start, positions, sdq[2], S.BN, S.D, S.BD)
        tl.store(p_known + o_n, tl.where(total == 0, float("inf"), m + tl.log(total)), mask=o_n < positions)
        tl.store(p_known + tl.num_programs(0).to(tl.int64) * positions + o_n, delta, mask=o_n < positions)
        sums = tl.dot(tl.trans(b_v), b_k, sums * before[None, :], input_precision=S.PRECISION)
        z = z * before + tl.sum(b_k, 0)
        c = c_new


@triton.jit
def load_query(p_q, p_do, p_log, p_delta, i, o_n, positions, sq, sdo, S: tl.constexpr):
    """Load query i: mantissa [1, BD]; u, -inf for the keys o_n that it does not see [BN, BD]; g_i [1, BV]; delta."""
    mantissa, exponent = load_queries(p_q, i, positions, sq, S, 1)
    b_do = load_tile(p_do, i, positions, sdo[2], 1, S.DV, S.BV, True).to(tl.float32)
    u = tl.where((o_n <= i)[:, None], exponent - tl.load(p_log + i), NEVER)
    return mantissa, u, b_do, tl.load(p_delta + i)


@triton.jit(do_not_specialize=COUNTS)
def key_gradient_kernel(
    Q, K, SHIFT, V, PRIOR, MASK, DO, KNOWN, DK, DV, DPRIOR, PART, sq, sk, sv, sdo, sdk, sdv, H, positions,
    S: tl.constexpr, HEADROOM: tl.constexpr,
):  # fmt: skip
    """Store DK, DV and, for a prior per position, DPRIOR (G,M,N).

    PART (G,M,D+1) takes the sums for the shifts and, in the last column, the priors of a head.
    """
    i_bh, i_b, i_h, _first, _length = locate(H, None, positions)
    p_q, p_k, p_v = head_pointer(Q, sq, i_b, i_h), head_pointer(K, sk, i_b, i_h), head_pointer(V, sv, i_b, i_h)
    p_do, p_dk, p_dv = head_pointer(DO, sdo, i_b, i_h), head_pointer(DK, sdk, i_b, i_h), head_pointer(DV, sdv, i_b, i_h)
    p_mask = offset(MASK, i_b * positions)
    p_dprior, p_log = DPRIOR + i_bh * S.M * positions, KNOWN + i_bh * positions
    p_delta = p_log + tl.num_programs(0).to(tl.int64) * positions

    d, y = tl.full([S.BD], LOWEST, tl.float32), tl.zeros([S.BD], tl.float32)
    sums = tl.zeros([S.BV, S.BD], tl.float32)  # U^T
    dshift, dprior = zeros_tuple([S.BD], S.M), zeros_tuple([S.BN], S.M)
    for back in range(0, positions, S.BN):
        start = (tl.cdiv(positions, S.BN) - 1) * S.BN - back
        o_n = start + tl.arange(0, S.BN)
        active = active_rows(p_mask, o_n, positions)
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        b_v = dot_operand(load_active(p_v, start, active, sv[2], S.BN, S.DV, S.BV), S.PRECISION)  # [BN, BV]
        b_do = dot_operand(load_tile(p_do, start, positions, sdo[2], S.BN, S.DV, S.BV, True), S.PRECISION)  # [BN, BV]
        mantissa, exponent = load_queries(p_q, start, positions, sq, S, S.BN)
        exponent -= tl.load(p_log + o_n, mask=o_n < positions, other=float("inf"))[:, None]  # u
        delta = tl.load(p_delta + o_n, mask=o_n < positions, other=0.0)

        d_new = tl.maximum(d, tl.max(exponent, 0))
        before, seen = tl.exp(d - d_new), o_n[:, None] <= o_n[None, :]  # [BN, BN], keys down
        largest = largest_exponent(keys, log_prior, S) + d_new[None, :]
        slow, d_past = tl.max(tl.max(largest, 1), 0) * LOG2E > HEADROOM, d_new
        if slow:
            d_past = d
        past = dot_operand(sums * tl.exp(d - d_past)[None, :], S.PRECISION)
        shares = dot_operand(mantissa * tl.exp(exponent - d_new[None, :]), S.PRECISION)  # Q

        d_phi = tl.dot(b_v, past, input_precision=S.PRECISION) - (y * tl.exp(d - d_past))[None, :]  # [BN, BD]: G
        b_d = tl.zeros([S.BN, S.BD], tl.float32) + d_past[None, :]
        if slow:
            for i in range(start, tl.minimum(start + S.BN, positions)):
                one, u, b_doi, delta_i = load_query(p_q, p_do, p_log, p_delta, i, o_n, positions, sq, sdo, S)
                b_d_new = tl.maximum(b_d, u)
                pair = tl.sum(b_v * b_doi, 1) - delta_i
                d_phi = d_phi * tl.exp(b_d - b_d_new) + one * tl.exp(u - b_d_new) * pair[:, None]
                b_d = b_d_new
        else:
            pairs = tl.dot(b_v, tl.trans(b_do), input_precision=S.PRECISION) - delta[None, :]
            pairs = dot_operand(tl.where(seen, pairs, 0.0), S.PRECISION)
            d_phi = tl.dot(pairs, shares, d_phi, input_precision=S.PRECISION)

        b_k = dot_operand(mix_keys(keys, log_prior, d_past[None, :], S), S.PRECISION)
        b_dv = tl.dot(b_k, tl.trans(past), input_precision=S.PRECISION)
        if slow:
            for i in range(start, tl.minimum(start + S.BN, positions)):
                one, u, b_doi, _ = load_query(p_q, p_do, p_log, p_delta, i, o_n, positions, sq, sdo, S)
                b_dv += tl.sum(one * mix_keys(keys, log_prior, u, S), 1)[:, None] * b_doi  # no share is above 1
        else:
            weights = tl.dot(b_k, tl.trans(shares), input_precision=S.PRECISION)
            weights = dot_operand(tl.where(seen, weights, 0.0), S.PRECISION)
            b_dv = tl.dot(weights, b_do, b_dv, input_precision=S.PRECISION)
        b_dv = tl.where(active[:, None], b_dv, 0.0)
        store_tile(p_dv, b_dv, start, positions, sdv[2], S.BN, S.DV, S.BV)
        sums = tl.dot(tl.trans(b_do), shares, sums * before[None, :], input_precision=S.PRECISION)
        y = y * before + tl.sum(shares * delta[:, None], 0)
        d = d_new

        # Load the keys again instead of holding them in registers.
        keys, log_prior = load_keys(p_k, SHIFT, PRIOR, active, i_h, start, positions, sk, S, S.BN)
        dshift, dprior = store_key_gradients(
            keys, log_prior, b_d, d_phi, dshift, dprior, p_dk, p_dprior, SHIFT, start, positions, positions, sdk, S
        )

    store_head_gradients(PART, i_bh, dshift, dprior, S)


def scan_attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    """Query (B,H,N,D), key (B,H,M,N,D), or (B,H,N,D) with shift (H,M,D), value (B,H,N,Dv) -> (B,H,N,Dv)."""
    output: Tensor = scan_forward(
        dense(query), dense(key), contiguous(shift), dense(value), contiguous(log_prior), contiguous(key_mask)
    )
    return output


def tile(query: Tensor, value: Tensor, components: int, backward: bool) -> dict[str, int]:
    """Return the positions of a tile, as many as fit into the registers, and the launch options."""
    width = max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    fits = query.dtype != torch.float32 and components <= 2 and width <= (16 if backward else 64)
    return {"BN": 32 if fits else 16, "num_warps": 4 if width == 16 else 8, "num_stages": 1}


@operator("triton_scan")
def scan_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    batch, heads, positions, _ = query.shape
    output = scan_result(query, key, shift, value)
    if output.numel():
        own = tile(query, value, num_components(key, shift), False)
        launch(
            forward_kernel, (batch * heads,), query, key, shift, value, log_prior, as_bytes(key_mask), output,
            query.stride()[:3], key_strides(key), value.stride()[:3], output.stride()[:3], heads, positions,
            **settings(query, key, shift, value, log_prior, own), HEADROOM=HEADROOM,
        )  # fmt: skip
    return output


@operator("triton_scan_backward")
def scan_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `linear_backward` returns."""
    (batch, heads, positions, width), components = query.shape, num_components(key, shift)
    own = tile(query, value, components, True)
    how = {**settings(query, key, shift, value, log_prior, own), "HEADROOM": HEADROOM}
    grad_query, grad_key, grad_value, grad_prior = new_gradients(query, key, value, log_prior, None)
    known = query.new_empty(2, batch * heads, positions, dtype=torch.float32)
    part = known.new_empty(batch, heads, components, width + 1)
    given = query, key, shift, value, log_prior, as_bytes(key_mask), grad
    strides = query.stride()[:3], key_strides(key), value.stride()[:3], grad.stride()[:3]
    launch(
        query_gradient_kernel, (batch * heads,), *given, grad_query, known, *strides, grad_query.stride()[:3], heads,
        positions, **how,
    )  # fmt: skip
    launch(
        key_gradient_kernel, (batch * heads,), *given, known, grad_key, grad_value, grad_prior, part, *strides,
        key_strides(grad_key), grad_value.stride()[:3], heads, positions, **how,
    )  # fmt: skip
    return grad_query, grad_key, grad_value, part.sum(0), grad_prior


@scan_forward.register_fake
def scan_result(query: Tensor, key: Any, shift: Any, value: Tensor, *_: Any) -> Tensor:
    """Allocate the output."""
    return empty_like_layout(query, *query.shape[:3], value.shape[-1])


scan_backward.register_fake(fake_gradients)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def scan_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, _ = ctx.saved_tensors
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior), None
    return *input_gradients(scan_backward(dense(grad), *ctx.saved_tensors), shift, log_prior), None


scan_forward.register_autograd(scan_autograd, setup_context=keep_for_backward)


def scan_flops(query: tuple[int, ...], value: tuple[int, ...]) -> int:
    """Count as `mgk.ops.cost` does, with the chunks of the blockwise implementation."""
    batch, heads, positions, width = query
    sizes = [min(CHUNK, positions - start) for start in range(0, positions, CHUNK)]
    columns = value[-1] + 1  # one for the denominator
    return batch * heads * sum(4 * width * columns * size + 2 * (width + columns) * size**2 for size in sizes)


@register_flop_formula(torch.ops.mgk.triton_scan)
def _(query: tuple[int, ...], key: Any, shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return scan_flops(query, value)


@register_flop_formula(torch.ops.mgk.triton_scan_backward)
def _(grad: Any, query: tuple[int, ...], key: Any, shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 3 * scan_flops(query, value)
