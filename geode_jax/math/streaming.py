"""Rows in fixed-size blocks: bounded memory, one compiled shape, results that do not depend on the other rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MEMORY_BUDGET = 256 * 2**20
# A single row is padded to a whole block too, so blocks must be small. Where each row takes much memory, a few keep all
# cores busy, and what they need stays in the caches.
LARGEST_BLOCK, ENOUGH_ROWS, ENOUGH_MEMORY = 64, 8, 16 * 2**20


def block_size(bytes_per_row: int) -> int:
    """Rows of a block, a power of two: at most 64, as many as fit in 16 MiB but at least 8, if these fit in 256 MiB."""

    def fitting(budget: int) -> int:
        return 2 ** int(np.log2(max(1.0, budget / max(bytes_per_row, 1))))

    return min(LARGEST_BLOCK, max(ENOUGH_ROWS, fitting(ENOUGH_MEMORY)), fitting(MEMORY_BUDGET))


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
