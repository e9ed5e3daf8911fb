"""A neural spline flow (Durkan et al. 2019) from flowjax, tuned on training rows: `pip install '.[rivals]'`."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

LEARNING_RATE, MAX_PATIENCE = 1e-3, 15


class SplineFlow:
    """Masked autoregressive flow with rational quadratic splines, on columns of mean 0 and standard deviation 1.

    A tenth of the rows tells when to stop, and which of the `shapes` (layers, width of their networks) is best.
    """

    def __init__(self, x: np.ndarray, shapes: Iterable[tuple[int, int]], seed: int, max_epochs: int) -> None:
        self._mean, self._deviation = x.mean(axis=0), x.std(axis=0)
        fits = [self._fit(layers, width, x, seed, max_epochs) for layers, width in shapes]
        self._flow = min(fits, key=lambda fit: fit[1])[0]

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log density of complete rows, (n,)."""
        density = eqx.filter_jit(lambda flow, x: flow.log_prob(x))(self._flow, self._standardised(x))
        return np.asarray(density, float) - np.log(self._deviation).sum()

    def _standardised(self, x: np.ndarray) -> jax.Array:
        return jnp.asarray((x - self._mean) / self._deviation, jnp.float32)

    def _fit(self, layers: int, width: int, x: np.ndarray, seed: int, max_epochs: int) -> tuple[Any, float]:
        """The flow with the smallest loss on the rows that tell when to stop, and that loss."""
        # flowjax is a rival, not a dependency
        from flowjax.bijections import RationalQuadraticSpline
        from flowjax.distributions import Normal
        from flowjax.flows import masked_autoregressive_flow
        from flowjax.train import fit_to_data

        key_start, key_train = jax.random.split(jax.random.key(seed))
        flow = masked_autoregressive_flow(
            key_start,
            base_dist=Normal(jnp.zeros(x.shape[1])),
            transformer=RationalQuadraticSpline(knots=8, interval=4),
            flow_layers=layers,
            nn_width=width,
        )
        flow, losses = fit_to_data(
            key_train,
            flow,
            self._standardised(x),
            learning_rate=LEARNING_RATE,
            max_epochs=max_epochs,
            max_patience=MAX_PATIENCE,
            show_progress=False,
        )
        return flow, float(min(losses["val"]))
