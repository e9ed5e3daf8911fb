"""Features that never varied in the training rows: each is normal by itself, whatever the others are.

The model is one of the features that vary (`Posterior.features`). Of the others nothing can be learned but their value.
That is their mean, with the smallest deviation that a feature's noise may have, so that a row with another value is an
unlikely one. They tell nothing of the nodes.
"""

import jax
import numpy as np
from scipy.special import ndtri

from geode_jax._typing import Bool, Float, KeyArray
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
    return found + posterior.scale * draws_of(key, posterior.frame.is_left_out, found.shape)


def draws_of(key: KeyArray, is_drawn: Bool[np.ndarray, "D"], shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal draws of these features, 0 of the others; the last axis is that of the features."""
    found = np.zeros(shape)
    if is_drawn.any():
        own = jax.random.fold_in(key, 2**31 - 1)  # rows have keys of their own by their number
        found[..., is_drawn] = np.asarray(jax.random.normal(own, (*shape[:-1], int(is_drawn.sum()))))
    return found


def summary_of(shift: np.ndarray, scale: np.ndarray, levels: tuple[float, ...] | None) -> list[np.ndarray]:
    """Mean, and with `levels` the deviation and quantiles, of features with these means and deviations."""
    if levels is None:
        return [shift]
    return [shift, scale, *(shift + scale * ndtri(level) for level in levels)]
