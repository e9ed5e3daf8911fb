"""Shrinkage of later directions (paper step 4): updates of tau given u, and joint updates of tau and u.

Given u the deltas of a node form a Markov chain, each tied to its neighbours by its tau and the next:

    delta_m | .  ∝  exp( delta_m log u_m - log gamma(delta_m + 1, 1) - a tau_m - a tau_(m+1) ) / delta_m

with tau_m = delta_m / delta_(m-1) and tau_(m+1) = delta_(m+1) / delta_m, whose Jacobian is the divisor. So every second
delta can be updated at once: two steps for any number of directions, where updating each tau given the others takes one
step per direction.

Alone these updates mix slowly where the rows carry little information: each delta is held in place by its u, and each u
by its delta. So the directions from a random one on are also updated jointly: tau is proposed from its prior, with
delta times -log u unchanged. For directions that the rows do not inform, such a proposal is almost always accepted (an
interweaving of two parametrisations, after Yu & Meng 2011).

The published step drops the normaliser and the other tau's.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Bool, Float
from geode_jax.math.log_concave import Target, in_lanes, move_log_concave, num_lanes, out_of_lanes
from geode_jax.math.truncated import log_lower_gamma_at_one, normaliser_correction
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.state import NodeSums, State, half_count_and_rate, running_sum
from geode_jax.model.tree import Tree
from geode_jax.settings import Prior

# Caps that keep float32 from overflow: on the sum of log tau and the next one's, and on the log of delta_(m-1) times
# -log u_m. The prior of tau has practically no mass beyond, at any `tau_rate` above 1e-8; such a pull keeps tau at 1.
_LARGEST_SPAN, _LARGEST_PULL = 40.0, 40.0


def renew(
    uniforms: Uniforms, state: State, sums: NodeSums, tree: Tree, prior: Prior
) -> tuple[Float[Array, "K d"], Float[Array, "K d"]]:
    """Joint update of (log(-log u), tau - 1) from a random active direction of every node on.

    One Metropolis step per node: tau is proposed from its prior, with ``delta * -log u`` unchanged.
    """
    shape = state.tau_excess.shape
    order = jnp.cumsum(state.is_active, axis=-1)
    cut = uniforms.take(shape[0], 1) * order[:, -1:]
    is_renewed = state.is_active & (order > cut)
    proposed = uniforms.exponential(*shape) / prior.tau_rate
    log_neg_log_u, tau_excess, log_ratio = _renewal(state, is_renewed, proposed, sums, tree)
    is_refused = jnp.log(uniforms.take(shape[0])) > log_ratio
    return (
        jnp.where(is_refused[:, None], state.log_neg_log_u, log_neg_log_u),
        jnp.where(is_refused[:, None], state.tau_excess, tau_excess),
    )


def _renewal(
    state: State, is_renewed: Bool[Array, "K d"], proposed: Float[Array, "K d"], sums: NodeSums, tree: Tree
) -> tuple[Float[Array, "K d"], Float[Array, "K d"], Float[Array, "K"]]:
    """(log(-log u), tau - 1) with the `proposed` tau at the renewed directions, and the log Hastings ratio.

    It is the ratio of ``p(u | tau) p(rows | u)``, as densities of -log u, times the Jacobian ``delta / delta'``: -log u
    is scaled by that factor.
    """
    tau_excess = jnp.where(is_renewed, proposed, state.tau_excess)
    log_tau = jnp.where(state.is_active, jnp.log1p(tau_excess), 0.0)
    log_delta, old_log_delta = running_sum(log_tau), state.log_delta
    log_neg_log_u = jnp.where(is_renewed, state.log_neg_log_u + old_log_delta - log_delta, state.log_neg_log_u)
    half_count, rate = half_count_and_rate(state, sums, tree)
    # clipped far above float32's subnormal numbers, which are slow, and far below any value that matters
    new, old = (jnp.exp(jnp.maximum(log_value, -60.0)) for log_value in (log_neg_log_u, state.log_neg_log_u))
    gain = (half_count[:, None] + 1.0) * (old - new) + rate * (jnp.expm1(-old) - jnp.expm1(-new))
    gain = gain + normaliser_correction(log_delta) - normaliser_correction(old_log_delta)
    return log_neg_log_u, tau_excess, jnp.sum(gain, where=is_renewed, axis=-1)


class _Half(NamedTuple):
    """Every second active direction: which places hold one, and which of these have another direction after them."""

    uniforms: Float[Array, "*halves 2 lanes"]
    log_neg_log_u: Float[Array, "*halves K h"]
    is_filled: Bool[Array, "*halves K h"]
    is_followed: Bool[Array, "*halves K h"]


def move(uniforms: Uniforms, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 given u: deltas at even places are updated given those at odd ones, then the other way round.

    Places count the node's active directions. Nine in ten of these Metropolis proposals are accepted.
    """
    num_nodes, max_rank = state.is_active.shape
    # even places, then odd ones, together more than there are directions
    half = max_rank // 2 + 1
    place = jnp.cumsum(state.is_active, axis=-1) - 1
    slot = jnp.where(state.is_active, place % 2 * half + place // 2, 2 * half)
    at = (jnp.arange(num_nodes)[:, None], slot)
    values = jnp.stack([jnp.log1p(state.tau_excess), state.log_neg_log_u], axis=-1)
    by_half = jnp.zeros((num_nodes, 2 * half, 2), values.dtype).at[at].set(values, mode="drop")
    log_tau, log_neg_log_u = by_half[..., 0], by_half[..., 1]
    number = state.is_active.sum(axis=-1)[:, None]
    places = jnp.arange(2 * half).reshape(half, 2).T[:, None]
    even, odd = log_tau[:, :half], log_tau[:, half:]
    before = running_sum(even + odd) - (even + odd)

    def alternate(carry: tuple[Array, Array, Array], half: _Half) -> tuple[tuple[Array, Array, Array], None]:
        """Update one half; for the other half, the directions after it are this half, shifted by one place."""
        before, own, after = carry
        own, after = _move_half(before, own, after, half, prior)
        return (before + own, after, jnp.roll(own, -1, axis=-1)), None

    halves = _Half(
        uniforms.take(2, 2, num_lanes(num_nodes * half)),
        jnp.stack([log_neg_log_u[:, :half], log_neg_log_u[:, half:]]),
        places < number,
        places + 1 < number,
    )
    start = before, even, odd
    both = partial(lax.scan, alternate)
    # On a CPU a scan, though of two rounds only: its body is compiled once. A GPU launches fewer kernels without it.
    (_, even, odd), _ = lax.platform_dependent(start, halves, cpu=both, default=partial(both, unroll=2))
    log_tau = jnp.concatenate([jnp.roll(even, 1, axis=-1), jnp.roll(odd, 1, axis=-1)], axis=-1)
    moved = jnp.expm1(jnp.take_along_axis(log_tau, jnp.minimum(slot, 2 * half - 1), axis=-1))
    return jnp.where(state.is_active, moved, state.tau_excess)


def _move_half(
    before: Float[Array, "K h"], own: Float[Array, "K h"], after: Float[Array, "K h"], half: _Half, prior: Prior
) -> tuple[Float[Array, "K h"], Float[Array, "K h"]]:
    """New log tau of every second direction and of the direction after each; `before`: log delta of the one before."""
    span = own + after
    lane, base, log_neg_log_u, total, is_followed = in_lanes(own, before, half.log_neg_log_u, span, half.is_followed)
    target, mode = _delta_target(base, log_neg_log_u, total, is_followed, prior.tau_rate)

    def log_factor(z: Array) -> Array:
        return normaliser_correction(base + jnp.maximum(mode + z, 0.0))

    moved = mode + move_log_concave(half.uniforms, lane - mode, target, log_factor)
    moved = jnp.clip(out_of_lanes(moved, own), 0.0, jnp.where(half.is_followed, span, jnp.inf))
    return jnp.where(half.is_filled, moved, own), jnp.where(half.is_followed, span - moved, after)


def _powers(is_followed: Array) -> Array:
    """The coefficient of log tau: 1 from the normaliser, and 1 more from the measure where no direction follows."""
    return jnp.where(is_followed, 1.0, 2.0)


def _delta_target(
    before: Array, log_neg_log_u: Array, span: Array, is_followed: Array, tau_rate: float
) -> tuple[Target, Array]:
    """Density of log tau's distance from its mode, given u and the sum of log tau and the next one's; and the mode.

    The normaliser's correction is left out.

    With A = a + delta_before * -log u and B = a exp(span), the potential of y = log tau is ``A exp(y) + B exp(-y) - y``
    on [0, span]; that of a last direction ``A exp(y) - 2 y`` on [0, inf).
    """
    rising = tau_rate + jnp.exp(jnp.minimum(before + log_neg_log_u, _LARGEST_PULL))
    falling = jnp.where(is_followed, tau_rate * jnp.exp(jnp.minimum(span, _LARGEST_SPAN)), 0.0)
    count = _powers(is_followed).astype(before.dtype)
    upper = jnp.where(is_followed, span, jnp.inf)
    free = jnp.log((count + jnp.sqrt(count * count + 4.0 * rising * falling)) / (2.0 * rising))
    mode = jnp.clip(free, 0.0, upper)
    rising, falling = rising * jnp.exp(mode), falling * jnp.exp(-mode)
    slope = jnp.where(mode == free, 0.0, rising - falling - count)
    curvature = rising + falling

    def potential(z: Array) -> tuple[Array, Array]:
        """Computed from z / 2: differences of exponentials would cancel near the mode."""
        growth = jnp.expm1(0.5 * z)
        half_sinh = 0.5 * (growth + growth / (1.0 + growth))
        cosh_excess = 2.0 * half_sinh * half_sinh
        sinh = 2.0 * half_sinh * jnp.sqrt(1.0 + half_sinh * half_sinh)
        value = curvature * cosh_excess + slope * sinh + count * (sinh - z)
        return value, curvature * sinh + slope + (slope + count) * cosh_excess

    root = jnp.sqrt(2.0 * curvature)
    width = 2.0 / (jnp.abs(slope) + jnp.hypot(slope, root))
    lower, upper = -mode, upper - mode
    points = (jnp.clip(-width, lower, upper), jnp.zeros_like(mode), jnp.clip(width, lower, upper))
    return Target(potential, points, lower, upper), mode


def draw_published(uniforms: Uniforms, state: State, prior: Prior) -> Float[Array, "K d"]:
    """New tau - 1 by the paper's step 4: ``Exp(a - sum over j >= m of log u_j)`` on [1, inf)."""
    later = jnp.cumsum(state.neg_log_u[:, ::-1], axis=-1)[:, ::-1]
    drawn = uniforms.exponential(*later.shape) / (prior.tau_rate + later)
    return jnp.where(state.is_active, drawn, state.tau_excess)


def log_conditional(state: State, prior: Prior) -> Float[Array, "K d"]:
    """Log density of each delta given u and the other deltas, up to its normaliser; 0 at removed directions.

    The density is with respect to tau and the next active direction's tau, both of which change with one delta.
    """
    log_delta = state.log_delta
    own = jnp.where(
        state.is_active,
        -jnp.exp(log_delta + state.log_neg_log_u)
        - log_lower_gamma_at_one(log_delta)
        - prior.tau_rate * state.tau_excess,
        0.0,
    )
    # the nearest active direction after each, or none
    index = jnp.where(state.is_active, jnp.arange(log_delta.shape[1]), log_delta.shape[1])
    following = jnp.roll(lax.cummin(index, axis=1, reverse=True), -1, axis=1).at[:, -1].set(log_delta.shape[1])
    after = jnp.take_along_axis(state.tau_excess, following, axis=1, mode="fill", fill_value=0.0)
    return jnp.where(state.is_active, own - prior.tau_rate * after, 0.0)
