"""Imputation of missing features: conditional means, central intervals, draws.

**Trees.** The conditional distributions of a row under the F trees are averaged with equal weights. This mixture is too
wide: even if every tree is calibrated, the errors of the trees partly cancel in the mean, while their disagreement adds
to the variance of the mixture. With W the mean of the trees' variances and B the variance of their means, the mixture
has variance W + B, but if each tree's W is right, the squared error of the mean is W - B (Krogh & Vedelsby 1995, the
ambiguity decomposition). So the mixture is shrunk towards its mean by the factor ``sqrt((W - B) / (W + B))``, which is
``sqrt(1 - 2 s)`` with s = B / (W + B), the share of the variance that is disagreement. This is the spread-adjusted pool
of Berrocal, Raftery & Gneiting (2007) and Gneiting & Ranjan (2013), with nothing to tune. A single tree is left
unchanged.

There is one factor per row, of the mean of s over its missing features. Sums of W and of B would depend on the
features' units, and one feature that varies far more than its noise, as a noisy band of a spectrum, would decide for
all. What is averaged is s up to the largest share that calibrated trees have, so that a few features on which trees are
overconfident do not narrow the intervals of the others. s is a concave function of B, so chance in B makes intervals
wider rather than narrower.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import ndtr, ndtri

from geode_jax._typing import Array, Float, KeyArray
from geode_jax.math.lowrank import HIGHEST, Observed, latent_root
from geode_jax.math.whitening import ObservedRows
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.predict.mixture import (
    Candidates,
    Mixture,
    candidate_scores,
    find_candidates,
    map_relevant,
    merged_mixture,
)


class _Wanted(NamedTuple):
    """The `features` to fill in (None: all), and `told`, how the observed features' noise predicts theirs.

    `told` is None where the noise of different features is independent.
    """

    features: Array | None
    told: Array | None


def _components(
    dictionary: Dictionary,
    candidates: Candidates,
    mixture: Mixture,
    seen: ObservedRows,
    wanted: _Wanted,
    with_variance: bool,
) -> tuple[Array, Array]:
    """Mean and variance of the wanted features under every component of one tree, (M, b, D') each.

    0 and 1 for components without weight.
    """
    features, told = wanted
    centres, bases = _rows_of(dictionary, features)
    rows, width = mixture.node.shape
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), mixture)

    def of_pairs(pairs: Array) -> tuple[Array, Array]:
        at, part = jax.tree.map(lambda leaf: leaf[pairs], flat), seen.rows(pairs // width)
        basis, variance = bases[at.node], at.noise[:, None]
        mean = centres[at.node] + jnp.einsum("pDd,pd->pD", basis, at.mean, precision=HIGHEST)
        if part.whitening is not None and told is not None:
            along, own = part.whitening(dictionary.bases[at.node]), told[(pairs // width) % told.shape[0]]
            off = part.whitening((part.x - dictionary.centres[at.node])[..., None])[..., 0]
            off -= jnp.einsum("psd,pd->ps", along, at.mean, precision=HIGHEST)
            mean += jnp.einsum("ps,psD->pD", off, own, precision=HIGHEST)
            if with_variance:
                basis -= jnp.einsum("psD,psd->pDd", own, along, precision=HIGHEST)
                variance *= part.whitening.residual_variance(own, features)
        if not with_variance:
            return mean, variance
        spread = jnp.einsum("pDd,pde->pDe", basis, at.covariance, precision=HIGHEST)
        return mean, variance + jnp.maximum(jnp.sum(spread * basis, axis=-1), 0.0)

    empty = jnp.zeros((rows * width, centres.shape[1]), centres.dtype)
    found = map_relevant(of_pairs, candidates, (empty, empty[:, : None if with_variance else 1] + 1.0))
    mean, variance = (jnp.swapaxes(leaf.reshape(rows, width, -1), 0, 1) for leaf in found)
    return mean, variance


def _rows_of(dictionary: Dictionary, features: Array | None) -> tuple[Array, Array]:
    """Centres and bases of one tree at some features, None being all of them."""
    if features is None:
        return dictionary.centres, dictionary.bases
    return dictionary.centres[:, features], dictionary.bases[:, features]


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


def _moments(weight: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Mean and variance of every coordinate of a mixture, (b, D) each; components on axis 0."""
    average = jnp.sum(weight * mean, axis=0)
    return average, jnp.sum(weight * (variance + jnp.square(mean - average)), axis=0)


def _pool(by_tree: Float[Array, "F b D"], variance: Float[Array, "F b D"], is_observed: Array) -> tuple[Array, Array]:
    """Mean of the trees' conditional distributions, (b, D), and the factor to shrink them towards it, (b, 1).

    Calibrated trees cannot disagree more than trees with independent errors, ``B = (1 - 1/F) W``. Trees that do
    disagree more are overconfident; the squared error of the mean is then estimated from B alone, as ``B / (F - 1)``,
    which is right for independent errors.
    """
    average = by_tree.mean(axis=0)
    is_missing = 1.0 - is_observed
    between = jnp.square(by_tree - average).mean(axis=0)
    total = variance.mean(axis=0) + between
    share = jnp.where(total > 0.0, between / jnp.where(total > 0.0, total, 1.0), 0.0)
    count = jnp.maximum(is_missing.sum(axis=1, keepdims=True), 1.0)

    def mean(values: Array) -> Array:
        return jnp.sum(values * is_missing, axis=1, keepdims=True) / count

    num_trees = by_tree.shape[0]
    most = (num_trees - 1) / (2 * num_trees - 1)  # s of calibrated trees with independent errors
    squared = jnp.maximum(1.0 - 2.0 * mean(jnp.minimum(share, most)), mean(share) / max(num_trees - 1, 1))
    return average, jnp.sqrt(squared)


def _at(values: Float[Array, "*b D"], features: Array | None) -> Float[Array, "*b _"]:
    return values if features is None else values[..., features]


@partial(jax.jit, static_argnames=("num_candidates", "levels"))
def conditional_summary(
    dictionary: Dictionary,
    draws: Draw,
    seen: ObservedRows,
    features: Array | None,
    *,
    num_candidates: int,
    levels: tuple[float, ...] | None,
) -> tuple[Array, ...]:
    """Mean of the `features` (None: all) given the observed ones, (b, D').

    With `levels`, also the factor by which the distribution is shrunk towards its mean, (b, 1), the standard deviation,
    and the quantiles.
    """
    num_trees = draws.log_joint.shape[0]
    wanted = _Wanted(features, None if seen.whitening is None else seen.whitening.noise_map(features))

    def one_tree(inputs: tuple[Dictionary, Draw]) -> tuple[Array, Array, Array]:
        tree_dictionary, tree_draws = inputs
        candidates = find_candidates(tree_dictionary, tree_draws, seen, num_candidates)
        scores = candidate_scores(tree_dictionary, tree_draws, candidates)
        candidates, mixture = merged_mixture(tree_dictionary, tree_draws, candidates, scores)
        mean, variance = _components(tree_dictionary, candidates, mixture, seen, wanted, levels is not None)
        return mixture.weight.T[..., None], mean, variance

    weight, mean, variance = lax.map(one_tree, (dictionary, draws))
    if levels is None:
        return (jnp.sum(weight * mean, axis=1).mean(axis=0),)
    average, factor = _pool(*jax.vmap(_moments)(weight, mean, variance), _at(seen.mask, features))
    # all components of all trees on one axis
    weight = weight.reshape(-1, seen.x.shape[0], 1) / num_trees
    mean = average + factor * (mean.reshape(-1, *average.shape) - average)
    deviation = factor * jnp.sqrt(variance.reshape(-1, *average.shape))
    spread = jnp.sqrt(_moments(weight, mean, jnp.square(deviation))[1])
    return average, factor, spread, *(_quantile(level, weight, mean, deviation) for level in levels)


@partial(jax.jit, static_argnames=("num_candidates", "num_samples"))
def conditional_draws(
    row_keys: KeyArray,
    model: tuple[Dictionary, Draw],
    seen: ObservedRows,
    features: Array | None,
    *,
    num_candidates: int,
    num_samples: int,
) -> Float[Array, "b s _"]:
    """Draws of the `features` (None: all) of rows given the observed ones; values drawn at observed ones are no use.

    Exact draws from the average of the trees, shrunk towards its mean like the intervals. `row_keys`, (b,): a row's
    draws depend on its key, not on the block that the row is in.
    """
    dictionary, draws = model
    num_trees = draws.log_joint.shape[0]
    told = None if seen.whitening is None else seen.whitening.noise_map(None)
    wanted = _Wanted(features, None if told is None else _at(told, features))

    def one_tree(inputs: tuple[Dictionary, Draw]) -> tuple[Array, Observed, Array, Array, Array]:
        candidates = find_candidates(*inputs, seen, num_candidates)
        scores = candidate_scores(*inputs, candidates)
        relevant, mixture = merged_mixture(*inputs, candidates, scores)
        moments = _moments(
            mixture.weight.T[..., None],
            *_components(inputs[0], relevant, mixture, seen, wanted, True),
        )
        return candidates.node, candidates.observed, jnp.moveaxis(scores, 0, 1), *moments

    node, observed, scores, by_tree, variance = lax.map(one_tree, model)
    average, factor = _pool(by_tree, variance, _at(seen.mask, features))
    # with a noise covariance the observed features are drawn too: their noise predicts that of the others
    shown = features if seen.whitening is None else None
    centres, bases = jax.vmap(_rows_of, in_axes=(0, None))(dictionary, shown)
    dtype = seen.x.dtype
    scale = jnp.asarray(dictionary.tree.scale)

    def one_draw(row_key: KeyArray, index: Array) -> Array:
        key_tree, key_pair, key_eta, key_eps = jax.random.split(row_key, 4)
        tree = jax.random.randint(key_tree, (), 0, num_trees)
        table = scores[tree, index]
        pair = jax.random.categorical(key_pair, table.reshape(-1))
        draw, slot = pair // table.shape[1], pair % table.shape[1]
        where = node[tree, index, slot]
        at_node = jax.tree.map(lambda leaf: leaf[tree, index, slot], observed)
        mean, root = latent_root(at_node, draws.neg_log_u[tree, draw, where])
        sigma = jnp.exp(0.5 * draws.log_sigma2[tree, draw, scale[where]])
        normal = jax.random.normal(key_eta, mean.shape, dtype)
        eta = mean + sigma * jnp.matmul(normal, root, precision=HIGHEST)
        noise = sigma * jax.random.normal(key_eps, (centres.shape[2],), dtype)
        drawn = centres[tree, where] + jnp.matmul(bases[tree, where], eta, precision=HIGHEST)
        whitening = seen.rows(index[None]).whitening
        if whitening is None or told is None:
            drawn += noise
        else:
            # a joint draw of all features, corrected by its error at the observed ones (Matheron's rule)
            drawn += jnp.matmul(whitening.root, noise, precision=HIGHEST)
            off = whitening((seen.x[index] - drawn)[None, :, None])[0, :, 0]
            drawn = _at(drawn + jnp.matmul(off, told[index % told.shape[0]], precision=HIGHEST), features)
        return average[index] + factor[index] * (drawn - average[index])

    def one_row(inputs: tuple[Array, Array]) -> Array:
        index, row_key = inputs
        keys = jax.random.split(row_key, num_samples)
        return lax.map(lambda k: one_draw(k, index), keys, batch_size=32)

    return lax.map(one_row, (jnp.arange(seen.x.shape[0]), row_keys))
