"""The sampler's data for rows with missing features: all work of size D is done once, before the first sweep.

Of a row's observed part the sampler needs, at a node, G = Phi_O'Phi_O, Phi_O'(x_O - mu_O) and a few more numbers
(math/lowrank.py). Of the missing part it needs only a root of Phi_M'Phi_M and the number of missing features
(notebooks/model.md). Rows keep these for their candidate nodes only, and rows that miss the same features share the
matrices.
"""

import equinox as eqx
import jax.numpy as jnp

from geode_jax._typing import Array, Float, Int, Shaped
from geode_jax.math.lowrank import Observed


class PartialRows(eqx.Module):
    """n_m rows with missing features in G groups of B places, at M candidate nodes each.

    Each sweep redraws one group. `node`: candidates; K at places without a row. `entry`: which of the group's P
    matrices belongs to a candidate; None where every candidate of every row has its own, in order. `entry_node`: the
    node of a matrix. `gram`, `root`: over the observed and the missing features (no root where no row is redrawn).
    """

    node: Int[Array, "*batch G B M"]
    entry: Int[Array, "*batch G B M"] | None
    entry_node: Int[Array, "*batch G P"]
    gram: Float[Array, "*batch G P d d"]
    root: Float[Array, "*batch G P d d"] | None
    cross: Float[Array, "*batch G B M d"]
    start: Float[Array, "*batch G B M d"]
    remainder: Float[Array, "*batch G B M d"]
    residual: Float[Array, "*batch G B M"]
    num_observed: Float[Array, "*batch G B"]
    num_missing: Float[Array, "*batch G B"]

    def observed(self, gram: Float[Array, "*batch B M d d"]) -> Observed:
        """The rows of one group (no axis G) in the form that :mod:`geode_jax.math.lowrank` takes."""
        count = jnp.broadcast_to(self.num_observed[..., None], self.residual.shape)
        return Observed(gram, self.cross, self.start, self.remainder, self.residual, count)

    def at_candidates(self, table: Shaped[Array, "P *rest"]) -> Shaped[Array, "B M *rest"]:
        """Expand a value per matrix of the group (no axis G) to every candidate of every row."""
        if self.entry is None:
            return table.reshape(*self.node.shape, *table.shape[1:])
        return table[self.entry]
