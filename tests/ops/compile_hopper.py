"""Compile the kernels of modules ops/triton/hopper*.py, by name, for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from mgk.ops.triton import (
    hopper,
    hopper_backward,
    hopper_common,
    hopper_projected,
    hopper_projected_wide,
    hopper_short,
    hopper_variances,
    loads,
)
from mgk.ops.triton.hopper_common import ROW16, ROW32

SHIFTED = hopper, hopper_backward
MODULES = *SHIFTED, hopper_projected, hopper_variances
MEMORY = 233472  # what a multiprocessor has; each program takes 1,024 bytes more than it asks for


def descriptor(rows: int, width: int, layout: Any, kind: str = "bf16", rank: int = 2) -> str:
    shape = [1] * (rank - 2) + [rows, width]
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>"


def compiled(
    module: Any, name: str, width: int, hard: bool, causal: bool, components: int = 2, head: int | None = None,
    kind: str = "bf16",
) -> Any:  # fmt: skip
    """`width` of a block, and `head`, of what fills it where it is less."""
    home = hopper_projected_wide if (module, name, width) == (hopper_projected, "key_kernel", 128) else module
    kernel, tile, thin = getattr(home, name), hopper_common.layout(width, 4), hopper_common.THIN.value
    constants: dict[str, Any] = {"CAUSAL": causal, "POSITIONS" if name == "key_kernel" else "EVEN": causal}
    if module not in SHIFTED:
        constants |= {"BEST": hard, **module.sizes(name, width)}
    else:
        constants = hopper.settings(name, head or width, width, components, hard, kind == "bf16", **constants)
    queries, keys, projected = constants["BM"], constants["BN"], module is hopper_projected
    other = queries if name == "key_kernel" else keys
    kinds = {
        "q_desc": descriptor(queries, width, tile, rank=4), "g_desc": descriptor(queries, width, tile, rank=4),
        "k_desc": descriptor(keys, width, hopper_common.layout(width, 4 + projected), rank=4 + projected),
        "v_desc": descriptor(keys, width, tile, rank=4), "c_desc": descriptor(other, 16, thin),
        "w_desc": descriptor(1, other, ROW16), "gap_desc": descriptor(1, other, ROW16, "fp16"),
        "extra_desc": descriptor(1, other, ROW16, "fp16"), "top_desc": descriptor(1, other, ROW16),
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
        kinds["KEYS"] = "*bf16" if factored else "*fp32"
        kinds["w_desc"] = kinds["w_desc"] if factored else descriptor(1, other, ROW32, "fp32")
    if name == "query_kernel" and constants.get("SPLIT"):
        kinds["c_desc"] = descriptor(constants["SUMS"], keys, hopper_common.layout(keys, 2))
        kinds["w_desc"] = descriptor(1, keys, ROW32, "fp32")
    if kind == "fp16":
        kinds = {each: text.replace("bf16", "fp16") for each, text in kinds.items()}
        kinds |= dict.fromkeys(("extra_desc", "top_desc"), descriptor(1, other, ROW32, "fp32"))
    if module in SHIFTED:
        constants = {"C": loads.constants(**constants)}
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compile_shares() -> None:
    kernel, constants = hopper.share_kernel, {"M": 2, "SIZE": hopper_common.BLOCK}
    signature = {"KEYS": "*fp32", "SHARES": "*fp16", "TOPS": "*fp32", "padded_keys": "i32"}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = GluonASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


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
    for module in [each for each in MODULES if each.__name__.split(".")[-1] in sys.argv]:
        shifted = module in SHIFTED
        for name, width in hopper.SIZES if shifted else module.SIZES:
            if not hasattr(module, name):
                continue
            hard = (width != 128) == (name == "query_kernel")
            others = (4, 3 * width // 4) if shifted and not hard and width > 32 else ()
            results = [compiled(module, name, width, hard, hard == shifted, *others)]
            if width == 64 and module is not hopper_variances:
                results.append(compiled(module, name, width, False, hard, kind="fp16"))
            memory = max(result.metadata.shared for result in results)
            if memory + 1024 > MEMORY:
                raise SystemExit(f"{name}, {width} wide: {memory} bytes of shared memory")
    if "hopper" in sys.argv:
        compile_shares()
    if "hopper_short" in sys.argv:
        for name, (width, programs) in product(("forward_kernel", "backward_kernel"), ((16, 3), (32, 2))):
            hard = (width == 16) == (name == "forward_kernel")
            result = compiled_short(name, width, hard, causal=not hard)
            if result.metadata.shared + 1024 > MEMORY // programs:
                raise SystemExit(f"{name}, {width} wide: {result.metadata.shared} bytes of shared memory")
