"""Classes: their densities against the mixture written out, calibration, votes, files, bad input."""

import dataclasses
from contextlib import nullcontext
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import small
from scipy import special, stats

import geode_jax
from geode_jax import DictionarySettings, SamplerSettings, SharedSpan
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.fitting import calibration, classes, memory
from geode_jax.math.whitening import ObservedRows
from geode_jax.model.draw import Draw
from geode_jax.predict import class_span
from geode_jax.predict import classes as predict_classes
from geode_jax.predict.class_span import show
from geode_jax.predict.distance import in_float64

SAMPLER = SamplerSettings(num_warmup=30, num_samples=20, segment_length=10)
SETTINGS = DictionarySettings(num_trees=2, max_rank=2, depth=1, shared_span=SharedSpan(4))
COUNTS = (80, 60, 20)


def _rows(counts, seed):
    """Three noisy planes in ten dimensions, in units far from 1; the last class is small and has little noise."""
    rng = np.random.default_rng(1)
    spans, centres = rng.normal(size=(3, 2, 10)), 1.5 * rng.normal(size=(3, 10))
    rng = np.random.default_rng(seed)
    parts = [
        centres[number]
        + rng.normal(size=(count, 2)) @ spans[number]
        + (0.3, 0.2, 0.02)[number] * rng.normal(size=(count, 10))
        for number, count in enumerate(counts)
    ]
    return 50.0 + 9.0 * np.concatenate(parts), np.repeat(np.arange(3), counts)


@pytest.fixture(scope="module")
def train():
    return _rows(COUNTS, 2)


@pytest.fixture(scope="module")
def test():
    return _rows((20, 20, 20), 3)


@pytest.fixture(scope="module", params=["float32", pytest.param("float64", marks=pytest.mark.slow)])
def reduced(request, train):
    """In four coordinates common to the classes; with noise at scales without rows far above that of others."""
    options = {"dictionary": SETTINGS, "sampler": SAMPLER, "dtype": request.param}
    prior = geode_jax.Prior(noise_shape=0.5, noise_rate=0.5)
    return geode_jax.fit_classes(jax.random.key(0), *train, prior=prior, **options)


@pytest.mark.parametrize("vote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_has_the_same_probabilities_whatever_the_other_rows_miss(reduced, test, vote):
    rows = test[0][::6].copy()
    expected = geode_jax.class_log_probabilities(reduced, rows, vote=vote)
    rows[3, 2:5] = np.nan
    found = geode_jax.class_log_probabilities(reduced, rows, vote=vote)
    np.testing.assert_allclose(np.delete(found, 3, axis=0), np.delete(expected, 3, axis=0), rtol=1e-4, atol=1e-5)
    alone = geode_jax.class_log_probabilities(reduced, rows[3:4], vote=vote)
    np.testing.assert_allclose(found[3:4], alone, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def whole(train):
    """Without common coordinates."""
    settings = dataclasses.replace(SETTINGS, shared_span=None)
    return geode_jax.fit_classes(jax.random.key(0), *train, dictionary=settings, sampler=SAMPLER)


def _dense(posterior, number, num_draws):
    """The mixture of one class in the data's units."""
    found = oracle.make_oracle(posterior.members[number], num_draws)
    mean, covariance = found.mean, found.covariance
    if posterior.reduction is not None:
        origin, basis, noise = (np.asarray(part, np.float64) for part in posterior.reduction)
        outside = noise * (np.eye(basis.shape[0]) - basis @ basis.T)
        mean, covariance = origin + mean @ basis.T, basis @ covariance @ basis.T + outside
    scale = posterior.scale
    return found._replace(mean=posterior.shift + scale * mean, covariance=scale[:, None] * covariance * scale)


@pytest.mark.parametrize("num_seen", [10, 7, 3, 1])
def test_densities_of_complete_and_partial_rows(reduced, test, num_seen):
    """With fewer features than coordinates, and with noise along them below and above that outside."""
    rows = test[0][::7]
    variances = np.concatenate([np.exp(np.asarray(member.draws.log_sigma2)).ravel() for member in reduced.members])
    assert variances.min() < reduced.reduction.noise < variances.max()
    seen = np.random.default_rng(num_seen).permutation(10) < num_seen
    found = geode_jax.class_log_densities(reduced, np.where(seen, rows, np.nan), num_draws=5, num_candidates=31)
    assert found.shape == (9, 3, 2 * 5)
    tolerance = {"rtol": 2e-3, "atol": 2e-2} if reduced.dtype == np.float32 else {"rtol": 1e-6, "atol": 1e-6}
    for number in range(3):
        expected = _dense(reduced, number, 5).log_density(rows, seen)
        np.testing.assert_allclose(special.logsumexp(found[:, number], axis=1) - np.log(10), expected, **tolerance)


def test_densities_without_common_coordinates(whole, test):
    rows = test[0][::7]
    assert whole.reduction is None
    for seen in (np.ones(10, bool), np.arange(10) != 4):
        found = geode_jax.class_log_densities(whole, np.where(seen, rows, np.nan), num_draws=5, num_candidates=31)
        for number in range(3):
            expected = _dense(whole, number, 5).log_density(rows, seen)
            found_here = special.logsumexp(found[:, number], axis=1) - np.log(10)
            np.testing.assert_allclose(found_here, expected, rtol=2e-3, atol=2e-2)


@pytest.mark.slow
def test_a_single_node(train, test):
    """Depth 0, complete rows and rows with a missing feature, against the one normal written out."""
    settings = dataclasses.replace(SETTINGS, num_trees=1, depth=0)
    found = geode_jax.fit_classes(jax.random.key(0), *train, dictionary=settings, sampler=SAMPLER)
    assert found.members[0].dictionary.tree.num_nodes == 1
    for seen in (np.ones(10, bool), np.arange(10) != 4):
        by_draw = geode_jax.class_log_densities(found, np.where(seen, test[0][::7], np.nan), num_draws=5)
        for number in range(3):
            expected = _dense(found, number, 5).log_density(test[0][::7], seen)
            found_here = special.logsumexp(by_draw[:, number], axis=1) - np.log(5)
            np.testing.assert_allclose(found_here, expected, rtol=2e-3, atol=2e-2)


def _some_draws(rng, dtype):
    """Two draws of a tree of 15 nodes, 3 directions each."""
    parameters = {
        "neg_log_u": rng.uniform(0.0, 2.0, (2, 15, 3)).astype(dtype),
        "tau": np.ones((2, 15, 3), dtype),
        "log_sigma2": rng.uniform(-2.0, -1.0, (2, 4)).astype(dtype),
        "log_weights": np.log(rng.dirichlet(np.ones(15), 2)).astype(dtype),
        "log_stop_concentration": np.zeros(2, dtype),
        "count": np.ones((2, 15), np.int32),
        "is_active": np.ones((2, 15, 3), bool),
        "dimension": np.full((2, 15), 3, np.int32),
        "log_joint": np.zeros(2, dtype),
    }
    return Draw(**{name: jnp.asarray(values) for name, values in parameters.items()})


def test_few_candidates_do_for_all_nodes(monkeypatch, fresh_programs):
    """Two of 15 nodes, kept in two steps; where little is seen, the others hold most of the weight."""
    rng = np.random.default_rng(0)
    dictionary = small.make_dictionary(jnp.float32, depth=3)
    forest, draws = jax.tree.map(lambda leaf: leaf[None], (dictionary, _some_draws(rng, np.float32)))
    coordinates = rng.normal(size=(40, 5)) + np.asarray(dictionary.centres)[rng.integers(0, 15, 40)]
    basis = np.linalg.qr(rng.normal(size=(12, 5)))[0]
    x = coordinates @ basis.T + 0.3 * rng.normal(size=(40, 12))
    unit = rng.random(x.shape)
    monkeypatch.setattr(class_span, "_KEPT_TIMES", 3)

    def gap(share):
        seen = ObservedRows(jnp.float32(x), jnp.float32(unit < share), None)
        shown = class_span.show(jnp.zeros(12), jnp.float32(basis), seen)
        two, every = (
            class_span.log_density_reduced(forest, draws, jnp.float32(0.09), shown, num_candidates=number)
            for number in (2, 15)
        )
        return float(jnp.abs(two - every).mean())

    assert gap(0.1) < 0.3
    assert gap(0.9) < 0.1
    monkeypatch.setattr(class_span, "log_share_of", lambda kept, scores: jnp.zeros(kept.shape[0], kept.dtype))
    jax.clear_caches()
    assert gap(0.1) > 0.6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_feature_that_says_much_though_it_hardly_loads_on_the_span(dtype):
    """Its share of the span is 1e-6, but nodes are 10^4 noise deviations apart."""
    with jax_settings(dtype):
        rng = np.random.default_rng(0)
        dictionary = small.make_dictionary(dtype, depth=3)
        centres = 3000.0 * np.asarray(dictionary.centres)
        dictionary = eqx.tree_at(lambda it: it.centres, dictionary, jnp.asarray(centres))
        draws = _some_draws(rng, dtype)
        features = rng.normal(size=(12, 5))
        features[0] *= 1e-3
        basis = np.linalg.qr(features)[0]
        x, seen, noise = np.zeros((6, 12)), np.zeros((6, 12)), 0.09
        x[:, 0], seen[:, 0] = np.linspace(-9.0, 9.0, 6), 1.0
        shown = class_span.show(
            jnp.zeros(12, dtype),
            jnp.asarray(basis, dtype),
            ObservedRows(*(jnp.asarray(it, dtype) for it in (x, seen)), None),
        )
        forest, draws = jax.tree.map(lambda leaf: leaf[None], (dictionary, draws))
        found = class_span.log_density_reduced(forest, draws, jnp.asarray(noise, dtype), shown, num_candidates=15)
    load = basis[0]
    assert np.sum(load**2) < 1e-5
    sigma2 = np.exp(np.asarray(draws.log_sigma2[0], np.float64))[:, dictionary.tree.scale]
    along = np.einsum("r,krd->kd", load, np.asarray(dictionary.bases, np.float64))
    signal = sigma2 * np.einsum("kd,tkd->tk", along**2, np.expm1(np.asarray(draws.neg_log_u[0], np.float64)))
    variance = noise * (1.0 - load @ load) + sigma2 * (load @ load) + signal
    log_density = stats.norm.logpdf(x[:, 0, None, None], centres @ load, np.sqrt(variance))
    expected = special.logsumexp(np.asarray(draws.log_weights[0], np.float64) + log_density, axis=2)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-3 if dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("reduced", ["float32"], indirect=True)
def test_little_noise_outside_the_common_coordinates(reduced, test):
    """Signals of 1e6 times the noise and more are told from it, in float32 too."""
    hidden = np.where(np.random.default_rng(0).random(test[0].shape) < 0.4, np.nan, test[0])
    for share in (1e-8, 1e-10):
        outside = reduced.reduction._replace(noise=np.asarray(share * reduced.reduction.noise))
        quiet = dataclasses.replace(reduced, reduction=outside)
        found, precise = (geode_jax.class_log_densities(one, hidden) for one in (quiet, in_float64(quiet)))
        np.testing.assert_allclose(found, precise, rtol=1e-5, atol=1e-2)
    inside = eqx.tree_at(lambda it: it.members[0].draws.log_sigma2, reduced, replace_fn=lambda leaf: leaf - 20.0)
    wide = eqx.tree_at(lambda it: it.members[0].draws.neg_log_u, inside, replace_fn=lambda leaf: leaf + 20.0)
    found, precise = (geode_jax.class_log_densities(one, hidden) for one in (wide, in_float64(wide)))
    np.testing.assert_allclose(found, precise, rtol=1e-5, atol=1e-2)


def test_probabilities(reduced, test):
    rows, labels = test
    log_probability = geode_jax.class_log_probabilities(reduced, rows)
    np.testing.assert_allclose(np.exp(log_probability).sum(axis=1), 1.0, rtol=1e-6)
    assert (log_probability.argmax(axis=1) == labels).mean() > 0.9
    assert 0.0 < reduced.power <= 1.0
    np.testing.assert_allclose(np.exp(reduced.log_prior), np.array(COUNTS) / sum(COUNTS))
    mixed = rows.copy()
    mixed[::2, 3] = np.nan
    beside = geode_jax.class_log_probabilities(reduced, mixed, num_draws=4)
    alone = geode_jax.class_log_probabilities(reduced, mixed[1::2], num_draws=4)
    np.testing.assert_allclose(beside[1::2], alone, atol=1e-4)


def test_votes(reduced, test):
    by_draw = geode_jax.class_log_densities(reduced, test[0])
    votes = np.exp(geode_jax.class_log_probabilities(reduced, test[0], vote=True))
    winner = (by_draw + reduced.log_prior[:, None]).argmax(axis=1)
    for row, shares in enumerate(votes):
        np.testing.assert_allclose(shares, np.bincount(winner[row], minlength=3) / winner.shape[1])


def test_calibration_tempers_densities_that_are_too_sure(train):
    """Classes that are one distribution with labels at random: no power above 0 helps."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(160, 10))
    labels = rng.integers(0, 2, 160)
    options = {"dictionary": SETTINGS, "sampler": SAMPLER}
    plain = geode_jax.fit_classes(jax.random.key(0), rows, labels.astype(np.uint8), calibrate=False, **options)
    tempered = geode_jax.fit_classes(jax.random.key(0), rows, labels, **options)
    assert plain.power == 1.0
    assert tempered.power < 0.3
    new = rng.normal(size=(300, 10))
    # around the odds of the classes as such
    spread = [np.diff(geode_jax.class_log_probabilities(found, new)).std() for found in (plain, tempered)]
    assert spread[1] < 0.2 * spread[0]


def test_calibration_holds_for_given_class_probabilities():
    """Rows of a class that will be rarer count less; counted alike, they would ask for the largest power."""
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 2
    rows = rng.normal(size=(160, 12)) + 0.3 * labels[:, None]
    rows += 0.5 * rows @ rng.normal(size=(12, 12)) / np.sqrt(12)
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=3, depth=2)
    found = [
        geode_jax.fit_classes(
            jax.random.key(0), rows, labels, class_probabilities=given, dictionary=settings, sampler=SAMPLER
        ).power
        for given in (None, [0.02, 0.98])
    ]
    assert 0.3 < found[0] < 0.7
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_few_observed_features_are_not_trusted_less_each(reduced, test, monkeypatch):
    """One row that is wrong the more, the more of it is seen, while all others are sure of their class."""
    own = test[1]

    def densities(posterior, hidden):
        share = (~np.isnan(hidden)).mean(axis=1, keepdims=True)
        found = np.where(np.arange(3) == own[:, None], 0.0, -1000.0 * share)
        found[0] = -10.0 * share[0] * (own[0] == np.arange(3))
        return found[:, :, None]

    monkeypatch.setattr(calibration, "class_log_densities", densities)
    exponent = calibration._best_exponent(reduced, 1.0, test[0], own, np.zeros(60), np.ones(60))
    assert exponent == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_few_observed_features_are_trusted_more_each():
    """Errors that repeat in five features each are one error where one of the five is observed."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    errors = rng.normal(size=(400, 8)) + 0.5 * labels[:, None]
    rows = np.repeat(errors, 5, axis=1) + 0.1 * rng.normal(size=(400, 40))
    options = {"dictionary": DictionarySettings(num_trees=1, max_rank=1, depth=0, shared_span=None), "sampler": SAMPLER}
    found = geode_jax.fit_classes(jax.random.key(0), rows[:200], labels[:200], **options)
    assert found.power < 0.5
    assert found.power_exponent < -0.3
    np.testing.assert_allclose(found.power_at(np.array([1.0, 1e-9])), [found.power, 1.0])
    hidden = np.where(rng.random((200, 40)) < 0.2, rows[200:], np.nan)
    same = dataclasses.replace(found, power_exponent=0.0)
    own = np.arange(200), labels[200:]
    loss = [-geode_jax.class_log_probabilities(one, hidden)[own].mean() for one in (found, same)]
    assert loss[0] < loss[1] - 0.01


@pytest.mark.slow
def test_given_class_probabilities(train, test):
    settings = dataclasses.replace(SETTINGS, num_trees=1)
    probabilities = [0.2, 0.3, 0.5]
    options = {"dictionary": settings, "sampler": SAMPLER, "calibrate": False}
    found = geode_jax.fit_classes(jax.random.key(0), *train, class_probabilities=probabilities, **options)
    np.testing.assert_allclose(np.exp(found.log_prior), probabilities)
    with pytest.raises(ValueError, match="class_probabilities: expected 3 positive numbers that add up to 1"):
        geode_jax.fit_classes(jax.random.key(0), *train, class_probabilities=[0.5, 0.5, 0.5], **options)


@pytest.mark.slow
def test_missing_values_in_training(train, test):
    rows, labels = train
    hidden = np.where(np.random.default_rng(0).random(rows.shape) < 0.2, np.nan, rows)
    found = geode_jax.fit_classes(
        jax.random.key(0), hidden, labels, dictionary=dataclasses.replace(SETTINGS, num_trees=1), sampler=SAMPLER
    )
    assert found.reduction is None
    log_probability = geode_jax.class_log_probabilities(found, test[0])
    assert (log_probability.argmax(axis=1) == test[1]).mean() > 0.9


def test_file(reduced, test, tmp_path):
    path = tmp_path / "classes.npz"
    reduced.save(path)
    loaded = geode_jax.ClassPosterior.load(path)
    for first, second in zip(jax.tree.leaves(reduced), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(
        geode_jax.class_log_probabilities(loaded, test[0]), geode_jax.class_log_probabilities(reduced, test[0])
    )
    with pytest.raises(ValueError, match=r"path: expected a file written by Posterior\.save"):
        geode_jax.Posterior.load(path)
    broken = eqx.tree_at(lambda it: it.log_prior, reduced, reduced.log_prior[:2])
    broken.save(path)
    with pytest.raises(ValueError, match="'log_prior' has 2 entries along axis G, expected 3"):
        geode_jax.ClassPosterior.load(path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(159, int), r"labels: expected 160 integers, got int64 of shape \(159,\)"),
        (np.zeros(160), "labels: expected 160 integers, got float64"),
        (np.full(160, -1), "labels: expected integers from 0, got -1"),
        (np.arange(160) // 159, "labels: expected at least 2 rows of every class, got 1 of class 1"),
        (
            10**12 * (np.arange(160) % 2),
            "labels: expected at least 2 rows of every class, got 160 rows of 1000000000001",
        ),
        (np.ma.masked_equal(np.arange(160) % 2, 1), "labels: expected a label for every row, got masked ones"),
        (2 * (np.arange(160) // 80), "labels: expected at least 2 rows of every class, got 0 of class 1"),
    ],
)
def test_bad_labels(train, labels, message):
    with pytest.raises(ValueError, match=message):
        geode_jax.fit_classes(jax.random.key(0), train[0], labels)


def test_a_block_of_rows_holds_no_products_of_all_columns():
    """Reducing a few rows with missing features: copies of the span for each, not all its columns' products."""
    seen = ObservedRows(jnp.zeros((3, 400)), jnp.ones((3, 400)), None)
    (called,) = jax.make_jaxpr(show)(jnp.zeros(400), jnp.zeros((400, 30)), seen).eqns
    made = [variable.aval.size for equation in called.params["jaxpr"].eqns for variable in equation.outvars]
    assert max(made) == 3 * 30 * 400


def test_classes_are_told_some_rows_at_a_time(reduced, train, monkeypatch):
    """Densities under every draw of all rows may not fit in memory."""
    rows = train[0][:7].copy()
    rows[[1, 4], 2] = np.nan
    whole = geode_jax.class_log_probabilities(reduced, rows)
    used = mock.Mock(wraps=predict_classes.class_log_densities)
    monkeypatch.setattr(predict_classes, "class_log_densities", used)
    monkeypatch.setattr(predict_classes, "NUMBERS_AT_ONCE", 1)
    np.testing.assert_allclose(geode_jax.class_log_probabilities(reduced, rows), whole, rtol=1e-12)
    assert used.call_count == 7


def test_memory_of_rows_with_missing_values(train, monkeypatch):
    """All rows, two copies of those of the largest class, and the row that is filled for six dictionaries."""
    needed = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(classes, "warn_if_too_large", needed)
    holes = train[0].copy()
    holes[0, 0] = np.nan
    for rows, num_partial in ((train[0], 0), (holes, 1)):
        with pytest.raises(InterruptedError):
            geode_jax.fit_classes(jax.random.key(0), rows, train[1], dictionary=SETTINGS, sampler=SAMPLER)
        width = 10 if num_partial else 4  # a span for complete rows only
        filled = (2 * np.bincount(train[1]).max() + 6) * num_partial
        assert needed.call_args.args[0]["rows"] == 4 * width * (len(rows) + filled)


def test_memory_that_will_not_suffice(train, monkeypatch):
    """Told before the first class is fitted."""
    monkeypatch.setattr(memory, "_physical_memory", lambda: 2**10)
    monkeypatch.setattr(classes, "_fit_members", mock.Mock(side_effect=InterruptedError))
    with pytest.warns(RuntimeWarning, match="GiB .*fewer trees"), pytest.raises(InterruptedError):
        geode_jax.fit_classes(jax.random.key(0), *train, dictionary=SETTINGS, sampler=SAMPLER)


def test_bad_rows(reduced):
    with pytest.raises(ValueError, match="X: expected 10 features as in fit, got 4"):
        geode_jax.class_log_densities(reduced, np.zeros((2, 4)))
    with pytest.raises(TypeError, match="posterior: expected ClassPosterior"):
        geode_jax.class_log_densities("model", np.zeros((2, 4)))
    with pytest.raises(TypeError, match="vote: expected bool, got 'no'"):
        geode_jax.class_log_probabilities(reduced, np.zeros((2, 10)), vote="no")


@pytest.mark.slow
def test_progress_goes_forward(train, monkeypatch):
    shares = []
    monkeypatch.setattr(classes, "progress_bar", lambda _: nullcontext(lambda share, text: shares.append(share)))
    monkeypatch.setattr(classes, "BATCH_BYTES", 1)
    settings = dataclasses.replace(SETTINGS, num_trees=1)
    geode_jax.fit_classes(jax.random.key(0), *train, dictionary=settings, sampler=SAMPLER)
    assert len(shares) > 20
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
