"""The common shape of the noise: what all nodes leave over varies more in some directions than in others.

A node explains a few directions of its own; the rest of its rows' covariance, often most of it where neighbouring
features hang together, is the same everywhere. In coordinates where the covariance of the whole data is a multiple of
the identity the model's noise is right for that rest, and its directions are those in which a node differs.

The whole covariance is estimated without each fold, like all that the statistics of a row depend on. Its eigenvectors
over-fit less than its eigenvalues, which are far too small at the lower end: those are estimated by the variances of
each fold along the directions learned without it (as in Bartz 2016, "Cross-validation based nonlinear shrinkage"),
made decreasing.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from geode_jax.build.blocks import slices
from geode_jax.build.evidence import Evidence, cross_fitted_evidence, is_clear
from geode_jax.build.parallel import each
from geode_jax.build.partition import Partition
from geode_jax.build.subspace import Subspaces, each_fold, join_groups, learn_subspaces

# Axes that nodes are taken to have directions for: the fewest that are tried, or a third of all, or as many as there
# are directions. Twice as many are tried as long as that helps, up to half of all.
NUM_LEADING = 20
# Least deviation relative to their mean: constant features have none, and float32 cannot tell less.
FLOOR = 0.02


class Shape(NamedTuple):
    """Noise covariance up to a factor, ``R R`` with the symmetric ``R = axes diag(deviation) axes'`` and det R = 1.

    `axes` (D, D): orthonormal columns. `deviation` (D,). `unit`: root mean square of ``R^{-1} x`` over the data.
    """

    axes: np.ndarray
    deviation: np.ndarray
    unit: float

    @property
    def root(self) -> np.ndarray:
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

    def shapes(self, num_leading: int) -> list[Shape]:
        """Shapes of all rows and without each fold, with one set of variances.

        Along the `num_leading` first axes, where nodes have directions of their own, noise is as along the next one.
        """
        deviation = np.sqrt(np.maximum(np.minimum(self.variance, self.variance[num_leading]), 0.0))
        deviation = np.maximum(deviation, max(FLOOR * deviation.mean(), np.finfo(float).tiny))
        deviation /= np.exp(np.mean(np.log(deviation)))
        unit = float(np.sqrt(np.mean(self.variance / np.square(deviation))))
        return [Shape(axes, deviation, unit) for axes in self.axes]


def learn_covariances(x: np.ndarray, folds: np.ndarray) -> Covariances:
    """Covariances of all rows of x, (n, D), and of those without each fold: O(n D^2 + D^3) operations."""
    rest, *own = (_moments(x, np.flatnonzero(folds == fold)) for fold in range(-1, folds.max() + 1))
    whole = functools.reduce(_Moments.plus, own, rest)
    left = [whole, *(whole.plus(part, -1) for part in own)]
    axes = each(_principal_axes, left)
    variance = np.zeros(x.shape[1])
    for part, without, directions in zip(own, left[1:], axes[1:], strict=True):
        variance += part.size / (whole.size - rest.size) * part.variance_about(without.mean, directions)
    return Covariances(axes, isotonic_regression(variance, increasing=False).x)


def _moments(x: np.ndarray, rows: np.ndarray) -> _Moments:
    total, products = np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[1]))
    for block in slices(rows.size, x.shape[1]):
        values = x[rows[block]].astype(np.float64)
        total += values.sum(axis=0)
        products += values.T @ values
    return _Moments(float(rows.size), total, products)


def _principal_axes(moments: _Moments) -> np.ndarray:
    """Eigenvectors of the covariance, that of the largest variance first."""
    return np.linalg.eigh(moments.covariance())[1][:, ::-1]


def learn_subspaces_in_shapes(
    x: np.ndarray,
    shapes: list[Shape],
    partitions: list[Partition],
    max_rank: int,
    folds: np.ndarray,
    seeds: list[int],
    parent_rows: float = 0.0,
    on_share: Callable[[float], None] = lambda share: None,
) -> tuple[np.ndarray, list[Subspaces]]:
    """Rows whitened without their own fold, if any, (n, D), and every tree's dictionaries of whitened coordinates.

    The dictionary that leaves a fold out is that of all rows as whitened without the fold.
    """
    parts: list[list[Subspaces]] = [[] for _ in partitions]
    left_out = each_fold(folds)
    matrices = [shape.whitening.astype(x.dtype) for shape in shapes]
    whitened = np.empty_like(x)  # the only copy: first of all rows by one shape after the other, then each by its own
    for number, (matrix, group) in enumerate(zip(matrices, left_out, strict=True)):
        on_share(number / len(left_out))
        np.matmul(x, matrix, out=whitened)
        for found, partition, seed in zip(parts, partitions, seeds, strict=True):
            found.append(learn_subspaces(whitened, partition, max_rank, folds, seed, parent_rows, [group]))
    for fold, matrix in enumerate(matrices, start=-1):
        rows = np.flatnonzero(folds == fold)
        for block in slices(rows.size, x.shape[1]):
            whitened[rows[block]] = x[rows[block]] @ matrix
    return whitened, [join_groups(found) for found in parts]


class Chosen(NamedTuple):
    """Covariances and the leading axes that noise leaves to the nodes, and what the rows say of one tree's dictionary.

    `gain`: in log likelihood per row, over isotropic noise.
    """

    covariances: Covariances
    num_leading: int
    evidence: Evidence
    gain: float


def choose_shapes(
    x: np.ndarray,
    partition: Partition,
    max_rank: int,
    folds: np.ndarray,
    seed: int,
    without: np.ndarray,
    parent_rows: float = 0.0,
) -> Chosen | None:
    """The shape with which one tree's dictionary describes held-out rows best; None where that is isotropic noise.

    Nodes are left more and more leading axes, as long as that helps. As with a span of directions, the gain has to be
    two standard errors. `without`: log likelihood of the rows by the tree's dictionary with isotropic noise.
    """

    def try_shapes(shapes: list[Shape]) -> Evidence:
        own, (found,) = learn_subspaces_in_shapes(x, shapes, [partition], max_rank, folds, [seed], parent_rows)
        return cross_fitted_evidence(own, partition, found, folds)

    covariances, num_features = learn_covariances(x, folds), x.shape[1]
    best: Chosen | None = None
    best_gain = np.zeros(1)
    num_leading = min(NUM_LEADING, num_features // 3, max_rank)
    while best is None or 2 * num_leading <= num_features:
        shapes = covariances.shapes(num_leading)
        evidence = try_shapes(shapes)
        gain = evidence.log_likelihood() - num_features * np.log(shapes[0].unit) - without
        if not is_clear(gain - best_gain):
            break
        best_gain = gain
        best = Chosen(covariances, num_leading, evidence, float(gain.mean()))
        num_leading = max(1, 2 * num_leading)
    return best
