"""Regression: the joint density of features and responses, conditioned on the features."""

from typing import ClassVar, Self

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_consistent_length, column_or_1d

from geode_jax._checks import check_columns, check_integer
from geode_jax._typing import ArrayLike
from geode_jax.estimators.base import FLOATS, GeodeEstimator, all_or_nothing, naming
from geode_jax.estimators.frames import missing_as_nan
from geode_jax.predict.conditional import Conditional, condition


class GeodeRegressor(MultiOutputMixin, RegressorMixin, GeodeEstimator):
    """Regression from GEODE's joint density of (x, y), conditioned on the observed features of x.

    Several responses are modelled jointly. NaN is a missing value in X (fit and predict) and in the responses of
    training rows. Each response is scaled so that its standard deviation is the root mean square of those of the
    features. If held-out rows show that features are in different units (and `feature_noise` is True), every feature
    and every response is then divided by its standard deviation.

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
        Posterior of the joint density; its features are those of X, then ``(y - y_mean_) / y_scale_``.
    y_mean_ : ndarray of shape (n_outputs,)
        Mean of each response over its observed values.
    y_scale_ : ndarray of shape (n_outputs,)
        What each response is divided by in the joint density.
    n_features_in_ : int
        Features seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where X had string column names.

    Examples
    --------
    >>> import numpy as np
    >>> from geode_jax import GeodeRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 1)) * [1.0, -1.0, 0.5] + 0.05 * rng.normal(size=(200, 3))
    >>> y = X[:, 0] + 0.1 * rng.normal(size=200)
    >>> model = GeodeRegressor(num_trees=1, num_warmup=50, num_samples=50, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.95)
    True
    >>> lower, upper = model.predict_interval([[0.5, np.nan, np.nan]], 0.9)
    >>> bool(0.0 < lower[0] < 0.5 < upper[0] < 1.0)
    True
    """

    _saved: ClassVar = (*GeodeEstimator._saved, "y_mean_", "y_scale_", "_y_ndim")

    @all_or_nothing
    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to rows X, (n, D), and responses y, (n,) or (n, responses)."""
        data = self._training_rows(X)
        if y is None:
            raise ValueError("y: GeodeRegressor requires y to be passed, but the target y is None")
        check_columns(y, "y")
        with naming("y"):
            responses = check_array(
                missing_as_nan(y), dtype=FLOATS, ensure_2d=False, ensure_all_finite="allow-nan", input_name="y"
            )
        self._y_ndim = responses.ndim
        if responses.ndim == 1 or responses.shape[1] == 1:
            responses = column_or_1d(responses, warn=True)[:, None]
            self._y_ndim = 1
        check_consistent_length(data, responses)
        if (is_empty := np.isnan(responses).all(axis=0)).any():
            raise ValueError(
                f"y: expected an observed value of every response, but column {np.flatnonzero(is_empty)[0]} is all NaN"
            )
        if (is_empty := np.isnan(data).all(axis=1) & np.isnan(responses).all(axis=1)).any():
            raise ValueError(
                "X, y: expected at least one observed value in every row of both together, but row"
                f" {np.flatnonzero(is_empty)[0]} has none"
            )
        with np.errstate(all="ignore"):  # the check tells of it
            self.y_mean_, self.y_scale_ = _frame(data, responses)
            scaled = ((responses - self.y_mean_) / self.y_scale_).astype(data.dtype)
        _check_units(self.y_mean_, self.y_scale_, scaled)
        joint = np.concatenate([data, scaled], axis=1)
        self.posterior_ = self._fit_forest(joint)[1]
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Mean of the responses given the observed features, (n, responses), or (n,) for a single one.

        With `return_std` also the standard deviation of a new response, noise included.
        """
        conditional = self._given(X)
        if not return_std:
            return self._to_responses(conditional.mean())
        mean, deviation = conditional.mean_and_std()
        return self._to_responses(mean), self._shaped(self.y_scale_ * deviation)

    def predict_interval(self, X: ArrayLike, probability: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper end of the central interval that contains a new response with this probability."""
        lower, upper = self._given(X).interval(probability)
        return self._to_responses(lower), self._to_responses(upper)

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = None
    ) -> np.ndarray:
        """Draws of the responses of each row, jointly over responses: (n_samples, n) or (n_samples, n, responses)."""
        n_samples = check_integer(n_samples, "n_samples", 1)
        return self._to_responses(self._given(X).sample(self._key(random_state), n_samples))

    def _num_features(self) -> int:
        return self.n_features_in_ + np.size(self.y_mean_)

    def _expected(self) -> dict[str, bool]:
        units = np.asarray(self.y_mean_), np.asarray(self.y_scale_)
        is_valid = all(unit.ndim == 1 and unit.dtype.kind == "f" and np.isfinite(unit).all() for unit in units)
        return {
            **super()._expected(),
            "finite y_mean_, and y_scale_ above 0": is_valid and bool((units[1] > 0).all()),
            "as many numbers in y_scale_ as in y_mean_": units[0].shape == units[1].shape,
            "_y_ndim of 1 or 2": type(self._y_ndim) is int
            and (self._y_ndim == 2 or (self._y_ndim == 1 and units[0].size == 1)),
        }

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _given(self, X: ArrayLike) -> Conditional:
        """The distribution of the responses, in the units of the joint density."""
        posterior, data = self._fitted(X)
        num_responses = self.y_scale_.size
        joint = np.concatenate([data, np.full((data.shape[0], num_responses), np.nan, data.dtype)], axis=1)
        return condition(posterior, joint).marginal(range(data.shape[1], joint.shape[1]))

    def _to_responses(self, values: np.ndarray) -> np.ndarray:
        return self._shaped(self.y_mean_ + self.y_scale_ * values)

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0] if self._y_ndim == 1 else values


def _check_units(mean: np.ndarray, unit: np.ndarray, scaled: np.ndarray) -> None:
    """Raise ValueError if a response is too large for float64, or its spread as against that of X."""
    is_usable = np.isfinite(mean) & np.isfinite(unit) & ~np.isinf(scaled).any(axis=0)
    if not is_usable.all():
        which = int(np.argmin(is_usable))
        raise ValueError(
            f"y: expected numbers that are not too large for float64, and a spread that is not too large or small"
            f" against that of X; those of column {which} have a mean of {mean[which]:.3g} and {unit[which]:.3g} times"
            " the spread of X; multiply them by a constant"
        )


def _frame(data: np.ndarray, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unit of each response; in this unit its standard deviation is the root mean square of the features'.

    Features that never vary do not count. The unit is 1 if the response is constant, or if all features are.
    """
    varies = np.fmax.reduce(data, axis=0) > np.fmin.reduce(data, axis=0)
    unit = _root_mean_square(_moments(data[:, varies])[1], 1.0) if varies.any() else 0.0
    lowest, highest = np.fmin.reduce(responses, axis=0), np.fmax.reduce(responses, axis=0)
    mean, deviation = _moments(responses)
    has_unit = (highest > lowest) & (deviation > 0.0) & (unit > 0.0)
    return np.where(highest > lowest, mean, lowest), np.where(has_unit, deviation / (unit if unit > 0.0 else 1.0), 1.0)


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every column over its observed values, (columns,); 0 where there are none."""
    seen = ~np.isnan(values)
    count = np.maximum(seen.sum(axis=0), 1)
    mean = np.where(seen, values, 0.0).sum(axis=0, dtype=np.float64) / count
    share = count / values.shape[0]
    return mean, _root_mean_square(np.where(seen, values - mean, 0.0), share)


def _root_mean_square(values: np.ndarray, share: np.ndarray | float) -> np.ndarray:
    """Of every column of `values`, which are 0 but for this share of the rows; squares are no larger than 1."""
    largest = np.abs(values).max(axis=0, initial=0.0)
    over = values / np.where(largest > 0.0, largest, 1.0)
    return largest * np.sqrt(np.square(over).mean(axis=0, dtype=np.float64) / share)
