"""Small models, and what it means that several processes compute what one computes: values, gradients and updates.

All inputs are in float64: sums in another order differ by some 1e-15 times the size of their terms, at most 1e2 here.
EXACT leaves two digits more. The language model rounds its logits to float32, so that its losses, of size 4, differ by
4 * 2^-24 and more after updates: ROUNDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mgk.models import (
    LanguageModelConfig,
    build,
    clip_grad_norm_,
)

ROOT = Path(__file__).parent.parent.parent
EXACT, ROUNDED = 1e-11, 2e-6
VOCABULARY = 37  # no multiple of the number of processes
TINY: dict[str, Any] = {
    "heads": 4, "head_dim": 4, "layers": 2, "width": 8, "hidden": 12, "vocabulary": VOCABULARY, "cutoffs": (),
    "max_length": 16, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def close(name: str, actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def mesh_of(*sizes: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def language_model(**options: Any) -> Any:
    return build(LanguageModelConfig(**TINY | options)).double()


def batches(count: int, rows: int = 2, length: int = 8) -> list[dict[str, Tensor]]:
    draw = torch.randint(VOCABULARY, (count, rows, length + 1))
    return [{"tokens": each[:, :-1], "target": each[:, 1:]} for each in draw]


def train(model: Any, data: list[dict[str, Tensor]], clip: Any) -> list[Tensor]:
    """Return the losses of some steps, in which the norm of the gradients is clipped."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for batch in data:
        loss = model.loss(batch)["loss"]
        optimiser.zero_grad()
        loss.backward()
        clip(model.parameters(), 0.5)
        optimiser.step()
        losses.append(loss.detach())
    return losses


def same_training(one: Any, many: Any, data: list[dict[str, Tensor]], parts: Any = None) -> None:
    """`many` sees its part of every batch, or all of it; the losses of its processes have the mean of `one`."""
    expected = train(one, data, nn.utils.clip_grad_norm_)
    for loss, wanted in zip(train(many, parts or data, clip_grad_norm_), expected, strict=True):
        dist.all_reduce(loss)
        close("loss", loss / dist.get_world_size(), wanted, ROUNDED)
    actual = many.state_dict()
    for name, tensor in one.state_dict().items():
        close(name, actual[name], tensor, ROUNDED)
