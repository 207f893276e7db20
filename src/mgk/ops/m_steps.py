"""The public functions of the M-steps: priors, means and variances.

B batch, H query heads, G heads of keys (H is a multiple of G), M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops.api import implementation
from mgk.ops.common import compute_dtype, for_each_query_head, shifted_keys, without_autocast
from mgk.ops.dtensor import accepts_dtensors
from mgk.ops.options import Options, check_options, check_visibility

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@accepts_dtensors()
def prior_statistics(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"] | Float[Tensor, "b g nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "h m nk"], Float[Tensor, " nk"]]:
    """Sum gamma over the visible queries of each key, (H,M,Nk), and count these queries, (Nk,).

    The M-step of the prior divides the one by the other. Sums of several batches or processes can be added. Priors
    belong to query heads: each has sums of its own, also where several read the same keys. No gradient flows through an
    M-step.
    """
    query, key, shift = check.check_query_key(query, key, shift)
    components = key.shape[2] if shift is None else shift.shape[1]
    visibility = check_visibility(query, key, is_causal, window, key_mask, query_mask)
    options = check_options(query, key.shape[-2], components, log_prior, variance, visibility)
    module = implementation(impl, query, query)
    with torch.no_grad(), without_autocast(query):
        total, count = module.prior_statistics(query, key, shift, options)
    return total, count


@accepts_dtensors()
def update_prior(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g m nk d"] | Float[Tensor, "b g nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "h m nk"]:
    """The M-step for the prior, prior[j,r] = sum_i gamma[i,j,r] / N over the visible queries of all batches, as logs.

    Returns (H,M,Nk). A key that no query sees keeps the prior it had. `query_mask`: bool (B,Nq), True for real queries.
    """
    total, count = prior_statistics(
        query, key, log_prior, shift=shift, variance=variance, is_causal=is_causal, window=window, key_mask=key_mask,
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
    key: Float[Tensor, "b g m nk d"] | Float[Tensor, "b g nk d"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None = None,
    *,
    shift: Float[Tensor, "h m d"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    key_mask: Bool[Tensor, "b nk"] | None = None,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "b g m nk d"] | Float[Tensor, "b h m nk d"], Float[Tensor, "h m"]]:
    """The M-step for means and variances, Eqn 13:

        k_jr = sum_i gamma[i,j,r] q_i / sum_i gamma[i,j,r]
        s2_r = sum_bij gamma[i,j,r] |q_i - k_jr|^2 / (D sum_bij gamma[i,j,r])

    Returns the keys (B,G,M,Nk,D) and the variances (H,M), in float32 or float64. A key that several query heads read is
    their common mean: both sums of k_jr run over the heads too, with the weights 1 / s2_r of each. With `shift` every
    query head has keys of its own, so they are (B,H,M,Nk,D). A component that explains no query keeps its key and
    variance. The variance is pooled over positions, as the model shares it; and it is divided by D, which the paper's
    formula leaves out and without which the step can lower the likelihood. With unequal variances the likelihood has
    the factor s2_r^(-D/2): add `-D/2 log s2_r` to `log_prior` if the step must not lower it (docs/math.md).
    """
    query, key, shift = check.check_query_key(query, key, shift)
    visibility = check_visibility(query, key, is_causal, window, key_mask, query_mask)
    key = key if shift is None else shifted_keys(key, shift)
    options = check_options(query, key.shape[-2], key.shape[2], log_prior, variance, visibility)
    if impl == "auto" and query.device.type != "cpu":  # Triton has no kernel for it
        impl = "reference"
    module = implementation(impl, query, query)
    if not hasattr(module, "component_statistics"):
        raise ValueError(f"impl: expected 'auto', 'reference' or 'blockwise' for update_components, got {impl!r}")
    with torch.no_grad(), without_autocast(query):
        # Distances do not change when queries and keys move together; about their mean the sums below cancel least.
        centre = by_key_head(query.to(compute_dtype(query.dtype)), key).mean((2, 3))[:, :, None].nan_to_num(0)
        query, key = query - for_each_query_head(centre, query.shape[1]), key - centre[:, :, None]
        new_key, new_variance = means_and_variances(key, module.component_statistics(query, key, options), options)
        return new_key + centre[:, :, None], new_variance


def means_and_variances(
    key: Tensor, statistics: tuple[Tensor, Tensor, Tensor], options: Options
) -> tuple[Tensor, Tensor]:
    """New keys (B,G,M,Nk,D) and variances (H,M) from the sums over i of Eqn 13.

    These are of gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk).
    """
    weight, mean, square = statistics
    s2 = options.variance
    before = s2.to(weight.dtype) if isinstance(s2, Tensor) else weight.new_full(weight.shape[1:3], s2)
    shared, total = weight, mean
    if key.shape[1] < weight.shape[1]:
        by_precision = weight / before[..., None], mean / before[..., None, None]
        shared, total = (by_key_head(x, key).sum(2) for x in by_precision)
    used = shared > 0
    new_key = torch.where(used[..., None], total / torch.where(used, shared, 1)[..., None], key)
    # sum gamma |q - k|^2 = sum gamma |q|^2 - 2 k . sum gamma q + |k|^2 sum gamma
    by_head = by_key_head(square, key) + new_key.square().sum(-1)[:, :, None] * by_key_head(weight, key)
    cross = (by_key_head(mean, key) * new_key[:, :, None]).sum(-1)
    scatter = torch.where(used[:, :, None], by_head - 2 * cross, 0).clamp(min=0).flatten(1, 2).sum((0, 3))
    mass = weight.sum((0, 3))
    return new_key, torch.where(mass > 0, scatter / (mass.clamp(min=1e-30) * key.shape[-1]), before)


def by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """(B,H,...) -> (B,G,H/G,...): the query heads that read each head of `key`."""
    groups = key.shape[1]
    batch, heads = tensor.shape[:2]
    return tensor.reshape(batch, groups, heads // max(1, groups), *tensor.shape[2:])
