"""What the sampler needs of a row: its squared distance to every node's subspace, and its squared coordinates in it.

    E_ik = || (I - Phi_k Phi_k') (x_i - mu_k) ||^2      Z2_ikm = ( Phi_k' (x_i - mu_k) )_m^2

E is the norm of the residual itself, not a difference of norms, so that float32 loses no digits (notebooks/model.md).
"""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Bool, Float, Int, Shaped
from geode_jax.math.lowrank import HIGHEST, Observed
from geode_jax.math.rows_in_space import SeenRows
from geode_jax.model.dictionary import Dictionary

# Sums over rows are sums of this many blocks. So their order does not depend on how many devices share the rows, as
# long as that number divides it; otherwise there are as many blocks as the least common multiple of both.
ROW_BLOCKS = 16
# Nodes at which partial rows are reduced at once, for few launches on a GPU; fewer if that would hold more numbers.
NODES_AT_ONCE, NUMBERS_AT_ONCE = 16, 2**24

NodeResults = TypeVar("NodeResults")


class Statistics(eqx.Module):
    """Sufficient statistics of n rows at K nodes, nodes first: the sweep contracts over the last axis.

    Only the first `num_rows` places hold rows, the others are padding: so data of nearly the same size share compiled
    programs, and classes of different size are sampled by one program. `row_blocks`: rows are summed in so many blocks,
    or in as many as divide both that number and the number of places. `shard_rows`: where processes bring their own
    rows, how many of each of R devices' places hold rows, the first ones; None where the first `num_rows` of all do.
    """

    residual: Float[Array, "*batch K n"]
    squared: Float[Array, "*batch K n d"]
    num_rows: Int[Array, "*batch"]
    shard_rows: Int[Array, "*batch R"] | None = None
    row_blocks: int = eqx.field(static=True, default=ROW_BLOCKS)

    @property
    def is_row(self) -> Bool[Array, "*batch n"]:
        """Which places hold rows."""
        return has_row(self.residual.shape[-1], self.num_rows, self.shard_rows)

    @property
    def row(self) -> Int[Array, "*batch n"] | None:
        """The number of the row at each place, where that is not the place's own."""
        return row_at(self.residual.shape[-1], self.shard_rows)

    def scores(
        self, constant: Float[Array, "K"], half_precision: Float[Array, "K"], u: Float[Array, "K d"]
    ) -> Float[Array, "K n"]:
        """``constant - half_precision (E + sum_m u_m Z2_m)`` of every row at every node."""
        along = jnp.einsum("knd,kd->kn", self.squared, u, precision=HIGHEST)
        return constant[:, None] - half_precision[:, None] * (self.residual + along)

    def of_nodes(self, table: Shaped[Array, "K"]) -> Shaped[Array, "K #n"]:
        """A value per node, in a shape that broadcasts with the scores."""
        return table[:, None]

    def node_at(self, slot: Int[Array, "n"]) -> Int[Array, "n"]:
        """The node at a position along the first axis of the scores."""
        return slot

    def at(self, node: Int[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n d"]]:
        """(E, Z2) of every row at its node; undefined where that is K."""
        residual = jnp.take_along_axis(self.residual, node[None], axis=0, mode="clip")[0]
        return residual, jnp.take_along_axis(self.squared, node[None, :, None], axis=0, mode="clip")[0]


def has_row(
    num_places: int, num_rows: Array | np.ndarray, shard_rows: Array | np.ndarray | None
) -> Bool[Array, "*batch n"]:
    """Which places hold rows: the first ones of all, or of every shard."""
    if shard_rows is None:
        return jnp.arange(num_places) < num_rows[..., None]
    size = num_places // shard_rows.shape[-1]
    return (jnp.arange(size) < shard_rows[..., None]).reshape(*shard_rows.shape[:-1], num_places)


def row_at(num_places: int, shard_rows: Array | np.ndarray | None) -> Int[Array, "*batch n"] | None:
    """The number of the row at each place; of places without a row it means nothing."""
    if shard_rows is None:
        return None
    size = num_places // shard_rows.shape[-1]
    before = jnp.cumsum(shard_rows, axis=-1) - shard_rows
    return (before[..., None] + jnp.arange(size)).reshape(*shard_rows.shape[:-1], num_places)


def padded_size(num_rows: int) -> int:
    """Number of places for `num_rows` rows: rounded up by less than 64 or 1/16 of it, whichever is larger.

    Compiling a program takes longer than a small table's sweeps, so tables of up to 1024 rows share sixteen sizes.
    """
    step = max(4 * ROW_BLOCKS, 2 ** (num_rows.bit_length() - 5))
    return -(-num_rows // step) * step


def project(
    x: Float[Array, "n D"], centre: Float[Array, "D"], basis: Float[Array, "D d"]
) -> tuple[Float[Array, "n"], Float[Array, "n d"]]:
    """(E, Z) of rows at one node."""
    centred = x - centre
    coordinates = jnp.matmul(centred, basis, precision=HIGHEST)
    residual = centred - jnp.matmul(coordinates, basis.T, precision=HIGHEST)
    return jnp.sum(jnp.square(residual), axis=-1), coordinates


def statistics_of(dictionary: Dictionary, x: Float[Array, "n D"]) -> Statistics:
    """Statistics of rows in model coordinates at the nodes of one tree."""
    residual, squared = project_all(dictionary.centres, dictionary.bases, x)
    return Statistics(residual, squared, jnp.asarray(x.shape[0], jnp.int32))


@jax.jit
def project_all(
    centres: Float[Array, "K D"], bases: Float[Array, "K D d"], x: Float[Array, "n D"]
) -> tuple[Float[Array, "K n"], Float[Array, "K n d"]]:
    """(E, Z2) of rows at all nodes, computed one node at a time to bound memory."""

    def at_node(node: tuple[Array, Array]) -> tuple[Array, Array]:
        residual, coordinates = project(x, *node)
        return residual, jnp.square(coordinates)

    return lax.map(at_node, (centres, bases))


def observed_statistics_of(
    centres: Float[Array, "K D"], bases: Float[Array, "K D d"], seen: SeenRows, places: Int[Array, "M"]
) -> Observed:
    """Statistics of partial rows at the nodes of these places, batch axes (b, M); the rows may share one mask."""
    by_node = map_nodes(seen.statistics, centres, bases, seen.numbers(bases.shape[-1]), places)
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), by_node)


def map_nodes(
    function: Callable[[Array, Array], NodeResults],
    centres: Float[Array, "K D"],
    bases: Float[Array, "K D d"],
    numbers: int,
    places: Int[Array, "M"] | None = None,
) -> NodeResults:
    """``function(centre, basis)`` of every node, stacked on a first axis; some nodes at a time.

    `numbers`: how many the function holds for one node. `places`: of the nodes, None: all.
    """
    places = jnp.arange(centres.shape[0]) if places is None else places
    num_nodes = places.shape[0]
    size = min(NODES_AT_ONCE, num_nodes, max(1, NUMBERS_AT_ONCE // numbers))
    number = -(-num_nodes // size)
    index = places[jnp.minimum(jnp.arange(number * size), num_nodes - 1)].reshape(number, size)
    found = lax.map(lambda some: jax.vmap(function)(centres[some], bases[some]), index)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_nodes], found)


def observed_statistics_at(
    centres: Float[Array, "K D"], bases: Float[Array, "K D d"], seen: SeenRows, places: Int[Array, "b M"]
) -> Observed:
    """Statistics of partial rows, each with its own mask, at M given nodes of each row; batch axes (b, M)."""
    return _of_slots(lambda own: seen.statistics_at(centres, bases, own), places)


def products_at(
    centres: Float[Array, "K D"], bases: Float[Array, "K D d"], seen: SeenRows, places: Int[Array, "b M"]
) -> tuple[Array, Array, Array]:
    """What ``seen.products`` gives of rows, each with its own mask, at M given nodes of each row; batch axes (b, M)."""
    return _of_slots(lambda own: seen.products_at(centres, bases, own), places)


def _of_slots(function: Callable[[Array], NodeResults], places: Int[Array, "b M"]) -> NodeResults:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), lax.map(function, places.T))
