"""LayerNorm, which on a GPU is a kernel of our own for many narrow rows.

E width of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.ops.api import small_kernels

if TYPE_CHECKING:
    from jaxtyping import Float

ROWS, WIDTH = 1 << 13, 256  # fewer rows take no time, and for wider ones PyTorch has blocks enough


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm(width)`.

    Args:
        width: E.
        narrow: products alone read the output. Under autocast they would round it, so it may come rounded.
    """

    def __init__(self, width: int, *, narrow: bool = False) -> None:
        super().__init__(width)
        self.narrow = narrow

    def forward(self, input: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
        if not pays(input, self.weight):
            return super().forward(input)
        from mgk.ops.triton.norm import layer_norm  # not loaded before it is needed

        narrow = self.narrow and torch.is_autocast_enabled(input.device.type)
        dtype = torch.get_autocast_dtype(input.device.type) if narrow else input.dtype
        output: Tensor = layer_norm(input, self.weight, self.bias, self.eps, dtype)[0]
        return output


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than PyTorch's."""
    many = len(weight) <= WIDTH and x.numel() >= ROWS * len(weight)
    return many and x.dtype == weight.dtype == torch.float32 and small_kernels(x)
