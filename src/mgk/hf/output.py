"""The output layer of a language model, as libraries expect it: a linear layer with a weight and a bias.

T positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mgk.nn import TiedSoftmax
from mgk.nn.arguments import is_plain_tensor, loads_its_weight
from mgk.nn.output import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class OutputLayer(nn.Linear):
    """A view of a plain softmax and the weight that it is called with. It owns nothing, and is not saved."""

    def forward(self, input: Float[Tensor, "*b e"]) -> Float[Tensor, "*b v"]:
        (softmax,) = self.__dict__["softmax"]
        return softmax(input, self.weight)  # type: ignore[no-any-return]


def summed_loss(
    softmax: TiedSoftmax, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
) -> Float[Tensor, ""]:
    """Return the sum of the losses in nats; from logits if the weights are quantised or loaded for each call."""
    if loads_its_weight(softmax) or not is_plain_tensor(weight):
        return nn.functional.cross_entropy(softmax(hidden, weight), target, ignore_index=IGNORE, reduction="sum")
    return softmax.total_loss(hidden, weight, target)


def output_layer(softmax: TiedSoftmax, weight: Tensor) -> OutputLayer:
    """Return `weight` (V,E) and the bias of a plain softmax as a linear layer, with the same tensors."""
    layer = OutputLayer.__new__(OutputLayer)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.__dict__["softmax"] = (softmax,)  # no submodule
    layer._parameters["weight"] = weight  # type: ignore[assignment]
    bias = softmax._bias(weight)  # -inf for rows behind the vocabulary
    layer._parameters["bias"] = bias if bias is None or isinstance(bias, nn.Parameter) else None
    if bias is not layer._parameters["bias"]:
        del layer._parameters["bias"]
        layer.bias = bias  # type: ignore[assignment]
    return layer
