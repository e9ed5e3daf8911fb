"""How many directions a node needs: removal and return during warm-up (paper steps 6 and 7), and the posterior of p.

The paper's removal test compares variances along the directions with each other. Where directions are many or rows are
few, its tolerance is far below the noise: the number that pass is an upper bound. So the intrinsic dimension that is
reported compares the variance of the node's rows along a direction with the noise, and with the node's largest.
"""

import equinox as eqx
import jax.numpy as jnp

from geode_jax._typing import Array, Bool, Float, Int
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.state import NodeSums, State, running_sum
from geode_jax.model.tree import Tree
from geode_jax.settings import RankAdaptation

# A direction counts where its variance above the noise is this share of the node's largest (Fukunaga & Olsen 1971): a
# cell of a curved set is wider than it is bent.
COUNTED_SHARE = 0.05


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
    uniforms: Uniforms,
    state: State,
    is_available: Bool[Array, "K d"],
    sweep: Int[Array, ""],
    settings: RankAdaptation,
) -> tuple[State, Bool[Array, ""], Bool[Array, "K d"]]:
    """State after one adaptation step, whether the step was taken, and the directions that passed its test.

    The step is taken with probability exp(c0 + c1 t). A direction that returns is first tested at the next step.
    """
    dtype = state.log_ratio.dtype
    probability = jnp.exp(settings.intercept + settings.slope * sweep.astype(dtype))
    is_taken = uniforms.take() < probability

    shares = log_variance_shares(state)
    is_removed = state.is_active & (shares < jnp.log(jnp.asarray(settings.tolerance, dtype)))
    is_missing = is_available & ~state.is_active
    # one removed direction returns, with probability proportional to its last share
    choice = _categorical(uniforms, jnp.where(is_missing, state.log_ratio, -jnp.inf))
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


def log_dimension_odds(
    sums: NodeSums, log_sigma2: Float[Array, "S"], is_available: Bool[Array, "K d"], tree: Tree
) -> Float[Array, "K d1"]:
    """Log posterior odds of every node's intrinsic dimension p = 0..d against 0, given its rows and the noise.

    Under dimension p, the first p directions have free variances above a threshold, and later ones have the threshold's
    variance: that of the noise, and `COUNTED_SHARE` of what the node's largest variance is above it. For n rows whose
    mean square along a direction is r times the threshold, a free variance gains ``n (r - 1 - log r) / 2`` nats where
    r > 1, and costs ``log(n) / 2`` (Schwarz's approximation of the Bayes factor; the prior on p is uniform). The rows'
    statistics should be cross-fitted: in sample, every direction of a small cell passes.
    """
    count = sums.count[:, None]
    noise = jnp.exp(log_sigma2)[tree.scale][:, None]
    over_noise = jnp.maximum(sums.squared / (jnp.maximum(count, 1.0) * noise), 1.0)
    largest = jnp.max(jnp.where(is_available, over_noise, 1.0), axis=-1, keepdims=True)
    ratio = jnp.maximum(over_noise / (1.0 + COUNTED_SHARE * (largest - 1.0)), 1.0)
    gain = 0.5 * count * (ratio - 1.0 - jnp.log(ratio)) - 0.5 * jnp.log(jnp.maximum(count, 1.0))
    is_open = running_sum(jnp.where(is_available, 0.0, 1.0).astype(gain.dtype)) == 0.0
    odds = jnp.where(is_open, running_sum(jnp.where(is_available, gain, 0.0)), -jnp.inf)
    return jnp.concatenate([jnp.zeros_like(count), odds], axis=-1)


def draw_dimension(
    uniforms: Uniforms, sums: NodeSums, log_sigma2: Float[Array, "S"], is_available: Bool[Array, "K d"], tree: Tree
) -> Int[Array, "K"]:
    """Every node's intrinsic dimension, drawn from its posterior given the rest."""
    odds = log_dimension_odds(sums, log_sigma2, is_available, tree)
    return _categorical(uniforms, odds)


def _categorical(uniforms: Uniforms, logits: Float[Array, "K m"]) -> Int[Array, "K"]:
    """A draw for each row by one uniform variable and the inverse CDF; m for rows without any weight."""
    largest = logits.max(axis=-1, keepdims=True)
    running = running_sum(jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0)))
    level = uniforms.take(logits.shape[0], 1) * running[:, -1:]
    return jnp.sum(running <= level, axis=-1, dtype=jnp.int32)
