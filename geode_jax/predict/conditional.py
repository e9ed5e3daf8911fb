"""The distribution of missing features given observed ones, per row: means, quantiles, draws, densities."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from geode_jax._checks import check_data, check_integer, check_key, check_number
from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, ArrayLike, Float, KeyArray
from geode_jax.model.draw import Draw
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.conditional_moments import conditional_draws, conditional_summary, tails
from geode_jax.predict.constants import draws_of_constants, log_density_of_constants, summary_of, varying
from geode_jax.predict.density import density_row_bytes, log_density_by_tree
from geode_jax.predict.distance import by_distance
from geode_jax.predict.row_blocks import map_row_blocks
from geode_jax.predict.rows import (
    CONDITIONAL_DRAWS,
    check_candidates,
    check_draws,
    check_rows,
    features_and_mask,
    in_row_space,
    map_held_rows,
    nodes_in_features,
    num_wanted,
    partial_log_density_by_tree,
    thinned,
)
from geode_jax.rows.frame import Frame, to_data, to_model


@dataclasses.dataclass(frozen=True, eq=False)
class Conditional:
    """Posterior predictive distribution of every row's missing features given its observed ones.

    Made by :func:`condition`. Per row it is a mixture of low-rank Gaussians over trees (with equal weights), posterior
    draws and nodes. With several trees the mixture is shrunk towards its mean, by a factor that depends on how much
    the trees disagree (`predict/conditional_moments.py` says why). A row without missing features is a point mass. All
    results are in the data's units; observed values are returned unchanged. :meth:`marginal` restricts the results to
    some of the features, and makes them cheaper.

    The noise variance of a scale that holds no row in a draw comes from its prior alone, which may have no mean.
    Standard deviations and quantiles therefore cap it at the square of the feature's own unit (`Posterior.scale`);
    draws and densities do not.

    Rows are processed in blocks, so that only the results grow with the number of rows: on a CPU at most 64 rows that
    fit in 256 MiB of memory, elsewhere at most 512 that fit in 1 GiB (a single row may need more).
    """

    posterior: Posterior
    rows: np.ndarray
    num_draws: int | None
    num_candidates: int | None
    features: np.ndarray | None = None

    def marginal(self, features: Sequence[int]) -> "Conditional":
        """The distribution of these features alone, in this order: results have one column for each instead of D.

        Other missing features of a row are integrated out. Regression is the case where `features` are the responses.
        Of a marginal, `features` are columns of its results.
        The factor by which the mixture is shrunk towards its mean is computed from these features only.
        """
        index = [check_integer(one, "features", 0) for one in np.atleast_1d(np.asarray(features)).tolist()]
        own = np.arange(self.rows.shape[1]) if self.features is None else self.features
        if not index or max(index) >= own.size or len(set(index)) < len(index):
            raise ValueError(f"features: expected different indices below {own.size}, got {features!r}")
        return dataclasses.replace(self, features=own[index])

    def mean(self) -> Float[np.ndarray, "n D"]:
        """Rows with missing features replaced by their conditional means."""
        return self._summary(None)[0]

    def std(self) -> Float[np.ndarray, "n D"]:
        """Standard deviation of every feature, 0 at observed ones."""
        return self.mean_and_std()[1]

    def mean_and_std(self) -> tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"]]:
        """:meth:`mean` and :meth:`std` in one pass over the rows."""
        mean, deviation = self._summary(())
        return mean, deviation

    def quantile(self, level: float | Sequence[float]) -> np.ndarray:
        """Quantiles of every feature by itself: (n, D) for one level in (0, 1), (levels, n, D) for several.

        At every node the posterior draws are merged into one normal with their mean and variance; the quantiles are
        those of the mixture of these normals.
        """
        levels = [self._checked_level(one, "level") for one in np.atleast_1d(level).tolist()]
        if not levels:
            raise ValueError("level: expected one or more numbers in (0, 1), got none")
        found = np.stack(self._summary(tuple(levels))[2:])
        return found[0] if np.ndim(level) == 0 else found

    def median(self) -> Float[np.ndarray, "n D"]:
        """The quantile at 1/2."""
        return self.quantile(0.5)

    def interval(self, probability: float = 0.95) -> tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"]]:
        """Lower and upper ends of the central interval of every feature."""
        _, lower, upper = self.mean_and_interval(probability)
        return lower, upper

    def mean_and_interval(self, probability: float) -> tuple[np.ndarray, ...]:
        """:meth:`mean` and both ends of :meth:`interval` in one pass over the rows."""
        tail = 0.5 * (1.0 - self._checked_level(probability, "probability"))
        mean, _, lower, upper = self._summary((tail, 1.0 - tail))
        return mean, lower, upper

    def _checked_level(self, value: float, name: str) -> float:
        """A probability that the posterior's dtype tells from 0, and Python from 1: near 1 the rest is what counts."""
        level = check_number(value, name, above=0.0, below=1.0)
        least, rest = np.finfo(self.posterior.dtype).tiny, np.finfo(float).eps
        if not least <= level <= 1.0 - rest:
            raise ValueError(f"{name}: expected a number from {least:.0e} to 1 - {rest:.0e}, got {level!r}")
        return level

    def sample(self, key: KeyArray, num_samples: int = 1) -> Float[np.ndarray, "s n D"]:
        """Completed data sets, with the missing features of a row drawn jointly: multiple imputation."""
        key = check_key(key)
        num_samples = check_integer(num_samples, "num_samples", 1)
        wanted = self._columns(self.rows)
        result = np.repeat(wanted[None].astype(np.float64), num_samples, axis=0)
        missing = np.isnan(wanted)
        for posterior, rows in by_distance(self.posterior, self.rows, np.flatnonzero(missing.any(axis=1))):
            drawn = dataclasses.replace(self, posterior=posterior)._draws(key, rows, num_samples)
            values = np.moveaxis(self._to_data(drawn), 1, 0)
            result[:, rows] = np.where(missing[rows], values, result[:, rows])
        return result

    def _draws(self, key: KeyArray, rows: np.ndarray, num_samples: int) -> np.ndarray:
        """Draws of the wanted features of some rows, (rows, num_samples, D'), each by its own key."""
        posterior = self.posterior
        with jax_settings(posterior.dtype), one_blas_thread():
            draws = thinned(posterior, self.num_draws)
            x, is_observed = features_and_mask(posterior, self.rows[rows])
            return map_held_rows(
                conditional_draws,
                (key, nodes_in_features(posterior), draws, self._index()),
                x,
                is_observed,
                rows.astype(np.int32),
                posterior=posterior,
                draws=draws,
                num_candidates=self.num_candidates,
                more_bytes=x.itemsize * num_samples * self._columns(x).shape[1],
                num_samples=num_samples,
                num_wanted=num_wanted(is_observed, self.features),
            )[0]

    def log_prob(self, values: ArrayLike) -> Float[np.ndarray, "n"]:
        """Log density, in nats, of the missing features at `values`, (n, D); entries at observed features are ignored.

        Of a marginal, `values` have one column for each of its features. 0 for rows without missing features. Raises
        ValueError if `values` has another shape, is infinite anywhere, or is NaN where a feature is missing.
        """
        given, missing = self._checked(values)
        result = np.zeros(self.rows.shape[0])
        whole = self.rows.astype(np.float64)
        columns = np.arange(whole.shape[1]) if self.features is None else self.features
        whole[:, columns] = np.where(missing, given, self._columns(whole))
        for posterior, rows in by_distance(self.posterior, whole, np.flatnonzero(missing.any(axis=1))):
            part = dataclasses.replace(self, posterior=posterior)
            result[rows] = part._log_prob_of(rows, whole[np.ix_(rows, columns)], missing[rows])
        return result

    def _checked(self, values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Values for the wanted features, and which of these the rows miss, (n, D') each."""
        missing = np.isnan(self._columns(self.rows))
        given = check_data(values, "values", allow_nan=True, min_rows=0)
        if given.shape != missing.shape:
            raise ValueError(
                f"values: expected shape {missing.shape}, rows and features of this distribution, got {given.shape}"
            )
        if np.isnan(given[missing]).any():
            raise ValueError("values: expected a number wherever the rows have a missing value, got NaN")
        return given, missing

    def _log_prob_of(self, rows: np.ndarray, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Log density of some rows' missing features at `values`, (rows, D')."""
        posterior = self.posterior
        with jax_settings(posterior.dtype), one_blas_thread():
            draws = thinned(posterior, self.num_draws)
            x, is_observed = features_and_mask(posterior, self.rows[rows])
            average, factor, _ = self._blocks(x, is_observed, ())
            at = to_model(values, Frame(self._columns(posterior.shift), self._columns(posterior.scale)), x.dtype)
            # the density of the shrunk distribution at a point is that of the original farther from the mean
            apart = np.where(missing, average + (at - average) / factor, self._columns(x)).astype(x.dtype)
            seen = partial_log_density_by_tree(posterior, draws, x, is_observed, self._candidates)
            whole = self._log_density_at(draws, x, is_observed, apart)
        by_tree = whole - seen
        units = missing @ np.log(self._columns(posterior.scale)) + missing.sum(axis=1) * np.log(factor[:, 0])
        return np.logaddexp.reduce(by_tree, axis=1) - np.log(by_tree.shape[1]) - units

    def _log_density_at(
        self, draws: Draw, x: np.ndarray, is_observed: np.ndarray, wanted: np.ndarray
    ) -> Float[np.ndarray, "n F"]:
        """Joint log density, under each tree, of the observed features and of the values `wanted`."""
        if self.features is None:
            whole, seen = wanted, np.ones_like(is_observed)
        else:
            whole, seen = x.copy(), is_observed.copy()
            whole[:, self.features], seen[:, self.features] = wanted, 1.0
        if not seen.all():
            return partial_log_density_by_tree(self.posterior, draws, whole, seen, self._candidates)
        inverse = self.posterior.frame.inverse_root
        complete = in_row_space(self.posterior, whole if inverse is None else (whole @ inverse).astype(whole.dtype))
        by_tree = map_row_blocks(
            log_density_by_tree,
            (self.posterior.dictionary, draws),
            complete,
            bytes_per_row=density_row_bytes(draws, complete),
        )
        return np.asarray(by_tree, np.float64)

    def _summary(self, levels: tuple[float, ...] | None) -> tuple[np.ndarray, ...]:
        """Mean, and with `levels` standard deviation and quantiles, of all rows, (n, D) each."""
        missing = np.isnan(self._columns(self.rows))
        results = self._as_observed(levels)
        for posterior, rows in by_distance(self.posterior, self.rows, np.flatnonzero(missing.any(axis=1))):
            with jax_settings(posterior.dtype), one_blas_thread():
                x, is_observed = features_and_mask(posterior, self.rows[rows])
                found = dataclasses.replace(self, posterior=posterior)._blocks(x, is_observed, levels)
            values = [self._to_data(found[0])]
            if levels is not None:
                deviation = self._columns(posterior.scale) * np.asarray(found[2], np.float64)
                values += [deviation, *(self._to_data(quantile) for quantile in found[3:])]
            for result, new in zip(results, values, strict=True):
                result[rows] = np.where(missing[rows], new, result[rows])
        return results

    def _as_observed(self, levels: tuple[float, ...] | None) -> tuple[np.ndarray, ...]:
        """What :meth:`_summary` gives at observed features; NaN, or a deviation of 0, elsewhere."""
        wanted = self._columns(self.rows)
        results = tuple(wanted.astype(np.float64) for _ in range(1 if levels is None else 2 + len(levels)))
        if levels is not None:
            results[1][:] = 0.0
        return results

    def _blocks(
        self, x: np.ndarray, is_observed: np.ndarray, levels: tuple[float, ...] | None
    ) -> tuple[np.ndarray, ...]:
        draws = thinned(self.posterior, self.num_draws)
        ends = None if levels is None else jax.device_put(tails(levels).astype(x.dtype))
        return map_held_rows(
            conditional_summary,
            (nodes_in_features(self.posterior), draws, self._index(), ends),
            x,
            is_observed,
            posterior=self.posterior,
            draws=draws,
            num_candidates=self.num_candidates,
            more_bytes=x.itemsize * len(levels or ()) * self._columns(x).shape[1],
            num_wanted=num_wanted(is_observed, self.features),
        )

    @property
    def _candidates(self) -> int:
        return check_candidates(self.posterior, self.num_candidates)

    def _columns(self, array: np.ndarray) -> np.ndarray:
        """The columns of `array` (its last axis) that belong to the wanted features."""
        return array if self.features is None else array[..., self.features]

    def _index(self) -> Array | None:
        return None if self.features is None else jax.device_put(self.features)

    def _to_data(self, x: np.ndarray) -> np.ndarray:
        """Model coordinates of the wanted features to the data's units."""
        posterior = self.posterior
        return to_data(x, Frame(self._columns(posterior.shift), self._columns(posterior.scale)))


class _BesideConstants(Conditional):
    """A conditional distribution where some features never varied: these are independent of all others."""

    def _parts(self) -> tuple[Conditional | None, np.ndarray, np.ndarray]:
        """The distribution of the wanted features that vary (None: of none), their columns, and those of the rest."""
        posterior, rows = varying(self.posterior, self.rows)
        wanted = np.arange(self.rows.shape[1]) if self.features is None else self.features
        is_constant = self.posterior.frame.is_left_out[wanted]
        place, rest = np.flatnonzero(~is_constant), np.flatnonzero(is_constant)
        own = None if self.features is None else self.posterior.frame.place_of(wanted[place])
        others = Conditional(posterior, rows, self.num_draws, self.num_candidates, own)
        return others if place.size else None, place, rest

    def _summary(self, levels: tuple[float, ...] | None) -> tuple[np.ndarray, ...]:
        others, place, rest = self._parts()
        results = self._as_observed(levels)
        missing = np.isnan(self._columns(self.rows)[:, rest])
        shift, scale = (self._columns(values)[rest] for values in (self.posterior.shift, self.posterior.scale))
        for result, value in zip(results, summary_of(shift, scale, levels), strict=True):
            result[:, rest] = np.where(missing, value, result[:, rest])
        if others is not None:
            for result, found in zip(results, others._summary(levels), strict=True):
                result[:, place] = found
        return results

    def sample(self, key: KeyArray, num_samples: int = 1) -> Float[np.ndarray, "s n D"]:
        """As of :class:`Conditional`."""
        key = check_key(key)
        num_samples = check_integer(num_samples, "num_samples", 1)
        others, place, rest = self._parts()
        wanted = self._columns(self.rows)
        result = np.repeat(wanted[None].astype(np.float64), num_samples, axis=0)
        normal = draws_of_constants(key, self.posterior, len(wanted), num_samples)
        drawn = self._columns(self.posterior.shift + self.posterior.scale * normal)[..., rest]
        result[..., rest] = np.where(np.isnan(wanted[:, rest]), drawn, result[..., rest])
        if others is not None:
            result[..., place] = others.sample(key, num_samples)
        return result

    def log_prob(self, values: ArrayLike) -> Float[np.ndarray, "n"]:
        """As of :class:`Conditional`."""
        given, missing = self._checked(values)
        others, place, rest = self._parts()
        whole = np.full(self.rows.shape, np.nan)
        wanted = np.arange(self.rows.shape[1]) if self.features is None else self.features
        whole[:, wanted[rest]] = np.where(missing, given, np.nan)[:, rest]
        found = log_density_of_constants(self.posterior, whole)
        return found if others is None else found + others.log_prob(given[:, place])


def condition(
    posterior: Posterior, X: ArrayLike, *, num_draws: int | None = None, num_candidates: int | None = None
) -> Conditional:
    """The distribution of the missing entries (NaN) of each row of X, (n, D), given the observed ones; any pattern.

    - `num_draws`: posterior draws per tree that are averaged. None: 8.
    - `num_candidates`: nodes per tree that are considered for a row, those that explain it best. None: 6, or up to 256
      for rows of which 6 hold less than half of the weight, as those that show nothing.

    Nothing is computed until a method of the result is called, with the rows as they are now.
    """
    posterior, data = check_rows(posterior, X)
    num_draws = check_draws(num_draws, CONDITIONAL_DRAWS)
    kind = Conditional if posterior.features is None else _BesideConstants
    check_candidates(posterior, num_candidates)
    return kind(posterior, data.copy(), num_draws, num_candidates)
