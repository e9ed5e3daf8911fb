"""Rows in fixed-size blocks: bounded memory, one compiled shape, results that do not depend on the other rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MEMORY_BUDGET = 256 * 2**20
LARGEST_BLOCK = 64  # a single row is padded to a whole block too, so blocks must be small


def block_size(bytes_per_row: int, budget: int = MEMORY_BUDGET) -> int:
    """Largest power of two of rows that fits in the memory budget, between 1 and 64."""
    fitting = max(1.0, budget / max(bytes_per_row, 1))
    return int(min(LARGEST_BLOCK, 2 ** int(np.log2(fitting))))


def map_row_blocks(
    function: Callable[..., Any],
    rows: np.ndarray,
    *more: np.ndarray,
    bytes_per_row: int,
) -> Any:
    """Apply `function` to blocks of rows (of `rows` and `more` alike) and concatenate along the first axis.

    The last block is padded with copies of the last row and its result is cut back, so that every call has the same
    shape and a row's result is bitwise the same whatever the other rows are.
    """
    n = rows.shape[0]
    size = block_size(bytes_per_row)
    results = []
    for start in range(0, n, size):
        index = np.minimum(np.arange(start, start + size), n - 1)
        out = function(*(jnp.asarray(array[index]) for array in (rows, *more)))
        count = min(size, n - start)
        results.append(jax.tree.map(lambda leaf, c=count: np.asarray(leaf)[:c], out))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)
