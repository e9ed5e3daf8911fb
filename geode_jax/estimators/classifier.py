"""Classification: one density per class, weighted by the class probabilities."""

import dataclasses
import os
from typing import Any, ClassVar, Self

import numpy as np
from jax.sharding import Mesh
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from geode_jax._checks import check_integer, without_na
from geode_jax._typing import ArrayLike
from geode_jax.estimators.base import GeodeEstimator, all_or_nothing
from geode_jax.fitting.classes import check_probabilities, fit_classes
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.predict.classes import class_log_probabilities
from geode_jax.settings import DictionarySettings, ExactShrinkage, Prior, PublishedShrinkage, SharedSpan


class GeodeClassifier(ClassifierMixin, GeodeEstimator):
    """Classification by one GEODE density per class; NaN is a missing value in fit and prediction.

    Units, noise scales of the features and the span of the leading directions are common to all classes (the last two
    only where no training value is missing), and the densities are calibrated on held-out complete training rows (see
    :func:`geode_jax.fit_classes`).

    Parameters
    ----------
    priors : array-like of shape (n_classes,), default=None
        Class probabilities, in the order of `classes_`; None takes the shares of the training rows.
    span_rank : int or None, default=50
        Number of leading directions, of all rows together, in whose span the class densities are learned. Used only if
        there are at least twice as many features and 20 times as many rows, all of them complete. None for no span.
    calibrate : bool, default=True
        Raise the densities to the power that predicts held-out training rows best; Ctrl-C meanwhile leaves them as they
        are. Votes are not calibrated.
    vote : bool, default=False
        Probabilities as in the paper: the share of posterior draws under which a class is the most probable, whatever
        `calibrate` says. Equally probable classes share a draw.
    max_rank : int, default=None
        As in :class:`GeodeDensity`, but None does not look at held-out rows: half of the features, or of the span's
        directions, at least 10 and at most 100.
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
    classes_ : ndarray of shape (n_classes,)
        The labels.
    posterior_ : ClassPosterior
        Dictionaries and draws of every class.
    n_features_in_ : int
        Features seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where X had string column names.

    Examples
    --------
    >>> import numpy as np
    >>> from geode_jax import GeodeClassifier
    >>> y = np.repeat(["a", "b"], 40)
    >>> X = np.random.default_rng(0).normal(size=(80, 2)) + 5.0 * (y == "b")[:, None]
    >>> model = GeodeClassifier(num_trees=1, num_warmup=20, num_samples=20, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 0.0], [5.0, np.nan]]).tolist()
    ['a', 'b']
    """

    _saved: ClassVar = (*GeodeEstimator._saved, "classes_")
    _flags: ClassVar = ("calibrate", "vote")

    def __init__(
        self,
        *,
        priors: ArrayLike | None = None,
        span_rank: int | None = 50,
        calibrate: bool = True,
        vote: bool = False,
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
        self.priors = priors
        self.span_rank = span_rank
        self.calibrate = calibrate
        self.vote = vote

    @all_or_nothing
    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to rows X, (n, D), NaN being missing values, with labels y, (n,)."""
        _check_given(y)
        data, y = self._training_rows(X, y)
        check_classification_targets(y)
        self._check_flags()
        if y.dtype.kind in "mM":
            raise TypeError(f"y: expected labels that are numbers, text or booleans, got {y.dtype}")
        self.classes_, labels, counts = np.unique(y, return_inverse=True, return_counts=True)
        if counts.min() < 2:
            label = self.classes_.tolist()[np.argmin(counts)]
            raise ValueError(f"y: expected at least 2 rows of every class, got {counts.min()} of class {label!r}")
        check_probabilities(self.priors, counts.size, "priors")
        self.posterior_ = fit_classes(
            self._fit_key(),
            data,
            labels.reshape(-1),
            class_probabilities=self.priors,
            dictionary=self._dictionary_settings(),
            prior=self.prior,
            sampler=self._sampler_settings(),
            calibrate=self.calibrate,
            dtype=self.dtype,
            progress=self.progress,
            checkpoint=self.checkpoint,
            mesh=self.mesh,
        )
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row, (n,)."""
        log_probability = self.predict_log_proba(X)
        return self.classes_[np.argmax(log_probability, axis=1)]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probability of every class, (n, n_classes), in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Log probability of every class, (n, n_classes)."""
        rows = self._fitted(X)[1]
        return class_log_probabilities(self.posterior_, rows, vote=self.vote)

    def _expected(self) -> dict[str, bool]:
        is_set = len(set(self.classes_.tolist())) == self.classes_.size if self.classes_.ndim == 1 else False
        return {
            **super()._expected(),
            "a different label in classes_ for every class": is_set
            and self.classes_.size == self.posterior_.num_classes,
        }

    def _dictionary_settings(self) -> DictionarySettings:
        settings = super()._dictionary_settings()
        span = None if self.span_rank is None else SharedSpan(check_integer(self.span_rank, "span_rank", 1))
        return dataclasses.replace(settings, shared_span=span)

    def _from_archive(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.posterior_ = ClassPosterior.from_archive(header, arrays)


def _check_given(y: ArrayLike) -> None:
    """Raise ValueError if labels are missing, where they are objects: scikit-learn would compare them."""
    if y is None:
        return  # scikit-learn has a message of its own
    if np.ma.is_masked(y):
        raise ValueError(f"y: expected a label for every row, got {int(np.ma.getmaskarray(y).sum())} masked ones")
    labels = without_na(np.asarray(y, dtype=None if hasattr(y, "dtype") else object))
    if labels.dtype == object:
        number = sum(one is None or (isinstance(one, float) and np.isnan(one)) for one in labels.ravel().tolist())
        if number:
            raise ValueError(f"y: expected a label for every row, got {number} missing ones")
