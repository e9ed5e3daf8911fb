"""Features that never varied in the training rows: each is normal by itself, whatever the others are.

The model is one of the features that vary (`Posterior.features`). Of the others nothing can be learned but their value.
That is their mean, with a small deviation, so that a row with another value is an unlikely one. They tell nothing of
the nodes.
"""

import jax
import numpy as np
from scipy.special import ndtri

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Float, KeyArray
from geode_jax.posterior.posterior import Posterior
from geode_jax.rows.frame import FARTHEST, to_data


def varying(posterior: Posterior, data: np.ndarray) -> tuple[Posterior, np.ndarray]:
    """The posterior of the features that vary, and these of the rows."""
    return posterior.of_varying, data if posterior.features is None else data[:, posterior.features]


def log_density_of_constants(posterior: Posterior, data: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n"]:
    """Log density of what rows show of the features that never vary, in the data's units."""
    some = posterior.frame.is_left_out
    farthest = FARTHEST["float64"]
    with np.errstate(over="ignore"):
        apart = (data[:, some] - posterior.shift[some]) / posterior.scale[some]
    cost = 0.5 * np.square(np.clip(apart, -farthest, farthest)) + np.log(np.sqrt(2 * np.pi) * posterior.scale[some])
    return -np.nansum(cost, axis=1)


def with_constants(key: KeyArray, posterior: Posterior, x: np.ndarray) -> Float[np.ndarray, "n D"]:
    """Rows drawn in model coordinates, in the data's units, with the features that never vary drawn too."""
    found = to_data(x, posterior.frame)
    if posterior.features is not None:
        found += posterior.scale * draws_of_constants(key, posterior, len(found), 1)[0]
    return found


def draws_of_constants(
    key: KeyArray, posterior: Posterior, num_rows: int, num_samples: int
) -> Float[np.ndarray, "s n D"]:
    """Standard normal draws of the features that never vary, 0 of the others; a row's depend on its number alone."""
    with jax_settings(posterior.dtype):
        seed = np.asarray(jax.random.key_data(key)).astype(np.uint32)
    some = posterior.frame.is_left_out
    found = np.zeros((num_rows, num_samples, some.size))
    found[..., some] = np.random.default_rng(seed).normal(size=(num_rows, num_samples, int(some.sum())))
    return np.moveaxis(found, 1, 0)


def summary_of(shift: np.ndarray, scale: np.ndarray, levels: tuple[float, ...] | None) -> list[np.ndarray]:
    """Mean, and with `levels` the deviation and quantiles, of features with these means and deviations."""
    if levels is None:
        return [shift]
    return [shift, scale, *(shift + scale * ndtri(level) for level in levels)]
