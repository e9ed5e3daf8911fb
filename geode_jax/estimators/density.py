"""GEODE with scikit-learn's verbs."""

from typing import Any, Self

import jax
import numpy as np
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from geode_jax._checks import check_integer
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.fit import fit
from geode_jax.predict.predictive import impute, impute_draws, impute_mean, log_density, sample
from geode_jax.settings import (
    CrossFit,
    DictionarySettings,
    ExactShrinkage,
    FeatureNoise,
    Prior,
    PublishedShrinkage,
    SamplerSettings,
)

_FLOATS = [np.float64, np.float32]


class GeodeDensity(DensityMixin, BaseEstimator):
    """Bayesian multiscale density estimation: a mixture of low-rank Gaussians over the nodes of learned trees.

    Parameters
    ----------
    max_rank : int, default=None
        Directions per node; None chooses 50, or fewer where the data have fewer.
    depth : int, default=None
        Scales below the root; None chooses from the number of rows.
    num_trees : int, default=8
        Trees whose densities are averaged.
    cross_fit : int or None, default=5
        Folds of the cross-fitted statistics; None is the paper's in-sample form.
    feature_noise : bool, default=True
        Learn a noise scale per feature; False is the paper's isotropic noise.
    shrinkage : ExactShrinkage or PublishedShrinkage, default=None
        Conditionals of u and tau; None is the exact ones.
    prior : Prior, default=None
        Hyperparameters of the model.
    num_warmup, num_samples, num_chains : int
        Sweeps per chain before and after adaptation, and chains per tree.
    dtype : {"float32", "float64"}, default="float32"
        Precision of the dictionary, the sampler and the predictions.
    progress : bool, default=False
        Show a progress bar on standard error.
    random_state : int, RandomState instance or None, default=None
        Decides everything random in `fit` and `sample`.

    Attributes
    ----------
    posterior_ : Posterior
        Dictionaries and draws; the functions of the package take it.
    intrinsic_dimension_ : int
        Posterior mode of the number of directions a row's node uses.
    n_features_in_ : int
        Features seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where X had string column names.

    Examples
    --------
    >>> import numpy as np
    >>> from geode_jax import GeodeDensity
    >>> X = np.random.default_rng(0).normal(size=(50, 3))
    >>> model = GeodeDensity(num_trees=1, num_warmup=20, num_samples=20, random_state=0).fit(X)
    >>> model.score_samples(X).shape
    (50,)
    >>> bool(np.isfinite(model.impute([[0.1, np.nan, 0.3]])).all())
    True
    """

    def __init__(
        self,
        *,
        max_rank: int | None = None,
        depth: int | None = None,
        num_trees: int = 8,
        cross_fit: int | None = 5,
        feature_noise: bool = True,
        shrinkage: ExactShrinkage | PublishedShrinkage | None = None,
        prior: Prior | None = None,
        num_warmup: int = 500,
        num_samples: int = 500,
        num_chains: int = 1,
        dtype: Any = "float32",
        progress: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.max_rank = max_rank
        self.depth = depth
        self.num_trees = num_trees
        self.cross_fit = cross_fit
        self.feature_noise = feature_noise
        self.shrinkage = shrinkage
        self.prior = prior
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.num_chains = num_chains
        self.dtype = dtype
        self.progress = progress
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to the rows of X, (n, D), NaN being missing values; y is ignored."""
        data = validate_data(self, X, dtype=_FLOATS, ensure_min_samples=2, ensure_all_finite="allow-nan")
        self.posterior_ = fit(
            self._key(),
            data,
            dictionary=DictionarySettings(
                max_rank=self.max_rank,
                depth=self.depth,
                num_trees=self.num_trees,
                cross_fit=None if self.cross_fit is None else CrossFit(self.cross_fit),
                feature_noise=FeatureNoise() if self.feature_noise else None,
            ),
            prior=self.prior,
            sampler=SamplerSettings(
                num_warmup=self.num_warmup,
                num_samples=self.num_samples,
                num_chains=self.num_chains,
                shrinkage=ExactShrinkage() if self.shrinkage is None else self.shrinkage,
            ),
            dtype=self.dtype,
            progress=self.progress,
        )
        self.intrinsic_dimension_ = self.posterior_.intrinsic_dimension
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Log density of each row, (n,), in nats; rows with NaN get that of their observed entries."""
        return log_density(*self._fitted(X))

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """Mean log density of the rows; unlike `KernelDensity`, and like `GaussianMixture`, not their sum."""
        return float(np.mean(self.score_samples(X)))

    def sample(self, n_samples: int = 1) -> np.ndarray:
        """Draw new rows from the posterior predictive, (n_samples, D)."""
        check_is_fitted(self)
        return sample(self._key(), self.posterior_, check_integer(n_samples, "n_samples", 1))

    def impute(
        self, X: ArrayLike, interval: float | None = None
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fill NaN with its conditional mean, (n, D); with `interval` (say 0.95), ``(filled, lower, upper)``."""
        if interval is None:
            return impute_mean(*self._fitted(X))
        return tuple(impute(*self._fitted(X), interval=interval))  # type: ignore[return-value]

    def impute_draws(self, X: ArrayLike, n_imputations: int = 5) -> np.ndarray:
        """Multiple imputation: (n_imputations, n, D), NaN drawn jointly from its conditional distribution."""
        posterior, data = self._fitted(X)
        return impute_draws(self._key(), posterior, data, check_integer(n_imputations, "n_imputations", 1))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _fitted(self, X: ArrayLike) -> tuple[Any, np.ndarray]:
        check_is_fitted(self)
        return self.posterior_, validate_data(self, X, dtype=_FLOATS, reset=False, ensure_all_finite="allow-nan")

    def _key(self) -> KeyArray:
        return jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))
