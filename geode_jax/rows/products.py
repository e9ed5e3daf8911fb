"""Products of rows whose cost grows with their number: by NumPy, or by a device in its place.

The rest of stage one is always NumPy's: graphs and trees, decompositions of matrices, choices.
"""

from collections.abc import Iterator

import numpy as np

from geode_jax.rows.blocks import slices


class Products:
    """By NumPy."""

    def blocks(self, length: int, width: int) -> Iterator[slice]:
        """Slices of `length` rows (or columns) of `width` numbers each, to pass one at a time."""
        return slices(length, width)

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
