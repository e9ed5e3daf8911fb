"""A cut of a cell, refined: rows go over to the side whose normal distribution describes them better.

METIS cuts few edges between neighbours and balances the sides. That needs no shape of the cells, and knows of none:
where two sheets cross, or one bends, rows of different parts are neighbours. Here either side gets a normal with a few
directions of its own, rows change sides, and the normals are learned again: k-subspaces clustering (Bradley &
Mangasarian, k-plane clustering, 2000), or a hard form of the EM algorithm for two probabilistic principal component
analysers (Tipping & Bishop 1999).
"""

import numpy as np

from geode_jax._runtime.blas import one_blas_thread

# With more features cuts stay as they are: digits and faces gained nothing. So they do with fewer: a spiral in the
# plane lost, as one line describes parts of several of its arms.
FEWEST_FEATURES, MOST_FEATURES = 4, 50
# Numbers of directions that a side may have, at most all but one of the features, and rows of a side for each.
DIRECTIONS, ROWS_PER_DIRECTION = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 49), 4
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


@one_blas_thread()
def refined(x: np.ndarray, is_right: np.ndarray, min_cell_size: int) -> np.ndarray:
    """The cut of rows x, (n, D), with rows moved: True is right, (n,); no side gets fewer than `min_cell_size` rows.

    Both sides have the number of directions that describes the rows best, each without itself, where the cut was. With
    fewer rows than features a side's normal is told by its own rows as no other row could be, so that rows would stay
    or go in crowds: such cuts are left as they are.
    """
    num_rows, num_features = x.shape
    smallest = min(int(is_right.sum()), num_rows - int(is_right.sum()))
    if smallest < max(FEWEST_ROWS, min_cell_size, num_features) or not FEWEST_FEATURES <= num_features <= MOST_FEATURES:
        return is_right
    rows = np.asarray(x - x.mean(axis=0, dtype=np.float64), np.float64)
    least_variance = NARROWEST * float(np.square(rows).mean())
    if least_variance == 0.0:
        return is_right

    def log_density(own: np.ndarray, rank: int) -> np.ndarray:
        return _log_density(rows, own, rank, least_variance)

    def fit(rank: int) -> float:
        return sum(float(log_density(own, rank)[own].sum()) for own in (is_right, ~is_right))

    most = max(1, min(smallest // ROWS_PER_DIRECTION, num_features - 1))
    rank = max(sorted({min(number, most) for number in DIRECTIONS}), key=fit)
    least = max(min_cell_size, int(LEAST_SHARE * num_rows))
    cut = is_right
    for _ in range(MOST_ROUNDS):
        preference = log_density(cut, rank) - log_density(~cut, rank)
        num_right = int(np.clip((preference > 0.0).sum(), least, num_rows - least))
        moved = np.zeros(num_rows, bool)
        moved[np.argsort(-preference, kind="stable")[:num_right]] = True
        if (moved == cut).all():
            break
        cut = moved
    return cut


def _log_density(rows: np.ndarray, own: np.ndarray, rank: int, least_variance: float) -> np.ndarray:
    """Log of the number of `own` rows times their normal's density at all rows, up to a constant, (n,).

    The normal has `rank` directions and equal variances beyond them. At its own rows it is taken as without the row,
    by the leverage: else every row would be drawn to where it is.
    """
    num_own = int(own.sum())
    rank = max(1, min(rank, num_own // ROWS_PER_DIRECTION))  # the side may have become smaller
    num_beyond = rows.shape[1] - rank
    mean = rows[own].mean(axis=0)
    away = rows - mean
    squares, directions = np.linalg.eigh(away[own].T @ away[own])
    rest, squares = max(float(squares[:-rank].sum()), 0.0), np.maximum(squares[-rank:], 0.0)
    noise = max(rest / (num_beyond * max(num_own - 1 - rank, 1)), least_variance)
    prior = PRIOR_ROWS * squares.mean() / (num_own - 1)
    variances = np.maximum((squares + prior) / (num_own - 1 + PRIOR_ROWS), noise)
    signal = np.square(away @ directions[:, -rank:])
    residual = np.maximum(np.square(away).sum(axis=1) - signal.sum(axis=1), 0.0)
    distance = (signal / variances).sum(axis=1)
    leverage = np.minimum(1 / num_own + distance / (num_own - 1), LARGEST_LEVERAGE)
    distance = (distance + residual / noise) * np.where(own, (1.0 - leverage) ** -2, 1.0)
    log_det = np.log(variances).sum() + num_beyond * np.log(noise)
    return np.log(num_own) - 0.5 * (distance + log_det)
