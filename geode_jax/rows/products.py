"""Products of rows whose cost grows with their number, by NumPy or by whoever is given instead of it.

What there is to choose, and the eigenvectors of small matrices, is NumPy's in any case.
"""

import numpy as np

from geode_jax.rows.blocks import BLOCK_NUMBERS


class Products:
    """By NumPy. `block_numbers`: how many numbers of the rows to pass at once."""

    block_numbers = BLOCK_NUMBERS

    def moments(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean (D,) and scatter about it (D, D) of rows (m, D), in float64; m is not 0."""
        mean = rows.mean(axis=0, dtype=np.float64)
        centred = rows - mean
        return mean, centred.T @ centred

    def inner(self, rows: np.ndarray) -> np.ndarray:
        """``rows @ rows.T``, (m, m), in the precision of the rows."""
        return rows @ rows.T

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """``rows @ matrix``, (m, k), in their common precision."""
        return rows @ matrix


BY_NUMPY = Products()
