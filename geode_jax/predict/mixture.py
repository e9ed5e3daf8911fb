"""Partially observed rows: the mixture over nodes and draws given what is observed.

Under each tree, a row's posterior predictive given its observed part is a mixture over (draw t, node k) with weights
proportional to pi_tk N(y_O | t, k); trees have equal weights. The work of size D is done once per row and node, that
for each draw is of size d. Candidates of a row are the `num_candidates` nodes with the largest weight at the posterior
mean of the parameters. Only those with a weight that is not negligible there are evaluated under all draws. The weight
of the other nodes, which is large where the observed part says little, counts in densities as it is at that mean; what
is filled in has no part in it (:func:`geode_jax.predict.rows.map_held_rows` takes more candidates there).
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import (
    HIGHEST,
    Latent,
    Observed,
    latent_given,
    latent_root,
    log_marginal,
    rough_log_marginal,
)
from geode_jax.math.rows_in_space import SeenRows
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.model.statistics import map_nodes, observed_statistics_at, observed_statistics_of, products_at
from geode_jax.model.tree import Tree
from geode_jax.predict.candidates import (
    DRAWS_AT_ONCE,
    Candidates,
    Parameters,
    batches_of,
    is_not_negligible,
    largest_rise,
    log_density_of,
    log_share_of,
    map_relevant,
    mean_parameters,
    parameters_of,
    scores_by_draw,
    take_nodes,
)
from geode_jax.predict.nodes import Nodes, NodesInSpan, Products, SeenInSpan, TreeNodes, rankings

# Components of a smaller share of a row's weight, in rounding errors, are left out of means, variances and quantiles.
LEAST_SHARE = 100.0


class Mixture(eqx.Module):
    """A row's conditional distribution, one component per candidate node, axes (b, M, ...).

    Posterior draws are merged within a node by their first two moments, so that mean and covariance of the mixture are
    exactly those over all draws. Given a component, the row is ``centre + basis eta + noise`` with eta of the given
    mean and covariance and noise of variance `noise`.
    """

    node: Int[Array, "b M"]
    weight: Float[Array, "b M"]
    mean: Float[Array, "b M d"]
    covariance: Float[Array, "b M d d"]
    noise: Float[Array, "b M"]


def _log_marginal(observed: Observed, latent: Latent, parameters: Parameters) -> Array:
    return log_marginal(observed, latent, parameters.neg_log_u, parameters.log_sigma2)


def _scores(observed: Observed, parameters: Parameters) -> Array:
    return _scores_and_distances(observed, parameters)[0]


def _scores_and_distances(observed: Observed, parameters: Parameters) -> tuple[Array, Array]:
    """Log weight plus log density, and the squared Mahalanobis distance, whose mean is the number of features seen."""
    latent = latent_given(observed, parameters.neg_log_u)
    marginal = _log_marginal(observed, latent, parameters)
    log_two_pi = jnp.log(2 * jnp.pi).astype(marginal.dtype)
    constant = observed.num_observed * (log_two_pi + parameters.log_sigma2) + latent.log_det
    return parameters.log_weights + marginal, -2.0 * marginal - constant


TreeResults = TypeVar("TreeResults")


def of_each_tree(
    function: Callable[[TreeNodes, Draw, Candidates[Observed]], TreeResults],
    nodes: Nodes,
    draws: Draw,
    seen: SeenRows,
    num_candidates: int,
) -> TreeResults:
    """``function(nodes, draws, candidates)`` of every tree in turn, stacked on a first axis."""
    forest = nodes.dictionary
    centres, bases = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (forest.centres, forest.bases))
    in_span = SeenInSpan.of(nodes.ranking, seen) if _rankings(forest, seen, num_candidates) else None

    def one_tree(inputs: tuple[Array, Tree, Draw, NodesInSpan | None]) -> TreeResults:
        number, tree, tree_draws, spanned = inputs
        own = TreeNodes(tree, centres, bases, number * tree.num_nodes, forest.num_features)
        products: _Products = _OwnProducts(own, seen)
        if in_span is not None and spanned is not None:
            products = _ProductsInSpan(in_span, spanned)
        return function(own, tree_draws, _find_candidates(own, tree_draws, seen, products, num_candidates))

    number = jnp.arange(forest.centres.shape[0])
    spanned = None if nodes.ranking is None else nodes.ranking.nodes
    return lax.map(one_tree, (number, forest.tree, draws, spanned))


def _rankings(nodes: Dictionary | TreeNodes, seen: SeenRows, num_candidates: int) -> list[tuple[int, int]]:
    """How nodes are ranked first; not at all where the rows share a mask, as products over it are the same for all."""
    is_shared = seen.mask.shape[0] == 1
    return [] if is_shared else rankings(nodes.tree.num_nodes, nodes.max_rank, num_candidates)


class _OwnProducts(eqx.Module):
    """What rows rank nodes by: products with their leading directions."""

    nodes: TreeNodes
    seen: SeenRows

    def at_all(self, rank: int) -> Products:
        """At all nodes of the tree, with so many directions, axes (K, b)."""
        return map_nodes(self.seen.products, *self.nodes.leading(rank), self.seen.numbers(rank))

    def at(self, node: Int[Array, "b M"], rank: int) -> Products:
        """At some nodes of each row, axes (b, M)."""
        return products_at(*self.nodes.leading(rank), self.seen, node)


class _ProductsInSpan(eqx.Module):
    """:class:`_OwnProducts` of coordinates in a span."""

    seen: SeenInSpan
    nodes: NodesInSpan

    def at_all(self, rank: int) -> Products:
        """At all nodes of the tree, with so many directions, axes (K, b)."""
        return self.seen.products(self.nodes.leading(rank))

    def at(self, node: Int[Array, "b M"], rank: int) -> Products:
        """At some nodes of each row, axes (b, M)."""
        return self.seen.products_at(self.nodes.leading(rank), node)


_Products: TypeAlias = _OwnProducts | _ProductsInSpan


def _find_candidates(
    own: TreeNodes, draws: Draw, seen: SeenRows, products: _Products, num_candidates: int
) -> Candidates[Observed]:
    """The best nodes of one tree at the posterior mean of the parameters.

    Rows with different masks need a (d, d) matrix of products over the features at every node, so nodes are first
    ranked with a few directions only, by `products`. The share of the weight that a step keeps is taken from what it
    ranks by.
    """
    log_share = jnp.zeros(seen.num_rows, own.centres.dtype)
    if own.tree.num_nodes == 1:  # there is nothing to choose
        only = jnp.zeros((seen.num_rows, 1), jnp.int32)
        observed = observed_statistics_of(own.centres, own.bases, seen, own.places(only[0]))
        observed = jax.tree.map(partial(take_nodes, node=only), observed)
        return Candidates.of(only, observed, log_share, jnp.ones(seen.num_rows, bool))
    parameters, node = mean_parameters(draws, own.tree), None
    num_seen = seen.mask.sum(axis=1)
    steps = _rankings(own, seen, num_candidates)
    for rank, number in steps:
        leading = parameters.leading(rank, own.num_features)
        if node is None:
            found = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), products.at_all(rank))
            node = jnp.broadcast_to(jnp.arange(own.tree.num_nodes), found[2].shape)
        else:
            found, leading = products.at(node, rank), leading.at(node)
        gram, cross, squared_norm = found
        rough = rough_log_marginal(gram, cross, squared_norm, num_seen[:, None], leading.neg_log_u, leading.log_sigma2)
        kept, best = lax.top_k(leading.log_weights + rough, number)
        log_share += log_share_of(kept, leading.log_weights + rough)
        node = jnp.take_along_axis(node, best, axis=1)
    if node is None:
        node = jnp.arange(own.tree.num_nodes)[None]
        observed = observed_statistics_of(own.centres, own.bases, seen, own.places(node[0]))
    else:
        observed = observed_statistics_at(own.centres, own.bases, seen, own.places(node))
    scores, distance = _scores_and_distances(observed, parameters.at(node))
    if not steps or node.shape[1] > num_candidates:
        every = scores
        scores, best = lax.top_k(scores, num_candidates)
        log_share += log_share_of(scores, every)
        node = jnp.take_along_axis(jnp.broadcast_to(node, (seen.num_rows, node.shape[1])), best, axis=1)
        observed, distance = jax.tree.map(partial(take_nodes, node=best), (observed, distance))
    # with the noise exp(rise) times as large, the log density gains this much where the row is far
    rise = largest_rise(draws, own.tree)[node]
    gain = 0.5 * (-jnp.expm1(-rise) * distance - rise * observed.num_observed)
    return Candidates.of(node, observed, log_share, is_not_negligible(scores, gain))


def candidate_scores(tree: Tree, draws: Draw, candidates: Candidates[Observed]) -> Float[Array, "T b M"]:
    """``log pi + log N(y_O)`` of every draw at the candidates; -inf at those whose weight is negligible."""
    return scores_by_draw(_scores, tree, draws, candidates)


def _capped_log_noise(tree: Tree, draws: Draw) -> Float[Array, "T S"]:
    """Log of the noise variance, which is capped at 1, the square of the unit, at scales that hold no row.

    There it is drawn from its prior alone, which may have no mean: however small the weight of such a scale, its noise
    would dominate every standard deviation.
    """
    has_rows = jax.vmap(tree.sum_over_scales)(draws.count.astype(draws.log_sigma2.dtype)) > 0.0
    return jnp.where(has_rows, draws.log_sigma2, jnp.minimum(draws.log_sigma2, 0.0))


def merged_mixture(
    tree: Tree, draws: Draw, candidates: Candidates[Observed]
) -> tuple[Candidates[Observed], Mixture, Float[Array, "T b M"]]:
    """Merge the draws within each candidate node, with the noise variance capped at scales without rows.

    Also returned: the candidates, of which only those with weight are relevant from here on, and what
    :func:`candidate_scores` gives. A draw counts by its score within the node, relative to the best so far.
    """
    rank, dtype = candidates.observed.start.shape[-1], candidates.observed.residual.dtype
    num_draws = draws.log_joint.shape[0]
    noise = jnp.exp(_capped_log_noise(tree, draws))[:, jnp.asarray(tree.scale)]
    batches = batches_of(num_draws)

    def of_pairs(pairs: Array) -> tuple[Array, ...]:
        node, observed = candidates.at(pairs)
        every_draw = jax.tree.map(lambda leaf: leaf[:, None], observed)

        def add(total: tuple[Array, ...], index: Array) -> tuple[tuple[Array, ...], Array]:
            at = jnp.minimum(index, num_draws - 1)
            some = jax.vmap(lambda draw: parameters_of(draw, tree).at(node), out_axes=1)(
                jax.tree.map(lambda leaf: leaf[at], draws)
            )
            latent, root = latent_root(every_draw, some.neg_log_u)
            score = some.log_weights + _log_marginal(every_draw, latent, some)
            score = jnp.where(index < num_draws, score, -jnp.inf)
            best = jnp.maximum(total[0], score.max(axis=1))
            largest = jnp.where(jnp.isfinite(best), best, 0.0)
            weight = jnp.exp(score - largest[:, None])
            scattered = weight * noise[at][:, node].T
            # about eta0 rather than 0, so that the spread between draws is no small difference of large numbers
            offset = latent.mean - every_draw.start
            within = (jnp.sqrt(scattered)[..., None, None] * root).reshape(pairs.size, -1, rank)
            between = jnp.sqrt(weight)[..., None] * offset
            second, spread = (jnp.einsum("pki,pkj->pij", one, one, precision=HIGHEST) for one in (within, between))
            first = jnp.einsum("pt,pti->pi", weight, offset, precision=HIGHEST)
            terms = weight.sum(axis=1), first, second + spread, scattered.sum(axis=1)
            kept = jnp.exp(total[0] - largest)
            sums = (
                kept.reshape(-1, *[1] * (old.ndim - 1)) * old + new for old, new in zip(total[1:], terms, strict=True)
            )
            return (best, *sums), score.T

        sums = tuple(jnp.zeros((pairs.size, *tail), dtype) for tail in ((), (rank,), (rank, rank), ()))
        nothing = jnp.full(pairs.size, -jnp.inf, dtype), *sums
        (_, weight, first, second, total_noise), scores = lax.scan(add, nothing, batches)
        share = 1.0 / jnp.maximum(weight, jnp.finfo(dtype).tiny)
        offset = first * share[:, None]
        covariance = second * share[:, None, None] - offset[:, :, None] * offset[:, None, :]
        own = scores.reshape(-1, pairs.size)[:num_draws].T
        return own, observed.start + offset, covariance, total_noise * share

    shape = candidates.node.shape
    # components that are not evaluated get noise variance 1, so that dividing by it stays finite
    empty: tuple[Array, ...] = (
        jnp.full((candidates.node.size, num_draws), -jnp.inf, dtype),
        candidates.observed.start.reshape(-1, rank),
        jnp.zeros((candidates.node.size, rank, rank), dtype),
        jnp.ones(candidates.node.size, dtype),
    )
    scores, *found = map_relevant(of_pairs, candidates, empty)
    weight = jax.nn.softmax(jax.nn.logsumexp(scores, axis=1).reshape(shape), axis=1)
    has_weight = weight > LEAST_SHARE * jnp.finfo(dtype).eps
    mixture = Mixture(
        candidates.node, jnp.where(has_weight, weight, 0.0), *(leaf.reshape(*shape, *leaf.shape[1:]) for leaf in found)
    )
    candidates = Candidates.of(candidates.node, candidates.observed, candidates.log_share, has_weight.reshape(-1))
    return candidates, mixture, scores.T.reshape(-1, *shape)


@partial(quickly_compiled, static_argnames="num_candidates")
def log_density_partial(nodes: Nodes, draws: Draw, seen: SeenRows, *, num_candidates: int) -> Float[Array, "b F"]:
    """Log marginal density under each tree of the observed features, each divided by its scale."""
    by_draw = log_densities_partial(nodes, draws, seen, num_candidates=num_candidates)
    return jax.nn.logmeanexp(by_draw, axis=2)


@partial(quickly_compiled, static_argnames="num_candidates")
def log_densities_partial(nodes: Nodes, draws: Draw, seen: SeenRows, *, num_candidates: int) -> Float[Array, "b F T"]:
    """Log marginal density under every draw of every tree of the observed features, each divided by its scale."""

    def one_tree(own: TreeNodes, draws: Draw, candidates: Candidates[Observed]) -> Array:
        return log_density_of(candidate_scores(own.tree, draws, candidates), candidates)

    by_draw = jnp.moveaxis(of_each_tree(one_tree, nodes, draws, seen, num_candidates), 2, 0)
    return by_draw if seen.log_det is None else by_draw - 0.5 * seen.log_det[:, None, None]


def bytes_per_row(dictionary: Dictionary, num_candidates: int, num_draws: int, num_seen: int) -> int:
    """Upper estimate of the bytes a partial row takes in a block; `num_seen` is 0 where the noise is isotropic."""
    rank, features = dictionary.max_rank, dictionary.num_features
    steps = _steps(dictionary, num_candidates)
    numbers = _numbers_of_nodes(dictionary, num_candidates, num_draws)
    if num_seen:
        numbers += num_seen * (4 * num_seen + 2 * features + 2 * rank) + _numbers_in_span(steps, rank)
    return dictionary.centres.dtype.itemsize * (numbers + features * (2 * rank + 4 + 4 * num_candidates))


def bytes_in_space(dictionary: Dictionary, num_candidates: int, num_draws: int) -> int:
    """:func:`bytes_per_row` where all nodes are in a space that the dictionary has coordinates of."""
    num_trees, rank, features = dictionary.centres.shape[0], dictionary.max_rank, dictionary.num_features
    in_space = dictionary.centres.shape[-1]
    numbers = _numbers_of_nodes(dictionary, num_candidates, num_draws)
    numbers += in_space * (8 * in_space + num_candidates * rank)
    numbers += _numbers_in_span(_steps(dictionary, num_candidates), rank)
    return dictionary.centres.dtype.itemsize * (numbers + features * (8 + 4 * num_trees * num_candidates))


def _steps(dictionary: Dictionary, num_candidates: int) -> list[tuple[int, int]]:
    """How many nodes a row looks at, and with how many directions, one step after the other."""
    left, steps = dictionary.tree.num_nodes, []
    for rank, kept in rankings(left, dictionary.max_rank, num_candidates):
        steps.append((left, rank))
        left = kept
    return [*steps, (left, dictionary.max_rank)]


def _numbers_in_span(steps: list[tuple[int, int]], rank: int) -> int:
    """How many numbers of a row the rankings hold in a span: at some nodes of each row, these are copied too."""
    return rank * max((1 + (number > 0)) * nodes * some for number, (nodes, some) in enumerate(steps))


def _numbers_of_nodes(dictionary: Dictionary, num_candidates: int, num_draws: int) -> int:
    """How many numbers per row do not grow with the features."""
    rank, steps = dictionary.max_rank, _steps(dictionary, num_candidates)
    numbers = max(3 * nodes * some * (some + 4) for nodes, some in steps) + 4 * rank * dictionary.tree.num_nodes
    numbers += num_candidates * (6 * rank * rank + num_draws)
    # a quarter of a pair at once; some more of few rows
    return numbers + min(num_draws, DRAWS_AT_ONCE) * rank * (rank + 4)
