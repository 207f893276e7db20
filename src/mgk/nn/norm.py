"""LayerNorm, which on a GPU is a kernel of our own for many narrow rows, with the sum and the dropout before it.

E width of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mgk.nn.linear import plain
from mgk.ops.api import TRITON_DTYPES, small_kernels
from mgk.ops.common import autocasts

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

        output: Tensor = layer_norm(input, self.weight, self.bias, self.eps, self.dtype(input))[0]
        return output

    def dtype(self, input: Tensor) -> torch.dtype:
        """Of the output."""
        narrow = self.narrow and autocasts(input)
        return torch.get_autocast_dtype(input.device.type) if narrow else input.dtype


def add_norm(
    norm: nn.Module, dropout: nn.Module, x: Float[Tensor, "*b e"], added: Float[Tensor, "*b e"]
) -> tuple[Float[Tensor, "*b e"], Float[Tensor, "*b e"]]:
    """s = x + dropout(added), and norm(s)."""
    known = plain(norm, LayerNorm) and plain(dropout, nn.Dropout) and added.dtype in TRITON_DTYPES
    if not (known and x.shape == added.shape and pays(x, norm.weight) and torch.is_grad_enabled()):  # type: ignore[arg-type]
        total = x + dropout(added)
        return total, norm(total)
    from mgk.ops.triton.host import draw_seed
    from mgk.ops.triton.norm import add_norm as kernel

    p: float = dropout.p if dropout.training else 0.0  # type: ignore[assignment]
    options: Any = norm.eps, p, norm.dtype(x)  # type: ignore[operator]
    total, output, _ = kernel(x, added, draw_seed(p, x), norm.weight, norm.bias, *options)
    return total, output


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than PyTorch's."""
    many = len(weight) <= WIDTH and x.numel() >= ROWS * len(weight)
    return many and x.dtype == weight.dtype == torch.float32 and small_kernels(x)
