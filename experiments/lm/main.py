"""Carry out the study of experiments/PLAN.md: train its cells, then write or check the report.

    python -m experiments.lm --plan                print what remains, and the command of the next session
    python -m experiments.lm --minutes 9           fill the next cells within nine minutes
    python -m experiments.lm --report              write docs/study.md and its figures
    python -m experiments.lm --check               verify records and report

A finished cell has a record in results/lm/cells (cells of the Long Range Arena by the paper's protocol: in
results/cells) and is not trained again. The order of the pieces is that of the plan.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mgk.data
from experiments import reproduce
from experiments.cells import Cell, Tally, run_cells
from experiments.cells.records import path_of, stale
from experiments.cells.report import write_report
from experiments.cells.steps import Steps, measure, read_steps
from experiments.lm import grid
from experiments.lm.folders import RESULTS, Folders
from experiments.lm.report import FIGURES, missing_figures, report
from experiments.lm.tasks import TASKS
from experiments.reproduce.pack import unpack
from mgk.train.data import options as data_options

RUNS, REPORT = Path("runs") / "lm", Path("docs") / "study.md"
ROW_MINUTES = 0.7  # to time a step of one row, with compilation
ORDER = (
    "sweep",
    "noise",
    "main",
    "steps",
    "own",
    "side",
    "plain",
    "scale",
    "length",
    "lra",
    "translation",
    "lra-modern",
)
LRA_MINUTES = 5.0


@dataclass
class Outcome:
    """What a session did, over all pieces."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, tally: Tally) -> None:
        self.finished += tally.finished
        self.failed |= tally.failed
        self.left += tally.left
        self.absent |= tally.absent


def work(piece: str, found: Sequence[grid.Record]) -> list[Any] | None:
    """Return the cells of a piece; None if it waits for an earlier one."""
    if piece == "lra":
        return lra()
    if piece == "steps":
        main = grid.pieces(found)["main"]
        own = grid.pieces(found)["own"]
        return None if main is None or own is None else [cell for cell in main + own if cell.seed == 0]
    return grid.pieces(found)[piece]


def lra() -> list[reproduce.Cell]:
    """Return the six rows of Tables 1 and 2 with 8 and 4 heads, all with one seed before any has two."""
    tables = ("table1", "table2")
    found = [c for t in tables for c in reproduce.cells(t, seeds=3, tasks=["retrieval-elife", "image"], heads=[8])]
    return sorted(found, key=lambda cell: (cell.seed, cell.task != "retrieval-elife"))


def remaining(piece: str, found: Sequence[grid.Record], folders: Folders) -> list[Any] | None:
    """Return the cells of a piece that have no record, or the rows whose step was not timed."""
    cells = work(piece, found)
    if cells is None:
        return None
    if piece == "steps":
        timed = read_steps(folders.steps).get("nano", {}).get("rows", {})
        return [] if all(cell.row.name in timed for cell in cells) else cells  # all in one run
    return [cell for cell in cells if not path_of(folders.of(piece), cell).exists()]


def minutes_of(cell: Cell) -> float:
    """Return about how long a cell takes on an H200."""
    return TASKS[cell.task].minutes if isinstance(cell, grid.Cell) else LRA_MINUTES


def session(folders: Folders, pieces: Sequence[str], *, minutes: float | None, last: bool, **options: Any) -> Outcome:
    """Fill the next cells of all pieces in their order, until the time is over."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    outcome = Outcome()
    for piece in pieces:
        tried: list[Any] = []
        while True:
            left = None if end is None else (end - time.monotonic()) / 60
            todo = remaining(piece, folders.records(), folders)
            if not todo or todo == tried:
                break
            if left is not None and left <= 0.2:
                outcome.left += [cell.name for cell in todo]
                break
            tried = todo
            if piece == "steps":
                outcome.absent |= time_steps(todo, folders, left, options)
                break
            limits: dict[str, Any] = {"budget": left, "minutes": minutes_of if last and left is not None else None}
            tally = run_cells(todo, results=folders.of(piece), runs=folders.runs, **limits, **options)
            outcome.add(tally)
            if piece != "sweep" or tally.failed or tally.left:  # only the sweep grows with its own results
                break
    return outcome


def time_steps(cells: Sequence[Any], folders: Folders, left: float | None, options: dict[str, Any]) -> dict[str, str]:
    """Time a step of every row if there is time for all of them. Return tasks without data."""
    needed = ROW_MINUTES * (len(cells) + 1)
    if left is not None and left < needed:
        print(f"steps: left for later: {needed:.0f} minutes for all rows in one run, {left:.0f} left", flush=True)
        return {}
    where = {name: options[name] for name in ("data_root", "device")}
    return measure(cells, folders.steps, again=True, **where)


def plan(folders: Folders) -> str:
    """Return what remains of each piece, and the commands of the next session."""
    found = folders.records()
    sets: dict[str, str] = {}  # prepared data, and the first piece that needs it
    lines, total = [], 0.0
    for piece in ORDER:
        cells = remaining(piece, found, folders)
        if cells is None:
            lines.append(f"{piece:14} waits for an earlier piece")
            continue
        minutes = ROW_MINUTES * len(cells) if piece == "steps" else sum(map(minutes_of, cells))
        total += minutes
        what = "rows to time" if piece == "steps" else "cells"
        following = f", next {cells[0].name}" if cells else ""
        lines.append(f"{piece:14} {len(cells):3} {what}, about {minutes:.0f} minutes of an H200{following}")
        for cell in cells:
            sets.setdefault(data_of(cell), piece)
    lines.append(f"{'':14} about {total:.0f} minutes in all, without the pieces that wait")
    return "\n".join([*lines, *(commands(sets) if sets else [])])


def data_of(cell: Cell) -> str:
    """Return the name of the folder with the prepared data of a cell."""
    data = cell.config.data
    return mgk.data.folder(data.name, **data_options(cell.config)).name


def commands(sets: Mapping[str, str]) -> list[str]:
    """Return the commands of a session, given the data sets that are needed and the first piece that needs each."""
    needed = [name for name in sets if name != "listops"]  # which a session generates
    return [
        "",
        f"data, and the first piece that needs it: {', '.join(f'{name} ({sets[name]})' for name in needed)}",
        "pack what the next pieces need, here:",
        f"    python -m experiments.reproduce.pack data {needed[0]} --to .carry/data.tar.xz",
        "a command of a session, with .carry beside the code; the same command goes on:",
        "    PYTHONPATH=src:.carry/extra python -m experiments.lm --data .carry/data.tar.xz --minutes 8.5 "
        "--save $OUT/records.tar",
        "add --last to the last command on a machine that keeps nothing; then, here: tar -xf records.tar",
    ]


def check(folders: Folders, out: Path) -> None:
    """Check that the records match the grid, that the report follows from them, and that its figures exist."""
    found = folders.records()
    if complaints := stale(found):
        raise ValueError(f"{len(complaints)} records do not match the grid: {complaints[0]}")
    page = out.read_text(encoding="utf-8") if out.exists() else ""
    if page != report(found, read_steps(folders.steps)):
        raise ValueError(f"{out} does not follow from the records in {folders.results}; run: {WRITE}")
    if absent := missing_figures(page, out.parent):
        raise ValueError(f"{out}: {len(absent)} of its figures are missing: {absent[0]}; run: {WRITE}")
    print(f"{out} follows from the {len(found)} records in {folders.results}")


WRITE = "python -m experiments.lm --report"


def write(folders: Folders, out: Path) -> None:
    """Write the report and, if matplotlib is installed, its figures."""
    found, steps = folders.records(), read_steps(folders.steps)
    write_report(out, report(found, steps), "experiments.lm.figures", found, steps, folder=out.parent / FIGURES)


def save(folders: Folders, file: Path) -> None:
    """Pack all records, under the paths that they have in the repository, into one file to copy back."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for folder in (folders.results, folders.paper):
            if folder.exists():
                archive.add(folder)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m experiments.lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", action="store_true", help="train nothing; print what remains")
    add("--check", action="store_true", help="train nothing; check records and report")
    add("--report", action="store_true", help="train nothing; write the report and its figures")
    add("--minutes", type=float, metavar="M", help="stop after this time (default: no limit)")
    add("--last", action="store_true", help="start no cell that would not end within the time")
    add("--jobs", type=int, default=1, metavar="N", help="trainings side by side (default: %(default)s)")
    add("--pieces", nargs="+", choices=ORDER, default=ORDER, metavar="PIECE", help=f"only these of {', '.join(ORDER)}")
    add("--cells", nargs="+", default=(), metavar="CELL", help="only these cells, e.g. nano/smgk-h4-s0")
    add("--again", type=Path, metavar="FOLDER", help="with --cells: compute them again, into another folder")
    add("--data", nargs="+", type=Path, default=(), metavar="FILE", help="packed data sets to unpack first")
    add("--data-root", type=Path, metavar="PATH", help="prepared data sets (default: $MGK_DATA or ~/.cache/mgk/data)")
    add("--save", type=Path, metavar="FILE", help="at the end, pack all records into this file")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to train (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, metavar="PATH", help="records of the study (default: %(default)s)")
    add("--paper", type=Path, default=reproduce.RESULTS, metavar="PATH", help="records of the paper's tables")
    add("--runs", type=Path, default=RUNS, metavar="PATH", help="folder of the runs (default: %(default)s)")
    add("--out", type=Path, default=REPORT, metavar="PATH", help="the report (default: %(default)s)")
    return parser.parse_args(arguments)


def carry_out(options: argparse.Namespace) -> None:
    """Do what the options say. Raises ValueError if a check fails, RuntimeError if a cell fails."""
    folders = Folders(options.results, options.paper, options.runs)
    if options.plan or options.check or options.report:
        print(plan(folders)) if options.plan else (check if options.check else write)(folders, options.out)
        return
    root = options.data_root
    if options.data and root is None:
        root = options.runs / "data"
    for file in options.data:
        unpack(file, root)
    where: dict[str, Any] = {"jobs": options.jobs, "data_root": root, "device": options.device, "quiet": False}
    try:
        outcome = train(folders, options, where)
    finally:
        if options.save:
            save(folders, options.save)
    for task, reason in outcome.absent.items():
        print(f"{task}: skipped: {reason}")
    print(f"{len(outcome.finished)} cells finished, {len(outcome.failed)} failed, {len(outcome.left)} left for later")
    if outcome.failed:
        raise RuntimeError(f"{len(outcome.failed)} cells failed; {next(iter(outcome.failed.values()))}")


def train(folders: Folders, options: argparse.Namespace, where: dict[str, Any]) -> Outcome:
    """Fill the cells that the options name, or the next ones."""
    if not options.cells:
        return session(folders, options.pieces, minutes=options.minutes, last=options.last, **where)
    rates = grid.chosen_rates(folders.records())
    cells = [grid.parse(name, rates) for name in options.cells]
    again = options.again
    results, runs = (again / "cells", again / "runs") if again else (folders.of("main"), folders.runs)
    outcome = Outcome()
    outcome.add(run_cells(cells, results=results, runs=runs, budget=options.minutes, **where))
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        carry_out(parse(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


__all__ = ["Steps", "main"]
