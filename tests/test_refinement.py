"""Cuts whose rows go over to the side that describes them better."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from geode_jax import DictionarySettings, learn_forest
from geode_jax._files.archive import decode, encode
from geode_jax.forest.plan import Plan
from geode_jax.partition import refinement
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.partition.refinement import PRIOR_ROWS, log_density, refined

NUM_ROWS = 400


def _crossing(num_features, dtype=np.float64):
    """Rows near two lines that cross, and which is whose."""
    rng = np.random.default_rng(0)
    directions = stats.ortho_group.rvs(num_features, random_state=1)[:2]
    own = np.arange(NUM_ROWS) % 2 == 1
    along = rng.normal(size=(NUM_ROWS, 1)) * directions[own.astype(int)]
    return (along + 0.02 * rng.normal(size=(NUM_ROWS, num_features))).astype(dtype), own


def _start(own):
    """Three quarters of the rows on their side."""
    return own ^ (np.random.default_rng(1).random(NUM_ROWS) < 0.25)


def _agreement(cut, own):
    return max(np.mean(cut == own), np.mean(cut != own))


@pytest.mark.parametrize("num_features", [5, 40])
def test_two_lines_that_cross_are_told_apart(num_features):
    x, own = _crossing(num_features)
    cut = refined(x, _start(own), 5)
    assert _agreement(cut, own) > 0.93  # those where the lines cross are on either


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tree_with_refined_cuts(dtype):
    """Two flat clusters, one of three times as many rows: METIS cuts through the larger one."""
    rng = np.random.default_rng(0)
    own = np.arange(NUM_ROWS) % 4 == 0
    x = rng.normal(size=(NUM_ROWS, 5)) * np.where(own[:, None], [1, 1, 1, 0.1, 0.1], [0.1, 0.1, 1, 1, 1])
    x = (x + 1.0 * own[:, None]).astype(dtype)
    graph = neighbour_graph(x, 10, 0)
    plain, tree = (partition_rows(x, graph, 3, 5, 0, refines=refines) for refines in (False, True))
    by_graph, by_shape = (_agreement(np.isin(np.arange(NUM_ROWS), one.cell(2)), own) for one in (plain, tree))
    assert by_graph < 0.8
    assert by_shape > 0.97
    for node in range(7):  # children are a partition of their parent's rows
        children = np.concatenate([tree.cell(2 * node + 1), tree.cell(2 * node + 2)])
        np.testing.assert_array_equal(np.sort(children), tree.cell(node))
        assert all(np.all(np.diff(tree.cell(child)) > 0) for child in (2 * node + 1, 2 * node + 2))


def test_units_and_origin_do_not_matter():
    x, own = _crossing(5)
    start = _start(own)
    cut = refined(x, start, 5)
    assert (cut != start).any()
    np.testing.assert_array_equal(refined(1e3 * x + 1e5, start, 5), cut)
    np.testing.assert_array_equal(refined(x, ~start, 5), ~cut)


def _falling_rows(num_rows=60):
    """Rows with falling variances along five axes, and which of them are one side's."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(num_rows, 5)) * [4.0, 2.0, 1.0, 0.5, 0.4] @ stats.ortho_group.rvs(5, random_state=1) + 3.0
    return rows, rng.random(num_rows) < 0.4


@pytest.mark.parametrize("rank", [1, 3])
def test_density_of_a_side(rank):
    """At others' rows it is that of a normal, times the number of rows."""
    rows, own = _falling_rows()
    found = log_density(refinement._sides(rows, own)[0], rank, 1e-9)
    values, axes = np.linalg.eigh(np.cov(rows[own].T))
    noise = values[: 5 - rank].mean() * (own.sum() - 1) / (own.sum() - 1 - rank)
    values[5 - rank :] += PRIOR_ROWS * values[5 - rank :].mean() / (own.sum() - 1)
    values[5 - rank :] *= (own.sum() - 1) / (own.sum() - 1 + PRIOR_ROWS)
    values[: 5 - rank] = noise
    normal = stats.multivariate_normal(rows[own].mean(axis=0), (axes * values) @ axes.T)
    wanted = normal.logpdf(rows) + np.log(own.sum()) + 2.5 * np.log(2.0 * np.pi)
    np.testing.assert_allclose(found[~own], wanted[~own], rtol=1e-9)
    assert (found[own] < wanted[own]).all()  # each without itself


def _left_out(rows, rank):
    """Log densities of the first 20 rows at themselves, and by the sides that lack one of them each."""
    place = np.arange(len(rows))

    def densities(own):
        return log_density(refinement._sides(rows, own)[0], rank, 1e-6)[:20]

    return densities(place < 20), np.array([densities((place < 20) & (place != row))[row] for row in range(20)])


def test_rows_are_judged_without_themselves(monkeypatch):
    """As by the normal learned without each: exactly, but for n (n - 2) / (n - 1)^2, where nothing is beyond."""
    monkeypatch.setattr(refinement, "PRIOR_ROWS", 0.0)
    rows = np.random.default_rng(0).normal(size=(30, 3)) @ stats.ortho_group.rvs(5, random_state=1)[:3]
    found, alone = _left_out(rows, 3)
    np.testing.assert_allclose(found, alone, atol=0.05)
    assert np.ptp(found) > 3.0


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_rows_are_judged_about_without_themselves(monkeypatch, rank):
    """So too with variance beyond, but that the directions, and how much is beyond, hardly change."""
    rows, _ = _falling_rows()
    found, alone = _left_out(rows, rank)
    monkeypatch.setattr(refinement, "LARGEST_LEVERAGE", 0.0)
    with_itself, _ = _left_out(rows, rank)
    assert 0.6 < np.mean(with_itself - found) / np.mean(with_itself - alone) < 1.1
    assert np.corrcoef(found, alone)[0, 1] > 0.95


def test_rank_of_a_side_that_became_small():
    """Four rows for each direction: seven rows have one, twelve three."""
    rows, _ = _falling_rows()
    for num_own, is_same in ((7, True), (12, False)):
        side = refinement._sides(rows, np.arange(60) < num_own)[0]
        assert np.array_equal(log_density(side, 3, 1e-9), log_density(side, 1, 1e-9)) is is_same
        np.testing.assert_array_equal(log_density(side, 4, 1e-9), log_density(side, num_own // 4, 1e-9))


def test_sides_keep_their_least_share():
    """A few rows far away are no side of their own: a side has a tenth of the rows, and as many as there are features.

    The rows that are added to them are those that their normal describes best.
    """
    x = np.random.default_rng(0).normal(size=(200, 6))
    x[:3] += 50.0
    for min_cell_size, smallest in ((5, 20), (60, 60)):
        cut = refined(x, np.arange(200) < 80, min_cell_size)
        assert min(cut.sum(), 200 - cut.sum()) >= smallest
    x = np.random.default_rng(0).normal(size=(100, 30))
    x[:3] += 50.0
    cut = refined(x, np.arange(100) < 50, 5)
    assert min(cut.sum(), 100 - cut.sum()) >= 30


def test_constant_features_do_not_count():
    x, own = _crossing(5)
    start = _start(own)
    padded = np.hstack([x, np.full((NUM_ROWS, 300), 7.0)])
    np.testing.assert_array_equal(refined(padded, start, 5), refined(x, start, 5))
    padded = np.hstack([x[:, :3], np.full((NUM_ROWS, 300), 7.0)])
    assert refined(padded, start, 5) is start


def test_small_sides_stay():
    x, _ = _crossing(5)
    cut = np.arange(11) < 5
    assert refined(x[:11], cut, 5) is cut
    cut = np.zeros(11, bool)  # nothing was cut
    assert refined(x[:11], cut, 5) is cut
    x, own = _crossing(3)  # fewer features than cuts are refined for
    cut = _start(own)
    assert refined(x, cut, 5) is cut
    x, own = _crossing(40)
    cut = cut[:60]  # fewer rows of a side than features
    assert refined(x[:60, :40], cut, 5) is cut


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_features", [5, 30])
def test_equal_rows(num_features):
    """Where all rows are equal, or of five kinds, no row has a reason to go."""
    cut = np.arange(120) % 2 == 0
    for x in (np.zeros((120, num_features)), np.repeat(np.eye(5, num_features), 24, axis=0)):
        np.testing.assert_array_equal(refined(x, cut, 5), cut)


@pytest.mark.filterwarnings("error")
def test_tiny_rows():
    """Their squares are 0 in float64."""
    x, own = _crossing(5)
    start = _start(own)
    assert refined(1e-200 * x, start, 5) is start


@pytest.mark.parametrize(
    ("wanted", "shape", "num_partial", "options"),
    [
        (True, (200, 6), 0, {}),
        (False, (200, 6), 0, {"num_trees": 1}),
        (False, (200, 6), 1, {}),
        (False, (200, 6), 0, {"tree_rows": 150}),
        (True, (200, 6), 0, {"tree_rows": 200}),
        (False, (200, 6), 0, {"refined_cuts": False}),
        (True, (200, 50), 0, {}),
        (False, (200, 51), 0, {}),
        (False, (10, 50), 0, {}),  # in coordinates of its rows
    ],
)
def test_where_cuts_are_refined(wanted, shape, num_partial, options):
    assert Plan.of(DictionarySettings(**options), *shape, num_partial).refines is wanted


def test_every_second_tree_is_refined():
    x, _ = _crossing(5)
    settings = DictionarySettings(
        num_trees=3, max_rank=2, depth=2, feature_noise=None, noise_covariance=None, shared_span=None
    )
    key = jax.random.key(0)
    found = [
        learn_forest(key, x, dictionary=one).dictionary
        for one in (settings, dataclasses.replace(settings, refined_cuts=False))
    ]
    centres = [np.asarray(one.centres) for one in found]
    assert [not np.array_equal(a, b) for a, b in zip(*centres, strict=True)] == [True, False, True]


def test_settings():
    assert not DictionarySettings.published().refined_cuts
    with pytest.raises(TypeError, match="refined_cuts: expected bool"):
        DictionarySettings(refined_cuts=1)
    written = encode(DictionarySettings())
    del written["refined_cuts"]
    assert not decode(written).refined_cuts  # files of earlier versions
