"""Rows that a fit reads from files."""

import os
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from geode_jax._checks import check_data, check_training_data, in_rows
from geode_jax._files.parquet import mapped_copy
from geode_jax._typing import ArrayLike
from geode_jax.rows.files import RowFiles


def are_paths(X: Any) -> TypeGuard[str | os.PathLike[str] | Sequence[str | os.PathLike[str]]]:
    """Whether X is a path, or a list of paths."""
    paths = X if isinstance(X, list | tuple) else [X]
    return len(paths) > 0 and all(isinstance(path, str | os.PathLike) for path in paths)


def checked_rows(X: ArrayLike, *, min_rows: int, allow_nan: bool) -> np.ndarray | RowFiles:
    """The rows of an array, or of .npy and .parquet files, checked; files are not read into memory.

    Raises TypeError or ValueError naming the argument, and the file; ImportError for a .parquet file without pyarrow.
    """
    if are_paths(X):
        return _opened([X] if isinstance(X, str | os.PathLike) else list(X), min_rows)
    return check_training_data(X) if allow_nan else in_rows(check_data(X, allow_nan=False, min_rows=min_rows))


def _opened(paths: Sequence[str | os.PathLike[str]], min_rows: int) -> RowFiles:
    files: list[np.ndarray] = []
    for path in paths:
        name = f"X: {os.fspath(path)}"
        try:
            file = _parquet(path, name) if os.fspath(path).lower().endswith(".parquet") else _npy(path, name)
        except FileNotFoundError:
            raise ValueError(f"{name}: expected a file, got none") from None
        files.append(check_data(file, name, allow_nan=False, min_rows=0))
        if file.shape[1] != files[0].shape[1]:
            raise ValueError(f"{name}: expected {files[0].shape[1]} features as in the first file, got {file.shape[1]}")
    found = RowFiles(files)
    if len(found) < min_rows:
        raise ValueError(f"X: expected at least {min_rows} rows in the files, got {len(found)}")
    return found


def _npy(path: str | os.PathLike[str], name: str) -> np.ndarray:
    try:
        file = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{name}: expected a .npy file of one array of numbers, got {error}") from error
    if not isinstance(file, np.ndarray) or file.dtype not in (np.float32, np.float64):
        kind = file.dtype if isinstance(file, np.ndarray) else "several arrays"
        raise TypeError(f"{name}: expected a .npy file of float32 or float64 numbers, got {kind}")
    return file


def _parquet(path: str | os.PathLike[str], name: str) -> np.ndarray:
    try:
        return mapped_copy(path)
    except TypeError as error:
        raise TypeError(f"{name}, {error}") from error
    except FileNotFoundError:
        raise
    except (ValueError, OSError, KeyError) as error:  # whatever pyarrow finds
        raise ValueError(f"{name}: expected a .parquet file of columns of numbers, got {error}") from error
