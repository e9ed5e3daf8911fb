"""What every prediction does at its boundary: arguments, units, draws on the device, memory per row."""

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._checks import check_data, check_instance, check_integer
from geode_jax._typing import ArrayLike
from geode_jax.build.standardise import to_model
from geode_jax.gibbs.chain import Draw
from geode_jax.posterior import Posterior
from geode_jax.predict.partial import bytes_per_row

# Draws per tree that predictions average over: enough that the Monte Carlo error of a row's log density is far below
# its posterior spread. Every draw of a partial row costs a Cholesky factor per candidate node.
DENSITY_DRAWS = 200
PARTIAL_DRAWS = 16
CANDIDATES = 6


def check_rows(posterior: Posterior, X: ArrayLike) -> tuple[Posterior, np.ndarray]:
    """The posterior and the rows, NaN allowed, or an error that names the argument."""
    check_instance(posterior, "posterior", Posterior)
    return posterior, check_data(X, "X", allow_nan=True, num_features=posterior.num_features)


def check_candidates(posterior: Posterior, num_candidates: int | None) -> int:
    """Nodes per partial row, at most those there are."""
    wanted = CANDIDATES if num_candidates is None else check_integer(num_candidates, "num_candidates", 1)
    return min(wanted, posterior.dictionary.tree.num_nodes)


def thinned(posterior: Posterior, num_draws: int | None, default: int | None) -> Draw:
    """Thinned draws on the device, moved there once."""
    if num_draws is not None:
        check_integer(num_draws, "num_draws", 1)
    return jax.tree.map(jnp.asarray, posterior.thin(default if num_draws is None else num_draws))


def partial_rows(posterior: Posterior, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Model coordinates with 0 (the centre of the data) at missing entries, and the mask of observed ones."""
    missing = np.isnan(data)
    x = to_model(np.where(missing, posterior.shift, data), posterior.frame, posterior.dtype)
    return x, (~missing).astype(posterior.dtype)


def partial_row_bytes(posterior: Posterior, draws: Draw, num_candidates: int) -> int:
    """Upper estimate of the memory a partial row takes in a block."""
    return bytes_per_row(posterior.dictionary, num_candidates, draws.log_joint.shape[1])


def to_data(posterior: Posterior, x: np.ndarray) -> np.ndarray:
    """Model coordinates to the data's units."""
    return posterior.shift + posterior.scale * np.asarray(x, dtype=np.float64)
