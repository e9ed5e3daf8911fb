"""The parameters of one chain, and the sums over each node's rows through which they depend on the data."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Bool, Count, Float, Int
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.candidate_statistics import AnyStatistics
from geode_jax.model.tree import Tree


class PartialState(eqx.Module):
    """The chain's state for rows with missing features: their nodes, and the statistics drawn for them there.

    Rows are in G groups of B places; each sweep redraws one group, number `turn`. Places without a row have node K.
    """

    node: Int[Array, "G B"]
    residual: Float[Array, "G B"]
    squared: Float[Array, "G B d"]
    turn: Int[Array, ""]


class State(eqx.Module):
    """Parameters of the model, each on a scale that keeps its precision.

    `node`: membership z of the complete rows; places without a row have node K. `partial`: the state of rows with
    missing features, None without such rows.
    `logit_stop`, `logit_right`: logits of S and R; logit S is +inf at leaves and absent nodes. `log_neg_log_u`:
    log(-log u); -log u = log(1 + alpha2 / sigma2) is of order 1/delta, below the range of float32 for later directions,
    while delta * -log u stays of order one. `tau_excess`: tau - 1. `log_stop_concentration`: log a_S, constant unless
    it has a prior. `is_active`: directions that are not removed; a removed one has u = 1 and keeps its last values in
    case it returns. `log_ratio`: log of a direction's variance over the node's largest, when it was removed.
    """

    node: Int[Array, "n"]
    logit_stop: Float[Array, "K"]
    logit_right: Float[Array, "K"]
    log_neg_log_u: Float[Array, "K d"]
    tau_excess: Float[Array, "K d"]
    log_sigma2: Float[Array, "S"]
    log_stop_concentration: Float[Array, ""]
    is_active: Bool[Array, "K d"]
    log_ratio: Float[Array, "K d"]
    partial: PartialState | None = None

    @property
    def neg_log_u(self) -> Float[Array, "K d"]:
        """-log u, 0 at removed directions."""
        return jnp.where(self.is_active, jnp.exp(self.log_neg_log_u), 0.0)

    @property
    def log_tau(self) -> Float[Array, "K d"]:
        """Log tau, 0 at removed directions."""
        return jnp.where(self.is_active, jnp.log1p(self.tau_excess), 0.0)

    @property
    def log_delta(self) -> Float[Array, "K d"]:
        """Log of delta, the running product of the active tau's (paper section 2.3)."""
        return running_sum(self.log_tau)


def running_sum(values: Float[Array, "K d"]) -> Float[Array, "K d"]:
    """Cumulative sum of finite numbers along the last axis, as a product with a triangular matrix of ones.

    The compiler fuses ``jnp.cumsum`` into each of its uses and computes it again for each: u took four times as long.
    """
    ones = np.triu(np.ones((values.shape[-1],) * 2, values.dtype))  # a constant: made by JAX, it is made in every sweep
    return jnp.matmul(values, ones, precision=HIGHEST)


class NodeSums(eqx.Module):
    """Sums over the rows of each node: all that the blocks other than membership need."""

    count: Float[Array, "K"]
    residual: Float[Array, "K"]
    squared: Float[Array, "K d"]


def node_sums(state: State, statistics: AnyStatistics) -> NodeSums:
    """Sums over the rows at each node; `statistics` are those of the complete rows."""
    num_nodes = state.logit_stop.shape[0]
    # gather each row's statistics at its node and sum by segment: no one-hot products
    sums = _sums(state.node, *statistics.at(state.node), num_nodes, statistics.row_blocks)
    if state.partial is None:
        return sums
    # the axis of places comes first: it may be sharded over devices, that of groups is not
    node, residual, squared = (
        jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:])
        for leaf in (state.partial.node, state.partial.residual, state.partial.squared)
    )
    return jax.tree.map(jnp.add, sums, _sums(node, residual, squared, num_nodes, statistics.row_blocks))


def _sums(node: Array, residual: Array, squared: Array, num_nodes: int, row_blocks: int) -> NodeSums:
    """Sums by node, without rows at node K. Blocks of rows are summed separately, so that devices can sum their own."""
    num_blocks = math.gcd(node.shape[0], row_blocks)

    def total(values: Array) -> Array:
        blocks = (part.reshape(num_blocks, part.shape[0] // num_blocks, *part.shape[1:]) for part in (values, node))
        return jax.vmap(lambda values, node: jax.ops.segment_sum(values, node, num_nodes))(*blocks).sum(axis=0)

    def apart(residual: Array, squared: Array) -> NodeSums:
        return NodeSums(count=total(jnp.ones_like(residual)), residual=total(residual), squared=total(squared))

    def together(residual: Array, squared: Array) -> NodeSums:
        """A sum of its own takes a GPU three kernels; a CPU would write the columns side by side first."""
        columns = jnp.ones_like(residual)[:, None], residual[:, None], squared
        sums = total(jnp.concatenate(columns, axis=1))
        return NodeSums(count=sums[:, 0], residual=sums[:, 1], squared=sums[:, 2:])

    return lax.platform_dependent(residual, squared, cpu=apart, default=together)


def log_normal_constants(
    neg_log_u: Float[Array, "K d"], log_sigma2: Float[Array, "S"], tree: Tree, num_features: Count
) -> Float[Array, "K"]:
    """``-D/2 log(2 pi sigma2) + 1/2 sum log u``: each node's log density at its own centre."""
    log_sigma2_at_node = log_sigma2[tree.scale]
    log_two_pi = jnp.log(2 * jnp.pi).astype(log_sigma2.dtype)
    return -0.5 * (num_features * (log_two_pi + log_sigma2_at_node) + neg_log_u.sum(axis=-1))


def half_count_and_rate(state: State, sums: NodeSums, tree: Tree) -> tuple[Float[Array, "K"], Float[Array, "K d"]]:
    """``n / 2`` of every node and ``1 + sum Z2 / (2 sigma2)``: the likelihood's part of u's shape, and u's rate."""
    half_precision = 0.5 * jnp.exp(-state.log_sigma2)[tree.scale]
    return 0.5 * sums.count, 1.0 + half_precision[:, None] * sums.squared
