"""Means and variances by EM: Eqn 13 pooled over what shares them; and a mixture before the feature map is one key.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from mgk.nn import MixtureAttention, m_step
from tests.nn.common import EXACT, make, normal, visible
from tests.nn.processes import in_two_processes

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def projected(module: MixtureAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    heads = (module.num_heads, module.head_dim)
    return tuple(  # type: ignore[return-value]
        proj(x).unflatten(-1, heads).transpose(1, 2).detach() for proj in (module.query_proj, module.key_proj)
    )


def log_joint(module: MixtureAttention, x: Tensor) -> Tensor:
    """log prior_r + log N(q_i; k_j + b_r, s2_r), (B,H,M,Nq,Nk), from torch's own Gaussian."""
    assert module.shift is not None
    assert module.log_variance is not None
    q, k = projected(module, x)
    mean = k[:, :, None, None] + module.shift[:, :, None, None]  # (B,H,M,1,Nk,D)
    deviation = (0.5 * module.log_variance).exp()[:, :, None, None, None].expand_as(mean)
    log_prior = module.prior.log()[:, :, None, None]
    density: Tensor = Independent(Normal(mean, deviation), 1).log_prob(q[:, :, None, :, None])  # type: ignore[no-untyped-call]
    return density + log_prior


def written_out(module: MixtureAttention, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts (H,M,D) and variances (H,M) of Eqn 13, every pair in memory."""
    q, k = projected(module, x)
    gamma = log_joint(module, x).softmax(2) * seen[:, :, None]
    mass = gamma.sum((0, 3, 4))
    apart = (q[:, :, :, None] - k[:, :, None])[:, :, None]  # (B,H,1,Nq,Nk,D)
    shift = (gamma[..., None] * apart).sum((0, 3, 4)) / mass[..., None]
    scatter = (gamma * (apart - shift[:, :, None, None]).square().sum(-1)).sum((0, 3, 4))
    return shift, scatter / mass / module.head_dim


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [2, 64])
def test_training_updates_shifts_and_variances_by_eqn_13(
    is_causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m_step, "ROWS", rows)
    module, x = make("smgk-means").train(), normal(2, 5, 12)
    seen = visible(2, 5, 5, is_causal, PADDING) & ~PADDING[:, None, :, None]
    for _ in range(2):
        shift, variance = written_out(module, x, seen)
        output, _ = module(x, key_padding_mask=PADDING, is_causal=is_causal)
        torch.testing.assert_close(module.shift, shift, **EXACT)
        torch.testing.assert_close(module.log_variance, variance.log(), **EXACT)
    output.sum().backward()  # the buffers moved after this forward read them
    assert {name for name, _ in module.named_buffers()} == {"shift", "log_variance"}


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_variances_are_right_however_far_keys_are_from_queries(offset: float) -> None:
    """Shifts make up for any offset, so training may go anywhere with it. In float32 an entry of 300 is right to 2e-5:
    that much is lost before we begin, and no more.
    """
    module, x = make("smgk-means").train(), normal(4, 30, 12)
    with torch.no_grad():
        for moved in (module.query_proj.bias, module.shift):
            assert moved is not None
            moved.add_(offset)
    shift, variance = written_out(module, x, visible(4, 30, 30, False, None))
    module.float()(x.float())
    torch.testing.assert_close(module.shift, shift.float(), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(module.log_variance, variance.log().float(), rtol=0, atol=1e-4)


def test_no_step_lowers_the_likelihood_of_the_queries() -> None:
    module, x = make("smgk-means").train(), normal(3, 40, 12)
    likelihood = []
    for _ in range(12):
        likelihood.append(float(log_joint(module, x).logsumexp(2).sum()))
        module(x)
    # Sums of 14,400 terms of the order of 10, right to 1e-16 each
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(likelihood))
    assert likelihood[-1] > likelihood[0] + 1


def test_without_queries_nothing_is_updated() -> None:
    module, x = make("smgk-means"), normal(2, 5, 12)
    before = {name: value.clone() for name, value in module.named_buffers()}
    module(x)
    module.train()(x, cache=module.new_cache(2))
    module(x, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


@pytest.mark.parametrize("place", [0, 4])
def test_nan_batch_updates_nothing(place: int) -> None:
    """In what counts, and in padding, where nothing times it is no number either."""
    module, x = make("smgk-means").train(), normal(2, 5, 12)
    before = {name: value.clone() for name, value in module.named_buffers()}
    x[1, place, 0] = torch.nan
    module(x, key_padding_mask=PADDING)
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_a_single_query_leaves_a_variance_above_zero() -> None:
    module = make("smgk-means").train()
    for _ in range(20):
        output, _ = module(normal(1, 1, 12))
    assert module.log_variance is not None
    assert float(module.log_variance.min()) >= math.log(m_step.MIN_VARIANCE) - 1e-9
    assert output.isfinite().all()


def _train_one(rank: int, folder: str) -> None:
    module = make("smgk-means").train()
    module(normal(2, 5, 12, seed=rank))
    torch.save(dict(module.named_buffers()), f"{folder}/{rank}.pt")


def test_two_processes_learn_what_one_learns_from_both_batches(tmp_path: Path) -> None:
    in_two_processes(_train_one, str(tmp_path))
    module = make("smgk-means").train()
    module(torch.cat([normal(2, 5, 12, seed=rank) for rank in range(2)]))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), dict(module.named_buffers()), **EXACT)


@pytest.mark.parametrize("kind", ["mlk-keys", "smlk-keys"])
def test_keys_mixed_before_the_map_are_those_of_a_linear_transformer(kind: str) -> None:
    """docs/math.md, 8: W' = sum_r prior_r W_r, or the bias sum_r prior_r b_r. After the map it is another model."""
    module, x = make(kind), normal(2, 6, 12)
    linear = make("linear")
    weights: dict[str, Any] = {name: value for name, value in module.state_dict().items() if "_proj" in name}
    H, M, D = module.num_heads, module.num_components, module.head_dim
    assert module.log_prior is not None
    prior = module.log_prior.exp()[..., None]  # (H,M,1)
    for name in ("key_proj.weight", "key_proj.bias"):
        rows = weights[name].view(H, M if module.shift is None else 1, D, -1)
        weights[name] = (prior[..., None] * rows).sum(1).view(H * D, -1).squeeze(-1)
    if module.shift is not None:
        weights["key_proj.bias"] = weights["key_proj.bias"] + (prior * module.shift).sum(1).flatten()
    linear.load_state_dict(weights)
    torch.testing.assert_close(module(x)[0], linear(x)[0], **EXACT)
    module.mixing = "features"
    assert (module(x)[0] - linear(x)[0]).abs().max() > 1e-3
