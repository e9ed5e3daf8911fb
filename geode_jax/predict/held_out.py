"""Leave-one-out densities of training rows, which densities of new rows can be compared with.

A training row's statistics come from dictionaries that never saw it (cross-fitting), so only the few parameters of its
node depend on it. Dividing its likelihood out of the posterior draws removes that dependence too: leave-one-out by
importance sampling. The ratios ``1 / p(x | draw)`` are truncated at their mean times the square root of their number
(Ionides 2008), which bounds their variance (Vehtari, Gelman & Gabry 2017 on the use for predictive densities).
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._checks import check_instance
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, Float
from geode_jax.forest.forest import Forest
from geode_jax.model.candidate_statistics import AnyStatistics, CandidateStatistics, Probe
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.model.on_host import on_host
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.constants import log_density_of_constants
from geode_jax.predict.density import log_density_of_statistics, lost_shares

NUM_DRAWS = 100


def held_out_log_density(forest: Forest, posterior: Posterior) -> Float[np.ndarray, "n"]:
    """Leave-one-out log density, in nats and the data's units, of the complete training rows in their order.

    `posterior` holds draws for `forest`. Complete are rows that miss no feature which varies; those that never vary
    count as observed. Rows with missing features are left out, as densities of different features
    cannot be compared. If rows have candidate nodes, the other nodes are ignored. Without cross-fitting the dictionary
    was learned from the row, and the density is too high.

    Raises ValueError if the draws are for another forest: :func:`geode_jax.fit` learns one of its own, which
    :func:`geode_jax.learn_forest` does not give again. Pass that from which :func:`geode_jax.sample_posterior` drew.
    """
    check_instance(forest, "forest", Forest)
    check_instance(posterior, "posterior", Posterior)
    _check_same(forest, posterior)
    with jax_settings(posterior.dtype):
        num_rows = int(forest.statistics.num_rows[0])
        draws = jax.device_put(posterior.thin(NUM_DRAWS))
        by_tree = _by_tree(forest, draws).astype(np.float64)
    of_constants = log_density_of_constants(posterior, posterior.shift[None])[0]
    averaged = np.logaddexp.reduce(by_tree[:, :num_rows], axis=0) - np.log(by_tree.shape[0])
    return averaged + posterior.log_jacobian + of_constants


def _check_same(forest: Forest, posterior: Posterior) -> None:
    pairs = {
        "settings": (forest.dictionary_settings, posterior.dictionary_settings),
        "trees": (forest.dictionary.tree.is_present, posterior.dictionary.tree.is_present),
        "origin": (forest.shift, posterior.shift),
        "units": (forest.scale, posterior.scale),
    }
    if (forest.row_space is None) == (posterior.row_space is None):  # else it was spread out, to other coordinates
        pairs["centres"] = forest.dictionary.centres, posterior.dictionary.centres
    for name, (own, given) in pairs.items():
        if not (own == given if name == "settings" else np.array_equal(np.asarray(own), np.asarray(given))):
            raise ValueError(f"posterior: expected draws for this forest, got draws for one with other {name}")


def _by_tree(forest: Forest, draws: Draw) -> Float[np.ndarray, "F n"]:
    """Leave-one-out log densities under every tree; places without a row have arbitrary ones."""
    statistics = forest.statistics
    if not isinstance(statistics.residual, np.ndarray):
        return np.asarray(_leave_one_out(forest.dictionary, draws, statistics))
    # they are on the host as no device need hold them all: one part of the rows of one tree at a time
    found = np.empty((forest.num_trees, statistics.is_row.shape[1]), forest.dtype)
    for tree in range(forest.num_trees):
        one = jax.tree.map(lambda leaf, at=tree: leaf[at : at + 1], (forest.dictionary, draws, statistics))
        for place, part in _parts(one[2]):
            found[tree, place] = np.asarray(_leave_one_out(*one[:2], part))[0]
    return found


def _parts(statistics: AnyStatistics) -> Iterator[tuple[slice, AnyStatistics]]:
    """Statistics of some rows each, and the places of these rows."""
    num_places = statistics.is_row.shape[-1]
    has_candidates = isinstance(statistics, CandidateStatistics)
    number = statistics.residual.shape[1] if has_candidates else math.gcd(num_places, statistics.row_blocks)
    size = num_places // number
    for shard in range(number):
        place, own = slice(shard * size, (shard + 1) * size), slice(shard, shard + 1)
        by_shard = ("residual", "squared", "block_node") if has_candidates else ()
        by_place = ("node", "position") if has_candidates else ("residual", "squared")
        fields = {name: getattr(statistics, name)[:, own] for name in by_shard}
        fields |= {name: getattr(statistics, name)[:, :, place] for name in by_place}
        yield place, on_host(type(statistics), num_rows=statistics.num_rows, **fields)


@jax.jit
def _leave_one_out(dictionary: Dictionary, draws: Draw, statistics: AnyStatistics) -> Float[Array, "F n"]:
    def one_tree(inputs: tuple[Dictionary, Draw, AnyStatistics]) -> Array:
        log_density = log_density_of_statistics(*inputs)
        num_draws = log_density.shape[1]
        log_mean = jax.nn.logmeanexp(-log_density, axis=1, keepdims=True)
        log_ratio = jnp.minimum(-log_density, log_mean + 0.5 * jnp.log(num_draws))
        return jax.nn.logsumexp(log_ratio + log_density, axis=1) - jax.nn.logsumexp(log_ratio, axis=1)

    return lax.map(one_tree, (dictionary, draws, statistics))


def lost_mass(forest: Forest, posterior: Posterior) -> Float[np.ndarray, "F"] | None:
    """Mean posterior probability that a complete row is at none of its candidate nodes, for every tree.

    Averaged over the forest's probe rows, which have statistics at all nodes. None if all nodes are candidates.
    """
    if forest.probe is None:
        return None
    with jax_settings(posterior.dtype):
        draws = jax.device_put(posterior.thin(NUM_DRAWS))
        return np.asarray(_lost_mass(forest.dictionary, draws, forest.probe), np.float64)


@jax.jit
def _lost_mass(dictionary: Dictionary, draws: Draw, probe: Probe) -> Float[Array, "F"]:
    return lax.map(lambda inputs: lost_shares(*inputs).mean(), (dictionary, draws, probe))
