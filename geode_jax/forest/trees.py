"""The trees of a forest, and the noise scales that are learned on the first."""

from collections.abc import Callable

import numpy as np

from geode_jax.forest.feature_scales import noise_scales
from geode_jax.learning.feature_noise import middle_cells
from geode_jax.partition.metis import Partition, partition_rows, route_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.row_space import is_worth, row_coordinates
from geode_jax.rows.view import Rows, as_array
from geode_jax.settings import DictionarySettings


def grow_trees(
    x: Rows,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    seeds: list[int],
    on_step: Callable[[float, str], None],
) -> tuple[list[Partition], np.ndarray]:
    """Trees and the noise scales of the features; takes half of the way."""
    assert settings.max_rank is not None
    partitions = []
    near = row_coordinates(x) if is_worth(*x.shape) else x  # distances are all that a tree asks for
    for number, seed in enumerate(seeds):
        on_step(0.4 * number / len(seeds), "growing trees")
        partitions.append(_grow_tree(near, settings, number, seed))
    if settings.feature_noise is None:
        return partitions, np.ones(x.shape[1])
    on_step(0.4, "noise scales")
    return partitions, noise_scales(x, middle_cells(partitions[0]), is_observed, settings, seeds[0]).scales


def _grow_tree(x: Rows, settings: DictionarySettings, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed, their neighbour count, and the rows they are learned from."""
    assert settings.num_neighbors is not None
    assert settings.tree_rows is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    num_neighbors = min(settings.num_neighbors + 2 * number, x.shape[0] - 1)
    if settings.tree_rows >= x.shape[0]:
        x = as_array(x)
        graph = neighbour_graph(x, num_neighbors, seed)
        return partition_rows(x, graph, settings.depth, settings.min_cell_size, seed)
    known = np.sort(np.random.default_rng(seed).choice(x.shape[0], settings.tree_rows, replace=False))
    some = x[known]
    graph = neighbour_graph(some, min(num_neighbors, known.size - 1), seed)
    fewest = max(2, settings.min_cell_size * known.size // x.shape[0])
    partition = partition_rows(some, graph, settings.depth, fewest, seed)
    return route_rows(x, partition, known, settings.min_cell_size)
