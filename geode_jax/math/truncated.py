"""The gamma distribution truncated to (0, 1), on the log scale of -log u, and its normaliser."""

import jax.numpy as jnp

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.math.log_concave import Target, draw_log_concave, move_log_concave

# Where log shape exceeds log rate by more than this, it is lowered to this excess, and the draw is rescaled: -log u is
# then exponential with rate = shape to within one part in 10^9. It keeps the squares in the normal range of float32:
# arithmetic on smaller numbers takes ten times as long.
_LARGEST_LOG_EXCESS = 21.0
_LARGEST_LOG = 60.0


def draw_log_truncated_gamma(
    key: KeyArray, log_shape: Float[Array, "..."], rate: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Draw ``log(-log u)`` for u ~ Gamma(shape, rate) truncated to (0, 1).

    On the log scale because -log u is of order 1/shape, and shapes reach 1e26 and more. Valid for shapes of at least
    0.5 and rates in [1, 1e12]; `log_shape` has no upper limit.
    """
    target, offset, log_unit = _target(log_shape, rate)
    return _log_of(offset, draw_log_concave(key, target)) + log_unit


def move_log_truncated_gamma(
    uniforms: Float[Array, "2 *lanes"],
    old: Float[Array, "*lanes"],
    log_shape: Float[Array, "*lanes"],
    rate: Float[Array, "*lanes"],
) -> Float[Array, "..."]:
    """A Metropolis step that leaves the distribution of :func:`draw_log_truncated_gamma` invariant.

    `uniforms`: two uniform variables for each lane. Most lanes change, at any `old`: see
    :func:`geode_jax.math.log_concave.move_log_concave`.
    """
    target, offset, log_unit = _target(log_shape, rate)
    start = jnp.exp(jnp.minimum(old - log_unit, _LARGEST_LOG)) - offset
    new = move_log_concave(uniforms, start, target)
    return jnp.where(new == start, old, _log_of(offset, new) + log_unit)


def _target(log_shape: Float[Array, "..."], rate: Float[Array, "..."]) -> tuple[Target, Array, Array]:
    """The density of y = t / unit - offset, for t = -log u; the offset; and the log of the unit.

    In t the density is ``exp(-a t - b exp(-t))``, log-concave on [0, inf). With m = max(0, log(b / a)), y = t - m,
    c = min(a, b) and rho = max(a - b, 0) the potential is ``rho y + c (exp(-y) - 1 + y)``, free of cancellation.
    """
    capped = jnp.minimum(log_shape, jnp.log(rate) + _LARGEST_LOG_EXCESS)
    shape = jnp.exp(capped)
    excess = rate - shape
    offset = jnp.log1p(jnp.maximum(excess, 0.0) / shape)
    slope = jnp.maximum(-excess, 0.0)
    curvature = jnp.minimum(shape, rate)

    def potential(y: Array) -> tuple[Array, Array]:
        return slope * y + curvature * exp_remainder(y), slope - curvature * jnp.expm1(-y)

    root = jnp.sqrt(2.0 * curvature)
    right = 2.0 / (slope + jnp.hypot(slope, root))
    left = jnp.log1p(2.0 / root + 1.0 / curvature)  # about where c (exp(x) - 1 - x) = 1
    points = (jnp.maximum(-left, -offset), jnp.zeros_like(right), right)
    return Target(potential, points, -offset, jnp.full_like(offset, jnp.inf)), offset, capped - log_shape


def _log_of(offset: Array, y: Array) -> Array:
    return jnp.log(jnp.maximum(offset + y, jnp.finfo(y.dtype).tiny))


def exp_remainder(y: Array) -> Array:
    """``exp(-y) - 1 + y`` with full relative precision: a series near 0, where the terms cancel."""
    num_terms = 14 if y.dtype == jnp.float64 else 8
    small = jnp.clip(y, -0.5, 0.5)
    series = jnp.ones_like(y)
    for k in range(num_terms + 2, 2, -1):
        series = 1.0 - small / k * series
    return jnp.where(jnp.abs(y) < 0.5, 0.5 * small * small * series, jnp.expm1(-y) + y)


def log_lower_gamma_at_one(log_delta: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log gamma(delta + 1, 1)``, the normaliser of Gamma(delta + 1, 1) truncated to (0, 1), for delta >= 1.

    Stable for every delta: ``-1 - log delta - h``, see :func:`normaliser_correction`.
    """
    return -1.0 - log_delta - normaliser_correction(log_delta)


def normaliser_correction(log_delta: Float[Array, "..."]) -> Float[Array, "..."]:
    """``h = -log gamma(delta + 1, 1) - log delta - 1`` for delta >= 1: below 0.34, and of order 1/delta^2.

    It equals ``log(1 + 1/delta) - log M`` with M = 1F1(1; delta + 2; 1), whose term k, the inverse of
    ``(delta + 2) (delta + 3) ... (delta + k + 1)``, is below 2/(k + 2)!.
    """
    delta = jnp.exp(jnp.minimum(log_delta, 30.0))  # beyond, it is 0 to within rounding
    excess = jnp.zeros_like(delta)
    for k in range(16 if delta.dtype == jnp.float64 else 9, 0, -1):
        excess = (1.0 + excess) / (delta + (1.0 + k))
    return jnp.log1p(1.0 / delta) - jnp.log1p(excess)
