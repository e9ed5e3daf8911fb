"""Leading directions of one cell's rows, beside a scatter that is added to theirs: three ways, by the cell's size.

From the Gram matrix of the rows, from their scatter, or by a randomised SVD.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax.learning.small_cells import are_orthonormal
from geode_jax.rows.blocks import slices
from geode_jax.rows.processes import Processes
from geode_jax.rows.products import Products
from geode_jax.rows.view import Rows

# Up to this size of the smaller side the eigenvectors of the Gram or moment matrix are exact and faster than a
# randomised SVD (and one matrix serves all folds).
EXACT_MAX_SIDE = 1500
# Of the randomised SVD in blocks of rows: vectors beyond the directions, and products with the scatter.
NUM_MORE, NUM_POWERS = 10, 5


class Spectrum(NamedTuple):
    """Leading directions of a covariance, (D, r) orthonormal, and the variances along them, (r,)."""

    directions: np.ndarray
    variances: np.ndarray


# A cell's centre, (D,), and the leading directions of its rows about it.
Cell: TypeAlias = tuple[np.ndarray, Spectrum]


class Tolerance(NamedTuple):
    """Singular values at or below this are rounding, of the data (`own`), or of the squared matrix (`relative`)."""

    own: float
    relative: float

    @classmethod
    def of(cls, x: Rows, num_rows: int, largest: float) -> "Tolerance":
        """For as many rows of x, of which `largest` is the largest absolute value."""
        own = np.finfo(x.dtype).eps * largest * np.sqrt(num_rows * x.shape[1])
        return cls(own, np.sqrt(np.finfo(np.float64).eps * max(num_rows, x.shape[1])))

    def __call__(self, largest: float) -> float:
        """The limit where the largest singular value is this."""
        return max(largest * self.relative, self.own)


def _as_columns(spectrum: Spectrum, features: slice = slice(None)) -> np.ndarray:
    """Pseudo-rows whose scatter is the spectrum, as columns: the given features of them, (D', r) in float64."""
    return np.sqrt(spectrum.variances) * spectrum.directions[features]


def randomised(x: Rows, rows: np.ndarray, rank: int, seed: int, mask: np.ndarray, prior: Spectrum) -> Cell:
    """By a randomised SVD of the rows under the `mask`, and of pseudo-rows for the prior."""
    cell = x[rows[mask]]
    tolerance = Tolerance.of(cell, len(cell), largest_of([cell]))
    centre = cell.mean(axis=0, dtype=np.float64)
    cell -= centre.astype(cell.dtype)
    stacked = np.concatenate([cell, _as_columns(prior).T.astype(cell.dtype)]) if prior.variances.size else cell
    _, singular, right = randomized_svd(stacked, rank, n_iter=4, random_state=seed)
    useful = singular > tolerance(singular[0])
    return centre, Spectrum(right[useful].T, np.square(singular[useful], dtype=np.float64))


def randomised_in_blocks(
    x: Rows, rows: np.ndarray, rank: int, seed: int, processes: Processes, mask: np.ndarray, prior: Spectrum
) -> Cell:
    """:func:`randomised` that reads a few rows at a time, several times, of one or several processes.

    Processes exchange products with as many vectors as directions.

    A range finder for the scatter (Halko, Martinsson & Tropp 2011, algorithm 4.4), which is never made.
    """
    cell = rows[mask]
    counts = processes.total(np.array([cell.size]))
    sums = sum((block.sum(axis=0, dtype=np.float64) for block in _blocks(x, cell)), np.zeros(x.shape[1]))
    centre = processes.total(sums) / counts[0]
    tolerance = Tolerance.of(x, int(counts[0]), float(processes.each(np.array(largest_of(_blocks(x, cell)))).max()))

    def scatter_times(vectors: np.ndarray) -> np.ndarray:
        found = np.zeros(vectors.shape)
        for block in _blocks(x, cell):
            centred = block - centre
            found += centred.T @ (centred @ vectors)
        return processes.total(found) + _as_columns(prior) @ (_as_columns(prior).T @ vectors)

    num_vectors = min(rank + NUM_MORE, x.shape[1])
    vectors = np.random.default_rng(seed).normal(size=(x.shape[1], num_vectors))
    for _ in range(NUM_POWERS):
        vectors = linalg.qr(scatter_times(vectors), mode="economic")[0]
    found = leading(vectors.T @ scatter_times(vectors), Spectrum(np.zeros((0, 0)), np.zeros(0)), rank, tolerance)
    return centre, Spectrum((vectors @ found.directions).astype(x.dtype), found.variances)


def leading(scatter: np.ndarray, prior: Spectrum, rank: int, tolerance: Tolerance) -> Spectrum:
    """The leading directions of a scatter, (D, D), and a prior one."""
    if prior.variances.size:
        scatter = scatter + (prior.directions * prior.variances) @ prior.directions.T
    values, vectors = _leading_eigenpairs(scatter, rank)
    useful = values > tolerance(np.sqrt(max(values[0], 0.0))) ** 2
    return Spectrum(vectors[:, useful], values[useful])


def _blocks(x: Rows, rows: np.ndarray) -> Iterator[np.ndarray]:
    return (x[rows[some]] for some in slices(rows.size, x.shape[1]))


def largest_of(blocks: Iterable[np.ndarray]) -> float:
    """The largest absolute value in some blocks; 0 of none."""
    return max((max(float(block.max()), -float(block.min())) for block in blocks), default=0.0)  # no copies


def _mean(x: Rows, rows: np.ndarray) -> np.ndarray:
    total = sum((block.sum(axis=0, dtype=np.float64) for block in _blocks(x, rows)), np.zeros(x.shape[1]))
    return total / rows.size


def by_gram(x: Rows, rows: np.ndarray, rank: int, products: Products) -> Callable[[np.ndarray, Spectrum], Cell]:
    """Eigenvectors of the Gram matrix of the rows, which is computed once for all folds."""
    tolerance = Tolerance.of(x, rows.size, largest_of(_blocks(x, rows)))
    origin = _mean(x, rows)

    def columns() -> Iterator[tuple[slice, np.ndarray]]:
        """Centred features in float64, a few at a time: no copy of the rows is made."""
        for some in products.blocks(x.shape[1], rows.size):
            yield some, x[rows, some] - origin[some]

    gram = sum((products.inner(block) for _, block in columns()), np.zeros(()))

    def learn(mask: np.ndarray, prior: Spectrum) -> Cell:
        count, num_extra = int(mask.sum()), prior.variances.size
        inner = gram[np.ix_(mask, mask)]
        row_mean = inner.mean(axis=0)
        inner = inner - row_mean - row_mean[:, None] + row_mean.mean()
        across = np.zeros((rows.size, num_extra))
        if num_extra:
            for some, block in columns():
                across += block @ _as_columns(prior, some)
        across = across[mask]
        across -= across.mean(axis=0)
        inner = np.block([[inner, across], [across.T, np.diag(prior.variances)]])
        values, vectors = _leading_eigenpairs(inner, rank)
        singular = np.sqrt(np.maximum(values, 0.0))
        useful = singular > tolerance(singular[0])
        own, inherited = np.split(vectors[:, useful], [count])
        weight = np.zeros((rows.size, own.shape[1]))
        weight[mask] = own - own.mean(axis=0)  # centred, so that the rows' mean drops out
        basis = np.empty((x.shape[1], own.shape[1]))
        share, mean = mask / count, np.zeros(x.shape[1])
        for some, block in columns():
            basis[some] = (block.T @ weight + _as_columns(prior, some) @ inherited) / singular[useful]
            mean[some] = share @ block
        if not are_orthonormal(basis, True, x.dtype):
            basis = _orthonormal(basis)
        return origin + mean, Spectrum(basis.astype(x.dtype), values[useful])

    return learn


def _orthonormal(basis: np.ndarray) -> np.ndarray:
    """Restore orthogonality, which columns of small singular value lose because the Gram matrix squares them.

    By the Cholesky factor of the inner products, at a tenth of the cost of a QR decomposition; by QR where the inner
    products are far from the identity.
    """
    inner = basis.T @ basis
    if np.abs(inner - np.eye(inner.shape[0])).max() > 0.1 / inner.shape[0]:
        return linalg.qr(basis, mode="economic")[0]
    factor = linalg.cholesky(inner, lower=True, check_finite=False)
    return linalg.solve_triangular(factor, basis.T, lower=True, overwrite_b=True, check_finite=False).T


def _leading_eigenpairs(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, descending, and their vectors as columns."""
    # NumPy lets other threads run meanwhile, which SciPy does not. Of two matrices at once on two cores (500 to 972
    # rows, 100 vectors) NumPy finds all eigenvectors sooner than SciPy finds the leading ones.
    values, vectors = np.linalg.eigh(matrix)
    return values[::-1][:rank], vectors[:, ::-1][:, :rank]
