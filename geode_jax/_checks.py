"""Checks of arguments. Error messages name the argument, what was expected, and what was given."""

import contextlib
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy import sparse

from geode_jax._typing import ArrayLike, KeyArray

# An error shows a wrong value only if it has at most so many characters.
LONGEST_SHOWN = 80


def check_key(key: Any, name: str = "key") -> KeyArray:
    """Return a scalar typed JAX key, wrapping a legacy ``uint32[2]`` key."""
    hint = f"{name}: expected a JAX key such as jax.random.key(0), got"
    _refuse_traced(key, name)
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{hint} {type(key).__name__}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(f"{hint} an array of {key.shape} keys")
        return key  # type: ignore[return-value]
    if key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    raise TypeError(f"{hint} an array of dtype {key.dtype} and shape {key.shape}")


def _refuse_traced(value: Any, name: str) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected an array with values, got a traced one; call this function outside jax.jit, vmap and"
            " grad (inside them, geode_jax.interop.numpyro.PosteriorPredictive gives densities and samples)"
        )


def check_integer(value: Any, name: str, minimum: int) -> int:
    """Return `value` as an int, at least `minimum`; bools and floats are rejected."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {_shown(value)}")
    if value < minimum:
        raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value}")
    return int(value)


def check_number(value: Any, name: str, *, above: float, below: float = np.inf) -> float:
    """Return `value` as a float inside the open interval (`above`, `below`)."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    if not above < number < below:
        raise ValueError(f"{name}: expected a number in ({above:g}, {below:g}), got {value}")
    return number


def check_instance(value: Any, name: str, kinds: type | tuple[type | None, ...]) -> Any:
    """Return `value` if it is of one of `kinds` (None stands for the value None)."""
    options = kinds if isinstance(kinds, tuple) else (kinds,)
    if bool in options and isinstance(value, np.bool_):  # as a grid of parameters gives
        return bool(value)
    if any(value is None if kind is None else isinstance(value, kind) for kind in options):
        return value
    names = " or ".join("None" if kind is None else kind.__name__ for kind in options)
    has_posterior = any(kind is not None and isinstance(getattr(value, "posterior_", None), kind) for kind in options)
    raise TypeError(f"{name}: expected {names}, got {_shown(value)}{'; pass its posterior_' if has_posterior else ''}")


def _shown(value: Any) -> str:
    """A value and its type; the type alone if the value takes more than one line."""
    found, kind = repr(value), type(value).__name__
    return (
        f"{found} of type {kind}" if len(found) <= LONGEST_SHOWN and "\n" not in found else f"an object of type {kind}"
    )


def check_mesh(mesh: Any, limits: Mapping[str, int | None], name: str = "mesh") -> Mesh | None:
    """Return a mesh of devices whose axes are among the keys of `limits`, with sizes that divide the values there.

    None stands for any size.
    """
    check_instance(mesh, name, (Mesh, None))
    for axis, size in {} if mesh is None else mesh.shape.items():
        if axis not in limits:
            raise ValueError(f"{name}: expected axes among {', '.join(map(repr, limits))}, got {axis!r}")
        limit = limits[axis]
        if limit is not None and limit % size:
            raise ValueError(f"{name}: expected a size of the axis {axis!r} that divides {limit}, got {size}")
    return mesh


def check_dtype(dtype: Any) -> np.dtype:
    """Return float32 or float64 as a NumPy dtype."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if dtype is None or found.name not in ("float32", "float64"):
        raise ValueError(f"dtype: expected float32 or float64, got {dtype!r}")
    return found


def check_columns(X: Any, name: str = "X") -> None:
    """Raise TypeError that names the columns of a frame that are no numbers: text, dates, categories.

    Columns of objects pass if all of them are numbers or missing. A Series is checked like a column of a frame. Of
    other inputs only text and dates are refused, which NumPy would convert to numbers; other checks see to the rest.
    """
    if is_frame(X, "pandas"):
        kinds = [(column, _pandas_kind(X.iloc[:, at], X.dtypes.iloc[at])) for at, column in enumerate(X.columns)]
    elif is_frame(X, "polars"):
        kinds = [(column, None if _is_polars_number(dtype) else str(dtype)) for column, dtype in X.schema.items()]
    else:
        kind = _kind_of_array(X)
        if kind is not None:
            raise TypeError(f"{name}: expected numbers, got {kind}; encode it as numbers")
        return
    bad = [f"{column!r} ({kind})" for column, kind in kinds if kind is not None]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise TypeError(
            f"{name}: expected columns of numbers, got {', '.join(bad[:5])}{more}; encode them as numbers, or leave"
            " them out"
        )


def _kind_of_array(X: Any) -> str | None:
    """What is wrong with an array, or a single column, None if nothing that other checks would not find."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(X, pandas.Series):
        found = _pandas_kind(X, X.dtype)
        return found if found in (None, "text") else f"dtype {found}"
    if isinstance(X, list | tuple):
        with contextlib.suppress(TypeError, ValueError):  # ragged lists
            X = np.asarray(X)
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(X, polars.Series):
        return None if _is_polars_number(X.dtype) else f"dtype {X.dtype}"
    dtype = getattr(X, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind == "O":
        return _kind_of_objects(np.ravel(X))
    return f"dtype {dtype}" if kind in ("m", "M", "U", "S", "T") else None


def _is_polars_number(dtype: Any) -> bool:
    return dtype.is_numeric() or str(dtype) in ("Boolean", "Null")


def _kind_of_objects(values: np.ndarray) -> str | None:
    """The first kind of object that a conversion would take for a number, and that is none; None if there is none."""
    for one in values:
        if isinstance(one, str | bytes):
            return "text"
        if isinstance(one, np.datetime64 | np.timedelta64):
            return str(one.dtype)
    return None


def is_frame(X: Any, library: str) -> bool:
    """Whether X is a DataFrame of a library, which need not be installed."""
    module = sys.modules.get(library)
    return module is not None and isinstance(X, module.DataFrame)


def _pandas_kind(column: Any, dtype: Any) -> str | None:
    """What is wrong with a column: None if it holds numbers, else the name of its type."""
    if dtype.kind in "fiub":
        return None
    if dtype.kind in "mM":
        return str(dtype)
    categories = getattr(dtype, "categories", None)
    values = column.dropna() if categories is None else categories
    if (kind := _kind_of_objects(values.to_numpy(dtype=object))) is not None:
        return kind if dtype.kind == "O" and categories is None else str(dtype)
    try:
        column.to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError, OverflowError):
        return str(dtype)
    return None


def _as_float_array(data: ArrayLike, name: str) -> np.ndarray:
    _refuse_traced(data, name)
    if sparse.issparse(data):
        raise TypeError(f"{name}: expected a dense array, got a sparse {type(data).__name__}; pass {name}.toarray()")
    check_columns(data, name)
    data = unmasked(data)
    if hasattr(data, "to_numpy"):  # pandas and polars
        data = data.to_numpy()
    try:
        array = np.asarray(data)
    except ValueError as error:  # ragged nested lists
        raise ValueError(f"{name}: expected a rectangular array of numbers, got {type(data).__name__}") from error
    if array.dtype.kind == "c":
        raise TypeError(f"{name}: expected real numbers, got complex numbers ({array.dtype})")
    if array.dtype.kind == "O":
        try:
            array = without_na(array).astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{name}: expected numbers, got an object array: {error}") from error
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected numbers, got dtype {array.dtype}")
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        array = array.astype(np.float32 if array.dtype.itemsize <= 2 else np.float64)  # float32 holds all of two bytes
    return array


def unmasked(data: Any) -> Any:
    """A masked array of real numbers as floats, with NaN for what it hides; anything else as it is."""
    if not isinstance(data, np.ma.MaskedArray) or data.dtype.kind == "c":
        return data
    return np.ma.filled(data.astype(np.float64), np.nan)


def without_na(array: Any) -> Any:
    """An array of objects with NaN for pd.NA, which is no number; anything else as it is."""
    pandas = sys.modules.get("pandas")
    if pandas is None or getattr(getattr(array, "dtype", None), "kind", "") != "O":
        return array
    found = array.copy()
    found[pandas.isna(array)] = np.nan
    return found


def check_data(
    data: ArrayLike,
    name: str = "X",
    *,
    allow_nan: bool,
    min_rows: int = 1,
    num_features: int | None = None,
) -> np.ndarray:
    """Return `data` as a float32 or float64 array of shape (n, D), without a copy if none is needed.

    Accepts anything NumPy can read, including pandas and polars frames. With `allow_nan`, NaN means missing; otherwise
    it is an error. Infinite values always are.
    """
    array = _as_float_array(data, name)
    if array.ndim != 2:
        hint = f"; use {name}.reshape(1, -1) for one row" if array.ndim == 1 and name.isidentifier() else ""
        raise ValueError(f"{name}: expected a 2-D array of shape (rows, features), got shape {array.shape}{hint}")
    rows, features = array.shape
    if features == 0 or (rows == 0 and min_rows > 0):
        raise ValueError(f"{name}: expected a non-empty array, got shape {array.shape}")
    if rows < min_rows:
        raise ValueError(f"{name}: expected at least {min_rows} rows, got {rows}")
    if num_features is not None and features != num_features:
        raise ValueError(f"{name}: expected {num_features} features as in fit, got {features}")
    # One pass without a temporary for the usual, finite case: a sum is finite only if every term is.
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float64)
    if not np.isfinite(total):
        _explain_non_finite(array, name, allow_nan)
    return array


def check_training_data(data: ArrayLike, name: str = "X") -> np.ndarray:
    """:func:`check_data` for a fit: NaN is missing, and every row and every column has an observed value."""
    array = check_data(data, name, allow_nan=True, min_rows=2)
    empty_rows = np.isnan(array.max(axis=1))
    empty_rows[empty_rows] = np.isnan(array[empty_rows]).all(axis=1)
    if empty_rows.any():
        raise ValueError(
            f"{name}: expected at least one observed value in every row, but {int(empty_rows.sum())} rows are all"
            f" NaN (the first is row {np.flatnonzero(empty_rows)[0]})"
        )
    is_empty = np.isnan(array.min(axis=0))
    is_empty[is_empty] = np.isnan(array[:, is_empty]).all(axis=0)
    if is_empty.any():
        raise ValueError(
            f"{name}: expected at least one observed value in every column, but {int(is_empty.sum())} columns are all"
            f" NaN (the first is column {np.flatnonzero(is_empty)[0]}); drop them"
        )
    return in_rows(array)


def in_rows(array: np.ndarray) -> np.ndarray:
    """The same array, laid out by rows unless it is a memory-mapped file.

    A frame may be laid out by columns. Sums would be rounded in another way, and the same rows draw otherwise.
    """
    return array if is_memory_mapped(array) else np.ascontiguousarray(array)


def is_memory_mapped(data: np.ndarray) -> bool:
    """Whether the array, or an array that it is a view of, is a memory-mapped file."""
    base: Any = data
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return base is not None


def _explain_non_finite(array: np.ndarray, name: str, allow_nan: bool) -> None:
    infinite = np.isinf(array)
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise ValueError(
            f"{name}: expected finite numbers, got {int(infinite.sum())} infinite values"
            f" (the first in row {row}, column {column})"
        )
    missing = np.isnan(array)
    if not missing.any():
        return  # finite entries whose sum overflowed
    if not allow_nan:
        row, column = np.argwhere(missing)[0]
        raise ValueError(
            f"{name}: expected no missing values here, got {int(missing.sum())} NaN"
            f" (the first in row {row}, column {column})"
        )
