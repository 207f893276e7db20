"""The arithmetic of linear attention with mixture keys, Eqn 14, in dense, parallel, chunked and recurrent form.

Once the features of the M components of a position are mixed, M plays no further part. The forms differ in which keys
a query sees:

    dense       the matrix of weights; the reference
    parallel    all keys: add up S and z, then read them with every query
    chunked     causal: read the sums of earlier chunks, add the pairs within the chunk, carry the sums on
    recurrent   the chunked step for any number of new tokens; the caller keeps the sums (`LinearState`)
    exported    causal: all chunks at once, in float64, for a program that takes any length

How results stay exact: features are stored as mantissa * exp(exponent) (`ScaledFeatures`). The sums of feature f are
scaled by exp(-c_f), where c_f is the largest exponent of the keys they hold. A query reads them with the exponent
s_if + c_f - m_i, where m_i, the largest of these over f, cancels in the quotient. So the largest term of every sum has
the size of its mantissa, and terms that underflow are negligible beside it. Exponents are constants: gradients flow
through the mantissas alone, and are exact because mantissa * exp(exponent) does not depend on how it is split.

c_f belongs to a sum, not to a key or to the sequence, so that a causal query that sees small keys only is right
whatever follows. Within a chunk, one c_f suffices unless a query would lose its keys beside later ones. In that case
the pairs are taken as (second half, first half), (second quarter, first quarter), ..., each with its own c_f. The
carried sums are rescaled when c_f grows, so the chunked and recurrent forms agree.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value, F width of the features.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.ops import arguments as check
from mgk.ops.common import compute_dtype, matmul, shifted_keys, without_autocast, zero_masked
from mgk.ops.feature_maps import FeatureMap, ScaledFeatures, apply_feature_map, dpfp, remove_zeros

CHUNK = 128
HEADROOM = 300.0  # with exp(300) in queries and keys, exponents may differ by SPREAD in float64
SPREAD = 900.0
NEGLIGIBLE = -100.0  # exp(-100) is below the rounding error of float32 by 30 orders of magnitude


class LinearState(NamedTuple):
    """The sums over the keys seen so far: S = numerator * exp(exponent), z = denominator * exp(exponent).

    numerator (B,H,F,Dv), denominator and exponent (B,H,F); float32 for half precision. Its size is constant.
    """

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor


def prepare(
    query: Tensor, key: Tensor, shift: Tensor | None, prior: Tensor | None, mask: Tensor | None, phi: FeatureMap,
    with_state: bool = False,
) -> tuple[ScaledFeatures, ScaledFeatures]:  # fmt: skip
    """Features of the queries and of the mixed keys, (B,H,N,F)."""
    dtype = compute_dtype(query.dtype)
    key = zero_masked(key, mask)
    key = key.to(dtype) if shift is None else shifted_keys(key, shift)
    # An infinity counts as NaN: the feature of minus infinity would be zero, and nobody would see it.
    query, key = (x.masked_fill(x.isinf(), torch.nan) for x in (query.to(dtype)[:, :, None], key))
    queries, keys = apply_feature_map(phi, query), apply_feature_map(phi, key)
    if phi is dpfp and (with_state or may_underflow(add_prior(keys.exponent[..., :1], prior))):
        queries, keys = remove_zeros(queries), remove_zeros(keys)  # only if needed: exp(-inf) is slow on a CPU
    return mix(queries, None, None), mix(keys, prior, mask)


def with_ones(value: Tensor, mask: Tensor | None, query: Tensor) -> Tensor:
    """Values with a column of ones, (B,H,Nk,Dv+1), whose sum is the denominator: the last column of every sum."""
    return pad(zero_masked(value, mask).to(compute_dtype(query.dtype)), (0, 1), value=1.0)


def add_prior(exponent: Tensor, log_prior: Tensor | None) -> Tensor:
    """Add the log prior, uniform if None, to exponents (B,H,M,N,F)."""
    if log_prior is None:
        return exponent - math.log(exponent.shape[2])
    log_prior = log_prior.to(exponent.dtype)
    return exponent + (log_prior[..., None, None] if log_prior.dim() == 2 else log_prior[..., None])


def may_underflow(exponent: Tensor) -> bool:
    """Whether some exponents are so far apart that one may hide another, or their values cannot be read."""
    if not (check.readable(exponent) and exponent.numel()):
        return True
    return not bool(exponent.amax() - exponent.amin() < half_range(exponent.dtype))


def half_range(dtype: torch.dtype) -> float:
    """Half the range of the exponents of normal numbers up to 1."""
    return -math.log(torch.finfo(dtype).tiny) / 2


def mix(features: ScaledFeatures, log_prior: Tensor | None, key_mask: Tensor | None) -> ScaledFeatures:
    """sum_r prior[j,r] phi(k_jr): (B,H,M,N,F) -> (B,H,N,F), with constant exponents; -inf where no term is left."""
    exponent = add_prior(features.exponent, log_prior)
    largest = exponent.detach().amax(2)
    finite = largest.masked_fill(largest == -torch.inf, 0)
    mantissa = (features.mantissa * (exponent - finite[:, :, None]).exp()).sum(2)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        mantissa, largest = mantissa.masked_fill(hidden, 0), largest.masked_fill(hidden, -torch.inf)
    return ScaledFeatures(mantissa, largest)


def key_scale(exponent: Tensor) -> Tensor:
    """c_f: the largest exponent of the keys, (..., N, F) -> (..., 1, F). Finite, so that differences are numbers.

    NaN of one key must not reach queries that do not see it.
    """
    floor = torch.finfo(exponent.dtype).min / 4
    if not exponent.shape[-2]:
        return exponent.new_full((*exponent.shape[:-2], 1, exponent.shape[-1]), floor)
    return exponent.nan_to_num(nan=floor, posinf=torch.inf, neginf=-torch.inf).amax(-2, keepdim=True).clamp(min=floor)


def query_scale(exponent: Tensor) -> Tensor:
    """m_i: the largest exponent that a query reads, (..., N, F) -> (..., N, 1). Finite, and above an empty c_f."""
    return exponent.amax(-1, keepdim=True).clamp(min=torch.finfo(exponent.dtype).min / 8)


def quotient(sums: Tensor) -> Tensor:
    """phi(q)^T S / phi(q)^T z, from (B,H,Nq,Dv+1). Output and gradients are zero where the denominator is zero."""
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    empty = denominator == 0
    return torch.where(empty, 0, numerator / denominator.masked_fill(empty, 1))


def dense(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, is_causal: bool) -> Tensor:
    """The reference: sum_j phi(q_i).phi(k_j) v_j with explicit weights. Queries that see the same keys go together."""
    num_queries, num_keys = query.mantissa.shape[2], value.shape[2]
    rows = [slice(i, i + 1) for i in range(max(1, num_queries))] if is_causal else [slice(0, num_queries)]
    sums = []
    for row in rows:
        seen = slice(0, max(0, row.stop + num_keys - num_queries) if is_causal else num_keys)
        reads, keys = query.at(row), key.at(seen)
        c = key_scale(keys.exponent)
        m = query_scale(reads.exponent + c)
        weights = reads.times_exp(c - m) @ keys.times_exp(-c).mT
        sums.append(weights @ value[:, :, seen])
    return torch.cat(sums, 2)


def blockwise(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, is_causal: bool) -> Tensor:
    """The parallel form, or with a causal mask the chunked form: what the queries read, (B,H,Nq,Dv+1)."""
    num_queries, num_keys = query.mantissa.shape[2], value.shape[2]
    shared = min(num_queries, num_keys) if is_causal else 0  # positions that have a query and a key
    earlier, later = slice(0, num_keys - shared), slice(num_keys - shared, None)
    sums, exponent = add_keys(key.at(earlier), value[:, :, earlier], *state_sums(None, query, value))
    if not is_causal:
        m = query_scale(query.exponent + exponent)
        return matmul(query.times_exp(exponent - m), sums)
    reads = query.at(slice(num_queries - shared, None))
    output, _, _ = causal(reads, key.at(later), value[:, :, later], sums, exponent)
    return pad(output, (0, 0, num_queries - shared, 0))  # queries before the first key see nothing


def state_sums(state: LinearState | None, query: ScaledFeatures, value: Tensor) -> tuple[Tensor, Tensor]:
    """The state as sums with the denominator in the last column, (B,H,F,Dv+1), and exponents (B,H,1,F)."""
    batch, heads, width = value.shape[0], value.shape[1], query.mantissa.shape[-1]
    if state is None:
        sums = value.new_zeros(batch, heads, width, value.shape[-1])
        return sums, key_scale(query.exponent[:, :, :0])
    if not isinstance(state, LinearState):
        raise TypeError(f"state: expected a LinearState or None, got {check.describe(state)}")
    check.check_shape("state.numerator", state.numerator, "B,H,F,Dv", (batch, heads, width, value.shape[-1] - 1))
    check.check_shape("state.denominator", state.denominator, "B,H,F", (batch, heads, width))
    check.check_shape("state.exponent", state.exponent, "B,H,F", (batch, heads, width))
    for name, part in state._asdict().items():
        check.check_same(f"state.{name}", part, value)
    return torch.cat((state.numerator, state.denominator[..., None]), -1), state.exponent[:, :, None]


def add_keys(key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Add keys and values to the sums (B,H,F,Dv+1) and their exponents (B,H,1,F)."""
    c = torch.maximum(exponent, key_scale(key.exponent))
    return sums * (exponent - c).exp().mT + matmul(key.times_exp(-c).mT, value), c


def chunk(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk with as many queries as keys: what the queries read, (B,H,N,Dv+1), and the sums after it."""
    c = torch.maximum(exponent, key_scale(key.exponent))
    keys, past = key.times_exp(-c), sums * (exponent - c).exp().mT
    after = past + keys.mT @ value
    m = query_scale(query.exponent + c)
    if value.shape[2] == 1 or one_scale_suffices(query, torch.maximum(exponent, key.exponent[:, :, :1]), m):
        reads = query.times_exp(c - m)
        return reads @ past + (reads @ keys.mT).tril() @ value, after, c
    m = query_scale(query.exponent + torch.maximum(key.exponent.cummax(2).values, exponent))
    return query.times_exp(exponent - m) @ sums + pairs_within(query, key, value, m), after, c


def one_scale_suffices(query: ScaledFeatures, first: Tensor, m: Tensor) -> bool:
    """Whether the c_f of a chunk leaves half of the number range to every query, which sees `first` at least."""
    if not check.has_values(m):
        return False
    lost = m - query_scale(query.exponent + first)
    return not bool((lost > half_range(m.dtype)).any())


def pairs_within(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, m: Tensor) -> Tensor:
    """The pairs j <= i of a chunk: j = i, then the second against the first of every two runs of 1, 2, 4, ... keys."""
    size = value.shape[2]
    total = (query.mantissa * key.times_exp(query.exponent - m)).sum(-1, keepdim=True) * value
    missing = (1 << (size - 1).bit_length()) - size
    if missing:
        end = (0, 0, 0, missing)
        query = ScaledFeatures(pad(query.mantissa, end), pad(query.exponent, end, value=-torch.inf))
        key = ScaledFeatures(pad(key.mantissa, end), pad(key.exponent, end, value=-torch.inf))
        value, total, m = pad(value, end), pad(total, end), pad(m, end)
    run = 1
    while run < size:
        (_, reads), (_, reads_exponent) = halves(query.mantissa, run), halves(query.exponent - m, run)
        (keys, _), (keys_exponent, _), (values, _) = (halves(part, run) for part in (*key, value))
        c = key_scale(keys_exponent)
        weights = (reads * (reads_exponent + c).exp()) @ (keys * (keys_exponent - c).exp()).mT
        total = total + pad((weights @ values)[:, :, :, None], (0, 0, 0, 0, 1, 0)).flatten(2, 4)
        run *= 2
    return total[:, :, :size]


def halves(x: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """The first and the second of every two runs of positions: (B,H,N,F) -> two tensors (B,H,N/(2 run),run,F)."""
    first, second = x.reshape(*x.shape[:2], -1, 2, run, x.shape[-1]).unbind(3)
    return first, second


def causal(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What every query reads, (B,H,N,Dv+1), and the sums after the last key; as many queries as keys."""
    if not value.shape[2]:
        return query.times_exp(exponent) @ sums, sums, exponent
    if value.shape[2] == 1:  # decoding
        return chunk(query, key, value, sums, exponent)
    if check.is_traced():  # compilers and torch.func differentiate, and choose what to save, themselves
        output, _, sums, exponent = scan(query, key, value, sums, exponent)
        return output, sums, exponent
    return CausalScan.apply(*query, *key, value, sums, exponent)  # type: ignore[no-any-return, no-untyped-call]


def scan(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """All chunks in turn: what the queries read, sums and exponents before each chunk, and those after the last."""
    outputs, states = [], []
    for at in chunk_slices(value):
        states += [sums, exponent]
        output, sums, exponent = chunk(query.at(at), key.at(at), value[:, :, at], sums, exponent)
        outputs.append(output)
    return torch.cat(outputs, 2), states, sums, exponent


def chunk_slices(value: Tensor) -> list[slice]:
    return [slice(start, min(start + CHUNK, value.shape[2])) for start in range(0, value.shape[2], CHUNK)]


class CausalScan(torch.autograd.Function):
    """`scan`, which saves the inputs and the sums before each chunk. Backward computes each chunk again.

    A backward that is itself differentiated (create_graph=True) computes the full scan again, with autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, q_exponent: Tensor, k: Tensor, k_exponent: Tensor, value: Tensor, sums: Tensor,
        exponent: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        query, key = ScaledFeatures(q, q_exponent), ScaledFeatures(k, k_exponent)
        output, states, sums, exponent = scan(query, key, value, sums, exponent)
        ctx.save_for_backward(q, q_exponent, k, k_exponent, value, *states)
        ctx.mark_non_differentiable(exponent)
        return output, sums, exponent

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_sums: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, q_exponent, k, k_exponent, value, *states = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = [
                part.view_as(part) if part.requires_grad else part.detach().requires_grad_()
                for part in (q, k, value, states[0])
            ]
            query, key = ScaledFeatures(leaves[0], q_exponent), ScaledFeatures(leaves[1], k_exponent)
            output, _states, after, _ = scan(query, key, leaves[2], leaves[3], states[1])
            by_q, by_k, by_value, by_sums = torch.autograd.grad(
                (output, after), leaves, (grad_output, grad_sums), create_graph=True
            )
            return by_q, None, by_k, None, by_value, by_sums, None
        grads = [torch.empty_like(part) for part in (q, k, value)]
        for index, at in reversed(list(enumerate(chunk_slices(value)))):
            before, exponent = states[2 * index : 2 * index + 2]
            inputs = [part.detach().requires_grad_() for part in (q[:, :, at], k[:, :, at], value[:, :, at], before)]
            with without_autocast(value):
                with torch.enable_grad():
                    query = ScaledFeatures(inputs[0], q_exponent[:, :, at])
                    key = ScaledFeatures(inputs[1], k_exponent[:, :, at])
                    output, after, _ = chunk(query, key, inputs[2], inputs[3], exponent)
                *parts, grad_sums = torch.autograd.grad((output, after), inputs, (grad_output[:, :, at], grad_sums))
            for grad, part in zip(grads, parts, strict=True):
                grad[:, :, at] = part
        return grads[0], None, grads[1], None, grads[2], grad_sums, None


def exported(query: ScaledFeatures, key: ScaledFeatures, value: Tensor) -> Tensor:
    """What every query reads, divided by its last column, (B,H,N,Dv+1), without a loop, for any number of positions.

    Exported programs have neither loops over chunks nor branches on values. So one c_f scales all chunks. In float64
    no query loses its keys beside later ones, as long as the exponents of a feature differ by at most `SPREAD` between
    keys. Where they differ by more, which takes features as small as exp(-900), the result is NaN.
    """
    length = value.shape[2]
    chunks = length // CHUNK + 2  # the last one is empty: a size that may be 1 could not be exported
    at, within = (torch.arange(size, device=value.device) for size in (chunks, CHUNK))
    place = at[:, None] * CHUNK + within  # by index, because views would only export for some lengths
    c = key_scale(key.exponent)
    m = query_scale(query.exponent + c)
    query, key = (ScaledFeatures(x.mantissa.double(), x.exponent.double()) for x in (query, key))
    parts = (query.times_exp(c - m + HEADROOM), key.times_exp(HEADROOM - c), value.double())
    reads, keys, values = (pad(x, (0, 0, 0, chunks * CHUNK - length))[:, :, place] for x in parts)
    past = pad(keys.mT @ values, (0, 0, 0, 0, 1, 0)).cumsum(2)[:, :, :-1]
    position = torch.arange(length, device=value.device)
    sums = (reads @ past + (reads @ keys.mT).tril() @ values)[:, :, position // CHUNK, position % CHUNK]
    empty = sums[..., -1:] == 0
    sums = torch.where(empty, 0, sums / sums[..., -1:].masked_fill(empty, 1))
    lowest = key.exponent.masked_fill(key.exponent == -torch.inf, torch.inf).amin(2, keepdim=True)
    return sums.masked_fill(((c - lowest) > SPREAD).any(-1, keepdim=True), torch.nan).to(value.dtype)


def fla_scan(query: ScaledFeatures, key: ScaledFeatures, value: Tensor) -> Tensor:
    """The causal scan by fla-core: gated linear attention whose gate rescales the sums when c_f grows."""
    from fla.ops.gla import chunk_gla

    c = key.exponent.cummax(2).values.clamp(min=torch.finfo(key.exponent.dtype).min / 4)  # (B,H,N,F)
    # A sum that shrinks below exp(NEGLIGIBLE) adds nothing to the key that caused it. Cumulated gates stay exact.
    gate = pad((c[:, :, :-1] - c[:, :, 1:]).clamp(min=NEGLIGIBLE), (0, 0, 1, 0))
    m = query_scale(query.exponent + c)
    parts = (query.times_exp(c - m), key.times_exp(-c), value, gate)
    sums, _ = chunk_gla(*(part.transpose(1, 2).contiguous() for part in parts), scale=1.0)  # (B,N,H,Dv+1)
    return sums.transpose(1, 2)  # type: ignore[no-any-return]
