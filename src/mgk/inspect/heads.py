"""Attention weights and responsibilities of one head on one input, computed in blocks of rows.

Every variant uses the same formula for a query i and component r of a key j:

    l[i,j,r] = link(scale_r q_i.k_jr) + row[i,r] + column[r,j]
    A[i,j] = sum_r exp l[i,j,r] / sum_j' sum_r exp l[i,j',r]

- softmax: one component, scale = 1/sqrt(D), row = column = 0.
- MGK: scale = 1/s2, column = log prior - |k_jr|^2 / 2 s2, row = -|q_i|^2 / 2 s2_r if the variances differ. If they are
  equal, that term cancels and row = 0.
- sMGK: as MGK, with the same k_j for every component; the shift adds q_i.b_r / s2 to row.
- linear, MLK and sMLK: q and k are the features, and link is the logarithm.

The explorer page stores q, k, row and column and evaluates the same formula in JavaScript (`assets/heads.js`).

M components, Nq queries, Nk keys, F width of q and k (D, or the number of features), R sets of keys (M, or 1 if all
components share one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mgk.ops.arguments import check_tensor, describe

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Rows:
    """Attention of a block of queries, by component."""

    components: Float[Tensor, "m n nk"]
    """Contribution of each component to A; they sum to A."""
    logits: Float[Tensor, "m n nk"]
    """l[i,j,r] up to a constant per row; -inf where the key is not visible."""
    log_total: Float[Tensor, " n"]
    """logsumexp of the logits of each row, the log of the normaliser of A; -inf if no key is visible."""

    @property
    def weights(self) -> Float[Tensor, "n nk"]:
        return self.components.sum(0) if len(self.components) > 1 else self.components[0]

    @property
    def responsibilities(self) -> Float[Tensor, "m n nk"]:
        """gamma[i,j,r] of Eqn 11; zero where the key is not visible."""
        return self.logits.softmax(0).nan_to_num(0)


class Head(Protocol):
    """Interface of a head; `Factors` and `Dense` implement it."""

    @property
    def num_components(self) -> int: ...
    @property
    def num_queries(self) -> int: ...
    @property
    def num_keys(self) -> int: ...
    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        """Compute the attention of queries start..stop, in M * (stop - start) * Nk memory."""
        ...


@dataclass(frozen=True)
class Factors:
    """A head given by its queries and keys, see the formula at the top of this file."""

    query: Float[Tensor, "nq f"]
    key: Float[Tensor, "r nk f"]
    scale: Float[Tensor, " m"]
    row: Float[Tensor, "nq m"]
    column: Float[Tensor, "m nk"]
    link: str = "identity"  # or "log"
    hard: bool = False  # hard E-step (Eqn 12): only the largest component of a pair contributes to A
    is_causal: bool = False  # lower-right aligned
    window: int | None = None  # of the causal mask

    @property
    def num_components(self) -> int:
        return len(self.scale)

    @property
    def num_queries(self) -> int:
        return len(self.query)

    @property
    def num_keys(self) -> int:
        return self.key.shape[1]

    def logits(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "m n nk"]:
        """Compute l[i,j,r] of queries start..stop, -inf where the key is not visible."""
        query = self.query[start:stop]
        product = (query @ self.key.mT) * self.scale[:, None, None]
        if self.link == "log":
            product = product.clamp(min=0).log()
        logits = product + self.row[start:stop].T[..., None] + self.column[:, None]
        if self.is_causal:
            last = torch.arange(start, start + len(query), device=query.device) + self.num_keys - self.num_queries
            age = last[:, None] - torch.arange(self.num_keys, device=query.device)
            hidden = (age < 0) | (age >= (self.window or self.num_keys + self.num_queries))
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        logits = counted = self.logits(start, stop)
        if self.hard:
            winner = logits.max(0, keepdim=True)
            counted = torch.full_like(logits, -torch.inf).scatter_(0, winner.indices, winner.values)
        # Subtracting the largest logit avoids overflow. A row without a visible key has the sum 0 and gets zeros.
        largest = counted.amax((0, 2))
        terms = (counted - largest.masked_fill(largest == -torch.inf, 0)[:, None]).exp_()
        total = terms.sum((0, 2))
        terms /= total.masked_fill(total == 0, 1)[:, None]
        return Rows(terms, logits, largest + total.log())

    def to(self, *args: object) -> Factors:
        """Move to another device or dtype."""
        tensors = {name: getattr(self, name).to(*args) for name in ("query", "key", "scale", "row", "column")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class Dense:
    """A head given by its attention matrix, from any model."""

    components: Float[Tensor, "m nq nk"]

    @classmethod
    def of(cls, weights: Float[Tensor, "nq nk"] | Float[Tensor, "m nq nk"]) -> Dense:
        """Create a head from A, or from the contribution of each component to A."""
        tensor = torch.as_tensor(weights)
        if tensor.dim() == 2:
            tensor = tensor[None]
        check_tensor("weights", tensor, "M,Nq,Nk")
        if not bool((tensor.isfinite() & (tensor >= 0)).all()):
            raise ValueError(f"weights: expected finite numbers of at least 0, got {describe(tensor)} with others")
        return cls(tensor)

    @property
    def num_components(self) -> int:
        return len(self.components)

    @property
    def num_queries(self) -> int:
        return self.components.shape[1]

    @property
    def num_keys(self) -> int:
        return self.components.shape[2]

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        components = self.components[:, start:stop]
        return Rows(components, components.log(), components.new_zeros(components.shape[1]))


def gaussian(
    query: Float[Tensor, "nq d"],
    key: Float[Tensor, "m nk d"] | Float[Tensor, "nk d"],
    log_prior: Float[Tensor, " m"] | Float[Tensor, "m nk"] | None = None,
    *,
    shift: Float[Tensor, "m d"] | None = None,
    variance: float | Float[Tensor, " m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
) -> Factors:
    """Create a head of MGK, or of sMGK if `shift` is given.

    Arguments are those of `mgk.attention_weights` without the batch and head dimensions.
    """
    components = key if shift is None else key[None] + shift[:, None]
    scale = 1 / expand_variance(variance, components)
    column = -components.square().sum(-1) / 2 * scale[:, None]
    if log_prior is not None and e_step == "soft":
        column = column + log_prior.reshape(len(components), -1)
    row = -query.square().sum(-1, keepdim=True) / 2 * (scale - scale[0])  # 0 if the variances are equal
    if shift is not None:
        row = row + query @ shift.T * scale
    keys = components if shift is None else key[None]
    return Factors(query, keys, scale, row, column, hard=e_step == "hard", is_causal=is_causal, window=window)


def softmax(
    query: Float[Tensor, "nq d"], key: Float[Tensor, "nk d"], *, is_causal: bool = False, window: int | None = None
) -> Factors:
    """Create a head of softmax attention."""
    scale = query.new_full((1,), query.shape[-1] ** -0.5)
    row, column = query.new_zeros(len(query), 1), key.new_zeros(1, len(key))
    return Factors(query, key[None], scale, row, column, is_causal=is_causal, window=window)


def linear(
    query: tuple[Float[Tensor, "nq f"], Float[Tensor, "nq f"]],
    key: tuple[Float[Tensor, "m nk f"], Float[Tensor, "m nk f"]],
    log_prior: Float[Tensor, " m"] | Float[Tensor, "m nk"] | None = None,
    *,
    is_causal: bool = False,
) -> Factors:
    """Create a head of linear attention, MLK or sMLK.

    `query` and `key` are the features of queries and component keys as (mantissa, exponent): mantissa * exp(exponent).
    """
    (queries, row), (keys, column) = _common_exponent(*query), _common_exponent(*key)
    count = len(keys)
    if log_prior is not None:
        column = column + log_prior.reshape(count, -1)
    scale = queries.new_ones(count)
    return Factors(queries, keys, scale, row[:, None].expand(-1, count), column, link="log", is_causal=is_causal)


def _common_exponent(mantissa: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Scale features to one exponent per position, the largest, and return both."""
    largest = exponent.amax(-1)
    return mantissa * (exponent - largest[..., None]).exp(), largest


def expand_variance(variance: float | Float[Tensor, " m"] | None, keys: Float[Tensor, "m nk d"]) -> Float[Tensor, " m"]:
    """Return one variance per component; the default is sqrt(D)."""
    variance = math.sqrt(keys.shape[-1]) if variance is None else variance
    return torch.as_tensor(variance, dtype=keys.dtype, device=keys.device).expand(len(keys))
