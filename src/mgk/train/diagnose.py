"""Where a number stopped being finite: the batch of the failed step once more, with a look at every module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def culprit(objective: nn.Module, batch: dict[str, Tensor]) -> str:
    """The first place in one forward and backward pass that is not finite, in words."""
    for name, parameter in objective.named_parameters():
        if not parameter.isfinite().all():
            return f"weight {short(name)} is not finite"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = any(not tensor.isfinite().all() for tensor in tensors(output))
            if bad and not found:
                found.append(f"layer {short(name)} ({type(module).__name__})")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in objective.named_modules() if name]
    try:
        objective.zero_grad(set_to_none=True)
        loss = objective(batch)["loss"]
        if found:
            return found[0]
        if not loss.isfinite():
            return "the loss itself, from finite outputs of every layer"
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in reversed(list(objective.named_parameters())):  # gradients come from the last layer back
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {short(name)}"
    return "nothing that happens again in eager mode"


def short(name: str) -> str:
    return name.removeprefix("model.")


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [tensor for item in output.values() for tensor in tensors(item)]
    return [tensor for item in output for tensor in tensors(item)] if isinstance(output, tuple | list) else []
