"""Transformers with any attention of `mgk.nn`: encoder classifier, two-document matcher, language model, vision."""

from __future__ import annotations

from torch import nn

from mgk.models.classifier import Classifier, Matcher
from mgk.models.config import (
    ClassifierConfig,
    LanguageModelConfig,
    MatcherConfig,
    ModelConfig,
    TransformerConfig,
    VisionConfig,
)
from mgk.models.language import LanguageModel
from mgk.models.vision import VisionTransformer

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Matcher",
    "MatcherConfig",
    "ModelConfig",
    "TransformerConfig",
    "VisionConfig",
    "VisionTransformer",
    "build",
]

Model = Classifier | Matcher | LanguageModel | VisionTransformer
BUILDERS: dict[type, type[nn.Module]] = {
    ClassifierConfig: Classifier,
    MatcherConfig: Matcher,
    LanguageModelConfig: LanguageModel,
    VisionConfig: VisionTransformer,
}


def build(config: ModelConfig) -> Model:
    """The model of a configuration, with initial values from torch's generator."""
    if type(config) not in BUILDERS:
        names = ", ".join(kind.__name__ for kind in BUILDERS)
        raise TypeError(f"config: expected one of {names}, got {type(config).__name__}")
    return BUILDERS[type(config)](config)  # type: ignore[return-value]
