"""The benchmark of `generate()` runs on a CPU, and does not time wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import generate
from mgk.hf.static import FixedShapeCache


def test_it_measures_every_way_and_compares_with_the_best_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generate.OPTIONS, "compiled", generate.STATIC)  # compiling takes a minute
    path = tmp_path / "deep" / "generate.json"
    found = generate.main(["--tiny", "--output", str(path), "--methods", "llama", "sMGK soft"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    rows = found["rows"]
    assert [(row["method"], row["way"]) for row in rows] == [
        ("llama", "static"), ("llama", "dynamic"), ("sMGK soft", "compiled"), ("sMGK soft", "static"),
    ]  # fmt: skip
    best = max(row["tokens_per_second"] for row in rows[:2])
    assert rows[3]["speed"] == rows[3]["tokens_per_second"] / best
    assert found["environment"]["versions"]["transformers"]


def test_ratios_are_to_the_fastest_baseline_at_the_same_point_and_a_failed_row_has_none() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "llama", "batch": 1, "length": 8, "tokens_per_second": 100.0},
        {"method": "llama", "batch": 1, "length": 8, "tokens_per_second": 40.0},
        {"method": "sMGK soft", "batch": 1, "length": 8, "tokens_per_second": 190.0},
        {"method": "sMGK soft", "batch": 2, "length": 8, "tokens_per_second": 1.0},
        {"method": "MGK soft", "batch": 1, "length": 8, "failed": "no kernel"},
    ]
    assert [row.get("speed") for row in generate.rated(rows)] == [1.0, 0.4, 1.9, None, None]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = generate.make("sMGK soft", generate.TINY, "cpu")
    assert generate.check(model, "static") < 1e-5
    append = FixedShapeCache.append
    monkeypatch.setattr(FixedShapeCache, "append", lambda cache, key, value: append(cache, key, -value))
    with pytest.raises(RuntimeError, match="a wrong result is not timed"):
        generate.check(model, "static")
