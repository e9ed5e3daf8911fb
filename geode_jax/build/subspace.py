"""Centre and rank-d basis of every cell, for all rows and without each fold.

A cell of few rows knows its covariance badly, and a little of its parent's helps: the parent's leading directions enter
as if they were rows of the cell (`python -m benchmarks.stage_one` shows what that and the other choices are worth).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax.build.parallel import each
from geode_jax.build.partition import Partition

# Up to this size of the smaller side the eigenvectors of the Gram or moment matrix are exact and faster than a
# randomised SVD (and one matrix serves all folds).
EXACT_MAX_SIDE = 1500
_BLOCK_NUMBERS = 2**20


LeftOut: TypeAlias = Sequence[tuple[int, ...]]  # for every group of dictionaries, the folds it does not see


class Subspaces(NamedTuple):
    """Dictionaries of one partition: ``centres`` (G, K, D) and ``bases`` (G, K, D, d) with orthonormal columns.

    Unless other folds were left out, G = 1 + num_folds: entry 0 is learned from all rows, entry 1 + f without fold f.
    Columns beyond `ranks` (K,), and everything at absent nodes, are zero.
    """

    centres: np.ndarray
    bases: np.ndarray
    ranks: np.ndarray


def assign_folds(num_rows: int, num_folds: int, rng: np.random.Generator) -> np.ndarray:
    """One balanced fold per row, (n,)."""
    return rng.permutation(np.arange(num_rows) % min(num_folds, num_rows))


def each_fold(folds: np.ndarray | None) -> LeftOut:
    """Nothing left out, and each fold alone."""
    return [()] if folds is None else [(), *((fold,) for fold in range(int(folds.max()) + 1))]


def join_groups(parts: Sequence[Subspaces]) -> Subspaces:
    """Groups that were learned one by one; directions that one of them did not find are dropped."""
    ranks = np.min([part.ranks for part in parts], axis=0)
    bases = np.concatenate([part.bases for part in parts])
    bases *= (np.arange(bases.shape[3]) < ranks[:, None])[:, None, :]
    return Subspaces(np.concatenate([part.centres for part in parts]), bases, ranks)


class Spectrum(NamedTuple):
    """Leading directions of a covariance, (D, r) orthonormal, and the variances along them, (r,)."""

    directions: np.ndarray
    variances: np.ndarray


LearnGroup: TypeAlias = Callable[[np.ndarray, Spectrum], tuple[np.ndarray, Spectrum]]


def learn_subspaces(
    x: np.ndarray,
    partition: Partition,
    max_rank: int,
    folds: np.ndarray | None,
    seed: int,
    parent_rows: float = 0.0,
    left_out: LeftOut | None = None,
) -> Subspaces:
    """Learn every present cell's centre and basis without the folds `left_out`: None is none, and each alone.

    The covariance of a cell of n rows is ``(n own + parent_rows parent's) / (n + parent_rows)``, from the root down.
    """
    left_out = each_fold(folds) if left_out is None else left_out
    num_groups = len(left_out)
    num_nodes, num_features = len(partition.cells), x.shape[1]
    centres = np.zeros((num_groups, num_nodes, num_features), dtype=x.dtype)
    bases = np.zeros((num_groups, num_nodes, num_features, max_rank), dtype=x.dtype)
    ranks = np.zeros(num_nodes, dtype=np.int32)
    variances = np.zeros((num_groups, num_nodes, max_rank))

    def learn(node: int) -> None:
        rows = partition.cells[node]
        assert rows is not None
        kept = kept_rows(rows, folds, left_out)
        fewest = min(int(mask.sum()) for mask in kept)
        if fewest < 2:
            # Some fold holds (almost) the whole cell: that fold's dictionary has nothing to learn from here.
            centres[:, node] = _centres_with_fallback(_rows_of(x, rows), kept)
            return
        parent = (node - 1) // 2
        inherited = int(ranks[parent]) if parent_rows > 0.0 and node > 0 else 0
        prior = [
            Spectrum(bases[group, parent, :, :inherited], parent_rows * variances[group, parent, :inherited])
            for group in range(num_groups)
        ]
        most = min(max_rank, num_features, fewest - 1 + inherited)
        learned = _cell_subspaces(_rows_of(x, rows), kept, most, seed + node, prior)
        rank = ranks[node] = min(scatter.variances.size for _, scatter in learned)
        for group, (centre, scatter) in enumerate(learned):
            centres[group, node] = centre
            bases[group, node, :, :rank] = scatter.directions[:, :rank]
            weight = kept[group].sum() + (parent_rows if inherited else 0.0)
            variances[group, node, :rank] = scatter.variances[:rank] / weight

    present = np.flatnonzero(partition.is_present)
    for nodes in np.split(present, np.searchsorted(present, 2 ** np.arange(1, 64) - 1)):
        each(learn, nodes.tolist())  # parents first; the cells of a scale know nothing of each other
    return Subspaces(centres, bases, ranks)


def _rows_of(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A cell's rows; no copy where it has all."""
    return x if rows.size == x.shape[0] else x[rows]


def kept_rows(rows: np.ndarray, folds: np.ndarray | None, left_out: LeftOut) -> list[np.ndarray]:
    """Mask of the `rows` that stay in each group, (rows.size,)."""
    return [np.ones(rows.size, dtype=bool) if folds is None else ~np.isin(folds[rows], group) for group in left_out]


def _centres_with_fallback(cell: np.ndarray, kept: list[np.ndarray]) -> np.ndarray:
    return np.stack([cell[mask].mean(axis=0) if mask.any() else cell.mean(axis=0) for mask in kept])


def _cell_subspaces(
    cell: np.ndarray, kept: list[np.ndarray], rank: int, seed: int, prior: list[Spectrum]
) -> list[tuple[np.ndarray, Spectrum]]:
    """Centre of the cell's rows under each mask, and the leading `rank` or fewer of their scatter plus the prior's."""
    rows, features = cell.shape
    learn: LearnGroup
    if min(rows, features) > EXACT_MAX_SIDE:
        learn = functools.partial(_randomised, cell, rank, seed)
    else:
        learn = _by_moments(cell, rank) if features <= rows else _by_gram(cell, rank)
    return each(lambda group: learn(*group), zip(kept, prior, strict=True))


def _as_rows(spectrum: Spectrum) -> np.ndarray:
    """Rows whose scatter is the spectrum's, (r, D)."""
    return np.sqrt(spectrum.variances)[:, None] * spectrum.directions.T


def _randomised(
    cell: np.ndarray, rank: int, seed: int, mask: np.ndarray, prior: Spectrum
) -> tuple[np.ndarray, Spectrum]:
    cell = cell[mask]
    centre = cell.mean(axis=0, dtype=np.float64)
    stacked = np.concatenate([cell - centre.astype(cell.dtype), _as_rows(prior).astype(cell.dtype)])
    _, singular, right = randomized_svd(stacked, rank, n_iter=4, random_state=seed)
    useful = singular > _rank_tolerance(singular[0], cell)
    return centre, Spectrum(right[useful].T, np.square(singular[useful], dtype=np.float64))


def _by_moments(cell: np.ndarray, rank: int) -> LearnGroup:
    """Eigenvectors of the second-moment matrix; a fold's is the whole one less the fold's own."""
    origin = cell.mean(axis=0, dtype=np.float64)
    total_sum, total = _moments(cell, origin)

    def learn(mask: np.ndarray, prior: Spectrum) -> tuple[np.ndarray, Spectrum]:
        count = int(mask.sum())
        out_sum, out = _moments(cell[~mask], origin)
        mean = (total_sum - out_sum) / count
        scatter = total - out - count * np.outer(mean, mean)
        scatter += (prior.directions * prior.variances) @ prior.directions.T
        values, vectors = _leading_eigenpairs(scatter, rank)
        useful = values > _rank_tolerance(np.sqrt(max(values[0], 0.0)), cell) ** 2
        return origin + mean, Spectrum(vectors[:, useful], values[useful])

    return learn


def _moments(rows: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and second moment about `origin` in float64, by blocks so that no float64 copy of the rows is made."""
    features = origin.size
    first, second = np.zeros(features), np.zeros((features, features))
    size = max(256, _BLOCK_NUMBERS // features)
    for start in range(0, rows.shape[0], size):
        block = rows[start : start + size] - origin
        first += block.sum(axis=0)
        second += block.T @ block
    return first, second


def _by_gram(cell: np.ndarray, rank: int) -> LearnGroup:
    """Eigenvectors of the inner products of the rows, taken once for all folds."""
    origin = cell.mean(axis=0, dtype=np.float64)
    centred = cell - origin
    gram = centred @ centred.T

    def learn(mask: np.ndarray, prior: Spectrum) -> tuple[np.ndarray, Spectrum]:
        rows = centred[mask]
        mean = rows.mean(axis=0)
        extra = _as_rows(prior)
        inner = gram[np.ix_(mask, mask)]
        row_mean = inner.mean(axis=0)
        inner = inner - row_mean - row_mean[:, None] + row_mean.mean()
        across = rows @ extra.T
        across -= across.mean(axis=0)
        inner = np.block([[inner, across], [across.T, np.diag(prior.variances)]])
        values, vectors = _leading_eigenpairs(inner, rank)
        singular = np.sqrt(np.maximum(values, 0.0))
        useful = singular > _rank_tolerance(singular[0], cell)
        own, inherited = np.split(vectors[:, useful], [rows.shape[0]])
        basis = rows.T @ own - np.outer(mean, own.sum(axis=0)) + extra.T @ inherited
        basis /= singular[useful]
        basis = _orthonormal(basis) if useful.any() else basis
        return origin + mean, Spectrum(basis, values[useful])

    return learn


def _orthonormal(basis: np.ndarray) -> np.ndarray:
    """Restore to rounding what small singular values lose of orthogonality through the square of the matrix.

    By the Cholesky factor of the inner products, a tenth of the cost of a QR decomposition; where they are far from the
    identity, by that.
    """
    inner = basis.T @ basis
    if np.abs(inner - np.eye(inner.shape[0])).max() > 0.1 / inner.shape[0]:
        return linalg.qr(basis, mode="economic")[0]
    factor = linalg.cholesky(inner, lower=True, check_finite=False)
    return linalg.solve_triangular(factor, basis.T, lower=True, check_finite=False).T


def _leading_eigenpairs(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, descending, and their vectors as columns."""
    size = matrix.shape[0]
    if 8 * rank <= size:
        values, vectors = linalg.eigh(matrix, subset_by_index=(size - rank, size - 1), check_finite=False)
    else:
        values, vectors = np.linalg.eigh(matrix)  # lets other threads work beside it, which SciPy's does not
    return values[::-1][:rank], vectors[:, ::-1][:, :rank]


def _rank_tolerance(largest: float, cell: np.ndarray) -> float:
    """Singular values at or below this are rounding: the data's own, and that of the squared matrix."""
    own = np.finfo(cell.dtype).eps * float(max(cell.max(), -cell.min())) * np.sqrt(cell.size)
    return max(largest * np.sqrt(np.finfo(np.float64).eps * max(cell.shape)), own)
