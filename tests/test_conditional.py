"""The conditional distribution object: its parts agree with each other and with the densities."""

import dataclasses
import gc
import weakref

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import ANY_NOISE_SLOW

import geode_jax
from geode_jax.predict import conditional as conditional_module
from geode_jax.predict import rows as rows_module
from geode_jax.predict.distance import in_float64

SEEN = np.array([True, False, True, True, False, True])
OPTIONS = {"num_draws": 200, "num_candidates": 31}


@pytest.fixture(scope="module")
def rows():
    return 40.0 + 10.0 * np.random.default_rng(5).normal(size=(7, 6))


def _one_tree(posterior):
    parts = jax.tree.map(lambda leaf: leaf[:1], (posterior.dictionary, posterior.draws))
    return eqx.tree_at(lambda it: (it.dictionary, it.draws), posterior, parts)


@ANY_NOISE_SLOW
def test_one_tree_log_prob_is_joint_less_marginal(posterior, rows):
    posterior = _one_tree(posterior)
    found = geode_jax.condition(posterior, np.where(SEEN, rows, np.nan), **OPTIONS).log_prob(rows)
    joint = geode_jax.log_density(posterior, rows, num_draws=200)
    marginal = geode_jax.log_density(posterior, np.where(SEEN, rows, np.nan), **OPTIONS)
    np.testing.assert_allclose(found, joint - marginal, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@ANY_NOISE_SLOW
def test_levels_next_to_one(posterior, data):
    """Float32 resolves levels near 0 only; the upper tail is the lower one of the mirrored distribution."""
    x = data[:3].copy()
    x[:, 1] = np.nan
    conditional = geode_jax.condition(posterior, x)
    low, middle, high = conditional.quantile([1e-9, 0.5, 1 - 1e-9])[:, :, 1]
    assert (low < middle).all()
    assert (middle < high).all()
    spread = (middle - low) / (high - middle)
    assert ((spread > 0.1) & (spread < 10)).all()
    interval = geode_jax.impute(posterior, x, interval=1 - 1e-8)
    assert np.abs(interval.upper).max() < 1e6


def test_log_prob_integrates_to_the_quantiles_and_the_mean(posterior, data):
    """One missing feature: the density on a grid has mass 1, its mean, and a level's mass below its quantile.

    Quantiles merge the draws of a node: 5% of mass is what that may change, for rows like the data.
    """
    rows = data[:2]
    hidden = np.where(np.arange(6) == 1, np.nan, rows)
    conditional = geode_jax.condition(posterior, hidden, **OPTIONS)
    grid = np.linspace(-60, 140, 801)
    mean, deciles = conditional.mean(), conditional.quantile([0.1, 0.5, 0.9])
    np.testing.assert_allclose(conditional.median(), deciles[1], rtol=1e-6)
    lower, upper = conditional.interval(0.8)
    np.testing.assert_allclose([lower, upper], deciles[[0, 2]], rtol=1e-6)
    for i in range(2):
        line = np.repeat(hidden[i : i + 1], grid.size, axis=0)
        values = rows[np.full(grid.size, i)].copy()
        values[:, 1] = grid
        density = np.exp(geode_jax.condition(posterior, line, **OPTIONS).log_prob(values))
        step = grid[1] - grid[0]
        assert density.sum() * step == pytest.approx(1.0, abs=2e-3)
        assert (density * grid).sum() * step == pytest.approx(mean[i, 1], abs=0.1)
        below = [density[grid <= decile].sum() * step for decile in deciles[:, i, 1]]
        np.testing.assert_allclose(below, [0.1, 0.5, 0.9], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_draws_have_the_density_of_log_prob(posterior, rows):
    """Mean of the log density over draws against its integral: two features at once, on a grid."""
    hidden = np.where(SEEN, rows, np.nan)[:1]
    conditional = geode_jax.condition(posterior, hidden, **OPTIONS)
    draws = conditional.sample(jax.random.key(1), 640)[:, 0]
    at_draws = geode_jax.condition(posterior, np.repeat(hidden, 640, axis=0), **OPTIONS).log_prob(draws)
    axes = [np.linspace(draws[:, j].min() - 20, draws[:, j].max() + 20, 40) for j in (1, 4)]
    first, second = (part.ravel() for part in np.meshgrid(*axes, indexing="ij"))
    values = np.repeat(rows[:1], first.size, axis=0)
    values[:, 1], values[:, 4] = first, second
    log_prob = geode_jax.condition(posterior, np.repeat(hidden, first.size, axis=0), **OPTIONS).log_prob(values)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    density = np.exp(log_prob)
    assert density.sum() * cell == pytest.approx(1.0, abs=0.03)
    expected = (density * log_prob).sum() / density.sum()
    assert at_draws.mean() == pytest.approx(expected, abs=5 * at_draws.std() / np.sqrt(640))


def test_scales_without_rows_do_not_make_the_spread(posterior, data):
    """Their noise variance is a draw from a prior without a mean: one of them would be the standard deviation."""
    posterior = _one_tree(posterior)
    hidden = np.where(np.arange(6) == 0, data[:5], np.nan)
    where = posterior.dictionary.tree.depth == np.asarray(posterior.dictionary.tree.scale)
    count = np.where(where, 0, posterior.draws.count)

    def with_noise(variance, count):
        noise = np.array(posterior.draws.log_sigma2)
        noise[..., -1] = np.log(variance)
        changed = eqx.tree_at(lambda it: (it.draws.count, it.draws.log_sigma2), posterior, (count, noise))
        return geode_jax.condition(changed, hidden, **OPTIONS).std()[:, 1:]

    wild = with_noise(1e6, count)
    assert (wild < 20.0).all()  # of data with a standard deviation of about 10
    assert (with_noise(1e6, posterior.draws.count) > 50.0).all()
    np.testing.assert_array_equal(with_noise(0.5, count), with_noise(0.5, posterior.draws.count))


@pytest.mark.slow
@ANY_NOISE_SLOW
def test_a_marginal_is_that_of_the_joint(posterior, rows):
    """One tree: means and quantiles are the same features of the whole conditional's, draws have its moments."""
    posterior = _one_tree(posterior)
    hidden = np.where(SEEN, rows, np.nan)
    whole = geode_jax.condition(posterior, hidden, **OPTIONS)
    for features in ([4, 0], [1]):
        part = whole.marginal(features)
        np.testing.assert_allclose(part.mean(), whole.mean()[:, features], rtol=1e-5)
        np.testing.assert_allclose(part.quantile(0.1), whole.quantile(0.1)[:, features], rtol=1e-4)
    draws = whole.marginal([4, 0]).sample(jax.random.key(0), 2000)
    assert (draws[:, :, 1] == rows[:, 0]).all()
    error = draws[:, :, 0].mean(axis=0) - whole.mean()[:, 4]
    assert (np.abs(error) < 5 * draws[:, :, 0].std(axis=0) / np.sqrt(2000)).all()


def test_a_marginal_of_a_marginal(posterior, rows):
    """Its features are columns of the first one's results."""
    first = geode_jax.condition(posterior, np.where(SEEN, rows, np.nan), **OPTIONS).marginal([3, 0, 5])
    np.testing.assert_array_equal(first.marginal([2, 0]).features, [5, 3])
    with pytest.raises(ValueError, match=r"features: expected different indices below 3, got \[4\]"):
        first.marginal([4])


@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
@pytest.mark.parametrize("level", [1e-40, 1.0 - 2.0**-53])
def test_levels_that_cannot_be_told_from_0_and_1(posterior, rows, level):
    found = geode_jax.condition(posterior, np.where(SEEN, rows, np.nan), **OPTIONS)
    with pytest.raises(ValueError, match="level: expected a number from 1e-38 to 1 - 2e-16, got"):
        found.quantile(level)
    with pytest.raises(ValueError, match="probability: expected a number from 1e-38"):
        found.interval(level)


@pytest.mark.slow
@ANY_NOISE_SLOW
def test_the_log_density_of_a_marginal_integrates_the_rest_out(posterior, rows):
    """Feature 1 of two missing ones: its density is the joint's over a grid of the other."""
    posterior = _one_tree(posterior)
    hidden = np.where(SEEN, rows, np.nan)[:1]
    found = geode_jax.condition(posterior, hidden, **OPTIONS).marginal([1]).log_prob(rows[:1, [1]])
    grid = np.linspace(-150, 250, 1601)
    values = np.repeat(rows[:1], grid.size, axis=0)
    values[:, 4] = grid
    joint = geode_jax.condition(posterior, np.repeat(hidden, grid.size, axis=0), **OPTIONS).log_prob(values)
    assert found[0] == pytest.approx(np.logaddexp.reduce(joint) + np.log(grid[1] - grid[0]), abs=5e-3)


@pytest.mark.slow
def test_complete_rows_are_points(posterior, rows):
    hidden = rows.copy()
    hidden[0, 1] = np.nan
    conditional = geode_jax.condition(posterior, hidden)
    assert (conditional.log_prob(rows)[1:] == 0).all()
    assert (conditional.sample(jax.random.key(0), 3)[:, 1:] == rows[1:]).all()
    np.testing.assert_array_equal(conditional.quantile(0.3)[1:], rows[1:])
    complete = geode_jax.condition(posterior, rows)
    np.testing.assert_array_equal(complete.mean(), rows)
    np.testing.assert_array_equal(complete.quantile([0.2, 0.4]), np.stack([rows, rows]))
    assert (complete.log_prob(rows) == 0).all()


def test_rows_may_be_filled_in_place(posterior, rows):
    """What is asked later is of the rows as they were given."""
    given = np.where(SEEN, rows, np.nan)
    kept, changed = (geode_jax.condition(posterior, one) for one in (given.copy(), given))
    given[:, ~SEEN] = changed.mean()[:, ~SEEN]
    np.testing.assert_array_equal(changed.std(), kept.std())
    assert (changed.std()[:, ~SEEN] > 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, x: c.quantile(1.0), r"level: expected a number in \(0, 1\), got 1"),
        (lambda c, x: c.interval(95), r"probability: expected a number in \(0, 1\), got 95"),
        (lambda c, x: c.quantile([]), r"level: expected one or more numbers in \(0, 1\), got none"),
        (lambda c, x: c.log_prob(x[:1]), r"values: expected shape \(7, 6\), rows and features .*, got \(1, 6\)"),
        (lambda c, x: c.marginal([0]).log_prob(x), r"values: expected shape \(7, 1\), .* got \(7, 6\)"),
        (lambda c, x: c.log_prob(np.full_like(x, np.nan)), "values: expected a number wherever the rows have"),
        (lambda c, x: c.log_prob(np.where(SEEN, x, np.nan)), "values: expected a number wherever the rows have a miss"),
        (lambda c, x: c.marginal([6]), r"features: expected different indices below 6, got \[6\]"),
        (lambda c, x: c.marginal([1, 1]), r"features: expected different indices below 6, got \[1, 1\]"),
        (lambda c, x: c.marginal([-1]), "features: expected an integer of at least 0, got -1"),
        (lambda c, x: c.sample(jax.random.key(0), 0), "num_samples: expected an integer of at least 1, got 0"),
    ],
)
def test_errors(posterior, rows, call, message):
    conditional = geode_jax.condition(posterior, np.where(SEEN, rows, np.nan))
    with pytest.raises(ValueError, match=message):
        call(conditional, rows)


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_rows_of_one_pattern_share_its_algebra(posterior, data, monkeypatch):
    """40 rows miss the same features, 5 others do not: as one by one, in their order."""
    hidden = data[:45].copy()
    hidden[:40, [1, 4]] = np.nan
    hidden[[3, 7, 40, 42], [0, 2, 1, 5]] = np.nan
    order = np.random.default_rng(0).permutation(45)
    hidden = hidden[order]
    masks = []
    original = conditional_module.conditional_summary

    def spy(nodes, draws, features, levels, seen, **options):
        masks.append(seen.mask.shape[0])
        return original(nodes, draws, features, levels, seen, **options)

    monkeypatch.setattr(conditional_module, "conditional_summary", spy)
    together = geode_jax.impute(posterior, hidden)
    assert 1 in masks
    masks.clear()
    parts = [geode_jax.impute(posterior, part) for part in np.array_split(hidden, 3)]
    assert 1 not in masks
    tolerance = 1e-3 if posterior.dtype == np.float32 else 1e-9
    for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(whole, np.concatenate(pieces), rtol=tolerance)
    for function in (geode_jax.log_density, geode_jax.intrinsic_dimension):
        whole = function(posterior, hidden)
        pieces = np.concatenate([function(posterior, part) for part in np.array_split(hidden, 3)])
        np.testing.assert_allclose(whole, pieces, rtol=tolerance, atol=tolerance)
    draws = geode_jax.impute_draws(jax.random.key(0), posterior, hidden, 2)
    np.testing.assert_array_equal(np.isnan(draws).sum(), 0)
    np.testing.assert_array_equal(draws[:, ~np.isnan(hidden)], np.stack([hidden[~np.isnan(hidden)]] * 2))


@pytest.mark.slow
@ANY_NOISE_SLOW
def test_rows_are_filled_in_at_their_missing_features_only(posterior, data, monkeypatch):
    """Places for as many features as any row misses: the same numbers as with places for all."""
    hidden = data[:4].copy()
    hidden[[0, 1, 3], [2, 1, 5]] = np.nan
    hidden[2, :3] = np.nan

    def found():
        conditional = geode_jax.condition(posterior, hidden)
        return *conditional.mean_and_interval(0.9), conditional.marginal([5, 1]).sample(jax.random.key(0), 2)

    every = found()
    monkeypatch.setattr(rows_module, "FEW_FEATURES", 0)
    assert rows_module.num_wanted(~np.isnan(hidden), None) == 3
    assert rows_module.num_wanted(~np.isnan(hidden), np.array([5, 1])) == 1
    tolerance = 1e-4 if posterior.dtype == np.float32 else 1e-10
    for ours, theirs in zip(found(), every, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("posterior", ["shaped"], indirect=True)
def test_the_nodes_over_the_features_are_kept_as_long_as_the_dictionary(posterior):
    gc.collect()
    before = len(rows_module._KEPT)
    own = eqx.tree_at(lambda it: it.dictionary.bases, posterior, posterior.dictionary.bases + 0.0)
    nodes = rows_module.nodes_in_features(own)
    assert rows_module.nodes_in_features(own) is nodes
    plain = dataclasses.replace(own, noise_root=np.eye(6))
    np.testing.assert_allclose(rows_module.nodes_in_features(plain).dictionary.bases, own.dictionary.bases, atol=1e-6)
    moved = eqx.tree_at(lambda it: it.dictionary.centres, own, own.dictionary.centres + 1.0)
    shift = rows_module.nodes_in_features(moved).dictionary.centres - nodes.dictionary.centres
    np.testing.assert_allclose(shift, np.broadcast_to(own.noise_root.sum(axis=0), shift.shape), atol=1e-5)
    jax.jit(
        lambda: rows_module.nodes_in_features(dataclasses.replace(own, noise_root=2.0 * np.eye(6))).dictionary.bases
    )()
    assert len(rows_module._KEPT) == before + 3
    del own, moved, plain, nodes
    gc.collect()
    assert len(rows_module._KEPT) == before


@pytest.mark.parametrize("posterior", ["shaped"], indirect=True)
def test_nodes_that_are_forgotten_leave_nothing_with_the_parts_that_stay(posterior):
    """As with those of far rows, in float64: whole numbers are the same in both."""
    gc.collect()
    kept, finalizers = len(rows_module._KEPT), len(weakref.finalize._registry)
    for _ in range(3):
        rows_module.nodes_in_features(in_float64(posterior))
        gc.collect()
    assert len(rows_module._KEPT) == kept
    assert len(weakref.finalize._registry) == finalizers


@pytest.mark.parametrize("posterior", ["shaped"], indirect=True)
def test_the_nodes_have_the_posteriors_type(posterior):
    """Also where they are first made outside of a prediction, as for a picture."""
    wide = in_float64(posterior)
    assert rows_module.nodes_in_features(wide).dictionary.bases.dtype == np.float64
