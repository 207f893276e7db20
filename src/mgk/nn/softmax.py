"""The softmax baseline in memory linear in N.

B batch, H heads, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.ops import api
from mgk.ops.common import compute_dtype

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def softmax_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    value: Float[Tensor, "b h nk dv"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b nk"] | None,
    dropout_p: float,
    impl: str,
) -> Float[Tensor, "b h nq dv"]:
    """PyTorch's scaled dot-product attention, wherever that needs no Nq x Nk mask or weights in memory.

    It does need them for causal attention that is padded or not square, and on a CPU for dropout: there `impl` computes
    softmax attention as MGK with one component. `is_causal` is lower-right aligned, as everywhere in mgk.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_causal = is_causal and num_queries > 1  # a single query is the last one, which sees every key
    square = not is_causal or (key_mask is None and num_queries == num_keys)
    if square and (dropout_p == 0 or query.is_cuda):
        mask = None if key_mask is None else key_mask[:, None, None]
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal)
    value_of_heads = value.flatten(0, 1)[None]
    query_of_heads, component, log_prior = as_mixture(query, key, key_mask)
    output = api.mgk_attention(
        query_of_heads, component, value_of_heads, log_prior, is_causal=is_causal, dropout_p=dropout_p, impl=impl
    )
    return output.view(*query.shape[:2], num_queries, value.shape[-1])


def softmax_weights(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b nk"] | None,
) -> Float[Tensor, "b h nq nk"]:
    """The dense weights, for looking at."""
    weights = api.attention_weights(*as_mixture(query, key, key_mask), is_causal=is_causal)
    return weights.view(*query.shape[:3], key.shape[2])


def as_mixture(query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention as MGK with one component, s2 = sqrt(D) and the prior exp(|k_j|^2 / 2 s2) (Eqns 5 and 6).

    Then l[i,j] = q_i.k_j / sqrt(D) - |q_i|^2 / 2 s2, and the last term cancels. The prior differs from sample to
    sample, so each sample's heads become heads of their own: query (1,B*H,Nq,D), key (1,B*H,1,Nk,D), prior (B*H,1,Nk).
    """
    log_prior = key.to(compute_dtype(key.dtype)).square().sum(-1) / (2 * math.sqrt(key.shape[-1]))
    if key_mask is not None:
        log_prior = log_prior.masked_fill(~key_mask[:, None], -math.inf)
    return query.flatten(0, 1)[None], key.flatten(0, 1)[None, :, None], log_prior.flatten(0, 1)[:, None]
