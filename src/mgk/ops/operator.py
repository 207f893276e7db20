"""Register a function as an operator of PyTorch, and call it directly where nothing traces.

`torch.library.custom_op` lets torch.compile, torch.export, FlopCounterMode and other tools see a kernel as one node,
but costs the host more than the launch of the kernel. Where nothing traces, the function is called directly, inside an
`autograd.Function` if it can be differentiated; so too within `torch.func`, whose `grad` accepts no custom operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLAIN = {Tensor, nn.Parameter, NoneType, bool, int, float, str, torch.dtype}
TRANSFORMS = (TransformType.Grad, TransformType.Jvp, TransformType.Vmap)  # Jvp is an error; an operator would say zero
NO_SECOND = "the kernels of mgk have no second derivatives: use impl='reference'"
num_modes = torch._C._len_torch_dispatch_stack


class Operator:
    """`function` as torch.ops.mgk.`name` (`.op`). A call uses the operator or the function, with the same result."""

    def __init__(self, function: Callable[..., Any], name: str, device_types: str | None) -> None:
        self.function, self.direct = function, function
        self.transformed = transformable(function, no_gradient, no_context)
        self.op = torch.library.custom_op(f"mgk::{name}", function, mutates_args=(), device_types=device_types)
        self.op.register_autograd(no_gradient)
        self.register_fake = self.op.register_fake

    def register_autograd(self, gradient: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        self.direct = differentiable(self.function, gradient, setup_context)
        self.transformed = transformable(self.function, gradient, setup_context)
        self.op.register_autograd(gradient, setup_context=setup_context)

    def __call__(self, *inputs: Any) -> Any:
        transform = peek_interpreter_stack()
        if is_traced(inputs) or (transform is not None and transform.key() not in TRANSFORMS):
            return self.op(*inputs)
        return self.direct(*inputs) if transform is None else self.transformed(*inputs)


def operator(name: str, device_types: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """The decorator."""
    return lambda function: Operator(function, name, device_types)


def count_flops(packet: Any, formula: Callable[..., int]) -> None:
    """Let active FLOP counters count an operator. Call it before the operator is called.

    `torch.utils.flop_counter` imports Triton, which `import mgk` must not do, and each counter copies the formulas when
    it is made. So a formula is registered when its operator runs under a counter.
    """
    if torch.compiler.is_compiling() or not num_modes():
        return
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    if packet not in module.flop_registry:
        module.register_flop_formula(packet)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            counter.flop_registry[packet] = module.flop_registry[packet]


def is_traced(inputs: tuple[Any, ...]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass must see the operator."""
    return (
        torch.compiler.is_compiling() or num_modes() > 0 or not PLAIN.issuperset(map(type, inputs)) or inputs[0].is_meta
    )


def differentiable(function: Callable[..., Any], gradient: Callable[..., Any], keep: Callable[..., None]) -> Any:
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            keep(ctx, inputs, output)
            return output

        backward = staticmethod(first_order(gradient))
        jvp = staticmethod(no_forward_mode)

    return Direct.apply


def transformable(function: Callable[..., Any], gradient: Callable[..., Any], keep: Callable[..., None]) -> Any:
    """The same in the form that torch.func needs, at five times the overhead."""

    class Transformed(torch.autograd.Function):
        forward = staticmethod(function)  # type: ignore[assignment]
        setup_context = staticmethod(keep)  # type: ignore[assignment]
        backward = staticmethod(gradient)  # its operators raise an error if they are differentiated
        jvp = staticmethod(no_forward_mode)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            """Compute one sample after the other."""
            pairs = list(zip(inputs, in_dims, strict=True))
            samples = [
                Transformed.apply(*(x if dim is None else x.select(dim, i) for x, dim in pairs))  # type: ignore[no-untyped-call]
                for i in range(info.batch_size)
            ]
            if isinstance(samples[0], Tensor):
                return torch.stack(samples), 0
            return tuple(map(torch.stack, zip(*samples, strict=True))), (0,) * len(samples[0])

    return Transformed.apply


def first_order(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A backward function whose results raise an error if they are differentiated again."""

    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = gradient(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        error: Any = torch._C._functions.DelayedError(NO_SECOND.encode(), len(results))
        return error(*(None if x is None else x.detach().requires_grad_() for x in results))

    return backward


def no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...


def no_gradient(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(NO_SECOND)


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError("the kernels of mgk have no forward-mode derivatives (jvp): use impl='reference'")
