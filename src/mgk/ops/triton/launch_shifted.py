"""Launch the kernels for shifted keys: biases, forward and backward, generic, short or Hopper, as the plan says.

What the forward pass leaves for the backward pass:

    rows (G,1+2M,Nq')    per query: its log-sum-exp, and the factors and exponents of its components
    keys (G,1+2M,Nk')    per key: 0 or -inf where it is hidden, and the factors and exponents of its components
    factors (G,M,Nk')    the keys' factors in bfloat16, where weights are mixed in it
    overflow (G/GROUP,2) 1 for heads that would overflow on the fast path, found beforehand or by the forward pass, and
                         for the heads that read the same keys
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.dispatch import FALLBACK, FAST, FAST_HARD, HARD, Plan
from mgk.ops.triton import shifted, shifted_keys, short
from mgk.ops.triton.bias import shifted_bias, side_by_side
from mgk.ops.triton.host import as_bytes
from mgk.ops.triton.launch import compile_together, launch
from mgk.ops.triton.primitives import COLUMNS
from mgk.ops.triton.problem import Problem, compile_options, generic, lanes, padded, strides
from mgk.ops.triton.row_sums import padded_gradient
from mgk.ops.triton.self_check import LOADED

if LOADED:
    from mgk.ops.triton import hopper, hopper_backward, hopper_common, hopper_short

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # output, rows, keys, factors, overflow


def results(p: Problem) -> Saved:
    """Memory for what `forward` returns."""
    _, num_queries, num_keys = p.lengths
    return (
        p.new_output(),
        p.empty(p.groups, 1 + 2 * p.components, padded(num_queries)),
        p.empty(p.groups, 1 + 2 * p.components, padded(num_keys)),
        p.empty(*((p.groups, p.components, padded(num_keys)) if p.narrow else (0,)), dtype=torch.bfloat16),
        p.empty(p.groups // p.group, 2),
    )


@compile_together
def forward(p: Problem) -> Saved:
    saved = results(p)
    if saved[0].numel():
        plan = p.plan()
        if plan.short:
            short_forward(p, plan, saved)
        else:
            long_forward(p, plan, saved)
    return saved


def long_forward(p: Problem, plan: Plan, saved: Saved) -> None:
    output, rows, keys, factors, overflow = saved
    batch, num_queries, num_keys = p.lengths
    prior = None if p.hard else p.log_prior
    shifted_bias(
        keys, factors, rows, overflow.zero_(), p.query, p.key, p.shift, prior, 1 / p.variance, p.key_mask, p.hard,
        p.spans if p.packed else None,
    )  # fmt: skip
    tensors = (
        overflow, p.spans, p.query, p.key, p.value, keys, factors, output, rows, as_bytes(p.query_mask), p.seed
    )  # fmt: skip
    for each in plan.forward:
        if each.kernels == "hopper":
            hopper.forward(p, saved)
            continue
        settings = p.settings(each, MASK_QUERIES=p.query_mask is not None)
        launch(
            shifted.forward_kernel, p.grid(rows.shape[-1] // generic(each.tile).queries * p.groups, each), tensors,
            (*p.numbers, 1 / p.variance), strides(p.query, p.key, p.value, output, packed=p.packed), batch, p.section,
            p.heads, num_queries, num_keys, rows.shape[-1], keys.shape[-1], settings, **compile_options(each),
        )  # fmt: skip


def short_forward(p: Problem, plan: Plan, saved: Saved) -> None:
    output, rows, keys, factors, overflow = saved
    _, num_queries, num_keys = p.lengths
    prior = None if p.hard else p.log_prior
    *near, rest = plan.forward
    if near:
        hopper_short.forward(p, prior, saved)
    fast = rest._replace(path=FAST_HARD if p.hard else FAST, fixed=True, narrow=True)
    fallback = rest._replace(path=HARD if p.hard else FALLBACK)
    settings = [p.settings(each, MASK_QUERIES=p.query_mask is not None) for each in (fast, fallback)]
    tensors = (
        overflow, p.spans, p.query, p.key, p.value, keys, factors, output, rows, as_bytes(p.query_mask), p.seed
    )  # fmt: skip
    launch(
        short.forward_kernel, (p.groups,), tensors, p.shift, prior, as_bytes(p.key_mask),
        (*p.numbers, 1 / p.variance), strides(p.query, p.key, p.value, output), p.heads, num_queries, num_keys,
        rows.shape[-1], keys.shape[-1], *settings, 0 if prior is None else prior.dim(), **compile_options(rest),
    )  # fmt: skip


@compile_together
def backward(
    p: Problem, saved: Saved, grad: Tensor, grads: list[Tensor], grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fill `grads` (of query, key, value and of a prior per position), and return them with (H,M,BD+1): the gradients
    of the shift and, last, of the prior of a head.
    """
    plan = p.plan(grad)
    if plan.short:
        part = short_backward(p, plan, saved, grad, grads)
    else:
        part = long_backward(p, plan, saved, grad, grads, padded_gradient(p, grad_lse, saved[1][:, 0]))
    return grads[0], grads[1], grads[2], part, grads[3]


def long_backward(
    p: Problem, plan: Plan, saved: Saved, grad: Tensor, grads: list[Tensor], grad_lse: Tensor | None
) -> Tensor:
    output, rows, keys, factors, overflow = saved
    grad_query, grad_key, grad_value, grad_bias = grads
    batch, num_queries, _ = p.lengths
    on_hopper = any(each.kernels == "hopper" for each in plan.key)
    on_queries, on_keys = generic(plan.query_tile), generic(plan.key_tile)
    query_parts, key_parts = rows.shape[-1] // on_queries.queries, keys.shape[-1] // on_keys.keys
    parts = query_parts + key_parts
    if on_hopper:
        parts = max(parts, (rows.shape[-1] + keys.shape[-1]) // hopper_common.HALF.value)
    row_stats = p.empty(p.groups, rows.shape[-1], max(1 << p.components.bit_length(), lanes(on_keys)))
    part = p.empty(batch, p.heads, parts, p.components, p.block + 1)
    if p.packed or on_hopper:  # no program writes the parts after a sequence; fallback launches have other block sizes
        part.zero_()
    tops, near = None, saved
    if on_hopper:
        near_factors, tops = hopper.key_factors(p, saved)
        near = (output, rows, keys, near_factors, overflow)
    key_columns, row_columns = columns(p, near)
    numbers = (*p.numbers, 1 / p.variance)
    sizes = (batch, p.section, p.heads, num_queries, p.positions, rows.shape[-1], keys.shape[-1])
    shared = {"WIDTH": row_stats.shape[-1]}
    if not p.groups:
        return part.sum((0, 2))
    for each in plan.query if query_parts else ():
        if each.kernels == "hopper":
            hopper_backward.query_side(p, near, tops, grad, (key_columns, row_columns), row_stats, grad_query, part)
            continue
        tensors = (
            overflow, p.spans, p.query, p.key, p.shift, p.value, keys, factors, or_unused(key_columns, factors), output,
            rows, p.seed, grad, or_unused(grad_lse, rows), row_stats, or_unused(row_columns, factors), grad_query, part,
        )  # fmt: skip
        launch(
            shifted.query_kernel, p.grid(p.groups * query_parts, each), tensors, numbers,
            strides(p.query, p.key, p.value, output, grad, grad_query, packed=p.packed), *sizes, 0, parts,
            p.settings(each, **shared, AS_VECTORS=each.as_vectors, LSE=grad_lse is not None), **compile_options(each),
        )  # fmt: skip
    for each in plan.key if key_parts else ():
        if each.kernels == "hopper":
            hopper_backward.key_side(p, saved, grad, row_columns, row_stats, grads, part)
            continue
        tensors = (
            overflow, p.spans, p.query, p.key, p.shift, p.value, keys, rows, or_unused(row_columns, factors), p.seed,
            grad, row_stats, grad_key, grad_value, grad_bias, part,
        )  # fmt: skip
        launch(
            shifted_keys.key_kernel, p.grid(p.groups // p.group * key_parts, each), tensors, numbers,
            strides(p.query, p.key, p.value, grad, grad_key, grad_value, packed=p.packed), *sizes, query_parts, parts,
            p.settings(each, **shared, POSITIONS=grad_bias.dim() > 1), **compile_options(each),
        )  # fmt: skip
    return part.sum((0, 2))


def or_unused(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or one that the kernel does not read: Triton has no tuples with a None that a kernel renames."""
    return other if tensor is None else tensor


def columns(p: Problem, saved: Saved) -> tuple[Tensor | None, Tensor | None]:
    """What narrow mixing reads as columns: of the keys, and memory for that of the queries."""
    _, rows, keys, factors, _ = saved
    if not factors.numel():
        return None, None
    if p.hard:  # what a query must lead by for the second component to win
        return ((keys[:, 3] - keys[:, 4]).clamp(-6e4, 6e4).half(), None) if p.components == 2 else (None, None)
    row_columns = factors.new_empty(rows.shape[0], rows.shape[-1], COLUMNS.value)
    return side_by_side(factors, COLUMNS.value), row_columns


def short_backward(p: Problem, plan: Plan, saved: Saved, grad: Tensor, grads: list[Tensor]) -> Tensor:
    output, rows, keys, _, overflow = saved
    batch, num_queries, num_keys = p.lengths
    width = p.block
    rest_width = COLUMNS.value + (0 if p.hard else p.components - 1) * 2 * width
    part, (groups, length) = p.empty(batch, p.heads, p.components, width + 1), (rows.shape[0], rows.shape[-1])
    if p.groups:
        *near, rest = plan.query
        if near:
            hopper_short.backward(p, saved, grad, grads, part)
        scratch = (
            p.empty(groups, length), p.empty(groups, length, rest_width, dtype=p.query.dtype),
            p.empty(groups, length, width),
        )  # fmt: skip
        tensors = (overflow, p.query, p.key, p.shift, p.value, keys, output, rows, p.seed, grad, *scratch, *grads, part)
        launch(
            short.backward_kernel, (p.groups,), tensors, (*p.numbers, 1 / p.variance),
            strides(p.query, p.key, p.value, output, grad, *grads[:3]), p.heads, num_queries, num_keys, length,
            keys.shape[-1], p.settings(rest, WIDTH=rest_width, POSITIONS=grads[3].dim() > 1), **compile_options(rest),
        )  # fmt: skip
    return part.sum(0)
