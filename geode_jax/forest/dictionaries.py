"""Stage one's learning: trees, noise scales, the shared span, and dictionaries of complete or filled rows."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from geode_jax._runtime.buffers import release_free_memory
from geode_jax.forest.choices import _choose
from geode_jax.forest.trees import grow_trees
from geode_jax.learning.noise_covariance import Shape, learn_subspaces_in_shapes, whiten
from geode_jax.learning.shared_span import Span, learn_dictionaries, learn_span
from geode_jax.learning.subspaces import Subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.completed import Completed
from geode_jax.rows.row_space import is_worth, row_coordinates
from geode_jax.rows.view import Rows, as_array
from geode_jax.settings import DictionarySettings


class Learned(NamedTuple):
    """Trees and dictionaries of rows that are complete or have been filled.

    `subspaces` are those of the rows `x` divided by `scales`. Where there are few rows for their features, they and `x`
    are in coordinates of the row space, and `whole` learns the dictionaries of all rows in R^D as they are asked for:
    each may be as large as the data. With a `shape` of the noise they are of whitened coordinates, those of a row in
    `x` being by the shape that left its fold out.
    """

    scales: np.ndarray
    settings: DictionarySettings
    partitions: list[Partition]
    x: Rows
    subspaces: list[Subspaces]
    whole: Iterator[Subspaces] | None
    shape: Shape | None = None


def learn(
    completed: Completed,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    folds: np.ndarray | None,
    seeds: list[int],
    on_step: Callable[[float, str], None],
    *,
    may_lower_rank: bool,
) -> Learned:
    """Trees, scales and dictionaries of rows without missing entries, whose arrays are divided by the scales in place.

    `is_observed` tells which entries were not filled; None where none were. With `may_lower_rank`, nodes have no more
    directions than the rows tell of.
    """
    partitions, scales = grow_trees(completed.x, is_observed, settings, seeds, on_step)
    completed = completed.divided(scales)
    x = completed.x
    has_coordinates = folds is not None and completed.without is None and is_worth(*x.shape)
    if has_coordinates:
        completed = Completed(row_coordinates(x), None)
    on_step(0.5, "shared span, rank")
    may_have_shape = completed.without is None and not has_coordinates
    span, shapes, settings = _choose(
        completed,
        is_observed,
        settings,
        partitions[0],
        folds,
        seeds[0],
        x.shape[1],
        may_lower_rank=may_lower_rank,
        may_have_shape=may_have_shape,
    )
    release_free_memory()
    assert settings.max_rank is not None
    max_rank, parent_rows = settings.max_rank, settings.parent_rows or 0.0
    if shapes is not None:
        assert folds is not None
        found = learn_subspaces_in_shapes(
            x,
            shapes,
            partitions,
            max_rank,
            folds,
            seeds,
            parent_rows,
            lambda share: on_step(0.5 + 0.5 * share, "learning dictionaries"),
        )
        scales = scales * shapes[0].unit
        return Learned(scales, settings, partitions, whiten(as_array(x), shapes, folds), found, None, shapes[0])
    subspaces: list[Subspaces] = []
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        on_step(0.5 + 0.5 * number / len(seeds), "learning dictionaries")
        subspaces.append(learn_dictionaries(completed, partition, max_rank, folds, seed, parent_rows, span))
    whole = _whole_dictionaries(x, partitions, max_rank, seeds, parent_rows, span) if has_coordinates else None
    return Learned(scales, settings, partitions, completed.x, subspaces, whole)


def _whole_dictionaries(
    x: Rows, partitions: list[Partition], max_rank: int, seeds: list[int], parent_rows: float, span: Span | None
) -> Iterator[Subspaces]:
    """Every tree's dictionary of all rows in R^D, one after the other, within as many directions as `span` has."""
    rows = Completed(x, None)
    shared = None if span is None else learn_span(x, None, seeds[0], max_rank=span.bases.shape[2])
    for partition, seed in zip(partitions, seeds, strict=True):
        release_free_memory()
        yield learn_dictionaries(rows, partition, max_rank, None, seed, parent_rows, shared)
