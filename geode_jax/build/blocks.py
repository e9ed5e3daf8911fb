"""Rows and columns a few at a time: what is computed from them, often in float64, stays small beside the data."""

from collections.abc import Iterator

BLOCK_NUMBERS = 2**18


def slices(length: int, width: int) -> Iterator[slice]:
    """Slices that cover `length` rows (or columns) of `width` numbers, each of about a million numbers."""
    size = max(1, BLOCK_NUMBERS // max(1, width))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
