"""Helpers that all implementations of the operators share.

B batch, H heads, G heads of keys and values, M components, Nk keys, D width of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mgk.ops.arguments import is_traced


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for half precision, otherwise `dtype` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name as `mgk.ops.dispatch` has it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for every other device."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def allows_tf32() -> bool:
    """Whether PyTorch's settings, old or new, allow TF32 for products of float32 on a GPU."""
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is enabled for the tensor's device. The meta device has no autocast."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context that disables autocast if it is enabled. The check is cheaper than always entering the context."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()


class Matmul(torch.autograd.Function):
    """left @ right. PyTorch's own backward would round to half precision inside an autocast region."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        return left @ right

    @staticmethod
    def jvp(ctx: Any, left_tangent: Tensor, right_tangent: Tensor) -> Tensor:
        left, right = ctx.saved_tensors
        tangent: Tensor = left_tangent @ right + left @ right_tangent
        return tangent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        with without_autocast(grad):
            return (
                matmul(grad, right.mT).sum_to_size(left.shape),
                matmul(left.mT, grad).sum_to_size(right.shape),
            )


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right; its gradients are computed in the dtype of the operands even inside an autocast region."""
    return left @ right if is_traced() else Matmul.apply(left, right)  # type: ignore[no-any-return, no-untyped-call]


def zero_masked(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the positions of a (B,...,N,D) tensor where the (B,N) mask is False: a NaN there must not reach a sum."""
    if mask is None:
        return tensor
    return tensor.masked_fill(~mask.view(mask.shape[0], *[1] * (tensor.dim() - 3), mask.shape[1], 1), 0)


def unused(tensor: Tensor) -> Tensor:
    """Zero, with a gradient of zero rather than None for `tensor`, whatever it holds and whatever arrives."""
    return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0).sum()


def shifted_keys(key: Tensor, shift: Tensor) -> Tensor:
    """k_jr = k_j + b_r: (B,G,Nk,D) and (H,M,D) -> (B,H,M,Nk,D), in the dtype of the computation."""
    dtype = compute_dtype(key.dtype)
    key, groups = key.to(dtype), key.shape[1]
    of_group = shift.to(dtype).reshape(groups, shift.shape[0] // max(1, groups), *shift.shape[1:])  # (G,H/G,M,D)
    return (key[:, :, None, None] + of_group[:, :, :, None]).flatten(1, 2)


def for_each_query_head(tensor: Tensor, heads: int) -> Tensor:
    """(B,G,...) -> (B,H,...): the key or value head that each query head reads. A copy, for dense formulas only."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)
