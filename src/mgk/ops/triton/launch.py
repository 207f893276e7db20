"""Launching a kernel for the second time without asking Triton again which one it is.

For every launch Triton binds, types and specialises each argument to find the compiled kernel, which for the fifty to
eighty arguments of ours takes longer than many a kernel runs. Here a cheaper key, as fine as Triton's, finds it again:

- of a tensor its dtype and whether its address is a multiple of 16; of None, a float or a bool the type alone,
- of an integer whether it is 1, whether it is a multiple of 16 and how many bits it needs: a length that grows with
  every step of decoding makes no new keys; of a tuple of integers the same for each of them,
- of a host's tensor descriptor its dtype, block shape and layout; of a `tl.constexpr` or an option (`num_warps`) its
  value,
- the device, and those of Triton's settings that go into its own key.

A new key, and whatever is not known to be safe, takes the ordinary road through Triton.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import reduce
from inspect import Parameter
from itertools import chain
from operator import attrgetter, itemgetter, or_
from types import NoneType
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# The Triton whose key and whose launcher this is; to be compared again (JITFunction.run) before a newer one is added.
# AMD's also looks at the size of a tensor's memory.
KNOWN = triton.__version__.split(".")[:2] in [["3", str(minor)] for minor in range(6, 10)] and not torch.version.hip
SETTINGS = ["runtime.debug", "compilation.instrumentation_mode"]
if KNOWN and hasattr(knobs.compilation, "fpsan_homomorphic_casts"):
    SETTINGS.append("compilation.fpsan_homomorphic_casts")
MAX_INTEGERS = 4096

KERNELS: tuple[type, ...] = (JITFunction,)
DESCRIPTORS: tuple[type, ...] = (TensorDescriptor,)
if KNOWN:
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia import hopper

    KERNELS, DESCRIPTORS = (*KERNELS, GluonJITFunction), (*DESCRIPTORS, hopper.TensorDescriptor)
settings, dtype, address, get_device = attrgetter(*SETTINGS), attrgetter("dtype"), Tensor.data_ptr, Tensor.get_device


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the device that has the tensors.

    Every launch calls Triton's launch hooks. What a repeated one leaves out are Triton's check that the globals which
    the kernel reads are what they were when it was compiled, and the driver's that it knows each address.
    """
    plan = plan_of(kernel, args, constants)
    tensors = plan.tensors(args) if plan else ()
    devices = set(map(get_device, tensors))
    if plan is None or len(devices) != 1 or -1 in devices:  # Triton knows what to say to tensors on the CPU
        ordinary(kernel, grid, args, constants)
        return
    (device,), driver = devices, triton.runtime.driver.active
    if device != driver.get_current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **constants)
        return
    if not plan.direct or kernel.pre_run_hooks or knobs.runtime.add_stages_inspection_hook is not None:
        ordinary(kernel, grid, args, constants)
        return
    addresses, values = tuple(map(address, tensors)), tuple(constants.values())
    key = (
        device, kernel.debug, settings(knobs), values, plan.constants(args), tuple(map(dtype, tensors)),
        reduce(or_, addresses) % 16 and tuple([each % 16 == 0 for each in addresses]),
        tuple(map(integer_kinds.__getitem__, chain(plan.integers(args), *plan.tuples(args)))),
        plan.descriptors and tuple([descriptor_key(args[place]) for place in plan.descriptors]),
    )  # fmt: skip
    found = plan.compiled.get(key)
    if found is None:
        compiled = ordinary(kernel, grid, args, constants)
        if isinstance(compiled, CompiledKernel):
            plan.compiled[key] = compiled, [constants.get(each.name, each.default) for each in plan.rest]
        return
    (compiled, rest), blocks, first = found, (*grid, 1, 1)[:3], list(args)
    for place, pointer in zip(plan.places, addresses, strict=True):
        first[place] = pointer
    if has_hooks():
        compiled[blocks](*first, *rest)
    else:  # the same, without preparing for hooks
        run(compiled, blocks, driver.get_current_stream(device), [*first, *rest])
    if recording.writer is not None:
        recording.writer.launched(compiled, blocks, device, args, rest)


def ordinary(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """The launch that Triton itself does; what it returns."""
    with nullcontext() if recording.writer is None else recording.writer.launching(kernel, grid, args, constants):
        return kernel[grid](*args, **constants)


def run(compiled: CompiledKernel, blocks: tuple[int, ...], stream: int, args: list[Any]) -> None:
    """With addresses for tensors, and without hooks."""
    compiled.run(*blocks, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def has_hooks() -> bool:
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(hooks[0], "calls", hooks[0]) or getattr(hooks[1], "calls", hooks[1]))


class Recording(threading.local):
    """Who writes down the launches of this thread, if anybody; see repeat.py."""

    writer: Any = None


recording = Recording()


class Plan:
    """Where calls of a kernel with arguments of these types and keywords of these names have what.

    `tensors` (at `places`), `integers`, `tuples` of integers and `constants` pick these from the positional arguments,
    `descriptors` are places, and `rest` are the parameters that have a keyword or their default.
    """

    def __init__(self, kernel: Any, types: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.kernel = kernel  # keeps it, and so the id by which the plan is found
        self.compiled: dict[Any, tuple[CompiledKernel, list[Any]]] = {}
        parameters = list(kernel.signature.parameters.values())
        self.rest = parameters[len(types) :]
        looked_at = {place: kind for place, kind in enumerate(types) if place not in kernel.constexprs}
        tuples = {place: kind for place, kind in looked_at.items() if isinstance(kind, tuple)}
        single = {place: kind for place, kind in looked_at.items() if place not in tuples}
        self.places = [place for place, kind in single.items() if issubclass(kind, Tensor)]
        self.tensors = pick(self.places)
        self.integers = pick([place for place, kind in single.items() if kind is int])
        self.tuples = pick(list(tuples))
        self.constants = pick([place for place in range(len(types)) if place not in looked_at])
        self.descriptors = tuple(place for place, kind in single.items() if kind in DESCRIPTORS)
        self.direct = (
            KNOWN
            and kernel.launch_metadata is None  # it would want the tensors, not their addresses
            and all(issubclass(kind, Tensor) or kind in KINDS for kind in single.values())
            and all(each is int for kind in tuples.values() for each in kind)
            and all(kernel.arg_names.index(name) in kernel.constexprs for name in names if name in kernel.arg_names)
            and all(parameter.kind is not Parameter.VAR_POSITIONAL for parameter in parameters)
        )


def plan_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Plan | None:
    """None for Triton's interpreter."""
    if type(kernel) not in KERNELS:
        return None
    types: tuple[Any, ...] = tuple(map(type, args))
    if tuple in types:
        types = tuple([tuple(map(type, each)) if type(each) is tuple else type(each) for each in args])
    call = id(kernel), types, tuple(constants)
    return plans.get(call) or plans.setdefault(call, Plan(kernel, *call[1:]))


KINDS = (int, float, bool, NoneType, *DESCRIPTORS)
plans: dict[tuple[int, tuple[Any, ...], tuple[str, ...]], Plan] = {}


def pick(places: list[int]) -> itemgetter[Any]:
    """These items of a tuple as a tuple, however many."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def descriptor_key(descriptor: Any) -> tuple[Any, ...]:
    layout = getattr(descriptor, "layout", None)  # of Gluon's
    return descriptor.base.dtype, descriptor.base.get_device(), layout, *descriptor.block_shape


class IntegerKinds(dict[int, str]):
    """What Triton distinguishes in an integer; of the last few thousand it is remembered."""

    def __missing__(self, value: int) -> str:
        if len(self) >= MAX_INTEGERS:
            self.clear()
        if value == 1:
            kind = "1"
        elif -(2**31) <= value < 2**31:
            kind = "i32" if value % 16 else "i32 of 16"
        elif value < 2**63:
            kind = "i64" if value % 16 else "i64 of 16"
        else:
            kind = "u64" if value % 16 else "u64 of 16"
        self[value] = kind
        return kind


integer_kinds = IntegerKinds()
