"""Coordinates in the row space, for data with far fewer rows than features.

All that stage one needs from complete rows, distances and directions, lies in the space that the rows span. With n rows
in R^D it works on at most n coordinates instead of D, after one QR decomposition, and dictionaries stay in coordinates:
those of 8 trees over 100,000 features would else take 40 GB.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import lapack

from geode_jax.rows.blocks import slices
from geode_jax.rows.view import Rows

# Row coordinates are used where there are at least this many times as many features as rows.
WORTH_RATIO = 2
# The features are decomposed in this many parts: one part in float64 takes an eighth of the memory of float32 rows.
NUM_PARTS = 16
# Block size of LAPACK's QR decomposition, in columns.
PANEL = 64
# Directions along which the rows vary by less than this share of the largest variation are rounding errors: of a QR
# decomposition in float64, and of rows in float32.
ROUNDING, FLOAT32_ROUNDING = 1e-8, 1e-6


def uses_row_space(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


class RowSpace(NamedTuple):
    """Rows relative to their mean, in coordinates along their principal axes; distances are preserved.

    - `coordinates`: (n, q), the largest first.
    - `weights`: (n, q) in float64; the axes, (D, q), are combinations of the rows with these weights.
    """

    coordinates: np.ndarray
    weights: np.ndarray


class Axes(NamedTuple):
    """Orthonormal axes of a space of p dimensions that holds the rows' mean and all or a part of their row space.

    - `matrix`: (D, p).
    - `turn`: (q, r), orthonormal columns: the part of the row space that the first r axes span; None is all of it.
    - `origin`: (p,), the rows' mean.
    """

    matrix: np.ndarray
    turn: np.ndarray | None
    origin: np.ndarray

    def turned(self, vectors: np.ndarray) -> np.ndarray:
        """Column vectors of :class:`RowSpace` coordinates, (..., q, d), along the first axes, (..., r, d)."""
        return vectors if self.turn is None else np.matmul(self.turn.T, vectors)


def row_space(x: Rows) -> RowSpace:
    """Coordinates of the rows of x, (n, D) with D >= n.

    From their Gram matrix in float64, which holds all the digits of rows in float32. Rows in float64 have more: theirs
    are from the triangular factor of a QR decomposition of x', which takes three times as long. Both are updated with a
    part of the features at a time: no copy of the rows is made.
    """
    num_rows, num_features = x.shape
    is_gram = x.dtype == np.float32
    total = np.zeros((num_rows, num_rows), order="F")
    for some in _parts(num_rows, num_features):
        part = np.asfortranarray(x[:, some].T, dtype=np.float64)
        part -= part.mean(axis=1, keepdims=True)
        if is_gram:
            total += part.T @ part
        else:
            total = lapack.dtpqrt(0, min(PANEL, num_rows), total, part, overwrite_a=True, overwrite_b=True)[0]
    if is_gram:
        squares, vectors = np.linalg.eigh(total)
        left, lengths = vectors[:, ::-1], np.sqrt(np.maximum(squares[::-1], 0.0))
    else:
        left, lengths, _ = np.linalg.svd(total.T)
    kept = lengths > (FLOAT32_ROUNDING if is_gram else ROUNDING) * lengths[0]
    kept[0] = True
    left, lengths = left[:, kept], lengths[kept]
    # rows that are all equal have no direction: their weights stay finite
    return RowSpace((left * lengths).astype(x.dtype), left / np.maximum(lengths, np.finfo(np.float64).tiny))


def axes_of(x: Rows, space: RowSpace, directions: np.ndarray | None = None) -> Axes:
    """Axes of the space of the rows x, whose :func:`row_space` is `space`, or of a part of it, and of their mean.

    `directions`: orthonormal, (q, p'), of the part; None is all of it. The mean has an axis of its own unless it is
    zero, or in the space, to within rounding.
    """
    num_rows, num_features = x.shape
    weights = space.weights if directions is None else space.weights @ directions.astype(np.float64)
    rank = weights.shape[1]
    matrix, mean, origin = np.empty((num_features, rank), x.dtype), np.empty(num_features), np.zeros(rank)
    for some in _parts(num_rows, num_features):
        part = x[:, some].astype(np.float64)
        mean[some] = part.mean(axis=0)
        found = (part - mean[some]).T @ weights
        origin += mean[some] @ found
        matrix[some] = found
    for some in slices(num_features, rank):
        mean[some] -= matrix[some] @ origin
    length = float(np.linalg.norm(mean))
    if length > 4.0 * np.finfo(x.dtype).eps * np.sqrt(num_features):
        matrix = np.column_stack([matrix, (mean / length).astype(x.dtype)])
        origin = np.append(origin, length)
    return Axes(matrix, directions, origin)


def _parts(num_rows: int, num_features: int) -> list[slice]:
    """The features in parts of at least as many as a block of the QR decomposition."""
    size = max(PANEL, -(-num_features // NUM_PARTS))
    return [slice(start, start + size) for start in range(0, num_features, size)]
