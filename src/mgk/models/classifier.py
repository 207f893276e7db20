"""Classifiers of one sequence and of a pair, as in the paper's Long Range Arena experiments.

B batch, N positions, T rows of a packed batch, E width of the model, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgk.models.config import ClassifierConfig, MatcherConfig
from mgk.models.encoder import TokenEncoder

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Classifier(nn.Module):
    """Encoder, mean over the positions, Linear-ReLU-Linear."""

    capturable = True  # a CUDA graph can capture `loss`: fixed shapes, no synchronisation with the host
    vectors = 1  # number of vectors (B,E) that the final layers read

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TokenEncoder(config)
        self.classifier = nn.Sequential(
            nn.Linear(self.vectors * config.width, config.classifier_hidden),
            nn.ReLU(),
            nn.Linear(config.classifier_hidden, config.classes),
        )

    def forward(
        self,
        tokens: Int[Tensor, "b n"] | Int[Tensor, " t"],
        mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b c"]:
        """Return the logits.

        Args:
            tokens: (B,N), or packed (T,), see `TokenEncoder`.
            mask: (B,N), True for real tokens.
            positions: (B,N); None is 0, 1, ...
        """
        return self.head(self.pooled(tokens, mask, positions))

    def head(self, pooled: Float[Tensor, "b e"]) -> Float[Tensor, "b c"]:
        """Return the logits of pooled encodings."""
        return self.classifier(pooled)  # type: ignore[no-any-return]

    def pooled(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the mean encoding of the real tokens (B,E), or their sum / max_length (pooling="padded")."""
        x, packing = self.encoder.rows(tokens, mask, positions)
        return self.mean(x, mask, None if packing is None else packing.sum(x))

    def mean(self, x: Float[Tensor, "b n e"], mask: Tensor | None, total: Tensor | None = None) -> Tensor:
        """Return `pooled` of encodings; `total` is their sum, if it is known."""
        if total is None:
            total = (x if mask is None else x.masked_fill(~mask[..., None], 0)).sum(1)
        if self.config.pooling == "padded":
            return total / self.config.max_length
        return total / (x.shape[1] if mask is None else mask.sum(1, keepdim=True).clamp(min=1))

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss of a batch with "tokens", "label" and, if there is padding, "mask"."""
        return classification(self(batch["tokens"], batch.get("mask")), batch["label"])


class Matcher(Classifier):
    """One encoder for both documents of a pair, and a classifier of [x0, x1, x0*x1, x0-x1]. Inputs are (B,2,N)."""

    vectors = 4

    def __init__(self, config: MatcherConfig) -> None:
        super().__init__(config)

    def forward(
        self,
        tokens: Int[Tensor, "b 2 n"] | Int[Tensor, " t"],
        mask: Bool[Tensor, "b 2 n"] | None = None,
        positions: Int[Tensor, "b 2 n"] | None = None,
    ) -> Float[Tensor, "b c"]:
        packed = isinstance(tokens, Tensor) and tokens.dim() == 1 and mask is not None
        name, pairs = ("mask", mask) if packed else ("tokens", tokens)
        if not isinstance(pairs, Tensor) or pairs.dim() != 3 or pairs.shape[1] != 2:
            got = tuple(pairs.shape) if isinstance(pairs, Tensor) else type(pairs).__name__
            raise ValueError(f"{name}: expected shape (B,2,N), got {got}")
        documents = (
            part if part is None or part.dim() == 1 else part.flatten(0, 1) for part in (tokens, mask, positions)
        )
        return self.head(self.pooled(*documents))  # type: ignore[arg-type]

    def head(self, pooled: Float[Tensor, "2b e"]) -> Float[Tensor, "b c"]:
        """Return the logits of the pooled encodings of both documents of each pair, one after the other."""
        first, second = pooled.unflatten(0, (-1, 2)).unbind(1)  # type: ignore[no-untyped-call]
        joined = torch.cat((first, second, first * second, first - second), -1)
        return self.classifier(joined)  # type: ignore[no-any-return]


def classification(logits: Float[Tensor, "b c"], label: Int[Tensor, " b"]) -> dict[str, Tensor]:
    """Return the mean cross-entropy in nats, the number of correct predictions and the number of examples."""
    logits, label = logits.float(), label.long()
    return {
        "loss": cross_entropy(logits, label),
        "correct": (logits.argmax(-1) == label).sum(),
        "count": torch.full((), len(label), device=label.device),
    }
