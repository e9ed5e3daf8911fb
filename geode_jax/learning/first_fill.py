"""The first fill of missing entries, on which the first trees are grown: of two ways, the one that predicts better.

Factor analysis is unbiased where what is seen decides what is missing, but takes few factors only; soft-impute takes as
many components as there are, and shrinks its fills to the mean. Both are tried on observed entries that are held out.
"""

import contextlib
import math

import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax.learning.factor_fill import fill_by_factors, learn_factors, means_given
from geode_jax.learning.soft_impute import choose_threshold, fill_by_soft_impute

HELD_OUT_SHARE = 0.05
# Up to this many entries the matrices are too small for several threads. These wait for each other where another
# process uses the cores.
_SMALL = 2**20
# Rows and features on which the ways are compared; more do not help. Where a sample has few features for its rows,
# noise adds more to the largest singular value, of which thresholds are shares.
LARGEST_SAMPLE, ENOUGH_FEATURES, FEATURES_PER_ROW = 4000, 2000, 4
# Numbers of factors that are tried, as long as a step's work, n D d^2, is bounded; at 8 factors or fewer, its memory.
NUM_FACTORS, MOST_WORK = (1, 2, 3, 5, 8, 12, 18, 27), 2**31


def fill_low_rank(x: np.ndarray, is_observed: np.ndarray, max_rank: int, seed: int) -> np.ndarray:
    """Rows (n, D) with missing entries filled, by at most `max_rank` components.

    About the means of what is observed: those of a class may be far from 0. A feature never seen is filled about 0.
    """
    count = is_observed.sum(axis=0)
    mean = (x.sum(axis=0, dtype=np.float64, where=is_observed) / np.maximum(count, 1)).astype(x.dtype)
    with one_blas_thread() if x.size <= _SMALL else contextlib.nullcontext():
        filled = _fill_low_rank(x - mean, is_observed, max_rank, seed)
    filled += mean
    np.copyto(filled, x, where=is_observed)
    return filled


def _fill_low_rank(x: np.ndarray, is_observed: np.ndarray, max_rank: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sample = rng.permutation(x.shape[0])[:LARGEST_SAMPLE]
    seen = is_observed[sample]
    rows = np.where(seen, x[sample], 0.0).astype(x.dtype)
    tried, seen_of_tried = rows, seen
    num_features = max(ENOUGH_FEATURES, FEATURES_PER_ROW * sample.size)
    if x.shape[1] > num_features:
        features = np.sort(rng.choice(x.shape[1], num_features, replace=False))
        tried, seen_of_tried = rows[:, features], seen[:, features]
    kept, held_out = hold_out(seen_of_tried, rng)
    num_thresholds, error, start = choose_threshold(tried, kept, held_out, max_rank)
    most = math.isqrt(MOST_WORK // rows.size)
    num_factors, error_of_factors = _choose_factors(
        tried, kept, held_out, start, min(max_rank, most if most >= 8 else 0)
    )
    if error_of_factors >= error:
        return fill_by_soft_impute(x, is_observed, num_thresholds, max_rank, seed)
    start = fill_by_soft_impute(rows, seen, num_thresholds, max_rank, seed)
    return fill_by_factors(x, is_observed, learn_factors(rows, seen, start, num_factors), seed)


def hold_out(is_observed: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the entries to learn from, and of those held out; every row keeps an observed entry."""
    held_out = is_observed & (rng.uniform(size=is_observed.shape) < HELD_OUT_SHARE)
    held_out[~(is_observed & ~held_out).any(axis=1)] = False
    return is_observed & ~held_out, held_out


def _choose_factors(
    x: np.ndarray, kept: np.ndarray, held_out: np.ndarray, start: np.ndarray, most: int
) -> tuple[int, float]:
    """The number of factors, at most so many, that predict the held-out entries best, and their squared error."""
    best, best_error, worse = 0, np.inf, 0
    for number in NUM_FACTORS:
        if number > min(most, min(x.shape) - 1) or worse == 2:
            break
        found = means_given(learn_factors(x, kept, start, number, roughly=True), x, kept)
        error = float(np.square((found - x)[held_out]).sum())
        best, best_error, worse = (number, error, 0) if error < best_error else (best, best_error, worse + 1)
    return best, best_error
