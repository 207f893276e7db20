"""Fill the tables of the paper and write the report: `python -m experiments.reproduce`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.reproduce import grid, records
from experiments.reproduce.report import FIGURES, read_timings, report
from experiments.reproduce.runner import RESULTS, RUNS, Tally, run_cells
from experiments.reproduce.steps import STEPS, measure, read_steps
from mgk.files import write_text

What = Literal["table1", "table2", "table3", "table4", "checkpoints", "ablations", "all", "steps", "figures"]
REPORT = Path("docs") / "results.md"
WRITE = "python -m experiments.reproduce figures"


def reproduce(
    what: What,
    *,
    budget: float | None = None,
    jobs: int = 1,
    seeds: int = grid.SEEDS,
    recipes: Sequence[str] = (),
    heads: Sequence[int] = (),
    cells: Sequence[str] = (),
    check: bool = False,
    results: Path = RESULTS,
    runs: Path = RUNS,
    out: Path = REPORT,
    data_root: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Tally | None:
    """Train the chosen cells, or write or check the report.

    A check that fails raises ValueError; failed cells raise RuntimeError.
    """
    if check:
        verify(results, out)
        return None
    if what == "figures":
        write(results, out)
        return None
    chosen = [grid.Cell.parse(name) for name in cells]
    if what == "steps":
        chosen = chosen or grid.cells("all", seeds=1, tasks=recipes, heads=heads)
        absent = measure(chosen, results.parent / STEPS.name, data_root=data_root, device=device)
        tell_absent(absent)
        return None
    chosen = chosen or grid.cells(what, seeds=seeds, tasks=recipes, heads=heads)
    tally = run_cells(
        chosen, budget=budget, jobs=jobs, results=results, runs=runs, data_root=data_root, device=device, quiet=False
    )
    tell_absent(tally.absent)
    before = len(chosen) - sum(map(len, (tally.finished, tally.failed, tally.left)))
    before -= sum(cell.task in tally.absent and not records.path_of(results, cell).exists() for cell in chosen)
    print(
        f"{len(tally.finished)} cells finished, {before} had been before, {len(tally.failed)} failed, "
        f"{len(tally.left)} are left for the same command; records in {results}"
    )
    if tally.failed:
        raise RuntimeError(f"{len(tally.failed)} cells failed; {next(iter(tally.failed.values()))}")
    return tally


def tell_absent(absent: Mapping[str, str]) -> None:
    for task, reason in absent.items():
        print(f"{task}: left out: {reason}")


def text(found: Sequence[records.Record], results: Path) -> str:
    return report(found, read_timings(results.parent / "bench-cuda.json"), read_steps(results.parent / STEPS.name))


def read(results: Path) -> list[records.Record]:
    """Of nothing there is no report: a folder that is misspelt would empty the one that is there."""
    found = records.read_all(results)
    if not found:
        raise ValueError(f"results: expected a folder with records, RECIPE/CELL.json each, found none in {results}")
    return found


def write(results: Path, out: Path) -> None:
    """The report, and its figures where matplotlib is."""
    found = read(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text(found, results))
    print(f"written to {out}")
    try:
        from experiments.reproduce.figures import draw
    except ImportError as error:
        print(f"no figures: {error}")
        return
    for path in draw(found, out.parent / FIGURES):
        print(f"written to {path}")


def verify(results: Path, out: Path) -> None:
    """The records are those of the grid, the report is what they say, and its pictures are there."""
    found = read(results)
    complaints = records.stale(found)
    if complaints:
        raise ValueError(f"{len(complaints)} records are not of the present grid: {complaints[0]}")
    page = out.read_text(encoding="utf-8") if out.exists() else ""
    if page != text(found, results):
        raise ValueError(f"{out} does not follow from the records in {results}; type: {WRITE}")
    absent = [name for name in re.findall(r"!\[.*?\]\((.+?)\)", page) if not (out.parent / name).is_file()]
    if absent:
        raise ValueError(f"{out}: {len(absent)} of its pictures are not there: {absent[0]}; type: {WRITE}")
    print(f"{out} follows from the {len(found)} records in {results}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.reproduce", description="Fill the tables of the paper.")
    parser.add_argument("what", choices=get_args(What), nargs="?", default="all")
    parser.add_argument("--budget", type=float, help="minutes to stop within")
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side on one device")
    parser.add_argument("--seeds", type=int, default=grid.SEEDS, help="trainings of each row")
    parser.add_argument("--recipes", nargs="+", default=(), help=f"some of {', '.join(grid.TASKS)}")
    parser.add_argument("--heads", type=int, nargs="+", default=(), help="groups of rows by heads of their baseline")
    parser.add_argument(
        "--cells", nargs="+", default=(), help="these cells alone, RECIPE/ATTENTION-hHEADS[-OPTION]-sSEED"
    )
    parser.add_argument(
        "--check", action="store_true", help="verify that the report follows from the records, and has its figures"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    chosen: dict[str, Any] = vars(parser.parse_args(arguments))
    try:
        reproduce(**chosen)
    except (ValueError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
