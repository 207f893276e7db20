"""The benchmark of `generate()` runs on a CPU, and does not time wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import generate
from mgk.hf.static import FixedShapeCache


def test_it_measures_both_modes_and_compares_the_best(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "generate.json"
    found = generate.main(["--tiny", "--output", str(path), "--methods", "softmax", "sMGK soft"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    rows = found["rows"]
    assert [(row["method"], row["heads"], row["mode"]) for row in rows] == [
        ("softmax", 4, "dynamic"), ("softmax", 4, "static"), ("sMGK soft", 2, "dynamic"), ("sMGK soft", 2, "static"),
    ]  # fmt: skip
    # Keys and values of 2 sequences, 40 positions, 4 heads of 8 numbers, 2 layers, in float32.
    assert rows[0]["cache_bytes"] == 2 * 2 * 40 * 4 * 8 * 2 * 4
    assert found["summary"]["sMGK soft"]["cache"] == 0.5
    assert found["environment"]["versions"]["transformers"]


def test_the_fastest_mode_counts_and_a_failed_one_does_not() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "softmax", "mode": "dynamic", "tokens_per_second": 100.0, "cache_bytes": 8},
        {"method": "softmax", "mode": "static", "tokens_per_second": 40.0, "cache_bytes": 8},
        {"method": "sMGK soft", "mode": "dynamic", "tokens_per_second": 120.0, "cache_bytes": 4},
        {"method": "sMGK soft", "mode": "static", "tokens_per_second": 190.0, "cache_bytes": 4},
        {"method": "MGK soft", "mode": "static", "failed": "no kernel"},
    ]
    found = generate.summary(rows)
    assert found["sMGK soft"] == {"mode": "static", "speedup": 1.9, "cache": 0.5}
    assert found["softmax"]["mode"] == "dynamic"
    assert "MGK soft" not in found


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = generate.make("sMGK soft", generate.TINY, "cpu")
    assert generate.check(model, "static") < 1e-5
    append = FixedShapeCache.append
    monkeypatch.setattr(FixedShapeCache, "append", lambda cache, key, value: append(cache, key, 2 * value))
    with pytest.raises(RuntimeError, match="a wrong result is not timed"):
        generate.check(model, "static")
