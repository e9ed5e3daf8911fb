"""How well a dictionary describes rows that it has not seen: what choices in stage one are made by.

The mixture of the model with one variance per node and direction and one noise level per scale, fitted by a few steps
of EM to cross-fitted statistics. On held-out data its differences between dictionaries predict those of the full model
(`python -m benchmarks.choices`), for a small part of the cost. Rows with missing features count by the observed ones,
at the coordinates of what they were filled with.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from geode_jax._runtime.threads import each
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.view import Rows, taken

NUM_STEPS = 25
# Rows beyond this many are left out of the fit, not of the dictionary.
LARGEST_SAMPLE = 4000
# Rows of the sample that a node of a balanced tree should have.
FEWEST_SAMPLED = 20
# Rows of noise that every node's variances are shrunk by.
PRIOR_ROWS = 3.0
# Wider rows come as many at a time as rows of so many features: a basis is to be read once for many of them.
WIDEST = 4096


class QuickMixture(NamedTuple):
    """Parameters at the present `nodes`: log weights and noise variances (K',), variances along directions (K', d)."""

    nodes: np.ndarray
    log_weight: np.ndarray
    noise: np.ndarray
    variance: np.ndarray
    has_direction: np.ndarray

    def log_densities(
        self, residual: np.ndarray, squared: np.ndarray, num_observed: np.ndarray, num_features: int
    ) -> np.ndarray:
        """``log pi + log N`` of rows at the nodes, (K', n), from their statistics there."""
        ratio = np.where(self.has_direction, self.variance / self.noise[:, None], 1.0)
        # a direction is seen through the share of features that is observed
        counts, which = np.unique(num_observed, return_inverse=True)
        spread = np.stack([np.log1p((ratio - 1.0) * (count / num_features)).sum(axis=1) for count in counts], axis=1)
        constant = np.log(2 * np.pi * self.noise)[:, None] * num_observed + spread[:, which]
        precision = (self.has_direction / self.variance).astype(squared.dtype)  # not a copy of the rows in float64
        along = np.matmul(squared, precision[:, :, None])[:, :, 0]
        return self.log_weight[:, None] - 0.5 * (constant + residual / self.noise[:, None] + along)


class Evidence(NamedTuple):
    """What a sample of the rows says of a dictionary: a mixture fitted to their cross-fitted statistics.

    `residual` (K', m), `squared` (K', m, d): the statistics. `num_observed`: features that a row shows, of
    `num_features`.
    """

    mixture: QuickMixture
    residual: np.ndarray
    squared: np.ndarray
    num_observed: np.ndarray
    num_features: int

    def log_likelihood(self) -> np.ndarray:
        """Log density of every row, (m,)."""
        return special.logsumexp(self._log_densities(), axis=0)

    def needed_rank(self) -> int:
        """Directions per node that the rows tell of, and half as many again: others would be shrunk to the noise.

        Of a growing number of directions, the rest counted as noise, the one with the highest log likelihood less the
        number of variances (Akaike's criterion: the mixture is fitted to the rows that it is judged by).
        """
        mixture, residual, squared = self.mixture, self.residual, self.squared
        share = special.softmax(self._log_densities(), axis=0)
        largest = last = squared.shape[2]
        best, needed = -np.inf, largest
        for rank in reversed(_growing(largest)):
            # what is seen of a direction is in proportion to the features that are
            residual = residual + squared[..., rank:last].sum(axis=2) * (self.num_observed / self.num_features)
            squared, last = squared[..., :rank], rank
            has_direction = mixture.has_direction[:, :rank]
            sizes = self.num_observed, self.num_features
            part = _maximise(mixture.nodes, share, residual, squared, has_direction, *sizes)
            found = special.logsumexp(part.log_densities(residual, squared, *sizes), axis=0).sum() - has_direction.sum()
            if found > best:
                best, needed = found, rank
        return min(largest, -(-3 * needed // 2))

    def _log_densities(self) -> np.ndarray:
        return self.mixture.log_densities(self.residual, self.squared, self.num_observed, self.num_features)


def _growing(largest: int) -> list[int]:
    """1, 2, 3, 5, 8, ... to `largest`."""
    ranks = [1]
    while ranks[-1] < largest:
        ranks.append(min(largest, -(-3 * ranks[-1] // 2)))
    return ranks


def cross_fitted_evidence(
    x: Rows,
    partition: Partition,
    subspaces: Subspaces,
    folds: np.ndarray,
    is_observed: np.ndarray | None = None,
    num_features: int | None = None,
) -> Evidence:
    """The evidence of (a sample of) the rows that are in a fold, from dictionaries that left their folds out.

    `num_features`: D, where x holds coordinates of rows in fewer dimensions.
    """
    rows = judged_rows(folds)
    seen = None if is_observed is None else is_observed[rows]
    return evidence_of(taken(x, rows), partition, subspaces, folds, seen, num_features)


def evidence_of(
    judged: Rows,
    partition: Partition,
    subspaces: Subspaces,
    folds: np.ndarray,
    is_observed: np.ndarray | None = None,
    num_features: int | None = None,
) -> Evidence:
    """:func:`cross_fitted_evidence` from the :func:`judged_rows` alone, (m, D), and their mask."""
    nodes = np.flatnonzero(partition.is_present)
    if folds.size > LARGEST_SAMPLE:  # deeper ones have too few rows of the sample to be judged by
        nodes = nodes[_scale_of(nodes) <= np.log2(LARGEST_SAMPLE / FEWEST_SAMPLED)]
    rows, num_features = judged_rows(folds), num_features or judged.shape[1]
    return _fit(judged, rows, partition, subspaces, folds[rows], is_observed, num_features, nodes)


def is_clear(gain: np.ndarray) -> bool:
    """Whether a gain in log likelihood, (m,), is positive on average by more than two standard errors."""
    return bool(gain.mean() > 2.0 * gain.std() / np.sqrt(gain.size))


def sample_of(rows: np.ndarray) -> np.ndarray:
    """Those of the rows that the mixture is fitted to."""
    return rows[np.linspace(0, rows.size - 1, min(rows.size, LARGEST_SAMPLE)).astype(int)]


def judged_rows(folds: np.ndarray) -> np.ndarray:
    """Indices of the rows that :func:`cross_fitted_evidence` is of."""
    return sample_of(np.flatnonzero(folds >= 0))


def fit_quick_mixture(
    x: Rows, partition: Partition, subspaces: Subspaces, folds: np.ndarray | None, is_observed: np.ndarray | None
) -> QuickMixture:
    """The mixture alone; without `folds`, fitted to in-sample statistics."""
    nodes = np.flatnonzero(partition.is_present)
    rows = sample_of(np.arange(x.shape[0])) if folds is None else judged_rows(folds)
    own = None if folds is None else folds[rows]
    seen = None if is_observed is None else is_observed[rows]
    return _fit(taken(x, rows), rows, partition, subspaces, own, seen, x.shape[1], nodes).mixture


def _fit(
    values: Rows,
    rows: np.ndarray,
    partition: Partition,
    subspaces: Subspaces,
    folds: np.ndarray | None,
    is_observed: np.ndarray | None,
    num_features: int,
    nodes: np.ndarray,
) -> Evidence:
    """`values` (m, D), their folds and mask are of the given `rows` of those that the partition is of."""
    residual, squared = statistics_at(values, np.arange(rows.size), folds, subspaces, nodes, is_observed)
    ranks = subspaces.ranks[nodes]
    has_direction = np.arange(squared.shape[2]) < ranks[:, None]
    share = np.stack([np.isin(rows, partition.cells[node]) for node in nodes]).astype(np.float64)
    share /= share.sum(axis=0)
    num_observed = np.full(rows.size, num_features) if is_observed is None else is_observed.sum(axis=1)
    for _ in range(NUM_STEPS):
        mixture = _maximise(nodes, share, residual, squared, has_direction, num_observed, num_features)
        share = special.softmax(mixture.log_densities(residual, squared, num_observed, num_features), axis=0)
    return Evidence(mixture, residual, squared, num_observed, num_features)


def _maximise(
    nodes: np.ndarray,
    share: np.ndarray,
    residual: np.ndarray,
    squared: np.ndarray,
    has_direction: np.ndarray,
    num_observed: np.ndarray,
    num_features: int,
) -> QuickMixture:
    """The mixture whose nodes have the rows by the given shares, (K', n)."""
    count = share.sum(axis=1)
    freedom_per_feature = 1.0 - has_direction.sum(axis=1) / num_features
    noise = _noise(nodes, (share * residual).sum(axis=1), freedom_per_feature * (share @ num_observed))
    second = np.matmul(share.astype(squared.dtype)[:, None, :], squared)[:, 0, :]
    variance = _variance(second, count, noise)
    log_weight = np.log((count + 0.5) / (share.shape[1] + 0.5 * nodes.size))
    return QuickMixture(nodes, log_weight, noise, variance, has_direction)


def cell_mixture(
    x: Rows, partition: Partition, subspaces: Subspaces, folds: np.ndarray | None, is_observed: np.ndarray | None
) -> QuickMixture:
    """The mixture of the tree's own cells, every row counting once at every scale: no EM.

    Of a tree with many nodes, the few thousand rows that EM is given here know the deep ones badly; this mixture has
    all rows of a cell (a sample of `LARGEST_SAMPLE` where there are more).
    """
    nodes = np.flatnonzero(partition.is_present)
    ranks, num_features = subspaces.ranks[nodes], x.shape[1]

    def moments(node: int) -> tuple[float, np.ndarray, float, int]:
        cell = partition.cells[node]
        assert cell is not None
        rows = sample_of(cell)
        residual, squared = statistics_at_node(x, rows, folds, subspaces, node, is_observed)
        seen = float(rows.size * num_features if is_observed is None else is_observed[rows].sum())
        return float(residual.sum(dtype=np.float64)), squared.sum(axis=0, dtype=np.float64), seen, rows.size

    off, along, seen, used = (np.asarray(values) for values in zip(*each(moments, nodes.tolist()), strict=True))
    count = np.array([rows.size for rows in partition.cells if rows is not None])
    # rows that the cells are sampled for count for all of theirs
    weight = count / used
    noise = _noise(nodes, weight * off, weight * seen * (1.0 - ranks / num_features))
    has_direction = np.arange(along.shape[1]) < ranks[:, None]
    return QuickMixture(nodes, np.log(count / count.sum()), noise, _variance(along, used, noise), has_direction)


def _scale_of(nodes: np.ndarray) -> np.ndarray:
    return np.floor(np.log2(nodes + 1)).astype(int)


def _noise(nodes: np.ndarray, residual: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Noise variance of every node's scale, from sums of squares and their degrees of freedom at the nodes."""
    scale = _scale_of(nodes)
    # one row's worth of the average noise keeps empty scales proper
    return ((np.bincount(scale, residual) + 1.0) / (np.bincount(scale, freedom) + 1.0))[scale]


def _variance(second: np.ndarray, count: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Variances along directions from sums of squares, shrunk towards the noise and no smaller."""
    noise = noise[:, None]
    return np.maximum((second + PRIOR_ROWS * noise) / (count[:, None] + PRIOR_ROWS), noise)


def statistics_at(
    x: Rows,
    rows: np.ndarray,
    folds: np.ndarray | None,
    subspaces: Subspaces,
    nodes: np.ndarray,
    is_observed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Squared residuals (K', m), over the observed features, and squared coordinates (K', m, d) of some rows.

    From the dictionaries without their folds, or without `folds` from that of all rows.
    """
    residual = np.zeros((nodes.size, rows.size), dtype=x.dtype)
    squared = np.zeros((nodes.size, rows.size, subspaces.bases.shape[3]), dtype=x.dtype)
    for index, node in enumerate(nodes):
        residual[index], squared[index] = statistics_at_node(x, rows, folds, subspaces, node, is_observed)
    return residual, squared


def statistics_at_node(
    x: Rows,
    rows: np.ndarray,
    folds: np.ndarray | None,
    subspaces: Subspaces,
    node: int,
    is_observed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`statistics_at` one node, (m,) and (m, d)."""
    residual = np.zeros(rows.size, dtype=x.dtype)
    squared = np.zeros((rows.size, subspaces.bases.shape[3]), dtype=x.dtype)
    group = np.zeros(rows.size, dtype=int) if folds is None else 1 + folds[rows]
    for number in np.flatnonzero(np.bincount(group)):
        centre, basis = subspaces.centres[number, node], subspaces.bases[number, node]
        inside = np.flatnonzero(group == number)
        # blocks of rows: a node may have a good part of them all, and two more arrays as large are needed besides
        for some in slices(inside.size, min(x.shape[1], WIDEST)):
            block = inside[some]
            centred = x[rows[block]] - centre
            coordinates = centred @ basis
            centred -= coordinates @ basis.T
            error = np.square(centred, out=centred)
            residual[block] = (error if is_observed is None else error * is_observed[rows[block]]).sum(axis=1)
            squared[block] = np.square(coordinates)
    return residual, squared
