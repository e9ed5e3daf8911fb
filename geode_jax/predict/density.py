"""Complete rows: log densities under every draw, their average over draws and trees, and node probabilities."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Float
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.candidate_statistics import AnyStatistics, CandidateStatistics, Probe
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.model.state import log_normal_constants
from geode_jax.model.statistics import project
from geode_jax.predict.row_blocks import map_row_blocks


class NodeScores(eqx.Module):
    """Parameters in a node's score of a row, for one tree; axes are nodes, then draws."""

    u: Float[Array, "K T d"]
    half_precision: Float[Array, "K T"]
    constant: Float[Array, "K T"]


def _node_scores(dictionary: Dictionary, draws: Draw) -> NodeScores:
    tree = dictionary.tree
    constants = jax.vmap(log_normal_constants, in_axes=(0, 0, None, None))(
        draws.neg_log_u, draws.log_sigma2, tree, dictionary.num_features
    )
    half_precision = 0.5 * jnp.exp(-draws.log_sigma2)[:, tree.scale]
    return NodeScores(
        jnp.swapaxes(jnp.exp(-draws.neg_log_u), 0, 1), half_precision.T, (constants + draws.log_weights).T
    )


def _scores_at(x: Array, centre: Array, basis: Array, node: NodeScores) -> Float[Array, "n T"]:
    """``log pi + log N`` at one node: rows are projected once for all draws, and the draws are one matrix product."""
    residual, coordinates = project(x, centre, basis)
    return _scores_of(residual, jnp.square(coordinates), node)


def _scores_of(residual: Float[Array, "n"], squared: Float[Array, "n d"], node: NodeScores) -> Float[Array, "n T"]:
    along = jnp.matmul(squared, node.u.T, precision=HIGHEST)
    return node.constant - node.half_precision * (residual[:, None] + along)


def log_scores(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "n K T"]:
    """``log pi + log N`` of rows at every node under every draw of one tree."""
    nodes = (dictionary.centres, dictionary.bases, _node_scores(dictionary, draws))
    return jnp.moveaxis(lax.map(lambda node: _scores_at(x, *node), nodes), 0, 1)


def log_density_by_draw(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "n T"]:
    """Log density under every draw of one tree, in model coordinates; one node at a time."""

    def at_node(total: Array, node: tuple[Array, Array, NodeScores]) -> tuple[Array, None]:
        return jnp.logaddexp(total, _scores_at(x, *node)), None

    empty = jnp.full((x.shape[0], draws.log_sigma2.shape[0]), -jnp.inf, x.dtype)
    return lax.scan(at_node, empty, (dictionary.centres, dictionary.bases, _node_scores(dictionary, draws)))[0]


def log_density_of_statistics(dictionary: Dictionary, draws: Draw, statistics: AnyStatistics) -> Float[Array, "n T"]:
    """Log density, under every draw of one tree, of rows of which only the statistics are given.

    Summed over candidate nodes only if the statistics are of these only.
    """
    if isinstance(statistics, CandidateStatistics):
        parameters = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), _node_scores(dictionary, draws))
        return lax.map(
            lambda at: jax.nn.logsumexp(statistics.scores(at.constant, at.half_precision, at.u), axis=0), parameters
        ).T

    def at_node(total: Array, node: tuple[Array, Array, NodeScores]) -> tuple[Array, None]:
        return jnp.logaddexp(total, _scores_of(*node)), None

    empty = jnp.full((statistics.residual.shape[1], draws.log_sigma2.shape[0]), -jnp.inf, statistics.residual.dtype)
    nodes = (statistics.residual, statistics.squared, _node_scores(dictionary, draws))
    return lax.scan(at_node, empty, nodes)[0]


def lost_shares(dictionary: Dictionary, draws: Draw, probe: Probe) -> Float[Array, "p"]:
    """Posterior probability, averaged over the draws of one tree, that a row is at none of its candidate nodes."""

    def at_node(totals: tuple[Array, Array], node: tuple[Array, Array, Array, NodeScores]) -> tuple[Any, None]:
        everywhere, lost = totals
        is_candidate, residual, squared, parameters = node
        score = _scores_of(residual, squared, parameters)
        elsewhere = jnp.where(is_candidate[:, None], -jnp.inf, score)
        return (jnp.logaddexp(everywhere, score), jnp.logaddexp(lost, elsewhere)), None

    empty = jnp.full((probe.residual.shape[1], draws.log_sigma2.shape[0]), -jnp.inf, probe.residual.dtype)
    nodes = (probe.is_candidate, probe.residual, probe.squared, _node_scores(dictionary, draws))
    everywhere, lost = lax.scan(at_node, (empty, empty), nodes)[0]
    return jnp.exp(lost - everywhere).mean(axis=1)


@jax.jit
def log_densities(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "n F T"]:
    """Log density of rows under every draw of every tree, in model coordinates."""

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        tree_dictionary, tree_draws = inputs
        return log_density_by_draw(tree_dictionary, tree_draws, x)

    return jnp.swapaxes(lax.map(one_tree, (dictionary, draws)), 0, 1)


@jax.jit
def log_density_by_tree(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "n F"]:
    """Log of the posterior mean density under each tree, in model coordinates."""

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        tree_dictionary, tree_draws = inputs
        by_draw = log_density_by_draw(tree_dictionary, tree_draws, x)
        return jax.nn.logmeanexp(by_draw, axis=1)

    return lax.map(one_tree, (dictionary, draws)).T


@jax.jit
def node_probabilities(dictionary: Dictionary, draws: Draw, x: Float[Array, "n D"]) -> Float[Array, "n F K"]:
    """Probability of each node given the row, averaged over the draws of each tree."""

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        tree_dictionary, tree_draws = inputs
        total = log_density_by_draw(tree_dictionary, tree_draws, x)
        nodes = (tree_dictionary.centres, tree_dictionary.bases, _node_scores(tree_dictionary, tree_draws))
        return lax.map(lambda node: jnp.exp(_scores_at(x, *node) - total).mean(axis=1), nodes).T

    return jnp.swapaxes(lax.map(one_tree, (dictionary, draws)), 0, 1)


def density_row_bytes(draws: Draw, x: np.ndarray) -> int:
    """Bytes that a complete row takes in a block."""
    return x.itemsize * (4 * x.shape[1] + 3 * draws.log_joint.shape[1])


def log_density_complete(dictionary: Dictionary, draws: Draw, x: np.ndarray) -> np.ndarray:
    """Log density in model coordinates, averaged over trees with equal weights, (n,)."""
    by_tree = map_row_blocks(log_density_by_tree, (dictionary, draws), x, bytes_per_row=density_row_bytes(draws, x))
    return np.logaddexp.reduce(by_tree, axis=1) - np.log(by_tree.shape[1])
