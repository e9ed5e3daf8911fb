"""Rows and columns in blocks: temporary arrays, often in float64, stay small compared with the data."""

from collections.abc import Iterator

# 2 MiB in float64: every core holds a few such blocks, and malloc keeps them. (What goes to a GPU is in larger ones.)
BLOCK_NUMBERS = 2**18


def slices(length: int, width: int, *, numbers: int | None = None) -> Iterator[slice]:
    """Slices that cover `length` rows (or columns) of `width` numbers each: at most `numbers` together, or one row.

    None is `BLOCK_NUMBERS`.
    """
    size = max(1, (BLOCK_NUMBERS if numbers is None else numbers) // max(1, width))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
