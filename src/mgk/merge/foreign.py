"""Mixture keys inside models of Transformers: GPT-2, Llama and its like, BERT and its like, ViT.

A model keeps its own code. Its attention layers get projections for fewer query and value heads, M keys for each key
head, and a prior; and `attn_implementation="mgk_mixture"`, which every such layer calls with what it projected.

B batch, H query heads, Hk value heads, M components, Nq queries, Nk keys, D width of a head.
"""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, flash_attention_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from mgk.ops.api import mgk_attention
from mgk.ops.common import compute_dtype

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

IMPLEMENTATION = "mgk_mixture"
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
REFUSED = {"q_norm": "normalised queries", "sinks": "attention sinks"}
CLASSES = {
    "GPT2": ("Model", "LMHeadModel", "ForSequenceClassification"),
    "Llama": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Mistral": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Qwen2": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Bert": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "Roberta": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "ViT": ("Model", "ForImageClassification"),
}
AUTO = {
    "Model": "AutoModel",
    "LMHeadModel": "AutoModelForCausalLM",
    **{name: f"AutoModel{name}" for name in (
        "ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForImageClassification")},
}  # fmt: skip


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
) -> tuple[Float[Tensor, "b nq h d"], None]:
    """A[i,j] ~ sum_r prior_r exp(q_i.k_jr scaling): what a layer of Transformers calls once it has projected.

    MGK with s2 = 1 / scaling and a prior that takes the Gaussian's -|k|^2 / 2 s2 back (Eqns 5 and 6). The prior then
    differs from sample to sample, so each sample's heads become heads of their own.
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
    is_causal = is_causal and count > 1  # a single query is the last one, which sees every key
    output = mgk_attention(
        query, key, value, prior.flatten(0, 1), variance=1 / scaling, is_causal=is_causal, dropout_p=dropout
    )
    return output[0].unflatten(0, (batch, heads)).transpose(1, 2), None


def key_mask(mask_function: Callable[..., Any], **options: Any) -> Bool[Tensor, "b nk"] | None:
    """Which keys are real; None if nothing is padded."""
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if not plain and not torch.compiler.is_compiling():  # while tracing, all positions count as packed
        raise ValueError("position_ids: expected one text in a row, counted up by 1, got several packed into one")
    return flash_attention_mask(mask_function=mask_function, **options)  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, mixture_attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


class Layer:
    """An attention layer of a model: its projections, whatever they are called there."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.fused = hasattr(module, "c_attn")
        self.split = hasattr(module, "self")  # BERT: projections in one module, the output in another
        self.core: Any = module.self if self.split else module
        for name, what in REFUSED.items():
            if getattr(self.core, name, None) is not None:
                raise ValueError(f"model: expected attention without {what}, got {type(self.core).__name__}")
        settings = getattr(self.core, "config", None)  # some layers know their window, some ask the configuration
        if getattr(self.core, "sliding_window", getattr(settings, "sliding_window", None)) is not None:
            raise ValueError(f"model: expected attention without a sliding window, got {type(self.core).__name__}")

    @property
    def head_dim(self) -> int:
        return int(self.core.attention_head_size if self.split else self.core.head_dim)

    @property
    def scale(self) -> float:
        return float(self.core.scaling)

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight (in,out) and bias of query, key, value and output."""
        if self.fused:
            sizes = self.core.split_size
            sizes = sizes if isinstance(sizes, list) else [sizes] * 3
            parts = zip(self.core.c_attn.weight.split(sizes, 1), self.core.c_attn.bias.split(sizes), strict=True)
            return [*parts, (self.core.c_proj.weight, self.core.c_proj.bias)]
        return [(linear.weight.mT, linear.bias) for linear in self._linears()]

    def resize(self, heads: int, key_value_heads: int, components: int) -> None:
        """Give it projections for so many heads, with values that are yet to be set, and a prior."""
        width = self.head_dim
        sizes = (heads * width, key_value_heads * components * width, key_value_heads * width)
        if self.fused:
            old, out = self.core.c_attn, self.core.c_proj
            self.core.c_attn, self.core.c_proj = Conv1D(sum(sizes), old.nx), Conv1D(out.nf, sizes[0])
            self.core.split_size, self.core.num_heads = list(sizes), heads
            for new, was in ((self.core.c_attn, old), (self.core.c_proj, out)):
                new.to(device=was.weight.device, dtype=was.weight.dtype)
        else:
            query, key, value, output = self._linears()
            for old, (inputs, outputs) in zip(
                (query, key, value, output),
                (*((query.in_features, size) for size in sizes), (sizes[0], output.out_features)),
                strict=True,
            ):
                place = {"device": old.weight.device, "dtype": old.weight.dtype}
                new = nn.Linear(inputs, outputs, old.bias is not None, **place)
                old.weight, old.bias, old.in_features, old.out_features = new.weight, new.bias, inputs, outputs
        first = self.weights()[0][0]
        prior = torch.full((heads, components), -math.log(components), device=first.device, dtype=first.dtype)
        self.core.mixture_log_prior = nn.Parameter(prior)

    @torch.no_grad()
    def set(self, values: list[tuple[Tensor, Tensor | None]], log_prior: Tensor) -> None:
        for (weight, bias), (new, new_bias) in zip(self.weights(), values, strict=True):
            weight.copy_(new)
            if bias is not None and new_bias is not None:
                bias.copy_(new_bias)
        self.core.mixture_log_prior.copy_(log_prior)

    def _linears(self) -> list[nn.Linear]:
        if self.split:
            return [self.core.query, self.core.key, self.core.value, self.module.output.dense]
        return [getattr(self.core, name) for name in NAMES]


def layers_of(model: nn.Module) -> list[Layer]:
    """The self-attention layers of a model, first to last."""
    found = []
    for module in model.modules():
        bert = hasattr(module, "self") and hasattr(module.self, "query") and hasattr(module, "output")
        gpt = hasattr(module, "c_attn") and not getattr(module, "is_cross_attention", False)
        if bert or gpt or all(hasattr(module, name) for name in NAMES):
            found.append(Layer(module))
    if not found:
        raise ValueError(
            f"model: expected one with attention like that of {', '.join(CLASSES)}, got {type(model).__name__}"
        )
    return found


class MixtureModel(PreTrainedModel):
    """Mixed into a model class of Transformers: the same model, with the attention that `config.mixture_...` says."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = IMPLEMENTATION
        super().__init__(config, *args, **kwargs)
        for layer in layers_of(self):
            layer.resize(config.mixture_heads, config.mixture_key_value_heads, config.mixture_components)

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *_: Any, **__: Any) -> None:
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(f"attn_implementation: expected {IMPLEMENTATION!r}, got {attn_implementation!r}")

    def _prepare_static_cache(self, cache_implementation: str, *_: Any, **__: Any) -> None:
        """There is none: Transformers reserves as many heads for values as for keys."""
        raise ValueError(f"cache_implementation: expected 'dynamic' for this model, got {cache_implementation!r}")


def _mixture_classes() -> Iterator[type]:
    """For every class of CLASSES one called Mixture..., for every configuration one of type mgk-..."""
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
                "__doc__": f"{base.__name__}, and how many heads and components the attention really has.",
            },
        )
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        yield config
        for task in tasks:
            whole: Any = getattr(transformers, family + task)
            model: Any = type(
                f"Mixture{family}{task}",
                (MixtureModel, whole),
                {
                    "config_class": config,
                    "__module__": __name__,
                    "__doc__": f"{whole.__name__} with mixture keys.",
                    "_supports_attention_backend": True,
                },
            )
            getattr(transformers, AUTO[task]).register(config, model, exist_ok=True)
            if AUTO[task] == "AutoModelForCausalLM":  # for models of this list alone `Trainer` shifts smoothed labels
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
            yield model


globals().update({each.__name__: each for each in _mixture_classes()})


def mixture_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of the same model with mixture keys."""
    name = f"Mixture{type(model).__name__}"
    if name not in globals():
        known = ", ".join(family + task for family, tasks in CLASSES.items() for task in tasks)
        raise TypeError(f"model: expected one of {known}, got {type(model).__name__}")
    found: type[PreTrainedModel] = globals()[name]
    return found
