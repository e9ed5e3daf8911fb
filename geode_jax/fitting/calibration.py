"""Calibration of class probabilities: the power of the class densities that predicts training rows best."""

from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from geode_jax.posterior.classes import ClassPosterior
from geode_jax.predict.classes import class_log_densities, mean_over_draws
from geode_jax.rows.files import RowFiles
from geode_jax.rows.frame import to_model, view_in_model
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.view import has_missing

# At most this many training rows are used for calibration.
CALIBRATION_ROWS = 5000
# The same for partially observed rows, each of which costs as much as many complete ones.
PARTIAL_CALIBRATION_ROWS = 1000


def calibrated_powers(
    posterior: ClassPosterior,
    data: np.ndarray | RowFiles,
    index: np.ndarray,
    held_out: list[np.ndarray],
    processes: Processes = ALONE,
) -> tuple[float, float]:
    """The `power` and `power_exponent` that give the true classes of training rows the highest probability.

    Errors of neighbouring features correlate, so that a density of many features is overconfident, and less so if few
    of them are observed: the exponent is learned from rows in which features are hidden at random. For the true class
    of a row its leave-one-out density is used; `held_out` has these for the complete rows of every class. Only complete
    rows are used, the same share of every class; with fewer than two per class on average, the powers are 1 and 0.
    Where rows are divided among `processes`, each passes its own, and all compute the same from the chosen ones.
    """
    counted = data if posterior.features is None else view_in_model(data, posterior.frame, posterior.dtype)
    is_complete = ~has_missing(counted)
    log_own = np.full(data.shape[0], np.nan)
    for number, values in enumerate(held_out):
        log_own[(index == number) & is_complete] = values
    candidates = np.flatnonzero(is_complete)
    # every k-th row of each class, in the order of all rows
    own = processes.joined(index[candidates])
    everyones = _at_most(np.argsort(own, kind="stable"), CALIBRATION_ROWS)
    if everyones.size < 2 * posterior.num_classes or posterior.num_classes < 2:
        return 1.0, 0.0

    before = int(processes.before_and_total(np.array(candidates.size))[0])
    place = np.sort(everyones) - before
    chosen = candidates[place[(place >= 0) & (place < candidates.size)]]
    order = np.argsort(np.argsort(everyones))
    own = own[everyones]
    rows = processes.joined(data[chosen].astype(np.float64))[order]
    log_own = processes.joined(log_own[chosen])[order]
    log_density = mean_over_draws(class_log_densities(posterior, rows))
    outside = posterior.log_density_outside(to_model(rows, posterior.frame, posterior.dtype))
    optimism = log_density[np.arange(own.size), own] - log_own - outside
    log_density[np.arange(own.size), own] -= optimism
    # with other class probabilities than the training rows' shares, rows count as often as these say (where classes
    # have complete rows in other shares than rows, nearly)
    counts = processes.total(np.bincount(index, minlength=posterior.num_classes))
    weight = (np.exp(posterior.log_prior) * counts.sum() / counts)[own]
    # at most 1: that the densities separate the training rows does not justify more confidence than they express
    power = float(np.exp(_best(posterior, log_density, own, weight, np.exp, (np.log(1e-3), 0.0))))
    if rows[:, posterior.varying_features].shape[1] < 2:
        return power, 0.0
    few = _at_most(np.arange(own.size), PARTIAL_CALIBRATION_ROWS)
    return power, _best_exponent(posterior, power, rows[few], own[few], optimism[few], weight[few])


def _at_most(index: np.ndarray, number: int) -> np.ndarray:
    """At most `number` entries of `index`, evenly spaced."""
    return index[:: max(1, -(-index.size // number))]


def _best_exponent(
    posterior: ClassPosterior,
    power: float,
    rows: np.ndarray,
    own: np.ndarray,
    optimism: np.ndarray,
    weight: np.ndarray,
) -> float:
    """The exponent that fits best after features of each row are hidden at random, at least one being kept.

    At most 0: few observed features are not trusted less each than many. Where classes are far apart, one or two rows
    would decide for a larger exponent, also for rows that show much less than they do.
    """
    rng = np.random.default_rng(0)
    hidden = rows.copy()
    counted = rows[:, posterior.varying_features]
    kept = rng.random(counted.shape) < rng.uniform(0.2, 0.8, (own.size, 1))
    kept[np.arange(own.size), rng.integers(counted.shape[1], size=own.size)] = True
    share = kept.mean(axis=1, keepdims=True)
    hidden[:, posterior.varying_features] = np.where(kept, counted, np.nan)
    log_density = mean_over_draws(class_log_densities(posterior, hidden))
    # the optimism of a row's density under the class that was learned from it adds up over features
    log_density[np.arange(own.size), own] -= optimism * share[:, 0]

    def power_at(value: float) -> np.ndarray:
        return np.minimum(1.0, power * share**value)

    return _best(posterior, log_density, own, weight, power_at, (-2.0, 0.0))


def _best(
    posterior: ClassPosterior,
    log_density: np.ndarray,
    own: np.ndarray,
    weight: np.ndarray,
    power: Callable[[float], np.ndarray | float],
    bounds: tuple[float, float],
) -> float:
    """The value for which densities raised to ``power(value)`` give the rows' true classes the highest probability.

    `weight`, (n,): how much each row counts.
    """

    def loss(value: float) -> float:
        scores = posterior.log_prior + power(value) * log_density
        return float(-np.average(special.log_softmax(scores, axis=1)[np.arange(own.size), own], weights=weight))

    return float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").x)
