"""Feature maps of the linear family: phi(q).phi(k) replaces exp(q.k).

A feature map is any callable from (..., D) to (..., F) that treats all leading dimensions alike. It may return

- a plain tensor, the features themselves; or
- `ScaledFeatures`, phi = mantissa * exp(exponent). exp(-1000) underflows, but an exponent of -1000 is exact. Attention
  subtracts constants that cancel in its quotient from the exponents before it exponentiates them.

A map that owns tensors (FAVOR+ and its projection) is a module with the attribute `num_features`, its F.

B batch, H heads, N positions, D width of a head, F width of the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mgk.ops.arguments import check_count, describe

if TYPE_CHECKING:
    from jaxtyping import Float

DPFP_NU = 3
FAVOR_FEATURES_PER_WIDTH = 4  # a multiple of D gives full orthogonal blocks; F = 256 at D = 64


class ScaledFeatures(NamedTuple):
    """phi = mantissa * exp(exponent), two tensors (..., F). Gradients flow through both, except at -inf."""

    mantissa: Tensor
    exponent: Tensor

    def dense(self) -> Tensor:
        """The features as one tensor, which may under- or overflow."""
        return self.mantissa * self.exponent.exp()

    def times_exp(self, change: Tensor) -> Tensor:
        """The features times exp(change), as one tensor."""
        return self.mantissa * (self.exponent + change).exp()

    def at(self, positions: slice) -> ScaledFeatures:
        """The features (B,H,N,F) of some positions."""
        return ScaledFeatures(self.mantissa[:, :, positions], self.exponent[:, :, positions])


FeatureMap = Callable[[Tensor], "Tensor | ScaledFeatures"]


def elu(x: Float[Tensor, "... d"]) -> ScaledFeatures:
    """elu(x) + 1 = (1 + max(x, 0)) exp(min(x, 0)), so F = D. Positive, and never zero in this form."""
    return ScaledFeatures(1 + x.relu(), x.clamp(max=0))


def dpfp(x: Float[Tensor, "... d"], nu: int = DPFP_NU) -> ScaledFeatures:
    """Deterministic parameter-free projection (Schlag et al. 2021): F = 2 nu D products of r = relu([x, -x]).

        phi[(n-1) 2D + i] = r[i] r[i-n],  n = 1..nu, indices modulo 2D

    Most features are zero. A query that has no nonzero feature in common with its keys attends to none of them.
    """
    # phi(a x) = a^2 phi(x): if the largest entry is 1, no product under- or overflows.
    largest = x.detach().abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1)
    unit = x / largest
    rectified = torch.cat((unit.relu(), (-unit).relu()), -1)
    mantissa = torch.cat([rectified * rectified.roll(n, -1) for n in range(1, nu + 1)], -1)
    return ScaledFeatures(mantissa, (2 * largest.log()).expand_as(mantissa))


def remove_zeros(features: ScaledFeatures) -> ScaledFeatures:
    """Set the exponents of zero mantissas to -inf, so that zeros do not hide small features. For `dpfp` only."""
    return ScaledFeatures(features.mantissa, torch.where(features.mantissa == 0, -torch.inf, features.exponent))


def favor(x: Float[Tensor, "... d"], projection: Float[Tensor, "f d"]) -> ScaledFeatures:
    """Positive random features (FAVOR+, Choromanski et al. 2021): phi(x)_f = exp(w_f.x - |x|^2 / 2) / sqrt(F).

    If the rows w_f are standard normal, E[phi(q).phi(k)] = exp(q.k).
    """
    exponent = x @ projection.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2 - math.log(len(projection)) / 2
    return ScaledFeatures(torch.ones_like(exponent), exponent)


def orthogonal_projection(
    num_features: int, head_dim: int, *, generator: torch.Generator | None = None, device: torch.device | None = None
) -> Float[Tensor, "f d"]:
    """Standard normal rows; the D rows of each block are orthogonal."""
    blocks = -(-num_features // head_dim)
    normal = torch.randn(blocks, head_dim, head_dim, generator=generator, device=device, dtype=torch.float64)
    # Q of a QR decomposition with a positive diagonal of R is uniform over the orthogonal matrices.
    directions, upper = torch.linalg.qr(normal)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(blocks, head_dim, head_dim, generator=generator, device=device, dtype=torch.float64).norm(
        dim=-1
    )
    projection: Tensor = (directions.mT * lengths[..., None]).flatten(0, 1)[:num_features].float()
    return projection


class PositiveOrthogonalFeatures(nn.Module):
    """FAVOR+ with block-orthogonal projections: phi(q).phi(k) estimates exp(scale q.k) without bias.

    Args:
        head_dim: D.
        num_features: F; None is 4 D.
        scale: None is 1/sqrt(D), as in softmax attention.
        generator: of the first projection; None is the default generator of torch.

    The projection (F,D) is a buffer: it is saved with the model.
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        scale: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim)
        self.num_features = check_count(
            "num_features", FAVOR_FEATURES_PER_WIDTH * head_dim if num_features is None else num_features
        )
        self.scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale: expected a finite number above 0, got {scale}")
        self.register_buffer("projection", torch.empty(self.num_features, head_dim))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw a new projection in place. Recurrent states of the old projection become invalid."""
        device = self.projection.device if generator is None else generator.device
        drawn = orthogonal_projection(self.num_features, self.head_dim, generator=generator, device=device)
        self.projection.copy_(drawn)

    def forward(self, x: Float[Tensor, "... d"]) -> ScaledFeatures:
        return favor(x * math.sqrt(self.scale), self.projection)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_features={self.num_features}, scale={self.scale:g}"


FEATURE_MAPS: dict[str, FeatureMap] = {"elu": elu, "dpfp": dpfp}


def check_feature_map(feature_map: object) -> FeatureMap:
    """Return the map with this name, or the callable itself."""
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map: expected one of {', '.join(FEATURE_MAPS)} or a callable "
                f"(FAVOR+ is PositiveOrthogonalFeatures(head_dim)), got {feature_map!r}"
            )
        return FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        raise TypeError(f"feature_map: expected a name or a callable, got {describe(feature_map)}")
    return feature_map


def apply_feature_map(feature_map: FeatureMap, x: Float[Tensor, "... d"]) -> ScaledFeatures:
    """phi(x) as `ScaledFeatures`. Checks the shape, since the map may be the caller's."""
    features = feature_map(x)
    if isinstance(features, Tensor):
        features = ScaledFeatures(features, torch.zeros_like(features))
    if not isinstance(features, ScaledFeatures):
        raise TypeError(f"feature_map: expected it to return a tensor or ScaledFeatures, got {describe(features)}")
    for part in features:
        if part.shape[:-1] != x.shape[:-1] or part.shape != features.mantissa.shape or not part.shape[-1]:
            raise ValueError(
                f"feature_map: expected features {(*x.shape[:-1], 'F')} of {tuple(x.shape)}, got {tuple(part.shape)}"
            )
    return ScaledFeatures(*(part.to(x.dtype) for part in features))


def feature_width(feature_map: str | FeatureMap, head_dim: int) -> int:
    """F of a map: "elu", "dpfp" or "favor" with default sizes, or a callable with the attribute `num_features`."""
    widths = {"elu": head_dim, "dpfp": 2 * DPFP_NU * head_dim, "favor": FAVOR_FEATURES_PER_WIDTH * head_dim}
    if isinstance(feature_map, str) and feature_map in widths:
        return widths[feature_map]
    width = getattr(feature_map, "num_features", None)
    if not isinstance(width, int):
        raise ValueError(
            f"feature_map: expected one of {', '.join(widths)} or a callable with num_features, got {feature_map!r}"
        )
    return width
