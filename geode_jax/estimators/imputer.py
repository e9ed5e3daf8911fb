"""Filling in missing values as a step of a pipeline."""

from typing import Any, Self

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import validate_data

from geode_jax._checks import check_integer
from geode_jax._typing import ArrayLike
from geode_jax.estimators.base import FLOATS, GeodeEstimator
from geode_jax.predict.api import Imputation, impute, impute_draws, impute_mean


class GeodeImputer(OneToOneFeatureMixin, TransformerMixin, GeodeEstimator):
    """Fill in missing values (NaN) with their means given the observed values of the row, by GEODE's joint density.

    Any pattern of missing values is allowed in `fit` and `transform`; rows may all be partial. For uncertainty, use
    `impute` (central intervals) and `impute_draws` (multiple imputation). In `fit`, a row or column without any
    observed value is an error; in `transform` such a row gets the model's mean.

    Parameters
    ----------
    max_rank : int, default=None
        As in :class:`GeodeDensity`.
    depth : int, default=None
        As in :class:`GeodeDensity`.
    num_trees : int, default=8
        As in :class:`GeodeDensity`.
    cross_fit : int or None, default=5
        As in :class:`GeodeDensity`.
    feature_noise : bool, default=True
        As in :class:`GeodeDensity`.
    shrinkage : ExactShrinkage or PublishedShrinkage, default=None
        As in :class:`GeodeDensity`.
    prior : Prior, default=None
        As in :class:`GeodeDensity`.
    num_warmup : int, default=200
        As in :class:`GeodeDensity`.
    num_samples : int, default=200
        As in :class:`GeodeDensity`.
    num_chains : int, default=1
        As in :class:`GeodeDensity`.
    dtype : {"float32", "float64"}, default="float32"
        As in :class:`GeodeDensity`.
    progress : bool, default=False
        As in :class:`GeodeDensity`.
    checkpoint : path or None, default=None
        As in :class:`GeodeDensity`.
    mesh : jax.sharding.Mesh or None, default=None
        As in :class:`GeodeDensity`.
    random_state : int, RandomState instance or None, default=None
        As in :class:`GeodeDensity`.

    Attributes
    ----------
    posterior_ : Posterior
        Dictionaries and draws; the functions of the package take it.
    n_features_in_ : int
        Features seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where X had string column names.

    Examples
    --------
    >>> import numpy as np
    >>> from geode_jax import GeodeImputer
    >>> X = np.random.default_rng(0).normal(size=(60, 1)) + [0.0, 1.0, 2.0]
    >>> X[::3, 1] = np.nan
    >>> imputer = GeodeImputer(num_trees=1, num_warmup=20, num_samples=20, random_state=0)
    >>> filled = imputer.fit_transform(X)
    >>> bool(abs(filled[0, 1] - X[0, 0] - 1.0) < 0.1)
    True
    >>> imputer.impute_draws(X, n_imputations=3).shape
    (3, 60, 3)
    """

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to the rows of X, (n, D), NaN being missing values; y is ignored."""
        data = validate_data(self, X, dtype=FLOATS, ensure_min_samples=2, ensure_all_finite="allow-nan")
        self.posterior_ = self._fit_forest(data)[1]
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Rows (n, D) with NaN replaced by its conditional mean; observed values are unchanged."""
        posterior, data = self._fitted(X)
        return impute_mean(posterior, data).astype(data.dtype)

    def impute(self, X: ArrayLike, interval: float = 0.95, calibration: ArrayLike | None = None) -> Imputation:
        """``(filled, lower, upper)``, (n, D) each: conditional means and central intervals of this probability.

        `calibration`: rows that were not in the fit. With them, intervals are calibrated also where whole parts of rows
        are missing together (see :func:`geode_jax.impute`).
        """
        return impute(*self._fitted(X), interval=interval, calibration=calibration)

    def impute_draws(self, X: ArrayLike, n_imputations: int = 5) -> np.ndarray:
        """Multiple imputation: (n_imputations, n, D), NaN drawn jointly from its conditional distribution."""
        posterior, data = self._fitted(X)
        return impute_draws(self._key(), posterior, data, check_integer(n_imputations, "n_imputations", 1))
