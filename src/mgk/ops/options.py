"""What attention takes beside queries, keys and values, after the checks: one tuple for every implementation.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mgk.ops import arguments as check

Variance = float | Tensor


class Visibility(NamedTuple):
    """Which query sees which key.

    With `is_causal`, query i sees the keys up to i + Nk - Nq (lower-right aligned); with a `window` too, only the last
    `window` of them, its own position included.
    """

    is_causal: bool = False
    window: int | None = None
    key_mask: Tensor | None = None  # bool (B,Nk), True where a key takes part
    query_mask: Tensor | None = None  # bool (B,Nq), True for real queries


class Options(NamedTuple):
    """The mixture, what is visible, and what is returned."""

    log_prior: Tensor | None  # (H,M) or (H,M,Nk)
    variance: Variance  # a number or (H,M)
    visibility: Visibility = Visibility()
    hard: bool = False  # the E-step
    dropout_p: float = 0.0
    return_lse: bool = False


class Rows(NamedTuple):
    """Packed sequences: sequence b has the queries queries[b] to queries[b+1] and the keys keys[b] to keys[b+1]."""

    queries: Tensor  # int32 (S+1,)
    keys: Tensor  # int32 (S+1,)
    max_q: int  # at least the largest number of queries of a sequence
    max_k: int


class Pages(NamedTuple):
    """Keys and values in pages of a pool: those of row b are in the pages table[b, 0], table[b, 1], ..."""

    table: Tensor  # int32 (B,pages of a row)
    used: Tensor  # int32 (B,), the number of keys of each row
    max_k: int  # at least the largest of them


Result = tuple[Tensor, Tensor | None]  # the output and, if asked for, the log of the row sums (B,H,Nq)


def check_visibility(
    query: Tensor, key: Tensor, is_causal: object, window: object, key_mask: object, query_mask: object
) -> Visibility:
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[-2]
    is_causal = check.check_flag("is_causal", is_causal)
    return Visibility(
        is_causal,
        check.check_window(window, is_causal, keys),
        check.check_mask("key_mask", key_mask, "B,Nk", (batch, keys), query),
        check.check_mask("query_mask", query_mask, "B,Nq", (batch, queries), query),
    )


def check_options(
    query: Tensor,
    keys: int,
    components: int,
    log_prior: object,
    variance: object,
    visibility: Visibility,
    e_step: object = "soft",
    dropout_p: object = 0.0,
    return_lse: object = False,
) -> Options:
    heads = query.shape[1]
    return Options(
        check.check_log_prior(log_prior, heads, components, keys, query),
        check.check_variance(variance, heads, components, query),
        visibility,
        check.check_choice("e_step", e_step, check.E_STEPS) == "hard",
        check.check_probability("dropout_p", dropout_p),
        check.check_flag("return_lse", return_lse),
    )
