"""Step 1 of head merging where queries and keys are normalised (Qwen3, Gemma 3, OLMo 2, mgk).

Scores are then not bilinear in the inputs, so no truncated SVD is nearest to them. The components are the keys of the
two heads, and the query is the mean of their queries. A rotation within the planes of rotary positions changes neither
the scores of a head nor the norms, so the second head is first turned to the first one. (The gains of the normalisation
are then those of the turned planes: an approximation where the two gains of a plane differ.)

E width of the model, F = E + 1 with the bias, G pairs of query heads, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.merge.calibration import Calibration, Components, Norm

if TYPE_CHECKING:
    from jaxtyping import Float


def normalised(
    given: Calibration, norm: Norm, query: Float[Tensor, "g 2 f d"], key: Float[Tensor, "2 f d"],
    pairs: list[tuple[int, int]], groups: tuple[int, int], key_scale: float,
) -> Components:  # fmt: skip
    """Return the mean queries (G,F,D) and the keys (2,F,D) of two key heads, with their gains.

    Gains of keys are multiplied by `key_scale`, and those of queries divided by it.
    """
    rows = torch.cat([sample.x[sample.real] for sample in given.samples])
    gains = norm.query[torch.tensor(pairs)]  # (G,2,D)
    sizes = (rows @ query).square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-12)  # (G,2,1,1)
    rotation = given.samples[0].rotation
    if rotation is not None and rotation[0].shape[-1] == query.shape[-1]:
        seen = rows @ query / sizes * gains[..., None, :]
        turn = _turn(seen[:, 0], seen[:, 1])
        query = torch.stack((query[:, 0], _turned(query[:, 1], turn)), 1)
        key = torch.stack((key[0], _turned(key[1], turn)))
    if norm.together:  # the sizes of the heads count
        mean, gain = query.mean(1), gains.mean(1)
    else:  # each head counts the same
        mean, gain = (query / sizes).sum(1) / (1 / sizes).sum(1), gains[:, 0]
    return Components(mean, key, (gain / key_scale, norm.key[list(groups)] * key_scale))


def _turn(first: Float[Tensor, "g t d"], second: Float[Tensor, "g t d"]) -> Tensor:
    """Find the rotation of every plane, a complex number (D/2), that brings the second queries nearest to the first."""
    along = (_planes(first) * _planes(second).conj()).sum((0, 1))
    size = along.abs()
    return torch.where(size > 0, along / size.clamp(min=1e-300), 1)


def _planes(x: Float[Tensor, "*h t d"]) -> Tensor:
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half], x[..., half:])


def _turned(weight: Float[Tensor, "*h f d"], turn: Tensor) -> Float[Tensor, "*h f d"]:
    planes = _planes(weight) * turn
    return torch.cat((planes.real, planes.imag), -1)
