"""Compile the kernels of modules ops/triton/hopper*.py, by name, for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from mgk.ops.triton import hopper, hopper_common, hopper_projected, hopper_short, hopper_variances
from mgk.ops.triton.hopper_common import ROW16, ROW32

MEMORY = 233472  # what a multiprocessor has; each program takes 1,024 bytes more than it asks for


def descriptor(rows: int, width: int, layout: Any, kind: str = "bf16", rank: int = 2) -> str:
    shape = [1] * (rank - 2) + [rows, width]
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>"


def compiled(module: Any, name: str, width: int, hard: bool, causal: bool, kind: str = "bf16") -> Any:
    kernel, tile, thin = getattr(module, name), hopper_common.layout(width, 4), hopper_common.THIN.value
    constants: dict[str, Any] = {"CAUSAL": causal, "BEST": hard, **module.sizes(name, width)}
    constants["POSITIONS" if name == "key_kernel" else "EVEN"] = causal
    queries, keys, projected = constants["BM"], constants["BN"], module is hopper_projected
    other = queries if name == "key_kernel" else keys
    kinds = {
        "q_desc": descriptor(queries, width, tile, rank=4), "g_desc": descriptor(queries, width, tile, rank=4),
        "k_desc": descriptor(keys, width, hopper_common.layout(width, 4 + projected), rank=4 + projected),
        "v_desc": descriptor(keys, width, tile, rank=4), "c_desc": descriptor(other, 16, thin),
        "w_desc": descriptor(1, other, ROW16), "gap_desc": descriptor(1, other, ROW16, "fp16"),
        "r_desc": descriptor(1, other, ROW32, "fp32"), "n_desc": descriptor(1, other, ROW16),
        **dict.fromkeys(("OUT", "DQ", "DK", "DV", "NARROW_ROWS", "ROW_COLUMNS", "SHIFT"), "*bf16"),
        **dict.fromkeys(("ROWS", "OVERFLOW", "ROW_STATS", "PART", "KEYS", "DLW", "VARIANCE"), "*fp32"),
        **dict.fromkeys(("scale", "inverse_variance"), "fp32"),
    }  # fmt: skip
    if module is hopper_variances:
        kinds["KEYS"] = "*bf16"
        del constants["BEST"]
    if projected:
        factored = not hard and kind == "bf16"
        kinds = {each: value.replace("bf16", kind) for each, value in kinds.items()}
        kinds["KEYS"] = "*bf16" if factored else "*fp32"
        kinds["w_desc"] = kinds["w_desc"] if factored else descriptor(1, other, ROW32, "fp32")
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compiled_short(name: str, width: int, hard: bool, causal: bool, even: bool = True) -> Any:
    kernel = getattr(hopper_short, name)
    constants = {
        "D": width, "TQ": 4, "TK": 4, "CAUSAL": causal, "EVEN": even, "BEST": hard, "POSITIONS": causal,
        "PRIOR_AXES": 0 if hard else 2,
    }  # fmt: skip
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    kinds = {
        **dict.fromkeys(("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV"), "*bf16"),
        **dict.fromkeys(("SHIFT", "PRIOR", "KEYS", "ROWS", "OVERFLOW", "DLW", "PART"), "*fp32"),
        **dict.fromkeys(("scale", "inverse_variance"), "fp32"),
    }  # fmt: skip
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in kernel.arg_names}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(each),): v for each, v in constants.items()})
    options = {"num_warps": 4, "maxnreg": hopper_short.registers(name, width)}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    modules = hopper, hopper_projected, hopper_variances
    for module in [each for each in modules if each.__name__.split(".")[-1] in sys.argv]:
        for name, width in module.SIZES:
            hard = (width != 128) == (name == "query_kernel")
            kind = "fp16" if module is hopper_projected and width == 64 else "bf16"
            result = compiled(module, name, width, hard, hard == (module is hopper), kind)
            if result.metadata.shared + 1024 > MEMORY:
                raise SystemExit(f"{name}, {width} wide: {result.metadata.shared} bytes of shared memory")
    if "hopper_short" in sys.argv:
        for name, (width, programs) in product(("forward_kernel", "backward_kernel"), ((16, 3), (32, 2))):
            hard = (width == 16) == (name == "forward_kernel")
            result = compiled_short(name, width, hard, causal=not hard)
            if result.metadata.shared + 1024 > MEMORY // programs:
                raise SystemExit(f"{name}, {width} wide: {result.metadata.shared} bytes of shared memory")
