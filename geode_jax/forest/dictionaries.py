"""From rows without missing entries to trees and their dictionaries."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from geode_jax._runtime.buffers import release_free_memory
from geode_jax._runtime.progress import ShowProgress
from geode_jax.forest.choices import Chosen, choose
from geode_jax.forest.fill import refill_whitened
from geode_jax.forest.plan import Plan
from geode_jax.forest.trees import grow_trees
from geode_jax.learning.noise_covariance import (
    NoiseRoot,
    learn_covariances,
    learn_whitened_subspaces,
    whiten_training,
)
from geode_jax.learning.shared_span import learn_dictionaries, learn_root_cells
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.row_space import Axes, axes_of, principal_coordinates, uses_row_space
from geode_jax.rows.training import Training


class Learned(NamedTuple):
    """Trees and dictionaries of rows that are complete or have been filled.

    `subspaces` are learned from the rows of `training`, which are divided by `scales`. Where there are few rows for
    their features, both are in coordinates of the row space, and `axes` say where these are in R^D. With a
    `noise_root`, (D, D), or in a row space a `noise_deviation` along each of the axes, both are in whitened
    coordinates, each training row whitened by the noise covariance that was learned without its fold.
    """

    training: Training
    partitions: list[Partition]
    subspaces: list[Subspaces]
    scales: np.ndarray
    axes: Axes | None
    noise_root: np.ndarray | None
    noise_deviation: np.ndarray | None
    chosen: Chosen


def learn(
    training: Training,
    plan: Plan,
    seeds: list[int],
    show: ShowProgress,
    on_rank: Callable[[list[Partition], int], None] = lambda partitions, rank: None,
) -> Learned:
    """Trees, scales and dictionaries of rows without missing entries; arrays are divided by the scales in place.

    `on_rank` is called once the trees and the number of directions are known, before the dictionaries are.
    """
    partitions, scales = grow_trees(training, plan, seeds, show)
    training = training.divided(scales)
    x = training.x
    is_complete = training.is_observed is None
    space = principal_coordinates(x) if is_complete and uses_row_space(training.num_rows, x.shape[1]) else None
    if space is not None:
        training = training._replace(x=space.coordinates)
    show(0.5, "shared span, rank")
    chosen = _choose_in_row_space(training, plan, partitions[0], seeds[0])
    release_free_memory()
    on_rank(partitions, chosen.rank)
    trees = [(partition, plan.subspaces(chosen.rank, seed)) for partition, seed in zip(partitions, seeds, strict=True)]
    axes: Axes | None = None
    if (roots := chosen.roots) is not None:
        deviation = None
        if space is not None:
            axes, deviation = _whitened_axes(axes_of(x, space), roots[0])
        del x, space
        release_free_memory()
        known = () if chosen.first is None else (chosen.first,)
        chosen = chosen._replace(first=None)
        if not is_complete:
            show(0.5, "filling once more")
            known, training = (), refill_whitened(training, plan, *trees[0], roots, *known)
            roots = learn_covariances(training).roots(roots[0].deviation)
        own = roots[0]
        found = learn_whitened_subspaces(
            training, roots, trees, lambda share: show(0.5 + 0.5 * share, "learning dictionaries"), known
        )
        training, scales = whiten_training(training, roots), scales * own.unit
        matrix = own.matrix if axes is None else None
        return Learned(training, partitions, found, scales, axes, matrix, deviation, chosen)
    if space is not None:
        axes = axes_of(x, space, None if chosen.span is None else chosen.span.bases[0])
    del x, space
    release_free_memory()
    subspaces: list[Subspaces] = []
    root_cells = learn_root_cells(training, trees[0][1]) if chosen.span is None else None
    for number, (partition, options) in enumerate(trees):
        show(0.5 + 0.5 * number / len(seeds), "learning dictionaries")
        subspaces.append(learn_dictionaries(training, partition, options, chosen.span, root_cells))
    return Learned(training, partitions, subspaces, scales, axes, None, None, chosen)


def _whitened_axes(axes: Axes, noise: NoiseRoot) -> tuple[Axes, np.ndarray]:
    """The axes with the rows' mean whitened, and the deviation of the noise along each of them, (p,).

    The mean's own axis, if there is one, is outside of the rows' principal axes.
    """
    deviation = np.append(noise.deviation, np.full(axes.origin.size - noise.deviation.size, noise.deviation[-1]))
    return axes._replace(origin=axes.origin / (noise.unit * deviation)), deviation


def _choose_in_row_space(training: Training, plan: Plan, partition: Partition, seed: int) -> Chosen:
    """:func:`choose`, of filled rows in coordinates of their row space where there are few for their features.

    Their dictionaries are learned in R^D, which the sampler needs: only the trials have so many more directions that
    coordinates save work.
    """
    is_tried = plan.tries_spans or plan.seeks_rank or plan.span_rank > 0
    inside = training.in_row_space(plan.max_rank) if is_tried else training
    chosen = choose(inside, plan, partition, seed)
    if chosen.span is None or inside.axes is None:
        return chosen
    return chosen._replace(span=chosen.span.in_features(inside.axes))
