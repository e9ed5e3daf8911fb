"""Intervals that hold for the patterns of missing features at hand, by rows that are held out.

A fit is calibrated where features are missing here and there. Where whole parts are missing together (half of a
picture), what is left tells less than the model thinks, as the errors of neighbouring features hang together, and
intervals are too narrow. Conformalised quantile regression (Romano, Patterson & Candes 2019) mends that with rows that
the fit has not seen: they lose what the rows at hand have lost, and intervals are widened (or narrowed) in proportion
to their width until they hold the wanted share of what was hidden.
"""

from collections.abc import Callable

import numpy as np

from geode_jax._typing import Bool, Float

Intervals = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def widening(
    intervals: Intervals, rows: Float[np.ndarray, "m D"], is_missing: Bool[np.ndarray, "n D"], probability: float
) -> float:
    """By how much of their width, at either end, `intervals` have to grow to hold with this probability; from -0.5 on.

    `rows` are held out, `is_missing` are patterns of which every row gets one. Exact for one hidden feature per row;
    with more, it is the average over them that holds. Raises ValueError where `rows` are too few for the probability.
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
    # evenly spread patterns, or all of them in turn
    number = np.arange(rows.shape[0])
    index = number % len(patterns) if len(patterns) < number.size else number * len(patterns) // number.size
    is_hidden = patterns[index] & ~np.isnan(rows)
    is_usable = is_hidden.any(axis=1) & (~np.isnan(rows) & ~is_hidden).any(axis=1)
    rows, is_hidden = rows[is_usable], is_hidden[is_usable]
    if rows.shape[0] < needed:
        raise ValueError(
            f"calibration: expected at least {needed} rows that show something of what is missing in X, and something"
            f" else, got {rows.shape[0]}"
        )
    lower, upper = (end[is_hidden] for end in intervals(np.where(is_hidden, np.nan, rows)))
    truth, width = rows[is_hidden], upper - lower
    beyond = np.maximum(lower - truth, truth - upper) / np.where(width > 0.0, width, np.finfo(width.dtype).tiny)
    # rows are independent, features of a row are not: the correction for few is by rows
    level = min(1.0, probability * (1.0 + 1.0 / rows.shape[0]) - 1e-9)
    return float(np.quantile(beyond, level, method="inverted_cdf"))
