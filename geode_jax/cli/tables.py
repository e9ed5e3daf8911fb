"""Tables of numbers in .npy, .npz, .csv and .parquet files, read and written in chunks of rows."""

import contextlib
import csv
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")
# Cells of a .csv file that mean a missing value, in lower case.
_MISSING = frozenset({"", "na", "nan", "null", "none", "?"})

Write = Callable[[np.ndarray], None]


class TableError(Exception):
    """A file that is not the table it should be; the message is for the user."""


class Table(NamedTuple):
    """The rows of a file: their number, the column names (None if it has none), and the chunks."""

    num_rows: int
    names: list[str] | None
    chunks: Iterator[np.ndarray]

    def whole(self) -> np.ndarray:
        """All rows, (n, D)."""
        parts = list(self.chunks)
        if not parts:
            raise TableError("expected rows, got none")
        return np.concatenate(parts)


def open_table(path: Path, chunk: int) -> Table:
    """The table of a file, in chunks of at most `chunk` rows. Raises TableError."""
    readers = dict(zip(SUFFIXES, (_read_npy, _read_npz, _read_csv, _read_parquet), strict=True))
    reader = readers[_suffix(path)]
    try:
        return reader(path, chunk)
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from error
    except TableError:
        raise
    except Exception as error:  # a damaged file may fail anywhere in zipfile, NumPy, csv and pyarrow
        raise TableError(f"{path}: {error}") from error


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise TableError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    return suffix


def _read_npy(path: Path, chunk: int) -> Table:
    return _array_table(np.load(path, mmap_mode="r", allow_pickle=False), path, chunk)


def _read_npz(path: Path, chunk: int) -> Table:
    with np.load(path, allow_pickle=False) as file:
        if "X" not in file.files and len(file.files) != 1:
            raise TableError(f"{path}: expected one array, or one called X, got {', '.join(file.files) or 'none'}")
        return _array_table(file["X" if "X" in file.files else file.files[0]], path, chunk)


def _array_table(array: np.ndarray, path: Path, chunk: int) -> Table:
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise TableError(f"{path}: expected numbers of shape (n, D), got {array.dtype} of shape {array.shape}")
    rows = array.shape[0]
    return Table(rows, None, (np.asarray(array[first : first + chunk]) for first in range(0, rows, chunk)))


def _read_csv(path: Path, chunk: int) -> Table:
    with open(path, newline="", encoding="utf-8") as file:
        first = next(csv.reader(file), None)
        if first is None:
            raise TableError(f"{path}: expected rows, got an empty file")
        num_lines = 1 + sum(1 for row in csv.reader(file) if row)
    has_names = any(_number(cell) is None for cell in first)
    names = [cell.strip() for cell in first] if has_names else None

    def chunks() -> Iterator[np.ndarray]:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if has_names:
                next(lines)
            rows = (_numbers(row, len(first), path, lines.line_num, names) for row in lines if row)
            while part := list(itertools.islice(rows, chunk)):
                yield np.array(part)

    return Table(num_lines - has_names, names, chunks())


def _number(cell: str) -> float | None:
    """The number in a cell, or NaN for a missing value; None if it is neither."""
    text = cell.strip()
    if text.lower() in _MISSING:
        return np.nan
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(row: Sequence[str], width: int, path: Path, line: int, names: list[str] | None) -> list[float]:
    if len(row) != width:
        raise TableError(f"{path}, line {line}: expected {width} cells, got {len(row)}")
    found: list[float] = []
    for column, cell in enumerate(row):
        value = _number(cell)
        if value is None:
            where = f"column {column + 1}" if names is None else f"column {names[column]!r}"
            raise TableError(f"{path}, line {line}, {where}: expected a number or nothing, got {cell!r}")
        found.append(value)
    return found


def _read_parquet(path: Path, chunk: int) -> Table:
    file = _parquet().ParquetFile(path)
    names = file.schema_arrow.names

    def chunks() -> Iterator[np.ndarray]:
        for batch in file.iter_batches(batch_size=chunk):
            columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
            for name, column in zip(names, columns, strict=True):
                if column.dtype.kind not in "fiub":
                    raise TableError(f"{path}, column {name!r}: expected numbers, got {column.dtype}")
            yield np.stack([column.astype(np.float64) for column in columns], axis=1)

    return Table(file.metadata.num_rows, names, chunks())


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TableError('.parquet files need pyarrow: pip install "geode-jax[parquet]"') from error
    return pyarrow.parquet


@contextlib.contextmanager
def new_table(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    """A function that appends chunks of rows to a new table of `num_rows` rows; no partial file is left behind.

    .npy and .npz files have no column names. An .npz file holds one array, X.
    """
    writers = dict(zip(SUFFIXES, (_write_npy, _write_npz, _write_csv, _write_parquet), strict=True))
    writer = writers[_suffix(path)]
    partial = path.with_name(path.name + ".part")
    try:
        with writer(partial, num_rows, names) as write:
            yield write
        os.replace(partial, path)
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _begin_array(file: IO[bytes], shape: tuple[int, int]) -> None:
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)


@contextlib.contextmanager
def _write_npy(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    with open(path, "wb") as file:
        _begin_array(file, (num_rows, len(names)))
        yield lambda rows: _append(file, rows)


@contextlib.contextmanager
def _write_npz(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("X.npy", "w", force_zip64=True) as file,
    ):
        _begin_array(file, (num_rows, len(names)))
        yield lambda rows: _append(file, rows)


def _append(file: IO[bytes], rows: np.ndarray) -> None:
    file.write(np.ascontiguousarray(rows, dtype="<f8").tobytes())


@contextlib.contextmanager
def _write_csv(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    del num_rows
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        yield lambda rows: writer.writerows(rows.tolist())


@contextlib.contextmanager
def _write_parquet(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    del num_rows
    parquet = _parquet()
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    with parquet.ParquetWriter(path, schema) as writer:

        def write(rows: np.ndarray) -> None:
            columns = [pyarrow.array(np.asarray(column, np.float64)) for column in rows.T]
            writer.write_table(pyarrow.table(columns, schema=schema))

        yield write
