"""What a layer's heads do with an input, in numbers: one pass over the rows of their attention matrices.

H heads, M components (the most of any head; missing ones count as unused), N positions, G bins of a pooled map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.inspect.heads import Head, blocks

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Summary:
    """Of the heads of one layer on one input."""

    entropy: Float[Tensor, "h nq"]
    """-sum_j A log A of every row, in nats; exp of it is the number of keys a query attends to."""
    peak: Float[Tensor, "h nq"]
    """max_j A of every row."""
    log_total: Float[Tensor, "h nq"]
    """Of every row, see `Rows`."""
    cosine: Float[Tensor, "h h"]
    """Cosine of the angle between two heads' matrices."""
    overlap: Float[Tensor, "h h"]
    """Share of attention that two heads give to the same keys: mean_i sum_j min(A, A'); 1 the same, 0 disjoint."""
    share: Float[Tensor, "h m"]
    """Share of the attention that each component gives; adds up to 1."""
    wins: Float[Tensor, "h m"]
    """Share of the visible pairs where a component has the largest responsibility; adds up to 1."""
    removal: Float[Tensor, "h m"]
    """How far the rows move, in total variation (0..1), if a component is taken out: what it is needed for."""
    component_overlap: Float[Tensor, "h m m"]
    """Share of attention that two components, each taken alone, give to the same keys."""
    pooled: list[Float[Tensor, "m gq gk"]]
    """Of each head: what each component adds to A in blocks, the mean over queries and the sum over keys."""
    bin_size: int

    @property
    def effective_heads(self) -> float:
        return effective_number(self.cosine)

    @property
    def effective_components(self) -> Float[Tensor, " h"]:
        """exp of the entropy of `share`: M if all are used alike, 1 if one does all."""
        entropy: Tensor = torch.special.entr(self.share).sum(-1)
        return entropy.exp()


def effective_number(similarity: Float[Tensor, "h h"]) -> float:
    """exp of the entropy of the eigenvalues of similarity / H: 1 if all are the same, H if none resembles another.

    `similarity` is positive semidefinite with ones on its diagonal, as cosines are (the score of Friedman and Dieng).
    """
    values = torch.linalg.eigvalsh(similarity.double() / len(similarity)).clamp(min=0)
    return math.exp(float(torch.special.entr(values / values.sum()).sum()))


@torch.no_grad()
def summarise(heads: Sequence[Head], *, bins: int = 128, sampled: int = 512) -> Summary:
    """One pass over the matrices of all heads, a block of rows at a time.

    Args:
        heads: of one layer.
        bins: maps are pooled to at most `bins` x `bins` blocks.
        sampled: overlaps and `removal` are means over at most so many queries, evenly spread; the rest is over all.
    """
    if not heads:
        raise ValueError("heads: expected at least one, got none")
    shapes = {(head.num_queries, head.num_keys) for head in heads}
    if len(shapes) > 1:
        raise ValueError(f"heads: expected all with the same queries and keys, got {sorted(shapes)}")
    (num_queries, num_keys), count = shapes.pop(), len(heads)
    bin_size = max(1, math.ceil(max(num_queries, num_keys) / bins))
    stride = math.ceil(num_queries / sampled)
    components = max(head.num_components for head in heads)
    entropy, peak, log_total = torch.zeros(3, count, num_queries)
    share, wins, removal = torch.zeros(3, count, components, dtype=torch.float64)
    inner, common = torch.zeros(2, count, count, dtype=torch.float64)
    between = torch.zeros(count, components, components, dtype=torch.float64)
    pooled: list[list[Tensor]] = [[] for _ in heads]
    step = max(bin_size, blocks(heads).step // count // bin_size * bin_size)  # blocks end where bins end
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        every = slice(-start % stride, None, stride)  # the sampled queries of this block
        maps = []
        for index, head in enumerate(heads):
            rows = head.rows(start, stop)
            weights, used = rows.weights, slice(0, head.num_components)
            maps.append(weights)
            entropy[index, start:stop] = torch.special.entr(weights).sum(-1)
            peak[index, start:stop] = weights.amax(-1)
            log_total[index, start:stop] = rows.log_total
            share[index, used] += rows.components.sum((1, 2)).double().cpu()
            wins[index, used] += _wins(rows.logits).cpu()
            removal[index, used] += _removal(rows.components[:, every], weights[every]).cpu()
            between[index, used, used] += _overlaps(_alone(rows.components[:, every])).cpu()
            pooled[index].append(_pool(rows.components, bin_size).cpu())
        stacked = torch.stack(maps)
        inner += (stacked.flatten(1) @ stacked.flatten(1).mT).double().cpu()
        common += _overlaps(stacked[:, every]).cpu()
    norm = inner.diagonal().clamp(min=1e-300).sqrt()
    looked = math.ceil(num_queries / stride)
    return Summary(
        entropy=entropy,
        peak=peak,
        log_total=log_total,
        cosine=(inner / norm / norm[:, None]).float(),
        overlap=(common / looked).float(),
        share=(share / share.sum(-1, keepdim=True).clamp(min=1e-300)).float(),
        wins=(wins / wins.sum(-1, keepdim=True).clamp(min=1)).float(),
        removal=(removal / looked).float(),
        component_overlap=(between / looked).float(),
        pooled=[torch.cat(parts, 1) for parts in pooled],
        bin_size=bin_size,
    )


def _wins(logits: Tensor) -> Tensor:
    """Pairs where each component has the largest logit, (M,)."""
    best, winner = logits.max(0)
    if len(logits) == 1:
        return (best > -torch.inf).sum(dtype=torch.float64)[None]
    return torch.bincount(winner[best > -torch.inf], minlength=len(logits)).double()


def _removal(components: Tensor, weights: Tensor) -> Tensor:
    """Total variation moved by taking a component out, summed over the rows, (M,)."""
    moved = []
    for component in components:
        left = weights - component
        total = left.sum(-1, keepdim=True)
        gone = total <= torch.finfo(total.dtype).eps * components.shape[-1]  # nothing else is there: all of it moves
        change = (weights - left / total.masked_fill(gone, 1)).abs().sum(-1) / 2
        moved.append(torch.where(gone[:, 0], weights.sum(-1), change).sum(dtype=torch.float64))
    return torch.stack(moved)


def _alone(components: Tensor) -> Tensor:
    """Each component's part of a row, made to add up to 1."""
    total = components.sum(-1, keepdim=True)
    return components / total.masked_fill(total == 0, 1)


def _overlaps(maps: Tensor) -> Tensor:
    """sum_i sum_j min(a, b) for each pair of (K,n,Nk): (K,K)."""
    count = len(maps)
    common = torch.zeros(count, count, dtype=torch.float64, device=maps.device)
    for first in range(count):
        for second in range(first, count):
            common[first, second] = torch.minimum(maps[first], maps[second]).sum(dtype=torch.float64)
    return common + common.triu(1).mT


def _pool(components: Tensor, size: int) -> Tensor:
    """(M,n,Nk) -> (M, n/size, Nk/size), the mean over queries (fewer in the last bin) and the sum over keys."""
    if size == 1:
        return components
    _, n, keys = components.shape
    padded = pad(components, (0, -keys % size, 0, -n % size))
    sums = padded.view(len(padded), padded.shape[1] // size, size, -1, size).sum((2, 4))
    rows = torch.full((sums.shape[1],), size, device=sums.device)
    rows[-1] = n - size * (len(rows) - 1)
    return sums / rows[:, None]


def separation(
    keys: Float[Tensor, "m nk d"], variance: float | Float[Tensor, " m"] | None = None
) -> Float[Tensor, "m m"]:
    """How far apart the components of a key are: the mean of |k_jr - k_js| in standard deviations sqrt(s2).

    Of two components with variances of their own, s2 is the mean of both.
    """
    variance = math.sqrt(keys.shape[-1]) if variance is None else variance
    variances = torch.as_tensor(variance, dtype=keys.dtype, device=keys.device).expand(len(keys))
    distance: Tensor = (keys[:, None] - keys[None]).norm(dim=-1)
    return distance.mean(-1) / ((variances[:, None] + variances) / 2).sqrt()
