"""Tables of pandas and polars: their columns checked on the way in, and the same kind of table on the way out."""

import sys
from typing import Any

import numpy as np


def check_columns(X: Any) -> None:
    """Raise TypeError that names the columns of a frame that are no numbers: text, dates, categories.

    Columns of objects pass if all of them are numbers or missing. Arrays are left to scikit-learn's checks.
    """
    if _is_frame(X, "pandas"):
        kinds = {name: _pandas_kind(X.iloc[:, at], X.dtypes.iloc[at]) for at, name in enumerate(X.columns)}
    elif _is_frame(X, "polars"):
        kinds = {
            name: None if dtype.is_numeric() or str(dtype) in ("Boolean", "Null") else str(dtype)
            for name, dtype in X.schema.items()
        }
    else:
        return
    bad = [f"{name!r} ({kind})" for name, kind in kinds.items() if kind is not None]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise TypeError(
            f"X: expected columns of numbers, got {', '.join(bad[:5])}{more}; encode them as numbers, or leave them out"
        )


def like(X: Any, values: np.ndarray, columns: np.ndarray | None = None) -> Any:
    """`values`, (n, D'), as a frame of the kind of X with its index and names; as they are if X is no frame.

    `columns`: positions in X of the columns of `values`; None: all, in order.
    """
    if not (_is_frame(X, "pandas") or _is_frame(X, "polars")):
        return values
    names = list(X.columns) if columns is None else [X.columns[at] for at in columns]
    if _is_frame(X, "pandas"):
        return sys.modules["pandas"].DataFrame(values, index=X.index, columns=names)
    return sys.modules["polars"].DataFrame(values, schema=names)


def _is_frame(X: Any, library: str) -> bool:
    """Whether X is a DataFrame of a library, which need not be installed."""
    module = sys.modules.get(library)
    return module is not None and isinstance(X, module.DataFrame)


def _pandas_kind(column: Any, dtype: Any) -> str | None:
    """What is wrong with a column: None if it holds numbers, else the name of its type."""
    if dtype.kind in "fiub":
        return None
    if dtype.kind in "mM":
        return str(dtype)
    try:
        column.to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError):
        return str(dtype)
    return None
