"""The blocks of a report above the explorer: paragraphs, tables, bars and line charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mgk.tables import Table

POINTS = 4000  # of a line in a chart, which is some 500 pixels wide


@dataclass(frozen=True)
class Text:
    """A paragraph of a report."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    """Lower ends of an interval around each point, drawn as a band."""
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Chart:
    """A line chart of a report."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    """One sentence under the title."""


@dataclass(frozen=True)
class Bar:
    """One bar: a number, as it is written beside the bar, and its interval."""

    name: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    """One quantity of several models, as bars that start at 0."""

    bars: Sequence[Bar]
    title: str = ""
    note: str = ""
    """One sentence under the title."""


Block = Text | Table | Chart | Bars


def thinned(block: Block) -> Block:
    """Return a chart with at most `POINTS` points per line; another block unchanged.

    Of a longer line, each part of equal length is drawn by its first and last point, its lowest and its highest.
    """
    if not isinstance(block, Chart) or all(len(series.x) <= POINTS for series in block.series):
        return block
    return replace(block, series=[_thinned(series) for series in block.series])


def _thinned(series: Series) -> Series:
    if len(series.x) <= POINTS:
        return series
    y = np.asarray(series.y, float)
    parts = np.array_split(np.arange(len(y)), POINTS // 4)
    kept = [{part[0], part[-1], part[y[part].argmin()], part[y[part].argmax()]} for part in parts]
    chosen = np.array(sorted(set().union(*kept)))
    values = {
        name: None if (line := getattr(series, name)) is None else np.asarray(line, float)[chosen].tolist()
        for name in ("x", "y", "low", "high")
    }
    return Series(series.name, **values)  # type: ignore[arg-type]
