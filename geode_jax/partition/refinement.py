"""A cut of a cell, refined: rows go over to the side whose normal distribution describes them better.

METIS cuts few edges between neighbours and balances the sides. That needs no shape of the cells, and knows of none:
where two sheets cross, or one bends, rows of different parts are neighbours. Here either side gets a normal with a few
directions of its own, rows change sides, and the normals are learned again: k-subspaces clustering (Bradley &
Mangasarian, k-plane clustering, 2000), or a hard form of the EM algorithm for two probabilistic principal component
analysers (Tipping & Bishop 1999).
"""

from typing import NamedTuple

import numpy as np
from sklearn.utils.extmath import randomized_svd

# Sides are learned along the first principal axes of a cell's rows, this many at most.
MOST_COORDINATES = 32
# Numbers of directions that a side may have, at most all but one of the features, and rows of a side for each.
DIRECTIONS, ROWS_PER_DIRECTION = (1, 2, 3, 4, 6, 8, 12, 16, 24, 31), 4
MOST_ROUNDS = 8
# A side keeps this share of the rows at least: nodes of a scale are to be of comparable size.
LEAST_SHARE = 0.1
# In a side's covariance this many rows count that vary equally along all its directions, as a parent's rows do in that
# of a cell (`parent_rows`): a few rows tell small variances as too small.
PRIOR_ROWS = 3.0
# Sides with fewer rows are left as they are.
FEWEST_ROWS = 6
# How much of a row's own place a side may owe to the row.
LARGEST_LEVERAGE = 0.9
# The least variance of a side, relative to the mean one of the cell: rows may be equal.
NARROWEST = 1e-9


class _Rows(NamedTuple):
    """A cell's rows about their mean: `along` the first principal axes, (n, p), and `beyond` these, squared, (n,)."""

    along: np.ndarray
    beyond: np.ndarray
    num_features: int

    @property
    def mean_square(self) -> float:
        """The mean variance of a feature."""
        return float(np.square(self.along).sum() + self.beyond.sum()) / (len(self.along) * self.num_features)


def refined(x: np.ndarray, is_right: np.ndarray, min_cell_size: int, seed: int) -> np.ndarray:
    """The cut of rows x, (n, D), with rows moved: True is right, (n,); no side gets fewer than `min_cell_size` rows.

    Both sides have the number of directions that describes the rows best, each without itself, where the cut was.
    """
    num_rows, num_features = x.shape
    smallest = min(int(is_right.sum()), num_rows - int(is_right.sum()))
    if smallest < max(FEWEST_ROWS, min_cell_size) or num_features == 1:
        return is_right
    rows = _rows(x, seed)
    if rows.mean_square == 0.0:
        return is_right
    most = max(1, min(smallest // ROWS_PER_DIRECTION, num_features - 1))
    rank = max((r for r in DIRECTIONS if r <= most), key=lambda rank: _fit(rows, is_right, rank))
    least = max(min_cell_size, int(LEAST_SHARE * num_rows))
    for _ in range(MOST_ROUNDS):
        preference = _log_density(rows, is_right, rank) - _log_density(rows, ~is_right, rank)
        num_right = int(np.clip((preference > 0.0).sum(), least, num_rows - least))
        goes_right = np.zeros(num_rows, bool)
        goes_right[np.argsort(-preference, kind="stable")[:num_right]] = True
        if (goes_right == is_right).all():
            break
        is_right = goes_right
    return is_right


def _rows(x: np.ndarray, seed: int) -> _Rows:
    centred = np.asarray(x - x.mean(axis=0, dtype=np.float64), np.float64)
    if x.shape[1] <= MOST_COORDINATES:
        return _Rows(centred, np.zeros(len(x)), x.shape[1])
    axes = randomized_svd(centred, min(MOST_COORDINATES, len(x) - 1), n_iter=2, random_state=seed % 2**31)[2]
    along = centred @ axes.T
    beyond = np.square(centred).sum(axis=1) - np.square(along).sum(axis=1)
    return _Rows(along, np.maximum(beyond, 0.0), x.shape[1])


def _fit(rows: _Rows, is_right: np.ndarray, rank: int) -> float:
    """The sum of the rows' log densities on their sides, each without itself."""
    return sum(float(_log_density(rows, side, rank)[side].sum()) for side in (is_right, ~is_right))


def _log_density(rows: _Rows, own: np.ndarray, rank: int) -> np.ndarray:
    """Log of the number of `own` rows times their normal's density at all rows, up to a constant, (n,).

    The normal has `rank` directions and equal variances beyond them. At its own rows it is taken as without the row,
    by the leverage: else every row would be drawn to where it is.
    """
    along, num_own, num_beyond = rows.along[own], int(own.sum()), rows.num_features - rank
    mean = along.mean(axis=0)
    squares, directions = np.linalg.eigh((along - mean).T @ (along - mean))
    rest = max(float(squares[:-rank].sum() + rows.beyond[own].sum()), 0.0)
    squares, directions = np.maximum(squares[-rank:], 0.0), directions[:, -rank:]
    noise = max(rest / (num_beyond * max(num_own - 1 - rank, 1)), NARROWEST * rows.mean_square)
    prior = PRIOR_ROWS * squares.mean() / (num_own - 1)
    variances = np.maximum((squares + prior) / (num_own - 1 + PRIOR_ROWS), noise)
    away = rows.along - mean
    signal = np.square(away @ directions)
    residual = np.maximum(np.square(away).sum(axis=1) - signal.sum(axis=1), 0.0) + rows.beyond
    distance = (signal / variances).sum(axis=1)
    leverage = np.minimum(1 / num_own + distance / (num_own - 1), LARGEST_LEVERAGE)
    distance = (distance + residual / noise) * np.where(own, (1.0 - leverage) ** -2, 1.0)
    log_det = np.log(variances).sum() + num_beyond * np.log(noise)
    return np.log(num_own) - 0.5 * (distance + log_det)
