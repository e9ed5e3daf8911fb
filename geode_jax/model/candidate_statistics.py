"""Statistics of rows at a few nodes each, where those at all nodes are too many to store or to read in every sweep.

A sweep needs all rows of a node together, for one matrix product, and then all nodes of a row. So the (row, node) pairs
are sorted by node, in blocks of one node each, and every row stores the positions of its pairs. A sweep then gathers
n M scores; to gather parameters to every pair would be n M d numbers.
"""

from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array, Bool, Float, Int, Shaped
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.on_host import on_host
from geode_jax.model.statistics import ROW_BLOCKS, Statistics, has_row, row_at

# Pairs per block: enough for a vectorised product, few enough that the last block of a node wastes little.
BLOCK = 32
# Positions are int32, as JAX's integers are by default.
MOST_PLACES = 2**31 - 1


class CandidateStatistics(eqx.Module):
    """Sufficient statistics of n rows at M candidate nodes each; a row cannot be at any other node.

    `residual`, `squared`: of P pairs in each of R shards of rows, as (E, Z2) in :class:`Statistics`. `block_node`: the
    node of a block of pairs, K where it is empty. `node`: candidates, ascending; K at places without a row or node.
    `position`: the position of a pair in its shard. `num_rows`: places beyond it hold no rows.
    `shard_rows`, `row_blocks`: as in :class:`Statistics`.
    """

    residual: Float[Array, "*batch R P"]
    squared: Float[Array, "*batch R P d"]
    block_node: Int[Array, "*batch R B"]
    node: Int[Array, "*batch M n"]
    position: Int[Array, "*batch M n"]
    num_rows: Int[Array, "*batch"]
    shard_rows: Int[Array, "*batch R"] | None = None
    row_blocks: int = eqx.field(static=True, default=ROW_BLOCKS)

    @property
    def is_row(self) -> Bool[Array, "*batch n"]:
        """Which places hold rows."""
        return has_row(self.node.shape[-1], self.num_rows, self.shard_rows)

    @property
    def row(self) -> Int[Array, "*batch n"] | None:
        """The number of the row at each place, where that is not the place's own."""
        return row_at(self.node.shape[-1], self.shard_rows)

    def scores(
        self, constant: Float[Array, "K"], half_precision: Float[Array, "K"], u: Float[Array, "K d"]
    ) -> Float[Array, "M n"]:
        """``constant - half_precision (E + sum_m u_m Z2_m)`` of every row at its candidates; -inf where it has none."""
        shape = (*self.block_node.shape, BLOCK)
        constant = jnp.append(constant, -jnp.inf)
        at_block = jnp.take(u, self.block_node, axis=0, mode="clip")
        along = jnp.einsum("rbpd,rbd->rbp", self.squared.reshape(*shape, -1), at_block, precision=HIGHEST)
        distance = self.residual.reshape(shape) + along
        half = jnp.take(half_precision, self.block_node, mode="clip")
        scores = constant[self.block_node][..., None] - half[..., None] * distance
        return self._pick(scores.reshape(self.residual.shape), self.position)

    def of_nodes(self, table: Shaped[Array, "K"]) -> Shaped[Array, "M n"]:
        """A value per node, in the shape of the scores; -1, or False, where there is no candidate."""
        return jnp.take(table, self.node, mode="fill", fill_value=False if table.dtype == bool else -1)

    def node_at(self, slot: Int[Array, "n"]) -> Int[Array, "n"]:
        """The node at a position along the first axis of the scores."""
        return jnp.take_along_axis(self.node, slot[None], axis=0)[0]

    def at(self, node: Int[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n d"]]:
        """(E, Z2) of every row at one of its candidates; undefined where `node` is K."""
        slot = jnp.argmax(self.node == node, axis=0)
        place = jnp.take_along_axis(self.position, slot[None], axis=0)
        return self._pick(self.residual, place)[0], self._pick(self.squared, place)[0]

    def _pick(self, values: Shaped[Array, "R P *rest"], place: Int[Array, "m n"]) -> Shaped[Array, "m n *rest"]:
        """Gather the values of pairs at the given positions of every row; positions are within the row's shard."""
        by_shard = place.reshape(place.shape[0], values.shape[0], -1)
        found = jax.vmap(lambda own, at: own[at], in_axes=(0, 1), out_axes=1)(values, by_shard)
        return found.reshape(*place.shape, *values.shape[2:])


AnyStatistics: TypeAlias = Statistics | CandidateStatistics


class Probe(eqx.Module):
    """Statistics of a few rows at all nodes, to measure what candidates leave out; axes as in :class:`Statistics`."""

    residual: Float[Array, "*batch K p"]
    squared: Float[Array, "*batch K p d"]
    is_candidate: Bool[Array, "*batch K p"]


class _Layout(NamedTuple):
    """Where pairs are stored: `row` (R, P), -1 at empty positions, `block_node` (R, B) and `position` (M, n)."""

    row: np.ndarray
    block_node: np.ndarray
    position: np.ndarray


def num_blocks_of(num_pairs: int, num_nodes: int) -> int:
    """Blocks that hold the pairs: per node one beyond the full ones, and an empty block at the end.

    Raises ValueError if a pair's position would be beyond `MOST_PLACES`.
    """
    num_blocks = -(-num_pairs // BLOCK) + num_nodes + 1
    if num_blocks * BLOCK > MOST_PLACES:
        raise ValueError(
            f"num_candidates: expected rows times candidates within {MOST_PLACES:.2g}, but they are {num_pairs:.2g};"
            " set fewer candidates, or fit fewer rows"
        )
    return num_blocks


def lay_out(node: np.ndarray, num_nodes: int, num_shards: int) -> _Layout:
    """Positions of the pairs of `node`, (M, n), where K means no pair; shapes depend on sizes only, not on nodes."""
    width, num_rows = node.shape
    size = num_rows // num_shards
    num_blocks = num_blocks_of(width * size, num_nodes)
    row = np.full((num_shards, num_blocks * BLOCK), -1, np.int32)
    block_node = np.full((num_shards, num_blocks), num_nodes, np.int32)
    # Every row has at least one candidate. Its unused candidates point at the last, empty block, and so score -inf.
    # Places without a row point at position 0; their scores are not used.
    position = np.where((node == num_nodes) & (node[0] < num_nodes), num_blocks * BLOCK - 1, 0).astype(np.int32)
    for shard in range(num_shards):
        inside = slice(shard * size, (shard + 1) * size)
        flat = node[:, inside].ravel()
        count = np.bincount(flat, minlength=num_nodes + 1)[:num_nodes]
        blocks = -(-count // BLOCK)
        start = np.cumsum(blocks) - blocks
        block_node[shard, : blocks.sum()] = np.repeat(np.arange(num_nodes), blocks)
        # pairs sorted by node, without the entries that are no pair; int32 to save memory
        slot, member = np.divmod(np.argsort(flat, kind="stable")[: count.sum()].astype(np.int32), np.int32(size))
        place = np.arange(member.size, dtype=np.int32)
        place += np.repeat((start * BLOCK - np.cumsum(count) + count).astype(np.int32), count)
        member += np.int32(shard * size)
        row[shard, place] = member
        position[slot, member] = place
    return _Layout(row, block_node, position)


def reshard(
    statistics: CandidateStatistics, num_nodes: int, num_shards: int, num_places: int | None = None
) -> CandidateStatistics:
    """The same statistics, of every tree along a leading axis F, with rows in another number of shards; NumPy arrays.

    `num_places`: of the result, at least as many as before, and a multiple of the number of shards.
    """
    host = jax.tree.map(np.asarray, statistics)
    old_places, old_shards = host.node.shape[2], host.residual.shape[1]
    more = 0 if num_places is None else num_places - old_places
    node = np.pad(host.node, [(0, 0), (0, 0), (0, more)], constant_values=num_nodes)

    def one_tree(tree: CandidateStatistics, node: np.ndarray) -> tuple[np.ndarray, ...]:
        layout = lay_out(node, num_nodes, num_shards)
        row = np.arange(old_places)
        is_pair = tree.node < num_nodes
        old_shard, new_shard = (
            np.broadcast_to(row * shards // places, is_pair.shape)[is_pair]
            for shards, places in ((old_shards, old_places), (num_shards, old_places + more))
        )
        source = old_shard, tree.position[is_pair]
        target = new_shard, layout.position[:, :old_places][is_pair]
        residual = np.zeros(layout.row.shape, tree.residual.dtype)
        squared = np.zeros((*layout.row.shape, tree.squared.shape[2]), tree.squared.dtype)
        residual[target], squared[target] = tree.residual[source], tree.squared[source]
        return residual, squared, layout.block_node, layout.position

    numbers = range(host.num_rows.size)
    trees = [one_tree(jax.tree.map(lambda leaf, at=number: leaf[at], host), node[number]) for number in numbers]
    names = "residual", "squared", "block_node", "position"
    arrays = {name: np.stack(leaves) for name, leaves in zip(names, zip(*trees, strict=True), strict=True)}
    given = {"node": node, "num_rows": host.num_rows, "row_blocks": host.row_blocks}
    return on_host(CandidateStatistics, **arrays, **given)
