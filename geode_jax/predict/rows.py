"""What all predictions share: checks of arguments, units, moving draws to the device, memory per row."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

from geode_jax._checks import check_data, check_instance, check_integer
from geode_jax._runtime.blas import lapack_turn, one_blas_thread
from geode_jax._runtime.devices import everywhere, mesh_of, on_one
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, ArrayLike
from geode_jax.math.rows_in_space import SeenRows, Space, observe_in_space, outside_deviation
from geode_jax.math.whitening import SharedNoise, observe_rows
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.distance import by_distance
from geode_jax.predict.mixture import bytes_in_space, bytes_per_row, log_density_partial
from geode_jax.predict.nodes import Nodes, Ranking, has_span
from geode_jax.predict.row_blocks import ON_CPU, map_row_blocks
from geode_jax.rows.frame import to_model

# Draws per tree that predictions average over: enough that the Monte Carlo error of a row's log density, or of its
# missing values, is far below the posterior spread (`python -m benchmarks.thinning`). Every draw of a partial row costs
# a Cholesky factor per candidate node, and where values are filled in also a covariance.
DENSITY_DRAWS = 200
PARTIAL_DRAWS = 16
CONDITIONAL_DRAWS = 8
CANDIDATES = 6
# Rows whose candidates hold less of their weight, as those that show nothing or little, are filled in from all nodes,
# or from so many, as memory allows: the other nodes may be elsewhere. (With nine tenths hidden, candidates hold 70 to
# 100% of the weight of digits, faces and a curved sheet.)
ENOUGH_WEIGHT, MOST_CANDIDATES = 0.5, 256
# Rows that miss the same features are processed together if there are at least this many of them.
COMMON_PATTERN = 32
# With fewer features it costs more to compile a program for another number of missing ones than to compute them all.
FEW_FEATURES = 32
# From here on the number of observed features is rounded up less.
MANY_FEATURES = 256


def check_rows(posterior: Posterior, X: ArrayLike) -> tuple[Posterior, np.ndarray]:
    """The posterior and the rows, NaN allowed, or an error that names the argument."""
    check_instance(posterior, "posterior", Posterior)
    return posterior, check_data(X, "X", allow_nan=True, num_features=posterior.num_features)


def check_candidates(posterior: Posterior, num_candidates: int | None) -> int:
    """Candidate nodes per partial row, at most all of them; `CANDIDATES` if not given."""
    wanted = CANDIDATES if num_candidates is None else check_integer(num_candidates, "num_candidates", 1)
    return min(wanted, posterior.dictionary.tree.num_nodes)


def check_draws(num_draws: int | None, default: int | None) -> int | None:
    """Draws per tree, `default` if not given; a default of None means all draws."""
    return default if num_draws is None else check_integer(num_draws, "num_draws", 1)


def thinned(posterior: Posterior, num_draws: int | None) -> Draw:
    """Thinned draws, moved once to where the dictionary is."""
    mesh = mesh_of(posterior.dictionary)
    return jax.device_put(posterior.thin(num_draws), None if mesh is None else everywhere(mesh))


def features_and_mask(posterior: Posterior, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred features divided by their scales, 0 (the mean) where missing, and the mask of observed ones."""
    missing = np.isnan(data)
    x = to_model(np.where(missing, posterior.shift, data), posterior.frame._replace(root=None), posterior.dtype)
    return x, (~missing).astype(posterior.dtype)


def in_row_space(posterior: Posterior, x: np.ndarray) -> np.ndarray:
    """Complete rows, (n, D), in the coordinates that the posterior's dictionary has."""
    space = posterior.space
    if space is None:
        return x
    return np.asarray(map_row_blocks(Space.coordinates, (space,), x, bytes_per_row=4 * x.itemsize * x.shape[1]))


_Made = TypeVar("_Made", Nodes, Ranking)


def nodes_in_features(posterior: Posterior) -> Nodes:
    """The nodes in coordinates of the features divided by their scales, which partial rows need, or of a space."""
    dictionary, root, deviation = posterior.dictionary, posterior.noise_root, posterior.noise_deviation
    if root is not None:
        return _kept(posterior, root, lambda own: Nodes.of(own, jax.device_put(root.astype(posterior.dtype))))
    if deviation is None or not has_span(dictionary):
        return Nodes(dictionary, None)
    # in a space rows bring the noise covariance with them (math/rows_in_space.py)
    return Nodes(dictionary, _kept(posterior, deviation, Ranking.of))


def _kept(posterior: Posterior, noise: np.ndarray, make: Callable[[Dictionary], _Made]) -> _Made:
    """What is made of a posterior's dictionary and noise, kept as long as these are, of which it must hold no array.

    To make it can take longer than to fill in a few rows.
    """
    parts = [*jax.tree.leaves(posterior.dictionary), noise]
    key = tuple(map(id, parts))
    found = _KEPT.get(key)
    if found is None:
        with jax_settings(posterior.dtype):
            # other LAPACK calls must not run beside it (math/lowrank.py)
            dictionary, mesh = posterior.dictionary, mesh_of(posterior.dictionary)
            if mesh is not None:  # several devices could wait for each other in LAPACK
                dictionary = on_one(dictionary, mesh)
            with lapack_turn(jax.default_backend()):
                found = jax.block_until_ready(make(dictionary))
            if mesh is not None:
                found = jax.device_put(found, everywhere(mesh))
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(found)):
            _KEPT[key] = found
            _forget_with(parts, key)
    return cast(_Made, found)


def _forget_with(parts: list[Any], key: tuple[int, ...]) -> None:
    """Forget what is kept once the first of the parts is gone; others may outlast it, and be parts of many."""
    finalizers: list[Any] = []

    def forget() -> None:
        _KEPT.pop(key, None)
        for finalizer in finalizers:
            finalizer.detach()

    finalizers += [weakref.finalize(part, forget) for part in parts]


_KEPT: dict[tuple[int, ...], Any] = {}


def node_in_features(
    posterior: Posterior, tree: int, node: int, features: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Centre, (D,), and basis, (D, d), of one node in float64, of `features` (None: all) divided by their scales."""
    some = slice(None) if features is None else features
    dictionary = nodes_in_features(posterior).dictionary
    parts = dictionary.centres[tree, node], dictionary.bases[tree, node]
    centre, basis = (np.asarray(part, np.float64) for part in parts)
    if posterior.row_space is None:
        return centre[some], basis[some]
    space = np.asarray(posterior.row_space)[some]
    along = np.column_stack([centre, basis])[:-1]
    if posterior.noise_deviation is not None:
        along *= posterior.noise_deviation[:, None]
    found = (space @ along.astype(space.dtype)).astype(np.float64)
    return found[:, 0], found[:, 1:]


def noise_between(posterior: Posterior, features: list[int]) -> np.ndarray:
    """The noise covariance of some features over their scales, relative to sigma2, (m, m) in float64."""
    root, deviation = posterior.noise_root, posterior.noise_deviation
    if root is not None:
        return np.asarray(root[features] @ root[:, features], np.float64)
    if deviation is None:
        return np.eye(len(features))
    axes = np.asarray(posterior.row_space)
    own, least = axes[features].astype(np.float64), outside_deviation(deviation, len(axes)) ** 2
    return least * np.eye(len(features)) + (own * (np.square(deviation) - least)) @ own.T


def num_seen(is_observed: np.ndarray) -> int:
    """Array length for the observed features of a row, rounded up to a few sizes so that few programs are compiled.

    These are eighths of D; of many features sixteenths, as the work grows with the square of the size.
    """
    num_features = is_observed.shape[1]
    step = -(-num_features // (8 if num_features < MANY_FEATURES else 16))
    return min(num_features, -(-max(1, int(is_observed.sum(axis=1).max())) // step) * step)


def num_wanted(is_observed: np.ndarray, features: np.ndarray | None) -> int:
    """Array length for the missing features of a row that are to be filled in, `features` (None: all) or fewer.

    Rounded up as in :func:`num_seen`; with few features all rows share one program.
    """
    count = is_observed.shape[1] if features is None else len(features)
    if count < FEW_FEATURES:
        return count
    return num_seen((is_observed if features is None else is_observed[:, features]) == 0.0)


def map_partial_rows(
    function: Callable[..., Any],
    shared: tuple[Any, ...],
    x: np.ndarray,
    is_observed: np.ndarray,
    *more: np.ndarray,
    bytes_per_row: int,
    posterior: Posterior | None,
    **options: Any,
) -> Any:
    """:func:`map_row_blocks` of ``function(*shared, seen, *more)``; rows that miss the same features share blocks.

    A pattern that many rows share, as in regression, gets separate blocks with a single mask, (1, D), so that work that
    depends only on the pattern is done once per block. `posterior`: the one whose noise covariance or row space the
    rows are to be reduced by; None if by none.
    """
    root, space = (None, None) if posterior is None else (posterior.noise_root, posterior.space)
    noise = None if root is None else SharedNoise.of(jax.device_put(root.astype(x.dtype)))
    seen: dict[str, Any] = {"bytes_per_row": bytes_per_row, "calls_lapack": True}
    seen |= {"of_seen": function, "num_seen": num_seen(is_observed), "options": tuple(options.items())}
    packed = np.packbits(is_observed.astype(bool), axis=1)
    _, pattern, count = np.unique(packed, axis=0, return_inverse=True, return_counts=True)
    pattern = pattern.reshape(-1)
    is_common = count >= COMMON_PATTERN
    index, parts = [], []
    rest = np.flatnonzero(~is_common[pattern])
    if rest.size:
        arrays = (array[rest] for array in (is_observed, x, *more))
        index.append(rest)
        parts.append(map_row_blocks(_of_observed, (shared, noise, space), *arrays, **seen))
    for number in np.flatnonzero(is_common):
        here = np.flatnonzero(pattern == number)
        mask = jax.device_put(is_observed[here[:1]])
        arrays = (array[here] for array in (x, *more))
        index.append(here)
        parts.append(map_row_blocks(_of_observed, (shared, noise, space, mask), *arrays, **seen))
    order = np.argsort(np.concatenate(index))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)


def _of_observed(
    shared: tuple[Any, ...],
    noise: SharedNoise | None,
    space: Space | None,
    mask: Array,
    x: Array,
    *more: Array,
    of_seen: Callable[..., Any],
    num_seen: int,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    """``of_seen(*shared, seen, *more, **options)`` of a block of partial rows."""
    if space is not None:
        seen: SeenRows = observe_in_space(x, mask, space, num_seen=num_seen)
    else:
        seen = observe_rows(x, mask, noise, num_seen=num_seen)
    return of_seen(*shared, seen, *more, **dict(options))


def map_rows(
    posterior: Posterior,
    data: np.ndarray,
    num_draws: tuple[int | None, int | None],
    of_complete: Callable[[Posterior, Draw, np.ndarray], np.ndarray],
    of_partial: Callable[[Posterior, Draw, np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Results (n, ...) for rows in the data's units, with one function for complete rows and one for partial rows.

    `of_complete` gets the posterior, in float64 for rows far from the data, its thinned draws, and model coordinates;
    `of_partial` gets these two and what :func:`features_and_mask` returns. `num_draws`: draws per tree for each.
    """
    is_partial = np.isnan(data).any(axis=1)
    index, parts = [], []
    for within, rows in by_distance(posterior, data, np.flatnonzero(~is_partial)):
        with jax_settings(within.dtype), one_blas_thread():
            x = in_row_space(within, to_model(data[rows], within.frame, within.dtype))
            parts.append(of_complete(within, thinned(within, num_draws[0]), x))
        index.append(rows)
    for within, rows in by_distance(posterior, data, np.flatnonzero(is_partial)):
        with jax_settings(within.dtype), one_blas_thread():
            parts.append(of_partial(within, thinned(within, num_draws[1]), *features_and_mask(within, data[rows])))
        index.append(rows)
    return np.concatenate(parts, dtype=np.float64)[np.argsort(np.concatenate(index))]


def map_held_rows(
    function: Callable[..., tuple[Any, ...]],
    shared: tuple[Any, ...],
    x: np.ndarray,
    is_observed: np.ndarray,
    *more: np.ndarray,
    posterior: Posterior,
    draws: Draw,
    num_candidates: int | None,
    more_bytes: int = 0,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """:func:`map_partial_rows` of a function whose first result is the share of a row's weight that candidates hold.

    It returns the others. Rows whose candidates hold too little are worked out again with more of them, unless
    `num_candidates` is given. `more_bytes`: what a row's results take.
    """

    def of_rows(rows: np.ndarray | slice, number: int) -> tuple[np.ndarray, ...]:
        share, *found = map_partial_rows(
            function,
            shared,
            x[rows],
            is_observed[rows],
            *(array[rows] for array in more),
            posterior=posterior,
            bytes_per_row=partial_row_bytes(posterior, draws, number, is_observed[rows]) + more_bytes,
            num_candidates=number,
            **options,
        )
        return np.asarray(share), *found

    number = check_candidates(posterior, num_candidates)
    share, *results = of_rows(slice(None), number)
    few = np.flatnonzero(share < ENOUGH_WEIGHT)
    if num_candidates is not None or few.size == 0:
        return tuple(results)
    wider = min(MOST_CANDIDATES, posterior.dictionary.tree.num_nodes)
    while wider > number and partial_row_bytes(posterior, draws, wider, is_observed[few]) > ON_CPU.most_memory:
        wider //= 2  # of very wide rows
    if wider > number:
        for result, again in zip(results, of_rows(few, wider)[1:], strict=True):
            result[few] = again
    return tuple(results)


def partial_row_bytes(posterior: Posterior, draws: Draw, num_candidates: int, is_observed: np.ndarray) -> int:
    """Upper estimate of the bytes a partial row takes in a block."""
    if posterior.row_space is not None:
        return bytes_in_space(posterior.dictionary, num_candidates, draws.log_joint.shape[1])
    most_seen = 0 if posterior.noise_root is None else num_seen(is_observed)
    return bytes_per_row(posterior.dictionary, num_candidates, draws.log_joint.shape[1], most_seen)


def partial_log_density_by_tree(
    posterior: Posterior, draws: Draw, x: np.ndarray, is_observed: np.ndarray, num_candidates: int
) -> np.ndarray:
    """Log density under each tree, (n, F), of the observed features, each divided by its scale."""
    nodes = nodes_in_features(posterior)
    by_tree = map_partial_rows(
        log_density_partial,
        (nodes, draws),
        x,
        is_observed,
        posterior=posterior,
        bytes_per_row=partial_row_bytes(posterior, draws, num_candidates, is_observed),
        num_candidates=num_candidates,
    )
    return without_empty(by_tree, is_observed)


def without_empty(log_density: np.ndarray, is_observed: np.ndarray) -> np.ndarray:
    """Log densities in float64, 0 at rows that show nothing: candidate nodes do not hold quite all of the weight."""
    shows = is_observed.any(axis=1).reshape(-1, *[1] * (log_density.ndim - 1))
    return np.where(shows, log_density.astype(np.float64), 0.0)
