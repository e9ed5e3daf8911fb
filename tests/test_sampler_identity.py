"""Identity test: for every block, the ratio of `log_conditional` at two values is that of `log_joint`.

Deterministic, in float64, residual 1e-10: it cannot raise a false alarm, and a wrong term in either formula fails it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from geode_jax._typing import precision_of
from geode_jax.gibbs import allocation, noise, scales, shrinkage, weights
from geode_jax.model import log_joint, sample_prior, simulate


@pytest.fixture(scope="module")
def setting():
    with precision_of(np.float64):
        dictionary = small.make_dictionary(jnp.float64)
        active = small.active_mask(dictionary)
        one, other = (
            sample_prior(key, dictionary.tree, small.PRIOR, active, small.NUM_ROWS, jnp.float64)
            for key in small.keys(1, 2)
        )
        problem = small.make_problem(dictionary, simulate(jax.random.key(3), dictionary, one))
        yield problem, one, other


def _joint(problem, state):
    return log_joint(state, small.sums_of(problem, state), problem.tree, problem.prior, problem.num_features)


def _stop(problem, state):
    return weights.log_conditional(state, small.sums_of(problem, state), problem.tree, problem.prior)[0]


def _right(problem, state):
    return weights.log_conditional(state, small.sums_of(problem, state), problem.tree, problem.prior)[1]


def _u(problem, state):
    return scales.log_conditional(state, small.sums_of(problem, state), problem.tree).sum()


def _noise(problem, state):
    sums = small.sums_of(problem, state)
    return noise.log_conditional(state, sums, problem.tree, problem.prior, problem.num_features).sum()


def _node(problem, state):
    return allocation.log_conditional(state, problem.statistics, problem.tree, problem.num_features)


BLOCKS = {
    "node": (lambda it: it.node, _node),
    "stop": (lambda it: it.logit_stop, _stop),
    "right": (lambda it: it.logit_right, _right),
    "u": (lambda it: it.log_neg_log_u, _u),
    "noise": (lambda it: it.log_sigma2, _noise),
}


def identity_gap(problem, one, other, name):
    where, log_conditional = BLOCKS[name]
    changed = eqx.tree_at(where, one, where(other))
    return float(
        (_joint(problem, changed) - _joint(problem, one))
        - (log_conditional(problem, changed) - log_conditional(problem, one))
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_identity(setting, name):
    problem, one, other = setting
    where, _ = BLOCKS[name]
    assert not np.array_equal(where(one), where(other))
    assert abs(identity_gap(problem, one, other, name)) < 1e-10 * max(1.0, abs(float(_joint(problem, one))))


def tau_gap(problem, one, other, m):
    """Each tau_m has its own conditional: change one direction of every node at a time."""
    changed = eqx.tree_at(lambda it: it.tau_excess, one, one.tau_excess.at[:, m].set(other.tau_excess[:, m]))
    conditional = [shrinkage.log_conditional(state, problem.prior)[:, m].sum() for state in (changed, one)]
    return float(_joint(problem, changed) - _joint(problem, one) - (conditional[0] - conditional[1]))


@pytest.mark.parametrize("m", range(small.MAX_RANK))
def test_identity_of_tau(setting, m):
    assert abs(tau_gap(*setting, m)) < 1e-10 * max(1.0, abs(float(_joint(setting[0], setting[1]))))


def test_joint_is_a_density_of_the_rows(setting):
    """The likelihood through (E, Z2) equals the normal density with the full covariance matrix."""
    problem, one, _ = setting
    dictionary = small.make_dictionary(jnp.float64)
    x = np.asarray(simulate(jax.random.key(3), dictionary, one))
    total = 0.0
    for row, node in zip(x, np.asarray(one.node), strict=True):
        sigma2 = np.exp(np.asarray(one.log_sigma2))[dictionary.tree.scale[node]]
        basis = np.asarray(dictionary.bases)[node]
        alpha2 = sigma2 * np.expm1(np.asarray(one.neg_log_u)[node])
        covariance = basis @ np.diag(alpha2) @ basis.T + sigma2 * np.eye(small.NUM_FEATURES)
        centred = row - np.asarray(dictionary.centres)[node]
        total -= 0.5 * (centred @ np.linalg.solve(covariance, centred) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    from geode_jax.model import log_likelihood

    found = log_likelihood(one, small.sums_of(problem, one), problem.tree, problem.num_features)
    np.testing.assert_allclose(found, total, rtol=1e-12)
