"""Count the singular values of attention matrices above a threshold: the ranks of the paper's Figures 2 and 6.

The singular values themselves are not needed. By Sylvester's law of inertia, A^T A - tol^2 I = L D L^T has as many
positive eigenvalues as D: one matrix product and one factorisation, a fifth of the work of an SVD. If a few keys have
nearly all the weight, the SVD of their columns is cheaper still. Squaring loses digits; two steps keep the count equal
to that of the SVD:

- Rows of attention sum to 1, so the largest singular value is close to the constant direction. That direction is split
  off first, and the remaining columns are divided by their norms. This changes no sign, and it keeps the rounding error
  of a column relative to that column.
- Inverse iteration finds the eigenvalue closest to 0. If rounding could have changed its sign, the SVD decides. This is
  rare: none of 80 random attention matrices at N = 1,024, and 3 of 72 with a few dominant keys.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TOLERANCE = 1e-6
# The sign of an eigenvalue is certain if its distance from 0 is above MARGIN * eps * |A^T A|. Measured errors near 0
# were below 0.1 * eps * |A^T A| at N = 1,024, and inverse iteration overestimates the distance by a small factor only.
MARGIN = 4


def ranks(matrices: Float[Tensor, "*b n k"] | Iterable[Tensor], tol: float = TOLERANCE) -> Int[Tensor, "*b"]:
    """Count the singular values above `tol` of each matrix, as `numpy.linalg.matrix_rank(matrix, tol=tol)` in float64.

    Args:
        matrices: (...,N,K), or an iterable of (N,K), which is consumed lazily.
        tol: absolute threshold, as in the paper.
    """
    if not tol > 0:
        raise ValueError(f"tol: expected a number above 0, got {tol}")
    if isinstance(matrices, Tensor):
        if matrices.dim() < 2:
            raise ValueError(f"matrices: expected at least 2 dimensions (...,N,K), got {tuple(matrices.shape)}")
        counts = ranks(iter(matrices.flatten(0, -3) if matrices.dim() > 2 else [matrices]), tol)
        return counts.view(matrices.shape[:-2])
    workers = torch.get_num_threads()
    torch.set_num_threads(1)  # one matrix per thread scales better than several threads per factorisation
    try:
        with ThreadPoolExecutor(workers) as pool:
            return torch.tensor(list(_map_lazily(pool, matrices, tol, 2 * workers)), dtype=torch.int64)
    finally:
        torch.set_num_threads(workers)


def _map_lazily(pool: ThreadPoolExecutor, matrices: Iterable[Tensor], tol: float, ahead: int) -> Iterator[int]:
    """As `pool.map`, but read at most `ahead` matrices before their results are consumed."""
    waiting = []
    for matrix in matrices:
        waiting.append(pool.submit(rank, matrix, tol))
        if len(waiting) > ahead:
            yield waiting.pop(0).result()
    for last in waiting:
        yield last.result()


@torch.no_grad()
def rank(matrix: Float[Tensor, "n k"], tol: float = TOLERANCE) -> int:
    """Count the singular values of one matrix above `tol`, on the CPU in float64."""
    matrix = matrix.cpu().double()
    if not bool(matrix.isfinite().all()):
        raise ValueError("matrix: expected finite numbers, got others")
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    for count in (count_by_heavy_columns, count_by_gram_matrix):
        found = count(matrix, tol)
        if found is not None:
            return found
    return int((torch.linalg.svdvals(matrix) > tol).sum())


def count_by_heavy_columns(matrix: Float[Tensor, "n k"], tol: float) -> int | None:
    """Count by the SVD of the heavy columns, if these are at most half of all; None if the others could matter.

    Removing columns with a joint Frobenius norm d moves no singular value by more than d (Weyl).
    """
    squares, order = torch.linalg.vector_norm(matrix, dim=0).square().sort()
    slack = 1e-3 * tol
    light = int((squares.cumsum(0) <= slack**2).sum())
    if 2 * light < matrix.shape[1]:
        return None
    values = torch.linalg.svdvals(torch.linalg.qr(matrix[:, order[light:]], mode="r").R)
    least, most = int((values > tol + 2 * slack).sum()), int((values > tol - 2 * slack).sum())
    return least if least == most else None


def count_by_gram_matrix(matrix: Float[Tensor, "n k"], tol: float) -> int | None:
    """Count by the inertia of A^T A - tol^2 I; None if rounding could change the count."""
    if matrix.shape[1] < 2:
        return None
    column, rest = _split_off_constant(matrix)
    norms = torch.linalg.vector_norm(rest, dim=0).clamp_min(tol)
    rest /= norms  # keeps the inertia, and the rounding error of each column small relative to that column
    pivot, cross = column @ column, rest.mT @ column
    if not pivot > 4 * tol**2:
        return None
    gram = _lower_gram(rest)
    gram.diagonal().sub_((tol / norms).square())
    size = 2**0.5 * float(torch.linalg.vector_norm(gram))  # at least the norm: `gram` has the lower triangle only
    gram.addr_(cross, cross, alpha=-1 / float(pivot - tol**2))  # the Schur complement, which has no larger norm
    positive, nearest = _inertia(gram)
    return 1 + positive if nearest > MARGIN * torch.finfo(gram.dtype).eps * size else None


def _inertia(lower: Tensor) -> tuple[int, float]:
    """Return the number of positive eigenvalues of a symmetric matrix, and how close to 0 the closest eigenvalue is.

    Only the lower triangle is read.
    """
    factor, pivots, singular = torch.linalg.ldl_factor_ex(lower)
    if int(singular):
        return 0, 0.0  # an eigenvalue is 0
    single = pivots > 0  # the others form 2 x 2 blocks with one positive and one negative eigenvalue
    positive = int(((factor.diagonal() > 0) & single).sum()) + int((~single).sum()) // 2
    return positive, _nearest_eigenvalue(factor, pivots)


def _lower_gram(matrix: Tensor, parts: int = 4) -> Tensor:
    """Compute the lower triangle of A^T A in blocks of columns: five eighths of the full product."""
    width = matrix.shape[1]
    gram, step = matrix.new_zeros(width, width), -(-width // parts)
    for start in range(0, width, step):
        torch.mm(matrix[:, start:].mT, matrix[:, start : start + step], out=gram[start:, start : start + step])
    return gram.tril_()


def _split_off_constant(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the Householder reflection that maps the constant vector to axis 0; return column 0 and the others."""
    mirror = matrix.new_full((matrix.shape[1],), matrix.shape[1] ** -0.5)
    mirror[0] += 1
    mirror /= mirror.norm()
    turned = torch.addr(matrix, matrix @ mirror, mirror, alpha=-2)
    return turned[:, 0], turned[:, 1:]


def _nearest_eigenvalue(factor: Tensor, pivots: Tensor, vectors: int = 8, steps: int = 5) -> float:
    """Estimate, slightly too large, the distance of the closest eigenvalue from 0, by inverse iteration."""
    generator = torch.Generator(factor.device).manual_seed(0)
    x = torch.randn(len(factor), vectors, dtype=factor.dtype, device=factor.device, generator=generator)
    growth = x.new_ones(vectors)
    for _ in range(steps):
        x = torch.linalg.ldl_solve(factor, pivots, x / x.norm(dim=0))
        growth = x.norm(dim=0)
    largest = float(growth.max())
    return 1 / largest if largest < torch.inf else 0.0  # NaN: uncertain
