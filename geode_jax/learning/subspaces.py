"""Centre and rank-d basis of every cell, for all rows and without each fold.

A cell of few rows estimates its covariance badly, and a small weight of its parent's helps: the parent's leading
directions enter as if they were rows of the cell (`python -m benchmarks.stage_one` shows the gain of this and of the
other choices).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.decompositions import (
    EXACT_MAX_SIDE,
    Cell,
    Spectrum,
    Tolerance,
    by_gram,
    largest_of,
    leading,
    randomised,
    randomised_in_blocks,
)
from geode_jax.learning.moments import MomentSums
from geode_jax.learning.small_cells import (
    Limits,
    Priors,
    Size,
    Stack,
    in_stacks,
    stack_by_moments,
    stack_by_rows,
)
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import Holdout, Parts, each_fold, kept_rows
from geode_jax.rows.processes import ALONE, NUMBERS_AT_ONCE, Processes
from geode_jax.rows.products import BY_NUMPY
from geode_jax.rows.row_space import Axes
from geode_jax.rows.view import Rows, is_in_memory


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

    def leading(self, rank: int) -> "Subspaces":
        """The same with at most `rank` directions per node."""
        return Subspaces(self.centres, self.bases[..., :rank], np.minimum(self.ranks, rank))

    def in_features(self, axes: Axes, is_needed: np.ndarray) -> "Subspaces":
        """Dictionaries in coordinates of a row space, in R^D: those that are needed, (H, K); the others are zero."""
        num_holdouts, num_nodes, _, max_rank = self.bases.shape
        centres, bases = empty_subspaces(num_holdouts, num_nodes, len(axes.matrix), max_rank, self.bases.dtype)
        centres[is_needed] = axes.points(self.centres[is_needed])

        def map_basis(place: tuple[int, int]) -> None:
            axes.directions(self.bases[place], out=bases[place])

        parallel_map(map_basis, zip(*(index.tolist() for index in np.nonzero(is_needed)), strict=True))
        return Subspaces(centres, bases, self.ranks)


def empty_subspaces(
    num_holdouts: int, num_nodes: int, num_features: int, max_rank: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Zeros for centres, (H, K, D), and bases, (H, K, D, d)."""
    shape = (num_holdouts, num_nodes, num_features)
    return aligned_zeros(shape, dtype), aligned_zeros((*shape, max_rank), dtype)


def with_common_ranks(centres: np.ndarray, bases: np.ndarray, ranks: np.ndarray) -> Subspaces:
    """Dictionaries whose holdouts have their own `ranks`, (H, K): directions that one lacks are dropped, in place."""
    common = ranks.min(axis=0)
    for node in np.flatnonzero(common < ranks.max(axis=0)):
        bases[:, node, :, common[node] :] = 0.0
    return Subspaces(centres, bases, common)


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
        limits = self._limits(nodes, ranks, [largest_of([own]) for own in rows])
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
                return mean, leading(scatter, prior, rank, tolerance)

            return learn
        kept, seed = self._kept(node), self._seed + node
        by_mask: Callable[[np.ndarray, Spectrum], Cell]
        if min(size, x.shape[1]) > EXACT_MAX_SIDE:
            if self._processes.is_alone and is_in_memory(x):
                by_mask = functools.partial(randomised, x, rows, rank, seed)
            else:  # rows of files may be larger than memory
                by_mask = functools.partial(randomised_in_blocks, x, rows, rank, seed, self._processes)
        elif self._processes.is_alone:
            by_mask = by_gram(x, rows, rank, self._processes.products)
        else:
            cell = self._joined.pop(node, None) or self._join([node])[node]
            everyones = np.arange(size)
            # by every process, which must all find the same to the last bit: devices need not
            by_mask = by_gram(cell.x, everyones, rank, BY_NUMPY)
            kept = kept_rows(everyones, None if self._folds is None else cell.folds, self._holdouts)
        return lambda out, prior: by_mask(kept[out], prior)
