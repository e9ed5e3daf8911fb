"""The heap-ordered tree: subtree sums, stick-breaking weights, scales."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._typing import Array, Bool, Float

# For up to this many nodes, subtree sums are one pass over all pairs of nodes: one kernel on a GPU. For more, they go
# level by level.
FEW_FOR_PAIRS = 255


class Tree(eqx.Module):
    """A complete binary tree of `depth` in heap order; nodes without a cell are absent (masked).

    Node k has children ``2k + 1`` (left) and ``2k + 2`` (right) and is at scale ``floor(log2(k + 1))``.
    """

    is_present: Bool[Array, "*batch K"]
    is_leaf: Bool[Array, "*batch K"]
    depth: int = eqx.field(static=True)

    @property
    def num_nodes(self) -> int:
        """K, absent nodes included."""
        return 2 ** (self.depth + 1) - 1

    @property
    def num_scales(self) -> int:
        """Number of scales, the root's included."""
        return self.depth + 1

    @property
    def scale(self) -> np.ndarray:
        """Scale of each node, (K,); a NumPy array, constant under jit."""
        return np.repeat(np.arange(self.depth + 1), 2 ** np.arange(self.depth + 1))

    @property
    def is_internal(self) -> Bool[Array, "K"]:
        """Present nodes with children: the only ones with free S and R."""
        return self.is_present & ~self.is_leaf

    def sum_over_scales(self, values: Float[Array, "*batch K"]) -> Float[Array, "*batch S"]:
        """Sum of node quantities over the nodes of each scale."""
        is_at = np.arange(self.num_scales)[:, None] == self.scale
        return jnp.sum(jnp.where(is_at, values[..., None, :], 0.0), axis=-1)

    def log_sum_over_scales(self, log_values: Float[Array, "K"]) -> Float[Array, "S"]:
        """Log-sum-exp over the nodes of each scale; -inf where all values are."""
        largest = jax.ops.segment_max(log_values, self.scale, self.num_scales, indices_are_sorted=True)
        safe = jnp.where(jnp.isfinite(largest), largest, 0.0)
        return safe + jnp.log(self.sum_over_scales(jnp.exp(log_values - safe[self.scale])))

    def subtree_sum(self, values: Array) -> Array:
        """Sum of a node quantity over each node's subtree, itself included, (K,)."""
        if self.num_nodes <= FEW_FOR_PAIRS:
            return jnp.sum(jnp.where(self._is_below, values, 0.0), axis=1)
        levels = [values[2**s - 1 : 2 ** (s + 1) - 1] for s in range(self.num_scales)]
        total = levels[-1]
        totals = [total]
        for level in reversed(levels[:-1]):
            total = level + total.reshape(-1, 2).sum(axis=1)
            totals.append(total)
        return jnp.concatenate(totals[::-1])

    @property
    def _is_below(self) -> np.ndarray:
        """Whether a node, the second axis, is in another's subtree, (K, K)."""
        number = np.arange(1, self.num_nodes + 1)
        return number >> np.maximum(self.scale - self.scale[:, None], 0) == number[:, None]

    def right_child(self, values: Array) -> Array:
        """Value of a node quantity at each node's right child, 0 at the last scale, (K,)."""
        return jnp.concatenate([values[2::2], jnp.zeros(2**self.depth, values.dtype)])

    def log_weights(self, logit_stop: Float[Array, "K"], logit_right: Float[Array, "K"]) -> Float[Array, "K"]:
        """Log of pi (paper eq. 3): P(stop at the node) times P(path down to it); -inf at absent nodes.

        `logit_stop` is +inf at leaves and absent nodes, which stops every path there.
        """
        log_move = jax.nn.log_sigmoid(-logit_stop)
        steps = jnp.stack([jax.nn.log_sigmoid(-logit_right), jax.nn.log_sigmoid(logit_right)], axis=1)
        path = jnp.zeros(1, logit_stop.dtype)
        paths = [path]
        for s in range(self.depth):
            level = slice(2**s - 1, 2 ** (s + 1) - 1)
            path = ((path + log_move[level])[:, None] + steps[level]).reshape(-1)
            paths.append(path)
        log_path = jnp.concatenate(paths)
        return jnp.where(self.is_present, log_path + jax.nn.log_sigmoid(logit_stop), -jnp.inf)


def tree_from_mask(is_present: np.ndarray) -> Tree:
    """Tree of the present nodes, (K,), or the trees of several masks, (F, K), as one `Tree` with a leading axis F.

    A present node needs its parent, and both children or none. Raises ValueError where it lacks them.
    """
    num_nodes = is_present.shape[-1]
    depth = int(np.log2(num_nodes + 1)) - 1
    if 2 ** (depth + 1) - 1 != num_nodes or not is_present[..., 0].all():
        raise ValueError(f"is_present: expected 2**(depth + 1) - 1 nodes with a root, got {num_nodes}")
    children = np.zeros((*is_present.shape, 2), bool)
    children[..., : 2**depth - 1, :] = is_present[..., 1:].reshape(*is_present.shape[:-1], -1, 2)
    left, right = children[..., 0], children[..., 1]
    if (left != right).any() or (left & ~is_present).any():
        raise ValueError("is_present: expected every present node to have a parent, and both children or none")
    return Tree(jax.device_put(is_present), jax.device_put(is_present & ~left), depth)
