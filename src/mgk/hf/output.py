"""The output layer of a language model, as libraries expect it: a module with a weight and a bias.

B batch, T positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mgk.nn import TiedSoftmax
from mgk.nn.arguments import is_plain_tensor, loads_its_weight
from mgk.nn.output import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class OutputLayer(TiedSoftmax):
    """A plain softmax that can also be called without its weight, which belongs to another module of the model."""

    @property
    def weight(self) -> Float[Tensor, "v e"]:
        """The rows of the vocabulary in the matrix that the model calls the softmax with."""
        (model,) = self.__dict__["owner"]
        weight: Tensor = model.output_weight
        return weight if len(weight) == self.sizes[0] else weight[: self.sizes[0]]

    @property
    def out_features(self) -> int:
        return self.sizes[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: Float[Tensor, "*b e"], weight: Tensor | None = None) -> Float[Tensor, "*b v"]:
        return super().forward(hidden, self.weight if weight is None else weight)


def as_output_layer(softmax: TiedSoftmax, model: nn.Module) -> None:
    """Make a plain softmax the output layer of a model with `output_weight`."""
    softmax.__class__ = OutputLayer
    softmax.__dict__["owner"] = (model,)  # a tuple: the model is no submodule of its output layer


def summed_loss(
    softmax: TiedSoftmax, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
) -> Float[Tensor, ""]:
    """Return the sum of the losses in nats; from logits if the weights are quantised or loaded for each call."""
    if loads_its_weight(softmax) or not is_plain_tensor(weight):
        return nn.functional.cross_entropy(softmax(hidden, weight), target, ignore_index=IGNORE, reduction="sum")
    return softmax.total_loss(hidden, weight, target)
