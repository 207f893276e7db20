"""Many rows: the sums of their columns, products with a bias, which get such sums backward, with an activation behind
them, and zeros.

PyTorch takes 45 microseconds on an H200 to sum the columns of 45,056 rows of 128 numbers in bfloat16, which the memory
would deliver in 3. Here it is 8: many programs leave the sums over their rows, and a few add them up, in a fixed order.

T rows, E width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from mgk.ops.common import MANY_ROWS, NARROW
from mgk.ops.operator import operator
from mgk.ops.triton.host import dropout_numbers
from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import hash32
from mgk.ops.triton.repeat import repeated

PROGRAMS = 264  # two for each multiprocessor of an H200
FEW = 528  # rows; no fewer than PROGRAMS
TILE = 4096  # numbers
WIDTH = 256  # of the columns that one program sums


@triton.jit
def load_rows(p, o_row, rows, E: tl.constexpr, BE: tl.constexpr, first=0):
    """[ROWS, BE], zero beyond; of columns from `first` on."""
    o_e = first + tl.arange(0, BE)
    real = (o_row < rows)[:, None] & (o_e < E)[None, :]
    return tl.load(p + o_row.to(tl.int64)[:, None] * E + o_e[None, :], mask=real, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p, block, o_row, rows, E: tl.constexpr, BE: tl.constexpr, first=0):
    o_e = first + tl.arange(0, BE)
    real = (o_row < rows)[:, None] & (o_e < E)[None, :]
    tl.store(p + o_row.to(tl.int64)[:, None] * E + o_e[None, :], block.to(p.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def sums_kernel(X, PARTS, rows, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr):
    """PARTS (programs,E) takes the sums of each program's rows."""
    i, first = tl.program_id(0), tl.program_id(1) * BE
    sums = tl.zeros([ROWS, BE], tl.float32)
    for start in range(i * ROWS, rows, tl.num_programs(0) * ROWS):
        sums += load_rows(X, start + tl.arange(0, ROWS), rows, E, BE, first)
    o_e = first + tl.arange(0, BE)
    tl.store(PARTS + i * E + o_e, tl.sum(sums, 0), mask=o_e < E)


def column_sums(x: Tensor) -> Tensor:
    """Of x (T,E), in float32."""
    (rows, width), x = x.shape, x.contiguous()
    few = rows <= FEW  # as a first launch leaves: a program for every few columns
    block = min(16 if few else WIDTH, triton.next_power_of_2(width))
    tile = max(1, TILE // block)
    programs = 1 if few else min(PROGRAMS, triton.cdiv(rows, tile))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    grid = (programs, triton.cdiv(width, block))
    launch(sums_kernel, grid, x, parts, rows, E=width, BE=block, ROWS=tile, num_warps=4)
    return parts[0] if few else column_sums(parts)


def bias_gradient(rows: Tensor) -> Tensor:
    """Sums of columns in float32, of rows (T,E) by whatever is faster."""
    many = rows.shape[0] >= MANY_ROWS and rows.shape[1] <= NARROW
    return column_sums(rows) if many else rows.sum(0, dtype=torch.float32)


@operator("linear_rows")
def linear_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x weight^T + bias, of x (...,E) and weight in one type; the bias may be wider, and so is its gradient."""
    return linear(x, weight, bias.to(x.dtype))


@linear_rows.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@operator("linear_rows_backward")
@repeated
def linear_rows_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and, in float32, of the bias."""
    rows = grad.reshape(-1, grad.shape[-1])
    return grad @ weight, rows.T @ x.reshape(-1, x.shape[-1]), column_sums(rows)


@linear_rows_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad.new_empty(len(weight), dtype=torch.float32)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = bias.dtype


def linear_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = linear_rows_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, grad_bias.to(ctx.bias_dtype)


linear_rows.register_autograd(linear_autograd, setup_context=keep_for_backward)


@triton.jit(do_not_specialize=["rows"])
def clear_kernel(X, FIRST, rows, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr):
    first, start = tl.load(FIRST), tl.program_id(0) * ROWS
    if start + ROWS > first:
        o_row, o_e = start + tl.arange(0, ROWS), tl.arange(0, BE)
        spare = ((o_row >= first) & (o_row < rows))[:, None] & (o_e < E)[None, :]
        zeros = tl.zeros([ROWS, BE], X.dtype.element_ty)
        tl.store(X + o_row.to(tl.int64)[:, None] * E + o_e[None, :], zeros, mask=spare)


def clear_rows(x: Tensor, first: Tensor) -> None:
    """Zeros in the rows of x (T,...) from `first` (1,) on, where nothing is written yet: autograd does not notice."""
    width = x[:1].numel()
    block = triton.next_power_of_2(max(1, width))
    rows = max(1, TILE // block)
    if x.numel():
        launch(clear_kernel, (triton.cdiv(len(x), rows),), x, first, len(x), E=width, BE=block, ROWS=rows, num_warps=4)


@triton.jit
def dropped(block, p_seed, threshold, inverse_keep, o_row, o_e, E: tl.constexpr):
    """What dropout leaves of a block, scaled: a function of the seed and the place; `threshold` is p * 2^32."""
    seed = tl.load(p_seed)
    salt = hash32(hash32((seed >> 32).to(tl.uint32)) ^ seed.to(tl.uint32))
    place = (o_row[:, None] * E + o_e[None, :]).to(tl.uint32)
    return tl.where(hash32(place * 0x9E3779B1 + salt) >= threshold.to(tl.uint32), block * inverse_keep, 0.0)


@triton.jit(do_not_specialize=["rows"])
def relu_kernel(
    X, SEED, rows, threshold, inverse_keep, E: tl.constexpr, DROPOUT: tl.constexpr, BE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """max(x, 0) with dropout, in place."""
    i, first = tl.program_id(0), tl.program_id(1) * BE
    for start in range(i * ROWS, rows, tl.num_programs(0) * ROWS):
        o_row, o_e = start + tl.arange(0, ROWS), first + tl.arange(0, BE)
        block = load_rows(X, o_row, rows, E, BE, first)
        block = tl.where(block < 0, 0.0, block)  # NaN stays what it is
        if DROPOUT:
            block = dropped(block, SEED, threshold, inverse_keep, o_row, o_e, E)
        store_rows(X, block, o_row, rows, E, BE, first)


@triton.jit(do_not_specialize=["rows"])
def relu_gradient_kernel(
    GRAD, Y, RESULT, PARTS, rows, inverse_keep, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr
):
    """What came out tells what was kept. PARTS (programs,E) takes the sums of each program's rows."""
    i, first = tl.program_id(0), tl.program_id(1) * BE
    sums = tl.zeros([ROWS, BE], tl.float32)
    for start in range(i * ROWS, rows, tl.num_programs(0) * ROWS):
        o_row = start + tl.arange(0, ROWS)
        y, block = load_rows(Y, o_row, rows, E, BE, first), load_rows(GRAD, o_row, rows, E, BE, first)
        block = tl.where(y <= 0, 0.0, block * inverse_keep)
        sums += block
        store_rows(RESULT, block, o_row, rows, E, BE, first)
    o_e = first + tl.arange(0, BE)
    tl.store(PARTS + i * E + o_e, tl.sum(sums, 0), mask=o_e < E)


def blocks_of(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs for rows and for columns of x (T,E), and the tiles they walk over."""
    rows, width = x.shape
    block = min(WIDTH, triton.next_power_of_2(width))
    tile = max(1, TILE // block)
    return (min(PROGRAMS, triton.cdiv(rows, tile)), triton.cdiv(width, block)), {"E": width, "BE": block, "ROWS": tile}


@operator("linear_relu")
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    """max(x weight^T + bias, 0) with dropout, of x (...,E) and weight in one type; `seed` is there if it drops any."""
    result = linear(x, weight, bias.to(x.dtype))
    flat = result.view(-1, len(weight))
    if flat.numel():
        grid, tiles = blocks_of(flat)
        threshold, inverse_keep = dropout_numbers(dropout_p)
        launch(
            relu_kernel, grid, flat, seed, len(flat), threshold, inverse_keep, **tiles, DROPOUT=seed is not None,
            num_warps=4,
        )  # fmt: skip
    return result


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@operator("linear_relu_backward")
@repeated
def linear_relu_backward(
    grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and, in float32, of the bias."""
    flat, inputs = output.view(-1, len(weight)), x.reshape(-1, x.shape[-1])
    if not flat.numel():
        return torch.zeros_like(x), torch.zeros_like(weight), flat.new_zeros(len(weight), dtype=torch.float32)
    grid, tiles = blocks_of(flat)
    inner, parts = torch.empty_like(flat), flat.new_empty(grid[0], len(weight), dtype=torch.float32)
    launch(
        relu_gradient_kernel, grid, grad.reshape(flat.shape).contiguous(), flat, inner, parts, len(flat),
        dropout_numbers(dropout_p)[1], **tiles, num_warps=4,
    )  # fmt: skip
    return (inner @ weight).view(x.shape), inner.T @ inputs, column_sums(parts)


@linear_relu_backward.register_fake
def _(grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad.new_empty(len(weight), dtype=torch.float32)


def keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, ctx.dropout_p = inputs
    ctx.save_for_backward(output, x, weight)
    ctx.bias_dtype = bias.dtype


def relu_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = linear_relu_backward(grad, *ctx.saved_tensors, ctx.dropout_p)
    return grad_x, grad_weight, grad_bias.to(ctx.bias_dtype), None, None


linear_relu.register_autograd(relu_autograd, setup_context=keep_output)
