"""Stage one: from an array to a forest of dictionaries and the statistics of its rows."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._checks import check_dtype, check_instance, check_key, check_training_data, is_memory_mapped
from geode_jax._runtime.compilation import drop_programs_if_many
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._runtime.progress import ShowProgress, part_of, progress_bar
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.forest.device_products import computing_here
from geode_jax.forest.dictionaries import learn
from geode_jax.forest.feature_scales import divide_by_units
from geode_jax.forest.fill import fill_conditionally
from geode_jax.forest.forest import Forest
from geode_jax.forest.freeze import (
    freeze_borrowed,
    freeze_forest,
    freeze_partial_rows,
    partial_grouping,
    zero_parts,
)
from geode_jax.forest.partial_statistics import Grouping
from geode_jax.forest.plan import Plan
from geode_jax.learning.first_fill import fill_low_rank
from geode_jax.model.found import Decision, Found
from geode_jax.partition.metis import Partition
from geode_jax.rows.copies import groups_of_copies
from geode_jax.rows.files import RowFiles
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.frame import Frame, learn_frame, to_model, view_in_model
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.training import Training
from geode_jax.rows.view import Rows, as_array, has_missing
from geode_jax.settings import DictionarySettings, FeatureNoise

OnShapes: TypeAlias = Callable[[Forest], None]


def learn_forest(
    key: KeyArray,
    X: ArrayLike,
    *,
    dictionary: DictionarySettings | None = None,
    dtype: Any = jnp.float32,
    progress: bool = False,
) -> Forest:
    """Learn trees and dictionaries from the rows of X, shape (n, D): stage one of :func:`geode_jax.fit`.

    Use it to sample the same forest more than once, by :func:`geode_jax.sample_posterior` with other priors or
    settings, or by NumPyro's MCMC. Arguments and errors are those of :func:`geode_jax.fit`, but X is an array or a
    frame: no path of files.
    """
    key = check_key(key)
    check_instance(progress, "progress", bool)
    data = check_training_data(X)
    real = check_dtype(dtype)
    settings = check_instance(dictionary, "dictionary", (DictionarySettings, None)) or DictionarySettings()
    with jax_settings(real), progress_bar(progress) as show:
        return grow_forest(key, data, plan_of(data, settings), real, show)


def plan_of(data: np.ndarray | RowFiles, settings: DictionarySettings) -> Plan:
    """The plan for training rows, (n, D), NaN being missing values."""
    return Plan.of(settings, data.shape[0], data.shape[1], int(has_missing(data).sum()))


def grow_forest(
    key: KeyArray,
    data: np.ndarray | RowFiles,
    plan: Plan,
    dtype: np.dtype,
    show: ShowProgress,
    on_shapes: OnShapes | None = None,
    processes: Processes = ALONE,
) -> Forest:
    """:func:`learn_forest` on checked arguments, within the precision of `dtype`.

    `processes`: those that the rows are divided among, `data` being those of this one.
    """
    frame = learn_frame(data, processes)
    # memory-mapped data may be larger than memory
    if isinstance(data, RowFiles) or is_memory_mapped(data):
        return grow_in_frame(key, view_in_model(data, frame, dtype), frame, plan, show, on_shapes, processes)
    return grow_in_frame(key, to_model(data, frame, dtype), frame, plan, show, on_shapes, processes)


@np.errstate(under="ignore")  # whatever the user makes of it: small weights underflow
def grow_in_frame(
    key: KeyArray,
    x: Rows,
    frame: Frame,
    plan: Plan,
    show: ShowProgress,
    on_shapes: OnShapes | None = None,
    processes: Processes = ALONE,
) -> Forest:
    """The forest of rows in model coordinates, which leave out the features that never vary.

    The plan may be that of all features. An array `x` is modified in place: it is divided by the units and noise scales
    of the features. With wide data it is released once it is no longer needed, unless the caller holds a reference. A
    view stays one unless entries are missing, or a single process uses a noise covariance. `on_shapes` is called with a
    forest of shapes in place of arrays as soon as these are known, while work is still to do; not if many rows miss the
    same features.
    """
    drop_programs_if_many()
    processes = computing_here(processes)
    num_features = x.shape[1]
    is_observed, has_gap = None, has_missing(x)
    if plan.num_features != num_features:
        plan = plan.over(num_features, int(has_gap.sum()))
    if has_gap.any():
        x = as_array(x)
        is_observed = ~np.isnan(x)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32))
    seeds = [int(seed) for seed in rng.integers(2**31, size=plan.request.num_trees)]
    show(0.0, "units")
    x, frame, about_units = divide_by_units(x, frame, plan, seeds[0], processes)
    folds, cross_fit = None, plan.request.cross_fit
    if cross_fit is not None:
        copies = groups_of_copies(x, is_observed, processes)
        everyones = assign_folds(processes.count(x.shape[0]), cross_fit.num_folds, rng, copies)
        folds = processes.own_part(everyones)
    show_learning = show
    if is_observed is not None:
        show(0.0, "first fill")
        x = fill_low_rank(as_array(x), is_observed, plan.max_rank, seeds[0])
    training = [Training(x, num_features, folds, is_observed, processes=processes)]
    del x
    if is_observed is not None:
        training.append(fill_conditionally(training.pop(), plan, seeds, part_of(show, 0.0, 0.5, "filling: ")))
        show_learning = part_of(show, 0.5, 1.0)
    dtype = training[0].x.dtype
    partial = training[0].partial
    folds_of_partial = training[0].folds_of(partial)

    def on_rank(partitions: list[Partition], rank: int) -> None:
        if on_shapes is None:
            return
        grouping = None
        if is_observed is not None:
            grouping = partial_grouping(is_observed[partial], folds_of_partial, partitions, rank, plan)
            if grouping.is_shared:
                return
        on_shapes(_forest_of_shapes(partitions, rank, plan, dtype, grouping))

    # `pop`, so that only `learn` refers to the rows
    learned = learn(training.pop(), plan, seeds, show_learning, on_rank)
    show(1.0, "learned dictionaries")
    partial_rows = freeze_partial_rows(learned, plan)
    borrowed = freeze_borrowed(learned, plan)
    dictionary, statistics, probe = freeze_forest(learned, plan)
    chosen = learned.chosen
    return Forest(
        dictionary=dictionary,
        statistics=statistics,
        partial=partial_rows,
        borrowed=borrowed,
        probe=probe,
        shift=frame.shift,
        scale=_scale_of(frame, learned.scales, plan),
        dictionary_settings=plan.request,
        noise_root=learned.noise_root,
        row_space=jax.device_put(learned.axes.matrix) if learned.axes is not None and dictionary.num_outside else None,
        features=frame.features,
        noise_deviation=learned.noise_deviation,
        found=Found(
            rank=chosen.rank,
            span_rank=None if chosen.span is None else chosen.span.bases.shape[2],
            num_candidates=plan.num_candidates(chosen.rank),
            decisions=(*about_units, *_about_constants(frame), *chosen.decisions),
            rank_limit=min(plan.max_rank, plan.span_rank or plan.max_rank),
        ),
    )


def _scale_of(frame: Frame, scales: np.ndarray, plan: Plan) -> np.ndarray:
    """Divisors of all features, (D,). That of what never varies is its standard deviation in new rows, a small one."""
    found, is_left_out = frame.divided(scales).scale, frame.is_left_out
    noise = plan.request.feature_noise or FeatureNoise()
    found[is_left_out] = noise.floor * np.exp(np.log(found[~is_left_out]).mean())
    return found


def _about_constants(frame: Frame) -> tuple[Decision, ...]:
    number = int(frame.is_left_out.sum())
    if number == 0:
        return ()
    why = "they are left out of the model; in log densities each is a narrow normal about its value"
    return (Decision("features that never vary", str(number), why),)


def _forest_of_shapes(
    partitions: list[Partition], rank: int, plan: Plan, dtype: np.dtype, grouping: Grouping | None = None
) -> Forest:
    """A forest with shapes in place of its arrays.

    They are known before its dictionaries are, so the sampler can be compiled meanwhile.
    """

    def forest() -> Forest:
        dictionary, statistics, partial, borrowed = zero_parts(partitions, rank, plan, dtype, grouping)
        nowhere = np.zeros(plan.num_features)
        found = Found(rank, None, plan.num_candidates(rank))
        return Forest(dictionary, statistics, partial, borrowed, None, nowhere, nowhere, plan.request, found)

    return jax.eval_shape(forest)
