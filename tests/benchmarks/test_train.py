"""The training benchmark runs from end to end on a CPU, and its dense MGK computes what the fused one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import train
from mgk.nn import MixtureAttention


def test_every_model_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.json"
    train.main(["--device", "cpu", "--rounds", "1", "--length", "24", "--steps", "2", "--output", str(path)])
    found = json.loads(path.read_text())
    assert [row["method"] for row in found["rows"]] == list(train.METHODS)
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    assert {"torch", "mgk"} <= set(found["environment"]["versions"])
    assert "| smgk:4      |     no |" in capsys.readouterr().out


def test_the_formula_is_what_the_fused_attention_computes() -> None:
    torch.manual_seed(0)
    fused = MixtureAttention(16, 2, variant="mgk", head_dim=8).eval().double()
    with torch.no_grad():
        fused.log_prior += torch.randn_like(fused.log_prior)  # type: ignore[arg-type, operator]
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    padding = torch.arange(9)[None] >= torch.tensor([[9], [5]])
    dense = train.DenseMixture(fused).eval()
    torch.testing.assert_close(dense(x, key_padding_mask=padding)[0], fused(x, key_padding_mask=padding)[0])


def test_a_wrong_fused_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = train.Case("cpu", 2, 16, "random", None, 0)
    learner = case.learner(train.DENSE, False)
    assert train.check(learner, 16) < 1e-6
    real = MixtureAttention.forward
    monkeypatch.setattr(MixtureAttention, "forward", lambda *a, **o: (real(*a, **o)[0] * 1.01, None))
    with pytest.raises(RuntimeError, match="a wrong result is not timed"):
        train.check(learner, 16)
