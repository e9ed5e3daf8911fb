"""What is stored of a chain: its draws, and tallies of the rank adaptation."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array, Bool, Float, Int


class Draw(eqx.Module):
    """What is stored of one sweep; nothing in it has size n."""

    neg_log_u: Float[Array, "*batch K d"]
    tau: Float[Array, "*batch K d"]
    log_sigma2: Float[Array, "*batch S"]
    log_weights: Float[Array, "*batch K"]
    log_stop_concentration: Float[Array, "*batch"]
    count: Int[Array, "*batch K"]
    is_active: Bool[Array, "*batch K d"]
    dimension: Int[Array, "*batch K"]
    log_joint: Float[Array, "*batch"]

    def packed(self) -> Float[Array, "P"]:
        """All of one draw as a row of numbers: a scan over sweeps then writes one array, not nine.

        In float32, counts beyond 2**24 are rounded, as the sums are that they come from.
        """
        return jnp.concatenate([leaf.ravel().astype(self.tau.dtype) for leaf in jax.tree.leaves(self)])

    @classmethod
    def unpacked(cls, rows: Float[Array, "T P"], like: "Draw") -> "Draw":
        """The draws in rows of :meth:`packed`; `like`: shapes and types of one."""
        leaves, structure = jax.tree.flatten(like)
        ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
        parts = jnp.split(rows, ends[:-1].tolist(), axis=1)
        arrays = [part.reshape(-1, *leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)


class Adaptation(eqx.Module):
    """Tallies over the adaptation steps of a chain, for the paper's inclusion probabilities.

    `included`: sum, over the steps at which direction m of node k passed the removal test, of the node's share of rows.
    `steps`: the number of adaptation steps.
    """

    included: Float[Array, "*batch K d"]
    steps: Float[Array, "*batch"]
