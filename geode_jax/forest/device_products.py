"""Products of many rows on a GPU, for stage one: NumPy passes blocks of rows, and gets results of few numbers."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST
from geode_jax.rows.processes import Processes
from geode_jax.rows.products import BY_NUMPY, Products

# A product of fewer multiplications is done by NumPy before it is on its way to a device.
LEAST_WORK = 2**26


class DeviceProducts(Products):
    """By a device of JAX. Blocks are padded to powers of two, so that a handful of programs serves all of them."""

    block_numbers = 2**22

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def moments(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and scatter, from sums in float64 whatever the precision of the rows."""
        if rows.size * rows.shape[1] < LEAST_WORK:
            return super().moments(rows)
        with self._at_work(np.float64):
            mean, scatter = _moments(jax.device_put(_padded(rows)), np.int32(len(rows)))
            return np.asarray(mean), np.asarray(scatter)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        """``rows @ rows.T``."""
        if rows.size * len(rows) < LEAST_WORK:
            return super().inner(rows)
        with self._at_work(rows.dtype):
            return np.asarray(_inner(jax.device_put(_padded(_padded(rows).T).T)))[: len(rows), : len(rows)]

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """``rows @ matrix``."""
        if rows.size * matrix.shape[1] < LEAST_WORK:
            return super().product(rows, matrix)
        with self._at_work(np.result_type(rows, matrix)):
            return np.asarray(_product(*jax.device_put((_padded(rows), matrix))))[: len(rows)]

    @contextmanager
    def _at_work(self, dtype: np.dtype | type) -> Iterator[None]:
        """Context in which arrays go to the device; also in a thread, which does not have its caller's settings."""
        with jax_settings(dtype), jax.default_device(self.device):
            yield


def computing_here(processes: Processes) -> Processes:
    """The same processes, whose products are those of :func:`products_here`."""
    return dataclasses.replace(processes, products=products_here())


def products_here() -> Products:
    """Those of JAX's default device if it is a GPU, else NumPy's.

    Sums are in float64, which a TPU does not have. To be called within the user's settings.
    """
    (device,) = jnp.zeros(()).devices()
    return DeviceProducts(device) if device.platform == "gpu" else BY_NUMPY


def _padded(rows: np.ndarray) -> np.ndarray:
    """The rows (m, D) with rows of zeros after them, up to a power of two."""
    size = 1 << (len(rows) - 1).bit_length()
    return rows if size == len(rows) else np.pad(rows, [(0, size - len(rows)), (0, 0)])


@jax.jit
def _moments(rows: Float[Array, "m D"], number: Int[Array, ""]) -> tuple[Float[Array, "D"], Float[Array, "D D"]]:
    """Of the first `number` rows; the others are zeros."""
    rows = rows.astype(jnp.float64)
    mean = rows.sum(axis=0) / number
    centred = jnp.where(jnp.arange(rows.shape[0])[:, None] < number, rows - mean, 0.0)
    return mean, _inner(centred.T)


@jax.jit
def _inner(rows: Float[Array, "m D"]) -> Float[Array, "m m"]:
    return jnp.matmul(rows, rows.T, precision=HIGHEST)


_product = jax.jit(functools.partial(jnp.matmul, precision=HIGHEST))
