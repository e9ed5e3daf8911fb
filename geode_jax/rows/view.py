"""Rows of the data in other coordinates: converted in place, or computed when they are indexed.

Stage one reads some rows at a time. So it need not hold a second array as large as the data for coordinates that it
only tries, and no array at all where the data are a file mapped into memory.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np

from geode_jax.rows.blocks import slices
from geode_jax.rows.files import RowFiles, rows_and_features


class View:
    """Rows ``(source - shift) / divisors``, (n, D), of an array or another view, computed when they are indexed.

    `dtype` is that of the result, by default the source's. With a shift the computation is in float64, so that data far
    from the origin lose no digits. `features`: those of the source that the view has; None is all.
    """

    shape: tuple[int, int]
    dtype: np.dtype

    def __init__(
        self,
        source: "Rows | RowFiles",
        divisors: np.ndarray,
        shift: np.ndarray | None = None,
        dtype: np.dtype | None = None,
        features: np.ndarray | None = None,
    ) -> None:
        self.shape = source.shape[0], divisors.size
        self.dtype = source.dtype if dtype is None else dtype
        self._source, self._shift, self._features = source, shift, features
        self._divisors = divisors.astype(self.dtype) if shift is None else divisors

    def __getitem__(self, index: Any) -> np.ndarray:
        """The indexed rows; with a pair of indices, the indexed features of the indexed rows."""
        if not isinstance(index, np.ndarray) or index.dtype == bool:
            return self._found(index)
        out = np.empty((index.size, self.shape[1]), self.dtype)  # filled in blocks, as the float64 rows are larger
        for some in slices(*out.shape):
            out[some] = self._found(index[some])
        return out

    def _found(self, index: Any) -> np.ndarray:
        features = index[1] if isinstance(index, tuple) else slice(None)
        found = self._read(index)
        if self._shift is not None:
            found = found - self._shift[features]
        return np.asarray(found / self._divisors[features], self.dtype)

    def _read(self, index: Any) -> np.ndarray:
        if self._features is None:
            return self._source[index]
        rows, features = rows_and_features(index)
        columns = self._features[features]
        if isinstance(self._source, RowFiles):
            return self._source[rows, columns]
        if isinstance(rows, slice):  # in C order, as sums of whole arrays are
            return self._source[rows].take(columns, axis=1)
        return self._source[np.ix_(rows, columns)]


class Product(View):
    """Rows ``source @ matrices[which]``, (n, D), computed when they are indexed.

    `matrices`: (D, D) each. `which`, (n,): the matrix of every row, -1 where the row is left unchanged; None is the
    first for all.
    """

    def __init__(self, source: "Rows", matrices: Sequence[np.ndarray], which: np.ndarray | None = None) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self._source = source
        self._matrices = [matrix.astype(self.dtype) for matrix in matrices]
        self._which = np.zeros(source.shape[0], dtype=np.int8) if which is None else which

    def _found(self, index: Any) -> np.ndarray:
        rows, features = rows_and_features(index)
        found, which = np.array(self._source[rows]), self._which[rows]
        for number in np.unique(which[which >= 0]):
            own = which == number
            found[own] = found[own] @ self._matrices[number]
        return found[:, features]


class Overlay(View):
    """Rows of `source`, (n, D), with other `values`, (m, D), in place of the rows `replaced`, (m,)."""

    def __init__(self, source: "Rows", replaced: np.ndarray, values: np.ndarray) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self._source, self._values = source, values
        self._place = np.full(source.shape[0], -1)
        self._place[replaced] = np.arange(replaced.size)

    def _found(self, index: Any) -> np.ndarray:
        rows, features = rows_and_features(index)
        found, place = np.array(self._source[rows]), self._place[rows]
        found[place >= 0] = self._values[place[place >= 0]]
        return found[:, features]


Rows: TypeAlias = np.ndarray | View


def is_in_memory(x: Rows | RowFiles) -> bool:
    """Whether rows are an array, or computed from one, that is no file mapped into memory."""
    while isinstance(x, View):
        x = x._source
    base: Any = x
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return isinstance(x, np.ndarray) and base is None


@overload
def taken(x: np.ndarray, rows: np.ndarray) -> np.ndarray: ...
@overload
def taken(x: Rows, rows: np.ndarray) -> Rows: ...
def taken(x: Rows, rows: np.ndarray) -> Rows:
    """The given rows of x, ascending; x itself if these are all."""
    return x if rows.size == x.shape[0] else x[rows]


def as_array(x: Rows) -> np.ndarray:
    """The rows as an array: x itself if it is one, else computed in blocks."""
    if not isinstance(x, View):
        return x
    out = np.empty(x.shape, x.dtype)
    for some in slices(*x.shape):
        out[some] = x[some]
    return out


@overload
def divide(x: np.ndarray, divisors: np.ndarray) -> np.ndarray: ...
@overload
def divide(x: Rows, divisors: np.ndarray) -> Rows: ...
def divide(x: Rows, divisors: np.ndarray) -> Rows:
    """``x / divisors`` in the precision of x: an array is divided in place, a view gives another view."""
    if isinstance(x, View):
        return View(x, divisors)
    divisors = divisors.astype(x.dtype)
    for some in slices(*x.shape):
        x[some] /= divisors
    return x


def has_missing(x: Rows | RowFiles) -> np.ndarray:
    """Mask of the rows that have a NaN, (n,)."""
    found = np.zeros(x.shape[0], dtype=bool)
    for some in slices(*x.shape):
        found[some] = np.isnan(x[some]).any(axis=1)
    return found
