"""A first fill of missing entries by one low-rank matrix, on which the first trees are grown.

Soft-impute (Mazumder, Hastie & Tibshirani 2010): fill, take the leading components with their singular values lowered
by a threshold, fill from these, and repeat. The threshold is lowered in steps, each started from the last one's
solution, to the value that predicts held-out observed entries best.
"""

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax.learning.subspaces import EXACT_MAX_SIDE

HELD_OUT_SHARE = 0.05
# Rows on which the threshold is chosen; more do not help.
LARGEST_SAMPLE = 4000
RATIO, NUM_THRESHOLDS = 0.6, 16
NUM_STEPS = 30
TOLERANCE = 1e-3


def fill_low_rank(x: np.ndarray, is_observed: np.ndarray, max_rank: int, seed: int) -> np.ndarray:
    """Rows (n, D) with missing entries filled, by at most `max_rank` components; column means should be near 0."""
    rng = np.random.default_rng(seed)
    start = np.where(is_observed, x, 0.0).astype(x.dtype)
    sample = rng.permutation(x.shape[0])[:LARGEST_SAMPLE]
    # the largest singular value grows as the root of the number of rows
    thresholds = RATIO ** np.arange(1, NUM_THRESHOLDS + 1)
    count = _choose_threshold(start[sample], is_observed[sample], thresholds, max_rank, rng)
    filled = start
    largest = _largest_singular(start, seed)
    for threshold in thresholds[:count]:
        filled = _soft_impute(filled, is_observed, threshold * largest, max_rank, seed)
    return filled


def _choose_threshold(
    x: np.ndarray, is_observed: np.ndarray, thresholds: np.ndarray, max_rank: int, rng: np.random.Generator
) -> int:
    """The number of thresholds to go through; every row keeps an observed entry that is not held out."""
    held_out = is_observed & (rng.uniform(size=x.shape) < HELD_OUT_SHARE)
    held_out &= is_observed.cumsum(axis=1) > 1
    kept = is_observed & ~held_out
    filled = np.where(kept, x, 0.0).astype(x.dtype)
    largest = _largest_singular(filled, 0)
    best, best_error = 0, float(np.square(x[held_out]).sum())
    for number, threshold in enumerate(thresholds, start=1):
        filled = _soft_impute(filled, kept, threshold * largest, max_rank, 0)
        error = float(np.square((filled - x)[held_out]).sum())
        if error < best_error:
            best, best_error = number, error
        elif number >= best + 2:
            break
    return best


def _largest_singular(x: np.ndarray, seed: int) -> float:
    return float(_leading_components(x - x.mean(axis=0), 1, seed)[1][0])


def _soft_impute(filled: np.ndarray, is_observed: np.ndarray, threshold: float, max_rank: int, seed: int) -> np.ndarray:
    missing = ~is_observed
    rank = min(max_rank, *filled.shape)
    for _ in range(NUM_STEPS):
        mean = filled.mean(axis=0)
        left, singular, right = _leading_components(filled - mean, rank, seed)
        shrunk = np.maximum(singular - threshold, 0.0).astype(filled.dtype)
        low_rank = mean + (left * shrunk) @ right
        change = np.square((low_rank - filled)[missing], dtype=np.float64).sum()
        size = np.square(low_rank[missing], dtype=np.float64).sum()
        filled = np.where(missing, low_rank, filled)
        if change <= TOLERANCE**2 * size:
            break
    return filled


def _leading_components(x: np.ndarray, rank: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
