"""Shrinkage of later directions (paper step 4): tau given u.

    tau_m | .  ∝  exp( -a tau_m + sum over j >= m of [ delta_j log u_j - log gamma(delta_j + 1, 1) ] ),   tau_m >= 1

delta_j is linear in tau_m for j >= m, and log gamma(s, 1) is the log of a moment generating function, hence convex in
s: the conditional is log-concave, and each tau_m is drawn exactly. The published step drops the normaliser and the
other tau's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.math.truncated import gamma_correction_coefficients, log_lower_gamma_at_one, sample_log_concave
from geode_jax.settings import Prior
from geode_jax.state import State


class _Later(NamedTuple):
    """What a direction's update needs of the active directions from it on, relative to delta at its own place.

    All of it depends on the tau's after the direction's own only, so that it is summed up once, from the last direction
    to the first, while the updates run from the first to the last. `number`: how many; `log_pull`: log of the sum of
    ``delta_j / delta_m * -log u_j``; `powers`: sums of ``(delta_m / delta_j)^p`` for p = 2, 3, ...
    """

    number: Float[Array, "*d K"]
    log_pull: Float[Array, "*d K"]
    powers: Float[Array, "*d P K"]


def draw_exact(key: KeyArray, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 from the exact conditionals, one direction after the other, all nodes at once."""

    def update(log_before: Array, direction: tuple[Array, Array, Array, _Later]) -> tuple[Array, Array]:
        index, is_active, old, later = direction
        drawn = _draw_one(jax.random.fold_in(key, index), log_before, later, prior)
        new = jnp.where(is_active, drawn, old)
        return log_before + jnp.where(is_active, jnp.log1p(new), 0.0), new

    max_rank = state.tau_excess.shape[-1]
    start = jnp.zeros_like(state.tau_excess[:, 0])
    # directions first: every step works on a whole row of nodes
    directions = (jnp.arange(max_rank), state.is_active.T, state.tau_excess.T, _later(state))
    return lax.scan(update, start, directions)[1].T


def _later(state: State) -> _Later:
    """By recursion from the last direction: sums of positive terms, of which none can overflow."""
    is_active, log_tau, log_neg_log_u = state.is_active.T, state.log_tau.T, state.log_neg_log_u.T
    dtype, num_nodes = log_tau.dtype, log_tau.shape[1]
    exponent = jnp.arange(2, 2 + len(gamma_correction_coefficients(dtype)), dtype=dtype)[:, None]

    def add(after: _Later, direction: tuple[Array, Array, Array]) -> tuple[_Later, _Later]:
        is_active, log_tau, log_neg_log_u = direction
        one = is_active.astype(dtype)
        here = _Later(
            after.number + one,
            jnp.logaddexp(after.log_pull, jnp.where(is_active, log_neg_log_u, -jnp.inf)),
            after.powers + one,
        )
        # as the direction before sees it: one more factor of tau between
        return _Later(here.number, here.log_pull + log_tau, here.powers * jnp.exp(-exponent * log_tau)), here

    none = jnp.zeros(num_nodes, dtype)
    start = _Later(none, jnp.full(num_nodes, -jnp.inf, dtype), jnp.zeros((exponent.size, num_nodes), dtype))
    return lax.scan(add, start, (is_active, log_tau, log_neg_log_u), reverse=True)[1]


def _draw_one(key: KeyArray, log_before: Float[Array, "K"], later: _Later, prior: Prior) -> Float[Array, "K"]:
    """Draw x = tau - 1 of one direction, `log_before` being log delta of the direction before."""
    rate = prior.tau_rate + jnp.exp(jnp.minimum(log_before + later.log_pull, 60.0))
    count = jnp.maximum(later.number, 1.0)
    # The log terms are log(delta) + h(delta), and delta_j = delta_before (delta_j / delta_m) tau.
    coefficients = [
        c * jnp.exp(-p * log_before) * later.powers[p - 2]
        for p, c in enumerate(gamma_correction_coefficients(rate.dtype), start=2)
    ]

    def correction(tau: Array) -> tuple[Array, Array]:
        """Sum of h over the directions, and its slope times tau."""
        inverse = 1.0 / tau
        h, slope = jnp.zeros_like(tau), jnp.zeros_like(tau)
        for p, coefficient in reversed(list(enumerate(coefficients, start=2))):
            h = h * inverse + coefficient
            slope = slope * inverse - p * coefficient
        square = jnp.square(inverse)
        return square * h, square * slope

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
