"""The attention kernels as operators of PyTorch: their schemas, gradients, shapes for tracing, and FLOP counts.

An operator's arguments are flat, as `torch.library` requires (12 to 25 of them); `Problem` groups them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.operator import operator
from mgk.ops.options import Options, Pages, Visibility
from mgk.ops.triton import launch_projected, launch_shifted
from mgk.ops.triton.decode import decode_attention
from mgk.ops.triton.host import dense, zero_gradients
from mgk.ops.triton.problem import Problem
from mgk.ops.triton.row_sums import log_of_sums, shifted_log_of_sums

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("triton_shifted")
def shifted_forward(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    query_mask: Tensor | None, seed: Tensor | None, cu_seq_q: Tensor | None, cu_seq_k: Tensor | None,
    variance: float, hard: bool, causal: bool, window: int, dropout_p: float, max_q: int, max_k: int, lse: bool,
) -> Six:  # fmt: skip
    """Output, the log of the row sums, and what backward needs; see `launch_shifted`."""
    masks = key_mask, query_mask, seed, cu_seq_q, cu_seq_k
    options = variance, hard, causal, window, dropout_p, max_q, max_k, lse
    p = Problem(query, key, shift, value, log_prior, None, *masks, *options)
    output, *saved = launch_shifted.forward(p)
    return output, shifted_log_of_sums(p, saved[0], saved[3]), *saved


@operator("triton_shifted_backward")
def shifted_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, cu_seq_q: Tensor | None,
    cu_seq_k: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, factors: Tensor, overflow: Tensor,
    grad_lse: Tensor | None, variance: float, hard: bool, causal: bool, window: int, dropout_p: float, max_q: int,
    max_k: int, lse: bool,
) -> Five:  # fmt: skip
    masks = key_mask, query_mask, seed, cu_seq_q, cu_seq_k
    options = variance, hard, causal, window, dropout_p, max_q, max_k, lse
    p = Problem(query, key, shift, value, log_prior, None, *masks, *options)
    return launch_shifted.backward(p, (output, rows, keys, factors, overflow), grad, p.new_gradients(), grad_lse)


@operator("triton_mixture")
def projected_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    cu_seq_q: Tensor | None, cu_seq_k: Tensor | None, variance: float, hard: bool, causal: bool, window: int,
    dropout_p: float, max_q: int, max_k: int, lse: bool,
) -> Six:  # fmt: skip
    """Output, log of the row sums, and what backward needs; see `launch_projected`. A shift comes with variances."""
    masks = key_mask, query_mask, seed, cu_seq_q, cu_seq_k
    options = variance, hard, causal, window, dropout_p, max_q, max_k, lse
    p = Problem(query, key, shift, value, log_prior, variances, *masks, *options)
    output, *saved = launch_projected.forward(p)
    return output, log_of_sums(p, saved[0]), *saved


@operator("triton_mixture_backward")
def projected_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    cu_seq_q: Tensor | None, cu_seq_k: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, factors: Tensor,
    overflow: Tensor, grad_lse: Tensor | None, variance: float, hard: bool, causal: bool, window: int,
    dropout_p: float, max_q: int, max_k: int, lse: bool,
) -> Five:  # fmt: skip
    masks = key_mask, query_mask, seed, cu_seq_q, cu_seq_k
    options = variance, hard, causal, window, dropout_p, max_q, max_k, lse
    p = Problem(query, key, shift, value, log_prior, variances, *masks, *options)
    return launch_projected.backward(p, (output, rows, keys, factors, overflow), grad, p.new_gradients(), grad_lse)


@operator("triton_decode")
def decode_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, table: Tensor | None, used: Tensor | None, variance: float,
    hard: bool, causal: bool, window: int, max_k: int, softmax: bool, lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and the log of the row sums, empty if `lse` is False."""
    pages = None if table is None or used is None else Pages(table, used, max_k)
    visibility = Visibility(causal, window or None, key_mask)
    options = Options(log_prior, variance if variances is None else variances, visibility, hard, return_lse=lse)
    return decode_attention(query, key, shift, value, options, pages, softmax)


# Shapes for tracing.


@decode_forward.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, *rest: Any) -> Any:
    shape = query.shape[:3] if rest[-1] else (0,)
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(shape, dtype=torch.float32)


def with_lse(p: Problem, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    output, *saved = results
    return output, p.empty(*(p.query.shape[:3] if p.lse else (0,))), *saved


@shifted_forward.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, *rest: Any) -> Any:
    p = Problem(query, key, shift, value, log_prior, None, *rest)
    return with_lse(p, launch_shifted.results(p))


@projected_forward.register_fake
def _(*inputs: Any) -> Any:
    p = Problem(*inputs)
    return with_lse(p, launch_projected.results(p))


@shifted_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Any, *rest: Any) -> Any:
    p = Problem(query, key, shift, value, log_prior, None, *rest[:5], *rest[-8:])
    return with_part(p, p.block + 1)


@projected_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> Any:
    p = Problem(*inputs[:11], *inputs[-8:])
    return with_part(p, launch_projected.part_width(p))


def with_part(p: Problem, width: int) -> tuple[Tensor, ...]:
    *grads, grad_bias = p.new_gradients()
    return *grads, p.empty(p.heads, p.components, width), grad_bias


# Gradients.


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    first, _lse, *saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-8], first, *saved)
    ctx.options = inputs[-8:]
    ctx.mark_non_differentiable(*saved)


def upstream(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of the output and of the log of the row sums, of which one may be unused."""
    output = ctx.saved_tensors[-5]
    return torch.zeros_like(output) if grad is None else dense(grad), grad_lse


def prior_grad(total: Tensor, by_position: Tensor, log_prior: Tensor | None, hard: bool) -> Tensor | None:
    """The gradient of the log-prior, which is that of the keys' biases; a hard E-step does not use the prior."""
    if log_prior is None:
        return None
    if hard:
        return torch.zeros_like(log_prior)
    return (by_position.sum(0) if log_prior.dim() == 3 else total).to(log_prior.dtype)


def shifted_autograd(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, *rest = ctx.saved_tensors
    grad, grad_lse = upstream(ctx, grad, grad_lse)
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior), *[None] * 13
    grads = shifted_backward(grad, query, key, shift, value, log_prior, *rest, grad_lse, *ctx.options)
    grad_query, grad_key, grad_value, total, by_position = grads
    grad_shift = total[..., : query.shape[-1]].to(shift.dtype)
    grad_prior = prior_grad(total[..., -1], by_position, log_prior, ctx.options[1])
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, *[None] * 13


def projected_autograd(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, variances, *rest = ctx.saved_tensors
    grad, grad_lse = upstream(ctx, grad, grad_lse)
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior, variances), *[None] * 13
    inputs = query, key, shift, value, log_prior, variances
    results = projected_backward(grad, *inputs, *rest, grad_lse, *ctx.options)
    grad_query, grad_key, grad_value, total, by_position = results
    grad_shift = None if shift is None else total[..., 2:].to(shift.dtype)
    grad_prior = prior_grad(total[..., 0], by_position, log_prior, ctx.options[1])
    grad_variance = None if variances is None else total[..., 1].to(variances.dtype)
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, grad_variance, *[None] * 13


shifted_forward.register_autograd(shifted_autograd, setup_context=keep_for_backward)
projected_forward.register_autograd(projected_autograd, setup_context=keep_for_backward)


# FLOPs: those of the matrix products. What the two backward passes both compute is counted once.

Shape = tuple[int, ...]


def pairs(query: Shape, key: Shape) -> int:
    return math.prod(query[:3]) * key[-2]


@register_flop_formula(torch.ops.mgk.triton_shifted)
def _(query: Shape, key: Shape, shift: Any, value: Shape, *_: Any, **__: Any) -> int:
    return 2 * pairs(query, key) * (query[-1] + value[-1])


@register_flop_formula(torch.ops.mgk.triton_mixture)
def _(query: Shape, key: Shape, shift: Any, value: Shape, *_: Any, **__: Any) -> int:
    return 2 * pairs(query, key) * (math.prod(key[2:-2]) * query[-1] + value[-1])


@register_flop_formula(torch.ops.mgk.triton_shifted_backward)
def _(grad: Any, query: Shape, key: Shape, shift: Any, value: Shape, *_: Any, **__: Any) -> int:
    return 2 * pairs(query, key) * (3 * query[-1] + 2 * value[-1])


@register_flop_formula(torch.ops.mgk.triton_mixture_backward)
def _(grad: Any, query: Shape, key: Shape, shift: Any, value: Shape, *_: Any, **__: Any) -> int:
    return 2 * pairs(query, key) * (3 * math.prod(key[2:-2]) * query[-1] + 2 * value[-1])
