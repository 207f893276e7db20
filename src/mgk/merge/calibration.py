"""The heads of a layer, the inputs that they are merged on, and their dense scores there.

B batch, N positions, E width of the model, F = E + 1 with the bias, H heads, Hk key heads, D width of a head, R of them
with rotary positions, M components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Gains = tuple[Tensor, Tensor]  # of queries (h,d) and of keys (*hk,d)


@dataclass(frozen=True)
class Norm:
    """RMS normalisation of queries and keys before their positions: x gain / sqrt(mean(x^2) + eps)."""

    query: Float[Tensor, "h d"]
    key: Float[Tensor, "hk d"]
    eps: float
    together: bool
    """Whether the mean is over all heads of a position (OLMo 2), not over each head (Qwen3, Gemma 3, mgk)."""


@dataclass(frozen=True)
class Projections:
    """The heads of an attention layer in float64; the last of the F rows is the bias, zero where there is none."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "hk f d"]
    value: Float[Tensor, "hk f d"]
    output: Float[Tensor, "h d e"]
    scale: float
    """Scale of the scores: 1/sqrt(D)."""
    biased: tuple[bool, bool, bool]
    """Whether query, key and value have a bias."""
    norm: Norm | None = None

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return len(self.query) // len(self.key)


@dataclass(frozen=True)
class Components:
    """Queries and component keys of merged heads. `key` has one row for all heads, or one for each."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "*h m f d"]
    gains: Gains | None = None
    """Of queries (h,d) and of keys (*h,m,d), if the layer normalises them."""

    def keys(self, index: int) -> Tensor:
        return self.key[..., index, :, :]

    def gain(self, index: int) -> Gains | None:
        return None if self.gains is None else (self.gains[0], self.gains[1][..., index, :])


@dataclass(frozen=True)
class Mixture:
    """The merged heads: H' = H/2, and Hk' = Hk/2, or Hk where heads are merged within their groups."""

    query: Float[Tensor, "h f d"]
    key: Float[Tensor, "hk m f d"]
    value: Float[Tensor, "hk f d"]
    output: Float[Tensor, "h d e"]
    log_prior: Float[Tensor, "h m"]
    pairs: list[tuple[int, int]]
    """The two query heads that each merged head replaces."""
    affinity: float
    """Mean over the pairs of sum_j sqrt(A_a A_b): 1 for equal heads, 0 for heads that never attend to the same key."""
    gains: Gains | None = None
    """Of queries (h,d) and of keys (hk,m,d), if the layer normalises them."""


@dataclass(frozen=True)
class Sample:
    """The inputs of a layer."""

    x: Float[Tensor, "b n f"]
    visible: Bool[Tensor, "b n n"]
    real: Bool[Tensor, "b n"]
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine (B or 1,N,R) of rotary positions, of the first R numbers of a head."""


@dataclass(frozen=True)
class Calibration:
    """The heads of a layer, the inputs that they are merged on, and their dense attention weights there."""

    heads: Projections
    samples: list[Sample]
    weights: list[Float[Tensor, "h b n n"]]
    gaussian: bool
    """Whether the mixture's score is that of a Gaussian."""
    query_rms: list[Float[Tensor, "b n"]] = field(default_factory=list)
    """Root mean squares of all merged queries of a position, where the layer normalises them together."""

    def head_output(self, index: int, head: int) -> Float[Tensor, "t e"]:
        """Compute what a head adds to the layer's output at the real positions of a sample."""
        sample, heads = self.samples[index], self.heads
        seen = (self.weights[index][head] @ sample.x)[sample.real]
        return seen @ heads.value[head // heads.groups] @ heads.output[head]

    def energy(self, head: int) -> Tensor:
        """Compute the squared norm of a head's output over all samples."""
        return torch.stack([self.head_output(i, head).square().sum() for i in range(len(self.samples))]).sum()

    def component_scores(self, merged: Components, index: int) -> list[Float[Tensor, "h b n n"]]:
        """Compute the scores of every component of merged heads on a sample."""
        sample, norm, found = self.samples[index], self.heads.norm, []
        for r in range(merged.key.shape[-3]):
            gains: tuple[Tensor | None, Tensor | None] = merged.gain(r) or (None, None)
            rms: tuple[Tensor | None, Tensor | None] = (None, None)
            if norm is not None and norm.together:  # the merged keys are those of all heads
                rms = (self.query_rms[index], rms_of(self.heads.key, sample, norm.eps))
            q = project(merged.query, sample, gains[0], norm, rms[0])
            k = project(merged.keys(r), sample, gains[1], norm, rms[1])
            found.append(scores(q, k, sample, self.heads.scale, self.gaussian))
        return found

    def mixture_weights(self, merged: Components, prior: Float[Tensor, "h m"], index: int) -> Tensor:
        """Compute the dense attention weights (H,B,N,N) of merged heads on a sample."""
        found = torch.stack(self.component_scores(merged, index), -1)
        return (found + prior[:, None, None, None]).logsumexp(-1).softmax(-1).nan_to_num(0)


def attention(heads: Projections, sample: Sample) -> Float[Tensor, "h b n n"]:
    """Compute the dense attention weights of every head."""
    norm = heads.norm
    rms: tuple[Tensor | None, Tensor | None] = (None, None)
    if norm is not None and norm.together:
        rms = (rms_of(heads.query, sample, norm.eps), rms_of(heads.key, sample, norm.eps))
    q = project(heads.query, sample, None if norm is None else norm.query, norm, rms[0])
    k = project(heads.key, sample, None if norm is None else norm.key, norm, rms[1])
    return scores(q, k.repeat_interleave(heads.groups, 0), sample, heads.scale).softmax(-1).nan_to_num(0)


def rms_of(weight: Float[Tensor, "h f d"], sample: Sample, eps: float) -> Float[Tensor, "b n"]:
    """Compute the root mean square of the projections of a position by all heads."""
    return ((sample.x @ weight[:, None]).square().mean((0, -1)) + eps).sqrt()


def project(
    weight: Float[Tensor, "*h f d"], sample: Sample, gain: Float[Tensor, "*h d"] | None = None,
    norm: Norm | None = None, rms: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, "*h b n d"]:  # fmt: skip
    """Project the inputs to queries or keys: normalised, if there are gains, and rotated, if positions are rotary."""
    x = sample.x @ weight[..., None, :, :]
    if gain is not None and norm is not None:
        size = (x.square().mean(-1) + norm.eps).sqrt() if rms is None else rms
        x = x / size[..., None] * gain[..., None, None, :]
    if sample.rotation is None:
        return x
    cos, sin = sample.rotation
    width, half = cos.shape[-1], cos.shape[-1] // 2
    turned, rest = x[..., :width], x[..., width:]
    turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), -1) * sin
    return torch.cat((turned, rest), -1)


def scores(
    query: Float[Tensor, "h b n d"], key: Float[Tensor, "*h b n d"], sample: Sample, scale: float,
    gaussian: bool = False,
) -> Float[Tensor, "h b n n"]:  # fmt: skip
    """Compute q_i.k_j scale, with the Gaussian's -|k_j|^2 scale/2 if asked for; -inf where j is not visible."""
    found = query @ key.mT * scale
    if gaussian:
        found = found - key.square().sum(-1)[..., None, :] * (scale / 2)
    return found.masked_fill(~sample.visible, -math.inf)
