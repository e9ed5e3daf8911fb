"""Partially observed rows: the mixture over nodes and draws given what is observed.

A row's posterior predictive given its observed part is a mixture over (draw t, node k) with weights proportional to
pi_tk N(y_O | t, k), the same under every tree; trees count equally. Work per draw is d-sized: the D-sized work is
done once per row and node. Per row only the `num_candidates` nodes with the largest weight at the posterior mean of
the parameters are carried through all draws.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._typing import Array, Float, Int
from geode_jax.dictionary import Dictionary
from geode_jax.gibbs.chain import Draw
from geode_jax.math.lowrank import HIGHEST, Observed, latent_given, latent_root, log_marginal
from geode_jax.statistics import observed_statistics_of


class Candidates(eqx.Module):
    """The nodes a partial row may belong to, and the row's statistics there; axes (b, M, ...)."""

    node: Int[Array, "b M"]
    observed: Observed


class Mixture(eqx.Module):
    """A row's conditional distribution, one component per candidate node, axes (b, M, ...).

    Draws of the parameters are merged within a node by their first two moments: mean and covariance of the mixture
    are those of all draws exactly. Given a component, the row is ``centre + basis eta + noise`` with eta of the given
    mean and covariance and noise of variance `noise`.
    """

    node: Int[Array, "b M"]
    weight: Float[Array, "b M"]
    mean: Float[Array, "b M d"]
    covariance: Float[Array, "b M d d"]
    noise: Float[Array, "b M"]


def _parameters_at(draw: Draw, dictionary: Dictionary, node: Int[Array, "b M"]) -> tuple[Array, Array, Array]:
    """(-log u, log sigma2, log pi) of one draw at the given nodes."""
    log_sigma2 = draw.log_sigma2[jnp.asarray(dictionary.tree.scale)]
    return draw.neg_log_u[node], log_sigma2[node], draw.log_weights[node]


def _scores(observed: Observed, neg_log_u: Array, log_sigma2: Array, log_weights: Array) -> Array:
    latent = latent_given(observed, neg_log_u)
    return log_weights + log_marginal(observed, latent, neg_log_u, log_sigma2)


def find_candidates(
    dictionary: Dictionary, draws: Draw, x: Array, is_observed: Array, num_candidates: int
) -> Candidates:
    """Best nodes at the posterior mean of the parameters, for one tree."""
    observed = observed_statistics_of(dictionary, x, is_observed)
    num_rows, num_nodes = observed.residual.shape
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), (draws.neg_log_u, draws.log_sigma2))
    log_weights = jax.nn.logsumexp(draws.log_weights, axis=0) - jnp.log(draws.log_weights.shape[0])
    all_nodes = jnp.broadcast_to(jnp.arange(num_nodes), (num_rows, num_nodes))
    log_sigma2 = mean[1][jnp.asarray(dictionary.tree.scale)]
    scores = _scores(observed, mean[0][all_nodes], log_sigma2[all_nodes], log_weights[all_nodes])
    if num_candidates >= num_nodes:
        return Candidates(all_nodes, observed)
    node = lax.top_k(scores, num_candidates)[1]

    def at_candidates(leaf: Array) -> Array:
        return jax.vmap(lambda values, index: values[index])(leaf, node)

    return Candidates(node, jax.tree.map(at_candidates, observed))


def candidate_scores(dictionary: Dictionary, draws: Draw, candidates: Candidates) -> Float[Array, "T b M"]:
    """``log pi + log N(y_O)`` of every draw at the candidates."""

    def of_draw(draw: Draw) -> Array:
        return _scores(candidates.observed, *_parameters_at(draw, dictionary, candidates.node))

    return lax.map(of_draw, draws)


def _with_mean_noise(dictionary: Dictionary, draws: Draw) -> Draw:
    """Draws whose noise variance is at most 1, the data's own, at scales that hold no row.

    There it is drawn from its prior alone, which has no mean: however little weight such a scale has, it would make up
    all of a standard deviation.
    """
    has_rows = jax.vmap(dictionary.tree.sum_over_scales)(draws.count.astype(draws.log_sigma2.dtype)) > 0.0
    capped = jnp.where(has_rows, draws.log_sigma2, jnp.minimum(draws.log_sigma2, 0.0))
    return eqx.tree_at(lambda it: it.log_sigma2, draws, capped)


def merged_mixture(
    dictionary: Dictionary, draws: Draw, candidates: Candidates, scores: Float[Array, "T b M"]
) -> Mixture:
    """Merge the draws within each candidate node; scales without rows count with a noise that has a mean."""
    log_total = jax.nn.logsumexp(scores, axis=(0, 2), keepdims=True)
    weights = jnp.exp(scores - log_total)

    def add(total: tuple[Array, ...], inputs: tuple[Draw, Array]) -> tuple[tuple[Array, ...], None]:
        draw, weight = inputs
        neg_log_u, log_sigma2, _ = _parameters_at(draw, dictionary, candidates.node)
        eta, root = latent_root(candidates.observed, neg_log_u)
        covariance = jnp.einsum("bmki,bmkj->bmij", root, root, precision=HIGHEST)
        sigma2 = jnp.exp(log_sigma2)
        # about eta0 rather than 0, so that the spread between draws is no small difference of large numbers
        offset = eta - candidates.observed.start
        second = sigma2[..., None, None] * covariance + offset[..., :, None] * offset[..., None, :]
        terms = (
            weight,
            weight[..., None] * offset,
            weight[..., None, None] * second,
            weight * sigma2,
        )
        return jax.tree.map(jnp.add, total, terms), None

    rows, nodes = candidates.node.shape
    rank = dictionary.max_rank
    dtype = scores.dtype
    empty = tuple(jnp.zeros((rows, nodes, *tail), dtype) for tail in ((), (rank,), (rank, rank), ()))
    (weight, first, second, noise), _ = lax.scan(add, empty, (_with_mean_noise(dictionary, draws), weights))
    share = 1.0 / jnp.maximum(weight, jnp.finfo(dtype).tiny)
    mean = first * share[..., None]
    covariance = second * share[..., None, None] - mean[..., :, None] * mean[..., None, :]
    return Mixture(candidates.node, weight, mean + candidates.observed.start, covariance, noise * share)


@partial(jax.jit, static_argnames="num_candidates")
def log_density_partial(
    dictionary: Dictionary, draws: Draw, x: Array, is_observed: Array, *, num_candidates: int
) -> Float[Array, "b F"]:
    """Log marginal density of the observed part under each tree, in model coordinates."""
    by_draw = log_densities_partial(dictionary, draws, x, is_observed, num_candidates=num_candidates)
    return jax.nn.logsumexp(by_draw, axis=2) - jnp.log(by_draw.shape[2])


@partial(jax.jit, static_argnames="num_candidates")
def log_densities_partial(
    dictionary: Dictionary, draws: Draw, x: Array, is_observed: Array, *, num_candidates: int
) -> Float[Array, "b F T"]:
    """Log marginal density of the observed part under every draw of every tree, in model coordinates."""

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        candidates = find_candidates(*inputs, x, is_observed, num_candidates)
        return jax.nn.logsumexp(candidate_scores(*inputs, candidates), axis=2)

    return jnp.moveaxis(lax.map(one_tree, (dictionary, draws)), 2, 0)


def bytes_per_row(dictionary: Dictionary, num_candidates: int, num_draws: int) -> int:
    """Upper estimate of the memory a partial row takes in a block."""
    rank, features, nodes = dictionary.max_rank, dictionary.num_features, dictionary.tree.num_nodes
    numbers = 3 * nodes * rank * (rank + 4) + num_candidates * (6 * rank * rank + num_draws)
    return dictionary.centres.dtype.itemsize * (numbers + features * (rank + 4 + 4 * num_candidates))
