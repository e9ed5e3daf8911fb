"""Divisors of the features: one unit per feature where held-out rows favour it, and noise scales."""

import numpy as np

from geode_jax.forest.plan import Plan
from geode_jax.learning.feature_noise import NoiseOptions, learn_feature_scales
from geode_jax.learning.units import UnitsTrial, choose_units, least_gain
from geode_jax.model.found import Decision
from geode_jax.partition.metis import Partition
from geode_jax.rows.frame import Frame
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.view import Rows, divide


def noise_scales(x: Rows, is_observed: np.ndarray | None, cells: Partition, options: NoiseOptions | None) -> np.ndarray:
    """Noise scale of every feature of x, (n, D), from disjoint cells; all 1 without options."""
    if options is None:
        return np.ones(x.shape[1])
    return learn_feature_scales(x, is_observed, cells, options).scales


def find_units(x: Rows, plan: Plan, seed: int, processes: Processes = ALONE) -> tuple[np.ndarray, tuple[Decision, ...]]:
    """Divisors of the features of x, (n, D) with NaN where missing: all 1, or one unit per feature.

    There is one unit per feature only if there is one noise scale per feature, and held-out rows favour it.
    """
    options = plan.noise(seed)
    if options is None:
        return np.ones(x.shape[1]), (Decision("units", "one for all features", "all features have the same noise"),)
    trial = choose_units(x, options, plan.tree, plan.max_rank, seed, processes)
    return trial.divisors, (_decision(trial),)


def _decision(trial: UnitsTrial) -> Decision:
    taken = "one for each feature" if (trial.divisors != 1.0).any() else "one for all features"
    if trial.gain is None:
        return Decision("units", taken, "the deviations of the features hardly differ")
    why = "gain of a unit for each feature"
    if trial.gain.is_clear and (trial.divisors == 1.0).all():
        why += f", {least_gain(trial.divisors.size):.2g} needed"
    return Decision("units", taken, why, *trial.gain)


def divide_by_units(
    x: Rows, frame: Frame, plan: Plan, seed: int, processes: Processes = ALONE
) -> tuple[Rows, Frame, tuple[Decision, ...]]:
    """Divide the rows by the units of :func:`find_units`, in place if they are an array, and update the frame."""
    divisors, decisions = find_units(x, plan, seed, processes)
    if (divisors != 1.0).any():
        x = divide(x, divisors)
    return x, frame.divided(divisors), decisions
