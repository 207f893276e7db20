"""Which pairs of positions a process computes, and what it refuses, without processes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mgk.ops.ring import chunks_of, pieces


def causal(queries: int, keys: int, window: int | None) -> Tensor:
    """Lower-right aligned, as the operators have it."""
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    return (distance >= 0) & (distance < (keys + queries if window is None else window))


def positions(rank: int, size: int, chunk: int) -> Tensor:
    return torch.cat([torch.arange(each * chunk, (each + 1) * chunk) for each in chunks_of(rank, size)])


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.none() | st.integers(1, 70), st.data())
def test_the_pieces_cover_every_visible_pair_once(
    size: int, chunk: int, is_causal: bool, window: int | None, data: st.DataObject
) -> None:
    rank, source = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    window = window if is_causal else None
    found = torch.zeros(2 * chunk, 2 * chunk, dtype=torch.int)
    for piece in pieces(rank, source, size, chunk, is_causal, window):
        block = found[piece.queries, piece.keys]
        seen = (
            causal(block.shape[0], block.shape[1], piece.window)
            if piece.is_causal
            else torch.ones_like(block, dtype=torch.bool)
        )
        found[piece.queries, piece.keys] += (seen.flip(0, 1) if piece.reverse else seen).int()
    distance = positions(rank, size, chunk)[:, None] - positions(source, size, chunk)
    expected = (distance >= 0) & (distance < (window or 10**6)) if is_causal else torch.ones_like(found)
    torch.testing.assert_close(found, expected.int(), rtol=0, atol=0)


@given(st.integers(2, 6), st.integers(1, 4))
def test_with_a_causal_mask_all_processes_have_the_same_work(size: int, chunk: int) -> None:
    def pairs(rank: int, source: int) -> int:
        block = torch.zeros(2 * chunk, 2 * chunk)
        return sum(block[piece.queries, piece.keys].numel() for piece in pieces(rank, source, size, chunk, True, None))

    work = {sum(pairs(rank, source) for source in range(size)) for rank in range(size)}
    assert len(work) == 1
