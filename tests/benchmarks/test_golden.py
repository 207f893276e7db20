"""Five tiny models learn along the recorded curves, and any other curve is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import golden

RECORDED: dict[str, Any] = json.loads(golden.RECORD.read_text())


def test_the_losses_are_the_recorded_ones() -> None:
    """After a change that is meant to alter them: python -m benchmarks.golden --write, and a line in the changelog."""
    assert golden.check(RECORDED) == []


def test_every_model_learns_and_the_tolerance_is_small_beside_that() -> None:
    assert set(RECORDED["curves"]) == set(golden.MODELS)
    for curve in RECORDED["curves"].values():
        learned = curve["loss"][0] - min(curve["loss"])
        assert learned > 0.1
        assert max(curve["tolerance"]) < 0.01 * learned
        assert curve["tolerance"] == sorted(curve["tolerance"])
        assert curve["tolerance"][0] > 0


@pytest.mark.parametrize("name", ["sMGK classifier", "MGK language model"])
def test_another_order_of_sums_stays_within_the_tolerance(name: str, tmp_path: Path) -> None:
    """The reference implementation stands for another machine: it rounds every attention differently."""
    golden.prepare(tmp_path)
    found = golden.losses(name, tmp_path, model__impl="reference")
    assert found != RECORDED["curves"][name]["loss"]
    assert golden.differences(name, found, RECORDED | {"processor": "another"}) == []


@pytest.mark.parametrize("exact", [True, False])
def test_another_loss_is_reported_with_its_step(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sMGK classifier"
    here = golden.machine() if exact else golden.machine() | {"processor": "another"}
    recorded = RECORDED | here
    curve = RECORDED["curves"][name]
    assert golden.differences(name, curve["loss"], recorded) == []
    for factor, reported in ((0.5, exact), (2.0, True)):  # of the tolerance of a step
        other = list(curve["loss"])
        other[20] += factor * curve["tolerance"][20]
        found = golden.differences(name, other, recorded)
        assert bool(found) == reported
        assert not found or f"{name}: step 21: expected" in found[0]
    other = list(curve["loss"])
    other[3] = float("nan")
    assert golden.differences(name, other, recorded)
    assert golden.differences(name, other[:-1], recorded) == [f"{name}: expected 50 steps, got 49"]
