"""Rows of the data in other coordinates: where they lie, or worked out where they are asked for.

Stage one asks for some rows at a time. So it need not hold a second array as large as the data for coordinates that it
only tries, nor any at all where the data are a file mapped into memory.
"""

from typing import Any, TypeAlias, overload

import numpy as np

from geode_jax.rows.blocks import slices


class View:
    """Rows ``(source - shift) / divisors``, (n, D), of an array or another view, in the precision `dtype`.

    Without a shift it is that of the source. With one the work is done in float64, so that a far-off origin costs no
    digits.
    """

    shape: tuple[int, int]
    dtype: np.dtype

    def __init__(
        self,
        source: "Rows",
        divisors: np.ndarray,
        shift: np.ndarray | None = None,
        dtype: np.dtype | None = None,
    ) -> None:
        self.shape, self.dtype = source.shape, source.dtype if dtype is None else dtype
        self._source, self._shift = source, shift
        self._divisors = divisors.astype(self.dtype) if shift is None else divisors

    def __getitem__(self, index: Any) -> np.ndarray:
        """Those rows, or of a pair of indices those features of those rows."""
        if not isinstance(index, np.ndarray) or index.dtype == bool:
            return self._found(index)
        out = np.empty((index.size, self.shape[1]), self.dtype)  # a few at a time: in float64 they are larger
        for some in slices(*out.shape):
            out[some] = self._found(index[some])
        return out

    def _found(self, index: Any) -> np.ndarray:
        features = index[1] if isinstance(index, tuple) else slice(None)
        found = self._source[index]
        if self._shift is not None:
            found = found - self._shift[features]
        return np.asarray(found / self._divisors[features], self.dtype)


Rows: TypeAlias = np.ndarray | View


@overload
def taken(x: np.ndarray, rows: np.ndarray) -> np.ndarray: ...
@overload
def taken(x: Rows, rows: np.ndarray) -> Rows: ...
def taken(x: Rows, rows: np.ndarray) -> Rows:
    """The given rows of x, ascending, and no copy where these are all."""
    return x if rows.size == x.shape[0] else x[rows]


def as_array(x: Rows) -> np.ndarray:
    """The rows as an array, a few at a time; those of an array are the array itself."""
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
    """``x / divisors`` in the precision of x: an array's where they lie, others as a view of them."""
    if isinstance(x, View):
        return View(x, divisors)
    divisors = divisors.astype(x.dtype)
    for some in slices(*x.shape):
        x[some] /= divisors
    return x


def has_missing(x: Rows) -> np.ndarray:
    """Which rows have a NaN, (n,)."""
    return np.concatenate([np.isnan(x[some]).any(axis=1) for some in slices(*x.shape)])


def is_memory_mapped(data: np.ndarray) -> bool:
    """Whether the numbers are those of a file that is mapped into memory."""
    base: Any = data
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return base is not None
