"""`MGKConfig` keeps every field of a model's configuration and rejects unknown ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from mgk.hf import MGKConfig
from mgk.train.config import MODELS
from tests.hf.common import config
from tests.models.common import KINDS


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "poem"}, "kind: expected one of classifier, matcher, language, vision, got 'poem'"),
        ({"head": 3}, "head: no such field; did you mean heads?"),
        ({"cutoffs": (5,)}, "cutoffs: no field of a classifier model"),
        ({"max_length": 100}, "max_length: is called max_position_embeddings"),
        ({"heads": 0}, "heads: expected at least 1, got 0"),
        ({"attention": "flash"}, "attention: expected one of"),
    ],
)
def test_a_wrong_field_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        MGKConfig(**given)
