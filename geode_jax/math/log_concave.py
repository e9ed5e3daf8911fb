"""Exact draws and Metropolis steps for univariate log-concave densities, many at once.

A log-concave density ``exp(-g(x))`` on [lower, upper] lies below the piecewise exponential made of tangents to -g at
three points (Gilks & Wild 1992). With one point at the mode and one on each side, where g is about one unit higher,
the density fills more than nine tenths of that envelope. A proposal from the envelope takes one uniform variable.
Rejection turns it into an exact draw, a Metropolis step into a move that leaves the density invariant.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Bool, Float, KeyArray, Shaped
from geode_jax.math.uniforms import Uniforms

Potential = Callable[[Array], tuple[Array, Array]]
# Below this product of slope and width a piece is flat to within rounding.
_FLAT = 1e-5
# Numbers in a vector register (AVX-512, float32); the rest of a row that fills no vector takes as long as many rows.
_VECTOR = 16


class Target(NamedTuple):
    """Densities proportional to ``exp(-g(x))`` on [lower, upper], one per lane, upper may be infinite.

    `potential` returns g and its derivative, elementwise; g is convex. `points` are x1 <= x2 <= x3 within the bounds,
    with a positive derivative at x3 where `upper` is infinite; they affect the speed, never the distribution.
    """

    potential: Potential
    points: tuple[Array, Array, Array]
    lower: Array
    upper: Array


def num_lanes(size: int) -> int:
    """Length of a row of whole vectors that holds `size` numbers."""
    return size + -size % _VECTOR


def in_lanes(*arrays: Array) -> list[Shaped[Array, "lanes"]]:
    """Arrays of one shape, each flattened to a row of whole vectors; unused lanes at the end hold ones.

    They should be cheap to compute: compilers compute them one by one where they write the row.
    """
    spare = num_lanes(arrays[0].size) - arrays[0].size
    return [jnp.pad(array.ravel(), (0, spare), constant_values=1) for array in arrays]


def out_of_lanes(lanes: Shaped[Array, "lanes"], like: Array) -> Array:
    """The inverse of :func:`in_lanes`."""
    return lanes[: like.size].reshape(like.shape)


class _Piece(NamedTuple):
    """A tangent (its point, the potential and its slope there), its interval, and its area under the envelope."""

    point: Array
    value: Array
    slope: Array
    start: Array
    stop: Array
    area: Array


def _envelope(target: Target) -> list[_Piece]:
    tangents = [(x, *target.potential(x)) for x in target.points]
    start, parts, log_areas = target.lower, [], []
    for number, tangent in enumerate(tangents):
        stop = target.upper
        if number + 1 < len(tangents):
            stop = jnp.clip(_intersection(*tangent, *tangents[number + 1]), start, target.upper)
        parts.append((*tangent, start, stop))
        log_areas.append(_log_area(*parts[-1]))
        start = stop
    largest = jnp.maximum(jnp.maximum(log_areas[0], log_areas[1]), log_areas[2])
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)  # bounds that leave a single point
    return [_Piece(*part, jnp.exp(area - largest)) for part, area in zip(parts, log_areas, strict=True)]


def _intersection(xa: Array, ga: Array, sa: Array, xb: Array, gb: Array, sb: Array) -> Array:
    """Where two tangents meet; between their points by convexity, and at one of them where they coincide."""
    rise = sb - sa
    offset = (gb - ga - sa * (xb - xa)) / jnp.where(rise > 0, rise, 1.0)
    return jnp.where(rise > 0, jnp.clip(xb - offset, xa, xb), xb)


def _log_area(x: Array, g: Array, s: Array, start: Array, stop: Array) -> Array:
    """Log integral of ``exp(-(g + s (t - x)))`` over [start, stop]; -inf for an empty piece."""
    width = jnp.maximum(stop - start, 0.0)
    end = jnp.where(s >= 0, start, stop)
    q = jnp.abs(s) * width
    length = jnp.where(q > _FLAT, -jnp.expm1(-q) / jnp.where(q > _FLAT, jnp.abs(s), 1.0), width)
    return jnp.where(width > 0, jnp.log(jnp.where(width > 0, length, 1.0)) - (g + s * (end - x)), -jnp.inf)


def _propose(pieces: list[_Piece], uniform: Array) -> Array:
    """The envelope's inverse CDF."""
    level = uniform * (pieces[0].area + pieces[1].area + pieces[2].area)
    chosen, reached = pieces[0], pieces[0].area
    rest = level
    for piece in pieces[1:]:
        is_beyond = (level >= reached) & (piece.area > 0)
        chosen = _Piece(*(jnp.where(is_beyond, new, old) for new, old in zip(piece, chosen, strict=True)))
        rest = jnp.where(is_beyond, level - reached, rest)
        reached = reached + piece.area
    share = jnp.clip(rest / jnp.where(chosen.area > 0, chosen.area, 1.0), 0.0, 1.0 - jnp.finfo(level.dtype).epsneg)
    # from the higher end of the piece, so that a steep one keeps its digits
    width, steepness = chosen.stop - chosen.start, jnp.abs(chosen.slope)
    q = steepness * width
    is_flat = ~(q > _FLAT)
    curved = -jnp.log1p(share * jnp.expm1(-q)) / jnp.where(is_flat, 1.0, steepness)
    distance = jnp.where(is_flat, share * width, curved)
    found = jnp.where(chosen.slope >= 0, chosen.start + distance, chosen.stop - distance)
    return jnp.clip(found, pieces[0].start, pieces[-1].stop)


def _log_ratio(pieces: list[_Piece], target: Target, x: Array) -> Array:
    """Log of the density over the envelope, at most 0."""
    heights = [piece.value + piece.slope * (x - piece.point) for piece in pieces]
    return jnp.maximum(jnp.maximum(heights[0], heights[1]), heights[2]) - target.potential(x)[0]


def draw_log_concave(key: KeyArray, target: Target) -> Array:
    """Exact draws, by rejection: one `while_loop` over all lanes, which ends after a handful of rounds.

    A lane where g is NaN accepts its proposal, so that the caller sees the NaN and the loop ends.
    """
    pieces = _envelope(target)

    def not_done(carry: tuple[KeyArray, Array, Bool[Array, "..."]]) -> Array:
        return ~carry[2].all()

    def again(carry: tuple[KeyArray, Array, Bool[Array, "..."]]) -> tuple[KeyArray, Array, Bool[Array, "..."]]:
        key, x, is_done = carry
        key, key_proposal = jax.random.split(key)
        uniforms = Uniforms(key_proposal, 2 * x.size, x.dtype).take(2, *x.shape)
        proposal = _propose(pieces, uniforms[0])
        is_refused = jnp.log(uniforms[1]) > _log_ratio(pieces, target, proposal)
        return key, jnp.where(is_done, x, proposal), is_done | ~is_refused

    lanes = pieces[0].area
    start = (key, jnp.broadcast_to(target.points[1], lanes.shape), jnp.zeros(lanes.shape, bool))
    return lax.while_loop(not_done, again, start)[1]


def move_log_concave(
    uniforms: Float[Array, "2 *lanes"], old: Array, target: Target, log_factor: Callable[[Array], Array] | None = None
) -> Array:
    """One Metropolis step for each lane, with proposals from the envelope, independent of `old` (Tierney 1994).

    `uniforms`: two uniform variables in (0, 1) for each lane.
    More than nine in ten proposals are accepted, whatever `old` is, and no lane waits for another: on a device a
    rejection loop takes several rounds, until its slowest lane is done, and waits for the host in each. `log_factor`,
    small, is added to -g; the envelope leaves it out. Where the ratio is NaN the proposal is accepted, so that the
    caller sees it.
    """
    pieces = _envelope(target)

    def log_ratio(x: Array) -> Array:
        ratio = _log_ratio(pieces, target, x)
        return ratio if log_factor is None else ratio + log_factor(x)

    proposal = _propose(pieces, uniforms[0])
    is_refused = jnp.log(uniforms[1]) > log_ratio(proposal) - log_ratio(old)
    return jnp.where(is_refused, old, proposal)
