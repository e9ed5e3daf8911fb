"""Log density of complete rows, averaged over draws and trees."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Float
from geode_jax.dictionary import Dictionary
from geode_jax.gibbs.run import Draw
from geode_jax.math.lowrank import HIGHEST
from geode_jax.math.streaming import map_row_blocks
from geode_jax.state import log_normal_constants
from geode_jax.statistics import project


@jax.jit
def log_density_by_tree(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "F n"]:
    """Log of the posterior mean density under each tree, in model coordinates.

    One node at a time: its two projections serve every draw, and the draws are one matrix product.
    """

    def one_tree(tree_inputs: tuple[Dictionary, Draw]) -> Array:
        tree_dictionary, tree_draws = tree_inputs
        tree = tree_dictionary.tree
        constants = jax.vmap(log_normal_constants, in_axes=(0, 0, None, None))(
            tree_draws.neg_log_u, tree_draws.log_sigma2, tree, dictionary.num_features
        )
        constants = constants + tree_draws.log_weights
        half_precision = 0.5 * jnp.exp(-tree_draws.log_sigma2)[:, tree.scale]
        u = jnp.exp(-tree_draws.neg_log_u)

        def at_node(total: Array, node: tuple[Array, ...]) -> tuple[Array, None]:
            centre, basis, node_u, node_half_precision, constant = node
            residual, coordinates = project(x, centre, basis)
            along = jnp.matmul(jnp.square(coordinates), node_u.T, precision=HIGHEST)
            score = constant - node_half_precision * (residual[:, None] + along)
            return jnp.logaddexp(total, score), None

        nodes = (
            tree_dictionary.centres,
            tree_dictionary.bases,
            jnp.swapaxes(u, 0, 1),
            half_precision.T,
            constants.T,
        )
        empty = jnp.full((x.shape[0], u.shape[0]), -jnp.inf, x.dtype)
        by_draw = lax.scan(at_node, empty, nodes)[0]
        return jax.nn.logsumexp(by_draw, axis=1) - jnp.log(by_draw.shape[1])

    return lax.map(one_tree, (dictionary, draws))


def log_density_complete(dictionary: Dictionary, draws: Draw, x: np.ndarray) -> np.ndarray:
    """Log density in model coordinates, averaged over trees with equal weights, (n,)."""
    by_tree = map_row_blocks(
        lambda block: log_density_by_tree(dictionary, draws, block).T,
        x,
        bytes_per_row=x.itemsize * (4 * x.shape[1] + 3 * draws.log_joint.shape[1]),
    )
    return np.logaddexp.reduce(by_tree, axis=1) - np.log(by_tree.shape[1])
