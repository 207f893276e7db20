"""Queries, keys and values of `MixtureAttention`.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, T rows of a packed batch, E width
of the model, D width of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.nn import arguments, operators
from mgk.nn.packing import Packing
from mgk.ops.dtensor import local_part
from mgk.variants import PROJECTED

if TYPE_CHECKING:
    from mgk.nn.attention import MixtureAttention


def project(
    module: MixtureAttention, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B,H,Nq,D), keys (B,G,Nk,D) or (B,G,M,Nk,D), and values (B,G,Nk,D), before rotary positions.

    The inputs are (B,N,E). With `packing` they are (1,T,E), and the results are padded.
    """

    def padded(x: Tensor) -> Tensor:
        return x if packing is None else packing.unpack(x.squeeze(0))

    projections = (module.query_proj, module.key_proj, module.value_proj)
    if key is query and value is query and all(map(arguments.is_plain_linear, projections)):
        # One product reads x once, forward and backward: on a GPU 4% to 6% of a training step at width 64.
        weight = torch.cat([projection.weight for projection in projections])
        bias = None if module.query_proj.bias is None else torch.cat([part.bias for part in projections])
        sizes = [projection.out_features for projection in projections]
        q, k, v = torch.split(padded(nn.functional.linear(query, weight, bias)), sizes, -1)
    else:
        q, k, v = (padded(part(x)) for part, x in zip(projections, (query, key, value), strict=True))
    head: tuple[int, ...] = (module.head_dim,)
    key_head = (module.num_components, *head) if module.variant in PROJECTED else head
    # Not num_heads: in tensor parallelism the process has some of them.
    q, k, v = (
        x.view(*x.shape[:2], x.shape[-1] // math.prod(each), *each) for x, each in ((q, head), (k, key_head), (v, head))
    )
    q, k, v = (x.movedim(1, -2) for x in (module.query_norm(q), module.key_norm(k), v))
    if module.mixing == "keys":
        k = operators.mean_key(k, module.key_shift, local_part(module.log_prior))
    return q, k, v
