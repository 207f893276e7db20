"""One configuration for all models: the fields of `mgk.models`, under the names that Transformers looks for too."""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from mgk.models.config import ModelConfig
from mgk.ops import arguments as check
from mgk.train.config import MODELS, build

# A configuration of Transformers may have no `max_length`: that is how much to generate.
RENAMED = {"max_length": "max_position_embeddings"}


class MGKConfig(PreTrainedConfig):
    """What a model is built from: `MGKConfig(kind="language", attention="smgk", heads=4, width=256)`.

    `kind` is "classifier", "matcher", "language" or "vision"; the other fields and their defaults are those of
    `ClassifierConfig`, `MatcherConfig`, `LanguageModelConfig` and `VisionConfig` of `mgk.models`, but for `max_length`,
    which is `max_position_embeddings` here. `hidden_size`, `vocab_size`, `num_labels` and their like are other names of
    the same fields. A name that is nearly that of a field, or belongs to another kind, is an error.
    """

    model_type = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
        "intermediate_size": "hidden",
        "vocab_size": "vocabulary",
        "num_channels": "channels",
        "classes": "num_labels",
    }

    kind: str = "classifier"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = field_names(check.check_choice("kind", self.kind, MODELS))
        given = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        given = {name: value for name, value in given.items() if not (name == "num_labels" and "num_labels" not in own)}
        others = {name for kind in MODELS for name in field_names(kind)}
        for name in given.keys() - own:
            if name in RENAMED:
                raise ValueError(f"{name}: is called {RENAMED[name]} here; in Transformers {name} is for generation")
            near = difflib.get_close_matches(name, sorted(own), 1, 0.8)
            if name in others:
                raise ValueError(f"{name}: no field of a {self.kind} model; it has {', '.join(sorted(own))}")
            if near:
                raise ValueError(f"{name}: no such field; did you mean {near[0]}?")
        settings = {public: given.pop(public) for public in own & given.keys()}
        if "num_labels" in own and "num_labels" not in settings and self.id2label is not None:
            settings["num_labels"] = len(self.id2label)
        inner = {own_name(public): value for public, value in settings.items()}
        for name, value in dataclasses.asdict(build(MODELS[self.kind], inner, "")).items():
            public = public_name(name)
            if public == "num_labels":
                given[public] = value
            else:
                setattr(self, public, list(value) if isinstance(value, tuple) else value)
        super().__post_init__(**given)

    def to_model(self) -> ModelConfig:
        """The configuration of `mgk.models`."""
        values = {own_name(public): getattr(self, public) for public in field_names(self.kind)}
        return build(MODELS[self.kind], values, "")  # type: ignore[no-any-return]

    @classmethod
    def from_model(cls, config: ModelConfig, **others: Any) -> MGKConfig:
        """Of a configuration of `mgk.models`."""
        kind = next((name for name, type_ in MODELS.items() if type(config) is type_), None)
        if kind is None:
            raise TypeError(f"config: expected a configuration of mgk.models, got {check.describe(config)}")
        fields = {public_name(name): value for name, value in dataclasses.asdict(config).items()}
        return cls(kind=kind, **fields, **others)


def field_names(kind: str) -> set[str]:
    """The fields of a kind of model, by their names in this configuration."""
    return {public_name(f.name) for f in dataclasses.fields(MODELS[kind])}


def public_name(name: str) -> str:
    return "num_labels" if name == "classes" else RENAMED.get(name, name)


def own_name(public: str) -> str:
    return "classes" if public == "num_labels" else next((o for o, p in RENAMED.items() if p == public), public)
