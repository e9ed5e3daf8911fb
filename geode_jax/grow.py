"""Stage one: from an array to a forest of dictionaries and the statistics of its rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from geode_jax._checks import check_dtype, check_instance, check_key, check_training_data
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.build.completed import Completed
from geode_jax.build.fill import fill_low_rank
from geode_jax.build.partition import default_depth
from geode_jax.build.rows import Rows, as_array, has_missing, is_memory_mapped
from geode_jax.build.standardise import Frame, learn_frame, to_model, view_in_model
from geode_jax.build.subspace import assign_folds
from geode_jax.compilation import make_room
from geode_jax.completion import PARTIAL_CANDIDATES, complete
from geode_jax.forest import Forest
from geode_jax.handover import freeze_forest, partial_rows
from geode_jax.learn import divide_by_units, learn
from geode_jax.settings import DictionarySettings

# What sets the largest rank: the statistics of complete rows at the fewest nodes, in float32, and the matrices of rows
# with missing features.
STATISTICS_BYTES = 2**32
# The matrices of rows with missing features: beyond this much, no more than 50 directions, as work grows with d^3.
QUICK_BYTES = 2**30
# The sampler reads (F, K, n, d) numbers in every sweep. Above this many bytes in float32 rows have candidate nodes, as
# many as fit: beyond the processor's cache a sweep takes as long as reading them, and rows give a part in 500 of their
# mass to others than their best 32 (`python -m benchmarks.candidates`).
CANDIDATE_BYTES = 2**30
FEWEST_CANDIDATES, MOST_CANDIDATES = 8, 32
# Rows that a tree is learned from by default: more make finer cuts no better, and the graph slow.
TREE_ROWS = 100_000
BAR_FORMAT = "{desc:<28}|{bar:30}| {percentage:3.0f}% [{elapsed}]"


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
    data = check_training_data(X)
    real = check_dtype(dtype)
    settings = check_instance(dictionary, "dictionary", (DictionarySettings, None)) or DictionarySettings()
    with precision_of(real), tqdm(total=1.0, disable=not progress, bar_format=BAR_FORMAT) as bar:

        def show(share: float, text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update(share - bar.n)

        return grow_forest(key, data, settings, real, show)


def resolve(settings: DictionarySettings, num_rows: int, num_features: int, num_partial: int = 0) -> DictionarySettings:
    """Fill in what was left to the data's shape.

    `max_rank`, the largest that may be needed: 100, or as many as keep the float32 statistics of all trees within 4 GiB
    at 8 nodes, at least 50; at most half the features beyond 20, and no more than the data allow (with as many
    directions as features, nothing tells of the noise), or than keeps the matrices of `num_partial` rows with missing
    features at their candidate nodes of all trees within 4 GiB, and beyond 50 within 1 GiB. `num_neighbors`: 10, or
    more for very large n. `tree_rows`: all, up to 100,000. `min_cell_size`: 10 rows, below which a cell's own centre
    costs more than it brings. `depth`: until cells reach twice that size, at most 7. `num_candidates`: all nodes, or
    where the float32 statistics of all trees take more than 1 GiB as many as do not, 8 to 32.
    """
    limit = max(1, min(num_features, num_rows) - 1)
    numbers_per_row = STATISTICS_BYTES // (4 * settings.num_trees * num_rows)
    max_rank = settings.max_rank
    if max_rank is None:
        max_rank = min(int(np.clip(numbers_per_row // FEWEST_CANDIDATES, 50, 100)), max(10, num_features // 2))
        if num_partial > 0:
            width = settings.missing_rows.num_candidates or PARTIAL_CANDIDATES
            per_square = 8 * settings.num_trees * num_partial * width
            most, quick = (int(np.sqrt(size / per_square)) for size in (STATISTICS_BYTES, QUICK_BYTES))
            max_rank = min(max_rank, max(1, most), max(50, quick))
    max_rank = min(max_rank, limit)
    num_neighbors = min(settings.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
    tree_rows = min(settings.tree_rows or TREE_ROWS, num_rows)
    min_cell_size = settings.min_cell_size or max(2, min(10, num_rows // 4))
    depth = settings.depth
    if depth is None:
        depth = default_depth(num_rows, 2 * min_cell_size)
    resolved = dataclasses.replace(
        settings,
        max_rank=max_rank,
        num_neighbors=num_neighbors,
        tree_rows=tree_rows,
        min_cell_size=min_cell_size,
        depth=depth,
    )
    return _with_candidates(resolved, num_rows)


def _with_candidates(settings: DictionarySettings, num_rows: int) -> DictionarySettings:
    """Settings with a number of candidates, by their rank."""
    assert settings.depth is not None
    assert settings.max_rank is not None
    num_nodes, num_candidates = 2 ** (settings.depth + 1) - 1, settings.num_candidates
    if num_candidates is None:
        fitting = CANDIDATE_BYTES // (4 * settings.num_trees * num_rows * settings.max_rank)
        num_candidates = num_nodes if fitting >= num_nodes else np.clip(fitting, FEWEST_CANDIDATES, MOST_CANDIDATES)
    return dataclasses.replace(settings, num_candidates=int(min(num_candidates, num_nodes)))


def grow_forest(
    key: KeyArray,
    data: np.ndarray,
    settings: DictionarySettings,
    dtype: np.dtype,
    on_step: Callable[[float, str], None],
) -> Forest:
    """:func:`learn_forest` on checked arguments, within the precision of `dtype`; tells `on_step` the share done."""
    resolved = resolve(settings, data.shape[0], data.shape[1], int(has_missing(data).sum()))
    # how many nodes fit depends on the rank that is found
    resolved = dataclasses.replace(resolved, num_candidates=settings.num_candidates)
    frame = learn_frame(data)
    # what is mapped into memory may be larger than that is
    rows_in = view_in_model if is_memory_mapped(data) else to_model
    may_lower_rank = settings.max_rank is None
    return grow_in_frame(key, rows_in(data, frame, dtype), frame, resolved, on_step, may_lower_rank=may_lower_rank)


def grow_in_frame(
    key: KeyArray,
    x: Rows,
    frame: Frame,
    settings: DictionarySettings,
    on_step: Callable[[float, str], None],
    num_places: int | None = None,
    may_lower_rank: bool = False,
) -> Forest:
    """The forest of rows in model coordinates, with settings that leave nothing but candidates to the data's shape.

    An array `x` is the fit's own, and is divided by the units and noise scales of the features where it lies. It is let
    go where wide data need it no longer, if the caller does not hold it. A view stays one where nothing is missing.

    `num_places`: places for complete rows, at least their number, where several forests are to share a program.
    `may_lower_rank`: nodes get no more directions than the rows tell of, at most `settings.max_rank`.
    """
    make_room()
    num_rows = x.shape[0]
    is_observed = None
    if has_missing(x).any():
        x = as_array(x)
        is_observed = ~np.isnan(x)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32))
    seeds = [int(seed) for seed in rng.integers(2**31, size=settings.num_trees)]
    on_step(0.0, "units")
    x, frame = divide_by_units(x, frame, settings, seeds[0])
    folds = None
    if settings.cross_fit is not None:
        folds = assign_folds(num_rows, settings.cross_fit.num_folds, rng)
    if is_observed is None:
        learned = learn(Completed(x, None), None, settings, folds, seeds, on_step, may_lower_rank=may_lower_rank)
        rows = None
    else:
        assert settings.max_rank is not None
        on_step(0.0, "first fill")
        x = fill_low_rank(as_array(x), is_observed, settings.max_rank, seeds[0])

        def on_fill(share: float, text: str) -> None:
            on_step(0.5 * share, f"filling: {text}")

        def on_learn(share: float, text: str) -> None:
            on_step(0.5 + 0.5 * share, text)

        completed = complete(x, is_observed, settings, folds, seeds, on_fill, may_lower_rank=may_lower_rank)
        learned = learn(completed, is_observed, settings, folds, seeds, on_learn, may_lower_rank=may_lower_rank)
        rows = partial_rows(learned, is_observed, folds)
    del x
    learned = learned._replace(settings=_with_candidates(learned.settings, num_rows))
    on_step(1.0, "learned dictionaries")
    dictionary, statistics, probe = freeze_forest(learned, is_observed, folds, num_places)
    return Forest(
        dictionary=dictionary,
        statistics=statistics,
        partial=rows,
        probe=probe,
        shift=frame.shift,
        scale=frame.scale * learned.scales,
        dictionary_settings=learned.settings,
        noise_root=None if learned.shape is None else learned.shape.root,
    )
