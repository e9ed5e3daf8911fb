"""Array types and the axis glossary used in every annotation of the package.

====  =======================================================================
axis  meaning
====  =======================================================================
n     rows (observations)
D     features (columns)
K     nodes of the tree in heap order, ``2**(depth + 1) - 1``; absent nodes are masked
d     directions kept per node (``max_rank``)
S     scales of the tree, ``depth + 1``; the root is scale 0
F     trees of the forest
C     chains per tree
T     draws
M     candidate nodes of a row
G     classes
b     rows of a block
====  =======================================================================
"""

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

__all__ = ["Array", "ArrayLike", "Bool", "Count", "DTypeLike", "Float", "Int", "KeyArray", "Shaped", "precision_of"]

KeyArray: TypeAlias = jax.Array
# a count, as a Python integer or a traced array; an array with one count per problem where problems are stacked
Count: TypeAlias = Any
ArrayLike: TypeAlias = Any
DTypeLike: TypeAlias = Any


def precision_of(dtype: Any) -> AbstractContextManager[Any]:
    """Context in which arrays of `dtype` keep it: 64-bit types on for float64, off for float32.

    The setting is local to the thread and restored on exit, so the user's global JAX configuration is never
    touched.
    """
    return jax.enable_x64(np.dtype(dtype) == np.dtype(jnp.float64))
