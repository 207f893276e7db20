"""-log softmax(W x + b)[target] of many rows, forward and backward, without storing their T x V logits.

    loss_t = lse_t - s_t[target],  s_t = W x_t + b,  lse_t = log sum_v exp(s_tv)
    ds_tv = g_t (exp(s_tv - lse_t) - [v = target])
    dx_t = sum_v ds_tv W_v     dW_v = sum_t ds_tv x_t     db_v = sum_t ds_tv

A program has a block of rows and loops over a split of the tokens, or backward a block of tokens and loops over the
rows; the results of the splits are added in a fixed order. Each of the two backward kernels computes the logits again.
Only the rows from span[0] to span[1] take part. The kernels read these two numbers on the device, so that a CUDA graph
can capture the clusters of an adaptive softmax, whose sizes differ from batch to batch. Logarithms in the kernels are
to the base 2.

T rows, V tokens, E width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.dispatch import block_width
from mgk.ops.operator import operator
from mgk.ops.triton.host import dot_precision
from mgk.ops.triton.launch import launch
from mgk.ops.triton.loads import constants
from mgk.ops.triton.primitives import LOG2E, NEVER, finite, load_tile, store_tile

SPLIT, SPLITS = 4096, 8  # tokens of a split at least, and splits at most
COUNTS = ("num_rows", "num_tokens", "tiles", "splits")
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_range(SPAN, num_rows):
    """Return the first row that takes part and one past the last."""
    first, end = 0, num_rows
    if SPAN is not None:
        first, end = tl.load(SPAN), tl.load(SPAN + 1)
    return first, end


@triton.jit
def load_tokens(W, BIAS, start, num_tokens, S: tl.constexpr):
    """Load a tile of W [BN, BE] and its biases, -inf beyond the last."""
    o_n = start + tl.arange(0, S.BN)
    bias = tl.load(BIAS + o_n, mask=o_n < num_tokens, other=NEVER).to(tl.float32)
    return load_tile(W, start, num_tokens, S.E, S.BN, S.E, S.BE, True), bias * LOG2E


@triton.jit
def token_logits(b_x, target, W, BIAS, first, num_tokens, S: tl.constexpr):
    """Return a tile of W [BN, BE], the logits of rows b_x for its tokens [BM, BN], and which of these are targets."""
    b_w, bias = load_tokens(W, BIAS, first, num_tokens, S)
    s = tl.dot(b_x, tl.trans(b_w), input_precision=S.PRECISION) * LOG2E + bias[None, :]
    return b_w, s, (first + tl.arange(0, S.BN))[None, :] == target[:, None]


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(X, W, BIAS, TARGET, SPAN, PARTS, num_rows, num_tokens, tiles, S: tl.constexpr):
    """Store the largest logit, the sum of exponentials and the target's logit of each split in PARTS (splits,3,T)."""
    start, end = row_range(SPAN, num_rows)
    start, i_split = start + tl.program_id(0) * S.BM, tl.program_id(1)
    if start < end:
        o_m = start + tl.arange(0, S.BM)
        real = o_m < end
        b_x = load_tile(X, start, end, S.E, S.BM, S.E, S.BE, True)  # [BM, BE]
        target = tl.load(TARGET + o_m, mask=real, other=-1).to(tl.int32)
        m, l = tl.full([S.BM], NEVER, tl.float32), tl.zeros([S.BM], tl.float32)
        picked = tl.zeros([S.BM], tl.float32)
        for first in range(i_split * tiles * S.BN, tl.minimum((i_split + 1) * tiles * S.BN, num_tokens), S.BN):
            _, s, wanted = token_logits(b_x, target, W, BIAS, first, num_tokens, S)
            m_new = tl.maximum(m, tl.max(s, 1))
            safe = finite(m_new)
            l = l * tl.exp2(m - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
            picked += tl.sum(tl.where(wanted, s, 0.0), 1)
            m = m_new
        p_part = PARTS + tl.cast(i_split, tl.int64) * 3 * num_rows + o_m
        tl.store(p_part, m, mask=real)
        tl.store(p_part + num_rows, l, mask=real)
        tl.store(p_part + 2 * num_rows, picked, mask=real)


@triton.jit(do_not_specialize=COUNTS)
def loss_kernel(PARTS, TARGET, SPAN, LOSS, LSE, num_rows, splits, BM: tl.constexpr):
    """Store LOSS and LSE (T,), to the base 2, from the parts of all splits."""
    start, end = row_range(SPAN, num_rows)
    start += tl.program_id(0) * BM
    if start < end:
        o_m = start + tl.arange(0, BM)
        real = o_m < end
        m, l, picked = tl.full([BM], NEVER, tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
        for i_split in range(0, splits):
            p_part = PARTS + tl.cast(i_split, tl.int64) * 3 * num_rows + o_m
            largest = tl.load(p_part, mask=real, other=NEVER)
            m_new = tl.maximum(m, largest)
            safe = finite(m_new)
            share = tl.load(p_part + num_rows, mask=real, other=0.0) * tl.exp2(largest - safe)
            l, m = l * tl.exp2(m - safe) + share, m_new
            picked += tl.load(p_part + 2 * num_rows, mask=real, other=0.0)
        lse = m + tl.log2(tl.where(real, l, 1.0))
        target = tl.load(TARGET + o_m, mask=real, other=-1)
        tl.store(LOSS + o_m, tl.where(target < 0, 0.0, (lse - picked) * LN2), mask=real)
        tl.store(LSE + o_m, lse, mask=real)


@triton.jit
def load_rows(X, TARGET, GRAD, LSE, start, end, S: tl.constexpr):
    """Load a tile of X [BM, BE], the gradients of its losses, zero without a target, the targets and lse [BM]."""
    o_m = start + tl.arange(0, S.BM)
    real = o_m < end
    target = tl.load(TARGET + o_m, mask=real, other=-1).to(tl.int32)
    grad = tl.where(target < 0, 0.0, tl.load(GRAD + o_m, mask=real, other=0.0))
    lse = tl.load(LSE + o_m, mask=real, other=float("inf"))
    return load_tile(X, start, end, S.E, S.BM, S.E, S.BE, True), grad, target, lse


@triton.jit(do_not_specialize=COUNTS)
def row_gradient_kernel(X, W, BIAS, TARGET, SPAN, GRAD, LSE, PARTS, num_rows, num_tokens, tiles, S: tl.constexpr):
    """Store dx of each split of the tokens in PARTS (splits,T,E)."""
    start, end = row_range(SPAN, num_rows)
    start, i_split = start + tl.program_id(0) * S.BM, tl.program_id(1)
    if start < end:
        b_x, grad, target, lse = load_rows(X, TARGET, GRAD, LSE, start, end, S)
        b_dx = tl.zeros([S.BM, S.BE], tl.float32)
        for first in range(i_split * tiles * S.BN, tl.minimum((i_split + 1) * tiles * S.BN, num_tokens), S.BN):
            b_w, s, wanted = token_logits(b_x, target, W, BIAS, first, num_tokens, S)
            ds = (tl.exp2(s - lse[:, None]) - tl.where(wanted, 1.0, 0.0)) * grad[:, None]
            b_dx = tl.dot(ds.to(b_w.dtype), b_w, b_dx, input_precision=S.PRECISION)
        store_tile(PARTS + tl.cast(i_split, tl.int64) * num_rows * S.E, b_dx, start, end, S.E, S.BM, S.E, S.BE)


@triton.jit(do_not_specialize=COUNTS)
def join_kernel(PARTS, SPAN, DX, num_rows, splits, S: tl.constexpr):
    """Add the splits PARTS (splits,T,E) to DX (T,E)."""
    start, end = row_range(SPAN, num_rows)
    start += tl.program_id(0) * S.BM
    if start < end:
        b_dx = tl.zeros([S.BM, S.BE], tl.float32)
        for i_split in range(0, splits):
            p_part = PARTS + tl.cast(i_split, tl.int64) * num_rows * S.E
            b_dx += load_tile(p_part, start, end, S.E, S.BM, S.E, S.BE, True)
        store_tile(DX, b_dx, start, end, S.E, S.BM, S.E, S.BE)


@triton.jit(do_not_specialize=COUNTS)
def token_gradient_kernel(X, W, BIAS, TARGET, SPAN, GRAD, LSE, DW, DBIAS, num_rows, num_tokens, S: tl.constexpr):
    """Store the gradients of a block of tokens in DW (V,E) and DBIAS (V,)."""
    begin, end = row_range(SPAN, num_rows)
    first = tl.program_id(0) * S.BN
    o_n = first + tl.arange(0, S.BN)
    b_w, bias = load_tokens(W, BIAS, first, num_tokens, S)
    b_dw, dbias = tl.zeros([S.BN, S.BE], tl.float32), tl.zeros([S.BN], tl.float32)
    for start in range(begin, end, S.BM):
        b_x, grad, target, lse = load_rows(X, TARGET, GRAD, LSE, start, end, S)
        s = tl.dot(b_w, tl.trans(b_x), input_precision=S.PRECISION) * LOG2E + bias[:, None]  # [BN, BM]
        wanted = o_n[:, None] == target[None, :]
        ds = (tl.exp2(s - lse[None, :]) - tl.where(wanted, 1.0, 0.0)) * grad[None, :]
        b_dw = tl.dot(ds.to(b_x.dtype), b_x, b_dw, input_precision=S.PRECISION)
        dbias += tl.sum(ds, 1)
    store_tile(DW, b_dw, first, num_tokens, S.E, S.BN, S.E, S.BE)
    tl.store(DBIAS + o_n, dbias, mask=o_n < num_tokens)


def losses_of_rows(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, span: Tensor | None = None) -> Tensor:
    """Return the losses (T,), in float32, of x (T,E), weight (V,E) in the dtype of x, bias (V,) and target (T,), int64.

    The loss is zero for rows with a negative target and for rows outside of span (2,), int32.
    """
    losses: Tensor = cross_entropy_forward(x.contiguous(), weight.contiguous(), bias, target.contiguous(), span)[0]
    return losses


def settings(kernel: str, x: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Return the rows and tokens of a tile, as many as fit into the registers, and what a kernel is compiled for."""
    block, warps, stages = block_width(x.shape[1]), 8, 1
    rows = tokens = 32 if block <= 128 else 16  # in float32, of which a product needs twice the registers
    if x.dtype != torch.float32:
        wide, warps, stages = block > 128, 4, 3 if kernel == "forward" and not torch.version.hip else 2
        rows = 32 if wide and kernel == "tokens" else 64
        tokens = (128 if kernel == "forward" else 64) // (2 if wide and kernel != "tokens" else 1)
    sizes = constants(E=x.shape[1], BE=block, PRECISION=dot_precision(x), BM=rows, BN=tokens)
    return rows, tokens, {"S": sizes, "num_warps": warps, "num_stages": stages}


def split(num_tokens: int, block: int) -> tuple[int, int]:
    """Return the number of splits of the tokens, none of them empty, and of tiles of `block` tokens in a split."""
    blocks = triton.cdiv(num_tokens, block)
    tiles = triton.cdiv(blocks, max(1, min(SPLITS, triton.cdiv(num_tokens, SPLIT))))
    return triton.cdiv(blocks, tiles), tiles


@operator("cross_entropy")
def cross_entropy_forward(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, span: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the losses and the logarithms to the base 2 of the sums of exponentials (T,)."""
    rows, tokens = len(x), len(weight)
    losses, lse = cross_entropy_results(x)
    if rows:
        losses.zero_()  # of rows outside of the span
        tile_rows, tile_tokens, how = settings("forward", x)
        splits, tiles = split(tokens, tile_tokens)
        parts, grid = lse.new_empty(splits, 3, rows), (triton.cdiv(rows, tile_rows), splits)
        launch(forward_kernel, grid, x, weight, bias, target, span, parts, rows, tokens, tiles, **how)
        launch(loss_kernel, (triton.cdiv(rows, 128),), parts, target, span, losses, lse, rows, splits, BM=128)
    return losses, lse


@cross_entropy_forward.register_fake
def cross_entropy_results(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


@operator("cross_entropy_backward")
def cross_entropy_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, span: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    rows, tokens, known = len(x), len(weight), (x, weight, bias, target, span)
    grad_x, grad_weight, grad_bias = grads = cross_entropy_gradients(grad, *known)
    grad, grad_x = grad.contiguous(), grad_x.zero_()  # of rows outside of the span
    tile_rows, tile_tokens, how = settings("rows", x)
    splits, tiles = split(tokens, tile_tokens)
    parts = grad_x if splits == 1 else x.new_empty(splits, *x.shape, dtype=torch.float32)
    grid = triton.cdiv(rows, tile_rows), splits
    launch(row_gradient_kernel, grid, *known, grad, lse, parts, rows, tokens, tiles, **how)
    if splits > 1:
        launch(join_kernel, grid[:1], parts, span, grad_x, rows, splits, S=how["S"])
    _, tile_tokens, how = settings("tokens", x)
    grid = (triton.cdiv(tokens, tile_tokens),)
    launch(token_gradient_kernel, grid, *known, grad, lse, grad_weight, grad_bias, rows, tokens, **how)
    return grads


@cross_entropy_backward.register_fake
def cross_entropy_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def cross_entropy_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    if not grad.numel():
        return *(torch.zeros_like(each) for each in ctx.saved_tensors[:3]), None, None
    return *cross_entropy_backward(grad, *ctx.saved_tensors), None, None


cross_entropy_forward.register_autograd(cross_entropy_autograd, setup_context=keep_for_backward)


@register_flop_formula(torch.ops.mgk.cross_entropy)
def _(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[0] * x[1]


@register_flop_formula(torch.ops.mgk.cross_entropy_backward)
def _(grad: Any, x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 8 * x[0] * weight[0] * x[1]
