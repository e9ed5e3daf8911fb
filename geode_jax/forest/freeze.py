"""What stage one hands to the sampler: frozen dictionaries, and statistics of the training rows."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.buffers import aligned_zeros, release_free_memory
from geode_jax.forest.defaults import PARTIAL_CANDIDATES
from geode_jax.forest.dictionaries import Learned
from geode_jax.forest.partial_statistics import group_rows, reduce_rows, stack_trees
from geode_jax.forest.statistics import add_cross_fitted, candidate_statistics, no_statistics, without_folds
from geode_jax.learning.candidate_search import find_candidates
from geode_jax.learning.subspaces import Subspaces
from geode_jax.model.candidate_statistics import AnyStatistics, Probe
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.statistics import Statistics, padded_size
from geode_jax.model.tree import trees_from_masks
from geode_jax.partition.metis import Partition
from geode_jax.rows.view import as_array, taken

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


def freeze(partitions: list[Partition], trees: Iterable[Subspaces], max_ranks: list[np.ndarray]) -> Dictionary:
    """A forest's dictionaries of all rows, from each tree's first group; nodes keep at most `max_ranks` directions."""
    arrays: tuple[np.ndarray, np.ndarray] | None = None
    ranks = []
    learned = iter(trees)
    for number, most in enumerate(max_ranks):
        found = next(learned)
        if arrays is None and len(partitions) == found.bases.shape[0] == 1:
            arrays = found.centres, found.bases  # with many features these are as large as the data
        elif arrays is None:
            shape = len(partitions), *found.bases.shape[1:]
            arrays = aligned_zeros(shape[:-1], found.bases.dtype), aligned_zeros(shape, found.bases.dtype)
        ranks.append(np.minimum(found.ranks, most))
        has_direction = np.arange(found.bases.shape[3]) < ranks[-1][:, None, None]
        arrays[0][number] = found.centres[0]
        np.multiply(found.bases[0], has_direction, out=arrays[1][number])
        del found  # before the next is learned, which zip would hold it beyond
    assert arrays is not None
    next(learned, None)  # at its end it lets go of what it learned from
    return Dictionary(
        tree=trees_from_masks(np.stack([partition.is_present for partition in partitions])),
        centres=jax.device_put(arrays[0]),
        bases=jax.device_put(arrays[1]),
        ranks=jnp.asarray(np.stack(ranks)),
    )
