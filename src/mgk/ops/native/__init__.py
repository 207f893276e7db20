"""Mixture-key attention on the CPU as compiled code: one call of a library forward and one backward.

    call.h          the layout of a call; library.py packs it
    attention.cpp   the kernels, compiled once for each instruction set; products.h, vectors.h: what they are made of
    library.cpp     the library's interface and its threads
    build.py        compiles the library
    operators.py    the torch.library operators

M-steps are those of `mgk.ops.blockwise`.

B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.blockwise.statistics import component_statistics, prior_statistics
from mgk.ops.common import compute_dtype, dtype_name, unused
from mgk.ops.dispatch import lacks_native
from mgk.ops.flops import register_formulas
from mgk.ops.native.library import MISSING
from mgk.ops.native.operators import attention
from mgk.ops.options import Options, Result

__all__ = [
    "MISSING", "component_statistics", "mgk_attention", "prior_statistics", "require_support", "smgk_attention"
]  # fmt: skip


def require_support(query: Tensor, width: int) -> None:
    if query.device.type != "cpu":
        raise ValueError(f"impl: expected tensors on the CPU for 'native', got {query.device}")
    if MISSING:
        raise RuntimeError(f"impl: 'native' needs its compiled library, but {MISSING}")
    if reason := lacks_native(dtype_name(query.dtype), width):
        raise ValueError(f"impl: {reason}; use 'blockwise'")


def mgk_attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Result:
    return _attend(query, key, None, value, options)


def smgk_attention(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, options: Options) -> Result:
    return _attend(query, key, shift, value, options)


def _attend(query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options) -> Result:
    log_prior, variance, (is_causal, window, key_mask, query_mask), hard, dropout_p, return_lse = options
    dtype = compute_dtype(query.dtype)
    register_formulas()
    output: Tensor
    lse: Tensor
    output, lse, _ = attention(
        query, key, None if shift is None else shift.to(dtype), value,
        None if log_prior is None or hard else log_prior.to(dtype),
        variance.to(dtype) if isinstance(variance, Tensor) else None, key_mask, query_mask,
        1.0 if isinstance(variance, Tensor) else variance, hard, is_causal, window, dropout_p,
        torch.randint(1 << 62, ()) if dropout_p else None,
    )  # fmt: skip
    if hard and log_prior is not None and log_prior.requires_grad:
        output, lse = (x + unused(log_prior).to(x.dtype) for x in (output, lse))
    return output, lse if return_lse else None
