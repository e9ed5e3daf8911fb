"""The posterior predictive distribution in the data's units: densities, samples and imputation."""

from typing import NamedTuple

import numpy as np

from geode_jax._checks import check_data, check_instance, check_integer, check_key, check_number
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import ArrayLike, Float, KeyArray
from geode_jax.model.draw import Draw
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.conditional import condition
from geode_jax.predict.conformal import widening
from geode_jax.predict.constants import log_density_of_constants, varying, with_constants
from geode_jax.predict.density import density_row_bytes, log_densities, log_density_complete
from geode_jax.predict.mixture import log_densities_partial
from geode_jax.predict.row_blocks import map_row_blocks
from geode_jax.predict.rows import (
    DENSITY_DRAWS,
    PARTIAL_DRAWS,
    check_candidates,
    check_draws,
    check_rows,
    map_partial_rows,
    map_rows,
    nodes_in_features,
    partial_log_density_by_tree,
    partial_row_bytes,
    thinned,
    without_empty,
)
from geode_jax.predict.samples import sample_rows


class Imputation(NamedTuple):
    """Completed rows and, per entry, a central posterior predictive interval; (n, D) each.

    At observed entries all three are the observed value.
    """

    filled: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def log_density(
    posterior: Posterior,
    X: ArrayLike,
    *,
    num_draws: int | None = None,
    num_candidates: int | None = None,
) -> Float[np.ndarray, "n"]:
    """Log posterior predictive density of rows, in nats and the data's units; (n, D) to (n,).

    Averaged over draws and trees (on the density scale, by log-sum-exp). A row with NaN gets the marginal log density
    of its observed entries, which is 0 if there are none.

    - `num_draws`: posterior draws per tree that are averaged, as many of every chain. None: at most 200 for complete
      rows, 16 for rows with NaN.
    - `num_candidates`: nodes per tree that are considered for a row with NaN under all draws; the weight of the others
      counts as it is at the posterior mean of the parameters. None: 6.
    """
    whole, everything = check_rows(posterior, X)
    posterior, data = varying(whole, everything)
    num_candidates = check_candidates(posterior, num_candidates)

    def of_complete(posterior: Posterior, draws: Draw, x: np.ndarray) -> np.ndarray:
        return log_density_complete(posterior.dictionary, draws, x) + posterior.log_jacobian

    def of_partial(posterior: Posterior, draws: Draw, x: np.ndarray, is_observed: np.ndarray) -> np.ndarray:
        by_tree = partial_log_density_by_tree(posterior, draws, x, is_observed, num_candidates)
        by_row = np.logaddexp.reduce(by_tree, axis=1) - np.log(by_tree.shape[1])
        return by_row - is_observed @ np.log(posterior.scale)

    counts = check_draws(num_draws, DENSITY_DRAWS), check_draws(num_draws, PARTIAL_DRAWS)
    return map_rows(posterior, data, counts, of_complete, of_partial) + log_density_of_constants(whole, everything)


def log_density_draws(
    posterior: Posterior,
    X: ArrayLike,
    *,
    num_draws: int | None = None,
    num_candidates: int | None = None,
) -> Float[np.ndarray, "F C T n"]:
    """Log density of rows under every tree, chain and draw: (F, C, T, n), in nats and the data's units.

    These are draws from the posterior of the density itself; :func:`log_density` averages over them. A row with NaN
    gets the marginal log density of its observed entries. `num_draws` thins to that many draws per tree, rounded up to
    a multiple of the number of chains; None keeps all. `num_candidates` is that of :func:`log_density`.
    """
    whole, everything = check_rows(posterior, X)
    posterior, data = varying(whole, everything)
    num_candidates = check_candidates(posterior, num_candidates)
    num_draws = check_draws(num_draws, None)

    def of_complete(posterior: Posterior, draws: Draw, x: np.ndarray) -> np.ndarray:
        by_draw = map_row_blocks(
            log_densities,
            (posterior.dictionary, draws),
            x,
            bytes_per_row=posterior.num_trees * density_row_bytes(draws, x),
        )
        return by_draw + posterior.log_jacobian

    def of_partial(posterior: Posterior, draws: Draw, x: np.ndarray, is_observed: np.ndarray) -> np.ndarray:
        nodes = nodes_in_features(posterior)
        by_draw = map_partial_rows(
            log_densities_partial,
            (nodes, draws),
            x,
            is_observed,
            posterior=posterior,
            bytes_per_row=posterior.num_trees * partial_row_bytes(posterior, draws, num_candidates, is_observed),
            num_candidates=num_candidates,
        )
        return without_empty(by_draw, is_observed) - (is_observed @ np.log(posterior.scale))[:, None, None]

    by_draw = map_rows(posterior, data, (num_draws, num_draws), of_complete, of_partial)
    by_chain = by_draw.reshape(data.shape[0], posterior.num_trees, posterior.num_chains, -1)
    return np.moveaxis(by_chain, 0, 3) + log_density_of_constants(whole, everything)


def sample(key: KeyArray, posterior: Posterior, num_samples: int = 1) -> Float[np.ndarray, "n D"]:
    """Draw new rows from the posterior predictive, (num_samples, D)."""
    key = check_key(key)
    check_instance(posterior, "posterior", Posterior)
    num_samples = check_integer(num_samples, "num_samples", 1)
    with jax_settings(posterior.dtype):
        draws = thinned(posterior, None)
        x = map_row_blocks(
            sample_rows,
            (key, posterior.dictionary, draws, posterior.space),
            np.arange(num_samples, dtype=np.int32),
            bytes_per_row=4 * posterior.dtype.itemsize * posterior.num_features,
        )
    return with_constants(key, posterior, x)


def impute(
    posterior: Posterior,
    X: ArrayLike,
    *,
    interval: float = 0.95,
    calibration: ArrayLike | None = None,
    num_draws: int | None = None,
    num_candidates: int | None = None,
) -> Imputation:
    """Fill NaN with its conditional mean given the row's observed entries, with central intervals.

    - `interval`: probability of the intervals. The mean of a skewed distribution may lie outside a narrow one.
    - `calibration`: rows (m, D) that were not in the fit, at least ``interval / (1 - interval)`` of them. Without them
      intervals are too narrow where whole parts of rows are missing together. The features that rows of X miss are
      hidden in the calibration rows, and all intervals but those of rows that show nothing are widened (or narrowed) by
      one factor until they contain that share of the hidden values (conformalised quantile regression; Romano,
      Patterson & Candes 2019), and to their mean where it lies outside. If rows of X miss different kinds of parts,
      pass each kind in a separate call.
    - `num_draws`, `num_candidates`: as in :func:`geode_jax.condition`, which gives the whole conditional distribution.
    """
    interval = check_number(interval, "interval", above=0.0, below=1.0)
    posterior, data = check_rows(posterior, X)
    rows = None
    if calibration is not None:
        rows = check_data(calibration, "calibration", allow_nan=True, num_features=posterior.num_features)

    def summary(x: np.ndarray) -> Imputation:
        conditional = condition(posterior, x, num_draws=num_draws, num_candidates=num_candidates)
        return Imputation(*conditional.mean_and_interval(interval))

    if rows is None:
        return summary(data)
    # what never varies has intervals of its own, and so has a row that shows nothing of the rest
    varies = ~posterior.frame.is_left_out
    shows_nothing = np.isnan(data[:, varies]).all(axis=1, keepdims=True)
    is_widened = np.isnan(data) & varies & ~shows_nothing
    share = widening(lambda x: summary(x)[1:], np.where(varies, rows, np.nan), is_widened, interval)
    filled, lower, upper = summary(data)
    more = np.where(is_widened & (upper > lower), share * (upper - lower), 0.0)
    return Imputation(filled, np.minimum(lower - more, filled), np.maximum(upper + more, filled))


def impute_mean(
    posterior: Posterior, X: ArrayLike, *, num_draws: int | None = None, num_candidates: int | None = None
) -> Float[np.ndarray, "n D"]:
    """Fill NaN with its conditional mean given the row's observed entries; faster than :func:`impute`."""
    return condition(posterior, X, num_draws=num_draws, num_candidates=num_candidates).mean()


def impute_draws(
    key: KeyArray,
    posterior: Posterior,
    X: ArrayLike,
    num_samples: int = 1,
    *,
    num_draws: int | None = None,
    num_candidates: int | None = None,
) -> Float[np.ndarray, "s n D"]:
    """Multiple imputation: completed data sets, (num_samples, n, D), that carry the posterior's uncertainty.

    The missing entries of a row are drawn jointly, under a tree and a posterior draw chosen at random.
    """
    return condition(posterior, X, num_draws=num_draws, num_candidates=num_candidates).sample(key, num_samples)
