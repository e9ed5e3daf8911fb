"""The trees of a forest, and the noise scales that are learned on the first."""

import numpy as np

from geode_jax._runtime.progress import ShowProgress
from geode_jax.forest.feature_scales import noise_scales
from geode_jax.forest.plan import Plan
from geode_jax.learning.feature_noise import middle_cells
from geode_jax.partition.metis import Partition, TreeOptions, partition_rows, route_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.processes import Processes
from geode_jax.rows.row_space import principal_coordinates, uses_row_space
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows, as_array


def grow_trees(
    training: Training, plan: Plan, seeds: list[int], show: ShowProgress
) -> tuple[list[Partition], np.ndarray]:
    """A tree for every seed, and the noise scales of the features, (D,); progress runs from 0 to one half."""
    partitions, x, is_observed = [], training.x, training.is_observed
    has_coordinates = uses_row_space(training.num_rows, x.shape[1])
    near = principal_coordinates(x).coordinates if has_coordinates else x  # a tree depends on distances only
    if plan.tree_rows >= training.num_rows:
        near = training.processes.joined(as_array(near))
    for number, seed in enumerate(seeds):
        show(0.4 * number / len(seeds), "growing trees")
        partitions.append(_grow_tree(near, training, plan, number, seed))
    del near
    show(0.4, "noise scales")
    return partitions, noise_scales(x, is_observed, middle_cells(partitions[0]), plan.noise(seeds[0]))


def _grow_tree(x: Rows, training: Training, plan: Plan, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed, their neighbour count, and the rows they are learned from.

    `x`: everyone's rows if a tree is learned from all of them, else those of this process.
    """
    num_rows, processes = training.num_rows, training.processes
    tree = plan.tree._replace(num_neighbors=min(plan.tree.num_neighbors + 2 * number, num_rows - 1))
    if plan.tree_rows >= num_rows:
        refines = plan.refines and number % 2 == 0
        return _cut(as_array(x), tree, seed, processes, refines=refines).divided(processes)
    known = np.sort(np.random.default_rng(seed).choice(num_rows, plan.tree_rows, replace=False))
    some = processes.joined(x[processes.own(known)])
    fewest = max(2, tree.min_cell_size * known.size // num_rows)
    sampled = TreeOptions(min(tree.num_neighbors, known.size - 1), tree.depth, fewest)
    partition = _cut(some, sampled, seed, processes, refines=False)
    return route_rows(x, some, partition, known, tree.min_cell_size, processes)


def _cut(x: np.ndarray, tree: TreeOptions, seed: int, processes: Processes, *, refines: bool) -> Partition:
    """The partition of rows that every process has: found by the first process for all.

    An approximate search for neighbours may find others on another machine.
    """
    if processes.index > 0:
        place, is_present = np.zeros(x.shape[0], dtype=int), np.zeros(2 ** (tree.depth + 1) - 1, dtype=int)
        found = processes.total(place), processes.total(is_present)
        return Partition.of_leaves(tree.depth, found[0], found[1] > 0)
    graph = neighbour_graph(x, tree.num_neighbors, seed)
    partition = partition_rows(x, graph, tree.depth, tree.min_cell_size, seed, refines=refines)
    if not processes.is_alone:
        processes.total(partition.leaf_order())
        processes.total(partition.is_present.astype(int))
    return partition
