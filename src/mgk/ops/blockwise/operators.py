"""`mgk::blockwise_attention` and its backward as operators of torch.library.

    l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]

Query (G,Nq,D), row_bias (G,M,Nq) or None, key_bias (G,M,Nk), value (G,Nk,Dv), and key (G,M,Nk,D), or (G,1,Nk,D) where
the components share one key (shifted keys).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.blockwise.attend import attend, attend_backward, backward_offset
from mgk.ops.blockwise.blocks import Scratch
from mgk.ops.blockwise.forms import spread_infinities
from mgk.ops.blockwise.kernels import LOWEST, HardMixture, Kernel, Mixture
from mgk.ops.blockwise.shifted import ShiftedHard, ShiftedSoft
from mgk.ops.blockwise.weights import Dropout, WeightGradient
from mgk.ops.common import without_autocast
from mgk.ops.flops import register_formulas
from mgk.ops.operator import operator


@operator("blockwise_attention", "cpu")
def attention(
    query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, bound: Tensor, hard: bool,
    causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (G,Nq,Dv), and what backward needs of each row, (3,G,Nq). `bound` (G,Nq) bounds the exponents."""
    query, key, key_bias = spread_infinities(query, key, key_bias)
    active = key_bias.amax(1) != -torch.inf
    if not (bound.numel() and active.numel()):
        return value.new_zeros(*bound.shape, value.shape[-1]), torch.stack([bound * 0, bound * 0 + 1, bound * 0])
    kernel = make_kernel(query, key, row_bias, key_bias, hard, LOWEST[value.dtype], Scratch(value))
    return attend(kernel, value, bound, active, causal, Dropout(dropout_p, int(seed)))


@operator("blockwise_attention_backward", "cpu")
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, output: Tensor,
    rows: Tensor, hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, row_bias (empty if there is none), key_bias and value."""
    offset, total, as_mixture = rows
    query, key, key_bias = spread_infinities(query, key, key_bias)
    active, scratch = key_bias.amax(1) != -torch.inf, Scratch(value)
    if not (offset.numel() and active.numel()):
        row = query.new_empty(0) if row_bias is None else row_bias
        a, b, c, d, e = (torch.zeros_like(x) for x in (query, key, row, key_bias, value))
        return a, b, c, d, e
    with without_autocast(grad):
        grad, offset, lowest = backward_offset(grad, offset, total, bool((as_mixture >= 2).any()))
        kernel = make_kernel(query, key, row_bias, key_bias, hard, lowest, scratch)
        weight_grad = WeightGradient(value, output, grad, Dropout(dropout_p, int(seed)), scratch)
        kernels: list[Kernel] = [kernel]
        if isinstance(kernel, ShiftedSoft) and bool((as_mixture % 2).any()):
            kernels.append(kernel.as_mixture())
        attend_backward(kernels, as_mixture, offset, active, causal, weight_grad)
    grads = kernel.gradients()
    for other in kernels[1:]:
        by_query, by_key, by_row, by_bias = other.gradients()
        for total, part in zip(grads, (by_query, by_key.sum(1, keepdim=True), by_row, by_bias), strict=True):
            total += part
    return *grads, weight_grad.grad_value


def make_kernel(
    query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, hard: bool, lowest: float, scratch: Scratch
) -> Kernel:
    if row_bias is not None and key.shape[1] < key_bias.shape[1]:  # the components share one key
        shifted = ShiftedHard if hard else ShiftedSoft
        return shifted(query, key, row_bias, key_bias, lowest, scratch)
    hard = hard and key.shape[1] > 1
    return (HardMixture if hard else Mixture)(query, key, row_bias, key_bias, lowest, scratch)


@attention.register_fake
def _(query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, *_: Any) -> Any:
    rows = query.shape[:2]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(3, *rows)


@attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, *_: Any) -> Any:
    row = query.new_empty(0) if row_bias is None else row_bias
    return tuple(torch.empty_like(tensor) for tensor in (query, key, row, key_bias, value))


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _bound, hard, causal, dropout_p, seed = inputs  # query, key, two biases, value
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.options = hard, causal, dropout_p
    ctx.mark_non_differentiable(output[1])


def attention_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    register_formulas()
    *tensors, seed = ctx.saved_tensors
    grad_query, grad_key, grad_row, grad_bias, grad_value = attention_backward(grad, *tensors, *ctx.options, seed)
    has_row = tensors[2] is not None
    return grad_query, grad_key, grad_row if has_row else None, grad_bias, grad_value, *[None] * 5


attention.register_autograd(attention_autograd, setup_context=keep_for_backward)
