"""Removal and return of directions during warm-up (paper steps 6 and 7), by masks."""

import equinox as eqx
import jax
import jax.numpy as jnp

from geode_jax._typing import Array, Bool, Float, Int, KeyArray
from geode_jax.settings import RankAdaptation
from geode_jax.state import State


def log_variance_shares(state: State) -> Float[Array, "K d"]:
    """Log of alpha2 over the largest alpha2 of the node, -inf at removed directions.

    Within a node alpha2 is proportional to ``expm1(-log u)``.
    """
    neg_log_u = jnp.exp(state.log_neg_log_u)
    small = neg_log_u < 1e-3
    log_expm1 = jnp.where(
        small,
        state.log_neg_log_u + 0.5 * neg_log_u,
        neg_log_u + jnp.log(-jnp.expm1(-jnp.where(small, 1.0, neg_log_u))),
    )
    active = jnp.where(state.is_active, log_expm1, -jnp.inf)
    largest = active.max(axis=-1, keepdims=True)
    return active - jnp.where(jnp.isfinite(largest), largest, 0.0)


def adapt(
    key: KeyArray,
    state: State,
    is_available: Bool[Array, "K d"],
    sweep: Int[Array, ""],
    settings: RankAdaptation,
) -> tuple[State, Bool[Array, ""], Bool[Array, "K d"]]:
    """State after one adaptation step, whether the step was taken, and the directions that passed its test.

    The step is taken with probability exp(c0 + c1 t). A direction that returns is on trial until the next step.
    """
    key_coin, key_return = jax.random.split(key)
    dtype = state.log_ratio.dtype
    probability = jnp.exp(settings.intercept + settings.slope * sweep.astype(dtype))
    is_taken = jax.random.uniform(key_coin, (), dtype) < probability

    shares = log_variance_shares(state)
    is_removed = state.is_active & (shares < jnp.log(jnp.asarray(settings.tolerance, dtype)))
    is_missing = is_available & ~state.is_active
    # one removed direction returns, with probability proportional to its last share
    choice = jax.random.categorical(key_return, jnp.where(is_missing, state.log_ratio, -jnp.inf), axis=-1)
    is_chosen = jnp.arange(is_available.shape[-1]) == choice[:, None]
    is_returned = is_chosen & is_missing & ~is_removed.any(axis=-1, keepdims=True)

    has_passed = state.is_active & ~is_removed
    adapted = eqx.tree_at(
        lambda it: (it.is_active, it.log_ratio),
        state,
        (
            jnp.where(is_taken, has_passed | is_returned, state.is_active),
            jnp.where(is_taken & is_removed, shares, state.log_ratio),
        ),
    )
    return adapted, is_taken, has_passed
