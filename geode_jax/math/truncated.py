"""Exact draws from log-concave univariate densities, and the gamma distribution truncated to (0, 1).

A log-concave density ``exp(-g(x))`` on [lower, inf) lies below the piecewise exponential made of tangents to -g at
three points (Gilks & Wild 1992). With points at the mode and about one unit of g to its sides, well over 80% of the
proposals are accepted, so one `while_loop` over all lanes ends after a handful of rounds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, DTypeLike, Float, KeyArray

Potential = Callable[[Array], tuple[Array, Array]]

# Shapes beyond this are drawn at this value and rescaled: the draw is then exponential with rate = shape to within
# rounding, for any rate up to 1e12. It keeps the arithmetic inside float32.
_LARGEST_LOG_SHAPE = 69.0


def sample_log_concave(key: KeyArray, potential: Potential, lower: Array, points: tuple[Array, Array, Array]) -> Array:
    """Draw x with density proportional to ``exp(-g(x))`` on [lower, inf), one per lane.

    `potential` returns g and its derivative, elementwise; g is convex. `points` are x1 <= x2 <= x3, at least `lower`,
    with a positive derivative at x3; they decide the speed, never the distribution. A lane where g is not finite
    returns its last proposal, so that a caller sees the NaN instead of a hang.
    """
    tangents = [(x, *potential(x)) for x in points]
    (x1, g1, s1), (x2, g2, s2), (x3, g3, s3) = tangents
    left = jnp.maximum(_intersection(x1, g1, s1, x2, g2, s2), lower)
    right = jnp.maximum(_intersection(x2, g2, s2, x3, g3, s3), left)
    log_areas = jnp.stack(
        [
            _log_area(x1, g1, s1, lower, left),
            _log_area(x2, g2, s2, left, right),
            -(g3 + s3 * (right - x3)) - jnp.log(s3),
        ]
    )
    areas = jnp.exp(log_areas - log_areas.max(axis=0))
    first, second = areas[0], areas[0] + areas[1]
    total = second + areas[2]

    def propose(key: KeyArray) -> tuple[Array, Array]:
        uniforms = jax.random.uniform(key, (3, *total.shape), total.dtype, minval=jnp.finfo(total.dtype).tiny)
        level = uniforms[0] * total
        in_first, in_last = level < first, level >= second
        x, g, s = (
            jnp.where(in_first, a, jnp.where(in_last, c, b))
            for a, b, c in zip(tangents[0], tangents[1], tangents[2], strict=True)
        )
        start = jnp.where(in_first, lower, jnp.where(in_last, right, left))
        stop = jnp.where(in_first, left, right)
        inside = _within_piece(uniforms[1], s, start, stop)
        beyond = right - jnp.log(uniforms[1]) / s3
        proposal = jnp.where(in_last, beyond, inside)
        value = potential(proposal)[0]
        accept = jnp.log(uniforms[2]) <= (g + s * (proposal - x)) - value
        return proposal, accept | ~jnp.isfinite(value)

    def not_done(carry: tuple) -> Array:
        return ~carry[2].all()

    def again(carry: tuple) -> tuple:
        key, x, done = carry
        key, key_proposal = jax.random.split(key)
        proposal, accept = propose(key_proposal)
        return key, jnp.where(done, x, proposal), done | accept

    start = (key, jnp.broadcast_to(points[1], total.shape), jnp.zeros(total.shape, bool))
    return lax.while_loop(not_done, again, start)[1]


def _intersection(xa: Array, ga: Array, sa: Array, xb: Array, gb: Array, sb: Array) -> Array:
    """Where two tangents meet; between their points by convexity, and at one of them where they coincide."""
    rise = sb - sa
    offset = (gb - ga - sa * (xb - xa)) / jnp.where(rise > 0, rise, 1.0)
    return jnp.where(rise > 0, jnp.clip(xb - offset, xa, xb), xb)


def _log_area(x: Array, g: Array, s: Array, start: Array, stop: Array) -> Array:
    """Log integral of ``exp(-(g + s (t - x)))`` over [start, stop]; -inf for an empty piece."""
    width = jnp.maximum(stop - start, 0.0)
    top = -jnp.minimum(g + s * (start - x), g + s * (stop - x))
    q = jnp.abs(s) * width
    mean = jnp.where(q > 1e-5, -jnp.expm1(-q) / jnp.where(q > 1e-5, q, 1.0), 1.0 - q / 2)
    return jnp.where(width > 0, top + jnp.log(jnp.where(width > 0, width, 1.0)) + jnp.log(mean), -jnp.inf)


def _within_piece(uniform: Array, s: Array, start: Array, stop: Array) -> Array:
    """Draw from the exponential with slope -s on [start, stop] by its inverse CDF, from its higher end."""
    width = jnp.maximum(stop - start, 0.0)
    q = jnp.abs(s) * width
    flat = q <= 1e-5
    curved = -jnp.log1p(uniform * jnp.expm1(-q)) / jnp.where(flat, 1.0, jnp.abs(s))
    distance = jnp.clip(jnp.where(flat, uniform * width, curved), 0.0, width)
    return jnp.where(s >= 0, start + distance, stop - distance)


def log_truncated_gamma(
    key: KeyArray, log_shape: Float[Array, "..."], rate: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Draw ``log(-log u)`` for u ~ Gamma(shape, rate) truncated to (0, 1).

    In t = -log u the density is ``exp(-a t - b exp(-t))``, log-concave on [0, inf). With m = max(0, log(b / a)),
    y = t - m, c = min(a, b) and rho = max(a - b, 0) the potential is ``rho y + c (exp(-y) - 1 + y)``, free of
    cancellation. Returned on the log scale because t is of order 1/shape, and shapes reach 1e26 and more.

    Valid for shapes of at least 0.5 and rates in [1, 1e12]; `log_shape` has no upper limit.
    """
    capped = jnp.minimum(log_shape, _LARGEST_LOG_SHAPE)
    shape = jnp.exp(capped)
    excess = rate - shape
    offset = jnp.log1p(jnp.maximum(excess, 0.0) / shape)
    slope = jnp.maximum(-excess, 0.0)
    curvature = jnp.minimum(shape, rate)

    def potential(y: Array) -> tuple[Array, Array]:
        return slope * y + curvature * _exp_remainder(y), slope - curvature * jnp.expm1(-y)

    root = jnp.sqrt(2.0 * curvature)
    right = 2.0 / (slope + jnp.hypot(slope, root))
    left = jnp.log1p(2.0 / root + 1.0 / curvature)  # about where c (exp(x) - 1 - x) = 1
    points = (jnp.maximum(-left, -offset), jnp.zeros_like(right), right)
    y = sample_log_concave(key, potential, -offset, points)
    t = jnp.maximum(offset + y, jnp.finfo(y.dtype).tiny)
    return jnp.log(t) + capped - log_shape


def _exp_remainder(y: Array) -> Array:
    """``exp(-y) - 1 + y`` with full relative precision: a series near 0, where the terms cancel."""
    num_terms = 14 if y.dtype == jnp.float64 else 8
    small = jnp.clip(y, -0.5, 0.5)
    series = jnp.ones_like(y)
    for k in range(num_terms + 2, 2, -1):
        series = 1.0 - small / k * series
    return jnp.where(jnp.abs(y) < 0.5, 0.5 * small * small * series, jnp.expm1(-y) + y)


def log_lower_gamma_at_one(log_delta: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log gamma(delta + 1, 1)``, the normaliser of Gamma(delta + 1, 1) truncated to (0, 1), for delta >= 1.

    Equals ``-1 - log(delta + 1) + log M`` with M = 1F1(1; delta + 2; 1), stable for every delta.
    """
    delta = jnp.exp(jnp.minimum(log_delta, 80.0))  # beyond, M is 1 to within rounding
    num_terms = 16 if delta.dtype == jnp.float64 else 9
    return -1.0 - jnp.logaddexp(log_delta, 0.0) + jnp.log1p(_kummer_excess(delta, num_terms))


def _kummer_excess(delta: Any, num_terms: int) -> Any:
    """M - 1, the sum over k >= 1 of ``1 / (b (b+1) ... (b+k-1))`` with b = delta + 2; term k is below 2/(k+2)!."""
    term = 1.0 / (delta + 2.0)
    total = term
    for k in range(1, num_terms):
        term = term / (delta + (2.0 + k))
        total = total + term
    return total


def gamma_correction_coefficients(dtype: DTypeLike) -> tuple[float, ...]:
    """Coefficients c_2, c_3, ... of h = ``-log gamma(delta + 1, 1) - log delta - 1`` in powers of 1/delta, delta >= 1.

    h is ``log(1 + 1/delta) - log M``, below 0.33 and of order 1/delta^2. In powers a sum of it over directions whose
    deltas share a factor is a polynomial in that factor. (Its own series does not converge: these interpolate, to 4e-7
    for float32 and 1e-10 for float64.)
    """
    return _correction_coefficients(18 if jnp.dtype(dtype) == jnp.float64 else 10)


@functools.cache
def _correction_coefficients(degree: int) -> tuple[float, ...]:

    def g(x: np.ndarray) -> np.ndarray:
        """``h / x^2`` at x = 1/delta, with the difference of 1 + x and M taken term by term."""
        term = 1.0 / ((1.0 + 2.0 * x) * (1.0 + 3.0 * x))
        difference = 2.0 / (1.0 + 2.0 * x) - term
        for k in range(3, 18):
            term = term * x / (1.0 + (k + 1.0) * x)
            difference = difference - term
        return np.log1p(np.square(x) * difference / (1.0 + _kummer_excess(1.0 / x, 18))) / np.square(x)

    series = np.polynomial.Chebyshev.interpolate(g, degree, domain=(0.0, 1.0))
    return tuple(series.convert(kind=np.polynomial.Polynomial).coef.tolist())
