"""Rows with missing features: draws against brute-force imputation in R^D, and the joint test of the whole sweep.

The reference knows nothing of the reduction: dense Gaussians over the observed features give the nodes, the missing
features are drawn from their conditional in R^D, and E and Z^2 follow from the completed row. False alarm: 1e-4 per
test and type.
"""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bugs import MISSING_BUGS
from scipy import stats
from test_sampler_joint import _ACTIVE, _DICTIONARY, FEW_CHAINS, LEVEL, NUM_CHAINS, compare

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import partial_statistics
from geode_jax.forest.partial_statistics import group_rows, reduce_rows
from geode_jax.gibbs import chain as chain_module
from geode_jax.gibbs import missing
from geode_jax.gibbs.chain import Chain, missing_norms, step
from geode_jax.gibbs.sweep import sweep
from geode_jax.model.draw import Adaptation
from geode_jax.model.joint import log_joint, sample_prior, simulate, simulate_rows
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.state import PartialState
from geode_jax.model.statistics import project
from geode_jax.rows.training import Training

NUM_DRAWS = 20_000
NUM_PARTIAL = small.MASK.shape[0]


@functools.cache
def _setting():
    with jax_settings(np.float64):
        dictionary = small.make_dictionary(jnp.float64)
        active = small.active_mask(dictionary)
        state = small.draw_from_prior(jax.random.key(9), small.without_rows(dictionary), active, NUM_PARTIAL)
        # enough noise that a row may belong to several nodes
        state = eqx.tree_at(lambda it: it.log_sigma2, state, state.log_sigma2 + 2.0)
        x = np.asarray(simulate(jax.random.key(4), dictionary, state))
        return dictionary, state, x


def _cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


@functools.cache
def _draws(dtype, bug=None):
    """Nodes, E and Z^2 of every row in many draws."""
    dictionary, state, x = _setting()
    with jax_settings(dtype), MISSING_BUGS[bug]() if bug else contextlib.nullcontext():
        dictionary, state = _cast((dictionary, state), dtype)
        rows = small.make_partial_rows(dictionary, jnp.asarray(np.where(small.MASK, x, 0.0), dtype), num_groups=1)
        group = jax.tree.map(lambda leaf: leaf[0], rows)
        run = jax.jit(jax.vmap(lambda key: missing.draw_group(key, state, group, dictionary.tree)))
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), run(small.keys(8, NUM_DRAWS)))


@functools.cache
def _dense(row):
    """(probability of every node given the observed features, draws of (E, Z^2) at every node), in R^D."""
    dictionary, state, x = _setting()
    rng = np.random.default_rng(row)
    seen = small.MASK[row].astype(bool)
    scale = dictionary.tree.scale
    log_weights = np.asarray(dictionary.tree.log_weights(state.logit_stop, state.logit_right))
    log_density = np.full(scale.size, -np.inf)
    draws = {}
    for node in np.flatnonzero(np.asarray(dictionary.tree.is_present)):
        basis, centre = np.asarray(dictionary.bases[node]), np.asarray(dictionary.centres[node])
        sigma2 = np.exp(float(state.log_sigma2[scale[node]]))
        alpha2 = sigma2 * np.expm1(np.asarray(state.neg_log_u[node]))
        covariance = (basis * alpha2) @ basis.T + sigma2 * np.eye(x.shape[1])
        inner = covariance[np.ix_(seen, seen)]
        log_density[node] = stats.multivariate_normal(centre[seen], inner).logpdf(x[row, seen])
        gain = np.linalg.solve(inner, covariance[np.ix_(seen, ~seen)]).T
        mean = centre[~seen] + gain @ (x[row, seen] - centre[seen])
        left = covariance[np.ix_(~seen, ~seen)] - gain @ covariance[np.ix_(seen, ~seen)]
        filled = np.tile(x[row], (NUM_DRAWS, 1))
        filled[:, ~seen] = rng.multivariate_normal(mean, left, NUM_DRAWS)
        residual, coordinates = project(jnp.asarray(filled), dictionary.centres[node], dictionary.bases[node])
        draws[node] = np.column_stack([residual, np.square(coordinates)])
    probability = np.exp(log_weights + log_density - np.logaddexp.reduce(log_weights + log_density))
    return probability, draws


@functools.cache
def _p_values(dtype, bug=None):
    node, residual, squared = _draws(dtype, bug)
    nodes, statistics = [], []
    with jax_settings(np.float64):
        for row in range(NUM_PARTIAL):
            probability, dense = _dense(row)
            count = np.bincount(node[:, row].astype(int), minlength=probability.size)
            common = probability * NUM_DRAWS > 5
            if common.sum() > 1:
                expected = probability[common] / probability[common].sum() * count[common].sum()
                nodes.append(stats.chisquare(count[common], expected).pvalue)
            for at in np.flatnonzero(probability > 0.05):
                here = node[:, row] == at
                ours = np.column_stack([residual[here, row], squared[here, row]])
                theirs = dense[at]
                # sums see the dependence between the statistics
                for weight in (*np.eye(1 + small.MAX_RANK), np.ones(1 + small.MAX_RANK), np.array([1.0, -1, 2, 3])):
                    if np.ptp(theirs @ weight) > 1e-9:
                        statistics.append(stats.ks_2samp(ours @ weight, theirs @ weight).pvalue)
    return np.array(nodes), np.array(statistics)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_draws_are_those_of_brute_force_imputation(dtype):
    nodes, statistics = _p_values(dtype)
    print(f"{nodes.size} and {statistics.size} tests, smallest p {nodes.min():.2g} and {statistics.min():.2g}")
    assert nodes.size >= 5
    assert statistics.size > 60
    assert nodes.min() * nodes.size > LEVEL
    assert statistics.min() * statistics.size > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("bug", MISSING_BUGS)
def test_planted_bug_is_caught_by_the_draws(bug):
    nodes, statistics = _p_values("float32", bug)
    assert min(nodes.min() * nodes.size, statistics.min() * statistics.size) < LEVEL


def _with_fresh_data(key, state, node, turn=0):
    """(problem, state) where the data are drawn anew given parameters and nodes: complete rows first."""
    num_complete = state.node.size
    everywhere = jnp.concatenate([state.node, node.reshape(-1)])
    sigma = jnp.exp(0.5 * state.log_sigma2)[jnp.asarray(_DICTIONARY.tree.scale)[everywhere]]
    x = simulate_rows(key, _DICTIONARY, everywhere, state.neg_log_u[everywhere], sigma)
    complete, partial = x[:num_complete], x[num_complete:]
    problem = small.make_problem(_DICTIONARY, complete)
    problem = eqx.tree_at(
        lambda it: it.partial,
        problem,
        small.make_partial_rows(_DICTIONARY, partial * small.MASK),
        is_leaf=lambda leaf: leaf is None,
    )
    at = jax.vmap(lambda row, k: project(row[None], _DICTIONARY.centres[k], _DICTIONARY.bases[k]))
    residual, coordinates = at(partial, node.reshape(-1))
    drawn = PartialState(
        node=node,
        residual=residual.reshape(node.shape),
        squared=jnp.square(coordinates).reshape(*node.shape, -1),
        turn=jnp.asarray(turn, jnp.int32),
    )
    return problem, eqx.tree_at(lambda it: it.partial, state, drawn, is_leaf=lambda leaf: leaf is None)


@pytest.mark.slow
def test_norms_drawn_ahead_are_those_of_the_groups_in_turn():
    """From any sweep on the same, as what a sweep draws must not depend on how sweeps are cut into segments."""
    key_start, key_data, key_run = jax.random.split(jax.random.key(3), 3)
    state, node = jax.tree.map(lambda leaf: leaf[0], _start(key_start[None]))
    problem, state = _with_fresh_data(key_data, state, node, turn=1)
    num_missing = np.zeros(problem.partial.num_missing.shape, np.float32)
    num_missing[1] = 40.0 + np.arange(num_missing.shape[1])
    problem = eqx.tree_at(lambda it: it.partial.num_missing, problem, jnp.asarray(num_missing))

    def chain(state):
        tallies = Adaptation(jnp.zeros_like(state.tau_excess), jnp.zeros(()))
        return Chain(state, small.sums_of(problem, state), tallies)

    keys = jax.random.split(key_run, 4000)
    norms = np.asarray(missing_norms(keys, chain(state), problem))
    np.testing.assert_array_equal(norms[1::2], 0.0)
    freedom = num_missing[1] - small.MAX_RANK
    p_values = [stats.kstest(own, stats.chi2(size).cdf).pvalue for own, size in zip(norms[::2].T, freedom, strict=True)]
    assert min(p_values) * len(p_values) > LEVEL
    later = eqx.tree_at(lambda it: it.partial.turn, state, jnp.asarray(0, jnp.int32))
    np.testing.assert_array_equal(missing_norms(keys[1:], chain(later), problem), norms[1:])

    @jax.jit
    def stepped(norms):
        return step(keys[0], problem, jnp.asarray(0), None, chain(state), jnp.asarray(0), norms).state.partial.residual

    alone, given, wrong = map(stepped, (None, *map(jnp.asarray, (norms[0], norms[0] + 1.0))))
    np.testing.assert_allclose(given, alone, rtol=1e-6)
    assert (np.asarray(wrong[1]) > np.asarray(given[1])).all()


@pytest.mark.slow
def test_norms_drawn_in_several_batches_are_the_same(monkeypatch):
    """What is drawn at once bounds the memory only."""
    state, node = jax.tree.map(lambda leaf: leaf[0], _start(jax.random.key(3)[None]))
    problem, state = _with_fresh_data(jax.random.key(4), state, node)
    problem = eqx.tree_at(lambda it: it.partial.num_missing, problem, problem.partial.num_missing + 9.0)
    tallies = Adaptation(jnp.zeros_like(state.tau_excess), jnp.zeros(()))
    chain = Chain(state, small.sums_of(problem, state), tallies)
    keys = jax.random.split(jax.random.key(5), 7)
    at_once = np.asarray(missing_norms(keys, chain, problem))
    assert at_once.min() > 0.0
    monkeypatch.setattr(chain_module, "NORMS_AT_ONCE", 3 * at_once.shape[1])
    np.testing.assert_allclose(missing_norms(keys, chain, problem), at_once, rtol=1e-6)


@functools.partial(jax.jit, compiler_options=small.OPTIMISED)
@jax.vmap
def _start(key):
    """An exact draw of the joint, the nodes of the partial rows apart: (state, nodes)."""
    state = sample_prior(key, small.without_rows(_DICTIONARY), _ACTIVE, 8 + NUM_PARTIAL)
    return eqx.tree_at(lambda it: it.node, state, state.node[:8]), state.node[8:].reshape(2, -1)


def _functions(problem, state):
    sums = small.sums_of(problem, state)
    joint = log_joint(state, sums, problem)
    free = small.free_parameters(_DICTIONARY, _ACTIVE, state, sums)
    return jnp.concatenate([free, jnp.log(sums.residual.sum())[None], (joint / 10.0)[None]])


@functools.cache
def _starts(num_chains):
    """(starts of chains, the chains' keys, functions of other draws of the joint); no bug touches them."""
    key_start, key_run = (jax.vmap(jax.random.split)(small.keys(5, num_chains))[:, part] for part in range(2))
    key_other, key_data = (jax.vmap(jax.random.split)(small.keys(6, num_chains))[:, part] for part in range(2))
    fresh = jax.jit(jax.vmap(lambda key, state, node: _functions(*_with_fresh_data(key, state, node))))
    return _start(key_start), key_run, fresh(key_data, *_start(key_other))


@functools.lru_cache(maxsize=1)
def _program(bug):
    """Functions of the joint at the chains' ends, from their starts and keys.

    Three sweeps after fresh data, four times: the drawn statistics must reach the parameters before they are replaced.
    It is traced, with the bug, when it is first called.
    """

    def chain(state, node, key):
        def one_round(carry, key):
            key_sweeps, key_data = jax.random.split(key)
            problem, state = _with_fresh_data(key_data, *carry)

            def one_sweep(state, key):
                return sweep(key, state, small.sums_of(problem, state), problem)[0], None

            state, _ = jax.lax.scan(one_sweep, state, jax.random.split(key_sweeps, 3))
            bare = eqx.tree_at(lambda it: it.partial, state, None)
            return (bare, state.partial.node, state.partial.turn), _functions(problem, state)

        start = state, node, jnp.zeros((), jnp.int32)
        return jax.lax.scan(one_round, start, jax.random.split(key, 4))[1][-1]

    return jax.jit(jax.vmap(chain), compiler_options=small.OPTIMISED)


@functools.cache
def _joint_z_scores(bug=None, num_chains=NUM_CHAINS):
    (states, nodes), keys, before = _starts(num_chains)
    with MISSING_BUGS[bug]() if bug else contextlib.nullcontext():
        after = small.in_parts(_program(bug), FEW_CHAINS, states, nodes, keys)
    return compare(before, after)


@pytest.mark.slow
def test_joint_with_missing_features():
    z, limit = _joint_z_scores()
    assert np.isfinite(z).all()
    print(f"{z.size} moments, largest |z| {np.abs(z).max():.1f}, limit {limit:.1f}")
    assert np.abs(z).max() < limit


@pytest.mark.slow
# The determinant moves the nodes of a few rows a little: the draws see it, 12,000 chains do not.
@pytest.mark.parametrize("bug", [bug for bug in MISSING_BUGS if bug != "node without determinant"])
def test_planted_bug_is_caught_by_the_joint(bug):
    both = (_joint_z_scores(bug, number) for number in (FEW_CHAINS, NUM_CHAINS))
    assert any(np.abs(z).max() > limit for z, limit in both)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_numbers", [2**22, 30])
@pytest.mark.parametrize(("dtype", "exact", "solved"), [(np.float64, 1e-12, 1e-10), (np.float32, 1e-5, 1e-5)])
def test_reduced_rows_are_those_of_the_observed_features(is_shared, num_numbers, dtype, exact, solved, monkeypatch):
    """Candidates, folds, groups, shared patterns and empty places: everything lands where it belongs.

    Whatever the number of rows that a thread takes at once.
    """
    monkeypatch.setattr(partial_statistics, "_CHUNK_NUMBERS", num_numbers)
    rng = np.random.default_rng(0)
    with jax_settings(dtype):
        dictionaries = [small.make_dictionary(dtype, seed=seed) for seed in (0, 1)]
        num_rows = 23
        if is_shared:
            mask = small.MASK[rng.integers(2, size=num_rows)]
        else:
            mask = np.array([list(f"{i:05b}") for i in range(1, 24)], float)
        folds = rng.integers(2, size=num_rows)
        candidates = np.stack([rng.choice(5, size=3, replace=False) for _ in range(num_rows)])
        x = rng.normal(size=(num_rows, 5)).astype(dtype)
        assert group_rows(mask, folds, 10).rows.shape == (8, 3)
        grouping = group_rows(mask, folds, 4)
        assert grouping.is_shared == is_shared
        centres, bases = (
            np.stack([np.asarray(getattr(d, name)) for d in dictionaries]) for name in ("centres", "bases")
        )
        training = Training(np.where(mask, x, np.finfo(dtype).max), 5, folds, mask.astype(bool))
        rows = PartialRows(**jax.device_put(reduce_rows((centres, bases), training, candidates, grouping)))
        assert {leaf.dtype for leaf in (rows.gram, rows.root, rows.start, rows.residual)} == {np.dtype(dtype)}
        assert (rows.entry is None) == (not is_shared)
        assert sorted(grouping.rows[grouping.rows >= 0]) == list(range(num_rows))
        for group, places in enumerate(grouping.rows):
            one = jax.tree.map(lambda leaf, at=group: leaf[at], rows)
            gram, root = one.at_candidates(one.gram), one.at_candidates(one.root)
            entry_node = one.at_candidates(one.entry_node)
            for place, row in enumerate(places):
                if row < 0:
                    assert (np.asarray(one.node[place]) == 7).all()
                    continue
                np.testing.assert_array_equal(one.node[place], candidates[row])
                np.testing.assert_array_equal(entry_node[place], candidates[row])
                assert one.num_observed[place] == mask[row].sum() == 5 - one.num_missing[place]
                seen = mask[row].astype(bool)
                for slot, node in enumerate(candidates[row]):
                    basis = bases[folds[row], node]
                    deviation = (x[row] - centres[folds[row], node])[seen]
                    error = deviation - basis[seen] @ np.asarray(one.start[place, slot])
                    np.testing.assert_allclose(gram[place, slot], basis[seen].T @ basis[seen], atol=exact)
                    here = np.asarray(root[place, slot])
                    np.testing.assert_allclose(here @ here.T, basis[~seen].T @ basis[~seen], atol=10 * solved)
                    # as many columns as features are missing, at most, and nothing along directions that are absent
                    assert (here[:, (~seen).sum() :] == 0).all()
                    assert (here[~np.any(basis != 0, axis=0)] == 0).all()
                    np.testing.assert_allclose(one.cross[place, slot], basis[seen].T @ deviation, atol=exact)
                    np.testing.assert_allclose(one.remainder[place, slot], basis[seen].T @ error, atol=solved)
                    np.testing.assert_allclose(one.residual[place, slot], error @ error, atol=solved)
