"""Compile the kernels of ops/triton/hopper*.py for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from mgk.ops.triton import hopper, hopper_mixture


def descriptor(rows: int, width: int, layout: Any, kind: str = "bf16", rank: int = 2) -> str:
    shape = [1] * (rank - 2) + [rows, width]
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>"


def compiled(module: Any, name: str, width: int, hard: bool, causal: bool) -> Any:
    kernel, tile, thin = getattr(module, name), hopper.TILE, hopper.THIN.value
    constants: dict[str, Any] = {"CAUSAL": causal, "BEST": hard, **module.sizes(name, width)}
    constants["POSITIONS" if name == "key_kernel" else "EVEN"] = causal
    queries, keys, projected = constants["BM"], constants["BN"], module is hopper_mixture
    other = queries if name == "key_kernel" else keys
    kinds = {
        "q_desc": descriptor(queries, width, tile, rank=4), "g_desc": descriptor(queries, width, tile, rank=4),
        "k_desc": descriptor(keys, width, hopper_mixture.KEY_TILE if projected else tile, rank=4 + projected),
        "v_desc": descriptor(keys, width, tile, rank=4), "c_desc": descriptor(other, 16, thin),
        "w_desc": descriptor(1, other, hopper.ROW16), "gap_desc": descriptor(1, other, hopper.ROW16, "fp16"),
        "r_desc": descriptor(1, other, hopper.ROW32, "fp32"), "n_desc": descriptor(1, other, hopper.ROW16),
        **dict.fromkeys(("OUT", "DQ", "DK", "DV", "NARROW_ROWS", "ROW_COLUMNS", "SHIFT"), "*bf16"),
        **dict.fromkeys(("ROWS", "FAR_HEADS", "KNOWN_ROWS", "PART", "KEYS", "DLW"), "*fp32"),
        **dict.fromkeys(("scale", "inverse_variance"), "fp32"),
    }  # fmt: skip
    if projected:
        kinds["KEYS"] = "*fp32" if hard else "*bf16"
        kinds["w_desc"] = descriptor(1, other, hopper.ROW32, "fp32") if hard else kinds["w_desc"]
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    names = "forward_kernel", "query_kernel", "key_kernel"
    for module, name, width in product((hopper, hopper_mixture), names, (64, 128)):
        hard = (width == 64) == (name == "query_kernel")
        result = compiled(module, name, width, hard, causal=hard == (module is hopper))
        if result.metadata.shared > 232448:  # what a multiprocessor has
            raise SystemExit(f"{name}, {width} wide: {result.metadata.shared} bytes of shared memory")
