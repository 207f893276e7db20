"""Export a model with `torch.export`, and to ONNX where `onnx` and `onnxscript` are installed.

Every model and variant exports with `impl="reference"`, at fixed shapes. The ONNX program is run by ONNX's reference
evaluator and compared. What does not export:
- dynamic shapes: a model compares the shapes of its inputs, and an exported program keeps the sizes of the example;
- memory linear in the length: the reference computes the full (Nq,Nk) weights of a head;
- caches: an exported program computes all positions; decode with `generate()`;
- the default implementation of the causal linear family, whose control flow depends on the range of its inputs.
Not tried with ONNX: the Performer's feature map, priors by M-steps, adaptive softmax.

pip install onnx onnxscript    # for ONNX
python examples/export_model.py
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from mgk.models import ClassifierConfig, LanguageModelConfig, VisionConfig, build

SMALL = {"heads": 2, "head_dim": 8, "layers": 1, "width": 16, "hidden": 16, "dropout": 0.0, "attention_dropout": 0.0}
ONNX = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxscript") is not None


def export(model: nn.Module, inputs: Tensor, folder: Path) -> Tensor:
    """Export a model to a file, load the file and return the output of the loaded program."""
    torch.export.save(torch.export.export(model, (inputs,)), folder / "model.pt2")
    result: Tensor = torch.export.load(folder / "model.pt2").module()(inputs)
    return result


def export_onnx(model: nn.Module, inputs: Tensor, folder: Path) -> Tensor:
    """Do the same with ONNX."""
    import onnx  # type: ignore[import-not-found]
    from onnx.reference import ReferenceEvaluator  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised inside torch
        program = torch.onnx.export(model, (inputs,), dynamo=True, verbose=False, input_names=["inputs"])
    assert program is not None  # it is a program with dynamo=True
    program.save(str(folder / "model.onnx"))
    loaded = ReferenceEvaluator(onnx.load(folder / "model.onnx"))
    return torch.from_numpy(loaded.run(None, {"inputs": inputs.numpy()})[0])


def main(attentions: tuple[str, ...] = ("softmax", "linear", "mgk", "smgk", "mlk", "smlk")) -> int:
    torch.manual_seed(0)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists optional packages
    tokens, pixels = torch.randint(1, 50, (2, 12)), torch.randn(2, 3, 8, 8)
    done = 0
    for attention in attentions:
        options = {**SMALL, "attention": attention, "impl": "reference"}
        for config, inputs in (
            (ClassifierConfig(**options, vocabulary=50, max_length=12), tokens),  # type: ignore[arg-type]
            (LanguageModelConfig(**options, vocabulary=50, cutoffs=()), tokens),  # type: ignore[arg-type]
            (VisionConfig(**options, image_size=8), pixels),  # type: ignore[arg-type]
        ):
            model = build(config).eval()
            expected = model(inputs)
            with tempfile.TemporaryDirectory() as folder:
                for exported in (export, export_onnx) if ONNX else (export,):
                    torch.testing.assert_close(exported(model, inputs, Path(folder)), expected, rtol=1e-4, atol=1e-5)
            done += 1
        print(f"{attention}: classifier, language model and vision transformer exported{' (ONNX too)' * ONNX}")
    return done


if __name__ == "__main__":
    main()
