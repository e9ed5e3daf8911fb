"""Density estimation with scikit-learn's interface."""

from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from geode_jax._checks import check_integer
from geode_jax._runtime.warning import warn_user
from geode_jax._typing import ArrayLike
from geode_jax.estimators.base import GeodeEstimator, all_or_nothing
from geode_jax.estimators.frames import like
from geode_jax.predict.api import Imputation, impute, impute_draws, impute_mean, log_density, sample
from geode_jax.predict.conformal import p_values, p_values_by_pattern
from geode_jax.predict.held_out import held_out_log_density


class GeodeDensity(DensityMixin, GeodeEstimator):
    """Bayesian multiscale density estimation: a mixture of low-rank Gaussians over the nodes of learned trees.

    Parameters
    ----------
    max_rank : int, default=None
        Directions per node. None chooses the number by held-out likelihood, adds half as many again, and takes at most
        100.
    depth : int, default=None
        Scales of a tree below the root; None chooses by the number of rows.
    num_trees : int, default=8
        Trees whose densities are averaged.
    cross_fit : int or None, default=5
        Number of folds for the cross-fitted statistics; None is the paper's in-sample form.
    feature_noise : bool, default=True
        Learn a noise scale per feature; False is the paper's isotropic noise.
    shrinkage : ExactShrinkage or PublishedShrinkage, default=None
        How u and tau are updated in the sampler; None is ``ExactShrinkage()``.
    prior : Prior, default=None
        Hyperparameters of the model; None is ``Prior()``.
    num_warmup : int, default=100
        Warm-up sweeps per chain, in which ranks adapt; their draws are discarded.
    num_samples : int, default=100
        Draws kept per chain, one per sweep after warm-up.
    num_chains : int, default=1
        Chains per tree; `geode_jax.diagnostics.report(model.posterior_)` tells whether they agree.
    dtype : {"float32", "float64"}, default="float32"
        Precision of the dictionary, the sampler and the predictions.
    progress : bool, default=False
        Show a progress bar on standard error.
    checkpoint : path or None, default=None
        Folder in which an unfinished fit is saved; the same `fit` after a crash resumes from there. Not saved by
        `save`.
    mesh : jax.sharding.Mesh or None, default=None
        Devices that share the work of `fit` and of predictions, as in :func:`geode_jax.fit`; not saved by `save`.
    random_state : int, RandomState instance or None, default=None
        Seed of everything random in `fit`, `sample` and `impute_draws`.

    Attributes
    ----------
    posterior_ : Posterior
        Dictionaries and draws; the functions of the package take it.
    intrinsic_dimension_ : int or None
        Posterior mode of the number of directions that a row's node needs; None if that is the most allowed.
    held_out_scores_ : ndarray
        Leave-one-out log densities of the complete training rows, ascending; `novelty` compares with them.
    n_features_in_ : int
        Features seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where X had string column names.

    See Also
    --------
    GeodeImputer : Filling in as a step of a pipeline.
    geode_jax.diagnostics.report : Whether the chains of ``posterior_`` agree, in words.
    geode_jax.interop.arviz.to_arviz : ``posterior_`` as ArviZ has it.
    geode_jax.interop.plots : Pictures of ``posterior_``.

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

    _saved = (*GeodeEstimator._saved, "held_out_scores_")

    @all_or_nothing
    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to the rows of X, (n, D), NaN being missing values; y is ignored."""
        data = self._training_rows(X)
        forest, self.posterior_ = self._fit_forest(data)
        try:
            self.held_out_scores_ = np.sort(held_out_log_density(forest, self.posterior_))
        except KeyboardInterrupt:  # the posterior is complete, and is all that most methods need
            warn_user("interrupted: the posterior is complete, but novelty needs calibration rows")
            self.held_out_scores_ = np.empty(0)
        return self

    def _expected(self) -> dict[str, bool]:
        scores = np.asarray(self.held_out_scores_)
        is_valid = scores.ndim == 1 and scores.dtype.kind == "f" and bool(np.isfinite(scores).all())
        return {
            **super()._expected(),
            "held_out_scores_ finite and ascending": is_valid and bool((np.diff(scores) >= 0).all()),
        }

    @property
    def intrinsic_dimension_(self) -> int | None:
        """Posterior mode of the number of directions that a row's node needs; None if it is the most allowed."""
        return self.posterior_.intrinsic_dimension

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Log density of each row, (n,), in nats; rows with NaN get that of their observed entries."""
        return log_density(*self._fitted(X))

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """Mean log density of the rows, as in `GaussianMixture` (`KernelDensity` returns the sum)."""
        return float(np.mean(self.score_samples(X)))

    def novelty(self, X: ArrayLike, calibration: ArrayLike | None = None) -> np.ndarray:
        """Conformal p-value of each row, (n,): the share of known rows whose density is not higher.

        A small value means a novel row. Rows distributed like the known rows have uniform p-values, so that
        ``model.novelty(X) < level`` flags that share of them even where the density fits badly. The smallest possible
        value is ``1 / (1 + known rows)``.

        Without `calibration` the known rows are the complete training rows, with their held-out densities
        (`held_out_scores_`), and X must be complete, as densities of different features cannot be compared. With
        ``cross_fit=None`` these densities are too high, and more rows than `level` are flagged: pass `calibration`.

        `calibration`: rows (m, D) that were not in the fit. Then X may have NaN: each row is compared with these rows
        with the same features hidden. The p-values are uniform if what is missing does not depend on the row's values.
        Every pattern of missing features takes a pass over the calibration rows; some hundred of these are enough.
        """
        posterior, data = self._fitted(X)
        if calibration is not None:
            return p_values_by_pattern(
                partial(log_density, posterior), data, self._fitted(calibration, "calibration")[1]
            )
        if np.isnan(data).any():
            raise ValueError(
                f"X: expected no missing values without calibration rows, got {np.isnan(data).sum()} NaN; pass"
                " rows that were not in the fit as `calibration`"
            )
        if self.held_out_scores_.size == 0:
            raise ValueError(
                "X: novelty compares with densities of complete rows of fit, and there are none: no row was complete,"
                " or fit was interrupted before; pass calibration"
            )
        return p_values(log_density(posterior, data), self.held_out_scores_)

    def sample(self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw new rows from the posterior predictive, (n_samples, D).

        `random_state`: None is that of the estimator, which draws the same rows in every call if it is a number.
        """
        check_is_fitted(self)
        return sample(self._key(random_state), self.posterior_, check_integer(n_samples, "n_samples", 1))

    def impute(self, X: ArrayLike, interval: float | None = None, calibration: ArrayLike | None = None) -> Any:
        """Fill NaN with its conditional mean, (n, D); with `interval` (say 0.95), ``(filled, lower, upper)``.

        Without `interval` there are no intervals; :func:`geode_jax.impute` gives those of 95%. Arrays, or frames with
        the index and columns of X if that is a frame of pandas or polars.

        `calibration`: rows that were not in the fit. With them, intervals are calibrated also where whole parts of rows
        are missing together (see :func:`geode_jax.impute`).
        """
        if interval is None:
            if calibration is not None:
                raise ValueError("interval: expected the probability of the intervals to calibrate, got None")
            return like(X, impute_mean(*self._fitted(X)))
        rows = None if calibration is None else self._fitted(calibration, "calibration")[1]
        found = impute(*self._fitted(X), interval=interval, calibration=rows)
        return Imputation(*(like(X, values) for values in found))

    def impute_draws(
        self, X: ArrayLike, n_imputations: int = 5, random_state: int | np.random.RandomState | None = None
    ) -> np.ndarray:
        """Multiple imputation: (n_imputations, n, D), NaN drawn jointly from its conditional distribution.

        `random_state`: as in :meth:`sample`.
        """
        posterior, data = self._fitted(X)
        return impute_draws(self._key(random_state), posterior, data, check_integer(n_imputations, "n_imputations", 1))
