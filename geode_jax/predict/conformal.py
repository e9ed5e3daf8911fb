"""Intervals and p-values calibrated on held-out rows, for given patterns of missing features.

A fit is calibrated where features are missing at random. Where whole parts are missing together (half of a picture),
the observed features say less about the missing ones than the model assumes, because the errors of neighbouring
features correlate, and intervals are too narrow. Conformalised quantile regression (Romano, Patterson & Candes 2019)
corrects this with rows that were not in the fit: the same features are hidden in them, and intervals are widened (or
narrowed) in proportion to their width until they contain the wanted share of the hidden values.
"""

from collections.abc import Callable

import numpy as np

from geode_jax._typing import Bool, Float

Intervals = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Scores = Callable[[np.ndarray], np.ndarray]


def widening(
    intervals: Intervals, rows: Float[np.ndarray, "m D"], is_missing: Bool[np.ndarray, "n D"], probability: float
) -> float:
    """How much to widen `intervals` at either end, as a share of their width, to reach this probability; at least -0.5.

    `rows` are held out; each gets one of the patterns `is_missing`. Coverage is exact with one hidden feature per row;
    with more it holds on average over them. Intervals without a width are left out: no factor widens them. Raises
    ValueError if there are too few `rows` for the probability.
    """
    needed = int(np.ceil(probability / (1.0 - probability) - 1e-9))
    if rows.shape[0] < needed:
        raise ValueError(
            f"calibration: expected at least {needed} rows for intervals of probability {probability:g}, got"
            f" {rows.shape[0]}"
        )
    patterns = is_missing[is_missing.any(axis=1)]
    if patterns.shape[0] == 0:
        return 0.0
    # sorted, so that like patterns are neighbours: evenly spread ones then have each kind's share, whatever the order
    # of X. They go to the held-out rows at random, as these may have an order themselves.
    patterns = patterns[np.lexsort(np.packbits(patterns, axis=1).T[::-1])]
    place = np.random.default_rng(0).permutation(rows.shape[0])
    is_hidden = patterns[place * len(patterns) // place.size] & ~np.isnan(rows)
    is_usable = is_hidden.any(axis=1) & (~np.isnan(rows) & ~is_hidden).any(axis=1)
    rows, is_hidden = rows[is_usable], is_hidden[is_usable]
    if rows.shape[0] < needed:
        raise ValueError(
            f"calibration: expected at least {needed} rows that show something of what is missing in X, and something"
            f" else, got {rows.shape[0]}"
        )
    lower, upper = intervals(np.where(is_hidden, np.nan, rows))
    is_hidden &= lower != upper
    num_usable = int(is_hidden.any(axis=1).sum())
    if num_usable == 0:
        return 0.0
    if num_usable < needed:
        raise ValueError(
            f"calibration: expected at least {needed} rows whose intervals have a width, got {num_usable} of them"
        )
    lower, upper, truth = lower[is_hidden], upper[is_hidden], rows[is_hidden]
    beyond = np.maximum(lower - truth, truth - upper) / (upper - lower)
    # the finite-sample correction counts rows, which are independent; the features of a row are not
    level = np.clip(probability * (1.0 + 1.0 / num_usable) - 1e-9, 0.0, 1.0)
    return float(np.quantile(beyond, level, method="inverted_cdf"))


def p_values(scores: Float[np.ndarray, "n"], reference: Float[np.ndarray, "m"]) -> Float[np.ndarray, "n"]:
    """``(1 + number of reference scores that are not higher) / (1 + m)``; uniform if all scores are exchangeable."""
    return (1 + np.searchsorted(np.sort(reference), scores, side="right")) / (1 + reference.size)


def p_values_by_pattern(
    score: Scores, data: Float[np.ndarray, "n D"], rows: Float[np.ndarray, "m D"]
) -> Float[np.ndarray, "n"]:
    """P-values of `data`, each row against the held-out `rows` with the same features hidden.

    Held-out rows that miss a feature which the row shows are left out for it; ValueError if that leaves none.
    """
    patterns, pattern_of = np.unique(np.isnan(data), axis=0, return_inverse=True)
    found = np.empty(data.shape[0])
    for number, is_missing in enumerate(patterns):
        members = np.flatnonzero(pattern_of.reshape(-1) == number)
        is_usable = ~np.isnan(rows[:, ~is_missing]).any(axis=1)
        if not is_usable.any():
            raise ValueError(
                f"calibration: expected rows with values in all features that X[{members[0]}] shows, got none"
            )
        reference = score(np.where(is_missing, np.nan, rows[is_usable]))
        found[members] = p_values(score(data[members]), reference)
    return found
