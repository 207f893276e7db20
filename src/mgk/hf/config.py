"""`MGKConfig`: one Transformers configuration for all models, with the fields of `mgk.models`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from mgk.models.config import ModelConfig
from mgk.ops import arguments as check
from mgk.train.config import MODELS, build

# Fields of `mgk.models` and their names here. In Transformers `max_length` is how much to generate.
PUBLIC = {"max_length": "max_position_embeddings", "classes": "num_labels"}
OWN = {public: name for name, public in PUBLIC.items()}


class MGKConfig(PreTrainedConfig):
    """The configuration of a model, for example `MGKConfig(kind="language", attention="smgk", heads=4, width=256)`.

    `kind` is "classifier", "matcher", "language" or "vision". The other fields and their defaults are those of
    `ClassifierConfig`, `MatcherConfig`, `LanguageModelConfig` and `VisionConfig` of `mgk.models`, except that
    `max_length` is called `max_position_embeddings`. `hidden_size`, `vocab_size`, `num_labels` and so on are aliases of
    the same fields. A misspelled field, or a field of another kind of model, is an error.
    """

    model_type = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
        "intermediate_size": "hidden",
        "vocab_size": "vocabulary",
        "partial_rotary_factor": "rotary_share",
        "original_max_position_embeddings": "rope_original_length",
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
        if "num_labels" not in own:
            given.pop("num_labels", None)
        for name in given.keys() - own:
            if name in PUBLIC:
                raise ValueError(f"{name}: is called {PUBLIC[name]} here; in Transformers {name} is for generation")
            if any(name in field_names(kind) for kind in MODELS):
                raise ValueError(f"{name}: no field of a {self.kind} model; it has {', '.join(sorted(own))}")
            if near := difflib.get_close_matches(name, sorted(own), 1, 0.8):
                raise ValueError(f"{name}: no such field; did you mean {near[0]}?")
        settings = {OWN.get(public, public): given.pop(public) for public in own & given.keys()}
        if "num_labels" in own and "classes" not in settings and self.id2label is not None:
            settings["classes"] = len(self.id2label)
        for name, value in dataclasses.asdict(build(MODELS[self.kind], settings, "")).items():
            if name == "classes":  # `PreTrainedConfig` sets it, together with the names of the labels
                given["num_labels"] = value
            else:
                setattr(self, PUBLIC.get(name, name), list(value) if isinstance(value, tuple) else value)
        super().__post_init__(**given)

    def to_model(self) -> ModelConfig:
        """Convert to the configuration of `mgk.models`."""
        values = {OWN.get(public, public): getattr(self, public) for public in field_names(self.kind)}
        return build(MODELS[self.kind], values, "")  # type: ignore[no-any-return]

    @classmethod
    def from_model(cls, config: ModelConfig, **others: Any) -> MGKConfig:
        """Convert from a configuration of `mgk.models`; `others` are fields of Transformers."""
        kind = next((name for name, type_ in MODELS.items() if type(config) is type_), None)
        if kind is None:
            raise TypeError(f"config: expected a configuration of mgk.models, got {check.describe(config)}")
        fields = {PUBLIC.get(name, name): value for name, value in dataclasses.asdict(config).items()}
        return cls(kind=kind, **fields, **others)


def field_names(kind: str) -> set[str]:
    """Return the fields of a kind of model, by their names in `MGKConfig`."""
    return {PUBLIC.get(f.name, f.name) for f in dataclasses.fields(MODELS[kind])}
