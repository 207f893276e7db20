"""`MGKConfig` keeps every field of a model's configuration and rejects unknown ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.utils import logging

from mgk.hf import MGKConfig
from mgk.hf.config import MODELS
from mgk.models import LanguageModelConfig
from tests.hf.common import config
from tests.models.common import KINDS

LOCAL = ["sliding_attention"] * 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_configuration_gives_the_same_model(model: str, kind: str, tmp_path: Path) -> None:
    expected = config(model, kind)
    expected.save_pretrained(tmp_path)
    found = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, MGKConfig)
    assert found.to_model() == expected.to_model()


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_are_those_of_the_models(model: str, tmp_path: Path) -> None:
    """Also after saving: a field that equals the default of another kind must be written."""
    expected = MODELS[model]()
    found = MGKConfig(kind=model)
    assert found.to_model() == expected
    changed = dataclasses.replace(expected, heads=5, layers=3)
    MGKConfig.from_model(changed).save_pretrained(tmp_path)
    assert MGKConfig.from_pretrained(tmp_path).to_model() == changed


def test_names_of_transformers_are_aliases() -> None:
    given: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 3, "vocab_size": 99}
    labels: dict[str, Any] = {"num_labels": 7, "max_position_embeddings": 11}
    made: Any = MGKConfig(**given, **labels)
    model = made.to_model()
    assert (model.width, model.heads, model.classes, model.vocabulary, model.max_length) == (48, 3, 7, 99, 11)
    assert (made.width, made.num_hidden_layers, made.classes) == (48, model.layers, 7)
    assert MGKConfig(id2label={0: "a", 1: "b", 2: "c"}).to_model().classes == 3  # type: ignore[union-attr]


def test_fields_of_transformers_mean_what_they_mean_there() -> None:
    llama: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 8,
        "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "vocab_size": 99, "max_position_embeddings": 64, "attention_dropout": 0.25,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "partial_rotary_factor": 0.75,
                            "original_max_position_embeddings": 16},
    }  # fmt: skip
    made: Any = MGKConfig(kind="language", **llama)
    expected = LanguageModelConfig(
        width=48, hidden=96, layers=3, heads=6, head_dim=8, num_kv_heads=2, activation="swiglu",
        tie_word_embeddings=False, vocabulary=99, max_length=64, attention_dropout=0.25, positions="rotary",
        rope_type="yarn", rope_theta=5e5, rope_factor=4.0, rotary_share=0.75, rope_original_length=16,
        window=8, global_every=2,
    )  # fmt: skip
    assert made.to_model() == expected
    told = made.to_dict()
    del llama["rope_parameters"]
    assert {name: told[name] for name in llama} == llama
    assert not {"width", "heads", "layers", "hidden", "vocabulary", "num_kv_heads", "activation", "window"} & set(told)
    made.hidden_act = "relu"
    assert (made.num_key_value_heads, made.hidden_act, made.activation) == (2, "relu", "relu")
    rotary: Any = {"kind": "language", "rope_theta": 5e5}
    assert MGKConfig(**rotary).to_model().positions == "rotary"  # type: ignore[union-attr]


def test_a_window_is_written_by_its_names_in_transformers(tmp_path: Path) -> None:
    """As `sliding_window` and `layer_types`; a file with `window`, as 0.2 wrote it, gives the same model."""
    for every, expected in ((None, LOCAL), (2, ["sliding_attention", "full_attention"])):
        model = LanguageModelConfig(attention="smgk", layers=2, window=8, global_every=every)
        MGKConfig.from_model(model).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert (written["sliding_window"], written["layer_types"]) == (8, expected)
        found = AutoConfig.from_pretrained(tmp_path)
        assert found.to_model() == model
        assert (found.sliding_window, found.window, found.layer_types) == (8, 8, expected)
        renamed = {name: value for name, value in written.items() if name not in ("sliding_window", "layer_types")}
        (tmp_path / "config.json").write_text(json.dumps(renamed | {"window": 8}))
        assert AutoConfig.from_pretrained(tmp_path).to_model() == model
    found.layer_types = LOCAL
    assert found.to_model() == dataclasses.replace(model, global_every=None)
    whole: Any = MGKConfig(kind="language", layers=2, layer_types=["full_attention"] * 2)  # type: ignore[call-arg]
    assert (whole.sliding_window, whole.layer_types) == (None, None)


def test_folders_with_our_names_or_unknown_fields_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As 0.2 wrote them, or with a note that somebody added; a field that has no effect is not passed over silently."""
    logging.enable_propagation()
    old = {"model_type": "mgk", "kind": "language", "width": 24, "heads": 3, "activation": "swiglu", "my_note": "x"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    found = AutoConfig.from_pretrained(tmp_path)
    assert (found.hidden_size, found.num_attention_heads, found.hidden_act) == (24, 3, "silu")
    assert found.my_note == "x"
    assert "my_note: no field of MGKConfig" in caplog.text
    found.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, num_hidden_layers=5).layers == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "poem"}, "kind: expected one of classifier, matcher, language, vision, got 'poem'"),
        ({"head": 3}, "head: no such field; did you mean heads?"),
        ({"cutoffs": (5,)}, "cutoffs: no field of a classifier model"),
        ({"max_length": 100}, "max_length: is called max_position_embeddings"),
        ({"heads": 0}, "heads: expected at least 1, got 0"),
        ({"attention": "flash"}, "attention: expected one of"),
        ({"num_layers": 2}, "num_layers: no such field; did you mean layers?"),
        ({"num_heads": 2}, "num_heads: no such field; did you mean heads?"),
        ({"variant": "softmax"}, "variant: no such field; did you mean attention?"),
        ({"d_model": 12}, "d_model: no such field; did you mean width?"),
        ({"hidden_siez": 12}, "hidden_siez: no such field; did you mean hidden_size?"),
        ({"experts": 8}, "experts: no such field; it has activation, "),
        ({"hidden_act": "mish"}, "hidden_act: expected one of gelu, relu, silu, got 'mish'"),
        ({"sliding_window": 128}, "sliding_window: expected None, only language models have a window, got 128"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types: expected \['full_attention', 'full_"),
        (
            {"kind": "language", "sliding_window": 8, "attention": "mlk"},
            "window: expected None for attention 'mlk', got 8",
        ),
        (
            {"kind": "language", "sliding_window": 8, "layers": 3, "layer_types": ["full_attention", *LOCAL]},
            r"layer_types: expected \['full_attention', 'full_attention', 'full_attention'\] for these layers",
        ),
        (
            {"kind": "language", "sliding_window": 8, "layers": 3, "layer_types": LOCAL},
            "layer_types: expected .* for these layers",
        ),
        ({"rope_parameters": {"beta": 1}}, "rope_parameters: expected any of"),
        ({"width": 8, "hidden_size": 12}, "hidden_size: expected the value of width, another name of it, 8, got 12"),
    ],
)
def test_a_wrong_field_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        MGKConfig(**given)
