"""Adapters of PEFT: trained, saved, loaded and merged; a tied embedding is not changed without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.common import inputs, make

peft = pytest.importorskip("peft", reason="needs PEFT")


def trained(model: Any, batch: dict[str, Any]) -> None:
    model.train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        model(**batch).loss.backward()
        optimiser.step()
    model.eval()


@pytest.mark.parametrize("kind", ["softmax", "smgk", "mlk"])
@pytest.mark.parametrize("model", ["classifier", "language", "vision"])
def test_an_adapter_is_saved_loaded_and_merged(model: str, kind: str, tmp_path: Path) -> None:
    batch = inputs(model)
    plain = make(model, kind)
    expected = plain(**batch).logits
    adapted = peft.get_peft_model(make(model, kind), peft.LoraConfig(target_modules=["query_proj", "value_proj", "up"]))
    trained(adapted, batch)
    found = adapted(**batch).logits
    assert not torch.allclose(found, expected)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(model, kind), tmp_path)
    torch.testing.assert_close(again(**batch).logits, found)
    torch.testing.assert_close(again.merge_and_unload()(**batch).logits, found, rtol=1e-4, atol=1e-4)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(**batch).logits, expected)


def test_prompt_tuning_and_gradient_checkpointing() -> None:
    made = make("language", positions="rotary", cutoffs=())
    made.gradient_checkpointing_enable()
    adapted = peft.get_peft_model(
        made, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=12, num_layers=2)
    )
    before = adapted.prompt_encoder["default"].embedding.weight.clone()
    trained(adapted, inputs("language"))
    assert not torch.equal(before, adapted.prompt_encoder["default"].embedding.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["tokens", "lm_head"])
def test_an_adapter_of_the_vocabulary_is_used_at_both_ends(target: str, tied: bool) -> None:
    """A tied embedding is one matrix: adapted, it is also the output layer, as it is once the adapter is merged."""
    if tied and target == "lm_head":
        return  # there is no such module
    made, batch = make("language", cutoffs=(), tie_word_embeddings=tied), inputs("language")
    adapted = peft.get_peft_model(made, peft.LoraConfig(target_modules=[target]))
    trained(adapted, batch)
    assert all(p.grad is not None and p.grad.any() for p in adapted.parameters() if p.requires_grad)
    found = adapted(**batch)
    merged = adapted.merge_and_unload()(**batch)
    torch.testing.assert_close(merged.logits, found.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.loss, found.loss, rtol=1e-4, atol=1e-4)
