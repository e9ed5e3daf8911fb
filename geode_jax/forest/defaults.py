"""Settings that were left open, by the shape of the data."""

import dataclasses

import numpy as np

from geode_jax.partition.metis import default_depth
from geode_jax.settings import DictionarySettings

# What sets the largest rank: the statistics of complete rows at the fewest nodes, in float32, and the matrices of rows
# with missing features.
STATISTICS_BYTES = 2**32
# The matrices of rows with missing features: beyond this much, no more than 50 directions, as work grows with d^3.
QUICK_BYTES = 2**30
# The sampler reads (F, K, n, d) numbers in every sweep. Above this many bytes in float32 rows have candidate nodes, as
# many as fit: beyond the processor's cache a sweep takes as long as reading them, and rows give a part in 500 of their
# mass to others than their best 32 (`python -m benchmarks.candidates`).
CANDIDATE_BYTES = 2**30
FEWEST_CANDIDATES, MOST_CANDIDATES = 8, 32
# Nodes that a row with missing features may belong to: its matrices at each are held.
PARTIAL_CANDIDATES = 6
# Rows that a tree is learned from by default: more make finer cuts no better, and the graph slow.
TREE_ROWS = 100_000


def resolve(settings: DictionarySettings, num_rows: int, num_features: int, num_partial: int = 0) -> DictionarySettings:
    """Fill in what was left to the data's shape.

    `max_rank`, the largest that may be needed: 100, or as many as keep the float32 statistics of all trees within 4 GiB
    at 8 nodes, at least 50; at most half the features beyond 20, and no more than the data allow (with as many
    directions as features, nothing tells of the noise), or than keeps the matrices of `num_partial` rows with missing
    features at their candidate nodes of all trees within 4 GiB, and beyond 50 within 1 GiB. `num_neighbors`: 10, or
    more for very large n. `tree_rows`: all, up to 100,000. `min_cell_size`: 10 rows, below which a cell's own centre
    costs more than it brings. `depth`: until cells reach twice that size, at most 7. `num_candidates`: all nodes, or
    where the float32 statistics of all trees take more than 1 GiB as many as do not, 8 to 32.
    """
    limit = max(1, min(num_features, num_rows) - 1)
    numbers_per_row = STATISTICS_BYTES // (4 * settings.num_trees * num_rows)
    max_rank = settings.max_rank
    if max_rank is None:
        max_rank = min(int(np.clip(numbers_per_row // FEWEST_CANDIDATES, 50, 100)), max(10, num_features // 2))
        if num_partial > 0:
            width = settings.missing_rows.num_candidates or PARTIAL_CANDIDATES
            per_square = 8 * settings.num_trees * num_partial * width
            most, quick = (int(np.sqrt(size / per_square)) for size in (STATISTICS_BYTES, QUICK_BYTES))
            max_rank = min(max_rank, max(1, most), max(50, quick))
    max_rank = min(max_rank, limit)
    num_neighbors = min(settings.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
    tree_rows = min(settings.tree_rows or TREE_ROWS, num_rows)
    min_cell_size = settings.min_cell_size or max(2, min(10, num_rows // 4))
    depth = settings.depth
    if depth is None:
        depth = default_depth(num_rows, 2 * min_cell_size)
    resolved = dataclasses.replace(
        settings,
        max_rank=max_rank,
        num_neighbors=num_neighbors,
        tree_rows=tree_rows,
        min_cell_size=min_cell_size,
        depth=depth,
    )
    return _with_candidates(resolved, num_rows)


def _with_candidates(settings: DictionarySettings, num_rows: int) -> DictionarySettings:
    """Settings with a number of candidates, by their rank."""
    assert settings.depth is not None
    assert settings.max_rank is not None
    num_nodes, num_candidates = 2 ** (settings.depth + 1) - 1, settings.num_candidates
    if num_candidates is None:
        fitting = CANDIDATE_BYTES // (4 * settings.num_trees * num_rows * settings.max_rank)
        num_candidates = num_nodes if fitting >= num_nodes else np.clip(fitting, FEWEST_CANDIDATES, MOST_CANDIDATES)
    return dataclasses.replace(settings, num_candidates=int(min(num_candidates, num_nodes)))
