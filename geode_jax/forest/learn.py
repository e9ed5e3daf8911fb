"""Stage one: from an array to a forest of dictionaries and the statistics of its rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from geode_jax._checks import check_dtype, check_instance, check_key, check_training_data
from geode_jax._runtime.compilation import make_room
from geode_jax._runtime.progress import BAR_FORMAT
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.forest.defaults import _with_candidates, resolve
from geode_jax.forest.dictionaries import learn
from geode_jax.forest.feature_scales import divide_by_units
from geode_jax.forest.fill import complete
from geode_jax.forest.forest import Forest
from geode_jax.forest.freeze import freeze_forest, partial_rows
from geode_jax.learning.soft_impute import fill_low_rank
from geode_jax.rows.completed import Completed
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.frame import Frame, learn_frame, to_model, view_in_model
from geode_jax.rows.view import Rows, as_array, has_missing, is_memory_mapped
from geode_jax.settings import DictionarySettings


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
