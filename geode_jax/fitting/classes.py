"""Fit one posterior per class to an array and labels, in common coordinates."""

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from geode_jax._checks import check_instance, check_key
from geode_jax._files.checkpoint import Checkpoint
from geode_jax._runtime.collectives import lost_processes_are_told
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._runtime.progress import ShowProgress, part_of, progress_bar
from geode_jax._runtime.warning import warn_user
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.fitting.calibration import calibrated_powers
from geode_jax.fitting.local_rows import bring_rows
from geode_jax.fitting.memory import bytes_needed, warn_if_too_large
from geode_jax.fitting.row_files import checked_rows
from geode_jax.fitting.stages import Request, kept_forest, posterior_of, sample_forests
from geode_jax.forest.device_products import computing_here
from geode_jax.forest.feature_scales import divide_by_units, noise_scales
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import grow_in_frame
from geode_jax.forest.plan import Plan
from geode_jax.learning.class_span import Reduction, learn_reduction
from geode_jax.partition.metis import Partition
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.held_out import held_out_log_density
from geode_jax.rows.files import RowFiles
from geode_jax.rows.frame import Frame, learn_frame, to_model
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.row_space import uses_row_space
from geode_jax.rows.view import divide, has_missing
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings

# Directions of the span common to all classes where its rank is left open.
SPAN_RANK = 50
# Bytes of statistics of the classes that are sampled together: enough to keep any device busy.
BATCH_BYTES = 2**30
# Coordinates that another machine has found differ by less, relatively, where they are the same but for rounding.
SAME_COORDINATES = 1e-3
# Classes that are sampled together differ in size by at most this ratio, as they are padded to the same size.
SIZE_RATIO = 1.5


class _Task(NamedTuple):
    """What all classes share: model coordinates, the rows of each class, the plan, the request and the checkpoint.

    `sizes`: (P, G), how many rows of every class each process has. `devices`: how many each has for its rows; empty if
    one process has all rows.
    `is_reduced`: whether the coordinates are those in the span common to all classes. The plan is that of the largest
    class, whose array shapes all classes use.
    """

    x: np.ndarray
    rows_of: list[np.ndarray]
    sizes: np.ndarray
    devices: tuple[int, ...]
    plan: Plan
    request: Request
    kept: Checkpoint | None
    is_reduced: bool
    processes: Processes

    def places(self, largest: int) -> int:
        """Places for the rows of classes of up to `largest` rows, alike for all such classes."""
        if self.processes.is_alone:
            return self.plan.places(largest)
        own = self.sizes[:, self.sizes.sum(axis=0) <= largest].max(axis=1)
        return self.plan.among(tuple(own.tolist()), self.devices, self.processes.index).num_places

    def processes_of(self, number: int) -> Processes:
        """The processes that the rows of a class are divided among."""
        if self.processes.is_alone:
            return self.processes
        return dataclasses.replace(self.processes, sizes=tuple(self.sizes[:, number].tolist()))


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
    process_local: bool = False,
) -> ClassPosterior:
    """Fit one GEODE density per class, for :func:`geode_jax.class_log_probabilities`.

    Units, noise scales of the features and the span of the leading directions are common to all classes: if they
    differed, a class with little noise would win rows that it describes badly. With many features and enough rows,
    classes are densities of the coordinates in that span, and what is outside does not depend on the class. The rank
    of the span is that of ``dictionary.shared_span``, by default 50; ``shared_span=None`` means no span.

    **Arguments:**

    - `key`, `X`, `dictionary`, `prior`, `sampler`, `dtype`, `progress`, `checkpoint`, `mesh`: as in
      :func:`geode_jax.fit`, but held-out rows do not choose the number of directions: where `max_rank` is None it is
      half of the features, or of the span's directions, at least 10 and at most 100. If X has NaN, there is no span,
      and no noise scales of features. Rows in files are brought into memory.
    - `labels`: class of each row, (n,), integers 0..G-1, every one of them with at least two rows.
    - `class_probabilities`: (G,), positive; None takes the shares of the rows.
    - `process_local`: X and `labels` hold only the rows of this process, as in :func:`geode_jax.fit`; this process
      may have none of some classes. Of every class, all processes together need more rows than half the number of
      features (or of directions of the span). Classes are then sampled one after the other; one process samples classes
      of similar size together, and draws others.
    - `calibrate`: raise class densities to the power that predicts training rows best, each held out from its true
      class, because densities in many dimensions are overconfident. False leaves them unchanged, and so does Ctrl-C
      meanwhile, with a RuntimeWarning.

    Raises TypeError or ValueError naming the argument, and FloatingPointError if sampling became non-finite.
    """
    key = check_key(key)
    check_instance(calibrate, "calibrate", bool)
    request = Request.checked(
        dictionary=dictionary,
        prior=prior,
        sampler=sampler,
        dtype=dtype,
        progress=progress,
        checkpoint=checkpoint,
        mesh=mesh,
        process_local=process_local,
    )
    processes: Processes = ALONE
    devices: tuple[int, ...] = ()
    if request.process_local:
        settings = [*request.compared, repr(class_probabilities), calibrate]
        with lost_processes_are_told(request.mesh):
            data, processes, devices = bring_rows(X, request.mesh, key, settings, partial(_check_labels, labels))
    else:
        data = checked_rows(X, min_rows=2, allow_nan=True)
    index = _check_labels(labels, len(data))
    if has_missing(data).any():
        request.check_missing()
    with (
        lost_processes_are_told(request.mesh),
        jax_settings(request.dtype),
        request.open_checkpoint(key, [*(data.files if isinstance(data, RowFiles) else [data]), index]) as kept,
        progress_bar(progress) as show,
    ):
        sizes = _sizes_of_classes(index, processes)
        counts = sizes.sum(axis=0)
        given = check_probabilities(class_probabilities, counts.size)
        log_prior = np.log(counts / counts.sum() if given is None else given)
        if kept is not None and not processes.is_alone:
            kept = kept.of_process(processes, [*sizes.ravel().tolist(), *devices])
        rows_of = [np.flatnonzero(index == number) for number in range(sizes.shape[1])]
        show(0.0, "common coordinates")
        frame, reduction, x = _common_coordinates(data, rows_of, request, processes)
        if kept is not None:
            _keep_coordinates(kept, frame, reduction)
        _check_enough(sizes, x.shape[1], processes)
        plan = _plan_of_classes(x, rows_of, sizes, request)
        task = _Task(x, rows_of, sizes, devices, plan, request, kept, reduction is not None, processes)
        warn_if_too_large(_bytes_of_classes(task))
        members, held_out = _fit_members(key, task, calibrate, part_of(show, 0.0, 0.95))
        parts = tuple(members), reduction, frame.shift, frame.scale, log_prior
        found = ClassPosterior(*parts, 1.0, 0.0, frame.features)
        if not calibrate:
            return found
        show(0.95, "calibrating")
        try:
            powers = calibrated_powers(found, data, index, held_out, processes)
        except KeyboardInterrupt:
            if jax.process_count() > 1:  # the others go on
                raise
            warn_user("interrupted: the densities of the classes are complete, but are not calibrated")
            return found
        # in their last digits they may depend on a process's devices
        powers = tuple(processes.each(np.array(powers))[0].tolist())
        show(1.0, "fitted classes")
        return ClassPosterior(*parts, *powers, frame.features)


def _check_labels(labels: ArrayLike, num_rows: int) -> np.ndarray:
    """Labels as integers."""
    if np.ma.is_masked(labels):
        raise ValueError("labels: expected a label for every row, got masked ones")
    index = np.asarray(labels, int if num_rows == 0 and np.size(labels) == 0 else None)
    if index.shape != (num_rows,) or index.dtype.kind not in "iu":
        raise ValueError(f"labels: expected {num_rows} integers, got {index.dtype} of shape {index.shape}")
    if index.min(initial=0) < 0:
        raise ValueError(f"labels: expected integers from 0, got {index.min()}")
    return index.astype(np.int64)


def _sizes_of_classes(index: np.ndarray, processes: Processes) -> np.ndarray:
    """How many rows of every class each process has, (P, G)."""
    num_classes = int(processes.each(index.max(initial=-1)).max()) + 1
    num_rows = processes.count(index.size)
    if 2 * num_classes > num_rows:  # or counting a class for every number up to the largest would take any memory
        raise ValueError(
            f"labels: expected at least 2 rows of every class, got {num_rows} rows of {num_classes} classes, 0 to"
            f" {num_classes - 1}"
        )
    sizes = processes.each(np.bincount(index, minlength=num_classes))
    counts = sizes.sum(axis=0)
    if counts.min() < 2:
        which = int(np.argmin(counts))
        raise ValueError(f"labels: expected at least 2 rows of every class, got {counts[which]} of class {which}")
    return sizes


def _check_enough(sizes: np.ndarray, num_features: int, processes: Processes) -> None:
    """Raise ValueError if a class has too few rows to be learned by several processes."""
    counts = sizes.sum(axis=0)
    if not processes.is_alone and uses_row_space(int(counts.min()), num_features):
        raise ValueError(
            f"process_local: expected more than {num_features // 2} rows of every class in all processes together, got"
            f" {counts.min()} of class {np.argmin(counts)}; pass all rows in every process, without process_local"
        )


def check_probabilities(
    probabilities: ArrayLike | None, num_classes: int, name: str = "class_probabilities"
) -> np.ndarray | None:
    """Class probabilities as numbers, (G,); None if none are given."""
    if probabilities is None:
        return None
    try:
        given = np.asarray(probabilities, dtype=np.float64)
    except (TypeError, ValueError):
        given = np.empty(0)
    if given.shape != (num_classes,) or not (given > 0.0).all() or not np.isclose(given.sum(), 1.0):
        raise ValueError(f"{name}: expected {num_classes} positive numbers that add up to 1, got {probabilities!r}")
    return given


def _common_coordinates(
    data: np.ndarray | RowFiles, rows_of: list[np.ndarray], request: Request, processes: Processes = ALONE
) -> tuple[Frame, Reduction | None, np.ndarray]:
    settings, processes = request.dictionary, computing_here(processes)
    frame = learn_frame(data, processes)
    x = to_model(data, frame, request.dtype)
    plan = Plan.of(settings, processes.count(len(x)), x.shape[1])
    _, frame, _ = divide_by_units(x, frame, plan, 0, processes)  # in place
    is_observed = ~np.isnan(x)
    if settings.shared_span is not None and is_observed.all():
        reduction = learn_reduction(x, settings.shared_span.rank or SPAN_RANK, 0, processes)
        if reduction is not None:
            return frame, reduction, reduction.coordinates(x)
    if settings.feature_noise is None or not is_observed.all():
        return frame, None, x
    scales = noise_scales(x, None, Partition.among(processes, 0, tuple(rows_of)), plan.noise(seed=0))
    return frame.divided(scales), None, divide(x, scales)


def _keep_coordinates(kept: Checkpoint, frame: Frame, reduction: Reduction | None) -> None:
    """Save the coordinates common to all classes; ValueError if the classes of an earlier run were learned in others.

    They are found anew by a fit that goes on, which another machine, or other versions of NumPy or SciPy, may do
    otherwise: a direction may change its sign. Differences of rounding, up to `SAME_COORDINATES`, are let pass.
    """
    own = {"shift": frame.shift, "scale": frame.scale, **({} if reduction is None else reduction._asdict())}
    found = kept.read("coordinates")
    if found is None:
        kept.write("coordinates", {}, own)
        return
    earlier = found[1]
    # of every feature in its own unit
    units: dict[str, np.ndarray | float] = {name: float(np.abs(value).max()) for name, value in own.items()}
    units |= {"shift": frame.scale, "scale": frame.scale}
    if earlier.keys() != own.keys() or not all(_is_same(earlier[name], own[name], units[name]) for name in own):
        raise ValueError(
            f"checkpoint: the classes in {kept.folder} were learned in other coordinates than this run has found, by"
            " another machine or with other versions of NumPy or SciPy; go on there, or use a new folder"
        )


def _is_same(one: np.ndarray, other: np.ndarray, unit: np.ndarray | float) -> bool:
    return one.shape == other.shape and bool((np.abs(one - other) <= SAME_COORDINATES * unit).all())


def _plan_of_classes(x: np.ndarray, rows_of: list[np.ndarray], sizes: np.ndarray, request: Request) -> Plan:
    """The plan that all classes use, without the parts that are common to all classes and already learned.

    Cuts are not refined: coordinates of many features would be taken for a table's.
    """
    largest = int(sizes.sum(axis=0).max())
    num_partial = max(int(np.isnan(x[rows]).any(axis=1).sum()) for rows in rows_of)
    plain = dataclasses.replace(
        request.dictionary, feature_noise=None, noise_covariance=None, shared_span=None, refined_cuts=False
    )
    plan = Plan.of(plain, largest, x.shape[1], num_partial).with_fixed_rank().on_mesh(request.row_devices)
    return dataclasses.replace(plan, num_places=plan.places(largest))


def _bytes_of_classes(task: _Task) -> dict[str, int]:
    """Bytes of the large arrays of all classes together; only one batch of them has its statistics at a time."""
    plan, request = task.plan, task.request
    total = dict.fromkeys(("dictionaries", "trees", "statistics", "chains", "draws"), 0) | {"rows": task.x.nbytes}
    filled = 0
    for batch in _batches(task):
        parts = []
        for number in batch:
            count = int(task.sizes[:, number].sum())
            own = dataclasses.replace(plan, num_rows=count, tree_rows=min(plan.tree_rows, count))
            num_rows = task.rows_of[number].size
            parts.append(bytes_needed(own, request.sampler, request.dtype.itemsize, num_rows=num_rows))
        for name in ("dictionaries", "draws"):
            total[name] += sum(part[name] for part in parts)
        total["trees"] = max(total["trees"], *(part["trees"] for part in parts))
        for name in ("statistics", "chains"):
            total[name] = max(total[name], sum(part[name] for part in parts))
        if plan.num_partial > 0:  # rows of one class at a time, as they are filled
            filled = max(filled, *(part["rows"] for part in parts))
    total["rows"] += filled
    return total


def _batches(task: _Task) -> Iterator[list[int]]:
    """Classes that are sampled together: of similar size, without missing values, and as many as memory allows.

    One at a time where processes bring their own rows: each has another share of every class.
    """
    sizes = task.sizes.sum(axis=0)
    plan = task.plan
    per_row = task.request.dtype.itemsize * plan.request.num_trees * plan.num_candidates(plan.max_rank) * plan.max_rank
    has_missing = bool(np.isnan(task.x).any())
    batch: list[int] = []
    for number in np.argsort(-sizes, kind="stable"):
        fits = batch and not has_missing and task.processes.is_alone and SIZE_RATIO * sizes[number] >= sizes[batch[0]]
        if batch and not (fits and (len(batch) + 1) * per_row * sizes[batch[0]] <= BATCH_BYTES):
            yield batch
            batch = []
        batch.append(int(number))
    yield batch


def _fit_members(
    key: KeyArray, task: _Task, with_held_out: bool, show: ShowProgress
) -> tuple[list[Posterior], list[np.ndarray]]:
    """Posterior of every class and, with `with_held_out`, leave-one-out log densities of its complete rows."""
    num_classes = len(task.rows_of)
    frame = Frame(np.zeros(task.x.shape[1]), np.ones(task.x.shape[1]))
    sizes = task.sizes.sum(axis=0)
    members: dict[int, Posterior] = {}
    held_out: dict[int, np.ndarray] = {}
    for batch in _batches(task):
        largest = sizes[batch].max()
        # classes of similar size share a compiled program even if they are not sampled together
        num_places = task.places(int(sizes[sizes <= SIZE_RATIO * largest].max()))
        plan = dataclasses.replace(task.plan, num_places=num_places)
        if not task.processes.is_alone:
            plan = dataclasses.replace(plan, row_devices=task.devices[task.processes.index])
        processes = task.processes_of(batch[0])
        first, last = len(members) / num_classes, (len(members) + len(batch)) / num_classes
        show_batch = part_of(show, first, last)
        forests: list[Forest] = []
        for place, number in enumerate(batch):
            shares = (0.3 * place / len(batch), 0.3 * (place + 1) / len(batch))
            show_class = part_of(show_batch, *shares, f"class {number}: ")
            key_class = jax.random.fold_in(key, number)
            rows = task.x[task.rows_of[number]]
            grow = partial(grow_in_frame, key_class, rows, frame, plan, show_class, processes=processes)
            part = task.kept and task.kept.part(f"class {number}")
            forests.append(kept_forest(part, grow, task.request.mesh, processes))
        names = ", ".join(map(str, batch))
        drawn = sample_forests(
            jax.random.fold_in(key, num_classes + batch[0]),
            forests,
            task.request,
            part_of(show_batch, 0.3, 1.0, f"class {names}: "),
            task.kept and task.kept.part(f"classes from {batch[0]}"),
            is_last=len(members) + len(batch) == num_classes,
            processes=processes,
        )
        for number, forest, samples in zip(batch, forests, drawn, strict=True):
            request = task.request
            member = posterior_of(forest, samples, request.prior, request.sampler, mesh=request.mesh)
            # coordinates in the common span are few: those of a class's row space within would gain nothing
            members[number] = member.spread_out() if task.is_reduced else member
            if with_held_out:
                held_out[number] = held_out_log_density(forest, member)
    return [members[number] for number in range(num_classes)], [held_out[number] for number in sorted(held_out)]
