"""Missing entries filled by one low-rank matrix.

Soft-impute (Mazumder, Hastie & Tibshirani 2010): fill, take the leading components with their singular values lowered
by a threshold, fill from these, and repeat. The threshold is lowered in steps, each started from the last one's
solution.
"""

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax.learning.decompositions import EXACT_MAX_SIDE

# Thresholds, as shares of the largest singular value, which grows as the root of the number of rows.
THRESHOLDS = 0.6 ** np.arange(1, 17)
NUM_STEPS = 30
TOLERANCE = 1e-3


def fill_by_soft_impute(
    x: np.ndarray, is_observed: np.ndarray, num_thresholds: int, max_rank: int, seed: int
) -> np.ndarray:
    """Rows (n, D) with missing entries filled, by at most `max_rank` components; column means should be near 0.

    `num_thresholds`: how many of the thresholds to go through.
    """
    filled = np.where(is_observed, x, np.zeros((), x.dtype))
    largest = _largest_singular(filled, seed)
    for threshold in THRESHOLDS[:num_thresholds]:
        _soft_impute(filled, is_observed, threshold * largest, max_rank, seed)
    return filled


def choose_threshold(
    x: np.ndarray, kept: np.ndarray, held_out: np.ndarray, max_rank: int
) -> tuple[int, float, np.ndarray]:
    """How many thresholds to go through to predict the held-out entries best; their squared error, and the fill.

    `kept`: the entries to learn from. `kept` and `held_out` are masks of the rows' shape.
    """
    filled = np.where(kept, x, np.zeros((), x.dtype))
    largest = _largest_singular(filled, 0)
    best, best_error, best_filled = 0, float(np.square(x[held_out]).sum()), filled
    for number, threshold in enumerate(THRESHOLDS, start=1):
        filled = filled.copy()
        _soft_impute(filled, kept, threshold * largest, max_rank, 0)
        error = float(np.square((filled - x)[held_out]).sum())
        if error < best_error:
            best, best_error, best_filled = number, error, filled
        elif number >= best + 2:
            break
    return best, best_error, best_filled


def _largest_singular(x: np.ndarray, seed: int) -> float:
    return float(leading_components(x - x.mean(axis=0), 1, seed)[1][0])


def _soft_impute(filled: np.ndarray, is_observed: np.ndarray, threshold: float, max_rank: int, seed: int) -> None:
    """Fill the missing entries anew, in place: of the rows that have any, which may be few."""
    partial = np.flatnonzero(~is_observed.all(axis=1))
    missing = ~is_observed[partial]
    known = np.where(missing, np.zeros((), filled.dtype), filled[partial])
    rank = min(max_rank, *filled.shape)
    by_gram = len(filled) <= min(filled.shape[1], EXACT_MAX_SIDE)
    gram = filled @ filled.T if by_gram else np.zeros((0, 0), filled.dtype)
    for _ in range(NUM_STEPS):
        if by_gram:
            rows = _rows_by_gram(filled, gram, partial, threshold, rank)
        else:
            rows = _rows_by_components(filled, partial, threshold, rank, seed)
        rows *= missing
        size = _sum_of_squares(rows)
        rows += known
        change = _sum_of_squares(filled[partial] - rows)
        filled[partial] = rows
        if change <= TOLERANCE**2 * size:
            break
        if by_gram:  # of the rows that have changed
            gram[partial] = rows @ filled.T
            gram[:, partial] = gram[partial].T


def _sum_of_squares(x: np.ndarray) -> float:
    return float(np.einsum("ij,ij->i", x, x).sum(dtype=np.float64))


def _rows_by_components(filled: np.ndarray, rows: np.ndarray, threshold: float, rank: int, seed: int) -> np.ndarray:
    """Some rows of the low-rank matrix, (m, D)."""
    mean = filled.mean(axis=0)
    left, singular, right = leading_components(filled - mean, rank, seed)
    shrunk = np.maximum(singular - threshold, 0.0).astype(filled.dtype)
    return mean + (left[rows] * shrunk) @ right


def _rows_by_gram(filled: np.ndarray, gram: np.ndarray, rows: np.ndarray, threshold: float, rank: int) -> np.ndarray:
    """:func:`_rows_by_components` of wide data, from the Gram matrix of all rows.

    Only components above the threshold are found, and no centred copy of the rows is made.
    """
    row_mean = gram.mean(axis=0, dtype=np.float64)
    centred = gram - row_mean - row_mean[:, None] + row_mean.mean()
    values, vectors = linalg.eigh(centred, subset_by_value=(max(threshold**2, np.finfo(np.float64).tiny), np.inf))
    singular, vectors = np.sqrt(values[-rank:]), vectors[:, -rank:]
    along = vectors.T.astype(filled.dtype) @ filled  # the vectors are centred, so that the mean drops out
    shrunk = vectors[rows] * (1.0 - threshold / singular)
    return np.asarray(filled.mean(axis=0) + shrunk.astype(filled.dtype) @ along)


def leading_components(x: np.ndarray, rank: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular vectors and values of rows (n, D), the largest first: (n, rank), (rank,), (rank, D)."""
    n, num_features = x.shape
    if min(n, num_features) > EXACT_MAX_SIDE:
        return randomized_svd(x, rank, n_iter=2, random_state=seed)
    tall = x if num_features <= n else x.T
    moments = (tall.T @ tall).astype(np.float64)
    size = moments.shape[0]
    values, vectors = linalg.eigh(moments, subset_by_index=(size - rank, size - 1))
    singular = np.sqrt(np.maximum(values[::-1], 0.0))
    short = vectors[:, ::-1].astype(x.dtype)
    long = tall @ short / np.maximum(singular, np.finfo(x.dtype).tiny).astype(x.dtype)
    return (long, singular, short.T) if tall is x else (short, singular, long.T)
