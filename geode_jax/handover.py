"""What stage one hands to the sampler: frozen dictionaries, and statistics of the training rows."""

import jax.numpy as jnp
import numpy as np

from geode_jax.build.candidates import find_candidates
from geode_jax.build.heap import release_free_memory
from geode_jax.build.rows import as_array, taken
from geode_jax.candidates import AnyStatistics, Probe, candidate_statistics
from geode_jax.completion import PARTIAL_CANDIDATES, without_folds
from geode_jax.dictionary import Dictionary, freeze
from geode_jax.learn import Learned
from geode_jax.partial_rows import PartialRows, group_rows, reduce_rows, stack_trees
from geode_jax.statistics import Statistics, add_cross_fitted, no_statistics, padded_size

# Rows are kept at all nodes, to see what their candidates leave out, within this many bytes.
PROBE_BYTES = 2**28
# Rows with missing features are drawn in groups where a sweep over all of them takes more than this many operations
# (matrices times d^3) per tree.
GROUP_COST = 1e8


def freeze_forest(
    learned: Learned, is_observed: np.ndarray | None, folds: np.ndarray | None, num_places: int | None
) -> tuple[Dictionary, AnyStatistics, Probe | None]:
    """The dictionaries of all rows, and the complete rows' statistics from those that left them out.

    `num_places`: places for complete rows, where forests share a program; None for just enough. Statistics are at all
    nodes, or at the rows' candidates, and then those of a few rows at all nodes besides.
    """
    trees = range(len(learned.partitions))
    dictionary = _frozen(learned)
    rows = np.arange(learned.x.shape[0]) if is_observed is None else np.flatnonzero(is_observed.all(axis=1))
    width, num_nodes = learned.settings.num_candidates, dictionary.tree.num_nodes
    assert width is not None
    num_places = num_places or padded_size(rows.size)
    if width >= num_nodes or rows.size == 0:
        return dictionary, _at_all_nodes(learned, rows, folds, num_places), None
    candidates = [_candidates(learned, number, rows, folds, is_observed) for number in trees]
    per_row = learned.x.dtype.itemsize * len(trees) * num_nodes * dictionary.max_rank
    num_probes = min(rows.size, int(np.clip(PROBE_BYTES // per_row, 16, 256)))
    sample = np.linspace(0, rows.size - 1, num_probes).astype(int)
    probed = _at_all_nodes(learned, rows[sample], folds, num_probes)
    release_free_memory()
    statistics = candidate_statistics(learned.x, rows, folds, learned.subspaces, candidates, num_places)
    chosen = np.stack([nodes[sample] for nodes in candidates])
    is_candidate = np.swapaxes((chosen[..., None] == np.arange(num_nodes)).any(axis=2), 1, 2)
    return dictionary, statistics, Probe(probed.residual, probed.squared, jnp.asarray(is_candidate))


def _frozen(learned: Learned) -> Dictionary:
    """Every tree's dictionary of all rows, in R^D."""
    # directions that the folds did not find have no statistics
    ranks = [found.ranks for found in learned.subspaces]
    return freeze(learned.partitions, learned.subspaces if learned.whole is None else learned.whole, ranks)


def _at_all_nodes(learned: Learned, rows: np.ndarray, folds: np.ndarray | None, num_places: int) -> Statistics:
    x = taken(learned.x, rows)
    own = np.zeros(rows.size, dtype=int) if folds is None else folds[rows]
    num_nodes, rank = len(learned.partitions[0].cells), learned.subspaces[0].bases.shape[3]
    shape = len(learned.partitions), num_nodes, num_places, rank
    statistics = no_statistics(shape, rows.size, x.dtype)
    for number, subspaces in enumerate(learned.subspaces):
        centres, bases = without_folds(subspaces, folds)
        of_fold = [np.flatnonzero(own == fold) for fold in range(centres.shape[0])]
        statistics = add_cross_fitted(statistics, number, centres, bases, x, of_fold)
    return statistics


def _candidates(
    learned: Learned, number: int, rows: np.ndarray, folds: np.ndarray | None, is_observed: np.ndarray | None
) -> np.ndarray:
    """The nodes of every row, (rows, width), best first; a tree with fewer is filled up with the number of nodes."""
    width, num_nodes = learned.settings.num_candidates, len(learned.partitions[number].cells)
    assert width is not None
    candidates = np.full((rows.size, width), num_nodes, np.int32)
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    found = find_candidates(learned.x, rows, partition, subspaces, folds, width, is_observed)
    candidates[:, : found.shape[1]] = found
    return candidates


def partial_rows(learned: Learned, is_observed: np.ndarray, folds: np.ndarray | None) -> PartialRows:
    """What the sampler needs of the rows with missing features, on every tree."""
    x = as_array(learned.x)  # of rows with missing features no view was made
    rows = np.flatnonzero(~is_observed.all(axis=1))
    settings = learned.settings.missing_rows
    pairs = list(zip(learned.partitions, learned.subspaces, strict=True))
    width = min(settings.num_candidates or PARTIAL_CANDIDATES, *(partition.is_present.sum() for partition, _ in pairs))
    candidates = [find_candidates(x, rows, *pair, folds, width, is_observed) for pair in pairs]
    own = np.zeros(rows.size, dtype=int) if folds is None else folds[rows]
    grouping = group_rows(is_observed[rows], own, 1)
    num_groups = settings.num_groups
    if num_groups is None:
        rank = learned.subspaces[0].bases.shape[3]
        matrices = grouping.num_matrices * width
        num_groups = int(np.clip(np.ceil(matrices * rank**3 / GROUP_COST), 1, 4))
    grouping = group_rows(is_observed[rows], own, min(num_groups, rows.size))
    reduced = [
        reduce_rows(*without_folds(subspaces, folds), x[rows], is_observed[rows], own, nodes, grouping)
        for (_, subspaces), nodes in zip(pairs, candidates, strict=True)
    ]
    return stack_trees(reduced)
