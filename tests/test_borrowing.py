"""Rows that nodes borrow from their parents' cells, and the typical noise of every scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DICTIONARY, SAMPLER
from sklearn.datasets import load_iris

import geode_jax
from geode_jax import DictionarySettings, Prior
from geode_jax._files.archive import decode, encode
from geode_jax.learning.borrowing import rows_nearby, typical_noise
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.model.borrowed import Borrowed, noise_prior
from geode_jax.model.tree import tree_from_mask
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.training import Training


@pytest.fixture(scope="module")
def learned():
    """Rows near a curve in 8 dimensions, with noise of deviation 0.1: training rows, a tree, and its dictionaries."""
    rng = np.random.default_rng(0)
    x = np.cos(rng.uniform(0, 3, (400, 1)) + np.arange(8)) + 0.1 * rng.normal(size=(400, 8))
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 4, 10, 0)
    folds = assign_folds(400, 5, rng)
    subspaces = learn_subspaces(x, partition, SubspaceOptions(2, 0), folds)
    return Training(x, 8, folds, None), partition, subspaces


@pytest.mark.parametrize("is_partial", [False, True])
def test_signal_is_that_of_the_complete_rows_of_the_parents_cell(learned, is_partial):
    training, partition, subspaces = learned
    is_complete = np.arange(400) % 3 > 0 if is_partial else np.ones(400, bool)
    if is_partial:
        training = training._replace(is_observed=is_complete[:, None] | (np.arange(8) > 0))
    noise = np.linspace(0.5, 1.0, 5)
    found = rows_nearby(training, partition, subspaces, noise)
    assert found.share[0] == 0.0
    assert (found.signal[0] == 0.0).all()
    for node in (2, 5, 11):
        squares, parent = [], partition.cell((node - 1) // 2)
        for row in parent[is_complete[parent]]:
            sibling = 4 * ((node - 1) // 2) + 3 - node
            own = node if row in partition.cell(node) else sibling
            holdout = 1 + training.folds[row]
            centred = training.x[row] - subspaces.centres[holdout, own]
            squares.append(np.square(centred @ subspaces.bases[holdout, node]))
        scale = int(np.log2(node + 1))
        np.testing.assert_allclose(found.signal[node], np.mean(squares, axis=0) / noise[scale], rtol=1e-6)
        assert found.share[node] == pytest.approx(is_complete[parent].mean())


def test_nothing_is_borrowed_where_no_row_is_complete(data):
    partial = np.array(data)
    partial[np.arange(90), np.arange(90) % 6] = np.nan
    borrowed = geode_jax.learn_forest(jax.random.key(0), partial, dictionary=DICTIONARY).borrowed
    assert not np.asarray(borrowed.count).any()
    assert not np.asarray(borrowed.squared).any()
    assert (np.asarray(borrowed.noise) > 0.0).all()


@pytest.mark.parametrize("deviation", [0.1, 0.01])
def test_typical_noise_is_near_the_truth(deviation):
    """On a plane, where one node is enough for all rows: also at scales that the mixture leaves without rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) @ rng.normal(size=(2, 6)) + deviation * rng.normal(size=(300, 6))
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 2, 10, 0)
    folds = assign_folds(300, 5, rng)
    subspaces = learn_subspaces(x, partition, SubspaceOptions(2, 0, 3.0), folds)
    noise = typical_noise(Training(x, 6, folds, None), partition, subspaces)
    np.testing.assert_allclose(np.log(noise), np.log(deviation**2), atol=0.7)


def test_a_scale_without_nodes_has_the_noise_of_the_one_above(learned):
    training, partition, subspaces = learned
    shallow = partition._replace(cells=(*partition.cells[:15], *[None] * 16))
    noise = typical_noise(training, shallow, subspaces)
    assert noise[4] == noise[3] > 0.0


@pytest.fixture(scope="module")
def iris():
    return load_iris().data


def _share_and_variance(posterior, x):
    """Of 100,000 samples: the share beyond six deviations, and the variance of every feature over that of the data."""
    drawn = geode_jax.sample(jax.random.key(1), posterior, 100_000)
    distance = np.abs(drawn - x.mean(axis=0)) / x.std(axis=0)
    return (distance > 6.0).any(axis=1).mean(), drawn.var(axis=0) / x.var(axis=0)


@pytest.mark.slow
def test_samples_have_no_absurd_outliers(iris):
    """Also where a scale has no rows."""
    posterior = geode_jax.fit(jax.random.key(0), iris, dictionary=DictionarySettings(num_trees=4))
    share, variance = _share_and_variance(posterior, iris)
    assert share < 5e-4
    np.testing.assert_allclose(variance, 1.0, atol=0.25)


@pytest.mark.slow
def test_with_the_papers_prior_samples_have_absurd_outliers(iris):
    settings = DictionarySettings(num_trees=4, borrowed_rows=None)
    posterior = geode_jax.fit(
        jax.random.key(0), iris, dictionary=settings, prior=Prior(noise_shape=0.5, noise_rate=0.5, noise_rows=None)
    )
    share, variance = _share_and_variance(posterior, iris)
    assert share > 1e-3
    assert variance.max() > 2.0


def test_nothing_is_borrowed_by_the_root_or_where_nothing_is_to_be(data):
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)
    is_present = np.asarray(forest.dictionary.tree.is_present)
    count = np.asarray(forest.borrowed.count)
    assert (count[:, 0] == 0.0).all()
    assert (count[:, 1:] == 5.0 * is_present[:, 1:]).all()
    assert (np.asarray(forest.borrowed.noise) > 0.0).all()
    nothing = dataclasses.replace(DICTIONARY, borrowed_rows=None)
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=nothing)
    assert not np.asarray(forest.borrowed.count).any()
    assert not np.asarray(forest.borrowed.squared).any()


@pytest.mark.slow
def test_borrowing_changes_the_fit_and_units_do_not(data):
    """The borrowed squares are relative to the noise: c Y + t has the same posterior in the new units."""
    fitted, scaled, alone = (
        geode_jax.fit(jax.random.key(0), x, dictionary=settings, sampler=SAMPLER, dtype="float64")
        for x, settings in (
            (data, DICTIONARY),
            (1e3 * data - 7.0, DICTIONARY),
            (data, dataclasses.replace(DICTIONARY, borrowed_rows=None)),
        )
    )
    density = geode_jax.log_density(fitted, data)
    np.testing.assert_allclose(
        geode_jax.log_density(scaled, 1e3 * data - 7.0) + 6 * np.log(1e3), density, rtol=0, atol=1e-5
    )
    assert np.abs(geode_jax.log_density(alone, data) - density).max() > 0.01


def test_the_papers_settings_borrow_nothing():
    assert DictionarySettings.published().borrowed_rows is None
    assert Prior.published().noise_rows is None
    assert Prior.published().noise_shape == Prior.published().noise_rate == 0.5
    tree = tree_from_mask(np.ones(3, bool))
    nothing = Borrowed.nothing(tree, 2, jnp.float32)
    shape, rate = noise_prior(Prior.published(), nothing, jnp.asarray(5.0))
    np.testing.assert_array_equal(shape, 0.5)
    np.testing.assert_array_equal(rate, 0.5)


_EARLIER = Prior(noise_shape=0.5, noise_rate=0.5)


@pytest.mark.parametrize(("settings", "field"), [(DictionarySettings(), "borrowed_rows"), (_EARLIER, "noise_rows")])
def test_files_of_earlier_versions_borrowed_nothing(settings, field):
    written = encode(settings)
    assert decode(written) == settings
    del written[field]
    assert getattr(decode(written), field) is None


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, "five"])
def test_bad_settings(value):
    with pytest.raises((ValueError, TypeError), match="borrowed_rows: expected"):
        DictionarySettings(borrowed_rows=value)
    with pytest.raises((ValueError, TypeError), match="noise_rows: expected"):
        Prior(noise_rows=value)


@pytest.mark.parametrize("name", ["noise_shape", "noise_rate"])
def test_the_prior_of_the_noise_is_proper(name):
    """Rows of typical noise make it so, or the paper's gamma prior does."""
    assert Prior().noise_shape == Prior().noise_rate == 0.0
    paper = {"noise_shape": 0.5, "noise_rate": 0.5}
    with pytest.raises(ValueError, match=f"{name}: expected a number above 0 where noise_rows is None"):
        Prior(**{**paper, name: 0.0}, noise_rows=None)
    with pytest.raises(ValueError, match=f"{name}: expected a number of at least 0, got -1"):
        Prior(**{name: -1.0})
    with pytest.raises(TypeError, match=f"{name}: expected a number, got False"):
        Prior(**{name: False})
    with pytest.raises(ValueError, match=r"noise_rows: expected at least 1 where noise_shape is 0, got 0\.5"):
        Prior(noise_rows=0.5)
    assert Prior(**paper, noise_rows=0.5).noise_rows == 0.5
    assert decode(encode(Prior())) == Prior()


def test_typical_noise_of_one_feature_is_not_the_least_there_is():
    """Where nodes have a direction for every feature, nothing is left to tell the noise from."""
    x = np.random.default_rng(0).normal(size=(40, 1))
    forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=dataclasses.replace(DICTIONARY, max_rank=1))
    np.testing.assert_allclose(forest.borrowed.noise, 0.3)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rows_with_missing_features_leave_one_unknown(data, share):
    """Nodes of three directions pass nearly through four features: what these leave is no measure of the noise.

    The root's noise has an unknown feature in any case.
    """
    hidden = data.copy()
    hidden[: round(share * len(data)), [1, 4]] = np.nan
    hidden[:6] = data[:6]
    some = dataclasses.replace(DICTIONARY, max_rank=3)
    noise = np.asarray(geode_jax.learn_forest(jax.random.key(0), hidden, dictionary=some).borrowed.noise)
    incomplete = np.isnan(hidden).any(axis=1).mean()
    unknown = np.array([1.0, incomplete, incomplete]) * 0.3 / 6
    assert (noise > unknown).all()
    assert (noise < unknown + 0.03).all()


def test_a_row_unlike_all_others_is_not_absurdly_unlikely():
    """Columns that follow exactly from others leave no noise; the root still takes up a row off their plane."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)) @ rng.normal(size=(3, 6)) + 1e-4 * rng.normal(size=(120, 6))
    settings = dataclasses.replace(DICTIONARY, max_rank=5)
    posterior = geode_jax.fit(jax.random.key(0), x[:100], dictionary=settings, sampler=SAMPLER)
    inside, outside = geode_jax.log_density(posterior, np.stack([x[100], x[100] + 0.5 * rng.normal(size=6)]))
    assert inside > 10.0
    assert outside > -60.0


def test_typical_rows_alone_make_the_prior_of_the_noise():
    """Three rows of typical noise, and nothing in units of the data's deviation."""
    nothing = Borrowed.nothing(tree_from_mask(np.ones(3, bool)), 2, jnp.float32)
    typical = dataclasses.replace(nothing, noise=jnp.asarray([0.01, 0.002], jnp.float32))
    shape, rate = noise_prior(Prior(), typical, jnp.asarray(10.0))
    np.testing.assert_allclose(shape, 15.0)
    np.testing.assert_allclose(rate, [0.15, 0.03], rtol=1e-6)
