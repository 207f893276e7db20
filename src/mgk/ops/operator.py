"""An operator of PyTorch that is one only where that matters.

`torch.library.custom_op` lets torch.compile, torch.export, FlopCounterMode and the like see a kernel as one node, and
costs the host more than the launch of the kernel does. Where nothing looks, the function is called as it is, in an
`autograd.Function` if something is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PLAIN = (Tensor, nn.Parameter)
num_modes = torch._C._len_torch_dispatch_stack
innermost_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


class Operator:
    """`function` as torch.ops.mgk.`name`, which is `.op`; a call takes it or the short way, with the same result."""

    def __init__(self, function: Callable[..., Any], name: str, device_types: str | None) -> None:
        self.function, self.direct = function, function
        self.op = torch.library.custom_op(f"mgk::{name}", function, mutates_args=(), device_types=device_types)
        self.register_fake = self.op.register_fake

    def register_autograd(self, gradient: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        self.op.register_autograd(gradient, setup_context=setup_context)
        function = self.function

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = function(*inputs)
                setup_context(ctx, inputs, output)
                return output

            backward = staticmethod(once_differentiable(gradient))  # type: ignore[assignment]

        self.direct = Direct.apply

    def __call__(self, *inputs: Any) -> Any:
        return self.op(*inputs) if is_watched(inputs) else self.direct(*inputs)


def operator(name: str, device_types: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """The decorator."""
    return lambda function: Operator(function, name, device_types)


def is_watched(inputs: tuple[Any, ...]) -> bool:
    """Whether something may want to see an operator: a compiler, a mode, a transform, another kind of tensor."""
    return (
        torch.compiler.is_compiling()
        or num_modes() > 0
        or innermost_transform() is not None
        or any(isinstance(each, Tensor) and (type(each) not in PLAIN or each.is_meta) for each in inputs)
    )
