"""Rows in fixed-size blocks: bounded memory, one compiled shape, results that do not depend on a block's other rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Limits(NamedTuple):
    """Sizes of a block: at most so many rows, and as many as fit in `memory` bytes, but at least `enough`.

    Where these do not fit in `most_memory`, fewer.
    """

    rows: int
    memory: int
    enough: int
    most_memory: int


# A single row is padded to a whole block too, so blocks must be small. Where each row takes much memory, a few keep all
# cores of a CPU busy, and what they need stays in the caches.
ON_CPU = Limits(rows=64, memory=16 * 2**20, enough=8, most_memory=256 * 2**20)
# A GPU launches as many kernels for a block of few rows as for one of many.
ELSEWHERE = Limits(rows=512, memory=2**30, enough=1, most_memory=2**30)


def block_size(bytes_per_row: int, limits: Limits) -> int:
    """Rows of a block, a power of two."""

    def fitting(budget: int) -> int:
        return 2 ** int(np.log2(max(1.0, budget / max(bytes_per_row, 1))))

    return min(limits.rows, max(limits.enough, fitting(limits.memory)), fitting(limits.most_memory))


def _limits() -> Limits:
    """Those of the device that arrays go to."""
    return ON_CPU if next(iter(jnp.zeros(()).devices())).platform == "cpu" else ELSEWHERE


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
    size = block_size(bytes_per_row, _limits())
    results = []
    for start in range(0, n, size):
        index = np.minimum(np.arange(start, start + size), n - 1)
        out = function(*jax.device_put([array[index] for array in (rows, *more)]))
        count = min(size, n - start)
        results.append(jax.tree.map(lambda leaf, c=count: np.asarray(leaf)[:c], out))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)
