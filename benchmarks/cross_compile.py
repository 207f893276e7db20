"""Compile the kernels of a call for a GPU that need not be there: `python -m benchmarks.cross_compile TARGET CASE...`

TARGET is sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942. A CASE is FAMILY/DTYPE/D/Dv/M/N[/FLAGS], for example
smgk/bf16/128/128/2/512/causal; FLAGS are some of causal, hard, mask, drop, var (a variance per component) and one or
few (that many queries), joined by commas.

For each kernel it prints the shared memory against the limit of the target and, on NVIDIA targets, registers, spilled
bytes and the instructions per query-key pair of the inner loops, by disassembling what Triton compiled.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

LIMITS = {  # shared memory of one block, in KiB
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64,
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BATCH, HEADS = 2, 2


class Driver:
    """In place of the driver of a GPU: Triton asks it what to compile for."""

    def __init__(self, target: str) -> None:
        hip = target.startswith("gfx")
        self.target = GPUTarget("hip", target, 64) if hip else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Compiler:
    """Compiles what would be launched, each kernel once, and keeps a line about it."""

    def __init__(self, target: str) -> None:
        self.target, self.seen, self.over = target, set[str](), 0

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        name = f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"
        compiled = kernel.warmup(*args, grid=grid, **constants)
        if compiled.hash in self.seen:
            return
        self.seen.add(compiled.hash)
        shared, limit = compiled.metadata.shared, LIMITS[self.target] * 1024
        self.over += shared > limit
        settings = next((each for each in args if hasattr(each, "PATH")), None)
        about = ""
        if settings is not None:
            path, heads, queries, keys = (getattr(settings, each).value for each in ("PATH", "HEADS", "BM", "BN"))
            about = f" path {path} heads {heads} tile {queries}x{keys}"
        text = f"{name}{about}: shared {shared} of {limit}{' OVER THE LIMIT' if shared > limit else ''}"
        if "cubin" in compiled.asm:
            text += disassembled(compiled.asm["cubin"], settings, compiled.metadata.num_warps)
        print(text, flush=True)


def disassembled(cubin: bytes, settings: Any, warps: int) -> str:
    """Registers, spilled bytes, and the instructions of inner loops that have matrix products."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def run(*command: str) -> str:
            return subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout

        usage, listing = run(str(tools / "cuobjdump"), "-res-usage"), run(str(tools / "nvdisasm"), "-c")
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    text = f", {found.get('REG')} registers, {found.get('STACK')} bytes of stack"
    for body in inner_loops(listing):
        products = sum("MMA" in line for line in body)
        if products and settings is not None:
            pairs = settings.BM.value * settings.BN.value / (32 * warps)
            text += f", loop {len(body) / pairs:.1f}/pair ({len(body)} instructions, {products} MMA)"
    return text


def inner_loops(listing: str) -> list[list[str]]:
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    loops = []
    for place, text in enumerate(instructions):
        jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        if jump and labels.get(jump[1], place + 1) <= place:
            loops.append((labels[jump[1]], place))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [instructions[start : stop + 1] for start, stop in inner]


def run_case(case: str) -> None:
    """Call the operators on the CPU: everything happens but the launches."""
    from mgk.ops import triton as kernels

    family, dtype_name, *sizes = case.split("/")
    flags = sizes.pop().split(",") if len(sizes) > 4 else []
    width, value_width, components, length = map(int, sizes)
    queries = 1 if "one" in flags else 8 if "few" in flags else length
    train = queries == length

    def make(*shape: int, dtype: torch.dtype = DTYPES[dtype_name]) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_(train)

    query, value = make(BATCH, HEADS, queries, width), make(BATCH, HEADS, length, value_width)
    mask = torch.rand(BATCH, length) < 0.8 if "mask" in flags else None
    variance = torch.ones(HEADS, components) if "var" in flags else math.sqrt(width)
    options: Any = (
        make(HEADS, components, dtype=torch.float32), variance, "hard" if "hard" in flags else "soft",
        "causal" in flags, mask, 0.1 if "drop" in flags else 0.0,
    )  # fmt: skip
    if family == "smgk":
        shift = make(HEADS, components, width, dtype=torch.float32)
        output = kernels.smgk_attention(query, make(BATCH, HEADS, length, width), shift, value, *options)
    else:
        output = kernels.mgk_attention(query, make(BATCH, HEADS, components, length, width), value, *options)
    if train:
        torch.autograd.backward(output, torch.zeros_like(output))


def main(arguments: Sequence[str] | None = None) -> int:
    """The number of kernels that need more shared memory than the target has."""
    target, *cases = sys.argv[1:] if arguments is None else arguments
    if target not in LIMITS:
        raise SystemExit(f"TARGET: expected one of {', '.join(LIMITS)}, got {target!r}")
    triton.runtime.driver._active = Driver(target)
    from mgk.ops import triton as kernels
    from mgk.ops.triton import decode

    compiler = Compiler(target)
    for module in [each for name, each in sys.modules.items() if name.startswith("mgk.ops.triton.")]:
        if callable(getattr(module, "launch", None)):
            module.launch = compiler.launch  # type: ignore[attr-defined]
    kernels.require_support = lambda *_: None  # type: ignore[assignment]
    decode.multiprocessors = lambda device: 108  # type: ignore[assignment]
    for case in cases:
        print(f"{target} {case}")
        run_case(case)
    return compiler.over


if __name__ == "__main__":
    raise SystemExit(main())
