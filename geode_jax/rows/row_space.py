"""Coordinates in the row space, for data with far fewer rows than features.

All that stage one needs from complete rows, distances and directions, lies in the space that the rows span. With n rows
in R^D it works on at most n coordinates instead of D. Dictionaries stay in coordinates where they would be large with
all features: those of 8 trees over 100,000 features would take 40 GB. Statistics of rows with missing entries are over
their observed features, so final dictionaries are then in R^D; but where few rows miss something, choices and
candidates are found in coordinates of the space that all rows span as filled.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.linalg import lapack

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax.rows.blocks import slices
from geode_jax.rows.view import Rows

# Row coordinates are used where there are at least this many times as many features as rows.
WORTH_RATIO = 2
# The features are decomposed in this many parts: one part in float64 takes an eighth of the memory of float32 rows.
NUM_PARTS = 16
# Block size of LAPACK's QR decomposition, in columns.
PANEL = 64
# Directions along which the rows vary by less than this share of the largest variation may be rounding errors: of a QR
# decomposition in float64, and of a Gram matrix.
ROUNDING, GRAM_ROUNDING = 1e-8, 1e-6
# Dictionaries that take more bytes than this are kept in coordinates, if these take so many times less.
LARGE_BYTES, LEAST_SAVING = 2**28, 4


def uses_row_space(num_rows: int, num_features: int) -> bool:
    """Whether coordinates in the row space save more than they cost."""
    return num_features >= WORTH_RATIO * num_rows


def is_kept_in_space(num_features: int, num_axes: int, num_nodes: int, rank: int, itemsize: int) -> bool:
    """Whether dictionaries with so many nodes in all trees stay in coordinates of a space, or get all features."""
    dense = num_nodes * num_features * (rank + 1)
    kept = num_axes * (num_features + num_nodes * (rank + 1))
    return itemsize * dense > LARGE_BYTES and LEAST_SAVING * kept <= dense


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

    def directions(self, vectors: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Column vectors of coordinates along the first axes, (..., r, d), in R^D: (..., D, d)."""
        return np.matmul(self.matrix[:, : vectors.shape[-2]], vectors, out=out)

    def points(self, coordinates: np.ndarray) -> np.ndarray:
        """Rows (..., r) of coordinates along the first axes, about the rows' mean, as points of R^D, (..., D)."""
        along = coordinates @ self.matrix[:, : coordinates.shape[-1]].T
        return along + self.matrix @ self.origin.astype(self.matrix.dtype)


def principal_coordinates(x: Rows) -> RowSpace:
    """Coordinates of the rows of x, (n, D) with D >= n, which stays as it is.

    From their Gram matrix in float64, which holds the digits of rows in float32 unless their variations differ by more
    than a million times; else from the triangular factor of a QR decomposition of x', which takes three times as long.
    Both are updated with a part of the features at a time: no copy of the rows is made.
    """
    num_rows = x.shape[0]
    if x.dtype == np.float32:
        gram = np.zeros((num_rows, num_rows))
        for part in _centred_parts(x):
            gram += part.T @ part
        squares, vectors = np.linalg.eigh(gram)
        lengths = np.sqrt(np.maximum(squares[::-1], 0.0))
        # one direction is always missing, that of the mean
        if (lengths > GRAM_ROUNDING * lengths[0]).sum() >= num_rows - 1:
            return _along_axes(x, vectors[:, ::-1][:, : num_rows - 1], lengths[: num_rows - 1])
    triangle = np.zeros((num_rows, num_rows), order="F")
    for part in _centred_parts(x):
        triangle = lapack.dtpqrt(0, min(PANEL, num_rows), triangle, part, overwrite_a=True, overwrite_b=True)[0]
    left, lengths, _ = np.linalg.svd(triangle.T)
    number = max(1, int((lengths > ROUNDING * lengths[0]).sum()))
    return _along_axes(x, left[:, :number], lengths[:number])


def _along_axes(x: Rows, left: np.ndarray, lengths: np.ndarray) -> RowSpace:
    # rows that are all equal have no direction: their weights stay finite
    return RowSpace((left * lengths).astype(x.dtype), left / np.maximum(lengths, np.finfo(np.float64).tiny))


def _centred_parts(x: Rows) -> Iterator[np.ndarray]:
    """Parts of the features, relative to their means: (D', n) each, in float64."""
    for some in _parts(x.shape[1]):
        part = np.array(x[:, some].T, np.float64, order="F")  # a copy in any case: it is overwritten
        part -= part.mean(axis=1, keepdims=True)
        yield part


def axes_of(x: Rows, space: RowSpace, directions: np.ndarray | None = None) -> Axes:
    """Axes of the space of the rows x, or of a part of it, and of their mean; `space`: their principal coordinates.

    `directions`: orthonormal, (q, p'), of the part; None is all of it. The mean has an axis of its own unless it is
    zero, or in the space, to within rounding.
    """
    num_features = x.shape[1]
    weights = space.weights if directions is None else space.weights @ directions.astype(np.float64)
    rank = weights.shape[1]
    # aligned, so that a CPU device takes it without a copy
    matrix, mean, origin = aligned_zeros((num_features, rank), x.dtype), np.empty(num_features), np.zeros(rank)
    for some in _parts(num_features):
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


def _parts(num_features: int) -> list[slice]:
    """The features in parts of at least as many as a block of the QR decomposition."""
    size = max(PANEL, -(-num_features // NUM_PARTS))
    return [slice(start, start + size) for start in range(0, num_features, size)]
