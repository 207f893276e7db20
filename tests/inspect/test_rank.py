"""Ranks match numpy's SVD, also where rounding is critical, and matrices are read lazily."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import mgk
from mgk.inspect import rank, ranks
from mgk.inspect.rank import count_by_gram_matrix, count_by_heavy_columns


def attention(size: int, spread: float, causal: bool = False) -> Tensor:
    query, key = spread * torch.randn(2, 1, 1, size, 16)
    return mgk.attention_weights(query, key, shift=torch.randn(1, 2, 16), is_causal=causal)[0, 0]


def by_numpy(matrix: Tensor, tol: float = 1e-6) -> int:
    return int(np.linalg.matrix_rank(matrix.double().numpy(), tol=tol))


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks_of_attention(spread: float, causal: bool) -> None:
    """From constant rows (rank 1) to nearly one key per query."""
    torch.manual_seed(0)
    matrices = torch.stack([attention(96, spread, causal) for _ in range(6)])
    assert ranks(matrices).tolist() == [by_numpy(matrix) for matrix in matrices]


def test_a_threshold_next_to_a_singular_value() -> None:
    """Relative distances of 1e-3 to 1e-10 between threshold and singular value are resolved on either side."""
    torch.manual_seed(0)
    matrix = attention(80, 0.3).double()
    values = torch.linalg.svdvals(matrix)
    for index in (5, 30, 55):
        for distance in (1e-3, 1e-6, 1e-10):
            for side in (1, -1):
                tol = float(values[index]) * (1 + side * distance)
                assert rank(matrix, tol) == index + (side < 0), (index, distance, side)


def test_heavy_columns_decide_if_few_keys_have_all_the_weight() -> None:
    """The count is that of the full SVD, or None if the omitted columns could change it."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 96, 16), 9 * torch.randn(1, 1, 1, 96, 16)
    matrix = mgk.attention_weights(query, key)[0, 0].double()
    values = torch.linalg.svdvals(matrix)
    assert count_by_heavy_columns(matrix, 1e-6) == by_numpy(matrix)
    assert count_by_heavy_columns(matrix, float(values[3])) is None
    assert rank(matrix, float(values[3]) * (1 + 1e-9)) == 3
    assert count_by_heavy_columns(attention(96, 0.3).double(), 1e-6) is None  # every key has some


def test_the_gram_matrix_counts_and_knows_when_it_cannot() -> None:
    """It agrees with the SVD wherever it answers, answers nearly always, and not on top of a singular value."""
    torch.manual_seed(0)
    answers = 0
    for spread in (0.1, 0.3, 1.0, 2.0):
        matrix = attention(96, spread).double()
        found = count_by_gram_matrix(matrix, 1e-6)
        answers += found is not None
        assert found in (None, by_numpy(matrix))
        assert count_by_gram_matrix(matrix, float(torch.linalg.svdvals(matrix)[40])) in (None, 40, 41)
    assert answers >= 3
    exact = torch.diag(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    assert count_by_gram_matrix(exact, 0.25) is None


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (20, 9), (9, 20)])
def test_shapes(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    assert rank(matrix) == by_numpy(matrix)


def test_known_ranks() -> None:
    """Zero, one, a known number, and signs that cancel in the constant direction."""
    torch.manual_seed(0)
    assert rank(torch.zeros(8, 8)) == 0
    assert rank(torch.full((8, 8), 0.125)) == 1
    assert rank(torch.randn(40, 7, dtype=torch.float64) @ torch.randn(7, 40, dtype=torch.float64)) == 7
    centred = torch.eye(12, dtype=torch.float64) - 1 / 12
    assert rank(centred) == 11
    assert rank(1e-3 * torch.eye(6), tol=1e-2) == 0


def test_batches_keep_their_shape() -> None:
    matrices = torch.eye(5).expand(2, 3, 5, 5)
    assert ranks(matrices).tolist() == [[5] * 3] * 2
    assert ranks(torch.eye(4)).item() == 4


def test_an_iterable_is_read_lazily() -> None:
    """At most a few matrices per thread are alive at a time."""
    alive = most = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def made() -> Iterator[Tensor]:
        nonlocal alive, most
        for _ in range(40):
            alive += 1
            most = max(most, alive)
            yield torch.eye(6).as_subclass(Counted)

    assert ranks(made()).tolist() == [6] * 40
    assert most <= 3 * torch.get_num_threads() + 2


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="finite"):
        ranks([torch.full((2, 2), torch.nan)])
    assert torch.get_num_threads() == before


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="tol: expected a number above 0, got 0"):
        ranks(torch.eye(2), tol=0)
    with pytest.raises(ValueError, match="matrices: expected at least 2 dimensions"):
        ranks(torch.zeros(3))
