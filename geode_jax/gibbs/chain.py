"""One chain: its start, its step, and its draws."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Float, Int, KeyArray
from geode_jax.gibbs import missing, rank
from geode_jax.gibbs.sweep import sweep, sweep_keys
from geode_jax.math.row_uniforms import uniforms_of_rows
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.candidate_statistics import AnyStatistics
from geode_jax.model.draw import Adaptation, Draw
from geode_jax.model.joint import log_joint, sample_log_stop_concentration
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State, node_sums
from geode_jax.settings import RankAdaptation

# Chi-squared variables of so many rows and sweeps of a chain are drawn together, which bounds the memory.
NORMS_AT_ONCE = 2**20


class Chain(eqx.Module):
    """What one sweep passes to the next."""

    state: State
    sums: NodeSums
    adaptation: Adaptation


def initial_chain(key: KeyArray, problem: Problem) -> Chain:
    """An over-dispersed start: memberships at the nearest node of a random scale, the rest spread widely.

    The scale is drawn per row from chain-specific weights, so that chains begin with different mixtures of coarse and
    fine nodes. The noise level is that of the rows at their nodes times a log-normal factor, a_S comes from its prior,
    and u starts at 1/2 as in the author's code. tau starts so close to 1 that its product over all directions is of
    order one. If tau came from its prior, the products would grow geometrically, and every later u would be drawn next
    to 1 whatever the rows are. tau given such u's would keep the products large, so that each direction would become
    free only some sweeps after the one before.
    """
    key_scale, key_row, key_noise, key_tau, key_stop, key_right, key_concentration, key_partial = jax.random.split(
        key, 8
    )
    statistics, tree = problem.statistics, problem.tree
    dtype = statistics.residual.dtype
    log_scale_weights = 1.5 * jax.random.normal(key_scale, (tree.num_scales,), dtype)
    row_scale = _draw_per_row(key_row, log_scale_weights, statistics)
    # A row may start at a leaf above its scale. One without a candidate at its scale starts at the nearest scale.
    is_present, is_leaf, scale = (
        statistics.of_nodes(jnp.asarray(table)) for table in (tree.is_present, tree.is_leaf, tree.scale)
    )
    gap = jnp.where(is_leaf & (scale < row_scale), 0, jnp.abs(scale - row_scale))
    gap = jnp.where(is_present, gap, tree.num_scales)
    ones = jnp.ones(tree.num_nodes, dtype)
    closeness = statistics.scores(0.0 * ones, ones, jnp.full(problem.is_available.shape, 0.5, dtype))
    slot = jnp.argmax(jnp.where(gap == gap.min(axis=0), closeness, -jnp.inf), axis=0).astype(jnp.int32)
    node = jnp.where(statistics.is_row, statistics.node_at(slot), tree.num_nodes)
    partial = None
    if problem.partial is not None:
        partial = missing.start(key_partial, log_scale_weights, problem.partial, tree, problem.num_features)
    shape = problem.is_available.shape
    spread = [1.5 * jax.random.normal(k, (tree.num_nodes,), dtype) for k in (key_stop, key_right)]
    state = State(
        node=node,
        logit_stop=jnp.where(tree.is_internal, spread[0], jnp.inf),
        logit_right=jnp.where(tree.is_internal, spread[1], 0.0),
        log_neg_log_u=jnp.full(shape, jnp.log(jnp.log(2.0)), dtype),
        tau_excess=jax.random.exponential(key_tau, shape, dtype) / shape[-1],
        log_sigma2=jnp.zeros(tree.num_scales, dtype),
        log_stop_concentration=sample_log_stop_concentration(key_concentration, problem.prior, dtype),
        is_active=problem.is_available,
        log_ratio=jnp.zeros(shape, dtype),
        partial=partial,
    )
    sums = node_sums(state, statistics)

    count = jnp.maximum(tree.sum_over_scales(sums.count), 1.0)
    level = tree.sum_over_scales(sums.residual) / (count * problem.num_features)
    overall = jnp.maximum(sums.residual.sum() / (sums.count.sum() * problem.num_features), 1e-6)
    jitter = 0.5 * jax.random.normal(key_noise, (tree.num_scales,), dtype)
    log_sigma2 = jnp.log(jnp.where(level > 1e-6, level, overall)) + jitter
    state = eqx.tree_at(lambda it: it.log_sigma2, state, log_sigma2)
    tallies = Adaptation(jnp.zeros(shape, dtype), jnp.zeros((), dtype))
    return Chain(state, sums, tallies)


def _draw_per_row(key: KeyArray, log_weights: Float[Array, "S"], statistics: AnyStatistics) -> Int[Array, "n"]:
    """An index drawn for every row, as `jax.random.categorical` draws it."""
    if statistics.row is None:
        return jax.random.categorical(key, log_weights, shape=statistics.is_row.shape)
    dtype = log_weights.dtype
    uniform = jnp.maximum(uniforms_of_rows(key, statistics.row, log_weights.size, dtype), jnp.finfo(dtype).tiny)
    return jnp.argmax(log_weights - jnp.log(-jnp.log(uniform)), axis=1)


def without_rows(chain: Chain) -> Chain:
    """A chain in so far as :func:`draw_of` reads it: without what has the size of the data, log_ratio and tallies."""
    none = jnp.zeros(0, jnp.int32)
    return eqx.tree_at(
        lambda it: (it.state.node, it.state.log_ratio, it.state.partial, it.adaptation),
        chain,
        (none, none, None, None),
        is_leaf=lambda leaf: leaf is None,
    )


def draw_of(key: KeyArray, chain: Chain, problem: Problem) -> Draw:
    """The draw that is stored of a chain; `key`: that of the :func:`step` to it.

    It adds each node's intrinsic dimension, on which no later sweep depends, and the log joint. So draws are made of
    many sweeps at once, in few large kernels.
    """
    state, sums = chain.state, chain.sums
    uniforms = rank_uniforms(_step_keys(key)[1], state)
    dimension = rank.draw_dimension(uniforms, sums, state.log_sigma2, problem.is_available, problem.tree)
    return Draw(
        neg_log_u=state.neg_log_u,
        tau=1.0 + state.tau_excess,
        log_sigma2=state.log_sigma2,
        log_weights=problem.tree.log_weights(state.logit_stop, state.logit_right),
        log_stop_concentration=state.log_stop_concentration,
        count=sums.count.astype(jnp.int32),
        is_active=state.is_active,
        dimension=dimension,
        log_joint=log_joint(state, sums, problem),
    )


def _tally(old: Adaptation, count: Array, has_passed: Array, is_tallied: Array) -> Adaptation:
    share = count / jnp.maximum(count.sum(), 1.0)
    weight = is_tallied.astype(share.dtype)
    return Adaptation(
        old.included + weight * share[:, None] * has_passed,
        old.steps + weight,
    )


def rank_uniforms(key: KeyArray, state: State) -> Uniforms:
    """As many as the draw of the dimensions takes, and after it a step of the rank adaptation."""
    return Uniforms(key, 1 + 2 * state.log_neg_log_u.shape[0], state.log_sigma2.dtype)


def missing_norms(keys: KeyArray, chain: Chain, problem: Problem) -> Float[Array, "T B"] | None:
    """What :func:`step` draws of chi-squared variables in the sweeps of these keys, (T,), from this chain on.

    None if no features are missing. Drawn for many sweeps at once, so that a rejection loop, which waits for its
    slowest row and on a GPU for the host in every round, is not in every sweep.
    """
    if problem.partial is None:
        return None
    assert chain.state.partial is not None
    num_missing, num_columns = problem.partial.num_missing, problem.partial.cross.shape[-1]
    group = (chain.state.partial.turn + jnp.arange(keys.shape[0])) % num_missing.shape[0]

    def of_sweep(inputs: tuple[KeyArray, Array]) -> Array:
        key, group = inputs
        return missing.draw_norms(sweep_keys(_step_keys(key)[0])[2], num_missing[group], num_columns)

    at_once = max(1, NORMS_AT_ONCE // num_missing.shape[1])
    return lax.map(of_sweep, (keys, group), batch_size=min(at_once, keys.shape[0]))


def _step_keys(key: KeyArray) -> KeyArray:
    """For the sweep and for the ranks."""
    return jax.random.split(key)


def step(
    key: KeyArray,
    problem: Problem,
    num_warmup: Int[Array, ""],
    adaptation: RankAdaptation | None,
    chain: Chain,
    index: Int[Array, ""],
    norms: Float[Array, "B"] | None = None,
) -> Chain:
    """Sweep number `index`; during warm-up, followed by a step of the rank adaptation.

    `norms`: of this sweep, by :func:`missing_norms`; if it is None the same ones are drawn here.
    """
    key_sweep, key_rank = _step_keys(key)
    state, sums = sweep(key_sweep, chain.state, chain.sums, problem, norms)
    if adaptation is None:
        return Chain(state, sums, chain.adaptation)
    uniforms = rank_uniforms(key_rank, state)
    uniforms.take(problem.tree.num_nodes)  # those of the dimensions
    adapted, is_taken, has_passed = rank.adapt(uniforms, state, problem.is_available, index, adaptation)
    in_warmup = index < num_warmup
    # the first half of warm-up still depends on the start
    is_tallied = is_taken & in_warmup & (2 * index >= num_warmup)
    return Chain(
        state=jax.tree.map(lambda new, old: jnp.where(in_warmup, new, old), adapted, state),
        sums=sums,
        adaptation=_tally(chain.adaptation, sums.count, has_passed, is_tallied),
    )
