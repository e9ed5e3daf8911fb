"""Draw test: every block's draws follow its own `log_conditional`, in float32 and float64.

Kolmogorov-Smirnov of 4000 draws of each coordinate against the conditional integrated on a grid in float64 (chi-square
for memberships). With the identity test this pins the draws to the joint. False alarm: 1e-4 per block and type.
"""

import functools
import itertools
from functools import partial
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bugs import BUGS, caught_by
from scipy import special, stats

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.gibbs import chain, membership, noise, rank, shrinkage, signal, tree_weights
from geode_jax.gibbs.chain import Chain, draw_of, initial_chain, step
from geode_jax.gibbs.packing import packed, unpacked
from geode_jax.gibbs.sweep import node_uniforms, sweep
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.draw import Adaptation, Draw
from geode_jax.model.joint import simulate
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State, half_count_and_rate, node_sums
from geode_jax.model.statistics import Statistics
from geode_jax.model.tree import tree_from_mask
from geode_jax.settings import DirectMembership, ExactShrinkage, Prior, RankAdaptation

NUM_DRAWS = 4000
LEVEL = 1e-4


@functools.cache
def _setting(dtype):
    """The same values in both types: made in float64, cast down."""
    with jax_settings(np.float64):
        dictionary = small.make_dictionary(jnp.float64)
        active, nothing = small.active_mask(dictionary), small.without_rows(dictionary)
        state = small.draw_from_prior(jax.random.key(11), nothing, active, small.NUM_ROWS)
        problem = small.make_problem(dictionary, simulate(jax.random.key(12), dictionary, state))

    def cast(leaf):
        array = np.asarray(leaf)
        return array.astype(dtype) if array.dtype.kind == "f" else array

    with jax_settings(dtype):
        return jax.tree.map(jnp.asarray, jax.tree.map(cast, (problem, state)))


def _draws(dtype, draw):
    with jax_settings(dtype):
        problem, state = _setting(dtype)
        many = jax.vmap(lambda key: draw(key, problem, state, small.sums_of(problem, state)))
        run = jax.jit(many, compiler_options=small.OPTIMISED)
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), run(small.keys(21, NUM_DRAWS)))


def _grid_cdf(log_density, low, high):
    """CDF over [low, high] of a density known up to its normaliser, by the trapezoid rule.

    None if some of its upper tail is beyond `high`.
    """
    grid = np.linspace(low, high, 40_001)
    values = np.asarray(log_density(jnp.asarray(grid)))
    density = np.exp(values - values.max())
    if not density[-1] < 1e-7:
        return None
    total = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    return lambda x: np.interp(x, grid, total / total[-1])


def _p_values(draws, where, log_conditional, log_measure):
    """KS p-values of some coordinates; `log_measure` is the log derivative of the conditional's variable by one.

    `draws` by index, and `log_conditional` of the state, its sums, the problem and an index. One program serves all
    indices. It is compiled anew in every call, as a bug may be planted in what it calls.
    """
    with jax_settings(np.float64):
        problem, state = _setting(np.float64)
        sums = small.sums_of(problem, state)

        @jax.jit
        @functools.partial(jax.vmap, in_axes=(0, None))
        def log_density(value, index):
            changed = eqx.tree_at(where, state, where(state).at[index].set(value))
            return log_conditional(changed, sums, problem, index) + log_measure(value)

        return [_p_value(own, lambda grid, at=index: log_density(grid, at)) for index, own in draws.items()]


def _p_value(draws, log_density):
    if np.ptp(draws) == 0.0:
        return 0.0
    spread = draws.max() - draws.min()
    cdf = _grid_cdf(log_density, draws.min() - spread, draws.max() + 5 * spread)
    # draws of the density reach so far that five times their spread more holds all of it
    return 0.0 if cdf is None else stats.kstest(draws, cdf).pvalue


def _repeated(step, times):
    """A block's moves in a row from the same state: nine in ten are taken, so that the end knows nothing of the start.

    `step` of (key, problem, state, sums) to the changed state.
    """

    def draw(key, problem, state, sums):
        keys = jax.random.split(key, times)
        return jax.lax.scan(lambda held, key: (step(key, problem, held, sums), None), state, keys)[0]

    return draw


def _uniforms(key, state):
    return small.uniforms(key, state.log_sigma2.dtype)


def _move_u(key, problem, state, sums):
    sums = problem.borrowed.added_to(sums, state.log_sigma2, problem.tree)
    moved = signal.move(_uniforms(key, state), state, sums, problem.tree, ExactShrinkage())
    return eqx.tree_at(lambda it: it.log_neg_log_u, state, moved)


def _move_tau(key, problem, state, sums):
    return eqx.tree_at(lambda it: it.tau_excess, state, shrinkage.move(_uniforms(key, state), state, problem.prior))


def _move_noise(key, problem, state, sums):
    moved = noise.move(_uniforms(key, state), state, sums, problem)
    return eqx.tree_at(lambda it: it.log_sigma2, state, moved)


def _move_weights(key, problem, state, sums):
    moved = tree_weights.move(_uniforms(key, state), state, sums, problem.tree, problem.prior)
    return eqx.tree_at(lambda it: (it.logit_stop, it.logit_right), state, moved)


def _move_concentration(key, problem, state, sums):
    moved = tree_weights.move_concentration(_uniforms(key, state), state, problem.tree, problem.prior)
    return eqx.tree_at(lambda it: it.log_stop_concentration, state, moved)


def _renew(key, problem, state, sums):
    sums = problem.borrowed.added_to(sums, state.log_sigma2, problem.tree)
    renewed = shrinkage.renew(_uniforms(key, state), state, sums, problem.tree, problem.prior)
    return eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)


def _u(dtype):
    draws = _draws(dtype, lambda *arguments: _repeated(_move_u, 12)(*arguments).log_neg_log_u)
    mask = np.asarray(_setting(dtype)[1].is_active)
    kept = np.asarray(_setting(dtype)[1].log_neg_log_u, np.float64)
    assert (draws[:, ~mask] == kept[~mask]).all()
    return _p_values(
        {(k, m): draws[:, k, m] for k, m in np.argwhere(mask)},
        lambda it: it.log_neg_log_u,
        lambda s, sums, p, at: signal.log_conditional(s, p.borrowed.added_to(sums, s.log_sigma2, p.tree), p.tree)[at],
        lambda v: v - jnp.exp(v),
    )


def _tau(dtype):
    """All deltas of a node given its u."""

    def log_density(log_delta, k, m):
        return -np.exp(log_delta + state.log_neg_log_u[k, m]) - _log_normaliser(np.exp(log_delta))

    with jax_settings(np.float64):
        state = jax.tree.map(np.asarray, _setting(np.float64)[1])
    return _delta_p_values(dtype, _repeated(_move_tau, 40), log_density)


def _shrinkage(dtype):
    """All deltas of a node given its rows, u integrated out: three kinds of moves together."""

    def step(key, problem, state, sums):
        for number, move in enumerate((_move_u, _renew, _move_tau)):
            state = move(jax.random.fold_in(key, number), problem, state, sums)
        return state

    def log_density(log_delta, k, m):
        """Log of the integral of ``u^(delta + n/2) exp(-rate u)`` over (0, 1), less the normaliser."""
        shape, decay = np.exp(log_delta) + 1.0 + float(half_count[k]), float(rate[k, m])
        terms = np.cumsum(np.log(decay) - np.log(shape + np.arange(1, 300)[:, None]), axis=0)
        return -decay - np.log(shape) + np.log1p(np.exp(terms).sum(axis=0)) - _log_normaliser(np.exp(log_delta))

    with jax_settings(np.float64):
        problem, state = _setting(np.float64)
        sums = problem.borrowed.added_to(small.sums_of(problem, state), state.log_sigma2, problem.tree)
        half_count, rate = half_count_and_rate(state, sums, problem.tree)
    return _delta_p_values(dtype, _repeated(step, 60), log_density)


def _log_normaliser(delta):
    """Log of the integral of ``u^delta exp(-u)`` over (0, 1), by its series, for any delta."""
    terms = np.cumsum(-np.log(delta + 1.0 + np.arange(1, 40)[:, None]), axis=0)
    return -1.0 - np.log(delta + 1.0) + np.log1p(np.exp(terms).sum(axis=0))


def _delta_p_values(dtype, draw, log_density):
    """KS p-values of all log deltas of `draw` against their law: a chain along a node's active directions.

    Its marginals by passing messages along a grid; `log_density` of (log delta, k, m) is what the rest says of each.
    """
    with jax_settings(dtype):
        problem, state = _setting(dtype)
        rate, mask = problem.prior.tau_rate, np.asarray(state.is_active)
        old = np.asarray(state.log_delta, np.float64)
    draws = _draws(dtype, lambda *arguments: draw(*arguments).log_delta)
    grid = np.linspace(0.0, 24.0, 2401)
    gap = grid - grid[:, None]
    with np.errstate(over="ignore"):
        forth = np.where(gap >= 0, np.exp(np.log(rate) - rate * np.expm1(gap) + gap), 0.0)
    forth[np.diag_indices(grid.size)] *= 0.5  # a trapezoid begins there
    p_values = []
    for k in range(mask.shape[0]):
        places = np.flatnonzero(mask[k])
        told = [np.exp(value - value.max()) for value in (log_density(grid, k, m) for m in places)]
        before, after = [2.0 * forth[0]], [np.ones_like(grid)]
        before[0][0] *= 0.5
        for here, _ in zip(told, places[1:], strict=False):
            before.append((before[-1] * here) @ forth)
        for here in told[:0:-1]:
            after.append(forth @ (after[-1] * here))
        for number, m in enumerate(places):
            density = before[number] * told[number] * after[len(places) - 1 - number]
            assert density[-1] < 1e-7 * density.max(), "the grid must cover the upper tail"
            total = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
            moved = draws[:, k, m]
            p_values.append(
                stats.kstest(moved, lambda x, total=total: np.interp(x, grid, total / total[-1])).pvalue
                if (moved != old[k, m]).mean() > 0.99
                else 0.0
            )
    return p_values


def _noise(dtype):
    draws = _draws(dtype, lambda *arguments: _repeated(_move_noise, 12)(*arguments).log_sigma2)
    return _p_values(
        {(scale,): draws[:, scale] for scale in range(draws.shape[1])},
        lambda it: it.log_sigma2,
        lambda s, sums, p, at: noise.log_conditional(s, sums, p)[at],
        lambda v: -v,
    )


def _weights(dtype):
    moved = _draws(dtype, _repeated(_move_weights, 12))
    stop, right = moved.logit_stop, moved.logit_right
    internal = np.flatnonzero(_setting(dtype)[0].tree.is_internal)

    def measure(v):
        return jax.nn.log_sigmoid(v) + jax.nn.log_sigmoid(-v)

    def p_values(part, draws, where):
        def log_conditional(s, sums, p, _):  # summed over nodes
            return tree_weights.log_conditional(s, sums, p.tree, p.prior)[part]

        return _p_values({(k,): draws[:, k] for k in internal}, where, log_conditional, measure)

    return p_values(0, stop, lambda it: it.logit_stop) + p_values(1, right, lambda it: it.logit_right)


def _concentration(dtype):
    draws = _draws(dtype, lambda *arguments: _repeated(_move_concentration, 12)(*arguments).log_stop_concentration)
    return _p_values(
        {(): draws},
        lambda it: it.log_stop_concentration,
        lambda s, sums, p, _: tree_weights.log_conditional_of_concentration(s, p.tree, p.prior),
        lambda v: v,
    )


def _node_probabilities():
    """Conditional of every row's node, (K, n)."""
    with jax_settings(np.float64):
        problem, state = _setting(np.float64)
        scores = membership.node_scores(state, problem.statistics, problem.tree, problem.num_features)
        return np.asarray(jax.nn.softmax(scores, axis=0))


def _membership(dtype):
    node = _draws(dtype, lambda k, p, s, sums: membership.draw(k, s, p.statistics, p.tree, p.num_features))
    return _frequency_p_values(node, _node_probabilities())


def slice_transition(log_weights, scale, probability):
    """Transition matrix of the slice sampler, [from, to] for one row, by summing over the order of the scales' weights.

    Nothing of the sampler's code: `probability` is the row's conditional, `log_weights` those of the nodes.
    """
    scales = np.unique(scale)
    weight = np.array([np.exp(log_weights[scale == s]).sum() for s in scales])
    divided = probability / weight[scale]
    edges = np.concatenate([[0.0], np.sort(weight)])
    transition = np.zeros((scale.size, scale.size))
    for low, high in itertools.pairwise(edges):
        is_open = weight[scale] >= high
        to = np.where(is_open, divided, 0.0)
        if to.sum() > 0:
            transition += np.where(is_open, (high - low) / weight[scale], 0.0)[:, None] * to / to.sum()
    return transition


def _slice_matrices():
    with jax_settings(np.float64):
        problem, state = _setting(np.float64)
        log_weights = np.asarray(problem.tree.log_weights(state.logit_stop, state.logit_right))
    present = np.asarray(problem.tree.is_present)
    probability = _node_probabilities()
    matrices = np.zeros((probability.shape[1], *np.shape(np.outer(present, present))))
    for row in range(probability.shape[1]):
        matrices[row][np.ix_(present, present)] = slice_transition(
            log_weights[present], problem.tree.scale[present], probability[present, row]
        )
    return matrices, probability


def test_tau_has_its_mode_under_a_wide_prior():
    """Of a prior that lets log tau and the next one's sum to 20, as against the mode written out."""
    for dtype in ("float32", "float64"):
        with jax_settings(np.dtype(dtype)):
            nothing, span = jnp.full(1, -30.0, dtype), jnp.full(1, 20.0, dtype)
            mode = shrinkage._delta_target(nothing, nothing, span, jnp.ones(1, bool), 1e-4)[1]
        np.testing.assert_allclose(mode, np.log((1 + np.sqrt(1 + 4e-8 * np.exp(20.0))) / 2e-4), rtol=1e-5)


@pytest.mark.slow
def test_slices_leave_the_conditional_unchanged():
    """The matrix that the draws are compared with is a transition matrix with the right invariant distribution."""
    matrices, probabilities = _slice_matrices()
    for matrix, probability in zip(matrices, probabilities.T, strict=True):
        np.testing.assert_allclose(matrix.sum(axis=1)[probability > 0], 1.0, rtol=1e-12)
        np.testing.assert_allclose(probability @ matrix, probability, atol=1e-14)


def _slices(dtype):
    node = _draws(dtype, lambda k, p, s, sums: membership.draw_sliced(k, s, p.statistics, p.tree, p.num_features))
    matrices, _ = _slice_matrices()
    start = np.asarray(_setting(np.float64)[1].node)
    return _frequency_p_values(node, np.stack([m[z] for m, z in zip(matrices, start, strict=True)], axis=1))


def _frequency_p_values(node, probability):
    """Chi-square p-value of every row's nodes, (draws, n), against their probabilities, (K, n)."""
    p_values = []
    for row in range(small.NUM_ROWS):
        count = np.bincount(node[:, row].astype(int), minlength=probability.shape[0])
        if count[probability[:, row] == 0].sum() > 0:
            return [0.0]
        common = probability[:, row] * NUM_DRAWS >= 5
        observed = np.append(count[common], count[~common].sum())
        expected = np.append(probability[common, row], probability[~common, row].sum()) * NUM_DRAWS
        keep = expected > 0.5
        if keep.sum() > 1:
            p_values.append(
                stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue
            )
    return p_values


CHECKS = {
    "u": _u,
    "tau": _tau,
    "shrinkage": _shrinkage,
    "noise": _noise,
    "weights": _weights,
    "concentration": _concentration,
    "membership": _membership,
    "slices": _slices,
}


def smallest_p_value(block, dtype):
    """Smallest p-value of a block's coordinates, times their number; 0 where draws were not finite."""
    p_values = np.nan_to_num(np.asarray(CHECKS[block](dtype)))
    assert p_values.size
    return p_values.min() * p_values.size


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", CHECKS)
def test_draws_follow_the_conditional(block, dtype):
    assert smallest_p_value(block, dtype) > LEVEL


# Of two bugs in one block, and one that takes long to show, among the longer proofs.
_SLOW_BUGS = {"tau without normaliser", "renewal without rows"}


@pytest.mark.parametrize(
    ("bug", "block"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] in _SLOW_BUGS)) for pair in caught_by("draws")],
)
def test_planted_bug_is_caught(bug, block):
    with BUGS[bug]():
        assert smallest_p_value(block, np.float32) < LEVEL


@pytest.mark.slow
def test_places_without_rows_change_nothing():
    """Padded statistics, with rubbish in the empty places: same sums, same conditional, and no membership there."""
    dictionary = small.make_dictionary(jnp.float32)
    problem = small.make_problem(dictionary, 2.0 * jax.random.normal(jax.random.key(0), (14, 5)))
    active = small.active_mask(dictionary)
    state = small.draw_from_prior(jax.random.key(1), problem, active, 14)
    statistics = problem.statistics
    padded = Statistics(
        jnp.pad(statistics.residual, ((0, 0), (0, 5)), constant_values=77.0),
        jnp.pad(statistics.squared, ((0, 0), (0, 5), (0, 0)), constant_values=99.0),
        statistics.num_rows,
    )
    nowhere = jnp.full(5, dictionary.tree.num_nodes, state.node.dtype)
    longer = eqx.tree_at(lambda it: it.node, state, jnp.concatenate([state.node, nowhere]))
    tree, num_features = dictionary.tree, dictionary.num_features

    @jax.jit
    def sums_and_conditional(state, statistics):
        return node_sums(state, statistics), membership.log_conditional(state, statistics, tree, num_features)

    (sums, conditional), (of_longer, of_padded) = (
        sums_and_conditional(*given) for given in ((state, statistics), (longer, padded))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), sums, of_longer)
    np.testing.assert_allclose(conditional, of_padded, rtol=1e-5)
    for draw in (membership.draw, membership.draw_sliced):
        node = np.asarray(jax.jit(draw)(jax.random.key(2), longer, padded, tree, num_features))
        assert (node[14:] == tree.num_nodes).all()
        assert (node[:14] < tree.num_nodes).all()
    started = jax.jit(initial_chain)(jax.random.key(3), eqx.tree_at(lambda it: it.statistics, problem, padded))
    assert (np.asarray(started.state.node)[14:] == tree.num_nodes).all()
    assert float(started.sums.count.sum()) == 14


_FEW, _BLOCKS = membership.FEW_NODES, 0  # node by node, and by blocks
_SETS = [(_FEW, 3, 1), (_FEW, 31, 16), (_BLOCKS, 1, 1), (_BLOCKS, 31, 1), (_BLOCKS, 127, 16)]
_OTHER_SETS = set(itertools.product([_FEW, _BLOCKS], [1, 3, 31, 127], [1, 16])) - set(_SETS)


@pytest.mark.parametrize(
    ("few_nodes", "num_nodes", "num_chunks"),
    [*_SETS, *(pytest.param(*rest, marks=pytest.mark.slow) for rest in sorted(_OTHER_SETS))],
)
def test_nodes_are_drawn_by_the_inverse_cdf(few_nodes, num_nodes, num_chunks, monkeypatch):
    """At any level, the ends included, and never at a node without weight; in chunks of rows too."""
    monkeypatch.setattr(membership, "FEW_NODES", few_nodes)
    monkeypatch.setattr(membership, "CHUNK_BITS", (400).bit_length() - (num_chunks.bit_length() - 1))
    rng = np.random.default_rng(num_nodes)
    scores = rng.normal(scale=20.0, size=(num_nodes, 400)).astype(np.float32)
    scores[1:][rng.random((num_nodes - 1, 400)) < 0.4] = -np.inf
    levels = rng.random(400).astype(np.float32)
    levels[:50], levels[50:100] = 0.0, 1.0  # 1 is what a level just below it rounds to, times a sum
    # a new function each time: JAX would reuse the trace of the same one, whatever the settings are now
    found = np.asarray(jax.jit(lambda *of: membership._draw_from(*of))(jnp.asarray(levels), jnp.asarray(scores)))
    assert np.isfinite(scores[found, np.arange(400)]).all()
    weight = np.exp(scores.astype(np.float64) - scores.max(axis=0))
    cumulative = np.cumsum(weight, axis=0) / weight.sum(axis=0)
    above = cumulative[found, np.arange(400)]
    below = above - weight[found, np.arange(400)] / weight.sum(axis=0)
    assert (below <= levels + 1e-5).all()
    assert (levels <= above + 1e-5).all()


def test_the_start_holds_no_direction_at_the_noise():
    """All of 80 directions far above it are found within a few sweeps, the strongest shrinkage notwithstanding."""
    rank, num_rows, num_features = 80, 300, 100
    rng = np.random.default_rng(0)
    squared = np.square(4.0 * rng.standard_normal((1, num_rows, rank), dtype=np.float32))
    outside = rng.chisquare(num_features - rank, (1, num_rows)).astype(np.float32)
    tree = tree_from_mask(np.ones(1, bool))
    problem = Problem(
        tree=tree,
        statistics=Statistics(jnp.asarray(outside), jnp.asarray(squared), jnp.asarray(num_rows)),
        partial=None,
        borrowed=Borrowed.nothing(tree, rank, jnp.float32),
        is_available=jnp.ones((1, rank), bool),
        num_features=jnp.asarray(float(num_features)),
        prior=Prior.published(),
        shrinkage=ExactShrinkage(),
        membership=DirectMembership(),
    )

    def run(key):
        start = initial_chain(key, problem)
        keys = jax.random.split(key, 5)
        return jax.lax.scan(lambda held, key: (sweep(key, *held, problem), None), (start.state, start.sums), keys)[0]

    state, _ = jax.jit(run)(jax.random.key(0))
    assert float(jnp.exp(-state.neg_log_u).max()) < 0.2  # the truth is 1/17


def test_directions_without_rows_follow_the_prior_soon():
    """After a hundred sweeps from tau near 1, the product of 60 tau's is that of the prior.

    By moves of each delta given its own u, and of u given delta, it takes thousands.
    """
    rank, num_sweeps = 60, 100
    tree = tree_from_mask(np.ones(63, bool))
    near_one = jnp.full((63, rank), 1.0 / rank)
    state = State(
        node=jnp.zeros(1, jnp.int32),
        logit_stop=jnp.zeros(63),
        logit_right=jnp.zeros(63),
        log_neg_log_u=0.0 * near_one,
        tau_excess=near_one,
        log_sigma2=jnp.zeros(tree.num_scales),
        log_stop_concentration=jnp.zeros(()),
        is_active=jnp.ones((63, rank), bool),
        log_ratio=0.0 * near_one,
    )
    nothing = NodeSums(count=jnp.zeros(63), residual=jnp.zeros(63), squared=jnp.zeros((63, rank)))

    @jax.jit
    def run(state):
        def step(state, key):
            uniforms = node_uniforms(key, state)
            moved = signal.move(uniforms, state, nothing, tree, ExactShrinkage())
            state = eqx.tree_at(lambda it: it.log_neg_log_u, state, moved)
            renewed = shrinkage.renew(uniforms, state, nothing, tree, Prior())
            state = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)
            return eqx.tree_at(lambda it: it.tau_excess, state, shrinkage.move(uniforms, state, Prior())), None

        return jax.lax.scan(step, state, small.keys(1, num_sweeps))[0]

    log_delta = np.asarray(run(state).log_delta[:, -1])
    mean = rank * np.e * special.exp1(1.0)  # of log tau for tau - 1 ~ Exp(1)
    assert abs(log_delta.mean() - mean) < 4.0 * log_delta.std() / np.sqrt(63)


@pytest.mark.slow
def test_a_sweep_in_the_way_of_a_gpu_is_the_sweep():
    """Where the program depends on the platform, every way gives the same draws."""
    problem, state = _setting(np.float64)

    def swept():
        with jax_settings(np.float64):
            sums = small.sums_of(problem, state)
            return jax.jit(lambda key: sweep(key, state, sums, problem))(jax.random.key(2))

    ways = []

    def elsewhere(*operands, cpu, default):
        ways.append(default)
        return default(*operands)

    expected = swept()
    with mock.patch.object(jax.lax, "platform_dependent", elsewhere):
        found = swept()
    assert len(ways) >= 3
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_values_are_the_values(dtype):
    """Of every type, and values that no arithmetic keeps."""
    with jax_settings(dtype):
        log_weights = jnp.asarray([-jnp.inf, 0.0, -1.5], dtype)
        one = Draw(
            neg_log_u=jnp.asarray([[1e-30, 3.0]] * 3, dtype),
            tau=jnp.asarray([[1.0, 1e30]] * 3, dtype),
            log_sigma2=jnp.asarray([-12.5, jnp.nan], dtype),
            log_weights=log_weights,
            log_stop_concentration=jnp.asarray(0.25, dtype),
            count=jnp.asarray([2**24, 0, 1], jnp.int32),
            is_active=jnp.asarray([[True, False]] * 3),
            dimension=jnp.asarray([2, 0, 1], jnp.int32),
            log_joint=jnp.asarray(-123456.0, dtype),
        )
        other = eqx.tree_at(lambda it: it.count, one, one.count + 5 * (one.count < 9))
        rows = jnp.stack([packed(own, dtype) for own in (one, other)])
        found = unpacked(rows, jax.eval_shape(lambda: one))
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
        assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_sweep_uses_the_uniform_variables_that_it_draws():
    """None twice, and none drawn for nothing: those that a step leaves are those of the dimensions."""
    problem, state = _setting(np.float32)
    held = []
    original, take = small.Uniforms.__init__, small.Uniforms.take

    def noted(self, *arguments):
        original(self, *arguments)
        held.append(self)

    with mock.patch.object(small.Uniforms, "__init__", noted):
        tallies = Adaptation(jnp.zeros_like(state.tau_excess), jnp.zeros(()))
        chain = Chain(state, small.sums_of(problem, state), tallies)
        number, used = jnp.asarray(0), []
        with mock.patch.object(small.Uniforms, "take", lambda self, *shape: used.append(shape) or take(self, *shape)):
            jax.eval_shape(lambda key: step(key, problem, number, RankAdaptation(), chain, number), jax.random.key(0))
            jax.eval_shape(lambda key: draw_of(key, chain, problem), jax.random.key(0))
    assert [uniforms.left for uniforms in held] == [0, 0, 1 + 7]
    assert used[-1] == (7, 1)  # the first ones, which the step hands to nobody
    assert (7,) in used
    with pytest.raises(ValueError, match="only 0 are left"):
        held[0].take(1)


class _Levels(small.Uniforms):
    """Uniform variables that are given."""

    def __init__(self, *levels):
        self._all, self._taken = jnp.asarray(levels, jnp.float32), 0


def _state_of_ranks(variance, is_active, share):
    """A state of nodes whose directions have these variances over the noise, and these shares when removed."""
    shape = np.shape(variance)
    return State(
        node=jnp.zeros(1, jnp.int32),
        logit_stop=jnp.zeros(shape[0]),
        logit_right=jnp.zeros(shape[0]),
        log_neg_log_u=jnp.log(jnp.log1p(jnp.asarray(variance))),
        tau_excess=jnp.zeros(shape),
        log_sigma2=jnp.zeros(1),
        log_stop_concentration=jnp.zeros(()),
        is_active=jnp.asarray(is_active),
        log_ratio=jnp.log(jnp.asarray(share)),
    )


def test_directions_are_removed_and_return():
    """Removed below the tolerance; of a node that keeps all of its own, one returns by the shares of the removed."""
    yes, no = True, False
    nodes = [  # variances, active directions, shares of removed ones, available directions, level of the choice
        ([50.0, 0.04, 0.6], [yes, yes, yes], [1.0, 1.0, 1.0], [yes, yes, yes], 0.5),
        ([50.0, 9.0, 9.0], [yes, no, no], [1.0, 0.1, 0.3], [yes, yes, yes], 0.2),
        ([50.0, 9.0, 9.0], [yes, no, no], [1.0, 0.1, 0.3], [yes, yes, yes], 0.3),
        ([50.0, 9.0, 0.04], [yes, no, yes], [1.0, 0.1, 1.0], [yes, yes, yes], 0.5),
        ([50.0, 9.0, 9.0], [yes, no, no], [1.0, 0.9, 1e-6], [yes, no, yes], 0.1),
    ]
    variance, is_active, share, is_available, level = (list(column) for column in zip(*nodes, strict=True))
    state = _state_of_ranks(variance, is_active, share)
    settings = RankAdaptation(intercept=-1.0, slope=-0.01, tolerance=0.01)

    def adapted(first):
        return rank.adapt(_Levels(first, *level), state, jnp.asarray(is_available), jnp.asarray(100), settings)

    found, is_taken, has_passed = adapted(0.13)  # below exp(-1 - 0.01 * 100) = 0.135
    assert is_taken
    expected = [[yes, no, yes], [yes, yes, no], [yes, no, yes], [yes, no, no], [yes, no, yes]]
    np.testing.assert_array_equal(found.is_active, expected)
    passed = [[yes, no, yes], [yes, no, no], [yes, no, no], [yes, no, no], [yes, no, no]]
    np.testing.assert_array_equal(has_passed, passed)
    share[0][1] = share[3][2] = 0.04 / 50.0
    np.testing.assert_allclose(np.exp(found.log_ratio), share, rtol=1e-5)
    kept, is_taken, has_passed = adapted(0.14)
    assert not is_taken
    np.testing.assert_array_equal(has_passed, passed)
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_adaptation_steps_that_count():
    """Those of the second half of warm-up; ranks change in all of warm-up, and not after it."""
    problem, state = _setting(np.float32)
    sums = small.sums_of(problem, state)
    state = eqx.tree_at(lambda it: it.log_neg_log_u, state, state.log_neg_log_u.at[0].set(jnp.array([1.0, -20.0, 0.5])))
    always, ranks = RankAdaptation(intercept=0.0, slope=0.0), []
    now = Chain(state, sums, Adaptation(jnp.zeros_like(state.tau_excess), jnp.zeros(())))
    advance = jax.jit(lambda now, index: step(jax.random.key(0), problem, jnp.asarray(5), always, now, index))
    with mock.patch.object(chain, "sweep", lambda key, state, sums, *_: (state, sums)):
        for index in range(8):
            now = advance(now, jnp.asarray(index))
            ranks.append((int(now.adaptation.steps), now.state.is_active[0].tolist()))
    # the second direction is below the tolerance: it returns on trial, and is removed again
    without, on_trial = [True, False, True], [True, True, True]
    expected = [on_trial, without, on_trial, without, *[on_trial] * 4]
    assert ranks == list(zip([0, 0, 0, 1, 2, 2, 2, 2], expected, strict=True))
    share = sums.count[0] / sums.count.sum()
    np.testing.assert_allclose(now.adaptation.included[0], 2 * share * np.array(without), rtol=1e-6)
