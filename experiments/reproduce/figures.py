"""Draw the figures of the report: training curves, ranks and maps of the first rows of each table, and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.cells.inside import unpack_map
from experiments.reproduce.grid import TASKS, Record
from experiments.reproduce.report import (
    compared_rows,
    curve_figures,
    first_rows,
    maps_by_task,
    tabulate,
    tasks_with_ranks,
)
from mgk.inspect.costs import cost_curves
from mgk.inspect.figures import Points, attention_maps, costs, curves, save

HEADS = (2, 4, 8, 16)


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every figure of the report as SVG and PNG."""
    table = tabulate(records)
    written = []
    for target, task in curve_figures(table):
        quantity = "accuracy" if TASKS[task].metric == "accuracy" else "loss"
        panels: dict[str, dict[str, Points]] = {
            f"{event} {name}": {
                row.label: every_seed(table[task][row], event, name) for row in first_rows(target, table[task])
            }
            for event, name in (("train", "loss"), ("valid", quantity))
        }
        written += save(curves(panels, x_label="thousand steps"), folder / f"{target}-{task}")
    for task in tasks_with_ranks(table):
        rows = {row: table[task][row] for row in compared_rows(table[task])}
        panels = {
            "mean rank": {row.label: by_layer(found, "rank") for row, found in rows.items()},
            "effective heads / heads": {
                row.label: by_layer(found, "effective_heads", row.heads) for row, found in rows.items()
            },
        }
        figure = curves(panels, x_label="layer")
        for axes in figure.axes:
            axes.locator_params("x", integer=True)
        written += save(figure, folder / f"ranks-{task}")
    for (task, baseline), found in maps_by_task(table).items():
        maps = {row.label: [[unpack_map(text) for text in heads] for heads in x["maps"]] for row, x in found.items()}
        numbers = next(iter(found.values()))["map_layers"]
        written += save(attention_maps(maps, size=0.7, names=numbers), folder / f"maps-{task}-{baseline}")
    for name, family in (("softmax", ("softmax", "mgk", "smgk")), ("linear", ("linear", "mlk", "smlk"))):
        written += save(costs(cost_curves(family, heads=HEADS), heads=HEADS), folder / f"costs-{name}")
    return written


def every_seed(records: Sequence[Record], event: str, quantity: str) -> Points:
    """Return the curves of all seeds as one line with gaps. Their mean would hide which seeds leave a plateau."""
    steps, values = [], []
    for record in records:
        x, y = record.curve(event, quantity)
        steps += [*(step / 1000 for step in x), math.nan]
        values += [*y, math.nan]
    return steps, values


def by_layer(records: Sequence[Record], quantity: str, unit: int = 1) -> Points:
    """Return the mean over seeds for each layer."""
    found = [record.values["inside"][quantity] for record in records if record.values.get("inside")]
    means = [statistics.mean(layer) / unit for layer in zip(*found, strict=True)]
    return list(range(1, len(means) + 1)), means
