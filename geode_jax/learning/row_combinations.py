"""Subspaces of a cell with fewer rows than features, as combinations of its rows.

A cell's centre, its directions, and the residuals of its rows off them are combinations of its rows. Their coefficients
follow from the rows' Gram matrix alone. So where only sums over rows are wanted no basis is made: the features are
passed over a few at a time, in one product with all coefficients.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.learning.decompositions import Tolerance


class HeldOut(NamedTuple):
    """Coefficients of the n rows of a cell under the subspace learned without one fold; they add up to 0.

    - `inside`: (i,), the rows of that fold.
    - `residuals`: (i, n), of these rows off the subspace.
    - `directions`: (r, n), of its orthonormal basis.
    """

    inside: np.ndarray
    residuals: np.ndarray
    directions: np.ndarray


def held_out_combinations(gram: np.ndarray, folds: np.ndarray, max_rank: int, tolerance: Tolerance) -> list[HeldOut]:
    """For each fold that has rows in the cell. `gram`: of the rows about any origin, (n, n), in float64.

    All subspaces have equally many directions, at most `max_rank`: as many as all of them support.
    """
    learned, rank = [], max_rank
    for fold in np.unique(folds[folds >= 0]).tolist():
        kept = folds != fold
        centre = kept / kept.sum() if kept.any() else np.full(folds.size, 1.0 / folds.size)
        centring = np.eye(folds.size) - centre
        rank = min(rank, max(int(kept.sum()) - 1, 0))
        if rank == 0:
            learned.append((fold, centring, np.zeros(0), np.zeros((0, folds.size))))
            continue
        values, vectors = np.linalg.eigh(centring[kept] @ gram @ centring[kept].T)
        singular = np.sqrt(np.maximum(values[::-1][:rank], 0.0))
        singular = singular[singular > tolerance(float(singular[0]))]
        rank = singular.size
        learned.append((fold, centring, singular, vectors[:, ::-1][:, :rank].T @ centring[kept]))
    found = []
    for fold, centring, singular, combined in learned:
        directions = combined[:rank] / singular[:rank, None]
        own = centring[folds == fold]
        coordinates = own @ gram @ directions.T
        found.append(HeldOut(np.flatnonzero(folds == fold), own - coordinates @ directions, directions))
    return found
