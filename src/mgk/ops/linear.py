"""Linear attention with mixture keys, Eqn 14: the public functions, and the choice of an implementation.

    h_i = phi(q_i)^T S / phi(q_i)^T z
    S = sum_j sum_r prior[j,r] phi(k_jr) v_j^T,   z = sum_j sum_r prior[j,r] phi(k_jr)

The mixture is taken after the feature map. The computation is in linear_forms.py for PyTorch, in triton/linear.py
(all keys) and triton/scan.py (causal) for CUDA.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, D width of a head, Dv width of a
value, F width of the features.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops import dispatch
from mgk.ops import linear_forms as forms
from mgk.ops.api import HAS_TRITON
from mgk.ops.common import allows_tf32, capability, dtype_name, for_each_query_head, without_autocast
from mgk.ops.dispatch import LINEAR_IMPLEMENTATIONS, LONG_SCAN, TRITON_DTYPES
from mgk.ops.dtensor import OUTPUT, accepts_dtensors
from mgk.ops.feature_maps import FeatureMap, check_feature_map, elu
from mgk.ops.linear_forms import LinearState as LinearState

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

HAS_FLA = importlib.util.find_spec("fla") is not None  # found, not imported


@accepts_dtensors(OUTPUT)
def mlk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"],
    value: Float[Tensor, "b g nk dv"],
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
        key: (B,G,M,Nk,D), the M component keys of every position. H is a multiple of G: query head h reads the keys and
            values of head h // (H/G). The heads of a group are computed one after the other.
        value: (B,G,Nk,Dv).
        log_prior: log priors of the components, (H,M) or per position (H,M,Nk); None is uniform, 1/M. They need not be
            normalised. -inf removes a component.
        feature_map: "elu" (elu + 1), "dpfp", or a callable (see `mgk.ops.feature_maps`), for example FAVOR+.
        is_causal: a query sees the keys up to its own position; with Nq != Nk the last query sees every key.
        key_mask: bool (B,Nk), True where a key takes part. A query that sees no key gets zeros and zero gradients, and
            so does one that has no feature in common with its keys (`dpfp`).
        impl: "auto"; "reference" (dense weights); "blockwise" (linear in N, forward and backward); or "triton" on CUDA.
            "triton" runs the kernels of this library for "elu" with widths up to 128 (differentiable once), or
            64 on GPUs with less than 128 KiB of shared memory, and otherwise, with a causal mask, the scan of fla-core.
            Both need Nq = Nk with a causal mask. "auto" prefers fla-core above 1024 positions where TF32 is allowed. If
            you name an implementation, it is used or raises an error.
    """
    query, key, _ = check.check_query_key(query, key, None)
    return _attention(query, key, None, value, log_prior, feature_map, is_causal, key_mask, impl)


@accepts_dtensors(OUTPUT)
def smlk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g nk d"],
    shift: Float[Tensor, "h m d"],
    value: Float[Tensor, "b g nk dv"],
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
        key: (B,G,Nk,D).
        shift: b, (H,M,D).
    """
    check.check_tensor("shift", shift, "H,M,D")
    query, key, _ = check.check_query_key(query, key, shift)
    return _attention(query, key, shift, value, log_prior, feature_map, is_causal, key_mask, impl)


@accepts_dtensors(OUTPUT)
def linear_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g nk d"],
    value: Float[Tensor, "b g nk dv"],
    *,
    feature_map: str | FeatureMap = "elu",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Linear attention (Katharopoulos et al. 2020), the baseline: `mlk_attention` with one component.

    Args:
        query, value, feature_map, is_causal, key_mask, impl: as in `mlk_attention`.
        key: (B,G,Nk,D).
    """
    query, key = _single_component(query, key)
    return _attention(query, key, None, value, None, feature_map, is_causal, key_mask, impl)


@accepts_dtensors()
def linear_step(
    state: LinearState | None,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g m n d"] | Float[Tensor, "b g n d"],
    value: Float[Tensor, "b g n dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    feature_map: str | FeatureMap = "elu",
    key_mask: Bool[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h n dv"], LinearState]:
    """Causal attention of n >= 1 new tokens to those in `state` and to each other. Also returns the new state.

    Feeding a sequence in pieces of any size equals one causal call. Gradients flow through the state.

    Args:
        state: the state that the last step returned; None before the first. It belongs to the H query heads.
        query, value, feature_map: as in `mlk_attention`, for the new tokens only.
        key: (B,G,M,n,D) for MLK, (B,G,n,D) with `shift` for sMLK, (B,G,n,D) alone for linear attention.
        log_prior: (H,M), or per new position (H,M,n).
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
        values, prior, mask, phi = _check(query, key, shift, value, log_prior, feature_map, key_mask)
        if shift is None:
            key = for_each_query_head(key, query.shape[1])
        values = for_each_query_head(values, query.shape[1])  # the new tokens only
        reads, keys = forms.prepare(query, key, shift, prior, mask, phi, with_state=True)
        values = forms.with_ones(values, mask, query)
        output, sums, exponent = forms.causal(reads, keys, values, *forms.state_sums(state, reads, values))
        return forms.quotient(output).to(query.dtype), LinearState(sums[..., :-1], sums[..., -1], exponent[:, :, 0])


def rows_attention(
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 h m t d"] | Float[Tensor, "1 h t d"],
    shift: Float[Tensor, "h m d"] | None,
    value: Float[Tensor, "1 h t dv"],
    log_prior: Float[Tensor, "h m"] | None,
    cu_seqlens: Int[Tensor, " b+1"],
    max_seqlen: int,
) -> Float[Tensor, "1 h t dv"]:
    """Attention within packed sequences: sequence b is at cu_seqlens[b] to cu_seqlens[b+1]. Zero after the last one."""
    from mgk.ops.triton import linear as kernels  # loads Triton

    def attend(query: Tensor, shift: Tensor | None, prior: Tensor | None) -> Tensor:
        return kernels.linear_attention(query, key, shift, value, prior, None, cu_seqlens, max_seqlen)

    with without_autocast(query):
        return in_turn(query.shape[1] // max(1, key.shape[1]), query, shift, log_prior, attend)


def _attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: object, log_prior: object, feature_map: object,
    is_causal: object, key_mask: object, impl: object,
) -> Tensor:  # fmt: skip
    is_causal = check.check_flag("is_causal", is_causal)
    impl = check.check_choice("impl", impl, LINEAR_IMPLEMENTATIONS)
    values, prior, mask, phi = _check(query, key, shift, value, log_prior, feature_map, key_mask)
    path = _gpu_path(query, key, values, phi, is_causal, impl)
    group = query.shape[1] // max(1, key.shape[1])
    with without_autocast(query):
        if path == "kernels":
            from mgk.ops.triton import linear, scan  # loads Triton

            kernels = scan.scan_attention if is_causal else linear.linear_attention
            return in_turn(group, query, shift, prior, lambda q, b, p: kernels(q, key, b, values, p, mask))
        values = forms.with_ones(values, mask, query)

        def attend(query: Tensor, shift: Tensor | None, prior: Tensor | None) -> Tensor:
            reads, keys = forms.prepare(query, key, shift, prior, mask, phi)
            if path == "fla":
                return forms.quotient(forms.fla_scan(reads, keys, values))
            if is_causal and impl in ("auto", "reference") and check.exports_any_length(query, keys.mantissa):
                return forms.quotient(forms.exported(reads, keys, values))
            compute = forms.dense if impl == "reference" else forms.blockwise
            return forms.quotient(compute(reads, keys, values, is_causal))

        return in_turn(group, query, shift, prior, attend).to(query.dtype)


def in_turn(
    group: int, query: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    attend: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """Call `attend` with the first of the `group` query heads that read each key, then with the second, and so on.

    Neither keys nor values are copied. The mixed features differ between these heads, as their priors and shifts do.
    """
    if group <= 1:
        return attend(query, shift, log_prior)
    outputs = [
        attend(query[:, at], None if shift is None else shift[at], None if log_prior is None else log_prior[at])
        for at in (slice(first, None, group) for first in range(group))
    ]
    return torch.stack(outputs, 2).flatten(1, 2)


def _check(
    query: Tensor, key: Tensor, shift: Tensor | None, value: object, log_prior: object, feature_map: object,
    key_mask: object,
) -> tuple[Tensor, Tensor | None, Tensor | None, FeatureMap]:  # fmt: skip
    """Check value, prior, mask and feature map against query and key, and return them."""
    components = key.shape[2] if shift is None else shift.shape[1]
    return (
        check.check_value(value, query, key),
        check.check_log_prior(log_prior, query.shape[1], components, key.shape[-2], query),
        check.check_mask("key_mask", key_mask, "B,Nk", (query.shape[0], key.shape[-2]), query),
        check_feature_map(feature_map),
    )


def _single_component(query: object, key: object) -> tuple[Tensor, Tensor]:
    """Check query (B,H,Nq,D) and key (B,G,Nk,D). Return them with the key as (B,G,1,Nk,D)."""
    key = check.check_tensor("key", key, "B,G,Nk,D")
    query = check.check_tensor("query", query, "B,H,Nq,D")
    expected = (query.shape[0], check.key_heads(key, query.shape[1]), key.shape[2], query.shape[-1])
    check.check_shape("key", key, "B,G,Nk,D", expected, " to go with query")
    query, key, _ = check.check_query_key(query, key[:, :, None], None)
    return query, key


def never_waits(width: int, length: int, feature_map: object) -> bool:
    """Whether causal attention on a GPU never synchronises with the host, so that a CUDA graph can capture it."""
    return (
        HAS_TRITON
        and feature_map == "elu"
        and width <= dispatch.linear_width(None)
        and not (HAS_FLA and length > LONG_SCAN)
    )


def takes_rows(x: Tensor, width: int, feature_map: object, impl: str) -> bool:
    """Whether `rows_attention` has a kernel for heads of this width, computed from x."""
    on_gpu = impl == "triton" or (impl == "auto" and x.is_cuda)
    head = x.new_empty(0, width)
    return on_gpu and _kernel_obstacle(head, head, check_feature_map(feature_map)) is None


def _gpu_path(query: Tensor, key: Tensor, value: Tensor, phi: FeatureMap, is_causal: bool, impl: str) -> str | None:
    """What computes this on a GPU, see `dispatch.linear_path`. If `impl` is "triton", nothing is an error."""
    obstacle = _kernel_obstacle(query, value, phi, is_causal)
    fla = (
        is_causal
        and _fla_obstacle(query, key) is None
        and (impl == "triton" or query.dtype != torch.float32 or allows_tf32())
    )
    path = dispatch.linear_path(impl, query.device.type, obstacle is None, fla, query.shape[2])
    if path is None and impl == "triton":
        raise obstacle  # type: ignore[misc]
    return path


def _fla_obstacle(query: Tensor, key: Tensor) -> Exception | None:
    """The exception that says why fla-core cannot run these arguments; None if it can."""
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return ValueError(f"impl: 'triton' needs float32 or half on CUDA, got {query.dtype} on {query.device}")
    if not HAS_FLA:
        return ImportError("impl: 'triton' runs on fla-core here, which is not installed: pip install 'mgk[fla]'")
    return _unequal_lengths(query, key)


def _kernel_obstacle(query: Tensor, value: Tensor, phi: FeatureMap, is_causal: bool = False) -> Exception | None:
    """The exception that says why our kernels cannot run these arguments. Triton's interpreter runs them on a CPU."""
    on_gpu = query.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if not on_gpu or dtype_name(query.dtype) not in TRITON_DTYPES:
        return ValueError(f"impl: 'triton' needs float32 or half on CUDA, got {query.dtype} on {query.device}")
    where = "without fla-core" if is_causal else "where is_causal=False"
    if phi is not elu:
        return ValueError(f"impl: 'triton' has only the feature map 'elu' {where}, got {getattr(phi, '__name__', phi)}")
    most = dispatch.linear_width(capability(query.device), bool(torch.version.hip))
    if max(query.shape[-1], value.shape[-1]) > most:
        return ValueError(
            f"impl: 'triton' needs head widths D and Dv up to {most} {where}, "
            f"got {query.shape[-1]} and {value.shape[-1]}"
        )
    if not HAS_TRITON:
        return ImportError("impl: 'triton' needs Triton, which is not installed: pip install 'mgk[gpu]'")
    return _unequal_lengths(query, value) if is_causal else None


def _unequal_lengths(query: Tensor, key: Tensor) -> ValueError | None:
    """The exception for causal scans with Nq != Nk. `key` may also be the value."""
    num_queries, num_keys = query.shape[2], key.shape[-2]
    if num_queries == num_keys:
        return None
    return ValueError(
        f"impl: 'triton' scans with Nq = Nk where is_causal=True, got Nq = {num_queries}, Nk = {num_keys}"
    )
