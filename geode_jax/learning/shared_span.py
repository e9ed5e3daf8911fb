"""One span for all nodes: directions inherited from the whole data set.

Independent cells each pay to learn their directions in R^D. Where all of them lie in the span of the r leading
directions of the whole data, learning them there costs r coordinates instead of D, and what is outside is noise at
every node. The span is learned without each fold, like everything that the statistics of a row depend on.
"""

from typing import NamedTuple

import numpy as np

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax.learning.evidence import Evidence, cross_fitted_evidence, is_clear
from geode_jax.learning.subspaces import Subspaces, join_groups, learn_subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.completed import Completed
from geode_jax.rows.folds import LeftOut, each_fold, kept_rows
from geode_jax.rows.view import Rows

# A span is looked for up to this many directions; beyond, nodes learn theirs in R^D.
LARGEST_SPAN = 400


class Span(NamedTuple):
    """Centres (G, D) and orthonormal bases (G, D, r) of the whole data: entry 0 of all rows, 1 + f without fold f."""

    centres: np.ndarray
    bases: np.ndarray

    def leading(self, rank: int) -> "Span":
        """The span of the first `rank` directions."""
        return Span(self.centres, self.bases[..., :rank])


def learn_span(
    x: Rows, folds: np.ndarray | None, seed: int, left_out: LeftOut | None = None, max_rank: int = LARGEST_SPAN
) -> Span:
    """The leading directions of the whole data, `max_rank` or as many as there are."""
    num_rows = x.shape[0] if folds is None else x.shape[0] - int(np.bincount(folds[folds >= 0]).max())
    rank = min(max_rank, x.shape[1], num_rows - 1)
    found = learn_subspaces(x, Partition(0, (np.arange(x.shape[0]),)), rank, folds, seed, left_out=left_out)
    return Span(found.centres[:, 0], found.bases[:, 0, :, : found.ranks[0]])


def learn_whole_span(completed: Completed, folds: np.ndarray | None, seed: int, max_rank: int = LARGEST_SPAN) -> Span:
    """:func:`learn_span` of rows that may have been filled."""
    parts = [learn_span(x, folds, seed, some, max_rank) for x, some in completed.each(each_fold(folds))]
    rank = min(part.bases.shape[2] for part in parts)
    return Span(*(np.concatenate(leaves) for leaves in zip(*(part.leading(rank) for part in parts), strict=True)))


def span_rank(completed: Completed, span: Span, folds: np.ndarray, num_features: int) -> int:
    """Rank at which probabilistic PCA, fitted without each fold, describes that fold best; at least 1."""
    x = completed.x
    ranks = np.arange(1, min(span.bases.shape[2], num_features - 1) + 1)
    cost = np.zeros(ranks.size)
    for fold in range(span.centres.shape[0] - 1):
        is_out = folds == fold
        inside, total_inside = _mean_squares(
            completed.without_fold(fold), ~is_out, span.centres[1 + fold], span.bases[1 + fold]
        )
        outside, total_outside = _mean_squares(x, is_out, span.centres[1 + fold], span.bases[1 + fold])
        # few rows lie wholly in as many directions: what is left of them there is rounding
        rounding = max(np.finfo(x.dtype).eps * total_inside, np.finfo(x.dtype).tiny)
        noise = np.maximum(total_inside - np.cumsum(inside)[ranks - 1], rounding) / (num_features - ranks)
        left = np.maximum(total_outside - np.cumsum(outside)[ranks - 1], 0.0)
        for index, rank in enumerate(ranks):
            variance = np.maximum(inside[:rank], noise[index])
            fit = np.log(variance).sum() + np.sum(outside[:rank] / variance)
            fit += (num_features - rank) * np.log(noise[index]) + left[index] / noise[index]
            cost[index] += is_out.sum() * fit
    return int(ranks[np.argmin(cost)])


def _mean_squares(x: Rows, is_used: np.ndarray, centre: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean squared coordinates, (r,), and mean squared norm of the rows that are used."""
    squares, total, count = np.zeros(basis.shape[1]), 0.0, int(is_used.sum())
    for rows in slices(*x.shape):
        centred = x[rows][is_used[rows]] - centre
        squares += np.square(centred @ basis, dtype=np.float64).sum(axis=0)
        total += float(np.square(centred, dtype=np.float64).sum())
    return squares / count, total / count


def _coordinates(x: Rows, centre: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Coordinates of the rows, (n, r), without a centred copy of them all."""
    return np.concatenate([(x[rows] - centre) @ basis for rows in slices(*x.shape)])


def learn_subspaces_in_span(
    x: Rows,
    span: Span,
    partition: Partition,
    max_rank: int,
    folds: np.ndarray | None,
    seed: int,
    parent_rows: float = 0.0,
    left_out: LeftOut | None = None,
) -> Subspaces:
    """Centres and bases of every cell, all within the span: learned in its coordinates and carried back.

    `left_out` are the folds that the groups of the span do not see.
    """
    left_out = each_fold(folds) if left_out is None else left_out
    num_groups, num_features, rank = span.bases.shape
    num_nodes, num_directions = len(partition.cells), min(max_rank, rank)
    centres = aligned_zeros((num_groups, num_nodes, num_features), x.dtype)
    bases = aligned_zeros((num_groups, num_nodes, num_features, num_directions), x.dtype)
    ranks = np.full((num_groups, num_nodes), 0, dtype=np.int32)
    for group, (centre, basis, without) in enumerate(zip(span.centres, span.bases, left_out, strict=True)):
        coordinates = _coordinates(x, centre, basis)
        cells = tuple(None if rows is None else rows[kept_rows(rows, folds, [without])[0]] for rows in partition.cells)
        cells = tuple(_at_least_one(rows, whole) for rows, whole in zip(cells, partition.cells, strict=True))
        found = learn_subspaces(coordinates, Partition(partition.depth, cells), num_directions, None, seed, parent_rows)
        present = np.flatnonzero(partition.is_present)
        centres[group, present] = centre + found.centres[0, present] @ basis.T
        for node in present:  # all at once would be another copy of the largest array
            np.matmul(basis, found.bases[0, node], out=bases[group, node])
        ranks[group] = found.ranks
    smallest = ranks.min(axis=0)
    bases *= (np.arange(num_directions) < smallest[:, None])[:, None, :]
    return Subspaces(centres, bases, smallest)


def _at_least_one(rows: np.ndarray | None, whole: np.ndarray | None) -> np.ndarray | None:
    """A cell that lies in one fold keeps its rows: it has a centre and no directions either way."""
    return whole if rows is not None and rows.size == 0 else rows


def learn_dictionaries(
    completed: Completed,
    partition: Partition,
    max_rank: int,
    folds: np.ndarray | None,
    seed: int,
    parent_rows: float,
    span: Span | None = None,
) -> Subspaces:
    """A tree's dictionaries of all rows and without each fold, within the span if there is one."""
    parts, done = [], 0
    for x, some in completed.each(each_fold(folds)):
        if span is None:
            found = learn_subspaces(x, partition, max_rank, folds, seed, parent_rows, some)
        else:
            own = Span(*(leaf[done : done + len(some)] for leaf in span))
            found = learn_subspaces_in_span(x, own, partition, max_rank, folds, seed, parent_rows, some)
        parts.append(found)
        done += len(some)
    return join_groups(parts)


class ChosenSpan(NamedTuple):
    """A span, what the rows say of one tree's dictionary in it, and its gain per row over none."""

    span: Span
    evidence: Evidence
    gain: float


def choose_span(
    completed: Completed,
    partition: Partition,
    max_rank: int,
    folds: np.ndarray,
    seed: int,
    without: np.ndarray,
    parent_rows: float = 0.0,
    is_observed: np.ndarray | None = None,
    num_features: int | None = None,
) -> ChosenSpan | None:
    """The span with which one tree's dictionary describes held-out rows best; None where it is no span.

    `without`: log likelihood of the rows by the tree's dictionary in R^D, which a span has to gain on.
    Candidates are the rank of the whole data as one Gaussian and its doubles, up to half of the features. A span is
    taken only where it gains two standard errors, and a larger one where it gains as many on the smaller: where cells
    bend away from the common directions it loses much (Frey faces), where they do not it gains
    (`python -m benchmarks.choices` and `benchmarks.swiss_roll`).
    `num_features`: D, where the rows are coordinates in fewer dimensions.
    """
    x, num_features = completed.x, num_features or completed.x.shape[1]
    whole = learn_whole_span(completed, folds, seed)
    if min(whole.bases.shape[2], num_features - 1) < 1:
        return None
    rank, best_gain = span_rank(completed, whole, folds, num_features), np.zeros(1)
    best: ChosenSpan | None = None
    while rank < whole.bases.shape[2] and 2 * rank <= num_features:
        span = whole.leading(rank)
        found = learn_dictionaries(completed, partition, max_rank, folds, seed, parent_rows, span)
        evidence = cross_fitted_evidence(x, partition, found, folds, is_observed, num_features)
        gain = evidence.log_likelihood() - without
        if is_clear(gain - best_gain):
            best, best_gain = ChosenSpan(span, evidence, float(gain.mean())), gain
        rank *= 2
    return best
