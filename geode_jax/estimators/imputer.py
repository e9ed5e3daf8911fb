"""Filling in missing values as a step of a pipeline."""

import os
from typing import Any, ClassVar, Self

import numpy as np
from jax.sharding import Mesh
from sklearn.base import OneToOneFeatureMixin, TransformerMixin

from geode_jax._checks import check_integer
from geode_jax._runtime.warning import warn_user
from geode_jax._typing import ArrayLike
from geode_jax.estimators.base import GeodeEstimator, all_or_nothing
from geode_jax.estimators.frames import like
from geode_jax.predict.api import Imputation, impute, impute_draws, impute_mean
from geode_jax.settings import ExactShrinkage, Prior, PublishedShrinkage


class GeodeImputer(OneToOneFeatureMixin, TransformerMixin, GeodeEstimator):
    """Fill in missing values (NaN) with their means given the observed values of the row, by GEODE's joint density.

    Any pattern of missing values is allowed in `fit` and `transform`; rows may all be partial. For uncertainty, use
    `impute` (central intervals) and `impute_draws` (multiple imputation). In `fit`, a row without any observed value is
    an error; in `transform` it gets the model's mean. A column without any observed value in `fit` is left out, as
    scikit-learn's imputers do, with a warning.

    Parameters
    ----------
    add_indicator : bool, default=False
        Whether `transform` adds a column of zeros and ones for every feature that had missing values in fit, which says
        where they are.
    keep_empty_features : bool, default=False
        Whether results hold the columns that had no observed value in fit. What is missing there becomes 0.
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
    num_warmup : int, default=100
        As in :class:`GeodeDensity`.
    num_samples : int, default=100
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
    has_values_ : ndarray of shape (n_features_in_,)
        Which features had an observed value in fit: those of the model.
    has_missing_ : ndarray of shape (n_features_in_,)
        Which features had missing values in fit.
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

    _saved: ClassVar = (*GeodeEstimator._saved, "has_values_", "has_missing_")
    _flags: ClassVar = ("add_indicator", "keep_empty_features")

    def __init__(
        self,
        *,
        add_indicator: bool = False,
        keep_empty_features: bool = False,
        max_rank: int | None = None,
        depth: int | None = None,
        num_trees: int = 8,
        cross_fit: int | None = 5,
        feature_noise: bool = True,
        shrinkage: ExactShrinkage | PublishedShrinkage | None = None,
        prior: Prior | None = None,
        num_warmup: int = 100,
        num_samples: int = 100,
        num_chains: int = 1,
        dtype: Any = "float32",
        progress: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        mesh: Mesh | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            max_rank=max_rank,
            depth=depth,
            num_trees=num_trees,
            cross_fit=cross_fit,
            feature_noise=feature_noise,
            shrinkage=shrinkage,
            prior=prior,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            dtype=dtype,
            progress=progress,
            checkpoint=checkpoint,
            mesh=mesh,
            random_state=random_state,
        )
        self.add_indicator = add_indicator
        self.keep_empty_features = keep_empty_features

    @all_or_nothing
    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to the rows of X, (n, D), NaN being missing values; y is ignored."""
        self._check_flags()
        data = self._training_rows(X)
        is_missing = np.isnan(data)
        self.has_missing_, self.has_values_ = is_missing.any(axis=0), ~is_missing.all(axis=0)
        if not self.has_values_.any():
            raise ValueError("X: expected an observed value in some column, but all are NaN")
        if not self.has_values_.all():
            names = getattr(self, "feature_names_in_", np.arange(data.shape[1]))[~self.has_values_].tolist()
            what = "become 0" if self.keep_empty_features else "are left out"
            warn_user(f"X: features without any observed value {what}: {names[:10]}", UserWarning)
            data = data[:, self.has_values_]
        self.posterior_ = self._fit_forest(data)[1]
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Rows with NaN replaced by its conditional mean; observed values are unchanged.

        (n, D), less the features without any observed value in fit, and more those that `add_indicator` adds.
        """
        self._check_flags()
        posterior, data = self._fitted(X)
        filled = self._with_empty(impute_mean(posterior, data[:, self.has_values_]), data).astype(data.dtype)
        if not self.add_indicator:
            return filled
        return np.concatenate([filled, np.isnan(data[:, self.has_missing_]).astype(data.dtype)], axis=1)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> np.ndarray:
        """Names of the columns of `transform`, as scikit-learn's imputers give them."""
        self._check_flags()
        names = super().get_feature_names_out(input_features)
        added = [f"missingindicator_{name}" for name in names[self.has_missing_]] if self.add_indicator else []
        return np.concatenate([names[self._columns()], np.asarray(added, dtype=object)])

    def impute(self, X: ArrayLike, interval: float = 0.95, calibration: ArrayLike | None = None) -> Imputation:
        """``(filled, lower, upper)``: conditional means and central intervals of this probability.

        Arrays (n, D), less the features without any observed value in fit; or frames with the index and columns of X if
        that is a frame of pandas or polars. `calibration`: rows that were not in the fit. With them, intervals are
        calibrated also where whole parts of rows are missing together (see :func:`geode_jax.impute`).
        """
        posterior, data = self._fitted(X)
        rows = None if calibration is None else self._fitted(calibration, "calibration")[1][:, self.has_values_]
        found = impute(posterior, data[:, self.has_values_], interval=interval, calibration=rows)
        return Imputation(*(like(X, self._with_empty(values, data), self._columns()) for values in found))

    def impute_draws(
        self, X: ArrayLike, n_imputations: int = 5, random_state: int | np.random.RandomState | None = None
    ) -> np.ndarray:
        """Multiple imputation: (n_imputations, n, D), NaN drawn jointly from its conditional distribution.

        D is less the features without any observed value in fit. `random_state`: None is that of the estimator.
        """
        posterior, data = self._fitted(X)
        number = check_integer(n_imputations, "n_imputations", 1)
        drawn = impute_draws(self._key(random_state), posterior, data[:, self.has_values_], number)
        return np.stack([self._with_empty(values, data) for values in drawn])

    def _columns(self) -> np.ndarray:
        """Positions in X of the columns of results."""
        return np.flatnonzero(self.has_values_ | self.keep_empty_features)

    def _with_empty(self, values: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Values of the model's features among all that results hold."""
        if not self.keep_empty_features or values.shape[1] == data.shape[1]:
            return values
        whole = np.where(np.isnan(data), 0.0, data).astype(values.dtype)
        whole[:, self.has_values_] = values
        return whole

    def _num_features(self) -> int:
        return int(np.sum(self.has_values_))

    def _added_attributes(self) -> dict[str, np.ndarray]:
        size = self.n_features_in_
        return {"has_values_": np.ones(size, dtype=bool), "has_missing_": np.zeros(size, dtype=bool)}

    def _expected(self) -> dict[str, bool]:
        masks = np.asarray(self.has_values_), np.asarray(self.has_missing_)
        is_valid = all(mask.dtype == bool and mask.shape == (self.n_features_in_,) for mask in masks)
        return {"true or false for every feature in has_values_ and has_missing_": is_valid, **super()._expected()}
