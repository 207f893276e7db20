"""How many seeds a difference needs, from the standard deviation of one row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mgk.intervals import quantile

SMALLEST = 0.003  # the difference that the study wants to find, as a share of the mean
POWER = 0.84  # quantile of the normal distribution: found with a probability of 80%
LEAST, MOST = 5, 10  # seeds of a main row


def detectable(values: Sequence[float], seeds: int) -> float:
    """Return the difference, as a share of the mean, that two rows of `seeds` seeds each find in four of five cases."""
    spread = statistics.stdev(values) / statistics.mean(values)
    return (quantile(2 * seeds - 2) + POWER) * spread * math.sqrt(2 / seeds)


def seeds_needed(values: Sequence[float], share: float = SMALLEST) -> int:
    """Return the smallest number of seeds of each row that finds a difference of this share of the mean."""
    return next(seeds for seeds in range(2, 10_000) if detectable(values, seeds) <= share)


def seeds_of_main(values: Sequence[float]) -> int:
    """Return the number of seeds of the main rows."""
    return max(LEAST, min(seeds_needed(values), MOST))
