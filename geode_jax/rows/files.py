"""Rows in several files, one file after the other, without a copy of them in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def rows_and_features(index: Any) -> tuple[Any, Any]:
    """The rows and the features that an index asks for, each a slice or an array of one axis."""
    pair = index if isinstance(index, tuple) else (index, slice(None))
    rows, features = (part if isinstance(part, slice) else np.ravel(part) for part in pair)
    return rows, features


class RowFiles:
    """Rows of arrays of shape (n_f, D), usually files mapped into memory; read when they are indexed.

    Indexed by rows (a slice, numbers in any order, or a mask), or by a pair of rows and features as an array is.
    """

    shape: tuple[int, int]
    dtype: np.dtype

    def __init__(self, files: Sequence[np.ndarray]) -> None:
        self.files = tuple(files)
        self._ends = np.cumsum([len(file) for file in self.files])
        self.shape = int(self._ends[-1]), self.files[0].shape[1]
        self.dtype = np.result_type(*self.files)

    def __len__(self) -> int:
        """Number of rows."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """The indexed rows, or features of them, as a new array."""
        rows, features = rows_and_features(index)
        number = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else _numbers(rows)
        file = np.searchsorted(self._ends, number, side="right")
        width = len(range(*features.indices(self.shape[1]))) if isinstance(features, slice) else features.size
        found = np.empty((number.size, width), self.dtype)
        for place in np.unique(file):
            own = file == place
            source = self.files[place]
            inside = number[own] - (self._ends[place] - len(source))
            is_run = bool((np.diff(inside) == 1).all())
            if is_run or isinstance(features, slice):
                found[own] = source[slice(inside[0], inside[-1] + 1) if is_run else inside, features]
            else:
                found[own] = source[np.ix_(inside, features)]
        return found


def _numbers(rows: np.ndarray) -> np.ndarray:
    return np.flatnonzero(rows) if rows.dtype == bool else rows
