"""What every launcher does to its tensors before a kernel sees them."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """Rows must be contiguous; anything else may be strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def dot_precision() -> str:
    """Float32 products are exact unless the user allowed TF32 for matrix products."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def draw_seed(dropout_p: float, query: Tensor) -> Tensor | None:
    """On the device, so that nothing waits for it and every replay of a graph draws anew."""
    return torch.randint(1 << 62, (1,), device=query.device) if dropout_p else None


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """p * 2^32 as the signed number with these 32 bits, and 1 / (1 - p)."""
    return (int(dropout_p * 2**32) + 2**31) % 2**32 - 2**31, 1 / (1 - dropout_p)
