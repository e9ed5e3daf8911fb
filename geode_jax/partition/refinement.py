"""A cut of a cell, refined: rows go over to the side whose normal distribution describes them better.

METIS cuts few edges between neighbours and balances the sides. That needs no shape of the cells, and knows of none:
where two sheets cross, or one bends, rows of different parts are neighbours. Here each side gets a normal with a few
directions of its own, rows change sides, and the normals are learned again: k-subspaces clustering (Bradley &
Mangasarian, k-plane clustering, 2000), or a hard form of the EM algorithm for two probabilistic principal component
analysers (Tipping & Bishop 1999).
"""

from typing import NamedTuple

import numpy as np

from geode_jax._runtime.blas import one_blas_thread

# In a table of more features cuts stay as they are: digits and faces gained nothing. So do those of cells in which
# fewer features vary: a spiral in the plane lost, as one line describes parts of several of its arms.
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
# The largest leverage that is reckoned with: near 1 rounding would tell a row's density under the others' normal.
LARGEST_LEVERAGE = 0.9
# The least variance of a side, relative to the mean one of the cell: rows may be equal.
NARROWEST = 1e-9


@one_blas_thread()
def refined(x: np.ndarray, is_right: np.ndarray, min_cell_size: int) -> np.ndarray:
    """The cut of rows x, (n, D), with rows moved: True is right, (n,); no side gets fewer than `min_cell_size` rows.

    Both sides have the number of directions that describes the rows best where the cut was, each row without itself.
    With fewer rows than features a side's normal fits its own rows far better than any other, so rows would never
    change sides, or all at once. Such cuts are left as they are, and no side becomes so small.
    """
    varying = x.max(axis=0) > x.min(axis=0)  # rows are complete, else NaN would make a feature constant
    num_rows, num_features = len(x), int(varying.sum())
    fewest = max(FEWEST_ROWS, min_cell_size, num_features)
    smallest = min(int(is_right.sum()), num_rows - int(is_right.sum()))
    if smallest < fewest or num_features < FEWEST_FEATURES:
        return is_right
    rows = np.asarray(x[:, varying], np.float64)
    rows = rows - rows.mean(axis=0)
    least_variance = NARROWEST * float(np.square(rows).mean())
    if least_variance == 0.0:  # squares below the smallest number
        return is_right
    sides = _sides(rows, is_right)
    most = min(smallest // ROWS_PER_DIRECTION, num_features - 1)

    def fit(rank: int) -> float:
        return sum(float(log_density(side, rank, least_variance)[side.own].sum()) for side in sides)

    rank = max(sorted({min(number, most) for number in DIRECTIONS}), key=fit)
    least = max(fewest, int(LEAST_SHARE * num_rows))
    cut = is_right
    # Not stopped where the sum of the rows' log densities falls: forests cut so described held-out rows worse.
    for _ in range(MOST_ROUNDS):
        right, left = (log_density(side, rank, least_variance) for side in sides)
        preference = right - left
        num_right = int(np.clip((preference > 0.0).sum(), least, num_rows - least))
        moved = np.zeros(num_rows, bool)
        moved[np.argsort(-preference, kind="stable")[:num_right]] = True
        if (moved == cut).all():
            break
        cut, sides = moved, _sides(rows, moved)
    return cut


class _Side(NamedTuple):
    """One side of a cut: its rows, (n,), and about their mean the squares of all rows along its axes, (n, D).

    `squares`: their sums over its own rows, (D,), from the largest on.
    """

    own: np.ndarray
    along: np.ndarray
    squares: np.ndarray


def _sides(rows: np.ndarray, is_right: np.ndarray) -> tuple[_Side, _Side]:
    """The right side of a cut, and the left one."""

    def side(own: np.ndarray) -> _Side:
        away = rows - rows[own].mean(axis=0)
        squares, axes = np.linalg.eigh(away[own].T @ away[own])
        return _Side(own, np.square(away @ axes[:, ::-1]), np.maximum(squares[::-1], 0.0))

    return side(is_right), side(~is_right)


def log_density(side: _Side, rank: int, least_variance: float) -> np.ndarray:
    """Log of a side's number of rows times its normal's density at all rows, up to a constant, (n,).

    The normal has `rank` directions and equal variances beyond them. At its own rows it is taken as without the row,
    else every row would be drawn to where it is: by the row's leverage h in the mean and the `rank` directions. Without
    the row the squares' determinant within the directions is 1 - h of what it is (but for a factor of its divisors),
    distances within them are about 1 / (1 - h) of what they are, and squares beyond them 1 / (1 - h)^2.
    """
    num_own = int(side.own.sum())
    rank = max(1, min(rank, num_own // ROWS_PER_DIRECTION))  # the side may have become smaller
    num_beyond = side.squares.size - rank
    squares, rest = side.squares[:rank], float(side.squares[rank:].sum())
    noise = max(rest / (num_beyond * max(num_own - 1 - rank, 1)), least_variance)
    prior = PRIOR_ROWS * squares.mean() / (num_own - 1)
    variances = np.maximum((squares + prior) / (num_own - 1 + PRIOR_ROWS), noise)
    within, beyond = side.along[:, :rank] @ (1.0 / variances), side.along[:, rank:].sum(axis=1) / noise
    leverage = np.minimum(1 / num_own + within / (num_own - 1), LARGEST_LEVERAGE)
    kept = np.where(side.own, 1.0 - leverage, 1.0)
    divisors = rank * np.log1p(1.0 / (num_own - 2 + PRIOR_ROWS)) + np.log1p(1.0 / (num_own - 1))
    log_det = np.log(variances).sum() + num_beyond * np.log(noise) + np.log(kept) + np.where(side.own, divisors, 0.0)
    return np.log(num_own - side.own) - 0.5 * (within / kept + beyond / kept**2 + log_det)
