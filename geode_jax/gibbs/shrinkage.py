"""Shrinkage of later directions (paper step 4): tau given u.

    tau_m | .  ∝  exp( -a tau_m + sum over j >= m of [ delta_j log u_j - log gamma(delta_j + 1, 1) ] ),   tau_m >= 1

delta_j is linear in tau_m for j >= m, and log gamma(s, 1) is the log of a moment generating function, hence convex in
s: the conditional is log-concave, and each tau_m is drawn exactly. The published step drops the normaliser and the
other tau's.
"""

import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.math.truncated import kummer_excess, log_lower_gamma_at_one, sample_log_concave
from geode_jax.settings import Prior
from geode_jax.state import State


def draw_exact(key: KeyArray, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 from the exact conditionals, one direction after the other, all nodes at once."""
    max_rank = state.tau_excess.shape[-1]

    def update(m: Array, tau_excess: Array) -> Array:
        log_tau = jnp.where(state.is_active, jnp.log1p(tau_excess), 0.0)
        affected = state.is_active & (jnp.arange(max_rank) >= m)
        log_rest = jnp.cumsum(log_tau, axis=-1) - log_tau[:, m, None]
        drawn = _draw_one(jax.random.fold_in(key, m), log_rest, state.log_neg_log_u, affected, prior)
        return tau_excess.at[:, m].set(jnp.where(state.is_active[:, m], drawn, tau_excess[:, m]))

    return lax.fori_loop(0, max_rank, update, state.tau_excess)


def _draw_one(key: KeyArray, log_rest: Array, log_neg_log_u: Array, affected: Array, prior: Prior) -> Float[Array, "K"]:
    """Draw x = tau - 1 where delta_j = exp(log_rest_j) tau for the affected j."""
    rate = prior.tau_rate + jnp.sum(
        jnp.where(affected, jnp.exp(jnp.minimum(log_rest + log_neg_log_u, 60.0)), 0.0), axis=-1
    )
    # Beyond exp(75) the log terms are those of a power of tau to within rounding, in either precision.
    rest = jnp.where(affected, jnp.exp(jnp.minimum(log_rest, 75.0)), 0.0)
    count = jnp.maximum(affected.sum(axis=-1), 1).astype(rate.dtype)

    def pull(x: Array) -> tuple[Array, Array]:
        """Sum over j of the log terms' slopes d/dx [log(1 + delta_j) - log M(delta_j)], and log M itself."""
        tau = 1.0 + x[:, None]
        delta = rest * tau
        excess, slope = kummer_excess(jnp.maximum(delta, 1.0))
        slopes = delta / (1.0 + delta) + slope / (1.0 + excess)
        total = jnp.sum(jnp.where(affected, slopes, 0.0), axis=-1) / tau[:, 0]
        return total, jnp.sum(jnp.where(affected, jnp.log1p(excess), 0.0), axis=-1)

    # The log terms pull like count * log(tau): a fixed point of tau = (their pull at tau) * tau / rate is the mode.
    mode = jnp.maximum(count / rate - 1.0, 0.0)
    for _ in range(2):
        mode = jnp.maximum(pull(mode)[0] * (1.0 + mode) / rate - 1.0, 0.0)
    pull_at_mode, log_m_at_mode = pull(mode)
    base = rest / (1.0 + rest * (1.0 + mode[:, None]))

    def potential(x: Array) -> tuple[Array, Array]:
        slopes, log_m = pull(x)
        step = x - mode
        gained = jnp.sum(jnp.where(affected, jnp.log1p(base * step[:, None]), 0.0), axis=-1)
        return rate * step - gained + (log_m - log_m_at_mode), rate - slopes

    slope = jnp.maximum(rate - pull_at_mode, 0.0)
    root = jnp.sqrt(2.0 * count) / (1.0 + mode)
    right = mode + 2.0 / (slope + jnp.hypot(slope, root))
    points = (jnp.maximum(mode - 1.0 / root, 0.0), mode, right)
    return sample_log_concave(key, potential, jnp.zeros_like(mode), points)


def draw_published(key: KeyArray, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 by the paper's step 4: ``Exp(a - sum over j >= m of log u_j)`` on [1, inf)."""
    later = jnp.cumsum(state.neg_log_u[:, ::-1], axis=-1)[:, ::-1]
    drawn = jax.random.exponential(key, later.shape, later.dtype) / (prior.tau_rate + later)
    return jnp.where(state.is_active, drawn, state.tau_excess)


def log_conditional(state: State, prior: Prior) -> Float[Array, "K d"]:
    """Log density of each tau given u and the other tau's, up to its normaliser; 0 at removed directions."""
    log_delta = state.log_delta
    terms = -jnp.exp(log_delta + state.log_neg_log_u) - log_lower_gamma_at_one(log_delta)
    terms = jnp.where(state.is_active, terms, 0.0)
    later = jnp.cumsum(terms[:, ::-1], axis=-1)[:, ::-1]
    return jnp.where(state.is_active, later - prior.tau_rate * state.tau_excess, 0.0)
