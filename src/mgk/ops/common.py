"""What every implementation of the operators shares.

B batch, H heads, M components, Nk keys, D width of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Variance = float | Tensor
MAX_QUERIES = 16  # that kernels for decoding take
# From so many rows on, if they are no wider, our kernels sum columns faster than PyTorch, which has too few blocks.
MANY_ROWS, NARROW = 1 << 13, 1024


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision accumulates in float32; every other float type in itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on where the tensor is; on meta there is none, and asking is an error."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Operators compute in the types they are given. Switching off what is off takes longer than a launch."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()


def shifted_keys(key: Tensor, shift: Tensor) -> Tensor:
    """k_jr = k_j + b_r: (B,H,Nk,D) and (H,M,D) -> (B,H,M,Nk,D), in the dtype of the computation."""
    dtype = compute_dtype(key.dtype)
    return key.to(dtype)[:, :, None] + shift.to(dtype)[None, :, :, None]
