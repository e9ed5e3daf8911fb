"""Membership of the rows (paper step 1): z given everything else, directly or by slices.

Slices (Canale & Dunson; the paper's section 2.2): with Pi_s the total weight of scale s, a row at scale s draws
w ~ U(0, Pi_s); its new node k has probability proportional to ``1(Pi_s(k) > w) pi_k / Pi_s(k) N(x | k)``. The joint of
(z, w) has the conditional of z as its marginal.
"""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Count, Float, Int, KeyArray
from geode_jax.math.row_uniforms import uniforms_of_rows
from geode_jax.model.candidate_statistics import AnyStatistics
from geode_jax.model.state import State, log_normal_constants
from geode_jax.model.statistics import ROW_BLOCKS
from geode_jax.model.tree import Tree

# A chunk has at least 2^(CHUNK_BITS - 1) and less than 2^CHUNK_BITS rows (all rows, if these are fewer).
CHUNK_BITS = 13
# Up to this many nodes a draw on a CPU is unrolled over the nodes: the compiler fuses it into one loop, which reads the
# scores once (6000 to 60,000 rows, 63 and 127 nodes: a sweep takes a seventh less). With 255 nodes that is slower than
# several passes over all nodes, and slower to compile. For a GPU the unrolled draw takes minutes to compile.
FEW_NODES = 128


def node_scores(state: State, statistics: AnyStatistics, tree: Tree, num_features: Count) -> Float[Array, "M n"]:
    """``log pi_k + log N(x_i | k)`` at all nodes, or at each row's candidates; -inf at absent nodes."""
    neg_log_u = state.neg_log_u
    constants = log_normal_constants(neg_log_u, state.log_sigma2, tree, num_features)
    constants = constants + tree.log_weights(state.logit_stop, state.logit_right)
    half_precision = 0.5 * jnp.exp(-state.log_sigma2)[tree.scale]
    return statistics.scores(constants, half_precision, jnp.exp(-neg_log_u))


def draw(key: KeyArray, state: State, statistics: AnyStatistics, tree: Tree, num_features: Count) -> Int[Array, "n"]:
    """New memberships from their conditionals over all nodes, or over each row's candidates."""
    scores = node_scores(state, statistics, tree, num_features)
    slot = _draw_from(_uniforms(key, statistics), scores, statistics.row_blocks)
    return jnp.where(statistics.is_row, statistics.node_at(slot), tree.num_nodes)


def draw_sliced(
    key: KeyArray, state: State, statistics: AnyStatistics, tree: Tree, num_features: Count
) -> Int[Array, "n"]:
    """New memberships by the multiscale slice sampler."""
    key_slice, key_node = jax.random.split(key)
    scores = node_scores(state, statistics, tree, num_features)
    log_scale_weights = tree.log_sum_over_scales(tree.log_weights(state.logit_stop, state.logit_right))
    scale = jnp.asarray(tree.scale)
    log_slice = _log_slices(_uniforms(key_slice, statistics), log_scale_weights[scale[state.node]])
    at_node = statistics.of_nodes(jnp.where(tree.is_present, log_scale_weights[scale], 0.0))
    # `>=`, not `>`: the logarithm of a uniform near 1 may be lost in the sum, and a row's own scale must stay open.
    is_open = at_node >= log_slice
    uniform = _uniforms(key_node, statistics)
    slot = _draw_from(uniform, jnp.where(is_open, scores - at_node, -jnp.inf), statistics.row_blocks)
    return jnp.where(statistics.is_row, statistics.node_at(slot), tree.num_nodes)


def _uniforms(key: KeyArray, statistics: AnyStatistics) -> Float[Array, "n"]:
    """One uniform variable per row."""
    row, dtype = statistics.row, statistics.residual.dtype
    if row is None:
        return jax.random.uniform(key, statistics.is_row.shape, dtype)
    return uniforms_of_rows(key, row, 1, dtype)[:, 0]


def _log_slices(uniform: Float[Array, "n"], log_weight: Float[Array, "n"]) -> Float[Array, "n"]:
    """Log of a uniform variable below the weight of each row's scale."""
    return log_weight + jnp.log(uniform)


def _draw_from(
    uniform: Float[Array, "n"], scores: Float[Array, "K n"], row_blocks: int = ROW_BLOCKS
) -> Int[Array, "n"]:
    """Categorical draws from a uniform variable per row by the inverse CDF.

    Rows are taken in contiguous chunks: otherwise reductions over nodes would stride through all of memory (on two
    cores, with 60,000 rows, a maximum over 63 nodes took 7 ms, as long as the scores).
    """
    num_nodes, num_rows = scores.shape
    num_chunks = 2 ** max(0, num_rows.bit_length() - CHUNK_BITS)
    if num_chunks > 1 and ROW_BLOCKS % row_blocks != 0:  # each chunk on one device
        per_block = num_rows // row_blocks
        most = -(-num_chunks // row_blocks)
        num_chunks = row_blocks * next(number for number in range(most, 0, -1) if per_block % number == 0)
    if num_rows % num_chunks != 0:
        return _draw_chunk(uniform, scores)
    chunks = jnp.moveaxis(scores.reshape(num_nodes, num_chunks, -1), 1, 0)
    return jax.vmap(_draw_chunk)(uniform.reshape(num_chunks, -1), chunks).reshape(num_rows)


def _draw_chunk(uniform: Float[Array, "n"], scores: Float[Array, "K n"]) -> Int[Array, "n"]:
    """Draws for one chunk by the inverse CDF over the first axis, in the way of the platform that runs it."""
    if scores.shape[0] > FEW_NODES:
        return _draw_by_blocks(uniform, scores)
    return lax.platform_dependent(uniform, scores, cpu=_draw_node_by_node, default=_draw_by_blocks)


def _draw_node_by_node(uniform: Float[Array, "n"], scores: Float[Array, "K n"]) -> Int[Array, "n"]:
    """The inverse CDF over the first axis, unrolled over the nodes."""
    largest = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(of_node - largest) for of_node in scores]
    start = jnp.zeros_like(largest)
    return _last_reached(weights, start, uniform * sum(weights, start=start))[0]


def _draw_by_blocks(uniform: Float[Array, "n"], scores: Float[Array, "K n"]) -> Int[Array, "n"]:
    """The inverse CDF over the first axis in two steps: first a block of nodes, then a node in it.

    A running sum over all nodes at once would take several passes over (K, n) numbers, longer than the scores take.
    """
    num_nodes, num_rows = scores.shape
    size = math.isqrt(num_nodes - 1) + 1
    weights = jnp.exp(scores - scores.max(axis=0))
    num_blocks = -(-num_nodes // size)
    blocks = jnp.pad(weights, ((0, num_blocks * size - num_nodes), (0, 0))).reshape(num_blocks, size, num_rows)
    sums = blocks.sum(axis=1)
    start = jnp.zeros(num_rows, scores.dtype)
    level = uniform * sum(sums, start=start)
    block, before = _last_reached(sums, start, level)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    return block * size + _last_reached(inside, before, level)[0]


def _last_reached(
    weights: Iterable[Float[Array, "n"]], start: Array, level: Array
) -> tuple[Int[Array, "n"], Float[Array, "n"]]:
    """The last index of positive weight before which the running sum is at most `level`, and that sum.

    So rounding never selects an index of zero weight, such as an absent node.
    """
    place, before, running = jnp.zeros(start.shape, jnp.int32), start, start
    for number, weight in enumerate(weights):
        is_reached = (running <= level) & (weight > 0.0)
        place = jnp.where(is_reached, number, place)
        before = jnp.where(is_reached, running, before)
        running = running + weight
    return place, before


def log_conditional(state: State, statistics: AnyStatistics, tree: Tree, num_features: Count) -> Float[Array, ""]:
    """Log probability of the memberships given the rest, summed over rows."""
    log_probability = jax.nn.log_softmax(node_scores(state, statistics, tree, num_features), axis=0)
    is_own = statistics.of_nodes(jnp.arange(tree.num_nodes)) == state.node
    return jnp.sum(log_probability, where=is_own & statistics.is_row)
