"""The least-squares problems of head merging, each checked against the definition of its solution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mgk.merge import heads as maths
from mgk.merge import pairs
from mgk.merge.calibration import Mixture, Projections, Sample, attention, project
from mgk.merge.calibration import scores as dense_scores
from mgk.merge.heads import merge
from tests.nn.common import normal

E, D, N = 10, 4, 14


def layer(biased: bool, heads: int = 2, key_heads: int = 2) -> Projections:
    parts = [normal(count, E + 1, D, seed=seed) / E**0.5 for seed, count in enumerate((heads, key_heads, key_heads))]
    if not biased:
        for part in parts:
            part[:, -1] = 0
    query, key, value = parts
    return Projections(2 * query, key, value, normal(heads, D, E, seed=5), D**-0.5, (biased,) * 3)


def sample(rotary: bool, seed: int = 9) -> Sample:
    x = torch.cat((normal(3, N, E, seed=seed), torch.ones(3, N, 1, dtype=torch.float64)), -1)
    real = torch.ones(3, N, dtype=torch.bool)
    real[0, :5] = False
    visible = real[:, None] & torch.ones(N, N, dtype=torch.bool).tril()
    angle = torch.arange(N)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=torch.float64)
    return Sample(x, visible, real, (angle.cos()[None], angle.sin()[None]) if rotary else None)


def scores(merged: Mixture, given: Sample, scale: float) -> Tensor:
    """Scores of both components of one merged head with their priors, (2,B,N,N)."""
    query = project(merged.query, given)
    parts = [dense_scores(query, project(merged.key[0, r], given), given, scale)[0] for r in range(2)]
    return torch.stack(parts) + merged.log_prior[0, :, None, None, None]


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_shared_query_is_the_nearest_of_its_rank(rotary: bool, groups: int) -> None:
    """Eckart and Young: the error is that of the discarded singular values, here with the identity as metric."""
    query, key = normal(groups, 2, E + 1, D), normal(2, E + 1, D, seed=1)
    identity = (torch.eye(E + 1, dtype=torch.float64),) * 2
    new_query, new_key = maths._shared_query(query, key, identity, identity, D if rotary else 0)

    def full(q: Tensor, k: Tensor) -> Tensor:
        """The matrices of all planes (or the one of the head), (P,G*F,2F), of query (G,2,F,D) and key (2,F,D)."""
        if rotary:
            q = torch.complex(q[..., : D // 2], -q[..., D // 2 :])
            k = torch.complex(k[..., : D // 2], k[..., D // 2 :])
            pairs = torch.einsum("grfp,rep->pgfre", q, k)
        else:
            pairs = torch.einsum("grfd,red->gfre", q, k)[None]
        return pairs.flatten(3, 4).flatten(1, 2)

    wanted, found = full(query, key), full(new_query[:, None].expand(-1, 2, -1, -1), new_key)
    singular = torch.linalg.svdvals(wanted)
    lost = singular[:, 1 if rotary else D :].square().sum()
    torch.testing.assert_close((wanted - found).abs().square().sum(), lost)
    assert lost > 0.01


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_the_components_have_the_shares_of_their_heads(biased: bool, rotary: bool) -> None:
    """The mean over the positions of log w_a / w_b is the log ratio of the energies of the heads' outputs."""
    given, old = sample(rotary), layer(biased)
    old = Projections(
        old.query, old.key, old.value, old.output * torch.tensor([2.0, 1.0])[:, None, None], old.scale, old.biased
    )
    merged = merge(old, [given])
    weights = attention(old, given)
    energy = [(weights[h] @ given.x @ old.value[h] @ old.output[h])[given.real].square().sum() for h in range(2)]
    sums = scores(merged, given, old.scale).logsumexp(-1)[:, given.real]
    torch.testing.assert_close((sums[0] - sums[1]).mean(), (energy[0] / energy[1]).log(), rtol=1e-9, atol=1e-9)
    if biased and not rotary:  # and the biases remove the part that is linear in the query
        query = (given.x @ merged.query[0])[given.real]
        query = query - query.mean(0)
        rest = sums[0] - sums[1] - (sums[0] - sums[1]).mean()
        assert (query.mT @ rest).norm() < 1e-3 * query.norm() * rest.norm() + 1e-9


@pytest.mark.parametrize("biased", [False, True])
def test_values_and_outputs_are_the_best_of_their_rank(biased: bool) -> None:
    """Reduced-rank regression: no V O of rank D is nearer than the SVD of the fitted values, up to the small ridge."""
    given, old = sample(False), layer(biased)
    merged = merge(old, [given])
    weights = attention(old, given)
    target = sum((weights[h] @ given.x @ old.value[h] @ old.output[h])[given.real] for h in range(2))
    mixed = scores(merged, given, old.scale).logsumexp(0).softmax(-1).nan_to_num(0)
    seen = (mixed @ given.x)[given.real]
    seen = seen if biased else seen[:, :-1]
    found = seen @ merged.value[0][: seen.shape[1]] @ merged.output[0]
    fitted = seen @ torch.linalg.lstsq(seen, target).solution
    u, s, vh = torch.linalg.svd(fitted, full_matrices=False)
    best = (u[:, :D] * s[:D]) @ vh[:D]
    least, reached = ((target - each).square().sum() for each in (best, found))
    assert least * (1 - 1e-9) <= reached <= least * 1.01
    assert merged.value[0, -1].abs().sum() == 0 or biased


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 4)])
def test_outputs_of_all_heads_are_fitted_together(heads: int, key_heads: int) -> None:
    """Normal equations: the residual is orthogonal to the inputs of the outputs, up to the small ridge."""
    given, old = sample(False), layer(True, heads, key_heads)
    merged = merge(old, [given])
    weights, share = attention(old, given), heads // key_heads
    target = sum(
        (weights[h] @ given.x @ old.value[h // share] @ old.output[h])[given.real] for h in range(len(old.query))
    )
    seen = []
    for h in range(len(merged.query)):
        query, keys = project(merged.query[h : h + 1], given), project(merged.key[h // share], given)
        parts = [dense_scores(query, key, given, old.scale)[0] for key in keys]
        both = torch.stack(parts) + merged.log_prior[h, :, None, None, None]
        mixed = both.logsumexp(0).softmax(-1).nan_to_num(0)
        seen.append((mixed @ given.x @ merged.value[h // share])[given.real])
    rows = torch.cat(seen, -1)
    left = target - rows @ merged.output.flatten(0, 1)
    assert (rows.mT @ left).norm() < 1e-2 * rows.norm() * left.norm()
    assert left.norm() > 0.1 * torch.as_tensor(target).norm()  # half the heads cannot reproduce all of it


def test_equal_heads_have_affinity_one_and_disjoint_ones_none() -> None:
    given = Sample(torch.zeros(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool))
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]])[:, None]
    found = pairs.affinities([weights], [given])
    torch.testing.assert_close(found, torch.tensor([[1, 0.5, 1], [0.5, 1, 0.5], [1, 0.5, 1]]))
    assert math.isclose(float(found.trace()), 3)
