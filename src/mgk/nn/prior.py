"""The M-step of a module's prior (the paper's setting B): a running estimate instead of a learned parameter.

B batch, H heads, M components, Nk keys of this batch, N positions of a prior per position, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mgk.ops import api
from mgk.ops.common import compute_dtype

if TYPE_CHECKING:
    from jaxtyping import Float


# torch.compile takes it as it is: an implementation need not be one that can be traced.
@torch.library.custom_op("mgk::prior_statistics", mutates_args=())
def prior_statistics(
    query: Tensor,
    key: Tensor,
    shift: Tensor | None,
    log_prior: Tensor | None,
    variance: Tensor | None,
    is_causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """`mgk.ops.api.prior_statistics`: sums of responsibilities (H,M,Nk) and numbers of visible queries (Nk,)."""
    return api.prior_statistics(
        query, key, log_prior, shift=shift, variance=variance, is_causal=is_causal, key_mask=key_mask,
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
) -> None:
    """In place: prior <- momentum * prior + (1 - momentum) * total / count, over the batches of all processes.

    `total` and `count` are those of `mgk.prior_statistics`. A prior (H,M) is shared over positions: it is the mean of
    the positions' priors weighted by how many queries saw each. Where no query saw a key, or one that
    is not a number did, the prior stays.
    """
    if log_prior.dim() == 2:
        total, count = total.sum(-1), count.sum()
    else:  # processes may hold sequences of different lengths: all send N positions
        room = log_prior.shape[-1] - total.shape[-1]
        total, count = torch.nn.functional.pad(total, (0, room)), torch.nn.functional.pad(count, (0, room))
    total, count = over_processes(total, count)
    prior = momentum * log_prior.to(total.dtype).exp() + (1 - momentum) * total / count.clamp(min=1)
    log_prior.copy_(torch.where((count > 0) & total.isfinite(), prior.log(), log_prior.to(total.dtype)))


def mean_key(
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    shift: Float[Tensor, "h m d"] | None,
    prior: Float[Tensor, "h m"],
) -> Float[Tensor, "b h nk d"]:
    """sum_r prior_r k_jr: the mixture before a feature map, one key instead of M."""
    if shift is None:
        return torch.einsum("bhmnd,hm->bhnd", key, prior.to(key.dtype))
    mean = (prior[..., None] * shift).sum(1)
    return key * prior.sum(1).to(key.dtype)[:, None, None] + mean.to(key.dtype)[:, None]


def over_processes(*parts: Tensor) -> tuple[Tensor, ...]:
    """Sums of each part over all processes, in one message."""
    if not (dist.is_available() and dist.is_initialized()):
        return parts
    sums = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(sums)
    pieces = torch.split(sums, [part.numel() for part in parts])
    return tuple(piece.view_as(part) for piece, part in zip(pieces, parts, strict=True))
