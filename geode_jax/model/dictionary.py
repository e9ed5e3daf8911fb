"""The frozen dictionary: what stage one, in NumPy, hands to stage two, in JAX."""

import equinox as eqx
import jax
import jax.numpy as jnp

from geode_jax._typing import Array, Bool, Float, Int
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.tree import Tree


class Dictionary(eqx.Module):
    """Centre and orthonormal basis of every node, in model coordinates. Absent nodes hold zeros.

    Columns of a basis beyond the node's rank are zero. A forest is the same class with a leading axis F on every
    array, and so is a set of dictionaries that each left a fold out.
    """

    tree: Tree
    centres: Float[Array, "*batch K D"]
    bases: Float[Array, "*batch K D d"]
    ranks: Int[Array, "*batch K"]

    @property
    def num_features(self) -> int:
        """D."""
        return self.centres.shape[-1]

    @property
    def max_rank(self) -> int:
        """Directions per node, d."""
        return self.bases.shape[-1]

    @property
    def is_available(self) -> Bool[Array, "*batch K d"]:
        """Directions that the data support."""
        return jnp.arange(self.max_rank) < self.ranks[..., None]


@jax.jit
def coloured(dictionary: Dictionary, root: Float[Array, "D D"] | None) -> Dictionary:
    """A dictionary of the coordinates ``R^{-1} x`` mapped to those of x: centres ``R mu`` and bases ``R Phi``."""
    if root is None:
        return dictionary
    centres = jnp.matmul(dictionary.centres, root, precision=HIGHEST)
    bases = jnp.einsum("ed,...dm->...em", root, dictionary.bases, precision=HIGHEST)
    return eqx.tree_at(lambda it: (it.centres, it.bases), dictionary, (centres, bases))
