"""Signal-to-noise ratio along each direction (paper step 3): u given memberships, tau and sigma."""

import jax.numpy as jnp

from geode_jax._typing import Array, Float
from geode_jax.math.log_concave import in_lanes, out_of_lanes
from geode_jax.math.truncated import move_log_truncated_gamma
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.state import NodeSums, State, half_count_and_rate
from geode_jax.model.tree import Tree
from geode_jax.settings import ExactShrinkage, PublishedShrinkage


def _gamma_parameters(
    state: State, sums: NodeSums, tree: Tree, shrinkage: ExactShrinkage | PublishedShrinkage
) -> tuple[Array, Array, Array]:
    """Log delta, the shape minus delta, and the rate, all (K, d).

    The shape is ``delta + 1 + n/2``, the rate ``1 + sum Z2 / (2 sigma2)``; the paper prints ``delta + n/2``.
    """
    half_count, rate = half_count_and_rate(state, sums, tree)
    added = half_count + 1.0 if isinstance(shrinkage, ExactShrinkage) else half_count
    return state.log_delta, jnp.broadcast_to(added[:, None], rate.shape), rate


def _log_shape(log_delta: Array, added: Array) -> Array:
    return jnp.logaddexp(log_delta, jnp.log(jnp.maximum(added, jnp.finfo(added.dtype).tiny)))


def move(
    uniforms: Uniforms,
    state: State,
    sums: NodeSums,
    tree: Tree,
    shrinkage: ExactShrinkage | PublishedShrinkage,
) -> Float[Array, "K d"]:
    """New log(-log u), by Metropolis steps that accept more than nine in ten; removed directions keep theirs."""
    old, log_delta, added, rate = in_lanes(state.log_neg_log_u, *_gamma_parameters(state, sums, tree, shrinkage))
    moved = move_log_truncated_gamma(uniforms.take(2, old.size), old, _log_shape(log_delta, added), rate)
    return jnp.where(state.is_active, out_of_lanes(moved, state.log_neg_log_u), state.log_neg_log_u)


def log_conditional(state: State, sums: NodeSums, tree: Tree) -> Float[Array, "K d"]:
    """Log density of each u given the rest, up to its normaliser; 0 at removed directions."""
    *parts, rate = _gamma_parameters(state, sums, tree, ExactShrinkage())
    log_shape = _log_shape(*parts)
    # (shape - 1) log u - rate u, with shape - 1 applied on the log scale
    neg_log_u = jnp.exp(state.log_neg_log_u)
    density = -jnp.exp(log_shape + state.log_neg_log_u) + neg_log_u - rate * jnp.exp(-neg_log_u)
    return jnp.where(state.is_active, density, 0.0)
