"""Both perplexities follow their definitions."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mgk.models import LanguageModel, LanguageModelConfig
from mgk.train import config, evaluate, load_model, train
from mgk.train.evaluate import sliding_loss
from tests.train.common import losses, tiny

WINDOW = 8


@pytest.mark.parametrize("cutoffs", [(), (5, 9)])
@pytest.mark.parametrize("length", [3, 9, 10, 40])
def test_sliding_window_is_the_papers_definition(cutoffs: tuple[int, ...], length: int) -> None:
    """Every token but the first, each from the tokens before it, at most a window of them."""
    torch.manual_seed(0)
    small = LanguageModelConfig(
        vocabulary=12, cutoffs=cutoffs, layers=2, width=16, hidden=16, heads=2, head_dim=8, max_length=WINDOW
    )
    model = LanguageModel(small).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)  # so that the context matters
    tokens = np.random.default_rng(0).integers(0, 12, length)
    text = torch.from_numpy(tokens)
    expected = []
    with torch.no_grad():
        for target in range(1, length):
            context = text[max(0, target - WINDOW) : target][None]
            expected.append(-model(context)[0, -1].log_softmax(-1)[text[target]].item())
        found = sliding_loss(model, tokens, WINDOW, batch=7)
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found != pytest.approx(math.log(12), rel=1e-2)


def test_a_run_is_measured_as_at_its_end(data_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(tiny(), run, data_root=data_root)
    measured = evaluate(run, data_root=data_root, device="cpu")
    assert measured["accuracy"] == result.test["accuracy"]
    assert measured["loss"] == pytest.approx(losses(run, "test")[0], rel=1e-6)
    assert measured["step"] == result.best_step
    other = evaluate(run, split="dev", which="last", data_root=data_root, device="cpu")
    assert other["loss"] == pytest.approx(losses(run, "valid")[-1], rel=1e-6)
    model, settings = load_model(run)
    assert settings == tiny()
    assert not model.training


def test_a_run_with_graphs_is_measured_on_a_cpu(data_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(steps=2), run, data_root=data_root)
    (run / "config.json").write_text(config.dump(tiny(steps=2, graphs="on")))
    assert evaluate(run, data_root=data_root, device="cpu")["step"] == 2


@pytest.mark.parametrize("batch", [0, -3])
def test_batch_must_be_positive(batch: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"batch: expected at least 1, got {batch}"):
        evaluate(tmp_path, batch=batch)
    model = LanguageModel(LanguageModelConfig(vocabulary=12, layers=1, width=16, hidden=16, heads=2, head_dim=8))
    with pytest.raises(ValueError, match=f"batch: expected at least 1, got {batch}"):
        sliding_loss(model, np.arange(12), WINDOW, batch)


def test_a_missing_run_or_checkpoint_is_one_line(tmp_path: Path, data_root: Path) -> None:
    with pytest.raises(ValueError, match="expected the folder of a run"):
        evaluate(tmp_path)
    train(tiny(steps=2), tmp_path / "run", data_root=data_root)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="no checkpoint best yet"):
        evaluate(tmp_path / "run")
    with pytest.raises(ValueError, match="expected best or last"):
        evaluate(tmp_path / "run", which="newest")
