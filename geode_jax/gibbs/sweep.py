"""One Gibbs sweep: every block is updated once, given the current values of the others."""

import equinox as eqx
import jax

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.gibbs import membership, missing, noise, shrinkage, signal, tree_weights
from geode_jax.math.log_concave import num_lanes
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State, node_sums
from geode_jax.settings import DirectMembership, ExactShrinkage


def node_uniforms(key: KeyArray, state: State) -> Uniforms:
    """As many as the updates of a sweep take for the nodes, by the exact sampler with a learned concentration."""
    num_nodes, rank = state.log_neg_log_u.shape
    signal_and_tau = 2 * num_lanes(num_nodes * rank) + 4 * num_lanes(num_nodes * (rank // 2 + 1))
    renewal = num_nodes * (rank + 2)
    noise_and_weights = 2 * (num_lanes(state.log_sigma2.size) + num_lanes(2 * num_nodes) + num_lanes(1))
    return Uniforms(key, signal_and_tau + renewal + noise_and_weights, state.log_sigma2.dtype)


def sweep_keys(key: KeyArray) -> KeyArray:
    """For the nodes, for the complete rows, and for the rows with missing features."""
    return jax.random.split(key, 3)


def sweep(
    key: KeyArray, state: State, sums: NodeSums, problem: Problem, norms: Float[Array, "B"] | None = None
) -> tuple[State, NodeSums]:
    """New state and its node sums; `sums` are those of `state`.

    `norms`: as in :func:`geode_jax.gibbs.missing.draw_group`.
    """
    key_nodes, key_rows, key_missing = sweep_keys(key)
    tree, prior, num_features = problem.tree, problem.prior, problem.num_features
    uniforms = node_uniforms(key_nodes, state)

    with_borrowed = problem.borrowed.added_to(sums, state.log_sigma2, tree)
    log_neg_log_u = signal.move(uniforms, state, with_borrowed, tree, problem.shrinkage)
    state = eqx.tree_at(lambda it: it.log_neg_log_u, state, log_neg_log_u)
    if isinstance(problem.shrinkage, ExactShrinkage):
        renewed = shrinkage.renew(uniforms, state, with_borrowed, tree, prior)
        state = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)
        tau_excess = shrinkage.move(uniforms, state, prior)
    else:
        tau_excess = shrinkage.draw_published(uniforms, state, prior)
    log_sigma2 = noise.move(uniforms, state, sums, problem)
    logit_stop, logit_right = tree_weights.move(uniforms, state, sums, tree, prior)
    state = eqx.tree_at(
        lambda it: (it.tau_excess, it.log_sigma2, it.logit_stop, it.logit_right),
        state,
        (tau_excess, log_sigma2, logit_stop, logit_right),
    )
    log_stop_concentration = tree_weights.move_concentration(uniforms, state, tree, prior)
    state = eqx.tree_at(lambda it: it.log_stop_concentration, state, log_stop_concentration)
    draw_node = membership.draw if isinstance(problem.membership, DirectMembership) else membership.draw_sliced
    node = draw_node(key_rows, state, problem.statistics, tree, num_features)
    state = eqx.tree_at(lambda it: it.node, state, node)
    if problem.partial is not None:
        assert state.partial is not None
        partial = missing.draw(key_missing, state, state.partial, problem.partial, tree, norms)
        state = eqx.tree_at(lambda it: it.partial, state, partial)
    return state, node_sums(state, problem.statistics)
