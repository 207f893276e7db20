"""Mixture-key attention on a GPU: the functions that `mgk.ops.api` calls.

    dispatch (one level up)             which kernels and tiles a call gets
    operators                           the operators of PyTorch, with their gradients
    launch_shifted, launch_projected    allocate memory and launch what the plan says
    row_sums                            the log of the row sums
    shifted, shifted_keys, projected, projected_keys, short
                                        generic kernels, in Triton
    hopper, hopper_backward, hopper_wide, hopper_projected, hopper_projected_keys, hopper_variances, hopper_short
                                        kernels for Hopper GPUs, in Gluon
    bias, decode, prior, linear, scan, row_loss, cross_entropy   other kernels

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, D width of a head, Dv width of a
value.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mgk.ops.common import capability, dtype_name
from mgk.ops.dispatch import TRITON_DTYPES, TRITON_WIDTH, decodes, lacks
from mgk.ops.options import Options, Pages, Result, Rows
from mgk.ops.triton.host import contiguous, dense, draw_seed
from mgk.ops.triton.operators import decode_forward, projected_forward, shifted_forward
from mgk.ops.triton.prior import prior_statistics

__all__ = ["attend_to_cache", "mgk_attention", "prior_statistics", "smgk_attention"]


def mgk_attention(query: Tensor, key: Tensor, value: Tensor, options: Options, rows: Rows | None = None) -> Result:
    """Query (B,H,Nq,D), key (B,G,M,Nk,D), value (B,G,Nk,Dv) -> (B,H,Nq,Dv), and lse (B,H,Nq) if asked for.

    With `rows`, the batch axis has one entry that holds packed sequences. There are no masks then, and a prior per
    position (H,M,Np) has Np >= rows.max_k. Rows after the last sequence are ignored and get zeros.
    """
    return attention(query, key, None, value, options, rows)


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, options: Options, rows: Rows | None = None
) -> Result:
    """`mgk_attention` on the keys k_j + b_r, of key (B,G,Nk,D) and shift (H,M,D)."""
    return attention(query, key, shift, value, options, rows)


def attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, rows: Rows | None
) -> Result:
    require_support(query, value)
    log_prior, variance, (is_causal, window, key_mask, query_mask), hard, dropout_p, return_lse = options
    number, variances = (1.0, variance) if isinstance(variance, Tensor) else (variance, None)
    grad = needs_grad(query, key, shift, value, log_prior, variance)
    if decodes(query.shape[2], grad, dropout_p > 0, query_mask is not None, rows is not None):
        return attend_to_cache(query, key, shift, value, options)
    seed = draw_seed(dropout_p, query)
    ends = (None, None) if rows is None else (rows.queries.contiguous(), rows.keys.contiguous())
    most = (0, 0) if rows is None else (rows.max_q, rows.max_k)
    masks = contiguous(key_mask), contiguous(query_mask), seed, *ends
    rest = number, hard, is_causal, window or 0, dropout_p, *most, return_lse
    inputs = dense(query), dense(key), contiguous(shift), dense(value), contiguous(log_prior)
    if shift is not None and variances is None:
        output, lse, *_ = shifted_forward(*inputs, *masks, *rest)
    else:  # q.k / s2_r differs between the components of shifted keys: the exponentials do not factor
        own = None if variances is None else variances.float().contiguous()
        output, lse, *_ = projected_forward(*inputs, own, *masks, *rest)
    return output, whole_lse(lse, query, options) if return_lse else None


def attend_to_cache(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, pages: Pages | None = None,
    softmax: bool = False,
) -> Result:  # fmt: skip
    """Attention of a few queries per row to a cache; see `decode_attention`."""
    log_prior, variance, (is_causal, window, key_mask, _), hard, _, return_lse = options
    number, variances = (1.0, variance) if isinstance(variance, Tensor) else (variance, None)
    cache = (None, None, 0) if pages is None else pages
    output, lse = decode_forward(
        query, key, shift, value, log_prior, variances, key_mask, *cache[:2], number, hard, is_causal, window or 0,
        cache[2], softmax, return_lse,
    )  # fmt: skip
    return output, lse if return_lse else None


def whole_lse(lse: Tensor, query: Tensor, options: Options) -> Tensor:
    """Add what the kernels leave out with one variance, -|q|^2 / (2 s2), to the log of the row sums (B,H,Nq)."""
    variance, query_mask, hidden = options.variance, options.visibility.query_mask, lse == -torch.inf
    if query_mask is not None:
        hidden = hidden | ~query_mask[:, None]
    if not isinstance(variance, Tensor):
        query = query.float().masked_fill(hidden[..., None], 0)
        lse = lse - query.masked_fill(query.isinf(), torch.nan).square().sum(-1) / (2 * variance)
    return lse.masked_fill(hidden, -torch.inf)


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
