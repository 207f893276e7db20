"""Normalisation over the last dimension: LayerNorm, or RMSNorm as in Llama.

E is the width of the model, or of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float

EPSILON = 1e-5


class RMSNorm(nn.RMSNorm):
    """weight * x / sqrt(mean(x^2) + 1e-5), in the dtype of x: under autocast the weight is converted."""

    def __init__(self, width: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(width, EPSILON, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


def make_norm(norm_type: str, width: int) -> nn.Module:
    """Return a normalisation of vectors of this width: "layer" or "rms"."""
    return NORMS[check.check_choice("norm_type", norm_type, NORMS)](width)
