"""The first table of the demo: every variant agrees with its dense formula."""

from __future__ import annotations

import pytest
import torch

from mgk.cli.demo import VARIANTS, agreement, linear_weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_with_its_dense_formula(variant: str) -> None:
    found = agreement(variant, length=70, width=8)
    # A weight's relative error is the rounding of its exponent |q - k|^2 / 2 s2, which is under 100 here (times 300^2).
    assert found.float32 < 100 * torch.finfo(torch.float32).eps
    assert found.float64 < 100 * torch.finfo(torch.float64).eps
    assert found.extreme < 100 * 300**2 * torch.finfo(torch.float64).eps


def test_linear_weights_mix_after_the_feature_map_and_rows_sum_to_one() -> None:
    query, log_prior = torch.full((1, 1, 1, 1), 1.0), torch.tensor([[0.25, 0.75]]).log()
    key = torch.tensor([2.0, -3.0, 1.0, 0.5]).view(1, 1, 2, 2, 1)  # (B,H,M,N,D)
    features = torch.tensor([0.25 * 3.0 + 0.75 * 2.0, 0.25 * torch.tensor(-3.0).exp() + 0.75 * 1.5])
    torch.testing.assert_close(linear_weights(query, key, log_prior).flatten(), features / features.sum())
