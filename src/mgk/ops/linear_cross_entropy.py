"""The sum of -log softmax(W h + b)[target] over many rows, without all T x V logits in memory.

Rows are taken in chunks. The gradient of a chunk is computed together with its loss, while its logits are in memory:

    d loss / d logit[t,v] = softmax(logits[t])[v] - [v = target[t]]

So there are three matrix products in all, as with full logits. (Recomputing logits in backward would be a fourth.) All
chunks are one operator of PyTorch: torch.compile would reorder them so that the logits of all are in memory at a time.

T rows, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from mgk.ops.api import HAS_TRITON
from mgk.ops.common import autocasts
from mgk.ops.operator import count_flops, operator

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNKS = 4
FEW_BYTES = 1 << 28  # logits that need no chunks
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # the loss, and the gradients of hidden, weight and bias


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
        return _full(hidden, weight, bias, target, ignore)
    if not torch.is_grad_enabled():
        parts = zip(_chunks(hidden), _chunks(target), strict=True)
        return torch.stack([_full(x, weight, bias, wanted, ignore) for x, wanted in parts]).sum()
    count_flops(torch.ops.mgk.linear_cross_entropy, flops)
    frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    result: Tensor = chunked_cross_entropy(hidden.to(dtype), weight, bias, target, ignore, frozen)[0]
    return result


def _full(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore: int) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias).float(), target, ignore_index=ignore, reduction="sum")


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, -(-x.shape[0] // CHUNKS)))


@operator("linear_cross_entropy")
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore: int, frozen: bool
) -> Results:
    """Return the loss and the gradients of hidden, weight and bias; those of a frozen weight or no bias are (0,).

    Products are computed in the dtype of `hidden`; sums over chunks are in float32.
    """
    results: Results = empty_results(hidden, weight, bias, target, ignore, frozen)
    total, grad_hidden, grad_weight, grad_bias = results
    matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    for each in (total, grad_weight, grad_bias):
        each.zero_()
    for x, wanted, grad_x in zip(*map(_chunks, (hidden, target, grad_hidden)), strict=True):
        logits = linear(x, matrix, offset)
        total += replace_by_gradient(logits, wanted, ignore)
        torch.mm(logits, matrix, out=grad_x)
        if grad_weight.numel():
            grad_weight += logits.T @ x
        if grad_bias.numel():
            grad_bias += logits.sum(0, dtype=grad_bias.dtype)
    return results


@chunked_cross_entropy.register_fake
def empty_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore: int, frozen: bool
) -> Results:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    grad_weight = hidden.new_empty((0,) if frozen else weight.shape, dtype=dtype)
    grad_bias = hidden.new_empty((0,) if frozen or bias is None else bias.shape, dtype=dtype)
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden), grad_weight, grad_bias


def replace_by_gradient(logits: Float[Tensor, "t v"], target: Int[Tensor, " t"], ignore: int) -> Float[Tensor, ""]:
    """Return the summed loss, and write its gradient with respect to the logits into `logits`."""
    if logits.is_cuda and HAS_TRITON and logits.dtype != torch.float64:
        from mgk.ops.triton.row_loss import losses_and_gradients  # imported only where it is used

        return losses_and_gradients(logits, target, ignore).sum()
    real = target != ignore
    index = target.clamp(min=0)[:, None]
    log_probability = torch.log_softmax(logits.float(), -1)
    loss = -log_probability.gather(1, index)[real].sum()
    gradient = log_probability.exp_().scatter_add_(1, index, log_probability.new_full((1, 1), -1.0).expand_as(index))
    logits.copy_(gradient.mul_(real[:, None]))
    return loss


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = [None if each is None else each.dtype for each in inputs[:3]]


def scaled_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *((x * grad).to(dtype) if x.numel() else None for x, dtype in saved), None, None, None


chunked_cross_entropy.register_autograd(scaled_gradients, setup_context=keep_for_backward)


def flops(hidden: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 6 * hidden[0] * hidden[1] * weight[0]
