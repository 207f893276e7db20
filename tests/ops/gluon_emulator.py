"""Gluon, as far as our kernels use it, in PyTorch on a CPU: warp groups are threads, barriers are objects.

`emulated()` gives copies of ops/triton/hopper*.py that run in it. Layouts mean nothing here, and products are exact:
what it tells is whether the right numbers meet, in the right order, and whether nobody waits forever.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mgk.ops import triton as package

NAMES = (
    "hopper_common", "hopper", "hopper_wide", "hopper_backward", "hopper_projected_keys", "hopper_projected_wide",
    "hopper_projected",
    "hopper_variances", "hopper_short",
)  # fmt: skip
PATIENCE = 60.0  # seconds until a wait is a deadlock


class Block(Tensor):
    """Numbers in registers."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:  # type: ignore[override]
        return block(self.as_subclass(Tensor).view(dtype) if bitcast else self.as_subclass(Tensor).to(dtype))


def block(tensor: Tensor) -> Block:
    return tensor.as_subclass(Block)  # type: ignore[return-value]


def plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Pointer:
    """Memory from the first number of a tensor on."""

    memory: Tensor
    place: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + plain(offset))

    @classmethod
    def to_first(cls, tensor: Tensor) -> Pointer:
        length = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return cls(torch.as_strided(tensor.detach(), (length,), (1,)))


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Block:
    place = torch.as_tensor(pointer.place)
    if mask is None:
        return block(pointer.memory[place])
    seen = plain(mask).expand(place.shape)
    return block(torch.where(seen, pointer.memory[torch.where(seen, place, 0)], other))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place = torch.as_tensor(pointer.place)
    value = torch.as_tensor(plain(value)).to(pointer.memory.dtype).expand(place.shape)
    seen = torch.ones_like(place, dtype=torch.bool) if mask is None else plain(mask).expand(place.shape)
    pointer.memory[place[seen]] = value[seen]


@dataclass
class Shared:
    """Shared memory; views share it."""

    memory: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, place: Any) -> Shared:
        return Shared(self.memory[int(place)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.view(*shape))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def load(self, layout: Any) -> Block:
        return block(self.memory.clone())

    def store(self, value: Tensor) -> None:
        self.memory.copy_(plain(value))


@dataclass
class Barrier:
    """Completes a phase when as many have arrived as should, and all bytes that are expected."""

    count: int = 0
    pending: int = 0
    expected: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def update(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.pending, self.expected = self.pending - arrivals, self.expected + expected
            if self.pending < 0:
                raise AssertionError("more arrivals than the barrier counts")
            if self.pending == self.expected == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any, pred: Any = True) -> None:
        """Until the phase of that parity is complete; of a fresh barrier the one before the first is."""
        if not pred:
            return
        with self.changed:
            if not self.changed.wait_for(lambda: (self.phase & 1) != int(parity), PATIENCE):
                raise AssertionError(f"deadlock: phase {self.phase}, {self.pending} arrivals missing")

    def index(self, place: Any) -> Barrier:
        return self


class Barriers(list[Barrier]):
    def index(self, place: Any) -> Barrier:  # type: ignore[override]
        return self[int(place)]


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Any:
    if layout == "barrier":
        return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))
    memory = torch.full(tuple(shape), torch.nan, dtype=torch.float32).to(dtype)
    return Shared(memory if value is None else memory.copy_(plain(value)))


@dataclass
class Descriptor:
    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def copy(descriptor: Descriptor, place: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    """Zeros beyond the tensor. The copy engine writes to multiples of 128 bytes."""
    assert target.memory.storage_offset() * target.memory.element_size() % 128 == 0, "misaligned shared memory"
    where = torch.zeros((), dtype=torch.int64)
    inside = torch.ones((), dtype=torch.bool)
    for first, size, stride, length in zip(
        place, descriptor.block_shape, descriptor.strides, descriptor.shape, strict=True
    ):  # fmt: skip
        indices = int(first) + torch.arange(size)
        where = where[..., None] + indices * stride
        inside = inside[..., None] & (indices < length)
    memory = Pointer.to_first(descriptor.base).memory
    target.memory.copy_(torch.where(inside, memory[torch.where(inside, where, 0)], 0))
    barrier.update(0, -target.memory.numel() * target.memory.element_size())


def multiply(a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Block:
    left, right = (x.memory if isinstance(x, Shared) else plain(x) for x in (a, b))
    product = left.float() @ right.float()
    return block(product + plain(acc) if use_acc else product)


def specialise(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Constant(int):
    """A number that is known when a kernel is compiled."""

    @property
    def value(self) -> int:
        return int(self)


def constant(value: Any) -> Any:
    if isinstance(value, float):
        return value
    return Constant(value) if isinstance(value, int) else SimpleNamespace(value=value)


program = [0]


def language() -> Any:
    gl: Any = ModuleType("triton.experimental.gluon.language")
    for name in ("bfloat16", "float16", "float32", "int32", "int64"):
        setattr(gl, name, getattr(torch, name))
    for name in ("NVMMASharedLayout", "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout",
                 "SwizzledSharedLayout"):  # fmt: skip
        setattr(gl, name, lambda *_: None)
    gl.constexpr = constant
    gl.static_range = range
    gl.load, gl.store, gl.allocate_shared_memory, gl.warp_specialize = load, store, allocate, specialise
    gl.program_id = lambda axis: block(torch.tensor(program[0]))
    gl.convert_layout = lambda x, layout: x
    gl.arange = lambda start, end, layout: block(torch.arange(start, end))
    gl.zeros = lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype))
    gl.full = lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype))
    gl.zeros_like = lambda x: block(torch.zeros_like(plain(x)))
    gl.exp2, gl.log2 = (lambda x: block(torch.exp2(plain(x)))), (lambda x: block(torch.log2(plain(x))))
    gl.where = lambda condition, x, y: block(torch.where(plain(condition), plain(x), plain(y)))
    gl.sum = lambda x, axis: block(plain(x).sum(axis))
    gl.max = lambda x, axis: block(plain(x).amax(axis))
    gl.maximum = lambda x, y: pairwise(torch.maximum, x, y)
    gl.minimum = lambda x, y: pairwise(torch.minimum, x, y)
    gl.cdiv = lambda x, y: -(-x // y)
    gl.barrier = lambda: None
    return gl


def pairwise(function: Any, x: Any, y: Any) -> Block:
    return block(function(torch.as_tensor(plain(x)), torch.as_tensor(plain(y))))


ASSEMBLY: dict[str, Callable[..., Any]] = {
    "multiply_add": lambda x, y, z: (x.float() * y.float() + z.float()).to(x.dtype),
    "multiply": lambda x, y: x * y,
    "larger": torch.maximum,
    "where_larger": lambda x, y, z: torch.where(y > x, z, torch.zeros_like(z)),
    "second_of": lambda x, y, z: torch.where(y > x, z, torch.zeros_like(z)),
    "without": lambda whole, part: torch.where(part == 0, whole, torch.zeros_like(whole)),
}


@cache
def emulated() -> tuple[Any, ...]:
    """The modules of NAMES; their kernels run program after program."""
    gl, jit = language(), lambda function=None, **_: function or (lambda each: each)
    hopper: Any = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barrier", init=init, wait=Barrier.wait, arrive=lambda barrier: barrier.update(1, 0),
        expect=lambda barrier, bytes: barrier.update(1, bytes),
    )  # fmt: skip
    hopper.tma = SimpleNamespace(async_load=copy)
    hopper.warpgroup_mma, hopper.warpgroup_mma_init = multiply, lambda block: block
    hopper.warpgroup_mma_wait = lambda outstanding, deps: deps[0] if len(deps) == 1 else deps
    hopper.fence_async_shared = lambda: None
    fakes: dict[str, Any] = {
        "triton.experimental.gluon": SimpleNamespace(jit=jit, language=gl),
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(mma_v2=multiply),
        "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
        "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit, language=gl)),
    }
    before = {name: sys.modules.get(name) for name in [*fakes, *(f"mgk.ops.triton.{name}" for name in NAMES)]}
    modules = []
    try:
        sys.modules |= fakes
        for name in NAMES:
            modules.append(read(name))
            sys.modules[f"mgk.ops.triton.{name}"] = modules[-1]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    return tuple(modules)


def read(name: str) -> Any:
    path = Path(package.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"emulated_{name}", path)
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    for function, replacement in ASSEMBLY.items():
        if hasattr(module, function):
            setattr(module, function, replacement)
    for function, replacement in (("launch", launch),):
        if hasattr(module, function):
            setattr(module, function, replacement)
    return module


def launch(
    kernel: Callable[..., None], grid: tuple[int], *arguments: Any, num_warps: int, maxnreg: int = 0, **constants: Any
) -> None:
    given = [Pointer.to_first(each) if isinstance(each, Tensor) else each for each in arguments]
    for program[0] in range(grid[0]):
        kernel(*given, **constants)
