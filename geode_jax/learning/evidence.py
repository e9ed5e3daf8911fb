"""How well a dictionary describes held-out rows: the criterion of all choices in stage one.

It is the likelihood of a quick version of the model: a mixture with one variance per node and direction and one noise
level per scale, fitted by EM to cross-fitted statistics. A row is judged without its own part in variances and weights:
in small cells they would else fit it the better, the more directions there are. Differences between dictionaries
predict those of the full model on held-out data (`python -m benchmarks.choices`), at a small part of the cost. For rows
with missing features, residuals are over the observed features, and coordinates are those of the filled row.
"""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import special

from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.processes import ALONE, Processes, sample_part
from geode_jax.rows.row_space import Axes
from geode_jax.rows.training import Training
from geode_jax.rows.unseen import Unseen

NUM_STEPS = 25
# The mixture is fitted to at most this many rows; the dictionary is learned from all.
LARGEST_SAMPLE = 4000
# Least number of sampled rows per node, for a balanced tree.
FEWEST_SAMPLED = 20
# Variances are shrunk towards the noise as if every node had this many more rows of noise.
PRIOR_ROWS = 3.0
# A row with a smaller share of a node leaves the node's variances as they are.
NEGLIGIBLE = 1e-4
# Blocks of rows wider than this have as many rows as blocks of this width, so that a basis is read once for many rows.
WIDEST = 4096
# Of rows with missing features, in coordinates of a row space or whitened: numbers of the residuals that are multiplied
# together, and of a block of products with the axes. The more, the fewer times axes and residuals are read from memory.
RESIDUAL_NUMBERS, PRODUCT_NUMBERS = 2**24, 2**21


class HeldOutStatistics(NamedTuple):
    """Statistics of m rows at the present `nodes` (K',), from dictionaries that have not seen them.

    `residual` (K', m): squared distance from the subspace. `squared` (K', m, d): squared coordinates.
    `has_direction` (K', d): directions that a node has. `num_observed`, (m,): the row's number of observed features,
    out of `num_features`.
    """

    nodes: np.ndarray
    residual: np.ndarray
    squared: np.ndarray
    has_direction: np.ndarray
    num_observed: np.ndarray
    num_features: int


class QuickMixture(NamedTuple):
    """Parameters at the present `nodes`: log weights and noise variances (K',), variances along directions (K', d).

    The noise, one for each scale, was estimated from the nodes' sums of squared residuals, `residual`, and their
    degrees of freedom, `freedom`, (K',) each. Cells side by side share it as nodes of these numbers would: one for all
    of them, or one for each, chose the noise scales of features no better in trials on training rows.
    """

    nodes: np.ndarray
    log_weight: np.ndarray
    noise: np.ndarray
    variance: np.ndarray
    has_direction: np.ndarray
    residual: np.ndarray
    freedom: np.ndarray

    def of_complete_rows(self, num_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """C (K',), p (K',) and q (K', d): `log_densities` of complete rows are ``c - p residual - squared @ q``."""
        ratio = np.where(self.has_direction, self.variance / self.noise[:, None], 1.0)
        spread = num_features * np.log(2 * np.pi * self.noise) + np.log(ratio).sum(axis=1)
        return self.log_weight - 0.5 * spread, 0.5 / self.noise, 0.5 * self.has_direction / self.variance

    def log_densities(self, rows: HeldOutStatistics) -> np.ndarray:
        """``log pi + log N`` of rows at the nodes, (K', m), from their statistics there."""
        ratio = np.where(self.has_direction, self.variance / self.noise[:, None], 1.0)
        # a direction's signal is in proportion to the share of features that are observed
        counts, which = np.unique(rows.num_observed, return_inverse=True)
        spread = np.stack(
            [np.log1p((ratio - 1.0) * (count / rows.num_features)).sum(axis=1) for count in counts], axis=1
        )
        constant = np.log(2 * np.pi * self.noise)[:, None] * rows.num_observed + spread[:, which]
        precision = (self.has_direction / self.variance).astype(rows.squared.dtype)  # not a copy of the rows in float64
        along = _matmul(rows.squared, precision[:, :, None])[:, :, 0]
        return self.log_weight[:, None] - 0.5 * (constant + rows.residual / self.noise[:, None] + along)


class Gain(NamedTuple):
    """Gain of one dictionary over another in held-out log likelihood per row, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, differences: np.ndarray) -> "Gain":
        """Mean and standard error of differences in log likelihood, (m,). One or two of them make nothing clear."""
        mean = float(differences.mean())
        return cls(mean, float(differences.std() / np.sqrt(differences.size)) if differences.size > 2 else abs(mean))

    @property
    def is_clear(self) -> bool:
        """Whether it is positive by more than two standard errors."""
        return self.mean > 2.0 * self.error

    @property
    def least(self) -> float:
        """What it surely is: two standard errors less than its mean, at least 0."""
        return max(0.0, self.mean - 2.0 * self.error)


class Evidence(NamedTuple):
    """How well a dictionary describes a sample of the rows: a mixture fitted to their cross-fitted statistics."""

    mixture: QuickMixture
    rows: HeldOutStatistics

    def log_likelihood(self) -> np.ndarray:
        """Log density of every row, (m,), under variances and weights without the row's own part in them.

        The noise of a scale, which comes from many rows, is that of all.
        """
        rows = self.rows
        share = special.softmax(self.mixture.log_densities(rows), axis=0)
        mixture, count = _m_step(rows, share), share.sum(axis=1)
        density = mixture.log_densities(rows)

        def leave_out(node: int) -> None:
            some = np.flatnonzero(share[node] > NEGLIGIBLE)
            own, squared = share[node, some], rows.squared[node, some].astype(np.float64)
            left, noise = count[node] - own, mixture.noise[node]
            # in float64: of a node that one row has nearly to itself, next to nothing is left
            total = np.einsum("i,ij->j", share[node], rows.squared[node], dtype=np.float64)
            variance = _variance(total - own[:, None] * squared, left, np.full(some.size, noise))
            known = (rows.num_observed[some] / rows.num_features)[:, None]

            def cost(variance: np.ndarray) -> np.ndarray:
                return (np.log1p((variance / noise - 1.0) * known) + squared / variance).sum(axis=1)

            change = _log_weight(left, share.shape) - mixture.log_weight[node]
            density[node, some] += change - 0.5 * (cost(variance) - cost(mixture.variance[node]))

        parallel_map(leave_out, range(rows.nodes.size))
        return special.logsumexp(density, axis=0)

    def needed_rank(self) -> int:
        """Directions per node that the rows support, times 1.5: further ones would be shrunk to the noise.

        The supported rank is the one with the highest log likelihood less the number of variances, with later
        directions counted as noise (Akaike's criterion, as the mixture is fitted to the rows on which it is judged).
        """
        rows = self.rows
        share = special.softmax(self.mixture.log_densities(rows), axis=0)
        largest = rows.squared.shape[2]
        best, needed = -np.inf, largest
        for rank in reversed(_growing(largest)):
            # the observed part of a direction is in proportion to the share of observed features
            dropped = rows.squared[..., rank:].sum(axis=2) * (rows.num_observed / rows.num_features)
            rows = rows._replace(
                residual=rows.residual + dropped,
                squared=rows.squared[..., :rank],
                has_direction=rows.has_direction[:, :rank],
            )
            log_likelihood = special.logsumexp(_m_step(rows, share).log_densities(rows), axis=0).sum()
            found = log_likelihood - rows.has_direction.sum()
            if found > best:
                best, needed = found, rank
        return min(largest, -(-3 * needed // 2))


def _growing(largest: int) -> list[int]:
    """1, 2, 3, 5, 8, ... to `largest`."""
    ranks = [1]
    while ranks[-1] < largest:
        ranks.append(min(largest, -(-3 * ranks[-1] // 2)))
    return ranks


def cross_fitted_evidence(training: Training, partition: Partition, subspaces: Subspaces) -> Evidence:
    """The evidence of (a sample of) the rows that are in a fold, from dictionaries that left their folds out."""
    rows = judged_rows(training.own_folds, training.processes)
    return evidence_of(training.taken(rows), rows, partition, subspaces)


def evidence_of(judged: Training, rows: np.ndarray, partition: Partition, subspaces: Subspaces) -> Evidence:
    """:func:`cross_fitted_evidence` from the judged rows alone.

    `rows`: the indices in the partition of those among them that this process holds.
    """
    nodes = np.flatnonzero(partition.is_present)
    if partition.depth > 0 and partition.cells[0] is not None and partition.size(0) > LARGEST_SAMPLE:
        # deeper nodes have too few rows of the sample
        nodes = nodes[_scale_of(nodes) <= np.log2(LARGEST_SAMPLE / FEWEST_SAMPLED)]
    return _fit(judged, rows, partition, subspaces, nodes)


def judged_rows(folds: np.ndarray, processes: Processes = ALONE) -> np.ndarray:
    """Indices of the rows on which :func:`cross_fitted_evidence` judges."""
    return processes.sample(np.flatnonzero(folds >= 0), LARGEST_SAMPLE)


def fit_quick_mixture(training: Training, partition: Partition, subspaces: Subspaces) -> QuickMixture:
    """The mixture alone; fitted to in-sample statistics if the rows have no folds."""
    nodes = np.flatnonzero(partition.is_present)
    folds, processes = training.folds, training.processes
    all_rows = np.arange(training.x.shape[0])
    rows = processes.sample(all_rows, LARGEST_SAMPLE) if folds is None else judged_rows(folds, processes)
    return _fit(training.taken(rows), rows, partition, subspaces, nodes).mixture


def _fit(judged: Training, rows: np.ndarray, partition: Partition, subspaces: Subspaces, nodes: np.ndarray) -> Evidence:
    """Fit the mixture at the given nodes by EM, started from the tree's cells."""
    num_rows = judged.x.shape[0]
    residual, squared = statistics_at(judged, np.arange(num_rows), subspaces, nodes)
    seen, num_features = judged.is_observed, judged.num_features
    held_out = HeldOutStatistics(
        nodes,
        residual,
        squared,
        has_direction=np.arange(squared.shape[2]) < subspaces.ranks[nodes][:, None],
        num_observed=np.full(num_rows, num_features) if seen is None else seen.sum(axis=1),
        num_features=num_features,
    )
    is_inside = np.stack([np.isin(rows, partition.cells[node]) for node in nodes], axis=1)
    share = partition.processes.joined(is_inside).T.astype(np.float64, order="C")
    share /= share.sum(axis=0)
    for _ in range(NUM_STEPS):
        mixture = _m_step(held_out, share)
        share = special.softmax(mixture.log_densities(held_out), axis=0)
    return Evidence(mixture, held_out)


def _m_step(rows: HeldOutStatistics, share: np.ndarray) -> QuickMixture:
    """The M step, given the responsibilities `share`, (K', m)."""
    count = share.sum(axis=1)
    freedom_per_feature = 1.0 - rows.has_direction.sum(axis=1) / rows.num_features
    freedom = freedom_per_feature * (share @ rows.num_observed)
    residual = (share * rows.residual).sum(axis=1)
    noise = _noise(rows.nodes, residual, freedom)
    second = _matmul(share.astype(rows.squared.dtype)[:, None, :], rows.squared)[:, 0, :]
    variance = _variance(second, count, noise)
    log_weight = _log_weight(count, share.shape)
    return QuickMixture(rows.nodes, log_weight, noise, variance, rows.has_direction, residual, freedom)


def _log_weight(count: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Log weights of nodes that have so many rows, of K' nodes and m rows in all."""
    num_nodes, num_rows = shape
    return np.log((count + 0.5) / (num_rows + 0.5 * num_nodes))


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b``, with NumPy's warning of an invalid value only where the product holds one.

    OpenBLAS sometimes makes NumPy warn of finite products too (OpenBLAS issue 1924, NumPy issue 24067).
    """
    with np.errstate(invalid="ignore"):
        product = np.matmul(a, b)
    if np.isnan(product).any():
        warnings.warn("invalid value encountered in matmul", RuntimeWarning, stacklevel=2)
    return product


def cell_mixture(training: Training, partition: Partition, subspaces: Subspaces) -> QuickMixture:
    """The mixture of the tree's cells, in which every row counts once at every scale: no EM.

    In a tree with many nodes, the few thousand rows given to EM determine the deep nodes badly. This mixture uses all
    rows of a cell (a sample of `LARGEST_SAMPLE` if there are more).
    """
    nodes, processes = np.flatnonzero(partition.is_present), training.processes
    ranks, num_features, is_observed = subspaces.ranks[nodes], training.num_features, training.is_observed
    before, count = processes.before_and_total(np.array([partition.cell(node).size for node in nodes.tolist()]))

    def moments(number: int) -> tuple[float, np.ndarray, float, int]:
        node = int(nodes[number])
        rows = sample_part(partition.cell(node), LARGEST_SAMPLE, before[number], count[number])
        residual, squared = statistics_at_node(training, rows, subspaces, node)
        seen = float(rows.size * num_features if is_observed is None else is_observed[rows].sum())
        return float(residual.sum(dtype=np.float64)), squared.sum(axis=0, dtype=np.float64), seen, rows.size

    found = zip(*parallel_map(moments, range(nodes.size)), strict=True)
    off, along, seen, used = (processes.total(np.asarray(values)) for values in found)
    # sampled rows stand for all rows of their cell
    weight = count / used
    residual = weight * off
    freedom = weight * seen * (1.0 - ranks / num_features)
    noise = _noise(nodes, residual, freedom)
    has_direction = np.arange(along.shape[1]) < ranks[:, None]
    variance = _variance(along, used, noise)
    log_weight = np.log(count / count.sum())
    return QuickMixture(nodes, log_weight, noise, variance, has_direction, residual, freedom)


def residuals_of_scales(mixture: QuickMixture, num_scales: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squared residuals that a mixture's noise comes from, and their degrees of freedom, (S,) each."""
    scale, residual, freedom = _scale_of(mixture.nodes), mixture.residual, mixture.freedom
    return np.bincount(scale, residual, num_scales), np.bincount(scale, freedom, num_scales)


def _scale_of(nodes: np.ndarray) -> np.ndarray:
    return np.floor(np.log2(nodes + 1)).astype(int)


def _noise(nodes: np.ndarray, residual: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Noise variance of every node's scale, from sums of squares and their degrees of freedom at the nodes."""
    scale = _scale_of(nodes)
    # one degree of freedom of unit variance keeps the noise of empty scales defined
    return ((np.bincount(scale, residual) + 1.0) / (np.bincount(scale, freedom) + 1.0))[scale]


def _variance(second: np.ndarray, count: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Variances along directions from sums of squares, shrunk towards the noise and never below it."""
    noise = noise[:, None]
    return np.maximum((second + PRIOR_ROWS * noise) / (count[:, None] + PRIOR_ROWS), noise)


def statistics_at(
    training: Training, rows: np.ndarray, subspaces: Subspaces, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared residuals (K', m), over the observed features, and squared coordinates (K', m, d) of some rows.

    From the dictionaries without the rows' folds; from that of all rows if the rows have no folds.
    """
    seen, axes, unseen = training.is_observed, training.axes, training.unseen
    if unseen is None and seen is not None and axes is not None:
        return _statistics_in_row_space(training, axes, rows, subspaces, nodes)
    residual = np.zeros((nodes.size, rows.size), dtype=training.x.dtype)
    squared = np.zeros((nodes.size, rows.size, subspaces.bases.shape[3]), dtype=training.x.dtype)
    if unseen is not None:
        width = nodes.size * unseen.missing.shape[1] + 3 * training.x.shape[1]
        for some in slices(rows.size, width, numbers=RESIDUAL_NUMBERS):
            _add_whitened(training, unseen, rows[some], subspaces, nodes, (residual[:, some], squared[:, some]))
        return residual, squared

    def fill(index: int) -> None:
        residual[index], squared[index] = statistics_at_node(training, rows, subspaces, int(nodes[index]))

    parallel_map(fill, range(nodes.size))
    return residual, squared


def _statistics_in_row_space(
    training: Training, axes: Axes, rows: np.ndarray, subspaces: Subspaces, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`statistics_at`: as of complete rows, over all features; then residuals of the others."""
    seen = training.mask
    residual, squared = statistics_at(training._replace(is_observed=None), rows, subspaces, nodes)
    is_partial = np.zeros(rows.size, dtype=bool)
    for some in slices(rows.size, seen.shape[1]):
        is_partial[some] = ~seen[rows[some]].all(axis=1)
    partial = np.flatnonzero(is_partial)
    for some in slices(partial.size, nodes.size * training.x.shape[1], numbers=RESIDUAL_NUMBERS):
        at = partial[some]
        left = _residuals_at(training, rows[at], subspaces, nodes)
        residual[:, at] = _observed_squares(left, seen[rows[at]], axes)
    return residual, squared


def _residuals_at(training: Training, rows: np.ndarray, subspaces: Subspaces, nodes: np.ndarray) -> np.ndarray:
    """Residuals of some rows off the subspaces of some nodes, (K', m, d')."""
    residuals = np.zeros((nodes.size, rows.size, training.x.shape[1]), dtype=training.x.dtype)

    def fill(index: int) -> None:
        for _, block, left, _ in _blocks_at_node(training, rows, subspaces, int(nodes[index])):
            residuals[index, block] = left

    parallel_map(fill, range(nodes.size))
    return residuals


def statistics_at_node(
    training: Training, rows: np.ndarray, subspaces: Subspaces, node: int
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`statistics_at` one node, (m,) and (m, d)."""
    seen = training.is_observed
    if seen is not None and (training.axes is not None or training.unseen is not None):
        own, along = statistics_at(training, rows, subspaces, np.array([node]))
        return own[0], along[0]
    residual = np.zeros(rows.size, dtype=training.x.dtype)
    squared = np.zeros((rows.size, subspaces.bases.shape[3]), dtype=training.x.dtype)
    for _, block, left, along in _blocks_at_node(training, rows, subspaces, node):
        error = np.square(left, out=left)
        residual[block] = (error if seen is None else error * seen[rows[block]]).sum(axis=1)
        squared[block] = np.square(along)
    return residual, squared


def _blocks_at_node(
    training: Training, rows: np.ndarray, subspaces: Subspaces, node: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """A few rows of one holdout at a time: its number, which, (b,), their residuals, (b, d'), and coordinates, (b, d).

    In blocks, as a node may have most of the rows, and two temporary arrays of that size are needed.
    """
    x, holdout = training.x, training.holdouts_of(rows)
    for number in np.flatnonzero(np.bincount(holdout)).tolist():
        centre, basis = subspaces.centres[number, node], subspaces.bases[number, node]
        inside = np.flatnonzero(holdout == number)
        for some in slices(inside.size, min(x.shape[1], WIDEST)):
            centred = x[rows[inside[some]]] - centre
            coordinates = centred @ basis
            centred -= coordinates @ basis.T
            yield number, inside[some], centred, coordinates


def _add_whitened(
    training: Training,
    unseen: Unseen,
    rows: np.ndarray,
    subspaces: Subspaces,
    nodes: np.ndarray,
    out: tuple[np.ndarray, np.ndarray],
) -> None:
    """:func:`statistics_at` of whitened rows, written to `out`: of residuals, less their part that a row hides."""
    (residual, squared), dtype, rank = out, training.x.dtype, subspaces.bases.shape[3]
    place = unseen.place[rows]
    partial = np.flatnonzero(place >= 0)
    number_of = np.cumsum(place >= 0) - 1
    missing = unseen.missing[place[partial]]
    turned_rows = unseen.turned_each(rows[partial], training.x[rows[partial]])
    turned = np.zeros((partial.size, nodes.size, missing.shape[1]), dtype)  # residuals times W, at missing features

    def fill(index: int) -> None:
        node = int(nodes[index])
        for number, block, left, along in _blocks_at_node(training, rows, subspaces, node):
            squared[index, block] = np.square(along)
            residual[index, block] = np.square(left).sum(axis=1)
            inside = np.flatnonzero(place[block] >= 0)
            if inside.size == 0:
                continue
            block, left, along = block[inside], left[inside], along[inside]
            own = number_of[block]
            matrix = unseen.matrix(unseen.which[place[block[0]]], dtype)
            basis = subspaces.bases[number, node]
            if block.size <= rank:
                found = left @ matrix
            else:  # a product with the basis, not with each row
                found = turned_rows[own] - subspaces.centres[number, node] @ matrix
                found -= along @ (matrix @ basis).T
            turned[own, index] = np.take_along_axis(found, missing[own], axis=1)

    def take_off(some: slice) -> None:
        at = partial[some]
        residual[:, at] -= np.minimum(unseen.squares(rows[at], turned[some]), residual[:, at])

    parallel_map(fill, range(nodes.size))
    parallel_map(take_off, slices(partial.size, unseen.numbers + nodes.size * missing.shape[1]))


def _observed_squares(vectors: np.ndarray, seen: np.ndarray, axes: Axes) -> np.ndarray:
    """Squared norms over the observed features, `seen` (m, D), of vectors in coordinates (K', m, q): (K', m)."""
    flat = vectors.reshape(-1, vectors.shape[2])

    def over(some: slice) -> np.ndarray:
        squares = np.square(flat @ axes.matrix[some, : flat.shape[1]].T)
        squares = squares.reshape(*vectors.shape[:2], squares.shape[1])
        return np.einsum("kmf,mf->km", squares, seen[:, some].astype(squares.dtype))

    parts = parallel_map(over, slices(seen.shape[1], flat.shape[0], numbers=PRODUCT_NUMBERS))
    return np.sum(parts, axis=0)
