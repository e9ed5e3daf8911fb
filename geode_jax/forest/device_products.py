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
from geode_jax.rows.blocks import slices
from geode_jax.rows.processes import Processes
from geode_jax.rows.products import BY_NUMPY, Products

# A product of fewer multiplications is done by NumPy before a device has it: an H200 and 16 CPU cores were as fast at
# this size (`python -m benchmarks.gpu`).
LEAST_WORK = 2**26
# Numbers of a block: at 32 MiB in float64, what it takes to send it off is little beside sending it.
BLOCK_NUMBERS = 2**22


class DeviceProducts(Products):
    """By a device of JAX. Lengths are powers of two, or padded to one, so that a handful of programs serves all."""

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def blocks(self, length: int, width: int) -> Iterator[slice]:
        """Slices of a power of two of rows (or columns) but for the last."""
        return slices(length, 1, numbers=power_within(BLOCK_NUMBERS // max(1, width)))

    def moments(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and scatter, from sums in float64 whatever the precision of the rows."""
        if rows.size * rows.shape[1] < LEAST_WORK:
            return super().moments(rows)
        with self._at_work(np.float64):
            mean, scatter = _moments(jax.device_put(_padded(rows, 1)), np.int32(len(rows)))
            return np.asarray(mean), np.asarray(scatter)

    def inner(self, rows: np.ndarray) -> np.ndarray:
        """``rows @ rows.T``."""
        if rows.size * len(rows) < LEAST_WORK:
            return super().inner(rows)
        with self._at_work(rows.dtype):
            return np.asarray(_inner(jax.device_put(_padded(rows, 2))))[: len(rows), : len(rows)]

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """``rows @ matrix``."""
        if rows.size * matrix.shape[1] < LEAST_WORK:
            return super().product(rows, matrix)
        with self._at_work(np.result_type(rows, matrix)):
            return np.asarray(_product(*jax.device_put((_padded(rows, 1), matrix))))[: len(rows)]

    @contextmanager
    def _at_work(self, dtype: np.dtype | type) -> Iterator[None]:
        """Context in which arrays go to the device; also in a thread, which does not have its caller's settings."""
        with jax_settings(dtype), jax.default_device(self.device):
            yield


def computing_here(processes: Processes) -> Processes:
    """The same processes, whose products are those of :func:`products_here`.

    NumPy's where several processes each learn from all rows: these must find the same to the last bit, and a GPU's
    products depend on which way of computing them XLA has found to be the fastest.
    """
    if processes.is_alone and jax.process_count() > 1:
        return processes
    return dataclasses.replace(processes, products=products_here())


def products_here() -> Products:
    """Those of JAX's default device if it is a GPU, else NumPy's.

    Sums are in float64, which a TPU does not have. To be called within the user's settings.
    """
    # under `jax.set_mesh` an array lies on all devices of the mesh, also on those of other processes
    (device,) = jnp.zeros(()).addressable_data(0).devices()
    return DeviceProducts(device) if device.platform == "gpu" else BY_NUMPY


def power_within(number: int) -> int:
    """The largest power of two that is not above a number; at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _padded(rows: np.ndarray, num_axes: int) -> np.ndarray:
    """The rows with zeros after them, up to a power of two along the first axis, or along both."""
    more = [(1 << (size - 1).bit_length()) - size for size in rows.shape[:num_axes]]
    return np.pad(rows, [(0, size) for size in [*more, 0][:2]]) if any(more) else rows


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
