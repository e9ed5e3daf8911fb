"""Rows in fixed-size blocks: bounded memory, one compiled shape, results that do not depend on a block's other rows."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geode_jax._runtime.blas import lapack_turn
from geode_jax._runtime.compilation import drop_programs_at_times
from geode_jax._runtime.devices import everywhere, may_call_lapack, mesh_of, on_one


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

# The share of a whole block that a device of a mesh has at least.
SMALLEST_SHARE = 8


def block_size(bytes_per_row: int, limits: Limits) -> int:
    """Rows of a block, a power of two."""

    def fitting(budget: int) -> int:
        return 2 ** int(np.log2(max(1.0, budget / max(bytes_per_row, 1))))

    return min(limits.rows, max(limits.enough, fitting(limits.memory)), fitting(limits.most_memory))


def _platform(shared: object) -> str:
    """That of the devices that hold the arrays; of JAX's default device if there are none."""
    held = [leaf for leaf in jax.tree.leaves(shared) if isinstance(leaf, jax.Array)] or [jnp.zeros(())]
    return str(next(iter(held[0].devices())).platform)


def map_row_blocks(
    function: Callable[..., Any],
    shared: tuple[Any, ...],
    *rows: Any,
    bytes_per_row: int,
    calls_lapack: bool = False,
    **options: Any,
) -> Any:
    """Apply ``function(*shared, *block, **options)`` to blocks of rows and concatenate along the first axis.

    `rows` are trees of NumPy arrays that have the rows on their first axis, as the results have. The last block is
    padded with copies of the last row and its result is cut back, so that without a mesh every call has the same shape,
    and a row's result is bitwise the same whatever the other rows are.

    Where `shared` is replicated over a mesh, each of its devices has a block at the same time. Blocks are smaller where
    there are few rows, so that a row's result may depend on their number in its last digits. `function` is then
    compiled as a whole, once for every value of the hashable `options`. If it `calls_lapack` and the devices could wait
    for each other there, the first of them does all the work. Other threads have their blocks in between.
    """
    drop_programs_at_times()
    n = jax.tree.leaves(rows)[0].shape[0]
    mesh = mesh_of(shared)
    if mesh is not None and calls_lapack and not may_call_lapack(mesh):
        shared, mesh = on_one(shared, mesh), None
    platform = _platform(shared)
    size = block_size(bytes_per_row, ON_CPU if platform == "cpu" else ELSEWHERE)
    if mesh is None:
        apply, to_device = functools.partial(function, *shared, **options), jax.device_put
    else:
        by_row = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        program = _on_all_devices(function, mesh, tuple(options.items()))
        apply = functools.partial(program, jax.device_put(shared, everywhere(mesh)))
        to_device = functools.partial(jax.device_put, device=by_row)
        # blocks of few rows are smaller, so that no device is without; of few sizes, as each compiles a program
        size = max(size // SMALLEST_SHARE, min(size, 2 ** (-(-n // mesh.size) - 1).bit_length())) * mesh.size
    turn = functools.partial(lapack_turn, platform) if calls_lapack else contextlib.nullcontext
    results = []
    for start in range(0, n, size):
        index = np.minimum(np.arange(start, start + size), n - 1)
        block = to_device(jax.tree.map(lambda array, at=index: array[at], rows))
        count = min(size, n - start)
        with turn():
            results.append(jax.tree.map(lambda leaf, c=count: np.asarray(leaf)[:c], apply(*block)))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)


@functools.cache
def _on_all_devices(function: Callable[..., Any], mesh: Mesh, options: tuple[tuple[str, Any], ...]) -> Any:
    """``function(*shared, *block, **options)`` as a program of `shared` and blocks, one block for every device."""

    def on_each(shared: tuple[Any, ...], *block: Any) -> Any:
        return function(*shared, *block, **dict(options))

    def on_all(shared: tuple[Any, ...], *rows: Any) -> Any:
        by_row = PartitionSpec(mesh.axis_names)
        specs = (PartitionSpec(), *[by_row] * len(rows))
        return jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=by_row, check_vma=False)(shared, *rows)

    return jax.jit(on_all)
