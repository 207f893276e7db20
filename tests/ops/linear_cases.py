"""Inputs for the tests of linear attention, Eqn 14 as the paper writes it, and comparisons.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.ops.feature_maps import FeatureMap, PositiveOrthogonalFeatures, check_feature_map
from mgk.ops.linear import linear_step

IMPLS = ("reference", "blockwise")
FAVOR = PositiveOrthogonalFeatures(4, 12, generator=torch.Generator().manual_seed(7))
MAPS: list[str | FeatureMap] = ["elu", "dpfp", FAVOR, lambda x: x.square() + 0.1]
EXACT = 1e-10  # float64 sums of at most some hundred terms, none of which cancels

Inputs = dict[str, Any]  # tensors, by the names of the arguments
everywhere = pytest.mark.parametrize("impl", IMPLS)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(
    B: int = 2, H: int = 2, M: int = 2, Nq: int = 5, Nk: int = 7, D: int = 4, Dv: int = 3,
    prior: str | None = "position", scale: float = 1.0, seed: int = 0,
) -> Inputs:  # fmt: skip
    made = {
        "query": numbers(B, H, Nq, D, seed=seed, scale=scale),
        "key": numbers(B, H, M, Nk, D, seed=seed + 1, scale=scale),
        "value": numbers(B, H, Nk, Dv, seed=seed + 2),
    }
    if prior:
        made["log_prior"] = numbers(*((H, M) if prior == "head" else (H, M, Nk)), seed=seed + 3)
    return {name: x.requires_grad_() for name, x in made.items()}


def dense(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None = None, *, feature_map: Any = "elu",
    is_causal: bool = False, key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Eqn 14 as the paper writes it: no scaling, every pair of positions, in the dtype of its arguments."""
    features = check_feature_map(feature_map)
    phi_q, phi_k = ((x if isinstance(x, Tensor) else x.dense()) for x in (features(query), features(key)))
    prior = torch.full(key.shape[1:3], 1 / key.shape[2]).to(query) if log_prior is None else log_prior.exp().to(query)
    prior = prior.view(*prior.shape[:2], -1).expand(*prior.shape[:2], key.shape[3])
    weights = torch.einsum("hmk,bhqf,bhmkf->bhqk", prior, phi_q, phi_k)
    visible = torch.ones(query.shape[2], key.shape[3], dtype=torch.bool)
    if is_causal:
        visible = visible.tril(key.shape[3] - query.shape[2])
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    weights = weights * visible
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1, total)) @ value * (total != 0)


def gradients(output: Tensor, arguments: Inputs, seed: int = 9) -> list[Tensor]:
    """Return the gradients of a fixed random functional of the output, for every argument."""
    total = (output * numbers(*output.shape, seed=seed)).sum()
    return list(torch.autograd.grad(total, list(arguments.values()), materialize_grads=True))


def agree(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = EXACT) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def feed(
    pieces: Sequence[int], query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, **options: Any
) -> Tensor:
    """Feed a sequence to `linear_step` in pieces of the given sizes."""
    state, outputs, start = None, [], 0
    for size in pieces:
        at = slice(start, start + size)
        per_position = log_prior is not None and log_prior.dim() == 3
        prior = log_prior[:, :, at] if per_position and log_prior is not None else log_prior
        output, state = linear_step(state, query[:, :, at], key[..., at, :], value[:, :, at], prior, **options)
        outputs.append(output)
        start += size
    return torch.cat(outputs, 2)
