"""Export a model with `torch.export`, and to ONNX where `onnx` and `onnxscript` are installed.

What exports: every model and variant, with `impl="reference"`, at the shapes it was exported with; the ONNX program is
run by ONNX's own reference evaluator and compared. What does not:
- dynamic shapes: a model checks its inputs against each other, and an exported program keeps the numbers it saw;
- memory linear in the length: the reference makes all weights of a head at once, (Nq,Nk);
- caches: an exported program computes all positions; decode with `generate()`;
- the default implementation for the causal linear family, which looks at the range of its numbers on the way;
- to ONNX, the Performer's feature map, a prior moved by M-steps and adaptive softmax have not been tried.

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
    """Written, read again and run."""
    torch.export.save(torch.export.export(model, (inputs,)), folder / "model.pt2")
    result: Tensor = torch.export.load(folder / "model.pt2").module()(inputs)
    return result


def export_onnx(model: nn.Module, inputs: Tensor, folder: Path) -> Tensor:
    """The same with ONNX."""
    import onnx  # type: ignore[import-not-found]
    from onnx.reference import ReferenceEvaluator  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        program = torch.onnx.export(model, (inputs,), dynamo=True, verbose=False, input_names=["inputs"])
    assert program is not None  # with dynamo=True there is one
    program.save(str(folder / "model.onnx"))
    loaded = ReferenceEvaluator(onnx.load(folder / "model.onnx"))
    return torch.from_numpy(loaded.run(None, {"inputs": inputs.numpy()})[0])


def main(attentions: tuple[str, ...] = ("softmax", "linear", "mgk", "smgk", "mlk", "smlk")) -> int:
    torch.manual_seed(0)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names what else could be installed
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
