"""The plan of a fit: the user's settings, with those left open decided by the shape of the data."""

import dataclasses
import math

import numpy as np

from geode_jax.learning.feature_noise import NoiseOptions
from geode_jax.learning.subspaces import SubspaceOptions
from geode_jax.model.statistics import ROW_BLOCKS, padded_size
from geode_jax.partition.metis import TreeOptions, default_depth
from geode_jax.partition.refinement import MOST_FEATURES
from geode_jax.rows.row_space import uses_row_space
from geode_jax.settings import DictionarySettings

# Memory that limits the rank: for the statistics of complete rows at the fewest candidates, in float32, and for the
# matrices of rows with missing features.
STATISTICS_BYTES = 2**32
# If the matrices of rows with missing features take more memory than this, the rank is at most 50: work grows with d^3.
QUICK_BYTES = 2**30
# The sampler reads the statistics of every row at its candidate nodes in every sweep, and a row has little chance at
# other nodes than its best few (`python -m benchmarks.candidates` measures what is left out). In trees of up to
# FEW_NODES nodes a row may be at any. There are fewer candidates where the statistics of all trees would take more than
# CANDIDATE_BYTES in float32.
CANDIDATE_BYTES = 2**30
FEWEST_CANDIDATES, MOST_CANDIDATES, FEW_NODES = 8, 16, 31
# Nodes that a row with missing features may belong to: its matrices at each of them are in memory.
PARTIAL_CANDIDATES = 6
# Rows that a tree is learned from by default: more rows do not improve fine cuts, and make the graph slow.
TREE_ROWS = 100_000


def _unjudged_rank(num_features: int) -> int:
    """The most directions per node where held-out rows do not choose their number."""
    return max(10, num_features // 2)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of stage one with nothing left open.

    - `request`: the settings as the user gave them.
    - `num_rows`, `num_features`: of the training rows. `num_partial`: how many of them have missing features.
    - `tree`: how each tree is grown, from `tree_rows` of the rows. `refines`: whether the cuts of every second one are
      refined, the first one included; the others keep those that METIS makes, which suit some data better.
    - `least_rank`, `max_rank`: the bounds between which held-out rows choose the number of directions per node.
    - `span_rank`: directions of a span of all nodes, if the user gave one; else 0.
    - `tries_spans`, `tries_noise_covariance`: whether these are tried on held-out rows.
    - `partial_candidates`: nodes that a row with missing features may belong to.
    - `num_places`: places for complete rows, at least their number; forests with as many share compiled programs.
    - `row_devices`: devices that share the rows, whose statistics then stay on the host until each device gets its
      own; None if one device has them all.

    Where processes bring their own rows, `num_rows` are all, and `num_places` and `row_devices` those of this process.
    """

    request: DictionarySettings
    num_rows: int
    num_features: int
    num_partial: int
    tree: TreeOptions
    tree_rows: int
    refines: bool
    least_rank: int
    max_rank: int
    span_rank: int
    tries_spans: bool
    tries_noise_covariance: bool
    partial_candidates: int
    num_places: int
    row_devices: int | None = None

    @classmethod
    def of(cls, request: DictionarySettings, num_rows: int, num_features: int, num_partial: int = 0) -> "Plan":
        """The plan for (n, D) training rows, `num_partial` of them with missing features.

        `max_rank`: as many as keep the float32 statistics of all trees within 4 GiB at 8 nodes, but at least 50 and at
        most 100. It is at most half of the features, or 50 if that is more (without held-out rows to choose it by, 10),
        and no more than the data allow (with as many directions as features, nothing is left to estimate the noise
        from). With missing features, the rows' matrices at the candidate nodes of all trees must also fit within 4 GiB,
        and within 1 GiB for a rank above 50. Neighbours: 10, or more for very large n. `tree_rows`: all, up to 100,000.
        The smallest cell has 5 rows, or 10 if nodes borrow none: with fewer, a separate centre costs more than it
        gains. Depth: until cells reach twice that size, at most 7.
        """
        partial_candidates = request.missing_rows.num_candidates or PARTIAL_CANDIDATES
        limit = max(1, min(num_features, num_rows) - 1)
        numbers_per_row = STATISTICS_BYTES // (4 * request.num_trees * num_rows)
        max_rank = request.max_rank
        is_judged, span, noise = request.cross_fit is not None, request.shared_span, request.noise_covariance
        if max_rank is None:
            most = max(min(num_features, 50), num_features // 2) if is_judged else _unjudged_rank(num_features)
            max_rank = min(int(np.clip(numbers_per_row // FEWEST_CANDIDATES, 50, 100)), most)
            if num_partial > 0:
                per_square = 8 * request.num_trees * num_partial * partial_candidates
                most, quick = (int(np.sqrt(size / per_square)) for size in (STATISTICS_BYTES, QUICK_BYTES))
                max_rank = min(max_rank, max(1, most), max(50, quick))
        max_rank = min(max_rank, limit)
        min_cell_size = request.min_cell_size or max(2, min(10 if request.borrowed_rows is None else 5, num_rows // 4))
        depth = default_depth(num_rows, 2 * min_cell_size) if request.depth is None else request.depth
        num_neighbors = min(request.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
        tree_rows = min(request.tree_rows or TREE_ROWS, num_rows)
        is_complete, is_wide = num_partial == 0, uses_row_space(num_rows, num_features)
        return cls(
            request=request,
            num_rows=num_rows,
            num_features=num_features,
            num_partial=num_partial,
            tree=TreeOptions(num_neighbors, depth, min_cell_size),
            tree_rows=tree_rows,
            # Fills are more regular than values: normals would tell apart which rows miss which features. Of a tree
            # that is learned from some rows, the others go to the nearer centre, whatever the sides' normals.
            refines=(
                request.refined_cuts
                and request.num_trees > 1
                and is_complete
                and not is_wide
                and num_features <= MOST_FEATURES
                and tree_rows >= num_rows
            ),
            least_rank=1 if request.max_rank is None and is_judged else max_rank,
            max_rank=max_rank,
            span_rank=0 if span is None or span.rank is None else span.rank,
            tries_spans=is_judged and span is not None and span.rank is None,
            tries_noise_covariance=(
                is_judged
                and (is_complete or not is_wide)
                and noise is not None
                and (num_rows if is_wide else num_features) <= noise.max_features
            ),
            partial_candidates=partial_candidates,
            num_places=padded_size(num_rows - num_partial),
        )

    def on_mesh(self, row_devices: int | None) -> "Plan":
        """The same plan for statistics that go to the devices of a mesh, of which so many share the rows of a tree."""
        plan = dataclasses.replace(self, row_devices=row_devices)
        return dataclasses.replace(plan, num_places=plan.places(self.num_rows - self.num_partial))

    def over(self, num_features: int, num_partial: int) -> "Plan":
        """The same plan for some of the features; `num_partial` rows miss some of these."""
        plan = Plan.of(self.request, self.num_rows, num_features, num_partial).on_mesh(self.row_devices)
        # several processes have agreed on their places
        return dataclasses.replace(plan, num_places=self.num_places) if num_partial == self.num_partial else plan

    def among(self, sizes: tuple[int, ...], devices: tuple[int, ...], index: int) -> "Plan":
        """The same plan for process `index` of those that bring `sizes` rows, and share them over `devices` each.

        All devices have as many places.
        """
        step = math.lcm(ROW_BLOCKS, sum(devices)) // sum(devices)
        most = max(padded_size(max(1, -(-rows // own))) for rows, own in zip(sizes, devices, strict=True))
        num_places = -(-most // step) * step * devices[index]
        return dataclasses.replace(self, row_devices=devices[index], num_places=num_places)

    def places(self, num_rows: int) -> int:
        """Places for so many complete rows: a number that the devices can share evenly."""
        step = math.lcm(ROW_BLOCKS, self.row_devices or 1)
        return -(-padded_size(num_rows) // step) * step

    def with_fixed_rank(self) -> "Plan":
        """The same plan with one rank for all nodes, whatever held-out rows support.

        The rank that was asked for, otherwise a modest one.
        """
        return dataclasses.replace(self, least_rank=self.modest_rank, max_rank=self.modest_rank)

    @property
    def modest_rank(self) -> int:
        """The rank that was asked for; otherwise the most that leaves residuals to learn the features' noise from."""
        if self.request.max_rank is not None:
            return self.max_rank
        return min(self.max_rank, _unjudged_rank(self.num_features))

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a tree, absent ones included, K."""
        return 2 ** (self.tree.depth + 1) - 1

    @property
    def num_holdouts(self) -> int:
        """Number of dictionaries that are learned for a tree: one from all rows, and one without each fold."""
        return 1 if self.request.cross_fit is None else 1 + self.request.cross_fit.num_folds

    @property
    def seeks_rank(self) -> bool:
        """Whether held-out rows choose the number of directions per node."""
        return self.least_rank < self.max_rank

    def num_candidates(self, rank: int) -> int:
        """Nodes of each tree that a complete row may belong to, if nodes have `rank` directions.

        By default all of up to 31 nodes, and 16 of more; of a single feature all, as without a residual candidates
        cannot be told. If the float32 statistics of all trees then take more than 1 GiB, as many as fit in that, but at
        least 8.
        """
        wanted = self.request.num_candidates
        if wanted is None:
            fitting = CANDIDATE_BYTES // (4 * self.request.num_trees * self.num_rows * rank)
            is_whole = self.num_nodes <= FEW_NODES or rank == self.num_features
            most = self.num_nodes if is_whole else MOST_CANDIDATES
            wanted = min(most, max(fitting, FEWEST_CANDIDATES))
        return min(wanted, self.num_nodes)

    def subspaces(self, rank: int, seed: int) -> SubspaceOptions:
        """How the subspaces of a tree are learned, with at most `rank` directions."""
        return SubspaceOptions(rank, seed, self.request.parent_rows or 0.0)

    def noise(self, seed: int) -> NoiseOptions | None:
        """How the noise scales of the features are learned; None if all features are to have the same noise."""
        given = self.request.feature_noise
        if given is None:
            return None
        return NoiseOptions(given.num_rounds, given.num_folds, given.floor, self.modest_rank, seed)
