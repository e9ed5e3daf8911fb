"""Stage one: from an array to a forest of dictionaries and the statistics of its rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from geode_jax._checks import check_data, check_dtype, check_instance, check_key
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.build.neighbours import neighbour_graph
from geode_jax.build.noise import learn_feature_scales
from geode_jax.build.partition import Partition, default_depth, partition_rows
from geode_jax.build.span import Span, choose_span, learn_span, learn_subspaces_in_span
from geode_jax.build.standardise import Frame, learn_frame, to_model
from geode_jax.build.subspace import assign_folds, learn_subspaces
from geode_jax.dictionary import Dictionary, freeze
from geode_jax.gibbs.sweep import Problem
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings, SharedSpan
from geode_jax.statistics import Statistics, cross_fitted_statistics

# The sampler reads (F, K, n, d) numbers in every sweep; a default depth keeps them within this many bytes in
# float32.
STATISTICS_BYTES = 2**32
BAR_FORMAT = "{desc:<28}|{bar:30}| {percentage:3.0f}% [{elapsed}]"


class Forest(eqx.Module):
    """What stage one learned: the dictionaries of all trees, and all that the sampler needs of the training rows.

    Made by :func:`geode_jax.learn_forest`; arrays of `dictionary` and `statistics` have a leading axis F. Everything is
    in model coordinates ``x = (y - shift) / scale``, with `shift` and `scale` of shape (D,) in float64.
    """

    dictionary: Dictionary
    statistics: Statistics
    shift: np.ndarray
    scale: np.ndarray
    dictionary_settings: DictionarySettings = eqx.field(static=True)

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return np.dtype(self.dictionary.centres.dtype)

    @property
    def num_trees(self) -> int:
        """F."""
        return self.dictionary.centres.shape[0]

    @property
    def num_rows(self) -> int:
        """Training rows."""
        return self.statistics.residual.shape[-1]

    def problem(self, prior: Prior, sampler: SamplerSettings) -> Problem:
        """What the sampler works on, all trees at once, with a leading axis F on its arrays."""
        dictionary = self.dictionary
        return Problem(
            tree=dictionary.tree,
            statistics=self.statistics,
            is_available=dictionary.is_available & dictionary.tree.is_present[..., None],
            prior=prior,
            shrinkage=sampler.shrinkage,
            membership=sampler.membership,
            num_features=dictionary.num_features,
        )


def learn_forest(
    key: KeyArray,
    X: ArrayLike,
    *,
    dictionary: DictionarySettings | None = None,
    dtype: Any = jnp.float32,
    progress: bool = False,
) -> Forest:
    """Learn trees and dictionaries from the rows of X, shape (n, D): stage one of :func:`geode_jax.fit`.

    For sampling the same forest more than once, by :func:`geode_jax.sample_posterior` with other priors or settings, or
    by NumPyro's MCMC. Arguments and errors are those of :func:`geode_jax.fit`.
    """
    key = check_key(key)
    data = check_data(X, "X", allow_nan=False, min_rows=2)
    real = check_dtype(dtype)
    settings = check_instance(dictionary, "dictionary", (DictionarySettings, None)) or DictionarySettings()
    with precision_of(real), tqdm(total=1.0, disable=not progress, bar_format=BAR_FORMAT) as bar:

        def show(share: float, text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update(share - bar.n)

        return grow_forest(key, data, settings, real, show)


def resolve(settings: DictionarySettings, num_rows: int, num_features: int) -> DictionarySettings:
    """Fill in what was left to the data's shape.

    `max_rank`: 50, but at most half the features beyond 20, and no more than the data allow. `num_neighbors`: 10, or
    more for very large n. `min_cell_size`: 10 rows, below which a cell's own centre costs more than it brings. `depth`:
    until cells reach twice that size, at most 7, and no deeper than the float32 statistics of all trees fit
    in 4 GiB.
    """
    limit = min(num_features, num_rows - 1)
    max_rank = min(settings.max_rank or min(50, max(10, num_features // 2)), limit)
    num_neighbors = min(settings.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
    min_cell_size = settings.min_cell_size or max(2, min(10, num_rows // 4))
    depth = settings.depth
    if depth is None:
        depth = default_depth(num_rows, 2 * min_cell_size)
        per_node = 4 * settings.num_trees * num_rows * max_rank
        while depth > 0 and (2 ** (depth + 1) - 1) * per_node > STATISTICS_BYTES:
            depth -= 1
    return dataclasses.replace(
        settings,
        max_rank=max_rank,
        num_neighbors=num_neighbors,
        min_cell_size=min_cell_size,
        depth=depth,
    )


def grow_forest(
    key: KeyArray,
    data: np.ndarray,
    settings: DictionarySettings,
    dtype: np.dtype,
    on_step: Callable[[float, str], None],
) -> Forest:
    """:func:`learn_forest` on checked arguments, within the precision of `dtype`; tells `on_step` the share done."""
    settings = resolve(settings, *data.shape)
    assert settings.max_rank is not None
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32))
    seeds = rng.integers(2**31, size=settings.num_trees)
    frame = learn_frame(data)
    x = to_model(data, frame, dtype)
    steps = 2 * settings.num_trees + 2
    partitions = []
    for number, seed in enumerate(seeds):
        on_step(number / steps, "growing trees")
        partitions.append(_grow_tree(x, settings, number, int(seed)))
    if settings.feature_noise is not None:
        on_step(settings.num_trees / steps, "noise scales")
        scales = learn_feature_scales(
            x,
            partitions[0],
            settings.max_rank,
            seed=int(seeds[0]),
            num_rounds=settings.feature_noise.num_rounds,
            num_folds=settings.feature_noise.num_folds,
            floor=settings.feature_noise.floor,
        )
        frame = Frame(frame.shift, frame.scale * scales)
        x = to_model(data, frame, dtype)
    folds = None
    if settings.cross_fit is not None:
        folds = assign_folds(data.shape[0], settings.cross_fit.num_folds, rng)
    on_step((settings.num_trees + 1) / steps, "shared span")
    span = _find_span(x, settings, partitions[0], folds, int(seeds[0]))
    settings = _with_span(settings, span)
    learned = []
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        on_step((settings.num_trees + 2 + number) / steps, "learning dictionaries")
        learned.append(_learn_dictionary(x, partition, settings, span, folds, int(seed)))
    on_step(1.0, "learned dictionaries")
    dictionary, statistics = jax.tree.map(lambda *leaves: jnp.stack(leaves), *learned)
    return Forest(dictionary, statistics, frame.shift, frame.scale, settings)


def _grow_tree(x: np.ndarray, settings: DictionarySettings, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed and their neighbour count."""
    assert settings.num_neighbors is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    num_neighbors = min(settings.num_neighbors + 2 * number, x.shape[0] - 1)
    graph = neighbour_graph(x, num_neighbors, seed)
    return partition_rows(x, graph, settings.depth, settings.min_cell_size, seed)


def _find_span(
    x: np.ndarray, settings: DictionarySettings, partition: Partition, folds: np.ndarray | None, seed: int
) -> Span | None:
    assert settings.max_rank is not None
    if settings.shared_span is None:
        return None
    if settings.shared_span.rank is not None:
        span = learn_span(x, folds, seed).leading(settings.shared_span.rank)
        return span if span.bases.shape[2] > 0 else None  # too few rows for any direction
    return (
        None
        if folds is None
        else choose_span(x, partition, settings.max_rank, folds, seed, settings.parent_rows or 0.0)
    )


def _with_span(settings: DictionarySettings, span: Span | None) -> DictionarySettings:
    """Settings that say what was found; no node has more directions than the span."""
    assert settings.max_rank is not None
    if span is None:
        return dataclasses.replace(settings, shared_span=None)
    rank = span.bases.shape[2]
    return dataclasses.replace(settings, shared_span=SharedSpan(rank), max_rank=min(settings.max_rank, rank))


def _learn_dictionary(
    x: np.ndarray,
    partition: Partition,
    settings: DictionarySettings,
    span: Span | None,
    folds: np.ndarray | None,
    seed: int,
) -> tuple[Dictionary, Statistics]:
    assert settings.max_rank is not None
    if span is None:
        subspaces = learn_subspaces(x, partition, settings.max_rank, folds, seed, settings.parent_rows or 0.0)
    else:
        subspaces = learn_subspaces_in_span(
            x, span, partition, settings.max_rank, folds, seed, settings.parent_rows or 0.0
        )
    frozen = freeze(partition, subspaces, 0)
    if folds is None:
        rows = [jnp.arange(x.shape[0])]
        centres, bases = subspaces.centres[:1], subspaces.bases[:1]
    else:
        rows = [jnp.asarray(np.flatnonzero(folds == fold)) for fold in range(int(folds.max()) + 1)]
        centres, bases = subspaces.centres[1:], subspaces.bases[1:]
    statistics = cross_fitted_statistics(jnp.asarray(centres), jnp.asarray(bases), frozen, jnp.asarray(x), rows)
    return frozen, statistics
