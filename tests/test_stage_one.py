"""Stage one: the graph, the partition, the subspaces, the noise scales."""

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from joblib import cpu_count
from scipy import linalg, special
from threadpoolctl import threadpool_info, threadpool_limits

from geode_jax import DictionarySettings, learn_forest
from geode_jax._runtime.threads import parallel_map
from geode_jax.forest import statistics
from geode_jax.learning import decompositions, evidence, feature_noise, small_cells, subspaces
from geode_jax.learning.evidence import cross_fitted_evidence, judged_rows
from geode_jax.learning.feature_noise import NoiseOptions, learn_feature_scales
from geode_jax.learning.shared_span import (
    LARGEST_SPAN,
    learn_dictionaries,
    learn_root_cells,
    learn_span,
    learn_subspaces_in_span,
    learn_whole_span,
    span_rank,
    try_spans,
)
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import Partition, default_depth, partition_rows, route_rows
from geode_jax.partition.neighbours import nearest_neighbours, neighbour_graph, uses_exact_search
from geode_jax.rows import blocks
from geode_jax.rows.folds import assign_folds, judging_folds
from geode_jax.rows.frame import learn_frame, to_model
from geode_jax.rows.processes import ALONE, sample_part
from geode_jax.rows.row_space import principal_coordinates
from geode_jax.rows.training import Training
from geode_jax.rows.view import View


def _partition(x, depth=3, min_cell_size=5, num_neighbors=10, seed=0):
    return partition_rows(x, neighbour_graph(x, num_neighbors, seed), depth, min_cell_size, seed)


def _assert_valid(partition, n, min_cell_size):
    np.testing.assert_array_equal(np.sort(partition.cells[0]), np.arange(n))
    for node, rows in enumerate(partition.cells):
        left = 2 * node + 1
        if left >= len(partition.cells):
            continue
        children = partition.cells[left], partition.cells[left + 1]
        assert (children[0] is None) == (children[1] is None)
        if rows is None:
            assert children[0] is None
        elif children[0] is not None:
            np.testing.assert_array_equal(np.sort(np.concatenate(children)), np.sort(rows))
            assert min(child.size for child in children) >= min_cell_size


def test_neighbours_are_exact_and_never_oneself():
    x = np.random.default_rng(0).normal(size=(60, 4))
    found = nearest_neighbours(x, 5, 0)
    distance = np.square(x[:, None] - x).sum(axis=-1)
    np.fill_diagonal(distance, np.inf)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(np.argsort(distance, axis=1)[:, :5], axis=1))


def test_neighbours_of_duplicates():
    x = np.repeat(np.random.default_rng(0).normal(size=(6, 3)), 20, axis=0)
    found = nearest_neighbours(x, 7, 0)
    assert found.shape == (120, 7)
    assert not (found == np.arange(120)[:, None]).any()
    assert (found // 20 == np.arange(120)[:, None] // 20).all()


def test_graph_is_symmetric_without_loops():
    x = np.random.default_rng(1).normal(size=(80, 3)).astype(np.float32)
    graph = neighbour_graph(x, 6, 0)
    assert (graph != graph.T).nnz == 0
    assert graph.diagonal().sum() == 0
    assert set(np.unique(graph.data)) == {1, 2}


def test_search_switches_to_approximate():
    assert uses_exact_search(40_000, 784)
    assert not uses_exact_search(40_001, 784)
    assert uses_exact_search(1_000_000, 3)


@pytest.mark.slow
def test_approximate_neighbours_recall(monkeypatch):
    """Recall of pynndescent above 0.9; about a minute, most of it numba's compilation."""
    x = np.random.default_rng(0).normal(size=(3000, 12)).astype(np.float32)
    exact = nearest_neighbours(x, 10, 0)
    monkeypatch.setattr("geode_jax.partition.neighbours.EXACT_MAX_ROWS", 100)
    found = nearest_neighbours(x, 10, 0)
    recall = np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)])
    assert recall > 0.9
    assert not (found == np.arange(3000)[:, None]).any()


def test_partition_is_nested_and_even():
    x = np.random.default_rng(0).normal(size=(400, 3))
    partition = _partition(x)
    _assert_valid(partition, 400, 5)
    assert partition.is_present.all()
    assert all(35 <= partition.cells[k].size <= 65 for k in range(7, 15))


def test_components_are_not_cut():
    """METIS alone would cut components of 40 and 360 rows into 200 and 200."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(40, 3)), 50 + rng.normal(size=(360, 3))])
    partition = _partition(x, depth=2)
    _assert_valid(partition, 400, 5)
    assert {partition.cells[1].size, partition.cells[2].size} == {40, 360}


def test_many_components_are_grouped_by_place():
    rng = np.random.default_rng(0)
    places = np.array([0, 1, 2, 3, 100, 101, 102, 103]) * 100.0
    x = np.concatenate([np.array([place, 0.0]) + rng.normal(size=(30, 2)) for place in places])
    partition = _partition(x, depth=1, num_neighbors=5)
    sides = {frozenset(np.unique(partition.cells[k] // 30).tolist()) for k in (1, 2)}
    assert sides == {frozenset(range(4)), frozenset(range(4, 8))}


def test_routed_rows_go_to_the_nearer_centre():
    """Clusters find their own; the known rows keep their cells; children are never too small."""
    rng = np.random.default_rng(0)
    places = np.array([0.0, 10.0, 100.0, 110.0])
    x = np.concatenate([np.array([place, 0.0]) + rng.normal(size=(60, 2)) for place in places])
    known = np.sort(rng.choice(240, 60, replace=False))
    small = _partition(x[known], depth=3, min_cell_size=3, num_neighbors=5)
    partition = route_rows(x, x[known], small, known, 12, ALONE)
    _assert_valid(partition, 240, 12)
    sides = {frozenset(np.unique(partition.cells[k] // 60).tolist()) for k in (1, 2)}
    assert sides == {frozenset({0, 1}), frozenset({2, 3})}
    assert all(np.unique(partition.cells[k] // 60).size == 1 for k in range(3, 7))
    for node, rows in enumerate(partition.cells):
        if rows is not None:
            np.testing.assert_array_equal(rows[np.isin(rows, known)], known[np.sort(small.cells[node])])


def test_routing_ends_at_cells_that_would_be_too_small():
    x = np.concatenate([np.zeros((95, 1)), np.ones((5, 1))])
    known = np.array([0, 1, 95, 96])
    small = Partition(1, (np.arange(4), np.array([0, 1]), np.array([2, 3])))
    assert route_rows(x, x[known], small, known, 6, ALONE).cells[1:] == (None, None)
    assert route_rows(x, x[known], small, known, 5, ALONE).cells[2].tolist() == [95, 96, 97, 98, 99]
    undivided = Partition(2, (np.arange(4), *[None] * 6))
    assert route_rows(x, x[known], undivided, known, 5, ALONE).cells[1:] == (None,) * 6


def test_routing_is_by_the_nearer_centre_at_every_split_and_reads_rows_once():
    """As if from node to node, in trees whose branches end at different scales; known rows wherever they are."""
    rng = np.random.default_rng(0)

    class Counting(View):
        read = np.zeros(500, int)

        def __getitem__(self, index):
            self.read[index] += 1
            return super().__getitem__(index)

    x = Counting(rng.normal(size=(500, 3)), np.ones(3))
    known = np.sort(rng.choice(500, 80, replace=False))
    cells = [np.arange(80), np.arange(30), np.arange(30, 80), None, None, np.arange(30, 50), np.arange(50, 80)]
    cells += [None] * 6 + [np.arange(50, 60), np.arange(60, 80)]
    small, sample = Partition(3, tuple(cells)), x[known]
    x.read[:] = 0
    found = route_rows(x, sample, small, known, 1, ALONE)
    assert (x.read == 1).all()
    rows = x[np.arange(500)]
    np.testing.assert_array_equal(found.is_present, small.is_present)
    for node in (0, 2, 6):
        centres = [rows[known[small.cell(child)]].mean(axis=0) for child in (2 * node + 1, 2 * node + 2)]
        distance = [np.square(rows - centre).sum(axis=1) for centre in centres]
        inside = found.cell(node)
        free = inside[~np.isin(inside, known)]
        np.testing.assert_array_equal(np.isin(free, found.cell(2 * node + 2)), (distance[1] < distance[0])[free])
        np.testing.assert_array_equal(np.intersect1d(found.cell(2 * node + 1), known), known[small.cell(2 * node + 1)])


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_partition_of_few_rows(n):
    x = np.random.default_rng(0).normal(size=(n, 4))
    partition = _partition(x, depth=3, min_cell_size=2, num_neighbors=min(10, n - 1))
    _assert_valid(partition, n, 2)


def test_partition_of_duplicates():
    x = np.repeat(np.random.default_rng(0).normal(size=(3, 4)), 40, axis=0)
    partition = _partition(x, depth=3)
    _assert_valid(partition, 120, 5)


def test_cells_too_small_or_uneven_become_leaves():
    """One row far off is a component of its own below the smallest cell: it stays with its nearest side."""
    x = np.concatenate([np.random.default_rng(0).normal(size=(60, 2)), [[1e3, 1e3]]])
    partition = _partition(x, depth=4, min_cell_size=10, num_neighbors=3)
    _assert_valid(partition, 61, 10)
    assert not partition.is_present.all()


def test_nodes_at_cover_the_rows():
    x = np.random.default_rng(0).normal(size=(100, 2))
    partition = _partition(x, depth=4, min_cell_size=12)
    for scale in range(5):
        covering = np.concatenate([partition.cells[k] for k in partition.nodes_at(scale)])
        np.testing.assert_array_equal(np.sort(covering), np.arange(100))


def test_default_depth():
    assert [default_depth(n, 40) for n in (5, 79, 80, 1000, 10**9)] == [0, 0, 1, 4, 7]


def _oracle(rows, rank):
    centre = rows.mean(axis=0)
    return centre, np.linalg.svd(rows - centre, full_matrices=False)[2][:rank].T


@pytest.mark.parametrize("shape", [(90, 6), (30, 200)], ids=["moments", "gram"])
def test_subspaces_match_the_svd_of_each_fold(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.geomspace(3, 0.3, shape[1]) + 5.0
    folds = assign_folds(shape[0], 3, rng)
    whole = Partition(0, (np.arange(shape[0]),))
    found = learn_subspaces(x, whole, SubspaceOptions(3, 0), folds)
    assert found.ranks == [3]
    for group in range(4):
        rows = x if group == 0 else x[folds != group - 1]
        centre, basis = _oracle(rows, 3)
        np.testing.assert_allclose(found.centres[group, 0], centre, atol=1e-10)
        np.testing.assert_allclose(found.bases[group, 0].T @ found.bases[group, 0], np.eye(3), atol=1e-12)
        assert linalg.subspace_angles(found.bases[group, 0], basis).max() < 1e-6


@pytest.mark.parametrize("shape", [(90, 6), (30, 200)], ids=["moments", "gram"])
def test_trees_share_their_root(shape):
    """A dictionary with a given root is the one that learns its own, deeper cells included."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.geomspace(3, 0.3, shape[1]) + 5.0
    training = Training(x, shape[1], assign_folds(shape[0], 3, rng))
    partition, options = _partition(x, depth=2), SubspaceOptions(3, 0, parent_rows=2.0)
    alone = learn_dictionaries(training, partition, options)
    root_cells = learn_root_cells(training, options)
    shared = learn_dictionaries(training, partition, options, root_cells=root_cells)
    np.testing.assert_array_equal(shared.ranks, alone.ranks)
    np.testing.assert_allclose(shared.centres, alone.centres, atol=1e-9)
    own, given = (bases @ np.swapaxes(bases, -1, -2) for bases in (alone.bases, shared.bases))
    np.testing.assert_allclose(given, own, atol=1e-6)
    moved = [(centre + 1.0, spectrum) for centre, spectrum in root_cells]
    elsewhere = learn_dictionaries(training, partition, options, root_cells=moved)
    np.testing.assert_allclose(elsewhere.centres[:, 0], alone.centres[:, 0] + 1.0)


@pytest.mark.parametrize("shape", [(90, 6), (30, 200)], ids=["moments", "gram"])
def test_a_cell_inherits_its_parents_covariance(shape, monkeypatch):
    """Leading directions of ``(n own + 2 parent's) / (n + 2)`` from the root down, formed densely, fold by fold."""
    rng = np.random.default_rng(0)
    n, features = shape
    x = rng.normal(size=shape) * np.geomspace(3, 0.3, features) + 5.0
    folds = np.arange(n) % 3
    cells = (np.arange(n), np.arange(n // 2), np.arange(n // 2, n), np.arange(n // 4), np.arange(n // 4, n // 2))
    partition = Partition(2, (*cells, None, None))
    rank = min(features, n)  # all there is, so that the parent's spectrum is whole
    found = learn_subspaces(x, partition, SubspaceOptions(rank, 0, parent_rows=2.0), folds)
    monkeypatch.setattr(subspaces, "EXACT_MAX_SIDE", 1)
    randomised = learn_subspaces(x, partition, SubspaceOptions(rank, 0, parent_rows=2.0), folds)
    for group in range(1, 4):  # a parent learned from all rows passes on no more directions than without a fold
        covariance = []
        for node, cell in enumerate(cells):
            rows = x[cell] if group == 0 else x[cell[folds[cell] != group - 1]]
            own = np.cov(rows.T, bias=True)
            parent = covariance[(node - 1) // 2] if node else own
            covariance.append((len(rows) * own + 2.0 * parent) / (len(rows) + 2.0))
            top = linalg.eigh(covariance[node])[1][:, :-4:-1]
            for result, error in ((found, 1e-6), (randomised, 0.05)):
                np.testing.assert_allclose(result.centres[group, node], rows.mean(axis=0), atol=1e-10)
                assert linalg.subspace_angles(result.bases[group, node, :, :3], top).max() < error
            basis = found.bases[group, node, :, : found.ranks[node]]
            np.testing.assert_allclose(basis.T @ basis, np.eye(found.ranks[node]), atol=1e-10)
    assert found.ranks[3] > min(n // 4, features - 1)  # more directions than rows: the parent's


def _uneven_cells(num_rows):
    """A partition of depth 5 whose cells have 2 to `num_rows` rows: a fold leaves some of them with a single one."""
    cells = [np.arange(num_rows)]
    for node in range(31):
        rows = cells[node]
        cut = None if rows is None or rows.size < 4 else max(2, rows.size * (2 + node % 3) // 6)
        cells += [None, None] if cut is None else [rows[:cut], rows[cut:]]
    return Partition(5, tuple(cells))


@pytest.mark.parametrize("holdouts", [None, [(1,)], [(1,), (0, 2)]], ids=["each", "one", "two"])
@pytest.mark.parametrize("parent_rows", [0.0, 3.0])
@pytest.mark.parametrize(("num_features", "dtype"), [(6, np.float64), (40, np.float64), (40, np.float32)])
def test_small_cells_at_once_are_those_one_by_one(num_features, dtype, parent_rows, holdouts, monkeypatch):
    """By moments and by rows, of cells of all sizes, also with duplicate rows and a spectrum of many digits."""
    rng = np.random.default_rng(0)
    spectrum = np.full(num_features, 1e-3)
    spectrum[:5] = np.geomspace(10, 1e-2 if dtype == np.float64 else 0.1, 5)
    turn = linalg.qr(rng.normal(size=(num_features, num_features)))[0]
    x = ((rng.normal(size=(150, num_features)) * spectrum) @ turn + 5.0).astype(dtype)
    x[20:40] = x[20]
    folds, cells, options = rng.permutation(150) % 4, _uneven_cells(150), SubspaceOptions(5, 0, parent_rows)
    stacked = {"stack_by_rows": [], "stack_by_moments": []}
    for name, sizes in stacked.items():
        function = getattr(subspaces, name)

        def counted(cells, *arguments, function=function, sizes=sizes):
            sizes.append(len(cells))
            return function(cells, *arguments)

        monkeypatch.setattr(subspaces, name, counted)
    monkeypatch.setattr(small_cells, "STACK_NUMBERS", 40_000)  # so that stacks are full
    found = learn_subspaces(x, cells, options, folds, holdouts)
    assert max(stacked["stack_by_rows"]) > 3
    assert num_features > 6 or max(stacked["stack_by_moments"]) > 1
    assert parent_rows or not found.ranks[9]  # its rows are equal
    for sizes in stacked.values():
        sizes.clear()
    monkeypatch.setattr(small_cells, "STACK_NUMBERS", 0)
    expected = learn_subspaces(x, cells, options, folds, holdouts)
    assert not any(stacked.values())
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    assert (found.ranks[cells.is_present] < 5).any()
    exact = 1e-12 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(found.centres, expected.centres, atol=exact)
    projected = [x @ bases @ np.swapaxes(bases, -1, -2) for bases in (found.bases, expected.bases)]
    np.testing.assert_allclose(*projected, atol=1e-5 if dtype == np.float64 else 1e-4)
    identity = np.where(np.arange(5) < found.ranks[:, None], 1.0, 0.0)[:, None, :] * np.eye(5)
    for bases in (found.bases, expected.bases):
        inner = np.swapaxes(bases, -1, -2) @ bases
        np.testing.assert_allclose(inner, np.broadcast_to(identity, inner.shape), atol=exact)


def test_stacks_are_of_bounded_size():
    """Padded to the largest of their cells, they stay within the limit, and their matrices are not much larger."""
    rng = np.random.default_rng(0)
    sizes = rng.integers((2, 0), (40, 20), (200, 2)).tolist()
    cells = {node: small_cells.Size(*own) for node, own in enumerate(sizes)} | {200: small_cells.Size(390, 0)}
    found = small_cells.in_stacks(cells, num_features=400, num_holdouts=3, rank=10)
    assert sorted(node for stack in found for node in stack) == list(range(200))  # the last one is large
    assert max(map(len, found)) > 5
    for stack in found:
        own = [cells[node] for node in stack]
        padded = small_cells.Size(*np.max(own, axis=0).tolist())
        assert len(stack) * padded.numbers(400, 3, 10) <= small_cells.STACK_NUMBERS
        assert padded.side(400) <= 1.15 * min(one.side(400) for one in own) + 1


def test_the_largest_value_of_blocks_may_be_negative():
    assert decompositions.largest_of([np.array([[-3.0, 1.0]]), np.array([[2.0, -0.5]])]) == 3.0
    assert decompositions.largest_of([np.array([[4.0, -1.0]])]) == 4.0
    assert decompositions.largest_of([]) == 0.0


def test_directions_of_a_stack_are_made_orthonormal():
    """Whether they nearly are or not, each after those before it; zero columns stay zero."""
    rng = np.random.default_rng(0)
    exact = linalg.qr(rng.normal(size=(12, 4)), mode="economic")[0]
    near, far, fewer = exact + 1e-4 * rng.normal(size=(12, 4)), exact + 0.2 * rng.normal(size=(12, 4)), exact.copy()
    fewer[:, 2:] = 0.0
    given = np.stack([near, far, fewer])
    useful = np.array([4, 4, 2])[:, None] > np.arange(4)
    found = small_cells._orthonormal(given, useful)
    for one, rank, own in zip(found, (4, 4, 2), given, strict=True):
        np.testing.assert_allclose(one[:, :rank].T @ one[:, :rank], np.eye(rank), atol=1e-12)
        assert not one[:, rank:].any()
        for first in range(1, rank + 1):
            assert linalg.subspace_angles(one[:, :first], own[:, :first]).max() < 1e-7


def test_statistics_at_some_nodes():
    rng = np.random.default_rng(0)
    x, folds, cells = rng.normal(size=(60, 5)), np.arange(60) % 3, _uneven_cells(60)
    subspaces = learn_subspaces(x, cells, SubspaceOptions(2, 0), folds)
    training, rows, nodes = Training(x, 5, folds), np.arange(1, 60, 2), np.array([4, 0, 2])
    found = evidence.statistics_at(training, rows, subspaces, nodes)
    for number, node in enumerate(nodes):
        own = evidence.statistics_at_node(training, rows, subspaces, node)
        for table, expected in zip(found, own, strict=True):
            np.testing.assert_array_equal(table[number], expected)


@pytest.mark.parametrize("shape", [(60, 7), (11, 30)])
def test_work_by_blocks_leaves_nothing_out(shape, monkeypatch):
    """Frame, moments, inner products and the span, a few rows or features at a time, the last block smaller."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=shape) * np.geomspace(3, 0.3, shape[1]) + 5.0
    folds = np.arange(shape[0]) % 3
    cells = Partition(1, (np.arange(shape[0]), np.arange(shape[0] - 4), np.arange(shape[0] - 4, shape[0])))

    def learn():
        frame = learn_frame(data)
        x = to_model(data, frame, np.dtype(np.float64))
        training = Training(x, shape[1], folds)
        span = learn_span(x, folds, 0).leading(3)
        ranks = span_rank(training, learn_span(x, folds, 0))
        own = learn_subspaces(x, cells, SubspaceOptions(3, 0, 2.0), folds)
        within = learn_subspaces_in_span(x, span, cells, SubspaceOptions(3, 0, 2.0), folds)
        outer = [bases @ np.swapaxes(bases, -1, -2) for bases in (span.bases, own.bases, within.bases)]
        found = evidence.statistics_at(training, np.arange(1, shape[0]), own, np.arange(3))
        return [frame.shift, frame.scale, x, ranks, own.centres, within.centres, *outer, *found]

    whole = learn()
    monkeypatch.setattr(blocks, "BLOCK_NUMBERS", 4 * min(shape))
    assert len(list(blocks.slices(*shape))) > 1
    for part, all_at_once in zip(learn(), whole, strict=True):
        np.testing.assert_allclose(part, all_at_once, atol=1e-9)


def test_randomised_subspaces(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)) @ rng.normal(size=(5, 150)) + 0.01 * rng.normal(size=(200, 150))
    monkeypatch.setattr(subspaces, "EXACT_MAX_SIDE", 50)
    found = learn_subspaces(x, Partition(0, (np.arange(200),)), SubspaceOptions(5, 0), None)
    assert linalg.subspace_angles(found.bases[0, 0], _oracle(x, 5)[1]).max() < 1e-3


def test_large_cells_of_a_file_are_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    """Rows of a file may be larger than memory, and each of the holdouts would hold a copy."""
    sizes = []

    class Counted(View):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            sizes.append(len(found))
            return found

    monkeypatch.setattr(subspaces, "EXACT_MAX_SIDE", 50)
    monkeypatch.setattr(blocks, "BLOCK_NUMBERS", 20 * 150)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)) @ rng.normal(size=(5, 150)) + 0.01 * rng.normal(size=(300, 150))
    folds, cells = np.arange(300) % 3, Partition(1, (np.arange(300), np.arange(180), np.arange(180, 300)))
    options = SubspaceOptions(5, 0, 2.0)
    np.save(tmp_path / "x.npy", x)
    file = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = learn_subspaces(Counted(View(file, np.ones(150)), np.ones(150)), cells, options, folds)
    assert max(sizes) == 20
    expected = learn_subspaces(x, cells, options, folds)
    np.testing.assert_allclose(found.centres, expected.centres, atol=1e-12)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    outer = [one.bases @ np.swapaxes(one.bases, -1, -2) for one in (found, expected)]
    np.testing.assert_allclose(*outer, atol=1e-4)


def test_subspaces_of_duplicate_rows_and_small_cells():
    """Directions without data are zero columns, never NaN; the rank allows for every fold."""
    rng = np.random.default_rng(0)
    x = np.concatenate([np.repeat(rng.normal(size=(1, 8)), 20, axis=0), rng.normal(size=(4, 8))])
    cells = (np.arange(24), np.arange(20), np.arange(20, 24))
    found = learn_subspaces(x.astype(np.float32), Partition(1, cells), SubspaceOptions(6, 0), np.arange(24) % 3)
    assert np.isfinite(found.bases).all()
    assert list(found.ranks) == [2, 0, 1]
    assert not found.bases[:, 1].any()
    assert not found.bases[:, 2, :, 1:].any()


def test_constant_features_lie_in_no_direction():
    x = np.random.default_rng(0).normal(size=(50, 5))
    x[:, 2] = 7.0
    found = learn_subspaces(x, Partition(0, (np.arange(50),)), SubspaceOptions(4, 0), None)
    np.testing.assert_allclose(found.bases[0, 0, 2], 0.0, atol=1e-10)


def _scales(x, max_rank, is_observed=None):
    """Noise scales from one cell of all rows."""
    options = NoiseOptions(num_rounds=3, num_folds=5, floor=0.05, max_rank=max_rank, seed=0)
    return learn_feature_scales(x, is_observed, Partition(0, (np.arange(len(x)),)), options).scales


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_partial", [False, True])
def test_residuals_of_few_rows_are_those_off_their_bases(dtype, is_partial, monkeypatch):
    """Cells with fewer rows than features, which make no bases: also of one or two rows, and in parts of features."""
    monkeypatch.setattr(blocks, "BLOCK_NUMBERS", 200)
    rng = np.random.default_rng(0)
    x = (5.0 + rng.normal(size=(60, 4)) @ rng.normal(size=(4, 50)) + rng.normal(size=(60, 50))).astype(dtype)
    x[40:52] = x[40:41] + rng.normal(size=(12, 2)) @ rng.normal(size=(2, 50))  # fewer directions than asked for
    folds = assign_folds(60, 5, rng)
    folds[:6], folds[52:55] = -1, 0
    training = Training(x, 50, folds, rng.random(x.shape) < 0.8 if is_partial else None)
    for start, stop in ((0, 40), (40, 52), (52, 54), (55, 56), (53, 60)):
        rows = np.arange(start, stop)
        found = feature_noise._sums_of_small(training, rows, 6)
        expected = feature_noise._sums_off_bases(training, Partition(0, (rows,)), SubspaceOptions(6, 0))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3 if dtype is np.float32 else 1e-8, atol=1e-6)


def test_noise_scales_recover_the_truth():
    """Rank-2 signal and noise of known relative size per feature: estimates within 12%, four sampling deviations.

    Without the correction for leverage a quiet feature with a large loading is 20% off.
    """
    rng = np.random.default_rng(0)
    truth = np.geomspace(0.3, 3.0, 30)
    truth /= np.exp(np.log(truth).mean())
    x = rng.normal(size=(500, 2)) @ rng.normal(size=(2, 30)) * 3 + truth * rng.normal(size=(500, 30))
    found = _scales(x, 2)
    np.testing.assert_allclose(np.log(found).mean(), 0.0, atol=1e-12)
    np.testing.assert_allclose(found, truth, rtol=0.12)


def test_noise_scales_do_not_take_noise_for_signal():
    """Up to 20 directions allowed and 2 there: the scales are those that 2 would give, not those of 20."""
    rng = np.random.default_rng(0)
    truth = np.geomspace(0.5, 2.0, 40)
    x = rng.normal(size=(130, 2)) @ rng.normal(size=(2, 40)) * 3 + truth * rng.normal(size=(130, 40))
    found = _scales(x, 20)
    assert np.std(np.log(found / truth)) < 0.1  # one feature's sampling deviation is 0.062; off 20 directions, 0.6


def test_noise_scale_of_a_constant_feature_is_the_floor():
    x = np.random.default_rng(0).normal(size=(100, 10))
    x[:, 3] = 0.0
    found = _scales(x, 2)
    assert np.argmin(found) == 3
    assert found[3] > 0.01 * found.max()


def test_filled_entries_say_nothing_of_the_noise():
    """Two of ten features have three times the noise and are half filled with the signal: their scales stay."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(600, 2)) @ rng.normal(size=(2, 10))
    deviation = np.where(np.arange(10) < 2, 3.0, 1.0)
    noisy = signal + 0.2 * deviation * rng.normal(size=signal.shape)
    is_observed = (np.arange(10) >= 2) | (rng.random(signal.shape) < 0.5)
    x = np.where(is_observed, noisy, signal)
    expected = deviation / np.exp(np.log(deviation).mean())
    np.testing.assert_allclose(_scales(x, 2, is_observed), expected, rtol=0.15)
    assert _scales(x, 2)[:2].max() < 0.85 * expected[0]
    wild = np.where(is_observed, noisy, signal + 1.5 * rng.normal(size=x.shape))
    np.testing.assert_allclose(_scales(wild, 2, is_observed), expected, rtol=0.15)


def test_a_sample_of_rows_that_take_turns_has_all_kinds():
    """Before and after, or classes in turns; each process has its part of one sample."""
    for kinds, total in ((2, 8000), (3, 12_000), (10, 20_000)):
        found = judged_rows(np.arange(total) % 5)
        assert np.unique(found).size == found.size == 4000
        np.testing.assert_allclose(np.bincount(found % kinds) * kinds / 4000.0, 1.0, atol=0.15)
        parts = (np.arange(700), np.arange(700, total))
        joined = [sample_part(part, 4000, np.array(part[0]), np.array(total)) for part in parts]
        np.testing.assert_array_equal(np.concatenate(joined), found)
    np.testing.assert_array_equal(judged_rows(np.arange(4000) % 5), np.arange(4000))


@pytest.mark.parametrize("is_partial", [False, True])
def test_noise_scales_from_as_many_folds_as_are_enough(is_partial, monkeypatch):
    """Three of five: rows of the others have no say in the residuals, however they are."""
    monkeypatch.setattr(feature_noise, "ENOUGH_ROWS", 900)
    rng = np.random.default_rng(0)
    truth = np.geomspace(0.5, 2.0, 10)
    truth /= np.exp(np.log(truth).mean())
    signal = 30.0 * rng.normal(size=(1500, 1)) * np.ones(10)
    x = signal + truth * rng.normal(size=signal.shape)
    is_observed = rng.random(x.shape) < 0.7 if is_partial else None
    judged = judging_folds(assign_folds(1500, 5, np.random.default_rng(0)), 900) >= 0
    assert judged.sum() == 900
    found = _scales(x, 1, is_observed)
    np.testing.assert_allclose(found, truth, rtol=0.15)
    x[~judged] = (signal + truth[::-1] * rng.normal(size=signal.shape))[~judged]
    found = _scales(x, 1, is_observed)
    np.testing.assert_allclose(found, truth, rtol=0.15)


@pytest.mark.parametrize("num_rows", [300, 0])
def test_statistics_in_blocks_are_those_at_once(num_rows, monkeypatch):
    """Folds of several blocks, the last of them short, and an empty one; and no row at all."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 5)).astype(np.float32)
    centres, bases = (rng.normal(size=size).astype(np.float32) for size in ((3, 4, 5), (3, 4, 5, 2)))
    folds = np.where(np.arange(num_rows) % 3 == 0, 0, 2)
    of_fold = [np.flatnonzero(folds == fold) for fold in range(3)]

    def found():
        empty = statistics.zero_statistics((2, 4, 320, 2), num_rows, np.dtype(np.float32))
        return statistics.add_cross_fitted(empty, 1, (centres, bases), x, of_fold)

    whole = found()
    monkeypatch.setattr(statistics, "BLOCK_BYTES", 1)  # 64 rows
    for leaf, expected in zip(jax.tree.leaves(found()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-5)
    for row in range(0, num_rows, 37):
        for node in range(4):
            centred = x[row] - centres[folds[row], node]
            along = np.square(centred @ bases[folds[row], node])
            np.testing.assert_allclose(whole.squared[1, node, row], along, rtol=1e-4)
    assert not np.any(whole.squared[0])


def test_seldom_observed_features_have_the_average_noise():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8))
    is_observed = np.ones(x.shape, bool)
    is_observed[2:, 0] = False
    x[:, 0] = 0.0
    scales = _scales(x, 1, is_observed)
    assert scales[0] > 0.5 * np.median(scales)


def test_frame_is_invariant_and_exact_far_from_the_origin():
    x = np.random.default_rng(0).normal(size=(40, 3))
    base = to_model(x, learn_frame(x), np.dtype(np.float64))
    moved = 1e6 + 1e-3 * x
    np.testing.assert_allclose(to_model(moved, learn_frame(moved), np.dtype(np.float64)), base, atol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(base))), 1.0)


def test_frame_of_float32_rows_far_from_the_origin():
    """Sums over many rows are in float64: shift and scale are those of the same numbers in float64."""
    x = (1e4 + np.random.default_rng(0).normal(size=(60_000, 3))).astype(np.float32)
    x[::7, 1] = np.nan
    found, expected = learn_frame(x), learn_frame(x.astype(np.float64))
    np.testing.assert_allclose(found.shift, np.nanmean(x, axis=0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-12)


def test_frame_refuses_equal_rows():
    for value in (0.0, 0.1, 1e8):
        with pytest.raises(ValueError, match="all rows are equal"):
            learn_frame(np.full((5, 3), value))


def test_frame_of_the_smallest_and_the_largest_numbers():
    x = np.zeros((100, 1))
    x[0] = 5e-324
    frame = learn_frame(x)
    assert (frame.scale > 0.0).all()
    assert np.isfinite(to_model(x, frame, np.dtype(np.float32))).all()
    with pytest.raises(ValueError, match=r"X: expected smaller values: their sums, or .* overflow"):
        learn_frame(np.where(x > 0.0, 1.1e308, 1e308))


def _flat_sheet(n=400, features=40, seed=0):
    """A curved sheet inside three of forty directions."""
    rng = np.random.default_rng(seed)
    t = rng.uniform(-1, 1, (n, 2))
    points = np.stack([3 * t[:, 0], 3 * t[:, 1], 4 * t[:, 0] ** 2], axis=1)
    directions = np.linalg.qr(rng.normal(size=(features, 3)))[0]
    return (points @ directions.T + 0.1 * rng.normal(size=(n, features))).astype(np.float32), directions


def _clusters(n=400, features=40, seed=0):
    """Eight clusters, each with three directions of its own: together they need more than half of the features."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(8, size=n)
    directions = rng.normal(size=(8, features, 3))
    signal = 2 * rng.normal(size=(8, features))[cluster]
    signal = signal + np.einsum("nDm,nm->nD", directions[cluster], rng.normal(size=(n, 3)))
    return (signal + 0.05 * rng.normal(size=(n, features))).astype(np.float32)


def test_a_span_has_the_leading_directions_that_are_asked_for():
    x = np.random.default_rng(0).normal(size=(440, 450)).astype(np.float32)
    few, many = (learn_span(x, None, 0, max_rank=rank) for rank in (5, LARGEST_SPAN + 20))
    assert many.bases.shape == (1, 450, LARGEST_SPAN + 20)
    np.testing.assert_allclose(np.abs(np.diag(few.bases[0].T @ many.bases[0])), 1.0, atol=1e-4)


@pytest.mark.parametrize("with_folds", [True, False])
def test_subspaces_in_a_span_stay_in_it(with_folds):
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 4, np.random.default_rng(0)) if with_folds else None
    partition = _partition(x, depth=2)
    span = learn_span(x, folds, 0).leading(5)
    found = learn_subspaces_in_span(x, span, partition, SubspaceOptions(3, 0), folds)
    assert found.bases.shape == (5 if with_folds else 1, 7, 40, 3)
    assert (found.ranks == 3).all()
    for group, (centre, basis) in enumerate(zip(span.centres, span.bases, strict=True)):
        outside = np.eye(40) - basis @ basis.T
        for node in range(7):
            np.testing.assert_allclose(outside @ found.bases[group, node], 0.0, atol=1e-5)
            np.testing.assert_allclose(outside @ (found.centres[group, node] - centre), 0.0, atol=1e-4)
            gram = found.bases[group, node].T @ found.bases[group, node]
            np.testing.assert_allclose(gram, np.eye(3), atol=1e-5)


def test_directions_in_a_span_that_a_fold_lacks_are_dropped():
    """A cell of four rows that vary, all of one fold, among equal ones."""
    x = np.random.default_rng(0).normal(size=(60, 20))
    x[34:40] = x[34]
    folds, rows = np.where(np.arange(60) < 34, 1, np.arange(60) % 3), np.arange(60)
    cells = Partition(1, (rows, rows[30:40], np.concatenate([rows[:30], rows[40:]])))
    span = learn_span(x, folds, 0).leading(6)
    found = learn_subspaces_in_span(x, span, cells, SubspaceOptions(6, 0), folds)
    assert found.ranks[1] < 4 < found.ranks[2]
    assert not found.bases[:, 1, :, found.ranks[1] :].any()


@pytest.mark.parametrize("parent_rows", [0.0, 3.0])
def test_a_cell_of_one_fold_has_its_parents_centre_without_it(parent_rows):
    """The mean of its rows would be one that they are judged by."""
    x, rows = np.random.default_rng(0).normal(size=(10, 4)), np.arange(10)
    folds = np.array([0, 0, 1, 1, 1, 2, 2, 0, 1, 2])
    cells = Partition(1, (rows, rows[:2], rows[2:]))
    found = learn_subspaces(x, cells, SubspaceOptions(2, 0, parent_rows), folds)
    np.testing.assert_allclose(found.centres[1, 1], x[folds != 0].mean(axis=0))
    for without in (0, 2, 3):
        np.testing.assert_allclose(found.centres[without, 1], x[:2].mean(axis=0))
    # one row is enough for a centre, and cells side by side are not each other's parents
    one_more = learn_subspaces(x, Partition(1, (rows, rows[:3], rows[3:])), SubspaceOptions(2, 0, parent_rows), folds)
    np.testing.assert_allclose(one_more.centres[1, 1], x[2])
    apart = learn_subspaces(x, Partition(0, (rows[2:], rows[:2])), SubspaceOptions(2, 0, parent_rows), folds)
    np.testing.assert_allclose(apart.centres[1, 1], x[:2].mean(axis=0))


def test_a_row_does_not_enter_the_dictionary_that_its_statistics_come_from():
    """Moving a fold's rows far away changes neither the span nor the cells learned without the fold."""
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 4, np.random.default_rng(0))
    partition = _partition(x, depth=2)
    moved = x.copy()
    moved[folds == 2] += 100 * np.random.default_rng(1).normal(size=(int((folds == 2).sum()), 40)).astype(np.float32)
    found = [
        learn_subspaces_in_span(rows, learn_span(rows, folds, 0).leading(5), partition, SubspaceOptions(3, 0), folds)
        for rows in (x, moved)
    ]
    projectors = [np.einsum("gkDm,gkEm->gkDE", it.bases, it.bases) for it in found]
    # not equal bit by bit: a fold's moments are those of all rows less its own
    np.testing.assert_allclose(found[0].centres[3], found[1].centres[3], atol=1e-3)
    np.testing.assert_allclose(projectors[0][3], projectors[1][3], atol=1e-3)
    assert np.abs(projectors[0][2] - projectors[1][2]).max() > 0.1


def _own_evidence(x, rank, folds):
    """Of a tree's dictionary in R^D."""
    partition = _partition(x)
    subspaces = learn_subspaces(x, partition, SubspaceOptions(rank, 0), folds)
    return cross_fitted_evidence(Training(x, x.shape[1], folds), partition, subspaces)


def _best_span(x, folds):
    """What is tried against a tree's dictionary in R^D."""
    without = _own_evidence(x, 10, folds).log_likelihood()
    return try_spans(Training(x, x.shape[1], folds), _partition(x), SubspaceOptions(10, 0), without)


def test_span_is_found_where_there_is_one():
    x, directions = _flat_sheet()
    found = _best_span(x, assign_folds(len(x), 5, np.random.default_rng(0)))
    assert found.is_taken
    assert found.gain.mean > 0.0
    assert found.span.bases.shape == (6, 40, 3)
    np.testing.assert_allclose(np.linalg.norm(directions.T @ found.span.bases[0], ord=2, axis=(0, 1)), 1.0, atol=0.01)


def test_no_span_where_there_is_none():
    x = _clusters()
    found = _best_span(x, assign_folds(len(x), 5, np.random.default_rng(0)))
    assert found is None or not found.is_taken


def test_a_cell_in_one_fold_leaves_nothing_of_it_to_the_span():
    """Without that fold the cell has no directions, and its parent none of its rows."""
    x = np.random.default_rng(0).normal(size=(12, 4))
    folds = np.repeat([0, 1], 6)
    cells = Partition(1, (np.arange(12), np.arange(6), np.arange(6, 12)))
    found = learn_subspaces_in_span(x, learn_span(x, folds, 0), cells, SubspaceOptions(2, 0), folds)
    np.testing.assert_allclose(found.centres[1, 0], x[6:].mean(axis=0))
    assert found.ranks.tolist() == [2, 0, 0]


def test_evidence_of_many_cells_side_by_side(monkeypatch):
    """Such as one for each class: none is left out as if it were deep in a tree."""
    monkeypatch.setattr(evidence, "LARGEST_SAMPLE", 100)
    x = np.random.default_rng(0).normal(size=(600, 4))
    cells = Partition(0, (np.arange(400), *np.split(np.arange(400, 600), 20)))
    folds = np.arange(600) % 5
    training = Training(x, 4, folds)
    found = cross_fitted_evidence(training, cells, learn_subspaces(x, cells, SubspaceOptions(2, 0), folds))
    assert found.rows.nodes.tolist() == list(range(21))
    assert np.isfinite(found.log_likelihood()).all()


def test_evidence_tells_learned_from_memorised():
    """With 30 directions per cell of 50 rows most are memorised, which the cross-fitted density shows."""
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 5, np.random.default_rng(0))
    scores = [_own_evidence(x, rank, folds).log_likelihood().mean() for rank in (1, 3, 30)]
    assert scores[1] > scores[0] + 1.0
    assert scores[1] > scores[2]


def test_evidence_judges_rows_without_their_own_part():
    """Against a loop that takes the row out of sums and counts. Features are missing, and a node has one direction."""
    rng = np.random.default_rng(0)
    num_rows, observed = 12, rng.integers(5, 9, 12)
    rows = evidence.HeldOutStatistics(
        nodes=np.arange(3),
        residual=rng.gamma(3.0, size=(3, num_rows)),
        squared=rng.gamma(0.5, 8.0, (3, num_rows, 2)),
        has_direction=np.array([[True, True], [True, True], [True, False]]),
        num_observed=observed,
        num_features=8,
    )
    rows.squared[2, :, 1] = 0.0
    mixture = evidence._m_step(rows, rng.dirichlet(np.ones(3), num_rows).T)
    share = special.softmax(mixture.log_densities(rows), axis=0)
    noise = evidence._m_step(rows, share).noise
    expected = np.zeros((3, num_rows))
    for node in range(3):
        for i in range(num_rows):
            others = np.where(np.arange(num_rows) == i, 0.0, share[node])
            variance = (others @ rows.squared[node] + 3.0 * noise[node]) / (others.sum() + 3.0)
            ratio = np.maximum(variance, noise[node]) / noise[node]
            quadratic = rows.residual[node, i] + np.sum(rows.squared[node, i] / ratio)
            spread = np.log1p((ratio - 1.0) * observed[i] / 8).sum() + observed[i] * np.log(2 * np.pi * noise[node])
            weight = np.log((others.sum() + 0.5) / (num_rows + 1.5))
            expected[node, i] = weight - 0.5 * (spread + quadratic / noise[node])
    found = evidence.Evidence(mixture, rows).log_likelihood()
    np.testing.assert_allclose(found, special.logsumexp(expected, axis=0), rtol=1e-9)


def test_evidence_of_a_sample(monkeypatch):
    monkeypatch.setattr(evidence, "LARGEST_SAMPLE", 100)
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 5, np.random.default_rng(0))
    assert _own_evidence(x, 3, folds).log_likelihood().shape == (100,)


def test_folds_learn_from_rows_that_were_filled_without_them():
    """With and without a span; only the dictionary of all rows learns from rows that were filled by all others."""
    x, _ = _flat_sheet()
    rng = np.random.default_rng(0)
    other = (x + 0.3 * rng.normal(size=x.shape)).astype(np.float32)
    folds = assign_folds(len(x), 4, rng)
    cells = _partition(x, depth=1)
    is_observed = np.arange(40) != np.arange(len(x))[:, None] % 40  # every row misses one entry
    both = Training(x, 40, folds, is_observed, without=[other] * 4)
    options = SubspaceOptions(3, 0, 3.0)
    span = learn_whole_span(both, 0).leading(5)
    for within in (None, span):
        found = learn_dictionaries(both, cells, options, within)
        for group, rows in enumerate((x, other, other, other, other)):
            alone = learn_span(rows, folds, 0).leading(5) if within else None
            expected = learn_dictionaries(Training(rows, 40, folds), cells, options, alone)
            np.testing.assert_allclose(found.centres[group], expected.centres[group], atol=1e-5)
            np.testing.assert_allclose(np.abs(found.bases[group]), np.abs(expected.bases[group]), atol=1e-3)
    # choices are by the same dictionaries: those of rows that fit nothing have nothing to gain
    own = Training(x, 40, folds, is_observed)
    one_direction = learn_subspaces(x, cells, SubspaceOptions(1, 0), folds)
    without = cross_fitted_evidence(own, cells, one_direction).log_likelihood()
    assert try_spans(own, cells, SubspaceOptions(10, 0), without).is_taken
    shuffled = own._replace(without=[rng.permuted(x, axis=0) for _ in range(4)])
    found = try_spans(shuffled, cells, SubspaceOptions(10, 0), without)
    assert found is None or not found.is_taken


def test_rows_may_tell_of_fewer_directions_than_a_span_has(monkeypatch):
    """Then nodes get no more, as in R^D; those that the user asked for stay, within the span."""
    x, _ = _flat_sheet()
    monkeypatch.setattr(evidence.Evidence, "needed_rank", lambda self: 2)
    for max_rank, found in ((None, 2), (20, 3)):
        settings = DictionarySettings(num_trees=1, depth=2, max_rank=max_rank)
        forest = learn_forest(jax.random.key(0), x, dictionary=settings)
        assert (forest.found.rank, forest.found.span_rank) == (found, 3)
        assert forest.dictionary_settings == settings


def test_judged_by_some_folds():
    """As many as have rows enough; a span is the one that all rows would choose, and leaves no other rows out."""
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 5, np.random.default_rng(0))
    assert judging_folds(folds, len(x) + 1) is folds
    some = judging_folds(folds, len(x) // 5 + 1)
    assert set(some) == {-1, 0, 1}
    np.testing.assert_array_equal(some[some >= 0], folds[folds < 2])
    found = [_own_evidence(x, 10, kept) for kept in (folds, some)]
    assert found[1].log_likelihood().shape == (2 * len(x) // 5,)
    assert found[0].log_likelihood().mean() == pytest.approx(found[1].log_likelihood().mean(), abs=1.0)
    spans = [_best_span(x, kept).span for kept in (folds, some)]
    assert [span.bases.shape for span in spans] == [(6, 40, 3), (3, 40, 3)]
    np.testing.assert_array_equal(spans[1].bases[1:], spans[0].bases[1:3])


def test_no_more_directions_than_rows_span():
    """Cells with their parents' directions: no more than all rows that are left span, about their mean."""
    x = np.random.default_rng(0).normal(size=(40, 60)).astype(np.float32)
    partition = Partition(1, (np.arange(40), np.arange(20), np.arange(20, 40)))
    folds = assign_folds(40, 5, np.random.default_rng(0))
    options = SubspaceOptions(39, 0, parent_rows=3.0)
    found = learn_subspaces(principal_coordinates(x).coordinates, partition, options, folds)
    assert found.ranks.tolist() == [31, 31, 31]


def test_no_more_directions_than_rows_tell_of():
    """Three directions in every cell, which half as many again are given; noise of one variance has none to tell of."""
    x, _ = _flat_sheet()
    folds = assign_folds(len(x), 5, np.random.default_rng(0))
    assert _own_evidence(x, 20, folds).needed_rank() in (4, 5)
    assert _own_evidence(x, 2, folds).needed_rank() == 2
    noise = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    assert _own_evidence(noise, 20, folds).needed_rank() <= 3


@pytest.mark.parametrize("n", [2, 3, 6, 12])
def test_span_of_few_rows(n):
    x = np.random.default_rng(0).normal(size=(n, 30)).astype(np.float32)
    folds = assign_folds(n, 5, np.random.default_rng(0))
    root = Partition(0, (np.arange(n),))
    training, options = Training(x, 30, folds), SubspaceOptions(5, 0)
    found = cross_fitted_evidence(training, root, learn_subspaces(x, root, options, folds))
    assert 1 <= found.needed_rank() <= 5
    chosen = try_spans(training, root, options, found.log_likelihood())
    assert chosen is None or chosen.rank <= 15


def test_each_in_parallel():
    """Results in order, on several threads; inner calls on the thread that asked; one BLAS thread, given back."""
    with threadpool_limits(3, user_api="blas"):
        _check_parallel()


def _check_parallel():
    outer = threadpool_info()

    def inner(item):
        return item, threading.get_ident()

    def work(item):
        time.sleep(0.01)
        threads = {place["num_threads"] for place in threadpool_info() if place["user_api"] == "blas"}
        nested = parallel_map(inner, range(3))
        assert {thread for _, thread in nested} == {threading.get_ident()}
        return item, threads, threading.get_ident()

    found = parallel_map(work, range(20))
    assert [item for item, _, _ in found] == list(range(20))
    assert all(threads == {1} for _, threads, _ in found)
    assert (len({thread for _, _, thread in found}) == 1) == (cpu_count() == 1)
    assert threadpool_info() == outer
    assert parallel_map(work, []) == []
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda item: 1 / item, [1, 0, 2])
    assert threadpool_info() == outer
    again = parallel_map(work, range(20))
    assert {thread for _, _, thread in again} == {thread for _, _, thread in found}  # they stay


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_threads_of_its_own():
    code = """
import os, sys
from geode_jax._runtime.threads import parallel_map
parallel_map(float, range(9))
child = os.fork()
if child == 0:
    os._exit(parallel_map(float, range(9)) != list(range(9)))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other mallocs have nothing to give back")
def test_free_memory_goes_back():
    code = """
import numpy as np
from benchmarks.common import memory_bytes
from geode_jax._runtime.buffers import release_free_memory
arrays = [np.ones(12_000) for _ in range(1000)]  # too small for a mapping of their own: 92 MiB on the heap
del arrays[:-1]  # the last one holds the heap's end
before = memory_bytes("RssAnon")
release_free_memory()
assert before - memory_bytes("RssAnon") > 2**26
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent.parent)
