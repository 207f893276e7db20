"""Check and time other tiles of the Hopper kernels: `python -m benchmarks.candidates [CASE...]`, on a Hopper GPU.

A candidate replaces the tile of one kernel: the positions of the other side, the stages of the ring, and for shifted
keys whether the next scores are asked for early. Worker processes compile all of them first. Every candidate is
compared with the formula in float64 and then timed beside what is chosen today, in turns, from CUDA graphs. The best
backend of SDPA with twice the heads is timed too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import operators, problems
from benchmarks.problems import Problem
from mgk.ops import dispatch
from mgk.ops.measure import BACKENDS, Method, capture, in_turns
from mgk.ops.tiles import Tile
from mgk.ops.triton import hopper, hopper_projected, hopper_variances
from mgk.tables import Table

WIDE = Problem("wide", 8, 16, 4096, 64)
HALF = Problem("float16", 8, 16, 4096, 64, dtype="float16")
LONG = Problem("long-wide", 4, 16, 8192, 128, is_causal=True)
PADDED = next(each for each in problems.VARIATIONS if each.padded)
NARROW = Problem("lra-4096", 32, 8, 4096, 32)


class Candidate(NamedTuple):
    """`table` is a module's table of tiles, by kernel and width, or empty for a tile of the generic kernels."""

    table: str
    kernel: str
    width: int
    size: tuple[Any, ...]

    @property
    def label(self) -> str:
        return f"{self.kernel} {self.size}" if self.kernel else "today"


TODAY = Candidate("", "", 0, ())


class Row(NamedTuple):
    """A case, its method, its target of SDPA's time over ours, and candidates."""

    name: str
    problem: Problem
    method: Method
    target: float
    candidates: list[Candidate]


def sizes(table: str, width: int, **others: list[tuple[Any, ...]]) -> list[Candidate]:
    return [Candidate(table, f"{kernel}_kernel", width, size) for kernel, found in others.items() for size in found]


def generic(width: int, **others: list[Tile]) -> list[Candidate]:
    return [Candidate("", kernel, width, tuple(size)) for kernel, found in others.items() for size in found]


ROWS = [
    Row("sMGK M=3", WIDE, Method("smgk", components=3), 1.5, sizes("hopper", 64, query=[(64, 8, False)])),
    Row("sMGK float16", HALF, Method("smgk"), 1.55, sizes("hopper", 64, forward=[(64, 8, True), (128, 4, False)])),
    Row("MGK float16", HALF, Method("mgk"), 1.05, sizes("hopper_projected", 64, forward=[(64, 5)])),
    Row("sMGK variances", WIDE, Method("smgk", variances=True), 1.2, sizes(
        "hopper_variances", 64, forward=[(128, 5)], query=[(64, 6), (128, 3)], key=[(64, 4)])),
    Row("MGK M=3", WIDE, Method("mgk", components=3), 0.75, generic(
        64, query=[Tile(128, 32, 8, 2), Tile(64, 32, 4, 3)], key=[Tile(32, 64, 4, 2), Tile(32, 32, 4, 3)])),
    Row("MGK D=128", LONG, Method("mgk"), 1.0, []),
    Row("MGK hard D=128", LONG, Method("mgk", "hard"), 1.1, []),
    Row("sMGK D=32", NARROW, Method("smgk"), 2.0, []),
    Row("sMGK half padded", PADDED, Method("smgk"), 3.0, []),  # of the time of the row before, here not shown
]  # fmt: skip


@contextmanager
def chosen(candidate: Candidate, method: Method) -> Iterator[None]:
    """Let a kernel use the candidate's tile."""
    table = {"hopper": hopper, "hopper_projected": hopper_projected, "hopper_variances": hopper_variances}
    dispatch.override.clear()
    dispatch.plan.cache_clear()
    known = table[candidate.table].SIZES if candidate.table else {}
    place = (candidate.kernel, candidate.width)
    before = known.get(place)
    try:
        if candidate.table:
            known[place] = candidate.size
        elif candidate.kernel:
            family = "shifted" if method.operator == "smgk" else "projected"
            dispatch.override[family, candidate.kernel] = Tile(*candidate.size)
        yield
    finally:
        if before is not None:
            known[place] = before
        dispatch.override.clear()
        dispatch.plan.cache_clear()


def prepare(job: tuple[int, Candidate]) -> str:
    """Compile the kernels of a case with a candidate. Return why it cannot run, empty if it can."""
    place, candidate = job
    row = ROWS[place]
    small = row.problem if row.problem.padded else Problem(**{**vars(row.problem), "batch": 1, "heads": 2})
    try:
        with chosen(candidate, row.method):
            operators.calls(small, row.method)
    except Exception as error:
        return operators.explain(error)
    return ""


def measure_row(row: Row, candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Errors and times of a case."""
    works: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    alive: list[Any] = []  # a graph reads the inputs of what it has recorded
    for candidate in [TODAY, *candidates]:
        try:
            with chosen(candidate, row.method):
                error = max(operators.error(row.problem, row.method).values())
                eager = operators.calls(row.problem, row.method)
                works[candidate.label] = {kind: capture(eager[kind]) for kind in ("forward", "train")}
                alive.append(eager)
        except Exception as reason:
            found[candidate.label] = {"failed": operators.explain(reason)}
            continue
        found[candidate.label] = {"error": error}
    for name in BACKENDS:
        try:
            eager = operators.calls(row.problem, name)
            works[name] = {kind: capture(eager[kind]) for kind in ("forward", "train")}
            alive.append(eager)
        except Exception:  # it has no kernel for this case
            works.pop(name, None)
    times = {kind: in_turns({name: work[kind] for name, work in works.items()}) for kind in ("forward", "train")}
    anchors = [name for name in BACKENDS if name in works]
    results = []
    for name, known in found.items():
        result = {"case": row.name, "target": row.target, "candidate": name, **known}
        for kind in times:
            if name in times[kind]:
                best = min((times[kind][each] for each in anchors), default=float("nan"))
                today = times[kind].get("today", float("nan"))
                result[kind] = {"ms": times[kind][name], "to_today": today / times[kind][name],
                                "to_sdpa": best / times[kind][name]}  # fmt: skip
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.candidates", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(row.name for row in ROWS)}; all without")
    parser.add_argument("--only-today", action="store_true", help="no other tiles")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--output", default="candidates.json")
    options = parser.parse_args()
    begin = time.perf_counter()
    places = [place for place, row in enumerate(ROWS) if not options.cases or row.name in options.cases]
    jobs = [
        (place, each) for place in places for each in [TODAY, *([] if options.only_today else ROWS[place].candidates)]
    ]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        failed = dict(zip(jobs, pool.map(prepare, jobs), strict=True))
    print(f"compiled {len(jobs)} in {time.perf_counter() - begin:.0f} s", flush=True)
    results = []
    for place in places:
        row = ROWS[place]
        runs = [each for key, each in jobs if key == place and each != TODAY and not failed[key, each]]
        for key, each in jobs:
            if key == place and failed[key, each]:
                print(f"{row.name}, {each.label}: {failed[key, each]}", flush=True)
        results += measure_row(row, runs)
        torch.cuda.empty_cache()
        print(table(results[-len(runs) - 1 :]), flush=True)
        Path(options.output).write_text(json.dumps(results))
    print(f"{time.perf_counter() - begin:.0f} s in all")


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for each in results:
        cells = [each["case"], each["candidate"], f"{each['error']:.2f}" if "error" in each else each["failed"][:60]]
        for kind in ("forward", "train"):
            numbers = each.get(kind)
            cells += ["-"] * 3
            if numbers:
                cells[-3:] = [f"{numbers['ms']:.3f}", f"{numbers['to_today']:.3f}", f"{numbers['to_sdpa']:.2f}"]
        lines.append([*cells, f"{each['target']}"])
    header = ["case", "candidate", "error / eager", "forward ms", "to today", "to SDPA",
              "both ms", "to today", "to SDPA", "target"]  # fmt: skip
    return Table(header, lines, left=(0, 1)).markdown()


if __name__ == "__main__":
    main()
