"""What stage one hands to the sampler: frozen dictionaries, and statistics of the training rows."""

import jax.numpy as jnp
import numpy as np

from geode_jax.build.candidates import find_candidates
from geode_jax.candidates import AnyStatistics, Probe, candidate_statistics
from geode_jax.completion import PARTIAL_CANDIDATES, without_folds
from geode_jax.dictionary import Dictionary, freeze
from geode_jax.learn import Learned
from geode_jax.partial_rows import PartialRows, group_rows, reduce_rows, stack_trees
from geode_jax.statistics import Statistics, cross_fitted_statistics

# Rows are kept at all nodes, to see what their candidates leave out, within this many bytes.
PROBE_BYTES = 2**28
# Rows with missing features are drawn in groups where a sweep over all of them takes more than this many operations
# (matrices times d^3) per tree.
GROUP_COST = 1e8


def freeze_tree(
    learned: Learned, number: int, is_observed: np.ndarray, folds: np.ndarray | None, num_places: int | None
) -> tuple[Dictionary, AnyStatistics, Probe | None]:
    """The dictionary of all rows, and the complete rows' statistics from those that left them out."""
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    frozen = freeze(partition, subspaces, 0)
    statistics, probe = _statistics(learned, number, frozen, is_observed, folds, num_places)
    if learned.whole is None:
        return frozen, statistics, probe
    # directions that the folds did not find have no statistics
    ranks = np.minimum(learned.whole[number].ranks, subspaces.ranks)
    found = learned.whole[number].bases * (np.arange(subspaces.bases.shape[3]) < ranks[:, None])[:, None, :]
    return freeze(partition, learned.whole[number]._replace(bases=found, ranks=ranks), 0), statistics, probe


def _statistics(
    learned: Learned,
    number: int,
    dictionary: Dictionary,
    is_observed: np.ndarray,
    folds: np.ndarray | None,
    num_places: int | None,
) -> tuple[AnyStatistics, Probe | None]:
    """Statistics of the complete rows at all nodes; or at their candidates, and those of a few rows at all."""
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    is_complete = is_observed.all(axis=1)
    rows = np.flatnonzero(is_complete)
    num_nodes, rank, width = len(partition.cells), subspaces.bases.shape[3], learned.settings.num_candidates
    assert width is not None

    def at_all_nodes(rows: np.ndarray, num_places: int | None) -> Statistics:
        centres, bases = without_folds(subspaces, folds)
        own = np.zeros(rows.size, dtype=int) if folds is None else folds[rows]
        x = learned.x if rows.size == learned.x.shape[0] else learned.x[rows]
        of_fold = [jnp.asarray(np.flatnonzero(own == fold)) for fold in range(centres.shape[0])]
        return cross_fitted_statistics(
            jnp.asarray(centres), jnp.asarray(bases), dictionary, jnp.asarray(x), of_fold, num_places
        )

    if width >= num_nodes or rows.size == 0:
        return at_all_nodes(rows, num_places), None
    seen = None if is_complete.all() else is_observed
    candidates = np.full((rows.size, width), num_nodes, np.int32)
    found = find_candidates(learned.x, rows, partition, subspaces, folds, width, seen)
    candidates[:, : found.shape[1]] = found
    per_row = learned.x.itemsize * learned.settings.num_trees * num_nodes * rank
    num_probes = min(rows.size, int(np.clip(PROBE_BYTES // per_row, 16, 256)))
    sample = np.linspace(0, rows.size - 1, num_probes).astype(int)
    probed = at_all_nodes(rows[sample], num_probes)
    is_candidate = (candidates[sample, :, None] == np.arange(num_nodes)).any(axis=1).T
    return (
        candidate_statistics(learned.x, rows, folds, subspaces, candidates, num_places),
        Probe(probed.residual, probed.squared, jnp.asarray(is_candidate)),
    )


def partial_rows(learned: Learned, is_observed: np.ndarray, folds: np.ndarray | None) -> PartialRows:
    """What the sampler needs of the rows with missing features, on every tree."""
    x = learned.x
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
