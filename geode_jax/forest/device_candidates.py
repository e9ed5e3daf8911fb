"""Candidate nodes of complete rows, and the rows' statistics there, on a GPU: all nodes are looked at.

A GPU scores all nodes of a block of rows sooner than a beam search could tell it which ones to score, and the rows are
sent once for all nodes, not once for each.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Float, Int
from geode_jax.forest.device_products import DeviceProducts, power_within
from geode_jax.learning.evidence import cell_mixture
from geode_jax.learning.subspaces import Subspaces
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.statistics import NODES_AT_ONCE, project
from geode_jax.partition.metis import Partition
from geode_jax.rows.training import Training

# Memory of the device for a block of rows, with its statistics at all nodes.
BLOCK_BYTES = 2**28
# Where statistics of all rows at all nodes take fewer multiplications, NumPy is done before the programs for a GPU are
# compiled: that took 8 s beside an H200, and 16 CPU cores found all candidates of digits (2^31) in one second. That is
# 2^34; four times as many, as NumPy's beam search leaves most nodes out.
LEAST_WORK = 2**36


def is_for_device(training: Training, trees: list[Subspaces]) -> bool:
    """Whether stage one computes on a GPU, and has enough work of this kind for one."""
    num_nodes, num_features, rank = trees[0].bases.shape[1:]
    work = training.num_rows * len(trees) * num_nodes * num_features * rank
    return isinstance(training.processes.products, DeviceProducts) and work >= LEAST_WORK


class _Block(NamedTuple):
    """Some rows on the device, padded, and the dictionary that left their fold out; `place`: which rows, unpadded."""

    place: np.ndarray
    centres: Float[Array, "K D"]
    bases: Float[Array, "K D d"]
    x: Float[Array, "m D"]


def search_on_device(
    training: Training, rows: np.ndarray, partition: Partition, subspaces: Subspaces, width: int
) -> np.ndarray:
    """As :func:`geode_jax.learning.candidate_search.search_candidates`, but the best of all nodes."""
    mixture = cell_mixture(training, partition, subspaces)
    width = min(width, mixture.nodes.size)
    tables = [table.astype(training.x.dtype) for table in mixture.of_complete_rows(training.num_features)]
    constant, of_residual, of_squared = jax.device_put(tables)
    found = np.empty((rows.size, width), np.int32)
    for block in _blocks(training, rows, subspaces, mixture.nodes):
        nodes = block.centres, block.bases, constant, of_residual, of_squared
        best = np.asarray(_best_nodes(nodes, block.x, width=width))
        found[block.place] = mixture.nodes[best[: block.place.size]]
    return found


def statistics_on_device(
    training: Training, rows: np.ndarray, subspaces: Subspaces, candidates: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Which rows (m,), and their E (m, M) and Z2 (m, M, d) at their `candidates` (n, M); undefined at those of K."""
    for block in _blocks(training, rows, subspaces, np.arange(subspaces.bases.shape[1])):
        nodes = jax.device_put(np.resize(candidates[block.place], (len(block.x), candidates.shape[1])))
        residual, squared = _statistics_at(block.centres, block.bases, block.x, nodes)
        yield block.place, np.asarray(residual)[: block.place.size], np.asarray(squared)[: block.place.size]


def _blocks(training: Training, rows: np.ndarray, subspaces: Subspaces, nodes: np.ndarray) -> Iterator[_Block]:
    """The given rows, fold by fold, in blocks of one size; with the dictionary at the given nodes."""
    holdout = training.holdouts_of(rows)
    num_features, rank = subspaces.bases.shape[2:]
    numbers = nodes.size * (rank + 1) + 3 * NODES_AT_ONCE * num_features
    most = max(1, BLOCK_BYTES // (training.x.dtype.itemsize * numbers))
    size = power_within(min(most, int(np.bincount(holdout).max(initial=0))))
    for number in np.flatnonzero(np.bincount(holdout)):
        centres, bases = jax.device_put((subspaces.centres[number, nodes], subspaces.bases[number, nodes]))
        inside = np.flatnonzero(holdout == number)
        for start in range(0, inside.size, size):
            place = inside[start : start + size]
            yield _Block(place, centres, bases, jax.device_put(training.x[rows[np.resize(place, size)]]))


@functools.partial(jax.jit, static_argnames="width")
def _best_nodes(nodes: tuple[Array, ...], x: Float[Array, "m D"], *, width: int) -> Int[Array, "m width"]:
    """The nodes of highest score, ascending; `nodes`: their centres, bases and tables of the mixture."""

    def score(node: tuple[Array, ...]) -> Float[Array, "m"]:
        centre, basis, constant, of_residual, of_squared = node
        residual, coordinates = project(x, centre, basis)
        return constant - of_residual * residual - jnp.matmul(jnp.square(coordinates), of_squared, precision=HIGHEST)

    scores = lax.map(score, nodes, batch_size=NODES_AT_ONCE)
    return jnp.sort(lax.top_k(scores.T, width)[1], axis=1)


@jax.jit
def _statistics_at(
    centres: Float[Array, "K D"], bases: Float[Array, "K D d"], x: Float[Array, "m D"], nodes: Int[Array, "m M"]
) -> tuple[Float[Array, "m M"], Float[Array, "m M d"]]:
    residual, coordinates = lax.map(lambda node: project(x, *node), (centres, bases), batch_size=NODES_AT_ONCE)
    row = jnp.arange(x.shape[0])[:, None]
    at = jnp.minimum(nodes, centres.shape[0] - 1)
    return residual[at, row], jnp.square(coordinates[at, row])
