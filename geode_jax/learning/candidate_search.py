"""Candidate nodes of a row, where all nodes are too many: a beam search from the root down.

At every scale the search goes on to the children of the row's best nodes there, and keeps the best of all nodes seen,
by their density under the mixture of the tree's cells. In high dimension that mixture is overconfident in its best
node, so its probabilities do not say how much is lost. That is measured on the posterior (`lost_mass` in
`predict/held_out.py`).
"""

import numpy as np

from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.evidence import HeldOutStatistics, QuickMixture, cell_mixture, statistics_at, statistics_at_node
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.training import Training

# Nodes of a scale whose children are looked at, unless half of the candidates is more. On digits, Frey faces and a
# curved sheet, 16 found no better candidates.
BEAM = 8
# Rows that are searched together: enough for matrix products at deep nodes, few enough to hold their indices and a copy
# of their features.
SEARCHED_AT_ONCE, _BLOCK_NUMBERS = 2**14, 2**22
# About the numbers of a table of statistics of rows at all nodes.
_TABLE_NUMBERS = 2**24


def search_candidates(
    training: Training, rows: np.ndarray, partition: Partition, subspaces: Subspaces, width: int
) -> np.ndarray:
    """Good nodes of the given rows, `width` of them, ascending, (rows.size, width); all nodes if fewer are present.

    Nodes are scored by cross-fitted statistics of the observed features.
    """
    mixture = cell_mixture(training, partition, subspaces)
    width = min(width, mixture.nodes.size)
    # with b of them the search sees all nodes, or at least 2 b + 1
    beam = min(width, max(BEAM, width // 2))
    place = np.full(len(partition.cells), -1)
    place[mixture.nodes] = np.arange(mixture.nodes.size)
    num_features = training.num_features

    def search(block: np.ndarray) -> np.ndarray:
        own = Training(
            training.x[block],
            num_features,
            None if training.folds is None else training.folds[block],
            None if training.is_observed is None else training.is_observed[block],
            axes=training.axes,
            unseen=None if training.unseen is None else training.unseen.taken(block),
        )
        count = np.full(block.size, num_features) if own.is_observed is None else own.is_observed.sum(axis=1)

        # in coordinates of a row space, one product for all nodes is quicker than one for each that is visited; and a
        # row's own matrix is read once
        is_at_once = own.axes is not None or _has_own_matrices(training, block)
        table = statistics_at(own, np.arange(block.size), subspaces, mixture.nodes) if is_at_once else None

        def score(node: int, members: np.ndarray) -> np.ndarray:
            if table is None:
                residual, squared = statistics_at_node(own, members, subspaces, node)
            else:
                residual, squared = (values[place[node], members] for values in table)
            alone = _only(mixture, int(place[node]))
            observed = count[:1] if own.is_observed is None else count[members]
            there = HeldOutStatistics(
                alone.nodes, residual[None], squared[None], alone.has_direction, observed, num_features
            )
            return alone.log_densities(there)[0]

        found = np.zeros((block.size, 0), dtype=np.int32)
        scores = np.zeros((block.size, 0))
        front = np.zeros((block.size, 1), dtype=np.int32)
        while True:
            here = np.full(front.shape, -np.inf)
            order = np.argsort(front, axis=None, kind="stable")
            nodes, starts = np.unique(front.ravel()[order], return_index=True)
            for node, members in zip(nodes.tolist(), np.split(order, starts[1:]), strict=True):
                if node >= 0:
                    here.flat[members] = score(node, members // front.shape[1])
            found, scores = _keep(np.hstack([found, front]), np.hstack([scores, here]), width)
            front = _keep(front, here, beam)[0]
            children = np.stack([2 * front + 1, 2 * front + 2], axis=2).reshape(block.size, -1)
            exists = (front >= 0).repeat(2, axis=1) & (children < place.size)
            front = np.where(exists & (place[np.where(exists, children, 0)] >= 0), children, -1).astype(np.int32)
            front = front[:, (front >= 0).any(axis=0)]
            if front.shape[1] == 0:
                return np.sort(found, axis=1)

    # neighbouring rows are searched together: they visit the same nodes, and are adjacent in memory
    order = np.argsort(partition.leaf_order()[rows], kind="stable")
    found = np.empty((rows.size, width), dtype=np.int32)
    if rows.size == 0:
        return found
    size = searched_at_once(training)
    if _has_own_matrices(training, rows):
        size = min(size, max(1, _TABLE_NUMBERS // (mixture.nodes.size * subspaces.bases.shape[3])))
    found[order] = np.concatenate(parallel_map(search, np.array_split(rows[order], -(-rows.size // size))))
    return found


def _has_own_matrices(training: Training, rows: np.ndarray) -> bool:
    """Whether some of the rows are whitened and miss features: what they do not show takes a large matrix each."""
    return training.unseen is not None and bool((training.unseen.place[rows] >= 0).any())


def searched_at_once(training: Training) -> int:
    """How many rows one core searches together."""
    return min(SEARCHED_AT_ONCE, max(1, _BLOCK_NUMBERS // training.x.shape[1]))


def _only(mixture: QuickMixture, index: int) -> QuickMixture:
    return QuickMixture(*(table[index : index + 1] for table in mixture))


def _keep(nodes: np.ndarray, scores: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The `width` nodes of highest score for every row, and their scores."""
    if nodes.shape[1] <= width:
        return nodes, scores
    best = np.argpartition(-scores, width - 1, axis=1)[:, :width]
    return np.take_along_axis(nodes, best, axis=1), np.take_along_axis(scores, best, axis=1)
