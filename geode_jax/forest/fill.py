"""Conditional means of the missing features of rows, given the observed ones: stage one fills and refines by these.

Under the quick mixture of `learning/evidence.py`, at a row's candidate nodes, from the dictionaries that left its fold
out: a row must not be filled from what it was filled with before.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax._typing import Array
from geode_jax.forest.defaults import PARTIAL_CANDIDATES
from geode_jax.forest.partial_statistics import group_rows, reduce_rows
from geode_jax.forest.trees import grow_trees
from geode_jax.learning.candidate_search import find_candidates
from geode_jax.learning.evidence import QuickMixture, cross_fitted_evidence, fit_quick_mixture
from geode_jax.learning.subspaces import Subspaces, learn_subspaces
from geode_jax.math.lowrank import latent_given, log_marginal
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.rows.completed import Completed
from geode_jax.rows.folds import each_fold
from geode_jax.rows.view import View, as_array
from geode_jax.settings import DictionarySettings

# Trees whose conditional means fill missing entries.
FILL_TREES = 4
_LARGE_BLOCK = 4096  # rows whose matrices are held at once
_SYSTEMS = 256  # rows whose systems of equations are solved at once


def complete(
    x: np.ndarray,
    is_observed: np.ndarray,
    settings: DictionarySettings,
    folds: np.ndarray | None,
    seeds: list[int],
    on_step: Callable[[float, str], None],
    *,
    may_lower_rank: bool,
) -> Completed:
    """Missing entries of filled rows `x` at their conditional means, averaged over trees.

    A row is filled by dictionaries that left its own fold out: one that knew the row would find again what it was
    filled with before. And the rows that a fold's dictionary learns from are filled by dictionaries that left that fold
    out too, or what it says of the fold's rows would hang on these themselves, and intervals would be too narrow.
    With `may_lower_rank` they have no more directions than the rows tell of.
    """
    assert settings.max_rank is not None
    parent_rows = settings.parent_rows or 0.0
    rows = np.flatnonzero(~is_observed.all(axis=1))
    seen = is_observed[rows]
    width = settings.missing_rows.num_candidates or PARTIAL_CANDIDATES
    seeds = seeds[:FILL_TREES]
    partitions, scales = grow_trees(x, is_observed, settings, seeds, on_step)
    scaled = as_array(View(x, scales))
    max_rank = settings.max_rank
    if may_lower_rank and folds is not None:
        first = learn_subspaces(scaled, partitions[0], max_rank, folds, seeds[0], parent_rows)
        max_rank = cross_fitted_evidence(scaled, partitions[0], first, folds, is_observed).needed_rank()
    left_out = list(each_fold(folds))
    num_folds = len(left_out) - 1
    left_out += itertools.combinations(range(num_folds), 2)
    number_of = {without: number for number, without in enumerate(left_out)}
    own = np.full(rows.size, -1) if folds is None else folds[rows]
    # who fills a row for the dictionary of all rows, and for that without fold f: 0 where it learns not from the row
    filler = np.zeros((1 + num_folds, rows.size), dtype=int)
    filler[0] = own + 1
    for fold in range(num_folds):
        filler[1 + fold] = [number_of.get((min(fold, other), max(fold, other)), 0) for other in own]
    total = np.zeros((*filler.shape, x.shape[1]), dtype=x.dtype)
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        on_step(0.5 + 0.5 * number / len(seeds), "conditional means")
        subspaces = learn_subspaces(scaled, partition, max_rank, folds, seed, parent_rows, left_out)
        mixture = fit_quick_mixture(scaled, partition, subspaces, folds, is_observed)
        candidates = find_candidates(scaled, rows, partition, subspaces, folds, width, is_observed)
        for group, by in enumerate(filler):
            used = np.flatnonzero((by > 0) | (group == 0))
            total[group, used] += conditional_means(
                scaled[rows[used]], seen[used], mixture, subspaces, by[used], candidates[used]
            )
    filled = []
    for means in total / len(partitions) * scales:
        copy = x.copy()
        copy[rows] = np.where(seen, x[rows], means)
        filled.append(copy)
    return Completed(filled[0], filled[1:] or None)


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


@one_blas_thread()
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
