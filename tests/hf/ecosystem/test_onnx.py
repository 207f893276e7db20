"""A model in ONNX Runtime, exported with its default implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hf.common import make

runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnxscript", reason="needs onnx and onnxscript")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised inside torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "linear", "mlk", "smlk"])
def test_onnx_runtime_takes_any_batch_and_length(kind: str, tmp_path: Path) -> None:
    made = make("language", kind, cutoffs=(), layers=1, max_length=140)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=140)}
    with torch.no_grad():
        program = torch.onnx.export(
            made, (), kwargs={"input_ids": torch.ones(2, 9).long()}, dynamo=True, verbose=False,
            dynamic_shapes={"input_ids": shape},
        )  # fmt: skip
        assert program is not None
        program.save(str(tmp_path / "model.onnx"))
        session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        for size in ((1, 5), (3, 131)):
            tokens = torch.randint(0, 20, size)
            found = torch.from_numpy(session.run(None, {"input_ids": tokens.numpy()})[0])
            torch.testing.assert_close(found, made(tokens).logits, rtol=1e-4, atol=1e-5)
