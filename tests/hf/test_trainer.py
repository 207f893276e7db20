"""Transformers' `Trainer` trains, saves, resumes and evaluates every kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Trainer, TrainingArguments

from mgk.hf import merge_heads
from mgk.hf.config import MODELS
from tests.hf.common import foreign, inputs, make, same_weights
from tests.models.common import KINDS

pytest.importorskip("accelerate")  # needed by Trainer
pytestmark = [  # of accelerate, on machines without a GPU
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
EM: dict[str, Any] = {"prior": "em"}
# Every attention, soft and hard, with learned priors and priors by M-steps.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS if kind != "smgk-em"},
    "mgk-em": ("mgk", EM),
    "smgk-em": ("smgk", EM),
}


def rows(model: str, count: int = 8) -> list[dict[str, Any]]:
    batch = inputs(model, count)
    return [{name: value[row] for name, value in batch.items()} for row in range(count)]


def trainer(model: str, out: Path, kind: str = "smgk", fields: dict[str, Any] | None = None, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "save_steps": 2,
        "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "seed": 0,
    }  # fmt: skip
    data: Any = rows(model)
    made = make(model, kind, **(fields or {}))
    return Trainer(made, TrainingArguments(str(out), **(given | options)), train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize(
    ("model", "kind"),
    [("classifier", "smgk"), ("matcher", "mgk"), ("language", "smgk-em"), ("language", "mlk"), ("vision", "softmax")],
)
def test_training_lowers_the_loss(model: str, kind: str, tmp_path: Path) -> None:
    made = trainer(model, tmp_path, kind, gradient_checkpointing=True, gradient_accumulation_steps=2)
    before = made.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_gradients_equal_those_of_the_full_batch(model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    moved = []
    for size in (8, 2):
        made = trainer(
            model,
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            **options,
        )
        made.train()
        moved.append(torch.cat([x.detach().flatten() for x in cast(Any, made.model).parameters()]))
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merged", [False, True])
def test_smoothed_labels_are_shifted(merged: bool, tmp_path: Path) -> None:
    made = trainer("language", tmp_path, label_smoothing_factor=0.1)
    tokens = inputs("language")["input_ids"]
    model: Any = merge_heads(foreign("llama")[0], [{"input_ids": tokens}])[0] if merged else made.model
    model = model.float()
    found: Any = made.compute_loss(model, {"input_ids": tokens, "labels": tokens})
    logits = model(tokens).logits[:, :-1].mT
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, tokens[:, 1:], label_smoothing=0.1))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("model", ["classifier", "language"])
def test_a_resumed_training_is_bit_identical(model: str, name: str, tmp_path: Path) -> None:
    """With dropout, whose random state is in the checkpoint: parameters, priors and optimiser are restored."""
    kind, fields = VARIANTS[name]
    fields = fields | {"dropout": 0.2}
    whole = trainer(model, tmp_path / "whole", kind, fields)
    whole.train()
    again = trainer(model, tmp_path / "again", kind, fields)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert again.state.global_step == 4
    assert whole.model is not None
    assert again.model is not None
    one, two = whole.model.state_dict(), again.model.state_dict()
    fresh = make(model, kind, **fields).state_dict()
    assert any(not torch.equal(one[key], fresh[key]) for key in one)
    if "em" in name or "positions" in name:
        assert any("log_prior" in key and not torch.equal(one[key], fresh[key]) for key in one)
    for key, value in one.items():
        assert torch.equal(two[key], value), key


@pytest.mark.parametrize("kind", ["softmax", "smgk"])
def test_a_checkpoint_can_be_loaded_as_a_model(kind: str, tmp_path: Path) -> None:
    made = trainer("classifier", tmp_path, kind)
    made.train()
    model: Any = made.model
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-4")
    batch = {name: value for name, value in inputs("classifier").items() if name != "labels"}
    assert same_weights(loaded, model)
    torch.testing.assert_close(loaded(**batch).logits, model.eval()(**batch).logits)
