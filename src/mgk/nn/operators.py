"""Calls of the operators of `mgk.ops` for `MixtureAttention`, on projected queries, keys and values.

B batch, H heads, M components, Nq queries, Nk keys, T rows of a packed batch, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mgk.nn.cache import StateCache
from mgk.nn.packing import Packing
from mgk.nn.pages import PagedLayer
from mgk.nn.softmax import packed_softmax_attention, softmax_attention, softmax_weights
from mgk.ops import api
from mgk.ops import arguments as check
from mgk.ops.common import without_autocast
from mgk.ops.dtensor import local_part
from mgk.ops.feature_maps import FeatureMap
from mgk.ops.linear import linear_step, mlk_attention, rows_attention, smlk_attention, takes_rows
from mgk.ops.options import Options, Visibility
from mgk.ops.pages import decodes as reads_pages
from mgk.variants import GAUSSIAN, LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from mgk.nn.attention import MixtureAttention


@dataclass(frozen=True)
class AttentionInputs:
    """Everything that the attention operator reads in one call of `MixtureAttention`.

    Rotary positions are already applied. With a cache, keys, values and `key_mask` cover the cached positions too.
    """

    query: Float[Tensor, "b h nq d"]
    key: Float[Tensor, "b g nk d"] | Float[Tensor, "b g m nk d"]  # one key per component for mgk and mlk
    value: Float[Tensor, "b g nk d"]
    shift: Float[Tensor, "h m d"] | None  # smgk and smlk
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None  # None is uniform
    variance: Float[Tensor, "h m"] | None  # None is sqrt(D)
    is_causal: bool
    window: int | None  # of a causal mask; None is all keys
    key_mask: Bool[Tensor, "b nk"] | None  # True where a key takes part
    query_mask: Bool[Tensor, "b nq"] | None  # True where a query is real
    variant: str
    e_step: str
    feature_map: str | FeatureMap
    dropout_p: float
    impl: str


def attend(x: AttentionInputs) -> Float[Tensor, "b h nq d"]:
    """Return the heads, zero where `query_mask` is False."""
    options: dict[str, Any] = {
        "is_causal": x.is_causal, "window": x.window, "key_mask": x.key_mask, "query_mask": x.query_mask,
        "dropout_p": x.dropout_p, "impl": x.impl,
    }  # fmt: skip
    if x.variant in GAUSSIAN:
        options |= {"variance": x.variance, "e_step": x.e_step}
        if x.shift is None:
            output: Tensor = api.mgk_attention(x.query, x.key, x.value, x.log_prior, **options)
        else:
            output = api.smgk_attention(x.query, x.key, x.shift, x.value, x.log_prior, **options)
        return output
    if x.variant in LINEAR:
        return _masked(_linear(x, x.value), x)
    return _masked(softmax_attention(x.query, x.key, x.value, **options), x)


def attention_weights(x: AttentionInputs) -> Float[Tensor, "b h nq nk"]:
    """Return the dense weights A, without dropout."""
    seen: dict[str, Any] = {"is_causal": x.is_causal, "window": x.window, "key_mask": x.key_mask}
    if x.variant in GAUSSIAN:
        mixture: dict[str, Any] = {"shift": x.shift, "variance": x.variance, "e_step": x.e_step}
        return _masked(api.attention_weights(x.query, x.key, x.log_prior, **mixture, **seen), x)
    if x.variant in LINEAR:  # sum_j A[i,j] e_j is row i of A
        identity = torch.eye(x.key.shape[-2], dtype=x.value.dtype, device=x.value.device)
        return _masked(_linear(x, identity.expand(*x.value.shape[:2], -1, -1)), x)
    return _masked(softmax_weights(x.query, x.key, **seen), x)


def attend_with_state(x: AttentionInputs, cache: StateCache) -> Float[Tensor, "b h nq d"]:
    """Return the heads of linear attention for the positions after those in the cache, and add them to it."""
    mask = None if x.key_mask is None else x.key_mask[:, cache.length :]  # of the new keys
    heads, state = linear_step(
        cache.state, x.query, x.key, x.value, x.log_prior, shift=x.shift, feature_map=x.feature_map, key_mask=mask
    )
    cache.advance(state, x.query.shape[2])
    return _masked(heads, x)


def attend_paged(x: AttentionInputs, cache: PagedLayer, log_prior: Tensor | None) -> Float[Tensor, "b h nq d"]:
    """Add the keys and values of x to a cache in pages, and return the heads.

    `log_prior` is the prior of all positions, if each has its own. A kernel reads the pages; otherwise each row's keys
    are copied.
    """
    key, value, pages = cache.write(x.key, x.value)
    positions = None if log_prior is None or log_prior.dim() == 2 else local_part(log_prior)
    if positions is not None:
        x = replace(x, log_prior=positions[..., : cache.length])
    softmax, new = x.variant == "softmax", x.query.shape[2]
    module = api.implementation(x.impl, x.query, x.value)
    if reads_pages(module, new):
        variance = math.sqrt(x.query.shape[-1]) if x.variance is None else x.variance
        visibility = Visibility(True, check.check_window(x.window, True, pages.max_k))
        options = Options(x.log_prior, variance, visibility, x.e_step == "hard")
        key = key[:, :, None] if softmax else key
        with without_autocast(x.query):
            heads: Tensor = module.attend_to_cache(x.query, key, x.shift, value, options, pages, softmax)[0]
        return heads
    rows = []
    for index, row in enumerate(cache.rows):
        length = cache.table.lengths[row]
        first = 0 if x.window is None else max(0, length - x.window - new + 1)
        keys, values = cache.row(index, first)
        prior = x.log_prior if positions is None else positions[..., first:length]
        rows.append(attend(replace(x, query=x.query[index : index + 1], key=keys, value=values, log_prior=prior)))
    return torch.cat(rows)


def can_attend_packed(module: MixtureAttention, x: Tensor, is_causal: bool) -> bool:
    """Whether `attend_packed` has an operator for what `module` projects from x."""
    if module.variant in LINEAR:
        return not is_causal and takes_rows(x, module.head_dim, module.feature_map, module.impl)
    # A prior per position belongs to the positions of the padded batch.
    by_position = module.log_prior is not None and module.log_prior.dim() == 3
    return module.variant == "softmax" or (not by_position and api.takes_rows(x, module.head_dim, module.impl))


def attend_packed(x: AttentionInputs, packing: Packing) -> Float[Tensor, "1 h t d"]:
    """`attend` for the rows of a packed batch: query and value (1,H,T,D), key (1,H,T,D) or (1,H,M,T,D)."""
    if x.variant == "softmax":
        seen: dict[str, Any] = {"is_causal": x.is_causal, "window": x.window}
        options: dict[str, Any] = {"dropout_p": x.dropout_p, "impl": x.impl}
        return packed_softmax_attention(x.query, x.key, x.value, packing, **seen, **options)
    lengths = packing.cu_seqlens, packing.max_seqlen
    if x.variant in LINEAR:
        key = x.key if x.key.dim() == 5 or x.shift is not None else x.key[:, :, None]
        return rows_attention(x.query, key, x.shift, x.value, x.log_prior, *lengths)
    mixture = x.shift, x.value, x.log_prior, x.variance, x.e_step
    return api.rows_attention(x.query, x.key, *mixture, x.is_causal, x.window, x.dropout_p, *lengths)


def mean_key(
    key: Float[Tensor, "b h m nk d"] | Float[Tensor, "b h nk d"],
    shift: Float[Tensor, "h m d"] | None,
    log_prior: Float[Tensor, "h m"] | None,
) -> Float[Tensor, "b h nk d"]:
    """sum_r prior_r k_jr: the mixture before a feature map, one key instead of M. No prior is the uniform one."""
    if log_prior is None:
        return key.mean(2) if shift is None else key + shift.mean(1).to(key.dtype)[:, None]
    prior = log_prior.exp()
    if shift is None:
        return torch.einsum("bhmnd,hm->bhnd", key, prior.to(key.dtype))
    mean = (prior[..., None] * shift).sum(1)
    return key * prior.sum(1).to(key.dtype)[:, None, None] + mean.to(key.dtype)[:, None]


def _linear(x: AttentionInputs, value: Tensor) -> Tensor:
    options: dict[str, Any] = {
        "feature_map": x.feature_map, "is_causal": x.is_causal, "key_mask": x.key_mask, "impl": x.impl,
    }  # fmt: skip
    if x.shift is not None:
        return smlk_attention(x.query, x.key, x.shift, value, x.log_prior, **options)
    key = x.key if x.key.dim() == 5 else x.key[:, :, None]
    return mlk_attention(x.query, key, value, x.log_prior, **options)


def _masked(rows: Tensor, x: AttentionInputs) -> Tensor:
    """Set the rows (B,H,Nq,...) of padded queries to zero."""
    return rows if x.query_mask is None else rows.masked_fill(~x.query_mask[:, None, :, None], 0)
