"""Transformers with any attention of `mgk.nn`: classifier, two-document matcher, language model, vision, translator."""

from __future__ import annotations

from torch import nn

from mgk.models.classifier import Classifier, Matcher
from mgk.models.config import (
    ClassifierConfig,
    LanguageModelConfig,
    MatcherConfig,
    ModelConfig,
    TransformerConfig,
    TranslatorConfig,
    VisionConfig,
)
from mgk.models.language import LanguageModel
from mgk.models.parallel import clip_grad_norm_, context_parallel, tensor_parallel, tensor_parallel_plan
from mgk.models.translator import Translator
from mgk.models.vision import VisionTransformer
from mgk.ops.ring import shard_sequence, unshard_sequence

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Matcher",
    "MatcherConfig",
    "ModelConfig",
    "TransformerConfig",
    "Translator",
    "TranslatorConfig",
    "VisionConfig",
    "VisionTransformer",
    "build",
    "clip_grad_norm_",
    "context_parallel",
    "shard_sequence",
    "tensor_parallel",
    "tensor_parallel_plan",
    "unshard_sequence",
]

Model = Classifier | Matcher | LanguageModel | VisionTransformer | Translator
# The kinds of models by the names that configuration files use, with their configuration and module.
KINDS: dict[str, tuple[type[ModelConfig], type[nn.Module]]] = {
    "classifier": (ClassifierConfig, Classifier),
    "matcher": (MatcherConfig, Matcher),
    "language": (LanguageModelConfig, LanguageModel),
    "vision": (VisionConfig, VisionTransformer),
    "translation": (TranslatorConfig, Translator),
}
MODELS: dict[str, type] = {kind: config for kind, (config, _) in KINDS.items()}


def build(config: ModelConfig) -> Model:
    """Return the model of a configuration, initialised with torch's random generator."""
    for type_, model in KINDS.values():
        if type(config) is type_:
            return model(config)  # type: ignore[return-value]
    names = ", ".join(type_.__name__ for type_ in MODELS.values())
    raise TypeError(f"config: expected one of {names}, got {type(config).__name__}")
