"""What launchers do to tensors before a kernel sees them, and the memory they allocate."""

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


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def empty_like_layout(tensor: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of a shape, with the axes in the order that `tensor` has them in memory, the last innermost.

    An expanded axis of `tensor`, with a stride of 0, would otherwise come before the last.
    """
    strides, step = [0] * len(shape), 1
    last = len(shape) - 1
    for axis in sorted(range(len(shape)), key=lambda axis: (axis != last, tensor.stride(axis), -axis)):
        strides[axis], step = step, step * max(1, shape[axis])
    return torch.empty_strided(shape, strides, device=tensor.device, dtype=tensor.dtype)


def zero_gradients(*tensors: Tensor | None) -> list[Tensor | None]:
    """For an output without entries, which depends on nothing."""
    return [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]


def lengths(query: Tensor, key: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[int, int, int]:
    """B, Nq and Nk; of packed sequences their number and the greatest length."""
    if cu_seqlens is None:
        return query.shape[0], query.shape[2], key.shape[-2]
    return cu_seqlens.shape[0] - 1, max_seqlen, max_seqlen
