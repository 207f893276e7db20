"""Priors by EM: the buffer moves by the M-step over the real queries of all processes; learned priors stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgk.nn import MixtureAttention
from tests.nn.common import EXACT, make, normal, visible
from tests.nn.processes import in_two_processes

each_em = pytest.mark.parametrize("kind", ["mgk-em", "smgk-positions"])


def m_step(module: MixtureAttention, x: Tensor, seen: Tensor) -> Tensor:
    """Eqn 11 and the M-step written out: (H,M), or (H,M,N) where a prior is kept per position."""
    assert module.log_prior is not None
    H, M, D = module.num_heads, module.num_components, module.head_dim
    q = module.query_proj(x).unflatten(-1, (H, D)).transpose(1, 2)
    k = module.key_proj(x)
    k = (
        k.unflatten(-1, (H, M, D)).permute(0, 2, 3, 1, 4)
        if module.shift is None
        else k.unflatten(-1, (H, D)).transpose(1, 2)[:, :, None]
    )
    k = k if module.shift is None else k + module.shift[:, :, None]
    prior = module.log_prior.reshape(H, M, -1)[..., : x.shape[1]]
    logits = prior[:, :, None] - (q[:, :, None, :, None] - k[:, :, :, None]).square().sum(-1) / (2 * D**0.5)
    gamma = logits.softmax(2) * seen[:, :, None]  # (B,H,M,Nq,Nk)
    if module.log_prior.dim() == 2:
        return torch.div(gamma.sum((0, 3, 4)), seen.sum())
    count = seen.sum((0, 1, 2))
    new = module.log_prior.exp().clone()
    new[..., : x.shape[1]] = torch.where(count > 0, gamma.sum((0, 3)) / count.clamp(min=1), new[..., : x.shape[1]])
    return new


@each_em
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_training_updates_the_prior_by_an_m_step(kind: str, is_causal: bool, momentum: float) -> None:
    module, x = make(kind, prior_momentum=momentum).train(), normal(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    seen = visible(2, 5, 5, is_causal, padding) & ~padding[:, None, :, None]  # padded queries do not count
    assert module.log_prior is not None
    for _ in range(2):
        expected = momentum * module.log_prior.exp() + (1 - momentum) * m_step(module, x, seen)
        output, _ = module(x, key_padding_mask=padding, is_causal=is_causal)
        torch.testing.assert_close(module.log_prior.exp(), expected, **EXACT)
    output.sum().backward()  # the buffer moved after this forward read it


@each_em
def test_priors_stay_distributions(kind: str) -> None:
    module = MixtureAttention(12, 3, dtype=torch.float64, prior="em", prior_positions=16 if "pos" in kind else None)
    for step in range(3):
        module(normal(2, 5, 12, seed=step))
    assert module.log_prior is not None
    torch.testing.assert_close(module.log_prior.exp().sum(1), torch.ones_like(module.log_prior[:, 0]), **EXACT)
    torch.testing.assert_close(module.prior, module.log_prior.exp(), **EXACT)
    assert (module.prior - 0.5).abs().max() > 1e-3


@each_em
def test_padded_queries_are_not_read(kind: str) -> None:
    """Other contents in the padded places leave the prior where it is."""
    priors = []
    for scale in (1.0, 100.0):
        module, x = make(kind).train(), normal(2, 5, 12)
        x[1, 3:] *= scale
        module(x, key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))
        priors.append(module.log_prior)
    torch.testing.assert_close(priors[0], priors[1], **EXACT)


def test_every_query_of_cross_attention_is_real() -> None:
    """The mask is that of the keys, whose positions are not the queries'."""
    module, query, key = make("mgk-em").train(), normal(1, 4, 12), normal(1, 4, 12, seed=1)
    hidden = torch.tensor([[False, False, False, True]])
    module(query, key, key_padding_mask=hidden)
    alone = make("mgk-em").train()
    alone(query, key[:, :3])
    torch.testing.assert_close(module.log_prior, alone.log_prior, **EXACT)


@each_em
def test_padded_queries_alone_do_not_count(kind: str) -> None:
    """All keys take part; the mask of queries decides which of them the M-step adds up."""
    module, x = make(kind).train(), normal(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    expected = m_step(module, x, visible(2, 5, 5, False).clone() & ~padding[:, None, :, None])
    module(x, query_padding_mask=padding)
    assert module.log_prior is not None
    torch.testing.assert_close(module.log_prior.exp(), expected, **EXACT)


@each_em
def test_evaluation_and_decoding_leave_the_prior(kind: str) -> None:
    module, x = make(kind), normal(2, 5, 12)
    assert module.log_prior is not None
    before = module.log_prior.clone()
    module(x)
    module.train()(x, cache=module.new_cache(2))
    assert torch.equal(module.log_prior, before)
    module(x, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))  # no real query: nothing to learn from
    assert torch.equal(module.log_prior, before)


@each_em
def test_nan_batch_does_not_change_the_prior(kind: str) -> None:
    module, x = make(kind).train(), normal(2, 5, 12)
    assert module.log_prior is not None
    before = module.log_prior.clone()
    x[0, 0, 0] = torch.nan
    module(x)
    assert torch.equal(module.log_prior, before)


def test_a_learned_prior_changes_by_its_gradient_only() -> None:
    module = make("smgk").train()
    assert isinstance(module.log_prior, torch.nn.Parameter)
    before = module.log_prior.detach().clone()
    module(normal(2, 5, 12))
    assert torch.equal(module.log_prior, before)


def test_prior_property_is_normalised() -> None:
    module = make("smgk", num_components=3)
    assert module.log_prior is not None
    torch.testing.assert_close(
        module.prior, module.log_prior.detach().exp() / module.log_prior.detach().exp().sum(1, True)
    )
    assert make("smgk-variance").prior.tolist() == [[1 / 3] * 3] * 3


LENGTHS = (3, 5)  # of the sequences of two processes


def _train_one(rank: int, folder: str) -> None:
    for kind in ("mgk-em", "smgk-positions"):
        module = make(kind).train()
        for step in range(2):
            module(normal(2, LENGTHS[rank], 12, seed=10 * step + rank))
        torch.save(module.log_prior, f"{folder}/{kind}-{rank}.pt")


def test_two_processes_learn_what_one_learns_from_both_batches(tmp_path: Path) -> None:
    in_two_processes(_train_one, str(tmp_path))
    for kind in ("mgk-em", "smgk-positions"):
        module = make(kind).train()
        for step in range(2):
            x, padding = torch.zeros(4, 5, 12, dtype=torch.float64), torch.ones(4, 5, dtype=torch.bool)
            for rank, length in enumerate(LENGTHS):
                x[2 * rank : 2 * rank + 2, :length] = normal(2, length, 12, seed=10 * step + rank)
                padding[2 * rank : 2 * rank + 2, :length] = False
            module(x, key_padding_mask=padding)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{kind}-{rank}.pt"), module.log_prior, **EXACT)
