"""Uniform variables of rows by their numbers: a row's are the same wherever it is stored.

JAX's threefry generator makes entry i of an array from the key and i alone. So the entries of some rows can be made
where these rows are, without those of the others.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from geode_jax._typing import Array, DTypeLike, Float, Int, KeyArray, Shaped


def uniforms_of_rows(key: KeyArray, row: Int[Array, "n"], width: int, dtype: DTypeLike) -> Float[Array, "n width"]:
    """The given rows of ``jax.random.uniform(key, (number of rows, width), dtype)``.

    With another generator than threefry, other variables than those, by place. To be called within
    :func:`geode_jax._runtime.jax_settings.jax_settings`.
    """
    if "fry" not in str(jax.random.key_impl(key)):
        return jax.random.uniform(key, (*row.shape, width), dtype)
    high, low = _products(row.astype(jnp.uint32), width)
    column = jnp.arange(width, dtype=jnp.uint32)
    below = low[:, None] + column
    above = high[:, None] + (below < column).astype(jnp.uint32)
    counts = jnp.concatenate([above.ravel(), below.ravel()])
    first, second = jnp.split(threefry_2x32(jax.random.key_data(key), counts), 2)
    return _to_unit_interval(first, second, dtype).reshape(*row.shape, width)


def _products(row: Shaped[Array, "n"], width: int) -> tuple[Shaped[Array, "n"], Shaped[Array, "n"]]:
    """The upper and lower 32 bits of ``row * width``."""
    factor = jnp.uint32(width)
    of_lower, of_upper = (row & 0xFFFF) * factor, (row >> 16) * factor
    low = (of_upper << 16) + of_lower
    return (of_upper >> 16) + (low < of_lower).astype(jnp.uint32), low


def _to_unit_interval(first: Shaped[Array, "n"], second: Shaped[Array, "n"], dtype: DTypeLike) -> Float[Array, "n"]:
    """In [0, 1), from 64 random bits: of the mantissa of a number in [1, 2), as in JAX."""
    if jnp.dtype(dtype) == jnp.float32:
        mantissa = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    else:
        bits = (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
        mantissa = (bits >> 12) | jnp.uint64(0x3FF0000000000000)
    return lax.bitcast_convert_type(mantissa, dtype) - 1
