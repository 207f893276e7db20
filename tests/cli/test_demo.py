"""The first table of the demo: every variant agrees with its dense formula."""

from __future__ import annotations

import pytest
import torch

from mgk.cli.demo import INPUTS, VARIANTS, error_of, linear_weights


@pytest.mark.parametrize(("dtype", "scale"), INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_with_its_dense_formula(variant: str, dtype: torch.dtype, scale: float) -> None:
    # A weight's relative error is the rounding of its exponent |q - k|^2 / 2 s2, which is under 100 at scale 1.
    assert error_of(variant, dtype, scale, length=70, width=8) < 100 * scale**2 * torch.finfo(dtype).eps


def test_linear_weights_mix_after_the_feature_map_and_rows_sum_to_one() -> None:
    query, log_prior = torch.full((1, 1, 1, 1), 1.0), torch.tensor([[0.25, 0.75]]).log()
    key = torch.tensor([2.0, -3.0, 1.0, 0.5]).view(1, 1, 2, 2, 1)  # (B,H,M,N,D)
    features = torch.tensor([0.25 * 3.0 + 0.75 * 2.0, 0.25 * torch.tensor(-3.0).exp() + 0.75 * 1.5])
    torch.testing.assert_close(linear_weights(query, key, log_prior).flatten(), features / features.sum())
