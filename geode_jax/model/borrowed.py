"""What the prior takes from stage one: rows that a node borrows from its parent's cell, and a scale's typical noise.

A power prior (Ibrahim & Chen 2000): the likelihood of other rows, raised to a small power, multiplies the prior. A node
borrows for its u only, with the rows' squares taken relative to a noise variance that stage one fixes. So the factor
depends on no other parameter, and all other updates stay as they are. A prior that counts as much as a few typical rows
(unit information, Kass & Wasserman 1995) keeps the noise of a scale without rows near that of the others.
"""

import equinox as eqx
import jax.numpy as jnp

from geode_jax._typing import Array, Count, DTypeLike, Float
from geode_jax.model.state import NodeSums
from geode_jax.model.tree import Tree
from geode_jax.settings import Prior

LARGEST_LOG_NOISE = 60.0


class Borrowed(eqx.Module):
    """Rows that nodes borrow, and the typical noise of every scale.

    `count`: how many rows a node borrows; 0 at the root, and where nothing is borrowed. `squared`: sum of their squared
    coordinates along each direction, over the typical noise variance of the scale. `noise`: that variance, as the prior
    of a scale's noise counts it: with a feature of unknown noise where there is one (`learning/borrowing.py`).
    """

    count: Float[Array, "*batch K"]
    squared: Float[Array, "*batch K d"]
    noise: Float[Array, "*batch S"]

    @classmethod
    def nothing(cls, tree: Tree, rank: int, dtype: DTypeLike) -> "Borrowed":
        """No borrowed rows, and a typical noise of the data's variance; one tree, with no leading axis."""
        count = jnp.zeros(tree.num_nodes, dtype)
        return cls(count, jnp.zeros((tree.num_nodes, rank), dtype), jnp.ones(tree.num_scales, dtype))

    def log_factor(self, neg_log_u: Float[Array, "K d"]) -> Float[Array, "K d"]:
        """Log of the factor on the prior of each u, ``count/2 log u - u/2 squared``."""
        return -0.5 * (self.count[:, None] * neg_log_u + jnp.exp(-neg_log_u) * self.squared)

    def added_to(self, sums: NodeSums, log_sigma2: Float[Array, "S"], tree: Tree) -> NodeSums:
        """The sums that updates of u take: of the node's own rows and the borrowed ones.

        The updates divide squares by the current sigma2; those of borrowed rows are relative to `noise` already.
        """
        # a vague prior may put the noise of a scale without rows beyond the range of float32
        sigma2 = jnp.exp(jnp.minimum(log_sigma2, LARGEST_LOG_NOISE))[tree.scale]
        return NodeSums(sums.count + self.count, sums.residual, sums.squared + sigma2[:, None] * self.squared)


def noise_prior(prior: Prior, borrowed: Borrowed, num_features: Count) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """Shape and rate of the Gamma prior of each scale's 1/sigma2: `prior`'s, and `noise_rows` rows of typical noise."""
    half = 0.5 * (prior.noise_rows or 0.0) * num_features
    rate = prior.noise_rate + half * borrowed.noise
    return jnp.broadcast_to(prior.noise_shape + half, rate.shape), rate
