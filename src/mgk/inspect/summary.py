"""Statistics of the heads of one layer on one input, from one pass over the rows of their attention matrices.

H heads, M components (the largest number of any head; missing components count as unused), Nq queries, Nk keys,
G bins of a pooled map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from mgk.inspect.heads import Head, expand_variance

if TYPE_CHECKING:
    from jaxtyping import Float

BLOCK_NUMBERS = 1 << 24  # size of the blocks of rows: about this many numbers for all heads together


@dataclass(frozen=True)
class Summary:
    """Statistics of the heads of one layer on one input."""

    entropy: Float[Tensor, "h nq"]
    """-sum_j A log A of every row, in nats; its exponential is the number of keys a query attends to."""
    peak: Float[Tensor, "h nq"]
    """max_j A of every row."""
    log_total: Float[Tensor, "h nq"]
    """Log of the normaliser of every row, see `Rows`."""
    cosine: Float[Tensor, "h h"]
    """Cosine similarity of the matrices of two heads."""
    overlap: Float[Tensor, "h h"]
    """Share of attention that two heads give to the same keys, mean_i sum_j min(A, A'): 1 if equal, 0 if disjoint."""
    share: Float[Tensor, "h m"]
    """Share of the attention that comes from each component; sums to 1."""
    wins: Float[Tensor, "h m"]
    """Share of the visible pairs in which a component has the largest responsibility; sums to 1."""
    removal: Float[Tensor, "h m"]
    """Mean total variation (0..1) between a row and the same row after removing a component: how much it is needed."""
    component_overlap: Float[Tensor, "h m m"]
    """Share of attention that two components, each normalised alone, give to the same keys."""
    pooled: list[Float[Tensor, "m gq gk"]]
    """Map of each head in blocks, by component: the mean over the queries and the sum over the keys of a block."""
    bin_size: int
    """Positions per side of a block."""

    @property
    def effective_heads(self) -> float:
        """`effective_number` of the heads, by their cosine similarity."""
        return effective_number(self.cosine)

    @property
    def effective_components(self) -> Float[Tensor, " h"]:
        """exp of the entropy of `share`: M if all components contribute equally, 1 if only one does."""
        entropy: Tensor = torch.special.entr(self.share).sum(-1)
        return entropy.exp()


def effective_number(similarity: Float[Tensor, "h h"]) -> float:
    """Return exp of the entropy of the eigenvalues of similarity / H.

    It is 1 if all items are equal and H if no two resemble each other. `similarity` is positive semidefinite with ones
    on its diagonal. This is the Vendi score of Friedman and Dieng.
    """
    values = torch.linalg.eigvalsh(similarity.double() / len(similarity)).clamp(min=0)
    return math.exp(float(torch.special.entr(values / values.sum()).sum()))


@torch.no_grad()
def summarise(heads: Sequence[Head], *, bins: int = 128, sampled: int = 512) -> Summary:
    """Compute the statistics of the heads of one layer, one block of rows at a time.

    Args:
        heads: all heads of one layer.
        bins: maps are pooled to at most `bins` x `bins` blocks.
        sampled: overlaps and `removal` are means over at most this many queries, evenly spaced; the rest uses all.
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
    fitting = BLOCK_NUMBERS // max(1, count * components * num_keys)
    step = max(bin_size, fitting // bin_size * bin_size)  # blocks end where bins end
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
            between[index, used, used] += _overlaps(_normalised(rows.components[:, every])).cpu()
            pooled[index].append(_pool(rows.components, bin_size).cpu())
        stacked = torch.stack(maps)
        inner += (stacked.flatten(1) @ stacked.flatten(1).mT).double().cpu()
        common += _overlaps(stacked[:, every]).cpu()
    norm = inner.diagonal().clamp(min=1e-300).sqrt()
    num_sampled = math.ceil(num_queries / stride)
    return Summary(
        entropy=entropy,
        peak=peak,
        log_total=log_total,
        cosine=(inner / norm / norm[:, None]).float(),
        overlap=(common / num_sampled).float(),
        share=(share / share.sum(-1, keepdim=True).clamp(min=1e-300)).float(),
        wins=(wins / wins.sum(-1, keepdim=True).clamp(min=1)).float(),
        removal=(removal / num_sampled).float(),
        component_overlap=(between / num_sampled).float(),
        pooled=[torch.cat(parts, 1) for parts in pooled],
        bin_size=bin_size,
    )


def _wins(logits: Tensor) -> Tensor:
    """Count the visible pairs in which each component has the largest logit, (M,)."""
    best, winner = logits.max(0)
    return torch.bincount(winner[best > -torch.inf], minlength=len(logits)).double()


def _removal(components: Tensor, weights: Tensor) -> Tensor:
    """Sum over the rows the total variation that removing each component causes, (M,)."""
    left = weights - components
    total = left.sum(-1, keepdim=True)
    empty = total <= torch.finfo(total.dtype).eps * components.shape[-1]  # no other component: all of the row moves
    change = (weights - left / total.masked_fill(empty, 1)).abs().sum(-1) / 2
    return torch.where(empty[..., 0], weights.sum(-1), change).sum(-1, dtype=torch.float64)


def _normalised(components: Tensor) -> Tensor:
    """Normalise the rows of each component to sum to 1."""
    total = components.sum(-1, keepdim=True)
    return components / total.masked_fill(total == 0, 1)


def _overlaps(maps: Tensor) -> Tensor:
    """Compute sum_i sum_j min(a, b) of every pair of maps: (K,n,Nk) -> (K,K)."""
    return torch.stack([torch.minimum(one, maps).sum((1, 2), dtype=torch.float64) for one in maps])


def _pool(components: Tensor, size: int) -> Tensor:
    """Pool (M,n,Nk) to (M, n/size, Nk/size): the mean over queries, the sum over keys; the last bins may be smaller."""
    means = avg_pool2d(components, (size, 1), ceil_mode=True)
    return avg_pool2d(means, (1, size), ceil_mode=True, divisor_override=1)


def separation(
    keys: Float[Tensor, "m nk d"], variance: float | Float[Tensor, " m"] | None = None
) -> Float[Tensor, "m m"]:
    """Return the mean distance |k_jr - k_js| of two components, in standard deviations sqrt(s2).

    For two components with different variances, s2 is the mean of both.
    """
    variances = expand_variance(variance, keys)
    distance: Tensor = (keys[:, None] - keys[None]).norm(dim=-1)
    return distance.mean(-1) / ((variances[:, None] + variances) / 2).sqrt()
