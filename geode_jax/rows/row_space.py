"""Coordinates in the row space, for data with far fewer rows than features.

All that stage one needs from complete rows, distances and directions, lies in the space that the rows span. With n rows
in R^D it works on n coordinates instead of D, after one QR decomposition.
"""

import numpy as np
from scipy.linalg import lapack

from geode_jax.rows.view import Rows

# Row coordinates are used where there are at least this many times as many features as rows.
WORTH_RATIO = 2
# The features are decomposed in this many parts: one part in float64 takes an eighth of the memory of float32 rows.
NUM_PARTS = 16
# Block size of LAPACK's QR decomposition, in columns.
PANEL = 64


def uses_row_space(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


def row_coordinates(x: Rows) -> np.ndarray:
    """Coordinates (n, n) of the rows of x, (n, D) with D >= n, relative to their mean; distances are preserved.

    They are the triangular factor of a QR decomposition of x', updated in place with a part of the features at a time:
    no copy of the rows is made.
    """
    num_rows, num_features = x.shape
    triangle = np.zeros((num_rows, num_rows), order="F")
    size = max(PANEL, -(-num_features // NUM_PARTS))
    for start in range(0, num_features, size):
        part = np.asfortranarray(x[:, start : start + size].T, dtype=np.float64)
        part -= part.mean(axis=1, keepdims=True)
        panel = min(PANEL, num_rows)
        triangle = lapack.dtpqrt(0, panel, triangle, part, overwrite_a=True, overwrite_b=True)[0]
    return triangle.T.astype(x.dtype)
