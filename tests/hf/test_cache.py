"""The arithmetic of the cache behind the interface of Transformers: lengths, rows and cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.hf import MGKCache
from mgk.nn import KeyValueCache, StackCache


def cache(rows: int = 3, length: int = 5) -> Any:
    """Two layers in which the key of row b, position n and layer l is 100 l + 10 b + n, and the value its negative."""
    layers: list[Any] = []
    for layer in range(2):
        inner = KeyValueCache(rows)
        numbers = 100.0 * layer + 10 * torch.arange(rows)[:, None] + torch.arange(length)
        keys = numbers[:, None, :, None]  # (B,H,N,D)
        inner.append(keys, -keys)
        layers.append(inner)
    return MGKCache(StackCache(layers))


def held(given: Any, layer: int = 0) -> list[list[float]]:
    """The keys of a layer, row by row; the values must be theirs."""
    inner: Any = given.layers[layer].inner
    key, value = (x[..., : inner.length, :].squeeze(-1).squeeze(1) for x in (inner._key, inner._value))
    assert torch.equal(value, -key)
    assert inner.batch_size == len(key)
    found: list[list[float]] = (key - 100 * layer).tolist()
    return found


def rows(*numbers: int, length: int = 5) -> list[list[float]]:
    return [[10.0 * number + n for n in range(length)] for number in numbers]


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_are_reordered_repeated_and_selected(layer: int) -> None:
    given = cache()
    given.reorder_cache(torch.tensor([2, 0, 0]))
    assert held(given, layer) == rows(2, 0, 0)
    given = cache()
    given.batch_repeat_interleave(2)  # each row twice, side by side, as beams are
    assert held(given, layer) == rows(0, 0, 1, 1, 2, 2)
    given.batch_select_indices(torch.tensor([5, 0, 2]))
    assert held(given, layer) == rows(2, 0, 1)


@pytest.mark.parametrize(("cut", "left"), [(-2, 3), (0, 5), (-5, 0), (2, 2), (5, 5), (9, 5)])
def test_crop_removes_the_last_or_keeps_the_first(cut: int, left: int) -> None:
    given = cache()
    given.crop(cut)
    assert held(given) == rows(0, 1, 2, length=left)
    assert given.get_seq_length() == left


def test_crop_removes_no_more_than_there_is() -> None:
    given = cache()
    with pytest.raises(ValueError, match="crop: expected 0 to -5, got -6"):
        given.crop(-6)
    assert given.get_seq_length() == 5


def test_the_mask_covers_the_cached_and_the_new_positions() -> None:
    given = cache()
    assert given.get_seq_length() == 5
    assert given.get_mask_sizes(3, 0) == (8, 0)


def test_a_row_that_does_not_exist_is_an_error_after_reordering() -> None:
    """The number of rows follows the beams: with more rows, more may be chosen; with fewer, fewer."""
    given, one = cache(), torch.tensor([1])
    given.reorder_cache(one)
    with pytest.raises(ValueError, match=r"indices: expected numbers in \[0, 1\)"):
        given.reorder_cache(one)


def test_a_reset_cache_is_filled_from_the_start() -> None:
    given = cache()
    given.reset()
    inner: Any = given.layers[0].inner
    fresh: Tensor = torch.full((3, 1, 1, 1), 7.0)
    inner.append(fresh, -fresh)
    assert held(given) == [[7.0]] * 3
