"""The arguments that Transformers passes to a model, as the models of `mgk.models` read them.

B batch, N positions of this call, Nk positions so far, E width of the model, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mgk.hf import documents
from mgk.hf.config import MGKConfig
from mgk.models.encoder import count_real
from mgk.nn.documents import Documents

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# `generate` passes its tokenizer on, too.
IGNORED = (
    "output_hidden_states", "return_dict", "use_cache", "token_type_ids", "num_items_in_batch", "cache_position",
    "tokenizer",
)  # fmt: skip


class Texts(NamedTuple):
    """The arguments of `TokenEncoder.forward`, without the cache."""

    tokens: Int[Tensor, "b n"] | Float[Tensor, "b n e"]
    mask: Bool[Tensor, "b nk"] | None
    positions: Int[Tensor, "b n"] | None
    documents: Documents | None


def read_texts(
    model: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None,
    position_ids: Tensor | None, options: dict[str, Any], *, start: int = 0, cached: bool = False,
) -> Texts:  # fmt: skip
    """Check the arguments of a call; those that describe packed documents are removed from `options`.

    Args:
        model: the model that is called.
        input_ids: (B,N), or (B,2,N) for pairs of documents, which are flattened to (2B,N).
        inputs_embeds: (B,N,E), instead of `input_ids`.
        attention_mask: (B,Nk), 1 for real tokens.
        position_ids: (B,N) or (1,N).
        options: the other keyword arguments of the call.
        start: positions in the cache.
        cached: whether there is a cache, perhaps an empty one.
    """
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"input_ids: expected token ids, or inputs_embeds instead, got {got}")
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    assert tokens is not None
    shape = tokens.shape if inputs_embeds is None else tokens.shape[:-1]
    mask = real_tokens(model.config, attention_mask, shape, start)
    if position_ids is not None:
        position_ids = position_ids.expand(shape)
    if model.config.kind == "matcher" and len(shape) == 3:
        if shape[1] != 2:
            raise ValueError(f"input_ids: expected shape (B,2,N), got {tuple(shape)}")
        tokens, mask, position_ids = (
            None if part is None else part.flatten(0, 1) for part in (tokens, mask, position_ids)
        )
        assert tokens is not None
        shape = torch.Size((2 * shape[0], shape[2]))
    packed = documents.find(model, shape, position_ids, mask, options, cached=cached)
    if packed is not None:
        return Texts(tokens, None, packed.positions, packed.documents)
    if position_ids is None and mask is not None:
        position_ids = count_real(mask)[:, -shape[-1] :]
    return Texts(tokens, mask, position_ids, None)


def real_tokens(
    config: MGKConfig, attention_mask: Tensor | None, shape: tuple[int, ...], start: int = 0
) -> Tensor | None:
    """Return the mask as booleans, True for real tokens, or None if nothing is padded, which is faster."""
    if attention_mask is None:
        return None
    expected = (*shape[:-1], start + shape[-1])
    if attention_mask.dim() == 4:
        raise ValueError(
            f"attention_mask: expected (B,Nk) = {expected}, 1 for real tokens, got 4 dimensions; mgk never "
            "stores a number for each pair of positions; to pack documents, pass position_ids that start again"
        )
    if attention_mask.shape != expected:
        raise ValueError(f"attention_mask: expected shape {expected}, got {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    if torch.compiler.is_compiling():
        return mask
    if config.prior_positions and bool((mask[..., 1:] & ~mask[..., :-1]).any()):
        raise ValueError(
            "attention_mask: expected padding on the right (prior_positions is set), got padding before a token"
        )
    return None if bool(mask.all()) else mask


def check_options(options: dict[str, Any]) -> None:
    """Check the keyword arguments that Transformers passes on: reject unknown ones and `output_attentions`."""
    if options.pop("output_attentions", False):
        raise ValueError("output_attentions: expected False; `mgk explore` and mgk.inspect.collect show attention")
    for name in IGNORED:
        options.pop(name, None)
    for name, value in options.items():
        if value is not None:  # PEFT adapters pass None for every argument they know
            raise TypeError(f"{name}: no such argument")


def require_one_text(texts: Texts) -> None:
    """Refuse packed documents where a row has one label."""
    if texts.documents is not None:
        raise ValueError("position_ids: expected one text in a row to classify, got packed documents")


def classification_loss(config: MGKConfig, logits: Tensor, labels: Tensor | None) -> Any:
    """Compute the loss that `config.problem_type` or the labels ask for; None without labels."""
    if labels is None:
        return None
    logits, kind = logits.float(), config.problem_type
    if kind is None and (logits.shape[1] == 1 or labels.is_floating_point()):
        kind = "regression" if logits.shape[1] == 1 else "multi_label_classification"
    if kind in ("regression", "multi_label_classification"):
        if labels.numel() != logits.numel():
            expected = "(B,)" if logits.shape[1] == 1 else "(B,C)"
            raise ValueError(f"labels: expected {expected} numbers of {tuple(logits.shape)}, got {tuple(labels.shape)}")
        labels = labels.float().view_as(logits)
        loss = nn.functional.mse_loss if kind == "regression" else nn.functional.binary_cross_entropy_with_logits
        return loss(logits, labels)
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels: expected integers (B,) = ({len(logits)},), got {labels.dtype} {tuple(labels.shape)}")
    return cross_entropy(logits, labels)


def cross_entropy(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"], ignored: int = -100) -> Tensor:
    """Return the mean cross-entropy; on a CPU a label out of range is an error that says so."""
    try:
        return nn.functional.cross_entropy(logits, labels.long(), ignore_index=ignored)
    except IndexError:  # raised on a CPU only
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"labels: expected 0 to {logits.shape[1] - 1} (num_labels), got {found}") from None
