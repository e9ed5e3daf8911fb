"""A span common to all classes: the leading directions of the whole data, with isotropic noise outside.

For classification, the part of a row outside the common span must have the same density under every class. Otherwise
the noise levels of the classes decide, not their densities within the span. So rows are reduced to their coordinates in
the span, and the rest is isotropic noise of one variance, the same under every class.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.learning.shared_span import mean_squares
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.processes import ALONE, Processes

# With fewer rows per direction, the directions are not estimated well enough to drop the rest.
ROWS_PER_DIRECTION = 20


class Reduction(NamedTuple):
    """Coordinates ``w = basis' (x - origin)`` of rows: `origin` (D,), `basis` (D, r) orthonormal, `noise` variance."""

    origin: np.ndarray
    basis: np.ndarray
    noise: np.ndarray

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """Coordinates of rows, (n, r)."""
        return (x - self.origin) @ self.basis

    def log_density_outside(self, x: np.ndarray) -> np.ndarray:
        """Log density of the part of the rows outside the span, (n,)."""
        centred = x - self.origin
        residual = np.square(centred - (centred @ self.basis) @ self.basis.T, dtype=np.float64).sum(axis=1)
        freedom = self.basis.shape[0] - self.basis.shape[1]
        return -0.5 * (freedom * np.log(2 * np.pi * self.noise) + residual / self.noise)


def learn_reduction(x: np.ndarray, rank: int, seed: int, processes: Processes = ALONE) -> Reduction | None:
    """The leading `rank` directions of the rows; None if a reduction gains nothing, or if there are too few rows."""
    num_rows, num_features = processes.count(len(x)), x.shape[1]
    if 2 * rank > num_features or num_rows < ROWS_PER_DIRECTION * rank:
        return None
    whole = Partition.among(processes, 0, (np.arange(len(x)),))
    found = learn_subspaces(x, whole, SubspaceOptions(rank, seed), None)
    if found.ranks[0] < rank:
        return None
    origin, basis = found.centres[0, 0], found.bases[0, 0]
    along, total = mean_squares(x, np.ones(len(x), dtype=bool), origin, basis, processes)
    noise = max(total - float(along.sum()), 0.0) / (num_features - rank)
    if not noise > np.finfo(x.dtype).eps * total / num_features:
        return None  # the rows lie in the span: there is no outside
    return Reduction(origin, basis, np.asarray(noise))
