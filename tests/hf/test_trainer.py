"""Transformers' own Trainer: it trains every kind of model, saves, resumes and evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.hf.common import inputs, make

pytest.importorskip("accelerate")  # which Trainer needs
pytestmark = [  # of accelerate, on machines without a GPU
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def rows(model: str, count: int = 8) -> list[dict[str, Any]]:
    batch = inputs(model, count)
    return [{name: value[row] for name, value in batch.items()} for row in range(count)]


def trainer(model: str, out: Path, kind: str = "smgk", **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "save_steps": 2,
        "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "seed": 0,
    }  # fmt: skip
    data: Any = rows(model)
    return Trainer(
        make(model, kind), TrainingArguments(str(out), **(given | options)), train_dataset=data, eval_dataset=data
    )


@pytest.mark.parametrize(
    ("model", "kind"),
    [("classifier", "smgk"), ("matcher", "mgk"), ("language", "smgk-em"), ("language", "mlk"), ("vision", "softmax")],
)
def test_it_trains(model: str, kind: str, tmp_path: Path) -> None:
    made = trainer(model, tmp_path, kind, gradient_checkpointing=True, gradient_accumulation_steps=2)
    before = made.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] < before


def test_it_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = trainer("classifier", tmp_path / "whole")
    whole.train()
    again = trainer("classifier", tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert again.model is not None
    assert whole.model is not None
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(two, one)
