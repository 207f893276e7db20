"""How many singular values of an attention matrix exceed a threshold: the rank of the paper's Figures 2 and 6.

That takes no singular values, only the side on which each lies. The eigenvalues of A^T A are their squares, and by
Sylvester's law of inertia A^T A - tol^2 I = L D L^T has as many positive eigenvalues as D has: one product and one
factorisation, a fifth of the work of an SVD. Where few keys have all the weight, the SVD of their columns is less work
still. Squares lose digits, so three things keep the count that of the SVD:

- Rows of attention add up to 1, so the constant vector takes most of the largest singular value. It is split off
  first, and the rest is computed to the rounding of the rest. Its columns are then divided by their lengths, which
  changes no sign: light columns are computed to their own rounding.
- The eigenvalue nearest to 0 is found by inverse iteration. If rounding could have moved it across, the count is taken
  again from [[tol I, A^T], [A, tol I]], whose eigenvalues are tol +- sigma: twice the size, and no squares.
- If that is not certain either, a singular value is tol to all digits but a few, and the SVD decides.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TOLERANCE = 1e-6
# An eigenvalue so many eps * |A^T A| from 0 has a certain sign: those near 0 were seen to err by less than 0.1 of these
# units at N = 1,024, and inverse iteration overrates their distance by a few times at most.
MARGIN = 4


def ranks(matrices: Float[Tensor, "*b n k"] | Iterable[Tensor], tol: float = TOLERANCE) -> Int[Tensor, "*b"]:
    """Singular values above `tol` of each matrix: what `numpy.linalg.matrix_rank(matrix, tol=tol)` says in float64.

    Args:
        matrices: (...,N,K), or any iterable of (N,K), which is then never held as a whole.
        tol: absolute, as in the paper.
    """
    if not tol > 0:
        raise ValueError(f"tol: expected a number above 0, got {tol}")
    if isinstance(matrices, Tensor):
        if matrices.dim() < 2:
            raise ValueError(f"matrices: expected at least 2 dimensions (...,N,K), got {tuple(matrices.shape)}")
        counts = ranks(iter(matrices.flatten(0, -3) if matrices.dim() > 2 else [matrices]), tol)
        return counts.view(matrices.shape[:-2])
    workers = torch.get_num_threads()
    with _one_thread_each(workers), ThreadPoolExecutor(workers) as pool:
        return torch.tensor(list(_in_order(pool, matrices, tol, 2 * workers)), dtype=torch.int64)


@torch.no_grad()
def rank(matrix: Float[Tensor, "n k"], tol: float = TOLERANCE) -> int:
    """Singular values of one matrix above `tol`, counted on the CPU, where factorisations of this size are at home."""
    matrix = matrix.cpu().double()
    if not bool(matrix.isfinite().all()):
        raise ValueError("matrix: expected finite numbers, got others")
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    for count in (count_by_few_columns, count_by_squares, count_without_squares):
        found = count(matrix, tol)
        if found is not None:
            return found
    return int((torch.linalg.svdvals(matrix) > tol).sum())


def count_by_few_columns(matrix: Float[Tensor, "n k"], tol: float) -> int | None:
    """Where at most half of the columns have nearly all the weight, by the SVD of those; None if the others matter.

    Without columns of together the Frobenius norm d no singular value moves by more than d (Weyl).
    """
    squares, order = torch.linalg.vector_norm(matrix, dim=0).square().sort()
    slack = 1e-3 * tol
    light = int((squares.cumsum(0) <= slack**2).sum())
    if 2 * light < matrix.shape[1]:
        return None
    values = torch.linalg.svdvals(torch.linalg.qr(matrix[:, order[light:]], mode="r").R)
    least, most = int((values > tol + 2 * slack).sum()), int((values > tol - 2 * slack).sum())
    return least if least == most else None


def count_by_squares(matrix: Float[Tensor, "n k"], tol: float) -> int | None:
    """By the inertia of A^T A - tol^2 I; None where rounding may have a say."""
    if matrix.shape[1] < 2:
        return None
    column, rest = _split_off_constant(matrix)
    lengths = torch.linalg.vector_norm(rest, dim=0).clamp_min(tol)
    rest /= lengths  # inertia stays, and a key that everybody looks at no longer drowns the others in its rounding
    pivot, cross = column @ column, rest.mT @ column
    if not pivot > 4 * tol**2:
        return None
    gram = _lower_gram(rest)
    gram.diagonal().sub_((tol / lengths).square())
    size = _norm_bound(gram.abs())
    gram.addr_(cross, cross, alpha=-1 / float(pivot - tol**2))  # the Schur complement; it is no larger than the rest
    positive, nearest = _inertia(gram)
    return 1 + positive if nearest > MARGIN * torch.finfo(gram.dtype).eps * size else None


def count_without_squares(matrix: Float[Tensor, "n k"], tol: float) -> int | None:
    """By the inertia of [[tol I, A^T], [A, tol I]]; None where rounding may have a say."""
    rows, columns = matrix.shape
    both = matrix.new_zeros(rows + columns, rows + columns)  # the lower triangle
    both[columns:, :columns] = matrix
    both.diagonal().fill_(tol)
    positive, nearest = _inertia(both)
    size = float(torch.linalg.vector_norm(matrix))
    return rows + columns - positive if nearest > MARGIN * torch.finfo(both.dtype).eps * size else None


def _inertia(lower: Tensor) -> tuple[int, float]:
    """Positive eigenvalues of a symmetric matrix, and the distance of the one nearest to 0, of its lower triangle."""
    factor, pivots, singular = torch.linalg.ldl_factor_ex(lower)
    if int(singular):
        return 0, 0.0  # an eigenvalue is 0
    single = pivots > 0  # the others come in pairs: blocks of 2 x 2, which hold one eigenvalue of either sign
    positive = int(((factor.diagonal() > 0) & single).sum()) + int((~single).sum()) // 2
    return positive, _nearest_eigenvalue(factor, pivots)


def _lower_gram(matrix: Tensor, parts: int = 4) -> Tensor:
    """A^T A, of which the lower triangle alone is computed, by columns: five eighths of the product."""
    width = matrix.shape[1]
    gram, step = matrix.new_zeros(width, width), -(-width // parts)
    for start in range(0, width, step):
        torch.mm(matrix[:, start:].mT, matrix[:, start : start + step], out=gram[start:, start : start + step])
    return gram.tril_()


def _split_off_constant(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix in a basis of its columns' space whose first vector is constant: that column (N,), the others."""
    mirror = matrix.new_full(
        (matrix.shape[1],), matrix.shape[1] ** -0.5
    )  # the Householder reflection of it onto axis 0
    mirror[0] += 1
    mirror /= mirror.norm()
    turned = torch.addr(matrix, matrix @ mirror, mirror, alpha=-2)
    return turned[:, 0], turned[:, 1:]


def _norm_bound(lower: Tensor, steps: int = 4) -> float:
    """At least the largest eigenvalue of a symmetric matrix without negative entries, and close to it.

    max_i (G x)_i / x_i is a bound for every x > 0 (Collatz and Wielandt), and exact at the eigenvector.
    """
    x = lower.new_ones(len(lower))
    image = x
    for _ in range(steps + 1):
        x = image / image.max().clamp(min=torch.finfo(x.dtype).tiny) + 1e-3
        image = lower @ x + lower.mT @ x - lower.diagonal() * x
    return float((image / x).max())


def _nearest_eigenvalue(factor: Tensor, pivots: Tensor, vectors: int = 8, steps: int = 5) -> float:
    """The distance of the eigenvalue nearest to 0, overrated a little: inverse iteration from a few random vectors."""
    generator = torch.Generator(factor.device).manual_seed(0)
    x = torch.randn(len(factor), vectors, dtype=factor.dtype, device=factor.device, generator=generator)
    growth = x.new_ones(vectors)
    for _ in range(steps):
        x = x / x.norm(dim=0)
        x = torch.linalg.ldl_solve(factor, pivots, x)
        growth = x.norm(dim=0)
    largest = float(growth.max())
    return 1 / largest if largest < torch.inf else 0.0  # nan: not certain


def _in_order(pool: ThreadPoolExecutor, matrices: Iterable[Tensor], tol: float, ahead: int) -> Iterator[int]:
    """As `pool.map`, which would read all of `matrices` at once."""
    waiting = []
    for matrix in matrices:
        waiting.append(pool.submit(rank, matrix, tol))
        if len(waiting) > ahead:
            yield waiting.pop(0).result()
    for last in waiting:
        yield last.result()


@contextmanager
def _one_thread_each(workers: int) -> Iterator[None]:
    """Matrices side by side scale better than threads within one factorisation."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(workers)
