"""Weights that accelerate keeps on the CPU or on disk are loaded for each module when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.common import CLASSES, inputs, make
from tests.models.common import MODERN

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "mlk"])
@pytest.mark.parametrize("model", CLASSES)
def test_offloaded_models_compute_the_same(model: str, kind: str, where: str, tmp_path: Path) -> None:
    made, batch = make(model, kind), inputs(model)
    expected = made(**batch)
    offload = {"cpu": accelerate.cpu_offload, "disk": accelerate.disk_offload}[where]
    options = {"offload_dir": str(tmp_path)} if where == "disk" else {}
    offload(made, execution_device=torch.device("cpu"), **options)
    assert any(parameter.is_meta for parameter in made.parameters())
    with torch.no_grad():
        found = made(**batch)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("options", [{}, {"cutoffs": ()}, MODERN, {"positions": "learned"}])
def test_a_model_spread_over_devices(options: dict[str, Any], tmp_path: Path) -> None:
    """`device_map="auto"` with too little memory for the whole model, which then is on disk in part."""
    made, tokens = make("language", **options), inputs("language")["input_ids"]
    made.save_pretrained(tmp_path)
    size = sum(x.numel() * x.element_size() for x in made.parameters())
    loaded = CLASSES["language"].from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": size // 2}, offload_folder=str(tmp_path / "disk")
    )
    assert "disk" in loaded.hf_device_map.values()
    torch.testing.assert_close(loaded(tokens).logits, made(tokens).logits)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(tokens, **settings), made.generate(tokens, **settings))
