"""One draw of uniform variables, handed out in parts.

Every call of JAX's generator is a loop of its own, with several kernels to compile and to launch. The node updates of
a sweep need few numbers each, so they share one call.
"""

import math

import jax
import jax.numpy as jnp

from geode_jax._typing import Array, DTypeLike, Float, KeyArray


class Uniforms:
    """`count` independent uniform variables in (0, 1); each is handed out once.

    It lives while a program is traced, and its state is how many were handed out; only the arrays that :meth:`take`
    returns may be passed into `lax.scan` and the like.
    """

    def __init__(self, key: KeyArray, count: int, dtype: DTypeLike) -> None:
        # 0 is left out: its logarithm is taken
        self._all = jax.random.uniform(key, (count,), dtype, minval=jnp.finfo(dtype).tiny)
        self._taken = 0

    @property
    def left(self) -> int:
        """How many are left."""
        return self._all.size - self._taken

    def take(self, *shape: int) -> Float[Array, "..."]:
        """The next ones, as an array of this shape. Raises ValueError if there are not enough."""
        count = math.prod(shape)
        if count > self.left:
            raise ValueError(f"{count} uniform variables were asked for, but only {self.left} are left")
        start, self._taken = self._taken, self._taken + count
        return self._all[start : self._taken].reshape(shape)

    def exponential(self, *shape: int) -> Float[Array, "..."]:
        """Exponential variables of rate 1, made of the next uniform ones."""
        return -jnp.log1p(-self.take(*shape))
