"""A configuration survives JSON exactly, and wrong fields are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgk.recipes import RECIPES, recipe
from mgk.train import config, replace
from tests.train.common import tiny


@pytest.mark.parametrize("name", RECIPES)
def test_json_and_back_is_the_same_configuration(name: str) -> None:
    original = recipe(name)
    assert config.from_dict(json.loads(config.dump(original))) == original


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stepps": 3}, "stepps: no such field; there are recipe, model"),
        ({"steps": "many"}, "steps: expected int, got str 'many'"),
        ({"steps": True}, "steps: expected int, got bool True"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"precision": "8-true"}, "precision: expected one of"),
        ({"model": {"kind": "perceptron"}}, "model.kind: expected one of classifier, matcher, language, vision"),
        ({"model": {"kind": "classifier", "hedas": 2}}, "model.hedas: no such field"),
        ({"data": {"batch": 3}}, "data.name: missing"),
        ({"data": {"name": "listops", "options": "x"}}, "data.options: expected a list"),
        ({"optimiser": 3}, "optimiser: expected an object, got int 3"),
        ({"optimiser": {"lr": -1}}, "lr: expected at least 0, got -1"),
        ({"optimiser": {"warmup": 100}}, "optimiser.warmup: expected at most steps = 12, got 100"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(tiny()) | change))
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        config.read(path)
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["prior", "means"])
def test_an_m_step_with_micro_batches_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"accumulate: expected 1 if model\.prior or model\.means is em.*, got 2"):
        tiny(**{f"model__{name}": "em"}, accumulate=2)


def test_an_integer_may_stand_for_a_float_and_null_for_none() -> None:
    values = json.loads(config.dump(tiny()))
    values["optimiser"]["lr"] = 1
    values["model"]["head_dim"] = None
    read = config.from_dict(values)
    assert isinstance(read.optimiser.lr, float)
    assert read.model.head_dim is None


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the folder of a run, found no config\.json"):
        config.read(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a configuration"):
        config.read(tmp_path / "config.json")


def test_resuming_with_another_configuration_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"model\.heads: the run in here was started with 2, got 1"):
        config.check_same(tiny(), tiny(model__heads=1), Path("here"))


def test_where_and_how_fast_it_runs_may_change() -> None:
    changed = replace(tiny(), workers=1, log_every=3, tensorboard=True, accumulate=2, graphs="off", strategy="ddp")
    config.check_same(tiny(), changed, Path("here"))


def test_flat_names_are_those_of_the_command_line() -> None:
    names = config.flatten(tiny())
    assert {"steps", "model.heads", "data.batch", "optimiser.lr"} <= set(names)


@pytest.mark.parametrize(("saved", "read"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_runs_that_saved_compile_as_a_flag_are_still_read(saved: object, read: str) -> None:
    values = config.to_dict(recipe("lra-listops")) | {"compile": saved}
    assert config.from_dict(values).compile == read
