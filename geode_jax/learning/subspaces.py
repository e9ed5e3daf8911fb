"""Centre and rank-d basis of every cell, for all rows and without each fold.

A cell of few rows estimates its covariance badly, and a small weight of its parent's helps: the parent's leading
directions enter as if they were rows of the cell (`python -m benchmarks.stage_one` shows the gain of this and of the
other choices).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax._runtime.threads import parallel_map
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.folds import Holdout, each_fold, kept_rows
from geode_jax.rows.view import Rows

# Up to this size of the smaller side the eigenvectors of the Gram or moment matrix are exact and faster than a
# randomised SVD (and one matrix serves all folds).
EXACT_MAX_SIDE = 1500


class SubspaceOptions(NamedTuple):
    """How the subspaces of a partition's cells are learned.

    `max_rank`: directions per cell. `seed`: of the randomised SVD of large cells. `parent_rows`: how many rows the
    parent's covariance counts for in a cell's.
    """

    max_rank: int
    seed: int
    parent_rows: float = 0.0


class Subspaces(NamedTuple):
    """Dictionaries of one partition: ``centres`` (H, K, D) and ``bases`` (H, K, D, d) with orthonormal columns.

    One for each of H holdouts; if not said otherwise H = 1 + num_folds: entry 0 is learned from all rows, entry 1 + f
    without fold f. Columns beyond `ranks` (K,), and everything at absent nodes, are zero.
    """

    centres: np.ndarray
    bases: np.ndarray
    ranks: np.ndarray


def empty_subspaces(
    num_holdouts: int, num_nodes: int, num_features: int, max_rank: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Zeros for centres, (H, K, D), and bases, (H, K, D, d)."""
    shape = (num_holdouts, num_nodes, num_features)
    return aligned_zeros(shape, dtype), aligned_zeros((*shape, max_rank), dtype)


def join_holdouts(parts: Sequence[Subspaces]) -> Subspaces:
    """Join the dictionaries of holdouts learned separately; directions that one of them lacks are dropped."""
    if len(parts) == 1:  # no copy
        return parts[0]
    centres = np.concatenate([part.centres for part in parts])
    bases = np.concatenate([part.bases for part in parts])
    return with_common_ranks(centres, bases, np.stack([part.ranks for part in parts]))


def with_common_ranks(centres: np.ndarray, bases: np.ndarray, ranks: np.ndarray) -> Subspaces:
    """Dictionaries whose holdouts have their own `ranks`, (H, K): directions that one lacks are dropped, in place."""
    common = ranks.min(axis=0)
    for node in np.flatnonzero(common < ranks.max(axis=0)):
        bases[:, node, :, common[node] :] = 0.0
    return Subspaces(centres, bases, common)


class Spectrum(NamedTuple):
    """Leading directions of a covariance, (D, r) orthonormal, and the variances along them, (r,)."""

    directions: np.ndarray
    variances: np.ndarray


Cell: TypeAlias = tuple[np.ndarray, Spectrum]
LearnCell: TypeAlias = Callable[[np.ndarray, Spectrum], Cell]


def learn_root(
    x: Rows, options: SubspaceOptions, folds: np.ndarray | None, holdouts: list[Holdout] | None = None
) -> list[Cell]:
    """The centre of all rows and their covariance's leading directions, under each of the holdouts.

    Every tree has this root, and with many features it takes longer than any other cell: trees can share it.
    """
    holdouts = each_fold(folds) if holdouts is None else holdouts
    rows = np.arange(x.shape[0])
    kept = kept_rows(rows, folds, holdouts)
    fewest = min(int(mask.sum()) for mask in kept)
    nothing = Spectrum(np.zeros((x.shape[1], 0), x.dtype), np.zeros(0))
    if fewest < 2:
        return [(centre, nothing) for centre in _centres_with_fallback(x[rows], kept)]
    learn_cell = _cell_subspaces(x, rows, min(options.max_rank, x.shape[1], fewest - 1), options.seed)
    return parallel_map(lambda mask: learn_cell(mask, nothing), kept)


def learn_subspaces(
    x: Rows,
    partition: Partition,
    options: SubspaceOptions,
    folds: np.ndarray | None,
    holdouts: list[Holdout] | None = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    root: list[Cell] | None = None,
) -> Subspaces:
    """Learn every present cell's centre and basis under each of the `holdouts`; None means those of `each_fold`.

    The covariance of a cell of n rows is ``(n C + parent_rows P) / (n + parent_rows)``, from the root down, with C its
    rows' covariance and P its parent's. `out`: zeros to write centres and bases to, for callers that learn one holdout
    at a time. `root`: that of :func:`learn_root`, for several trees of the same rows.
    """
    holdouts = each_fold(folds) if holdouts is None else holdouts
    max_rank, seed, parent_rows = options
    num_holdouts = len(holdouts)
    num_nodes, num_features = len(partition.cells), x.shape[1]
    centres, bases = out or empty_subspaces(num_holdouts, num_nodes, num_features, max_rank, x.dtype)
    ranks = np.zeros(num_nodes, dtype=np.int32)
    variances = np.zeros((num_holdouts, num_nodes, max_rank))
    # Dimension of the span of a cell's rows and of those it inherits from. Further directions would be rounding error;
    # in coordinates of the row space they would be directions of left-out rows alone.
    spanned = np.zeros(num_nodes, dtype=np.int32)

    def learn(node: int) -> None:
        rows = partition.cell(node)
        kept = kept_rows(rows, folds, holdouts)
        fewest = min(int(mask.sum()) for mask in kept)
        if fewest < 2:
            # One fold has (almost) the whole cell: without it there is nothing to learn directions from.
            centres[:, node] = _centres_with_fallback(x[rows], kept)
            return
        parent = (node - 1) // 2
        inherited = int(ranks[parent]) if parent_rows > 0.0 and node > 0 else 0
        prior = [
            Spectrum(bases[out, parent, :, :inherited], parent_rows * variances[out, parent, :inherited])
            for out in range(num_holdouts)
        ]
        spanned[node] = spanned[parent] if inherited else fewest - 1
        most = int(min(max_rank, num_features, fewest - 1 + inherited, spanned[node]))
        cell: Callable[[int], Cell]
        if root is not None and node == 0:
            cell = root.__getitem__
        else:
            cell = _of_holdouts(_cell_subspaces(x, rows, most, seed + node), kept, prior)

        def learn_without(out: int) -> int:
            centre, scatter = cell(out)
            rank = scatter.variances.size
            centres[out, node] = centre
            bases[out, node, :, :rank] = scatter.directions
            weight = kept[out].sum() + (parent_rows if inherited else 0.0)
            variances[out, node, :rank] = scatter.variances / weight
            return rank

        found = parallel_map(learn_without, range(num_holdouts))
        rank = ranks[node] = min(found)
        if rank < max(found):
            bases[:, node, :, rank:], variances[:, node, rank:] = 0.0, 0.0

    present = np.flatnonzero(partition.is_present)
    for nodes in np.split(present, np.searchsorted(present, 2 ** np.arange(1, 64) - 1)):
        parallel_map(learn, nodes.tolist())  # parents first; the cells of a scale do not depend on each other
    return Subspaces(centres, bases, ranks)


def _centres_with_fallback(cell: np.ndarray, kept: list[np.ndarray]) -> np.ndarray:
    return np.stack([cell[mask].mean(axis=0) if mask.any() else cell.mean(axis=0) for mask in kept])


def _cell_subspaces(x: Rows, rows: np.ndarray, rank: int, seed: int) -> LearnCell:
    """A function that finds, for a mask of a cell's rows and a prior scatter, their centre and leading directions.

    There are at most `rank` directions. It is called for one mask at a time, so that results need not all be held.
    """
    if min(rows.size, x.shape[1]) > EXACT_MAX_SIDE:
        return functools.partial(_randomised, x, rows, rank, seed)
    return (_by_moments if x.shape[1] <= rows.size else _by_gram)(x, rows, rank)


def _of_holdouts(learn_cell: LearnCell, kept: list[np.ndarray], prior: list[Spectrum]) -> Callable[[int], Cell]:
    return lambda out: learn_cell(kept[out], prior[out])


def _as_columns(spectrum: Spectrum, features: slice = slice(None)) -> np.ndarray:
    """Pseudo-rows whose scatter is the spectrum, as columns: the given features of them, (D', r) in float64."""
    return np.sqrt(spectrum.variances) * spectrum.directions[features]


def _randomised(
    x: Rows, rows: np.ndarray, rank: int, seed: int, mask: np.ndarray, prior: Spectrum
) -> tuple[np.ndarray, Spectrum]:
    cell = x[rows[mask]]
    tolerance = _Tolerance.of(cell, np.arange(len(cell)))
    centre = cell.mean(axis=0, dtype=np.float64)
    cell -= centre.astype(cell.dtype)
    stacked = np.concatenate([cell, _as_columns(prior).T.astype(cell.dtype)]) if prior.variances.size else cell
    _, singular, right = randomized_svd(stacked, rank, n_iter=4, random_state=seed)
    useful = singular > tolerance(singular[0])
    return centre, Spectrum(right[useful].T, np.square(singular[useful], dtype=np.float64))


def _by_moments(x: Rows, rows: np.ndarray, rank: int) -> LearnCell:
    """Eigenvectors of the second-moment matrix; without a fold it is the whole matrix minus that of the fold's rows."""
    tolerance = _Tolerance.of(x, rows)
    origin = _mean(x, rows)
    total_sum, total = _moments(x, rows, origin)

    def learn(mask: np.ndarray, prior: Spectrum) -> tuple[np.ndarray, Spectrum]:
        count = int(mask.sum())
        out_sum, out = _moments(x, rows[~mask], origin)
        mean = (total_sum - out_sum) / count
        scatter = total - out - count * np.outer(mean, mean)
        scatter += (prior.directions * prior.variances) @ prior.directions.T
        values, vectors = _leading_eigenpairs(scatter, rank)
        useful = values > tolerance(np.sqrt(max(values[0], 0.0))) ** 2
        return origin + mean, Spectrum(vectors[:, useful], values[useful])

    return learn


def _blocks(x: Rows, rows: np.ndarray) -> Iterator[np.ndarray]:
    return (x[rows[some]] for some in slices(rows.size, x.shape[1]))


def _mean(x: Rows, rows: np.ndarray) -> np.ndarray:
    return sum(block.sum(axis=0, dtype=np.float64) for block in _blocks(x, rows)) / rows.size


def _moments(x: Rows, rows: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and second moment about `origin` in float64, in blocks: no copy of the rows is made."""
    first, second = np.zeros(origin.size), np.zeros((origin.size, origin.size))
    for block in _blocks(x, rows):
        centred = block - origin
        first += centred.sum(axis=0)
        second += centred.T @ centred
    return first, second


def _by_gram(x: Rows, rows: np.ndarray, rank: int) -> LearnCell:
    """Eigenvectors of the Gram matrix of the rows, which is computed once for all folds."""
    tolerance = _Tolerance.of(x, rows)
    origin = _mean(x, rows)

    def columns() -> Iterator[tuple[slice, np.ndarray]]:
        """Centred features in float64, a few at a time: no copy of the rows is made."""
        for some in slices(x.shape[1], rows.size):
            yield some, x[rows, some] - origin[some]

    gram = sum(block @ block.T for _, block in columns())

    def learn(mask: np.ndarray, prior: Spectrum) -> tuple[np.ndarray, Spectrum]:
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
        basis = _orthonormal(basis) if useful.any() else basis
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


class _Tolerance(NamedTuple):
    """Singular values at or below this are rounding, of the data (`own`), or of the squared matrix (`relative`)."""

    own: float
    relative: float

    @classmethod
    def of(cls, x: Rows, rows: np.ndarray) -> "_Tolerance":
        magnitude = max((float(np.abs(block).max()) for block in _blocks(x, rows)), default=0.0)
        own = np.finfo(x.dtype).eps * magnitude * np.sqrt(rows.size * x.shape[1])
        return cls(own, np.sqrt(np.finfo(np.float64).eps * max(rows.size, x.shape[1])))

    def __call__(self, largest: float) -> float:
        return max(largest * self.relative, self.own)
