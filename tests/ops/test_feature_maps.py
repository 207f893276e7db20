"""Feature maps: their formulas, and what FAVOR+ promises about its random features."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mgk.ops.feature_maps import (
    FEATURE_MAPS,
    PositiveOrthogonalFeatures,
    ScaledFeatures,
    apply_feature_map,
    check_feature_map,
    dpfp,
    elu,
    favor,
    feature_width,
    orthogonal_projection,
)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_elu_is_elu_plus_one_with_its_slope() -> None:
    x = torch.cat((numbers(50), torch.tensor([-1e3, -30.0, 0.0, 1e3]))).double().requires_grad_()
    expected = torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(elu(x).dense(), expected, rtol=1e-12, atol=1e-15)
    (slope,) = torch.autograd.grad(elu(x).dense().sum(), x)
    (expected_slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-12, atol=1e-15)


def test_elu_keeps_what_underflows() -> None:
    features = elu(torch.tensor([-1e6]))
    assert features.mantissa.item() == 1
    assert features.exponent.item() == -1e6


@pytest.mark.parametrize("nu", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_dpfp_is_the_products_of_rectified_entries(nu: int, width: int) -> None:
    x = numbers(4, width)
    expected = torch.zeros(4, 2 * nu * width, dtype=torch.float64)
    for row in range(4):
        rectified = [max(e, 0.0) for e in x[row].tolist()] + [max(-e, 0.0) for e in x[row].tolist()]
        for n in range(1, nu + 1):
            for i in range(2 * width):
                expected[row, (n - 1) * 2 * width + i] = rectified[i] * rectified[(i - n) % (2 * width)]
    torch.testing.assert_close(dpfp(x, nu).dense(), expected, rtol=1e-12, atol=0)


def test_dpfp_of_extremes_is_finite() -> None:
    for scale in (0.0, 1e-30, 1e30):
        x = (numbers(3, 4, scale=scale)).float().requires_grad_()
        features = dpfp(x)
        (slope,) = torch.autograd.grad(features.mantissa.sum(), x)
        assert features.mantissa.isfinite().all()
        assert features.exponent.isfinite().all()
        assert slope.isfinite().all()
        assert bool((features.mantissa > 0).any()) == (scale > 0)


def test_favor_is_its_formula() -> None:
    x, projection = numbers(3, 4), numbers(7, 4, seed=1)
    expected = torch.stack(
        [(torch.dot(w, row) - row.dot(row) / 2).exp() / math.sqrt(7) for row in x for w in projection]
    ).view(3, 7)
    torch.testing.assert_close(favor(x, projection).dense(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_favor_is_unbiased_for_the_exponential_of_the_product(scale: float) -> None:
    """The mean of n terms exp(w.(q+k) - (|q|^2+|k|^2)/2), each of variance exp(2|q+k|^2-|q|^2-|k|^2) - exp(2q.k).

    Orthogonal rows lower the variance of positive features, so that 5 sigma of independent ones is a bound.
    """
    width, count = 8, 160_000
    q, k = numbers(width, seed=1, scale=0.3), numbers(width, seed=2, scale=0.3)
    features = PositiveOrthogonalFeatures(width, count, scale=scale, generator=torch.Generator().manual_seed(3))
    estimate = features(q[None]).dense() @ features(k[None]).dense().mT
    a, b = q * math.sqrt(scale), k * math.sqrt(scale)
    exact = a.dot(b).exp().item()
    variance = (2 * (a + b).square().sum() - a.square().sum() - b.square().sum()).exp().item() - exact**2
    assert abs(estimate.item() - exact) < 5 * math.sqrt(variance / count)
    assert 5 * math.sqrt(variance / count) < 0.05 * abs(exact)  # the bound says something


def test_projection_is_orthogonal_in_blocks_and_normal_in_length() -> None:
    width, blocks = 8, 500
    projection = orthogonal_projection(width * blocks, width, generator=torch.Generator().manual_seed(0)).double()
    gram = projection.view(blocks, width, width) @ projection.view(blocks, width, width).mT
    off_diagonal = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    # Rows of length up to 6 rounded to float32: the product of two is off by at most a few of 36 * 6e-8.
    assert off_diagonal.abs().max() < 1e-5
    squares = projection.square().sum(-1)  # chi^2 with D degrees of freedom: mean D, variance 2 D
    assert abs(squares.mean().item() - width) < 5 * math.sqrt(2 * width / (width * blocks))
    # and the sample variance of n of them, relative to it, (2 + 12 / D) / n
    assert abs(squares.var().item() / (2 * width) - 1) < 5 * math.sqrt((2 + 12 / width) / (width * blocks))
    # No direction is preferred: each coordinate is standard normal, so its mean is within 5 sigma of 0.
    assert projection.mean(0).abs().max() < 5 / math.sqrt(width * blocks)


@pytest.mark.parametrize("count", [1, 5, 8, 19])
def test_projection_need_not_fill_its_last_block(count: int) -> None:
    assert orthogonal_projection(count, 8).shape == (count, 8)


def test_redraw_changes_the_buffer_in_place_and_repeats_under_a_seed() -> None:
    features = PositiveOrthogonalFeatures(4, generator=torch.Generator().manual_seed(0))
    buffer, before = features.projection, features.projection.clone()
    features.redraw(torch.Generator().manual_seed(1))
    assert features.projection is buffer
    assert not torch.equal(buffer, before)
    features.redraw(torch.Generator().manual_seed(0))
    assert torch.equal(buffer, before)
    assert list(features.state_dict()) == ["projection"]
    assert "num_features=16" in repr(features)


def test_width_of_the_features_is_the_one_foretold() -> None:
    x = numbers(2, 6)
    for name, feature_map in FEATURE_MAPS.items():
        assert apply_feature_map(feature_map, x).mantissa.shape == (2, feature_width(name, 6))
    features = PositiveOrthogonalFeatures(6)
    assert features(x).mantissa.shape == (2, feature_width("favor", 6)) == (2, feature_width(features, 6))
    with pytest.raises(ValueError, match=r"feature_map: expected one of elu, dpfp, favor or a callable.*'relu'"):
        feature_width("relu", 6)
    with pytest.raises(ValueError, match=r"feature_map: .*num_features"):
        feature_width(torch.relu, 6)


def test_a_plain_tensor_is_a_feature_map_too() -> None:
    x = numbers(2, 6)
    features = apply_feature_map(check_feature_map(torch.relu), x)
    assert torch.equal(features.dense(), x.relu())


def test_bad_feature_maps_are_named() -> None:
    x = numbers(2, 6)
    with pytest.raises(ValueError, match=r"feature_map: expected one of elu, dpfp.*got 'favor'"):
        check_feature_map("favor")
    with pytest.raises(TypeError, match="feature_map: expected a name or a callable, got int 3"):
        check_feature_map(3)
    with pytest.raises(TypeError, match=r"feature_map: expected it to return .*got list"):
        apply_feature_map(lambda x: [x], x)  # type: ignore[arg-type, return-value]
    for wrong in (lambda x: x[0], lambda x: x[..., :0], lambda x: ScaledFeatures(x, x[..., :1])):
        with pytest.raises(ValueError, match=r"feature_map: expected features \(2, 'F'\)"):
            apply_feature_map(wrong, x)


def test_bad_sizes_are_named() -> None:
    for arguments, error, match in (
        ((0,), ValueError, "head_dim: expected at least 1, got 0"),
        ((4.0,), TypeError, "head_dim: expected an integer, got float 4.0"),
        ((4, -1), ValueError, "num_features: expected at least 1, got -1"),
        ((4, True), TypeError, "num_features: expected an integer, got bool True"),
    ):
        with pytest.raises(error, match=match):
            PositiveOrthogonalFeatures(*arguments)  # type: ignore[arg-type]
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale: expected a finite number above 0"):
            PositiveOrthogonalFeatures(4, scale=scale)
