"""One Gibbs sweep: every block is updated once, given the current values of the others."""

import equinox as eqx
import jax

from geode_jax._typing import KeyArray
from geode_jax.gibbs import membership, missing, noise, shrinkage, signal, tree_weights
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State, node_sums
from geode_jax.settings import DirectMembership, ExactShrinkage


def sweep(key: KeyArray, state: State, sums: NodeSums, problem: Problem) -> tuple[State, NodeSums]:
    """New state and its node sums; `sums` are those of `state`."""
    key_u, key_tail, key_tau, key_noise, key_weights, key_concentration, key_node, key_missing = jax.random.split(
        key, 8
    )
    tree, prior, num_features = problem.tree, problem.prior, problem.num_features

    log_neg_log_u = signal.move(key_u, state, sums, tree, problem.shrinkage)
    state = eqx.tree_at(lambda it: it.log_neg_log_u, state, log_neg_log_u)
    if isinstance(problem.shrinkage, ExactShrinkage):
        renewed = shrinkage.renew(key_tail, state, sums, tree, prior)
        state = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)
        tau_excess = shrinkage.move(key_tau, state, prior)
    else:
        tau_excess = shrinkage.draw_published(key_tau, state, prior)
    log_sigma2 = noise.move(key_noise, state, sums, tree, prior, num_features)
    logit_stop, logit_right = tree_weights.move(key_weights, state, sums, tree, prior)
    state = eqx.tree_at(
        lambda it: (it.tau_excess, it.log_sigma2, it.logit_stop, it.logit_right),
        state,
        (tau_excess, log_sigma2, logit_stop, logit_right),
    )
    log_stop_concentration = tree_weights.move_concentration(key_concentration, state, tree, prior)
    state = eqx.tree_at(lambda it: it.log_stop_concentration, state, log_stop_concentration)
    draw_node = membership.draw if isinstance(problem.membership, DirectMembership) else membership.draw_sliced
    node = draw_node(key_node, state, problem.statistics, tree, num_features)
    state = eqx.tree_at(lambda it: it.node, state, node)
    if problem.partial is not None:
        assert state.partial is not None
        partial = missing.draw(key_missing, state, state.partial, problem.partial, tree)
        state = eqx.tree_at(lambda it: it.partial, state, partial)
    return state, node_sums(state, problem.statistics)
