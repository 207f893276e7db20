"""The four costs of a row, and which rows are on the Pareto frontier of each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.cells.steps import Steps
from experiments.lm.claims import Table, scores
from experiments.lm.grid import Cell, Record, Row
from mgk.intervals import difference, interval

COSTS = {
    "parameters": "parameters (millions)",
    "time": "training step (ms)",
    "flops": "FLOPs of the layers, forward and backward, per sequence (G)",
    "cache": "cache (bytes per token)",
}


@dataclass(frozen=True)
class Point:
    """A row at one cost: its mean score, lower is better, and the half of its 95% interval."""

    row: Row
    cost: float
    score: float
    half: float | None


def cost(name: str, records: Sequence[Record], steps: Steps) -> float | None:
    """Return a cost of the row of some records, in the unit of COSTS; None if it was not measured."""
    first = records[0]
    cell: Cell = first.cell
    if name == "time":
        seconds = steps[cell.task]["rows"].get(cell.row.name) if cell.task in steps else None
        return None if seconds is None else 1e3 * seconds
    if name == "cache":
        return cell.cache_per_token
    return float(first.values[name]) / (1e6 if name == "parameters" else 1e9)


def points(name: str, table: Table, steps: Steps, task: str = "nano") -> list[Point]:
    """Return the rows of a task that have a score and this cost, cheapest first."""
    found = []
    for (where, row), records in table.items():
        values, price = scores(records), cost(name, records, steps)
        if where == task and values and price is not None:
            found.append(Point(row, price, statistics.mean(values), interval(values)))
    return sorted(found, key=lambda point: (point.cost, point.score))


def frontier(found: Sequence[Point]) -> list[Point]:
    """Return the points for which no point that costs as much or less has a lower mean."""
    return [p for p in found if not any(q.cost <= p.cost and q.score < p.score for q in found)]


def beaten(found: Sequence[Point], table: Table, task: str = "nano") -> Mapping[Row, list[Row]]:
    """Return for each row the rows that cost as much or less and are better, by the interval of the difference."""
    result: dict[Row, list[Row]] = {}
    for p in found:
        for q in found:
            if q.row == p.row or q.cost > p.cost:
                continue
            gap = difference(scores(table[task, p.row]), scores(table[task, q.row]))
            if gap is not None and gap.low > 0:
                result.setdefault(p.row, []).append(q.row)
    return result
