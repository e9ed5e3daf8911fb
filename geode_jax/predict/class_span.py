"""Log densities of rows with missing features, where classes are densities of reduced coordinates.

With r coordinates w of :mod:`geode_jax.learning.class_span` and noise of variance s on the rest of the D features,

    x = origin + S w + (I - SS') eps,      w ~ N(c, Sigma),  Sigma = B diag(alpha2) B' + sigma2 I  at a node.

The observed features depend on w only through ``G = S_O'S_O = Q diag(g) Q'`` and ``S_O'(x_O - origin)``. Both are
computed once per row, for all nodes, classes and draws. In the basis ``U = S_O Q g^{-1/2}``, and orthogonal to it,

    cov(U'x_O) = s T,   T = diag(1 - g) + g^{1/2} Q' (Sigma / s) Q g^{1/2},      cov(rest) = s I,

a sum of positive terms even where sigma2 is smaller than s.

Nodes are ranked at the posterior mean of the parameters, first by their centres alone, then with a few leading
directions; the variance along all other directions counts as noise. T is then the diagonal matrix E = diag(1 - g + g
sigma2 / s) plus a matrix of that low rank, and a density takes a small factor only. The best nodes are the candidates,
which are looked at under every draw. The weight of all others is that of the ranking, as a share.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, cholesky, log_det_of, masked_gram, rough_log_marginal
from geode_jax.math.whitening import ObservedRows
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.predict.candidates import (
    DRAWS_AT_ONCE,
    Candidates,
    Parameters,
    is_not_negligible,
    largest_rise,
    log_density_of,
    log_share_of,
    mean_parameters,
    scores_by_draw,
)
from geode_jax.predict.nodes import SCREEN_RANK

# So many times the number of candidates are kept of a tree's nodes by their centres alone.
_KEPT_TIMES = 8


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
    # smaller ones, of coordinates that are not shown, may be rounding errors
    least = (4.0 + gain.shape[1]) * jnp.finfo(gain.dtype).eps * gain.max(axis=1, keepdims=True)
    gain = jnp.clip(jnp.where(gain > least, gain, 0.0), 0.0, 1.0)
    centred = is_observed * (x - origin)
    turned = jnp.einsum("bD,Dr,brs->bs", centred, basis, axes, precision=HIGHEST)
    value = jnp.where(gain > 0.0, turned / jnp.sqrt(jnp.where(gain > 0.0, gain, 1.0)), 0.0)
    back = jnp.where(gain > 0.0, value / jnp.sqrt(jnp.where(gain > 0.0, gain, 1.0)), 0.0)
    within = is_observed * jnp.einsum("bs,brs,Dr->bD", back, axes, basis, precision=HIGHEST)
    rest = jnp.sum(jnp.square(centred - within), axis=1)
    return Shown(gain, axes, value, rest, jnp.broadcast_to(is_observed.sum(axis=1), rest.shape))


class _AtNodes(eqx.Module):
    """What rows show of nodes, axes (b, M, ...).

    `basis`: ``g^{1/2} Q'B``. `off`: ``value - g^{1/2} Q'c``. The others are those of :class:`Shown`.
    """

    basis: Float[Array, "*at r d"]
    off: Float[Array, "*at r"]
    gain: Float[Array, "*at r"]
    rest: Float[Array, "*at"]
    num_observed: Float[Array, "*at"]

    @classmethod
    def of(cls, shown: Shown, dictionary: Dictionary, node: Int[Array, "b M"] | None, rank: int) -> "_AtNodes":
        """At M nodes of each row, with so many directions; None: at all nodes of the tree."""
        vectors = jnp.concatenate([dictionary.bases[..., :rank], dictionary.centres[..., None]], axis=-1)
        if node is None:
            turned = jnp.einsum("brs,kri->bski", shown.axes, vectors, precision=HIGHEST)
        else:
            turned = jnp.einsum("brs,bmri->bsmi", shown.axes, vectors[node], precision=HIGHEST)
        turned = jnp.swapaxes(turned * jnp.sqrt(shown.gain)[:, :, None, None], 1, 2)
        off = shown.value[:, None] - turned[..., -1]
        gain = jnp.broadcast_to(shown.gain[:, None], off.shape)
        rest, num_observed = (
            jnp.broadcast_to(leaf[:, None], off.shape[:2]) for leaf in (shown.rest, shown.num_observed)
        )
        return cls(turned[..., :-1], off, gain, rest, num_observed)


def _over_noise(seen: _AtNodes, at: Parameters, noise: Float[Array, ""]) -> tuple[Array, Array]:
    """Variances along directions, alpha2 / s, (..., d), and the diagonal E, (..., r)."""
    ratio = jnp.exp(at.log_sigma2 - jnp.log(noise))[..., None]
    return jnp.expm1(at.neg_log_u) * ratio, 1.0 - seen.gain + seen.gain * ratio


def _rough_log_density(seen: _AtNodes, at: Parameters, noise: Float[Array, ""]) -> Float[Array, "b M"]:
    """By Woodbury's formula for T divided by E: fast for few directions, but not safe from cancellation.

    `at` has the directions that `seen` has, and the noise that :meth:`Parameters.leading` raises by the others.
    """
    signal, variance = _over_noise(seen, at, noise)
    both = jnp.concatenate([seen.basis, seen.off[..., None]], axis=-1) / jnp.sqrt(variance)[..., None]
    products = jnp.einsum("bmri,bmrj->bmij", both, both, precision=HIGHEST)
    gram, cross, squared = products[..., :-1, :-1], products[..., :-1, -1], products[..., -1, -1]
    log_noise = jnp.broadcast_to(jnp.log(noise), squared.shape)
    rough = rough_log_marginal(gram, cross, squared + seen.rest, seen.num_observed, jnp.log1p(signal), log_noise)
    return rough - 0.5 * jnp.sum(jnp.log(variance), axis=-1)


def _log_density_and_distance(
    seen: _AtNodes, at: Parameters, noise: Float[Array, ""]
) -> tuple[Float[Array, "*at"], Float[Array, "*at"]]:
    """Log density, and the squared Mahalanobis distance of the coordinates that are shown."""
    signal, diagonal = _over_noise(seen, at, noise)
    along = seen.basis * jnp.sqrt(signal)[..., None, :]
    total = jnp.matmul(along, jnp.swapaxes(along, -1, -2), precision=HIGHEST)
    factor = cholesky(total + diagonal[..., None] * jnp.eye(diagonal.shape[-1], dtype=total.dtype))
    solved = lax.linalg.triangular_solve(factor, seen.off[..., None], left_side=True, lower=True)
    distance = jnp.sum(jnp.square(solved), axis=(-2, -1)) / noise
    constant = seen.num_observed * jnp.log(2 * jnp.pi * noise) + log_det_of(factor)
    return -0.5 * (constant + seen.rest / noise + distance), distance


def _rankings(num_nodes: int, rank: int, num_candidates: int) -> list[tuple[int, int]]:
    """How nodes are ranked, step by step: by how many leading directions, and how many nodes are kept then."""
    found, kept = [], _KEPT_TIMES * num_candidates
    if num_nodes >= 2 * kept:
        found.append((0, kept))
    if num_nodes > num_candidates:
        found.append((min(SCREEN_RANK, rank), num_candidates))
    return found


def _find_candidates(
    dictionary: Dictionary, draws: Draw, noise: Float[Array, ""], shown: Shown, num_candidates: int
) -> Candidates[_AtNodes]:
    """The best nodes of one tree at the posterior mean of the parameters."""
    tree, num_rows = dictionary.tree, shown.rest.shape[0]
    parameters, node = mean_parameters(draws, tree), None
    log_share = jnp.zeros(num_rows, shown.rest.dtype)
    for rank, number in _rankings(tree.num_nodes, dictionary.max_rank, num_candidates):
        leading = parameters.leading(rank, dictionary.num_features)
        leading = leading if node is None else leading.at(node)
        scores = leading.log_weights + _rough_log_density(_AtNodes.of(shown, dictionary, node, rank), leading, noise)
        kept, best = lax.top_k(scores, number)
        log_share += log_share_of(kept, scores)
        node = best if node is None else jnp.take_along_axis(node, best, axis=1)
    if node is None:
        node = jnp.broadcast_to(jnp.arange(tree.num_nodes), (num_rows, tree.num_nodes))
    seen = _AtNodes.of(shown, dictionary, node, dictionary.max_rank)
    at = parameters.at(node)
    log_density, distance = _log_density_and_distance(seen, at, noise)
    # with the noise exp(rise) times as large, no distance is shorter than exp(-rise) of what it was
    gain = -0.5 * jnp.expm1(-largest_rise(draws, tree)[node]) * distance
    return Candidates.of(node, seen, log_share, is_not_negligible(at.log_weights + log_density, gain))


@partial(quickly_compiled, static_argnames="num_candidates")
def log_density_reduced(
    dictionary: Dictionary, draws: Draw, noise: Float[Array, ""], shown: Shown, *, num_candidates: int
) -> Float[Array, "b F T"]:
    """Log density of the observed features under every draw of every tree, in model coordinates.

    Under every draw at `num_candidates` nodes of every row; all others count as they are at the posterior mean.
    """

    def one_tree(inputs: tuple[Dictionary, Draw]) -> Array:
        dictionary, draws = inputs
        candidates = _find_candidates(dictionary, draws, noise, shown, num_candidates)

        def score(seen: _AtNodes, at: Parameters) -> Array:
            return at.log_weights + _log_density_and_distance(seen, at, noise)[0]

        return log_density_of(scores_by_draw(score, dictionary.tree, draws, candidates), candidates)

    return jnp.moveaxis(lax.map(one_tree, (dictionary, draws)), 2, 0)


def bytes_per_row(dictionary: Dictionary, num_candidates: int, num_draws: int) -> int:
    """Upper estimate of the memory a row takes in a block."""
    features, rank, left = dictionary.num_features, dictionary.max_rank, dictionary.tree.num_nodes
    steps = [0]
    for directions, kept in _rankings(left, rank, num_candidates):
        steps.append(left * features * (3 * directions + 5))
        left = kept
    numbers = max(*steps, left * features * (4 * rank + 3 * features)) + 4 * features * features
    # a quarter of a pair at once; some more of few rows
    numbers += min(num_draws, DRAWS_AT_ONCE) * features * (rank + features) + 2 * left * num_draws
    return dictionary.centres.dtype.itemsize * numbers
