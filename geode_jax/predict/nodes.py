"""The nodes of a forest over the features, and how rows with missing features rank them.

Where rows have different masks, the products of a node's directions over the features differ from row to row. So nodes
with many directions are first ranked by the leading ones; the rest counts as noise. With a noise covariance a row must
be whitened too, which takes as many multiplications for every vector as the square of the observed features, or of the
dimensions of a space that all rows are in. It is done for one span, and nodes are ranked by their coordinates there.
"""

from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp

from geode_jax._typing import Array, Float
from geode_jax.math.lowrank import HIGHEST, least_squares, orthonormal
from geode_jax.math.rows_in_space import RowsInSpace, SeenRows
from geode_jax.model.dictionary import Dictionary, coloured

SCREEN_RANK = 16  # leading directions by which nodes are ranked
# What ObservedRows.products gives, at every node.
Products: TypeAlias = tuple[Array, Array, Array]


class NodesInSpan(eqx.Module):
    """Coordinates in a span of the nodes' centres and of their leading directions."""

    centres: Float[Array, "*F K q"]
    bases: Float[Array, "*F K q r"]


class Ranking(eqx.Module):
    """What rows with a noise covariance rank nodes by: coordinates in the span of the first tree's root.

    The roots of all trees have learned from all rows.
    """

    centre: Float[Array, "D"]
    span: Float[Array, "D q"]
    nodes: NodesInSpan

    @classmethod
    @eqx.filter_jit
    def of(cls, forest: Dictionary) -> "Ranking":
        """That of a forest."""
        span, centre = orthonormal(forest.bases[0, 0]), forest.centres[0, 0]
        centres = jnp.matmul(forest.centres - centre, span, precision=HIGHEST)
        bases = jnp.einsum("Dq,fkDr->fkqr", span, forest.bases[..., :SCREEN_RANK], precision=HIGHEST)
        return cls(centre, span, NodesInSpan(centres, bases))


class Nodes(eqx.Module):
    """The nodes of a forest over the features. `ranking` is None where rows rank them by their own products."""

    dictionary: Dictionary
    ranking: Ranking | None

    @classmethod
    def of(cls, dictionary: Dictionary, root: Float[Array, "D D"]) -> "Nodes":
        """The nodes of a dictionary in model coordinates; `root`: of the noise covariance."""
        forest = coloured(dictionary, root)
        return cls(forest, Ranking.of(forest) if is_ranked(forest) else None)


def is_ranked(dictionary: Dictionary) -> bool:
    """Whether nodes have so many directions that it pays to rank them by the leading ones first."""
    return dictionary.max_rank >= 2 * SCREEN_RANK


class SeenInSpan(eqx.Module):
    """Whitened products of rows with a span: its Gram matrix, the rows' coordinates, and what is off it, squared."""

    gram: Float[Array, "#b q q"]
    own: Float[Array, "b q"]
    rest: Float[Array, "b"]

    @classmethod
    def of(cls, ranking: Ranking | None, seen: SeenRows) -> "SeenInSpan | None":
        """The products of these rows; None where these rank nodes by their own: products of few numbers cost little."""
        if ranking is None or _size(seen) < 2 * ranking.span.shape[1]:
            return None
        gram, cross, squared = seen.products(ranking.centre, ranking.span)
        own = least_squares(gram, cross)
        return cls(gram, own, squared - jnp.sum(own * cross, axis=-1))

    def products(self, nodes: NodesInSpan) -> Products:
        """``seen.products`` at the nodes of one tree, with their centres and bases projected to the span."""
        off = self.own - nodes.centres[:, None]
        pulled = jnp.einsum("bqs,kbs->kbq", self.gram, off, precision=HIGHEST)
        turned = jnp.einsum("bqp,kps->bqks", self.gram, nodes.bases, precision=HIGHEST)
        return (
            jnp.einsum("kqr,bqks->kbrs", nodes.bases, turned, precision=HIGHEST),
            jnp.einsum("kqr,kbq->kbr", nodes.bases, pulled, precision=HIGHEST),
            self.rest + jnp.sum(off * pulled, axis=-1),
        )


def _size(seen: SeenRows) -> int:
    """How many numbers a vector has where products with it are taken; 0 where no noise covariance makes them costly."""
    if isinstance(seen, RowsInSpace):
        return 0 if seen.given is None else seen.own.shape[1]
    return 0 if seen.whitening is None else seen.whitening.index.shape[1]
