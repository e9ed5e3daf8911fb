"""Stage one's learning: trees, noise scales, the shared span, and dictionaries of complete or filled rows."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from geode_jax.build.completed import Completed
from geode_jax.build.evidence import LARGEST_SAMPLE, Evidence, cross_fitted_evidence
from geode_jax.build.heap import release_free_memory
from geode_jax.build.neighbours import neighbour_graph
from geode_jax.build.noise import FeatureScales, learn_feature_scales, middle_cells
from geode_jax.build.partition import Partition, partition_rows, route_rows
from geode_jax.build.row_space import is_worth, row_coordinates
from geode_jax.build.rows import Rows, as_array, divide
from geode_jax.build.shape import Shape, choose_shapes, learn_covariances, learn_subspaces_in_shapes, whiten
from geode_jax.build.span import Span, choose_span, learn_dictionaries, learn_span, learn_whole_span
from geode_jax.build.standardise import Frame
from geode_jax.build.subspace import Subspaces, judging_folds
from geode_jax.build.units import choose_units
from geode_jax.settings import DictionarySettings, SharedSpan


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


def grow_trees(
    x: Rows,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    seeds: list[int],
    on_step: Callable[[float, str], None],
) -> tuple[list[Partition], np.ndarray]:
    """Trees and the noise scales of the features; takes half of the way."""
    assert settings.max_rank is not None
    partitions = []
    near = row_coordinates(x) if is_worth(*x.shape) else x  # distances are all that a tree asks for
    for number, seed in enumerate(seeds):
        on_step(0.4 * number / len(seeds), "growing trees")
        partitions.append(_grow_tree(near, settings, number, seed))
    if settings.feature_noise is None:
        return partitions, np.ones(x.shape[1])
    on_step(0.4, "noise scales")
    return partitions, noise_scales(x, middle_cells(partitions[0]), is_observed, settings, seeds[0]).scales


def noise_scales(
    x: Rows, cells: Partition, is_observed: np.ndarray | None, settings: DictionarySettings, seed: int
) -> FeatureScales:
    """The noise scales of the features of x, (n, D), from cells side by side, as the settings want them."""
    assert settings.feature_noise is not None
    assert settings.max_rank is not None
    options = dataclasses.asdict(settings.feature_noise)
    return learn_feature_scales(x, cells, settings.max_rank, is_observed, seed=seed, **options)


def units(x: Rows, settings: DictionarySettings, seed: int) -> np.ndarray:
    """Divisors of the features of x, (n, D) with NaN where missing: 1, unless features have noise scales of their own
    and held-out rows want units of their own too.
    """
    if settings.feature_noise is None:
        return np.ones(x.shape[1])
    assert settings.max_rank is not None
    assert settings.num_neighbors is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    return choose_units(
        x,
        lambda rows, cells, is_observed: noise_scales(rows, cells, is_observed, settings, seed),
        max_rank=settings.max_rank,
        num_neighbors=settings.num_neighbors,
        depth=settings.depth,
        min_cell_size=settings.min_cell_size,
        seed=seed,
    )


def divide_by_units(x: Rows, frame: Frame, settings: DictionarySettings, seed: int) -> tuple[Rows, Frame]:
    """The rows divided by their :func:`units`, where they lie if they are an array, and their frame after it."""
    divisors = units(x, settings, seed)
    if (divisors != 1.0).any():
        x = divide(x, divisors)
    return x, frame._replace(scale=frame.scale * divisors)


def _grow_tree(x: Rows, settings: DictionarySettings, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed, their neighbour count, and the rows they are learned from."""
    assert settings.num_neighbors is not None
    assert settings.tree_rows is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    num_neighbors = min(settings.num_neighbors + 2 * number, x.shape[0] - 1)
    if settings.tree_rows >= x.shape[0]:
        x = as_array(x)
        graph = neighbour_graph(x, num_neighbors, seed)
        return partition_rows(x, graph, settings.depth, settings.min_cell_size, seed)
    known = np.sort(np.random.default_rng(seed).choice(x.shape[0], settings.tree_rows, replace=False))
    some = x[known]
    graph = neighbour_graph(some, min(num_neighbors, known.size - 1), seed)
    fewest = max(2, settings.min_cell_size * known.size // x.shape[0])
    partition = partition_rows(some, graph, settings.depth, fewest, seed)
    return route_rows(x, partition, known, settings.min_cell_size)


def _choose(
    completed: Completed,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    partition: Partition,
    folds: np.ndarray | None,
    seed: int,
    num_features: int,
    *,
    may_lower_rank: bool,
    may_have_shape: bool,
) -> tuple[Span | None, list[Shape] | None, DictionarySettings]:
    """A shared span, or a shape of the noise, or neither, and settings that tell what was found, by the first tree."""
    assert settings.max_rank is not None
    x = completed.x
    shared, parent_rows = settings.shared_span, settings.parent_rows or 0.0
    span, shapes, noise_shape, gain = None, None, settings.noise_shape, 0.0
    may_have_shape &= noise_shape is not None and num_features <= noise_shape.max_features
    largest_rank = settings.max_rank

    def rank_by(evidence: Evidence) -> int:
        return evidence.needed_rank() if may_lower_rank else largest_rank

    if shared is not None and shared.rank is not None:
        span = learn_whole_span(completed, folds, seed, shared.rank)
        if span.bases.shape[2] == 0:  # too few rows for any direction
            span = None
    elif folds is not None and (shared is not None or may_lower_rank or may_have_shape):
        judging = judging_folds(folds, LARGEST_SAMPLE)
        own = learn_dictionaries(completed, partition, settings.max_rank, judging, seed, parent_rows)
        evidence = cross_fitted_evidence(x, partition, own, judging, is_observed, num_features)
        without = evidence.log_likelihood()
        needed_rank = rank_by(evidence)
        del own, evidence  # may be as large as the data
        if shared is not None:
            found = choose_span(
                completed, partition, settings.max_rank, judging, seed, without, parent_rows, is_observed, num_features
            )
            if found is not None:
                span, gain = found.span, found.gain
                needed_rank = rank_by(found.evidence)
            del found
        if may_have_shape:
            release_free_memory()
            chosen = choose_shapes(x, partition, settings.max_rank, judging, seed, without, parent_rows)
            if chosen is not None and chosen.gain > gain:
                covariances = chosen.covariances if judging is folds else learn_covariances(x, folds)
                span, shapes = None, covariances.shapes(chosen.deviation)
                needed_rank = rank_by(chosen.evidence)
        if span is not None and judging is not folds:
            span = learn_whole_span(completed, folds, seed, span.bases.shape[2])
        settings = dataclasses.replace(settings, max_rank=needed_rank)
    settings = dataclasses.replace(settings, shared_span=None, noise_shape=None if shapes is None else noise_shape)
    if span is None:
        return None, shapes, settings
    # no node has more directions than the span
    rank = span.bases.shape[2]
    assert settings.max_rank is not None
    return (
        span,
        None,
        dataclasses.replace(settings, shared_span=SharedSpan(rank), max_rank=min(settings.max_rank, rank)),
    )
