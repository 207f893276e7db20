"""The M-step for means and variances (Eqn 13) of a module's shifted keys: running estimates, not learned parameters.

The means k_jr = k_j + b_r share b_r over all positions, and the variances are shared too, so Eqn 13 is summed over what
shares them before it is divided (docs/math.md, 7):

    b_r  = sum_ij gamma[i,j,r] (q_i - k_j) / sum_ij gamma[i,j,r]
    s2_r = sum_ij gamma[i,j,r] |q_i - k_j - b_r|^2 / (D sum_ij gamma[i,j,r])

over the real queries i that see the real key j. gamma is Eqn 11 with the factor s2_r^(-D/2) of the Gaussians, without
which the widest component would take all. So no step lowers the likelihood of the queries.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.nn.prior import over_processes
from mgk.ops.common import compute_dtype, without_autocast

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

ROWS = 64  # queries at a time: memory is linear in Nk
LEAST = 1e-6  # of a variance: where all queries are one


@torch.no_grad()
def update_means(
    shift: Float[Tensor, "h m d"],
    log_variance: Float[Tensor, "h m"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b nk"] | None,
    query_mask: Bool[Tensor, "b nq"] | None,
) -> None:
    """In place: `shift` and `log_variance` after one step.

    A component that explains no query, or one that is not a number, keeps both.
    """
    dtype, width = compute_dtype(query.dtype), query.shape[-1]
    with without_autocast(query):
        q, k, b, log_s2 = (x.to(dtype) for x in (query, key, shift, log_variance))
        bias = -0.5 * width * log_s2[..., None]  # (H,M,1)
        if log_prior is not None:
            bias = bias + log_prior.to(dtype).view(*log_s2.shape, -1)
        mass, offset, square = over_processes(*statistics(q, k, b, log_s2, bias, is_causal, key_mask, query_mask))
        used = (mass > 0) & (offset.sum(-1) + square).isfinite()
        weight = torch.where(used, mass, 1)
        step = offset / weight[..., None]
        # About the new shift, b + step, the mean square is less by |step|^2
        variance = (square / weight - step.square().sum(-1)) / width
        shift.copy_(torch.where(used[..., None], b + step, b))
        log_variance.copy_(torch.where(used, variance.clamp(min=LEAST).log(), log_s2))


def statistics(
    query: Tensor,
    key: Tensor,
    shift: Tensor,
    log_variance: Tensor,
    bias: Float[Tensor, "h m nk"] | Float[Tensor, "h m 1"],
    is_causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> tuple[Float[Tensor, "h m"], Float[Tensor, "h m d"], Float[Tensor, "h m"]]:
    """Sums over batch, i and j of gamma, of gamma (q_i - k_j - b_r), and of gamma |q_i - k_j - b_r|^2.

    Shifts make up for any distance of queries and keys, and training goes far with it. So squares are taken about the
    means of both, where they do not cancel.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    query_mean, key_mean = (x.mean((0, 2), keepdim=True) for x in (query, key))
    query, key, shift = query - query_mean, key - key_mean, shift - (query_mean - key_mean)[0]
    half_precision = 0.5 * (-log_variance).exp()[..., None, None]  # 1 / 2 s2, (H,M,1,1)
    key_square = key.square().sum(-1)[:, :, None]  # (B,H,1,Nk)
    key_part = torch.einsum("bhjd,hmd->bhmj", key, shift)[:, :, :, None]
    constant = shift.square().sum(-1)[..., None, None]
    columns = torch.arange(num_keys, device=query.device)
    seen = query.new_zeros(*query.shape[:2], shift.shape[1], num_keys)  # sum_i gamma, (B,H,M,Nk)
    offset, square = torch.zeros_like(shift), torch.zeros_like(log_variance)
    for start in range(0, num_queries, ROWS):
        q = query[:, :, start : start + ROWS]
        distance = q.square().sum(-1)[..., None] + key_square - 2 * q @ key.mT  # (B,H,rows,Nk)
        query_part = torch.einsum("bhid,hmd->bhmi", q, shift)[..., None]
        reach = (distance[:, :, None] - 2 * (query_part - key_part) + constant).clamp(min=0)
        gamma = (bias[:, :, None] - reach * half_precision).softmax(2)  # (B,H,M,rows,Nk)
        if is_causal:
            rows = torch.arange(start, start + q.shape[2], device=query.device)[:, None]
            gamma = gamma * (columns - num_keys <= rows - num_queries)
        if key_mask is not None:
            gamma = gamma.masked_fill(~key_mask[:, None, None, None], 0)
        if query_mask is not None:
            gamma = gamma.masked_fill(~query_mask[:, None, None, start : start + ROWS, None], 0)
        seen += gamma.sum(-2)
        offset += torch.einsum("bhmi,bhid->hmd", gamma.sum(-1), q)
        square += torch.einsum("bhmij,bhmij->hm", gamma, reach)
    mass = seen.sum((0, 3))
    return mass, offset - torch.einsum("bhmj,bhjd->hmd", seen, key) - mass[..., None] * shift, square
