"""Filling in what is missing: conditional means, central intervals, draws."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import ndtr, ndtri

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.dictionary import Dictionary
from geode_jax.gibbs.chain import Draw
from geode_jax.math.lowrank import HIGHEST, Observed, latent_root
from geode_jax.predict.partial import Mixture, candidate_scores, find_candidates, merged_mixture


def _components(dictionary: Dictionary, mixture: Mixture, with_variance: bool) -> tuple[Array, Array]:
    """Mean and variance of every coordinate under every component of one tree, (M, b, D) each."""

    def at_candidate(inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        node, eta, covariance, noise = inputs
        basis = dictionary.bases[node]
        mean = dictionary.centres[node] + jnp.einsum("bDd,bd->bD", basis, eta, precision=HIGHEST)
        if not with_variance:
            return mean, jnp.zeros((0,), mean.dtype)
        spread = jnp.einsum("bDd,bde->bDe", basis, covariance, precision=HIGHEST)
        variance = noise[:, None] + jnp.maximum(jnp.sum(spread * basis, axis=-1), 0.0)
        return mean, variance

    slots = jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1),
        (mixture.node, mixture.mean, mixture.covariance, mixture.noise),
    )
    return lax.map(at_candidate, slots)


def _quantile(level: float, weight: Array, mean: Array, deviation: Array) -> Array:
    """Quantile of a mixture of normals per coordinate by bisection; components on axis 0.

    It lies between the smallest and the largest quantile of the components that have weight.
    """
    own = mean + deviation * ndtri(jnp.asarray(level, mean.dtype))
    has_weight = weight > jnp.finfo(mean.dtype).eps
    low = jnp.where(has_weight, own, jnp.inf).min(axis=0)
    high = jnp.where(has_weight, own, -jnp.inf).max(axis=0)

    def halve(_: Array, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (bracket[0] + bracket[1])
        below = jnp.sum(weight * ndtr((middle - mean) / deviation), axis=0) < level
        return jnp.where(below, middle, bracket[0]), jnp.where(below, bracket[1], middle)

    steps = 50 if mean.dtype == jnp.float64 else 24  # one for every bit of the bracket
    low, high = lax.fori_loop(0, steps, halve, (low, high))
    return 0.5 * (low + high)


@partial(jax.jit, static_argnames=("num_candidates", "interval"))
def conditional_summary(
    dictionary: Dictionary,
    draws: Draw,
    x: Float[Array, "b D"],
    is_observed: Float[Array, "b D"],
    *,
    num_candidates: int,
    interval: float | None,
) -> tuple[Array, ...]:
    """Mean of every coordinate given the observed ones, (b, D); with `interval`, also its lower and upper ends."""
    num_trees = draws.log_joint.shape[0]

    def one_tree(inputs: tuple[Dictionary, Draw]) -> tuple[Array, Array, Array]:
        tree_dictionary, tree_draws = inputs
        candidates = find_candidates(tree_dictionary, tree_draws, x, is_observed, num_candidates)
        scores = candidate_scores(tree_dictionary, tree_draws, candidates)
        mixture = merged_mixture(tree_dictionary, tree_draws, candidates, scores)
        mean, variance = _components(tree_dictionary, mixture, interval is not None)
        return mixture.weight.T, mean, variance

    weight, mean, variance = lax.map(one_tree, (dictionary, draws))
    weight = weight.reshape(-1, x.shape[0], 1) / num_trees
    mean = mean.reshape(-1, *x.shape)
    average = jnp.sum(weight * mean, axis=0)
    if interval is None:
        return (average,)
    deviation = jnp.sqrt(variance.reshape(-1, *x.shape))
    tail = 0.5 * (1.0 - interval)
    lower, upper = (_quantile(level, weight, mean, deviation) for level in (tail, 1.0 - tail))
    return average, lower, upper


@partial(jax.jit, static_argnames=("num_candidates", "num_samples"))
def conditional_draws(
    key: KeyArray,
    dictionary: Dictionary,
    draws: Draw,
    x: Float[Array, "b D"],
    is_observed: Float[Array, "b D"],
    row: Array,
    *,
    num_candidates: int,
    num_samples: int,
) -> Float[Array, "b s D"]:
    """Exact draws of whole rows given their observed part; observed entries are drawn too and mean nothing.

    `row` numbers the rows: a row's draws depend on its number, not on the block it stands in.
    """
    num_trees = draws.log_joint.shape[0]

    def one_tree(inputs: tuple[Dictionary, Draw]) -> tuple[Array, Observed, Array]:
        candidates = find_candidates(*inputs, x, is_observed, num_candidates)
        scores = candidate_scores(*inputs, candidates)
        return candidates.node, candidates.observed, jnp.moveaxis(scores, 0, 1)

    node, observed, scores = lax.map(one_tree, (dictionary, draws))
    scale = jnp.asarray(dictionary.tree.scale)

    def one_draw(row_key: KeyArray, index: Array) -> Array:
        key_tree, key_pair, key_eta, key_eps = jax.random.split(row_key, 4)
        tree = jax.random.randint(key_tree, (), 0, num_trees)
        table = scores[tree, index]
        pair = jax.random.categorical(key_pair, table.reshape(-1))
        draw, slot = pair // table.shape[1], pair % table.shape[1]
        where = node[tree, index, slot]
        seen = jax.tree.map(lambda leaf: leaf[tree, index, slot], observed)
        mean, root = latent_root(seen, draws.neg_log_u[tree, draw, where])
        sigma = jnp.exp(0.5 * draws.log_sigma2[tree, draw, scale[where]])
        normal = jax.random.normal(key_eta, mean.shape, x.dtype)
        eta = mean + sigma * jnp.matmul(normal, root, precision=HIGHEST)
        noise = sigma * jax.random.normal(key_eps, (x.shape[1],), x.dtype)
        basis = dictionary.bases[tree, where]
        return dictionary.centres[tree, where] + jnp.matmul(basis, eta, precision=HIGHEST) + noise

    def one_row(inputs: tuple[Array, Array]) -> Array:
        index, number = inputs
        keys = jax.random.split(jax.random.fold_in(key, number), num_samples)
        return lax.map(lambda k: one_draw(k, index), keys, batch_size=32)

    return lax.map(one_row, (jnp.arange(x.shape[0]), row))
