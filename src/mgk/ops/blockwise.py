"""Mixture-key attention for the CPU: block by block, memory linear in N forward and backward.

What depends on one position alone becomes a bias here, by ordinary differentiable code; the gradients of priors, shifts
and variances are those of the biases. The pairs are the work of two operators over G = B*H heads (blockwise_kernels.py):

    mgk::blockwise_mixture   l[i,j,r] = q_i.k_jr + row_bias[i,r] + key_bias[j,r]
    mgk::blockwise_shifted   l[i,j,r] = q_i.k_j + log_u[i,r] + log_w[j,r]

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mgk.ops.blockwise_kernels import (
    Kernel,
    Mixture,
    Scratch,
    Shifted,
    WeightGradient,
    append,
    attend,
    attend_backward,
    head_groups,
    last_alive,
    query_blocks,
)
from mgk.ops.reference import Variance, compute_dtype


def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    form = mixture_form(query, key, log_prior if e_step == "soft" else None, variance, key_mask)
    output, _ = mixture_forward(
        *form[:4], flat(value), form[4], e_step == "hard", is_causal, dropout_p, draw_seed(dropout_p)
    )
    return zero_grad_prior(output, log_prior, e_step).unflatten(0, query.shape[:2]).to(query.dtype)


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    if isinstance(variance, Tensor):  # q.k / s2_r differs between the components: nothing factors
        keys = key.to(compute_dtype(key.dtype))[:, :, None] + shift.to(compute_dtype(key.dtype))[None, :, :, None]
        return mgk_attention(query, keys, value, log_prior, variance, e_step, is_causal, key_mask, dropout_p)
    form = shifted_form(query, key, shift, log_prior if e_step == "soft" else None, variance, key_mask)
    output, *_ = shifted_forward(
        *form[:4], flat(value), form[4], e_step == "hard", is_causal, dropout_p, draw_seed(dropout_p)
    )
    return zero_grad_prior(output, log_prior, e_step).unflatten(0, query.shape[:2]).to(query.dtype)


def mixture_form(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """query (G,Nq,D), key (G,M,Nk,D), row_bias (G,M,Nq) or None, key_bias (G,M,Nk), and a bound of l (G,Nq)."""
    query, key = flat(query), flat(key)
    half_norm, row_bias = query.square().sum(-1) / 2, None
    if isinstance(variance, Tensor):
        s2 = variance.to(query.dtype)[..., None].repeat(query.shape[0] // variance.shape[0], 1, 1)  # (G,M,1)
        key_bias = -key.square().sum(-1) / (2 * s2)
        row_bias, key = -half_norm[:, None] / s2, key / s2[..., None]
        bound = torch.zeros_like(half_norm)
    else:
        key_bias = -key.square().sum(-1) / (2 * variance)
        query, bound = query / variance, half_norm.detach() / variance
    key_bias, most = with_prior(key_bias, log_prior, key_mask)
    return query, key, row_bias, key_bias, bound + most


def shifted_form(
    query: Tensor, key: Tensor, shift: Tensor, log_prior: Tensor | None, variance: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query (G,Nq,D), key (G,Nk,D), log_u (G,Nq,M), log_w (G,Nk,M), and a bound of q.k + max_r log_w (G,Nq)."""
    heads, dtype = shift.shape[0], compute_dtype(query.dtype)
    shift = shift.to(dtype)
    scaled = query.to(dtype) / variance
    log_u = flat(scaled @ shift.mT)
    key_shift = key.to(dtype) @ shift.mT + shift.square().sum(-1)[:, None] / 2  # k.b + |b|^2 / 2
    log_w = flat((key_shift + key.to(dtype).square().sum(-1, keepdim=True) / 2) / -variance)
    bias, most = with_prior(log_w.mT, log_prior, key_mask)
    with torch.no_grad():
        bound = flat(scaled).square().sum(-1) * (variance / 2) - log_u.amin(-1) + most
    return flat(scaled), flat(key), log_u, bias.mT, bound


def with_prior(key_bias: Tensor, log_prior: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Add the prior to a (G,M,Nk) bias and hide masked keys; and the largest log prior of each head, (G,1) or 0."""
    most: Tensor | float = 0.0
    if log_prior is not None:
        prior = log_prior.to(key_bias.dtype)
        repeat = key_bias.shape[0] // max(1, prior.shape[0])
        most = prior.detach().flatten(1).amax(-1, keepdim=True) if prior.numel() else 0.0
        if isinstance(most, Tensor):
            most = most.masked_fill(most == -torch.inf, 0).repeat(repeat, 1)
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


@torch.library.custom_op("mgk::blockwise_mixture", mutates_args=(), device_types="cpu")
def mixture_forward(
    query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, bound: Tensor,
    hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    results, scratch, alive = [], Scratch(), key_bias.amax(1) > -torch.inf
    for heads in head_groups(query.shape[0], query.shape[1], key.shape[2], causal):
        road = partial(Mixture, *select(heads, query, key, row_bias, key_bias), hard, scratch)
        results.append(
            attend([road], value[heads], bound[heads], alive[heads], causal, dropout_p, int(seed), heads.start)[:2]
        )
    return join(results, [value.new_empty(0, query.shape[1], value.shape[-1]), torch.empty_like(bound)])


@torch.library.custom_op("mgk::blockwise_mixture_backward", mutates_args=(), device_types="cpu")
def mixture_backward(
    grad: Tensor, query: Tensor, key: Tensor, row_bias: Tensor | None, key_bias: Tensor, value: Tensor, output: Tensor,
    lse: Tensor, hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results, scratch, alive = [], Scratch(), key_bias.amax(1) > -torch.inf
    for heads in head_groups(query.shape[0], query.shape[1], key.shape[2], causal):
        kernel = Mixture(*select(heads, query, key, row_bias, key_bias), hard, scratch)
        kernel.start_backward()
        weight_grad = WeightGradient(value[heads], output[heads], grad[heads], dropout_p, int(seed), scratch)
        road_taken = torch.zeros_like(lse[heads], dtype=torch.uint8)
        attend_backward([kernel], road_taken, lse[heads], alive[heads], causal, weight_grad, heads.start)
        grad_row = query.new_empty(0) if kernel.grad_row_bias is None else kernel.grad_row_bias
        results.append((kernel.grad_query, kernel.grad_key, grad_row, kernel.grad_key_bias, weight_grad.grad_value))
    grad_row = query.new_empty(0) if row_bias is None else torch.empty_like(row_bias)
    return join(results, [*map(torch.empty_like, (query, key)), grad_row, *map(torch.empty_like, (key_bias, value))])


@torch.library.custom_op("mgk::blockwise_shifted", mutates_args=(), device_types="cpu")
def shifted_forward(
    query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, bound: Tensor,
    hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    results, scratch, alive = [], Scratch(), log_w.amax(-1) > -torch.inf
    for heads in head_groups(query.shape[0], query.shape[1], key.shape[1], causal):
        kernel = Shifted(*select(heads, query, key, log_u, log_w), hard, scratch)
        roads: list[Callable[[], Kernel]] = [lambda kernel=kernel: kernel]  # type: ignore[misc]
        if not hard:
            roads.append(kernel.as_mixture)
        results.append(
            attend(roads, value[heads], bound[heads], alive[heads], causal, dropout_p, int(seed), heads.start)
        )
    return join(
        results,
        [value.new_empty(0, query.shape[1], value.shape[-1]), torch.empty_like(bound), bound.to(torch.uint8)],
    )


@torch.library.custom_op("mgk::blockwise_shifted_backward", mutates_args=(), device_types="cpu")
def shifted_backward(
    grad: Tensor, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    road_taken: Tensor, hard: bool, causal: bool, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results, scratch, alive = [], Scratch(), log_w.amax(-1) > -torch.inf
    for heads in head_groups(query.shape[0], query.shape[1], key.shape[1], causal):
        kernel = Shifted(*select(heads, query, key, log_u, log_w), hard, scratch)
        kernel.start_backward()
        kernels: list[Kernel] = [kernel]
        if bool(road_taken[heads].any()):
            mixture = kernel.as_mixture()
            mixture.start_backward()
            kernels.append(mixture)
        weight_grad = WeightGradient(value[heads], output[heads], grad[heads], dropout_p, int(seed), scratch)
        attend_backward(kernels, road_taken[heads], lse[heads], alive[heads], causal, weight_grad, heads.start)
        if len(kernels) == 2:
            kernel.grad_query += mixture.grad_query
            kernel.grad_key += mixture.grad_key.sum(1)
            kernel.grad_log_u += mixture.grad_row_bias.mT
            kernel.grad_log_w += mixture.grad_key_bias.mT
        results.append(
            (kernel.grad_query, kernel.grad_key, kernel.grad_log_u, kernel.grad_log_w, weight_grad.grad_value)
        )
    return join(results, [torch.empty_like(t) for t in (query, key, log_u, log_w, value)])


def select(heads: slice, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor[heads] for tensor in tensors]


def join(results: list[Any], nothing: list[Tensor]) -> Any:
    """The groups' results one after the other; `nothing` is what there is without heads."""
    return tuple(map(torch.cat, zip(*results, strict=True))) if results else tuple(nothing)


@mixture_forward.register_fake
def _(query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, bound: Tensor, *_: Any) -> Any:
    return query.new_empty(*query.shape[:2], value.shape[-1]), torch.empty_like(bound)


@mixture_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, row_bias: Any, key_bias: Tensor, value: Tensor, *_: Any) -> Any:
    grad_row = query.new_empty(0) if row_bias is None else torch.empty_like(row_bias)
    return torch.empty_like(query), torch.empty_like(key), grad_row, torch.empty_like(key_bias), torch.empty_like(value)


@shifted_forward.register_fake
def _(query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, bound: Tensor, *_: Any) -> Any:
    road_taken = torch.empty_like(bound, dtype=torch.uint8)
    return query.new_empty(*query.shape[:2], value.shape[-1]), torch.empty_like(bound), road_taken


@shifted_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, log_u: Tensor, log_w: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(t) for t in (query, key, log_u, log_w, value))


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _bound, hard, causal, dropout_p, seed = inputs  # query, key, two biases, value
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.options = hard, causal, dropout_p
    ctx.mark_non_differentiable(*output[1:])


def mixture_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    grad_query, grad_key, grad_row, grad_bias, grad_value = mixture_backward(grad, *tensors, *ctx.options, seed)
    has_row = tensors[2] is not None
    return grad_query, grad_key, grad_row if has_row else None, grad_bias, grad_value, *[None] * 5


def shifted_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    return *shifted_backward(grad, *tensors, *ctx.options, seed), *[None] * 5


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
    return weight.unflatten(0, (batch, heads)).sum(0), (seen_by * taken).sum(0)


def component_statistics(
    query: Tensor, key: Tensor, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums of Eqn 13 over i: gamma (B,H,M,Nk), gamma q_i (B,H,M,Nk,D) and gamma |q_i|^2 (B,H,M,Nk)."""
    require_cpu(query)
    sums = component_sums(query, key, None, log_prior, variance, is_causal, key_mask, query_mask, True)
    weight, mean, square = (part.unflatten(0, query.shape[:2]) for part in sums)
    return weight, mean, square


def component_sums(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, variance: Variance, is_causal: bool,
    key_mask: Tensor | None, query_mask: Tensor | None, moments: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums over the visible queries of gamma (G,M,Nk), and if asked of gamma q (G,M,Nk,D) and gamma |q|^2 (G,M,Nk)."""
    if shift is not None and not isinstance(variance, Tensor):
        _, _, row, column, _ = shifted_form(query, key, shift, log_prior, variance, key_mask)
        scaled, keys, row, column = None, None, row.mT, column.mT  # gamma = softmax_r(log_u + log_w)
    else:
        key = key if shift is None else key[:, :, None] + shift.to(key.dtype)[None, :, :, None]
        scaled, keys, row, column, _ = mixture_form(query, key, log_prior, variance, key_mask)
    queries = flat(query)
    real = queries.new_ones(queries.shape[:2])
    if query_mask is not None:
        real = query_mask.to(real.dtype).repeat_interleave(query.shape[1], 0)
    powers = real[..., None]
    if moments:
        powers = append(append(queries, queries.square().sum(-1)), 1.0) * powers  # q, |q|^2, 1
    sums, alive = powers.new_zeros(*column.shape, powers.shape[-1]), column.amax(1) > -torch.inf
    for heads in head_groups(queries.shape[0], queries.shape[1], column.shape[-1], is_causal):
        for block in query_blocks(queries.shape[1], column.shape[-1], last_alive(alive[heads]), is_causal, 0):
            for span in block.keys:
                logits = column[heads, :, None, span]
                if row is not None:
                    logits = logits + row[heads, :, block.queries, None]
                if scaled is not None and keys is not None:
                    logits = logits + scaled[heads, None, block.queries] @ keys[heads, :, span].mT
                largest = logits.amax(1, keepdim=True)
                gamma = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp_()
                total = gamma.sum(1, keepdim=True)
                gamma = block.hide_future(gamma.div_(total.masked_fill(total == 0, 1)), span)
                sums[heads, :, span] += gamma.mT @ powers[heads, None, block.queries]
    return sums[..., -1], sums[..., :-2], sums[..., -2 if moments else -1]
