"""Joint test: the sweep leaves the joint distribution of parameters and data unchanged (after Geweke 2004).

Many chains start from exact draws of the joint, alternate a sweep with fresh data given the parameters, and must still
follow the joint at the end; the chains are independent, so means of functions and of their products are compared with
fresh draws by plain two-sample z statistics. False alarm: 1e-4 (Bonferroni over all functions and products).
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bugs import BUGS, UNSEEN_BY_JOINT, membership_for
from scipy import stats

from geode_jax.gibbs.sweep import sweep
from geode_jax.math.truncated import draw_log_truncated_gamma
from geode_jax.model.joint import log_joint, sample_prior, simulate
from geode_jax.settings import DirectMembership, ExactShrinkage, PublishedShrinkage, SliceMembership

NUM_CHAINS = 12_000
# Chains run at once, by one program. These show most planted bugs; where they do not, all chains are run.
FEW_CHAINS = 4_000
NUM_SWEEPS = 8
LEVEL = 1e-4

_DICTIONARY = small.make_dictionary(jnp.float32)
_ACTIVE = small.active_mask(_DICTIONARY)


@functools.partial(jax.jit, compiler_options=small.OPTIMISED)
@jax.vmap
def _start(key):
    """An exact draw of the joint: (state, rows)."""
    key_state, key_data = jax.random.split(key)
    state = sample_prior(key_state, small.without_rows(_DICTIONARY), _ACTIVE, small.NUM_ROWS)
    return state, simulate(key_data, _DICTIONARY, state)


@jax.jit
@jax.vmap
def _functions(state, x):
    """Functions of every block, of the memberships, and of the data through the joint."""
    problem = small.make_problem(_DICTIONARY, x)
    sums = small.sums_of(problem, state)
    joint = log_joint(state, sums, problem)
    return jnp.concatenate(
        [
            small.free_parameters(_DICTIONARY, _ACTIVE, state, sums),
            jnp.log(sums.residual.sum())[None],
            (joint / 10.0)[None],
        ]
    )


@functools.cache
def _starts(num_chains):
    """(draws of the joint to start chains from, the chains' keys, functions of other draws); no bug touches them."""
    key_start, key_run = (jax.vmap(jax.random.split)(small.keys(5, num_chains))[:, part] for part in range(2))
    return _start(key_start), key_run, _functions(*_start(small.keys(6, num_chains)))


@functools.lru_cache(maxsize=1)
def _program(shrinkage_settings, membership, bug):
    """Chains' ends from their starts and keys; it is traced, with the bug, when it is first called."""

    def chain(state, x, key):
        def step(carry, key):
            state, x = carry
            key_sweep, key_data = jax.random.split(key)
            problem = small.make_problem(_DICTIONARY, x, shrinkage=shrinkage_settings, membership=membership)
            state, _ = sweep(key_sweep, state, small.sums_of(problem, state), problem)
            return (state, simulate(key_data, _DICTIONARY, state)), None

        return jax.lax.scan(step, (state, x), jax.random.split(key, NUM_SWEEPS))[0]

    return jax.jit(jax.vmap(chain), compiler_options=small.OPTIMISED)


@functools.cache
def z_scores(shrinkage_settings, membership, bug=None, num_chains=NUM_CHAINS):
    """(z statistics of every function and product, the limit for the largest of them)."""
    (starts, x), keys, before = _starts(num_chains)
    run = _program(shrinkage_settings, membership, bug)
    with BUGS[bug]() if bug else contextlib.nullcontext():
        after = small.in_parts(run, FEW_CHAINS, starts, x, keys)
    return compare(before, _functions(*after))


def compare(before, after):
    """(z statistics of the means of all functions and their products, the limit for the largest of them)."""
    before, after = (np.asarray(part, np.float64) for part in (before, after))
    centre, spread = before.mean(axis=0), before.std(axis=0)
    (mean_before, variance_before), (mean_after, variance_after) = (
        _moments((part - centre) / spread) for part in (before, after)
    )
    z = (mean_after - mean_before) / np.sqrt((variance_before + variance_after) / len(before))
    return z, stats.norm.isf(0.5 * LEVEL / z.size)


def _moments(values):
    """Means of all columns and of their products, and the variances, by products of matrices."""
    pairs = np.triu_indices(values.shape[1])

    def means(values):
        return np.concatenate([values.mean(axis=0), (values.T @ values / len(values))[pairs]])

    found = means(values)
    return found, means(np.square(values)) - np.square(found)


@pytest.mark.parametrize(
    "membership",
    [
        pytest.param(DirectMembership(), id="direct"),
        pytest.param(SliceMembership(), id="slice", marks=pytest.mark.slow),
    ],
)
def test_joint(membership):
    z, limit = z_scores(ExactShrinkage(), membership)
    assert np.isfinite(z).all()
    print(f"{z.size} moments, largest |z| {np.abs(z).max():.1f}, limit {limit:.1f}")
    assert np.abs(z).max() < limit


@pytest.mark.slow
def test_published_shrinkage_is_not_a_sampler_of_the_joint():
    z, limit = z_scores(PublishedShrinkage(), DirectMembership())
    assert np.abs(z).max() > 2 * limit


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in UNSEEN_BY_JOINT])
def test_planted_bug_is_caught(bug):
    both = (z_scores(ExactShrinkage(), membership_for(bug), bug, number) for number in (FEW_CHAINS, NUM_CHAINS))
    assert any(np.abs(z).max() > limit for z, limit in both)


def test_prior_u_follows_its_density():
    """The one prior draw with a truncation: u ~ Gamma(delta + 1, 1) on (0, 1)."""
    log_t = draw_log_truncated_gamma(jax.random.key(3), jnp.full(20_000, np.log(4.0)), jnp.ones(20_000))
    u = np.exp(-np.exp(np.asarray(log_t, np.float64)))
    assert stats.kstest(u, lambda v: stats.gamma(4.0).cdf(v) / stats.gamma(4.0).cdf(1.0)).pvalue > LEVEL
