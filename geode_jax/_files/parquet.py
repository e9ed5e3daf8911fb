"""Columns of numbers in .parquet files. pyarrow is an extra, and imported only where such a file is opened."""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from geode_jax.rows.blocks import BLOCK_NUMBERS

# What pandas calls the index where it stores one.
INDEX = "__index_level_0__"


def parquet() -> Any:
    """The module of pyarrow for such files. Raises ImportError that says how to install it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('.parquet files need pyarrow: pip install "geode-jax[parquet]"') from error
    return pyarrow.parquet


def blocks_of(file: Any, names: Sequence[str], num_rows: int) -> Iterator[np.ndarray]:
    """Blocks of at most so many rows of these columns, (m, D) in float64, NaN where there is no value.

    Raises TypeError that names a column without numbers.
    """
    for batch in file.iter_batches(batch_size=num_rows, columns=list(names)):
        columns = [batch.column(name).to_numpy(zero_copy_only=False) for name in names]
        for name, column in zip(names, columns, strict=True):
            if column.dtype.kind not in "fiub":
                raise TypeError(f"column {name!r}: expected numbers, got {column.dtype}")
        yield np.stack([column.astype(np.float64) for column in columns], axis=1)


def mapped_copy(path: Any) -> np.ndarray:
    """All rows of a file, (n, D), in float32 if all columns are, else in float64.

    They are written, once, to a temporary file without a name, which is mapped into memory and ends with the array:
    rows of the .parquet file cannot be read one by one.
    """
    file = parquet().ParquetFile(path)
    names, num_rows = file.schema_arrow.names, file.metadata.num_rows
    if INDEX in names:
        raise ValueError(f"an index, {INDEX!r}, beside its columns; write it with index=False")
    is_single = all(str(kind) in ("float", "halffloat") for kind in file.schema_arrow.types)
    shape, dtype = (num_rows, len(names)), np.dtype(np.float32 if is_single else np.float64)
    if 0 in shape:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as target:
        found = np.memmap(target, dtype, mode="w+", shape=shape)
    start = 0
    for block in blocks_of(file, names, max(1, BLOCK_NUMBERS // len(names))):
        found[start : start + len(block)] = block
        start += len(block)
    return found
