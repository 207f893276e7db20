"""What launchers do to tensors before a kernel sees them, and the memory they allocate."""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.common import allows_tf32, capability


def dense(tensor: Tensor) -> Tensor:
    """Rows must be contiguous; anything else may be strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def dot_precision(tensor: Tensor, tf32: bool = False) -> str:
    """How products of float32 are computed: in TF32 where it is allowed, by PyTorch's settings or here; else as three
    products of TF32, nearly as exact as float32; in float32 itself, much slower, on GPUs without TF32.
    """
    gpu = capability(tensor.device)
    if torch.version.hip or (gpu is not None and gpu < (8, 0)):
        return "ieee"
    exact = "ieee" if gpu is None else "tf32x3"  # Triton's interpreter computes both alike
    return "tf32" if tf32 or allows_tf32() else exact


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


def lengths(
    query: Tensor, key: Tensor, cu_seqlens: Tensor | None, max_queries: int, max_keys: int
) -> tuple[int, int, int]:
    """B, Nq and Nk; of packed sequences their number and the greatest lengths."""
    if cu_seqlens is None:
        return query.shape[0], query.shape[2], key.shape[-2]
    return cu_seqlens.shape[0] - 1, max_queries, max_keys
