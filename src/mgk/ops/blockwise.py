"""Mixture-key attention for the CPU: block by block, memory linear in N forward and backward.

What depends on one position alone becomes a bias here, by ordinary differentiable code; the gradients of priors, shifts
and variances are those of the biases. The pairs are the work of two operators over G = B*H heads (blockwise_*.py):

    mgk::blockwise_mixture   l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]
    mgk::blockwise_shifted   l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mgk.ops.blockwise_attend import Dropout, WeightGradient, attend, attend_backward, is_large
from mgk.ops.blockwise_kernels import LOWEST, LOWEST_BACKWARD, Mixture, Scratch, make_blocks
from mgk.ops.blockwise_shifted import ShiftedHard, ShiftedSoft, as_mixture
from mgk.ops.common import Variance, compute_dtype, shifted_keys, without_autocast
from mgk.ops.operator import operator


def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    *form, most, scale = mixture_form(query, key, log_prior if e_step == "soft" else None, variance, key_mask)
    output, *_ = mixture_forward(
        *form, flat(value), most, scale, e_step == "hard", is_causal, dropout_p, draw_seed(dropout_p)
    )
    output = zero_grad_prior(output, log_prior, e_step).view(*query.shape[:3], value.shape[-1]).to(query.dtype)
    return output if query_mask is None else output.masked_fill(~query_mask[:, None, :, None], 0)


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    if isinstance(variance, Tensor):  # q.k / s2_r differs between the components: nothing factors
        keys = shifted_keys(key, shift)
        return mgk_attention(
            query, keys, value, log_prior, variance, e_step, is_causal, key_mask, dropout_p, query_mask
        )
    *form, most = shifted_form(query, key, shift, log_prior if e_step == "soft" else None, variance, key_mask)
    output, *_ = shifted_forward(
        *form, flat(value), most, 1 / variance, e_step == "hard", is_causal, dropout_p, draw_seed(dropout_p)
    )
    output = zero_grad_prior(output, log_prior, e_step).view(*query.shape[:3], value.shape[-1]).to(query.dtype)
    return output if query_mask is None else output.masked_fill(~query_mask[:, None, :, None], 0)


def mixture_form(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, float]:
    """query (G,Nq,D), key (G,M,Nk,D), row_bias (G,M,Nq) or None, key_bias (G,M,Nk), largest log prior (G,1), scale."""
    query, key = flat(query), flat(key)
    if isinstance(variance, Tensor):
        repeat = query.shape[0] // max(1, variance.shape[0])
        s2 = variance.to(query.dtype)[..., None].repeat(repeat, 1, 1)  # (G,M,1)
        key_bias = -key.square().sum(-1) / (2 * s2)
        row_bias, key, scale = query.square().sum(-1)[:, None] / (-2 * s2), key / s2[..., None], 1.0
    else:
        key_bias, row_bias, scale = key.square().sum(-1) / (-2 * variance), None, 1 / variance
    key_bias, most = with_prior(key_bias, log_prior, key_mask)
    return query, key, row_bias, key_bias, most, scale


def shifted_form(
    query: Tensor, key: Tensor, shift: Tensor, log_prior: Tensor | None, variance: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query (G,Nq,D), key (G,Nk,D), log_u (G,M,Nq), log_w (G,M,Nk), and the largest log prior (G,1)."""
    dtype = compute_dtype(query.dtype)
    shift, query, key = shift.to(dtype), query.to(dtype), key.to(dtype)
    log_u = flat(shift / variance @ query.mT)
    key_shift = shift @ key.mT + shift.square().sum(-1, keepdim=True) / 2  # b.k + |b|^2 / 2
    log_w = flat((key_shift + key.square().sum(-1)[:, :, None] / 2) / -variance)
    log_w, most = with_prior(log_w, log_prior, key_mask)
    return flat(query), flat(key), log_u, log_w, most


def with_prior(key_bias: Tensor, log_prior: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the prior to a (G,M,Nk) bias and hide masked keys; and the largest log prior of each head, (G,1)."""
    most = key_bias.new_zeros(key_bias.shape[0], 1)
    if log_prior is not None:
        prior = log_prior.to(key_bias.dtype)
        repeat = key_bias.shape[0] // max(1, prior.shape[0])
        if prior.numel():
            largest = prior.detach().flatten(1).amax(-1, keepdim=True)
            most = largest.masked_fill(largest == -torch.inf, 0).repeat(repeat, 1)
        key_bias = key_bias + (prior[..., None] if prior.dim() == 2 else prior).repeat(repeat, 1, 1)
    if key_mask is not None:
        hidden = (~key_mask).repeat_interleave(key_bias.shape[0] // max(1, key_mask.shape[0]), 0)
        key_bias = key_bias.masked_fill(hidden[:, None], -torch.inf)
    return key_bias, most


def flat(tensor: Tensor) -> Tensor:
    """(B,H,...) -> (G,...), contiguous, in the dtype of the computation."""
    return tensor.flatten(0, 1).to(compute_dtype(tensor.dtype)).contiguous()


def draw_seed(dropout_p: float) -> Tensor:
    return torch.randint(1 << 62, ()) if dropout_p else torch.zeros((), dtype=torch.long)


def zero_grad_prior(output: Tensor, log_prior: Tensor | None, e_step: str) -> Tensor:
    """With the hard E-step the prior plays no part: its gradient is zero rather than absent."""
    if log_prior is None or e_step == "soft" or not log_prior.requires_grad:
        return output
    return output + 0 * log_prior.masked_fill(log_prior.isinf(), 0).sum().to(output.dtype)


def require_cpu(query: Tensor) -> None:
    if query.device.type != "cpu":
        raise ValueError(f"impl: expected tensors on the CPU for 'blockwise', got {query.device}")


@operator("blockwise_mixture", "cpu")
def mixture_forward(
    query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, most: Tensor, scale: float,
    hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scratch, alive = Scratch(value), key_bias.amax(1) > -torch.inf
    road = cache(lambda: Mixture(query, key, row_bias, key_bias, scale, hard, LOWEST[value.dtype], scratch))
    dropout = Dropout(dropout_p, int(seed))
    return attend([road], query, value, most, alive, causal, key.shape[1], dropout, scratch)[:3]


@operator("blockwise_mixture_backward", "cpu")
def mixture_backward(
    grad: Tensor, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, output: Tensor,
    shift: Tensor, total: Tensor, scale: float, hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scratch, alive = Scratch(value), key_bias.amax(1) > -torch.inf
    if not (shift.numel() and alive.numel()):
        return no_gradient(query, key, query.new_empty(0) if row_bias is None else row_bias, key_bias, value)
    with without_autocast(grad):
        grad, shift, lowest = without_sums(grad, shift, total)
        kernel = Mixture(query, key, row_bias, key_bias, scale, hard, lowest, scratch)
        weight_grad = WeightGradient(value, output, grad, Dropout(dropout_p, int(seed)), scratch)
        attend_backward([kernel], None, shift, alive, causal, key.shape[1], weight_grad)
        return *kernel.gradients(), weight_grad.grad_value


@operator("blockwise_shifted", "cpu")
def shifted_forward(
    query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, most: Tensor, scale: float,
    hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scratch, alive = Scratch(value), log_w.amax(1) > -torch.inf
    make = shifted_kernel(hard, log_u)
    first = cache(lambda: make(query, key, log_u, log_w, scale, LOWEST[value.dtype], scratch))
    roads = [first, cache(lambda: as_mixture(first()))] if make is ShiftedSoft else [first]
    return attend(roads, query, value, most, alive, causal, 1, Dropout(dropout_p, int(seed)), scratch)


@operator("blockwise_shifted_backward", "cpu")
def shifted_backward(
    grad: Tensor, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, output: Tensor,
    shift: Tensor, total: Tensor, road_taken: Tensor, scale: float, hard: bool, causal: bool, dropout_p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scratch, alive = Scratch(value), log_w.amax(1) > -torch.inf
    if not (shift.numel() and alive.numel()):
        return no_gradient(query, key, log_u, log_w, value)
    with without_autocast(grad):
        grad, shift, lowest = without_sums(grad, shift, total)
        kernel = shifted_kernel(hard, log_u)(query, key, log_u, log_w, scale, lowest, scratch)
        weight_grad = WeightGradient(value, output, grad, Dropout(dropout_p, int(seed)), scratch)
        if not bool(road_taken.any()):
            attend_backward([kernel], None, shift, alive, causal, 1, weight_grad)
            return *kernel.gradients(), weight_grad.grad_value
        mixture = as_mixture(kernel)
        attend_backward([kernel, mixture], road_taken, shift, alive, causal, 1, weight_grad)
    grads = list(kernel.gradients())
    by_query, by_key, by_row, by_bias = mixture.gradients()
    for total, part in zip(grads, (by_query, by_key.sum(1), by_row, by_bias), strict=True):
        total += part
    grad_query, grad_key, grad_u, grad_w = grads
    return grad_query, grad_key, grad_u, grad_w, weight_grad.grad_value


def without_sums(grad: Tensor, shift: Tensor, total: Tensor) -> tuple[Tensor, Tensor, float]:
    """What backward starts from: gradient of the output, m_i, and the lowest exponent (`blockwise_attend`)."""
    if is_large(shift):
        return grad / total[..., None], shift, LOWEST[grad.dtype]
    return grad, shift + total.log(), LOWEST_BACKWARD[grad.dtype]


def new_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output (G,Nq,Dv), m_i and the row sums (G,Nq)."""
    rows = query.shape[:2]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows), query.new_empty(rows)


def no_gradient(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where there are no pairs."""
    return torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(c), torch.zeros_like(d), torch.zeros_like(e)


def shifted_kernel(hard: bool, log_u: Tensor) -> type[ShiftedSoft] | type[ShiftedHard]:
    return ShiftedHard if hard or log_u.shape[1] == 1 else ShiftedSoft


@mixture_forward.register_fake
def _(query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, *_: Any) -> Any:
    return new_results(query, value)


@mixture_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, *_: Any) -> Any:
    row = query.new_empty(0) if row_bias is None else row_bias
    return tuple(torch.empty_like(tensor) for tensor in (query, key, row, key_bias, value))


@shifted_forward.register_fake
def _(query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, *_: Any) -> Any:
    output, shift, total = new_results(query, value)
    return output, shift, total, torch.empty_like(total, dtype=torch.uint8)


@shifted_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(tensor) for tensor in (query, key, log_u, log_w, value))


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _most, scale, hard, causal, dropout_p, seed = inputs  # query, key, two biases, value
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.options = scale, hard, causal, dropout_p
    ctx.mark_non_differentiable(*output[1:])


def mixture_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    grad_query, grad_key, grad_row, grad_bias, grad_value = mixture_backward(grad, *tensors, *ctx.options, seed)
    has_row = tensors[2] is not None
    return grad_query, grad_key, grad_row if has_row else None, grad_bias, grad_value, *[None] * 6


def shifted_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    return *shifted_backward(grad, *tensors, *ctx.options, seed), *[None] * 6


mixture_forward.register_autograd(mixture_autograd, setup_context=keep_for_backward)
shifted_forward.register_autograd(shifted_autograd, setup_context=keep_for_backward)


def prior_statistics(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_i gamma[i,j,r] as (H,M,Nk), and the visible queries of each key (Nk,). Shifted keys need no score product."""
    require_cpu(query)
    batch, heads, num_queries, _ = query.shape
    num_keys, dtype = key.shape[-2], compute_dtype(query.dtype)
    real = torch.ones(batch, num_queries, dtype=dtype) if query_mask is None else query_mask.to(dtype)
    taken = torch.ones(batch, num_keys, dtype=dtype) if key_mask is None else key_mask.to(dtype)
    seen_by = real
    if is_causal:  # key j is seen by the queries from j - offset on
        later = torch.cat([real.flip(-1).cumsum(-1).flip(-1), real.new_zeros(batch, 1)], -1)
        seen_by = later[:, (torch.arange(num_keys) - (num_keys - num_queries)).clamp(0, num_queries)]
    else:
        seen_by = real.sum(-1, keepdim=True)
    weight, *_ = component_sums(query, key, shift, log_prior, variance, is_causal, key_mask, query_mask, False)
    return weight.view(batch, heads, *weight.shape[1:]).sum(0), (seen_by * taken).sum(0)


def component_statistics(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    require_cpu(query)
    sums = component_sums(query, key, None, log_prior, variance, is_causal, key_mask, query_mask, True)
    weight, mean, square = (part.reshape(*query.shape[:2], *part.shape[1:]) for part in sums)
    return weight, mean, square


def component_sums(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None, moments: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums over the visible queries of gamma (G,M,Nk), and if asked of gamma q (G,M,Nk,D) and gamma |q|^2 (G,M,Nk)."""
    keys: Tensor | None
    row: Tensor | None
    if shift is not None and not isinstance(variance, Tensor):
        keys, scale = None, 0.0  # q.k plays no part: gamma = softmax_r(log_u + log_w)
        _, _, row, column, _ = shifted_form(query, key, shift, log_prior, variance, key_mask)
    else:
        key = key if shift is None else shifted_keys(key, shift)
        _, keys, row, column, _, scale = mixture_form(query, key, log_prior, variance, key_mask)
    queries = flat(query)
    real = queries.new_ones(queries.shape[:2])
    if query_mask is not None:
        real = query_mask.to(real.dtype).repeat_interleave(query.shape[1], 0)
    powers = real[..., None]
    if moments:
        powers = torch.cat([queries, queries.square().sum(-1, keepdim=True), powers], -1) * powers  # q, |q|^2, 1
    sums, alive = powers.new_zeros(*column.shape, powers.shape[-1]), column.amax(1) > -torch.inf
    for block in make_blocks(queries.shape[1], alive, is_causal, column.shape[1]):
        heads, rows = block.place
        for at in block.keys:
            span = slice(*at)
            logits = column[heads, :, None, span]
            if row is not None:
                logits = logits + row[heads, :, rows, None]
            if keys is not None:
                logits = logits + scale * queries[heads, None, rows] @ keys[heads, :, span].mT
            largest = logits.amax(1, keepdim=True)
            gamma = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp_()
            gamma = gamma.div_(gamma.sum(1, keepdim=True).clamp(min=1e-30))  # at least 1 where there is a key
            if block.offset is not None:
                gamma = gamma.tril(rows.start + block.offset - span.start)
            sums[heads, :, span] += gamma.mT @ powers[heads, None, rows]
    return sums[..., -1], sums[..., :-2], sums[..., -2 if moments else -1]
