"""Stage one: from an array to a forest of dictionaries and the statistics of its rows."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from geode_jax._checks import check_dtype, check_instance, check_key, check_training_data
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.build.candidates import find_candidates
from geode_jax.build.evidence import fit_quick_mixture
from geode_jax.build.fill import fill_low_rank
from geode_jax.build.neighbours import neighbour_graph
from geode_jax.build.noise import learn_feature_scales, middle_cells
from geode_jax.build.partition import Partition, default_depth, partition_rows, route_rows
from geode_jax.build.row_space import is_worth, row_coordinates
from geode_jax.build.span import Span, choose_span, learn_span, learn_subspaces_in_span
from geode_jax.build.standardise import Frame, divide, learn_frame, to_model
from geode_jax.build.subspace import Subspaces, assign_folds, each_fold, join_groups, learn_subspaces
from geode_jax.candidates import AnyStatistics, Probe, candidate_statistics
from geode_jax.completion import conditional_means, without_folds
from geode_jax.dictionary import Dictionary, freeze
from geode_jax.forest import Forest
from geode_jax.partial_rows import PartialRows, group_rows, reduce_rows, stack_trees
from geode_jax.settings import DictionarySettings, SharedSpan
from geode_jax.statistics import Statistics, cross_fitted_statistics

# The sampler reads (F, K, n, d) numbers in every sweep, where they are within this many bytes in float32.
STATISTICS_BYTES = 2**32
# Nodes that a row may belong to where the statistics at all nodes take more than that: as many as fit.
FEWEST_CANDIDATES, MOST_CANDIDATES = 8, 16
# Rows are kept at all nodes, to see what their candidates leave out, within this many bytes.
PROBE_BYTES = 2**28
# Rows with missing features are drawn in groups where a sweep over all of them takes more than this many operations
# (matrices times d^3) per tree.
GROUP_COST = 1e8
# Nodes that a row with missing features may belong to: its matrices at each are held.
PARTIAL_CANDIDATES = 6
# Trees whose conditional means fill missing entries.
FILL_TREES = 4
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

    `max_rank`: 50, but at most half the features beyond 20, and no more than the data allow (with as many directions as
    features, nothing tells of the noise), or than keeps the matrices of `num_partial` rows with missing features at
    four candidate nodes of all trees within 4 GiB. `num_neighbors`: 10, or more for very large n. `tree_rows`: all, up
    to 100,000. `min_cell_size`: 10 rows, below which a cell's own centre costs more than it brings. `depth`: until
    cells reach twice that size, at most 7. `num_candidates`: all nodes, or where the float32 statistics of all trees
    take more than 4 GiB as many as do not, 8 to 16.
    """
    limit = max(1, min(num_features, num_rows) - 1)
    max_rank = settings.max_rank
    if max_rank is None:
        max_rank = min(50, max(10, num_features // 2))
        if num_partial > 0:
            max_rank = min(max_rank, max(1, int(np.sqrt(STATISTICS_BYTES / (32 * settings.num_trees * num_partial)))))
    max_rank = min(max_rank, limit)
    num_neighbors = min(settings.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
    tree_rows = min(settings.tree_rows or TREE_ROWS, num_rows)
    min_cell_size = settings.min_cell_size or max(2, min(10, num_rows // 4))
    depth = settings.depth
    if depth is None:
        depth = default_depth(num_rows, 2 * min_cell_size)
    num_nodes = 2 ** (depth + 1) - 1
    num_candidates = settings.num_candidates
    if num_candidates is None:
        fitting = STATISTICS_BYTES // (4 * settings.num_trees * num_rows * max_rank)
        num_candidates = num_nodes if fitting >= num_nodes else np.clip(fitting, FEWEST_CANDIDATES, MOST_CANDIDATES)
    return dataclasses.replace(
        settings,
        max_rank=max_rank,
        num_neighbors=num_neighbors,
        tree_rows=tree_rows,
        min_cell_size=min_cell_size,
        depth=depth,
        num_candidates=int(min(num_candidates, num_nodes)),
    )


class Completed(NamedTuple):
    """Rows without missing entries: `x` (n, D), and where there were any, as filled without knowing of each fold."""

    x: np.ndarray
    without: list[np.ndarray] | None


class Learned(NamedTuple):
    """Trees and dictionaries of rows that are complete or have been filled.

    `subspaces` are those of the rows `x` divided by `scales`. Where there are few rows for their features, they and `x`
    are in coordinates of the row space, and `whole` has the dictionaries of all rows in R^D.
    """

    scales: np.ndarray
    settings: DictionarySettings
    partitions: list[Partition]
    x: np.ndarray
    subspaces: list[Subspaces]
    whole: list[Subspaces] | None


def grow_forest(
    key: KeyArray,
    data: np.ndarray,
    settings: DictionarySettings,
    dtype: np.dtype,
    on_step: Callable[[float, str], None],
) -> Forest:
    """:func:`learn_forest` on checked arguments, within the precision of `dtype`; tells `on_step` the share done."""
    settings = resolve(settings, data.shape[0], data.shape[1], int(np.isnan(data).any(axis=1).sum()))
    frame = learn_frame(data)
    return grow_in_frame(key, to_model(data, frame, dtype), frame, settings, on_step)


def grow_in_frame(
    key: KeyArray,
    x: np.ndarray,
    frame: Frame,
    settings: DictionarySettings,
    on_step: Callable[[float, str], None],
    num_places: int | None = None,
) -> Forest:
    """The forest of rows in model coordinates, with settings that leave nothing to the data's shape.

    `x` is the fit's own copy, and is divided by the noise scales of the features where it lies.

    `num_places`: places for complete rows, at least their number, where several forests are to share a program.
    """
    is_observed = ~np.isnan(x)
    is_partial = ~is_observed.all(axis=1)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32))
    seeds = [int(seed) for seed in rng.integers(2**31, size=settings.num_trees)]
    folds = None
    if settings.cross_fit is not None:
        folds = assign_folds(x.shape[0], settings.cross_fit.num_folds, rng)
    if not is_partial.any():
        learned = _learn(Completed(x, None), None, settings, folds, seeds, on_step)
        rows = None
    else:
        assert settings.max_rank is not None
        on_step(0.0, "first fill")
        x = fill_low_rank(x, is_observed, settings.max_rank, seeds[0])
        completed = _complete(
            x, is_observed, settings, folds, seeds, lambda share, text: on_step(0.5 * share, f"filling: {text}")
        )
        learned = _learn(
            completed, is_observed, settings, folds, seeds, lambda share, text: on_step(0.5 + 0.5 * share, text)
        )
        rows = _partial_rows(learned, is_observed, folds)
    on_step(1.0, "learned dictionaries")
    trees = range(len(learned.partitions))
    pairs = [_freeze_tree(learned, number, is_observed, folds, num_places) for number in trees]
    dictionary, statistics, probe = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    return Forest(dictionary, statistics, rows, probe, frame.shift, frame.scale * learned.scales, learned.settings)


def _learn(
    completed: Completed,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    folds: np.ndarray | None,
    seeds: list[int],
    on_step: Callable[[float, str], None],
) -> Learned:
    partitions, scales = _grow_trees(completed.x, is_observed, settings, seeds, on_step)
    for x in (completed.x, *(completed.without or [])):
        divide(x, scales, out=x)
    x = completed.x
    has_coordinates = folds is not None and completed.without is None and is_worth(*x.shape)
    if has_coordinates:
        completed = Completed(row_coordinates(x), None)
    on_step(0.5, "shared span")
    span = _find_span(completed.x, is_observed, settings, partitions[0], folds, seeds[0], x.shape[1])
    settings = _with_span(settings, span)
    subspaces: list[Subspaces] = []
    whole: list[Subspaces] | None = [] if has_coordinates else None
    whole_span = learn_span(x, None, seeds[0]).leading(span.bases.shape[2]) if span and has_coordinates else None
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        on_step(0.5 + 0.5 * number / len(seeds), "learning dictionaries")
        subspaces.append(_learn_subspaces(completed, partition, settings, folds, seed, span))
        if whole is not None:
            whole.append(_learn_subspaces(Completed(x, None), partition, settings, None, seed, whole_span))
    return Learned(scales, settings, partitions, completed.x, subspaces, whole)


def _learn_subspaces(
    completed: Completed,
    partition: Partition,
    settings: DictionarySettings,
    folds: np.ndarray | None,
    seed: int,
    span: Span | None,
) -> Subspaces:
    """A tree's dictionaries of all rows and without each fold."""
    assert settings.max_rank is not None
    rank, parent_rows = settings.max_rank, settings.parent_rows or 0.0
    left_out = each_fold(folds)
    if completed.without is None:
        if span is None:
            return learn_subspaces(completed.x, partition, rank, folds, seed, parent_rows)
        return learn_subspaces_in_span(completed.x, span, partition, rank, folds, seed, parent_rows)
    # every group has rows of its own, filled without its fold
    parts = []
    for x, group in zip([completed.x, *completed.without], left_out, strict=True):
        if span is None:
            found = learn_subspaces(x, partition, rank, folds, seed, parent_rows, [group])
        else:
            own = learn_span(x, folds, seed, [group]).leading(span.bases.shape[2])
            found = learn_subspaces_in_span(x, own, partition, rank, folds, seed, parent_rows, [group])
        parts.append(found)
    return join_groups(parts)


def _grow_trees(
    x: np.ndarray,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    seeds: list[int],
    on_step: Callable[[float, str], None],
) -> tuple[list[Partition], np.ndarray]:
    """Trees and the noise scales of the features; takes half of the way."""
    assert settings.max_rank is not None
    partitions = []
    for number, seed in enumerate(seeds):
        on_step(0.4 * number / len(seeds), "growing trees")
        partitions.append(_grow_tree(x, settings, number, seed))
    if settings.feature_noise is None:
        return partitions, np.ones(x.shape[1])
    on_step(0.4, "noise scales")
    scales = learn_feature_scales(
        x,
        middle_cells(partitions[0]),
        settings.max_rank,
        is_observed,
        seed=seeds[0],
        num_rounds=settings.feature_noise.num_rounds,
        num_folds=settings.feature_noise.num_folds,
        floor=settings.feature_noise.floor,
    )
    return partitions, scales


def _grow_tree(x: np.ndarray, settings: DictionarySettings, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed, their neighbour count, and the rows they are learned from."""
    assert settings.num_neighbors is not None
    assert settings.tree_rows is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    num_neighbors = min(settings.num_neighbors + 2 * number, x.shape[0] - 1)
    if settings.tree_rows >= x.shape[0]:
        graph = neighbour_graph(x, num_neighbors, seed)
        return partition_rows(x, graph, settings.depth, settings.min_cell_size, seed)
    known = np.sort(np.random.default_rng(seed).choice(x.shape[0], settings.tree_rows, replace=False))
    graph = neighbour_graph(x[known], min(num_neighbors, known.size - 1), seed)
    fewest = max(2, settings.min_cell_size * known.size // x.shape[0])
    partition = partition_rows(x[known], graph, settings.depth, fewest, seed)
    return route_rows(x, partition, known, settings.min_cell_size)


def _find_span(
    x: np.ndarray,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    partition: Partition,
    folds: np.ndarray | None,
    seed: int,
    num_features: int,
) -> Span | None:
    assert settings.max_rank is not None
    if settings.shared_span is None:
        return None
    if settings.shared_span.rank is not None:
        span = learn_span(x, folds, seed).leading(settings.shared_span.rank)
        return span if span.bases.shape[2] > 0 else None  # too few rows for any direction
    if folds is None:
        return None
    parent_rows = settings.parent_rows or 0.0
    return choose_span(x, partition, settings.max_rank, folds, seed, parent_rows, is_observed, num_features)


def _with_span(settings: DictionarySettings, span: Span | None) -> DictionarySettings:
    """Settings that say what was found; no node has more directions than the span."""
    assert settings.max_rank is not None
    if span is None:
        return dataclasses.replace(settings, shared_span=None)
    rank = span.bases.shape[2]
    return dataclasses.replace(settings, shared_span=SharedSpan(rank), max_rank=min(settings.max_rank, rank))


def _freeze_tree(
    learned: Learned, number: int, is_observed: np.ndarray, folds: np.ndarray | None, num_places: int | None
) -> tuple[Dictionary, AnyStatistics, Probe | None]:
    """The dictionary of all rows, and the complete rows' statistics from those that left them out."""
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    frozen = freeze(partition, subspaces, 0)
    statistics, probe = _statistics(learned, number, frozen, is_observed, folds, num_places)
    if learned.whole is None:
        return frozen, statistics, probe
    # directions that the folds did not find have no statistics
    ranks = np.minimum(learned.whole[number].ranks, subspaces.ranks)
    found = learned.whole[number].bases * (np.arange(subspaces.bases.shape[3]) < ranks[:, None])[:, None, :]
    return freeze(partition, learned.whole[number]._replace(bases=found, ranks=ranks), 0), statistics, probe


def _statistics(
    learned: Learned,
    number: int,
    dictionary: Dictionary,
    is_observed: np.ndarray,
    folds: np.ndarray | None,
    num_places: int | None,
) -> tuple[AnyStatistics, Probe | None]:
    """Statistics of the complete rows at all nodes; or at their candidates, and those of a few rows at all."""
    partition, subspaces = learned.partitions[number], learned.subspaces[number]
    is_complete = is_observed.all(axis=1)
    rows = np.flatnonzero(is_complete)
    num_nodes, rank, width = len(partition.cells), subspaces.bases.shape[3], learned.settings.num_candidates
    assert width is not None

    def at_all_nodes(rows: np.ndarray, num_places: int | None) -> Statistics:
        centres, bases = without_folds(subspaces, folds)
        own = np.zeros(rows.size, dtype=int) if folds is None else folds[rows]
        x = learned.x if rows.size == learned.x.shape[0] else learned.x[rows]
        of_fold = [jnp.asarray(np.flatnonzero(own == fold)) for fold in range(centres.shape[0])]
        return cross_fitted_statistics(
            jnp.asarray(centres), jnp.asarray(bases), dictionary, jnp.asarray(x), of_fold, num_places
        )

    if width >= num_nodes or rows.size == 0:
        return at_all_nodes(rows, num_places), None
    seen = None if is_complete.all() else is_observed
    candidates = np.full((rows.size, width), num_nodes, np.int32)
    found = find_candidates(learned.x, rows, partition, subspaces, folds, width, seen)
    candidates[:, : found.shape[1]] = found
    per_row = learned.x.itemsize * learned.settings.num_trees * num_nodes * rank
    num_probes = min(rows.size, int(np.clip(PROBE_BYTES // per_row, 16, 256)))
    sample = np.linspace(0, rows.size - 1, num_probes).astype(int)
    probed = at_all_nodes(rows[sample], num_probes)
    is_candidate = (candidates[sample, :, None] == np.arange(num_nodes)).any(axis=1).T
    return (
        candidate_statistics(learned.x, rows, folds, subspaces, candidates, num_places),
        Probe(probed.residual, probed.squared, jnp.asarray(is_candidate)),
    )


def _complete(
    x: np.ndarray,
    is_observed: np.ndarray,
    settings: DictionarySettings,
    folds: np.ndarray | None,
    seeds: list[int],
    on_step: Callable[[float, str], None],
) -> Completed:
    """Missing entries of filled rows `x` at their conditional means, averaged over trees.

    A row is filled by dictionaries that left its own fold out: one that knew the row would find again what it was
    filled with before. And the rows that a fold's dictionary learns from are filled by dictionaries that left that fold
    out too, or what it says of the fold's rows would hang on these themselves, and intervals would be too narrow.
    """
    assert settings.max_rank is not None
    rows = np.flatnonzero(~is_observed.all(axis=1))
    seen = is_observed[rows]
    width = settings.missing_rows.num_candidates or PARTIAL_CANDIDATES
    seeds = seeds[:FILL_TREES]
    partitions, scales = _grow_trees(x, is_observed, settings, seeds, on_step)
    scaled = divide(x, scales)
    left_out = list(each_fold(folds))
    num_folds = len(left_out) - 1
    left_out += itertools.combinations(range(num_folds), 2)
    number_of = {without: number for number, without in enumerate(left_out)}
    own = np.full(rows.size, -1) if folds is None else folds[rows]
    # who fills a row for the dictionary of all rows, and for that without fold f: 0 where it learns not from the row
    filler = np.zeros((1 + num_folds, rows.size), dtype=int)
    filler[0] = own + 1
    for fold in range(num_folds):
        filler[1 + fold] = [number_of.get((min(fold, other), max(fold, other)), 0) for other in own]
    total = np.zeros((*filler.shape, x.shape[1]), dtype=x.dtype)
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        on_step(0.5 + 0.5 * number / len(seeds), "conditional means")
        subspaces = learn_subspaces(
            scaled, partition, settings.max_rank, folds, seed, settings.parent_rows or 0.0, left_out
        )
        mixture = fit_quick_mixture(scaled, partition, subspaces, folds, is_observed)
        candidates = find_candidates(scaled, rows, partition, subspaces, folds, width, is_observed)
        for group, by in enumerate(filler):
            used = np.flatnonzero((by > 0) | (group == 0))
            total[group, used] += conditional_means(
                scaled[rows[used]], seen[used], mixture, subspaces, by[used], candidates[used]
            )
    filled = []
    for means in total / len(partitions) * scales:
        copy = x.copy()
        copy[rows] = np.where(seen, x[rows], means)
        filled.append(copy)
    return Completed(filled[0], filled[1:] or None)


def _partial_rows(learned: Learned, is_observed: np.ndarray, folds: np.ndarray | None) -> PartialRows:
    """What the sampler needs of the rows with missing features, on every tree."""
    x = learned.x
    rows = np.flatnonzero(~is_observed.all(axis=1))
    settings = learned.settings.missing_rows
    pairs = list(zip(learned.partitions, learned.subspaces, strict=True))
    width = min(settings.num_candidates or PARTIAL_CANDIDATES, *(partition.is_present.sum() for partition, _ in pairs))
    candidates = [find_candidates(x, rows, *pair, folds, width, is_observed) for pair in pairs]
    own = np.zeros(rows.size, dtype=int) if folds is None else folds[rows]
    grouping = group_rows(is_observed[rows], own, 1)
    num_groups = settings.num_groups
    if num_groups is None:
        rank = learned.subspaces[0].bases.shape[3]
        matrices = grouping.num_matrices * width
        num_groups = int(np.clip(np.ceil(matrices * rank**3 / GROUP_COST), 1, 4))
    grouping = group_rows(is_observed[rows], own, min(num_groups, rows.size))
    reduced = [
        reduce_rows(*without_folds(subspaces, folds), x[rows], is_observed[rows], own, nodes, grouping)
        for (_, subspaces), nodes in zip(pairs, candidates, strict=True)
    ]
    return stack_trees(reduced)
