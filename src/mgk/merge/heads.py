"""The mathematics of head merging: two softmax heads a, b become the components of one mixture-key head.

A head weighs x_j for x_i by exp(x_i^T W_q W_k^T x_j / sqrt(D)) and adds A X W_v W_o to the output. The mixture head has
one query and two keys, A[i,j] ~ sum_r prior_r exp(q_i.k_jr / sqrt(D)), and one value. In four steps, each exact when
the two heads are the same:

1. Query and keys. [W_qa W_ka^T, W_qb W_kb^T] has rank 2D and must become W_q [K_a^T, K_b^T] of rank D: a truncated SVD,
   in the metric of the data. Rotary positions turn the planes of a head: there each plane is a complex SVD of rank 1.
2. Balance. The mixture is sum_r w_r A_r with weights w_r(i) ~ prior_r Z_r(i), where Z_r is the softmax sum of component
   r. Priors, and the key biases where there are any, are fitted so that w_r is the head's share of the output's energy.
3. Values and outputs. With the mixture's A fixed, min |A X V O - Y|^2 over rank D, where Y is what the two heads
   together wrote: reduced-rank regression, drawn to W_va W_oa + W_vb W_ob where the data says nothing.
4. Groups. Where G query heads share a key and a value (grouped-query attention), two groups merge, each query head of
   one with one of the other; the G pairs share the two keys and the value, and stand below each other in 1 and beside
   each other in 3.
5. Outputs. Last, the outputs of all merged heads are fitted together: what a pair cannot write, another may.

B batch, N positions, E width of the model, F = E + 1 with the bias, H heads, Hk key heads, G = H / Hk, D width of a
head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

RIDGE = 1e-4  # of the mean variance: how much a direction counts that the calibration text never takes
LARGEST_SHARE = 0.95  # of one head in a mixture


@dataclass(frozen=True)
class Projections:
    """The heads of an attention layer in float64; the last of the F rows is the bias, zero where there is none."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "hk f d"]
    value: Float[Tensor, "hk f d"]
    output: Float[Tensor, "h d e"]
    scale: float
    """Of the scores: 1/sqrt(D)."""
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
    """Which two query heads each merged head was."""
    affinity: float
    """Mean over the pairs of sum_j sqrt(A_a A_b): 1 for equal heads, 0 for heads that never look at the same key."""


@dataclass(frozen=True)
class Sample:
    """What a layer was called with."""

    x: Float[Tensor, "b n f"]
    visible: Bool[Tensor, "b n n"]
    real: Bool[Tensor, "b n"]
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine (B or 1,N,D), for x -> x cos + turn(x) sin."""


def merge(heads: Projections, samples: list[Sample], *, gaussian: float = 0.0) -> Mixture:
    """Merge the heads of a layer, two and two.

    Args:
        heads: the layer's heads; Hk is even.
        samples: inputs of the layer on a calibration text.
        gaussian: 0 for a mixture of dot products. Else the mixture's score is -|q - k|^2 scale/2, whose extra term
            -|k|^2 scale/2 is made small: keys are scaled by this number and queries by its inverse, which leaves
            q.k alone.
    """
    weights = [attention(heads, sample) for sample in samples]
    affinity = affinities(weights, samples)
    parts, pairs = [], []
    for first, second, matched in pair_groups(affinity, heads.groups):
        parts.append(merge_groups(heads, samples, weights, (first, second), matched, gaussian))
        pairs += matched
    query, key, value, output, prior = (torch.cat([part[i] for part in parts]) for i in range(5))
    output = _outputs(heads, samples, weights, query, key, value, output, prior, bool(gaussian))
    mean = sum(float(affinity[a, b]) for a, b in pairs) / len(pairs)
    return Mixture(query, key, value, output, prior, pairs, mean)


def attention(heads: Projections, sample: Sample) -> Float[Tensor, "h b n n"]:
    """The dense weights of every head; N x N, for calibration alone."""
    key = heads.key.repeat_interleave(heads.groups, 0)
    return _scores(heads.query, key, sample, heads.scale).softmax(-1).nan_to_num(0)


def affinities(weights: list[Tensor], samples: list[Sample]) -> Float[Tensor, "h h"]:
    """Mean over the real positions of sum_j sqrt(A_a[i,j] A_b[i,j])."""
    total, count = torch.zeros(()), 0
    for each, sample in zip(weights, samples, strict=True):
        rows = each[:, sample.real].sqrt().flatten(1)
        total = total + rows @ rows.mT
        count += int(sample.real.sum())
    return total / max(count, 1)


def pair_groups(affinity: Float[Tensor, "h h"], groups: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Pair key heads so that the affinities of the query heads add up to much: greedily, then by exchanges of partners.

    Each item: two key heads, and the pairs of their query heads.
    """
    count = len(affinity) // groups
    matched = {
        (a, b): _assign(affinity, range(a * groups, (a + 1) * groups), range(b * groups, (b + 1) * groups))
        for a in range(count)
        for b in range(a + 1, count)
    }
    worth = {ab: sum(float(affinity[q]) for q in pairs) for ab, pairs in matched.items()}

    def value(a: int, b: int) -> float:
        return worth[min(a, b), max(a, b)]

    chosen: list[tuple[int, int]] = []
    for a, b in sorted(worth, key=lambda ab: -worth[ab]):
        if not any({a, b} & {*pair} for pair in chosen):
            chosen.append((a, b))
    improved = True
    while improved:
        improved = False
        for i in range(len(chosen)):
            for j in range(i):
                (a, b), (c, d) = chosen[i], chosen[j]
                now = value(a, b) + value(c, d)
                for e, f in (((a, c), (b, d)), ((a, d), (b, c))):
                    if value(*e) + value(*f) > now + 1e-12:
                        chosen[i], chosen[j] = e, f
                        now, improved = value(*e) + value(*f), True
    ordered = sorted((min(pair), max(pair)) for pair in chosen)
    return [(a, b, matched[a, b]) for a, b in ordered]


def merge_groups(
    heads: Projections, samples: list[Sample], weights: list[Tensor], groups: tuple[int, int],
    pairs: list[tuple[int, int]], gaussian: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Query (G,F,D), key (1,2,F,D), value (1,F,D), output (G,D,E) and log prior (G,2) of two groups made one."""
    rows = torch.cat([sample.x[sample.real] for sample in samples])
    rotary = samples[0].rotation is not None
    # A bias of the keys adds a constant to a row of scores: where it can be set apart, keys need fit their spread only.
    free = heads.biased[1] and not rotary and not gaussian
    left, right = _metric(rows, heads.biased[0]), _metric(rows - rows.mean(0) if free else rows, heads.biased[1])
    factors = torch.stack([torch.stack((heads.query[a], heads.query[b])) for a, b in pairs])  # (G,2,F,D)
    query, key = _shared_query(factors, heads.key[list(groups)], left, right, rotary)
    if gaussian:
        query, key = query / gaussian, key * gaussian
    energy = torch.zeros(len(pairs), 2, dtype=rows.dtype)
    for sample, weight in zip(samples, weights, strict=True):
        for g, pair in enumerate(pairs):
            for r, head in enumerate(pair):
                energy[g, r] += _written(heads, sample, weight, head, groups[r]).square().sum()
    share = (energy / energy.sum(1, keepdim=True).clamp(min=1e-300)).clamp(1 - LARGEST_SHARE, LARGEST_SHARE)
    bias, prior = _balance(query, key, samples, share, heads, free, bool(gaussian))
    key = key + pad(bias[:, None], (0, 0, key.shape[1] - 1, 0))  # into the last row
    value, output = _values(heads, samples, weights, groups, pairs, query, key, prior, bool(gaussian))
    return query, key[None], value[None], output, prior


def _shared_query(
    query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"], left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor], rotary: bool,
) -> tuple[Float[Tensor, "g f d"], Float[Tensor, "2 f d"]]:  # fmt: skip
    """Step 1. Metrics are a root and its inverse."""
    if not rotary:
        new_query, new_key = _low_rank(left[0] @ query, right[0] @ key)
        return left[1] @ new_query, right[1] @ new_key
    half = query.shape[-1] // 2  # a plane is one complex number; conj(q) k must stay, whatever the angle between them
    conjugate = torch.complex(query[..., :half], -query[..., half:])
    plane = torch.complex(key[..., :half], key[..., half:])
    root, inverse, key_root, key_inverse = (matrix.to(plane.dtype) for matrix in (*left, *right))
    found = [_low_rank(root @ conjugate[..., p, None], key_root @ plane[..., p, None]) for p in range(half)]
    new_query, new_key = (torch.cat([each[i] for each in found], -1) for i in range(2))
    new_query, new_key = inverse @ new_query, key_inverse @ new_key
    return torch.cat((new_query.real, -new_query.imag), -1), torch.cat((new_key.real, new_key.imag), -1)


def _low_rank(query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"]) -> tuple[Tensor, Tensor]:
    """The rank-D matrix nearest to the one with rows g and columns r of query_gr key_r^T, as factors of equal size."""
    groups, _, size, width = query.shape
    basis, small = torch.linalg.qr(key)  # (2,F,D), (2,D,D): key_r^T = small_r^T basis_r^T
    stacked = torch.cat([(query[:, r] @ small[r].mT).flatten(0, 1) for r in range(2)], -1)  # (G*F,2D)
    u, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    root = s[:width].sqrt().to(u.dtype)
    new_key = torch.stack([basis[r] @ vh[:width, r * width : (r + 1) * width].mT * root for r in range(2)])
    return (u[:, :width] * root).unflatten(0, (groups, size)), new_key


def _balance(
    query: Tensor, key: Tensor, samples: list[Sample], share: Tensor, heads: Projections, free: bool, gaussian: bool
) -> tuple[Float[Tensor, "2 d"], Float[Tensor, "g 2"]]:
    """Step 2: biases of the keys and log priors with log w_a - log w_b near the log of the heads' shares."""
    wanted = (share[:, 0] / share[:, 1]).log()
    rows, gaps = [], []
    for sample in samples:
        sums = torch.stack([_scores(query, key[r], sample, heads.scale, gaussian).logsumexp(-1) for r in range(2)])
        rows.append((sample.x @ query[:, None])[:, sample.real] * heads.scale)  # (G,T,D)
        gaps.append(wanted[:, None] - (sums[0] - sums[1])[:, sample.real])
    row, gap = torch.cat(rows, 1), torch.cat(gaps, 1)
    beta = torch.zeros(row.shape[-1], dtype=row.dtype)
    if free:
        centred, rest = (row - row.mean(1, keepdim=True)).flatten(0, 1), (gap - gap.mean(1, keepdim=True)).flatten()
        gram = centred.mT @ centred
        beta = torch.linalg.solve(gram + _ridge(gram), centred.mT @ rest)
    rest = (gap - row @ beta).mean(1)
    return torch.stack((beta, -beta)) / 2, torch.stack((rest, -rest), -1) / 2 - math.log(2)


def _values(
    heads: Projections, samples: list[Sample], weights: list[Tensor], groups: tuple[int, int],
    pairs: list[tuple[int, int]], query: Tensor, key: Tensor, prior: Tensor, gaussian: bool,
) -> tuple[Float[Tensor, "f d"], Float[Tensor, "g d e"]]:  # fmt: skip
    """Step 3, for all pairs of a group together."""
    size, width = heads.value.shape[1:]
    gram = torch.zeros(len(pairs), size, size, dtype=query.dtype)
    cross = torch.zeros(len(pairs), size, heads.output.shape[-1], dtype=query.dtype)
    for sample, weight in zip(samples, weights, strict=True):
        scores = torch.stack([_scores(query, key[r], sample, heads.scale, gaussian) for r in range(2)], -1)
        mixed = (scores + prior[:, None, None, None]).logsumexp(-1).softmax(-1).nan_to_num(0)
        for g, pair in enumerate(pairs):
            seen = (mixed[g] @ sample.x)[sample.real]
            wrote = sum(_written(heads, sample, weight, head, groups[r]) for r, head in enumerate(pair))
            gram[g] += seen.mT @ seen
            cross[g] += seen.mT @ wrote
    first = torch.stack([sum(heads.value[groups[r]] @ heads.output[h] for r, h in enumerate(p)) for p in pairs])  # type: ignore[misc]
    kept = size if heads.biased[2] else size - 1
    gram, cross, first = gram[:, :kept, :kept], cross[:, :kept], first[:, :kept]
    gram, cross = gram + _ridge(gram), cross + _ridge(gram, of=first)
    root, inverse = _root(gram.mean(0))
    u, _, _ = torch.linalg.svd(root @ torch.cat(list(torch.linalg.solve(gram, cross)), -1), full_matrices=False)
    value = inverse @ u[:, :width]
    output = torch.linalg.solve(value.mT @ gram @ value, value.mT @ cross)
    # Both factors of a dimension get the same size, which trains well.
    ratio = (output.norm(dim=-1).mean(0) / value.norm(dim=0)).clamp(min=1e-9).sqrt()
    return pad(value * ratio, (0, 0, 0, size - kept)), output / ratio[:, None]


def _outputs(
    heads: Projections, samples: list[Sample], weights: list[Tensor], query: Tensor, key: Tensor, value: Tensor,
    output: Float[Tensor, "h d e"], prior: Tensor, gaussian: bool,
) -> Float[Tensor, "h d e"]:  # fmt: skip
    """Step 5: with all else fixed, min |sum_h A_h X V_h O_h - Y|^2 over the outputs of all merged heads together."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    size = output.shape[0] * output.shape[1]
    gram = torch.zeros(size, size, dtype=output.dtype)
    cross = torch.zeros(size, output.shape[-1], dtype=output.dtype)
    for sample, weight in zip(samples, weights, strict=True):
        scores = torch.stack([_scores(query, key[:, r], sample, heads.scale, gaussian) for r in range(2)], -1)
        mixed = (scores + prior[:, None, None, None]).logsumexp(-1).softmax(-1).nan_to_num(0)
        seen = (mixed @ (sample.x @ value[:, None]))[:, sample.real].transpose(0, 1).flatten(1)
        wrote = sum(_written(heads, sample, weight, h, h // heads.groups) for h in range(len(heads.query)))
        gram += seen.mT @ seen
        cross += seen.mT @ wrote
    fitted: Tensor = torch.linalg.solve(gram + _ridge(gram), cross + _ridge(gram, of=output.flatten(0, 1)))
    return fitted.view_as(output)


def _written(heads: Projections, sample: Sample, weight: Tensor, head: int, group: int) -> Float[Tensor, "t e"]:
    """What a head adds to the output at the real positions."""
    seen = (weight[head] @ sample.x)[sample.real]
    return seen @ heads.value[group] @ heads.output[head]


def _scores(
    query: Float[Tensor, "h f d"], key: Float[Tensor, "*h f d"], sample: Sample, scale: float, gaussian: bool = False
) -> Float[Tensor, "h b n n"]:
    """q_i.k_j scale, with the Gaussian's -|k_j|^2 scale/2 if asked for; -inf where j is not visible."""
    q = _turned(sample.x @ query[:, None], sample)
    k = _turned(sample.x @ (key if key.dim() == 3 else key[None])[:, None], sample)
    scores = q @ k.mT * scale
    if gaussian:
        scores = scores - k.square().sum(-1)[..., None, :] * (scale / 2)
    return scores.masked_fill(~sample.visible, -math.inf)


def _turned(x: Float[Tensor, "h b n d"], sample: Sample) -> Tensor:
    if sample.rotation is None:
        return x
    cos, sin = sample.rotation
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _metric(rows: Float[Tensor, "t f"], biased: bool) -> tuple[Tensor, Tensor]:
    """The root of the rows' second moment and its inverse; without a bias the last row and column are nothing."""
    kept = rows.shape[1] if biased else rows.shape[1] - 1
    moment = rows[:, :kept].mT @ rows[:, :kept] / len(rows)
    root, inverse = _root(moment + _ridge(moment))
    room = (0, rows.shape[1] - kept) * 2
    return pad(root, room), pad(inverse, room)


def _root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    root = values.clamp(min=1e-300).sqrt()
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def _ridge(matrix: Float[Tensor, "*g f f"], of: Tensor | None = None) -> Tensor:
    """A small multiple of the identity, or of `of`, on the scale of a Gram matrix."""
    size = matrix.shape[-1]
    weight = RIDGE * matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-300)[..., None, None]
    return weight * (torch.eye(size, dtype=matrix.dtype) if of is None else of)


def _assign(affinity: Tensor, first: range, second: range) -> list[tuple[int, int]]:
    """Every query head of one group with one of the other, the most alike first."""
    order = sorted(((a, b) for a in first for b in second), key=lambda ab: -float(affinity[ab]))
    pairs: list[tuple[int, int]] = []
    for a, b in order:
        if all(a != c and b != d for c, d in pairs):
            pairs.append((a, b))
    return sorted(pairs)
