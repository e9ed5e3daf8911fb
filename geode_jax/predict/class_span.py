"""Log densities of rows with missing features, where classes are densities of reduced coordinates.

With r coordinates w of :mod:`geode_jax.learning.class_span` and noise of variance s on the rest of the D features,

    x = origin + S w + (I - SS') eps,      w ~ N(c, Sigma),  Sigma = B diag(alpha2) B' + sigma2 I  at a node.

The observed features depend on w only through ``G = S_O'S_O = Q diag(g) Q'`` and ``S_O'(x_O - origin)``. Both are
computed once per row, for all nodes, classes and draws. In the basis ``U = S_O Q g^{-1/2}``, and orthogonal to it,

    cov(U'x_O) = s T,   T = diag(1 - g) + g^{1/2} Q' (Sigma / s) Q g^{1/2},      cov(rest) = s I,

a sum of positive terms even where sigma2 is smaller than s.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, log_det_of, masked_gram
from geode_jax.math.whitening import ObservedRows
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.predict.density import log_scores

# A coordinate of smaller gain counts as not observed.
_NOT_SHOWN = 1e-5


class Shown(eqx.Module):
    """What the observed features of rows say about their coordinates.

    `gain`: g. `axes`: Q. `value`: U'(x_O - origin). `rest`: squared norm of x_O - origin orthogonal to U.
    `num_observed`: |O|.
    """

    gain: Float[Array, "b r"]
    axes: Float[Array, "b r r"]
    value: Float[Array, "b r"]
    rest: Float[Array, "b"]
    num_observed: Float[Array, "b"]


@jax.jit
def show(origin: Float[Array, "D"], basis: Float[Array, "D r"], seen: ObservedRows) -> Shown:
    """Reduce rows with missing features to :class:`Shown`; values at missing features are ignored."""
    x, is_observed = seen.x, seen.mask
    gain, axes = jnp.linalg.eigh(masked_gram(is_observed, basis))
    gain, axes = (jnp.broadcast_to(part, (x.shape[0], *part.shape[1:])) for part in (gain, axes))
    gain = jnp.clip(jnp.where(gain > _NOT_SHOWN, gain, 0.0), 0.0, 1.0)
    centred = is_observed * (x - origin)
    turned = jnp.einsum("bD,Dr,brs->bs", centred, basis, axes, precision=HIGHEST)
    value = jnp.where(gain > 0.0, turned / jnp.sqrt(jnp.where(gain > 0.0, gain, 1.0)), 0.0)
    back = jnp.where(gain > 0.0, value / jnp.sqrt(jnp.where(gain > 0.0, gain, 1.0)), 0.0)
    within = is_observed * jnp.einsum("bs,brs,Dr->bD", back, axes, basis, precision=HIGHEST)
    rest = jnp.sum(jnp.square(centred - within), axis=1)
    return Shown(gain, axes, value, rest, jnp.broadcast_to(is_observed.sum(axis=1), rest.shape))


class _Component(eqx.Module):
    """Parameters of the candidate nodes of rows, axes (b, M, ...)."""

    centre: Float[Array, "b M r"]
    basis: Float[Array, "b M r d"]
    alpha2: Float[Array, "b M d"]
    sigma2: Float[Array, "b M"]


def _component(dictionary: Dictionary, draw: Draw, node: Int[Array, "b M"]) -> _Component:
    sigma2 = jnp.exp(draw.log_sigma2)[jnp.asarray(dictionary.tree.scale)][node]
    alpha2 = sigma2[..., None] * jnp.expm1(draw.neg_log_u[node])
    return _Component(dictionary.centres[node], dictionary.bases[node], alpha2, sigma2)


def _turned(shown: Shown, vectors: Float[Array, "b M r k"]) -> Float[Array, "b M r k"]:
    """``g^{1/2} Q' v`` of column vectors."""
    return jnp.sqrt(shown.gain)[:, None, :, None] * jnp.einsum("brs,bmrk->bmsk", shown.axes, vectors, precision=HIGHEST)


def _factored(
    shown: Shown, at: _Component, noise: Float[Array, ""]
) -> tuple[Float[Array, "b M r r"], Float[Array, "b M r"]]:
    """Cholesky factor L of T, and ``L^{-1} (value - g^{1/2} Q'c)``."""
    rank = at.centre.shape[-1]
    along = _turned(shown, at.basis * jnp.sqrt(at.alpha2 / noise)[..., None, :])
    diagonal = 1.0 - shown.gain[:, None] + shown.gain[:, None] * (at.sigma2 / noise)[..., None]
    total = jnp.einsum("bmri,bmsi->bmrs", along, along, precision=HIGHEST)
    factor = jnp.linalg.cholesky(total + diagonal[..., None] * jnp.eye(rank, dtype=total.dtype))
    off = shown.value[:, None, :, None] - _turned(shown, at.centre[..., None])
    return factor, lax.linalg.triangular_solve(factor, off, left_side=True, lower=True)[..., 0]


def _log_density(shown: Shown, at: _Component, noise: Float[Array, ""]) -> Float[Array, "b M"]:
    factor, solved = _factored(shown, at, noise)
    quadratic = (shown.rest[:, None] + jnp.sum(jnp.square(solved), axis=-1)) / noise
    return -0.5 * (shown.num_observed[:, None] * jnp.log(2 * jnp.pi * noise) + log_det_of(factor) + quadratic)


def _coordinates_at_root(dictionary: Dictionary, mean: Draw, noise: Array, shown: Shown) -> Float[Array, "b r"]:
    """Mean of the coordinates given the observed features, under the root node alone."""
    at = _component(dictionary, mean, jnp.zeros((shown.rest.shape[0], 1), jnp.int32))
    factor, solved = _factored(shown, at, noise)
    weight = lax.linalg.triangular_solve(factor, solved[..., None], left_side=True, lower=True, transpose_a=True)
    pulled = jnp.einsum("brs,bs->br", shown.axes, jnp.sqrt(shown.gain) * weight[:, 0, :, 0], precision=HIGHEST)
    along = jnp.einsum("bri,br->bi", at.basis[:, 0], pulled, precision=HIGHEST)
    spread = jnp.einsum("bri,bi->br", at.basis[:, 0], at.alpha2[:, 0] * along, precision=HIGHEST)
    return at.centre[:, 0] + (spread + at.sigma2[:, :1] * pulled) / noise


@partial(quickly_compiled, static_argnames="num_candidates")
def log_density_reduced(
    dictionary: Dictionary, draws: Draw, noise: Float[Array, ""], shown: Shown, *, num_candidates: int
) -> Float[Array, "b F T"]:
    """Log density of the observed features under every draw of every tree, in model coordinates.

    Summed over the `num_candidates` nodes that score best at the row's coordinates as the root node predicts them.
    """

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        dictionary, draws = inputs
        num_nodes = dictionary.tree.num_nodes
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0, keepdims=True), draws)
        if num_candidates < num_nodes:
            root = jax.tree.map(lambda leaf: leaf[0], mean)
            filled = _coordinates_at_root(dictionary, root, noise, shown)
            node = lax.top_k(log_scores(dictionary, mean, filled)[..., 0], num_candidates)[1]
        else:
            node = jnp.broadcast_to(jnp.arange(num_nodes), (shown.rest.shape[0], num_nodes))

        def of_draw(draw: Draw) -> Array:
            log_density = _log_density(shown, _component(dictionary, draw, node), noise)
            return jax.nn.logsumexp(draw.log_weights[node] + log_density, axis=1)

        return lax.map(of_draw, draws)

    return jnp.moveaxis(lax.map(one_tree, (dictionary, draws)), 2, 0)


def bytes_per_row(dictionary: Dictionary, num_candidates: int) -> int:
    """Upper estimate of the memory a row takes in a block."""
    features, rank = dictionary.num_features, dictionary.max_rank
    numbers = num_candidates * features * (3 * rank + 3 * features) + 4 * features * features
    return dictionary.centres.dtype.itemsize * (numbers + dictionary.tree.num_nodes * (rank + 2))
