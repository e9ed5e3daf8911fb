"""Identity test: for every block, the ratio of `log_conditional` at two values is that of `log_joint`.

Deterministic, in float64, residual 1e-10: it cannot raise a false alarm, and a wrong term in either formula fails it.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bugs import BUGS, caught_by

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.gibbs import membership, noise, shrinkage, signal, tree_weights
from geode_jax.model.joint import log_joint, log_likelihood, simulate

TOLERANCE = 1e-10


@functools.cache
def _setting():
    with jax_settings(np.float64):
        dictionary = small.make_dictionary(jnp.float64)
        active = small.active_mask(dictionary)
        one, other = (
            small.draw_from_prior(key, small.without_rows(dictionary), active, small.NUM_ROWS)
            for key in small.keys(1, 2)
        )
        problem = small.make_problem(dictionary, simulate(jax.random.key(3), dictionary, one))
        return problem, one, other


def _joint(problem, state):
    return log_joint(state, small.sums_of(problem, state), problem)


def _stop(problem, state):
    return tree_weights.log_conditional(state, small.sums_of(problem, state), problem.tree, problem.prior)[0]


def _right(problem, state):
    return tree_weights.log_conditional(state, small.sums_of(problem, state), problem.tree, problem.prior)[1]


def _u(problem, state):
    return signal.log_conditional(state, _with_borrowed(problem, state), problem.tree).sum()


def _with_borrowed(problem, state):
    return problem.borrowed.added_to(small.sums_of(problem, state), state.log_sigma2, problem.tree)


def _noise(problem, state):
    return noise.log_conditional(state, small.sums_of(problem, state), problem).sum()


def _node(problem, state):
    return membership.log_conditional(state, problem.statistics, problem.tree, problem.num_features)


def _concentration(problem, state):
    return tree_weights.log_conditional_of_concentration(state, problem.tree, problem.prior)


BLOCKS = {
    "node": (lambda it: it.node, _node),
    "stop": (lambda it: it.logit_stop, _stop),
    "right": (lambda it: it.logit_right, _right),
    "u": (lambda it: it.log_neg_log_u, _u),
    "noise": (lambda it: it.log_sigma2, _noise),
    "concentration": (lambda it: it.log_stop_concentration, _concentration),
}


def _gap(problem, one, other, name):
    if isinstance(name, int):
        return _delta_gap(problem, one, other, name)
    if name == "renewal":
        return _renewal_gap(problem, one, other)
    where, log_conditional = BLOCKS[name]
    changed = eqx.tree_at(where, one, where(other))
    return float(
        (_joint(problem, changed) - _joint(problem, one))
        - (log_conditional(problem, changed) - log_conditional(problem, one))
    )


def _delta_gap(problem, one, other, m):
    """Each delta_m has its own conditional: change one direction of every node, and the next tau against it."""
    active, log_tau = np.asarray(one.is_active), np.array(one.log_tau)
    for k in np.flatnonzero(active[:, m]):
        following = [n for n in range(m + 1, active.shape[1]) if active[k, n]]
        if following:
            span = log_tau[k, m] + log_tau[k, following[0]]
            log_tau[k, m], log_tau[k, following[0]] = 0.37 * span, 0.63 * span
        else:
            log_tau[k, m] = other.log_tau[k, m]
    moved = jnp.where(one.is_active, jnp.expm1(jnp.asarray(log_tau)), one.tau_excess)
    changed = eqx.tree_at(lambda it: it.tau_excess, one, moved)
    conditional = [shrinkage.log_conditional(state, problem.prior)[:, m].sum() for state in (changed, one)]
    return float(_joint(problem, changed) - _joint(problem, one) - (conditional[0] - conditional[1]))


def _renewal_gap(problem, one, other):
    """Hastings' ratio is that of the joint, less that of the tau's proposals, with -log u scaled against delta."""
    cut = np.arange(one.is_active.shape[0])[:, None] % small.MAX_RANK
    is_renewed = one.is_active & (np.arange(small.MAX_RANK) >= cut)
    log_neg_log_u, tau_excess, log_ratio = shrinkage._renewal(
        one, is_renewed, other.tau_excess, _with_borrowed(problem, one), problem.tree
    )
    changed = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), one, (log_neg_log_u, tau_excess))
    expected = _joint(problem, changed) - _joint(problem, one)
    expected += problem.prior.tau_rate * jnp.sum(tau_excess - one.tau_excess, where=is_renewed)
    # from u to the log of -log u, and that by the change of log delta
    for state, sign in ((changed, 1.0), (one, -1.0)):
        expected += sign * jnp.sum(-state.neg_log_u + state.log_neg_log_u, where=is_renewed)
    return float(log_ratio.sum() - expected)


def relative_gap(name):
    """Gap of one block (or of delta_m, for a number m) relative to the log joint; non-finite counts as infinite."""
    with jax_settings(np.float64):
        problem, one, other = _setting()
        gap = abs(_gap(problem, one, other, name)) / max(1.0, abs(float(_joint(problem, one))))
    return gap if np.isfinite(gap) else np.inf


@pytest.mark.parametrize("name", [*BLOCKS, "renewal", *range(small.MAX_RANK)])
def test_identity(name):
    assert relative_gap(name) < TOLERANCE


@pytest.mark.parametrize(("bug", "block"), caught_by("identity"))
def test_planted_bug_is_caught(bug, block):
    with BUGS[bug]():
        assert relative_gap(block) > 100 * TOLERANCE


def test_blocks_were_changed():
    _, one, other = _setting()
    for where, _ in BLOCKS.values():
        assert not np.array_equal(where(one), where(other))


def test_identity_with_given_concentration():
    """S at another a_S than 1, without a prior on it."""
    with jax_settings(np.float64):
        problem, one, other = _setting()
        given = dataclasses.replace(problem, prior=dataclasses.replace(small.PRIOR, stop_concentration=2.5))
        one, other = (eqx.tree_at(lambda it: it.log_stop_concentration, state, jnp.log(2.5)) for state in (one, other))
        assert abs(_gap(given, one, other, "stop")) < TOLERANCE * max(1.0, abs(float(_joint(given, one))))


def test_joint_is_a_density_of_the_rows():
    """The likelihood through (E, Z2) equals the normal density with the full covariance matrix."""
    with jax_settings(np.float64):
        _check_density(*_setting()[:2])


def _check_density(problem, one):
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
    found = log_likelihood(one, small.sums_of(problem, one), problem.tree, problem.num_features)
    np.testing.assert_allclose(found, total, rtol=1e-12)
