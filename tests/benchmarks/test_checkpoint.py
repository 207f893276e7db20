"""The benchmark of checkpoints compares what it wrote before it reports a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.checkpoint import WAYS, Bench, main

TINY = ["--device", "cpu", "--width", "16", "--layers", "1", "--vocabulary", "20", "--length", "8", "--batch", "2"]
TINY += ["--interval", "2", "--rounds", "1"]


def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = main([*TINY, "--folder", str(tmp_path), "--output", str(tmp_path / "found.json")])
    assert [row["way"] for row in found["rows"]] == list(WAYS)
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert "training waits" in capsys.readouterr().out


def test_a_wrong_checkpoint_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Bench.save

    def late(self: Bench, way: str) -> None:
        save(self, way)
        with torch.no_grad():
            next(self.learner.objective.parameters()).add_(1.0)

    monkeypatch.setattr(Bench, "save", late)
    try:
        with pytest.raises(RuntimeError, match="differs from the weights"):
            main([*TINY, "--folder", str(tmp_path), "--output", str(tmp_path / "found.json")])
    finally:
        dist.destroy_process_group()
