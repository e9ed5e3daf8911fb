"""The covariance of the noise: learned without the rows that judge it, taken where it helps, right in predictions."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SAMPLER

import geode_jax
from geode_jax.forest import choices, dictionaries
from geode_jax.forest.plan import Plan
from geode_jax.learning import evidence
from geode_jax.learning.evidence import cross_fitted_evidence
from geode_jax.learning.noise_covariance import (
    deviation_off_subspaces,
    is_worth_its_cost,
    learn_covariances,
    learn_whitened_subspaces,
    try_noise_covariance,
    whiten_in_place,
)
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.math.whitening import SharedNoise, observe_rows
from geode_jax.model.found import Decision
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.row_space import axes_of, principal_coordinates
from geode_jax.rows.training import Training

NUM_FEATURES = 24


@pytest.fixture(scope="module")
def smooth():
    """Rows whose neighbouring features hang together, in two groups: an autoregression about one of two curves."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, NUM_FEATURES))
    for j in range(1, NUM_FEATURES):
        rows[:, j] = 0.9 * rows[:, j - 1] + np.sqrt(1 - 0.9**2) * rows[:, j]
    centres = 3.0 * np.stack([np.sin(np.arange(NUM_FEATURES)), np.cos(np.arange(NUM_FEATURES))])
    return (rows + centres[rng.integers(2, size=400)]).astype(np.float32)


@pytest.fixture(scope="module")
def folds():
    return assign_folds(400, 5, np.random.default_rng(1))


CELLS = Partition(0, (np.arange(400),))


@pytest.fixture(scope="module")
def roots(smooth, folds):
    """Of all rows and without each fold, with two directions of signal."""
    covariances = learn_covariances(Training(smooth, NUM_FEATURES, folds))
    return covariances.roots(deviation_off_subspaces(smooth, covariances, CELLS, SubspaceOptions(2, 0), folds))


def test_held_out_variances_are_not_too_small(smooth, folds):
    """Sample eigenvalues are far too small at the lower end; those held out are near the truth."""
    few = folds[:60]
    found = learn_covariances(Training(smooth[:60], NUM_FEATURES, few))
    sample = np.linalg.eigvalsh(np.cov(smooth[:60].T))[::-1]
    fresh = np.square((smooth[60:] - smooth[:60].mean(axis=0)) @ found.axes[0]).mean(axis=0)
    lowest = slice(NUM_FEATURES // 2, None)
    assert sample[lowest].mean() < 0.75 * fresh[lowest].mean()
    assert found.variance[lowest].mean() == pytest.approx(fresh[lowest].mean(), rel=0.2)
    # and so are the deviations of the noise beyond two directions of signal, of few rows as of many
    deviation = deviation_off_subspaces(smooth[:60], found, Partition(0, (np.arange(60),)), SubspaceOptions(2, 0), few)
    shares = [values[lowest].mean() / values[2:].mean() for values in (np.square(deviation), fresh)]
    assert shares[0] == pytest.approx(shares[1], rel=0.2)


def test_rows_far_from_the_origin_lose_no_digits(smooth, folds):
    near, far = (
        learn_covariances(Training(smooth + distance, NUM_FEATURES, folds)) for distance in (0.0, np.float64(2**27))
    )
    np.testing.assert_allclose(far.variance, near.variance, rtol=1e-6)
    for axes, known in zip(far.axes, near.axes, strict=True):
        np.testing.assert_allclose(np.abs((axes * known).sum(axis=0)), 1.0, atol=1e-6)


def test_deviations_are_those_of_the_noise(smooth, roots):
    """The noise is an autoregression's, about either of two curves: its covariance is found, not that of the data."""
    lag = np.abs(np.subtract.outer(np.arange(NUM_FEATURES), np.arange(NUM_FEATURES)))
    noise = 0.9**lag

    def divergence(covariance):
        """Nats per row that a Gaussian of this covariance, in the best unit, loses on the noise."""
        ratio = np.linalg.solve(covariance, noise)
        return 0.5 * (NUM_FEATURES * np.log(ratio.trace() / NUM_FEATURES) - np.linalg.slogdet(ratio)[1])

    found = divergence(roots[0].matrix @ roots[0].matrix)
    assert found < 0.2 * divergence(np.eye(NUM_FEATURES))
    assert found < 0.8 * divergence(np.cov(smooth.T))


@pytest.fixture(scope="module")
def wide():
    """Fewer rows than features, of smooth noise about a plane, in float64; the covariance of the noise; the folds."""
    rng, number = np.random.default_rng(0), 200
    lag = np.subtract.outer(np.arange(number), np.arange(number))
    noise = np.exp(-np.square(lag / 4.0)) + 0.02 * np.eye(number)
    signal = 3.0 * rng.normal(size=(70, 2)) @ rng.normal(size=(2, number))
    rows = signal + rng.normal(size=(70, number)) @ np.linalg.cholesky(noise).T
    return rows - rows.mean(axis=0), noise, assign_folds(70, 5, rng)


def _root_of_rows(training):
    """The root of all rows, with two directions of signal, and what it was made from."""
    covariances, cells = learn_covariances(training), Partition(0, (np.arange(training.num_rows),))
    deviation = deviation_off_subspaces(training.x, covariances, cells, SubspaceOptions(2, 0), training.own_folds)
    return covariances.roots(deviation)[0], covariances


def test_wide_rows_have_the_same_noise_in_coordinates(wide):
    """Along as many axes as the rows without a fold have, and with one variance in all other directions of R^D."""
    rows, noise, folds = wide
    num_features, space = rows.shape[1], principal_coordinates(rows)
    found, covariances = _root_of_rows(Training(space.coordinates, num_features, folds))
    assert covariances.num_axes == 70 - 14 - 1
    outside = found.deviation[-1]
    np.testing.assert_array_equal(found.deviation[covariances.num_axes :], outside)
    assert (np.diff(found.deviation) <= 0.0).all()
    assert not ((found.deviation > outside) & (found.deviation < 1.05 * outside)).any()
    axes = axes_of(rows, space).matrix[:, : found.deviation.size]
    root = outside * np.eye(num_features) + (axes * (found.deviation - outside)) @ axes.T
    assert np.linalg.slogdet(root)[1] == pytest.approx(0.0, abs=1e-8)
    white = np.linalg.solve(root, rows.T).T / found.unit
    np.testing.assert_allclose(white @ axes, space.coordinates @ found.whitening, atol=1e-8)

    def divergence(root):
        """Nats per row that a Gaussian of this covariance, in the best unit, loses on the noise."""
        ratio = np.linalg.solve(root @ root, noise)
        return 0.5 * (num_features * np.log(ratio.trace() / num_features) - np.linalg.slogdet(ratio)[1])

    in_features = _root_of_rows(Training(rows, num_features, folds))[0]
    assert divergence(root) < 0.6 * divergence(np.eye(num_features))
    assert divergence(root) == pytest.approx(divergence(in_features.matrix), rel=0.05)


def test_wide_rows_gain_in_coordinates_what_they_gain_in_features(wide):
    rows, _, folds = wide
    cells, options = Partition(0, (np.arange(len(rows)),)), SubspaceOptions(4, 0)
    coordinates = principal_coordinates(rows).coordinates
    trials = [
        try_noise_covariance(Training(x, rows.shape[1], folds), cells, options, np.zeros(len(rows)))
        for x in (coordinates, rows)
    ]
    isotropic = [
        cross_fitted_evidence(Training(x, rows.shape[1], folds), cells, learn_subspaces(x, cells, options, folds))
        for x in (coordinates, rows)
    ]
    plain = [one.log_likelihood().mean() for one in isotropic]
    assert plain[0] == pytest.approx(plain[1], abs=1e-6)
    ours, theirs = (trial.gain.mean for trial in trials)
    assert ours - plain[0] > 20.0
    assert ours == pytest.approx(theirs, abs=0.03 * (ours - plain[0]))


def test_wide_rows_along_one_line():
    """With a single coordinate there is no axis that could have a deviation of its own."""
    rng = np.random.default_rng(0)
    rows = np.outer(rng.normal(size=30), rng.normal(size=80))
    found = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=dataclasses.replace(SETTINGS, depth=1))
    assert np.isfinite(found.statistics.residual).all()
    coordinates = principal_coordinates(rows - rows.mean(axis=0)).coordinates
    training = Training(coordinates, 80, assign_folds(30, 5, rng))
    root, covariances = _root_of_rows(training._replace(x=coordinates + 1e-3 * rng.normal(size=coordinates.shape)))
    assert covariances.num_axes == coordinates.shape[1] - 1 == 0
    np.testing.assert_allclose(root.deviation, 1.0)


def test_which_wide_rows_try_a_covariance():
    """Those in a space of at most as many rows as features are allowed."""
    settings = geode_jax.DictionarySettings(noise_covariance=geode_jax.NoiseCovariance(max_features=50))
    assert Plan.of(settings, 50, 100_000).tries_noise_covariance
    assert not Plan.of(settings, 51, 100_000).tries_noise_covariance
    assert not Plan.of(settings, 50, 100_000, num_partial=1).tries_noise_covariance
    assert not Plan.of(settings, 500, 51).tries_noise_covariance


def test_whitened_rows(smooth, roots):
    """Their root mean square is 1, the root has determinant 1, and what is beyond the signal is round."""
    root = roots[0]
    assert np.linalg.slogdet(root.matrix)[1] == pytest.approx(0.0, abs=1e-9)
    white = (smooth - smooth.mean(axis=0)) @ root.whitening
    np.testing.assert_allclose(white @ root.matrix * root.unit, smooth - smooth.mean(axis=0), atol=1e-4)
    assert np.square(white).mean() == pytest.approx(1.0, rel=0.1)
    variances = np.linalg.eigvalsh(np.cov(white.T))[:-2]
    assert variances.max() < 2.0 * variances.min()


def test_a_direction_without_spread_keeps_a_floor(smooth, folds):
    """A feature that is the sum of two others: what is whitened along the missing direction stays within float32."""
    rows = smooth.copy()
    rows[:, 5] = rows[:, 3] + rows[:, 4]
    covariances = learn_covariances(Training(rows, NUM_FEATURES, folds))
    root = covariances.roots(deviation_off_subspaces(rows, covariances, CELLS, SubspaceOptions(2, 0), folds))[0]
    assert root.deviation.min() > 0.01 * root.deviation.mean()
    assert np.linalg.slogdet(root.matrix)[1] == pytest.approx(0.0, abs=1e-9)


def test_a_sample_that_judges_is_whitened_as_its_rows_are(smooth, folds, monkeypatch):
    monkeypatch.setattr(evidence, "LARGEST_SAMPLE", 50)
    options = SubspaceOptions(3, 0)
    chosen = try_noise_covariance(Training(smooth, NUM_FEATURES, folds), CELLS, options, np.full(50, -1e6))
    roots = chosen.covariances.roots(chosen.deviation)
    (found,) = learn_whitened_subspaces(smooth, roots, [(CELLS, options)], folds)
    rows = evidence.judged_rows(folds)
    whole = whiten_in_place(smooth.copy(), roots, folds)
    expected = evidence.statistics_at(Training(whole, NUM_FEATURES, folds), rows, found, np.arange(1))
    assert rows.size == 50
    np.testing.assert_allclose(chosen.evidence.rows.residual, expected[0], rtol=1e-3)
    np.testing.assert_allclose(chosen.evidence.rows.squared, expected[1], rtol=1e-3, atol=1e-4)


def test_rows_are_whitened_without_their_own_fold(smooth, folds, roots):
    (found,) = learn_whitened_subspaces(smooth, roots, [(CELLS, SubspaceOptions(3, 0))], folds)
    own = smooth.copy()
    assert whiten_in_place(own, roots, folds) is own
    for fold in range(5):
        inside = folds == fold
        np.testing.assert_allclose(own[inside], smooth[inside] @ roots[1 + fold].whitening, atol=1e-5)
    assert found.centres.shape == (6, 1, NUM_FEATURES)


def test_a_shape_is_taken_where_features_hang_together(smooth, folds):
    """And not where they do not; the log likelihoods that decide are in the same units."""
    rng = np.random.default_rng(2)
    loose = (rng.normal(size=(400, 2)) @ rng.normal(size=(2, NUM_FEATURES)) * 3 + rng.normal(size=smooth.shape)).astype(
        np.float32
    )
    for rows, is_taken in ((smooth, True), (loose, False)):
        found = geode_jax.learn_forest(
            jax.random.key(0), rows, dictionary=geode_jax.DictionarySettings(num_trees=1, max_rank=2, depth=1)
        )
        assert (found.noise_root is not None) == is_taken
        (told,) = [it for it in found.found.decisions if it.about == "noise covariance"]
        assert told.taken == ("full" if is_taken else "isotropic")
        assert (told.gain > 0.01 * NUM_FEATURES) == is_taken
    # with nothing to gain on but an impossible likelihood the noise stays isotropic
    training = Training(smooth, NUM_FEATURES, folds)
    nothing = try_noise_covariance(training, CELLS, SubspaceOptions(2, 0), np.full(400, 1e6))
    assert not is_worth_its_cost(nothing.gain, NUM_FEATURES)


@pytest.mark.parametrize(("span_gain", "noise_gain"), [(2.0, 1.0), (1.0, 2.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_the_larger_gain_is_taken_and_told(smooth, folds, span_gain, noise_gain, monkeypatch):
    """One of the two at most; the other is told as not taken."""

    def outcome(about, name, gain):
        decision = Decision(about, name, "gain", gain, 0.1)
        return choices._Outcome(None, None, 2, gain, (decision if gain > 0.0 else Decision(about, "no", "gain"),))

    monkeypatch.setattr(choices, "_judge_plain", lambda *rest: choices._Plain(np.zeros(400), 2))
    monkeypatch.setattr(choices, "_judge_spans", lambda *rest: outcome("shared span", "3 directions", span_gain))
    monkeypatch.setattr(choices, "_judge_noise", lambda *rest: outcome("noise covariance", "full", noise_gain))
    plan = Plan.of(geode_jax.DictionarySettings(), *smooth.shape)
    chosen = choices.choose(Training(smooth, NUM_FEATURES, folds), plan, CELLS, 0)
    taken = {decision.about: decision.taken for decision in chosen.decisions}
    assert (taken["shared span"] == "3 directions") == (span_gain > noise_gain)
    assert (taken["noise covariance"] == "full") == (noise_gain > span_gain)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_rank": 3}, "as given"),
        ({"max_rank": 99}, "the most that the data allow"),
        ({"cross_fit": None}, "the most that are considered for data of this size"),
        ({}, "1.5 times what held-out rows support"),
        ({"max_rank": 9, "shared_span": geode_jax.SharedSpan(4)}, "all of the span's"),
    ],
)
def test_where_the_rank_comes_from_is_told(smooth, settings, why):
    settings = geode_jax.DictionarySettings(num_trees=1, depth=1, feature_noise=None, noise_covariance=None, **settings)
    found = geode_jax.learn_forest(jax.random.key(0), smooth, dictionary=settings).found
    assert found.decisions[-1].why == why
    assert found.decisions[-1].taken == str(found.rank)


def test_it_is_told_that_a_given_span_leaves_the_noise_isotropic(smooth):
    settings = geode_jax.DictionarySettings(num_trees=1, depth=1, shared_span=geode_jax.SharedSpan(4))
    found = geode_jax.learn_forest(jax.random.key(0), smooth, dictionary=settings).found
    assert "noise covariance: isotropic (not tried with a span of given rank)" in map(str, found.decisions)


def test_judged_by_some_folds(smooth, monkeypatch):
    """With more rows than a choice needs, the axes are still those of all rows, whoever judged them."""
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=2, depth=1)
    usual, judged = [], []
    for enough in (400, 90):
        monkeypatch.setattr(choices, "LARGEST_SAMPLE", enough)
        seen = mock.Mock(wraps=try_noise_covariance)
        monkeypatch.setattr(choices, "try_noise_covariance", seen)
        usual.append(geode_jax.learn_forest(jax.random.key(0), smooth, dictionary=settings))
        judged.append(set(seen.call_args.args[0].folds))
    assert judged == [{0, 1, 2, 3, 4}, {-1, 0, 1}]
    np.testing.assert_allclose(*(forest.noise_root for forest in usual), atol=0.1)
    roots = [forest.noise_root for forest in usual]
    np.testing.assert_allclose(roots[0] @ roots[1], roots[1] @ roots[0], atol=1e-6)


@pytest.mark.parametrize(
    ("enough", "rank", "is_known"),
    [(400, 4, True), (90, 4, False), (400, 2, False)],
    ids=["just these", "of some rows", "of more directions"],
)
def test_the_first_trees_dictionaries_are_not_learned_again(smooth, enough, rank, is_known, monkeypatch):
    """If those of the trial are what would be learned: the forest is the same to the last bit."""
    settings = geode_jax.DictionarySettings(num_trees=2, depth=1, shared_span=None, max_rank=4)
    monkeypatch.setattr(choices, "LARGEST_SAMPLE", enough)
    monkeypatch.setattr(choices, "_rank_by", lambda *rest: rank)
    chosen = []

    def choose(*arguments, forgetting):
        chosen.append(choices.choose(*arguments))
        return chosen[-1]._replace(first=None) if forgetting else chosen[-1]

    forests = []
    for forgetting in (False, True):
        monkeypatch.setattr(dictionaries, "choose", functools.partial(choose, forgetting=forgetting))
        forests.append(geode_jax.learn_forest(jax.random.key(0), smooth, dictionary=settings))
    assert [one.first is not None for one in chosen] == [is_known] * 2
    assert forests[0].noise_root is not None
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(forest) for forest in forests))


SETTINGS = geode_jax.DictionarySettings(num_trees=1, max_rank=2, depth=1, shared_span=None)


@pytest.fixture(scope="module")
def fits(smooth):
    """With a noise covariance and without one, of the first 300 rows."""
    kinds = (SETTINGS, dataclasses.replace(SETTINGS, noise_covariance=None))
    return [geode_jax.fit(jax.random.key(0), smooth[:300], dictionary=kind, sampler=SAMPLER) for kind in kinds]


@pytest.mark.slow
def test_it_pays_on_new_rows(smooth, fits):
    """Density of new rows, what is hidden in them, and a block's intervals, which without it are too narrow."""
    shaped, plain = fits
    new = smooth[300:].astype(float)
    gain = geode_jax.log_density(shaped, new) - geode_jax.log_density(plain, new)
    assert gain.mean() > max(0.5, 4 * gain.std() / np.sqrt(gain.size))
    block = np.zeros(new.shape, bool)
    block[:, 8:16] = True
    covered, error = [], []
    for posterior in fits:
        filled, lower, upper = geode_jax.impute(posterior, np.where(block, np.nan, new), interval=0.9)
        covered.append(((lower <= new) & (new <= upper))[block].mean())
        error.append(np.abs(filled - new)[block].mean())
    assert covered[0] == pytest.approx(0.9, abs=0.04)
    assert error[0] < error[1]


def test_statistics_are_honest(smooth):
    """Training rows, each as its own fold's dictionary and noise see it, are as likely as new ones."""
    forest = geode_jax.learn_forest(jax.random.key(0), smooth[:300], dictionary=SETTINGS)
    posterior = geode_jax.sample_posterior(jax.random.key(1), forest, sampler=SAMPLER)
    trained = geode_jax.held_out_log_density(forest, posterior)
    new = geode_jax.log_density(posterior, smooth[300:].astype(float))
    error = np.hypot(trained.std() / np.sqrt(300), new.std() / np.sqrt(100))
    assert trained.mean() - new.mean() == pytest.approx(0.0, abs=4 * error)


def test_files_keep_it(smooth, fits, tmp_path):
    fits[0].save(tmp_path / "model.npz")
    loaded = geode_jax.Posterior.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.noise_root, fits[0].noise_root)
    np.testing.assert_array_equal(
        geode_jax.log_density(loaded, smooth[:5].astype(float)),
        geode_jax.log_density(fits[0], smooth[:5].astype(float)),
    )
    forest = geode_jax.learn_forest(jax.random.key(0), smooth[:300], dictionary=SETTINGS)
    again = geode_jax.Forest.from_archive(*forest.to_archive())
    np.testing.assert_array_equal(again.noise_root, forest.noise_root)


def test_constant_features_do_not_run_away(smooth):
    """A feature without any spread: the density is finite, and a new value of it costs something but not all."""
    rows = smooth[:300].astype(float)
    rows[:, 3] = 7.0
    fitted = geode_jax.fit(jax.random.key(0), rows, dictionary=SETTINGS, sampler=SAMPLER)
    usual = geode_jax.log_density(fitted, rows[:20])
    assert np.isfinite(usual).all()
    rows[:20, 3] += 0.1
    other = geode_jax.log_density(fitted, rows[:20])
    assert np.isfinite(other).all()
    assert (other < usual).all()
    assert np.isfinite(geode_jax.sample(jax.random.key(1), fitted, 20)).all()


@pytest.mark.parametrize(
    ("num_rows", "num_features", "depth"), [(300, 1, 1), (300, 2, 1), (20, NUM_FEATURES, 1), (300, 24, 0)]
)
def test_odd_shapes(smooth, num_rows, num_features, depth):
    """One feature, two, fewer rows than features, one node: stage one ends, and what it hands on is finite."""
    settings = dataclasses.replace(SETTINGS, depth=depth)
    found = geode_jax.learn_forest(jax.random.key(0), smooth[:num_rows, :num_features], dictionary=settings)
    assert np.isfinite(found.statistics.residual).all()
    assert np.isfinite(found.statistics.squared).all()
    assert (found.scale > 0.0).all()
    if found.noise_root is not None:
        assert np.linalg.slogdet(found.noise_root)[1] == pytest.approx(0.0, abs=1e-6)


def test_rows_with_missing_features_in_training_leave_the_noise_isotropic(smooth):
    rows = smooth[:300].astype(float)
    rows[:20, 3] = np.nan
    found = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=SETTINGS)
    assert found.noise_root is None
    assert "noise covariance" not in [it.about for it in found.found.decisions]


def test_masks_of_different_size_share_a_program():
    """Places beyond a row's observed features count for nothing."""
    rng = np.random.default_rng(0)
    root = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    root = ((root * np.exp(rng.normal(size=6))) @ root.T).astype(np.float32)
    mask = (rng.random((5, 6)) < 0.5).astype(np.float32)
    mask[:, 0] = 1.0
    noise = SharedNoise.of(jnp.asarray(root))
    seen = observe_rows(*map(jnp.asarray, (np.zeros((5, 6), np.float32), mask)), noise, num_seen=6)
    vectors = rng.normal(size=(1, 6, 2)).astype(np.float32)
    shown = np.asarray(seen.whitening(jnp.asarray(vectors)))
    for row in range(5):
        observed = mask[row] > 0
        covariance = (root @ root)[np.ix_(observed, observed)].astype(float)
        values = vectors[0, observed]
        np.testing.assert_allclose(shown[row].T @ shown[row], values.T @ np.linalg.solve(covariance, values), rtol=1e-3)
        assert seen.whitening.log_det[row] == pytest.approx(np.linalg.slogdet(covariance)[1], abs=1e-3)
