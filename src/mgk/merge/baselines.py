"""What head merging is compared with: every second head dropped, or key and value heads pooled.

H query heads, Hk key heads, F width of the model with the bias, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.merge.calibration import Gains, Mixture, Projections


def drop(heads: Projections) -> Mixture:
    """Keep every second key head, with the query heads that use it; with an odd number, every second query head."""
    keys, queries = torch.arange(len(heads.key)), torch.arange(len(heads.query))
    if len(heads.key) % 2:
        queries = queries[::2]
    else:
        keys = keys[::2]
        queries = queries.unflatten(0, (-1, heads.groups))[::2].flatten()
    gains = None if heads.norm is None else (heads.norm.query[queries], heads.norm.key[keys][:, None])
    return _plain(heads.query[queries], heads.key[keys], heads.value[keys], heads.output[queries], gains)


def pool(heads: Projections) -> Mixture:
    """Keep all query heads; the means of every two neighbouring key and value heads serve the queries of both.

    This is the conversion to grouped-query attention of Ainslie et al. (2023).
    """
    gains = None if heads.norm is None else (heads.norm.query, _pooled(heads.norm.key)[:, None])
    return _plain(heads.query, _pooled(heads.key), _pooled(heads.value), heads.output, gains)


def _pooled(x: Tensor) -> Tensor:
    return (x[::2] + x[1::2]) / 2


def _plain(query: Tensor, key: Tensor, value: Tensor, output: Tensor, gains: Gains | None) -> Mixture:
    """Return softmax heads as mixtures of one component."""
    prior = query.new_zeros(len(query), 1)
    return Mixture(query, key[:, None], value, output, prior, pairs=[], affinity=0.0, gains=gains)
