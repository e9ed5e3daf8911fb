"""Noise variance of every scale: sigma2 given memberships and u."""

import jax.numpy as jnp
from jax.scipy.special import gammaln

from geode_jax._typing import Array, Float
from geode_jax.math.conjugate import move_log_gamma
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.borrowed import noise_prior
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State


def _gamma_parameters(state: State, sums: NodeSums, problem: Problem) -> tuple[Array, Array]:
    """The prior's shape plus ``D n_s / 2``, and its rate plus ``1/2 sum over the scale of (E + sum u Z2)``."""
    quadratic = sums.residual + jnp.sum(jnp.exp(-state.neg_log_u) * sums.squared, axis=-1)
    shape, rate = noise_prior(problem.prior, problem.borrowed, problem.num_features)
    count, quadratic = problem.tree.sum_over_scales(jnp.stack([sums.count, quadratic]))
    return shape + 0.5 * problem.num_features * count, rate + 0.5 * quadratic


def move(uniforms: Uniforms, state: State, sums: NodeSums, problem: Problem) -> Float[Array, "S"]:
    """New log sigma2, by Metropolis steps that accept nearly nine in ten proposals."""
    shape, rate = _gamma_parameters(state, sums, problem)
    return -move_log_gamma(uniforms, -state.log_sigma2, shape, rate)


def log_conditional(state: State, sums: NodeSums, problem: Problem) -> Float[Array, "S"]:
    """Log density of each 1/sigma2 given the rest."""
    shape, rate = _gamma_parameters(state, sums, problem)
    log_precision = -state.log_sigma2
    return shape * jnp.log(rate) - gammaln(shape) + (shape - 1) * log_precision - rate * jnp.exp(log_precision)
