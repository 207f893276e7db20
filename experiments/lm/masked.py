"""Masked self-pretraining: a classifier first learns to predict hidden tokens of the inputs it is trained on later.

"Never train from scratch" (Amos, Berant, Gupta, 2024) found that this decides how transformers do on the Long Range
Arena. Token 0, which is padding elsewhere and hidden from the attention, stands for a hidden token.

B batch, N positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgk.models import Classifier

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

SHARE = 0.15  # of the tokens are hidden
PATTERN, HIDDEN = 20, 3  # in scoring the same tokens are hidden every time: 3 of 20


class MaskedClassifier(Classifier):
    """A classifier whose loss is that of predicting hidden tokens; its accuracy is the share that it gets right."""

    unmask: nn.Linear

    @classmethod
    def of(cls, model: nn.Module) -> MaskedClassifier:
        """Change a classifier in place: replace its last layers by one that predicts tokens."""
        if type(model) is not Classifier:
            raise TypeError(f"model: expected a Classifier, got {type(model).__name__}")
        model.unmask = nn.Linear(model.config.width, model.config.vocabulary)
        model.classifier = nn.Sequential()  # its weights would get no gradient
        model.__class__ = cls
        return model  # type: ignore[return-value]

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of the hidden tokens, how many were right, and their number."""
        tokens, mask = batch["tokens"].long(), batch.get("mask")
        hidden = self.hide(tokens) if mask is None else self.hide(tokens) & mask
        logits = self.unmask(self.encoder(tokens.masked_fill(hidden, 0), mask)).float()
        losses = cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
        count = hidden.sum()
        return {
            "loss": (losses * hidden).sum() / count.clamp(min=1),
            "correct": ((logits.argmax(-1) == tokens) & hidden).sum(),
            "count": count,
        }

    def hide(self, tokens: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Choose the tokens to hide: at random in training, by a fixed pattern in scoring."""
        if self.training:
            return torch.rand(tokens.shape, device=tokens.device) < SHARE
        rows, columns = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        return (rows[:, None] * 7 + columns * 13) % PATTERN < HIDDEN


def predict_tokens(model: nn.Module) -> None:
    """Let a classifier predict hidden tokens."""
    MaskedClassifier.of(model)
