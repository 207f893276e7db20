"""LayerNorm of many narrow rows, in float32: y = n weight + bias, n = (x - mean) rstd; also of x + dropout(f).

    dx = rstd (u - mean(u) - n mean(u n)),  u = dy weight     dweight = sum dy n     dbias = sum dy

PyTorch sums the gradients of weight and bias over up to 65,536 rows in E/32 blocks: with E = 64 on two multiprocessors
of a GPU that has a hundred. Here each of many programs leaves the sums over its rows, which are added up in a fixed
order.

T rows, E width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.operator import operator
from mgk.ops.triton.host import dropout_numbers
from mgk.ops.triton.launch import launch
from mgk.ops.triton.repeat import repeated
from mgk.ops.triton.rows import column_sums, dropped, load_rows, store_rows

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 4096  # numbers


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    X, F, SEED, WEIGHT, BIAS, S, Y, MOMENTS, rows, eps, threshold, inverse_keep, E: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """MOMENTS (T,2) takes mean and rstd; if there is something to ADD, S takes the sum."""
    o_row, o_e = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    x = load_rows(X, o_row, rows, E, BE)
    if ADD:
        added = load_rows(F, o_row, rows, E, BE)
        if DROPOUT:
            added = dropped(added, SEED, threshold, inverse_keep, o_row, o_e, E)
        x += added
        store_rows(S, x, o_row, rows, E, BE)
    mean = tl.sum(x, 1) / E
    x = tl.where((o_e < E)[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / E + eps)
    weight = tl.load(WEIGHT + o_e, mask=o_e < E, other=0.0)
    bias = tl.load(BIAS + o_e, mask=o_e < E, other=0.0)
    store_rows(Y, x * rstd[:, None] * weight[None, :] + bias[None, :], o_row, rows, E, BE)
    tl.store(MOMENTS + 2 * o_row, mean, mask=o_row < rows)
    tl.store(MOMENTS + 2 * o_row + 1, rstd, mask=o_row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    DY, DS, X, SEED, WEIGHT, MOMENTS, DX, DF, PARTS, rows, threshold, inverse_keep, E: tl.constexpr,
    ADD: tl.constexpr, DROPOUT: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """DX, with what the sum itself received in DS; DF; PARTS (programs,2,E) takes each program's share of dweight and
    dbias.
    """
    i, o_e = tl.program_id(0), tl.arange(0, BE)
    weight = tl.load(WEIGHT + o_e, mask=o_e < E, other=0.0)
    d_weight, d_bias = tl.zeros([BE], tl.float32), tl.zeros([BE], tl.float32)
    for start in range(i * ROWS, rows, tl.num_programs(0) * ROWS):
        o_row = start + tl.arange(0, ROWS)
        x, dy = load_rows(X, o_row, rows, E, BE), load_rows(DY, o_row, rows, E, BE)
        mean = tl.load(MOMENTS + 2 * o_row, mask=o_row < rows, other=0.0)
        rstd = tl.load(MOMENTS + 2 * o_row + 1, mask=o_row < rows, other=0.0)
        n = tl.where((o_e < E)[None, :], (x - mean[:, None]) * rstd[:, None], 0.0)
        u = dy * weight[None, :]
        dx = (u - (tl.sum(u, 1) / E)[:, None] - n * (tl.sum(u * n, 1) / E)[:, None]) * rstd[:, None]
        if DS is not None:
            dx += load_rows(DS, o_row, rows, E, BE)
        store_rows(DX, dx, o_row, rows, E, BE)
        if ADD:
            if DROPOUT:
                dx = dropped(dx, SEED, threshold, inverse_keep, o_row, o_e, E)
            store_rows(DF, dx, o_row, rows, E, BE)
        d_weight += tl.sum(dy * n, 0)
        d_bias += tl.sum(dy, 0)
    tl.store(PARTS + 2 * i * E + o_e, d_weight, mask=o_e < E)
    tl.store(PARTS + (2 * i + 1) * E + o_e, d_bias, mask=o_e < E)


def sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"E": width, "BE": block, "ROWS": max(1, TILE // block)}


def normalise(
    x: Tensor, added: Tensor | None, seed: Tensor | None, weight: Tensor, bias: Tensor, total: Tensor | None, y: Tensor,
    moments: Tensor, eps: float, dropout_p: float,
) -> None:  # fmt: skip
    shape = sizes(x.shape[-1])
    if y.numel():
        launch(
            forward_kernel, (triton.cdiv(len(moments), shape["ROWS"]),), x, added, seed, weight, bias, total, y,
            moments, len(moments), eps, *dropout_numbers(dropout_p), **shape, ADD=added is not None,
            DROPOUT=seed is not None, num_warps=4,
        )  # fmt: skip


def gradients(
    grad: Tensor, of_total: Tensor | None, x: Tensor, seed: Tensor | None, weight: Tensor, moments: Tensor,
    grad_x: Tensor, grad_added: Tensor | None, dropout_p: float,
) -> Tensor:  # fmt: skip
    """Those of weight and bias (2,E); `grad_x` and `grad_added` are filled."""
    shape = sizes(x.shape[-1])
    programs = min(PROGRAMS, triton.cdiv(len(moments), shape["ROWS"]))
    parts = moments.new_empty(programs, 2, x.shape[-1])
    if programs:
        launch(
            backward_kernel, (programs,), grad.contiguous(), of_total, x, seed, weight, moments, grad_x, grad_added,
            parts, len(moments), *dropout_numbers(dropout_p), **shape, ADD=grad_added is not None,
            DROPOUT=seed is not None, num_warps=4,
        )  # fmt: skip
    return column_sums(parts.flatten(1)).view(2, -1)


@operator("layer_norm")
@repeated
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of x (..., E): y, in `dtype`, and mean and rstd of each row (T,2)."""
    y, moments = layer_norm_results(x, weight, bias, eps, dtype)
    normalise(x.contiguous(), None, None, weight, bias, None, y, moments, eps, 0.0)
    return y, moments


@layer_norm.register_fake
def layer_norm_results(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, 2, dtype=torch.float32)


@operator("layer_norm_backward")
@repeated
def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x; those of weight and bias (2,E)."""
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    return grad_x, gradients(grad, None, x, None, weight, moments, grad_x, None, 0.0)


@layer_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), moments.new_empty(2, x.shape[-1])


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def layer_norm_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grad_x, (grad_weight, grad_bias) = layer_norm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, grad_bias, None, None


layer_norm.register_autograd(layer_norm_autograd, setup_context=keep_for_backward)


@operator("add_norm")
@repeated
def add_norm(
    x: Tensor, added: Tensor, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dropout_p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """s = x + dropout(added), of x (..., E) in float32; its LayerNorm, in `dtype`; and mean and rstd (T,2)."""
    total, y, moments = add_norm_results(x, added, seed, weight, bias, eps, dropout_p, dtype)
    normalise(x.contiguous(), added.contiguous(), seed, weight, bias, total, y, moments, eps, dropout_p)
    return total, y, moments


@add_norm.register_fake
def add_norm_results(
    x: Tensor, added: Tensor, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dropout_p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), *layer_norm_results(x, weight, bias, eps, dtype)


@operator("add_norm_backward")
@repeated
def add_norm_backward(
    grad: Tensor, of_total: Tensor | None, total: Tensor, seed: Tensor | None, weight: Tensor, moments: Tensor,
    dropout_p: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and, in `dtype`, of what was added; those of weight and bias (2,E)."""
    grad_x, grad_added = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    of_total = None if of_total is None else of_total.contiguous()
    rest = gradients(grad, of_total, total, seed, weight, moments, grad_x, grad_added, dropout_p)
    return grad_x, grad_added, rest


@add_norm_backward.register_fake
def _(
    grad: Tensor, of_total: Tensor | None, total: Tensor, seed: Tensor | None, weight: Tensor, moments: Tensor,
    dropout_p: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(total), torch.empty_like(total, dtype=dtype), moments.new_empty(2, total.shape[-1])


def keep_the_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, added, seed, weight, _, _, ctx.dropout_p, ctx.norm_dtype = inputs
    total, _, moments = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, seed, weight, moments)
    ctx.dtype = added.dtype
    ctx.mark_non_differentiable(moments)


def add_norm_autograd(ctx: Any, of_total: Tensor | None, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    total, seed, weight, moments = ctx.saved_tensors
    if grad is None:  # nobody looked at the norm
        grad = torch.zeros_like(total, dtype=ctx.norm_dtype)
    grad_x, grad_added, rest = add_norm_backward(
        grad, of_total, total, seed, weight, moments, ctx.dropout_p, ctx.dtype
    )  # fmt: skip
    return grad_x, grad_added, None, rest[0], rest[1], None, None, None


add_norm.register_autograd(add_norm_autograd, setup_context=keep_the_sum)
