"""Many sweeps: a scan in segments, chains and trees as batch axes, draws streamed to the host."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Bool, Float, Int, KeyArray
from geode_jax.gibbs import rank
from geode_jax.gibbs.sweep import Problem, sweep
from geode_jax.model import log_joint
from geode_jax.settings import RankAdaptation, SamplerSettings
from geode_jax.state import NodeSums, State, node_sums


class Draw(eqx.Module):
    """What is kept of one sweep; never anything of size n."""

    neg_log_u: Float[Array, "*batch K d"]
    tau: Float[Array, "*batch K d"]
    log_sigma2: Float[Array, "*batch S"]
    log_weights: Float[Array, "*batch K"]
    count: Int[Array, "*batch K"]
    is_active: Bool[Array, "*batch K d"]
    log_joint: Float[Array, "*batch"]


class Adaptation(eqx.Module):
    """Tallies over the adaptation steps of a chain, for the inclusion probabilities and the intrinsic dimension.

    `included`: sum over steps of the share of rows at whose node direction m passed the test. `dimension`: sum over
    steps of the share of rows at whose node exactly p passed, p = 0..d. `steps`: how many steps were tallied.
    """

    included: Float[Array, "*batch d"]
    dimension: Float[Array, "*batch d1"]
    steps: Float[Array, "*batch"]


class Chain(eqx.Module):
    """What one sweep hands to the next."""

    state: State
    sums: NodeSums
    adaptation: Adaptation


class Samples(NamedTuple):
    """Kept draws with axes (F, C, T, ...) and tallies with axes (F, C, ...)."""

    draws: Draw
    adaptation: Adaptation


def initial_chain(key: KeyArray, problem: Problem) -> Chain:
    """An over-dispersed start: memberships at the nearest node of a random scale, the rest spread widely.

    The scale is drawn per row from chain-specific weights, so that chains begin with different mixtures of coarse and
    fine nodes. The noise level is that of the rows at their nodes times a log-normal factor, tau comes from its prior,
    and u starts at 1/2 as in the author's code.
    """
    key_scale, key_row, key_noise, key_tau, key_stop, key_right = jax.random.split(key, 6)
    statistics, tree = problem.statistics, problem.tree
    num_rows = statistics.residual.shape[1]
    dtype = statistics.residual.dtype
    log_scale_weights = 1.5 * jax.random.normal(key_scale, (tree.num_scales,), dtype)
    row_scale = jax.random.categorical(key_row, log_scale_weights, shape=(num_rows,))
    scale = jnp.asarray(tree.scale)[:, None]
    # a row whose cell ends above its scale starts at the leaf there
    may_hold = tree.is_present[:, None] & ((scale == row_scale) | (tree.is_leaf[:, None] & (scale < row_scale)))
    distance = statistics.residual + 0.5 * statistics.squared.sum(axis=-1)
    node = jnp.argmin(jnp.where(may_hold, distance, jnp.inf), axis=0).astype(jnp.int32)
    sums = node_sums(statistics, node)

    count = jnp.maximum(tree.sum_over_scales(sums.count), 1.0)
    level = tree.sum_over_scales(sums.residual) / (count * problem.num_features)
    overall = jnp.maximum(sums.residual.sum() / (num_rows * problem.num_features), 1e-6)
    jitter = 0.5 * jax.random.normal(key_noise, (tree.num_scales,), dtype)
    shape = problem.is_available.shape
    spread = [1.5 * jax.random.normal(k, (tree.num_nodes,), dtype) for k in (key_stop, key_right)]
    state = State(
        node=node,
        logit_stop=jnp.where(tree.is_internal, spread[0], jnp.inf),
        logit_right=jnp.where(tree.is_internal, spread[1], 0.0),
        log_neg_log_u=jnp.full(shape, jnp.log(jnp.log(2.0)), dtype),
        tau_excess=jax.random.exponential(key_tau, shape, dtype) / problem.prior.tau_rate,
        log_sigma2=jnp.log(jnp.where(level > 1e-6, level, overall)) + jitter,
        is_active=problem.is_available,
        log_ratio=jnp.zeros(shape, dtype),
    )
    tallies = Adaptation(jnp.zeros(shape[1], dtype), jnp.zeros(shape[1] + 1, dtype), jnp.zeros((), dtype))
    return Chain(state, sums, tallies)


def _draw_of(chain: Chain, problem: Problem) -> Draw:
    state = chain.state
    return Draw(
        neg_log_u=state.neg_log_u,
        tau=1.0 + state.tau_excess,
        log_sigma2=state.log_sigma2,
        log_weights=problem.tree.log_weights(state.logit_stop, state.logit_right),
        count=chain.sums.count.astype(jnp.int32),
        is_active=state.is_active,
        log_joint=log_joint(state, chain.sums, problem.tree, problem.prior, problem.num_features),
    )


def _tally(chain: Chain, has_passed: Array, is_tallied: Array) -> Adaptation:
    share = chain.sums.count / jnp.maximum(chain.sums.count.sum(), 1.0)
    sizes = has_passed.sum(axis=-1)
    weight = is_tallied.astype(share.dtype)
    old = chain.adaptation
    return Adaptation(
        old.included + weight * (share @ has_passed),
        old.dimension + weight * jax.ops.segment_sum(share, sizes, has_passed.shape[-1] + 1),
        old.steps + weight,
    )


def _step(
    key: KeyArray,
    problem: Problem,
    num_warmup: Array,
    adaptation: RankAdaptation | None,
    chain: Chain,
    index: Array,
) -> tuple[Chain, Draw]:
    """Sweep number `index` of one chain; its randomness depends on the chain's key and the index only."""
    key_sweep, key_rank = jax.random.split(jax.random.fold_in(key, index))
    state, sums = sweep(key_sweep, chain.state, chain.sums, problem)
    chain = Chain(state, sums, chain.adaptation)
    if adaptation is not None:
        adapted, is_taken, has_passed = rank.adapt(key_rank, state, problem.is_available, index, adaptation)
        in_warmup = index < num_warmup
        state = jax.tree.map(lambda new, old: jnp.where(in_warmup, new, old), adapted, state)
        chain = Chain(state, sums, chain.adaptation)
        # the first half of warm-up still carries the start
        chain = Chain(state, sums, _tally(chain, has_passed, is_taken & in_warmup & (2 * index >= num_warmup)))
    return chain, _draw_of(chain, problem)


@partial(jax.jit, static_argnames=("length", "adaptation"), donate_argnames="chains")
def _segment(
    keys: KeyArray,
    chains: Chain,
    problems: Problem,
    first: Int[Array, ""],
    num_warmup: Int[Array, ""],
    *,
    length: int,
    adaptation: RankAdaptation | None,
) -> tuple[Chain, Draw]:
    """`length` sweeps of every chain (axis 1) of every tree (axis 0); draws get a time axis after those."""

    def one_chain(key: KeyArray, chain: Chain, problem: Problem) -> tuple[Chain, Draw]:
        step = partial(_step, key, problem, num_warmup, adaptation)
        return lax.scan(step, chain, first + jnp.arange(length))

    over_chains = jax.vmap(one_chain, in_axes=(0, 0, None))
    return jax.vmap(over_chains)(keys, chains, problems)


@jax.jit
def _start(keys: KeyArray, problems: Problem) -> Chain:
    return jax.vmap(jax.vmap(initial_chain, in_axes=(0, None)))(keys, problems)


def run_chains(
    key: KeyArray,
    problems: Problem,
    settings: SamplerSettings,
    on_segment: Callable[[int, int], None] | None = None,
) -> Samples:
    """Run every chain on every tree; `problems` has a leading axis F on its arrays.

    `on_segment(done, total)` is called after every segment with the sweeps done so far. Raises FloatingPointError where
    a log joint is not finite: the draws before it would be worthless.
    """
    num_trees = problems.statistics.residual.shape[0]
    keys = jax.random.split(key, (num_trees, settings.num_chains, 2))
    chains = _start(keys[..., 0], problems)
    total = settings.num_warmup + settings.num_samples * settings.thinning
    kept: list[Draw] = []
    for first in range(0, total, settings.segment_length):
        chains, draws = _segment(
            keys[..., 1],
            chains,
            problems,
            jnp.asarray(first, jnp.int32),
            jnp.asarray(settings.num_warmup, jnp.int32),
            length=settings.segment_length,
            adaptation=settings.adaptation,
        )
        if not np.isfinite(draws.log_joint).all():
            raise FloatingPointError(
                f"the log joint became non-finite between sweeps {first} and {first + settings.segment_length};"
                " use dtype float64, or look for features of very different size"
            )
        # Sweeps past the end of the last segment are dropped: one compiled length serves every segment.
        index = np.arange(first, first + settings.segment_length)
        since = index - settings.num_warmup
        wanted = np.flatnonzero((since >= 0) & (index < total) & (since % settings.thinning == settings.thinning - 1))
        if wanted.size:
            kept.append(jax.tree.map(lambda leaf, w=wanted: np.asarray(leaf)[:, :, w], draws))
        if on_segment is not None:
            on_segment(min(first + settings.segment_length, total), total)
    draws = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=2), *kept)
    return Samples(draws, jax.tree.map(np.asarray, chains.adaptation))
