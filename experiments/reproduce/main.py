"""Reproduce the tables of the paper: train their cells, then write or check the report.

    python -m experiments.reproduce table1 --recipes listops text --seeds 3 --jobs 3 --budget 60
    python -m experiments.reproduce steps        time a training step of every row
    python -m experiments.reproduce figures      write docs/results.md and its figures
    python -m experiments.reproduce --check      verify that docs/results.md follows from the records

A cell is one training: a recipe, an attention, its heads, at most one option, and a seed. A finished cell has a record
in results/cells and is not trained again. A session that was stopped resumes with the same command.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.cells.records import path_of, stale
from experiments.cells.report import write_report
from experiments.cells.runner import run_cells
from experiments.cells.steps import STEPS, measure, read_steps
from experiments.lm.folders import read as read_study
from experiments.lm.page import page
from experiments.reproduce import RESULTS, RUNS, grid
from experiments.reproduce.claims import quality_claims
from experiments.reproduce.report import FIGURES, older_verdicts, read_timings, report, tabulate

REPORT = Path("docs") / "results.md"
WRITE = "python -m experiments.reproduce figures"
EXPLAINED = """what to do:
  table1             train the rows of Table 1: softmax, sMGK and MGK on the Long Range Arena
  table2             of Table 2: linear, sMLK and MLK on the Long Range Arena
  table3             of Table 3: language models
  table4             of Table 4: ways to learn the mixture
  checkpoints        of the comparison with more frequent validation
  ablations          of the ablations
  all                of all of these (the default)
  steps              time a training step of every row, into results/steps.json
  figures            write the report and its figures
"""


def reproduce(options: argparse.Namespace) -> None:
    """Train the selected cells, time their steps, or write or check the report; see `parse` for the options.

    Raises ValueError if a check fails, RuntimeError if a cell fails.
    """
    results, where = options.results, {"data_root": options.data_root, "device": options.device}
    if options.check:
        verify(results, options.out)
        return
    if options.what == "figures":
        write(results, options.out)
        return
    timing = options.what == "steps"
    target, seeds = ("all", 1) if timing else (options.what, options.seeds)
    chosen = [grid.Cell.parse(name) for name in options.cells]
    chosen = chosen or grid.cells(target, seeds=seeds, tasks=options.recipes, heads=options.heads)
    if timing:
        tell_absent(measure(chosen, results.parent / STEPS.name, **where))
        return
    limits = {"budget": options.budget, "jobs": options.jobs}
    tally = run_cells(chosen, results=results, runs=options.runs, quiet=False, **limits, **where)
    tell_absent(tally.absent)
    before = len(chosen) - sum(map(len, (tally.finished, tally.failed, tally.left)))
    before -= sum(cell.task in tally.absent and not path_of(results, cell).exists() for cell in chosen)
    print(
        f"{len(tally.finished)} cells finished, {before} were finished before, {len(tally.failed)} failed, "
        f"{len(tally.left)} remain; the same command continues; records in {results}"
    )
    if tally.failed:
        raise RuntimeError(f"{len(tally.failed)} cells failed; {next(iter(tally.failed.values()))}")


def tell_absent(absent: Mapping[str, str]) -> None:
    """Print the tasks that were skipped for lack of data."""
    for task, reason in absent.items():
        print(f"{task}: skipped: {reason}")


def text(found: Sequence[grid.Record], results: Path) -> str:
    """Return the report, with the timings and the study that lie beside the folder of records."""
    timings, steps = read_timings(results.parent / "bench-cuda.json"), read_steps(results.parent / STEPS.name)
    study = results.parent / "lm"
    older = older_verdicts(quality_claims(tabulate(found)))
    return report(found, timings, steps, page(read_study(study), read_steps(study / STEPS.name), older))


def read(results: Path) -> list[grid.Record]:
    """Read all records. Without any, raise: a misspelt folder would otherwise replace the report by an empty one."""
    found = grid.read_all(results)
    if not found:
        raise ValueError(f"results: expected a folder with records, RECIPE/CELL.json each, found none in {results}")
    return found


def write(results: Path, out: Path) -> None:
    """Write the report and, if matplotlib is installed, its figures."""
    found = read(results)
    write_report(out, text(found, results), "experiments.reproduce.figures", found, folder=out.parent / FIGURES)


def verify(results: Path, out: Path) -> None:
    """Check that the records match the grid, that the report follows from them, and that its figures exist."""
    found = read(results)
    complaints = stale(found)
    if complaints:
        raise ValueError(f"{len(complaints)} records do not match the grid: {complaints[0]}")
    page = out.read_text(encoding="utf-8") if out.exists() else ""
    if page != text(found, results):
        raise ValueError(f"{out} does not follow from the records in {results}; run: {WRITE}")
    absent = [name for name in re.findall(r"!\[.*?\]\((.+?)\)", page) if not (out.parent / name).is_file()]
    if absent:
        raise ValueError(f"{out}: {len(absent)} of its figures are missing: {absent[0]}; run: {WRITE}")
    print(f"{out} follows from the {len(found)} records in {results}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m experiments.reproduce",
        usage="%(prog)s [WHAT] [OPTIONS]",
        description=__doc__,
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        choices=(*grid.TARGETS, "steps", "figures"),
        nargs="?",
        default="all",
        metavar="WHAT",
        help="see below; all if not given",
    )
    add("--recipes", nargs="+", default=(), metavar="NAME", help=f"only these of {', '.join(grid.TASKS)}")
    add("--heads", type=int, nargs="+", default=(), metavar="H", help="only rows whose baseline has H heads")
    add("--seeds", type=int, default=grid.SEEDS, metavar="N", help="trainings of each row (default: %(default)s)")
    add("--cells", nargs="+", default=(), metavar="CELL", help="only RECIPE/ATTENTION-hHEADS[-OPTION]-sSEED")
    add("--budget", type=float, metavar="MINUTES", help="stop after this time (default: no limit)")
    add("--jobs", type=int, default=1, metavar="N", help="trainings side by side on one device (default: %(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to train (default: %(default)s)")
    add("--check", action="store_true", help="train nothing; check records, report and figures")
    add("--results", type=Path, default=RESULTS, metavar="PATH", help="folder of the records (default: %(default)s)")
    add("--runs", type=Path, default=RUNS, metavar="PATH", help="folder of the runs (default: %(default)s)")
    add("--out", type=Path, default=REPORT, metavar="PATH", help="the report (default: %(default)s)")
    add("--data-root", type=Path, metavar="PATH", help="prepared data sets (default: $MGK_DATA or ~/.cache/mgk/data)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        reproduce(parse(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
