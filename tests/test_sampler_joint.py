"""Joint test: the sweep leaves the joint distribution of parameters and data unchanged (after Geweke 2004).

Many chains start from exact draws of the joint, alternate a sweep with fresh data given the parameters, and must still
follow the joint at the end; the chains are independent, so means of functions and of their products are compared with
fresh draws by plain two-sample z statistics. False alarm: 1e-4 (Bonferroni over all functions and products).
"""

import contextlib
import functools
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from scipy import stats

from geode_jax.gibbs import allocation, noise, scales, shrinkage, weights
from geode_jax.gibbs.sweep import sweep
from geode_jax.math.truncated import log_truncated_gamma
from geode_jax.model import log_joint, sample_prior, simulate
from geode_jax.settings import ExactShrinkage, Prior, PublishedShrinkage

NUM_CHAINS = 12_000
NUM_SWEEPS = 8
LEVEL = 1e-4

_DICTIONARY = small.make_dictionary(jnp.float32)
_ACTIVE = small.active_mask(_DICTIONARY)
INTERNAL = np.flatnonzero(_DICTIONARY.tree.is_internal)
PRESENT = np.flatnonzero(_DICTIONARY.tree.is_present)
DIRECTIONS = tuple(np.argwhere(_ACTIVE).T)


def _functions(problem, state):
    """Smooth functions of every block with light tails, of the memberships, and of the data through the joint."""
    tree = problem.tree
    sums = small.sums_of(problem, state)
    joint = log_joint(state, sums, tree, problem.prior, problem.num_features)
    return jnp.concatenate(
        [
            jnp.clip(state.logit_stop[INTERNAL], -20, 20),
            jnp.clip(state.logit_right[INTERNAL], -20, 20),
            state.log_sigma2,
            state.log_neg_log_u[DIRECTIONS],
            state.log_tau[DIRECTIONS],
            sums.count[PRESENT],
            jnp.log(sums.residual.sum())[None],
            (joint / 10.0)[None],
        ]
    )


@functools.cache
def _z_scores(shrinkage_settings, bug, num_chains):
    dictionary = _DICTIONARY

    def start(key):
        key_state, key_data = jax.random.split(key)
        state = sample_prior(key_state, dictionary.tree, small.PRIOR, _ACTIVE, small.NUM_ROWS, jnp.float32)
        return state, simulate(key_data, dictionary, state)

    def fresh(key):
        state, x = start(key)
        return _functions(small.make_problem(dictionary, x), state)

    def chain(key):
        key_start, key_run = jax.random.split(key)
        state, x = start(key_start)

        def step(carry, key):
            state, x = carry
            key_sweep, key_data = jax.random.split(key)
            problem = small.make_problem(dictionary, x, shrinkage=shrinkage_settings)
            state, _ = sweep(key_sweep, state, small.sums_of(problem, state), problem)
            return (state, simulate(key_data, dictionary, state)), None

        (state, x), _ = jax.lax.scan(step, (state, x), jax.random.split(key_run, NUM_SWEEPS))
        return _functions(small.make_problem(dictionary, x), state)

    with BUGS[bug]() if bug else contextlib.nullcontext():
        after = np.asarray(jax.jit(jax.vmap(chain))(small.keys(5, num_chains)), np.float64)
    before = np.asarray(jax.jit(jax.vmap(fresh))(small.keys(6, num_chains)), np.float64)
    centre, spread = before.mean(axis=0), before.std(axis=0)
    before, after = (before - centre) / spread, (after - centre) / spread
    first, second = np.triu_indices(before.shape[1])
    before, after = (np.hstack([part, part[:, first] * part[:, second]]) for part in (before, after))
    error = np.sqrt((before.var(axis=0) + after.var(axis=0)) / num_chains)
    z = (after.mean(axis=0) - before.mean(axis=0)) / error
    print(bug, np.abs(z).max(), z.size)
    return z, stats.norm.isf(0.5 * LEVEL / z.size)


def test_joint():
    z, limit = _z_scores(ExactShrinkage(), None, NUM_CHAINS)
    assert np.isfinite(z).all()
    assert np.abs(z).max() < limit


def test_published_shrinkage_is_not_a_sampler_of_the_joint():
    z, limit = _z_scores(PublishedShrinkage(), None, NUM_CHAINS)
    assert np.abs(z).max() > 2 * limit


def _drop_plus_one():
    """u with shape delta + n/2."""
    original = scales._gamma_parameters
    return mock.patch.object(scales, "_gamma_parameters", lambda s, n, t, _: original(s, n, t, PublishedShrinkage()))


def _published_tau():
    return mock.patch.object(shrinkage, "draw_exact", shrinkage.draw_published)


def _tau_without_normaliser():
    def correction(delta):
        return -jnp.log(delta), -jnp.ones_like(delta)

    return mock.patch.object(shrinkage, "gamma_correction", correction)


def _forget_noise_prior():
    original = noise.draw
    flat = Prior(noise_shape=1e-3, noise_rate=1e-3)
    return mock.patch.object(noise, "draw", lambda k, s, n, t, _, d: original(k, s, n, t, flat, d))


def _forget_root_visits():
    """S ~ Beta(1 + n, a + v) instead of Beta(1 + n, a + v - n)."""
    original = weights._beta_parameters

    def wrong(sums, tree, prior):
        a, b, right_a, right_b = original(sums, tree, prior)
        return a, b + sums.count, right_a, right_b

    return mock.patch.object(weights, "_beta_parameters", wrong)


def _stale_sums():
    """u from node sums of memberships that have moved on."""
    original = scales.draw

    def stale(key, state, sums, tree, settings):
        return original(key, state, jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), sums), tree, settings)

    return mock.patch.object(scales, "draw", stale)


def _constant_key():
    """sigma2 always draws with the same key."""
    original = noise.draw
    return mock.patch.object(noise, "draw", lambda key, *rest: original(jax.random.key(0), *rest))


def _membership_without_weights():
    original = allocation.node_scores

    def flat(state, statistics, tree, num_features):
        even = eqx.tree_at(lambda it: it.logit_right, state, jnp.zeros_like(state.logit_right))
        return original(even, statistics, tree, num_features)

    return mock.patch.object(allocation, "node_scores", flat)


def _half_quadratic():
    original = scales._gamma_parameters

    def wrong(state, sums, tree, settings):
        shape, rate = original(state, sums, tree, settings)
        return shape, 1.0 + 2.0 * (rate - 1.0)

    return mock.patch.object(scales, "_gamma_parameters", wrong)


BUGS = {
    "u without + 1": _drop_plus_one,
    "published tau": _published_tau,
    "tau without normaliser": _tau_without_normaliser,
    "sigma2 without prior": _forget_noise_prior,
    "S without - n": _forget_root_visits,
    "stale node sums": _stale_sums,
    "constant key": _constant_key,
    "membership ignores R": _membership_without_weights,
    "u without 1/2": _half_quadratic,
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug):
    """Nine planted bugs, about 10 s each (compilation)."""
    z, limit = _z_scores(ExactShrinkage(), bug, NUM_CHAINS)
    assert np.abs(z).max() > limit


def test_prior_u_follows_its_density():
    """The one prior draw with a truncation: u ~ Gamma(delta + 1, 1) on (0, 1)."""
    log_t = log_truncated_gamma(jax.random.key(3), jnp.full(20_000, np.log(4.0)), jnp.ones(20_000))
    u = np.exp(-np.exp(np.asarray(log_t, np.float64)))
    assert stats.kstest(u, lambda v: stats.gamma(4.0).cdf(v) / stats.gamma(4.0).cdf(1.0)).pvalue > LEVEL
