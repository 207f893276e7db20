"""`mgk reproduce`: a thin face over `mgk.reproduce.main`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def reproduce(
    what: tyro.conf.Positional[
        Literal["table1", "table2", "table3", "table4", "checkpoints", "ablations", "all", "steps", "figures"]
    ] = "all",
    budget: float | None = None,
    jobs: int = 1,
    seeds: int = 5,
    recipes: tuple[str, ...] = (),
    heads: tuple[int, ...] = (),
    cells: tuple[str, ...] = (),
    check: bool = False,
    results: Path = Path("results") / "cells",
    runs: Path = Path("runs") / "reproduce",
    out: Path = Path("docs") / "results.md",
    data_root: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Fill the paper's tables: mgk reproduce table1 [--budget MINUTES --jobs 4 --recipes listops text ...]

    Every model is trained once before any is trained twice, the rows with 8 and 4 heads first, on every set that is
    prepared. A finished training is one small file in RESULTS; what the budget cut short is a checkpoint in RUNS, and
    the same command goes on with it. `mgk reproduce figures` writes the tables, the verdict on each of the paper's
    claims and the curves from those files; `--check` verifies that they still say so. `mgk reproduce steps` times a
    training step of every row, one row after the other, into `steps.json` beside RESULTS. On a machine without tyro,
    the same: python -m mgk.reproduce table1.

    In Python: `mgk.reproduce.sit(mgk.reproduce.cells("table1"), budget=60)`.

    Args:
        what: a table, what the choice of checkpoints does, the ablations, all of them, the times of steps, or the
            report with its figures.
        budget: stop within so many minutes, with a checkpoint of what is under way.
        jobs: trainings side by side on one device.
        seeds: trainings of each row.
        recipes: only these, in this order: listops, text, text-sound, text-often, listops-often, retrieval-rebuilt,
            listops-long, enwik8, wikitext2, enwiki, enwik8-short, enwik8-tiny.
        heads: only the rows that are compared with a baseline of so many heads.
        cells: these trainings alone, e.g. listops/smgk-h4-s0.
        check: train nothing; verify that the records are the grid's, the report follows from them and has its figures.
        results: where the record of each finished training goes.
        runs: where unfinished trainings are.
        out: the report; its figures go beside it.
        data_root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
        device: where to train.
    """
    from mgk.reproduce.main import reproduce as start

    start(
        what, budget=budget, jobs=jobs, seeds=seeds, recipes=recipes, heads=heads, cells=cells, check=check,
        results=results, runs=runs, out=out, data_root=data_root, device=device,
    )  # fmt: skip
