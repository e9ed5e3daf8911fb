"""Probabilities of stopping and of turning right (paper step 2): S and R given the node counts, and a_S given S.

a_S | S  ~  Gamma( shape + number of internal nodes, rate - sum of log(1 - S) )      where it has a Gamma prior
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln, gammaln

from geode_jax._typing import Array, Float
from geode_jax.math.conjugate import move_log_gamma, move_logit_beta
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.state import NodeSums, State
from geode_jax.model.tree import Tree
from geode_jax.settings import GammaPrior, Prior


def _gamma_parameters(state: State, tree: Tree, prior: GammaPrior) -> tuple[Array, Array]:
    """(shape, rate) of a_S."""
    log_move = jnp.where(tree.is_internal, jax.nn.log_sigmoid(-state.logit_stop), 0.0)
    return prior.shape + tree.is_internal.sum().astype(log_move.dtype), prior.rate - log_move.sum()


def move_concentration(uniforms: Uniforms, state: State, tree: Tree, prior: Prior) -> Float[Array, ""]:
    """New log a_S; the old one where a_S is given."""
    if not isinstance(prior.stop_concentration, GammaPrior):
        return state.log_stop_concentration
    shape, rate = _gamma_parameters(state, tree, prior.stop_concentration)
    return move_log_gamma(uniforms, state.log_stop_concentration, shape, rate)


def log_conditional_of_concentration(state: State, tree: Tree, prior: Prior) -> Float[Array, ""]:
    """Log density of a_S given the rest; 0 where it is given."""
    if not isinstance(prior.stop_concentration, GammaPrior):
        return jnp.zeros_like(state.log_stop_concentration)
    shape, rate = _gamma_parameters(state, tree, prior.stop_concentration)
    log_a = state.log_stop_concentration
    return shape * jnp.log(rate) - gammaln(shape) + (shape - 1) * log_a - rate * jnp.exp(log_a)


def _beta_parameters(state: State, sums: NodeSums, tree: Tree, prior: Prior) -> tuple[Array, Array, Array, Array]:
    """(a, b) of S, then of R: ``1 + n, a_S + v - n`` and ``b_R + r, b_R + v - n - r``."""
    visits = tree.subtree_sum(sums.count)
    right = tree.right_child(visits)
    passed = visits - sums.count
    b = prior.right_concentration
    return 1.0 + sums.count, jnp.exp(state.log_stop_concentration) + passed, b + right, b + (passed - right)


def move(
    uniforms: Uniforms, state: State, sums: NodeSums, tree: Tree, prior: Prior
) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
    """New (logit_stop, logit_right), by Metropolis steps that accept nearly nine in ten proposals."""
    stop_a, stop_b, right_a, right_b = _beta_parameters(state, sums, tree, prior)
    # logit S of leaves is infinite and not used
    old = jnp.where(tree.is_internal, jnp.stack([state.logit_stop, state.logit_right]), 0.0)
    a, b = jnp.stack([stop_a, right_a]), jnp.stack([stop_b, right_b])
    logit_stop, logit_right = move_logit_beta(uniforms, old, a, b)
    return jnp.where(tree.is_internal, logit_stop, jnp.inf), jnp.where(tree.is_internal, logit_right, 0.0)


def log_conditional(state: State, sums: NodeSums, tree: Tree, prior: Prior) -> tuple[Array, Array]:
    """Log densities of S and of R given the rest, summed over internal nodes."""

    def beta(logit: Array, a: Array, b: Array) -> Array:
        density = (a - 1) * jax.nn.log_sigmoid(logit) + (b - 1) * jax.nn.log_sigmoid(-logit) - betaln(a, b)
        return jnp.sum(jnp.where(tree.is_internal, density, 0.0))

    stop_a, stop_b, right_a, right_b = _beta_parameters(state, sums, tree, prior)
    return beta(state.logit_stop, stop_a, stop_b), beta(state.logit_right, right_a, right_b)
