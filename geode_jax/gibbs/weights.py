"""Stopping and turning probabilities of the tree (paper step 2): S and R given the node counts."""

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.model import logit_beta
from geode_jax.settings import Prior
from geode_jax.state import NodeSums, State
from geode_jax.tree import Tree


def _beta_parameters(sums: NodeSums, tree: Tree, prior: Prior) -> tuple[Array, Array, Array, Array]:
    """(a, b) of S, then of R: ``1 + n, a_S + v - n`` and ``b_R + r, b_R + v - n - r``."""
    visits = tree.subtree_sum(sums.count)
    right = tree.right_child(visits)
    passed = visits - sums.count
    b = prior.right_concentration
    return 1.0 + sums.count, prior.stop_concentration + passed, b + right, b + (passed - right)


def draw(key: KeyArray, sums: NodeSums, tree: Tree, prior: Prior) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
    """New (logit_stop, logit_right)."""
    key_stop, key_right = jax.random.split(key)
    stop_a, stop_b, right_a, right_b = _beta_parameters(sums, tree, prior)
    logit_stop = jnp.where(tree.is_internal, logit_beta(key_stop, stop_a, stop_b), jnp.inf)
    logit_right = jnp.where(tree.is_internal, logit_beta(key_right, right_a, right_b), 0.0)
    return logit_stop, logit_right


def log_conditional(state: State, sums: NodeSums, tree: Tree, prior: Prior) -> tuple[Array, Array]:
    """Log densities of S and of R given the rest, summed over internal nodes."""

    def beta(logit: Array, a: Array, b: Array) -> Array:
        density = (a - 1) * jax.nn.log_sigmoid(logit) + (b - 1) * jax.nn.log_sigmoid(-logit) - betaln(a, b)
        return jnp.sum(jnp.where(tree.is_internal, density, 0.0))

    stop_a, stop_b, right_a, right_b = _beta_parameters(sums, tree, prior)
    return beta(state.logit_stop, stop_a, stop_b), beta(state.logit_right, right_a, right_b)
