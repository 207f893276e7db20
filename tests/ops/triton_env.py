"""Where the Triton tests run, and on what memory. To be imported before any kernel: it may choose the interpreter."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ops.common import Inputs, component_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def repair_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, which it adds and multiplies, cuts where a GPU rounds, and
    makes other numbers of subnormals.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, binary = builder.cast_impl, builder.binary_op

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:  # in one go, and subnormals too
            bits = np.left_shift(source.data, 16, dtype=np.uint32)
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)

    def float_dot(self: Any, left: Any, right: Any, added: Any, *rest: Any) -> Any:
        # In float64, so that a product rounds alike in any shape and order, as on a GPU. Backward must find the weights
        # of the forward pass again, also where rounding decides which of two keys has all of it.
        wide = [
            (x if x.dtype.scalar == tl.float32 else rounding_cast(self, x, tl.float32)).data.astype(np.float64)
            for x in (left, right)
        ]
        return interpreter.TensorHandle((np.matmul(*wide) + added.data).astype(np.float32), added.dtype.scalar)

    def float_binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, operation)
        result = binary(self, *(rounding_cast(self, x, tl.float32) for x in (left, right)), operation)
        return rounding_cast(self, result, tl.bfloat16)

    builder.cast_impl, builder.create_dot, builder.binary_op = rounding_cast, float_dot, float_binary


def hasten() -> None:
    """The interpreter patches Triton's language for every call of a function within a kernel, a quarter of the time of
    our tests. Here it does so once for a launch, and once more for each module that the launch had not seen.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    done: set[str] = set()

    @cache
    def modules(function: Any) -> set[str]:
        return {module.__name__ for module in (tl, tl.core) if module in function.__globals__.values()}

    def for_a_launch(function: Any) -> Any:
        done.clear()
        done.update(modules(function))
        return patch(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        new = modules(self.fn) - done
        if new:
            patch(self.fn)
            done.update(new)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = for_a_launch, call


def remember_types() -> None:
    """The interpreter works out again for every tensor what follows from its type, half of the time of our tests. Here
    each type keeps what was found: blocks of it by their shape, fields of tensors, and the type of numpy.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    core: Any = tl.core
    make_block, make_tensor, find = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        known, key = vars(element_ty).setdefault("blocks", {}), (sizes, *map(type, sizes))  # 16.0 is no size
        if key not in known:
            make_block(self, element_ty, shape)
            known[key] = vars(self)
        self.__dict__ = known[key]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        known = vars(kind)
        if "fields" not in known:
            make_tensor(self, handle, kind)
            known["fields"] = vars(self).copy()
        vars(self).update(known["fields"], handle=handle)

    def numpy_type(kind: Any) -> Any:
        known = vars(kind)
        if "numpy" not in known:
            known["numpy"] = find(kind)
        return known["numpy"]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_type
    core.block_type.to_ir = lambda self, builder: self  # as the interpreter's, but not a new one


def check_overflow() -> None:
    """The interpreter computes at length whether a sum or product of integers overflows, and tells nobody unless it
    debugs. Here it does, of signed ones; hashes of unsigned ones do so on purpose.
    """
    from triton.language.semantic import TritonSemantic

    def check(self: Any, left: Any, right: Any, operation: Any) -> None:
        kind = left.type.scalar
        if self.builder.options.sanitize_overflow and kind.is_int_signed() and kind.int_bitwidth < 64:
            exact = getattr(operator, operation.__name__)(*(x.handle.data.astype(np.int64) for x in (left, right)))
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            if exact.min() < low or exact.max() > high:
                raise OverflowError(f"{operation.__name__} of {kind}: {exact.min()} to {exact.max()}")

    TritonSemantic.binary_op_sanitize_overflow_impl = check


@contextmanager
def overflow_checked(wanted: bool) -> Iterator[None]:
    """Whether the interpreter looks for it in every sum and product of integers, a third of the time of a kernel."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    before, builder.options = builder.options, interpreter.InterpreterOptions(sanitize_overflow=wanted)
    try:
        yield
    finally:
        builder.options = before


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns if nobody says
    repair_bfloat16()
    hasten()
    remember_types()
    check_overflow()


@contextmanager
def strict_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that a place nobody writes shows; and torch refuses what is not deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rounded_exponent(inputs: Inputs) -> float:
    """What float32 rounds of the largest term of an exponent, (|q|^2 + |k_jr|^2) / s2 with s2 = sqrt(D) or near it."""
    norms = [
        float(tensor.detach().double().square().sum(-1).max()) for tensor in (inputs["query"], component_keys(inputs))
    ]
    return sum(norms) / math.sqrt(inputs["query"].shape[-1]) * torch.finfo(torch.float32).eps


def assert_graph_follows(step: Callable[[], list[Tensor]], change: Callable[[], object]) -> None:
    """A captured step gives, after its inputs are changed in place, what a step then gives without a graph."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    change()
    expected = step()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))
