"""Statistics of complete rows from the dictionaries that left them out: at all nodes, or at candidates."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.buffers import aligned_zeros
from geode_jax._runtime.threads import parallel_map
from geode_jax._typing import Array, DTypeLike, Float, Int
from geode_jax.forest.device_candidates import is_for_device, statistics_on_device
from geode_jax.learning.evidence import statistics_at_node
from geode_jax.learning.subspaces import Subspaces
from geode_jax.model.candidate_statistics import BLOCK, CandidateStatistics, lay_out
from geode_jax.model.on_host import on_host
from geode_jax.model.statistics import Statistics, padded_size, project_all
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows

# Size of a block of statistics, which is computed before it is written to its place.
BLOCK_BYTES = 2**24
# Temporary numbers per feature of a row in a block: the row is copied, centred, and has a residual.
FEATURE_NUMBERS = 4


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def zero_statistics(shape: tuple[int, int, int, int], num_rows: int, dtype: DTypeLike) -> Statistics:
    """Zeros for the statistics of a forest, (F, K, places, d), before :func:`add_cross_fitted`."""
    return Statistics(
        jnp.zeros(shape[:3], dtype), jnp.zeros(shape, dtype), jnp.full(shape[0], num_rows, dtype=jnp.int32)
    )


def add_cross_fitted(
    statistics: Statistics,
    number: int,
    dictionary: tuple[np.ndarray, np.ndarray],
    x: Rows,
    rows_of_fold: list[np.ndarray],
) -> Statistics:
    """Add the statistics of one tree to those of the forest, each row's from the dictionary that left its fold out.

    `dictionary`: centres (H, K, D) and bases (H, K, D, d) without each of H folds. Rows keep their order. The arrays of
    `statistics` are donated: they are the largest of all, and are written in place, a block of rows at a time, so that
    little other memory is needed. All blocks have one length, so that the program is compiled once.
    """
    centres, bases = dictionary
    longest = padded_size(max(1, *(rows.size for rows in rows_of_fold)))
    numbers = max(centres.shape[1] * (bases.shape[3] + 1), FEATURE_NUMBERS * x.shape[1])
    fitting = BLOCK_BYTES // (x.dtype.itemsize * numbers)
    size = min(longest, 2 ** max(fitting.bit_length() - 1, 6))
    residual, squared = statistics.residual, statistics.squared
    for fold, rows in enumerate(rows_of_fold):
        own = jax.device_put((centres[fold], bases[fold]))
        for start in range(0, rows.size, size):
            block = np.resize(rows[start : start + size], size)  # padded with its own rows, which are written twice
            place = np.int32(number), block.astype(np.int32)
            residual, squared = _add_block(residual, squared, *own, jax.device_put(x[block]), *place)
    return Statistics(residual, squared, statistics.num_rows)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _add_block(
    residual: Float[Array, "F K n"],
    squared: Float[Array, "F K n d"],
    centres: Float[Array, "K D"],
    bases: Float[Array, "K D d"],
    x: Float[Array, "m D"],
    number: Int[Array, ""],
    place: Int[Array, "m"],
) -> tuple[Array, Array]:
    """Write the statistics of a block of rows to their places in those of one tree, `number`."""
    more_residual, more_squared = project_all(centres, bases, x)
    node = jnp.arange(residual.shape[1])[:, None]
    return residual.at[number, node, place].set(more_residual), squared.at[number, node, place].set(more_squared)


def candidate_statistics(
    training: Training,
    rows: np.ndarray,
    trees: list[Subspaces],
    candidates: list[np.ndarray],
    num_places: int,
    num_shards: int,
) -> CandidateStatistics:
    """Statistics of the given complete rows at their `candidates` in every tree, (n, M) ascending and padded with K.

    From the dictionaries that left a row's fold out; rows keep their order. Trees are along a leading axis. NumPy
    arrays, written in place: with the data these are the largest arrays of a fit.
    """
    num_nodes, rank, dtype = trees[0].bases.shape[1], trees[0].bases.shape[3], training.x.dtype
    num_rows, width = candidates[0].shape
    node = np.full((len(trees), width, num_places), num_nodes, np.int32)
    node[:, :, :num_rows] = np.swapaxes(np.stack(candidates), 1, 2)
    layouts = [lay_out(nodes, num_nodes, num_shards) for nodes in node]
    shape = (len(trees), *layouts[0].row.shape)
    residual, squared = aligned_zeros(shape, dtype), aligned_zeros((*shape, rank), dtype)

    def by_device(tree: int) -> None:
        nodes, stores, size = candidates[tree], (residual[tree], squared[tree]), num_places // num_shards
        for place, *values in statistics_on_device(training, rows, trees[tree], nodes):
            is_pair = nodes[place] < num_nodes
            shard = np.broadcast_to(place[:, None] // size, is_pair.shape)[is_pair]
            position = layouts[tree].position[:, place].T[is_pair]
            for store, found in zip(stores, values, strict=True):
                store[shard, position] = found[is_pair]

    def by_numpy(part: tuple[int, int, int]) -> None:
        tree, shard, number = part
        layout = layouts[tree]
        blocks = np.flatnonzero(layout.block_node[shard] == number)
        if blocks.size:
            here = slice(blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK)
            members = layout.row[shard, here]
            members = rows[members[members >= 0]]
            here = slice(here.start, here.start + members.size)
            found = statistics_at_node(training, members, trees[tree], number)
            residual[tree, shard, here], squared[tree, shard, here] = found

    if is_for_device(training, trees):
        for tree in range(len(trees)):
            by_device(tree)
    else:
        parallel_map(by_numpy, itertools.product(range(len(trees)), range(num_shards), range(num_nodes)))
    block_node = np.stack([layout.block_node for layout in layouts])
    position = np.stack([layout.position for layout in layouts])
    counts = np.full(len(trees), num_rows, np.int32)
    return on_host(
        CandidateStatistics,
        residual=residual,
        squared=squared,
        block_node=block_node,
        node=node,
        position=position,
        num_rows=counts,
    )


def without_folds(subspaces: Subspaces, folds: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Centres and bases learned without each fold; if there are no folds those of all rows, as fold 0."""
    entries = slice(0, 1) if folds is None else slice(1, None)
    return subspaces.centres[entries], subspaces.bases[entries]
