"""From an array and labels to one posterior per class, in common coordinates."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from geode_jax._checks import check_dtype, check_instance, check_key, check_mesh, check_training_data
from geode_jax._files.checkpoint import Checkpoint, open_checkpoint
from geode_jax._runtime.progress import move_bar, progress_bar
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.fitting.assemble import kept_forest, mesh_limits, posterior_of
from geode_jax.fitting.calibration import calibrated_powers
from geode_jax.forest.defaults import resolve
from geode_jax.forest.feature_scales import divide_by_units, noise_scales
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import grow_in_frame
from geode_jax.gibbs.run import Samples, run_chains
from geode_jax.learning.class_span import Reduction, learn_reduction
from geode_jax.model.statistics import padded_size
from geode_jax.partition.metis import Partition
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.held_out import held_out_log_density
from geode_jax.rows.frame import Frame, learn_frame, to_model
from geode_jax.rows.view import divide
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings

# Directions of the span common to all classes where its rank is left open.
SPAN_RANK = 50
# Statistics of the classes that are sampled together: enough to fill any device's cores.
BATCH_BYTES = 2**30
# Classes that are sampled together have at most this ratio of sizes, for they are padded to one.
SIZE_RATIO = 1.5


class _Task(NamedTuple):
    """What is the same for every class: coordinates of the rows, the rows of each class, settings, what is kept."""

    x: np.ndarray
    rows_of: list[np.ndarray]
    settings: DictionarySettings
    prior: Prior
    sampler: SamplerSettings
    kept: Checkpoint | None
    mesh: Mesh | None


def fit_classes(
    key: KeyArray,
    X: ArrayLike,
    labels: ArrayLike,
    *,
    class_probabilities: ArrayLike | None = None,
    dictionary: DictionarySettings | None = None,
    prior: Prior | None = None,
    sampler: SamplerSettings | None = None,
    calibrate: bool = True,
    dtype: Any = jnp.float32,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
) -> ClassPosterior:
    """Fit one GEODE per class, for :func:`geode_jax.class_log_probabilities`.

    Units, noise scales of the features and the span of the leading directions are common to all classes: where they
    differed, a class of little noise would win rows that it describes badly. With many features and enough rows, the
    classes are densities of the coordinates in that span (``dictionary.shared_span``; 50 directions unless it says
    otherwise; None for no span), and what is outside says nothing of the class.

    **Arguments:**

    - `key`, `X`, `dictionary`, `prior`, `sampler`, `dtype`, `progress`, `checkpoint`, `mesh`: as in
      :func:`geode_jax.fit`. Where X has NaN there is no span.
    - `labels`: class of each row, (n,), integers 0..G-1, every one of them with at least two rows.
    - `class_probabilities`: (G,), positive; None takes the shares of the rows.
    - `calibrate`: raise class densities to the power that predicts training rows best, each held out from its own
      class: densities of high dimension are too sure of themselves. False leaves them as they are.

    Raises TypeError or ValueError naming the argument, and FloatingPointError where sampling became non-finite.
    """
    key = check_key(key)
    data = check_training_data(X)
    index, counts = _check_labels(labels, data.shape[0])
    log_prior = _check_probabilities(class_probabilities, counts)
    real = check_dtype(dtype)
    settings = check_instance(dictionary, "dictionary", (DictionarySettings, None)) or DictionarySettings()
    model_prior = check_instance(prior, "prior", (Prior, None)) or Prior()
    stage_two = check_instance(sampler, "sampler", (SamplerSettings, None)) or SamplerSettings()
    check_mesh(mesh, mesh_limits(settings.num_trees, stage_two))

    kept = open_checkpoint(checkpoint, key, [data, index], [settings, model_prior, stage_two, real.name])
    with precision_of(real), progress_bar(progress) as bar:
        on_step = partial(move_bar, bar, 0.0, 1.0)
        rows_of = [np.flatnonzero(index == number) for number in range(counts.size)]
        on_step(0.0, "common coordinates")
        frame, reduction, x = _common_coordinates(data, rows_of, settings, real)
        settings = _settings_of_classes(x, rows_of, settings)
        task = _Task(x, rows_of, settings, model_prior, stage_two, kept, mesh)
        members, held_out = _fit_members(key, task, calibrate, on_step)
        found = ClassPosterior(tuple(members), reduction, frame.shift, frame.scale, log_prior, 1.0, 0.0)
        if not calibrate:
            return found
        on_step(0.95, "calibrating")
        powers = calibrated_powers(found, data, index, held_out)
        on_step(1.0, "fitted classes")
        return ClassPosterior(tuple(members), reduction, frame.shift, frame.scale, log_prior, *powers)


def _check_labels(labels: ArrayLike, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels as integers, and how many rows each class has."""
    index = np.asarray(labels)
    if index.shape != (num_rows,) or index.dtype.kind not in "iu":
        raise ValueError(f"labels: expected {num_rows} integers, got {index.dtype} of shape {index.shape}")
    if index.min() < 0:
        raise ValueError(f"labels: expected integers from 0, got {index.min()}")
    counts = np.bincount(index)
    if counts.min() < 2:
        which = int(np.argmin(counts))
        raise ValueError(f"labels: expected at least 2 rows of every class, got {counts[which]} of class {which}")
    return index, counts


def _check_probabilities(probabilities: ArrayLike | None, counts: np.ndarray) -> np.ndarray:
    """Log class probabilities."""
    if probabilities is None:
        return np.log(counts / counts.sum())
    given = np.asarray(probabilities, dtype=np.float64)
    if given.shape != counts.shape or not (given > 0.0).all() or not np.isclose(given.sum(), 1.0):
        raise ValueError(
            f"class_probabilities: expected {counts.size} positive numbers that add up to 1, got {probabilities!r}"
        )
    return np.log(given)


def _common_coordinates(
    data: np.ndarray, rows_of: list[np.ndarray], settings: DictionarySettings, dtype: np.dtype
) -> tuple[Frame, Reduction | None, np.ndarray]:
    frame = learn_frame(data)
    x = to_model(data, frame, dtype)
    resolved = resolve(settings, *x.shape)
    _, frame = divide_by_units(x, frame, resolved, seed=0)  # where they lie
    is_observed = ~np.isnan(x)
    if settings.shared_span is not None and is_observed.all():
        reduction = learn_reduction(x, settings.shared_span.rank or SPAN_RANK, seed=0)
        if reduction is not None:
            return frame, reduction, reduction.coordinates(x)
    if settings.feature_noise is None or not is_observed.all():
        return frame, None, x
    scales = noise_scales(x, Partition(0, tuple(rows_of)), None, resolved, seed=0).scales
    return Frame(frame.shift, frame.scale * scales), None, divide(x, scales)


def _settings_of_classes(x: np.ndarray, rows_of: list[np.ndarray], settings: DictionarySettings) -> DictionarySettings:
    """Settings of every class: those of the largest, whose shape all share; what is common is learned already."""
    largest = max(rows.size for rows in rows_of)
    num_partial = max(int(np.isnan(x[rows]).any(axis=1).sum()) for rows in rows_of)
    plain = dataclasses.replace(settings, feature_noise=None, noise_shape=None, shared_span=None)
    return resolve(plain, largest, x.shape[1], num_partial)


def _batches(task: _Task) -> Iterator[list[int]]:
    """Classes that are sampled together: of similar size, complete, and as many as memory allows."""
    sizes = np.array([rows.size for rows in task.rows_of])
    settings = task.settings
    assert settings.num_candidates is not None
    assert settings.max_rank is not None
    per_row = 4 * settings.num_trees * settings.num_candidates * settings.max_rank
    has_missing = bool(np.isnan(task.x).any())
    batch: list[int] = []
    for number in np.argsort(-sizes, kind="stable"):
        fits = batch and not has_missing and SIZE_RATIO * sizes[number] >= sizes[batch[0]]
        if batch and not (fits and (len(batch) + 1) * per_row * sizes[batch[0]] <= BATCH_BYTES):
            yield batch
            batch = []
        batch.append(int(number))
    yield batch


def _fit_members(
    key: KeyArray, task: _Task, with_held_out: bool, on_step: Callable[[float, str], None]
) -> tuple[list[Posterior], list[np.ndarray]]:
    """Posterior of every class and, if asked for, the held-out log densities of its complete rows."""
    num_classes = len(task.rows_of)
    frame = Frame(np.zeros(task.x.shape[1]), np.ones(task.x.shape[1]))
    sizes = np.array([rows.size for rows in task.rows_of])
    members: dict[int, Posterior] = {}
    held_out: dict[int, np.ndarray] = {}
    for batch in _batches(task):
        largest = sizes[batch].max()
        # classes of similar size share a program even where they are not sampled together
        num_places = padded_size(int(sizes[sizes <= SIZE_RATIO * largest].max()))
        first, share = 0.95 * len(members) / num_classes, 0.95 * len(batch) / num_classes
        forests: list[Forest] = []
        for place, number in enumerate(batch):
            learned = 0.3 * share / len(batch)
            show = _part_of(on_step, first + place * learned, learned, f"class {number}: ")
            key_class = jax.random.fold_in(key, number)
            rows = task.x[task.rows_of[number]]
            grow = partial(grow_in_frame, key_class, rows, frame, task.settings, show, num_places)
            forests.append(kept_forest(task.kept and task.kept.part(f"class {number}"), grow))
        names = ", ".join(map(str, batch))
        show = _part_of(on_step, first + 0.3 * share, 0.7 * share, f"class {names}: ")
        key_batch = jax.random.fold_in(key, num_classes + batch[0])
        kept = task.kept and task.kept.part(f"classes {names}")
        drawn = _sample_together(key_batch, forests, task, show, kept)
        for number, forest, samples in zip(batch, forests, drawn, strict=True):
            members[number] = posterior_of(forest, samples, task.prior, task.sampler)
            if with_held_out:
                held_out[number] = held_out_log_density(forest, members[number])
    return [members[number] for number in range(num_classes)], [held_out[number] for number in sorted(held_out)]


def _part_of(
    on_step: Callable[[float, str], None], first: float, width: float, start: str
) -> Callable[[float, str], None]:
    """Shows a part of the work on the bar of all."""
    return lambda share, text: on_step(first + width * share, start + text)


def _sample_together(
    key: KeyArray,
    forests: list[Forest],
    task: _Task,
    on_step: Callable[[float, str], None],
    kept: Checkpoint | None,
) -> list[Samples]:
    """Draws of every forest, all of one shape, from one run of the kernel."""
    problems = [forest.problem(task.prior, task.sampler) for forest in forests]
    together = problems[0] if len(problems) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *problems)

    def on_segment(done: int, total: int) -> None:
        on_step(done / total, f"sweep {done} of {total}")

    samples = run_chains(key, together, task.sampler, on_segment, kept, task.mesh)
    num_trees = forests[0].num_trees
    starts = range(0, num_trees * len(forests), num_trees)
    return [jax.tree.map(lambda leaf, start=start: leaf[start : start + num_trees], samples) for start in starts]
