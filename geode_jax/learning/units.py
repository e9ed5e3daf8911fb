"""One unit for all features, or one for each: distances, trees and directions depend on it, and no prior decides it.

Pixels share a unit, and division by their deviations would inflate those that hardly ever vary. The columns of a table
may be in millimetres and in per cent, and without division only the largest would count. Held-out density decides.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.learning.evidence import Gain
from geode_jax.learning.feature_noise import (
    NoiseOptions,
    learn_feature_scales,
    middle_cells,
    noise_folds,
    price_of_unseen,
)
from geode_jax.learning.first_fill import fill_low_rank
from geode_jax.partition.metis import TreeOptions, default_depth, partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.blocks import slices
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.view import Rows, View, as_array

# Numbers of rows and features that are enough to decide between the two answers.
LARGEST_SAMPLE, MOST_FEATURES = 2000, 500
# Nats per row and feature that one unit per feature must gain: tables in different units gain one, images hundredths.
LEAST_GAIN = 0.1
# Deviations within this factor of each other are left to the noise scales.
SMALL_RATIO = 2.0


class UnitsTrial(NamedTuple):
    """Divisors of the features, (D,): all 1, or their deviations.

    `gain`: that of the deviations, per row of the sample; None if they hardly differ, so that nothing was tried.
    """

    divisors: np.ndarray
    gain: Gain | None


def choose_units(
    x: Rows, noise: NoiseOptions, tree: TreeOptions, max_rank: int, seed: int, processes: Processes = ALONE
) -> UnitsTrial:
    """Divisors of the features of x, (n, D) with NaN where missing, column means near 0: all 1, or their deviations.

    Both are tried on a sample of rows and features: a tree is grown, and noise scales are learned on top. Deviations
    are used only if they clearly raise the held-out density of the rows, Jacobian included, and by more than
    `LEAST_GAIN` per feature. A row is judged by deviations that are learned without its fold. Missing entries are
    filled once, where every feature has its own unit, and only observed entries count.
    """
    ones = np.ones(x.shape[1])
    powers = _power_sums(x, processes)
    deviations = _deviations(powers)
    if deviations.max() < SMALL_RATIO * deviations.min():
        return UnitsTrial(ones, None)
    rng = np.random.default_rng(seed)
    features = np.sort(rng.permutation(x.shape[1])[:MOST_FEATURES])
    rows = np.sort(rng.permutation(processes.count(x.shape[0]))[:LARGEST_SAMPLE])
    sample = processes.joined(x[np.ix_(processes.own(rows), features)])
    sample = sample[~np.isnan(sample).all(axis=1)]
    is_observed = ~np.isnan(sample)
    num_rows = sample.shape[0]
    folds = noise_folds(num_rows, noise)
    of_folds = [_power_sums(sample[folds == fold]) for fold in range(folds.max() + 1)]
    own = np.stack(
        [deviations[features], *(_deviations(np.maximum(powers[:, features] - part, 0.0)) for part in of_folds)]
    )
    seen = None if is_observed.all() else is_observed
    if seen is not None:
        sample = fill_low_rank(as_array(View(sample, own[0])), seen, max_rank, seed) * own[0].astype(sample.dtype)
    fewest = min(tree.min_cell_size, max(2, num_rows // 4))
    depth = min(tree.depth, default_depth(num_rows, 2 * fewest))

    cells: list[Partition] = []

    def held_out(units: np.ndarray) -> np.ndarray:
        scaled = as_array(View(sample, units))
        graph = neighbour_graph(scaled, tree.num_neighbors, seed)
        cells.append(middle_cells(partition_rows(scaled, graph, depth, fewest, seed)))
        found = learn_feature_scales(scaled, seen, cells[-1], noise)
        return found.log_density - is_observed[found.rows] @ np.log(units)

    gains = held_out(own[0]) - held_out(ones[features])
    price = price_of_unseen(as_array(View(sample, own[0])), seen, cells[0], noise, own[1:] / own[0])
    gain = Gain.of(gains - price)
    is_taken = gain.is_clear and gain.mean > LEAST_GAIN * features.size
    return UnitsTrial(deviations if is_taken else ones, gain)


def _power_sums(x: Rows, processes: Processes = ALONE) -> np.ndarray:
    """Sums of the second and fourth powers of every feature's observed entries, (2, D)."""
    second, fourth = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for rows in slices(*x.shape):
        square = np.square(x[rows].astype(np.float64))
        second += np.nansum(square, axis=0)
        fourth += np.nansum(np.square(square), axis=0)
    return np.stack([processes.total(second), processes.total(fourth)])


def _deviations(powers: np.ndarray) -> np.ndarray:
    """The scale of each feature's deviations from its mean, ``sqrt(E x^4 / (3 E x^2))``, from :func:`_power_sums`.

    For a Gaussian it is the standard deviation. A pixel that is dark in all but a few rows has a small standard
    deviation, though it shares the unit of the others: weighting by squares measures it in those few rows. Features
    whose squares vanish get the geometric mean of the others. Only observed entries count.
    """
    second, fourth = powers
    varies = second > 0.0  # a column's own affair: how much others vary says nothing of it
    deviations = np.sqrt(fourth / np.where(varies, 3.0 * second, 1.0))
    deviations[~varies] = np.exp(np.log(deviations[varies]).mean())
    return deviations
