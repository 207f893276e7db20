"""Weights of 8 bits by torchao and by PyTorch's dynamic quantisation: close to the full model, in every attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.common import inputs, make
from tests.models.common import KINDS


def close(found: Tensor, expected: Tensor) -> None:
    """Half a step of 8 bits in each weight, through two layers: a few hundredths of the largest logit."""
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_torchao_int8_weights(kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model, tokens = make("language", kind, cutoffs=(), width=32, head_dim=16), inputs("language")["input_ids"]
    expected = model(tokens).logits
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        close(model(tokens).logits, expected)
    assert model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)


def test_torchao_config_of_a_loaded_model(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model, tokens = make("language", cutoffs=(), width=32, head_dim=16), inputs("language")["input_ids"]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map="cpu"
    )
    with torch.no_grad():
        close(loaded(tokens).logits.float(), model(tokens).logits)


@pytest.mark.filterwarnings("ignore")  # it is deprecated in favour of torchao
@pytest.mark.parametrize("model", ["classifier", "language", "vision"])
@pytest.mark.parametrize("kind", ["softmax", "smgk", "mlk"])
def test_dynamic_quantisation(model: str, kind: str) -> None:
    settings: dict[str, Any] = {"cutoffs": ()} if model == "language" else {}
    made, batch = make(model, kind, **settings), {k: v for k, v in inputs(model).items() if k != "labels"}
    small = torch.ao.quantization.quantize_dynamic(made, {torch.nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        close(small(**batch).logits, made(**batch).logits)
