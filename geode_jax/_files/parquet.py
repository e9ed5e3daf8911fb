"""Columns of numbers in .parquet files. pyarrow is an extra, and imported only where such a file is opened."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# What pandas calls an index without a name.
INDEX = "__index_level_0__"
# From here on a float does not hold all whole numbers.
LARGEST_WHOLE = 2**53
# Numbers that are read at once: each column of a batch costs a call, whatever its length.
BATCH_NUMBERS = 2**24


def pyarrow_parquet() -> Any:
    """The module of pyarrow for such files. Raises ImportError that says how to install it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('.parquet files need pyarrow: pip install "geode-jax[parquet]"') from error
    return pyarrow.parquet


def blocks_of(file: Any, names: Sequence[str], num_rows: int) -> Iterator[np.ndarray]:
    """Blocks of at most so many rows of these columns, (m, D) in float64, NaN where there is no value.

    Raises TypeError that names a column without numbers, and ValueError one with whole numbers that a float rounds.
    """
    for batch in file.iter_batches(batch_size=num_rows, columns=list(names)):
        columns = [_numbers(batch.column(name), name) for name in names]
        for name, column in zip(names, columns, strict=True):
            if column.dtype.kind not in "fiub":
                raise TypeError(f"column {name!r}: expected numbers, got {batch.column(name).type}")
        yield np.stack([column.astype(np.float64) for column in columns], axis=1)


def _numbers(column: Any, name: str) -> np.ndarray:
    """A column as an array of numbers, if its values are any."""
    kind = str(column.type)
    if kind in ("int64", "uint64"):
        found = column.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        large = np.flatnonzero(np.abs(found) >= LARGEST_WHOLE)
        rounded = [value for value in column.take(large).to_pylist() if int(float(value)) != value]
        if rounded:
            raise ValueError(
                f"column {name!r}: expected numbers that a float holds, got {rounded[0]}, perhaps an identifier; leave"
                " it out"
            )
        return found
    if kind.startswith("decimal") or (column.null_count and kind in ("bool", "null")):
        column = column.cast("float64")  # else an array of objects
    return column.to_numpy(zero_copy_only=False)


def index_columns(file: Any) -> list[str] | None:
    """Names of the columns of a file that are the index of the frame that pandas wrote, wherever they stand.

    Empty where pandas wrote the file and none is stored; None where the file says nothing of pandas.
    """
    schema = file.schema_arrow
    told = (schema.pandas_metadata or {}).get("index_columns")
    # a range of numbers is told, but not stored
    found = [name for name in told or [] if isinstance(name, str) and name in schema.names]
    found = found or [name for name in schema.names if name == INDEX]  # other programs may drop what pandas told
    return found or (None if told is None else [])


def mapped_copy(path: Any) -> np.ndarray:
    """All rows of a file, (n, D), in float32 if all columns are, else in float64.

    They are written, once, to a temporary file without a name, which is mapped into memory and ends with the array:
    rows of the .parquet file cannot be read one by one. TMPDIR must be on a disk, and hold them: RuntimeError if not.
    """
    file = pyarrow_parquet().ParquetFile(path)
    schema = file.schema_arrow
    names, num_rows = schema.names, file.metadata.num_rows
    if index := index_columns(file):
        raise ValueError(f"an index, {index[0]!r}, beside its columns; write it with index=False")
    is_single = all(str(kind) in ("float", "halffloat") for kind in schema.types)
    shape, dtype = (num_rows, len(names)), np.dtype(np.float32 if is_single else np.float64)
    if 0 in shape:
        return np.zeros(shape, dtype)
    with contextlib.ExitStack() as stack:
        with _room():
            target = stack.enter_context(tempfile.TemporaryFile())
        for block in blocks_of(file, names, max(1, BATCH_NUMBERS // len(names))):
            with _room():  # not through the map: a full disk would then end the process
                target.write(np.ascontiguousarray(block, dtype).data)
                target.flush()
        return np.memmap(target, dtype, mode="r", shape=shape)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Context in which an error of the temporary file is a RuntimeError that says what to do."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"rows of .parquet files are first written to a temporary file, which failed: {error}; set TMPDIR to a"
            " folder with room for them"
        ) from error
