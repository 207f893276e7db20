"""The sum of -log softmax(W h + b)[target] over many rows, without all T x V logits in memory.

Many rows are taken in CHUNKS equal chunks. The gradient of a chunk is computed together with its loss, while its
logits are in memory:

    d loss / d logit[t,v] = softmax(logits[t])[v] - [v = target[t]]

So there are three matrix products in all, as with full logits. (Recomputing logits in backward would be a fourth.) The
code is plain PyTorch: torch.compile fuses what is between the products of a chunk. The number of chunks is fixed, so
that it compiles once for any number of rows.

T rows, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from mgk.ops.common import autocasts, without_autocast

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNKS = 8
FEW_BYTES = 1 << 28  # logits that need no chunks


def linear_cross_entropy(
    hidden: Float[Tensor, "t e"],
    weight: Float[Tensor, "v e"],
    bias: Float[Tensor, " v"] | None,
    target: Int[Tensor, " t"],
    ignore: int,
) -> Float[Tensor, ""]:
    """Return the summed loss, in float32, of the rows whose target is not `ignore`."""
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts(hidden) else hidden.dtype
    if hidden.shape[0] * weight.shape[0] * dtype.itemsize <= FEW_BYTES:
        return cross_entropy(linear(hidden, weight, bias).float(), target, ignore_index=ignore, reduction="sum")
    return ChunkedCrossEntropy.apply(hidden, weight, bias, target, ignore, dtype)  # type: ignore[no-any-return, no-untyped-call]


def in_chunks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, -(-x.shape[0] // CHUNKS))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Products are computed in `dtype`; the gradients of weight and bias are summed over chunks in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore: int, dtype: torch.dtype
    ) -> Tensor:
        with without_autocast(hidden):
            x, matrix, offset = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            total, parts = torch.zeros((), device=hidden.device), []
            grad_weight = grad_bias = None
            for chunk, wanted in zip(in_chunks(x), in_chunks(target), strict=True):
                loss, grad = loss_and_gradient(linear(chunk, matrix, offset), wanted, ignore)
                total = total + loss
                parts.append(grad @ matrix)
                if ctx.needs_input_grad[1]:
                    product = (grad.T @ chunk).to(torch.promote_types(dtype, torch.float32))
                    grad_weight = product if grad_weight is None else grad_weight + product
                if ctx.needs_input_grad[2]:
                    column = grad.sum(0, dtype=torch.float32)
                    grad_bias = column if grad_bias is None else grad_bias + column
            ctx.save_for_backward(torch.cat(parts), grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if x is None else (x * grad).to(dtype) for x, dtype in saved), None, None, None


def loss_and_gradient(
    logits: Float[Tensor, "t v"], target: Int[Tensor, " t"], ignore: int
) -> tuple[Float[Tensor, ""], Float[Tensor, "t v"]]:
    """Return the summed loss, and its gradient with respect to the logits in their dtype."""
    real = (target != ignore)[:, None]
    index = target[:, None].clamp(min=0)
    log_probability = torch.log_softmax(logits.float(), -1)
    loss = -log_probability.gather(1, index).masked_fill(~real, 0).sum()
    wanted = torch.arange(logits.shape[1], device=logits.device) == index
    gradient = ((log_probability.exp() - wanted.float()) * real).to(logits.dtype)
    return loss, gradient
