"""One span for all nodes: directions inherited from the whole data set.

Without a span, every cell estimates its directions in R^D. Where all of these lie in the span of the r leading
directions of the whole data, a cell estimates them in r coordinates instead of D, and the rest is noise at every node.
The span is learned without each fold, like everything on which the statistics of a row depend.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.learning.decompositions import Cell
from geode_jax.learning.evidence import Evidence, Gain, cross_fitted_evidence
from geode_jax.learning.subspaces import (
    SubspaceOptions,
    Subspaces,
    empty_subspaces,
    learn_root,
    learn_subspaces,
    with_common_ranks,
)
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import Holdout, each_fold, fold_sizes
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.products import Products
from geode_jax.rows.row_space import Axes
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows

# Largest rank of a span; if none of at most this rank is good enough, nodes learn their directions in R^D.
LARGEST_SPAN = 400


class Span(NamedTuple):
    """Centres (H, D) and orthonormal bases (H, D, r) of the whole data: entry 0 of all rows, 1 + f without fold f."""

    centres: np.ndarray
    bases: np.ndarray

    def leading(self, rank: int) -> "Span":
        """The span of the first `rank` directions."""
        return Span(self.centres, self.bases[..., :rank])

    def in_features(self, axes: Axes) -> "Span":
        """A span in coordinates of a row space, in R^D."""
        return Span(axes.points(self.centres), axes.directions(self.bases))


def learn_span(
    x: Rows,
    folds: np.ndarray | None,
    seed: int,
    holdouts: list[Holdout] | None = None,
    max_rank: int = LARGEST_SPAN,
    processes: Processes = ALONE,
) -> Span:
    """The leading directions of the whole data: `max_rank` of them, or fewer if there are not as many."""
    num_rows = processes.count(x.shape[0])
    if folds is not None:
        num_rows -= int(fold_sizes(folds, processes)[1:].max())
    options = SubspaceOptions(min(max_rank, x.shape[1], num_rows - 1), seed)
    whole = Partition.among(processes, 0, (np.arange(x.shape[0]),))
    found = learn_subspaces(x, whole, options, folds, holdouts)
    return Span(found.centres[:, 0], found.bases[:, 0, :, : found.ranks[0]])


def learn_whole_span(training: Training, seed: int, max_rank: int = LARGEST_SPAN) -> Span:
    """:func:`learn_span` of rows that may have been filled."""
    folds, processes = training.folds, training.processes
    parts = [learn_span(x, folds, seed, some, max_rank, processes) for x, some in training.each(training.holdouts)]
    rank = min(part.bases.shape[2] for part in parts)
    return Span(*(np.concatenate(leaves) for leaves in zip(*(part.leading(rank) for part in parts), strict=True)))


def span_rank(training: Training, span: Span) -> int:
    """Rank at which probabilistic PCA, fitted without each fold, describes that fold best; at least 1."""
    x, folds, num_features = training.x, training.own_folds, training.num_features
    ranks = np.arange(1, min(span.bases.shape[2], num_features - 1) + 1)
    cost, num_out = np.zeros(ranks.size), fold_sizes(folds, training.processes)[1:]
    for fold in range(span.centres.shape[0] - 1):
        is_out = folds == fold
        inside, total_inside = mean_squares(
            training.without_fold(fold), ~is_out, span.centres[1 + fold], span.bases[1 + fold], training.processes
        )
        outside, total_outside = mean_squares(
            x, is_out, span.centres[1 + fold], span.bases[1 + fold], training.processes
        )
        # a few rows lie entirely in the span of as many directions: their residual is rounding error
        rounding = max(np.finfo(x.dtype).eps * total_inside, np.finfo(x.dtype).tiny)
        noise = np.maximum(total_inside - np.cumsum(inside)[ranks - 1], rounding) / (num_features - ranks)
        left = np.maximum(total_outside - np.cumsum(outside)[ranks - 1], 0.0)
        for index, rank in enumerate(ranks):
            variance = np.maximum(inside[:rank], noise[index])
            fit = np.log(variance).sum() + np.sum(outside[:rank] / variance)
            fit += (num_features - rank) * np.log(noise[index]) + left[index] / noise[index]
            cost[index] += num_out[fold] * fit
    return int(ranks[np.argmin(cost)])


def mean_squares(
    x: Rows, is_used: np.ndarray, centre: np.ndarray, basis: np.ndarray, processes: Processes
) -> tuple[np.ndarray, float]:
    """Mean squared coordinates, (r,), and mean squared norm of the used rows, about the centre."""
    squares, total, count = np.zeros(basis.shape[1]), 0.0, int(is_used.sum())
    for rows in processes.products.blocks(*x.shape):
        centred = x[rows][is_used[rows]] - centre
        squares += np.square(processes.products.product(centred, basis), dtype=np.float64).sum(axis=0)
        total += float(np.square(centred, dtype=np.float64).sum())
    *sums, number = processes.total(np.array([*squares, total, count]))
    return np.array(sums[:-1]) / number, float(sums[-1] / number)


def _coordinates(x: Rows, centre: np.ndarray, basis: np.ndarray, products: Products) -> np.ndarray:
    """Coordinates of the rows, (n, r), computed in blocks: no centred copy of all rows is made."""
    found = np.empty((x.shape[0], basis.shape[1]), np.result_type(x.dtype, centre, basis))
    for rows in products.blocks(*x.shape):
        found[rows] = products.product(x[rows] - centre, basis)
    return found


def learn_subspaces_in_span(
    x: Rows,
    span: Span,
    partition: Partition,
    options: SubspaceOptions,
    folds: np.ndarray | None,
    holdouts: list[Holdout] | None = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
) -> Subspaces:
    """Centres and bases of every cell within the span: learned in its coordinates and mapped back to R^D.

    `holdouts` are those of the span's entries. `out`: as in :func:`learn_subspaces`.
    """
    processes = partition.processes
    holdouts = each_fold(folds, processes) if holdouts is None else holdouts
    num_holdouts, num_features, rank = span.bases.shape
    num_nodes, num_directions = len(partition.cells), min(options.max_rank, rank)
    options = options._replace(max_rank=num_directions)
    centres, bases = out or empty_subspaces(num_holdouts, num_nodes, num_features, num_directions, x.dtype)
    ranks = np.full((num_holdouts, num_nodes), 0, dtype=np.int32)
    for number, (centre, basis, holdout) in enumerate(zip(span.centres, span.bases, holdouts, strict=True)):
        coordinates = _coordinates(x, centre, basis, processes.products)
        found = learn_subspaces(coordinates, partition, options, folds, [holdout])
        present = np.flatnonzero(partition.is_present)
        centres[number, present] = centre + found.centres[0, present] @ basis.T
        for node in present:  # all at once would take a copy of the largest array
            np.matmul(basis, found.bases[0, node], out=bases[number, node])
        ranks[number] = found.ranks
    return with_common_ranks(centres, bases, ranks)


def learn_root_cells(training: Training, options: SubspaceOptions) -> list[Cell]:
    """What all trees have as their root, of all rows and without each fold."""
    pairs = training.each(training.holdouts)
    return [cell for x, some in pairs for cell in learn_root(x, options, training.folds, some, training.processes)]


def learn_dictionaries(
    training: Training,
    partition: Partition,
    options: SubspaceOptions,
    span: Span | None = None,
    root_cells: list[Cell] | None = None,
) -> Subspaces:
    """A tree's dictionaries, of all rows and without each fold; within the span if there is one.

    `root_cells`: those of :func:`learn_root_cells`, for several trees; not used within a span.
    """
    folds, holdouts, num_features = training.folds, training.holdouts, training.x.shape[1]
    max_rank = options.max_rank if span is None else min(options.max_rank, span.bases.shape[2])
    # one array for all: parts of the size that these have are slow to join
    centres, bases = empty_subspaces(len(holdouts), len(partition.cells), num_features, max_rank, training.x.dtype)
    ranks, done = [], 0
    for x, some in training.each(holdouts):
        here = slice(done, done + len(some))
        out, done = (centres[here], bases[here]), here.stop
        if span is None:
            root = None if root_cells is None else root_cells[here]
            found = learn_subspaces(x, partition, options, folds, some, out, root)
        else:
            own = Span(*(leaf[here] for leaf in span))
            found = learn_subspaces_in_span(x, own, partition, options, folds, some, out)
        ranks.append(found.ranks)
    return with_common_ranks(centres, bases, np.stack(ranks))


class SpanTrial(NamedTuple):
    """A span that was tried, the evidence of one tree's dictionary within it, and its gain over no span.

    `is_taken`: whether the gain is clear, so that the span should be used.
    """

    span: Span
    evidence: Evidence
    gain: Gain
    is_taken: bool

    @property
    def rank(self) -> int:
        """Directions of the span."""
        return self.span.bases.shape[2]


def try_spans(
    training: Training, partition: Partition, options: SubspaceOptions, without: np.ndarray
) -> SpanTrial | None:
    """The span with which one tree's dictionary describes held-out rows best, or the first if none clearly gains.

    None if no span has few enough directions. `without`: log likelihood of the rows under the tree's dictionary in R^D.
    Candidate ranks are that of the whole data as one Gaussian, and this times 2, 4, ..., up to half of the features. A
    larger span must gain more than two standard errors over the best smaller one.
    """
    whole = learn_whole_span(training, options.seed)
    if min(whole.bases.shape[2], training.num_features - 1) < 1:
        return None
    rank, best_gain = span_rank(training, whole), np.zeros(1)
    best: SpanTrial | None = None
    while rank < whole.bases.shape[2] and 2 * rank <= training.num_features:
        span = whole.leading(rank)
        found = learn_dictionaries(training, partition, options, span)
        evidence = cross_fitted_evidence(training, partition, found)
        gain = evidence.log_likelihood() - without
        is_better = Gain.of(gain - best_gain).is_clear
        if best is None or is_better:
            best = SpanTrial(span, evidence, Gain.of(gain), is_better)
        best_gain = gain if is_better else best_gain
        rank *= 2
    return best
