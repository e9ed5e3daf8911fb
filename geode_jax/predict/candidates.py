"""The few nodes a row may belong to: by which parameters they are ranked, which have weight, and what share of it.

Where a row's features are not all seen, its density at a node takes a matrix factor. So nodes are ranked by less first,
and only those that are kept, and only where their weight is not negligible, are looked at under every draw.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Bool, Count, Float, Int
from geode_jax.model.draw import Draw
from geode_jax.model.tree import Tree

# A candidate this many nats behind the best one, at the posterior mean of the parameters but the largest noise of any
# draw, is not evaluated under the draws. This is more than makes its weight negligible there: under single draws a node
# of few rows may score much better than at the mean. (On digits, faces and three other sets, candidates of a weight
# above 1e-5 were at most 16 nats behind.)
NEGLIGIBLE = 32.0
# Pairs of row and candidate that are worked on at once are a quarter of the rows, or this many.
LEAST_PAIRS = 8
# Draws of one pair of row and candidate that are worked on at once: small matrices are fast only in large batches.
DRAWS_AT_ONCE = 16


class Parameters(eqx.Module):
    """-log u, log sigma2 and log pi of one draw, at all nodes or at some."""

    neg_log_u: Float[Array, "*nodes d"]
    log_sigma2: Float[Array, "*nodes"]
    log_weights: Float[Array, "*nodes"]

    def at(self, node: Int[Array, "*pairs"]) -> "Parameters":
        """The parameters of the given nodes."""
        return jax.tree.map(lambda leaf: leaf[node], self)

    def leading(self, rank: int, num_features: Count) -> "Parameters":
        """The model with the first directions only; variance along the others is spread over all features as noise."""
        snr = jnp.expm1(self.neg_log_u)
        raised = jnp.log1p(snr[..., rank:].sum(axis=-1) / num_features)
        neg_log_u = jnp.log1p(snr[..., :rank] * jnp.exp(-raised)[..., None])
        return Parameters(neg_log_u, self.log_sigma2 + raised, self.log_weights)


def parameters_of(draw: Draw, tree: Tree) -> Parameters:
    """Those of a draw at all nodes of a tree."""
    return Parameters(draw.neg_log_u, draw.log_sigma2[jnp.asarray(tree.scale)], draw.log_weights)


def mean_parameters(draws: Draw, tree: Tree) -> Parameters:
    """Means over the draws at all nodes of a tree, of -log u, log sigma2 and pi."""
    log_sigma2 = draws.log_sigma2.mean(axis=0)[jnp.asarray(tree.scale)]
    log_weights = jax.nn.logmeanexp(draws.log_weights, axis=0)
    return Parameters(draws.neg_log_u.mean(axis=0), log_sigma2, log_weights)


Seen = TypeVar("Seen")


class Candidates(eqx.Module, Generic[Seen]):
    """The nodes a partial row may belong to, and what the row shows of them; axes (b, M, ...).

    For most rows only one or two of them have weight. `order` holds all pairs of row and candidate, those that are not
    negligible first; `num_relevant` is their number. `log_share`: log of the share of the row's weight that they have.
    """

    node: Int[Array, "b M"]
    observed: Seen
    log_share: Float[Array, "b"]
    order: Int[Array, "b*M"]
    num_relevant: Int[Array, ""]

    @classmethod
    def of(
        cls, node: Int[Array, "b M"], observed: Seen, log_share: Float[Array, "b"], is_relevant: Bool[Array, "pairs"]
    ) -> "Candidates[Seen]":
        """Candidates of which these pairs are relevant."""
        return cls(node, observed, log_share, jnp.argsort(~is_relevant), jnp.sum(is_relevant))

    def at(self, pairs: Int[Array, "p"]) -> tuple[Int[Array, "p"], Seen]:
        """Nodes of some pairs, and what their rows show of them."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[pairs], (self.node, self.observed))


def is_not_negligible(scores: Float[Array, "b M"], gain: Float[Array, "b M"]) -> Bool[Array, "pairs"]:
    """Whether nodes may have weight under some draw.

    `scores`: log weights at the mean of the parameters. `gain`: how much larger they may be with the largest noise of
    any draw.
    """
    least = scores.max(axis=1, keepdims=True) - NEGLIGIBLE
    return (scores + jnp.maximum(gain, 0.0) >= least).reshape(-1)


def take_nodes(leaf: Array, node: Int[Array, "b M"]) -> Array:
    """What belongs to each row's nodes, (b, M, ...), of an array of rows and nodes, or of nodes for all rows alike."""
    row = jnp.arange(node.shape[0])[:, None] if leaf.shape[0] > 1 else jnp.zeros((1, 1), jnp.int32)
    return leaf[row, node]


def largest_rise(draws: Draw, tree: Tree) -> Float[Array, "K"]:
    """By how much the log noise variance of any draw is above the mean, at every node."""
    return (draws.log_sigma2.max(axis=0) - draws.log_sigma2.mean(axis=0))[jnp.asarray(tree.scale)]


def batches_of(num_draws: int) -> Int[Array, "batches at_once"]:
    """Numbers of draws that are worked on at once; those that fill up the last batch are beyond the last draw.

    Batches are alike, as a remainder would be a second chain of calls of LAPACK, beside the first, which may hang (see
    :mod:`geode_jax.math.lowrank`).
    """
    at_once = min(num_draws, DRAWS_AT_ONCE)
    return jnp.arange(-(-num_draws // at_once) * at_once).reshape(-1, at_once)


def held_share(log_share: Float[Array, "F b"]) -> Float[Array, "b"]:
    """The share of a row's weight that its candidates hold, averaged over the trees."""
    return jnp.exp(log_share).mean(axis=0)


def log_share_of(kept: Float[Array, "b M"], scores: Float[Array, "b N"]) -> Float[Array, "b"]:
    """Log of the share of the weight that some of the nodes have, of log weights; 0 where none has any."""
    share = jax.nn.logsumexp(kept, axis=1) - jax.nn.logsumexp(scores, axis=1)
    return jnp.where(jnp.isfinite(share), jnp.minimum(share, 0.0), 0.0)


PairResults = TypeVar("PairResults")


def map_relevant(
    function: Callable[[Int[Array, "p"]], PairResults], candidates: Candidates[Any], empty: PairResults
) -> PairResults:
    """``function(pairs)`` at the relevant pairs of row and candidate, some at a time; the others keep `empty`'s values.

    The first axis of all leaves is that of the pairs, (b*M, ...).
    """
    rows, width = candidates.node.shape
    size = max(rows // 4, min(rows, LEAST_PAIRS))

    def work(number: Array, results: PairResults) -> PairResults:
        place = number * size + jnp.arange(size)
        pairs = candidates.order[place]
        place = jnp.where(place < candidates.num_relevant, pairs, rows * width)  # beyond the end: not kept
        return jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), results, function(pairs))

    return lax.fori_loop(0, -(-candidates.num_relevant // size), work, empty)


def scores_by_draw(
    score: Callable[[Seen, Parameters], Array], tree: Tree, draws: Draw, candidates: Candidates[Seen]
) -> Float[Array, "T b M"]:
    """``score(seen, parameters)`` of every draw at the candidates; -inf at those whose weight is negligible."""
    num_draws = draws.log_joint.shape[0]

    def of_pairs(pairs: Int[Array, "p"]) -> Float[Array, "p T"]:
        node, seen = candidates.at(pairs)

        def of_draw(number: Int[Array, ""]) -> Float[Array, "p"]:
            draw = jax.tree.map(lambda leaf: leaf[number], draws)
            return score(seen, parameters_of(draw, tree).at(node))

        batches = jnp.minimum(batches_of(num_draws), num_draws - 1)
        return lax.map(of_draw, batches.reshape(-1), batch_size=batches.shape[1])[:num_draws].T

    empty = jnp.full((candidates.node.size, num_draws), -jnp.inf, candidates.log_share.dtype)
    return map_relevant(of_pairs, candidates, empty).T.reshape(-1, *candidates.node.shape)


def log_density_of(scores: Float[Array, "T b M"], candidates: Candidates[Any]) -> Float[Array, "T b"]:
    """Log density under every draw, of the scores of :func:`scores_by_draw`; other nodes count by `log_share`."""
    return jax.nn.logsumexp(scores, axis=2) - candidates.log_share
