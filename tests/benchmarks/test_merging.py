"""The study of merged heads measures what a run measures, and does not change the original model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import merging
from mgk.hf.batches import texts_of_run
from mgk.hf.convert import from_run
from mgk.train import config as run_config
from mgk.train import train
from mgk.train.config import replace
from tests.recipes.common import small


@pytest.mark.parametrize(("name", "recipe"), [("enwik8", "enwik8"), ("imdb", "lra-text")])
def test_a_run_is_halved_in_three_ways_and_compared(
    name: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {"steps": 20, "eval_every": 10, "optimiser__warmup": 2, "model__dropout": 0.0}
    base = replace(small(recipe, tmp_path), **fields, model__attention="softmax", model__heads=4)
    monkeypatch.setattr(merging, "settings_of", lambda *_: base)
    out = tmp_path / "study.json"
    arguments = ["--models", name, "--output", str(out), "--runs", str(tmp_path / "runs"), "--data-root", str(tmp_path)]
    found = merging.main(arguments)["studies"][0]
    assert json.loads(out.read_text())["studies"][0]["rows"] == found["rows"]
    assert (found["steps"], found["tuning_steps"]) == (20, 2)
    shapes = [(row["method"], row["heads"], row["key_value_heads"]) for row in found["rows"]]
    assert shapes == [("original", 4, 4), ("merge", 2, 2), ("drop", 2, 2), ("pool", 4, 2)]
    original, merged, dropped, pooled = found["rows"]
    assert 4 * merged["cache_per_token"] == 3 * original["cache_per_token"] == 6 * dropped["cache_per_token"]
    assert pooled["cache_per_token"] == dropped["cache_per_token"]
    expected = json.loads((tmp_path / "runs" / name / "result.json").read_text())["test"]
    for key, value in original["at_once"].items():  # the same sums, in other batches
        assert value == pytest.approx(expected[key], rel=1e-5)
    assert f"original {original['heads']}/4 heads" in capsys.readouterr().out


def test_the_original_is_not_tuned_with_its_copies(tmp_path: Path) -> None:
    base = replace(small("enwik8", tmp_path), steps=20, eval_every=10, optimiser__warmup=2)
    train(replace(base, model__attention="softmax"), tmp_path / "run", data_root=tmp_path)
    model = from_run(tmp_path / "run")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    texts = texts_of_run(run_config.read(tmp_path / "run/config.json"), tmp_path, 2, 16)
    best, lr = merging.tuned(model, texts, 3, (1e-9, 1e-2))
    assert lr == 1e-2  # it has hardly been trained: the faster the better
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert any(not torch.equal(before[key], value) for key, value in best.state_dict().items())


def test_a_run_with_normalised_queries_is_studied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of the study: grouped queries, QK-norm, rotary positions; the number of steps is at most a tenth."""
    base = replace(small("lm-nano-cpu", tmp_path), steps=20, eval_every=10, optimiser__warmup=2)
    fields: dict[str, Any] = {"model__attention": "softmax", "model__heads": 4, "model__num_kv_heads": 2}
    train(replace(base, **fields), tmp_path / "run", data_root=tmp_path)
    shared = ["--run", str(tmp_path / "run"), "--data-root", str(tmp_path), "--output", str(tmp_path / "study.json")]
    options = ["--rates", "1e-3", "--windows", "4", "16", "--tuning-steps"]
    rows = merging.main([*shared, *options, "1"])["studies"][0]["rows"]
    shapes = [(row["method"], row["heads"], row["key_value_heads"]) for row in rows]
    assert shapes == [("original", 4, 2), ("merge", 2, 1), ("drop", 2, 1), ("pool", 4, 1)]
    assert "1 of fine-tuning" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--tuning-steps: expected 1 to 2, a tenth of the run's, got 3"):
        merging.main([*shared, *options, "3"])
