"""Products with a bias that on a GPU gets its gradient from a kernel of our own, for many rows; with ReLU and dropout.

E width of the input, F of the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.ops.api import TRITON_DTYPES, small_kernels
from mgk.ops.common import MANY_ROWS, NARROW, autocasts

if TYPE_CHECKING:
    from jaxtyping import Float

INSIDE = 256  # where an activation is worth a kernel


def through(module: nn.Module, x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b f"]:
    """module(x), of an `nn.Linear` or of what somebody has put in its place."""
    if plain_linear(module):
        return linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    return module(x)  # type: ignore[no-any-return]


def through_activation(
    module: nn.Module, activation: nn.Module, dropout: nn.Module, x: Float[Tensor, "*b e"]
) -> Float[Tensor, "*b f"]:
    """dropout(activation(module(x)))."""
    kinds = zip((module, activation, dropout), (nn.Linear, nn.ReLU, nn.Dropout), strict=True)
    if not all(plain(each, kind) for each, kind in kinds) or not activation_pays(x, module.weight, module.bias):  # type: ignore[arg-type]
        return dropout(activation(through(module, x)))  # type: ignore[no-any-return]
    from mgk.ops.triton.host import draw_seed
    from mgk.ops.triton.rows import linear_relu

    p: float = dropout.p if dropout.training else 0.0  # type: ignore[assignment]
    x, weight = cast(x, module.weight)  # type: ignore[arg-type]
    return linear_relu(x, weight, module.bias, draw_seed(p, x), p)  # type: ignore[no-any-return]


def plain_linear(module: nn.Module) -> bool:
    """Whether calling it is W x + b and nothing else."""
    return plain(module, nn.Linear)


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is PyTorch's: no adapter in its place, no hook that wants to see the call, no method of its own, such
    as accelerate's that fetches the weight first.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and not any(hooks) and "forward" not in module.__dict__


def linear(
    x: Float[Tensor, "*b e"], weight: Float[Tensor, "f e"], bias: Float[Tensor, " f"] | None
) -> Float[Tensor, "*b f"]:
    """`nn.functional.linear`."""
    if bias is None or not pays(x, bias):
        return nn.functional.linear(x, weight, bias)
    from mgk.ops.triton.rows import linear_rows  # not loaded before it is needed

    x, weight = cast(x, weight)
    return linear_rows(x, weight, bias)  # type: ignore[no-any-return]


def cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As autocast casts what is multiplied."""
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    return x, weight


def pays(x: Tensor, bias: Tensor) -> bool:
    """Whether the bias wants a gradient that the kernel sums faster than PyTorch."""
    wanted = torch.is_grad_enabled() and bias.requires_grad and x.dtype in TRITON_DTYPES
    return wanted and len(bias) <= NARROW and x.numel() >= MANY_ROWS * x.shape[-1] and small_kernels(x)


def activation_pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is much between two products, of which backward is then one pass instead of three."""
    wanted = torch.is_grad_enabled() and bias is not None and bias.requires_grad and x.dtype in TRITON_DTYPES
    return wanted and len(weight) >= INSIDE and x.numel() >= MANY_ROWS * x.shape[-1] and small_kernels(x)
