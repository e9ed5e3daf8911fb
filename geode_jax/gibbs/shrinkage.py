"""Shrinkage of later directions (paper step 4): tau given u.

    tau_m | .  ∝  exp( -a tau_m + sum over j >= m of [ delta_j log u_j - log gamma(delta_j + 1, 1) ] ),   tau_m >= 1

delta_j is linear in tau_m for j >= m, and log gamma(s, 1) is the log of a moment generating function, hence convex in
s: the conditional is log-concave, and each tau_m is drawn exactly. The published step drops the normaliser and the
other tau's.
"""

import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Bool, Float, KeyArray
from geode_jax.math.truncated import gamma_correction, log_lower_gamma_at_one, sample_log_concave
from geode_jax.settings import Prior
from geode_jax.state import State


def draw_exact(key: KeyArray, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 from the exact conditionals, one direction after the other, all nodes at once."""
    # Directions first: the sums over directions then run along the slow axis and vectorise over nodes.
    is_active, log_neg_log_u = state.is_active.T, state.log_neg_log_u.T
    max_rank = is_active.shape[0]

    def update(m: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tau_excess, log_delta = carry
        affected = is_active & (jnp.arange(max_rank)[:, None] >= m)
        old = jnp.log1p(tau_excess[m])
        drawn = _draw_one(jax.random.fold_in(key, m), log_delta - old, log_neg_log_u, affected, prior)
        new = jnp.where(is_active[m], drawn, tau_excess[m])
        return tau_excess.at[m].set(new), log_delta + jnp.where(affected, jnp.log1p(new) - old, 0.0)

    return lax.fori_loop(0, max_rank, update, (state.tau_excess.T, state.log_delta.T))[0].T


def _draw_one(
    key: KeyArray,
    log_rest: Float[Array, "d K"],
    log_neg_log_u: Float[Array, "d K"],
    affected: Bool[Array, "d K"],
    prior: Prior,
) -> Float[Array, "K"]:
    """Draw x = tau - 1 where delta_j = exp(log_rest_j) tau for the affected j."""
    pulls = jnp.where(affected, jnp.exp(jnp.minimum(log_rest + log_neg_log_u, 60.0)), 0.0)
    rate = prior.tau_rate + pulls.sum(axis=0)
    # The log terms are log(delta) + h(delta); h is 0 to within rounding long before e^75.
    rest = jnp.where(affected, jnp.exp(jnp.minimum(log_rest, 75.0)), 1.0)
    count = jnp.maximum(affected.sum(axis=0), 1).astype(rate.dtype)

    def correction(tau: Array) -> tuple[Array, Array]:
        """Sum of h over the affected j, and its slope times tau."""
        h, slope = gamma_correction(rest * tau)
        return jnp.where(affected, h, 0.0).sum(axis=0), jnp.where(affected, slope, 0.0).sum(axis=0)

    # Without the correction this is Gamma(count + 1, rate); one fixed-point step brings its mode close to the true one.
    mode = jnp.maximum(count / rate - 1.0, 0.0)
    mode = jnp.maximum((count + correction(1.0 + mode)[1]) / rate - 1.0, 0.0)

    def potential(x: Array) -> tuple[Array, Array]:
        h, h_slope = correction(1.0 + x)
        step = x - mode
        value = rate * step - count * jnp.log1p(step / (1.0 + mode)) - h
        return value, rate - (count + h_slope) / (1.0 + x)

    root = jnp.sqrt(2.0 * count) / (1.0 + mode)
    slope = jnp.maximum(rate - count / (1.0 + mode), 0.0)
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
