"""New rows from the posterior predictive."""

import jax
import jax.numpy as jnp

from geode_jax._typing import Array, Float, Int, KeyArray
from geode_jax.math.lowrank import HIGHEST
from geode_jax.math.rows_in_space import Space
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw


@jax.jit
def sample_rows(
    key: KeyArray, dictionary: Dictionary, draws: Draw, space: Space | None, row: Int[Array, "n"]
) -> Float[Array, "n D"]:
    """Rows in model coordinates: pick a tree and a draw at random, a node by its weight, and draw from its Gaussian.

    `draws`: leaves with axes (trees, draws, ...). `space`: that of all rows if the dictionary is in coordinates of it;
    rows are then over the scales of the features. `row`: the numbers of the rows; a row depends on the key and on its
    number, not on the others.
    """
    num_trees, num_draws = draws.log_joint.shape
    scale = jnp.asarray(dictionary.tree.scale)

    def one_row(number: Array) -> Array:
        key_tree, key_draw, key_node, key_eta, key_eps = jax.random.split(jax.random.fold_in(key, number), 5)
        tree = jax.random.randint(key_tree, (), 0, num_trees)
        draw = jax.random.randint(key_draw, (), 0, num_draws)
        node = jax.random.categorical(key_node, draws.log_weights[tree, draw])
        neg_log_u = draws.neg_log_u[tree, draw, node]
        sigma = jnp.exp(0.5 * draws.log_sigma2[tree, draw, scale[node]])
        eta = sigma * jnp.sqrt(jnp.expm1(neg_log_u)) * jax.random.normal(key_eta, neg_log_u.shape, sigma.dtype)
        noise = sigma * jax.random.normal(key_eps, (dictionary.num_features,), sigma.dtype)
        point = dictionary.centres[tree, node] + jnp.matmul(dictionary.bases[tree, node], eta, precision=HIGHEST)
        return point + noise if space is None else space.features(point) + space.noise(noise)

    return jax.lax.map(one_row, row, batch_size=64)
