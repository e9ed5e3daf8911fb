"""Metropolis steps for the gamma and beta variables of conjugate blocks, on scales where they are log-concave.

Exact draws of both need rejection loops, which end with their slowest lane and on a device wait for the host in every
round. These steps make one proposal each: see :func:`geode_jax.math.log_concave.move_log_concave`.
"""

import jax.numpy as jnp

from geode_jax._typing import Array, Float
from geode_jax.math.log_concave import Potential, Target, in_lanes, move_log_concave, out_of_lanes
from geode_jax.math.truncated import exp_remainder
from geode_jax.math.uniforms import Uniforms

# Beyond this, the potential of a beta variable is computed without an exponential that could overflow.
_LARGE = 20.0


def move_log_gamma(
    uniforms: Uniforms, old: Float[Array, "..."], shape: Float[Array, "..."], rate: Float[Array, "..."]
) -> Float[Array, "..."]:
    """A Metropolis step for ``log G`` that leaves G ~ Gamma(shape, rate) invariant; most lanes change, at any `old`.

    With z the distance from the mode log(shape / rate), the potential is ``shape (exp(z) - 1 - z)``.
    """
    lane, shape, rate = in_lanes(old, shape, rate)

    def potential(z: Array) -> tuple[Array, Array]:
        return shape * exp_remainder(-z), shape * jnp.expm1(z)

    width = jnp.sqrt(2.0 / shape) + 1.0 / shape  # about one unit of the potential to the left, where it grows slowest
    return out_of_lanes(_moved(uniforms, lane, jnp.log(shape / rate), potential, width), old)


def move_logit_beta(
    uniforms: Uniforms, old: Float[Array, "..."], a: Float[Array, "..."], b: Float[Array, "..."]
) -> Float[Array, "..."]:
    """A Metropolis step for the logit of B that leaves B ~ Beta(a, b) invariant; most lanes change, at any `old`.

    Let n = a + b, and r the smaller of a / n and b / n. Let z be the distance of the logit from its mode log(a / b),
    with its sign such that the variable of mean r grows with z. The potential is ``n (log(1 + r (exp(z) - 1)) - r z)``.
    """
    lane, a, b = in_lanes(old, a, b)
    smaller, sign = jnp.minimum(a, b), jnp.where(a < b, 1.0, -1.0).astype(a.dtype)
    total = a + b
    share = smaller / total
    curvature = smaller * (1.0 - share)

    def potential(z: Array) -> tuple[Array, Array]:
        growth = jnp.expm1(jnp.minimum(z, _LARGE))
        decay = jnp.exp(-jnp.maximum(z, _LARGE))
        is_large = z > _LARGE
        ratio = jnp.where(is_large, share + (1.0 - share) * decay, 1.0 + share * growth)
        log_ratio = jnp.where(is_large, z + jnp.log(ratio), jnp.log1p(share * growth))
        return total * (log_ratio - share * z), curvature * jnp.where(is_large, 1.0 - decay, growth) / ratio

    width = jnp.sqrt(2.0 / curvature) + 1.0 / smaller
    return out_of_lanes(sign * _moved(uniforms, sign * lane, sign * (jnp.log(a) - jnp.log(b)), potential, width), old)


def _moved(uniforms: Uniforms, old: Array, mode: Array, potential: Potential, width: Array) -> Array:
    """The step of a variable, given the potential of its distance from the mode; `width` is on the left of the mode."""
    boundless = jnp.full_like(mode, jnp.inf)
    target = Target(potential, (-width, jnp.zeros_like(mode), jnp.log1p(width)), -boundless, boundless)
    start = old - mode
    new = move_log_concave(uniforms.take(2, *start.shape), start, target)
    return jnp.where(new == start, old, mode + new)
