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
# Nats per row and feature that one unit per feature must gain. In trials on training rows, tables in different units
# gained 0.08 (diabetes) to 3, tables in one unit at most 0.05, pictures and spectra at most 0.02. Pictures in whole
# grey levels gained 0.02 to 0.11: some of them get a unit for each pixel.
LEAST_GAIN = 0.075
# Deviations within this factor of each other are left to the noise scales.
SMALL_RATIO = 2.0
# Moments about the mean are known where they are more than this share of those about 0.
RESOLVED = 1e-10
# An entry that is further off, in deviations that others tell of, is a surprise in any unit, and costs no more.
FURTHEST = 50.0


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
    `LEAST_GAIN` per feature, less what rows surely lose if deviations are learned without their fold: one or two
    wild entries do not decide for all. Missing entries are filled once, where every feature has its own unit, and only
    observed entries count.
    """
    ones = np.ones(x.shape[1])
    sums = _power_sums(x, processes)
    deviations, _ = _deviations(sums)
    if deviations.max() < SMALL_RATIO * deviations.min():
        return UnitsTrial(ones, None)
    rng = np.random.default_rng(seed)
    features = np.sort(rng.permutation(x.shape[1])[:MOST_FEATURES])
    rows = np.sort(rng.permutation(processes.count(x.shape[0]))[:LARGEST_SAMPLE])
    sample = processes.joined(x[np.ix_(processes.own(rows), features)])
    sample = sample[~np.isnan(sample).all(axis=1)]
    is_observed = ~np.isnan(sample)
    num_rows = sample.shape[0]
    own, observed = deviations[features], sample
    seen = None if is_observed.all() else is_observed
    if seen is not None:
        sample = fill_low_rank(as_array(View(sample, own)), seen, max_rank, seed) * own.astype(sample.dtype)
    fewest = min(tree.min_cell_size, max(2, num_rows // 4))
    depth = min(tree.depth, default_depth(num_rows, 2 * fewest))

    cells: list[Partition] = []

    def held_out(units: np.ndarray) -> np.ndarray:
        scaled = as_array(View(sample, units))
        graph = neighbour_graph(scaled, tree.num_neighbors, seed)
        cells.append(middle_cells(partition_rows(scaled, graph, depth, fewest, seed)))
        found = learn_feature_scales(scaled, seen, cells[-1], noise)
        return found.log_density - is_observed[found.rows] @ np.log(units)

    gain = Gain.of(held_out(own) - held_out(ones[features]))
    if _is_worth(gain, features.size):
        folds = noise_folds(observed, None, noise)
        relative = _relative(sums[:, features], observed, folds)
        price = price_of_unseen(as_array(View(sample, own)), seen, cells[0], noise, folds, relative)
        gain = gain._replace(mean=gain.mean - Gain.of(price).least)
    is_taken = _is_worth(gain, features.size)
    return UnitsTrial(deviations if is_taken else ones, gain)


def least_gain(num_features: int) -> float:
    """What a unit for each of so many features must gain, in nats per row."""
    return LEAST_GAIN * min(num_features, MOST_FEATURES)


def _is_worth(gain: Gain, num_features: int) -> bool:
    return gain.is_clear and gain.mean > least_gain(num_features)


def _relative(sums: np.ndarray, sample: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Every feature's deviation without each fold of the sample, over that of all rows, (F, D).

    1 where nothing varies without the fold: such a feature would be left out.
    """
    deviations, _ = _deviations(sums)
    found = [_deviations(sums - _power_sums(sample[folds == fold])) for fold in range(folds.max() + 1)]
    relative = [np.where(varies, own / deviations, 1.0) for own, varies in found]
    return np.clip(np.stack(relative), 1.0 / FURTHEST, FURTHEST)


def _power_sums(x: Rows, processes: Processes = ALONE) -> np.ndarray:
    """Sums over every feature's observed entries of their powers from 0 to 4, (5, D)."""
    sums = np.zeros((5, x.shape[1]))
    for rows in slices(*x.shape):
        own = x[rows].astype(np.float64)
        sums[0] += (~np.isnan(own)).sum(axis=0)
        power = np.ones_like(own)
        for number in range(1, 5):
            power *= own
            sums[number] += np.nansum(power, axis=0)
    return np.asarray(processes.total(sums))


def _deviations(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each feature's deviations from its mean, ``(E x^4 / (3 E x^2))^(1/2)``, from :func:`_power_sums`.

    For a Gaussian it is the standard deviation. A pixel that is dark in all but a few rows has a small standard
    deviation, though it shares the unit of the others: weighting by squares measures it in those few rows. Features
    that do not vary get the geometric mean of the others. Also which do vary.
    """
    mean, *raw = sums[1:] / np.maximum(sums[0], 1.0)
    second = raw[0] - np.square(mean)
    fourth = raw[2] - 4.0 * mean * raw[1] + 6.0 * np.square(mean) * raw[0] - 3.0 * mean**4
    # a column's own affair: how much others vary says nothing of it
    varies = (second > RESOLVED * raw[0]) & (fourth > RESOLVED * raw[2])
    deviations = np.sqrt(np.where(varies, fourth, 1.0) / np.where(varies, 3.0 * second, 1.0))
    deviations[~varies] = np.exp(np.log(deviations[varies]).mean()) if varies.any() else 1.0
    return deviations, varies
