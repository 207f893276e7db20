"""The public functions of softmax-like mixture attention: check the arguments, choose an implementation, call it.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops import blockwise, dispatch, reference
from mgk.ops.common import capability, compute_dtype, dtype_name, shifted_keys, without_autocast
from mgk.ops.dispatch import IMPLEMENTATIONS
from mgk.ops.dtensor import OUTPUT, accepts_dtensors

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


@accepts_dtensors(OUTPUT)
def mgk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"],
    value: Float[Tensor, "b h nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Attention with a mixture of Gaussian keys (MGK), Eqns 9, 10 and 12.

        l[i,j,r] = log prior[j,r] - |q_i - k_jr|^2 / (2 s2_r)
        A[i,j]   = sum_r exp l[i,j,r] / sum_j' sum_r exp l[i,j',r]        (soft; hard: max_r, without the prior)
        h_i      = sum_j A[i,j] v_j

    Args:
        query: (B,H,Nq,D).
        key: (B,H,M,Nk,D), the M component keys of every position.
        value: (B,H,Nk,Dv).
        log_prior: log of the components' priors, (H,M) or one per position (H,M,Nk); None is uniform. It need not be
            normalised; -inf removes a component.
        variance: s2; None is sqrt(D), else a number or a tensor (H,M), which may require grad.
        e_step: "soft" or "hard".
        is_causal: a query sees the keys up to its own position; with Nq != Nk the last query sees every key:

            Nq=2, Nk=4:  1 1 1 0        Nq=4, Nk=2:  0 0
                         1 1 1 1                     0 0
                                                     1 0
                                                     1 1
        key_mask: bool (B,Nk), True where a key takes part. A query with no key left gets zeros and zero gradients.
        query_mask: bool (B,Nq), True for real queries. The others get zeros and zero gradients, and cost nothing on a
            GPU where they are whole blocks of padding.
        dropout_p: probability of dropping an attention weight.
        impl: "auto", "reference", "blockwise" or "triton". An implementation that you name is used or raises an error.
    """
    query, key, _ = check.check_query_key(query, key, None)
    value = check.check_value(value, query, key)
    options = _options(query, key, key.shape[2], log_prior, variance, e_step, is_causal, key_mask, dropout_p)
    query_mask = check.check_mask("query_mask", query_mask, "B,Nq", (query.shape[0], query.shape[2]), query)
    module = implementation(impl, query, value)
    with without_autocast(query):
        output: Tensor = module.mgk_attention(query, key, value, *options, query_mask)
    return output


@accepts_dtensors(OUTPUT)
def smgk_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    shift: Float[Tensor, "h m d"],
    value: Float[Tensor, "b h nk dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
) -> Float[Tensor, "b h nq dv"]:
    """Attention with a mixture of shifted Gaussian keys (sMGK): `mgk_attention` on the keys k_jr = k_j + b_r.

    With one variance for all components it costs one score product and one exponential per pair (docs/math.md).

    Args:
        query, value, log_prior, variance, e_step, is_causal, key_mask, query_mask, dropout_p, impl:
            as in `mgk_attention`.
        key: (B,H,Nk,D).
        shift: b, (H,M,D).
    """
    check.check_tensor("shift", shift, "H,M,D")
    query, key, _ = check.check_query_key(query, key, shift)
    value = check.check_value(value, query, key)
    options = _options(query, key, shift.shape[1], log_prior, variance, e_step, is_causal, key_mask, dropout_p)
    query_mask = check.check_mask("query_mask", query_mask, "B,Nq", (query.shape[0], query.shape[2]), query)
    module = implementation(impl, query, value)
    with without_autocast(query):
        output: Tensor = module.smgk_attention(query, key, shift, value, *options, query_mask)
    return output


@accepts_dtensors(OUTPUT)
def attention_weights(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
) -> Float[Tensor, "b h nq nk"]:
    """Compute the dense weights A of Eqn 9 or 12, (B,H,Nq,Nk), for inspection. With `shift`, key is (B,H,Nk,D)."""
    query, key, shift = check.check_query_key(query, key, shift)
    key = _component_keys(key, shift)
    log_prior, s2, e_step, is_causal, key_mask, _ = _options(
        query, key, key.shape[2], log_prior, variance, e_step, is_causal, key_mask, 0.0
    )
    visible = reference.visible_pairs(query, key.shape[-2], is_causal, key_mask)
    with without_autocast(query):
        return reference.attention_weights(query, key, log_prior, s2, e_step, visible).to(query.dtype)


@accepts_dtensors(OUTPUT)
def responsibilities(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
) -> Float[Tensor, "b h m nq nk"]:
    """Compute gamma of Eqn 11, the share of component r in the weight of key j for query i: (B,H,M,Nq,Nk).

    They sum to one over r for every visible pair, and are zero for the others. Dense: for inspection.
    """
    query, key, shift = check.check_query_key(query, key, shift)
    key = _component_keys(key, shift)
    log_prior, s2, _, is_causal, key_mask, _ = _options(
        query, key, key.shape[2], log_prior, variance, "soft", is_causal, key_mask, 0.0
    )
    visible = reference.visible_pairs(query, key.shape[-2], is_causal, key_mask)
    with without_autocast(query):
        return reference.responsibilities(query, key, log_prior, s2, visible).to(query.dtype)


@accepts_dtensors()
def prior_statistics(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "h m nk"], Float[Tensor, " nk"]]:
    """Sum gamma over the visible queries of each key, (H,M,Nk), and count these queries, (Nk,).

    The M-step of the prior divides the one by the other. Sums of several batches or processes can be added. No
    gradient flows through an M-step.
    """
    query, key, shift = check.check_query_key(query, key, shift)
    components = key.shape[2] if shift is None else shift.shape[1]
    log_prior, s2, _, is_causal, key_mask, _ = _options(
        query, key, components, log_prior, variance, "soft", is_causal, key_mask, 0.0
    )
    query_mask = check.check_mask("query_mask", query_mask, "B,Nq", (query.shape[0], query.shape[2]), query)
    module = implementation(impl, query, query)
    with torch.no_grad(), without_autocast(query):
        total, count = module.prior_statistics(query, key, shift, log_prior, s2, is_causal, key_mask, query_mask)
    return total, count


@accepts_dtensors()
def update_prior(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "h m nk"]:
    """The M-step for the prior, prior[j,r] = sum_i gamma[i,j,r] / N over the visible queries of all batches, as logs.

    Returns (H,M,Nk). A key that no query sees keeps the prior it had. `query_mask`: bool (B,Nq), True for real queries.
    """
    total, count = prior_statistics(
        query, key, log_prior, shift=shift, variance=variance, is_causal=is_causal, key_mask=key_mask,
        query_mask=query_mask, impl=impl,
    )  # fmt: skip
    components = total.shape[1]
    if log_prior is None:
        before = total.new_full(total.shape, 1 / components).log()
    else:
        before = log_prior.detach().to(total.dtype)
        before = (before[..., None] if before.dim() == 2 else before).expand_as(total)
    return torch.where(count > 0, (total / count.clamp(min=1)).log(), before)


@accepts_dtensors()
def update_components(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "b h m nk d"], Float[Tensor, "h m"]]:
    """The M-step for means and variances, Eqn 13:

        k_jr = sum_i gamma[i,j,r] q_i / sum_i gamma[i,j,r]
        s2_r = sum_bij gamma[i,j,r] |q_i - k_jr|^2 / (D sum_bij gamma[i,j,r])

    Returns the keys (B,H,M,Nk,D) and the variances (H,M), in float32 or float64. A component that explains no query
    keeps its key and variance. The variance is pooled over positions, as the model shares it; and it is divided by D,
    which the paper's formula leaves out and without which the step can lower the likelihood. With unequal variances
    the likelihood has the factor s2_r^(-D/2): add `-D/2 log s2_r` to `log_prior` if the step must not lower it
    (docs/math.md).
    """
    query, key, shift = check.check_query_key(query, key, shift)
    key = _component_keys(key, shift)
    log_prior, s2, _, is_causal, key_mask, _ = _options(
        query, key, key.shape[2], log_prior, variance, "soft", is_causal, key_mask, 0.0
    )
    query_mask = check.check_mask("query_mask", query_mask, "B,Nq", (query.shape[0], query.shape[2]), query)
    if impl == "auto" and query.device.type != "cpu":  # Triton has no kernel for it
        impl = "reference"
    module = implementation(impl, query, query)
    if not hasattr(module, "component_statistics"):
        raise ValueError(f"impl: expected 'auto', 'reference' or 'blockwise' for update_components, got {impl!r}")
    with torch.no_grad(), without_autocast(query):
        # Distances do not change when queries and keys move together; about their mean the sums below cancel least.
        centre = query.to(compute_dtype(query.dtype)).mean(2, keepdim=True).nan_to_num(0)
        query, key = query - centre, key - centre[:, :, None]
        weight, mean, square = module.component_statistics(
            query, key, log_prior, s2, is_causal, key_mask, query_mask
        )  # sum_i gamma (B,H,M,Nk), sum_i gamma q_i (B,H,M,Nk,D), sum_i gamma |q_i|^2 (B,H,M,Nk)
        used = weight > 0
        new_key = torch.where(used[..., None], mean / torch.where(used, weight, 1)[..., None], key)
        # sum gamma |q - k|^2 = sum gamma |q|^2 - N |k|^2 at the new mean
        scatter = torch.where(used, square - weight * new_key.square().sum(-1), 0).clamp(min=0).sum((0, 3))
        mass = weight.sum((0, 3))
        before = s2.to(mass.dtype) if isinstance(s2, Tensor) else mass.new_full(mass.shape, s2)
        new_variance = torch.where(mass > 0, scatter / (mass.clamp(min=1e-30) * query.shape[-1]), before)
        return new_key + centre[:, :, None], new_variance


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
    dropout_p: float,
    cu_seqlens: Int[Tensor, " b+1"],
    max_seqlen: int,
) -> Float[Tensor, "1 h t dv"]:
    """Attention within packed sequences: sequence b is at cu_seqlens[b] to cu_seqlens[b+1]. Zero after the last one."""
    from mgk.ops import triton  # loads Triton

    components = key.shape[2] if shift is None else shift.shape[1]
    s2 = check.check_variance(variance, query.shape[1], components, query)
    with without_autocast(query):
        options = value, log_prior, s2, e_step, is_causal, None, dropout_p, None, cu_seqlens, max_seqlen
        if shift is None:
            return triton.mgk_attention(query, key, *options)
        return triton.smgk_attention(query, key, shift, *options)


def implementation(impl: str, query: Tensor, value: Tensor) -> ModuleType:
    """The module that does the work. Where "auto" is left with the dense formula, it warns once and says why."""
    check.check_choice("impl", impl, IMPLEMENTATIONS)
    width = max(query.shape[-1], value.shape[-1])
    name, reason = dispatch.implementation(
        impl, query.device.type, dtype_name(query.dtype), width, HAS_TRITON, capability(query.device)
    )
    if name == "reference" and impl == "auto" and query.device.type != "meta":
        warn_dense(reason)
    if name == "triton":  # loads Triton
        from mgk.ops import triton

        triton.require_support(query, value)
        return triton
    return reference if name == "reference" else blockwise


@cache
def warn_dense(reason: str) -> None:
    """Once for each reason."""
    message = f"impl='auto' takes the dense reference implementation, in O(N^2) memory: {reason}"
    warnings.warn(message, stacklevel=4)


def _options(
    query: Tensor,
    key: Tensor,
    components: int,
    log_prior: object,
    variance: object,
    e_step: object,
    is_causal: object,
    key_mask: object,
    dropout_p: object,
) -> tuple[Tensor | None, float | Tensor, str, bool, Tensor | None, float]:
    batch, heads, keys = query.shape[0], query.shape[1], key.shape[-2]
    return (
        check.check_log_prior(log_prior, heads, components, keys, query),
        check.check_variance(variance, heads, components, query),
        check.check_choice("e_step", e_step, check.E_STEPS),
        check.check_flag("is_causal", is_causal),
        check.check_mask("key_mask", key_mask, "B,Nk", (batch, keys), query),
        check.check_probability("dropout_p", dropout_p),
    )


def _component_keys(key: Tensor, shift: Tensor | None) -> Tensor:
    return key if shift is None else shifted_keys(key, shift)
