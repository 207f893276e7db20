"""The mathematics of head merging: two softmax heads a, b become the components of one mixture-key head.

A head has weights A[i,j] ~ exp(q_i.k_j / sqrt(D)) and adds A X W_v W_o to the output. A mixture head has one query, two
keys and one value, with A[i,j] ~ sum_r prior_r exp(q_i.k_jr / sqrt(D)). docs/huggingface.md derives the five steps:

1. `_shared_query`: one query and two keys whose scores are nearest to those of the two heads (truncated SVD).
2. `_balance`: priors and key biases that give each component its head's share of the output.
3. `_values`: one value and output whose product is nearest to what the two heads wrote (reduced-rank regression).
4. Grouped queries: two groups of G query heads merge; their G pairs share the two keys and the value.
5. `_outputs`: the outputs of all merged heads of the layer, fitted together.

B batch, N positions, E width of the model, F = E + 1 with the bias, H heads, Hk key heads, G = H / Hk, D width of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

RIDGE = 1e-4  # relative to the mean variance: the weight of directions that the calibration text does not contain
LARGEST_SHARE = 0.95  # the largest share of one head in a mixture


@dataclass(frozen=True)
class Projections:
    """The heads of an attention layer in float64; the last of the F rows is the bias, zero where there is none."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "hk f d"]
    value: Float[Tensor, "hk f d"]
    output: Float[Tensor, "h d e"]
    scale: float
    """Scale of the scores: 1/sqrt(D)."""
    biased: tuple[bool, bool, bool]
    """Whether query, key and value have a bias."""

    @property
    def groups(self) -> int:
        return len(self.query) // len(self.key)


@dataclass(frozen=True)
class Mixture:
    """The merged heads: H' = H/2, Hk' = Hk/2."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "hk m f d"]
    value: Float[Tensor, "hk f d"]
    output: Float[Tensor, "h d e"]
    log_prior: Float[Tensor, "h m"]
    pairs: list[tuple[int, int]]
    """The two query heads that each merged head replaces."""
    affinity: float
    """Mean over the pairs of sum_j sqrt(A_a A_b): 1 for equal heads, 0 for heads that never attend to the same key."""


@dataclass(frozen=True)
class Sample:
    """The inputs of a layer."""

    x: Float[Tensor, "b n f"]
    visible: Bool[Tensor, "b n n"]
    real: Bool[Tensor, "b n"]
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine (B or 1,N,D) of rotary positions."""


@dataclass(frozen=True)
class Calibration:
    """The heads of a layer, the inputs that they are merged on, and their dense attention weights there."""

    heads: Projections
    samples: list[Sample]
    weights: list[Float[Tensor, "h b n n"]]
    gaussian: bool
    """Whether the mixture's score is that of a Gaussian."""

    def head_output(self, index: int, head: int) -> Float[Tensor, "t e"]:
        """Compute what a head adds to the layer's output at the real positions of a sample."""
        sample, heads = self.samples[index], self.heads
        seen = (self.weights[index][head] @ sample.x)[sample.real]
        return seen @ heads.value[head // heads.groups] @ heads.output[head]

    def energy(self, head: int) -> Tensor:
        """Compute the squared norm of a head's output over all samples."""
        return torch.stack([self.head_output(i, head).square().sum() for i in range(len(self.samples))]).sum()

    def component_scores(self, query: Tensor, key: Float[Tensor, "*h 2 f d"], sample: Sample) -> list[Tensor]:
        """Compute the scores (H,B,N,N) of both components of mixture heads."""
        return [_scores(query, part, sample, self.heads.scale, self.gaussian) for part in key.unbind(-3)]

    def mixture_weights(self, query: Tensor, key: Tensor, prior: Float[Tensor, "h 2"], sample: Sample) -> Tensor:
        """Compute the dense attention weights (H,B,N,N) of mixture heads."""
        scores = torch.stack(self.component_scores(query, key, sample), -1)
        return (scores + prior[:, None, None, None]).logsumexp(-1).softmax(-1).nan_to_num(0)


def merge(heads: Projections, samples: list[Sample], *, gaussian: float = 0.0) -> Mixture:
    """Merge the heads of a layer in pairs.

    Args:
        heads: the layer's heads; Hk is even.
        samples: inputs of the layer on a calibration text.
        gaussian: 0 for a mixture of dot products. Otherwise the mixture's score is -|q - k|^2 scale/2, and keys are
            multiplied by this number and queries divided by it, which keeps q.k and makes the extra term -|k|^2 scale/2
            small.
    """
    given = Calibration(heads, samples, [attention(heads, sample) for sample in samples], bool(gaussian))
    affinity = affinities(given.weights, samples)
    parts, pairs = [], []
    for first, second, matched in pair_groups(affinity, heads.groups):
        parts.append(merge_groups(given, (first, second), matched, gaussian))
        pairs += matched
    query, key, value, output, prior = (torch.cat([part[i] for part in parts]) for i in range(5))
    output = _outputs(given, query, key, value, output, prior)
    mean = sum(float(affinity[a, b]) for a, b in pairs) / len(pairs)
    return Mixture(query, key, value, output, prior, pairs, mean)


def attention(heads: Projections, sample: Sample) -> Float[Tensor, "h b n n"]:
    """Compute the dense attention weights of every head."""
    key = heads.key.repeat_interleave(heads.groups, 0)
    return _scores(heads.query, key, sample, heads.scale).softmax(-1).nan_to_num(0)


def affinities(weights: list[Tensor], samples: list[Sample]) -> Float[Tensor, "h h"]:
    """Compute the mean over the real positions of sum_j sqrt(A_a[i,j] A_b[i,j])."""
    total, count = torch.zeros(()), 0
    for each, sample in zip(weights, samples, strict=True):
        rows = each[:, sample.real].sqrt().flatten(1)
        total = total + rows @ rows.mT
        count += int(sample.real.sum())
    return total / max(count, 1)


def pair_groups(affinity: Float[Tensor, "h h"], groups: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Pair key heads for a large sum of affinities of their query heads: greedily, then by exchanging partners.

    Each item holds two key heads and the pairs of their query heads.
    """
    count = len(affinity) // groups
    matched = {}
    for a in range(count):
        for b in range(a + 1, count):
            queries = product(range(a * groups, (a + 1) * groups), range(b * groups, (b + 1) * groups))
            matched[a, b] = sorted(_greedy({pair: float(affinity[pair]) for pair in queries}))
    worth = {ab: sum(float(affinity[q]) for q in pairs) for ab, pairs in matched.items()}

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
    ordered = sorted((min(pair), max(pair)) for pair in chosen)
    return [(a, b, matched[a, b]) for a, b in ordered]


def _greedy(worth: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Choose disjoint pairs, the most valuable first."""
    chosen: list[tuple[int, int]] = []
    used: set[int] = set()
    for pair in sorted(worth, key=lambda pair: -worth[pair]):
        if used.isdisjoint(pair):
            chosen.append(pair)
            used.update(pair)
    return chosen


def merge_groups(
    given: Calibration, groups: tuple[int, int], pairs: list[tuple[int, int]], gaussian: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merge two key heads and their paired query heads.

    Returns query (G,F,D), key (1,2,F,D), value (1,F,D), output (G,D,E) and log prior (G,2).
    """
    heads, samples = given.heads, given.samples
    rows = torch.cat([sample.x[sample.real] for sample in samples])
    rotary = samples[0].rotation is not None
    # A key bias adds a constant to each row of scores. Where it can be fitted alone, keys only need to fit deviations.
    free = heads.biased[1] and not rotary and not gaussian
    left, right = _metric(rows, heads.biased[0]), _metric(rows - rows.mean(0) if free else rows, heads.biased[1])
    factors = torch.stack([heads.query[list(pair)] for pair in pairs])  # (G,2,F,D)
    query, key = _shared_query(factors, heads.key[list(groups)], left, right, rotary)
    if gaussian:
        query, key = query / gaussian, key * gaussian
    energy = torch.stack([given.energy(head) for pair in pairs for head in pair]).view(-1, 2)
    share = (energy / energy.sum(1, keepdim=True).clamp(min=1e-300)).clamp(1 - LARGEST_SHARE, LARGEST_SHARE)
    bias, prior = _balance(given, query, key, share, free)
    key = key + pad(bias[:, None], (0, 0, key.shape[1] - 1, 0))  # into the last row
    value, output = _values(given, pairs, query, key, prior)
    return query, key[None], value[None], output, prior


def _shared_query(
    query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"], left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor], rotary: bool,
) -> tuple[Float[Tensor, "g f d"], Float[Tensor, "2 f d"]]:  # fmt: skip
    """Step 1. `left` and `right` are metrics: a matrix root and its inverse."""
    if not rotary:
        new_query, new_key = _low_rank(left[0] @ query, right[0] @ key)
        return left[1] @ new_query, right[1] @ new_key
    half = query.shape[-1] // 2  # a plane is one complex number; scores depend on conj(q) k
    conjugate = torch.complex(query[..., :half], -query[..., half:])
    plane = torch.complex(key[..., :half], key[..., half:])
    root, inverse, key_root, key_inverse = (matrix.to(plane.dtype) for matrix in (*left, *right))
    found = [_low_rank(root @ conjugate[..., p, None], key_root @ plane[..., p, None]) for p in range(half)]
    new_query, new_key = (torch.cat([each[i] for each in found], -1) for i in range(2))
    new_query, new_key = inverse @ new_query, key_inverse @ new_key
    return torch.cat((new_query.real, -new_query.imag), -1), torch.cat((new_key.real, new_key.imag), -1)


def _low_rank(query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"]) -> tuple[Tensor, Tensor]:
    """Factor the best rank-D approximation of the block matrix query_gr key_r^T (rows g, columns r) evenly."""
    groups, _, size, width = query.shape
    basis, small = torch.linalg.qr(key)  # (2,F,D), (2,D,D): key_r^T = small_r^T basis_r^T
    stacked = torch.cat([(query[:, r] @ small[r].mT).flatten(0, 1) for r in range(2)], -1)  # (G*F,2D)
    u, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    root = s[:width].sqrt().to(u.dtype)
    new_key = torch.stack([basis[r] @ vh[:width, r * width : (r + 1) * width].mT * root for r in range(2)])
    return (u[:, :width] * root).unflatten(0, (groups, size)), new_key


def _balance(
    given: Calibration, query: Tensor, key: Tensor, share: Tensor, free: bool
) -> tuple[Float[Tensor, "2 d"], Float[Tensor, "g 2"]]:
    """Step 2: fit key biases and log priors so that log w_a - log w_b is near the log ratio of the heads' shares."""
    wanted = (share[:, 0] / share[:, 1]).log()
    rows, gaps = [], []
    for sample in given.samples:
        first, second = (scores.logsumexp(-1) for scores in given.component_scores(query, key, sample))
        rows.append((sample.x @ query[:, None])[:, sample.real] * given.heads.scale)  # (G,T,D)
        gaps.append(wanted[:, None] - (first - second)[:, sample.real])
    row, gap = torch.cat(rows, 1), torch.cat(gaps, 1)
    beta = torch.zeros(row.shape[-1], dtype=row.dtype)
    if free:
        centred, rest = (row - row.mean(1, keepdim=True)).flatten(0, 1), (gap - gap.mean(1, keepdim=True)).flatten()
        gram = centred.mT @ centred
        beta = torch.linalg.solve(gram + _ridge(gram), centred.mT @ rest)
    rest = (gap - row @ beta).mean(1)
    return torch.stack((beta, -beta)) / 2, torch.stack((rest, -rest), -1) / 2 - math.log(2)


def _values(
    given: Calibration, pairs: list[tuple[int, int]], query: Tensor, key: Tensor, prior: Tensor
) -> tuple[Float[Tensor, "f d"], Float[Tensor, "g d e"]]:
    """Step 3, for all pairs of a group together."""
    heads = given.heads
    size, width = heads.value.shape[1:]
    gram = torch.zeros(len(pairs), size, size, dtype=query.dtype)
    cross = torch.zeros(len(pairs), size, heads.output.shape[-1], dtype=query.dtype)
    for index, sample in enumerate(given.samples):
        seen = (given.mixture_weights(query, key, prior, sample) @ sample.x)[:, sample.real]  # (G,T,F)
        written = torch.stack([given.head_output(index, a) + given.head_output(index, b) for a, b in pairs])
        gram += seen.mT @ seen
        cross += seen.mT @ written
    values = heads.value.repeat_interleave(heads.groups, 0)
    first = torch.stack([values[a] @ heads.output[a] + values[b] @ heads.output[b] for a, b in pairs])
    kept = size if heads.biased[2] else size - 1
    gram, cross, first = gram[:, :kept, :kept], cross[:, :kept], first[:, :kept]
    gram, cross = gram + _ridge(gram), cross + _ridge(gram, of=first)
    root, inverse = _root(gram.mean(0))
    u, _, _ = torch.linalg.svd(root @ torch.cat(list(torch.linalg.solve(gram, cross)), -1), full_matrices=False)
    value = inverse @ u[:, :width]
    output = torch.linalg.solve(value.mT @ gram @ value, value.mT @ cross)
    # Value and output get the same norm in each dimension, which trains well.
    ratio = (output.norm(dim=-1).mean(0) / value.norm(dim=0)).clamp(min=1e-9).sqrt()
    return pad(value * ratio, (0, 0, 0, size - kept)), output / ratio[:, None]


def _outputs(
    given: Calibration, query: Tensor, key: Tensor, value: Tensor, output: Float[Tensor, "h d e"], prior: Tensor
) -> Float[Tensor, "h d e"]:
    """Step 5: with all else fixed, min |sum_h A_h X V_h O_h - Y|^2 over the outputs of all merged heads."""
    groups = given.heads.groups
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    size = output.shape[0] * output.shape[1]
    gram = torch.zeros(size, size, dtype=output.dtype)
    cross = torch.zeros(size, output.shape[-1], dtype=output.dtype)
    for index, sample in enumerate(given.samples):
        mixed = given.mixture_weights(query, key, prior, sample)
        seen = (mixed @ (sample.x @ value[:, None]))[:, sample.real].transpose(0, 1).flatten(1)
        gram += seen.mT @ seen
        cross += seen.mT @ sum(given.head_output(index, head) for head in range(len(given.heads.query)))
    fitted: Tensor = torch.linalg.solve(gram + _ridge(gram), cross + _ridge(gram, of=output.flatten(0, 1)))
    return fitted.view_as(output)


def _scores(
    query: Float[Tensor, "h f d"], key: Float[Tensor, "*h f d"], sample: Sample, scale: float, gaussian: bool = False
) -> Float[Tensor, "h b n n"]:
    """Compute q_i.k_j scale, with the Gaussian's -|k_j|^2 scale/2 if asked for; -inf where j is not visible."""
    q, k = (_rotated(sample.x @ weight[..., None, :, :], sample) for weight in (query, key))
    scores = q @ k.mT * scale
    if gaussian:
        scores = scores - k.square().sum(-1)[..., None, :] * (scale / 2)
    return scores.masked_fill(~sample.visible, -math.inf)


def _rotated(x: Float[Tensor, "*h b n d"], sample: Sample) -> Tensor:
    if sample.rotation is None:
        return x
    cos, sin = sample.rotation
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _metric(rows: Float[Tensor, "t f"], biased: bool) -> tuple[Tensor, Tensor]:
    """Compute the root of the rows' second moment and its inverse; without a bias, its row and column are zero."""
    kept = rows.shape[1] if biased else rows.shape[1] - 1
    moment = rows[:, :kept].mT @ rows[:, :kept] / len(rows)
    root, inverse = _root(moment + _ridge(moment))
    missing = (0, rows.shape[1] - kept) * 2
    return pad(root, missing), pad(inverse, missing)


def _root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    root = values.clamp(min=1e-300).sqrt()
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def _ridge(matrix: Float[Tensor, "*g f f"], of: Tensor | None = None) -> Tensor:
    """Return a small multiple of the identity, or of `of`, on the scale of a Gram matrix."""
    size = matrix.shape[-1]
    weight = RIDGE * matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-300)[..., None, None]
    return weight * (torch.eye(size, dtype=matrix.dtype) if of is None else of)
