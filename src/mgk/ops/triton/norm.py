"""LayerNorm of many narrow rows, in float32: y = n weight + bias, n = (x - mean) rstd.

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
from mgk.ops.triton.launch import launch
from mgk.ops.triton.rows import column_sums, load_rows, store_rows

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 4096  # numbers


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    X, WEIGHT, BIAS, Y, MOMENTS, rows, eps, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """MOMENTS (T,2) takes mean and rstd."""
    o_row, o_e = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    x = load_rows(X, o_row, rows, E, BE)
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
    DY, X, WEIGHT, MOMENTS, DX, PARTS, rows, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """DX; PARTS (programs,2,E) takes each program's share of dweight and dbias."""
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
        dx = u - (tl.sum(u, 1) / E)[:, None] - n * (tl.sum(u * n, 1) / E)[:, None]
        store_rows(DX, dx * rstd[:, None], o_row, rows, E, BE)
        d_weight += tl.sum(dy * n, 0)
        d_bias += tl.sum(dy, 0)
    tl.store(PARTS + 2 * i * E + o_e, d_weight, mask=o_e < E)
    tl.store(PARTS + (2 * i + 1) * E + o_e, d_bias, mask=o_e < E)


def sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"E": width, "BE": block, "ROWS": max(1, TILE // block)}


@operator("layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of x (..., E): y, in `dtype`, and mean and rstd of each row (T,2)."""
    x = x.contiguous()
    (y, moments), shape = layer_norm_results(x, weight, bias, eps, dtype), sizes(x.shape[-1])
    if y.numel():
        grid = (triton.cdiv(len(moments), shape["ROWS"]),)
        launch(forward_kernel, grid, x, weight, bias, y, moments, len(moments), eps, **shape, num_warps=4)
    return y, moments


@layer_norm.register_fake
def layer_norm_results(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, 2, dtype=torch.float32)


@operator("layer_norm_backward")
def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x; those of weight and bias (2,E)."""
    grad, x, shape = grad.contiguous(), x.contiguous(), sizes(x.shape[-1])
    programs = min(PROGRAMS, triton.cdiv(len(moments), shape["ROWS"]))
    grad_x, parts = torch.empty_like(x), moments.new_empty(programs, 2, x.shape[-1])
    if programs:
        launch(
            backward_kernel, (programs,), grad, x, weight, moments, grad_x, parts, len(moments), **shape, num_warps=4
        )
    return grad_x, column_sums(parts.flatten(1)).view(2, -1)


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
