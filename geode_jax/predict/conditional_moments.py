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

import math
from collections.abc import Iterable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr, ndtri

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int, KeyArray
from geode_jax.math.lowrank import HIGHEST, Observed, latent_root
from geode_jax.math.rows_in_space import RowsInSpace, SeenRows
from geode_jax.math.whitening import NoiseGivenSeen
from geode_jax.model.draw import Draw
from geode_jax.predict.candidates import Candidates, held_share, map_relevant
from geode_jax.predict.mixture import Mixture, merged_mixture, of_each_tree
from geode_jax.predict.nodes import Nodes, TreeNodes

SAMPLES_AT_ONCE = 32  # values drawn for a row, or for several rows, that are worked on at once


class _Wanted(eqx.Module):
    """The missing features to fill in, by `index`; one list for all rows, or one per row.

    `is_there` is 1 at these; where a row has fewer, it is 0 and the index any other.

    `noise`: theirs given that of the observed features; None where the noise of different features is independent.
    """

    index: Int[Array, "#b U"]
    is_there: Float[Array, "#b U"]
    noise: NoiseGivenSeen | None

    @classmethod
    def of(cls, seen: SeenRows, features: Array | None, num_wanted: int) -> "_Wanted":
        """The `features` (None: all) that a row misses, at most `num_wanted`."""
        is_wanted = 1.0 - seen.mask
        if features is not None:
            is_wanted *= jnp.zeros_like(is_wanted).at[:, features].set(1.0)
        is_there, index = lax.top_k(is_wanted, num_wanted)
        return cls(index, is_there, seen.noise_at(index))

    def of_rows(self, rows: Int[Array, "p"]) -> "_Wanted":
        """Those of some rows, in this order."""
        return jax.tree.map(lambda leaf: leaf[rows % leaf.shape[0]], self)

    def placed(self, values: Float[Array, "b *more U"], features: Array | None, num_features: int) -> Array:
        """The values at their features (of the `features`, None: of all), with zeros elsewhere, (b, ..., D')."""

        def of_row(own: Array, index: Array, is_there: Array) -> Array:
            kept = jnp.where(is_there > 0.0, own, 0.0)
            whole = jnp.zeros((*own.shape[:-1], num_features), own.dtype).at[..., index].set(kept)
            return whole if features is None else whole[..., features]

        shape = values.shape[0], self.index.shape[1]
        return jax.vmap(of_row)(values, *(jnp.broadcast_to(one, shape) for one in (self.index, self.is_there)))


def _components(
    own: TreeNodes,
    candidates: Candidates[Observed],
    mixture: Mixture,
    seen: SeenRows,
    wanted: _Wanted,
    with_variance: bool,
) -> tuple[Array, Array]:
    """Mean and variance of the wanted features under every component of one tree, (M, b, U) each.

    0 and 1 for components without weight.
    """
    centres, bases = own.centres, own.bases
    rows, width = mixture.node.shape
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), mixture)

    def of_pairs(pairs: Array) -> tuple[Array, Array]:
        at, row = jax.tree.map(lambda leaf: leaf[pairs], flat), pairs // width
        place, some = own.places(at.node), wanted.of_rows(row)
        if isinstance(seen, RowsInSpace):
            return _in_space(seen, row, centres[place], bases[place], at, some, with_variance)
        here = place[:, None], some.index
        mean, basis, variance = centres[here], bases[here], at.noise[:, None]
        if seen.whitening is not None and some.noise is not None and some.noise.map is not None:
            # what the observed features are off the basis is their noise, which tells of the others' noise
            whitening = seen.whitening.rows(row)
            told = whitening.taken((seen.x[row] - centres[place])[..., None])[..., 0]
            mean += jnp.einsum("psU,ps->pU", some.noise.map, told, precision=HIGHEST)
            shown = bases[place[:, None], whitening.index]
            basis -= jnp.einsum("psU,psd->pUd", some.noise.map, shown, precision=HIGHEST)
            if with_variance:
                variance *= some.noise.variance
        mean += jnp.einsum("pUd,pd->pU", basis, at.mean, precision=HIGHEST)
        if not with_variance:
            return mean, variance
        spread = jnp.einsum("pUd,pde->pUe", basis, at.covariance, precision=HIGHEST)
        variance += jnp.maximum(jnp.sum(spread * basis, axis=-1), 0.0)
        return mean, jnp.where(some.is_there > 0.0, variance, 1.0)  # an observed feature may have none

    empty = jnp.zeros((rows * width, wanted.index.shape[1]), centres.dtype)
    found = map_relevant(of_pairs, candidates, (empty, empty[:, : None if with_variance else 1] + 1.0))
    mean, variance = (jnp.swapaxes(leaf.reshape(rows, width, -1), 0, 1) for leaf in found)
    return mean, variance


def _in_space(
    seen: RowsInSpace,
    row: Int[Array, "k"],
    centre: Float[Array, "k p1"],
    basis: Float[Array, "k p1 d"],
    at: Mixture,
    wanted: _Wanted,
    with_variance: bool,
) -> tuple[Array, Array]:
    """:func:`_components` for rows and nodes in a space that holds all of these, (k, U) each."""
    index = jnp.broadcast_to(wanted.index, (centre.shape[0], wanted.index.shape[1]))
    point = centre + jnp.einsum("kpd,kd->kp", basis, at.mean, precision=HIGHEST)
    variance = at.noise[:, None]
    if seen.given is not None and wanted.noise is not None:
        # what the observed features are off the point is their noise, which tells of the others' noise
        point, basis = lax.map(lambda pair: _told(seen, *pair), (row, point, basis))
        if with_variance:
            variance *= wanted.noise.variance
    mean = jnp.take_along_axis(seen.space.features(point), index, axis=1)
    if not with_variance:
        return mean, variance

    def spread(pair: tuple[Array, Array, Array]) -> Float[Array, "U"]:
        basis, covariance, index = pair
        along = seen.space.coloured(basis[:-1].T).T
        own = jnp.matmul(seen.space.axes[index], along, precision=HIGHEST)  # copies U p numbers: one pair at a time
        return jnp.sum(jnp.matmul(own, covariance, precision=HIGHEST) * own, axis=-1)

    of_signal = lax.map(spread, (basis, at.covariance, index))
    variance += jnp.maximum(of_signal, 0.0)
    return mean, jnp.where(wanted.is_there > 0.0, variance, 1.0)


def _told(
    seen: RowsInSpace,
    row: Int[Array, ""],
    point: Float[Array, "p1"],
    basis: Float[Array, "p1 d"],
    noise: Float[Array, "D"] | None = None,
) -> tuple[Float[Array, "p1"], Float[Array, "p1 d"]]:
    """A point of the space and a basis there, with the noise that a row's observed features tell of.

    `noise`: what of it is known at the observed features, 0 elsewhere.
    """
    assert seen.given is not None
    assert seen.space.root is not None
    given, root = seen.given.of_row(row), seen.space.root
    step = given.base + jnp.matmul(given.told, seen.own[row] - point[:-1], precision=HIGHEST)
    if noise is not None:
        along = jnp.matmul(noise, seen.space.axes[:, : root.num_axes], precision=HIGHEST) * root.excess / root.outside
        step -= jnp.matmul(jnp.matmul(given.spread, along, precision=HIGHEST), given.spread, precision=HIGHEST)
    turned = jnp.matmul(given.told, basis[:-1], precision=HIGHEST)
    some = slice(root.num_axes)
    return point.at[some].add(step / root.ratio), basis.at[some].add(-turned / root.ratio[:, None])


def tails(levels: Iterable[float]) -> np.ndarray:
    """Levels in (0, 1) as :func:`conditional_summary` takes them: the mass below, or that above with a minus sign.

    float32 resolves levels near 0, not near 1.
    """
    return np.array([level if level <= 0.5 else level - 1.0 for level in levels])


def _quantile(tail: Float[Array, ""], weight: Array, mean: Array, deviation: Array) -> Array:
    """Quantile of a mixture of normals per coordinate by bisection; components on axis 0. `tail`: see :func:`tails`.

    It lies between the smallest and the largest quantile of the components that have weight.
    """
    level, side = jnp.abs(tail), jnp.sign(tail)
    mean = side * mean
    own = mean + deviation * ndtri(level)
    has_weight = weight > jnp.finfo(mean.dtype).eps
    low = jnp.where(has_weight, own, jnp.inf).min(axis=0)
    high = jnp.where(has_weight, own, -jnp.inf).max(axis=0)

    def halve(_: Array, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (bracket[0] + bracket[1])
        below = jnp.sum(weight * ndtr((middle - mean) / deviation), axis=0) < level
        return jnp.where(below, middle, bracket[0]), jnp.where(below, bracket[1], middle)

    steps = 50 if mean.dtype == jnp.float64 else 24  # one for every bit of the bracket
    low, high = lax.fori_loop(0, steps, halve, (low, high))
    return side * 0.5 * (low + high)


def _moments(weight: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Mean and variance of every coordinate of a mixture, (b, D) each; components on axis 0."""
    average = jnp.sum(weight * mean, axis=0)
    return average, jnp.sum(weight * (variance + jnp.square(mean - average)), axis=0)


def _pool(
    by_tree: Float[Array, "F b U"], variance: Float[Array, "F b U"], is_missing: Float[Array, "#b U"]
) -> tuple[Array, Array]:
    """Mean of the trees' conditional distributions, (b, U), and the factor to shrink them towards it, (b, 1).

    `is_missing` is 1 at what is filled in, and 0 elsewhere.

    Calibrated trees cannot disagree more than trees with independent errors, ``B = (1 - 1/F) W``. Trees that do
    disagree more are overconfident; the squared error of the mean is then estimated from B alone, as ``B / (F - 1)``,
    which is right for independent errors.
    """
    average = by_tree.mean(axis=0)
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


@partial(quickly_compiled, static_argnames=("num_candidates", "num_wanted"))
def conditional_summary(
    nodes: Nodes,
    draws: Draw,
    features: Array | None,
    levels: Float[Array, "l"] | None,
    seen: SeenRows,
    *,
    num_candidates: int,
    num_wanted: int,
) -> tuple[Array, ...]:
    """The share of a row's weight that its candidates hold, (b,), and the mean of the `features` (None: all) given the
    observed ones, (b, D'); zeros at those that are observed.

    With `levels`, as :func:`tails` gives them, also the factor by which the distribution is shrunk towards its mean,
    (b, 1), the standard deviation, and the quantiles: other levels need no other program. `num_wanted`: the most
    missing features that a row is to be filled in at.
    """
    num_trees, num_features = draws.log_joint.shape[0], seen.mask.shape[1]
    wanted = _Wanted.of(seen, features, num_wanted)

    def one_tree(own: TreeNodes, draws: Draw, candidates: Candidates[Observed]) -> tuple[Array, ...]:
        candidates, mixture, _ = merged_mixture(own.tree, draws, candidates)
        mean, variance = _components(own, candidates, mixture, seen, wanted, levels is not None)
        return candidates.log_share, mixture.weight.T[..., None], mean, variance

    log_share, weight, mean, variance = of_each_tree(one_tree, nodes, draws, seen, num_candidates)
    share = held_share(log_share)
    if levels is None:
        return share, wanted.placed(jnp.sum(weight * mean, axis=1).mean(axis=0), features, num_features)
    average, factor = _pool(*jax.vmap(_moments)(weight, mean, variance), wanted.is_there)
    # all components of all trees on one axis
    weight = weight.reshape(-1, seen.num_rows, 1) / num_trees
    mean = average + factor * (mean.reshape(-1, *average.shape) - average)
    deviation = factor * jnp.sqrt(variance.reshape(-1, *average.shape))
    spread = jnp.sqrt(_moments(weight, mean, jnp.square(deviation))[1])
    quantiles = (_quantile(levels[number], weight, mean, deviation) for number in range(levels.size))
    average, spread, *ends = (wanted.placed(one, features, num_features) for one in (average, spread, *quantiles))
    return share, average, factor, spread, *ends


@partial(quickly_compiled, static_argnames=("num_candidates", "num_samples", "num_wanted"))
def conditional_draws(
    key: KeyArray,
    nodes: Nodes,
    draws: Draw,
    features: Array | None,
    seen: SeenRows,
    row: Int[Array, "b"],
    *,
    num_candidates: int,
    num_samples: int,
    num_wanted: int,
) -> tuple[Float[Array, "b"], Float[Array, "b s _"]]:
    """The share of a row's weight that its candidates hold, and draws of the `features` (None: all) given the observed
    ones; zeros at those that are observed.

    Exact draws from the average of the trees, shrunk towards its mean like the intervals. `row`: the numbers of the
    rows; a row's draws depend on the key and on its number, not on the block that it is in. `num_wanted` as in
    :func:`conditional_summary`.
    """
    dictionary = nodes.dictionary
    num_trees, num_features = draws.log_joint.shape[0], seen.mask.shape[1]
    wanted = _Wanted.of(seen, features, num_wanted)

    def one_tree(
        own: TreeNodes, draws: Draw, candidates: Candidates[Observed]
    ) -> tuple[Array, Array, Observed, Array, Array, Array]:
        relevant, mixture, scores = merged_mixture(own.tree, draws, candidates)
        components = _components(own, relevant, mixture, seen, wanted, True)
        moments = _moments(mixture.weight.T[..., None], *components)
        return candidates.log_share, candidates.node, candidates.observed, jnp.moveaxis(scores, 0, 1), *moments

    log_share, node, observed, scores, by_tree, variance = of_each_tree(one_tree, nodes, draws, seen, num_candidates)
    average, factor = _pool(by_tree, variance, wanted.is_there)
    dtype = average.dtype
    scale = jnp.asarray(dictionary.tree.scale)

    def one_draw(row_key: KeyArray, index: Array) -> Array:
        key_tree, key_pair, key_eta, key_eps = jax.random.split(row_key, 4)
        tree = jax.random.randint(key_tree, (), 0, num_trees)
        table = scores[tree, index]
        pair = jax.random.categorical(key_pair, table.reshape(-1))
        draw, slot = pair // table.shape[1], pair % table.shape[1]
        where = node[tree, index, slot]
        at_node = jax.tree.map(lambda leaf: leaf[tree, index, slot], observed)
        latent, root = latent_root(at_node, draws.neg_log_u[tree, draw, where])
        sigma = jnp.exp(0.5 * draws.log_sigma2[tree, draw, scale[where]])
        normal = jax.random.normal(key_eta, latent.mean.shape, dtype)
        eta = latent.mean + sigma * jnp.matmul(normal, root, precision=HIGHEST)
        noise = sigma * jax.random.normal(key_eps, (num_features,), dtype)
        own = wanted.of_rows(index[None])
        missing = own.index[0]
        if isinstance(seen, RowsInSpace):
            basis = dictionary.bases[tree, where]
            point = dictionary.centres[tree, where] + jnp.matmul(basis, eta, precision=HIGHEST)
            if seen.given is not None:
                # a joint draw of all features, corrected by its error at the observed ones (Matheron's rule)
                noise = seen.space.noise(noise)
                point = _told(seen, index, point, basis, seen.mask[index % seen.mask.shape[0]] * noise)[0]
            drawn = seen.space.features(point)[missing] + noise[missing]
        elif seen.whitening is None or own.noise is None:
            basis = dictionary.bases[tree, where, missing]
            drawn = dictionary.centres[tree, where, missing] + jnp.matmul(basis, eta, precision=HIGHEST)
            drawn += noise[missing]
        else:
            # a joint draw of all features, corrected by its error at the observed ones (Matheron's rule)
            whole = dictionary.centres[tree, where] + jnp.matmul(dictionary.bases[tree, where], eta, precision=HIGHEST)
            whole += jnp.matmul(seen.whitening.noise.root, noise, precision=HIGHEST)
            off = seen.whitening.rows(index[None]).taken((seen.x[index] - whole)[None, :, None])[0, :, 0]
            assert own.noise.map is not None
            drawn = whole[missing] + jnp.matmul(off, own.noise.map[0], precision=HIGHEST)
        return average[index] + factor[index] * (drawn - average[index])

    num_rows = seen.num_rows
    number = num_rows * num_samples
    keys = jax.vmap(lambda own: jax.random.split(jax.random.fold_in(key, own), num_samples))(row).reshape(number)
    index = jnp.repeat(jnp.arange(num_rows), num_samples)
    # the same number at a time throughout: a remainder would be compiled as well; one where each copies large matrices
    at_once = 1 if isinstance(seen, RowsInSpace) and seen.given is not None else math.gcd(number, SAMPLES_AT_ONCE)
    drawn = lax.map(lambda inputs: one_draw(*inputs), (keys, index), batch_size=at_once)
    return held_share(log_share), wanted.placed(drawn.reshape(num_rows, num_samples, -1), features, num_features)
