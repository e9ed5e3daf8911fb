"""Baselines from scikit-learn, with the conditional distributions that it does not offer."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import linalg, special
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import cross_val_score


class NormalMixture(NamedTuple):
    """A mixture of full-covariance normals: weights (M,), means (M, D), covariances (M, D, D)."""

    name: str
    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log density of complete rows, (n,)."""
        return special.logsumexp(self._scores(x, self.means, self.covariances), axis=1)

    def responsibilities(self, x: np.ndarray) -> np.ndarray:
        """Probability of every component given complete rows, (n, M)."""
        return special.softmax(self._scores(x, self.means, self.covariances), axis=1)

    def _scores(self, x: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> np.ndarray:
        scores = np.empty((x.shape[0], self.weights.size))
        for m, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
            factor = linalg.cholesky(covariance, lower=True)
            whitened = linalg.solve_triangular(factor, (x - mean).T, lower=True)
            log_det = 2 * np.log(np.diag(factor)).sum()
            scores[:, m] = -0.5 * (np.square(whitened).sum(axis=0) + log_det + x.shape[1] * np.log(2 * np.pi))
        return scores + np.log(self.weights)

    def impute(self, x: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Conditional means of NaN entries and the ends of their central intervals, each (n, D)."""
        filled, lower, upper = x.copy(), x.copy(), x.copy()
        for i, row in enumerate(x):
            hidden = np.isnan(row)
            if hidden.any():
                filled[i, hidden], lower[i, hidden], upper[i, hidden] = self._impute_row(row, hidden, interval)
        return filled, lower, upper

    def _impute_row(self, row: np.ndarray, hidden: np.ndarray, interval: float) -> tuple[np.ndarray, ...]:
        seen = ~hidden
        scores = self._scores(row[None, seen], self.means[:, seen], self.covariances[:, seen][:, :, seen])[0]
        weights = special.softmax(scores)[:, None]
        means, deviations = [], []
        for mean, covariance in zip(self.means, self.covariances, strict=True):
            gain = linalg.solve(covariance[np.ix_(seen, seen)], covariance[np.ix_(seen, hidden)], assume_a="pos").T
            means.append(mean[hidden] + gain @ (row[seen] - mean[seen]))
            spread = np.diag(covariance)[hidden] - np.einsum("ij,ji->i", gain, covariance[np.ix_(seen, hidden)])
            deviations.append(np.sqrt(np.maximum(spread, 1e-12)))
        mean_by_part, deviation = np.array(means), np.array(deviations)
        tail = 0.5 * (1 - interval)
        ends = []
        for level in (tail, 1 - tail):
            own = mean_by_part + deviation * special.ndtri(level)
            low, high = own.min(axis=0), own.max(axis=0)
            for _ in range(40):
                middle = 0.5 * (low + high)
                below = (weights * special.ndtr((middle - mean_by_part) / deviation)).sum(axis=0) < level
                low, high = np.where(below, middle, low), np.where(below, high, middle)
            ends.append(0.5 * (low + high))
        return (weights * mean_by_part).sum(axis=0), *ends


def fit_gaussian_mixture(x: np.ndarray, sizes: Iterable[int], seed: int) -> NormalMixture:
    """Mixture of normals with the number of components and the covariance type chosen by BIC."""
    forms = ("full", "tied", "diag")
    fits = [GaussianMixture(size, covariance_type=form, random_state=seed).fit(x) for form in forms for size in sizes]
    best = min(fits, key=lambda mixture: mixture.bic(x))
    name = f"Gaussian mixture ({best.n_components} {best.covariance_type} by BIC)"
    identity = np.eye(x.shape[1])
    covariances = {
        "full": lambda: best.covariances_,
        "tied": lambda: np.repeat(best.covariances_[None], best.n_components, axis=0),
        "diag": lambda: best.covariances_[:, :, None] * identity,
    }[best.covariance_type]()
    return NormalMixture(name, best.weights_, best.means_, covariances)


def fit_probabilistic_pca(x: np.ndarray, ranks: Iterable[int]) -> NormalMixture:
    """Probabilistic PCA with its rank chosen by five-fold cross-validated likelihood."""
    best = max(ranks, key=lambda rank: cross_val_score(PCA(rank), x).mean())
    model = PCA(best).fit(x)
    name = f"Probabilistic PCA (rank {best} by cross-validation)"
    return NormalMixture(name, np.ones(1), model.mean_[None], model.get_covariance()[None])
