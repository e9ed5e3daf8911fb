"""Tables in, with one kind of missing value, and the same kind of table out as went in."""

import contextlib
import sys
from typing import Any

import numpy as np

from geode_jax._checks import is_frame, unmasked, without_na


def missing_as_nan(X: Any) -> Any:
    """X with NaN for what a masked array hides, and for what is missing among objects, and no sparse columns.

    scikit-learn reads what is under the mask, has no number for pd.NA, and refuses frames of sparse columns.
    """
    X = unmasked(X)
    if isinstance(X, list | tuple):
        with contextlib.suppress(ValueError):  # ragged lists are left to scikit-learn
            X = array if (array := np.asarray(X)).dtype.kind == "O" else X
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(X, pandas.Series):
        return X.to_numpy(dtype=np.float64, na_value=np.nan) if X.dtype.kind == "O" else X
    if pandas is None or not is_frame(X, "pandas"):
        return without_na(X) if isinstance(X, np.ndarray) else X
    kinds = list(X.dtypes)
    places = [at for at, kind in enumerate(kinds) if kind.kind == "O" or isinstance(kind, pandas.SparseDtype)]
    numbers = X.copy(deep=False) if places else X
    for at in places:
        numbers.isetitem(at, X.iloc[:, at].to_numpy(dtype=np.float64, na_value=np.nan))
    return numbers


def like(X: Any, values: np.ndarray, columns: np.ndarray | None = None) -> Any:
    """`values`, (n, D'), as a frame of the kind of X with its index and names; as they are if X is no frame.

    `columns`: positions in X of the columns of `values`; None: all, in order.
    """
    if not (is_frame(X, "pandas") or is_frame(X, "polars")):
        return values
    if is_frame(X, "pandas"):
        names = X.columns if columns is None else X.columns[columns]
        return sys.modules["pandas"].DataFrame(values, index=X.index, columns=names)
    names = list(X.columns) if columns is None else [X.columns[at] for at in columns]
    # said, as polars takes a square array that is laid out by columns for its transpose
    return sys.modules["polars"].DataFrame(values, schema=names, orient="row")
