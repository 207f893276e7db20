"""`mgk::native_attention` and its backward as operators of torch.library: one call of the compiled library each.

B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.common import compute_dtype
from mgk.ops.flops import register_formulas
from mgk.ops.native.library import CALL, LIBRARY
from mgk.ops.operator import operator

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
NO_STRIDES = (0, 0, 0, 0)


@operator("native_attention", "cpu")
def attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variance: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, one_variance: float, hard: bool,
    causal: bool, window: int | None, dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (B,H,Nq,Dv), the log-sum-exp (B,H,Nq), and what backward needs of each row, (2,B,H,Nq).

    Shift, log_prior and variance have the dtype of the computation.
    """
    output, lse, rows = results(query, value)
    inputs = tuple(map(prepared, (query, key, value, shift, log_prior, variance, key_mask, query_mask)))
    addresses = (*map(address, inputs), output.data_ptr(), lse.data_ptr(), rows.data_ptr(), *[0] * 8)
    layouts = (*map(strides, inputs[:3]), strides(output), *[NO_STRIDES] * 4)
    options = one_variance, hard, causal, window, dropout_p, seed
    run("mgk_forward", addresses, layouts, inputs, options)
    return output, lse, rows


@operator("native_attention_backward", "cpu")
def attention_backward(
    grad: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor,
    log_prior: Tensor | None, variance: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
    output: Tensor, rows: Tensor, wanted: int, one_variance: float, hard: bool, causal: bool, window: int | None,
    dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, shift, value, log_prior and variance; empty where the bit of `wanted` is 0.

    (A number and not a list: `Operator` takes what it does not know for something that must be traced.)
    """
    leaves = query, key, shift, value, log_prior, variance
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = gradients(leaves, wanted)
    inputs = tuple(map(prepared, (query, key, value, shift, log_prior, variance, key_mask, query_mask)))
    of_output, of_lse = prepared(grad), prepared(grad_lse)
    of_query, of_key, of_shift, of_value, of_prior, of_variance = (
        each.data_ptr() if wanted >> i & 1 else 0 for i, each in enumerate(grads)
    )
    addresses = (
        *map(address, inputs), output.data_ptr(), 0, rows.data_ptr(), address(of_output), address(of_lse),
        of_query, of_key, of_value, of_shift, of_prior, of_variance,
    )  # fmt: skip
    layouts = (*map(strides, (*inputs[:3], output, of_output)), strides(grads[0]), strides(grads[1]), strides(grads[3]))
    options = one_variance, hard, causal, window, dropout_p, seed
    run("mgk_backward", addresses, layouts, inputs, options)
    return grads


def run(function: str, addresses: Any, layouts: Any, inputs: Any, options: Any) -> None:
    query, key, value, shift, log_prior, *_ = inputs
    one_variance, hard, causal, window, dropout_p, seed = options
    batch, heads, queries, width = query.shape
    groups, keys, value_width = value.shape[1:]
    components = key.shape[2] if shift is None else shift.shape[1]
    by_position = log_prior is not None and log_prior.dim() == 3
    call = CALL.pack(
        *addresses, *(stride for layout in layouts for stride in layout),
        batch, heads, groups, components, queries, keys, width, value_width,
        TYPES[query.dtype], hard, causal, window or 0, by_position, 0 if seed is None else int(seed),
        torch.get_num_threads(), one_variance, dropout_p,
    )  # fmt: skip
    if getattr(LIBRARY, function)(call):
        raise MemoryError("native attention: the working memory could not be allocated")


def results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = query.shape[:3], compute_dtype(query.dtype)
    output = empty_like(query, (*rows, value.shape[-1]))
    return output, query.new_empty(rows, dtype=dtype), query.new_empty((2, *rows), dtype=dtype)


def gradients(leaves: tuple[Tensor | None, ...], wanted: int) -> Any:
    query = leaves[0]
    assert query is not None
    found = []
    for i, leaf in enumerate(leaves):
        if leaf is None or not wanted >> i & 1:
            found.append(query.new_empty(0))
        else:  # without a batch nothing is added up, and nothing written
            found.append(empty_like(leaf, leaf.shape) if query.shape[0] else torch.zeros_like(leaf))
    return tuple(found)


def empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised memory in the order of dimensions that a projection leaves: heads inside positions, or not."""
    if len(shape) < 4 or tensor.stride(1) >= tensor.stride(-2):
        return tensor.new_empty(shape)
    return tensor.new_empty((shape[0], shape[-2], *shape[1:-2], shape[-1])).movedim(1, -2)


def prepared(tensor: Tensor | None) -> Tensor | None:
    """What the library reads: the last dimension is contiguous, and in small tensors and masks all of them are."""
    if tensor is None:
        return None
    if tensor.dim() < 4:
        return tensor.contiguous()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Of batch, head, component and position."""
    if tensor is None:
        return NO_STRIDES
    if tensor.dim() == 5:
        return tensor.stride()[:4]
    if tensor.dim() == 4:
        batch, head, position, _ = tensor.stride()
        return batch, head, 0, position
    return NO_STRIDES


@attention.register_fake
def _(query: Tensor, key: Tensor, shift: Any, value: Tensor, *_: Any) -> Any:
    return results(query, value)


@attention_backward.register_fake
def _(grad: Tensor, grad_lse: Any, *rest: Any) -> Any:
    return gradients(rest[:6], rest[10])


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, one_variance, hard, causal, window, dropout_p, seed = inputs
    result, _, rows = output
    ctx.save_for_backward(*tensors, result, rows, seed)
    ctx.options = one_variance, hard, causal, window, dropout_p
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)


def attention_autograd(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    register_formulas()
    if grad is None:
        grad = torch.zeros_like(tensors[8])
    needs = ctx.needs_input_grad[:6]
    wanted = sum(1 << i for i, need in enumerate(needs) if need)
    found = attention_backward(grad, grad_lse, *tensors, wanted, *ctx.options, seed)
    return *(each if need else None for each, need in zip(found, needs, strict=True)), *[None] * 8


attention.register_autograd(attention_autograd, setup_context=keep_for_backward)
