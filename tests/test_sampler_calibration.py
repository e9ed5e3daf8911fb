"""Simulation-based calibration (Talts et al. 2018): the truth's rank among posterior draws is uniform.

Truth from the prior, data from the truth, then the package's own over-dispersed start, warm-up, and draws far enough
apart to be nearly independent. Unlike the joint test it needs the chain to forget its start and to mix, as a user does.
Chi-square of the ranks of every function of every block; false alarm: 1e-4 in all (Bonferroni).
"""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bugs import BUGS
from scipy import stats

from geode_jax.gibbs.chain import initial_chain, step
from geode_jax.model.joint import sample_prior, simulate
from geode_jax.settings import DirectMembership, ExactShrinkage, PublishedShrinkage, SliceMembership

NUM_REPLICATES = 3000
NUM_WARMUP = 200
NUM_DRAWS = 15
NUM_BETWEEN = 30
LEVEL = 1e-4

_DICTIONARY = small.make_dictionary(jnp.float32)
_ACTIVE = small.active_mask(_DICTIONARY)
_functions = functools.partial(small.free_parameters, _DICTIONARY, _ACTIVE)


@functools.partial(jax.jit, compiler_options=small.OPTIMISED)
@jax.vmap
def _truth(key):
    """(truth, rows, keys for a chain)."""
    key_truth, key_data, *rest = jax.random.split(key, 5)
    truth = sample_prior(key_truth, small.without_rows(_DICTIONARY), _ACTIVE, small.NUM_ROWS)
    return truth, simulate(key_data, _DICTIONARY, truth), rest


@functools.cache
def _truths(num_replicates):
    return _truth(small.keys(9, num_replicates))


@functools.cache
def p_values(shrinkage, membership, bug=None, num_replicates=NUM_REPLICATES):
    """Chi-square p-value of the ranks of every function."""

    def replicate(truth, x, keys):
        key_start, key_run, key_ties = keys
        problem = small.make_problem(_DICTIONARY, x, shrinkage=shrinkage, membership=membership)
        problem = eqx.tree_at(lambda it: it.is_available, problem, _ACTIVE)

        def advance(chain, index):
            return step(jax.random.fold_in(key_run, index), problem, jnp.asarray(0), None, chain, index), None

        def keep(chain, first):
            chain, _ = jax.lax.scan(advance, chain, first + jnp.arange(NUM_BETWEEN))
            return chain, _functions(chain.state, chain.sums)

        chain, _ = jax.lax.scan(advance, initial_chain(key_start, problem), jnp.arange(NUM_WARMUP))
        _, draws = jax.lax.scan(keep, chain, NUM_WARMUP + NUM_BETWEEN * jnp.arange(NUM_DRAWS))
        true = _functions(truth, small.sums_of(problem, truth))
        below, ties = (draws < true).sum(axis=0), (draws == true).sum(axis=0)
        return below + jnp.floor(jax.random.uniform(key_ties, true.shape) * (ties + 1)).astype(int)

    run = jax.jit(jax.vmap(replicate), compiler_options=small.OPTIMISED)
    truths = _truths(num_replicates)  # no bug touches them
    with BUGS[bug]() if bug else contextlib.nullcontext():
        ranks = np.asarray(run(*truths))
    counts = np.stack([np.bincount(column, minlength=NUM_DRAWS + 1) for column in ranks.T])
    return stats.chisquare(counts, axis=1).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("membership", [DirectMembership(), SliceMembership()], ids=["direct", "slice"])
def test_ranks_are_uniform(membership):
    found = p_values(ExactShrinkage(), membership)
    print(found.min(), found.size)
    assert found.min() > LEVEL / found.size


@pytest.mark.slow
def test_published_shrinkage_is_not_calibrated():
    found = p_values(PublishedShrinkage(), DirectMembership(), num_replicates=1000)
    assert found.min() < LEVEL / found.size
