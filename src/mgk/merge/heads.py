"""The mathematics of head merging: two softmax heads a, b become the components of one mixture-key head.

A head has weights A[i,j] ~ exp(q_i.k_j / sqrt(D)) and adds A X W_v W_o to the output. A mixture head has one query, two
keys and one value, with A[i,j] ~ sum_r prior_r exp(q_i.k_jr / sqrt(D)). docs/merging.md derives the five steps:

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
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgk.merge.calibration import Calibration, Components, Mixture, Projections, Sample, attention, rms_of
from mgk.merge.normalised import normalised
from mgk.merge.pairs import affinities, pair_groups

if TYPE_CHECKING:
    from jaxtyping import Float

RIDGE = 1e-4  # relative to the mean variance: the weight of directions that the calibration text does not contain
LARGEST_SHARE = 0.95  # the largest share of one head in a mixture


def merge(heads: Projections, samples: list[Sample], *, gaussian: float = 0.0) -> Mixture:
    """Merge the heads of a layer in pairs.

    Args:
        heads: the layer's heads; Hk is even, or G is.
        samples: inputs of the layer on a calibration text.
        gaussian: 0 for a mixture of dot products. Otherwise the mixture's score is -|q - k|^2 scale/2, and keys are
            multiplied by this number and queries divided by it, which keeps q.k and makes the extra term -|k|^2 scale/2
            small.
    """
    given = Calibration(heads, samples, [attention(heads, sample) for sample in samples], bool(gaussian))
    affinity = affinities(given.weights, samples)
    chosen = pair_groups(affinity, heads.groups)
    shared = [_shared(given, (first, second), matched, gaussian) for first, second, matched in chosen]
    if heads.norm is not None and heads.norm.together:  # the size of a query is that of all merged heads together
        queries, eps = torch.cat([part.query for part in shared]), heads.norm.eps
        given = replace(given, query_rms=[rms_of(queries, sample, eps) for sample in samples])
    parts = [_fitted(given, part, matched) for part, (_, _, matched) in zip(shared, chosen, strict=True)]
    merged, value, output, prior = _joined(parts)
    pairs = [pair for _, _, matched in chosen for pair in matched]
    mean = sum(float(affinity[a, b]) for a, b in pairs) / len(pairs)
    output = _outputs(given, merged, value, output, prior)
    return Mixture(merged.query, merged.key, value, output, prior, pairs, mean, merged.gains)


def _joined(parts: list[tuple[Components, Tensor, Tensor, Tensor]]) -> tuple[Components, Tensor, Tensor, Tensor]:
    """Concatenate the merged groups: queries (H,F,D), keys (Hk,2,F,D), values (Hk,F,D), outputs and log priors."""
    merged, *others = zip(*parts, strict=True)
    value, output, prior = (torch.cat(each) for each in others)
    gains = [each.gains for each in merged if each.gains is not None]
    joined = (torch.cat([q for q, _ in gains]), torch.stack([k for _, k in gains])) if gains else None
    query, key = torch.cat([each.query for each in merged]), torch.stack([each.key for each in merged])
    return Components(query, key, joined), value, output, prior


def _shared(given: Calibration, groups: tuple[int, int], pairs: list[tuple[int, int]], gaussian: float) -> Components:
    """Step 1 for two key heads and their paired query heads: queries (G,F,D) and keys (2,F,D)."""
    heads, samples = given.heads, given.samples
    factors = torch.stack([heads.query[list(pair)] for pair in pairs])  # (G,2,F,D)
    keys = heads.key[list(groups)]
    if heads.norm is not None:
        return normalised(given, heads.norm, factors, keys, pairs, groups, gaussian or 1.0)
    rows = torch.cat([sample.x[sample.real] for sample in samples])
    free = _free(given)
    left, right = _metric(rows, heads.biased[0]), _metric(rows - rows.mean(0) if free else rows, heads.biased[1])
    rotation = samples[0].rotation
    rotary = 0 if rotation is None else rotation[0].shape[-1]
    query, key = _shared_query(factors, keys, left, right, rotary)
    return Components(query / gaussian, key * gaussian) if gaussian else Components(query, key)


def _free(given: Calibration) -> bool:
    """Whether a key bias only adds a constant to each row of scores: it is fitted alone, and keys fit deviations."""
    return given.heads.biased[1] and given.samples[0].rotation is None and not given.gaussian and not given.heads.norm


def _fitted(
    given: Calibration, merged: Components, pairs: list[tuple[int, int]]
) -> tuple[Components, Tensor, Tensor, Tensor]:
    """Steps 2 and 3: keys with their biases, value (1,F,D), output (G,D,E) and log prior (G,2)."""
    energy = torch.stack([given.energy(head) for pair in pairs for head in pair]).view(-1, 2)
    share = (energy / energy.sum(1, keepdim=True).clamp(min=1e-300)).clamp(1 - LARGEST_SHARE, LARGEST_SHARE)
    bias, prior = _balance(given, merged, share)
    key = merged.key + pad(bias[:, None], (0, 0, merged.key.shape[1] - 1, 0))  # into the last row
    merged = replace(merged, key=key)
    value, output = _values(given, pairs, merged, prior)
    return merged, value[None], output, prior


def _shared_query(
    query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"], left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor], rotary: int,
) -> tuple[Float[Tensor, "g f d"], Float[Tensor, "2 f d"]]:  # fmt: skip
    """Step 1. `left` and `right` are metrics, a matrix root and its inverse; positions rotate the first `rotary` of D.

    Rotated planes (two numbers of a head) are factored each for itself, and what is not rotated together.
    """
    found = []
    if rotary < query.shape[-1]:
        rest = _low_rank(left[0] @ query[..., rotary:], right[0] @ key[..., rotary:])
        found.append((left[1] @ rest[0], right[1] @ rest[1]))
    if rotary:
        half = rotary // 2  # a plane is one complex number; scores depend on conj(q) k
        conjugate = torch.complex(query[..., :half], -query[..., half:rotary])
        plane = torch.complex(key[..., :half], key[..., half:rotary])
        root, inverse, key_root, key_inverse = (matrix.to(plane.dtype) for matrix in (*left, *right))
        parts = [_low_rank(root @ conjugate[..., p, None], key_root @ plane[..., p, None]) for p in range(half)]
        turned, keys = (torch.cat([each[i] for each in parts], -1) for i in range(2))
        turned, keys = inverse @ turned, key_inverse @ keys
        found.insert(0, (torch.cat((turned.real, -turned.imag), -1), torch.cat((keys.real, keys.imag), -1)))
    return torch.cat([part[0] for part in found], -1), torch.cat([part[1] for part in found], -1)


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
    given: Calibration, merged: Components, share: Float[Tensor, "g 2"]
) -> tuple[Float[Tensor, "2 d"], Float[Tensor, "g 2"]]:
    """Step 2: fit key biases and log priors so that log w_a - log w_b is near the log ratio of the heads' shares."""
    wanted = (share[:, 0] / share[:, 1]).log()
    rows, gaps = [], []
    for index, sample in enumerate(given.samples):
        first, second = (scores.logsumexp(-1) for scores in given.component_scores(merged, index))
        rows.append((sample.x @ merged.query[:, None])[:, sample.real] * given.heads.scale)  # (G,T,D)
        gaps.append(wanted[:, None] - (first - second)[:, sample.real])
    row, gap = torch.cat(rows, 1), torch.cat(gaps, 1)
    beta = torch.zeros(row.shape[-1], dtype=row.dtype)
    if _free(given):
        centred, rest = (row - row.mean(1, keepdim=True)).flatten(0, 1), (gap - gap.mean(1, keepdim=True)).flatten()
        gram = centred.mT @ centred
        beta = torch.linalg.solve(gram + _ridge(gram), centred.mT @ rest)
    rest = (gap - row @ beta).mean(1)
    return torch.stack((beta, -beta)) / 2, torch.stack((rest, -rest), -1) / 2 - math.log(2)


def _values(
    given: Calibration, pairs: list[tuple[int, int]], merged: Components, prior: Float[Tensor, "g 2"]
) -> tuple[Float[Tensor, "f d"], Float[Tensor, "g d e"]]:
    """Step 3, for all pairs of a group together."""
    heads = given.heads
    size, width = heads.value.shape[1:]
    gram = torch.zeros(len(pairs), size, size, dtype=prior.dtype)
    cross = torch.zeros(len(pairs), size, heads.output.shape[-1], dtype=prior.dtype)
    for index, sample in enumerate(given.samples):
        seen = (given.mixture_weights(merged, prior, index) @ sample.x)[:, sample.real]  # (G,T,F)
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
    given: Calibration, merged: Components, value: Float[Tensor, "hk f d"], output: Float[Tensor, "h d e"],
    prior: Float[Tensor, "h 2"],
) -> Float[Tensor, "h d e"]:  # fmt: skip
    """Step 5: with all else fixed, min |sum_h A_h X V_h O_h - Y|^2 over the outputs of all merged heads."""
    groups = len(output) // len(value)
    gains = None if merged.gains is None else (merged.gains[0], merged.gains[1].repeat_interleave(groups, 0))
    merged, value = (
        Components(merged.query, merged.key.repeat_interleave(groups, 0), gains),
        value.repeat_interleave(groups, 0),
    )
    size = output.shape[0] * output.shape[1]
    gram = torch.zeros(size, size, dtype=output.dtype)
    cross = torch.zeros(size, output.shape[-1], dtype=output.dtype)
    for index, sample in enumerate(given.samples):
        mixed = given.mixture_weights(merged, prior, index)
        seen = (mixed @ (sample.x @ value[:, None]))[:, sample.real].transpose(0, 1).flatten(1)
        gram += seen.mT @ seen
        cross += seen.mT @ sum(given.head_output(index, head) for head in range(len(given.heads.query)))
    fitted: Tensor = torch.linalg.solve(gram + _ridge(gram), cross + _ridge(gram, of=output.flatten(0, 1)))
    return fitted.view_as(output)


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
