"""Confidence intervals of means and of their differences: Student's t, with Welch's degrees of freedom."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.960  # the same quantile of the normal distribution, the limit for many degrees of freedom


def quantile(freedom: float) -> float:
    """97.5% quantile of Student's t: the table, interpolated log-linearly in 1 / freedom (at most 3% too wide)."""
    table = [*((1 / n, value) for n, value in enumerate(STUDENT, 1)), (0.0, NORMAL)]
    x = 1 / max(freedom, 1.0)
    for (right, high), (left, low) in pairwise(table):
        if left <= x <= right:
            return float(low * (high / low) ** ((x - left) / (right - left)))
    raise ValueError(f"freedom: expected a number above 0, got {freedom}")


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95% confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of means and its 95% confidence interval."""

    mean: float
    low: float
    high: float


def contrast(rows: Sequence[tuple[float, Sequence[float]]]) -> Contrast | None:
    """Weighted sum of the means of some rows, given as (weight, values); None if a row has fewer than two values."""
    if min((len(values) for _, values in rows), default=0) < 2:
        return None
    mean = sum(weight * statistics.mean(values) for weight, values in rows)
    parts = [weight**2 * statistics.variance(values) / len(values) for weight, values in rows]
    total = sum(parts)
    if total == 0:
        return Contrast(mean, mean, mean)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, (_, values) in zip(parts, rows, strict=True))
    half = quantile(freedom) * math.sqrt(total)
    return Contrast(mean, mean - half, mean + half)


def difference(first: Sequence[float], second: Sequence[float]) -> Contrast | None:
    """mean(first) - mean(second), with its interval."""
    return contrast([(1.0, first), (-1.0, second)])
