"""The covariance of the noise: what all nodes leave over varies more in some directions than in others.

A node explains a few directions of its own. The rest of its rows' covariance, often most of it where neighbouring
features correlate, is much the same at all nodes. It is estimated as a standard deviation along every principal axis of
the whole data, from residuals off the subspaces of a middle scale's cells: as `learning/feature_noise.py` does for the
features. In coordinates divided by these deviations the model's noise is right for that rest, and a node's directions
are those in which it differs.

The axes are learned without each fold, like all that the statistics of a row depend on, and the residuals are those of
the fold: along axes that the rows had a part in, the lowest would seem to have far less noise than they have.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from geode_jax._runtime.threads import each
from geode_jax.learning.evidence import Evidence, Gain, evidence_of, judged_rows
from geode_jax.learning.feature_noise import middle_cells
from geode_jax.learning.subspaces import SubspaceOptions, Subspaces, join_holdouts, learn_subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.folds import each_fold
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows

NUM_ROUNDS = 3
# Nats per row and feature that a noise covariance has to gain: with one, predictions are quadratic in the features.
LEAST_GAIN = 0.01
# Least deviation relative to their mean: constant features have none, and float32 cannot tell less.
FLOOR = 0.02


class NoiseRoot(NamedTuple):
    """Noise covariance up to a factor, ``R R`` with the symmetric ``R = axes diag(deviation) axes'`` and det R = 1.

    `axes` (D, D): orthonormal columns. `deviation` (D,). `unit`: root mean square of ``R^{-1} x`` over the data.
    """

    axes: np.ndarray
    deviation: np.ndarray
    unit: float

    @property
    def matrix(self) -> np.ndarray:
        """R, (D, D)."""
        return (self.axes * self.deviation) @ self.axes.T

    @property
    def whitening(self) -> np.ndarray:
        """``R^{-1} / unit``, (D, D)."""
        return (self.axes / (self.unit * self.deviation)) @ self.axes.T


class _Moments(NamedTuple):
    """Of a set of rows: their number, sum, and sum of products."""

    size: float
    total: np.ndarray
    products: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.total / self.size

    def plus(self, other: "_Moments", sign: int = 1) -> "_Moments":
        """Of both sets, or without the other."""
        return _Moments(
            self.size + sign * other.size, self.total + sign * other.total, self.products + sign * other.products
        )

    def covariance(self) -> np.ndarray:
        return self.products / self.size - np.outer(self.mean, self.mean)

    def variance_about(self, centre: np.ndarray, axes: np.ndarray) -> np.ndarray:
        """Mean squares along the columns of `axes` about `centre`."""
        return np.einsum("ij,ij->j", axes, self.covariance() @ axes) + np.square((self.mean - centre) @ axes)


class Covariances(NamedTuple):
    """Principal axes (D, D) of all rows and of those without each fold, and the `variance` (D,) held out along them."""

    axes: list[np.ndarray]
    variance: np.ndarray

    def roots(self, deviation: np.ndarray) -> list[NoiseRoot]:
        """Of all rows and without each fold, with the same deviations (D,) along their axes, up to a factor."""
        deviation = np.maximum(deviation, max(FLOOR * deviation.mean(), np.finfo(float).tiny))
        deviation = deviation / np.exp(np.mean(np.log(deviation)))
        unit = float(np.sqrt(np.mean(self.variance / np.square(deviation))))
        return [NoiseRoot(axes, deviation, unit) for axes in self.axes]


def learn_covariances(x: Rows, folds: np.ndarray) -> Covariances:
    """Covariances of all rows of x, (n, D), and of those without each fold: O(n D^2 + D^3) operations."""
    rest, *own = (_moments(x, np.flatnonzero(folds == fold)) for fold in range(-1, folds.max() + 1))
    whole = functools.reduce(_Moments.plus, own, rest)
    left = [whole, *(whole.plus(part, -1) for part in own)]
    axes = each(_principal_axes, left)
    variance = np.zeros(x.shape[1])
    for part, without, directions in zip(own, left[1:], axes[1:], strict=True):
        variance += part.size / (whole.size - rest.size) * part.variance_about(without.mean, directions)
    return Covariances(axes, variance)


def _moments(x: Rows, rows: np.ndarray) -> _Moments:
    total, products = np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[1]))
    for block in slices(rows.size, x.shape[1]):
        values = x[rows[block]].astype(np.float64)
        total += values.sum(axis=0)
        products += values.T @ values
    return _Moments(float(rows.size), total, products)


def _principal_axes(moments: _Moments) -> np.ndarray:
    """Eigenvectors of the covariance, that of the largest variance first."""
    return np.linalg.eigh(moments.covariance())[1][:, ::-1]


def learn_whitened_subspaces(
    x: Rows,
    roots: list[NoiseRoot],
    trees: list[tuple[Partition, SubspaceOptions]],
    folds: np.ndarray,
    on_share: Callable[[float], None] = lambda share: None,
) -> list[Subspaces]:
    """Every tree's dictionaries of whitened coordinates.

    The dictionary that leaves a fold out is that of all rows as whitened without the fold.
    """
    parts: list[list[Subspaces]] = [[] for _ in trees]
    holdouts = each_fold(folds)
    whitened = np.empty(x.shape, x.dtype)  # the only copy: of all rows by one root after the other
    for number, (root, holdout) in enumerate(zip(roots, holdouts, strict=True)):
        on_share(number / len(holdouts))
        _multiply(x, root.whitening, out=whitened)
        for found, (partition, options) in zip(parts, trees, strict=True):
            found.append(learn_subspaces(whitened, partition, options, folds, [holdout]))
    return [join_holdouts(found) for found in parts]


def _multiply(x: Rows, matrix: np.ndarray, out: np.ndarray) -> None:
    matrix = matrix.astype(x.dtype)
    for rows in slices(*x.shape):
        np.matmul(x[rows], matrix, out=out[rows])


def whiten(x: np.ndarray, roots: list[NoiseRoot], folds: np.ndarray) -> np.ndarray:
    """Rows of x, (n, D), whitened in place, each without its own fold; rows in no fold stay."""
    for fold, root in enumerate(roots[1:]):
        matrix, rows = root.whitening.astype(x.dtype), np.flatnonzero(folds == fold)
        for block in slices(rows.size, x.shape[1]):
            x[rows[block]] = x[rows[block]] @ matrix
    return x


def deviation_off_subspaces(
    x: Rows, covariances: Covariances, cells: Partition, options: SubspaceOptions, folds: np.ndarray
) -> np.ndarray:
    """Deviation of the noise along every axis, (D,), where `options.max_rank` directions of each cell are signal.

    From each fold's residuals off the cells' subspaces as learned without it. Each round whitens the rows by what was
    found so far, learns the subspaces again, and corrects it. Deviations decrease with the variance of the data: among
    axes of nearly the same variance the order is by chance, and it is all that says which axis of one fold is which of
    another. An axis that is itself nearly signal says little of the noise, and has that of the next ones.
    """
    deviation = np.ones(x.shape[1])
    for _ in range(NUM_ROUNDS):
        roots = covariances.roots(deviation)
        square, share = _residuals_along_axes(x, roots[1:], cells, options, folds)
        if not square.mean() > 0.0:  # no noise at all
            break
        variance = np.square(roots[0].deviation) * square / share
        deviation = np.sqrt(isotonic_regression(variance, weights=share, increasing=False).x)
    return deviation


def _residuals_along_axes(
    x: Rows, roots: list[NoiseRoot], cells: Partition, options: SubspaceOptions, folds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squared residuals of whitened rows along every axis, and of the shares of the noise that they keep."""
    square, share = np.zeros(x.shape[1]), np.full(x.shape[1], np.finfo(x.dtype).eps)
    whitened = np.empty(x.shape, x.dtype)
    for fold, root in enumerate(roots):
        _multiply(x, root.whitening, out=whitened)
        found = learn_subspaces(whitened, cells, options, folds, [(fold,)])
        for node in range(len(cells.cells)):
            rows = cells.cell(node)
            inside = rows[folds[rows] == fold]
            centred = whitened[inside] - found.centres[0, node]
            basis = found.bases[0, node]
            square += np.square((centred - (centred @ basis) @ basis.T) @ root.axes).sum(axis=0)
            share += inside.size * np.maximum(1.0 - np.square(root.axes.T @ basis).sum(axis=1), 0.0)
    return square, share


class NoiseTrial(NamedTuple):
    """A noise covariance that was tried: the noise's deviation along the axes of the rows' covariances.

    And what the rows say of one tree's dictionary with it: the evidence, and its gain over isotropic noise.
    """

    covariances: Covariances
    deviation: np.ndarray
    evidence: Evidence
    gain: Gain


def try_noise_covariance(
    training: Training, partition: Partition, options: SubspaceOptions, without: np.ndarray
) -> NoiseTrial:
    """How well one tree's dictionary describes held-out rows with a noise covariance that is not isotropic.

    As many directions as nodes may have count as signal: with fewer, what is common to all nodes' directions would
    pass for noise. `without`: log likelihood of the rows by the tree's dictionary with isotropic noise.
    """
    x, folds, num_features = training.x, training.own_folds, training.num_features
    covariances = learn_covariances(x, folds)
    rank = min(options.max_rank, max(1, num_features // 2))
    in_middle = SubspaceOptions(rank, options.seed)
    deviation = deviation_off_subspaces(x, covariances, middle_cells(partition), in_middle, folds)
    roots = covariances.roots(deviation)
    (found,) = learn_whitened_subspaces(x, roots, [(partition, options)], folds)
    rows = judged_rows(folds)
    judged = Training(whiten(x[rows], roots, folds[rows]), num_features, folds[rows])
    evidence = evidence_of(judged, rows, partition, found)
    gain = evidence.log_likelihood() - num_features * np.log(roots[0].unit) - without
    return NoiseTrial(covariances, deviation, evidence, Gain.of(gain))


def is_worth_its_cost(gain: Gain, num_features: int) -> bool:
    """Whether a noise covariance should be taken: as for a span the gain is clear, and at least `LEAST_GAIN`."""
    return gain.is_clear and gain.mean >= LEAST_GAIN * num_features
