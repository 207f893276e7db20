"""Masked self-pretraining: only hidden tokens count, and the classifier starts from the encoder that predicted them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.cells import run_cells
from experiments.cells.runner import load_encoder
from experiments.lm.grid import FULL, Cell
from experiments.lm.masked import PATTERN, SHARE, MaskedClassifier, predict_tokens
from experiments.lm.tasks import TASKS, Task
from mgk.files import beside
from mgk.models import Classifier, ClassifierConfig, LanguageModelConfig, build
from mgk.train import checkpoint
from tests.train.common import tiny


def small_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build(ClassifierConfig(layers=1, width=8, hidden=8, heads=1, head_dim=8, vocabulary=9, max_length=40))


def test_only_hidden_tokens_count() -> None:
    """Swapping targets that are not hidden changes nothing; padding is never hidden."""
    model = MaskedClassifier.of(small_model()).eval()
    tokens = torch.randint(1, 9, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(40) < torch.tensor([[40], [20]])
    batch = {"tokens": tokens.masked_fill(~mask, 0), "mask": mask}
    found = model.loss(batch)
    hidden = model.hide(tokens) & mask
    assert int(found["count"]) == int(hidden.sum()) == 40 * 3 // PATTERN + 3  # the pattern: 3 of 20 in every row
    logits = model.unmask(model.encoder(batch["tokens"].masked_fill(hidden, 0), mask))[hidden]
    torch.testing.assert_close(found["loss"], torch.nn.functional.cross_entropy(logits, tokens[hidden]))
    assert int(found["correct"]) == int((logits.argmax(-1) == tokens[hidden]).sum())
    again = model.loss(batch)
    assert all(torch.equal(found[name], again[name]) for name in found)  # the same tokens are hidden in every scoring


def test_a_share_of_the_tokens_is_hidden_in_training() -> None:
    model = MaskedClassifier.of(small_model()).train()
    torch.manual_seed(0)
    share = model.hide(torch.ones(100, 400)).double().mean()
    assert abs(float(share) - SHARE) < 5 * (SHARE * (1 - SHARE) / 40_000) ** 0.5  # five standard deviations


def test_other_models_are_refused() -> None:
    config = LanguageModelConfig(layers=1, width=8, heads=1, head_dim=8, vocabulary=9, cutoffs=(), max_length=8)
    with pytest.raises(TypeError, match="model: expected a Classifier, got LanguageModel"):
        predict_tokens(build(config))


def test_a_cell_starts_from_the_encoder_of_its_pretraining(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk = Task(tiny(steps=4), "accuracy", "Small.", 1.0, pretrained=True)
    monkeypatch.setitem(TASKS, "listops-pretrained", shrunk)
    cell = Cell("listops-pretrained", FULL, 0, 1e-2)
    tally = run_cells([cell], results=tmp_path / "cells", runs=tmp_path / "runs", data_root=data_root, device="cpu")
    assert (tally.finished, tally.failed) == ([cell.name], {})
    run = tmp_path / "runs" / cell.name
    before = checkpoint.load(beside(run, "pretraining") / "best").weights
    assert "unmask.weight" in before
    assert "unmask.weight" not in checkpoint.load(run / "best").weights
    model: Any = Classifier(cell.config.model)  # type: ignore[arg-type]
    load_encoder(beside(run, "pretraining"), model)
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(value, before[f"encoder.{name}"])
    with pytest.raises(ValueError, match="expected a finished run"):
        load_encoder(tmp_path / "nothing", model)
