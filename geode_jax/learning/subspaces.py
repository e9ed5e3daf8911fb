"""Centre and rank-d basis of every cell, for all rows and without each fold.

A cell of few rows estimates its covariance badly, and a small weight of its parent's helps: the parent's leading
directions enter as if they were rows of the cell (`python -m benchmarks.stage_one` shows the gain of this and of the
other choices).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.moments import MomentSums
from geode_jax.learning.small_cells import (
    Limits,
    Priors,
    Size,
    Stack,
    are_orthonormal,
    in_stacks,
    stack_by_moments,
    stack_by_rows,
)
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.folds import Holdout, Parts, each_fold, kept_rows
from geode_jax.rows.processes import ALONE, NUMBERS_AT_ONCE, Processes
from geode_jax.rows.products import BY_NUMPY, Products
from geode_jax.rows.view import Rows, is_in_memory

# Up to this size of the smaller side the eigenvectors of the Gram or moment matrix are exact and faster than a
# randomised SVD (and one matrix serves all folds).
EXACT_MAX_SIDE = 1500
# Of the randomised SVD in blocks of rows: vectors beyond the directions, and products with the scatter.
NUM_MORE, NUM_POWERS = 10, 5


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
# Given the number of a holdout, and a scatter that is added to that of the cell's rows.
LearnCell: TypeAlias = Callable[[int, Spectrum], Cell]


def learn_root(
    x: Rows,
    options: SubspaceOptions,
    folds: np.ndarray | None,
    holdouts: list[Holdout] | None = None,
    processes: Processes = ALONE,
) -> list[Cell]:
    """The centre of all rows and their covariance's leading directions, under each of the holdouts.

    Every tree has this root, and with many features it takes longer than any other cell: trees can share it.
    """
    holdouts = each_fold(folds, processes) if holdouts is None else holdouts
    whole = Partition.among(processes, 0, (np.arange(x.shape[0]),))
    nothing = Spectrum(np.zeros((x.shape[1], 0), x.dtype), np.zeros(0))
    cells = _Cells(x, whole, folds, holdouts, options.seed, [0])
    fewest = int(cells.num_kept[0].min())
    if fewest < 2:
        return [(centre, nothing) for centre in cells.centres(0)]
    learn_cell = cells.learner(0, min(options.max_rank, x.shape[1], fewest - 1))
    return parallel_map(lambda out: learn_cell(out, nothing), range(len(holdouts)), in_order=not processes.is_alone)


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
    processes = partition.processes
    holdouts = each_fold(folds, processes) if holdouts is None else holdouts
    max_rank, seed, parent_rows = options
    num_holdouts = len(holdouts)
    num_nodes, num_features = len(partition.cells), x.shape[1]
    centres, bases = out or empty_subspaces(num_holdouts, num_nodes, num_features, max_rank, x.dtype)
    ranks = np.zeros(num_nodes, dtype=np.int32)
    variances = np.zeros((num_holdouts, num_nodes, max_rank))
    # Dimension of the span of a cell's rows and of those it inherits from. Further directions would be rounding error;
    # in coordinates of the row space they would be directions of left-out rows alone.
    spanned = np.zeros(num_nodes, dtype=np.int32)
    present = np.flatnonzero(partition.is_present)
    learned = present if root is None else present[1:]
    cells = _Cells(x, partition, folds, holdouts, seed, learned.tolist())
    num_kept = cells.num_kept

    def num_inherited(node: int) -> int:
        return int(ranks[(node - 1) // 2]) if parent_rows > 0.0 and node > 0 else 0

    def bounded_rank(node: int) -> int:
        """The most directions the node's rows can have, noting how many they and its ancestors' span."""
        inherited, fewest = num_inherited(node), int(num_kept[node].min())
        spanned[node] = spanned[(node - 1) // 2] if inherited else fewest - 1
        return int(min(max_rank, num_features, fewest - 1 + inherited, spanned[node]))

    def learn(node: int) -> None:
        if num_kept[node].min() < 2:
            # One fold has (almost) the whole cell: without it there is nothing to learn directions from.
            centres[:, node] = cells.centres(node)
            if partition.depth > 0 and node > 0:  # without any row, no centre: that of the fold's own rows would be one
                has_none = num_kept[node] == 0
                centres[has_none, node] = centres[has_none, (node - 1) // 2]
            return
        parent, inherited = (node - 1) // 2, num_inherited(node)
        prior = [
            Spectrum(bases[out, parent, :, :inherited], parent_rows * variances[out, parent, :inherited])
            for out in range(num_holdouts)
        ]
        most = bounded_rank(node)
        learn_cell = _given(root) if root is not None and node == 0 else cells.learner(node, most)

        def learn_without(out: int) -> int:
            centre, scatter = learn_cell(out, prior[out])
            rank = scatter.variances.size
            centres[out, node] = centre
            bases[out, node, :, :rank] = scatter.directions
            weight = num_kept[node, out] + (parent_rows if inherited else 0.0)
            variances[out, node, :rank] = scatter.variances / weight
            return rank

        found = parallel_map(learn_without, range(num_holdouts), in_order=not processes.is_alone)
        rank = ranks[node] = min(found)
        if rank < max(found):
            bases[:, node, :, rank:], variances[:, node, rank:] = 0.0, 0.0

    def learn_stack(stack: list[int]) -> None:
        nodes = np.array(stack)
        parents = (nodes - 1) // 2
        inherited = np.array([num_inherited(node) for node in stack])
        num_extra = int(inherited.max())
        prior = Priors(
            bases[:, parents, :, :num_extra].swapaxes(0, 1).astype(np.float64),
            parent_rows * variances[:, parents, :num_extra].swapaxes(0, 1),
        )
        found = cells.stack(stack, np.array([bounded_rank(node) for node in stack]), prior)
        # directions that one of the holdouts lacks are dropped
        own = ranks[nodes] = found.ranks.min(axis=1)
        is_kept = np.arange(found.variances.shape[2]) < own[:, None]
        weight = num_kept[nodes] + np.where(inherited > 0, parent_rows, 0.0)[:, None]
        width = is_kept.shape[1]
        centres[:, nodes] = found.centres.swapaxes(0, 1)
        variances[:, nodes, :width] = (found.variances * is_kept[:, None, :] / weight[..., None]).swapaxes(0, 1)
        for node, rank, directions in zip(stack, own.tolist(), found.directions, strict=True):
            bases[:, node, :, :rank] = directions[:, :, :rank]

    def work(nodes: int | list[int]) -> None:
        learn(nodes) if isinstance(nodes, int) else learn_stack(nodes)

    for scale, at_scale in enumerate(np.split(present, np.searchsorted(present, 2 ** np.arange(1, 64) - 1))):
        cells.reach(scale)
        inherited = {node: num_inherited(node) for node in at_scale.tolist()}
        is_given = root is not None and scale == 0
        single, stacked = (inherited, []) if is_given else cells.by_size(inherited, max_rank)
        # parents first; the cells of a scale do not depend on each other
        parallel_map(work, [*single, *stacked], in_order=not processes.is_alone)
    return Subspaces(centres, bases, ranks)


def _given(root: list[Cell]) -> LearnCell:
    return lambda out, prior: root[out]


class _SmallCell(NamedTuple):
    """Rows of a cell, (n, D), those of other processes included, and their folds, (n,)."""

    x: np.ndarray
    folds: np.ndarray


class _Cells:
    """Learns the cells of a tree, each in the way that suits its shape: `nodes`, each once, parents first.

    `num_kept`, (K, H): how many rows of a cell each holdout keeps.
    """

    def __init__(
        self,
        x: Rows,
        partition: Partition,
        folds: np.ndarray | None,
        holdouts: list[Holdout],
        seed: int,
        nodes: list[int],
    ) -> None:
        self._x, self._partition, self._seed, self._folds, self._holdouts = x, partition, seed, folds, holdouts
        self._processes, self._nodes = partition.processes, nodes
        self._joined: dict[int, _SmallCell] = {}
        self._parts = Parts.of(x.shape[0], folds, holdouts, self._processes)
        own = np.zeros((len(partition.cells), len(holdouts)), dtype=int)
        for node in np.flatnonzero(partition.is_present).tolist():
            part = self._parts.of_row[partition.cell(node)]
            in_part = np.bincount(part[part >= 0], minlength=self._parts.number)
            own[node] = self._parts.is_kept @ in_part
        self.num_kept = self._processes.total(own)
        self._sums = MomentSums(x, partition, self._parts, [node for node in nodes if self._is_by_moments(node)])

    def _is_by_moments(self, node: int) -> bool:
        return self._x.shape[1] <= min(self._partition.size(node), EXACT_MAX_SIDE)

    def _kept(self, node: int) -> list[np.ndarray]:
        """The mask of the cell's rows under every holdout."""
        return kept_rows(self._partition.cell(node), self._folds, self._holdouts)

    def reach(self, scale: int) -> None:
        """To be called before the cells of a scale are learned."""
        self._sums.reach(scale)
        if not self._processes.is_alone:  # few sums over processes instead of one for every cell
            at_scale = [node for node in self._nodes if (node + 1).bit_length() - 1 == scale]
            nodes = [node for node in at_scale if self._is_small(node)]
            if nodes and sum(self._partition.size(node) for node in nodes) * self._x.shape[1] <= NUMBERS_AT_ONCE:
                self._joined |= self._join(nodes)

    def _is_small(self, node: int) -> bool:
        """Whether a cell is learned from a Gram matrix of its rows."""
        return not self._is_by_moments(node) and min(self._partition.size(node), self._x.shape[1]) <= EXACT_MAX_SIDE

    def _join(self, nodes: list[int]) -> dict[int, "_SmallCell"]:
        """Everyone's rows of some cells, so few that every process can hold them, with their folds."""
        cells = [self._partition.cell(node) for node in nodes]
        rows = np.concatenate(cells)
        x = self._processes.joined(self._x[rows])
        folds = np.full(rows.size, -1) if self._folds is None else self._folds[rows]
        number, folds = self._processes.joined(
            np.stack([np.repeat(np.arange(len(cells)), [cell.size for cell in cells]), folds], axis=1)
        ).T
        own = [np.flatnonzero(number == place) for place in range(len(cells))]
        return {node: _SmallCell(x[at], folds[at]) for node, at in zip(nodes, own, strict=True)}

    def by_size(self, inherited: dict[int, int], rank: int) -> tuple[list[int], list[list[int]]]:
        """Nodes that are learned one by one, and small ones by the stack: of cells that inherit so many directions.

        All are learned one by one where several processes have rows of each.
        """
        by_kind: tuple[dict[int, Size], ...] = ({}, {})
        num_features = self._x.shape[1]
        for node, num_extra in inherited.items():
            size, is_by_moments = self._partition.size(node), self._is_by_moments(node)
            has_rows = self.num_kept[node].min() >= 2
            if self._processes.is_alone and has_rows and (is_by_moments or self._is_small(node)):
                by_kind[is_by_moments][node] = Size(min(size, num_features), num_extra)
        found = [stack for kind in by_kind for stack in in_stacks(kind, num_features, len(self._holdouts), rank)]
        stacked = {node for stack in found for node in stack}
        return [node for node in inherited if node not in stacked], found

    def stack(self, nodes: list[int], ranks: np.ndarray, priors: Priors) -> Stack:
        """The nodes of one of the stacks, with at most as many directions as `ranks`."""
        if self._is_by_moments(nodes[0]):
            sums = [self._sums.take(node) for node in nodes]
            limits = self._limits(nodes, ranks, [one.largest for one in sums])
            return stack_by_moments(sums, self._parts.is_kept, priors, limits)
        cells = [self._partition.cell(node) for node in nodes]
        parts = [self._parts.of_row[cell] for cell in cells]
        rows = [self._x[cell[part >= 0]] for cell, part in zip(cells, parts, strict=True)]
        kept = [self._parts.is_kept[:, part[part >= 0]] for part in parts]
        limits = self._limits(nodes, ranks, [_largest([own]) for own in rows])
        return stack_by_rows(rows, kept, priors, limits)

    def _limits(self, nodes: list[int], ranks: np.ndarray, largest: list[float]) -> Limits:
        found = [
            Tolerance.of(self._x, self._partition.size(node), value) for node, value in zip(nodes, largest, strict=True)
        ]
        return Limits(ranks, np.array([one.own for one in found]), np.array([one.relative for one in found]))

    def centres(self, node: int) -> np.ndarray:
        """The mean of the cell's rows under every holdout, (H, D); that of all of them where a holdout keeps none."""
        self._joined.pop(node, None)
        cell, num_rows = self._x[self._partition.cell(node)], self._partition.size(node)
        if self._processes.is_alone:
            return np.stack([cell[mask].mean(axis=0) if mask.any() else cell.mean(axis=0) for mask in self._kept(node)])
        sums = [cell[mask].sum(axis=0, dtype=np.float64) for mask in self._kept(node)]
        total = self._processes.total(np.stack([*sums, cell.sum(axis=0, dtype=np.float64)]))
        count = self.num_kept[node][:, None]
        return np.where(count > 0, total[:-1] / np.maximum(count, 1), total[-1] / num_rows)

    def learner(self, node: int, rank: int) -> LearnCell:
        """A function that finds a cell's centre and at most `rank` leading directions, for a holdout and a prior.

        It is called for one holdout at a time, so that results need not all be held.
        """
        x, rows, size = self._x, self._partition.cell(node), self._partition.size(node)
        if self._is_by_moments(node):
            sums = self._sums.take(node)
            tolerance = Tolerance.of(x, size, sums.largest)

            def learn(out: int, prior: Spectrum) -> Cell:
                mean, scatter = sums.kept(self._parts.is_kept[out])
                return mean, _leading(scatter, prior, rank, tolerance)

            return learn
        kept, seed = self._kept(node), self._seed + node
        by_mask: Callable[[np.ndarray, Spectrum], Cell]
        if min(size, x.shape[1]) > EXACT_MAX_SIDE:
            if self._processes.is_alone and is_in_memory(x):
                by_mask = functools.partial(_randomised, x, rows, rank, seed)
            else:  # rows of files may be larger than memory
                by_mask = functools.partial(_randomised_in_blocks, x, rows, rank, seed, self._processes)
        elif self._processes.is_alone:
            by_mask = _by_gram(x, rows, rank, self._processes.products)
        else:
            cell = self._joined.pop(node, None) or self._join([node])[node]
            everyones = np.arange(size)
            # by every process, which must all find the same to the last bit: devices need not
            by_mask = _by_gram(cell.x, everyones, rank, BY_NUMPY)
            kept = kept_rows(everyones, None if self._folds is None else cell.folds, self._holdouts)
        return lambda out, prior: by_mask(kept[out], prior)


def _as_columns(spectrum: Spectrum, features: slice = slice(None)) -> np.ndarray:
    """Pseudo-rows whose scatter is the spectrum, as columns: the given features of them, (D', r) in float64."""
    return np.sqrt(spectrum.variances) * spectrum.directions[features]


def _randomised(
    x: Rows, rows: np.ndarray, rank: int, seed: int, mask: np.ndarray, prior: Spectrum
) -> tuple[np.ndarray, Spectrum]:
    cell = x[rows[mask]]
    tolerance = Tolerance.of(cell, len(cell), _largest([cell]))
    centre = cell.mean(axis=0, dtype=np.float64)
    cell -= centre.astype(cell.dtype)
    stacked = np.concatenate([cell, _as_columns(prior).T.astype(cell.dtype)]) if prior.variances.size else cell
    _, singular, right = randomized_svd(stacked, rank, n_iter=4, random_state=seed)
    useful = singular > tolerance(singular[0])
    return centre, Spectrum(right[useful].T, np.square(singular[useful], dtype=np.float64))


def _randomised_in_blocks(
    x: Rows, rows: np.ndarray, rank: int, seed: int, processes: Processes, mask: np.ndarray, prior: Spectrum
) -> tuple[np.ndarray, Spectrum]:
    """:func:`_randomised` that reads a few rows at a time, several times, of one or several processes.

    Processes exchange products with as many vectors as directions.

    A range finder for the scatter (Halko, Martinsson & Tropp 2011, algorithm 4.4), which is never made.
    """
    cell = rows[mask]
    counts = processes.total(np.array([cell.size]))
    sums = sum((block.sum(axis=0, dtype=np.float64) for block in _blocks(x, cell)), np.zeros(x.shape[1]))
    centre = processes.total(sums) / counts[0]
    tolerance = Tolerance.of(x, int(counts[0]), float(processes.each(np.array(_largest(_blocks(x, cell)))).max()))

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
    found = _leading(vectors.T @ scatter_times(vectors), Spectrum(np.zeros((0, 0)), np.zeros(0)), rank, tolerance)
    return centre, Spectrum((vectors @ found.directions).astype(x.dtype), found.variances)


def _leading(scatter: np.ndarray, prior: Spectrum, rank: int, tolerance: "Tolerance") -> Spectrum:
    """The leading directions of a scatter, (D, D), and a prior one."""
    if prior.variances.size:
        scatter = scatter + (prior.directions * prior.variances) @ prior.directions.T
    values, vectors = _leading_eigenpairs(scatter, rank)
    useful = values > tolerance(np.sqrt(max(values[0], 0.0))) ** 2
    return Spectrum(vectors[:, useful], values[useful])


def _blocks(x: Rows, rows: np.ndarray) -> Iterator[np.ndarray]:
    return (x[rows[some]] for some in slices(rows.size, x.shape[1]))


def _largest(blocks: Iterable[np.ndarray]) -> float:
    return max((max(float(block.max()), -float(block.min())) for block in blocks), default=0.0)  # no copies


def _mean(x: Rows, rows: np.ndarray) -> np.ndarray:
    total = sum((block.sum(axis=0, dtype=np.float64) for block in _blocks(x, rows)), np.zeros(x.shape[1]))
    return total / rows.size


def _by_gram(x: Rows, rows: np.ndarray, rank: int, products: Products) -> Callable[[np.ndarray, Spectrum], Cell]:
    """Eigenvectors of the Gram matrix of the rows, which is computed once for all folds."""
    tolerance = Tolerance.of(x, rows.size, _largest(_blocks(x, rows)))
    origin = _mean(x, rows)

    def columns() -> Iterator[tuple[slice, np.ndarray]]:
        """Centred features in float64, a few at a time: no copy of the rows is made."""
        for some in products.blocks(x.shape[1], rows.size):
            yield some, x[rows, some] - origin[some]

    gram = sum((products.inner(block) for _, block in columns()), np.zeros(()))

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
