"""Which heads are merged: pairs with a large affinity, the mean of sum_j sqrt(A_a[i,j] A_b[i,j]).

B batch, N positions, H query heads, Hk key heads, G = H / Hk.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.merge.calibration import Sample

if TYPE_CHECKING:
    from jaxtyping import Float

Pairs = list[tuple[int, int]]


def affinities(weights: list[Tensor], samples: list[Sample]) -> Float[Tensor, "h h"]:
    """Compute the mean over the real positions of sum_j sqrt(A_a[i,j] A_b[i,j])."""
    total, count = torch.zeros(()), 0
    for each, sample in zip(weights, samples, strict=True):
        rows = each[:, sample.real].sqrt().flatten(1)
        total = total + rows @ rows.mT
        count += int(sample.real.sum())
    return total / max(count, 1)


def pair_groups(affinity: Float[Tensor, "h h"], groups: int) -> list[tuple[int, int, Pairs]]:
    """Pair key heads for a large sum of affinities of their query heads: greedily, then by exchanging partners.

    Each item holds two key heads and the pairs of their query heads. An odd number of key heads stays: query heads are
    paired within their groups, and both key heads of an item are the same.
    """
    count = len(affinity) // groups
    if count % 2:
        return [(g, g, _within(affinity, range(g * groups, (g + 1) * groups))) for g in range(count)]
    matched = {}
    for a in range(count):
        for b in range(a + 1, count):
            queries = product(range(a * groups, (a + 1) * groups), range(b * groups, (b + 1) * groups))
            matched[a, b] = sorted(_greedy({pair: float(affinity[pair]) for pair in queries}))
    worth = {ab: sum(float(affinity[q]) for q in pairs) for ab, pairs in matched.items()}
    return [(a, b, matched[a, b]) for a, b in _exchanged(worth)]


def _within(affinity: Tensor, heads: Iterable[int]) -> Pairs:
    return _exchanged({pair: float(affinity[pair]) for pair in combinations(heads, 2)})


def _exchanged(worth: dict[tuple[int, int], float]) -> Pairs:
    """Choose disjoint pairs greedily, then exchange partners while that is worth more."""

    def total(pairs: Iterable[tuple[int, int]]) -> float:
        return sum(worth[min(pair), max(pair)] for pair in pairs)

    chosen = _greedy(worth)
    improved = True
    while improved:
        improved = False
        for i in range(len(chosen)):
            for j in range(i):
                (a, b), (c, d) = now = chosen[i], chosen[j]
                best = max((now, ((a, c), (b, d)), ((a, d), (b, c))), key=total)
                if total(best) > total(now) + 1e-12:
                    (chosen[i], chosen[j]), improved = best, True
    return sorted((min(pair), max(pair)) for pair in chosen)


def _greedy(worth: dict[tuple[int, int], float]) -> Pairs:
    """Choose disjoint pairs, the most valuable first."""
    chosen: Pairs = []
    used: set[int] = set()
    for pair in sorted(worth, key=lambda pair: -worth[pair]):
        if used.isdisjoint(pair):
            chosen.append(pair)
            used.update(pair)
    return chosen
