"""Compile the kernels for GPUs that need not be there: `python -m benchmarks.cross_compile [TARGET [CASE...]]`

TARGET is sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942. A CASE is FAMILY/DTYPE/D/Dv/M/N[/FLAGS], for example
smgk/bf16/128/128/2/512/causal. FAMILY is smgk, mgk, smlk, mlk (linear attention), prior (the M-step) or loss (D is the
width of the model, N its vocabulary). FLAGS are some of causal, hard, mask, drop, var (a variance per component), tf32
(allow it), group (the heads share keys), window (of 200), lse (it is returned) and one or few (that many queries),
joined by commas.

With cases it prints for each kernel the shared memory against the limit of the target, registers, spilled bytes and, on
NVIDIA targets, the instructions per query-key pair of the inner loops, by disassembling what Triton compiled. Without
cases it compiles a list of them, for all targets or one, prints the largest numbers of each kernel and writes those of
each case to results/cross-compile.json. The exit status says whether all kernels fit, with few spilled bytes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Triton is imported, which decides then
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from mgk.ops.options import Options, Visibility
from mgk.ops.tiles import shared_memory
from mgk.tables import Table

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SPILLED = 512  # bytes per thread that a kernel may spill
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
BATCH, HEADS, VOCABULARY = 2, 2, 4096
OUTPUT = Path("results/cross-compile.json")


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


@dataclass(frozen=True)
class Kernel:
    """What a compiled kernel needs: bytes of shared memory, registers per thread and spilled bytes per thread."""

    name: str
    shared: int
    registers: int
    spilled: int
    about: str = ""


class Compiler:
    """Compiles what would be launched, each kernel once."""

    def __init__(self, target: str, verbose: bool) -> None:
        self.verbose, self.seen, self.kernels = verbose, set[str](), list[Kernel]()
        self.limit = shared_memory(capability(target), target.startswith("gfx"))

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        name = f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"
        compiled = kernel.warmup(*args, grid=grid, enable_fp_fusion=True, **constants)
        settings = next((each for each in args if hasattr(each, "PATH")), None)
        about = ""
        if settings is not None:
            path, heads, queries, keys = (getattr(settings, each).value for each in ("PATH", "HEADS", "BM", "BN"))
            about = f" path {path} heads {heads} tile {queries}x{keys}"
        found = Kernel(name, compiled.metadata.shared, *resources(compiled), about)
        self.kernels.append(found)
        if self.verbose and compiled.hash not in self.seen:
            text = f"{name}{about}: shared {found.shared} of {self.limit}, {found.registers} registers, "
            text += f"{found.spilled} bytes spilled{'' if self.fits(found) else ' DOES NOT FIT'}"
            if "cubin" in compiled.asm and settings is not None:
                text += loops(compiled.asm["cubin"], settings, compiled.metadata.num_warps)
            print(text, flush=True)
        self.seen.add(compiled.hash)

    def fits(self, kernel: Kernel) -> bool:
        return kernel.shared <= self.limit and kernel.spilled <= SPILLED


def capability(target: str) -> tuple[int, int] | None:
    return None if target.startswith("gfx") else divmod(int(target.removeprefix("sm_")), 10)


def resources(compiled: Any) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    if "cubin" in compiled.asm:
        usage = run_tool(compiled.asm["cubin"], "cuobjdump", "-res-usage")
        found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
        return int(found["REG"]), int(found["STACK"])
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", compiled.asm["amdgcn"]))
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])


def run_tool(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool), *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(cubin: bytes, settings: Any, warps: int) -> str:
    """The instructions of inner loops that have matrix products."""
    text = ""
    for body in inner_loops(run_tool(cubin, "nvdisasm", "-c")):
        products = sum("MMA" in line for line in body)
        if products:
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
    from mgk.ops.triton import cross_entropy, linear, scan

    family, dtype_name, *sizes = case.split("/")
    flags = sizes.pop().split(",") if len(sizes) > 4 else []
    width, value_width, components, length = map(int, sizes)
    queries = 1 if "one" in flags else 8 if "few" in flags else length
    train = queries == length and family != "prior"
    torch.backends.cuda.matmul.fp32_precision = "tf32" if "tf32" in flags else "ieee"

    def make(*shape: int, dtype: torch.dtype = DTYPES[dtype_name]) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_(train)

    if family == "loss":
        target = torch.zeros(BATCH * HEADS, dtype=torch.long)
        bias = make(length, dtype=torch.float32)
        losses = cross_entropy.linear_cross_entropy(make(BATCH * HEADS, width), make(length, width), bias, target)
        torch.autograd.backward(losses.sum())
        return
    shifted = family in ("smgk", "smlk") or (family == "prior" and "var" not in flags)
    key_heads = 1 if "group" in flags else HEADS
    query, value = make(BATCH, HEADS, queries, width), make(BATCH, key_heads, length, value_width)
    key = make(BATCH, key_heads, *(() if shifted else (components,)), length, width)
    shift = make(HEADS, components, width, dtype=torch.float32) if shifted else None
    prior = make(HEADS, components, dtype=torch.float32)
    mask = torch.rand(BATCH, length) < 0.8 if "mask" in flags else None
    variance = torch.ones(HEADS, components) if "var" in flags else math.sqrt(width)
    causal = "causal" in flags
    visibility = Visibility(causal, 200 if "window" in flags else None, mask)
    if family == "prior":
        kernels.prior_statistics(query, key, shift, Options(prior, variance, visibility))
        return
    if family in ("smlk", "mlk"):
        attend = scan.scan_attention if causal else linear.linear_attention
        output = attend(query, key, shift, value, prior, mask)
    else:
        options = Options(prior, variance, visibility, "hard" in flags, 0.1 * ("drop" in flags), "lse" in flags)
        if shift is not None:
            output, lse = kernels.smgk_attention(query, key, shift, value, options)
        else:
            output, lse = kernels.mgk_attention(query, key, value, options)
        if lse is not None:
            output = output + lse[..., None].to(output.dtype)
    if train:
        torch.autograd.backward(output, torch.zeros_like(output))


def start(target: str, verbose: bool = False) -> Compiler:
    """Let this process compile for a target, once."""
    hip = target.startswith("gfx")
    triton.runtime.driver._active = Driver(target)
    torch.version.hip = "6" if hip else None  # type: ignore[assignment]
    from mgk.ops import triton as kernels
    from mgk.ops.triton import cross_entropy, decode, linear, scan, self_check  # noqa: F401

    compiler = Compiler(target, verbose)
    for name, module in list(sys.modules.items()):
        if name.startswith("mgk.ops"):
            if callable(vars(module).get("launch")):
                module.launch = compiler.launch  # type: ignore[attr-defined]
            if "capability" in vars(module):
                module.capability = lambda device: capability(target)  # type: ignore[attr-defined]
    self_check.forced = False  # the Hopper kernels are compiled by tests
    kernels.require_support = lambda *_: None  # type: ignore[assignment]
    decode.multiprocessors = lambda device: 108  # type: ignore[assignment]
    return compiler


def cases() -> list[str]:
    """Every family, type, width, number of components and feature, in few combinations."""
    found = []
    features = cycle(("causal", "mask", "hard", "causal,drop", "causal,mask,hard", "drop,mask", "causal,hard,drop"))
    for family, dtype, width in product(("smgk", "mgk"), DTYPES, WIDTHS):
        found.append(f"{family}/{dtype}/{width}/{width}/2/512/{next(features)}")
    for family, dtype, components in product(("smgk", "mgk"), DTYPES, (1, 3, 4, 8)):
        width = 128 if dtype == "bf16" else 64
        found.append(f"{family}/{dtype}/{width}/{width}/{components}/512/{next(features)}")
    for dtype in DTYPES:
        found += [f"mgk/{dtype}/{width}/{width}/2/512/var,{next(features)}" for width in (64, 128, 256)]
        found += [f"{family}/{dtype}/64/128/2/500/{next(features)}" for family in ("smgk", "mgk")]
        if dtype != "f32":  # not on all targets
            found += [f"mgk/{dtype}/256/256/{components}/512/{next(features)}" for components in (4, 8)]
        found += [
            f"{family}/{dtype}/{width}/{width}/{components}/4096/{queries}"
            for family, width, components in (("smgk", 64, 2), ("mgk", 256, 8), ("mgk", 128, 4), ("smgk", 256, 3))
            for queries in ("one", "few,mask")
        ]
        found += [
            f"{family}/{dtype}/{width}/{width}/{components}/512/{kind}"
            for family, width, components in (("smlk", 64, 2), ("mlk", 64, 3), ("smlk", 32, 4))
            for kind in ("causal", "mask")
        ]
        found += [f"prior/{dtype}/{width}/{width}/{components}/512/{kind}" for width, components, kind in (
            (64, 2, "causal"), (256, 4, "mask"), (128, 8, "var"), (256, 2, "var,causal"))]  # fmt: skip
        found += [f"loss/{dtype}/{width}/0/0/{VOCABULARY}" for width in (64, 256)]
    found += [f"smgk/f32/{width}/{width}/2/512/tf32" for width in (64, 128)]
    found += [f"mgk/f32/{width}/{width}/2/512/tf32" for width in (64, 128)]
    found += [
        f"smgk/bf16/{width}/{width}/2/256/{flags}" for width in (16, 32) for flags in ("causal", "hard,mask,drop")
    ]
    return found


def compile_case(job: tuple[str, str]) -> list[Kernel] | str:
    """Compile a case in a worker process, which handles one target."""
    target, case = job
    if target not in compilers:
        compilers[target] = start(target)
    compilers[target].kernels.clear()
    try:
        run_case(case)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return list(compilers[target].kernels)


compilers: dict[str, Compiler] = {}


def sweep(targets: Sequence[str]) -> int:
    """Compile all cases, print a table and write the file. Return how many cases do not fit."""
    rows, failed = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else [], 0
    rows = [row for row in rows if row["target"] not in targets]
    for target in targets:
        compiler, largest = Compiler(target, False), dict[str, Kernel]()
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            for case, found in zip(cases(), pool.imap(compile_case, [(target, case) for case in cases()]), strict=True):
                row: dict[str, object] = {"target": target, "case": case}
                if isinstance(found, str):
                    row["error"] = found
                else:
                    row |= {
                        name: max(getattr(each, name) for each in found) for name in ("shared", "registers", "spilled")
                    }
                if isinstance(found, str) or not all(map(compiler.fits, found)):
                    failed += 1
                    print(f"DOES NOT FIT: {row}", flush=True)
                rows.append(row)
                for each in found if not isinstance(found, str) else ():
                    known = largest.get(each.name, each)
                    numbers = (
                        max(getattr(known, name), getattr(each, name)) for name in ("shared", "registers", "spilled")
                    )
                    largest[each.name] = Kernel(each.name, *numbers)
        lines = [[each.name, f"{each.shared:,}", str(each.registers), f"{each.spilled:,}"] for each in largest.values()]
        title = f"{target}, {compiler.limit:,} bytes of shared memory"
        print(
            Table(["kernel", "shared memory", "registers", "spilled bytes"], sorted(lines), title).markdown(),
            flush=True,
        )
        head = json.dumps({"triton": triton.__version__})[:-1]
        OUTPUT.write_text(head + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all kernels fit."""
    target, *chosen = (sys.argv[1:] if arguments is None else arguments) or ["all"]
    if target not in (*TARGETS, "all"):
        raise SystemExit(f"TARGET: expected one of {', '.join(TARGETS)}, got {target!r}")
    if not chosen:
        return int(sweep(TARGETS if target == "all" else [target]) > 0)
    compiler = start(target, verbose=True)
    for case in chosen:
        print(f"{target} {case}")
        run_case(case)
    return int(not all(map(compiler.fits, compiler.kernels)))


if __name__ == "__main__":
    raise SystemExit(main())
