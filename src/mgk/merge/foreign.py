"""Mixture keys in Transformers' own models: one class Mixture... for each model class of `mgk.merge.families`.

A model keeps its own code. Its attention layers get projections for fewer query and value heads, M keys per key head
and a prior, and call `mgk.merge.attention.mixture_attention` by the name `attn_implementation="mgk_mixture"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mgk.merge.attention import IMPLEMENTATION
from mgk.merge.families import FAMILIES
from mgk.merge.layers import transformers_layers
from mgk.merge.static import MixtureStaticCache
from mgk.merge.sums import SummedModel

AUTO = {"Model": "", "TextModel": "", "LMHeadModel": "ForCausalLM", "ForConditionalGeneration": "ForSpeechSeq2Seq"}
"""The rest of the name of the Auto class of a task, where it is not the task's."""


class MixtureModel(SummedModel):
    """Mixin for a Transformers model class: the same model with the heads and components of `config.mixture_*`."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = IMPLEMENTATION
        super().__init__(config, *args, **kwargs)
        for name, layer in transformers_layers(self):
            layer.resize(self, name, config.mixture_heads, config.mixture_key_value_heads, config.mixture_components)

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *_: Any, **__: Any) -> None:
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(f"attn_implementation: expected {IMPLEMENTATION!r}, got {attn_implementation!r}")

    def _prepare_static_cache(self, cache_implementation: str, *args: Any, **kwargs: Any) -> Any:
        """Make a static cache for `generate`, with more heads of keys than of values."""
        if cache_implementation != "static":
            raise ValueError(f"cache_implementation: expected 'dynamic' or 'static', got {cache_implementation!r}")
        cache = super()._prepare_static_cache(cache_implementation, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(cache, StaticCache):  # Whisper's decoder is not merged
            return cache
        length: Any = self._previous_max_cache_length
        return MixtureStaticCache(self.config.get_text_config(decoder=True), length)

    def _get_static_cache_init_shape(self) -> None:
        """Let the first call allocate the static cache: keys and values have different numbers of heads."""


def _mixture_classes() -> Iterator[type]:
    """Create and register a class Mixture... for every class of every family, and a configuration mgk-... for each."""
    for family in FAMILIES:
        base: Any = getattr(transformers, family.config)
        fields = dict.fromkeys(("mixture_heads", "mixture_key_value_heads", "mixture_components"), 1)
        config: Any = type(
            f"Mixture{family.config}",
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
        for task, name in zip(family.tasks, family.classes, strict=True):
            base_model: Any = getattr(transformers, name)
            model: Any = type(
                f"Mixture{name}",
                (MixtureModel, base_model),
                {
                    "config_class": config,
                    "__module__": __name__,
                    "__doc__": f"{name} with mixture keys.",
                    "_supports_attention_backend": True,
                },
            )
            suffix = AUTO.get(task, task)
            getattr(transformers, f"AutoModel{suffix}").register(config, model, exist_ok=True)
            if suffix == "ForCausalLM":  # the models whose smoothed labels `Trainer` shifts
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
            yield model


globals().update({each.__name__: each for each in _mixture_classes()})


def auto_name(kind: str) -> str:
    """Return the name of the Auto class for a model class, such as AutoModelForMaskedLM for BertForMaskedLM."""
    auto = f"AutoModel{kind[kind.index('For') :]}" if "For" in kind else ""
    if not hasattr(transformers, kind) and hasattr(transformers, auto):  # a class of mgk
        return auto
    for family in FAMILIES:
        if kind in family.classes:
            task = kind.removeprefix(family.prefix)
            return f"AutoModel{AUTO.get(task, task)}"
    known = ", ".join(family.prefix for family in FAMILIES)
    raise ValueError(f"--from: expected a model of one of {known}, or of mgk, got {kind or 'none in its config.json'}")


def mixture_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of the same model with mixture keys."""
    name = f"Mixture{type(model).__name__}"
    if name not in globals():
        known = ", ".join(each for family in FAMILIES for each in family.classes)
        raise TypeError(f"model: expected one of {known}, got {type(model).__name__}")
    found: type[PreTrainedModel] = globals()[name]
    return found
