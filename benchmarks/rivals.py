"""What people would use instead: densities and imputers from scikit-learn where it has them, tuned on training rows.

Every density is a :class:`NormalMixture`, which also has the conditionals that scikit-learn's own do not.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from scipy import linalg, special
from sklearn.cluster import KMeans
from sklearn.covariance import LedoitWolf
from sklearn.decomposition import PCA, FactorAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
from sklearn.impute import KNNImputer
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KernelDensity

from geode_jax.demo.baselines import NormalMixture
from geode_jax.learning.first_fill import hold_out
from geode_jax.learning.soft_impute import choose_threshold, fill_by_soft_impute


def shrunk_gaussian(x: np.ndarray) -> NormalMixture:
    """One normal with the covariance of Ledoit & Wolf 2004."""
    found = LedoitWolf().fit(x)
    return NormalMixture("Gaussian, Ledoit-Wolf", np.ones(1), found.location_[None], found.covariance_[None])


def shrunk_low_rank(x: np.ndarray, least_noise: float = 0.0) -> "LowRankNormal":
    """The same normal without any matrix of D x D: that of the rows, shrunk, has as many directions as rows."""
    mean = x.mean(axis=0)
    share = shrinkage_of(x - mean)
    loadings = np.sqrt((1.0 - share) / len(x)) * (x - mean).T
    return LowRankNormal(mean, loadings, max(share * x.var(axis=0).mean(), least_noise))


def factor_analysis(x: np.ndarray, ranks: Iterable[int]) -> NormalMixture:
    """Factor analysis, its rank by five-fold cross-validated likelihood."""
    best = max(ranks, key=lambda rank: cross_val_score(FactorAnalysis(rank), x).mean())
    model = FactorAnalysis(best).fit(x)
    return NormalMixture("factor analysis", np.ones(1), model.mean_[None], model.get_covariance()[None])


def bayesian_mixture(x: np.ndarray, num_components: int, seed: int) -> NormalMixture:
    """Variational mixture with a Dirichlet process prior on its weights."""
    model = BayesianGaussianMixture(n_components=num_components, random_state=seed, max_iter=200).fit(x)
    return NormalMixture("BayesianGaussianMixture", model.weights_, model.means_, model.covariances_)


def kernel_density(x: np.ndarray) -> KernelDensity:
    """Normal kernels, their width by five-fold cross-validated likelihood."""
    widths = x.std() * np.logspace(-1.5, 0.5, 21)
    return GridSearchCV(KernelDensity(), {"bandwidth": widths}).fit(x).best_estimator_


def _factor_step(covariance: np.ndarray, loadings: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One EM step of factor analysis on a covariance; `noise` (D,)."""
    rank = loadings.shape[1]
    model = loadings @ loadings.T + np.diag(noise)
    gain = linalg.solve(model, loadings, assume_a="pos").T
    across = covariance @ gain.T
    second = np.eye(rank) - gain @ loadings + gain @ across
    loadings = linalg.solve(second, across.T, assume_a="pos").T
    return loadings, np.diag(covariance) - np.einsum("ij,ij->i", loadings, across)


def _principal_start(covariance: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilistic PCA of a covariance in closed form (Tipping & Bishop 1999): loadings and noise variances."""
    values, vectors = np.linalg.eigh(covariance)
    rest = max(values[:-rank].mean(), 1e-8 * values[-1])
    loadings = vectors[:, -rank:] * np.sqrt(np.maximum(values[-rank:] - rest, 0.0))
    return loadings, np.full(values.size, rest)


def low_rank_mixture(
    x: np.ndarray, num_components: int, rank: int, seed: int, *, noise_per_feature: bool, num_steps: int = 60
) -> NormalMixture:
    """Mixture of probabilistic PCA (Tipping & Bishop 1999) or of factor analysers (Ghahramani & Hinton 1996), by EM."""
    num_features = x.shape[1]
    name = f"mixture of {'factor analysers' if noise_per_feature else 'probabilistic PCA'}"
    labels = KMeans(num_components, n_init=1, random_state=seed).fit_predict(x)
    share = np.eye(num_components)[labels]
    floor = 1e-3 * x.var(axis=0).mean()
    parts: list[tuple[np.ndarray, np.ndarray] | None] = [None] * num_components
    mixture = NormalMixture(name, np.ones(1), x.mean(axis=0)[None], np.eye(num_features)[None])
    before = -np.inf
    for _ in range(num_steps):
        count = share.sum(axis=0) + 1e-9
        means = share.T @ x / count[:, None]
        covariances = np.empty((num_components, num_features, num_features))
        for k in range(num_components):
            centred = x - means[k]
            own = (share[:, k, None] * centred).T @ centred / count[k]
            if parts[k] is None or not noise_per_feature:
                parts[k] = _principal_start(own, rank)
            else:
                parts[k] = _factor_step(own, *parts[k])
            loadings, noise = parts[k][0], np.maximum(parts[k][1], floor)
            parts[k] = loadings, noise
            covariances[k] = loadings @ loadings.T + np.diag(noise)
        mixture = NormalMixture(name, count / count.sum(), means, covariances)
        log_density = mixture.log_density(x).mean()
        if log_density - before < 1e-3:
            break
        before = log_density
        share = mixture.responsibilities(x)
    return mixture


class LowRankNormal:
    """A normal of covariance ``W W' + noise I``, W (D, rank), without any matrix of D x D: for D in the thousands."""

    def __init__(self, mean: np.ndarray, loadings: np.ndarray, noise: float) -> None:
        self._mean, self._loadings, self._noise = mean, loadings, noise

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log density of complete rows, (n,)."""
        centred = x - self._mean
        factor, along = self._factors(self._loadings, centred.T)
        squares = (np.square(centred).sum(axis=1) - np.square(along).sum(axis=0)) / self._noise
        features, rank = self._loadings.shape
        log_det = 2 * np.log(np.diag(factor)).sum() + (features - rank) * np.log(self._noise)
        return -0.5 * (squares + log_det + features * np.log(2 * np.pi))

    def impute(self, x: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Conditional means of NaN entries and the ends of their central intervals, each (n, D)."""
        filled, lower, upper = x.copy(), x.copy(), x.copy()
        width = special.ndtri(0.5 + 0.5 * interval)
        for i, row in enumerate(x):
            seen = ~np.isnan(row)
            factor, along = self._factors(self._loadings[seen], (row - self._mean)[seen, None])
            across = linalg.solve_triangular(factor, self._loadings[~seen].T, lower=True)
            mean = self._mean[~seen] + across.T @ along[:, 0]
            deviation = np.sqrt(self._noise * (1.0 + np.square(across).sum(axis=0)))
            filled[i, ~seen] = mean
            lower[i, ~seen], upper[i, ~seen] = mean - width * deviation, mean + width * deviation
        return filled, lower, upper

    def _factors(self, loadings: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cholesky factor of ``noise + W'W``, and the `columns`' products with W, solved by it."""
        inner = loadings.T @ loadings
        inner[np.diag_indices_from(inner)] += self._noise
        factor = linalg.cholesky(inner, lower=True)
        return factor, linalg.solve_triangular(factor, loadings.T @ columns, lower=True)


def _principal_normal(x: np.ndarray, rank: int) -> LowRankNormal:
    """Probabilistic PCA in closed form (Tipping & Bishop 1999)."""
    mean = x.mean(axis=0)
    singular, directions = linalg.svd(x - mean, full_matrices=False)[1:]
    variances = np.square(singular) / len(x)
    noise = max(variances[rank:].sum() / (x.shape[1] - rank), 1e-8 * variances[0])
    return LowRankNormal(mean, directions[:rank].T * np.sqrt(np.maximum(variances[:rank] - noise, 0.0)), noise)


def principal_normal(x: np.ndarray, ranks: Iterable[int], seed: int) -> LowRankNormal:
    """Probabilistic PCA, its rank by the density of a held-out fifth."""
    return best_on_held_out(x, [functools.partial(_principal_normal, rank=rank) for rank in ranks], seed)


def _mixture_on_components(x: np.ndarray, rank: int, count: int, seed: int) -> NormalMixture:
    pca = PCA(rank, random_state=seed).fit(x)
    axes, along = pca.components_, pca.transform(x)
    rest = np.square(x - pca.inverse_transform(along)).sum() / (len(x) * (x.shape[1] - rank))
    inner = GaussianMixture(count, reg_covar=1e-3 * rest, random_state=seed).fit(along)
    covariances = axes.T @ inner.covariances_ @ axes + rest * (np.eye(x.shape[1]) - axes.T @ axes)
    return NormalMixture("Gaussian mixture after PCA", inner.weights_, pca.mean_ + inner.means_ @ axes, covariances)


def mixture_on_components(x: np.ndarray, ranks: Iterable[int], counts: Iterable[int], seed: int) -> NormalMixture:
    """Mixture of normals with full covariances on principal components, and one noise variance off them.

    The numbers of principal components and of normals are those with the best density of a held-out fifth.
    """
    fits = [
        functools.partial(_mixture_on_components, rank=rank, count=count, seed=seed)
        for rank, count in itertools.product(ranks, counts)
    ]
    return best_on_held_out(x, fits, seed)


def best_on_held_out(x: np.ndarray, fits: Iterable[Callable[[np.ndarray], Any]], seed: int, share: float = 0.2) -> Any:
    """The fit, on all rows, of the candidate with the best density on a held-out share of them."""
    order = np.random.default_rng(seed).permutation(len(x))
    cut = int((1 - share) * len(x))
    kept, held_out = x[order[:cut]], x[order[cut:]]
    return max(fits, key=lambda fit: fit(kept).log_density(held_out).mean())(x)


def best_at_filling(
    x: np.ndarray, fits: Iterable[Callable[[np.ndarray], Any]], fill: Callable[[Any, np.ndarray], np.ndarray], seed: int
) -> Any:
    """The fit, on all rows, of the candidate that fills hidden halves of 50 training rows, (n, D), best.

    `fill`, of a model and rows, gives the rows with their NaN filled in. Values of `x` may be NaN.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    kept, truth = x[order[50:]], x[order[:50]]
    hidden = (rng.random(truth.shape) < 0.5) & ~np.isnan(truth)

    def error(fit: Callable[[np.ndarray], Any]) -> float:
        filled = fill(fit(kept), np.where(hidden, np.nan, truth))
        return float(np.abs(filled - truth)[hidden].mean())

    return min(fits, key=error)(x)


def nearest_rows(x: np.ndarray, counts: Iterable[int], seed: int) -> KNNImputer:
    """KNNImputer, its number of neighbours by :func:`best_at_filling`; values may be NaN."""
    fits = [KNNImputer(n_neighbors=count, weights="distance").fit for count in counts]
    return best_at_filling(x, fits, KNNImputer.transform, seed)


class SoftImpute:
    """Soft-impute (Mazumder, Hastie & Tibshirani 2010), as stage one of ours has it; its threshold by held-out values.

    It has no model of new rows: they are completed together with those of training.
    """

    def __init__(self, x: np.ndarray, max_rank: int = 100) -> None:
        self._x, self._max_rank = x, max_rank

    def completed(self, new: np.ndarray | None = None) -> np.ndarray:
        """Rows of training, and new ones after them, with their NaN filled in."""
        rows = self._x if new is None else np.concatenate([self._x, new])
        mean, deviation = np.nanmean(rows, axis=0), np.nanstd(rows)
        scaled, seen = (rows - mean) / deviation, ~np.isnan(rows)
        max_rank = min(self._max_rank, *(size - 1 for size in rows.shape))
        num_thresholds, *_ = choose_threshold(scaled, *hold_out(seen, np.random.default_rng(0)), max_rank)
        return fill_by_soft_impute(scaled, seen, num_thresholds, max_rank, 0) * deviation + mean

    def transform(self, new: np.ndarray) -> np.ndarray:
        """New rows with their NaN filled in."""
        return self.completed(new)[len(self._x) :]


class Interpolation:
    """Lines between the nearest columns that a row shows: for columns that are in order, as years are.

    Rows that show nothing get the means of the columns.
    """

    def __init__(self, x: np.ndarray) -> None:
        self._means = np.nanmean(x, axis=0)

    def transform(self, x: np.ndarray) -> np.ndarray:
        """Rows with their NaN filled in."""
        at, found = np.arange(x.shape[1]), np.tile(self._means, (len(x), 1))
        for line, row, seen in zip(found, x, ~np.isnan(x), strict=True):
            if seen.any():
                line[:] = np.interp(at, at[seen], row[seen])
        return found


def shrinkage_of(x: np.ndarray) -> float:
    """That of Ledoit & Wolf 2004 for centred rows, by products of rows: scikit-learn's takes all pairs of columns."""
    num_rows, num_features = x.shape
    gram = x @ x.T
    size = np.trace(gram) / num_rows
    squares = np.square(gram).sum() / num_rows**2
    spread = (np.square(np.diag(gram)).sum() / num_rows - squares) / num_rows
    return float(np.clip(spread / (squares - size**2 / num_features), 0.0, 1.0)) if squares > 0.0 else 0.0


class NearestNormal:
    """For every row a normal of the training rows nearest in its observed features, its covariance by Ledoit & Wolf."""

    def __init__(self, x: np.ndarray, count: int) -> None:
        self._x, self._count, self._least_noise = x, count, 1e-8 * x.var()

    def impute(self, x: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Conditional means of NaN entries and the ends of their central intervals, each (n, D)."""
        return tuple(np.concatenate(ends) for ends in zip(*(self._of(row, interval) for row in x), strict=True))

    def _of(self, row: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        seen = ~np.isnan(row)
        squared = np.square(self._x[:, seen] - row[seen]).sum(axis=1)
        near = self._x[np.argpartition(squared, self._count - 1)[: self._count]]
        return shrunk_low_rank(near, self._least_noise).impute(row[None], interval)


def nearest_normal(x: np.ndarray, counts: Iterable[int], seed: int) -> NearestNormal:
    """A normal of the nearest rows, their number by :func:`best_at_filling`."""
    fits = [functools.partial(NearestNormal, count=count) for count in counts]
    return best_at_filling(x, fits, lambda model, masked: model.impute(masked, 0.95)[0], seed)


class PixelProcess:
    """A Gaussian process over the pixels of each image by itself, about the mean image, with a squared exponential.

    Length scale and share of noise are those that fill hidden halves of 30 training images best.
    """

    def __init__(self, x: np.ndarray, shape: tuple[int, int], seed: int) -> None:
        places = np.stack(np.divmod(np.arange(x.shape[1]), shape[1]), axis=1).astype(float)
        self._squared = np.square(places[:, None] - places[None]).sum(axis=2)
        self._mean = x.mean(axis=0)
        rng = np.random.default_rng(seed)
        truth = x[rng.permutation(len(x))[:30]]
        hidden = rng.random(truth.shape) < 0.5

        def error(chosen: tuple[float, float]) -> float:
            self._covariance = self._kernel(*chosen)
            return float(np.abs(self(np.where(hidden, np.nan, truth)) - truth)[hidden].mean())

        self._covariance = self._kernel(*min(self._choices(), key=error))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Rows with their missing pixels at the conditional means."""
        filled = x.copy()
        for row in filled:
            seen = ~np.isnan(row)
            weights = linalg.solve(self._covariance[np.ix_(seen, seen)], (row - self._mean)[seen], assume_a="pos")
            row[~seen] = self._mean[~seen] + self._covariance[np.ix_(~seen, seen)] @ weights
        return filled

    @staticmethod
    def _choices() -> Iterator[tuple[float, float]]:
        return ((length, noise) for length in (0.7, 1.0, 1.4, 2.0, 3.0) for noise in (1e-3, 1e-2, 0.03, 0.1))

    def _kernel(self, length: float, noise: float) -> np.ndarray:
        return np.exp(-0.5 * self._squared / length**2) + noise * np.eye(self._mean.size)


def _as_few_targets(y: np.ndarray) -> np.ndarray:
    """Targets, (n, D), standardised; where there are more than n, n others with n/D of their log marginal likelihood.

    That of independent Gaussian processes with one kernel depends on targets Y by Y Y' and their number alone.
    """
    deviation = y.std(axis=0)
    y = (y - y.mean(axis=0)) / np.where(deviation > 0.0, deviation, 1.0)
    num_rows, num_targets = y.shape
    if num_targets <= num_rows:
        return y
    left, values, _ = linalg.svd(y, full_matrices=False)
    return left * values * np.sqrt(num_rows / num_targets)


class RowProcess:
    """A Gaussian process from the observed features of a row to its missing ones, fitted anew for every row.

    Linear and squared exponential kernel; its parameters are those of the largest marginal likelihood on some training
    rows with half of their features hidden, and stay the same for all rows: fitting them to each would take minutes.
    """

    def __init__(self, x: np.ndarray, seed: int, num_tuned: int = 400) -> None:
        self._x, self._mean, self._scale = x, x.mean(axis=0), x.std() * np.sqrt(x.shape[1])
        rng = np.random.default_rng(seed)
        seen = rng.random(x.shape[1]) < 0.5
        some = rng.permutation(len(x))[:num_tuned]
        kernel = ConstantKernel() * RBF(0.5) + ConstantKernel() * DotProduct() + WhiteKernel(0.01)
        process = GaussianProcessRegressor(kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a parameter at its bound is as good as left out
            self._kernel = process.fit(self._inputs(x[some], seen), _as_few_targets(x[some][:, ~seen])).kernel_

    def impute(self, x: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Conditional means of NaN entries and the ends of their central intervals, each (n, D)."""
        filled, lower, upper = x.copy(), x.copy(), x.copy()
        width = special.ndtri(0.5 + 0.5 * interval)
        for i, row in enumerate(x):
            seen = ~np.isnan(row)
            targets, inputs = self._x[:, ~seen], self._inputs(self._x, seen)
            own = self._inputs(row[None], seen)
            factor = linalg.cho_factor(self._covariance(inputs, inputs, noise=True), lower=True, overwrite_a=True)
            across = self._covariance(own, inputs, noise=False)[0]
            weights = linalg.cho_solve(factor, across)
            left = self._covariance(own, own, noise=True)[0, 0] - across @ weights
            mean, deviation = targets.mean(axis=0), targets.std(axis=0)
            mean = mean + weights @ (targets - mean)
            deviation = deviation * np.sqrt(max(left, 0.0))
            filled[i, ~seen] = mean
            lower[i, ~seen], upper[i, ~seen] = mean - width * deviation, mean + width * deviation
        return filled, lower, upper

    def _covariance(self, left: np.ndarray, right: np.ndarray, *, noise: bool) -> np.ndarray:
        """The tuned kernel by one matrix product: scikit-learn's takes distances pair by pair, most of the time."""
        product = left @ right.T
        squares = [np.square(rows).sum(axis=1) for rows in (left, right)]
        squared = np.maximum(squares[0][:, None] + squares[1] - 2.0 * product, 0.0)
        near, linear, rest = self._kernel.k1.k1, self._kernel.k1.k2, self._kernel.k2
        covariance = near.k1.constant_value * np.exp(-0.5 * squared / near.k2.length_scale**2)
        covariance += linear.k1.constant_value * (linear.k2.sigma_0**2 + product)
        if noise:
            covariance[np.diag_indices_from(covariance)] += rest.noise_level
        return covariance

    def _inputs(self, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return (x - self._mean)[:, seen] / self._scale
