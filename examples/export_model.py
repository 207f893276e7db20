"""Export a model with `torch.export`, and to ONNX where `onnx` and `onnxscript` are installed.

Every model and variant exports with its default implementation, for any batch and, if it reads tokens, any length. To
ONNX that is the dense reference, except for the linear family. The ONNX program is run by ONNX's reference evaluator
and compared. What does not export:
- memory linear in the length, to ONNX: the reference computes the full (Nq,Nk) weights of a head;
- caches: an exported program computes all positions; decode with `generate()`;
- packed documents.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from mgk.models import ClassifierConfig, LanguageModelConfig, VisionConfig, build

SMALL = {"heads": 2, "head_dim": 8, "layers": 1, "width": 16, "hidden": 16, "dropout": 0.0, "attention_dropout": 0.0}
Sizes = dict[int, Any]  # which dimensions have any size
ONNX = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxscript") is not None


def export(model: nn.Module, example: Tensor, sizes: Sizes, inputs: Tensor, folder: Path) -> Tensor:
    """Export a model to a file, load the file and return the output of the loaded program for inputs of any size."""
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(sizes,)), folder / "model.pt2")
    result: Tensor = torch.export.load(folder / "model.pt2").module()(inputs)
    return result


def export_onnx(model: nn.Module, example: Tensor, sizes: Sizes, inputs: Tensor, folder: Path) -> Tensor:
    """Do the same with ONNX."""
    import onnx  # type: ignore[import-not-found]
    from onnx.reference import ReferenceEvaluator  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised inside torch
        program = torch.onnx.export(
            model, (example,), dynamo=True, verbose=False, input_names=["inputs"], dynamic_shapes=(sizes,)
        )
    assert program is not None  # it is a program with dynamo=True
    program.save(str(folder / "model.onnx"))
    loaded = ReferenceEvaluator(onnx.load(folder / "model.onnx"))
    return torch.from_numpy(loaded.run(None, {"inputs": inputs.numpy()})[0])


@torch.no_grad()
def main(attentions: tuple[str, ...] = ("softmax", "linear", "mgk", "smgk", "mlk", "smlk")) -> int:
    torch.manual_seed(0)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists optional packages
    tokens, pixels = torch.randint(1, 50, (3, 12)), torch.randn(3, 3, 8, 8)
    text, images = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}
    done = 0
    for attention in attentions:
        options = {**SMALL, "attention": attention}
        for config, inputs, sizes in (
            (ClassifierConfig(**options, vocabulary=50, max_length=12), tokens, text),  # type: ignore[arg-type]
            (LanguageModelConfig(**options, vocabulary=50, cutoffs=()), tokens, text),  # type: ignore[arg-type]
            (VisionConfig(**options, image_size=8), pixels, images),  # type: ignore[arg-type]
        ):
            model = build(config).eval()
            example = (inputs[:2, :9] if sizes is text else inputs[:2]).contiguous()
            expected = model(inputs)
            with tempfile.TemporaryDirectory() as folder:
                for exported in (export, export_onnx) if ONNX else (export,):
                    found = exported(model, example, sizes, inputs, Path(folder))
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            done += 1
        print(f"{attention}: classifier, language model and vision transformer exported{' (ONNX too)' * ONNX}")
    return done


if __name__ == "__main__":
    main()
