"""`MGKConfig`: one Transformers configuration for all models, with the fields of `mgk.models`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from mgk.models.config import ModelConfig
from mgk.ops import arguments as check
from mgk.train.config import MODELS as ALL_MODELS
from mgk.train.config import build

logger = logging.get_logger(__name__)

# A translator has two inputs, which no class of this package reads.
MODELS = {kind: config for kind, config in ALL_MODELS.items() if kind != "translation"}

# Fields of `mgk.models` and their names here. In Transformers `max_length` is how much to generate.
PUBLIC = {"max_length": "max_position_embeddings", "classes": "num_labels"}
OWN = {public: name for name, public in PUBLIC.items()}


# The names that Transformers' models give to the same fields. `to_dict` and config.json have these.
STANDARD = {
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "num_kv_heads",
    "num_hidden_layers": "layers",
    "intermediate_size": "hidden",
    "vocab_size": "vocabulary",
    "partial_rotary_factor": "rotary_share",
    "original_max_position_embeddings": "rope_original_length",
    "num_channels": "channels",
    "sliding_window": "window",
}
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "swiglu"}  # a Transformers model with "silu" has a gate, too
ROPE = {
    "rope_type": "rope_type", "type": "rope_type", "factor": "rope_factor", "rope_theta": "rope_theta",
    "original_max_position_embeddings": "rope_original_length", "partial_rotary_factor": "rotary_share",
}  # fmt: skip
# Names by which other libraries call a field.
MEANT = {
    "variant": "attention", "num_layers": "layers", "n_layer": "layers", "n_layers": "layers", "depth": "layers",
    "num_heads": "heads", "n_head": "heads", "n_heads": "heads", "num_components": "components",
    "d_model": "width", "n_embd": "width", "embed_dim": "width", "dim": "width", "d_ff": "hidden", "ffn_dim": "hidden",
    "n_inner": "hidden", "mlp_dim": "hidden", "activation_function": "activation", "num_classes": "num_labels",
    "n_positions": "max_position_embeddings", "max_seq_len": "max_position_embeddings",
    "hidden_dropout_prob": "dropout", "resid_pdrop": "dropout", "attention_probs_dropout_prob": "attention_dropout",
    "attn_pdrop": "attention_dropout", "gradient_checkpointing": "recompute",
}  # fmt: skip
# What Transformers itself, also an older release of it, passes or writes beside the fields of a model.
KNOWN = {
    "model_type", "torch_dtype", "name_or_path", "num_labels", "output_attentions", "attn_implementation",
    "experts_implementation", "per_layer_config", "auto_map", "quantization_config", "tie_word_embeddings",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "torchscript",
    "use_bfloat16", "pruned_heads", "finetuning_task", "tokenizer_class", "prefix", "task_specific_params",
    "sep_token_id", "decoder_start_token_id", "transformers_weights", "tie_last_hidden_states",
}  # fmt: skip
GENERATION = GenerationConfig().to_dict().keys()


class MGKConfig(PreTrainedConfig):
    """The configuration of a model, for example `MGKConfig(kind="language", attention="smgk", heads=4, width=256)`.

    `kind` is "classifier", "matcher", "language" or "vision". The other fields and their defaults are those of
    `ClassifierConfig`, `MatcherConfig`, `LanguageModelConfig` and `VisionConfig` of `mgk.models`, except that
    `max_length` is called `max_position_embeddings`. `hidden_size`, `num_attention_heads`, `num_key_value_heads`,
    `num_hidden_layers`, `intermediate_size`, `vocab_size`, `hidden_act`, `rope_parameters`, `sliding_window`,
    `layer_types` and so on mean what they mean in Transformers; `rope_theta` or `rope_parameters` alone ask for rotary
    positions. Another field, or one of another kind of model, is an error. In a file, it is kept with a warning.
    """

    model_type = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = STANDARD | {"classes": "num_labels"}

    auto_map: ClassVar[dict[str, str]] = {}  # Transformers reads it, and sets one that it loads

    kind: str = "classifier"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = True
    logits_in_training: bool = False  # see `MGKForCausalLM.forward`

    def __post_init__(self, **kwargs: Any) -> None:
        own = field_names(check.check_choice("kind", self.kind, MODELS))
        given = own_names(kwargs, own)
        for name in given.keys() - own:
            check_name(name, self.kind, own)
        settings = {OWN.get(public, public): given.pop(public) for public in own & given.keys()}
        if "num_labels" in own and "classes" not in settings and self.id2label is not None:
            settings["classes"] = len(self.id2label)
        made: ModelConfig = build(MODELS[self.kind], settings, "")
        check_layer_types(kwargs.get("layer_types"), made)
        for name, value in dataclasses.asdict(made).items():
            if name == "classes":  # `PreTrainedConfig` sets it, together with the names of the labels
                given["num_labels"] = value
            else:
                setattr(self, PUBLIC.get(name, name), list(value) if isinstance(value, tuple) else value)
        super().__post_init__(**given)

    @property
    def hidden_act(self) -> str:
        """The activation by its name in Transformers."""
        return next(name for name, own in ACTIVATIONS.items() if own == self.activation)  # type: ignore[attr-defined]

    @hidden_act.setter
    def hidden_act(self, value: str) -> None:
        self.activation = ACTIVATIONS[check.check_choice("hidden_act", value, ACTIVATIONS)]

    @property
    def layer_types(self) -> list[str] | None:
        """Which layers have the window, by the names of Transformers; None without a window."""
        return None if getattr(self, "window", None) is None else layer_types(self.to_model())

    @layer_types.setter
    def layer_types(self, value: list[str] | None) -> None:
        if getattr(self, "window", None) is not None:
            self.global_every = first_global(value)
        check_layer_types(value, self.to_model())

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, by the names of Transformers where it has one for a field."""
        standard = {own: name for name, own in STANDARD.items()}
        values = {standard.get(name, name): value for name, value in super().to_dict().items()}
        values["hidden_act"] = self.hidden_act
        del values["activation"]
        if self.layer_types is not None:
            values["layer_types"] = self.layer_types
        return values

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Convert from plain values, of a file perhaps, whose unknown fields are kept as attributes with a warning."""
        own = field_names(config_dict.get("kind", cls.kind)) if config_dict.get("kind", cls.kind) in MODELS else set()
        known, unknown = {}, {}
        fields = {field.name for field in dataclasses.fields(cls)}
        for name, value in config_dict.items():
            try:
                for each in own_names({name: value}, own).keys() - own - fields:
                    check_name(each, "", own)
                known[name] = value
            except UnknownFieldError:
                unknown[name] = value
            except ValueError:  # a wrong value, or a field of another kind of model: the constructor says so
                known[name] = value
        found: Any = super().from_dict(known, **kwargs)
        for name, value in unknown.items():
            logger.warning(f"{name}: no field of MGKConfig; it is kept and has no effect")
            setattr(found[0] if isinstance(found, tuple) else found, name, value)
        return found

    def to_model(self) -> ModelConfig:
        """Convert to the configuration of `mgk.models`."""
        values = {OWN.get(public, public): getattr(self, public) for public in field_names(self.kind)}
        return build(MODELS[self.kind], values, "")  # type: ignore[no-any-return]

    @classmethod
    def from_model(cls, config: ModelConfig, **others: Any) -> MGKConfig:
        """Convert from a configuration of `mgk.models`; `others` are fields of Transformers."""
        kind = next((name for name, type_ in MODELS.items() if type(config) is type_), None)
        if kind is None:
            known = ", ".join(type_.__name__ for type_ in MODELS.values())
            raise TypeError(f"config: expected one of mgk.models, {known}, got {check.describe(config)}")
        fields = {PUBLIC.get(name, name): value for name, value in dataclasses.asdict(config).items()}
        return cls(kind=kind, **fields, **others)


def field_names(kind: str) -> set[str]:
    """Return the fields of a kind of model, by their names in `MGKConfig`."""
    return {PUBLIC.get(f.name, f.name) for f in dataclasses.fields(MODELS[kind])}


class UnknownFieldError(ValueError):
    """A name that no field of any model has."""


def own_names(given: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Return fields by the names of `mgk.models`; `own` are those of this kind of model."""
    found: dict[str, Any] = {}
    every: int | None = None

    def add(public: str, name: str, value: Any) -> None:
        if name in found and found[name] != value:
            raise ValueError(f"{public}: expected the value of {name}, another name of it, {found[name]}, got {value}")
        found[name] = value

    for name, value in given.items():
        if name in ("rope_parameters", "rope_scaling") and "positions" in own:
            for inner, number in (value or {}).items():
                if inner not in ROPE:
                    raise ValueError(f"{name}: expected any of {', '.join(sorted(ROPE))}, got {inner}")
                add(f"{name}[{inner!r}]", ROPE[inner], number)
        elif name == "hidden_act":
            add(name, "activation", ACTIVATIONS[check.check_choice(name, value, ACTIVATIONS)])
        elif name == "sliding_window" and "window" not in own:
            if value is not None:
                raise ValueError(f"sliding_window: expected None, only language models have a window, got {value}")
        elif name == "layer_types":  # `check_layer_types` compares it with the layers of the model
            every = first_global(value)
        else:
            add(name, MGKConfig.attribute_map.get(name, name), value)
    if found.get("window") is not None and every is not None:
        found.setdefault("global_every", every)
    if found.keys() & {"rope_theta", "rope_type"} and "positions" in own:
        found.setdefault("positions", "rotary")
    return found


def layer_types(model: ModelConfig) -> list[str]:
    """Return what Transformers calls the attention of each layer."""
    windows = getattr(model, "windows", (None,) * model.layers)
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def first_global(types: list[str] | None) -> int | None:
    """Return the number of the first layer without a window, from 1 on, which is `global_every`; None: no layer."""
    return list(types).index("full_attention") + 1 if types and "full_attention" in types else None


def check_layer_types(types: list[str] | None, model: ModelConfig) -> None:
    if types is not None and list(types) != layer_types(model):
        raise ValueError(
            f"layer_types: expected {layer_types(model)} for these layers, sliding_window and global_every (layers "
            f"without a window are the n-th, 2n-th and so on), got {list(types)}"
        )


def check_name(name: str, kind: str, own: set[str]) -> None:
    """Raise for a name that is neither a field of this kind of model nor of Transformers."""
    if name in PUBLIC:
        raise ValueError(f"{name}: is called {PUBLIC[name]} here; in Transformers {name} is for generation")
    if name in KNOWN or name.startswith("_") or name in GENERATION:
        return
    if any(name in field_names(kind) for kind in MODELS):
        raise ValueError(f"{name}: no field of a {kind} model; it has {', '.join(sorted(own))}")
    near = [MEANT[name]] if name in MEANT else difflib.get_close_matches(name, sorted({*own, *STANDARD}), 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(own))}"
    raise UnknownFieldError(f"{name}: no such field; {hint}")
