"""Rows far from the data are computed in float64, so that finite rows get answers that are finite and precise.

A log density is a sum of squares: at a distance of r standard deviations its rounding error is of order ``eps r^2``. In
float32 that changes the weights of the nodes from some ten standard deviations on, and beyond 1e19 the squares
overflow. Such rows are rare, so float64 costs little there. Where features are divided by their noise, coordinates of
ordinary rows are large, and rows are far only if theirs are larger still. :func:`geode_jax.rows.frame.to_model` bounds
the coordinates of all rows, so that squares are finite in float64 too.
"""

from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import ArrayLike, Bool
from geode_jax.learning.class_span import Reduction
from geode_jax.math.lowrank import largest_signal
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.posterior.posterior import Posterior
from geode_jax.rows.blocks import slices

# Root mean square of a row's model coordinates, over that of the data if it is above 1; larger for about one row in a
# thousand of tables with heavy tails. Up to here widths of intervals in float32 are those in float64 to within 3e-3
# (tests/test_far_rows.py). A lower limit would make ordinary outliers compile a second set of programs.
FARTHEST_IN_FLOAT32 = 4.0

# Where a direction's variance is more than `largest_signal` times that of the noise, rows with missing features are
# computed in float64: inner products of a direction that is not seen are zero only to within rounding, which this ratio
# multiplies. With a noise covariance in a space, the rounding error is up to ten times as large (`_whitened` in
# math/rows_in_space.py).
LARGEST_SIGNAL_IN_NOISE = 2e5
# Nor are the noise's deviations along axes of the space more than so many times that outside: along what is not seen,
# rounding errors are multiplied by the square of this ratio. At 27 float32 has densities to 1e-4 nats; at 260 they were
# off by a tenth of a nat, or -inf, and means by five deviations.
LARGEST_DEVIATION_IN_NOISE = 30.0

# The same for classes in a common span, over the noise outside and over that inside: their covariances are summed and
# factored as they are (predict/class_span.py), and small eigenvalues are lost in the rounding of large ones. At this
# ratio log densities in float32 are off by some hundredths of a nat.
LARGEST_SIGNAL_OF_CLASSES = 1e6

AnyPosterior = TypeVar("AnyPosterior", Posterior, ClassPosterior)


def by_distance(
    posterior: AnyPosterior, data: np.ndarray, rows: np.ndarray | None = None
) -> Iterator[tuple[AnyPosterior, np.ndarray]]:
    """Pairs of a posterior and the indices of the rows it should be applied to: far rows get one in float64.

    `data` (n, D) are in the data's units, NaN being missing values. Only the given `rows` are considered, all if None;
    there is no pair without rows.
    """
    rows = np.arange(data.shape[0]) if rows is None else rows
    far = np.zeros(rows.size, bool) if posterior.dtype == np.float64 else is_far(posterior, data, rows)
    if not far.all():
        yield posterior, rows[~far]
    if far.any():
        yield in_float64(posterior), rows[far]


def is_far(posterior: Posterior | ClassPosterior, data: np.ndarray, rows: np.ndarray) -> Bool[np.ndarray, "n"]:
    """Whether the observed part of each of these rows is too far from the data for float32, or for a space in it."""
    varying = posterior.varying_features if isinstance(posterior, ClassPosterior) else slice(None)
    shift, scale = posterior.shift[varying], posterior.scale[varying]
    mean_square, is_partial = np.zeros(rows.size), np.zeros(rows.size, dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in slices(rows.size, data.shape[1]):
            own = data[rows[part]][:, varying]
            is_partial[part] = np.isnan(own).any(axis=1)
            mean_square[part] = np.nansum(np.square((own - shift) / scale), axis=1) / shift.size
    found = mean_square > FARTHEST_IN_FLOAT32**2
    if found.any():  # only then is the data's spread worth computing
        found &= mean_square > FARTHEST_IN_FLOAT32**2 * max(1.0, _mean_square(posterior))
    return found | is_partial if is_partial.any() and _needs_digits(posterior) else found


def _needs_digits(posterior: Posterior | ClassPosterior) -> bool:
    """Whether signals at nodes with rows are so large that partial rows need float64."""
    if isinstance(posterior, ClassPosterior) and posterior.reduction is not None:
        limit = np.log(LARGEST_SIGNAL_OF_CLASSES)
        outside = limit + np.log(posterior.reduction.noise)
        return any(
            _has_signal_above(one, limit) or _has_signal_above(one, outside, one.draws.log_sigma2)
            for one in posterior.members
        )
    members = posterior.members if isinstance(posterior, ClassPosterior) else (posterior,)
    return any(_has_too_large_signals(one) for one in members)


def _has_too_large_signals(posterior: Posterior) -> bool:
    """Whether a node with rows, or the noise, has a variance that its dtype cannot hold where rows miss features."""
    limit = largest_signal(posterior.dictionary.max_rank, posterior.dtype)
    if posterior.noise_deviation is not None:
        limit = min(limit, LARGEST_SIGNAL_IN_NOISE)
        root = None if posterior.space is None else posterior.space.root
        if root is not None and np.max(root.deviation) > LARGEST_DEVIATION_IN_NOISE * root.outside:
            return True
    return _has_signal_above(posterior, np.log(limit))


def _has_signal_above(posterior: Posterior, limit: float, log_noise: ArrayLike | None = None) -> bool:
    """Whether a direction of a node with rows has a log variance above `limit`, over the noise or, if given, in all."""
    found = np.asarray(posterior.draws.neg_log_u)
    if log_noise is not None:
        found = found + np.asarray(log_noise)[..., np.asarray(posterior.dictionary.tree.scale), None]
    if found.max() <= limit:  # as nearly always
        return False
    return bool(((found > limit) & (np.asarray(posterior.draws.count) > 0)[..., None]).any())


def _mean_square(posterior: Posterior | ClassPosterior) -> float:
    """Mean square of the data's coordinates ``(y - shift) / scale``, or less.

    It is that of the centres of the rows' nodes, in the first tree of a posterior or of every class.
    """
    if isinstance(posterior, ClassPosterior):
        return float(np.mean([_of_centres(one, posterior.reduction) for one in posterior.members]))
    return _of_centres(posterior, None)


def _of_centres(posterior: Posterior, reduction: Reduction | None) -> float:
    centres = np.asarray(posterior.dictionary.centres[0], np.float64)
    count = np.asarray(posterior.draws.count[0], np.float64).sum(axis=(0, 1))
    if posterior.noise_root is not None:
        centres = centres @ posterior.noise_root
    if posterior.noise_deviation is not None:
        centres = centres[:, :-1] * posterior.noise_deviation
    if reduction is not None:
        centres = reduction.origin + centres @ reduction.basis.T
    num_features = posterior.num_features if reduction is None else centres.shape[1]
    return float(np.average(np.sum(np.square(centres), axis=1) / num_features, weights=count))


def in_float64(posterior: AnyPosterior) -> AnyPosterior:
    """The same posterior with all its numbers in float64."""

    def cast(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        if leaf.dtype.kind != "f":
            return leaf
        return jnp.asarray(leaf, np.float64) if isinstance(leaf, jax.Array) else leaf.astype(np.float64)

    with jax_settings(np.float64):
        return jax.tree.map(cast, posterior)
