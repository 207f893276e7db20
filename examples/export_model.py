"""Export a model with `torch.export`, and to ONNX where `onnxscript` is installed.

What exports: every model and variant, with `impl="reference"`, at the shapes it was exported with. What does not:
- dynamic shapes: a model checks its inputs against each other, and an exported program keeps the numbers it saw;
- memory linear in the length: the reference makes all weights of a head at once, (Nq,Nk);
- caches: an exported program computes all positions; decode with `generate()`;
- the default implementation for the causal linear family, which looks at the range of its numbers on the way.

python examples/export_model.py
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch

from mgk.models import ClassifierConfig, LanguageModelConfig, VisionConfig, build

SMALL = {"heads": 2, "head_dim": 8, "layers": 1, "width": 16, "hidden": 16, "dropout": 0.0, "attention_dropout": 0.0}


def main(attentions: tuple[str, ...] = ("softmax", "linear", "mgk", "smgk", "mlk", "smlk")) -> int:
    torch.manual_seed(0)
    tokens, pixels = torch.randint(1, 50, (2, 12)), torch.randn(2, 3, 8, 8)
    onnx = importlib.util.find_spec("onnxscript") is not None
    done = 0
    for attention in attentions:
        options = {**SMALL, "attention": attention, "impl": "reference"}
        for config, inputs in (
            (ClassifierConfig(**options, vocabulary=50, max_length=12), tokens),  # type: ignore[arg-type]
            (LanguageModelConfig(**options, vocabulary=50, cutoffs=()), tokens),  # type: ignore[arg-type]
            (VisionConfig(**options, image_size=8), pixels),  # type: ignore[arg-type]
        ):
            model = build(config).eval()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.pt2")
                torch.export.save(torch.export.export(model, (inputs,)), path)
                loaded = torch.export.load(path).module()
                torch.testing.assert_close(loaded(inputs), model(inputs), rtol=1e-4, atol=1e-5)
                if onnx:
                    program = torch.onnx.export(model, (inputs,), dynamo=True, verbose=False)
                    assert program is not None
                    program.save(str(Path(folder, "model.onnx")))
            done += 1
        print(f"{attention}: classifier, language model and vision transformer exported{' (ONNX too)' * onnx}")
    return done


if __name__ == "__main__":
    main()
