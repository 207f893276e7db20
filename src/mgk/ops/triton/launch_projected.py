"""Launch the kernels for projected keys, and for shifted ones with a variance per component: biases, forward and
backward, generic or Hopper, as the plan says.

What the forward pass leaves for the backward pass:

    rows (G,Nq')         the log-sum-exp of each query
    keys (G,M,Nk')       the bias of each component key, -inf where it is hidden
    factors (G,M,Nk')    the same as factors in bfloat16, where weights are mixed in it
    overflow (G/GROUP,2) 1 for heads that would overflow on the fast path, found beforehand or by the forward pass, and
                         for the heads that read the same keys
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.triton import projected, projected_keys
from mgk.ops.triton.bias import key_bias
from mgk.ops.triton.host import as_bytes
from mgk.ops.triton.launch import compile_together, launch
from mgk.ops.triton.launch_shifted import Saved
from mgk.ops.triton.problem import Problem, compile_options, generic, lanes, padded, strides
from mgk.ops.triton.row_sums import padded_gradient
from mgk.ops.triton.self_check import LOADED

if LOADED:
    from mgk.ops.triton import hopper_common, hopper_projected, hopper_variances


def results(p: Problem) -> Saved:
    """Memory for what `forward` returns."""
    _, num_queries, num_keys = p.lengths
    biases = (p.groups, p.components, padded(num_keys))
    return (
        p.new_output(), p.empty(p.groups, padded(num_queries)), p.empty(*biases),
        p.empty(*(biases if p.narrow and not p.hard else (0,)), dtype=torch.bfloat16),
        torch.zeros(p.groups // p.group, 2, device=p.query.device),
    )  # fmt: skip


def by_component(p: Problem, key: Tensor) -> Tensor:
    """(B,H,M,Nk,D), or (B,H,1,Nk,D) of keys that the components share."""
    return key if p.shift is None else key[:, :, None]


def part_width(p: Problem) -> int:
    """How many numbers per component a program sums for its block: of prior and variance, and of the shift."""
    return 2 if p.shift is None else 2 + p.width


@compile_together
def forward(p: Problem) -> Saved:
    output, rows, keys, factors, overflow = saved = results(p)
    if not output.numel():
        return saved
    (batch, num_queries, num_keys), key = p.lengths, by_component(p, p.key)
    key_bias(
        keys, factors, overflow, key, p.shift, None if p.hard else p.log_prior, p.variances, 1 / p.variance,
        p.key_mask, p.spans if p.packed else None, p.heads,
    )  # fmt: skip
    tensors = (
        overflow, p.spans, p.query, key, p.shift, p.value, keys, factors, p.variances, output, rows,
        as_bytes(p.query_mask), p.seed,
    )  # fmt: skip
    for each in p.plan().forward:
        if each.kernels == "hopper":
            (hopper_variances if p.shared else hopper_projected).forward(p, saved)
            continue
        settings = p.settings(each, MASK_QUERIES=p.query_mask is not None)
        launch(
            projected.forward_kernel, p.grid(rows.shape[-1] // generic(each.tile).queries * p.groups, each), tensors,
            (1 / p.variance, *p.numbers[1:]), strides(p.query, key, p.value, output, packed=p.packed), batch,
            p.section, p.heads, num_queries, num_keys, rows.shape[-1], keys.shape[-1], settings,
            **compile_options(each),
        )  # fmt: skip
    return saved


@compile_together
def backward(
    p: Problem, saved: Saved, grad: Tensor, grads: list[Tensor], grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fill `grads` (of query, key, value and of a prior per position), and return them with (H,M,2): the gradients of
    the prior and the variance of a head; with a shift (H,M,2+D), its gradient last.
    """
    output, rows, keys, factors, overflow = saved
    grad_query, grad_key, grad_value, grad_bias = grads
    (batch, num_queries, _), key, grad_keys = p.lengths, by_component(p, p.key), by_component(p, grad_key)
    plan, grad_lse = p.plan(grad), padded_gradient(p, grad_lse, rows)
    on_hopper = any(each.kernels == "hopper" for each in plan.key)
    on_queries, on_keys = generic(plan.query_tile), generic(plan.key_tile)
    query_blocks, key_blocks = rows.shape[-1] // on_queries.queries, keys.shape[-1] // on_keys.keys
    query_parts = 0 if p.variances is None else query_blocks  # only variances have a gradient from the query pass
    parts = query_parts + key_blocks
    if on_hopper:
        parts = (keys.shape[-1] + (rows.shape[-1] if p.shared else 0)) // hopper_common.HALF.value
    biases = 0 if p.variances is None else p.components
    row_stats = p.empty(*rows.shape, max(1 << (1 + biases).bit_length(), lanes(on_keys)))
    part = p.empty(batch, p.heads, parts, p.components, part_width(p))
    if p.packed or on_hopper:  # no program writes the parts after a sequence; fallback launches have other block sizes
        part.zero_()
    numbers = (1 / p.variance, *p.numbers[1:])
    sizes = (
        batch, p.section, p.heads, num_queries, p.positions, rows.shape[-1], keys.shape[-1], query_parts, parts
    )  # fmt: skip
    for each in plan.query if p.groups * query_blocks else ():
        if each.kernels == "hopper" and p.shared:
            hopper_variances.query_side(p, saved, grad, row_stats, grad_query, part)
            continue
        if each.kernels == "hopper":
            hopper_projected.query_side(p, saved, grad, row_stats, grad_query)
            continue
        tensors = (
            overflow, p.spans, p.query, key, p.shift, p.value, keys, factors, p.variances, output, rows, p.seed, grad,
            rows if grad_lse is None else grad_lse, row_stats, grad_query, part,
        )  # fmt: skip
        launch(
            projected.query_kernel, p.grid(p.groups * query_blocks, each), tensors, numbers,
            strides(p.query, key, p.value, output, grad, grad_query, packed=p.packed), *sizes,
            p.settings(each, WIDTH=row_stats.shape[-1], LSE=grad_lse is not None), **compile_options(each),
        )  # fmt: skip
    for each in plan.key if p.groups * key_blocks else ():
        if each.kernels == "hopper":
            (hopper_variances if p.shared else hopper_projected).key_side(p, saved, grad, row_stats, grads, part)
            continue
        tensors = (
            overflow, p.spans, p.query, key, p.shift, p.value, keys, factors, p.variances, p.seed, grad, row_stats,
            grad_keys, grad_value, grad_bias, part,
        )  # fmt: skip
        launch(
            projected_keys.key_kernel, p.grid(p.groups // p.group * key_blocks, each), tensors, numbers,
            strides(p.query, key, p.value, grad, grad_keys, grad_value, packed=p.packed), *sizes,
            p.settings(each, WIDTH=row_stats.shape[-1], POSITIONS=grad_bias.dim() > 1), **compile_options(each),
        )  # fmt: skip
    return grad_query, grad_key, grad_value, part.sum((0, 2)), grad_bias
