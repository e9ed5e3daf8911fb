"""Several arrays as one row of numbers: a scan over sweeps then writes one array, not ten, in as many fewer kernels."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array, DTypeLike, Float

Values = TypeVar("Values")


def packed(values: Any, dtype: DTypeLike) -> Float[Array, "P"]:
    """All arrays of a pytree, one after the other, as floating-point numbers: integers must be small enough."""
    return jnp.concatenate([leaf.ravel().astype(dtype) for leaf in jax.tree.leaves(values)])


def unpacked(rows: Float[Array, "T P"], like: Values) -> Values:
    """The pytree of what rows of :func:`packed` hold, with the rows' axis first; `like`: shapes and types of one."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
    parts = jnp.split(rows, ends[:-1].tolist(), axis=1)
    arrays = [
        part.reshape(part.shape[0], *leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)
