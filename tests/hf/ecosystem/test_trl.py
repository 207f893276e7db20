"""TRL trains models of mgk as it trains those of Transformers: SFT, with adapters, with packed documents, and DPO."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mgk.hf.tokenizer import byte_tokenizer
from tests.hf.common import make

trl = pytest.importorskip("trl", reason="needs TRL")
datasets = pytest.importorskip("datasets", reason="needs datasets")
peft = pytest.importorskip("peft", reason="needs PEFT")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and its dependencies

WORDS = ("the", "attention", "of", "keys", "is", "a", "mixture", "and", "so", "on")
TRAINING: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no",
    "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": 0, "gradient_checkpointing": True,
}  # fmt: skip


def tokenizer() -> Any:
    found = byte_tokenizer(0)
    found.add_special_tokens({"eos_token": chr(1), "pad_token": chr(0)})
    return found


def model(kind: str = "smgk") -> Any:
    settings: dict[str, Any] = {"vocabulary": 258, "positions": "rotary", "cutoffs": (), "max_length": 128}
    return make("language", kind, **settings)


def sentences(count: int = 64) -> list[str]:
    pick = random.Random(0)
    return [" ".join(pick.choices(WORDS, k=pick.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["softmax", "smgk", "mlk"])
@pytest.mark.parametrize("how", ["plain", "lora", "packing"])
def test_supervised_fine_tuning(how: str, kind: str, tmp_path: Path) -> None:
    packing = {"packing": True, "max_length": 64} if how == "packing" else {}
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if how == "lora" else None
    trainer = trl.SFTTrainer(
        model(kind), trl.SFTConfig(str(tmp_path), **TRAINING, **packing), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": sentences()}), peft_config=lora,
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]


def test_packed_batches_have_the_loss_of_their_documents(tmp_path: Path) -> None:
    """What TRL's collator makes of several documents is scored as each of them alone."""
    settings = trl.SFTConfig(str(tmp_path), padding_free=True, max_length=None, **TRAINING)
    data = datasets.Dataset.from_dict({"text": sentences()})
    trainer = trl.SFTTrainer(model(), settings, processing_class=tokenizer(), train_dataset=data)
    rows = [trainer.train_dataset[place] for place in range(4)]
    batch = trainer.data_collator(rows)
    assert batch["input_ids"].shape[0] == 1
    made = trainer.model.eval()
    found = made(**batch).loss
    parts = [made(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss for row in rows]
    sizes = torch.tensor([len(row["input_ids"]) - 1.0 for row in rows])
    torch.testing.assert_close(found, (torch.stack(parts) * sizes).sum() / sizes.sum(), rtol=1e-4, atol=1e-5)


def test_preference_optimisation(tmp_path: Path) -> None:
    texts = sentences(24)
    data = datasets.Dataset.from_dict({"prompt": texts[:8], "chosen": texts[8:16], "rejected": texts[16:]})
    model().save_pretrained(tmp_path / "model")
    settings = trl.DPOConfig(str(tmp_path), **TRAINING)
    trainer = trl.DPOTrainer(str(tmp_path / "model"), args=settings, processing_class=tokenizer(), train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
