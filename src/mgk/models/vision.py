"""A vision transformer: an image as a sequence of patches.

B batch, C channels, S side of an image, P side of a patch, N patches, E width of the model, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.models.classifier import classification
from mgk.models.config import VisionConfig
from mgk.models.encoder import EMBEDDING_STD, make_stack
from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float


class VisionTransformer(nn.Module):
    """Linear patch embedding, learned positions, layers, mean or class token, and a linear classifier."""

    capturable = True  # a CUDA graph can capture `loss`: fixed shapes, no synchronisation with the host

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        patches = (config.image_size // config.patch_size) ** 2
        extra = config.pooling == "class"
        self.patches = nn.Linear(config.channels * config.patch_size**2, config.width)
        self.positions = nn.Parameter(torch.empty(patches + extra, config.width))
        self.class_token = nn.Parameter(torch.empty(config.width)) if extra else None
        for parameter in (self.positions, self.class_token):
            if parameter is not None:
                nn.init.normal_(parameter, std=EMBEDDING_STD)
        self.dropout = nn.Dropout(config.dropout)
        self.stack = make_stack(config)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(
        self, pixels: Float[Tensor, "b c s s"], keep: Callable[[Tensor], object] | None = None
    ) -> Float[Tensor, "b k"]:
        """Return the logits; `keep` is called with what `hidden` returns."""
        hidden = self.hidden(pixels)
        if keep is not None:
            keep(hidden)
        return self.classifier(self.pooled(hidden))  # type: ignore[no-any-return]

    def hidden(self, pixels: Float[Tensor, "b c s s"]) -> Float[Tensor, "b n e"]:
        """Return the output of the last layer for every patch, after that of the class token if there is one."""
        c = self.config
        pixels = check.check_tensor("pixels", pixels, "B,C,S,S")
        check.check_shape("pixels", pixels, "B,C,S,S", (pixels.shape[0], c.channels, c.image_size, c.image_size))
        side = c.image_size // c.patch_size
        grid = pixels.reshape(pixels.shape[0], c.channels, side, c.patch_size, side, c.patch_size)
        x = self.patches(grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        if self.class_token is not None:
            x = torch.cat((self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x), 1)
        return self.stack(self.dropout(x + self.positions))  # type: ignore[no-any-return]

    def pooled(self, hidden: Float[Tensor, "b n e"]) -> Float[Tensor, "b e"]:
        """Return what the classifier reads: the mean over the patches, or the class token."""
        return hidden.mean(1) if self.class_token is None else hidden[:, 0]

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss of a batch with "pixels" and "label"."""
        return classification(self(batch["pixels"]), batch["label"])
