"""Rows that are far fewer than their features, in coordinates of the space that they span.

Everything stage one learns from complete rows and asks of them, distances and directions, lies in that space: with n
rows in R^D it costs n coordinates instead of D, after one QR decomposition.
"""

import numpy as np

# Worth its decomposition where there are this many times as many features as rows.
WORTH_RATIO = 2


def is_worth(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


def row_coordinates(x: np.ndarray) -> np.ndarray:
    """Coordinates (n, n) of the rows of x, (n, D) with D >= n, about their mean: all distances are as they were."""
    centred = x - x.mean(axis=0, dtype=np.float64).astype(x.dtype)
    return np.asarray(np.linalg.qr(centred.T, mode="r")).T.copy()
