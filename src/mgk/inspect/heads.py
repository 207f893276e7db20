"""One head on one input, as a thing to look into: its weights and responsibilities by rows, in linear memory.

Every variant is the same formula over pairs of a query i and a component r of a key j:

    l[i,j,r] = link(scale_r q_i.k_jr) + row[i,r] + column[r,j]
    A[i,j] = sum_r exp l[i,j,r] / sum_j' sum_r exp l[i,j',r]

- softmax: one component, scale 1/sqrt(D), and nothing else.
- MGK: scale 1/s2, column = log prior - |k_jr|^2 / 2 s2; row = -|q_i|^2 / 2 s2_r where the variances differ, else it
  cancels. sMGK: k_jr = k_j for all r, and row gets q_i.b_r / s2 instead.
- the linear family: q and k are the features, and the link is the logarithm.

So a page that is given q, k, row and column computes any weight of any variant with one short function.

M components, Nq queries, Nk keys, F width of q and k (D, or that of the features), R = M sets of keys, or 1 for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mgk.ops.arguments import check_tensor, describe

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Rows:
    """Of some queries: what each component adds to A, and how the components compare."""

    components: Float[Tensor, "m n nk"]
    """Add up to A over the components."""
    logits: Float[Tensor, "m n nk"]
    """l[i,j,r] but for a constant of the row; -inf where a key is not visible."""
    log_total: Float[Tensor, " n"]
    """log of what the logits' exponentials add up to, which makes a logit a weight; -inf where no key is visible."""

    @property
    def weights(self) -> Float[Tensor, "n nk"]:
        return self.components.sum(0) if len(self.components) > 1 else self.components[0]

    @property
    def responsibilities(self) -> Float[Tensor, "m n nk"]:
        """gamma[i,j,r] of Eqn 11, zero where a key is not visible."""
        return self.logits.softmax(0).nan_to_num(0)


class Head(Protocol):
    """What an analysis needs of a head."""

    @property
    def num_components(self) -> int: ...
    @property
    def num_queries(self) -> int: ...
    @property
    def num_keys(self) -> int: ...
    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        """Of the queries start..stop: memory is M * (stop - start) * Nk."""
        ...


@dataclass(frozen=True)
class Factors:
    """A head by its queries and keys: see the formula above."""

    query: Float[Tensor, "nq f"]
    key: Float[Tensor, "r nk f"]
    scale: Float[Tensor, " m"]
    row: Float[Tensor, "nq m"]
    column: Float[Tensor, "m nk"]
    link: str = "identity"  # or "log"
    hard: bool = False  # Eqn 12: the largest component counts, and is the only one that adds to A
    is_causal: bool = False  # lower-right aligned

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
        """l[i,j,r] of some queries, -inf where a key is not visible."""
        query = self.query[start:stop]
        product = (query @ self.key.mT) * self.scale[:, None, None]
        if self.link == "log":
            product = product.clamp(min=0).log()
        logits = product + self.row[start:stop].T[..., None] + self.column[:, None]
        if self.is_causal:
            last = torch.arange(start, start + len(query), device=query.device) + self.num_keys - self.num_queries
            hidden = torch.arange(self.num_keys, device=query.device) > last[:, None]
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        logits = self.logits(start, stop)
        if self.hard:
            winner = logits.max(0, keepdim=True)
            counted = torch.full_like(logits, -torch.inf).scatter_(0, winner.indices, winner.values)
        else:
            counted = logits
        # With the largest logit at 0 nothing overflows; a row that sees no key has the sum 0, and gets zeros.
        largest = counted.amax((0, 2))
        terms = (counted - largest.masked_fill(largest == -torch.inf, 0)[:, None]).exp_()
        total = terms.sum((0, 2))
        terms /= total.masked_fill(total == 0, 1)[:, None]
        return Rows(terms, logits, largest + total.log())

    def to(self, *args: object) -> Factors:
        """On another device, or in another dtype."""
        tensors = {name: getattr(self, name).to(*args) for name in ("query", "key", "scale", "row", "column")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class Dense:
    """A head by its weights: of any model, if one has the matrices."""

    components: Float[Tensor, "m nq nk"]

    @classmethod
    def of(cls, weights: Float[Tensor, "nq nk"] | Float[Tensor, "m nq nk"]) -> Dense:
        """A, or what each component adds to it."""
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
        logits = components.log()
        return Rows(components, logits, components.new_zeros(components.shape[1]))


def gaussian(
    query: Float[Tensor, "nq d"],
    key: Float[Tensor, "m nk d"] | Float[Tensor, "nk d"],
    log_prior: Float[Tensor, " m"] | Float[Tensor, "m nk"] | None = None,
    *,
    shift: Float[Tensor, "m d"] | None = None,
    variance: float | Float[Tensor, " m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
) -> Factors:
    """A head of MGK, or with `shift` of sMGK: the arguments of `mgk.attention_weights` without batch and heads."""
    components = key[:, None] if shift is None else key[None] + shift[:, None]  # (M,1,Nk,D) or (M,Nk,D)
    components = components.flatten(0, -3)
    count = len(components)
    variance = math.sqrt(query.shape[-1]) if variance is None else variance
    variances = torch.as_tensor(variance, dtype=query.dtype, device=query.device).expand(count)
    scale = 1 / variances
    column = -components.square().sum(-1) / 2 * scale[:, None]
    if log_prior is not None and e_step == "soft":
        column = column + (log_prior[:, None] if log_prior.dim() == 1 else log_prior)
    row = -query.square().sum(-1, keepdim=True) / 2 * (scale - scale[0])  # 0 where the variances are the same
    if shift is not None:
        row = row + query @ shift.T * scale
    keys = components if shift is None else key[None]
    return Factors(query, keys, scale, row, column, hard=e_step == "hard", is_causal=is_causal)


def softmax(query: Float[Tensor, "nq d"], key: Float[Tensor, "nk d"], *, is_causal: bool = False) -> Factors:
    """A head of softmax attention."""
    scale = query.new_full((1,), query.shape[-1] ** -0.5)
    row, column = query.new_zeros(len(query), 1), key.new_zeros(1, len(key))
    return Factors(query, key[None], scale, row, column, is_causal=is_causal)


def linear(
    query: tuple[Float[Tensor, "nq f"], Float[Tensor, "nq f"]],
    key: tuple[Float[Tensor, "m nk f"], Float[Tensor, "m nk f"]],
    log_prior: Float[Tensor, " m"] | Float[Tensor, "m nk"] | None = None,
    *,
    is_causal: bool = False,
) -> Factors:
    """A head of linear attention, MLK or sMLK by the features of queries and component keys, mantissa and exponent."""
    (queries, row), (keys, column) = _scaled(*query), _scaled(*key)
    count = len(keys)
    if log_prior is not None:
        column = column + (log_prior[:, None] if log_prior.dim() == 1 else log_prior)
    scale = queries.new_ones(count)
    return Factors(queries, keys, scale, row[:, None].expand(-1, count), column, link="log", is_causal=is_causal)


def _scaled(mantissa: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Features with the largest exponent taken out, and that exponent."""
    largest = exponent.amax(-1)
    return mantissa * (exponent - largest[..., None]).exp(), largest


def blocks(heads: Sequence[Head], budget: int = 1 << 24) -> range:
    """Starts of blocks of rows such that one block of one head holds about `budget` numbers; `.step` rows each."""
    largest = max(head.num_components * head.num_keys for head in heads)
    return range(0, max(head.num_queries for head in heads), max(1, budget // max(1, largest)))
