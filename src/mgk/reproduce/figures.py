"""The pictures of the report: training curves of the first rows of each table, and costs against heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgk.analysis.costs import cost_curves
from mgk.analysis.figures import Points, costs, curves, save
from mgk.reproduce.grid import TASKS
from mgk.reproduce.records import Record
from mgk.reproduce.report import drawn, first_rows, tabulate

HEADS = (2, 4, 8, 16)


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Every figure that the report shows, as SVG and PNG."""
    table = tabulate(records)
    written = []
    for target, task in drawn(table):
        firsts = [table[task][row][0] for row in first_rows(target, table[task])]
        quantity = "accuracy" if TASKS[task].metric == "accuracy" else "loss"
        panels: dict[str, dict[str, Points]] = {
            f"{event} {name}": {record.row.label: record.curve(event, name) for record in firsts}
            for event, name in (("train", "loss"), ("valid", quantity))
        }
        written += save(curves(panels), folder / f"{target}-{task}")
    for name, family in (("softmax", ("softmax", "mgk", "smgk")), ("linear", ("linear", "mlk", "smlk"))):
        written += save(costs(cost_curves(family, heads=HEADS), heads=HEADS), folder / f"costs-{name}")
    return written
