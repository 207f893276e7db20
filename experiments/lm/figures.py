"""Draw the figures of the study: the score of every row against each of its four costs, with the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.cells.steps import Steps
from experiments.lm.claims import tabulate
from experiments.lm.costs import COSTS, Point, frontier, points
from experiments.lm.grid import Record
from mgk.inspect.figures import COLOURS, MARKERS, save, styled

FAMILIES = ("softmax", "smgk", "mgk", "linear", "mlk", "smlk")  # each has a colour and a marker


def draw(records: Sequence[Record], steps: Steps, folder: Path) -> list[Path]:
    """Draw a figure for every cost that at least two rows have, as SVG and PNG."""
    table = tabulate(records)
    written: list[Path] = []
    for name in COSTS:
        found = points(name, table, steps)
        if len(found) > 1:
            written += save(pareto(found, COSTS[name]), folder / f"study-{name}")
    return written


def pareto(found: Sequence[Point], x_label: str) -> Figure:
    """Draw rows as points with their intervals, and the frontier as a line."""
    with styled():
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        line = frontier(found)
        axes.step(
            [p.cost for p in line], [p.score for p in line], where="post", color="#8a90a0", linewidth=1.2, zorder=1,
            label="Pareto frontier",
        )  # fmt: skip
        seen: set[str] = set()
        for point in found:
            index = FAMILIES.index(point.row.attention)
            axes.errorbar(
                [point.cost], [point.score], [[point.half or 0.0]] * 2, fmt=MARKERS[index], color=COLOURS[index],
                capsize=2, linewidth=1.0, label=None if point.row.attention in seen else point.row.attention,
            )  # fmt: skip
            seen.add(point.row.attention)
            axes.annotate(point.row.label, (point.cost, point.score), (5, 4), textcoords="offset points", fontsize=7)
        axes.set(xlabel=x_label, ylabel="test bits per byte (lower is better)")
        axes.legend(fontsize=7)
        return figure
