"""Linear attention with mixture keys, Eqn 14: one formula in parallel, chunked and recurrent form.

    h_i = phi(q_i)^T S / phi(q_i)^T z
    S = sum_j sum_r prior[j,r] phi(k_jr) v_j^T,   z = sum_j sum_r prior[j,r] phi(k_jr)

The mixture is taken after the feature map. Once the features of a position are mixed, M plays no further part, and the
forms differ only in which keys a query sees:

    parallel    all of them: add up S and z, then read them with every query; kernels in ops/triton/linear.py
    chunked     causal: read the sums of the chunks before, add the pairs within the chunk, carry the sums on;
                kernels in ops/triton/scan.py
    recurrent   the same step with the sums (`LinearState`) in the caller's hands, for any number of new tokens

How it stays exact. Features are held as mantissa * exp(exponent) (`ScaledFeatures`). The sums of feature f carry
exp(c_f), the largest exponent of the keys they hold, and a query reads them with the exponent s_if + c_f - m_i, where
m_i, the largest of these over f, cancels in the quotient: the largest term of every sum has the size of its mantissa,
and what underflows is nothing beside it. Exponents are constants: gradients flow through mantissas alone, and are
exact, because mantissa * exp(exponent) does not depend on how it is split. c_f belongs to a sum, not to a key or to the
whole sequence, so that a causal query that sees small keys alone is right whatever comes later. Within a chunk one c_f
does unless a query would lose its keys beside later ones; then the pairs are taken as (second half, first half),
(second quarter, first quarter), ..., each with a c_f of its own. A carried state is rescaled when its c_f grows: so
chunked and recurrent forms agree.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value, F width of the features.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.ops import arguments as check
from mgk.ops.api import HAS_TRITON, TRITON_DTYPES
from mgk.ops.common import compute_dtype, shifted_keys, without_autocast
from mgk.ops.dispatch import IMPLEMENTATIONS
from mgk.ops.feature_maps import (
    FeatureMap,
    ScaledFeatures,
    apply_feature_map,
    check_feature_map,
    dpfp,
    elu,
    without_exponents_of_zero,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

HAS_FLA = importlib.util.find_spec("fla") is not None  # found, not imported
CHUNK = 128
TRITON_WIDTH = 128  # of our own kernels: a program holds the sums of a head
# Our scan walks over a head's positions one tile after the other, fla-core's over all chunks at once. Not measured.
LONG = 1024
NEGLIGIBLE = -100.0  # exp of it is below the rounding of float32 by 30 orders of magnitude


class LinearState(NamedTuple):
    """The sums over the keys seen so far: S = numerator * exp(exponent), z = denominator * exp(exponent).

    numerator (B,H,F,Dv), denominator and exponent (B,H,F); float32 for half precision. Its size does not grow.
    """

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor


def mlk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"],
    value: Float[Tensor, "b h nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    feature_map: str | FeatureMap = "elu",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Linear attention with a mixture of keys (MLK), Eqn 14.

        h_i = phi(q_i)^T S / phi(q_i)^T z
        S = sum_j sum_r prior[j,r] phi(k_jr) v_j^T,   z = sum_j sum_r prior[j,r] phi(k_jr)

    Args:
        query: (B,H,Nq,D).
        key: (B,H,M,Nk,D), the M component keys of every position.
        value: (B,H,Nk,Dv).
        log_prior: log of the components' priors, (H,M) or one per position (H,M,Nk); None is uniform, 1/M. It need not
            be normalised; -inf removes a component.
        feature_map: "elu" (elu + 1), "dpfp", or a callable (`mgk.ops.feature_maps`), FAVOR+ for one.
        is_causal: a query sees the keys up to its own position; with Nq != Nk the last query sees every key.
        key_mask: bool (B,Nk), True where a key takes part. A query with no key left gets zeros and zero gradients; so
            does one that has no feature in common with its keys (`dpfp`).
        impl: "auto"; "reference", the dense weights; "blockwise", linear in N forward and backward; "triton", on CUDA
            kernels of our own for "elu" (widths up to 128, with a causal mask Nq = Nk, differentiable once), and else
            with a causal mask the scan of fla-core (Nq = Nk). "auto" prefers fla-core's for more than 1024 positions
            where TF32 is allowed. One asked for by name is used or raises.
    """
    query, key, _ = check.check_query_key(query, key, None)
    return _attention(query, key, None, value, log_prior, feature_map, is_causal, key_mask, impl)


def smlk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    shift: Float[Tensor, "h m d"],
    value: Float[Tensor, "b h nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    feature_map: str | FeatureMap = "elu",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Linear attention with a mixture of shifted keys (sMLK): `mlk_attention` on the keys k_jr = k_j + b_r.

    Args:
        query, value, log_prior, feature_map, is_causal, key_mask, impl: as in `mlk_attention`.
        key: (B,H,Nk,D).
        shift: b, (H,M,D).
    """
    check.check_tensor("shift", shift, "H,M,D")
    query, key, _ = check.check_query_key(query, key, shift)
    return _attention(query, key, shift, value, log_prior, feature_map, is_causal, key_mask, impl)


def linear_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    value: Float[Tensor, "b h nk dv"],
    *,
    feature_map: str | FeatureMap = "elu",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Linear attention (Katharopoulos et al. 2020), the baseline: `mlk_attention` with one component.

    Args:
        query, value, feature_map, is_causal, key_mask, impl: as in `mlk_attention`.
        key: (B,H,Nk,D).
    """
    query, key = _single_component(query, key)
    return _attention(query, key, None, value, None, feature_map, is_causal, key_mask, impl)


def linear_step(
    state: LinearState | None,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m n d"] | Float[Tensor, "b h n d"],
    value: Float[Tensor, "b h n dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    feature_map: str | FeatureMap = "elu",
    key_mask: Bool[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h n dv"], LinearState]:
    """Causal attention of n >= 1 new tokens to those in `state` and to each other; and the state with them in it.

    Feeding a sequence in pieces of any size gives what one causal call gives. The state differentiates like a tensor.

    Args:
        state: what the last step returned; None before the first.
        query, value, feature_map: as in `mlk_attention`, for the new tokens alone.
        key: (B,H,M,n,D) for MLK, (B,H,n,D) with `shift` for sMLK, (B,H,n,D) alone for linear attention.
        log_prior: (H,M), or that of the new positions (H,M,n).
        shift: b of sMLK, (H,M,D).
        key_mask: bool (B,n), True where a new key takes part.
    """
    if shift is None and isinstance(key, Tensor) and key.dim() == 4:
        query, key = _single_component(query, key)
    else:
        query, key, shift = check.check_query_key(query, key, shift)
    if query.shape[2] != key.shape[-2]:
        raise ValueError(f"key: expected one key per query, n = {query.shape[2]}, got {check.describe(key)}")
    with without_autocast(query):
        checked = _check(query, key, shift, value, log_prior, feature_map, key_mask)
        reads, keys, values = _prepare(query, key, shift, *checked, with_state=True)
        output, sums, exponent = _causal(reads, keys, values, *_join(state, reads, values))
        return _quotient(output).to(query.dtype), LinearState(sums[..., :-1], sums[..., -1], exponent[:, :, 0])


def _attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: object, log_prior: object, feature_map: object,
    is_causal: object, key_mask: object, impl: object,
) -> Tensor:  # fmt: skip
    is_causal = check.check_flag("is_causal", is_causal)
    impl = check.check_choice("impl", impl, IMPLEMENTATIONS)
    values, prior, mask, phi = _check(query, key, shift, value, log_prior, feature_map, key_mask)
    road = _gpu_road(query, key, values, phi, is_causal, impl)
    with without_autocast(query):
        if road == "kernels":
            from mgk.ops.triton import linear, scan  # not loaded before they are needed

            kernels = scan.scan_attention if is_causal else linear.linear_attention
            return kernels(query, key, shift, values, prior, mask)
        reads, keys, values = _prepare(query, key, shift, values, prior, mask, phi)
        if impl == "reference":
            sums = _dense(reads, keys, values, is_causal)
        elif road == "fla":
            sums = _fla(reads, keys, values)
        else:
            sums = _blockwise(reads, keys, values, is_causal)
        return _quotient(sums).to(query.dtype)


def never_waits(width: int, length: int, feature_map: object) -> bool:
    """Whether causal attention on a GPU is kernels alone, of which none asks the host: a CUDA graph can hold it."""
    return HAS_TRITON and feature_map == "elu" and width <= TRITON_WIDTH and not (HAS_FLA and length > LONG)


def takes_rows(x: Tensor, width: int, feature_map: object, impl: str) -> bool:
    """Whether `rows_attention` has a kernel for heads of this width, of what is made of x."""
    on_gpu = impl == "triton" or (impl == "auto" and x.is_cuda)
    head = x.new_empty(0, width)
    return on_gpu and _kernel_obstacle(head, head, check_feature_map(feature_map)) is None


def rows_attention(
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 h m t d"] | Float[Tensor, "1 h t d"],
    shift: Float[Tensor, "h m d"] | None,
    value: Float[Tensor, "1 h t dv"],
    log_prior: Float[Tensor, "h m"] | None,
    ends: Int[Tensor, " b+1"],
    longest: int,
) -> Float[Tensor, "1 h t dv"]:
    """Attention within the rows ends[b] to ends[b+1] for each b, of which none has more than `longest`; zero behind."""
    from mgk.ops.triton import linear as kernels  # not loaded before it is needed

    with without_autocast(query):
        return kernels.linear_attention(query, key, shift, value, log_prior, None, ends, longest)


def _check(
    query: Tensor, key: Tensor, shift: Tensor | None, value: object, log_prior: object, feature_map: object,
    key_mask: object,
) -> tuple[Tensor, Tensor | None, Tensor | None, FeatureMap]:  # fmt: skip
    """Value, prior, mask and feature map, if they go with query and key."""
    components = key.shape[2] if shift is None else shift.shape[1]
    return (
        check.check_value(value, query, key),
        check.check_log_prior(log_prior, query.shape[1], components, key.shape[-2], query),
        check.check_mask("key_mask", key_mask, "B,Nk", (query.shape[0], key.shape[-2]), query),
        check_feature_map(feature_map),
    )


def _prepare(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, prior: Tensor | None, mask: Tensor | None,
    phi: FeatureMap, with_state: bool = False,
) -> tuple[ScaledFeatures, ScaledFeatures, Tensor]:  # fmt: skip
    """The arguments as features of queries and mixed keys, (B,H,N,F), and values with a column of ones.

    The ones make the denominator the last column of whatever is summed: (B,H,Nk,Dv+1).
    """
    dtype = compute_dtype(query.dtype)
    key = key.to(dtype) if shift is None else shifted_keys(key, shift)
    queries, keys = (apply_feature_map(phi, x) for x in (query.to(dtype)[:, :, None], key))
    if phi is dpfp and (with_state or _far_apart(_with_prior(keys.exponent[..., :1], prior))):
        queries, keys = map(without_exponents_of_zero, (queries, keys))  # which exponentials on a CPU do not like
    return _mix(queries, None, None), _mix(keys, prior, mask), pad(value.to(dtype), (0, 1), value=1.0)


def _with_prior(exponent: Tensor, log_prior: Tensor | None) -> Tensor:
    """For exponents (B,H,M,N,F)."""
    if log_prior is None:
        return exponent - math.log(exponent.shape[2])
    log_prior = log_prior.to(exponent.dtype)
    return exponent + (log_prior[..., None, None] if log_prior.dim() == 2 else log_prior[..., None])


def _far_apart(exponent: Tensor) -> bool:
    """Whether one may hide another, or it cannot be told."""
    if not (check.readable(exponent) and exponent.numel()):
        return True
    return not bool(exponent.amax() - exponent.amin() < _half_range(exponent.dtype))


def _mix(features: ScaledFeatures, log_prior: Tensor | None, key_mask: Tensor | None) -> ScaledFeatures:
    """sum_r prior[j,r] phi(k_jr): (B,H,M,N,F) -> (B,H,N,F), with constant exponents; -inf where nothing is left."""
    exponent = _with_prior(features.exponent, log_prior)
    largest = exponent.detach().amax(2)
    finite = largest.masked_fill(largest == -torch.inf, 0)
    mantissa = (features.mantissa * (exponent - finite[:, :, None]).exp()).sum(2)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        mantissa, largest = mantissa.masked_fill(hidden, 0), largest.masked_fill(hidden, -torch.inf)
    return ScaledFeatures(mantissa, largest)


def _largest(exponent: Tensor) -> Tensor:
    """c_f: the largest exponent of the keys, (..., N, F) -> (..., 1, F). Finite, so that differences are numbers."""
    floor = torch.finfo(exponent.dtype).min / 4
    if not exponent.shape[-2]:
        return exponent.new_full((*exponent.shape[:-2], 1, exponent.shape[-1]), floor)
    return exponent.amax(-2, keepdim=True).clamp(min=floor)


def _strongest(exponent: Tensor) -> Tensor:
    """m_i: the largest exponent a query reads, (..., N, F) -> (..., N, 1). Finite, and above c_f where no key has f."""
    return exponent.amax(-1, keepdim=True).clamp(min=torch.finfo(exponent.dtype).min / 8)


def _at(features: ScaledFeatures, positions: slice) -> ScaledFeatures:
    return ScaledFeatures(features.mantissa[:, :, positions], features.exponent[:, :, positions])


def _times_exp(features: ScaledFeatures, change: Tensor) -> Tensor:
    """The features times exp(change), as numbers."""
    return features.mantissa * (features.exponent + change).exp()


def _quotient(sums: Tensor) -> Tensor:
    """phi(q)^T S / phi(q)^T z, from (B,H,Nq,Dv+1); zero, gradients too, where the denominator is."""
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    empty = denominator == 0
    return torch.where(empty, 0, numerator / denominator.masked_fill(empty, 1))


def _dense(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, is_causal: bool) -> Tensor:
    """The oracle: sum_j phi(q_i).phi(k_j) v_j by way of the weights. Queries that see the same keys go together."""
    num_queries, num_keys = query.mantissa.shape[2], value.shape[2]
    rows = [slice(i, i + 1) for i in range(max(1, num_queries))] if is_causal else [slice(0, num_queries)]
    sums = []
    for row in rows:
        seen = slice(0, max(0, row.stop + num_keys - num_queries) if is_causal else num_keys)
        reads, keys = _at(query, row), _at(key, seen)
        c = _largest(keys.exponent)
        m = _strongest(reads.exponent + c)
        weights = _times_exp(reads, c - m) @ _times_exp(keys, -c).mT
        sums.append(weights @ value[:, :, seen])
    return torch.cat(sums, 2)


def _blockwise(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, is_causal: bool) -> Tensor:
    num_queries, num_keys = query.mantissa.shape[2], value.shape[2]
    shared = min(num_queries, num_keys) if is_causal else 0  # positions that have a query and a key
    empty = _join(None, query, value)
    before, exponent = _absorb(_at(key, slice(0, num_keys - shared)), value[:, :, : num_keys - shared], *empty)
    if not is_causal:
        m = _strongest(query.exponent + exponent)
        return _times_exp(query, exponent - m) @ before
    reads, keys = _at(query, slice(num_queries - shared, None)), _at(key, slice(num_keys - shared, None))
    sums, _, _ = _causal(reads, keys, value[:, :, num_keys - shared :], before, exponent)
    # queries before the first key see nothing
    return pad(sums, (0, 0, num_queries - shared, 0))


def _join(state: LinearState | None, query: ScaledFeatures, value: Tensor) -> tuple[Tensor, Tensor]:
    """The state as sums with the denominator in the last column, (B,H,F,Dv+1), and exponents (B,H,1,F)."""
    batch, heads, width = value.shape[0], value.shape[1], query.mantissa.shape[-1]
    if state is None:
        sums = value.new_zeros(batch, heads, width, value.shape[-1])
        return sums, _largest(query.exponent[:, :, :0])
    if not isinstance(state, LinearState):
        raise TypeError(f"state: expected a LinearState or None, got {check.describe(state)}")
    check.check_shape("state.numerator", state.numerator, "B,H,F,Dv", (batch, heads, width, value.shape[-1] - 1))
    check.check_shape("state.denominator", state.denominator, "B,H,F", (batch, heads, width))
    check.check_shape("state.exponent", state.exponent, "B,H,F", (batch, heads, width))
    for name, part in state._asdict().items():
        check.check_same(f"state.{name}", part, value)
    return torch.cat((state.numerator, state.denominator[..., None]), -1), state.exponent[:, :, None]


def _absorb(key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Add keys and values to the sums."""
    c = torch.maximum(exponent, _largest(key.exponent))
    return sums * (exponent - c).exp().mT + _times_exp(key, -c).mT @ value, c


def _chunk(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of as many queries as keys: what they read, (B,H,N,Dv+1), and the sums after it."""
    c = torch.maximum(exponent, _largest(key.exponent))
    keys, past = _times_exp(key, -c), sums * (exponent - c).exp().mT
    after = past + keys.mT @ value
    m = _strongest(query.exponent + c)
    if value.shape[2] == 1 or _one_scale_will_do(query, torch.maximum(exponent, key.exponent[:, :, :1]), m):
        reads = _times_exp(query, c - m)
        return reads @ past + (reads @ keys.mT).tril() @ value, after, c
    m = _strongest(query.exponent + torch.maximum(key.exponent.cummax(2).values, exponent))
    return _times_exp(query, exponent - m) @ sums + _within(query, key, value, m), after, c


def _one_scale_will_do(query: ScaledFeatures, start: Tensor, m: Tensor) -> bool:
    """Whether c_f of the whole chunk leaves every query, which sees `start` at least, half the range of its numbers."""
    if check.looked_on() or m.is_meta:  # no decision waits for a number
        return False
    hidden = m - _strongest(query.exponent + start)
    return not bool((hidden > _half_range(m.dtype)).any())


def _half_range(dtype: torch.dtype) -> float:
    """Of the exponents of normal numbers up to 1."""
    return -math.log(torch.finfo(dtype).tiny) / 2


def _within(query: ScaledFeatures, key: ScaledFeatures, value: Tensor, m: Tensor) -> Tensor:
    """The pairs j <= i of a chunk: j = i, then the second against the first of every two runs of 1, 2, 4, ... keys."""
    size = value.shape[2]
    total = (query.mantissa * _times_exp(key, query.exponent - m)).sum(-1, keepdim=True) * value
    missing = (1 << (size - 1).bit_length()) - size
    if missing:
        end = (0, 0, 0, missing)
        query = ScaledFeatures(pad(query.mantissa, end), pad(query.exponent, end, value=-torch.inf))
        key = ScaledFeatures(pad(key.mantissa, end), pad(key.exponent, end, value=-torch.inf))
        value, total, m = pad(value, end), pad(total, end), pad(m, end)
    run = 1
    while run < size:
        (_, reads), (_, reads_exponent) = _halves(query.mantissa, run), _halves(query.exponent - m, run)
        (keys, _), (keys_exponent, _), (values, _) = (_halves(part, run) for part in (*key, value))
        c = _largest(keys_exponent)
        weights = (reads * (reads_exponent + c).exp()) @ (keys * (keys_exponent - c).exp()).mT
        total = total + pad((weights @ values)[:, :, :, None], (0, 0, 0, 0, 1, 0)).flatten(2, 4)
        run *= 2
    return total[:, :, :size]


def _halves(x: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """First and second of every two runs of positions: (B,H,N,F) -> twice (B,H,N/(2 run),run,F)."""
    first, second = x.reshape(*x.shape[:2], -1, 2, run, x.shape[-1]).unbind(3)
    return first, second


def _causal(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What every query reads, (B,H,N,Dv+1), and the sums after the last key; as many queries as keys."""
    if not value.shape[2]:
        return _times_exp(query, exponent) @ sums, sums, exponent
    if value.shape[2] == 1:  # decoding: nothing to do again
        return _chunk(query, key, value, sums, exponent)
    if check.looked_on():  # by what chooses itself what to keep for backward, or differentiates in its own way
        output, _, sums, exponent = _scan(query, key, value, sums, exponent)
        return output, sums, exponent
    return _CausalScan.apply(*query, *key, value, sums, exponent)  # type: ignore[no-any-return, no-untyped-call]


def _scan(
    query: ScaledFeatures, key: ScaledFeatures, value: Tensor, sums: Tensor, exponent: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """`_chunk` after `_chunk`: what the queries read, sums and exponents before each, and those after the last."""
    outputs, states = [], []
    for at in _chunks(value):
        states += [sums, exponent]
        output, sums, exponent = _chunk(_at(query, at), _at(key, at), value[:, :, at], sums, exponent)
        outputs.append(output)
    return torch.cat(outputs, 2), states, sums, exponent


class _CausalScan(torch.autograd.Function):
    """`_scan`. Saves the inputs and the sums before each chunk; backward does each chunk again.

    A backward that is to be differentiated itself does the whole scan again, and keeps it.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, q_exponent: Tensor, k: Tensor, k_exponent: Tensor, value: Tensor, sums: Tensor,
        exponent: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        query, key = ScaledFeatures(q, q_exponent), ScaledFeatures(k, k_exponent)
        output, states, sums, exponent = _scan(query, key, value, sums, exponent)
        ctx.save_for_backward(q, q_exponent, k, k_exponent, value, *states)
        ctx.mark_non_differentiable(exponent)
        return output, sums, exponent

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_sums: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, q_exponent, k, k_exponent, value, *states = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            places = [
                part.view_as(part) if part.requires_grad else part.detach().requires_grad_()
                for part in (q, k, value, states[0])
            ]
            query, key = ScaledFeatures(places[0], q_exponent), ScaledFeatures(places[1], k_exponent)
            output, _states, after, _ = _scan(query, key, places[2], places[3], states[1])
            by_q, by_k, by_value, by_sums = torch.autograd.grad(
                (output, after), places, (grad_output, grad_sums), create_graph=True
            )
            return by_q, None, by_k, None, by_value, by_sums, None
        grads = [torch.empty_like(part) for part in (q, k, value)]
        for index, at in reversed(list(enumerate(_chunks(value)))):
            before, exponent = states[2 * index : 2 * index + 2]
            inputs = [part.detach().requires_grad_() for part in (q[:, :, at], k[:, :, at], value[:, :, at], before)]
            with without_autocast(value):
                with torch.enable_grad():
                    query = ScaledFeatures(inputs[0], q_exponent[:, :, at])
                    key = ScaledFeatures(inputs[1], k_exponent[:, :, at])
                    output, after, _ = _chunk(query, key, inputs[2], inputs[3], exponent)
                *parts, grad_sums = torch.autograd.grad((output, after), inputs, (grad_output[:, :, at], grad_sums))
            for grad, part in zip(grads, parts, strict=True):
                grad[:, :, at] = part
        return grads[0], None, grads[1], None, grads[2], grad_sums, None


def _chunks(value: Tensor) -> list[slice]:
    return [slice(start, min(start + CHUNK, value.shape[2])) for start in range(0, value.shape[2], CHUNK)]


def _fla(query: ScaledFeatures, key: ScaledFeatures, value: Tensor) -> Tensor:
    """The causal scan by fla-core: gated linear attention whose gate is the rescaling of the sums when c_f grows."""
    from fla.ops.gla import chunk_gla

    c = key.exponent.cummax(2).values.clamp(min=torch.finfo(key.exponent.dtype).min / 4)  # (B,H,N,F)
    # A sum that shrinks further than this is nothing beside the key it shrinks for; the gates' own sums stay exact.
    gate = pad((c[:, :, :-1] - c[:, :, 1:]).clamp(min=NEGLIGIBLE), (0, 0, 1, 0))
    m = _strongest(query.exponent + c)
    parts = (_times_exp(query, c - m), _times_exp(key, -c), value, gate)
    sums, _ = chunk_gla(*(part.transpose(1, 2).contiguous() for part in parts), scale=1.0)  # (B,N,H,Dv+1)
    return sums.transpose(1, 2)  # type: ignore[no-any-return]


def _gpu_road(query: Tensor, key: Tensor, value: Tensor, phi: FeatureMap, is_causal: bool, impl: str) -> str | None:
    """Who computes this on a GPU: our "kernels" or "fla"; None is nobody, which is an error where it is asked for."""
    if impl != "triton" and (impl != "auto" or query.device.type != "cuda"):
        return None
    obstacle = _kernel_obstacle(query, value, phi, is_causal)
    fla = is_causal and _fla_obstacle(query, key) is None and (impl == "triton" or _tensor_cores_will_do(query.dtype))
    if obstacle is None and not (fla and impl == "auto" and query.shape[2] > LONG):
        return "kernels"
    if not fla and impl == "triton":
        raise obstacle  # type: ignore[misc]
    return "fla" if fla else None


def _fla_obstacle(query: Tensor, key: Tensor) -> Exception | None:
    """Why the scan of fla-core cannot run these arguments, as the exception to raise; None if it can."""
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return ValueError(f"impl: 'triton' needs float32 or half on CUDA, got {query.dtype} on {query.device}")
    if not HAS_FLA:
        return ImportError("impl: 'triton' runs on fla-core here, which is not installed: pip install 'mgk[fla]'")
    return _unequal_lengths(query, key)


def _kernel_obstacle(query: Tensor, value: Tensor, phi: FeatureMap, is_causal: bool = False) -> Exception | None:
    """The same of our own kernels. Triton's interpreter runs them on a CPU, for tests."""
    on_gpu = query.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if not on_gpu or query.dtype not in TRITON_DTYPES:
        return ValueError(f"impl: 'triton' needs float32 or half on CUDA, got {query.dtype} on {query.device}")
    where = "without fla-core" if is_causal else "where is_causal=False"
    if phi is not elu:
        return ValueError(
            f"impl: 'triton' has the feature map 'elu' alone {where}, got {getattr(phi, '__name__', phi)}"
        )
    if max(query.shape[-1], value.shape[-1]) > TRITON_WIDTH:
        return ValueError(
            f"impl: 'triton' needs head widths D and Dv up to {TRITON_WIDTH} {where}, "
            f"got {query.shape[-1]} and {value.shape[-1]}"
        )
    if not HAS_TRITON:
        return ImportError("impl: 'triton' needs Triton, which is not installed: pip install 'mgk[gpu]'")
    return _unequal_lengths(query, value) if is_causal else None


def _unequal_lengths(query: Tensor, key: Tensor) -> ValueError | None:
    """The same of both, with a causal mask; the value will do for the key."""
    num_queries, num_keys = query.shape[2], key.shape[-2]
    if num_queries == num_keys:
        return None
    return ValueError(
        f"impl: 'triton' scans with Nq = Nk where is_causal=True, got Nq = {num_queries}, Nk = {num_keys}"
    )


def _tensor_cores_will_do(dtype: torch.dtype) -> bool:
    """fla-core multiplies float32 as TF32: enough for half precision, and for float32 where the user allows it."""
    return dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"


def _single_component(query: object, key: object) -> tuple[Tensor, Tensor]:
    """Check query (B,H,N,D) and key (B,H,N,D), and give the key its one component."""
    key = check.check_tensor("key", key, "B,H,Nk,D")
    query = check.check_tensor("query", query, "B,H,Nq,D")
    check.check_shape("key", key, "B,H,Nk,D", (*query.shape[:2], key.shape[2], query.shape[-1]), " to go with query")
    query, key, _ = check.check_query_key(query, key[:, :, None], None)
    return query, key
