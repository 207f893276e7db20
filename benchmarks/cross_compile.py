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

import argparse
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Triton is imported, which decides then
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from mgk.ops.options import Options, Pages, Visibility
from mgk.ops.tiles import shared_memory
from mgk.tables import Table

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SPILLED = 512  # bytes per thread that a kernel may spill
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
BATCH, HEADS, VOCABULARY = 2, 2, 4096
OUTPUT = Path("results/cross-compile.json")
Row = dict[str, Any]  # "kernels" with the numbers of each, or "error"
REFUSED = "ValueError: query: no tile"  # the error of a call that no kernel takes
# Which kernels may spill more: a pattern of "TARGET CASE KERNEL", how many bytes, and why.
EXCEPTIONS = (
    (r"sm_90 mgk/(bf|f)16/\d+/\d+/[3-8]/512", 16384, "these tiles take 1/2.4 of the time of some that do not (H200)"),
    (r"sm_90 s?mgk/(bf|f)16/(192|256)/", 16384, "these tiles take 1/1.7 of the time of some that do not (H200)"),
    (r"sm_90 mgk/(bf|f)16/128/\S+ projected.key", 640, "the launch for heads that would overflow: few calls have one"),
    (r"\S+ mgk/f32/(192|256)/", 4096, "16 x 16 is the smallest tile of a product"),
    (r"\S+ s?mlk/f32/\S+causal\S* scan", 576, "16 positions are the smallest tile of a product"),
)


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
        losses = cross_entropy.losses_of_rows(make(BATCH * HEADS, width), make(length, width), bias, target)
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
        page = next((int(flag.removeprefix("page")) for flag in flags if flag.startswith("page")), 0)
        if page:  # a pool of `length` pages, of which a row may have all
            pools = [x.detach().movedim(-2, 0)[:, 0].unsqueeze(-2).expand(*(-1,) * x.dim()) for x in (key, value)]
            pools = [x.expand(*x.shape[:-2], page, -1).contiguous() for x in pools]
            where = torch.zeros(BATCH, length // page, dtype=torch.int32), torch.zeros(BATCH, dtype=torch.int32)
            pages, softmax = Pages(*where, length), "softmax" in flags
            output, lse = kernels.attend_to_cache(query, pools[0], shift, pools[1], options, pages, softmax)
        elif shift is not None:
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
        found += [f"mgk/{dtype}/256/256/{components}/512/{next(features)}" for components in (4, 8)]
        found += [
            f"{family}/{dtype}/{width}/{width}/{components}/4096/{queries}"
            for family, width, components in (("smgk", 64, 2), ("mgk", 256, 8), ("mgk", 128, 4), ("smgk", 256, 3))
            for queries in ("one", "few,mask")
        ]
        found += [
            f"smgk/{dtype}/64/64/2/4096/{kind},{page}" for kind in ("one", "few") for page in ("page16", "page64")
        ]
        found.append(f"mgk/{dtype}/128/128/1/4096/one,causal,window,page64,softmax")
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


def few_cases() -> list[str]:
    """Those of the widest heads or the most components of each kernel, and some of those people have most."""
    chosen = (
        "smgk/bf16/(64|128|256)/.*/2/512/", "smgk/bf16/128/128/8/", "smgk/f16/64/64/3/", "smgk/bf16/.*/256/",
        "mgk/bf16/(64|128|256)/.*/2/512/", "mgk/bf16/256/256/4/", "mgk/bf16/128/128/3/",
        "mgk/f16/128/128/2/512/(causal|var)", "s?mgk/f32/(64|128|256)/.*/2/512/", "mgk/f32/(64|256)/.*/[48]/512/",
        "mgk/bf16/256/256/8/4096/few", "smgk/f32/256/256/3/4096/few", "s?mlk/(bf16|f32)/64/",
        "prior/(bf16|f32)/256/256/4/", "prior/bf16/128/", "loss/(bf16|f32)/256/",
    )  # fmt: skip
    return [case for case in cases() if any(re.match(each, case) for each in chosen)]


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


def sweep(targets: Sequence[str], chosen: Sequence[str], processes: int) -> int:
    """Compile cases, print a table and write the file after each. Return how many are not as they should be."""
    rows = read_rows()
    for target in targets:
        jobs = [(target, case) for case in chosen if (target, case) not in rows]
        with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs) or 1), maxtasksperchild=20) as pool:
            for job, found in zip(jobs, pool.imap(compile_case, jobs), strict=True):
                rows[job] = {"error": found} if isinstance(found, str) else {"kernels": summary(found)}
                write_rows(rows)
                for problem in problems(*job, rows[job]):
                    print(problem, flush=True)
        print(table(target, rows), flush=True)
    return sum(len(problems(*job, row)) for job, row in rows.items() if job[0] in targets)


def summary(found: Sequence[Kernel]) -> dict[str, list[int]]:
    """The most shared memory, registers and spilled bytes of each kernel of a case."""
    names = dict.fromkeys(each.name for each in found)
    kernels = {name: [each for each in found if each.name == name] for name in names}
    return {
        name: [max(getattr(each, number) for each in group) for number in ("shared", "registers", "spilled")]
        for name, group in kernels.items()
    }


def problems(target: str, case: str, row: Row) -> list[str]:
    """What is over a limit, and what does not compile though it is not expected to be refused."""
    if "error" in row:
        refused = row["error"].startswith(REFUSED)
        return [] if refused else [f"{target} {case}: {row['error']}"]
    limit, found = shared_memory(capability(target), target.startswith("gfx")), []
    for name, (shared, _, spilled) in row["kernels"].items():
        if shared > limit:
            found.append(f"{target} {case} {name}: {shared:,} of {limit:,} bytes of shared memory")
        if spilled > allowed_spills(target, case, name):
            found.append(f"{target} {case} {name}: {spilled:,} bytes spilled")
    return found


def allowed_spills(target: str, case: str, kernel: str) -> int:
    name = f"{target} {case} {kernel}"
    return max((most for pattern, most, _ in EXCEPTIONS if re.match(pattern, name)), default=SPILLED)


def table(target: str, rows: Mapping[tuple[str, str], Row]) -> str:
    """The largest numbers of each kernel on a target."""
    largest: dict[str, list[int]] = {}
    for (each, _), row in rows.items():
        for name, numbers in row.get("kernels", {}).items() if each == target else ():
            largest[name] = [max(pair) for pair in zip(numbers, largest.get(name, numbers), strict=True)]
    limit = shared_memory(capability(target), target.startswith("gfx"))
    lines = [[name, *(f"{number:,}" for number in numbers)] for name, numbers in sorted(largest.items())]
    title = f"{target}, {limit:,} bytes of shared memory"
    return Table(["kernel", "shared memory", "registers", "spilled bytes"], lines, title).markdown()


def read_rows() -> dict[tuple[str, str], Row]:
    if not OUTPUT.exists():
        return {}
    return {(row.pop("target"), row.pop("case")): row for row in json.loads(OUTPUT.read_text())["rows"]}


def write_rows(rows: Mapping[tuple[str, str], Row]) -> None:
    lines = [json.dumps({"target": target, "case": case} | row) for (target, case), row in sorted(rows.items())]
    head = {
        "about": "Shared memory, registers and spilled bytes of each kernel, by `python -m benchmarks.cross_compile`.",
        "triton": triton.__version__,
    }
    OUTPUT.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all kernels are within their limits."""
    parser = argparse.ArgumentParser("python -m benchmarks.cross_compile", description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="?", default="all", choices=(*TARGETS, "all"), metavar="TARGET")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--few", action="store_true", help="every kernel, but not every type and width")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if not options.cases:
        targets = TARGETS if options.target == "all" else [options.target]
        return int(sweep(targets, few_cases() if options.few else cases(), options.processes) > 0)
    compiler = start(options.target, verbose=True)
    for case in options.cases:
        print(f"{options.target} {case}")
        run_case(case)
    return int(not all(map(compiler.fits, compiler.kernels)))


if __name__ == "__main__":
    raise SystemExit(main())
