"""Where NumPy's stage one becomes JAX's stage two: the frozen dictionary."""

from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array, Bool, Float, Int
from geode_jax.build.heap import aligned_zeros
from geode_jax.build.partition import Partition
from geode_jax.build.subspace import Subspaces
from geode_jax.math.lowrank import HIGHEST
from geode_jax.tree import Tree, trees_from_masks


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
    """Centres ``R mu`` and bases ``R Phi`` of the features, for a dictionary of the coordinates ``R^{-1} x``."""
    if root is None:
        return dictionary
    centres = jnp.matmul(dictionary.centres, root, precision=HIGHEST)
    bases = jnp.einsum("ed,...dm->...em", root, dictionary.bases, precision=HIGHEST)
    return eqx.tree_at(lambda it: (it.centres, it.bases), dictionary, (centres, bases))


def freeze(partitions: list[Partition], trees: Iterable[Subspaces], max_ranks: list[np.ndarray]) -> Dictionary:
    """A forest's dictionaries of all rows, from each tree's first group; nodes keep at most `max_ranks` directions."""
    arrays: tuple[np.ndarray, np.ndarray] | None = None
    ranks = []
    learned = iter(trees)
    for number, most in enumerate(max_ranks):
        found = next(learned)
        if arrays is None and len(partitions) == found.bases.shape[0] == 1:
            arrays = found.centres, found.bases  # with many features these are as large as the data
        elif arrays is None:
            shape = len(partitions), *found.bases.shape[1:]
            arrays = aligned_zeros(shape[:-1], found.bases.dtype), aligned_zeros(shape, found.bases.dtype)
        ranks.append(np.minimum(found.ranks, most))
        has_direction = np.arange(found.bases.shape[3]) < ranks[-1][:, None, None]
        arrays[0][number] = found.centres[0]
        np.multiply(found.bases[0], has_direction, out=arrays[1][number])
        del found  # before the next is learned, which zip would hold it beyond
    assert arrays is not None
    next(learned, None)  # at its end it lets go of what it learned from
    return Dictionary(
        tree=trees_from_masks(np.stack([partition.is_present for partition in partitions])),
        centres=jax.device_put(arrays[0]),
        bases=jax.device_put(arrays[1]),
        ranks=jnp.asarray(np.stack(ranks)),
    )
