"""Mixture keys in Transformers' own models: GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa and ViT.

A model keeps its own code. Its attention layers get projections for fewer query and value heads, M keys per key head
and a prior, and call `mixture_attention` by the name `attn_implementation="mgk_mixture"`.

B batch, H query heads, Hk value heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, flash_attention_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import output_capturing

from mgk.merge.layers import transformers_layers
from mgk.merge.sums import SummedModel
from mgk.ops.api import attention_weights, mgk_attention
from mgk.ops.common import compute_dtype

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

IMPLEMENTATION = "mgk_mixture"
CLASSES = {
    "GPT2": ("Model", "LMHeadModel", "ForSequenceClassification"),
    "Llama": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Mistral": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Qwen2": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Bert": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "Roberta": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "ViT": ("Model", "ForImageClassification"),
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
    **others: Any,
) -> tuple[Float[Tensor, "b nq h d"], Float[Tensor, "b h nq nk"] | None]:
    """Attention with A[i,j] ~ sum_r prior_r exp(q_i.k_jr scaling), called by a Transformers layer after projecting.

    It is MGK with s2 = 1 / scaling and a prior that cancels the Gaussian's -|k|^2 / 2 s2 (Eqns 5 and 6). Such a prior
    depends on the sample, so the batch is folded into the heads. With `output_attentions` A is returned, too, which
    needs Nq x Nk memory.
    """
    batch, heads, count, width = query.shape
    groups = heads // value.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected (B,Nk), got {attention_mask.dim()} dimensions")
    key = key.unflatten(1, (value.shape[1], -1))  # (B,Hk,M,Nk,D)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    prior = module.mixture_log_prior[..., None] + key.to(compute_dtype(key.dtype)).square().sum(-1) * (scaling / 2)  # type: ignore[index]
    if attention_mask is not None:
        prior = prior.masked_fill(~attention_mask[:, None, None].bool(), -math.inf)
    query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    is_causal = is_causal and count > 1  # a single query is the last one and sees every key
    seen: dict[str, Any] = {"variance": 1 / scaling, "is_causal": is_causal}
    output = mgk_attention(query, key, value, prior.flatten(0, 1), dropout_p=dropout, **seen)
    weights = None
    if others.get("output_attentions") or collects_weights():
        warn_dense_weights()
        weights = attention_weights(query, key, prior.flatten(0, 1), **seen)[0].unflatten(0, (batch, heads))
    return output[0].unflatten(0, (batch, heads)).transpose(1, 2), weights


def collects_weights() -> bool:
    """Whether the model was asked for attention weights; some layers do not pass `output_attentions` on."""
    collector = getattr(output_capturing, "_active_collector", None)
    return collector is not None and "attentions" in (collector.get() or ())


@cache
def warn_dense_weights() -> None:
    """Say once what attention weights cost."""
    warnings.warn(
        "output_attentions=True stores the weights of all pairs of positions of every layer, (B,H,Nq,Nk); use it to "
        "look at short texts", stacklevel=2,
    )  # fmt: skip


def key_mask(mask_function: Callable[..., Any], **options: Any) -> Bool[Tensor, "b nk"] | None:
    """Return which keys are real, or None if nothing is padded."""
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if not plain and not torch.compiler.is_compiling():  # while tracing, Transformers treats all positions as packed
        raise ValueError("position_ids: expected one text per row, counted up by 1, got several packed into one row")
    return flash_attention_mask(mask_function=mask_function, **options)  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, mixture_attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


class MixtureModel(SummedModel):
    """Mixin for a Transformers model class: the same model with the heads and components of `config.mixture_*`."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = IMPLEMENTATION
        super().__init__(config, *args, **kwargs)
        for layer in transformers_layers(self):
            layer.resize(config.mixture_heads, config.mixture_key_value_heads, config.mixture_components)

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *_: Any, **__: Any) -> None:
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(f"attn_implementation: expected {IMPLEMENTATION!r}, got {attn_implementation!r}")

    def _prepare_static_cache(self, cache_implementation: str, *_: Any, **__: Any) -> None:
        """Refuse: Transformers' static cache has as many heads for values as for keys."""
        raise ValueError(f"cache_implementation: expected 'dynamic' for this model, got {cache_implementation!r}")


def _mixture_classes() -> Iterator[type]:
    """Create and register a class Mixture... for every class of CLASSES, and a configuration mgk-... per family."""
    for family, tasks in CLASSES.items():
        base: Any = getattr(transformers, f"{family}Config")
        fields = dict.fromkeys(("mixture_heads", "mixture_key_value_heads", "mixture_components"), 1)
        config: Any = type(
            f"Mixture{family}Config",
            (base,),
            {
                "model_type": f"mgk-{base.model_type}",
                **fields,
                "__annotations__": dict.fromkeys(fields, int),
                "__module__": __name__,
                "__doc__": f"{base.__name__} with the numbers of heads and components of the mixture attention.",
            },
        )
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        yield config
        for task in tasks:
            base_model: Any = getattr(transformers, family + task)
            model: Any = type(
                f"Mixture{family}{task}",
                (MixtureModel, base_model),
                {
                    "config_class": config,
                    "__module__": __name__,
                    "__doc__": f"{base_model.__name__} with mixture keys.",
                    "_supports_attention_backend": True,
                },
            )
            suffix = {"Model": "", "LMHeadModel": "ForCausalLM"}.get(task, task)
            getattr(transformers, f"AutoModel{suffix}").register(config, model, exist_ok=True)
            if suffix == "ForCausalLM":  # the models whose smoothed labels `Trainer` shifts
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
            yield model


globals().update({each.__name__: each for each in _mixture_classes()})


def mixture_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of the same model with mixture keys."""
    name = f"Mixture{type(model).__name__}"
    if name not in globals():
        known = ", ".join(family + task for family, tasks in CLASSES.items() for task in tasks)
        raise TypeError(f"model: expected one of {known}, got {type(model).__name__}")
    found: type[PreTrainedModel] = globals()[name]
    return found
