"""Launch a kernel, and find it again without asking Triton when the same kind of call comes back.

For every launch Triton binds, types and specialises each argument to find the compiled kernel, which takes longer than
many of our kernels run. Here a cheaper key, as fine as Triton's, finds it again. Arguments, and the entries of those
that are tuples, contribute to the key

- a tensor: its dtype, and whether its address is a multiple of 16; None, a float or a bool: the type alone,
- an integer: whether it is 1, whether it is a multiple of 16 and how many bits it needs, so that a length that grows
  with every decoding step makes no new keys,
- a tensor descriptor: its dtype, block shape and layout; a `tl.constexpr` or an option (`num_warps`): its value,
- the device, and those of Triton's settings that are part of its own key.

A new key, and whatever is not known to be safe, is launched by Triton itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from functools import reduce, wraps
from inspect import Parameter
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

# The Triton versions whose key and launcher this repeats. Compare JITFunction.run again before adding a newer one.
# On AMD GPUs the key also contains the size of a tensor's memory.
KNOWN = triton.__version__.split(".")[:2] in [["3", str(minor)] for minor in range(6, 10)] and not torch.version.hip
SETTINGS = ["runtime.debug", "compilation.instrumentation_mode"]
if KNOWN and hasattr(knobs.compilation, "fpsan_homomorphic_casts"):
    SETTINGS.append("compilation.fpsan_homomorphic_casts")
MAX_INTEGERS = 4096
COMPILERS = min(8, os.cpu_count() or 1)  # threads
only_compile: ContextVar[bool] = ContextVar("only_compile", default=False)

KERNELS: tuple[type, ...] = (JITFunction,)
DESCRIPTORS: tuple[type, ...] = (TensorDescriptor,)
if KNOWN:
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia import hopper

    KERNELS, DESCRIPTORS = (*KERNELS, GluonJITFunction), (*DESCRIPTORS, hopper.TensorDescriptor)
KINDS = (int, float, bool, NoneType, *DESCRIPTORS)
settings, dtype, address, get_device = attrgetter(*SETTINGS), attrgetter("dtype"), Tensor.data_ptr, Tensor.get_device


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
    """Call `kernel[grid](*args, **constants)` on the device that holds the tensors.

    Every launch calls Triton's launch hooks. A launch that is found again skips two checks: Triton's, that the globals
    which the kernel reads have not changed since it was compiled, and the driver's, that it knows each address.
    """
    constants = {
        "enable_fp_fusion": True
    } | constants  # a multiply and an add become one; not the default in all versions
    if only_compile.get():
        kernel.warmup(*args, grid=grid, **constants)
        return
    signature = signature_of(kernel, args, constants)
    values = flatten(args) if signature else []
    tensors = signature.tensors(values) if signature else ()
    devices = set(map(get_device, tensors))
    if signature is None or len(devices) != 1 or -1 in devices:  # Triton has an error for tensors on the CPU
        kernel[grid](*args, **constants)
        return
    (device,), driver = devices, triton.runtime.driver.active
    if device != driver.get_current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **constants)
        return
    if not signature.direct or kernel.pre_run_hooks or knobs.runtime.add_stages_inspection_hook is not None:
        kernel[grid](*args, **constants)
        return
    addresses = tuple(map(address, tensors))
    key = (
        device, kernel.debug, settings(knobs), tuple(constants.values()), tuple(signature.constants(values)),
        tuple(map(dtype, tensors)), reduce(or_, addresses) % 16 and tuple([each % 16 == 0 for each in addresses]),
        tuple(map(integer_kinds.__getitem__, signature.integers(values))),
        signature.descriptors and tuple([descriptor_key(values[place]) for place in signature.descriptors]),
    )  # fmt: skip
    found = signature.compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):
            signature.compiled[key] = compiled, [constants.get(each.name, each.default) for each in signature.rest]
        return
    (compiled, rest), blocks = found, (*grid, 1, 1)[:3]
    for place, pointer in zip(signature.places, addresses, strict=True):
        values[place] = pointer
    first = values if signature.slices is None else [
        tuple(values[part]) if isinstance(part, slice) else values[part] for part in signature.slices
    ]  # fmt: skip
    if has_hooks():
        compiled[blocks](*first, *rest)
    else:  # the same, without preparing for hooks
        stream, function = driver.get_current_stream(device), compiled.function
        compiled.run(*blocks, stream, function, compiled.packed_metadata, None, None, None, *first, *rest)


def compile_together(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Before the first call of a kind, compile all kernels that `launcher(problem, ...)` launches, at the same time.

    A pass launches three to six kernels, and one takes a second or two. They are found by calling the launcher with
    launches that only compile. A problem says of which kind it is (`kind`); what it remembers is not shared.
    """
    seen = set()

    @wraps(launcher)
    def call(problem: Any, *others: Any) -> Any:
        if problem.kind not in seen and problem.query.is_cuda and not torch.cuda.is_current_stream_capturing():
            seen.add(problem.kind)
            token = only_compile.set(True)
            try:
                with (
                    torch.cuda.device(problem.query.device),
                    ThreadPoolExecutor(COMPILERS) as pool,
                    triton.AsyncCompileMode(pool),
                ):
                    launcher(replace(problem), *others)
            finally:
                only_compile.reset(token)
        return launcher(problem, *others)

    return call


def flatten(args: tuple[Any, ...]) -> list[Any]:
    """The arguments, with the entries of tuples in place of these."""
    result: list[Any] = []
    for each in args:
        if type(each) is tuple:
            result += each
        else:
            result.append(each)
    return result


def has_hooks() -> bool:
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(hooks[0], "calls", hooks[0]) or getattr(hooks[1], "calls", hooks[1]))


class Signature:
    """Where calls of a kernel with arguments of these types, and keywords of these names, have what.

    `tensors` (at `places`), `integers` and `constants` pick these from the flattened positional arguments,
    `descriptors` are places among them, `slices` puts tuples together again, and `rest` are the parameters that have a
    keyword or their default.
    """

    def __init__(self, kernel: Any, types: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.kernel = kernel  # keeps it alive, and so the id by which this is found
        self.compiled: dict[Any, tuple[CompiledKernel, list[Any]]] = {}
        parameters = list(kernel.signature.parameters.values())
        self.rest = parameters[len(types) :]
        flat: list[tuple[type, bool]] = []  # type, and whether it is a constant
        slices: list[slice | int] = []
        for place, kind in enumerate(types):
            start = len(flat)
            flat += [(each, place in kernel.constexprs) for each in (kind if isinstance(kind, tuple) else (kind,))]
            slices.append(slice(start, len(flat)) if isinstance(kind, tuple) else start)
        self.slices = slices if any(isinstance(part, slice) for part in slices) else None
        variable = {place: kind for place, (kind, constant) in enumerate(flat) if not constant}
        self.places = [place for place, kind in variable.items() if issubclass(kind, Tensor)]
        self.tensors = pick(self.places)
        self.integers = pick([place for place, kind in variable.items() if kind is int])
        self.constants = pick([place for place in range(len(flat)) if place not in variable])
        self.descriptors = tuple(place for place, kind in variable.items() if kind in DESCRIPTORS)
        self.direct = (
            KNOWN
            and kernel.launch_metadata is None  # it would want the tensors, not their addresses
            and all(issubclass(kind, Tensor) or kind in KINDS for kind in variable.values())
            and all(kernel.arg_names.index(name) in kernel.constexprs for name in names if name in kernel.arg_names)
            and all(parameter.kind is not Parameter.VAR_POSITIONAL for parameter in parameters)
        )


def signature_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Signature | None:
    """None for Triton's interpreter."""
    if type(kernel) not in KERNELS:
        return None
    types = tuple([tuple(map(type, each)) if type(each) is tuple else type(each) for each in args])
    call = id(kernel), types, tuple(constants)
    return signatures.get(call) or signatures.setdefault(call, Signature(kernel, *call[1:]))


signatures: dict[tuple[int, tuple[Any, ...], tuple[str, ...]], Signature] = {}


def pick(places: list[int]) -> itemgetter[Any]:
    """These items of a list as a tuple or list, however many."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def descriptor_key(descriptor: Any) -> tuple[Any, ...]:
    layout = getattr(descriptor, "layout", None)  # of Gluon's
    return descriptor.base.dtype, descriptor.base.get_device(), layout, *descriptor.block_shape


class IntegerKinds(dict[int, str]):
    """What Triton distinguishes in an integer, remembered for the last few thousand."""

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
