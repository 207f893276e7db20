"""The M-steps of a module's prior, means and variances: running estimates in buffers, not learned parameters.

The prior (the paper's setting B) is the mean responsibility of each component, see `mgk.update_prior`.

The means k_jr = k_j + b_r share b_r over all positions, and the variances are shared too. So Eqn 13 is summed over all
pairs before the division (docs/math.md, 7):

    b_r  = sum_ij gamma[i,j,r] (q_i - k_j) / sum_ij gamma[i,j,r]
    s2_r = sum_ij gamma[i,j,r] |q_i - k_j - b_r|^2 / (D sum_ij gamma[i,j,r])

over the real queries i that see the real key j. gamma is Eqn 11 with the factor s2_r^(-D/2) of the Gaussians; without
it the widest component would get all the responsibility. With it no step lowers the likelihood of the queries.

B batch, H heads, M components, Nq queries, Nk keys, N positions of a prior per position, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgk.ops import m_steps
from mgk.ops.common import compute_dtype, without_autocast
from mgk.ops.dtensor import local_part
from mgk.ops.options import Visibility

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from mgk.nn.attention import MixtureAttention
    from mgk.nn.operators import AttentionInputs

ROWS = 64  # queries processed at a time, so that memory is linear in Nk
MIN_VARIANCE = 1e-6  # where all queries are equal

Groups = tuple[Any, ...]  # process groups, one for each dimension of a mesh
ALL: Groups = (None,)  # the group of all processes


@torch.no_grad()
def m_step(module: MixtureAttention, x: AttentionInputs, query_mask: Bool[Tensor, "b nq"] | None) -> None:
    """Update the module's buffers from the queries where `query_mask` is True.

    The responsibilities of both updates come from `x`, the values before the step.
    """
    seen: dict[str, Any] = {
        "is_causal": x.is_causal, "window": x.window, "key_mask": x.key_mask, "query_mask": query_mask,
    }  # fmt: skip
    if module.prior_kind == "em":
        assert module.log_prior is not None
        total, count = prior_statistics(x.query, x.key, x.shift, x.log_prior, x.variance, **seen, impl=x.impl)
        update_log_prior(local_part(module.log_prior), total, count, module.prior_momentum, module.m_step_groups)
    if module.means_kind == "em":
        assert module.shift is not None
        assert module.log_variance is not None
        buffers = local_part(module.shift), local_part(module.log_variance)
        update_means(*buffers, x.log_prior, x.query, x.key, **seen, groups=module.m_step_groups)


# A custom operator: torch.compile need not trace the implementation.
@torch.library.custom_op("mgk::prior_statistics", mutates_args=())
def prior_statistics(
    query: Tensor,
    key: Tensor,
    shift: Tensor | None,
    log_prior: Tensor | None,
    variance: Tensor | None,
    is_causal: bool,
    window: int | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """`mgk.ops.prior_statistics`: sums of responsibilities (H,M,Nk) and numbers of visible queries (Nk,)."""
    return m_steps.prior_statistics(
        query, key, log_prior, shift=shift, variance=variance, is_causal=is_causal, window=window, key_mask=key_mask,
        query_mask=query_mask, impl=impl,
    )  # fmt: skip


@prior_statistics.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    components = key.shape[2] if shift is None else shift.shape[1]
    dtype = compute_dtype(query.dtype)
    total = query.new_empty(query.shape[1], components, key.shape[-2], dtype=dtype)
    return total, query.new_empty(key.shape[-2], dtype=dtype)


@torch.no_grad()
def update_log_prior(
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"],
    total: Float[Tensor, "h m nk"],
    count: Float[Tensor, " nk"],
    momentum: float,
    groups: Groups = ALL,
) -> None:
    """Update in place: prior <- momentum * prior + (1 - momentum) * total / count, over the batches of all processes.

    `total` and `count` are those of `prior_statistics`. A prior (H,M) is shared over positions: it is the mean of the
    positions' priors, weighted by the number of queries that see each. The prior of a key that no query sees, or whose
    statistics are not finite, stays unchanged.
    """
    if log_prior.dim() == 2:
        total, count = total.sum(-1), count.sum()
    else:  # processes may hold sequences of different lengths: all send N positions
        missing = log_prior.shape[-1] - total.shape[-1]
        total, count = torch.nn.functional.pad(total, (0, missing)), torch.nn.functional.pad(count, (0, missing))
    total, count = sum_over_processes(groups, total, count)
    prior = momentum * log_prior.to(total.dtype).exp() + (1 - momentum) * total / count.clamp(min=1)
    log_prior.copy_(torch.where((count > 0) & total.isfinite(), prior.log(), log_prior.to(total.dtype)))


@torch.no_grad()
def update_means(
    shift: Float[Tensor, "h m d"],
    log_variance: Float[Tensor, "h m"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    *,
    is_causal: bool,
    window: int | None,
    key_mask: Bool[Tensor, "b nk"] | None,
    query_mask: Bool[Tensor, "b nq"] | None,
    groups: Groups = ALL,
) -> None:
    """Update `shift` and `log_variance` in place by one step.

    A component that explains no query, or whose statistics are not finite, keeps both.
    """
    dtype, width = compute_dtype(query.dtype), query.shape[-1]
    with without_autocast(query):
        q, k, b, log_s2 = (x.to(dtype) for x in (query, key, shift, log_variance))
        bias = -0.5 * width * log_s2[..., None]  # (H,M,1)
        if log_prior is not None:
            bias = bias + log_prior.to(dtype).view(*log_s2.shape, -1)
        visibility = Visibility(is_causal, window, key_mask, query_mask)
        statistics = mean_statistics(q, k, b, log_s2, bias, visibility)
        mass, offset, square = sum_over_processes(groups, *statistics)
        used = (mass > 0) & (offset.sum(-1) + square).isfinite()
        weight = torch.where(used, mass, 1)
        step = offset / weight[..., None]
        # About the new shift, b + step, the mean square is smaller by |step|^2.
        variance = (square / weight - step.square().sum(-1)) / width
        shift.copy_(torch.where(used[..., None], b + step, b))
        log_variance.copy_(torch.where(used, variance.clamp(min=MIN_VARIANCE).log(), log_s2))


def mean_statistics(
    query: Tensor,
    key: Tensor,
    shift: Tensor,
    log_variance: Tensor,
    bias: Float[Tensor, "h m nk"] | Float[Tensor, "h m 1"],
    visibility: Visibility,
) -> tuple[Float[Tensor, "h m"], Float[Tensor, "h m d"], Float[Tensor, "h m"]]:
    """Return the sums over batch, i and j of gamma, of gamma (q_i - k_j - b_r), and of gamma |q_i - k_j - b_r|^2.

    In training, queries and keys can drift far apart, because the shifts make up for it. So both are centred first:
    otherwise the squares would cancel.
    """
    is_causal, window, key_mask, query_mask = visibility
    num_queries, num_keys = query.shape[2], key.shape[2]
    query_mean, key_mean = (x.mean((0, 2), keepdim=True) for x in (query, key))
    query, key, shift = query - query_mean, key - key_mean, shift - (query_mean - key_mean)[0]
    half_precision = 0.5 * (-log_variance).exp()[..., None, None]  # 1 / 2 s2, (H,M,1,1)
    key_square = key.square().sum(-1)[:, :, None]  # (B,H,1,Nk)
    key_part = torch.einsum("bhjd,hmd->bhmj", key, shift)[:, :, :, None]
    constant = shift.square().sum(-1)[..., None, None]
    columns = torch.arange(num_keys, device=query.device)
    key_mass = query.new_zeros(*query.shape[:2], shift.shape[1], num_keys)  # sum_i gamma, (B,H,M,Nk)
    offset, square = torch.zeros_like(shift), torch.zeros_like(log_variance)
    for start in range(0, num_queries, ROWS):
        q = query[:, :, start : start + ROWS]
        distance = q.square().sum(-1)[..., None] + key_square - 2 * q @ key.mT  # (B,H,rows,Nk)
        query_part = torch.einsum("bhid,hmd->bhmi", q, shift)[..., None]
        shifted = (distance[:, :, None] - 2 * (query_part - key_part) + constant).clamp(min=0)
        gamma = (bias[:, :, None] - shifted * half_precision).softmax(2)  # (B,H,M,rows,Nk)
        if is_causal:
            last = torch.arange(start, start + q.shape[2], device=query.device)[:, None] + num_keys - num_queries
            gamma = gamma * ((columns <= last) & (columns > last - (window or num_keys + num_queries)))
        if key_mask is not None:
            gamma = gamma.masked_fill(~key_mask[:, None, None, None], 0)
        if query_mask is not None:
            gamma = gamma.masked_fill(~query_mask[:, None, None, start : start + ROWS, None], 0)
        key_mass += gamma.sum(-2)
        offset += torch.einsum("bhmi,bhid->hmd", gamma.sum(-1), q)
        square += torch.einsum("bhmij,bhmij->hm", gamma, shifted)
    mass = key_mass.sum((0, 3))
    return mass, offset - torch.einsum("bhmj,bhjd->hmd", key_mass, key) - mass[..., None] * shift, square


def sum_over_processes(groups: Groups, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return the sum of each part over the processes, with one all-reduce for each group."""
    if not (dist.is_available() and dist.is_initialized()):
        return parts
    sums = torch.cat([part.flatten() for part in parts])
    for group in groups:
        dist.all_reduce(sums, group=group)
    pieces = torch.split(sums, [part.numel() for part in parts])
    return tuple(piece.view_as(part) for piece, part in zip(pieces, parts, strict=True))
