"""Self-attention with its projections as one step of autograd, y = attention(x W_q, x W_k, x W_v) W_o.

Queries, keys and values come from one product and are read where it leaves them. Their gradients are written side by
side, where two products read them: nothing between products is copied. And where eager code gives autograd some twenty
steps, each of which takes the host longer than a GPU takes for a short sequence, here is one, whose launcher is
repeated (repeat.py).

B batch, H heads, M components, N positions, D width of a head, E width of the model, F = H D. Of packed rows (see
`mgk.ops.triton`) B is 1 and N counts all rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from mgk.ops.common import without_autocast
from mgk.ops.triton import (
    contiguous,
    mixture_forward,
    mixture_gradients,
    prior_grad,
    require_support,
    shifted_forward,
    shifted_gradients,
)  # fmt: skip
from mgk.ops.triton.host import draw_seed
from mgk.ops.triton.repeat import repeated
from mgk.ops.triton.rows import bias_gradient


def attention_layer(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], shift: Tensor | None,
    log_prior: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, ends: Tensor | None, longest: int,
    head_dim: int, e_step: str, is_causal: bool, dropout_p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x (B,N,E) -> (B,N,E'), computed in `dtype`.

    Args:
        weights: of queries (F,E), keys (F,E) or, without `shift`, (H M D,E), values (F,E) and the output (E',F).
        biases: of the four products, or four times None.
        shift: (H,M,D), or None where each component has keys of its own.
        log_prior: (H,M) or None.
        key_mask, query_mask: (B,N), None where `ends` says what is packed.
    """
    rest = map(contiguous, (shift, log_prior, key_mask, query_mask, draw_seed(dropout_p, x), ends))
    options = longest, head_dim, e_step == "hard", is_causal, dropout_p
    with without_autocast(x):
        y: Tensor = Layer.apply(x, *weights, *biases, *rest, *options, dtype)  # type: ignore[no-untyped-call]
    return y


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, *params, key_mask, query_mask, seed, ends = inputs[:15]
        y, *kept = layer_forward(*inputs)
        shift, log_prior = params[8:]
        ctx.save_for_backward(*kept, shift, log_prior, key_mask, query_mask, seed, ends)
        ctx.options = inputs[15:-1]
        ctx.dtypes = x.dtype, params[0].dtype, None if params[4] is None else params[4].dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (wide, of_weights, of_biases), saved = ctx.dtypes, ctx.saved_tensors
        *_, shift, log_prior, _, _, _, _ = saved
        with without_autocast(grad):
            results = layer_backward(grad, *saved, *ctx.options, of_biases is not None)
        grad_x, grad_weight, grad_out, sums, out_sums, total = results
        head_dim, hard = ctx.options[1:3]
        sizes = sizes_of(grad_weight.shape[0], grad_out.shape[1])
        weights = *grad_weight.to(of_weights).split(sizes), grad_out.to(of_weights)
        biases = [None] * 4 if of_biases is None else [*sums.to(of_biases).split(sizes), out_sums.to(of_biases)]
        if shift is None:
            grad_shift, grad_prior = None, prior_grad(total[..., 0], total, log_prior, hard)
        else:
            grad_shift = total[..., :head_dim].to(shift.dtype)
            grad_prior = prior_grad(total[..., -1], total, log_prior, hard)
        return grad_x.to(wide), *weights, *biases, grad_shift, grad_prior, *[None] * 10


def sizes_of(total: int, inner: int) -> list[int]:
    """Columns of queries, keys and values, of so many in all."""
    return [inner, total - 2 * inner, inner]


def heads_of(qkv: Tensor, inner: int, head_dim: int, projected: bool) -> list[Tensor]:
    """Queries (B,H,N,D), keys (B,H,N,D) or (B,H,M,N,D), and values (B,H,N,D) of (B,N,...)."""
    query, key, value = (
        part.unflatten(-1, (inner // head_dim, -1, head_dim)).permute(0, 2, 3, 1, 4)
        for part in qkv.split(sizes_of(qkv.shape[-1], inner), -1)
    )
    return [query[:, :, 0], key if projected else key[:, :, 0], value[:, :, 0]]


@repeated
def layer_forward(
    x: Tensor, query_weight: Tensor, key_weight: Tensor, value_weight: Tensor, out_weight: Tensor,
    query_bias: Tensor | None, key_bias: Tensor | None, value_bias: Tensor | None, out_bias: Tensor | None,
    shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
    seed: Tensor | None, ends: Tensor | None, longest: int, head_dim: int, hard: bool, causal: bool, dropout_p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y, and what backward wants: x and the weights in `dtype`, (B,N,...) and what the attention leaves."""
    x, out_weight = x.to(dtype), out_weight.to(dtype)
    weight, bias = torch.cat([query_weight, key_weight, value_weight]).to(dtype), None
    if query_bias is not None and key_bias is not None and value_bias is not None:
        bias = torch.cat([query_bias, key_bias, value_bias]).to(dtype)
    qkv = linear(x, weight, bias)
    query, key, value = heads_of(qkv, out_weight.shape[1], head_dim, shift is None)
    require_support(query, value)
    masks = key_mask, query_mask, seed, ends
    options = math.sqrt(head_dim), hard, causal, dropout_p, longest
    if shift is None:
        kept = mixture_forward.launcher(query, key, value, log_prior, None, *masks, *options)
    else:
        kept = shifted_forward.launcher(query, key, shift, value, log_prior, *masks, *options)
    y = linear(kept[0].transpose(1, 2).flatten(2), out_weight, None if out_bias is None else out_bias.to(dtype))
    return y, x, weight, out_weight, qkv, *kept


@repeated
def layer_backward(
    grad: Tensor, x: Tensor, weight: Tensor, out_weight: Tensor, qkv: Tensor, output: Tensor, rows: Tensor,
    keys: Tensor, narrow_keys: Tensor, far: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, ends: Tensor | None, longest: int,
    head_dim: int, hard: bool, causal: bool, dropout_p: float, biased: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, of the weights, of the biases in float32, and those of the rest as the attention leaves them."""
    inner, merged = out_weight.shape[1], output.transpose(1, 2).flatten(2)
    query, key, value = heads_of(qkv, inner, head_dim, shift is None)
    grad_qkv = torch.empty_like(qkv) if ends is None else torch.zeros_like(qkv)  # spare rows get none
    room = [*heads_of(grad_qkv, inner, head_dim, shift is None), grad.new_empty(0, dtype=torch.float32)]
    grad_heads = (grad @ out_weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)
    rest = key_mask, query_mask, seed, ends, output, rows, keys, narrow_keys, far
    options = math.sqrt(head_dim), hard, causal, dropout_p, longest
    if shift is None:
        total = mixture_gradients(room, grad_heads, query, key, value, log_prior, None, *rest, *options)[3]
    else:
        total = shifted_gradients(room, grad_heads, query, key, shift, value, log_prior, *rest, *options)[3]
    flat, flat_qkv = grad.reshape(-1, grad.shape[-1]), grad_qkv.view(-1, qkv.shape[-1])
    sums = [bias_gradient(each) if biased else total.new_empty(0) for each in (flat_qkv, flat)]
    grad_weight = flat_qkv.T @ x.reshape(-1, x.shape[-1])
    return grad_qkv @ weight, grad_weight, flat.T @ merged.reshape(-1, inner), *sums, total
