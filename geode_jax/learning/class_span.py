"""A few coordinates that hold what all classes have in common: the span of the whole data, noise outside it.

Where classes are told apart, what lies outside a span common to them must be described alike in all of them, or the
noise levels of the classes decide instead of their shapes. So rows are reduced to their coordinates in the span, and
the rest is isotropic noise of one variance, the same under every class.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import Partition

# Rows per direction below which directions are not known well enough to drop what is outside.
ROWS_PER_DIRECTION = 20


class Reduction(NamedTuple):
    """Coordinates ``w = basis' (x - origin)`` of rows: `origin` (D,), `basis` (D, r) orthonormal, `noise` variance."""

    origin: np.ndarray
    basis: np.ndarray
    noise: np.ndarray

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """(n, r)."""
        return (x - self.origin) @ self.basis

    def log_density_outside(self, x: np.ndarray) -> np.ndarray:
        """Log density of what the coordinates do not say, (n,)."""
        centred = x - self.origin
        residual = np.square(centred - (centred @ self.basis) @ self.basis.T, dtype=np.float64).sum(axis=1)
        freedom = self.basis.shape[0] - self.basis.shape[1]
        return -0.5 * (freedom * np.log(2 * np.pi * self.noise) + residual / self.noise)


def learn_reduction(x: np.ndarray, rank: int, seed: int) -> Reduction | None:
    """The leading `rank` directions of the rows; None where there is nothing to gain or rows are too few for it."""
    num_rows, num_features = x.shape
    if 2 * rank > num_features or num_rows < ROWS_PER_DIRECTION * rank:
        return None
    found = learn_subspaces(x, Partition(0, (np.arange(num_rows),)), SubspaceOptions(rank, seed), None)
    if found.ranks[0] < rank:
        return None
    origin, basis = found.centres[0, 0], found.bases[0, 0]
    total, kept = 0.0, 0.0
    for start in range(0, num_rows, 4096):
        centred = x[start : start + 4096] - origin
        total += float(np.square(centred, dtype=np.float64).sum())
        kept += float(np.square(centred @ basis, dtype=np.float64).sum())
    noise = max(total - kept, 0.0) / (num_rows * (num_features - rank))
    if not noise > np.finfo(x.dtype).eps * total / (num_rows * num_features):
        return None  # the rows lie in the span: there is no outside
    return Reduction(origin, basis, np.asarray(noise))
