"""Missing entries filled by factor analysis, whose likelihood is right where what is seen decides what is missing.

``x = mu + W z + e``, with standard normal z and noise e of a variance per feature, fitted to the observed entries by
maximum likelihood. Soft-impute shrinks its fills to the mean; these extrapolate to where a feature is seldom observed.
EM in its parameter-expanded form (Liu, Rubin & Wu 1998): the factors' mean and covariance are free in every step and
then absorbed by mu and W. Without that, features of which half is hidden take hundreds of steps.
"""

from typing import NamedTuple

import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.threads import parallel_map
from geode_jax.learning.soft_impute import leading_components

# Most steps of EM. It ends where the fitted values change by less than the tolerance, as a share of their size.
NUM_STEPS, TOLERANCE = 100, 1e-3
# The same where the number of factors is to be chosen.
NUM_STEPS_OF_CHOICE, TOLERANCE_OF_CHOICE = 20, 1e-2
# A feature's noise is at least this share of its variance.
_LEAST_NOISE = 1e-4
_BLOCK_ROWS = 256  # rows whose matrices a thread makes at once


class Factors(NamedTuple):
    """mu (D,), W (D, d) and the variances of the noise, (D,)."""

    mean: np.ndarray
    loadings: np.ndarray
    noise: np.ndarray


def fill_by_factors(x: np.ndarray, is_observed: np.ndarray, factors: Factors, seed: int) -> np.ndarray:
    """Rows (n, D) whose missing entries are ``mu + W z``, with z drawn given the observed ones.

    Fills with the mean of z would leave out its variance. What is learned from them would take the missing entries for
    a function of the observed ones, and intervals would be too narrow.
    """
    rng = np.random.default_rng(seed)
    filled = np.array(x)
    partial = np.flatnonzero(~is_observed.all(axis=1))
    for at in np.split(partial, range(_BLOCK_ROWS, partial.size, _BLOCK_ROWS)):
        rows, seen = x[at], is_observed[at]
        z, covariance = _expect(factors, rows, seen)
        z += np.einsum("nij,nj->ni", np.linalg.cholesky(covariance), rng.normal(size=z.shape))
        filled[at] = np.where(seen, rows, z @ factors.loadings.T + factors.mean)
    return filled


def means_given(factors: Factors, x: np.ndarray, is_observed: np.ndarray) -> np.ndarray:
    """The mean ``mu + W E[z]`` of every row, (n, D), given its observed entries."""
    return _expect(factors, x, is_observed)[0] @ factors.loadings.T + factors.mean


@one_blas_thread()
def learn_factors(
    x: np.ndarray, is_observed: np.ndarray, start: np.ndarray, num_factors: int, *, roughly: bool = False
) -> Factors:
    """Maximum likelihood by EM, from the principal components of the filled rows `start`, (n, D).

    `roughly`: by few steps, to compare numbers of factors.
    """
    steps, tolerance = (NUM_STEPS_OF_CHOICE, TOLERANCE_OF_CHOICE) if roughly else (NUM_STEPS, TOLERANCE)
    seen = is_observed.astype(np.float64)
    x = np.where(is_observed, x, 0.0).astype(np.float64)
    factors = _principal(start, num_factors)
    fitted = start.astype(np.float64)
    for _ in range(steps):
        z, covariance = _expect(factors, x, is_observed)
        square = covariance + z[:, :, None] * z[:, None, :]
        factors = _maximise(x, seen, z, square)
        before, fitted = fitted, z @ factors.loadings.T + factors.mean
        factors = _absorb(factors, z, square)
        if np.square(fitted - before).sum() <= tolerance**2 * np.square(fitted).sum():
            break
    return factors


def _principal(filled: np.ndarray, num_factors: int) -> Factors:
    mean = filled.mean(axis=0, dtype=np.float64)
    centred = filled - mean.astype(filled.dtype)
    _, singular, right = leading_components(centred, num_factors, 0)
    loadings = (right.T * singular / np.sqrt(len(filled))).astype(np.float64)
    variance = np.mean(np.square(centred, dtype=np.float64), axis=0)
    return Factors(mean, loadings, _bounded(variance - np.square(loadings).sum(axis=1), variance))


def _bounded(noise: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return np.maximum(noise, np.where(variance > 0.0, _LEAST_NOISE * variance, 1.0))


def _expect(factors: Factors, x: np.ndarray, is_observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (n, d) and covariance (n, d, d) of z given the observed entries of every row."""
    mean, loadings, noise = factors
    num_rows, rank = x.shape[0], loadings.shape[1]
    z, covariance = np.empty((num_rows, rank)), np.empty((num_rows, rank, rank))
    products = (loadings[:, :, None] * loadings[:, None, :]).reshape(-1, rank**2)

    def reduce(at: np.ndarray) -> None:
        weight = is_observed[at] / noise
        precision = (weight @ products).reshape(-1, rank, rank) + np.eye(rank)
        covariance[at] = np.linalg.inv(precision)
        centred = np.where(is_observed[at], x[at] - mean, 0.0)
        z[at] = np.einsum("nij,nj->ni", covariance[at], (weight * centred) @ loadings)

    parallel_map(reduce, np.array_split(np.arange(num_rows), -(-num_rows // _BLOCK_ROWS)))
    return z, covariance


def _maximise(x: np.ndarray, seen: np.ndarray, z: np.ndarray, square: np.ndarray) -> Factors:
    """Regress every feature on the factors, over the rows that show it."""
    num_rows, rank = z.shape
    design = np.concatenate([np.ones((num_rows, 1)), z], axis=1)
    count, sums = seen.sum(axis=0), seen.T @ z
    moments = np.empty((x.shape[1], rank + 1, rank + 1))
    moments[:, 0, 0], moments[:, 0, 1:], moments[:, 1:, 0] = count, sums, sums
    moments[:, 1:, 1:] = (seen.T @ square.reshape(num_rows, -1)).reshape(-1, rank, rank)
    cross, total = x.T @ design, np.square(x).sum(axis=0)
    # one pseudo-row at zero for the loadings, and next to none for the mean, which is 0 if a feature is never seen
    ridge = np.diag(np.r_[1e-9, np.ones(rank)])
    found = np.linalg.solve(moments + ridge, cross[:, :, None])[:, :, 0]
    left = total - 2 * np.sum(found * cross, axis=1) + np.einsum("ji,jik,jk->j", found, moments, found)
    rows = np.maximum(count, 1.0)
    variance = total / rows - np.square(cross[:, 0] / rows)
    return Factors(found[:, 0], found[:, 1:], _bounded(left / rows, variance))


def _absorb(factors: Factors, z: np.ndarray, square: np.ndarray) -> Factors:
    """The same distribution of x, with factors of mean 0 and covariance I."""
    shift = z.mean(axis=0)
    covariance = square.mean(axis=0) - np.outer(shift, shift)
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(shift)))
    return factors._replace(mean=factors.mean + factors.loadings @ shift, loadings=factors.loadings @ root)
