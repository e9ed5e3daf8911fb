"""The frozen dictionary: what stage one, in NumPy, hands to stage two, in JAX."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._files.archive import within
from geode_jax._files.schema import Member, Sizes, members_of, up_to
from geode_jax._typing import Array, Bool, Float, Int
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.tree import Tree, tree_from_mask


class Dictionary(eqx.Module):
    """Centre and orthonormal basis of every node, in model coordinates. Absent nodes hold zeros.

    Columns of a basis beyond the node's rank are zero. A forest is the same class with a leading axis F on every
    array, and so is a set of dictionaries that each left a fold out.

    Model coordinates are c = V, of the features that vary, or fewer where there are far fewer training rows than these:
    those in a space that holds all training rows, and last a row's distance from it, where all nodes have zeros.
    `num_outside`: V - c.
    """

    tree: Tree
    centres: Float[Array, "*batch K c"]
    bases: Float[Array, "*batch K c d"]
    ranks: Int[Array, "*batch K"]
    num_outside: int = eqx.field(static=True, default=0)

    @property
    def num_features(self) -> int:
        """V."""
        return self.centres.shape[-1] + self.num_outside

    @property
    def max_rank(self) -> int:
        """Directions per node, d."""
        return self.bases.shape[-1]

    @property
    def is_available(self) -> Bool[Array, "*batch K d"]:
        """Directions that the data support."""
        return jnp.arange(self.max_rank) < self.ranks[..., None]


@jax.jit
def coloured(dictionary: Dictionary, root: Float[Array, "V V"] | None) -> Dictionary:
    """A dictionary of the coordinates ``R^{-1} x`` mapped to those of x: centres ``R mu`` and bases ``R Phi``."""
    if root is None:
        return dictionary
    centres = jnp.matmul(dictionary.centres, root, precision=HIGHEST)
    bases = jnp.einsum("ed,...dm->...em", root, dictionary.bases, precision=HIGHEST)
    return eqx.tree_at(lambda it: (it.centres, it.bases), dictionary, (centres, bases))


@jax.jit
def spread_out(dictionary: Dictionary, space: Float[Array, "V p"] | None) -> Dictionary:
    """A dictionary in coordinates of a space, in those of R^V: what is not in the space is zero there."""
    if space is None:
        return dictionary
    centres = jnp.matmul(dictionary.centres[..., :-1], space.T, precision=HIGHEST)
    bases = jnp.einsum("Dp,...pd->...Dd", space, dictionary.bases[..., :-1, :], precision=HIGHEST)
    return Dictionary(dictionary.tree, centres, bases, dictionary.ranks)


# What a file holds of a forest's dictionaries and of the space that they lie in.
DICTIONARY_MEMBERS = {
    **members_of(Dictionary, "dictionary", "F", {"ranks": up_to("d")}),
    "tree.is_present": Member("b", ("F", "K")),
    "row_space": Member("f", ("V", "p"), is_optional=True),
    "features": Member("i", ("V",), is_optional=True),
}


def sizes_of_features(arrays: Mapping[str, np.ndarray]) -> Sizes:
    """The number V of features that vary, by the arrays of a file. Raises ValueError if these are no features."""
    if "shift" not in arrays:
        raise ValueError("arrays are missing or unknown: 'shift'")
    num_features, features = arrays["shift"].size, arrays.get("features")
    if features is None:
        return {"V": num_features}
    is_right = features.ndim == 1 and features.dtype.kind == "i" and features.size > 0 and features[0] >= 0
    if not (is_right and features[-1] < num_features and (np.diff(features) > 0).all()):
        raise ValueError(f"'features' holds other values than ascending numbers below {num_features}")
    return {"V": features.size}


def check_coordinates(arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
    """Raise ValueError unless dictionaries of a file have as many coordinates as its features or row space ask for."""
    if "row_space" not in arrays and "noise_deviation" in arrays:
        raise ValueError("'noise_deviation' is of coordinates in a 'row_space', which is missing")
    if "row_space" in arrays and "noise_root" in arrays:
        raise ValueError("'noise_root' is of all features, and dictionaries have coordinates in a 'row_space'")
    expected = sizes["p"] + 1 if "p" in sizes else sizes["V"]
    if sizes["c"] != expected or expected > sizes["V"]:
        raise ValueError(f"dictionaries have {sizes['c']} coordinates, expected {expected} for {sizes['V']} features")


def dictionary_of(arrays: dict[str, np.ndarray]) -> Dictionary:
    """The dictionaries of a file's arrays, which were checked; to be called within their precision."""
    own = jax.device_put(within(arrays, "dictionary"))
    num_outside = sizes_of_features(arrays)["V"] - arrays["dictionary.centres"].shape[-1]
    return Dictionary(tree=tree_from_mask(arrays["tree.is_present"]), **own, num_outside=num_outside)
