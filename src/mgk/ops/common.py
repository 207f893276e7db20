"""What every implementation of the operators shares.

B batch, H heads, M components, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

Variance = float | Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision accumulates in float32; every other float type in itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def shifted_keys(key: Tensor, shift: Tensor) -> Tensor:
    """k_jr = k_j + b_r: (B,H,Nk,D) and (H,M,D) -> (B,H,M,Nk,D), in the dtype of the computation."""
    dtype = compute_dtype(key.dtype)
    return key.to(dtype)[:, :, None] + shift.to(dtype)[None, :, :, None]
