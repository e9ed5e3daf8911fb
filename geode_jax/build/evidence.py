"""How well a dictionary describes rows that it has not seen: what choices in stage one are made by.

The mixture of the model with one variance per node and direction and one noise level per scale, fitted by a few steps
of EM to cross-fitted statistics. On held-out data its differences between dictionaries predict those of the full model
(`python -m benchmarks.choices`), for a small part of the cost.
"""

import numpy as np
from scipy import special

from geode_jax.build.partition import Partition
from geode_jax.build.subspace import Subspaces

NUM_STEPS = 25
# Rows beyond this many are left out of the score, not of the dictionary.
LARGEST_SAMPLE = 4000


def cross_fitted_log_likelihood(
    x: np.ndarray, partition: Partition, subspaces: Subspaces, folds: np.ndarray
) -> np.ndarray:
    """Log density of (a sample of) the rows under a mixture fitted to their cross-fitted statistics, (rows,)."""
    rows = np.linspace(0, x.shape[0] - 1, min(x.shape[0], LARGEST_SAMPLE)).astype(int)
    nodes = np.flatnonzero(partition.is_present)
    residual, squared = _statistics(x[rows], folds[rows], subspaces, nodes)
    ranks = subspaces.ranks[nodes]
    has_direction = np.arange(squared.shape[2]) < ranks[:, None]
    scale = np.floor(np.log2(nodes + 1)).astype(int)
    member = np.zeros((nodes.size, x.shape[0]), dtype=bool)
    for index, node in enumerate(nodes):
        member[index, partition.cells[node]] = True
    share = member[:, rows] / member[:, rows].sum(axis=0)
    num_features = x.shape[1]
    log_density = np.zeros((nodes.size, rows.size))
    for _ in range(NUM_STEPS):
        count = share.sum(axis=1)
        noise = np.empty(scale.max() + 1)
        for level in range(noise.size):
            at = scale == level
            # one row's worth of the average noise keeps empty scales proper
            freedom = (count[at] * (num_features - ranks[at])).sum()
            noise[level] = ((share[at] * residual[at]).sum() + 1.0) / (freedom + 1.0)
        noise_at = noise[scale][:, None]
        second = np.einsum("kn,knd->kd", share, squared, optimize=True)
        variance = np.maximum((second + 3.0 * noise_at) / (count[:, None] + 3.0), noise_at)
        constant = num_features * np.log(2 * np.pi * noise_at[:, 0]) + np.sum(
            np.log(variance / noise_at) * has_direction, axis=1
        )
        along = np.einsum("knd,kd->kn", squared, has_direction / variance, optimize=True)
        log_weight = np.log((count + 0.5) / (rows.size + 0.5 * nodes.size))
        log_density = log_weight[:, None] - 0.5 * (constant[:, None] + residual / noise_at + along)
        share = special.softmax(log_density, axis=0)
    return special.logsumexp(log_density, axis=0)


def _statistics(
    x: np.ndarray, folds: np.ndarray, subspaces: Subspaces, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared residuals (K, n) and squared coordinates (K, n, d) of rows, from the dictionaries without their folds."""
    num_directions = subspaces.bases.shape[3]
    residual = np.zeros((nodes.size, x.shape[0]), dtype=x.dtype)
    squared = np.zeros((nodes.size, x.shape[0], num_directions), dtype=x.dtype)
    for fold in range(subspaces.centres.shape[0] - 1):
        inside = np.flatnonzero(folds == fold)
        for index, node in enumerate(nodes):
            centred = x[inside] - subspaces.centres[1 + fold, node]
            basis = subspaces.bases[1 + fold, node]
            coordinates = centred @ basis
            residual[index, inside] = np.square(centred - coordinates @ basis.T).sum(axis=1)
            squared[index, inside] = np.square(coordinates)
    return residual, squared
