"""The intrinsic dimension at a row: how many directions are needed by the nodes it may belong to."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, ArrayLike, Float
from geode_jax.math.lowrank import Observed
from geode_jax.math.rows_in_space import SeenRows
from geode_jax.model.draw import Draw
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.candidates import Candidates, held_share
from geode_jax.predict.constants import varying
from geode_jax.predict.density import density_row_bytes, node_probabilities
from geode_jax.predict.mixture import candidate_scores, of_each_tree
from geode_jax.predict.nodes import Nodes, TreeNodes
from geode_jax.predict.row_blocks import map_row_blocks
from geode_jax.predict.rows import (
    DENSITY_DRAWS,
    PARTIAL_DRAWS,
    check_candidates,
    check_draws,
    check_rows,
    map_held_rows,
    map_rows,
    nodes_in_features,
)
from geode_jax.rows.blocks import slices

# Probabilities of the nodes of several rows that are held at once.
NUMBERS_AT_ONCE = 2**23


def intrinsic_dimension(
    posterior: Posterior, X: ArrayLike, *, num_draws: int | None = None, num_candidates: int | None = None
) -> Float[np.ndarray, "n d1"]:
    """Posterior of the intrinsic dimension p = 0..d at every row, (n, D) to (n, d + 1); rows sum to 1.

    The dimension of a row is that of its node. The probabilities of the nodes given the row (or its observed features),
    averaged over draws, weight the nodes' dimension probabilities (`Posterior.node_dimension_probabilities`), and trees
    are averaged. Ask it of rows that were not in the fit: under a dictionary that was learned from it, a row seems to
    belong to a small cell, which knows its own dimension badly. For the whole data set see
    `Posterior.intrinsic_dimension_probabilities`. `num_draws`: as in :func:`geode_jax.log_density`;
    `num_candidates`: as in :func:`geode_jax.condition`.
    """
    posterior, data = varying(*check_rows(posterior, X))
    check_candidates(posterior, num_candidates)

    def of_complete(posterior: Posterior, draws: Draw, x: np.ndarray) -> np.ndarray:
        return map_row_blocks(
            node_probabilities, (posterior.dictionary, draws), x, bytes_per_row=density_row_bytes(draws, x)
        )

    def of_partial(posterior: Posterior, draws: Draw, x: np.ndarray, is_observed: np.ndarray) -> np.ndarray:
        nodes = nodes_in_features(posterior)
        return map_held_rows(
            _node_probabilities_partial,
            (nodes, draws),
            x,
            is_observed,
            posterior=posterior,
            draws=draws,
            num_candidates=num_candidates,
        )[0]

    counts = check_draws(num_draws, DENSITY_DRAWS), check_draws(num_draws, PARTIAL_DRAWS)
    of_nodes = np.nan_to_num(posterior.node_dimension_probabilities)
    result = np.empty((data.shape[0], of_nodes.shape[2]))
    for some in slices(data.shape[0], of_nodes.shape[0] * of_nodes.shape[1], numbers=NUMBERS_AT_ONCE):
        nodes = map_rows(posterior, data[some], counts, of_complete, of_partial)
        result[some] = np.einsum("nfk,fkp->np", nodes, of_nodes)
    return result / result.sum(axis=1, keepdims=True)


@partial(quickly_compiled, static_argnames="num_candidates")
def _node_probabilities_partial(
    nodes: Nodes, draws: Draw, seen: SeenRows, *, num_candidates: int
) -> tuple[Float[Array, "b"], Float[Array, "b F K"]]:
    """The share of a row's weight that its candidates hold, and the probability of each node given the observed part,
    averaged over the draws of each tree; 0 at non-candidates.
    """

    def one_tree(own: TreeNodes, draws: Draw, candidates: Candidates[Observed]) -> tuple[Array, Array]:
        probability = jax.nn.softmax(candidate_scores(own.tree, draws, candidates), axis=2).mean(axis=0)
        empty = jnp.zeros((seen.num_rows, own.tree.num_nodes), probability.dtype)
        return candidates.log_share, empty.at[jnp.arange(seen.num_rows)[:, None], candidates.node].set(probability)

    log_share, found = of_each_tree(one_tree, nodes, draws, seen, num_candidates)
    return held_share(log_share), jnp.swapaxes(found, 0, 1)
