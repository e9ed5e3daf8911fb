"""The plan of a fit: what the user asked for, completed by what the shape of the data decides."""

import dataclasses

import numpy as np

from geode_jax.learning.feature_noise import NoiseOptions
from geode_jax.learning.subspaces import SubspaceOptions
from geode_jax.partition.metis import TreeOptions, default_depth
from geode_jax.rows.row_space import is_worth
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of stage one with nothing left open.

    - `request`: the settings as the user gave them.
    - `num_rows`, `num_features`: of the training rows.
    - `tree`: how each tree is grown, from `tree_rows` of the rows.
    - `least_rank`, `max_rank`: between these, nodes have as many directions as held-out rows tell of.
    - `span_rank`: directions of a given span of all nodes; 0 where none is given.
    - `tries_spans`, `tries_noise_covariance`: what held-out rows are asked about.
    - `partial_candidates`: nodes that a row with missing features may belong to.
    """

    request: DictionarySettings
    num_rows: int
    num_features: int
    tree: TreeOptions
    tree_rows: int
    least_rank: int
    max_rank: int
    span_rank: int
    tries_spans: bool
    tries_noise_covariance: bool
    partial_candidates: int

    @classmethod
    def of(cls, request: DictionarySettings, num_rows: int, num_features: int, num_partial: int = 0) -> "Plan":
        """The plan for (n, D) training rows, `num_partial` of them with missing features.

        `max_rank`: 100, or as many as keep the float32 statistics of all trees within 4 GiB at 8 nodes, at least 50; at
        most half of the features beyond 20, and no more than the data allow (with as many directions as features,
        nothing tells of the noise), or than keeps the matrices of rows with missing features at their candidate nodes
        of all trees within 4 GiB, and beyond 50 within 1 GiB. Neighbours: 10, or more for very large n. `tree_rows`:
        all, up to 100,000. The smallest cell has 10 rows; with fewer a cell's own centre costs more than it brings.
        Depth: until cells reach twice that size, at most 7.
        """
        partial_candidates = request.missing_rows.num_candidates or PARTIAL_CANDIDATES
        limit = max(1, min(num_features, num_rows) - 1)
        numbers_per_row = STATISTICS_BYTES // (4 * request.num_trees * num_rows)
        max_rank = request.max_rank
        if max_rank is None:
            max_rank = min(int(np.clip(numbers_per_row // FEWEST_CANDIDATES, 50, 100)), max(10, num_features // 2))
            if num_partial > 0:
                per_square = 8 * request.num_trees * num_partial * partial_candidates
                most, quick = (int(np.sqrt(size / per_square)) for size in (STATISTICS_BYTES, QUICK_BYTES))
                max_rank = min(max_rank, max(1, most), max(50, quick))
        max_rank = min(max_rank, limit)
        min_cell_size = request.min_cell_size or max(2, min(10, num_rows // 4))
        depth = default_depth(num_rows, 2 * min_cell_size) if request.depth is None else request.depth
        num_neighbors = min(request.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
        is_judged, span, noise = request.cross_fit is not None, request.shared_span, request.noise_covariance
        # few rows are learned from in coordinates of their row space, where a noise covariance has no meaning
        has_features = num_partial == 0 and not is_worth(num_rows, num_features)
        return cls(
            request=request,
            num_rows=num_rows,
            num_features=num_features,
            tree=TreeOptions(num_neighbors, depth, min_cell_size),
            tree_rows=min(request.tree_rows or TREE_ROWS, num_rows),
            least_rank=1 if request.max_rank is None and is_judged else max_rank,
            max_rank=max_rank,
            span_rank=0 if span is None or span.rank is None else span.rank,
            tries_spans=is_judged and span is not None and span.rank is None,
            tries_noise_covariance=(
                is_judged and has_features and noise is not None and num_features <= noise.max_features
            ),
            partial_candidates=partial_candidates,
        )

    def with_fixed_rank(self) -> "Plan":
        """The same plan with `max_rank` directions at every node, whatever the rows tell of."""
        return dataclasses.replace(self, least_rank=self.max_rank)

    @property
    def num_nodes(self) -> int:
        """Places for nodes in a tree, K."""
        return 2 ** (self.tree.depth + 1) - 1

    @property
    def num_holdouts(self) -> int:
        """Dictionaries that are learned of a tree: from all rows, and without each fold."""
        return 1 if self.request.cross_fit is None else 1 + self.request.cross_fit.num_folds

    @property
    def seeks_rank(self) -> bool:
        """Whether held-out rows are asked how many directions nodes need."""
        return self.least_rank < self.max_rank

    def num_candidates(self, rank: int) -> int:
        """Nodes of each tree that a complete row may belong to, where nodes have `rank` directions.

        All of them, or where the float32 statistics of all trees take more than 1 GiB as many as do not, 8 to 32.
        """
        wanted = self.request.num_candidates
        if wanted is None:
            fitting = CANDIDATE_BYTES // (4 * self.request.num_trees * self.num_rows * rank)
            wanted = self.num_nodes
            if fitting < self.num_nodes:
                wanted = int(np.clip(fitting, FEWEST_CANDIDATES, MOST_CANDIDATES))
        return min(wanted, self.num_nodes)

    def subspaces(self, rank: int, seed: int) -> SubspaceOptions:
        """How the subspaces of a tree are learned, with at most `rank` directions."""
        return SubspaceOptions(rank, seed, self.request.parent_rows or 0.0)

    def noise(self, seed: int) -> NoiseOptions | None:
        """How the noise scales of the features are learned; None where they all have the same noise."""
        given = self.request.feature_noise
        if given is None:
            return None
        return NoiseOptions(given.num_rounds, given.num_folds, given.floor, self.max_rank, seed)
