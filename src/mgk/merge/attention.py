"""Attention with mixtures of dot products, as an attention function and a mask of Transformers.

B batch, H query heads, Hk value heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, flash_attention_mask
from transformers.utils import output_capturing

from mgk.ops.api import attention_weights, mgk_attention
from mgk.ops.common import compute_dtype
from mgk.ops.partial import merge_attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

IMPLEMENTATION = "mgk_mixture"
KNOWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
}


def mixture_attention(
    module: nn.Module,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkm nk d"],
    value: Float[Tensor, "b hk nk d"],
    attention_mask: Bool[Tensor, "b nk"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "b nq h d"], Float[Tensor, "b h nq nk"] | None]:
    """Attention with A[i,j] ~ sum_r prior_r exp(q_i.k_jr scaling), called by a Transformers layer after projecting.

    It is MGK with s2 = 1 / scaling and a prior that cancels the Gaussian's -|k|^2 / 2 s2 (Eqns 5 and 6). Such a prior
    depends on the sample, so the batch is folded into the heads. With `output_attentions` A is returned, too, which
    needs Nq x Nk memory.
    """
    batch, heads, count, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask: expected (B,Nk), got {attention_mask.dim()} dimensions")
        # A static cache has space for more keys than the prompt has.
        key, value = (x[..., : attention_mask.shape[1], :] for x in (key, value))
    key = key.unflatten(1, (value.shape[1], -1))  # (B,Hk,M,Nk,D)
    sizes = key.to(compute_dtype(key.dtype)).square().sum(-1) * (scaling / 2)  # (B,Hk,M,Nk)
    prior = sizes.repeat_interleave(heads // value.shape[1], 1)
    given: Tensor | None = getattr(module, "mixture_log_prior", None)  # layers that are not merged have none
    prior = prior if given is None else prior + given[..., None]
    if attention_mask is not None:
        prior = prior.masked_fill(~attention_mask[:, None, None].bool(), -math.inf)
    query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    prior = prior.flatten(0, 1)
    seen: dict[str, Any] = {"variance": 1 / scaling}
    if is_causal and count > 1:  # a single query is the last one: its window is in the mask
        seen |= {"is_causal": True, "window": sliding_window}
    local = not is_causal and sliding_window is not None and sliding_window <= key.shape[-2]
    window = sliding_window if local else None
    if window is None:
        output = mgk_attention(query, key, value, prior, dropout_p=dropout, **seen)
    else:
        output = _local(query, key, value, prior, window, {"dropout_p": dropout, **seen})
    weights = None
    if others.get("output_attentions") or collected_weights() is not None:
        warn_dense_weights()
        weights = attention_weights(query, key, prior, **seen)[0].unflatten(0, (batch, heads))
        if window is not None:
            near = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)
            weights = weights.masked_fill(~near.tril(window - 1).triu(1 - window), 0)
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return output[0].unflatten(0, (batch, heads)).transpose(1, 2), weights


def _local(
    query: Float[Tensor, "b h n d"], key: Float[Tensor, "b hk m n d"], value: Float[Tensor, "b hk n d"],
    prior: Float[Tensor, "h m n"], window: int, options: dict[str, Any],
) -> Float[Tensor, "b h n d"]:  # fmt: skip
    """Attend to the keys with |i - j| < window: to those up to i, and, in reversed order, to those after i."""
    one = {"is_causal": True, "return_lse": True, **options}
    before: tuple[Tensor, Tensor] = mgk_attention(query, key, value, prior, window=window, **one)
    if window == 1 or key.shape[-2] == 1:
        return before[0]
    # In reversed order the keys after i are those before it. The last one, which is i = 0, comes after no other.
    query, later, values = query.flip(-2), key[..., 1:, :].flip(-2), value[..., 1:, :].flip(-2)
    after = mgk_attention(query, later, values, prior[..., 1:].flip(-1), window=window - 1, **one)
    output, _ = merge_attention(before, (after[0].flip(-2), after[1].flip(-1)))
    return output


def collected_weights() -> list[Tensor] | None:
    """Return the list in which Transformers collects attention weights, or None if it was not asked for them.

    Some layers do not pass `output_attentions` on.
    """
    collector = getattr(output_capturing, "_active_collector", None)
    return None if collector is None else (collector.get() or {}).get("attentions")


@cache
def warn_dense_weights() -> None:
    """Say once what attention weights cost."""
    warnings.warn(
        "output_attentions=True stores the weights of all pairs of positions of every layer, (B,H,Nq,Nk); use it to "
        "look at short texts", stacklevel=2,
    )  # fmt: skip


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Bool[Tensor, "b n"] | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Bool[Tensor, "b nk"] | None:
    """Return which keys take part, or None if all do. What is causal or a window for each query is not in it.

    The mask of several queries ends with the last query's key, though a static cache has space for more. That of a
    single query has the length of the cache, so that every step has the same shape.
    """
    tracing = torch.compiler.is_compiling()
    # While tracing, Transformers treats all positions as packed.
    kinds = KNOWN_MASKS if tracing else set(_kinds(mask_function))
    if "packed_sequence_mask_function" in kinds:
        raise ValueError("position_ids: expected one text per row, counted up by 1, got several packed into one row")
    if kinds - KNOWN_MASKS:
        raise ValueError(f"attention_mask: expected causal, windowed or full attention, got {sorted(kinds)}")
    static = isinstance(q_offset, Tensor) or (kv_length > q_offset + q_length - kv_offset and "causal" in str(kinds))
    if q_length == 1 and (static or (not tracing and "sliding_window_overlay" in kinds)):
        if attention_mask is not None:
            attention_mask = attention_mask[:, -kv_length:]
            attention_mask = nn.functional.pad(attention_mask, (0, kv_length - attention_mask.shape[1]))
        rows, keys = torch.arange(batch_size, device=device), torch.arange(kv_length, device=device) + kv_offset
        position = torch.as_tensor(q_offset, device=device)
        visible = mask_function(rows[:, None], torch.zeros_like(position), position, keys[None]).expand(batch_size, -1)
        visible = visible if attention_mask is None else visible & attention_mask
        return None if not static and bool(visible.all()) else visible
    if static:
        length = int(q_offset) + q_length - kv_offset
        if attention_mask is not None:
            return attention_mask[:, -length:]
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    return flash_attention_mask(  # type: ignore[no-any-return]
        batch_size,
        q_length,
        kv_length,
        int(q_offset),
        kv_offset,
        mask_function,
        attention_mask,
        device=device,
        **options,
    )


def _kinds(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the functions that made the parts of a mask function."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    cells = getattr(mask_function, "__closure__", None)
    if name != "and_masks" or not cells:
        yield name
        return
    for part in cells[0].cell_contents:
        yield from _kinds(part)


AttentionInterface.register(IMPLEMENTATION, mixture_attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


class SplitAttention(nn.Module):
    """Merged self-attention with a projection each for query, key and value.

    It takes the place of attention whose own code needs as many heads of queries as of keys and values: that of Phi-3,
    GPT-NeoX, OPT, ModernBERT and Whisper's encoder.
    """

    def __init__(
        self, old: Any, *, embed_dim: int, head_dim: int, heads: tuple[int, int, int], biased: tuple[bool, ...],
        rotate: Callable[..., tuple[Tensor, Tensor]] | None, window: int | None,
    ) -> None:  # fmt: skip
        """Make the projections, with arbitrary weights.

        Args:
            old: the module that it replaces.
            embed_dim: width of the model.
            head_dim: width of a head.
            heads: numbers of query, key and value heads.
            biased: whether the projections of query, key, value and output have a bias.
            rotate: the family's function for rotary positions.
            window: number of keys that a query sees, up to its own.
        """
        super().__init__()
        query, key, value = (count * head_dim for count in heads)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(embed_dim, size, bias) for size, bias in zip((query, key, value), biased, strict=False)
        )
        self.o_proj = nn.Linear(query, embed_dim, biased[3])
        self.head_dim, self.rotate, self.sliding_window = head_dim, rotate, window
        self.scaling = float(getattr(old, "scaling", head_dim**-0.5))
        self.is_causal, self.layer_idx = bool(old.is_causal), getattr(old, "layer_idx", None)
        self.attention_dropout = float(old.attention_dropout if hasattr(old, "attention_dropout") else old.dropout)
        self.out_drop = getattr(old, "out_drop", nn.Identity())

    def forward(
        self,
        hidden_states: Float[Tensor, "b n e"],
        attention_mask: Bool[Tensor, "b nk"] | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **others: Any,
    ) -> tuple[Float[Tensor, "b n e"], Tensor | None]:
        """Attend; the arguments are those of the families' own attention."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotate is not None and position_embeddings is not None:
            query, key = self.rotate(query, key, *position_embeddings)
        cache = layer_past if past_key_values is None else past_key_values
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = mixture_attention(
            self, query, key, value, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window,
            dropout=self.attention_dropout if self.training else 0.0,
        )  # fmt: skip
        if weights is not None and (collected := collected_weights()) is not None:
            collected.append(weights)  # Transformers collects the weights of the family's own attention
        return self.out_drop(self.o_proj(output.flatten(2))), weights
