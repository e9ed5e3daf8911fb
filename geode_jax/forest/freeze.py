"""What the sampler gets from stage one: frozen dictionaries, and statistics of the training rows."""

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.buffers import aligned_zeros, release_free_memory
from geode_jax._runtime.threads import parallel_map
from geode_jax._typing import Array
from geode_jax.forest.device_candidates import is_for_device, search_on_device
from geode_jax.forest.dictionaries import Learned
from geode_jax.forest.partial_statistics import Grouping, group_rows, reduce_rows, stack_trees
from geode_jax.forest.plan import Plan
from geode_jax.forest.statistics import add_cross_fitted, candidate_statistics, without_folds, zero_statistics
from geode_jax.learning.borrowing import rows_nearby, typical_noise, with_unknown
from geode_jax.learning.candidate_search import search_candidates, searched_at_once
from geode_jax.learning.subspaces import Subspaces
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.candidate_statistics import BLOCK, AnyStatistics, CandidateStatistics, Probe, num_blocks_of
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.on_host import on_host
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.statistics import Statistics
from geode_jax.model.tree import tree_from_mask
from geode_jax.partition.metis import Partition
from geode_jax.rows.row_space import Axes, is_kept_in_space
from geode_jax.rows.view import taken

# Memory for the statistics of some rows at all nodes, which measure what their candidates leave out.
PROBE_BYTES = 2**28
# Rows with missing features are drawn in groups where a sweep over all of them takes more than this many operations
# (matrices times d^3) per tree.
GROUP_COST = 1e8


def freeze_forest(learned: Learned, plan: Plan) -> tuple[Dictionary, AnyStatistics, Probe | None]:
    """The dictionaries of all rows, and the complete rows' statistics from those that left them out.

    Statistics are at all nodes, or at the rows' candidates; the `Probe` then has those of a few rows at all nodes.
    """
    trees = range(len(learned.partitions))
    is_whitened = learned.noise_deviation is not None
    dictionary = freeze(learned.partitions, learned.subspaces, learned.axes, is_whitened)
    training, rows = learned.training, learned.training.complete
    width, num_nodes = plan.num_candidates(learned.chosen.rank), dictionary.tree.num_nodes
    num_rows = training.processes.count(rows.size)
    if width >= num_nodes or num_rows == 0:
        if plan.row_devices is None:
            return dictionary, _at_all_nodes(learned, rows, plan.num_places), None
        return dictionary, _on_the_host(learned, rows, plan.num_places, plan.row_devices), None
    # of more rows, those of one tree keep all cores busy
    by_device = is_for_device(training, learned.subspaces)
    by_tree = training.processes.is_alone and not by_device and rows.size <= searched_at_once(training)
    candidates = parallel_map(lambda tree: _candidates(learned, tree, rows, width), trees, in_order=not by_tree)
    per_row = training.x.dtype.itemsize * len(trees) * num_nodes * dictionary.max_rank
    num_probes = min(num_rows, int(np.clip(PROBE_BYTES // per_row, 16, 256)))
    sample = training.processes.sample(np.arange(rows.size), num_probes)
    probe = learned._replace(training=training.taken(rows[sample]))
    probed = _at_all_nodes(probe, np.arange(num_probes), num_probes)
    release_free_memory()
    statistics = candidate_statistics(
        training, rows, learned.subspaces, candidates, plan.num_places, plan.row_devices or 1
    )
    if plan.row_devices is None:
        statistics = jax.device_put(statistics)
    chosen = np.stack([training.processes.joined(nodes[sample]) for nodes in candidates])
    is_candidate = np.swapaxes((chosen[..., None] == np.arange(num_nodes)).any(axis=2), 1, 2)
    return dictionary, statistics, Probe(probed.residual, probed.squared, jax.device_put(is_candidate))


def zero_parts(
    partitions: list[Partition], rank: int, plan: Plan, dtype: np.dtype, grouping: Grouping | None
) -> tuple[Dictionary, AnyStatistics, PartialRows | None, Borrowed]:
    """Zeros in the shapes of what freezing gives; `grouping`: the places of the rows with missing features.

    To be called in ``jax.eval_shape``: the arrays are as large as those of the fit. The grouping must be one where
    every row has its own matrices: how many matrices rows share depends on their candidates.
    """

    def real(*shape: int) -> Array:
        return jnp.zeros((num_trees, *shape), dtype)

    def integer(*shape: int) -> Array:
        return jnp.zeros((num_trees, *shape), jnp.int32)

    num_trees, num_nodes, places = len(partitions), plan.num_nodes, plan.num_places
    tree = tree_from_mask(np.stack([partition.is_present for partition in partitions]))
    centres, bases = real(num_nodes, plan.num_features), real(num_nodes, plan.num_features, rank)
    dictionary = Dictionary(tree, centres, bases, integer(num_nodes))
    borrowed = Borrowed(real(num_nodes), real(num_nodes, rank), real(partitions[0].depth + 1))
    partial = None
    if grouping is not None:
        slots = *grouping.rows.shape, _partial_width(partitions, plan)
        matrices = slots[0], slots[1] * slots[2]
        partial = PartialRows(
            node=integer(*slots),
            entry=None,
            entry_node=integer(*matrices),
            gram=real(*matrices, rank, rank),
            root=real(*matrices, rank, rank),
            cross=real(*slots, rank),
            start=real(*slots, rank),
            remainder=real(*slots, rank),
            residual=real(*slots),
            num_observed=real(*slots[:2]),
            num_missing=real(*slots[:2]),
        )
    width = plan.num_candidates(rank)
    if width >= num_nodes or plan.num_rows == plan.num_partial:
        every = Statistics(real(num_nodes, places), real(num_nodes, places, rank), integer())
        return dictionary, every, partial, borrowed
    num_blocks = num_blocks_of(width * places, num_nodes)
    pairs = real(1, num_blocks * BLOCK), real(1, num_blocks * BLOCK, rank), integer(1, num_blocks)
    by_row = integer(width, places), integer(width, places)
    return dictionary, CandidateStatistics(*pairs, *by_row, integer()), partial, borrowed


def _on_the_host(learned: Learned, rows: np.ndarray, num_places: int, num_parts: int) -> Statistics:
    """Statistics at all nodes as NumPy arrays: the device has one part of the rows of one tree at a time."""
    num_trees, num_nodes, rank = len(learned.subspaces), *learned.subspaces[0].bases.shape[1::2]
    dtype, size = learned.training.x.dtype, num_places // num_parts
    residual = aligned_zeros((num_trees, num_nodes, num_places), dtype)
    squared = aligned_zeros((num_trees, num_nodes, num_places, rank), dtype)
    for number in range(num_trees):
        one = learned._replace(subspaces=learned.subspaces[number : number + 1])
        for start in range(0, rows.size, max(size, 1)):  # 0 where there is no complete row
            found = _at_all_nodes(one, rows[start : start + size], size)
            residual[number, :, start : start + size] = found.residual[0]
            squared[number, :, start : start + size] = found.squared[0]
    counts = np.full(num_trees, rows.size, np.int32)
    return on_host(Statistics, residual=residual, squared=squared, num_rows=counts)


def _at_all_nodes(learned: Learned, rows: np.ndarray, num_places: int) -> Statistics:
    training = learned.training
    x = taken(training.x, rows)
    own = training.folds_of(rows)
    num_nodes, rank = learned.subspaces[0].bases.shape[1::2]
    statistics = zero_statistics((len(learned.subspaces), num_nodes, num_places, rank), rows.size, x.dtype)
    for number, subspaces in enumerate(learned.subspaces):
        dictionary = without_folds(subspaces, training.folds)
        of_fold = [np.flatnonzero(own == fold) for fold in range(dictionary[0].shape[0])]
        statistics = add_cross_fitted(statistics, number, dictionary, x, of_fold)
    return statistics


def _candidates(learned: Learned, number: int, rows: np.ndarray, width: int) -> np.ndarray:
    """The candidates of every row, (rows, width), ascending; padded with K if the tree has fewer nodes."""
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    candidates = np.full((rows.size, width), len(partition.cells), np.int32)
    search = search_on_device if is_for_device(learned.training, learned.subspaces) else search_candidates
    found = search(learned.training, rows, partition, subspaces, width)
    candidates[:, : found.shape[1]] = found
    return candidates


def freeze_borrowed(learned: Learned, plan: Plan) -> Borrowed:
    """What the prior takes from stage one, for every tree; the typical noise is that of the first tree."""
    training, rows = learned.training, plan.request.borrowed_rows or 0.0
    noise = typical_noise(training, learned.partitions[0], learned.subspaces[0])
    num_trees, num_nodes, rank = len(learned.partitions), *learned.subspaces[0].bases.shape[1::2]
    count, squared = np.zeros((num_trees, num_nodes)), np.zeros((num_trees, num_nodes, rank))
    if rows > 0.0:
        for number, pair in enumerate(zip(learned.partitions, learned.subspaces, strict=True)):
            nearby = rows_nearby(training, *pair, noise)
            count[number] = rows * nearby.share
            squared[number] = count[number][:, None] * nearby.signal
    tables = (count, squared, np.tile(with_unknown(noise, training), (num_trees, 1)))
    return Borrowed(*(jax.device_put(table.astype(training.x.dtype)) for table in tables))


def freeze_partial_rows(learned: Learned, plan: Plan) -> PartialRows | None:
    """What the sampler needs of the rows with missing features, on every tree; None if there are none."""
    training = learned.training
    if training.is_observed is None:
        return None
    rows = training.partial
    pairs = list(zip(learned.partitions, learned.subspaces, strict=True))
    width = _partial_width(learned.partitions, plan)
    candidates = [search_candidates(training, rows, *pair, width) for pair in pairs]
    own = training.folds_of(rows)
    block = training.taken(rows)._replace(folds=own)
    grouping = partial_grouping(block.mask, own, learned.partitions, learned.chosen.rank, plan)
    reduced = [
        reduce_rows(without_folds(subspaces, training.folds), block, nodes, grouping)
        for (_, subspaces), nodes in zip(pairs, candidates, strict=True)
    ]
    stacked = stack_trees(reduced)
    return jax.device_put(stacked) if plan.row_devices is None else stacked


def partial_grouping(
    is_observed: np.ndarray, folds: np.ndarray, partitions: list[Partition], rank: int, plan: Plan
) -> Grouping:
    """The places of rows with missing features, (n_m, D), in as many groups as a sweep over them is to be divided."""
    num_groups = plan.request.missing_rows.num_groups
    if num_groups is None:
        matrices = group_rows(is_observed, folds, 1).num_matrices * _partial_width(partitions, plan)
        num_groups = int(np.clip(np.ceil(matrices * rank**3 / GROUP_COST), 1, 4))
    return group_rows(is_observed, folds, min(num_groups, is_observed.shape[0]))


def _partial_width(partitions: list[Partition], plan: Plan) -> int:
    """How many candidates a row with missing features has in every tree."""
    return min(plan.partial_candidates, *(int(partition.is_present.sum()) for partition in partitions))


def freeze(
    partitions: list[Partition], trees: list[Subspaces], axes: Axes | None = None, is_whitened: bool = False
) -> Dictionary:
    """A forest's dictionaries of all rows (each tree's entry 0).

    `axes`: of the space that these are in coordinates of. A large dictionary, or one that `is_whitened`, is then in
    coordinates along the axes, a small one in those of all features.
    """
    is_present = np.stack([partition.is_present for partition in partitions])
    num_nodes, width, rank = trees[0].bases.shape[1:]
    num_outside, num_features = 0, width if axes is None else axes.matrix.shape[0]
    if axes is not None:
        number, itemsize = len(trees) * num_nodes, trees[0].bases.itemsize
        is_kept = is_whitened or is_kept_in_space(num_features, axes.origin.size, number, rank, itemsize)
        width = axes.origin.size + 1 if is_kept else num_features
        num_outside = num_features - width
    if axes is None and len(trees) == trees[0].bases.shape[0] == 1:
        centres, bases = trees[0].centres, trees[0].bases  # these may be as large as the data
    else:
        centres, bases = (
            aligned_zeros((len(trees), num_nodes, width, *more), trees[0].bases.dtype) for more in ((), (rank,))
        )
        for number, tree in enumerate(trees):
            _place(tree, axes, centres[number], bases[number])
        centres *= is_present[:, :, None]
    return Dictionary(
        tree=tree_from_mask(is_present),
        centres=jax.device_put(centres),
        bases=jax.device_put(bases),
        ranks=jax.device_put(np.stack([tree.ranks for tree in trees])),
        num_outside=num_outside,
    )


def _place(tree: Subspaces, axes: Axes | None, centres: np.ndarray, bases: np.ndarray) -> None:
    """Write a tree's dictionary of all rows into arrays of zeros: (K, D) and (K, D, d), or with p + 1 coordinates."""
    if axes is None:
        centres[:], bases[:] = tree.centres[0], tree.bases[0]
        return
    for node in range(len(centres)):
        turned = axes.turned(np.column_stack([tree.centres[0, node], tree.bases[0, node]]))
        found = np.zeros((axes.origin.size, turned.shape[1]), turned.dtype)
        found[: len(turned)] = turned
        found[:, 0] += axes.origin
        if centres.shape[1] == len(axes.matrix):
            found = axes.matrix @ found
        centres[node, : len(found)], bases[node, : len(found)] = found[:, 0], found[:, 1:]
