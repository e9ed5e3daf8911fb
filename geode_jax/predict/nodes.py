"""The nodes of a forest over the features, and how rows with missing features rank them.

Where rows have different masks, the products of a node's directions over the features differ from row to row. So many
nodes are first ranked by a few leading directions, the best ones by more if there are many; the rest counts as noise.
With a noise covariance a row must be whitened too, which takes as many multiplications for every vector as the square
of the observed features, or of the dimensions of a space that all rows are in. It is done for one span, and nodes are
ranked by their coordinates there.
"""

from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, least_squares, orthonormal
from geode_jax.math.rows_in_space import RowsInSpace, SeenRows
from geode_jax.model.dictionary import Dictionary, coloured
from geode_jax.model.tree import Tree

# Nodes of at least twice as many directions are ranked by so many leading ones.
SCREEN_RANK = 16
# Before that, nodes of at least twice as many directions are ranked by so few, if at least half of them can be left out
# then. So many are kept, or this many times the number of candidates.
FIRST_RANK, KEPT, KEPT_TIMES = 4, 24, 4
# What ObservedRows.products gives, at every node, axes (K, b), or at some of each row, (b, M).
Products: TypeAlias = tuple[Array, Array, Array]


class NodesInSpan(eqx.Module):
    """Coordinates in a span of the nodes' centres and of their leading directions."""

    centres: Float[Array, "*F K q"]
    bases: Float[Array, "*F K q r"]

    def leading(self, rank: int) -> "NodesInSpan":
        """Those of the first directions."""
        return NodesInSpan(self.centres, self.bases[..., :rank])


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
        return cls(forest, Ranking.of(forest) if has_span(forest) else None)


class TreeNodes(eqx.Module):
    """The nodes of one tree; `centres` and `bases` hold all N of the forest, this one's from place `first` on.

    Arrays of its own would be copies, made anew for every block of rows, as those of :meth:`leading` are.
    """

    tree: Tree
    centres: Float[Array, "N c"]
    bases: Float[Array, "N c d"]
    first: Int[Array, ""]
    num_features: int = eqx.field(static=True)

    @property
    def max_rank(self) -> int:
        """Directions per node, d."""
        return self.bases.shape[-1]

    def leading(self, rank: int) -> tuple[Float[Array, "K c"], Float[Array, "K c r"]]:
        """Centres and first directions of this tree's nodes."""
        number = self.tree.num_nodes
        centres, bases = (lax.dynamic_slice_in_dim(leaf, self.first, number) for leaf in (self.centres, self.bases))
        return centres, bases[..., :rank]

    def places(self, node: Int[Array, "*nodes"]) -> Int[Array, "*nodes"]:
        """Where the arrays hold these nodes."""
        return self.first + node


def has_span(dictionary: Dictionary) -> bool:
    """Whether nodes have so many directions that rows with a noise covariance rank them by coordinates in a span."""
    return dictionary.max_rank >= 2 * SCREEN_RANK


def rankings(num_nodes: int, rank: int, num_candidates: int) -> list[tuple[int, int]]:
    """How nodes are ranked, step by step: by how many leading directions, and how many nodes are kept then.

    Those that the last step keeps are looked at with all directions. They are the candidates, or more than these where
    nodes have too few directions for the second step.
    """
    found, kept = [], max(KEPT, KEPT_TIMES * num_candidates)
    if rank >= 2 * FIRST_RANK and num_nodes >= 2 * kept:
        found.append((FIRST_RANK, kept))
    if rank >= 2 * SCREEN_RANK and num_nodes > num_candidates:
        found.append((SCREEN_RANK, num_candidates))
    return found


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
        """``seen.products`` at the nodes of one tree, axes (K, b), of their centres and bases projected to the span."""
        off = self.own - nodes.centres[:, None]
        pulled = jnp.einsum("bqs,kbs->kbq", self.gram, off, precision=HIGHEST)
        turned = jnp.einsum("bqp,kps->bqks", self.gram, nodes.bases, precision=HIGHEST)
        return (
            jnp.einsum("kqr,bqks->kbrs", nodes.bases, turned, precision=HIGHEST),
            jnp.einsum("kqr,kbq->kbr", nodes.bases, pulled, precision=HIGHEST),
            self.rest + jnp.sum(off * pulled, axis=-1),
        )

    def products_at(self, nodes: NodesInSpan, node: Int[Array, "b M"]) -> Products:
        """:meth:`products` at M given nodes of each row, axes (b, M)."""
        off, bases = self.own[:, None] - nodes.centres[node], nodes.bases[node]
        pulled = jnp.einsum("bqs,bks->bkq", self.gram, off, precision=HIGHEST)
        turned = jnp.einsum("bqp,bkps->bkqs", self.gram, bases, precision=HIGHEST)
        return (
            jnp.einsum("bkqr,bkqs->bkrs", bases, turned, precision=HIGHEST),
            jnp.einsum("bkqr,bkq->bkr", bases, pulled, precision=HIGHEST),
            self.rest[:, None] + jnp.sum(off * pulled, axis=-1),
        )


def _size(seen: SeenRows) -> int:
    """How many numbers a vector has where products with it are taken; 0 where no noise covariance makes them costly."""
    if isinstance(seen, RowsInSpace):
        return 0 if seen.given is None else seen.own.shape[1]
    return 0 if seen.whitening is None else seen.whitening.index.shape[1]
