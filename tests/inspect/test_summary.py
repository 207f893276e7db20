"""Statistics have known values for known heads, and do not depend on the size of the blocks of rows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import mgk.inspect.summary as module
from mgk.inspect import Dense, collect, cost_curves, effective_number, separation, summarise
from mgk.models import TransformerConfig
from mgk.nn import MixtureAttention


def stochastic(*shape: int) -> Tensor:
    return torch.rand(*shape).softmax(-1)


def test_equal_heads() -> None:
    head = Dense.of(stochastic(20, 20))
    summary = summarise([head, head, head])
    assert summary.effective_heads == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(summary.overlap, torch.ones(3, 3))
    torch.testing.assert_close(summary.cosine, torch.ones(3, 3))


def test_disjoint_heads() -> None:
    shifts = [torch.eye(12).roll(shift, 1) for shift in range(4)]
    summary = summarise([Dense.of(shift) for shift in shifts])
    assert summary.effective_heads == pytest.approx(4, abs=1e-4)
    torch.testing.assert_close(summary.overlap, torch.eye(4))


def test_effective_number_between() -> None:
    """Two equal pairs count as two."""
    pairs = torch.eye(2).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert effective_number(pairs) == pytest.approx(2)


def test_entropy_of_known_rows() -> None:
    causal = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    summary = summarise([Dense.of(causal)])
    torch.testing.assert_close(summary.entropy[0], torch.arange(1.0, 9).log())
    torch.testing.assert_close(summary.peak[0], 1 / torch.arange(1.0, 9))


def test_use_of_components() -> None:
    """Three components: 3/4 on the diagonal, 1/4 beside it, and nothing."""
    eye = torch.eye(8)
    head = Dense.of(torch.stack([0.75 * eye, 0.25 * eye.roll(1, 1), 0 * eye]))
    summary = summarise([head])
    torch.testing.assert_close(summary.share[0], torch.tensor([0.75, 0.25, 0]))
    torch.testing.assert_close(summary.wins[0], torch.tensor([0.5, 0.5, 0]))  # of the 16 visible pairs
    torch.testing.assert_close(summary.removal[0], torch.tensor([0.75, 0.25, 0]))  # its whole share moves
    assert summary.component_overlap[0, 0, 1] == 0
    assert float(summary.effective_components[0]) == pytest.approx(
        math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    )


def test_a_copy_of_a_component_is_not_needed() -> None:
    weights = stochastic(10, 10)
    summary = summarise([Dense.of(torch.stack([weights / 2, weights / 2]))])
    torch.testing.assert_close(summary.removal, torch.zeros(1, 2), atol=1e-6, rtol=0)
    torch.testing.assert_close(summary.component_overlap[0], torch.ones(2, 2))


def test_the_only_component_is_needed_entirely() -> None:
    torch.testing.assert_close(summarise([Dense.of(stochastic(6, 6))]).removal, torch.ones(1, 1))


@pytest.mark.parametrize("size", [16, 21])
def test_pooled_maps_are_means(size: int) -> None:
    """Blocks of 4: the mean over queries of the sum over keys, the last block smaller."""
    weights = stochastic(2, size, size) / 2
    summary = summarise([Dense.of(weights)], bins=math.ceil(size / 4))
    assert summary.bin_size == 4
    pooled = summary.pooled[0]
    torch.testing.assert_close(pooled[1, 1, 2], weights[1, 4:8, 8:12].sum(-1).mean())
    torch.testing.assert_close(
        pooled[0, -1, -1], weights[0, size - (size % 4 or 4) :, size - (size % 4 or 4) :].sum(-1).mean()
    )
    torch.testing.assert_close(pooled.sum((0, 2)), torch.ones(len(pooled[0])))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = collect(MixtureAttention(24, 3).double(), torch.randn(1, 50, 24, dtype=torch.float64), is_causal=True)[0]
    whole = summarise(layer.heads(), bins=10, sampled=13)
    monkeypatch.setattr(module, "BLOCK_NUMBERS", 7 * 3 * 2 * 50)  # 7 rows fit: blocks of 5, one bin
    parts = summarise(layer.heads(), bins=10, sampled=13)
    for field in dataclasses.fields(whole):
        torch.testing.assert_close(getattr(parts, field.name), getattr(whole, field.name), atol=1e-6, rtol=1e-6)


def test_heads_must_fit_together() -> None:
    with pytest.raises(ValueError, match="heads: expected at least one"):
        summarise([])
    with pytest.raises(
        ValueError, match=r"heads: expected all with the same queries and keys, got \[\(2, 2\), \(3, 3\)"
    ):
        summarise([Dense.of(torch.eye(2)), Dense.of(torch.eye(3))])


def test_separation_counts_standard_deviations() -> None:
    """Two keys 3 apart with s2 = 4 are 1.5 standard deviations apart."""
    keys = torch.zeros(2, 5, 16)
    keys[1, :, 0] = 3
    torch.testing.assert_close(separation(keys), torch.tensor([[0, 1.5], [1.5, 0]]))
    torch.testing.assert_close(separation(keys, variance=9.0)[0, 1], torch.tensor(1.0))
    torch.testing.assert_close(separation(keys, variance=torch.tensor([1.0, 17.0]))[0, 1], torch.tensor(1.0))


def test_cost_curves_halve_the_heads_of_mixtures() -> None:
    softmax, mgk, smgk = cost_curves(heads=(2, 4, 8))
    assert softmax.heads == (2, 4, 8)
    assert mgk.heads == smgk.heads == (1, 2, 4)
    assert all(a > b > c for a, b, c in zip(softmax.flops, mgk.flops, smgk.flops, strict=True))
    assert softmax.parameters[-1] > mgk.parameters[-1] > smgk.parameters[-1]
    assert cost_curves(("mgk",), heads=(4,), halve=False)[0].heads == (4,)
    gated, plain = (
        cost_curves(model=TransformerConfig(attention="smgk", e_step="hard", activation=activation), heads=(2,))
        for activation in ("swiglu", "gelu")
    )  # a third matrix in two layers of width 64, with a bias
    assert {a.flops[0] - b.flops[0] for a, b in zip(gated, plain, strict=True)} == {2 * 2 * 4000 * 64 * 128}
    assert {a.parameters[0] - b.parameters[0] for a, b in zip(gated, plain, strict=True)} == {2 * (64 * 128 + 128)}
