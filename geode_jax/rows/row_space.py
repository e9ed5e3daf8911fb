"""Rows that are far fewer than their features, in coordinates of the space that they span.

Everything stage one learns from complete rows and asks of them, distances and directions, lies in that space: with n
rows in R^D it costs n coordinates instead of D, after one QR decomposition.
"""

import numpy as np
from scipy.linalg import lapack

from geode_jax.rows.view import Rows

# Worth its decomposition where there are this many times as many features as rows.
WORTH_RATIO = 2
# Features are taken in so many parts: in float64 a part is an eighth of float32 rows.
NUM_PARTS = 16
# Columns that LAPACK eliminates together.
PANEL = 64


def is_worth(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


def row_coordinates(x: Rows) -> np.ndarray:
    """Coordinates (n, n) of the rows of x, (n, D) with D >= n, about their mean: all distances are as they were.

    The triangle of a QR decomposition of the features, some at a time under the triangle of those before, where it
    lies: no copy of the rows is made.
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
