"""Rows with missing features: node and statistics given the observed part, at a cost that does not depend on D.

Membership has the missing part integrated out (the paper's A2, with the squared norm). Given its node k, the row's
(E, Z^2) there are drawn directly, as if the missing features had been drawn in R^D and reduced (notebooks/model.md):

    eta | y_O ~ N(eta*, sigma2 V),   v = Phi_M'eps / sigma ~ N(0, L L') with L L' = Phi_M'Phi_M = H,
    Z = Phi_O'(y_O - mu_O) + H eta + sigma v,   E = ||e||^2 - ||Phi'e||^2,   e = (y_O - mu_O - Phi_O eta, sigma eps).

The node and the statistics are drawn jointly given the parameters. Each sweep redraws one group of rows, in turn; the
other groups keep their values, so that every step leaves the joint distribution invariant.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Count, Float, Int, KeyArray
from geode_jax.math.lowrank import HIGHEST, Latent, latent_from, log_marginal, posterior_system
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.state import PartialState, State
from geode_jax.model.tree import Tree


class Scored(eqx.Module):
    """A group's candidates under the current parameters."""

    score: Float[Array, "B M"]
    latent: Latent
    amplitude: Float[Array, "B M d"]
    factor: Float[Array, "B M d d"]


def score(state: State, group: PartialRows, tree: Tree) -> Scored:
    """``log pi_k + log N(y_O | k)`` of every row of a group (no axis G) at its candidates; -inf at empty places."""
    neg_log_u = state.neg_log_u
    # one factor for all rows that share a matrix
    system = posterior_system(group.gram, neg_log_u[group.entry_node])
    amplitude, factor = (group.at_candidates(leaf) for leaf in system)
    latent = latent_from(amplitude, factor, group.cross)
    log_sigma2 = state.log_sigma2[tree.scale][group.node]
    observed = group.observed(group.at_candidates(group.gram))
    log_density = log_marginal(observed, latent, neg_log_u[group.node], log_sigma2)
    log_weights = tree.log_weights(state.logit_stop, state.logit_right)
    is_candidate = group.node < tree.num_nodes
    return Scored(jnp.where(is_candidate, log_weights[group.node] + log_density, -jnp.inf), latent, amplitude, factor)


def draw(
    key: KeyArray,
    state: State,
    partial: PartialState,
    rows: PartialRows,
    tree: Tree,
    norms: Float[Array, "B"] | None = None,
) -> PartialState:
    """Redraw the nodes and statistics of group number `turn`, and advance `turn`; `norms` as in :func:`draw_group`."""
    group = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, partial.turn, keepdims=False), rows)
    node, residual, squared = draw_group(key, state, group, tree, norms)
    return PartialState(
        node=partial.node.at[partial.turn].set(node),
        residual=partial.residual.at[partial.turn].set(residual),
        squared=partial.squared.at[partial.turn].set(squared),
        turn=(partial.turn + 1) % partial.node.shape[0],
    )


def draw_group(
    key: KeyArray, state: State, group: PartialRows, tree: Tree, norms: Float[Array, "B"] | None = None
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B d"]]:
    """Nodes, E and Z^2 of the rows of one group (no axis G).

    `norms`: those of :func:`draw_norms` for the same key and the group's rows, where they were drawn before.
    """
    key_node, key_eta, key_root, _ = _group_keys(key)
    scored = score(state, group, tree)
    slot = _draw_slot(key_node, scored.score)

    def chosen(values: Array) -> Array:
        return jax.vmap(lambda row, at: row[at])(values, slot)

    node = chosen(group.node)
    sigma = jnp.exp(0.5 * state.log_sigma2)[tree.scale][node][:, None]
    normal = jax.random.normal(key_eta, (*slot.shape, group.cross.shape[-1]), sigma.dtype)
    # V = a M^{-1} a with M = (factor)(factor)'
    half = lax.linalg.triangular_solve(
        chosen(scored.factor), normal[..., None], left_side=True, lower=True, transpose_a=True
    )[..., 0]
    eta = chosen(scored.latent.mean) + sigma * chosen(scored.amplitude) * half
    if norms is None:
        norms = draw_norms(key, group.num_missing, group.cross.shape[-1])
    # the missing noise in units of sigma, in the columns of the root
    w = jax.random.normal(key_root, normal.shape, normal.dtype)
    w = jnp.where(jnp.arange(w.shape[1]) < group.num_missing[:, None], w, 0.0)
    assert group.root is not None
    gram, root = (chosen(group.at_candidates(table)) for table in (group.gram, group.root))
    noise = sigma * _times(root, w)

    off = chosen(group.start) - eta
    bend = _times(gram, off)
    remainder = chosen(group.remainder)
    inherited = _times(root, jnp.einsum("bij,bi->bj", root, eta, precision=HIGHEST))
    coordinates = chosen(group.cross) + inherited + noise
    along = remainder + bend + noise  # Phi'e
    seen = chosen(group.residual) + jnp.sum(off * (2.0 * remainder + bend), axis=-1)  # ||e_O||^2
    unseen = jnp.square(sigma[:, 0]) * (jnp.square(w).sum(axis=-1) + norms)
    residual = jnp.maximum(seen + unseen - jnp.square(along).sum(axis=-1), 0.0)
    is_row = node < tree.num_nodes
    return node, jnp.where(is_row, residual, 0.0), jnp.where(is_row[:, None], jnp.square(coordinates), 0.0)


def _times(matrix: Float[Array, "B d d"], vector: Float[Array, "B d"]) -> Float[Array, "B d"]:
    return jnp.einsum("bij,bj->bi", matrix, vector, precision=HIGHEST)


def _draw_slot(key: KeyArray, score: Float[Array, "B M"]) -> Int[Array, "B"]:
    """Categorical draws, one uniform per row; slot 0 at empty places."""
    largest = score.max(axis=1, keepdims=True)
    cumulative = jnp.cumsum(jnp.exp(score - jnp.where(jnp.isfinite(largest), largest, 0.0)), axis=1)
    level = jax.random.uniform(key, (score.shape[0], 1), score.dtype) * cumulative[:, -1:]
    slot = jnp.sum(cumulative <= level, axis=1)
    # A level that rounds up to the total must not select a candidate of zero weight after the last of positive weight.
    last = score.shape[1] - 1 - jnp.argmax(jnp.isfinite(score)[:, ::-1], axis=1)
    return jnp.where(jnp.isfinite(largest[:, 0]), jnp.minimum(slot, last), 0).astype(jnp.int32)


def _group_keys(key: KeyArray) -> KeyArray:
    """For the nodes, the coordinates, the noise in the columns of the root, and that outside."""
    return jax.random.split(key, 4)


def draw_norms(key: KeyArray, num_missing: Float[Array, "B"], rank: int) -> Float[Array, "B"]:
    """Squared norm of each row's missing noise outside the root's `rank` columns, over sigma2: chi-squared.

    `key`: that of :func:`draw_group`.
    """
    freedom = jnp.maximum(num_missing - rank, 0.0)
    norms = 2.0 * jax.random.gamma(_group_keys(key)[3], 0.5 * jnp.maximum(freedom, 1.0), dtype=num_missing.dtype)
    return jnp.where(freedom > 0, norms, 0.0)


def start(
    key: KeyArray, log_scale_weights: Float[Array, "S"], rows: PartialRows, tree: Tree, num_features: Count
) -> PartialState:
    """Over-dispersed start: the nearest candidate of a random scale, with statistics from the observed part."""
    num_groups, size = rows.node.shape[:2]
    row_scale = jax.random.categorical(key, log_scale_weights, shape=(num_groups, size, 1))
    is_row = rows.node[..., 0] < tree.num_nodes
    gap = jnp.abs(jnp.asarray(tree.scale)[rows.node] - row_scale)
    at_scale = gap == gap.min(axis=-1, keepdims=True)
    slot = jnp.argmin(jnp.where(at_scale, rows.residual, jnp.inf), axis=-1)[..., None]

    def chosen(values: Array) -> Array:
        return jnp.take_along_axis(values, slot, axis=-1)[..., 0]

    coordinates = jnp.take_along_axis(rows.start, slot[..., None], axis=-2)[..., 0, :]
    residual = chosen(rows.residual) * (num_features / jnp.maximum(rows.num_observed, 1.0))
    return PartialState(
        node=chosen(rows.node),
        residual=jnp.where(is_row, residual, 0.0),
        squared=jnp.where(is_row[..., None], jnp.square(coordinates), 0.0),
        turn=jnp.zeros((), jnp.int32),
    )
