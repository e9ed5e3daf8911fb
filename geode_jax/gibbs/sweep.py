"""One Gibbs sweep: every block once, each given the newest values of the others."""

import equinox as eqx
import jax

from geode_jax._typing import Array, Count, KeyArray
from geode_jax.candidates import AnyStatistics
from geode_jax.gibbs import allocation, missing, noise, scales, shrinkage, weights
from geode_jax.partial_rows import PartialRows
from geode_jax.settings import DirectMembership, ExactShrinkage, Prior, PublishedShrinkage, SliceMembership
from geode_jax.state import NodeSums, State, node_sums
from geode_jax.tree import Tree


class Problem(eqx.Module):
    """What stays fixed during sampling: the tree, the rows' statistics, and the model's constants.

    `statistics` are those of the complete rows, `partial` those of rows with missing features (None without such rows).
    """

    tree: Tree
    statistics: AnyStatistics
    partial: PartialRows | None
    is_available: Array
    num_features: Count
    prior: Prior = eqx.field(static=True)
    shrinkage: ExactShrinkage | PublishedShrinkage = eqx.field(static=True)
    membership: DirectMembership | SliceMembership = eqx.field(static=True)


def sweep(key: KeyArray, state: State, sums: NodeSums, problem: Problem) -> tuple[State, NodeSums]:
    """New state and its node sums; `sums` are those of `state`."""
    key_u, key_tail, key_tau, key_noise, key_weights, key_concentration, key_node, key_missing = jax.random.split(
        key, 8
    )
    tree, prior, num_features = problem.tree, problem.prior, problem.num_features

    log_neg_log_u = scales.move(key_u, state, sums, tree, problem.shrinkage)
    state = eqx.tree_at(lambda it: it.log_neg_log_u, state, log_neg_log_u)
    if isinstance(problem.shrinkage, ExactShrinkage):
        renewed = shrinkage.renew(key_tail, state, sums, tree, prior)
        state = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)
        tau_excess = shrinkage.move(key_tau, state, prior)
    else:
        tau_excess = shrinkage.draw_published(key_tau, state, prior)
    log_sigma2 = noise.move(key_noise, state, sums, tree, prior, num_features)
    logit_stop, logit_right = weights.move(key_weights, state, sums, tree, prior)
    state = eqx.tree_at(
        lambda it: (it.tau_excess, it.log_sigma2, it.logit_stop, it.logit_right),
        state,
        (tau_excess, log_sigma2, logit_stop, logit_right),
    )
    log_stop_concentration = weights.move_concentration(key_concentration, state, tree, prior)
    state = eqx.tree_at(lambda it: it.log_stop_concentration, state, log_stop_concentration)
    draw_node = allocation.draw if isinstance(problem.membership, DirectMembership) else allocation.draw_sliced
    node = draw_node(key_node, state, problem.statistics, tree, num_features)
    state = eqx.tree_at(lambda it: it.node, state, node)
    if problem.partial is not None:
        assert state.partial is not None
        partial = missing.draw(key_missing, state, state.partial, problem.partial, tree)
        state = eqx.tree_at(lambda it: it.partial, state, partial)
    return state, node_sums(state, problem.statistics)
