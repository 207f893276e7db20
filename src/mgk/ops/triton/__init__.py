"""Mixture-key attention on a GPU: the functions that `mgk.ops.api` calls.

    dispatch (one level up)             which kernels and tiles a call gets
    operators                           the operators of PyTorch, with their gradients
    launch_shifted, launch_projected    allocate memory and launch what the plan says
    shifted, projected, short           generic kernels, in Triton
    hopper, hopper_backward, hopper_wide, hopper_projected, hopper_projected_keys, hopper_variances, hopper_short
                                        kernels for Hopper GPUs, in Gluon
    bias, decode, prior, linear, scan, cross_entropy   other kernels

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mgk.ops.common import capability, dtype_name
from mgk.ops.dispatch import TRITON_DTYPES, TRITON_WIDTH, decodes, lacks
from mgk.ops.options import Options, Result, Rows
from mgk.ops.triton.host import contiguous, dense, draw_seed
from mgk.ops.triton.operators import decode_forward, projected_forward, shifted_forward
from mgk.ops.triton.prior import prior_statistics

__all__ = ["mgk_attention", "prior_statistics", "smgk_attention"]


def mgk_attention(query: Tensor, key: Tensor, value: Tensor, options: Options, rows: Rows | None = None) -> Result:
    """Query (B,H,Nq,D), key (B,H,M,Nk,D), value (B,H,Nk,Dv) -> (B,H,Nq,Dv).

    With `rows`, the batch axis has one entry that holds packed sequences. There are no masks then, and a prior per
    position (H,M,Np) has Np >= rows.max_k. Rows after the last sequence are ignored and get zeros.
    """
    require_support(query, value)
    require_plain(query, key, options, rows)
    cu_seqlens, max_seqlen = (None, 0) if rows is None else (rows.queries, rows.max_q)
    log_prior, variance, (is_causal, _, key_mask, query_mask), hard, dropout_p, _ = options
    tensors = query, key, value, log_prior, variance
    number, variances = (1.0, variance.float()) if isinstance(variance, Tensor) else (variance, None)
    if decodes(query.shape[2], needs_grad(*tensors), dropout_p > 0, query_mask is not None, cu_seqlens is not None):
        own = variance if isinstance(variance, Tensor) else None
        return decode_forward(query, key, None, value, log_prior, own, key_mask, number, hard, is_causal), None
    masks = map(contiguous, (key_mask, query_mask, draw_seed(dropout_p, query), cu_seqlens))
    result = projected_forward(
        dense(query), dense(key), None, dense(value), contiguous(log_prior), contiguous(variances), *masks, number,
        hard, is_causal, dropout_p, max_seqlen,
    )  # fmt: skip
    return result[0], None


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, options: Options, rows: Rows | None = None
) -> Result:
    """`mgk_attention` on the keys k_j + b_r, of key (B,H,Nk,D) and shift (H,M,D)."""
    require_support(query, value)
    require_plain(query, key, options, rows)
    cu_seqlens, max_seqlen = (None, 0) if rows is None else (rows.queries, rows.max_q)
    log_prior, variance, (is_causal, _, key_mask, query_mask), hard, dropout_p, _ = options
    tensors = query, key, shift, value, log_prior, variance
    number = 1.0 if isinstance(variance, Tensor) else variance
    if decodes(query.shape[2], needs_grad(*tensors), dropout_p > 0, query_mask is not None, cu_seqlens is not None):
        own = variance if isinstance(variance, Tensor) else None
        return decode_forward(query, key, shift, value, log_prior, own, key_mask, number, hard, is_causal), None
    masks = map(contiguous, (key_mask, query_mask, draw_seed(dropout_p, query), cu_seqlens))
    inputs = dense(query), dense(key), shift.contiguous(), dense(value), contiguous(log_prior)
    rest = *masks, number, hard, is_causal, dropout_p, max_seqlen
    if isinstance(variance, Tensor):  # q.k / s2_r differs between the components: the exponentials do not factor
        return projected_forward(*inputs, variance.float().contiguous(), *rest)[0], None
    return shifted_forward(*inputs, *rest)[0], None


def require_plain(query: Tensor, key: Tensor, options: Options, rows: Rows | None) -> None:
    """Raise an error for what the kernels do not have yet."""
    if key.shape[1] != query.shape[1]:
        raise NotImplementedError("key: impl='triton' has no kernels yet for fewer heads than query has")
    if options.visibility.window is not None:
        raise NotImplementedError("window: impl='triton' has no kernels yet with a window")
    if options.return_lse:
        raise NotImplementedError("return_lse: impl='triton' does not return it yet")
    if rows is not None and rows.keys is not rows.queries:
        raise NotImplementedError("cu_seq_k: impl='triton' expects the same tensor as cu_seq_q")


def needs_grad(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


def require_support(query: Tensor, value: Tensor) -> None:
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl: expected CUDA tensors for 'triton', got {query.device}")
    if dtype_name(query.dtype) not in TRITON_DTYPES:
        raise TypeError(f"query: expected bfloat16, float16 or float32 for impl='triton', got {query.dtype}")
    if reason := lacks(dtype_name(query.dtype), capability(query.device)):
        name = torch.cuda.get_device_name(query.device)
        raise TypeError(f"query: {name}: {reason}: use float16, float32 or impl='reference'")
    if max(query.shape[-1], value.shape[-1]) > TRITON_WIDTH:
        raise ValueError(
            f"query: expected head widths D and Dv up to {TRITON_WIDTH} for impl='triton', "
            f"got {query.shape[-1]} and {value.shape[-1]}"
        )
