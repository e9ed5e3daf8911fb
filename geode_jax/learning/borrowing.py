"""What nodes borrow from their parents' cells: the spread of the rows along a node's directions, relative to the noise.

A cell of few rows cannot tell its variances from those rows alone. Rows nearby help: those of the parent's cell, each
about the centre of its own child cell, spread along the node's directions much as the node's own do.
"""

from typing import NamedTuple

import numpy as np

from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.evidence import cell_mixture, fit_quick_mixture, residuals_of_scales
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.frame import FAR_SHARE
from geode_jax.rows.processes import sample_part
from geode_jax.rows.training import Training

# A mean over this many rows of a cell is precise enough: a node borrows a few rows' worth of it.
ENOUGH_ROWS = 256
# In model coordinates, of variance 1 before the features are divided by their noise scales: what float32 resolves, for
# data without noise.
LEAST_NOISE = 1e-7
# The same where noise cannot be told from signal. (In units of the variance after that division diabetes loses 0.7 nats
# a row, and nothing else changes.)
UNKNOWN_NOISE = 0.3
# Noise of a scale's own cells that is more than so many times the square of the row which all but a FAR_SHARE are
# smaller than, and more than `UNKNOWN_NOISE`, is that of a few far rows. Some rows tell.
MOST_OF_USUAL, SOME_ROWS = 10.0, 1000


def typical_noise(training: Training, partition: Partition, subspaces: Subspaces) -> np.ndarray:
    """The noise variance of every scale, (S,).

    That of the quick mixture (`evidence.py`), in which rows choose their scale as in the sampler, together with one row
    of the noise that the rows have at their own cells: the mixture may leave a scale without rows. A scale without
    nodes has the noise of the one above it. That one row is bounded: a few rows that are far from all others, and from
    their own cells too, would make the noise of every scale.
    """
    most = max(MOST_OF_USUAL * _usual_square(training), UNKNOWN_NOISE)
    own, own_freedom = residuals_of_scales(cell_mixture(training, partition, subspaces), partition.depth + 1)
    chosen, freedom = residuals_of_scales(fit_quick_mixture(training, partition, subspaces), partition.depth + 1)
    noise = np.zeros(partition.depth + 1)
    for scale in range(noise.size):
        if own_freedom[scale] > 0.0:
            one_row = training.num_features * min(own[scale] / own_freedom[scale], most)
            noise[scale] = (chosen[scale] + one_row) / (freedom[scale] + training.num_features)
        else:
            noise[scale] = noise[scale - 1] if scale > 0 else UNKNOWN_NOISE
    return np.maximum(noise, LEAST_NOISE)


def _usual_square(training: Training) -> float:
    """The `1 - FAR_SHARE` quantile, over rows, of a row's mean squared coordinate."""
    rows = training.processes.sample(np.arange(training.x.shape[0]), SOME_ROWS)
    x = training.x[rows]
    squares = training.processes.joined(np.einsum("ij,ij->i", x, x, dtype=np.float64)) / training.num_features
    return float(np.quantile(squares, 1.0 - FAR_SHARE))


def with_unknown(noise: np.ndarray, training: Training) -> np.ndarray:
    """The typical noise (S,) as the prior counts it: in a share of the prior's rows one feature has `UNKNOWN_NOISE`.

    The share is 1 at the root, which must be able to take up a row unlike all others. At other scales it is the share
    of rows that miss features. Filled features have no noise of their own, and where few are seen, nodes pass near all
    that is seen of a row: intervals of its hidden features would be too narrow.
    """
    share = np.zeros(noise.size)
    if training.is_observed is not None:
        share[:] = training.partial.size / training.x.shape[0]
    share[0] = 1.0
    return noise + share * (UNKNOWN_NOISE - noise) / training.num_features


class Nearby(NamedTuple):
    """Of the rows of the parent's cell, for every node.

    `signal`, (K, d): mean squared coordinates along the node's directions, over the noise. `share`, (K,): how many of
    the rows are complete; the others are left out. Both are 0 at the root and at absent nodes.
    """

    signal: np.ndarray
    share: np.ndarray


def rows_nearby(training: Training, partition: Partition, subspaces: Subspaces, noise: np.ndarray) -> Nearby:
    """What nodes may borrow; `noise`, (S,), is the variance of every scale.

    Each row is taken about the centre of its own child cell, and from dictionaries that left its fold out. Rows with
    missing features are left out: as filled, they spread less than they do.
    """
    num_nodes, processes = len(partition.cells), training.processes
    found = Nearby(np.zeros((num_nodes, subspaces.bases.shape[3])), np.zeros(num_nodes))
    complete = np.zeros(training.x.shape[0], dtype=bool)
    complete[training.complete] = True
    kept = [np.arange(0) if rows is None else rows[complete[rows]] for rows in partition.cells]
    before, count = processes.before_and_total(np.array([rows.size for rows in kept]))
    nodes = [node for node in np.flatnonzero(partition.is_present).tolist() if node > 0]

    def squares(node: int) -> list[np.ndarray]:
        samples = [sample_part(kept[own], ENOUGH_ROWS, before[own], count[own]) for own in (node, _sibling(node))]
        pairs = zip(samples, (node, _sibling(node)), strict=True)
        return [_sum_of_squares(training, rows, subspaces, own, node) for rows, own in pairs]

    sums = processes.total(np.reshape(parallel_map(squares, nodes), (len(nodes), 2, subspaces.bases.shape[3])))
    for number, node in enumerate(nodes):
        cells = (node, _sibling(node))
        total = sum(int(count[own]) for own in cells)
        found.share[node] = total / sum(partition.size(own) for own in cells)
        for own, square in zip(cells, sums[number], strict=True):
            if count[own]:
                found.signal[node] += count[own] / total * (square / min(count[own], ENOUGH_ROWS))
        found.signal[node] /= noise[(node + 1).bit_length() - 1]
    return found


def _sibling(node: int) -> int:
    return node + 1 if node % 2 else node - 1


def _sum_of_squares(training: Training, rows: np.ndarray, subspaces: Subspaces, own: int, node: int) -> np.ndarray:
    """Sums of squared coordinates of rows along the directions of `node`, about the centre of `own`, (d,)."""
    holdout = training.holdouts_of(rows)
    total = np.zeros(subspaces.bases.shape[3])
    for number in np.unique(holdout):
        centred = training.x[rows[holdout == number]] - subspaces.centres[number, own]
        total += np.square(centred @ subspaces.bases[number, node]).sum(axis=0, dtype=np.float64)
    return total
