"""Conditional means of the missing features of rows, given the observed ones: stage one fills and refines by these.

Under the quick mixture of `build/evidence.py`, at a row's candidate nodes, from the dictionaries that left its fold
out: a row must not be filled from what it was filled with before.
"""

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array
from geode_jax.build.evidence import QuickMixture
from geode_jax.build.subspace import Subspaces
from geode_jax.math.lowrank import latent_given, log_marginal
from geode_jax.partial_rows import PartialRows, group_rows, reduce_rows

_LARGE_BLOCK = 4096  # rows whose matrices are held at once
_SYSTEMS = 256  # rows whose systems of equations are solved at once


def conditional_means(
    x: np.ndarray,
    is_observed: np.ndarray,
    mixture: QuickMixture,
    subspaces: Subspaces,
    group: np.ndarray,
    candidates: np.ndarray,
) -> np.ndarray:
    """Mean of every feature of rows x, (n_m, D), given their observed ones, a block of rows after the other.

    `group`, (n_m,): which of the groups of `subspaces` fills a row.
    """
    blocks = [slice(start, start + _LARGE_BLOCK) for start in range(0, x.shape[0], _LARGE_BLOCK)]
    return np.concatenate(
        [_block_means(x[at], is_observed[at], mixture, subspaces, group[at], candidates[at]) for at in blocks]
    )


def _block_means(
    x: np.ndarray,
    is_observed: np.ndarray,
    mixture: QuickMixture,
    subspaces: Subspaces,
    group: np.ndarray,
    candidates: np.ndarray,
) -> np.ndarray:
    grouping = group_rows(is_observed, group, -(-x.shape[0] // _SYSTEMS))
    centres, bases = subspaces.centres, subspaces.bases
    reduced = reduce_rows(centres, bases, x, is_observed, group, candidates, grouping, with_root=False)
    place = np.searchsorted(mixture.nodes, candidates)
    ratio = np.where(mixture.has_direction, mixture.variance / mixture.noise[:, None], 1.0)
    parameters = (np.log(ratio), np.log(mixture.noise), mixture.log_weight)
    weight, eta = np.empty(candidates.shape, x.dtype), np.empty((*candidates.shape, bases.shape[3]), x.dtype)
    for number, members in enumerate(grouping.rows):
        here = members[members >= 0]
        one = jax.tree.map(lambda leaf, at=number: leaf[at], reduced)
        at_slots = (table[place[np.maximum(members, 0)]].astype(x.dtype) for table in parameters)
        found = _conditional(one, *(jnp.asarray(table) for table in at_slots))
        weight[here], eta[here] = (np.asarray(leaf)[: here.size] for leaf in found)
    mean = np.zeros_like(x)
    for own in np.unique(group):
        for node in np.unique(candidates[group == own]):
            row, slot = np.nonzero((candidates == node) & (group == own)[:, None])
            mean[row] += weight[row, slot][:, None] * (centres[own, node] + eta[row, slot] @ bases[own, node].T)
    return mean


@jax.jit
def _conditional(group: PartialRows, neg_log_u: Array, log_noise: Array, log_weight: Array) -> tuple[Array, Array]:
    """Weights of the candidates and the coordinates' means there; neg_log_u = log(variance / noise)."""
    observed = group.observed(group.at_candidates(group.gram))
    latent = latent_given(observed, neg_log_u)
    score = log_weight + log_marginal(observed, latent, neg_log_u, log_noise)
    return jax.nn.softmax(score, axis=1), latent.mean


def without_folds(subspaces: Subspaces, folds: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Centres and bases that left each fold out; without folds the in-sample ones, as fold 0."""
    group = slice(0, 1) if folds is None else slice(1, None)
    return subspaces.centres[group], subspaces.bases[group]
