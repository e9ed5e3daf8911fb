"""Copies: equal rows that are one observation several times, as in a bootstrap sample or a class that was oversampled.

Held out alone, a copy is no new row: the dictionary has seen it. So all copies of a row are in one fold. Rows of few
different values, as answers to some questions, are equal by chance, and so are many rows of zeros: these are rows of
their own, as far as can be told.
"""

import numpy as np

from geode_jax.rows.blocks import slices
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.view import Rows

# Equal rows are copies if at most this share of their pairs can be expected where all columns are independent. (They
# are not, and some more are equal by chance: in iris one pair, where 0.06 are expected.)
MOST_BY_CHANCE = 0.01
# Rows and features from which that is estimated. Rows that differ in so many features are not compared in the others.
SOME_ROWS, SOME_FEATURES = 2000, 100
# Groups of a larger share of all rows are no copies, and would leave little to learn from without their fold.
LARGEST_SHARE = 0.1


def groups_of_copies(x: Rows, is_observed: np.ndarray | None = None, processes: Processes = ALONE) -> np.ndarray | None:
    """The number of the group of copies that each of everyone's rows is in, (n,); None where no row has copies.

    Values that are NaN, or not observed, are equal to each other.
    """
    rng, num_features = np.random.default_rng(0), x.shape[1]
    for number in sorted({min(num_features, SOME_FEATURES), num_features}):
        features = np.sort(rng.choice(num_features, number, replace=False))
        halves = [processes.joined(half) for half in _hashes(x, is_observed, features, rng)]
        _, group, count = np.unique(halves[0] + 1j * halves[1], return_inverse=True, return_counts=True)
        is_large = (count > LARGEST_SHARE * group.size)[group]
        if (count[group] == 1)[~is_large].all():
            return None
    # rows of large groups get numbers of their own
    group = np.where(is_large, count.size + np.arange(group.size), group)
    _, first, group, count = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    pairs, total = float((count * (count - 1.0)).sum()), float(count.sum())
    chance = _share_of_equal_pairs(x, is_observed, processes) * total * (total - 1.0)
    if chance > MOST_BY_CHANCE * pairs:
        return None
    # in the order of the rows: that of hashes would change with the last bits of the values, and folds with it
    return np.argsort(np.argsort(first))[group]


def _hashes(
    x: Rows, is_observed: np.ndarray | None, features: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Two whole numbers for every row, (n,) each, the same for rows that are equal in the features.

    Other rows have the same by a rare chance only. Floats, as processes exchange these.
    """
    factor, start = rng.integers(2**63, size=(2, features.size), dtype=np.uint64)
    factor = 2 * factor + np.uint64(1)
    found = np.empty(x.shape[0], np.uint64)
    for some in slices(*x.shape):
        block = x[some][:, features] + 0.0  # -0 equals 0
        is_missing = np.isnan(block) if is_observed is None else ~is_observed[some][:, features]
        bits = np.ascontiguousarray(block).view(np.uint32 if block.dtype.itemsize == 4 else np.uint64).astype(np.uint64)
        mixed = (np.where(is_missing, np.uint64(2**63), bits) + start) * factor
        mixed ^= mixed >> np.uint64(32)
        found[some] = (mixed * factor).sum(axis=1, dtype=np.uint64)
    return (found >> np.uint64(32)).astype(np.float64), (found & np.uint64(2**32 - 1)).astype(np.float64)


def _share_of_equal_pairs(x: Rows, is_observed: np.ndarray | None, processes: Processes) -> float:
    """The share of all pairs of rows that would be equal if columns were independent, from some rows and columns."""
    rows = processes.sample(np.arange(x.shape[0]), SOME_ROWS)
    features = np.unique(np.linspace(0, x.shape[1] - 1, min(x.shape[1], SOME_FEATURES)).astype(int))
    some = x[rows][:, features].astype(np.float64)
    if is_observed is not None:
        some[~is_observed[rows][:, features]] = np.nan
    some = processes.joined(np.where(np.isnan(some), np.finfo(float).max, some))
    share, pairs = 1.0, len(some) * (len(some) - 1.0)
    for column in some.T:
        count = np.unique(column, return_counts=True)[1]
        share *= float((count * (count - 1.0)).sum()) / pairs
    return share
