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
from geode_jax import NoiseCovariance
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import choices, dictionaries, fill, partial_statistics
from geode_jax.forest.partial_statistics import group_rows, reduce_rows
from geode_jax.forest.plan import Plan
from geode_jax.learning import candidate_search, evidence
from geode_jax.learning.evidence import cross_fitted_evidence
from geode_jax.learning.noise_covariance import (
    Covariances,
    NoiseRoot,
    _residuals_along_axes,
    deviation_off_subspaces,
    is_worth_its_cost,
    learn_covariances,
    learn_whitened_subspaces,
    try_noise_covariance,
    whiten_in_place,
    whiten_training,
)
from geode_jax.learning.subspaces import SubspaceOptions, Subspaces, learn_subspaces
from geode_jax.math.whitening import SharedNoise, observe_rows
from geode_jax.model.found import Decision
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.row_space import axes_of, principal_coordinates
from geode_jax.rows.training import Training
from geode_jax.rows.unseen import Unseen

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
    training = Training(smooth, NUM_FEATURES, folds)
    covariances = learn_covariances(training)
    return covariances.roots(deviation_off_subspaces(training, covariances, CELLS, SubspaceOptions(2, 0)))


def test_held_out_variances_are_not_too_small(smooth, folds):
    """Sample eigenvalues are far too small at the lower end; those held out are near the truth."""
    few = Training(smooth[:60], NUM_FEATURES, folds[:60])
    found = learn_covariances(few)
    sample = np.linalg.eigvalsh(np.cov(smooth[:60].T))[::-1]
    fresh = np.square((smooth[60:] - smooth[:60].mean(axis=0)) @ found.axes[0]).mean(axis=0)
    lowest = slice(NUM_FEATURES // 2, None)
    assert sample[lowest].mean() < 0.75 * fresh[lowest].mean()
    assert found.variance[lowest].mean() == pytest.approx(fresh[lowest].mean(), rel=0.2)
    # and so are the deviations of the noise beyond two directions of signal, of few rows as of many
    deviation = deviation_off_subspaces(few, found, Partition(0, (np.arange(60),)), SubspaceOptions(2, 0))
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
    deviation = deviation_off_subspaces(training, covariances, cells, SubspaceOptions(2, 0))
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
    training = Training(rows, NUM_FEATURES, folds)
    covariances = learn_covariances(training)
    root = covariances.roots(deviation_off_subspaces(training, covariances, CELLS, SubspaceOptions(2, 0)))[0]
    assert root.deviation.min() > 0.01 * root.deviation.mean()
    assert np.linalg.slogdet(root.matrix)[1] == pytest.approx(0.0, abs=1e-9)


def test_a_sample_that_judges_is_whitened_as_its_rows_are(smooth, folds, monkeypatch):
    monkeypatch.setattr(evidence, "LARGEST_SAMPLE", 50)
    options = SubspaceOptions(3, 0)
    chosen = try_noise_covariance(Training(smooth, NUM_FEATURES, folds), CELLS, options, np.full(50, -1e6))
    roots = chosen.covariances.roots(chosen.deviation)
    (found,) = learn_whitened_subspaces(Training(smooth, NUM_FEATURES, folds), roots, [(CELLS, options)])
    rows = evidence.judged_rows(folds)
    whole = whiten_in_place(smooth.copy(), roots, folds)
    expected = evidence.statistics_at(Training(whole, NUM_FEATURES, folds), rows, found, np.arange(1))
    assert rows.size == 50
    np.testing.assert_allclose(chosen.evidence.rows.residual, expected[0], rtol=1e-3)
    np.testing.assert_allclose(chosen.evidence.rows.squared, expected[1], rtol=1e-3, atol=1e-4)


def test_rows_are_whitened_without_their_own_fold(smooth, folds, roots):
    (found,) = learn_whitened_subspaces(Training(smooth, NUM_FEATURES, folds), roots, [(CELLS, SubspaceOptions(3, 0))])
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
def shaped(smooth):
    """A fit to the first 300 rows, with a noise covariance."""
    return geode_jax.fit(jax.random.key(0), smooth[:300], dictionary=SETTINGS, sampler=SAMPLER)


@pytest.mark.slow
def test_it_pays_on_new_rows(smooth, shaped):
    """Density of new rows, what is hidden in them, and a block's intervals, which without it are too narrow."""
    without = dataclasses.replace(SETTINGS, noise_covariance=None)
    plain = geode_jax.fit(jax.random.key(0), smooth[:300], dictionary=without, sampler=SAMPLER)
    new = smooth[300:].astype(float)
    gain = geode_jax.log_density(shaped, new) - geode_jax.log_density(plain, new)
    assert gain.mean() > max(0.5, 4 * gain.std() / np.sqrt(gain.size))
    block = np.zeros(new.shape, bool)
    block[:, 8:16] = True
    covered, error = [], []
    for posterior in (shaped, plain):
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


def test_files_keep_it(smooth, shaped, tmp_path):
    shaped.save(tmp_path / "model.npz")
    loaded = geode_jax.Posterior.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.noise_root, shaped.noise_root)
    np.testing.assert_array_equal(
        geode_jax.log_density(loaded, smooth[:5].astype(float)),
        geode_jax.log_density(shaped, smooth[:5].astype(float)),
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


def _root(rng):
    """The root of some covariance of twelve features, (12, 12)."""
    directions = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    return (directions * np.exp(0.5 * rng.normal(size=12))) @ directions.T


@pytest.fixture(scope="module")
def unseen():
    """Five rows, whitened by the inverses of two roots; the third is complete, the others miss 1, 2, 5 and 11."""
    rng = np.random.default_rng(0)
    roots, which = [_root(rng), _root(rng)], np.array([0, 1, 0, 1, 0])
    is_observed = np.ones((5, 12), dtype=bool)
    for row, number in enumerate((1, 2, 0, 5, 11)):
        is_observed[row, rng.permutation(12)[:number]] = False
    return Unseen.of(is_observed, which, dict(enumerate(map(np.linalg.inv, roots))), float), is_observed, roots


def test_what_whitened_rows_do_not_show(unseen):
    """It is the span of the columns of the whitening at the missing features."""
    found, is_observed, roots = unseen
    rows, rng = np.flatnonzero(found.place >= 0), np.random.default_rng(1)
    np.testing.assert_array_equal(rows, [0, 1, 3, 4])
    several = rng.normal(size=(3, 4, 12))
    basis = rng.normal(size=(12, 2))
    shown = found.shown(rows, several[0])
    of_basis = [found.of_basis(rows[[place]], found.turned(row, basis))[0] for place, row in enumerate(rows)]
    turned = [np.take_along_axis(found.turned_each(rows, vectors), found.missing, axis=1) for vectors in several]
    squares = [np.square(found.along(rows, vectors)).sum(axis=1) for vectors in several]
    np.testing.assert_allclose(found.squares(rows, np.stack(turned, axis=1)), squares)
    some = [place for place, row in enumerate(rows) if found.which[found.place[row]] == 0]
    expected = sum(np.square(of_basis[place]).sum(axis=0) for place in some)
    np.testing.assert_allclose(found.shares(rows[some], basis), expected)
    np.testing.assert_allclose(found.taken(rows[1:]).shown(np.arange(3), several[0, 1:]), shown[1:])
    for place, row in enumerate(rows):
        observed, root = is_observed[row], roots[row % 2]
        hidden = np.linalg.qr(np.linalg.inv(root)[:, ~observed])[0]
        left = several[0, place] - hidden @ hidden.T @ several[0, place]
        np.testing.assert_allclose(shown[place], left, atol=1e-10)
        np.testing.assert_allclose(of_basis[place].T @ of_basis[place], basis.T @ hidden @ hidden.T @ basis, atol=1e-10)
        changed = several[0, place] + hidden @ rng.normal(size=hidden.shape[1])
        np.testing.assert_allclose((root @ changed)[observed], (root @ several[0, place])[observed], atol=1e-10)
        log_det = np.linalg.slogdet((root @ root)[np.ix_(observed, observed)])[1]
        assert np.linalg.slogdet(root)[1] + found.log_det[place] == pytest.approx(0.5 * log_det)


@pytest.fixture(scope="module")
def whitened():
    """30 rows of 12 features, about 30 units from 0, in two folds, of which one is twice as large; a fifth complete.

    With the dictionaries of 4 nodes and their folds: of all rows, and without each fold.
    """
    rng = np.random.default_rng(4)
    folds, is_observed = np.arange(30) % 3, rng.random((30, 12)) < 0.6
    folds[folds == 2], is_observed[::5] = 1, True
    is_observed[:, 0] = True
    inverses = dict(enumerate(np.linalg.inv(_root(rng)) for _ in range(3)))
    centres, bases = 30.0 + rng.normal(size=(3, 4, 12)), np.linalg.qr(rng.normal(size=(3, 4, 12, 6)))[0]

    def of(dtype):
        unseen = Unseen.of(is_observed, 1 + folds, inverses, dtype)
        x = (30.0 + rng.normal(size=(30, 12))).astype(dtype)
        subspaces = Subspaces(centres.astype(dtype), bases.astype(dtype), np.full(4, 6))
        return Training(x, 12, folds, is_observed, unseen=unseen), subspaces

    return of


@pytest.mark.parametrize(("numbers", "dtype"), [(1, np.float64), (2**24, np.float64), (2**24, np.float32)])
def test_residuals_are_of_what_whitened_rows_show(whitened, monkeypatch, numbers, dtype):
    """At nodes with more rows of a fold than directions, and with fewer; complete rows among them."""
    monkeypatch.setattr(evidence, "RESIDUAL_NUMBERS", numbers)
    training, subspaces = whitened(dtype)
    nodes, rows = np.array([0, 2, 3]), np.flatnonzero(np.arange(30) % 4 > 0)
    residual, squared = evidence.statistics_at(training, rows, subspaces, nodes)
    tolerance = 1e-9 if dtype == np.float64 else 2e-4
    for place, row in enumerate(rows):
        for index, node in enumerate(nodes):
            out = 1 + training.folds[row]
            basis = subspaces.bases[out, node].astype(float)
            off = training.x[row] - subspaces.centres[out, node].astype(float)
            left = off - basis @ (basis.T @ off)
            shown = left if training.mask[row].all() else training.unseen.shown(np.array([row]), left[None])[0]
            assert residual[index, place] == pytest.approx(np.square(shown).sum(), rel=tolerance, abs=tolerance)
            np.testing.assert_allclose(squared[index, place], np.square(basis.T @ off), rtol=tolerance, atol=tolerance)
    alone = evidence.statistics_at_node(training, rows, subspaces, 2)
    for ours, theirs in zip(alone, (residual[1], squared[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    assert evidence.statistics_at(training, rows[:0], subspaces, nodes)[1].shape == (3, 0, 6)
    complete = np.flatnonzero(training.mask.all(axis=1))
    plain = evidence.statistics_at(training._replace(unseen=None, is_observed=None), complete, subspaces, nodes)
    for ours, theirs in zip(evidence.statistics_at(training, complete, subspaces, nodes), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance)


@pytest.mark.parametrize("numbers", [1, 2**24])
def test_whitened_rows_find_the_candidates_that_each_node_scores(whitened, monkeypatch, numbers):
    """However many of them are searched together."""
    monkeypatch.setattr(candidate_search, "_TABLE_NUMBERS", numbers)
    training, subspaces = whitened(np.float64)
    every = np.arange(30)
    cells = Partition(1, (every, every[::2], every[1::2]))
    own = Subspaces(subspaces.centres[:, :3], subspaces.bases[:, :3], subspaces.ranks[:3])
    mixture = evidence.cell_mixture(training, cells, own)
    residual, squared = evidence.statistics_at(training, every, own, np.arange(3))
    counts = training.mask.sum(axis=1)
    rows = evidence.HeldOutStatistics(np.arange(3), residual, squared, np.ones((3, 6), bool), counts, 12)
    best = np.sort(np.argsort(-mixture.log_densities(rows), axis=0)[:2].T, axis=1)
    np.testing.assert_array_equal(candidate_search.search_candidates(training, every, cells, own, 2), best)


@pytest.mark.parametrize("numbers", [30, 2**22])
def test_whitened_rows_of_several_folds_are_reduced_in_parts(whitened, monkeypatch, numbers):
    monkeypatch.setattr(partial_statistics, "_CHUNK_NUMBERS", numbers)
    training, subspaces = whitened(np.float64)
    rows = training.partial
    block = training.taken(rows)._replace(folds=1 + training.folds[rows])
    candidates = np.random.default_rng(0).permuted(np.tile(np.arange(4), (rows.size, 1)), axis=1)[:, :2]
    found = reduce_rows(subspaces[:2], block, candidates, group_rows(block.mask, block.folds, 1))
    for place, row in enumerate(rows):
        for slot, node in enumerate(candidates[place]):
            basis = subspaces.bases[1 + training.folds[row], node]
            off = training.x[row] - subspaces.centres[1 + training.folds[row], node]
            shown = training.unseen.shown(np.full(7, row), np.vstack([off, basis.T]))
            gram = found["gram"][0, 2 * place + slot]
            np.testing.assert_allclose(gram, basis.T @ shown[1:].T, atol=1e-9)
            start = found["start"][0, place, slot]
            np.testing.assert_allclose(found["cross"][0, place, slot], basis.T @ shown[0], atol=1e-8)
            np.testing.assert_allclose(found["remainder"][0, place, slot], basis.T @ shown[0] - gram @ start, atol=1e-8)
            error = shown[0] - shown[1:].T @ start
            assert found["residual"][0, place, slot] == pytest.approx(error @ error, abs=1e-8)


@pytest.mark.parametrize("is_shared", [False, True])
def test_whitened_rows_are_reduced_as_predictions_do(unseen, is_shared):
    """The statistics of rows with missing features, and the root of what they do not show of a basis."""
    _, is_observed, (root, _) = unseen
    if is_shared:
        is_observed = np.repeat(is_observed[[1, 3]], 4, axis=0)
    rows = np.flatnonzero(~is_observed.all(axis=1))
    is_observed, rng, number = is_observed[rows], np.random.default_rng(2), rows.size
    x, folds = rng.normal(size=(number, 12)), np.zeros(number, dtype=int)
    centres, bases = rng.normal(size=(1, 2, 12)), np.linalg.qr(rng.normal(size=(1, 2, 12, 3)))[0]
    bases[0, 1, :, 2:] = 0.0  # one direction less
    inverse = np.linalg.inv(root)
    training = Training(x @ inverse, 12, folds, is_observed, unseen=Unseen.of(is_observed, folds, {0: inverse}, float))
    grouping = group_rows(is_observed, folds, 1)
    assert grouping.is_shared == is_shared
    found = reduce_rows((centres, bases), training, np.tile([0, 1], (number, 1)), grouping)
    entry = np.arange(2 * number).reshape(1, number, 2) if found["entry"] is None else found["entry"]
    with jax_settings(np.float64):
        seen = observe_rows(
            jnp.asarray(x), jnp.asarray(is_observed * 1.0), SharedNoise.of(jnp.asarray(root)), num_seen=12
        )
        for node in range(2):
            expected = seen.statistics(jnp.asarray(root @ centres[0, node]), jnp.asarray(root @ bases[0, node]))
            for place, row in enumerate(grouping.rows[0]):
                gram = found["gram"][0, entry[0, place, node]]
                np.testing.assert_allclose(gram, expected.gram[row % expected.gram.shape[0]], atol=1e-9)
                np.testing.assert_allclose(found["cross"][0, place, node], expected.cross[row], atol=1e-9)
                start, remainder, residual = (
                    found[name][0, place, node] for name in ("start", "remainder", "residual")
                )
                squared = residual + 2.0 * start @ remainder + start @ gram @ start
                products = seen.products(jnp.asarray(root @ centres[0, node]), jnp.asarray(root @ bases[0, node]))
                assert squared == pytest.approx(float(products[2][row]))
                hidden = found["root"][0, entry[0, place, node]]
                whole = bases[0, node].T @ bases[0, node]
                np.testing.assert_allclose(hidden @ hidden.T, whole - gram, atol=1e-7)
                number_unseen = 12 - is_observed[row].sum()
                assert not hidden[:, number_unseen:].any()


def test_rows_are_filled_with_what_the_noise_of_the_observed_tells(unseen):
    """At given points, the mean of what is missing is that of a normal with the noise's covariance."""
    _, is_observed, roots = unseen
    rng = np.random.default_rng(3)
    is_observed, folds = is_observed[~is_observed.all(axis=1)], np.array([0, 1, 1, 0])
    x, mean = rng.normal(size=(2, 4, 12))
    noise = [NoiseRoot(*np.linalg.eigh(root)[::-1], 2.0) for root in (np.eye(12), *roots)]
    block = whiten_training(Training(x.copy(), 12, folds, is_observed), noise)._replace(folds=1 + folds)
    filled = fill._unwhitened(block, mean, noise)
    for row in range(4):
        root = roots[folds[row]]
        covariance, points = root @ root, 2.0 * mean @ root
        seen, hidden = np.flatnonzero(is_observed[row]), np.flatnonzero(~is_observed[row])
        np.testing.assert_allclose(filled[row, seen], x[row, seen], atol=1e-10)
        told = np.linalg.solve(covariance[np.ix_(seen, seen)], x[row, seen] - points[row, seen])
        expected = points[row, hidden] + covariance[np.ix_(hidden, seen)] @ told
        np.testing.assert_allclose(filled[row, hidden], expected, atol=1e-9)


@pytest.fixture(scope="module")
def holes(smooth):
    """A fifth of the values missing, in nine of ten rows."""
    rng = np.random.default_rng(4)
    is_hidden = (rng.random(smooth.shape) < 0.2) & (np.arange(400) % 10 > 0)[:, None]
    return np.where(is_hidden, np.nan, smooth)


def _about_noise(forest):
    """What was decided about the noise covariance."""
    (decision,) = (it for it in forest.found.decisions if it.about == "noise covariance")
    return decision


def test_deviations_count_only_what_rows_show():
    """Isotropic noise, half of the features missing in most rows, with any values filled in."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(400, NUM_FEATURES)).astype(np.float32)
    is_observed = np.ones(x.shape, dtype=bool)
    is_observed[:, ::2] = rng.random((400, NUM_FEATURES // 2)) < 0.4
    folds = assign_folds(400, 5, rng)
    for scale in (0.0, 1.0):
        filled = np.where(is_observed, x, scale * rng.normal(size=x.shape)).astype(np.float32)
        training = Training(filled, NUM_FEATURES, folds, is_observed)
        axes = [np.eye(NUM_FEATURES)] * 6
        covariances = Covariances(axes, np.ones(NUM_FEATURES), NUM_FEATURES, NUM_FEATURES)
        square, share = _residuals_along_axes(
            training, covariances.roots(np.ones(NUM_FEATURES))[1:], CELLS, SubspaceOptions(1, 0)
        )
        np.testing.assert_allclose(np.sqrt(square / share), 1.0, atol=0.15)
        seen = is_observed.sum(axis=0)
        np.testing.assert_allclose(share, seen, rtol=0.3)


def test_a_fold_has_its_own_fills(smooth, folds, roots):
    """The dictionary without a fold learns from the rows as they were filled without it."""
    is_observed = np.ones(smooth.shape, dtype=bool)
    is_observed[::2, 4] = False
    without = [smooth[::2] + np.float32(fold) for fold in range(5)]
    training = Training(smooth, NUM_FEATURES, folds, is_observed, without)
    (found,) = learn_whitened_subspaces(training, roots, [(CELLS, SubspaceOptions(2, 0))])
    for fold in range(5):
        rows = np.array(smooth)
        rows[::2] = without[fold]
        centre = rows[folds != fold].mean(axis=0) @ roots[1 + fold].whitening
        np.testing.assert_allclose(found.centres[1 + fold, 0], centre, atol=1e-3)
    pairs = learn_covariances(training, [*training.holdouts, (1, 3)])
    rows = np.array(smooth)
    rows[::2] = without[1]
    kept = rows[(folds != 1) & (folds != 3)]
    turned = (kept - kept.mean(axis=0)) @ pairs.axes[-1]
    np.testing.assert_allclose(np.cov(turned.T) * (1.0 - np.eye(NUM_FEATURES)), 0.0, atol=1e-3)


@pytest.fixture(scope="module")
def to_refill(smooth):
    """Rows in three folds that miss a fifth of their values, as filled for each fold; the roots of their noise."""
    rng = np.random.default_rng(5)
    is_observed, folds = rng.random(smooth.shape) < 0.8, rng.permutation(np.arange(400) % 3)
    is_observed[::10] = True
    filled = np.where(is_observed, smooth, smooth + rng.normal(size=smooth.shape)).astype(np.float32)
    partial = ~is_observed.all(axis=1)
    without = [np.where(is_observed, smooth, filled + 0.1 * fold)[partial].astype(np.float32) for fold in range(3)]
    training = Training(filled, NUM_FEATURES, folds, is_observed, without)
    return training, learn_covariances(training).roots(np.linspace(2.0, 1.0, NUM_FEATURES))


HALVES = Partition(1, (np.arange(400), np.arange(200), np.arange(200, 400)))


def _refilled(training, roots, known=None):
    with jax_settings(np.float32):
        plan = Plan.of(SETTINGS, 400, NUM_FEATURES, 360)
        return fill.refill_whitened(training, plan, HALVES, SubspaceOptions(2, 0), roots, known)


def test_rows_are_filled_once_more_without_knowing_the_folds_that_are_left_out(to_refill, monkeypatch):
    """Rows of fold 0 move: those of other folds, as filled for the dictionary without it, stay, but for rounding.

    Held are units, nodes' parameters and candidates: they are learned from all rows.
    """
    training, roots = to_refill
    held = {}
    for name in ("fit_quick_mixture", "search_candidates"):
        function = getattr(fill, name)
        monkeypatch.setattr(
            fill, name, lambda *given, name=name, function=function: held.setdefault(name, function(*given))
        )
    monkeypatch.setattr(
        fill, "learn_covariances", lambda *given: learn_covariances(*given)._replace(variance=np.ones(NUM_FEATURES))
    )
    moves = training.folds == 0
    moved = training._replace(
        x=np.where(moves[:, None], training.x + 1.0, training.x),
        without=[np.where(moves[training.partial, None], rows + 1.0, rows) for rows in training.without],
    )
    first, second = (_refilled(rows, roots) for rows in (training, moved))
    np.testing.assert_allclose(first.without_fold(0)[~moves], second.without_fold(0)[~moves], atol=1e-5)
    rest = training.folds == 2
    assert np.abs(first.x - second.x)[~moves].max() > 0.1
    assert np.abs(first.without_fold(1)[rest] - second.without_fold(1)[rest]).max() > 0.1
    # fills of fold 0 move, and are not what its rows are filled from
    moved = training._replace(x=np.where(training.is_observed, training.x, moved.x))
    np.testing.assert_allclose(_refilled(moved, roots).x[moves], first.x[moves], atol=1e-5)


@pytest.mark.parametrize("rank", [2, 4])
def test_rows_are_filled_once_more_from_the_dictionaries_of_the_trial(to_refill, rank, monkeypatch):
    """As from those that would be learned, also where the trial's had more directions."""
    training, roots = to_refill
    (known,) = learn_whitened_subspaces(training, roots, [(HALVES, SubspaceOptions(rank, 0))])
    whole = []

    def unwhitened(block, *rest, function=fill._unwhitened):
        whole.append((block.folds.size, function(block, *rest)[block.mask]))
        return function(block, *rest)

    monkeypatch.setattr(fill, "_unwhitened", unwhitened)
    ours, theirs = _refilled(training, roots, known), _refilled(training, roots)
    every, own = training.mask[training.partial], training.folds[training.partial]
    for number, (size, seen) in enumerate(whole):  # what is seen comes back: every line has the roots that whitened it
        used = np.flatnonzero(own != number % 4 - 1)
        assert size == used.size
        np.testing.assert_allclose(seen, training.x[training.partial[used]][every[used]], atol=1e-4)
    for one, other in zip([ours.x, *ours.without], [theirs.x, *theirs.without], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3 if rank > 2 else 0.0)


def test_dictionaries_are_of_rows_filled_under_the_noise(holes, monkeypatch):
    """They, and the axes of the noise, are learned from the rows as filled last."""
    filled, lines = [], []

    def refill(*given):
        filled.append(fill.refill_whitened(*given))
        lines.extend([np.array(filled[0].x[filled[0].partial]), *filled[0].without])  # x is whitened in place
        return filled[-1]

    learned = mock.Mock(wraps=learn_whitened_subspaces)
    monkeypatch.setattr(dictionaries, "refill_whitened", refill)
    monkeypatch.setattr(dictionaries, "learn_whitened_subspaces", learned)
    before = mock.Mock(wraps=learn_covariances)
    monkeypatch.setattr(dictionaries, "learn_covariances", before)
    geode_jax.learn_forest(jax.random.key(0), holes, dictionary=SETTINGS)
    (call,) = learned.call_args_list
    assert call.args[0] is filled[0] is before.call_args.args[0]
    assert call.kwargs.get("known", ()) == () == call.args[4]
    seen = ~np.isnan(holes[filled[0].partial])
    assert len(lines) == 6
    for rows in lines[1:]:
        np.testing.assert_array_equal(rows[seen], lines[0][seen])
        assert (rows[~seen] != lines[0][~seen]).mean() > 0.5


def test_missing_values_leave_a_covariance_much_as_it_is(smooth, holes):
    """It is taken, and near that of the complete rows, to whose noise it adds no more than a part."""
    complete, partial = (
        geode_jax.learn_forest(jax.random.key(0), rows, dictionary=SETTINGS) for rows in (smooth, holes)
    )
    gains = [
        next(it.gain for it in one.found.decisions if it.about == "noise covariance") for one in (complete, partial)
    ]
    assert 0.4 * gains[0] < gains[1] < gains[0]
    roots = [one.noise_root * one.scale[:, None] for one in (complete, partial)]
    covariances = [root @ root.T for root in roots]
    assert np.linalg.norm(covariances[1] - covariances[0]) < 0.25 * np.linalg.norm(covariances[0])


@pytest.mark.slow
def test_it_pays_on_new_rows_where_training_rows_miss_values(smooth, holes):
    """The density of new rows and the error of what is filled in are better than those of isotropic noise."""
    new, rng = smooth[300:], np.random.default_rng(5)
    masked = np.where(rng.random(new.shape) < 0.4, np.nan, new)
    nats, errors = [], []
    for noise in (NoiseCovariance(), None):
        settings = dataclasses.replace(SETTINGS, noise_covariance=noise)
        found = geode_jax.fit(jax.random.key(0), holes[:300], dictionary=settings, sampler=SAMPLER)
        assert (found.noise_root is not None) == (noise is not None)
        nats.append(geode_jax.log_density(found, new).mean())
        errors.append(np.abs(geode_jax.impute_mean(found, masked) - new)[np.isnan(masked)].mean())
    assert nats[0] > nats[1] + 2.0
    assert errors[0] < 0.9 * errors[1]


def test_noise_that_is_isotropic_stays_so_where_values_are_missing(smooth):
    """A gain of 0 within its error: what is filled in has no noise, which must not count as a covariance."""
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(400, 2)) @ rng.normal(size=(2, NUM_FEATURES)) * 3.0 + rng.normal(size=(400, NUM_FEATURES))
    rows[rng.random(rows.shape) < 0.3] = np.nan
    found = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=SETTINGS)
    assert found.noise_root is None
    assert abs(_about_noise(found).gain) < 0.03 * NUM_FEATURES


def test_float32_sees_nothing_of_what_is_not_seen(unseen):
    """Rows that show next to nothing, of nearly noise-free rows: no Gram matrix has a negative part worth the name."""
    rng, number = np.random.default_rng(7), 60
    directions = np.linalg.qr(rng.normal(size=(number, number)))[0]
    root = (directions * np.geomspace(3.0, 0.01, number)) @ directions.T
    is_observed = np.zeros((20, number), dtype=bool)
    is_observed[np.arange(20), rng.integers(number, size=20)] = True
    folds, basis = np.zeros(20, dtype=int), np.linalg.qr(rng.normal(size=(number, 4)))[0].astype(np.float32)
    rows = Unseen.of(is_observed, folds, {0: np.linalg.inv(root)}, np.float32)
    training = Training(rng.normal(size=(20, number)).astype(np.float32), number, folds, is_observed, unseen=rows)
    dictionary = np.zeros((1, 1, number), np.float32), basis[None, None]
    found = reduce_rows(dictionary, training, np.zeros((20, 1), int), group_rows(is_observed, folds, 1))
    for gram in found["gram"][0]:
        values = np.linalg.eigvalsh(gram.astype(float))
        assert values[0] > -4.0 * np.finfo(np.float32).eps * values[-1]
        assert values[-2] < 1e-6 * values[-1]


def test_few_rows_with_missing_values_among_many(smooth, monkeypatch):
    """None of them is judged; and a feature that is hardly ever seen."""
    rows = smooth.astype(float)
    rows[[7, 13, 29], 5] = np.nan
    monkeypatch.setattr(evidence, "LARGEST_SAMPLE", 20)
    assert geode_jax.learn_forest(jax.random.key(0), rows, dictionary=SETTINGS).noise_root is not None
    monkeypatch.undo()
    rows[4:, 7] = np.nan
    for cross_fit in (geode_jax.CrossFit(), geode_jax.CrossFit(2)):
        settings = dataclasses.replace(SETTINGS, cross_fit=cross_fit)
        found = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=settings)
        assert np.isfinite(found.partial.gram).all()
        assert np.isfinite(found.scale).all()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_features_of_which_values_are_missing(smooth, number):
    rows = smooth[:, :number].astype(float)
    rows[::3, 0] = np.nan
    rows = rows[~np.isnan(rows).all(axis=1)]
    found = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=dataclasses.replace(SETTINGS, max_rank=None))
    assert np.isfinite(found.dictionary.centres).all()


def test_too_many_missing_values_leave_the_noise_isotropic(holes, monkeypatch):
    monkeypatch.setattr(choices, "MOST_UNSEEN", 1000)
    found = geode_jax.learn_forest(jax.random.key(0), holes, dictionary=SETTINGS)
    assert found.noise_root is None
    assert _about_noise(found).why == "too many values are missing to try it"


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
