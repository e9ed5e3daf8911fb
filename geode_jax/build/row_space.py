"""Rows that are far fewer than their features, in coordinates of the space that they span.

Everything stage one learns from complete rows and asks of them, distances and directions, lies in that space: with n
rows in R^D it costs n coordinates instead of D, after one QR decomposition.
"""

import numpy as np

# Worth its decomposition where there are this many times as many features as rows.
WORTH_RATIO = 2
# Features at a time, for each row.
BLOCK_RATIO = 4


def is_worth(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


def row_coordinates(x: np.ndarray) -> np.ndarray:
    """Coordinates (n, n) of the rows of x, (n, D) with D >= n, about their mean: all distances are as they were.

    The triangle of a QR decomposition of the features, some at a time under the triangle of those before: no copy of
    the rows is made.
    """
    num_rows, num_features = x.shape
    triangle = np.zeros((0, num_rows), x.dtype)
    for start in range(0, num_features, BLOCK_RATIO * num_rows):
        block = x[:, start : start + BLOCK_RATIO * num_rows]
        centred = block - block.mean(axis=0, dtype=np.float64).astype(x.dtype)
        triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, centred.T]), mode="r"))
    return triangle.T.copy()
