"""A GPU that only writes down what Triton compiles for it and launches on it: the fixture `machine`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.ops.triton_env  # noqa: F401  (may choose the interpreter, before Triton is there)

# isort: split
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from mgk.ops.triton.launch import launch

launching: Any = sys.modules[launch.__module__]  # in the package the name may be that of a function


class Compiled(CompiledKernel):  # type: ignore[misc]
    """Says what it was compiled for, and writes down its launches."""

    def __init__(self, source: Any, options: dict[str, Any], launches: list[Any]) -> None:
        self.src, self.launches, self.module, self._module_pid, self.metadata = source, launches, "loaded", None, None
        self.name, self.function, self.packed_metadata, self._run = "example", id(self), (4, 1, 0), self.write_down
        ours = sorted((name, value) for name, value in options.items() if name in ("num_warps", "maxnreg", "debug"))
        self.made_for = repr((source.signature, source.constants, source.attrs, ours))

    def write_down(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, about: Any, enter: Any, leave: Any,
        *args: Any,
    ) -> None:  # fmt: skip
        """Calls the hooks as Triton's launcher does, and takes an address for a tensor as it does."""
        assert function == self.function
        assert metadata == self.packed_metadata
        for hook in (enter, leave):
            if hook is not None:
                hook(about)
        self.given = args
        seen = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        self.launches.append((self.made_for, (x, y, z), stream, seen))


class Machine:
    """A GPU that only writes down: launches, compilations, and how often Triton was asked for a launch."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.compilations: list[Compiled] = []
        self.asked = self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, source: Any, target: Any, options: dict[str, Any], **_: Any) -> Compiled:
        self.compilations.append(Compiled(source, options, self.launches))
        return self.compilations[-1]

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


def take_the_place_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine, run = Machine(), JITFunction.run

    def counting(kernel: Any, *args: Any, **options: Any) -> Any:
        machine.asked += 1
        return run(kernel, *args, **options)

    monkeypatch.setattr(triton.runtime.driver, "_active", machine)
    monkeypatch.setattr(triton.compiler, "compile", machine.compile)
    monkeypatch.setattr(torch.cuda, "device", machine.on)
    monkeypatch.setattr(JITFunction, "run", counting)
    monkeypatch.setattr(launching, "get_device", lambda tensor: tensor.get_device() + 1)  # the CPU is device 0 here
    monkeypatch.setattr(launching, "signatures", {})
    monkeypatch.setattr(launching, "integer_kinds", launching.IntegerKinds())
    return machine
