"""A first fill of missing entries by one low-rank Gaussian: what the first trees are grown on.

Regularised iterative principal components (Josse & Husson 2012, "Handling missing values in exploratory multivariate
data analysis methods"): fill, take the leading components with their singular values shrunk by the noise's share, fill
from them again. The number of components is the one that predicts held-out observed entries best.
"""

import numpy as np
from scipy import linalg
from sklearn.utils.extmath import randomized_svd

from geode_jax.build.subspace import EXACT_MAX_SIDE

HELD_OUT_SHARE = 0.05
# Rows and entries beyond these do not help to choose a number of components.
LARGEST_SAMPLE = 4000
NUM_STEPS = 30
TOLERANCE = 1e-3


def fill_low_rank(x: np.ndarray, is_observed: np.ndarray, max_rank: int, seed: int) -> np.ndarray:
    """Rows (n, D) with missing entries filled; those of `x` are ignored, and column means should be near 0."""
    rng = np.random.default_rng(seed)
    sample = rng.permutation(x.shape[0])[:LARGEST_SAMPLE]
    rank = _choose_rank(x[sample], is_observed[sample], max_rank, rng)
    return _iterate(np.where(is_observed, x, 0.0).astype(x.dtype), is_observed, rank, seed)


def _choose_rank(x: np.ndarray, is_observed: np.ndarray, max_rank: int, rng: np.random.Generator) -> int:
    """Best of 0, 1, 2, 4, ... components; a row keeps at least one observed entry."""
    held_out = is_observed & (rng.uniform(size=x.shape) < HELD_OUT_SHARE)
    held_out &= is_observed.cumsum(axis=1) > 1
    kept = is_observed & ~held_out
    filled = np.where(kept, x, 0.0).astype(x.dtype)
    limit = min(max_rank, *(side - 1 for side in x.shape))
    ranks = [0] + [2**power for power in range(limit.bit_length())]
    best, best_error, worse = 0, np.inf, 0
    for rank in ranks:
        filled = _iterate(filled, kept, rank, 0)
        error = np.square(filled - x, where=held_out, out=np.zeros_like(x)).sum()
        if error < best_error:
            best, best_error, worse = rank, error, 0
        else:
            worse += 1
        if worse == 2:
            break
    return best


def _iterate(filled: np.ndarray, is_observed: np.ndarray, rank: int, seed: int) -> np.ndarray:
    missing = ~is_observed
    if not missing.any():
        return filled
    for _ in range(NUM_STEPS):
        low_rank = _shrunk_reconstruction(filled, is_observed, rank, seed)
        change = np.square((low_rank - filled)[missing], dtype=np.float64).sum()
        size = np.square(low_rank[missing], dtype=np.float64).sum()
        filled = np.where(missing, low_rank, filled)
        if change <= TOLERANCE**2 * size:
            break
    return filled


def _shrunk_reconstruction(x: np.ndarray, is_observed: np.ndarray, rank: int, seed: int) -> np.ndarray:
    """Mean plus the leading components, each shrunk by what noise of the residual's size adds to it."""
    n, num_features = x.shape
    count = is_observed.sum(axis=0)
    mean = np.where(count > 0, x.mean(axis=0), 0.0)
    if rank == 0:
        return np.broadcast_to(mean, x.shape).astype(x.dtype)
    centred = x - mean
    left, singular, right = _leading_components(centred, rank, seed)
    plain = (left * singular) @ right
    error = np.square(centred - plain, dtype=np.float64)[is_observed].mean()
    freedom = (1.0 - rank / n) * (1.0 - rank / num_features)
    noise = max(n, num_features) * error / max(freedom, 1e-3)
    shrunk = np.maximum(np.square(singular) - noise, 0.0) / np.maximum(singular, np.finfo(x.dtype).tiny)
    return (mean + (left * shrunk) @ right).astype(x.dtype)


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
