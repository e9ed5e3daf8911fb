"""Noise variance of every scale: sigma2 given memberships and u."""

import jax.numpy as jnp
from jax.scipy.special import gammaln

from geode_jax._typing import Array, Count, Float
from geode_jax.math.conjugate import move_log_gamma
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.state import NodeSums, State
from geode_jax.model.tree import Tree
from geode_jax.settings import Prior


def _gamma_parameters(
    state: State, sums: NodeSums, tree: Tree, prior: Prior, num_features: Count
) -> tuple[Array, Array]:
    """``a + D n_s / 2`` and ``b + 1/2 sum over the scale of (E + sum u Z2)``."""
    quadratic = sums.residual + jnp.sum(jnp.exp(-state.neg_log_u) * sums.squared, axis=-1)
    count = tree.sum_over_scales(sums.count)
    return (
        prior.noise_shape + 0.5 * num_features * count,
        prior.noise_rate + 0.5 * tree.sum_over_scales(quadratic),
    )


def move(
    uniforms: Uniforms, state: State, sums: NodeSums, tree: Tree, prior: Prior, num_features: Count
) -> Float[Array, "S"]:
    """New log sigma2, by Metropolis steps that accept nearly nine in ten proposals."""
    shape, rate = _gamma_parameters(state, sums, tree, prior, num_features)
    return -move_log_gamma(uniforms, -state.log_sigma2, shape, rate)


def log_conditional(state: State, sums: NodeSums, tree: Tree, prior: Prior, num_features: Count) -> Float[Array, "S"]:
    """Log density of each 1/sigma2 given the rest."""
    shape, rate = _gamma_parameters(state, sums, tree, prior, num_features)
    log_precision = -state.log_sigma2
    return shape * jnp.log(rate) - gammaln(shape) + (shape - 1) * log_precision - rate * jnp.exp(log_precision)
