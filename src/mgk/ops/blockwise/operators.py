"""`mgk::blockwise_attention` and its backward as operators of torch.library.

    l[i,j,r] = scale[r] q_i.k_jr + row_bias[i,r] + key_bias[j,r]

Query (H,Nq,D), row_bias (H,M,Nq) or None, key_bias (H,M,Nk), scale (H,M) or None, value (G,Nk,Dv), and key (G,M,Nk,D),
or (G,1,Nk,D) where the components share one key (shifted keys). H and G are heads of all batch entries, and H/G query
heads read the same head of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.blockwise.attend import attend, attend_backward, backward_rows
from mgk.ops.blockwise.blocks import Reach, Scratch
from mgk.ops.blockwise.flops import register_formulas
from mgk.ops.blockwise.forms import spread_infinities
from mgk.ops.blockwise.kernels import LOWEST, HardMixture, Kernel, Mixture, Terms
from mgk.ops.blockwise.shifted import ShiftedHard, ShiftedSoft
from mgk.ops.blockwise.weights import Dropout, WeightGradient
from mgk.ops.common import without_autocast
from mgk.ops.operator import operator


@operator("blockwise_attention", "cpu")
def attention(
    query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, scale: Tensor | None, value: Tensor,
    bound: Tensor, hard: bool, causal: bool, window: int | None, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (H,Nq,Dv), the log of the row sums (H,Nq), and what backward needs of each row, (3,H,Nq).

    `bound` (H,Nq) bounds the exponents.
    """
    terms = spread_infinities(Terms(query, key, row_bias, key_bias, scale))
    active = terms.key_bias.amax(1) != -torch.inf
    if not (bound.numel() and active.numel()):
        rows = torch.stack([bound * 0, bound * 0 + 1, bound * 0])
        return value.new_zeros(*bound.shape, value.shape[-1]), torch.full_like(bound, -torch.inf), rows
    kernel = make_kernel(terms, hard, LOWEST[value.dtype], Scratch(value))
    reach = Reach(bound.shape[1], active.shape[1], causal, window)
    return attend(kernel, value, bound, active, reach, Dropout(dropout_p, int(seed)))


@operator("blockwise_attention_backward", "cpu")
def attention_backward(
    grad: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor,
    scale: Tensor | None, value: Tensor, output: Tensor, lse: Tensor, rows: Tensor, hard: bool, causal: bool,
    window: int | None, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, row_bias, key_bias, scale and value; empty for a tensor that is not there."""
    offset, total, as_mixture = rows
    terms = spread_infinities(Terms(query, key, row_bias, key_bias, scale))
    active, scratch = terms.key_bias.amax(1) != -torch.inf, Scratch(value)
    reach = Reach(offset.shape[1], active.shape[1], causal, window)
    if not (offset.numel() and active.numel()):
        a, b, c, d, e, f = (query.new_empty(0) if x is None else torch.zeros_like(x) for x in (*terms, value))
        return a, b, c, d, e, f
    late = bool((as_mixture >= 2).any())
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0)
    with without_autocast(grad):
        row = backward_rows(offset, total, late)
        grad = row.divided(grad)
        delta = torch.linalg.vecdot(grad, output) - row.divided(grad_lse)
        weight_grad = WeightGradient(value, grad, delta, Dropout(dropout_p, int(seed)), scratch)
        kernel = make_kernel(terms, hard, row.lowest, scratch)
        kernels: list[Kernel] = [kernel]
        if isinstance(kernel, ShiftedSoft) and bool((as_mixture % 2).any()):
            kernels.append(kernel.as_mixture())
        for each in kernels:
            each.set_row_offset(row.offset, late)
            each.start_backward(grad_lse)
        attend_backward(kernels, as_mixture, active, reach, weight_grad)
    grads = kernel.gradients()
    for other in kernels[1:]:
        for sum_of_both, part in zip(grads, other.gradients(), strict=True):
            sum_of_both += part
    return *grads, weight_grad.grad_value


def make_kernel(terms: Terms, hard: bool, lowest: float, scratch: Scratch) -> Kernel:
    components, shared = terms.key_bias.shape[1], terms.key.shape[1] == 1
    if shared and components > 1 and terms.scale is None and terms.row_bias is not None:
        return (ShiftedHard if hard else ShiftedSoft)(terms, terms.row_bias, lowest, scratch)
    return (HardMixture if hard and components > 1 else Mixture)(terms, lowest, scratch)


@attention.register_fake
def _(query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, scale: Any, value: Tensor, *_: Any) -> Any:
    rows = query.shape[:2]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows), query.new_empty(3, *rows)


@attention_backward.register_fake
def _(grad: Any, grad_lse: Any, query: Tensor, *rest: Any) -> Any:
    key, row_bias, key_bias, scale, value, *_ = rest
    tensors = query, key, row_bias, key_bias, scale, value
    return tuple(query.new_empty(0) if x is None else torch.empty_like(x) for x in tensors)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _bound, hard, causal, window, dropout_p, seed = inputs  # query, key, two biases, scale, value
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.options = hard, causal, window, dropout_p
    ctx.mark_non_differentiable(output[2])


def attention_autograd(ctx: Any, grad: Tensor, grad_lse: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    register_formulas()
    *tensors, seed = ctx.saved_tensors
    grads = attention_backward(grad, grad_lse, *tensors, *ctx.options, seed)
    return *(None if x is None else each for x, each in zip(tensors, grads, strict=False)), *[None] * 6


attention.register_autograd(attention_autograd, setup_context=keep_for_backward)
