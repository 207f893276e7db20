"""The public functions of softmax-like mixture attention: check the arguments, choose an implementation, call it.

B batch, H query heads, G heads of keys and values (H is a multiple of G), M components, Nq queries, Nk keys, D width of
a head, Dv width of a value.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops import blockwise, dispatch, native, reference
from mgk.ops.common import capability, dtype_name, for_each_query_head, shifted_keys, without_autocast
from mgk.ops.dispatch import IMPLEMENTATIONS
from mgk.ops.dtensor import OUTPUT, accepts_dtensors
from mgk.ops.options import Options, Result, Rows, Visibility, check_options, check_visibility

if TYPE_CHECKING:
    from typing import Unpack

    from jaxtyping import Bool, Float, Int

HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `mgk_attention` and `smgk_attention`, for their overloads."""

    variance: float | Tensor | None
    e_step: str
    is_causal: bool
    window: int | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    dropout_p: float
    impl: str


@overload
def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None = None, *, return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@accepts_dtensors(OUTPUT, OUTPUT)
def mgk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"],
    value: Float[Tensor, "b g nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"] | tuple[Float[Tensor, "b h nq dv"], Float[Tensor, "b h nq"]]:
    """Attention with a mixture of Gaussian keys (MGK), Eqns 9, 10 and 12.

        l[i,j,r] = log prior[j,r] - |q_i - k_jr|^2 / (2 s2_r)
        A[i,j]   = sum_r exp l[i,j,r] / sum_j' sum_r exp l[i,j',r]        (soft; hard: max_r, without the prior)
        h_i      = sum_j A[i,j] v_j

    Args:
        query: (B,H,Nq,D).
        key: (B,G,M,Nk,D), the M component keys of every position. H is a multiple of G: query head h reads the keys and
            values of head h // (H/G), which are not copied (grouped queries; G = 1 is multi-query attention).
        value: (B,G,Nk,Dv).
        log_prior: log of the components' priors, (H,M) or one per position (H,M,Nk); None is uniform, log(1/M).
            It need not be normalised; -inf removes a component. It belongs to query heads.
        variance: s2; None is sqrt(D), else a number or a tensor (H,M), which may require grad.
        e_step: "soft" or "hard".
        is_causal: a query sees the keys up to its own position; with Nq != Nk the last query sees every key:

            Nq=2, Nk=4:  1 1 1 0        Nq=4, Nk=2:  0 0
                         1 1 1 1                     0 0
                                                     1 0
                                                     1 1
        window: with is_causal, a query sees only the last `window` keys up to its own position. What is outside costs
            nothing. With window=2:

            Nq=2, Nk=4:  0 1 1 0        Nq=4, Nk=4:  1 0 0 0
                         0 0 1 1                     1 1 0 0
                                                     0 1 1 0
                                                     0 0 1 1
        key_mask: bool (B,Nk), True where a key takes part. A query with no key left gets zeros and zero gradients.
        query_mask: bool (B,Nq), True for real queries. The others get zeros and zero gradients, and cost nothing on a
            GPU where they are whole blocks of padding.
        dropout_p: probability of dropping an attention weight.
        return_lse: also return the log of the row sums (hard: with max_r, without the prior), by which
            `merge_attention` joins results over parts of the keys:

            lse_i = log sum_j sum_r exp l[i,j,r]

        impl: "auto", "reference", "blockwise" or "triton". An implementation that you name is used or raises an error.

    Returns:
        The output (B,H,Nq,Dv). With `return_lse` also lse (B,H,Nq), in float32 for half precision; -inf for a query
        that sees no key. It is differentiable, and dropout does not change it.
    """
    query, key, _ = check.check_query_key(query, key, None)
    value = check.check_value(value, query, key)
    visibility = check_visibility(query, key, is_causal, window, key_mask, query_mask)
    options = check_options(
        query, key.shape[-2], key.shape[2], log_prior, variance, visibility, e_step, dropout_p, return_lse
    )
    module = implementation(impl, query, value, key.shape[2])
    with without_autocast(query):
        return returned(module.mgk_attention(query, key, value, options), options, key.shape[2])


@overload
def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None = None, *,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@accepts_dtensors(OUTPUT, OUTPUT)
def smgk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g nk d"],
    shift: Float[Tensor, "h m d"],
    value: Float[Tensor, "b g nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"] | tuple[Float[Tensor, "b h nq dv"], Float[Tensor, "b h nq"]]:
    """Attention with a mixture of shifted Gaussian keys (sMGK): `mgk_attention` on the keys k_jr = k_j + b_r.

    With one variance for all components it costs one score product and one exponential per pair (docs/math.md).

    Args:
        query, value, log_prior, variance, e_step, is_causal, window, key_mask, query_mask, dropout_p, return_lse, impl:
            as in `mgk_attention`.
        key: (B,G,Nk,D). H is a multiple of G, as in `mgk_attention`.
        shift: b, (H,M,D). It belongs to query heads, so the heads of a group may differ.
    """
    check.check_tensor("shift", shift, "H,M,D")
    query, key, _ = check.check_query_key(query, key, shift)
    value = check.check_value(value, query, key)
    visibility = check_visibility(query, key, is_causal, window, key_mask, query_mask)
    options = check_options(
        query, key.shape[-2], shift.shape[1], log_prior, variance, visibility, e_step, dropout_p, return_lse
    )
    module = implementation(impl, query, value, shift.shape[1] if isinstance(options.variance, Tensor) else 0)
    with without_autocast(query):
        return returned(module.smgk_attention(query, key, shift, value, options), options, shift.shape[1])


@accepts_dtensors(OUTPUT)
def attention_weights(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"] | Float[Tensor, "b g nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
) -> Float[Tensor, "b h nq nk"]:
    """Compute the dense weights A of Eqn 9 or 12, (B,H,Nq,Nk), for inspection. With `shift`, key is (B,G,Nk,D)."""
    query, key, shift = check.check_query_key(query, key, shift)
    visibility = check_visibility(query, key, is_causal, window, key_mask, None)
    key = _component_keys(query, key, shift)
    options = check_options(query, key.shape[-2], key.shape[2], log_prior, variance, visibility, e_step)
    visible = reference.visible_pairs(query, key.shape[-2], visibility)
    with without_autocast(query):
        weights, _ = reference.attention_weights(query, key, options.log_prior, options.variance, options.hard, visible)
        return weights.to(query.dtype)


@accepts_dtensors(OUTPUT)
def responsibilities(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"] | Float[Tensor, "b g nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
) -> Float[Tensor, "b h m nq nk"]:
    """Compute gamma of Eqn 11, the share of component r in the weight of key j for query i: (B,H,M,Nq,Nk).

    They sum to one over r for every visible pair, and are zero for the others. Dense: for inspection.
    """
    query, key, shift = check.check_query_key(query, key, shift)
    visibility = check_visibility(query, key, is_causal, window, key_mask, None)
    key = _component_keys(query, key, shift)
    options = check_options(query, key.shape[-2], key.shape[2], log_prior, variance, visibility)
    visible = reference.visible_pairs(query, key.shape[-2], visibility)
    with without_autocast(query):
        return reference.responsibilities(query, key, options.log_prior, options.variance, visible).to(query.dtype)


def takes_rows(x: Tensor, width: int, impl: str) -> bool:
    """Whether `rows_attention` has kernels for heads of this width, computed from x."""
    return dispatch.takes_packed(impl, x.device.type, dtype_name(x.dtype), width, HAS_TRITON, capability(x.device))


def rows_attention(
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 h m t d"] | Float[Tensor, "1 h t d"],
    shift: Float[Tensor, "h m d"] | None,
    value: Float[Tensor, "1 h t dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"] | None,
    variance: Float[Tensor, "h m"] | None,
    e_step: str,
    is_causal: bool,
    window: int | None,
    dropout_p: float,
    cu_seqlens: Int[Tensor, " b+1"],
    max_seqlen: int,
) -> Float[Tensor, "1 h t dv"]:
    """Attention within packed sequences: sequence b is at cu_seqlens[b] to cu_seqlens[b+1]. Zero after the last one."""
    from mgk.ops import triton  # loads Triton

    components = key.shape[2] if shift is None else shift.shape[1]
    s2 = check.check_variance(variance, query.shape[1], components, query)
    visibility = Visibility(is_causal, check.check_window(window, is_causal, max_seqlen))
    options = Options(log_prior, s2, visibility, e_step == "hard", dropout_p)
    rows = Rows(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    with without_autocast(query):
        if shift is None:
            return triton.mgk_attention(query, key, value, options, rows)[0]
        return triton.smgk_attention(query, key, shift, value, options, rows)[0]


def implementation(impl: str, query: Tensor, value: Tensor, components: int = 0) -> ModuleType:
    """The module that does the work. Where "auto" is left with the dense formula, it warns once and says why.

    `components`: those with scores of their own, of which a GPU may have too little shared memory for many.
    """
    check.check_choice("impl", impl, IMPLEMENTATIONS)
    if impl == "auto" and check.is_exported_to_onnx():
        return reference
    width, dtype, gpu = max(query.shape[-1], value.shape[-1]), dtype_name(query.dtype), capability(query.device)
    without_tile = ""
    if (
        components
        and query.device.type == "cuda"
        and not dispatch.decodes(query.shape[2], torch.is_grad_enabled(), False, False, False)
    ):
        without_tile = dispatch.no_tile("projected", dtype, width, components, gpu, bool(torch.version.hip))
    name, reason = dispatch.implementation(
        impl, query.device.type, dtype, width, HAS_TRITON, gpu, native.MISSING, without_tile
    )
    if name == "reference" and impl == "auto" and query.device.type != "meta":
        warn_dense(reason)
    if name == "blockwise" and impl == "auto" and native.MISSING:
        warn_slow(native.MISSING)
    if name == "triton":  # loads Triton
        from mgk.ops import triton

        triton.require_support(query, value)
        return triton
    if name == "native":
        native.require_support(query, width)
        return native
    return reference if name == "reference" else blockwise


@cache
def warn_dense(reason: str) -> None:
    """Once for each reason."""
    message = f"impl='auto' takes the dense reference implementation, in O(N^2) memory: {reason}"
    warnings.warn(message, stacklevel=4)


@cache
def warn_slow(reason: str) -> None:
    """Once for each reason."""
    message = f"mgk computes attention on the CPU without its native kernels, two to four times as slowly: {reason}"
    warnings.warn(message, stacklevel=4)


def returned(result: Result, options: Options, components: int) -> Tensor | tuple[Tensor, Tensor]:
    """The output, and with `return_lse` the lse. Implementations leave out a uniform prior 1/M: it is added here."""
    output, lse = result
    if not options.return_lse or lse is None:
        return output
    return output, lse - math.log(components) if options.log_prior is None and not options.hard else lse


def _component_keys(query: Tensor, key: Tensor, shift: Tensor | None) -> Tensor:
    """(B,H,M,Nk,D)."""
    return for_each_query_head(key, query.shape[1]) if shift is None else shifted_keys(key, shift)
