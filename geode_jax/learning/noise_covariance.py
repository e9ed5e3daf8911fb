"""The noise covariance, common to all nodes: residuals may vary more in some directions than in others.

A node explains a few directions. The rest of its rows' covariance, often most of it where neighbouring features
correlate, is much the same at all nodes. It is estimated as a standard deviation along every principal axis of the
whole data, from residuals off the subspaces of a middle scale's cells, as `learning/feature_noise.py` does for the
features. Divided by these deviations the rest is isotropic, as the model's noise is, and a node's directions are those
in which the node differs from it.

The axes are learned without each fold, like everything on which the statistics of a row depend, and the residuals are
those of the fold. Along axes learned from the same rows, the lowest would seem to have far less noise than they have.

Of wide data, rows are in coordinates of their row space. They have fewer principal axes than coordinates, as each fold
is left out, and far fewer than features. All other directions of R^D have one deviation, the least.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.decompositions import Cell
from geode_jax.learning.evidence import Evidence, Gain, evidence_of, judged_rows
from geode_jax.learning.feature_noise import middle_cells
from geode_jax.learning.moments import Moments, as_parts, moments_of, over_processes
from geode_jax.learning.subspaces import (
    SubspaceOptions,
    Subspaces,
    empty_subspaces,
    learn_root,
    learn_subspaces,
    with_common_ranks,
)
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.folds import Holdout, fold_sizes
from geode_jax.rows.processes import Processes
from geode_jax.rows.products import Products
from geode_jax.rows.training import Training
from geode_jax.rows.unseen import Unseen
from geode_jax.rows.view import Product, Rows, View, as_array

NUM_ROUNDS = 3
# Nats per row and feature that a noise covariance must gain: with one, predictions cost more, O(D^2) with all features.
LEAST_GAIN = 0.01
# It must gain that once more for every so large share of values that are missing: along directions of signal, rows as
# filled vary by more than the noise, which a covariance takes up.
MISSING_SHARE = 0.1
# Least deviation relative to the mean deviation: constant features have none, and float32 does not resolve less.
FLOOR = 0.02
# Least deviation along a principal axis relative to that off all of them, of rows in coordinates. A smaller one counts
# as no more: predictions divide by the difference of their squares (math/rows_in_space.py).
LEAST_RATIO = 1.05


class NoiseRoot(NamedTuple):
    """Noise covariance up to a factor, ``R R`` with the symmetric ``R = axes diag(deviation) axes'`` and det R = 1.

    `axes` (p, p): orthonormal columns. `deviation` (p,). `unit`: root mean square of ``R^{-1} x`` over the data. With
    fewer coordinates p than features, this is R's part along the coordinates; in all other directions it has the last
    deviation, and its determinant is that in R^D.
    """

    axes: np.ndarray
    deviation: np.ndarray
    unit: float

    @property
    def matrix(self) -> np.ndarray:
        """R, (p, p)."""
        return (self.axes * self.deviation) @ self.axes.T

    @property
    def whitening(self) -> np.ndarray:
        """``R^{-1} / unit``, (p, p)."""
        return (self.axes / (self.unit * self.deviation)) @ self.axes.T


class Covariances(NamedTuple):
    """Principal axes (p, p) of all rows and of those without each fold, and the held-out `variance` (p,) along them.

    `num_features`: D. `num_axes`: how many axes have a deviation of their own. With fewer coordinates than features,
    as many as the rows without any fold have; else all.
    """

    axes: list[np.ndarray]
    variance: np.ndarray
    num_features: int
    num_axes: int

    @property
    def num_outside(self) -> int:
        """How many directions of R^D rows in coordinates do not have, D - p."""
        return self.num_features - self.variance.size

    def mean(self, values: np.ndarray) -> float:
        """Mean over R^D of values along the axes, (p,); directions without a coordinate have the last of them."""
        return float((values.sum() + self.num_outside * values[-1]) / self.num_features)

    def roots(self, deviation: np.ndarray) -> list[NoiseRoot]:
        """Roots for all rows and without each fold, with the same deviations (p,), up to a factor, along their axes."""
        deviation = np.maximum(deviation, max(FLOOR * self.mean(deviation), np.finfo(float).tiny))
        if self.num_outside:
            deviation = np.where(deviation < LEAST_RATIO * deviation[-1], deviation[-1], deviation)
        deviation = deviation / np.exp(self.mean(np.log(deviation)))
        unit = float(np.sqrt(np.sum(self.variance / np.square(deviation)) / self.num_features))
        return [NoiseRoot(axes, deviation, unit) for axes in self.axes]

    def decreasing(self, square: np.ndarray, share: np.ndarray, num_rows: int) -> np.ndarray:
        """Variances along the axes, (p,): ``square / share``, made decreasing, the same off the first `num_axes`.

        Outside the coordinates the `num_rows` rows have nothing, and all of the noise would show.
        """
        if not self.num_outside:
            return np.asarray(isotonic_regression(square / share, weights=share, increasing=False).x)
        own = slice(self.num_axes)
        square = np.append(square[own], square[self.num_axes :].sum())
        share = np.append(share[own], share[self.num_axes :].sum() + num_rows * self.num_outside)
        levels = isotonic_regression(square / share, weights=share, increasing=False).x
        return np.append(levels, np.full(self.variance.size - levels.size, levels[-1]))


def learn_covariances(training: Training, holdouts: list[Holdout] | None = None) -> Covariances:
    """Covariances of rows, (n, p), without each of the holdouts: O(n p^2 + p^3) operations.

    None: of all, and of those without each fold. Others come after these. Without two folds, rows are as they were
    filled without the first of them.
    """
    folds, processes = training.own_folds, training.processes
    numbers = range(-1, fold_sizes(folds, processes).size - 1)  # -1: rows in no fold

    def moments_by_fold(x: Rows) -> Moments:
        own = as_parts([moments_of(x, np.flatnonzero(folds == number), processes.products) for number in numbers])
        return over_processes([own], processes)[0]

    def without(moments: Moments, holdout: Holdout) -> tuple[np.ndarray, np.ndarray]:
        mean, scatter = moments.kept(~np.isin(numbers, holdout))
        return mean, np.linalg.eigh(scatter)[1][:, ::-1]  # in order of decreasing variance

    moments, found = moments_by_fold(training.x), []
    holdouts = training.holdouts if holdouts is None else holdouts
    if training.without is None:
        found = parallel_map(lambda holdout: without(moments, holdout), holdouts)
    else:  # rows are filled otherwise for every fold
        latest = functools.lru_cache(1)(lambda fold: moments_by_fold(training.without_fold(fold)))
        found = [without(latest(holdout[0]) if holdout else moments, holdout) for holdout in holdouts]
    size = training.x.shape[1]
    square = np.zeros(size)
    for part, (mean, axes) in enumerate(found[1 : len(numbers)], start=1):
        square += np.einsum("ij,ij->j", axes, moments.scatter[part] @ axes)
        square += moments.num_rows[part] * np.square((moments.mean[part] - mean) @ axes)
    variance, every = square / moments.num_rows[1:].sum(), [axes for _, axes in found]
    if size == training.num_features:
        return Covariances(every, variance, size, size)
    every[0] = np.eye(size)  # coordinates are along the principal axes of all rows
    fewest = int(moments.num_rows.sum() - moments.num_rows[1:].max())
    return Covariances(every, variance, training.num_features, max(0, min(size - 1, fewest - 1)))


def learn_whitened_subspaces(
    training: Training,
    roots: list[NoiseRoot],
    trees: list[tuple[Partition, SubspaceOptions]],
    on_share: Callable[[float], None] = lambda share: None,
    known: Sequence[Subspaces] = (),
    holdouts: list[Holdout] | None = None,
) -> list[Subspaces]:
    """Every tree's dictionaries of whitened coordinates; those of the first trees may be `known`.

    `holdouts`: None is all rows, and those without each fold. For each, rows are whitened by its own root.
    """
    trees = trees[len(known) :]
    if not trees:
        return list(known)
    x, folds, processes = training.x, training.own_folds, training.processes
    holdouts = training.holdouts if holdouts is None else holdouts
    found = [
        empty_subspaces(len(holdouts), len(partition.cells), x.shape[1], options.max_rank, x.dtype)
        for partition, options in trees
    ]
    ranks = np.zeros((len(trees), len(holdouts), len(trees[0][0].cells)), np.int32)
    scratch = _scratch(x, processes)

    def learn(whitened: Rows, tree: int, number: int, shared: list[Cell]) -> None:
        partition, options = trees[tree]
        centres, bases = found[tree]
        own = centres[number : number + 1], bases[number : number + 1]
        learned = learn_subspaces(whitened, partition, options, folds, [holdouts[number]], own, shared)
        ranks[tree, number] = learned.ranks

    for number, root in enumerate(roots):
        on_share(number / len(holdouts))
        rows = training.without_fold(holdouts[number][0]) if holdouts[number] else x
        whitened = _whitened_by(rows, root, scratch, processes.products)
        shared = learn_root(whitened, trees[0][1], folds, [holdouts[number]], processes)
        # whole trees side by side: the few cells of a tree's first scales would leave cores idle
        learn_tree = functools.partial(learn, whitened, number=number, shared=shared)
        parallel_map(learn_tree, range(len(trees)), in_order=not processes.is_alone)
    return [*known, *(with_common_ranks(*arrays, own) for arrays, own in zip(found, ranks, strict=True))]


def _scratch(x: Rows, processes: Processes) -> np.ndarray | None:
    """Memory for the whitened rows, the only copy; none for rows in files of which several processes bring theirs."""
    return None if isinstance(x, View) and not processes.is_alone else np.empty(x.shape, x.dtype)


def _whitened_by(x: Rows, root: NoiseRoot, scratch: np.ndarray | None, products: Products) -> Rows:
    """Rows whitened by a root: written to `scratch`, or computed when they are read."""
    if scratch is None:
        return Product(x, [root.whitening])
    matrix = root.whitening.astype(x.dtype)
    for rows in products.blocks(*x.shape):
        scratch[rows] = products.product(x[rows], matrix)
    return scratch


def whiten_in_place(x: np.ndarray, roots: list[NoiseRoot], folds: np.ndarray) -> np.ndarray:
    """Rows of x, (n, D), whitened in place, each by the root without its fold; rows in no fold are left unchanged."""
    for fold in np.unique(folds[folds >= 0]).tolist():
        matrix, rows = roots[1 + fold].whitening.astype(x.dtype), np.flatnonzero(folds == fold)
        for block in slices(rows.size, x.shape[1]):
            x[rows[block]] = x[rows[block]] @ matrix
    return x


def whiten_training(training: Training, roots: list[NoiseRoot]) -> Training:
    """Rows in folds, each whitened by the root without its fold: in place, or, as in :func:`_scratch`, when read."""
    x, folds, unseen = training.x, training.own_folds, None
    if training.is_observed is not None:
        whitenings = {number: roots[number].whitening for number in np.unique(1 + folds).tolist()}
        unseen = Unseen.of(training.is_observed, 1 + folds, whitenings, x.dtype)
        training = training._replace(unseen=unseen, without=None)
    if isinstance(x, View) and not training.processes.is_alone:
        return training._replace(x=Product(x, [root.whitening for root in roots[1:]], folds))
    return training._replace(x=whiten_in_place(as_array(x), roots, folds))


def deviation_off_subspaces(
    training: Training, covariances: Covariances, cells: Partition, options: SubspaceOptions
) -> np.ndarray:
    """Deviation of the noise along every axis, (p,), where `options.max_rank` directions of each cell are signal.

    They are estimated from each fold's residuals off the cells' subspaces learned without it. Each round whitens the
    rows by the deviations found so far, learns the subspaces again, and corrects the deviations. These are made
    decreasing, in the order of the axes' variances: axes of different folds are matched by that order alone, and it is
    random among axes of nearly the same variance. An axis that is nearly all signal says little about the noise, so it
    has low weight and takes the deviation of the axes next to it.
    """
    deviation = np.ones(training.x.shape[1])
    num_rows = int(fold_sizes(training.own_folds, cells.processes)[1:].sum())
    for _ in range(NUM_ROUNDS):
        roots = covariances.roots(deviation)
        square, share = _residuals_along_axes(training, roots[1:], cells, options)
        if not square.mean() > 0.0:  # no noise at all
            break
        deviation = np.sqrt(covariances.decreasing(np.square(roots[0].deviation) * square, share, num_rows))
    return deviation


def _residuals_along_axes(
    training: Training, roots: list[NoiseRoot], cells: Partition, options: SubspaceOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over whitened rows, along every axis, of squared residuals and of the shares of the noise they keep.

    Of rows with missing entries, residuals are what they show of these: what was filled in has no noise.
    """
    x, folds = training.x, training.own_folds
    square, share = np.zeros(x.shape[1]), np.full(x.shape[1], np.finfo(x.dtype).eps)
    scratch = _scratch(x, cells.processes)
    for fold, root in enumerate(roots):
        whitened = _whitened_by(training.without_fold(fold), root, scratch, cells.processes.products)
        found = learn_subspaces(whitened, cells, options, folds, [(fold,)])
        own = Product(x, [root.whitening]) if training.without is not None else whitened
        unseen = _unseen_of_fold(training, fold, root)
        for node in range(len(cells.cells)):
            rows = cells.cell(node)
            inside = rows[folds[rows] == fold]
            centred = own[inside] - found.centres[0, node]
            basis = found.bases[0, node]
            left, kept = centred - (centred @ basis) @ basis.T, np.full(square.size, float(inside.size))
            if unseen is not None:
                partial = np.flatnonzero(unseen.place[inside] >= 0)
                left[partial] = unseen.shown(inside[partial], left[partial])
                kept = np.maximum(kept - unseen.shares(inside[partial], root.axes), 0.0)
            square += np.square(left @ root.axes).sum(axis=0)
            share += kept * np.maximum(1.0 - np.square(root.axes.T @ basis).sum(axis=1), 0.0)
    return cells.processes.total(square), cells.processes.total(share)


def _unseen_of_fold(training: Training, fold: int, root: NoiseRoot) -> Unseen | None:
    """What a fold's rows do not show, whitened by this root; None if all rows are complete."""
    if training.is_observed is None:
        return None
    of_others = (training.own_folds != fold)[:, None]
    none = np.zeros(training.own_folds.size, dtype=int)
    return Unseen.of(training.is_observed | of_others, none, {0: root.whitening}, training.x.dtype)


class NoiseTrial(NamedTuple):
    """A noise covariance that was tried: its standard deviations along the axes of the rows' covariances.

    `subspaces`: one tree's dictionaries with that noise covariance. `evidence`: of these. `gain`: over isotropic noise.
    """

    covariances: Covariances
    deviation: np.ndarray
    subspaces: Subspaces
    evidence: Evidence
    gain: Gain


def try_noise_covariance(
    training: Training, partition: Partition, options: SubspaceOptions, without: np.ndarray
) -> NoiseTrial:
    """How well one tree's dictionary describes held-out rows with a noise covariance that is not isotropic.

    As many directions as a node may have count as signal: with fewer, signal that is common to all nodes would count as
    noise. `without`: log likelihood of the rows under the tree's dictionary with isotropic noise.
    """
    x, folds, num_features, seen = training.x, training.own_folds, training.num_features, training.is_observed
    covariances = learn_covariances(training)
    rank = min(options.max_rank, max(1, num_features // 2))
    in_middle = SubspaceOptions(rank, options.seed)
    deviation = deviation_off_subspaces(training, covariances, middle_cells(partition), in_middle)
    roots = covariances.roots(deviation)
    (found,) = learn_whitened_subspaces(training, roots, [(partition, options)])
    rows = judged_rows(folds, training.processes)
    judged = Training(
        x[rows], num_features, folds[rows], None if seen is None else seen[rows], processes=training.processes
    )
    judged = whiten_training(judged, roots).taken(np.arange(rows.size))
    evidence = evidence_of(judged, rows, partition, found)
    gain = evidence.log_likelihood() - num_features * np.log(roots[0].unit) - without
    if judged.unseen is not None:
        partial = np.flatnonzero(judged.unseen.place >= 0)
        gain[partial] -= judged.unseen.log_det[judged.unseen.place[partial]]
    return NoiseTrial(covariances, deviation, found, evidence, Gain.of(gain))


def is_worth_its_cost(gain: Gain, num_features: int, missing: float = 0.0) -> bool:
    """Whether to use a noise covariance: its gain must be clear, and at least `LEAST_GAIN` per feature.

    `missing`: the share of values that were missing.
    """
    return gain.is_clear and gain.mean >= LEAST_GAIN * num_features * (1.0 + missing / MISSING_SHARE)
