"""The attention kernels as operators of PyTorch: their schemas, gradients, shapes for tracing, and FLOP counts.

An operator's arguments are flat, as `torch.library` requires (14 to 20 of them); `Problem` groups them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.operator import operator
from mgk.ops.triton import launch_projected, launch_shifted
from mgk.ops.triton.decode import decode_attention
from mgk.ops.triton.host import dense, zero_gradients
from mgk.ops.triton.problem import Problem

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("triton_shifted")
def shifted_forward(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    query_mask: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, variance: float, hard: bool,
    causal: bool, dropout_p: float, max_seqlen: int,
) -> Five:  # fmt: skip
    """Output, and what backward needs; see `launch_shifted`."""
    masks = key_mask, query_mask, seed, cu_seqlens
    return launch_shifted.forward(
        Problem(query, key, shift, value, log_prior, None, *masks, variance, hard, causal, dropout_p, max_seqlen)
    )


@operator("triton_shifted_backward")
def shifted_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, output: Tensor,
    rows: Tensor, keys: Tensor, factors: Tensor, overflow: Tensor, variance: float, hard: bool, causal: bool,
    dropout_p: float, max_seqlen: int,
) -> Five:  # fmt: skip
    masks = key_mask, query_mask, seed, cu_seqlens
    p = Problem(query, key, shift, value, log_prior, None, *masks, variance, hard, causal, dropout_p, max_seqlen)
    return launch_shifted.backward(p, (output, rows, keys, factors, overflow), grad, p.new_gradients())


@operator("triton_mixture")
def projected_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    cu_seqlens: Tensor | None, variance: float, hard: bool, causal: bool, dropout_p: float, max_seqlen: int,
) -> Five:  # fmt: skip
    """Output, and what backward needs; see `launch_projected`. A shift comes with variances."""
    masks = key_mask, query_mask, seed, cu_seqlens
    return launch_projected.forward(
        Problem(query, key, shift, value, log_prior, variances, *masks, variance, hard, causal, dropout_p, max_seqlen)
    )


@operator("triton_mixture_backward")
def projected_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    cu_seqlens: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, factors: Tensor, overflow: Tensor,
    variance: float, hard: bool, causal: bool, dropout_p: float, max_seqlen: int,
) -> Five:  # fmt: skip
    masks = key_mask, query_mask, seed, cu_seqlens
    p = Problem(query, key, shift, value, log_prior, variances, *masks, variance, hard, causal, dropout_p, max_seqlen)
    return launch_projected.backward(p, (output, rows, keys, factors, overflow), grad, p.new_gradients())


@operator("triton_decode")
def decode_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variances: Tensor | None, key_mask: Tensor | None, variance: float, hard: bool, causal: bool,
) -> Tensor:  # fmt: skip
    each = variance if variances is None else variances
    return decode_attention(query, key, shift, value, log_prior, each, hard, causal, key_mask)


# Shapes for tracing.


@decode_forward.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


@shifted_forward.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, *rest: Any) -> Any:
    return launch_shifted.results(Problem(query, key, shift, value, log_prior, None, *rest))


@projected_forward.register_fake
def _(*inputs: Any) -> Any:
    return launch_projected.results(Problem(*inputs))


@shifted_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Any, *rest: Any) -> Any:
    p = Problem(query, key, shift, value, log_prior, None, *rest[:4], *rest[-5:])
    return with_part(p, p.block + 1)


@projected_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> Any:
    p = Problem(*inputs[:10], *inputs[-5:])
    return with_part(p, launch_projected.part_width(p))


def with_part(p: Problem, width: int) -> tuple[Tensor, ...]:
    *grads, grad_bias = p.new_gradients()
    return *grads, p.empty(p.heads, p.components, width), grad_bias


# Gradients.


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, variance, hard, causal, dropout_p, max_seqlen = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = variance, hard, causal, dropout_p, max_seqlen
    ctx.mark_non_differentiable(*output[1:])


def prior_grad(total: Tensor, by_position: Tensor, log_prior: Tensor | None, hard: bool) -> Tensor | None:
    """The gradient of the log-prior, which is that of the keys' biases; a hard E-step does not use the prior."""
    if log_prior is None:
        return None
    if hard:
        return torch.zeros_like(log_prior)
    return (by_position.sum(0) if log_prior.dim() == 3 else total).to(log_prior.dtype)


def shifted_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, *rest = ctx.saved_tensors
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior), *[None] * 9
    grads = shifted_backward(dense(grad), query, key, shift, value, log_prior, *rest, *ctx.options)
    grad_query, grad_key, grad_value, total, by_position = grads
    grad_shift = total[..., : query.shape[-1]].to(shift.dtype)
    grad_prior = prior_grad(total[..., -1], by_position, log_prior, ctx.options[1])
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, *[None] * 9


def projected_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, variances, *rest = ctx.saved_tensors
    if not grad.numel():
        return *zero_gradients(query, key, shift, value, log_prior, variances), *[None] * 9
    results = projected_backward(dense(grad), query, key, shift, value, log_prior, variances, *rest, *ctx.options)
    grad_query, grad_key, grad_value, total, by_position = results
    grad_shift = None if shift is None else total[..., 2:].to(shift.dtype)
    grad_prior = prior_grad(total[..., 0], by_position, log_prior, ctx.options[1])
    grad_variance = None if variances is None else total[..., 1].to(variances.dtype)
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, grad_variance, *[None] * 9


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
