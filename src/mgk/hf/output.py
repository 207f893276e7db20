"""The output layer of a language model, as libraries expect it: a module with a weight and a bias.

B batch, T positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


class Vocabulary:
    """Mixin for a model class with a softmax over tokens: `resize_token_embeddings` changes it, too."""

    config: Any
    softmax: Any

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output layer of another size; a tied one has the rows of the embedding."""
        if isinstance(old_lm_head, OutputLayer):
            return old_lm_head
        return super()._get_resized_lm_head(old_lm_head, *args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the vocabulary of a model with a plain softmax; an adaptive one has clusters by frequency."""
        if self.softmax.cluster_weight is not None:
            raise ValueError("new_num_tokens: expected a model with a plain softmax (cutoffs=()), got an adaptive one")
        if new_num_tokens is None and not args and not kwargs:
            return self.get_input_embeddings()  # type: ignore[attr-defined, no-any-return]
        if self.config.kind == "language":
            self.config.vocabulary_multiple = 1
            self.config.cutoffs = ()  # cutoffs above the old vocabulary may be below the new one
        table: nn.Embedding = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]
        output, size = self.softmax, table.num_embeddings
        if output.bias is not None:
            bias = output.bias.new_zeros(size)
            bias[: len(output.bias)] = output.bias.data[:size]
            output.bias = nn.Parameter(bias)
        output.sizes = [size]
        return table
