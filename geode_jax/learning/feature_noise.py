"""The noise scale of every feature, from cross-fitted residuals."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import special

from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.decompositions import EXACT_MAX_SIDE, Tolerance
from geode_jax.learning.evidence import cross_fitted_evidence, evidence_of, judged_rows, statistics_at
from geode_jax.learning.row_combinations import held_out_combinations
from geode_jax.learning.subspaces import SubspaceOptions, empty_subspaces, learn_subspaces, with_common_ranks
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.copies import groups_of_copies
from geode_jax.rows.folds import assign_folds, each_fold, fold_sizes
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.row_space import principal_coordinates, uses_row_space
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows, View

# Least value of 1 - leverage: the residuals of a feature that is nearly a direction say nothing about its noise.
SMALLEST_SHARE = 0.1
# With missing entries, every feature gets this many pseudo-rows of average noise: it matters for seldom observed ones.
SELDOM = 10
# Rows whose residuals are enough to estimate the scales to within 1%.
ENOUGH_ROWS = 10_000


class NoiseOptions(NamedTuple):
    """How noise scales are learned: :class:`geode_jax.FeatureNoise`, the most directions of a cell, and a seed."""

    num_rounds: int
    num_folds: int
    floor: float
    max_rank: int
    seed: int


class FeatureScales(NamedTuple):
    """Noise scale per feature, (D,), and the held-out `log_density` (m,) of the `rows` (m,) with these scales."""

    scales: np.ndarray
    log_density: np.ndarray
    rows: np.ndarray


def middle_cells(partition: Partition) -> Partition:
    """The cells of a middle scale, without a hierarchy: small enough to be nearly flat, large enough to estimate."""
    covering = partition.nodes_at((partition.depth + 1) // 2)
    return Partition.among(partition.processes, 0, tuple(partition.cells[k] for k in covering))


def noise_folds(
    x: Rows, is_observed: np.ndarray | None, options: NoiseOptions, processes: Processes = ALONE
) -> np.ndarray:
    """The fold of every one of everyone's rows, (n,), in which its residuals are taken."""
    copies = groups_of_copies(x, is_observed, processes)
    rng = np.random.default_rng(options.seed)
    return assign_folds(processes.count(x.shape[0]), options.num_folds, rng, copies)


def learn_feature_scales(
    x: Rows, is_observed: np.ndarray | None, cells: Partition, options: NoiseOptions
) -> FeatureScales:
    """Noise scale of every feature of x, (n, D), with geometric mean 1.

    They are estimated from the residuals of every row off the subspace of its cell, learned without the row's fold. The
    `cells` are disjoint, as those of a tree's middle scale. Each round divides the features by the scales found so far,
    learns the subspaces again, and corrects the scales.

    The number of directions that are signal is not known here. With too few, signal is taken for noise (digits need
    half of their 64 features, and lose 3 nats with a tenth); with too many, little is left to estimate the noise from.
    So three numbers are tried, and equal scales too, and the cross-fitted likelihood of the cells decides. No number
    is above half of the features: residuals off so many directions do not say how noisy a feature is. Filled entries,
    where `is_observed` is False, are ignored.
    """
    processes, num_features = cells.processes, x.shape[1]
    folds = processes.own_part(noise_folds(x, is_observed, options, processes))
    training = Training(x, num_features, folds, is_observed, processes=processes).judging(ENOUGH_ROWS)
    largest = min(options.max_rank, max(1, num_features // 2))
    ranks = dict.fromkeys(max(1, largest // part) for part in (1, 4, 16))
    candidates = [np.ones(num_features)]
    candidates += [_scales_off_subspaces(training, cells, rank, options) for rank in ranks]
    rows = judged_rows(training.own_folds, processes)

    is_wide = is_observed is None and uses_row_space(training.num_rows, num_features)

    def held_out(scales: np.ndarray) -> FeatureScales:
        scaled = training._replace(x=View(x, scales))
        if is_wide:
            scaled = scaled._replace(x=principal_coordinates(scaled.x).coordinates)
        subspaces = learn_subspaces(scaled.x, cells, SubspaceOptions(options.max_rank, options.seed), training.folds)
        log_density = cross_fitted_evidence(scaled, cells, subspaces).log_likelihood()
        # log scales add up to 0 over all features, but not over a row's observed features
        jacobian = 0.0 if is_observed is None else is_observed[rows] @ np.log(scales)
        return FeatureScales(scales, log_density - jacobian, rows)

    return max(map(held_out, candidates), key=lambda found: float(found.log_density.mean()))


def price_of_unseen(
    x: np.ndarray,
    is_observed: np.ndarray | None,
    cells: Partition,
    options: NoiseOptions,
    folds: np.ndarray,
    relative: np.ndarray,
) -> np.ndarray:
    """What rows lose in log density, (n,), if divisors of the features are learned without their fold.

    x, (n, D), was divided by what was learned from all of its rows; `relative`, (F, D), is the same without each of the
    `folds`, (n,), over that. All features then have the same noise. The mixture is that of all rows in either
    case, as in a fit: one of rows that are far off for want of divisors that know them would have a component for them.
    """
    subspaces = SubspaceOptions(options.max_rank, options.seed)
    holdouts, num_nodes = each_fold(folds), len(cells.cells)
    rows = np.arange(len(x))
    judged, found = np.empty_like(x), [learn_subspaces(x, cells, subspaces, folds)]
    ranks = [found[0].ranks]
    unseen = empty_subspaces(len(holdouts), num_nodes, x.shape[1], subspaces.max_rank, x.dtype)
    for number, holdout in enumerate(holdouts[1:], start=1):  # the dictionary of all rows is not used
        own, out = View(x, relative[number - 1]), slice(number, number + 1)
        part = unseen[0][out], unseen[1][out]
        ranks.append(learn_subspaces(own, cells, subspaces, folds, [holdout], part).ranks)
        judged[folds == number - 1] = own[np.flatnonzero(folds == number - 1)]
    known, other = (with_common_ranks(*pair, np.stack(ranks)) for pair in (found[0][:2], unseen))
    training = Training(x, x.shape[1], folds, is_observed)
    evidence = evidence_of(training, rows, cells, known)
    residual, squared = statistics_at(training._replace(x=judged), rows, other, evidence.rows.nodes)
    of_known, of_unseen = (
        special.logsumexp(evidence.mixture.log_densities(seen), axis=0)
        for seen in (evidence.rows, evidence.rows._replace(residual=residual, squared=squared))
    )
    return of_known - of_unseen + np.sum(training.mask * np.log(relative)[folds], axis=1)


def _scales_off_subspaces(training: Training, cells: Partition, rank: int, options: NoiseOptions) -> np.ndarray:
    """Noise scales where `rank` directions are signal."""
    scales = np.ones(training.num_features)
    for _ in range(options.num_rounds):
        scaled = training._replace(x=View(training.x, scales))
        moments = _residual_moments(scaled, cells, SubspaceOptions(rank, options.seed))
        residual = np.sqrt(moments.mean_square)
        if not residual.mean() > 0.0:  # no noise at all: all scales stay equal
            break
        updated = scales * residual
        logs = np.log(np.maximum(updated, options.floor * updated.mean()))
        scales = np.exp(_shrunk(logs - logs.mean(), 0.25 * moments.log_variance))
    return scales / np.exp(np.mean(np.log(scales)))


def _shrunk(logs: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Log scales with mean 0, each shrunk to 0 by the share of their spread that is the error of its estimate.

    Features with the same noise should not pay for separate scales: n rows determine a scale to a relative error of
    ``(2 n)^-1/2``, which costs ``1/2n`` nats of held-out density per feature. Empirical Bayes with Morris's factor
    (Parametric empirical Bayes inference, JASA 1983).
    """
    num = logs.size
    if num < 4:
        return logs
    spread = max(np.square(logs).sum() / (num - 1) - variance.mean(), 0.0)
    return logs * (1.0 - (num - 3) / (num - 1) * variance / np.maximum(variance + spread, np.finfo(float).tiny))


class _Moments(NamedTuple):
    """Per feature, (D,): the mean square of its residual, and the variance of that mean square's log."""

    mean_square: np.ndarray
    log_variance: np.ndarray


def _sums_off_bases(training: Training, cells: Partition, options: SubspaceOptions) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the second and fourth powers of the corrected residuals, (D,) each, of the rows of some cells."""
    x, folds = training.x, training.own_folds
    subspaces = learn_subspaces(x, cells, options, folds)
    second, fourth = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for node in range(len(cells.cells)):
        rows = cells.cell(node)
        for fold in range(subspaces.centres.shape[0] - 1):
            inside = rows[folds[rows] == fold]
            centred = x[inside] - subspaces.centres[1 + fold, node]
            basis = subspaces.bases[1 + fold, node]
            residual = centred - (centred @ basis) @ basis.T
            _add_powers(training, inside, slice(None), residual, basis.T, second, fourth)
    return second, fourth


def _sums_of_small(training: Training, rows: np.ndarray, max_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """:func:`_sums_off_bases` of one cell with fewer rows than features, without its bases."""
    x, num_features = training.x, training.x.shape[1]
    second, fourth = np.zeros(num_features), np.zeros(num_features)
    gram, largest = np.zeros((rows.size, rows.size)), 0.0

    def columns() -> Iterator[tuple[slice, np.ndarray]]:
        for some in slices(num_features, rows.size):
            yield some, x[rows, some].astype(np.float64)

    for _, block in columns():
        largest = max(largest, float(np.abs(block).max()))
        block -= block.mean(axis=0)
        gram += block @ block.T
    tolerance = Tolerance.of(x, rows.size, largest)
    found = held_out_combinations(gram, training.own_folds[rows], max_rank, tolerance)
    coefficients = [np.concatenate([one.residuals, one.directions]) for one in found]
    for some, block in columns():
        for one, matrix in zip(found, coefficients, strict=True):
            residual, basis = np.split(matrix @ (block - block.mean(axis=0)), [one.inside.size])
            _add_powers(training, rows[one.inside], some, residual, basis, second, fourth)
    return second, fourth


def _add_powers(
    training: Training,
    rows: np.ndarray,
    features: slice,
    residual: np.ndarray,
    basis: np.ndarray,
    second: np.ndarray,
    fourth: np.ndarray,
) -> None:
    """Add a block's powers to the sums, (D,) each: `residual` (i, D') of these rows, `basis` (d, D')."""
    square = np.square(residual, dtype=np.float64)
    if training.is_observed is not None:
        square *= training.is_observed[rows, features]
    square /= np.maximum(1.0 - np.square(basis, dtype=np.float64).sum(axis=0), SMALLEST_SHARE)
    second[features] += square.sum(axis=0)
    fourth[features] += np.einsum("ij,ij->j", square, square)


def _residual_moments(training: Training, cells: Partition, options: SubspaceOptions) -> _Moments:
    """Moments of the held-out residuals of rows in a fold, corrected for the noise that the subspaces absorb.

    Off a subspace the noise of feature j keeps the share ``1 - h_j`` of its variance, with ``h_j`` the squared norm of
    the feature's row of the basis (its leverage). Without that correction, features of high leverage would look less
    noisy than they are, and their noise would look like signal.
    """
    x, folds, is_observed = training.x, training.own_folds, training.is_observed
    # other processes may have rows of the same cells
    most = min(x.shape[1] - 1, EXACT_MAX_SIDE) if cells.processes.is_alone else 0
    is_small = np.array([cells.size(node) <= most for node in range(len(cells.cells))])
    small, large = np.flatnonzero(is_small).tolist(), np.flatnonzero(~is_small).tolist()
    sums = parallel_map(lambda node: _sums_of_small(training, cells.cell(node), options.max_rank), small)
    if large:
        rest = Partition.among(cells.processes, 0, tuple(cells.cell(node) for node in large))
        sums.append(_sums_off_bases(training, rest, options))
    second, fourth = (training.processes.total(np.sum(parts, axis=0)) for parts in zip(*sums, strict=True))
    if is_observed is None:
        count = np.full(x.shape[1], float(fold_sizes(folds, training.processes)[1:].sum()))
    else:
        average, count = second.sum() / is_observed[folds >= 0].sum(), is_observed[folds >= 0].sum(axis=0) + SELDOM
        second, fourth = second + SELDOM * average, fourth + SELDOM * 3.0 * average**2
    # one kurtosis for all: it cannot be estimated for a feature that is seldom observed or seldom varies
    varies = second > 0.0
    kurtosis = np.median(fourth[varies] * count[varies] / second[varies] ** 2) if varies.any() else 3.0
    return _Moments(second / count, (kurtosis - 1.0) / count)
