"""Stage one's large products on a device: what a GPU does, here on the CPU as if it were one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import device_candidates, device_products, freeze, statistics
from geode_jax.forest.device_candidates import search_on_device, statistics_on_device
from geode_jax.forest.device_products import DeviceProducts, products_here
from geode_jax.forest.statistics import candidate_statistics
from geode_jax.learning import small_cells
from geode_jax.learning.candidate_search import search_candidates
from geode_jax.learning.evidence import HeldOutStatistics, cell_mixture, statistics_at
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.processes import ALONE
from geode_jax.rows.products import BY_NUMPY
from geode_jax.rows.training import Training


@pytest.fixture
def device(monkeypatch):
    """Products by JAX's CPU, however small they are, of several blocks."""
    monkeypatch.setattr(device_products, "LEAST_WORK", 0)
    monkeypatch.setattr(device_candidates, "LEAST_WORK", 0)
    monkeypatch.setattr(device_products, "BLOCK_NUMBERS", 1000)
    # a device has none of the small cells that are learned at once
    monkeypatch.setattr(small_cells, "STACK_NUMBERS", 0)
    return DeviceProducts(jax.devices()[0])


def curve(num_rows=600, num_features=10):
    rng = np.random.default_rng(0)
    t = rng.uniform(0, 2 * np.pi, num_rows)
    x = np.stack([np.cos(t), np.sin(t), np.cos(2 * t), np.sin(3 * t)], axis=1) @ rng.normal(size=(4, num_features))
    return (x + 0.05 * rng.normal(size=x.shape)).astype(np.float32)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_products_are_those_of_numpy(device, num_rows):
    """In float64 for sums whatever the rows' type, also far from the origin, and without a trace of the padding."""
    rng = np.random.default_rng(num_rows)
    rows = (1e3 + rng.normal(size=(num_rows, 5))).astype(np.float32)
    for found, expected in zip(device.moments(rows), BY_NUMPY.moments(rows), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * num_rows)
        assert found.dtype == np.float64
    wide = rng.normal(size=(num_rows, 9))
    np.testing.assert_allclose(device.inner(wide), wide @ wide.T, rtol=1e-12, atol=1e-12)
    matrix = rng.normal(size=(5, 3)).astype(np.float32)
    found = device.product(rows, matrix)
    np.testing.assert_allclose(found, rows @ matrix, rtol=1e-5)
    assert found.dtype == np.float32
    assert not jax.config.jax_enable_x64


def test_small_products_are_left_to_numpy(monkeypatch):
    def fail(*arguments):
        raise AssertionError

    for name in ("_moments", "_inner", "_product"):
        monkeypatch.setattr(device_products, name, fail)
    monkeypatch.setattr(device_products, "LEAST_WORK", 64)
    device, rows = DeviceProducts(jax.devices()[0]), np.ones((4, 3))
    device.moments(rows)
    device.inner(rows)
    device.product(rows, rows.T)
    rows = np.ones((8, 8))
    for call in (lambda: device.moments(rows), lambda: device.inner(rows), lambda: device.product(rows, rows)):
        with pytest.raises(AssertionError):
            call()


def test_a_cpu_leaves_all_products_to_numpy():
    with jax.default_device(jax.devices("cpu")[0]):
        assert products_here() is BY_NUMPY


@pytest.fixture(scope="module")
def grown():
    """Rows in folds, a deep tree of them, and its dictionaries."""
    x = curve()
    folds = assign_folds(len(x), 4, np.random.default_rng(0))
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 4, 10, 0)
    return Training(x, x.shape[1], folds), partition, learn_subspaces(x, partition, SubspaceOptions(2, 0), folds)


@pytest.mark.parametrize("width", [3, 100])
def test_the_best_of_all_nodes(grown, monkeypatch, width):
    training, partition, subspaces = grown
    monkeypatch.setattr(device_candidates, "BLOCK_BYTES", 2**16)  # several blocks a fold
    rows = np.arange(0, 600, 2)
    found = search_on_device(training, rows, partition, subspaces, width)
    mixture = cell_mixture(training, partition, subspaces)
    held_out = HeldOutStatistics(
        mixture.nodes,
        *statistics_at(training, rows, subspaces, mixture.nodes),
        mixture.has_direction,
        np.full(rows.size, 10),
        10,
    )
    scores = mixture.log_densities(held_out).T
    width = min(width, mixture.nodes.size)
    assert found.shape == (rows.size, width)
    assert (np.diff(found, axis=1) > 0).all()
    own = np.take_along_axis(scores, np.searchsorted(mixture.nodes, found), axis=1)
    np.testing.assert_allclose(np.sort(own, axis=1), np.sort(scores, axis=1)[:, -width:], rtol=1e-3, atol=1e-3)
    constant, of_residual, of_squared = mixture.of_complete_rows(10)
    along = np.einsum("knd,kd->kn", held_out.squared, of_squared)
    by_tables = constant[:, None] - of_residual[:, None] * held_out.residual - along
    np.testing.assert_allclose(by_tables.T, scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_statistics_at_candidates(grown, device, monkeypatch, num_shards):
    """Rows with fewer nodes than candidates included."""
    training, partition, subspaces = grown
    monkeypatch.setattr(device_candidates, "BLOCK_BYTES", 2**16)
    rows = np.arange(0, 600, 2)
    candidates = search_candidates(training, rows, partition, subspaces, 5)
    candidates[::7, 3:] = subspaces.bases.shape[1]
    there = training._replace(processes=dataclasses.replace(ALONE, products=device))
    used = []

    def counted(*arguments):
        for found in statistics_on_device(*arguments):
            used.append(found[0].size)
            yield found

    monkeypatch.setattr(statistics, "statistics_on_device", counted)
    found, expected = (
        candidate_statistics(own, rows, [subspaces], [candidates], 320, num_shards) for own in (there, training)
    )
    assert sum(used) == rows.size
    assert len(used) > 4
    for name in ("residual", "squared"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    for name in ("node", "position", "block_node", "num_rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


# Settings and features of a case, and the products that it must take from the device.
CASES = {
    "all nodes": ({"depth": 3}, 10, {"moments"}),
    "trees of some rows": ({"depth": 3, "tree_rows": 200}, 10, {"product"}),
    "a span": ({"depth": 2, "shared_span": geode_jax.SharedSpan(3)}, 10, {"product"}),
    "few rows": ({"depth": 3, "shared_span": None, "noise_covariance": None}, 160, {"moments", "inner"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_forest_is_that_of_numpy(device, monkeypatch, case):
    """Up to the order of sums; each of the three products is taken where it is needed."""
    given, num_features, expected_calls = CASES[case]
    x = curve(400, num_features)
    settings = geode_jax.DictionarySettings(num_trees=2, max_rank=3, **given)
    calls = set()
    for name in ("moments", "inner", "product"):
        own = getattr(device, name)

        def counted(*arguments, name=name, own=own):
            calls.add(name)
            return own(*arguments)

        setattr(device, name, counted)

    def forest():
        return geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)

    by_numpy = forest()
    assert not calls
    monkeypatch.setattr(device_products, "products_here", lambda: device)
    by_device = forest()
    assert calls >= expected_calls
    for part in ("statistics", "borrowed"):
        for found, expected in zip(
            jax.tree.leaves(getattr(by_device, part)), jax.tree.leaves(getattr(by_numpy, part)), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4 * max(1.0, float(jnp.abs(expected).max())))
    np.testing.assert_array_equal(by_device.dictionary.ranks, by_numpy.dictionary.ranks)
    np.testing.assert_allclose(by_device.scale, by_numpy.scale, rtol=1e-5)


def test_a_noise_covariance_is_that_of_numpy(device, monkeypatch):
    rng = np.random.default_rng(1)
    x = curve(400, 8) + rng.normal(size=(400, 8)) @ (0.3 * rng.normal(size=(8, 8)))
    settings = geode_jax.DictionarySettings(num_trees=1, depth=2, max_rank=2, shared_span=None)

    def forest():
        with jax_settings(np.float32):
            return geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)

    by_numpy = forest()
    monkeypatch.setattr(device_products, "products_here", lambda: device)
    by_device = forest()
    assert by_numpy.noise_root is not None
    np.testing.assert_allclose(by_device.noise_root, by_numpy.noise_root, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_device.statistics.squared, by_numpy.statistics.squared, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_candidates_are_searched_on_the_device(device, monkeypatch, is_worth_it):
    """With fewer candidates than nodes; where there is little to do, NumPy searches."""
    x, used = curve(), []
    work = 600 * 2 * 31 * 10 * 2
    monkeypatch.setattr(device_candidates, "LEAST_WORK", work if is_worth_it else work + 1)

    def search(*arguments):
        used.append(search_on_device(*arguments))
        return used[-1]

    monkeypatch.setattr(freeze, "search_on_device", search)
    monkeypatch.setattr(device_products, "products_here", lambda: device)
    settings = geode_jax.DictionarySettings(num_trees=2, depth=4, max_rank=2, num_candidates=6)
    forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)
    assert len(used) == (2 if is_worth_it else 0)
    for tree in range(len(used)):
        np.testing.assert_array_equal(forest.statistics.node[tree, :, :600].T, used[tree])
