"""GeodeRegressor, GeodeClassifier and GeodeImputer as scikit-learn's users know them, and files of all estimators."""

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import joblib
import numpy as np
import pandas as pd
import pytest
from conftest import QUICK
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import geode_jax
from geode_jax.estimators.base import GeodeEstimator

OPTIONS = {"num_trees": 1, "num_warmup": 30, "num_samples": 20, "depth": 1, "max_rank": 3, "random_state": 0}


@pytest.fixture(scope="module")
def linear():
    """Features around three factors; two responses with noise 0.5 (in units of 1000) and 0.1."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(360, 3))
    X = factors @ rng.normal(size=(3, 6)) + 0.05 * rng.normal(size=(360, 6))
    Y = factors[:, :2] * [2.0, -1.0] + rng.normal(size=(360, 2)) * [0.5, 0.1]
    return X, Y * [1000.0, 1.0] + [1e6, 0.0]


@pytest.fixture(scope="module")
def regressor(linear):
    X, Y = linear
    return geode_jax.GeodeRegressor(**OPTIONS).fit(X[:320], Y[:320])


@pytest.mark.slow
def test_regression_has_the_noise_of_the_truth(regressor, linear):
    X, Y = linear[0][320:], linear[1][320:]
    mean, deviation = regressor.predict(X, return_std=True)
    np.testing.assert_allclose(regressor.predict(X), mean, rtol=1e-6)
    assert mean.shape == deviation.shape == (40, 2)
    np.testing.assert_allclose(np.median(deviation, axis=0), [500.0, 0.1], rtol=0.35)
    assert (np.abs((Y - mean) / deviation) < 4).all()
    assert regressor.score(X, Y) > 0.9
    lower, upper = regressor.predict_interval(X, 0.9)
    assert 0.75 < ((lower < Y) & (upper > Y)).mean() < 0.99
    np.testing.assert_allclose((upper - lower).mean(axis=0), 2 * 1.645 * deviation.mean(axis=0), rtol=0.1)


def test_draws_of_responses(regressor, linear):
    X = linear[0][320:324]
    draws = regressor.sample_y(X, 1500, random_state=3)
    assert draws.shape == (1500, 4, 2)
    mean, deviation = regressor.predict(X, return_std=True)
    assert (np.abs(draws.mean(axis=0) - mean) < 5 * deviation / np.sqrt(1500)).all()
    np.testing.assert_allclose(draws.std(axis=0), deviation, rtol=0.15)
    np.testing.assert_array_equal(draws, regressor.sample_y(X, 1500, random_state=3))


@pytest.mark.slow
def test_missing_features_and_responses(linear):
    X, Y = linear
    rng = np.random.default_rng(1)
    hidden = np.where(rng.random(X.shape) < 0.2, np.nan, X)
    hidden[:, 0] = X[:, 0]
    partly = np.where(rng.random(Y.shape) < 0.2, np.nan, Y)
    model = geode_jax.GeodeRegressor(**OPTIONS).fit(hidden[:320], partly[:320])
    assert model.score(hidden[320:], Y[320:]) > 0.8
    only_one = np.full((1, 6), np.nan)
    only_one[0, 0] = X[0, 0]
    assert (model.predict(only_one, return_std=True)[1] > model.predict(X[:1], return_std=True)[1]).all()


@pytest.mark.slow
def test_one_response_keeps_its_shape(linear):
    X, y = linear[0], linear[1][:, 1]
    model = geode_jax.GeodeRegressor(**OPTIONS).fit(X, y)
    assert model.predict(X).shape == (360,)
    assert [part.shape for part in model.predict_interval(X)] == [(360,), (360,)]
    assert model.sample_y(X[:2], 3).shape == (3, 2)
    hidden = np.arange(360) % 7 == 0
    masked = np.ma.masked_array(np.where(hidden, -999.0, y), hidden)
    missing = pd.Series(y).astype(object).where(~hidden, pd.NA)
    found = [clone(model).fit(X, given).predict(X) for given in (np.where(hidden, np.nan, y), masked, missing)]
    np.testing.assert_array_equal(found[1:], [found[0]] * 2)
    assert cross_val_score(make_pipeline(StandardScaler(), clone(model)), X, y, cv=2).min() > 0.9
    constant = geode_jax.GeodeRegressor(**OPTIONS).fit(X, np.full(360, 7.0))
    np.testing.assert_allclose(constant.predict(X), 7.0, atol=0.2)


@pytest.mark.parametrize("unit", [1e200, pytest.param(1e-200, marks=pytest.mark.slow)])
def test_responses_of_any_size(linear, unit):
    X, y = linear[0][:320], linear[1][:320, 0]
    model = geode_jax.GeodeRegressor(**OPTIONS).fit(X, y)
    other = geode_jax.GeodeRegressor(**OPTIONS).fit(X, unit * y)
    np.testing.assert_allclose(other.y_scale_ / unit, model.y_scale_)
    np.testing.assert_allclose(other.predict(X) / unit, model.predict(X), rtol=1e-2, atol=1e-2 * y.std())
    assert geode_jax.GeodeRegressor(**OPTIONS).fit(1e200 * X, y).score(1e200 * X, y) > 0.9


@pytest.mark.parametrize(
    ("of_x", "of_y"),
    [(1e-160, lambda y: 1e160 * y), (1e165, lambda y: 1e-165 * y), (1.0, lambda y: 1.7e308 - 1e294 * y**2)],
)
def test_responses_whose_unit_is_no_number(linear, of_x, of_y):
    X, y = linear[0], linear[1][:, 0]
    with pytest.raises(
        ValueError, match=r"y: expected numbers that are not too large for float64, and a spread .* of column 0"
    ):
        geode_jax.GeodeRegressor(**OPTIONS).fit(of_x * X, of_y(y))


@pytest.mark.parametrize(
    "wrong", [lambda y: 1j * y, lambda y: np.stack([y, y])[None], lambda y: np.where(y > 0, np.inf, y)]
)
def test_errors_of_responses_name_them(linear, wrong):
    X, y = linear[0], linear[1][:, 0]
    with pytest.raises(ValueError, match=r"^y: |^Input y "):
        geode_jax.GeodeRegressor(**OPTIONS).fit(X, wrong(y))


@pytest.fixture(scope="module")
def labelled():
    rng = np.random.default_rng(0)
    labels = np.repeat(["tea", "milk", "water"], [45, 40, 35])
    centres = {"tea": 0.0, "milk": 2.0, "water": 4.0}
    X = np.array([centres[label] for label in labels])[:, None] + rng.normal(size=(120, 4)) * [0.3, 0.5, 1.0, 3.0]
    return X, labels


@pytest.fixture(scope="module")
def classifier(labelled):
    return geode_jax.GeodeClassifier(**OPTIONS).fit(*labelled)


def test_classification(classifier, labelled):
    X, labels = labelled
    with pytest.raises(TypeError, match="'city'"):
        classifier.predict(pd.DataFrame(X[:3]).assign(city="Rome"))
    assert classifier.classes_.tolist() == ["milk", "tea", "water"]
    assert classifier.score(X, labels) > 0.97
    probability = classifier.predict_proba(X)
    np.testing.assert_allclose(probability, np.exp(classifier.predict_log_proba(X)))
    np.testing.assert_allclose(probability.sum(axis=1), 1.0, rtol=1e-6)
    hidden = np.where([True, True, False, False], X, np.nan)
    assert classifier.score(hidden, labels) > 0.95
    voter = copy.copy(classifier).set_params(vote=True)  # a matter of predictions
    assert set(np.unique(np.round(20 * voter.predict_proba(X), 6))) <= set(range(21))
    even = dataclasses.replace(classifier.posterior_, log_prior=np.full(3, -np.log(3.0)))
    shows_nothing = geode_jax.class_log_probabilities(even, np.full((1, 4), np.nan), vote=True)
    np.testing.assert_allclose(np.exp(shows_nothing), 1.0 / 3.0)  # equally probable in every draw


@pytest.mark.parametrize(
    "labels", [np.array([3, 2**63 + 5, 7], np.uint64), np.array([1, 2, 3], np.uint8), np.array(["a", "b", 3], object)]
)
def test_labels_are_saved_with_their_type(classifier, tmp_path, labels):
    model = copy.copy(classifier)
    model.classes_ = labels
    model.save(tmp_path / "x.npz")
    found = geode_jax.GeodeClassifier.load(tmp_path / "x.npz").classes_
    assert found.dtype == labels.dtype
    assert found.tolist() == labels.tolist()


def test_many_held_out_scores_are_saved(tmp_path):
    """As an array: of more than some 26 million, their text would be longer than NumPy allows."""
    model = geode_jax.GeodeDensity.load(Path(__file__).parent / "files" / "density_2.npz")
    model.held_out_scores_ = np.sort(np.random.default_rng(0).normal(size=300_000))
    model.save(tmp_path / "x.npz")
    assert (tmp_path / "x.npz").stat().st_size < 1.1 * 8 * 300_000
    np.testing.assert_array_equal(
        geode_jax.GeodeDensity.load(tmp_path / "x.npz").held_out_scores_, model.held_out_scores_
    )


@pytest.mark.slow
def test_grid_search_and_feature_names(labelled):
    X, labels = labelled
    frame = pd.DataFrame(X, columns=list("abcd"))
    search = GridSearchCV(geode_jax.GeodeClassifier(**OPTIONS), {"priors": [None, [0.2, 0.3, 0.5]]}, cv=2)
    search.fit(frame, labels)
    assert search.best_score_ > 0.95
    with pytest.raises(ValueError, match="feature names"):
        search.best_estimator_.predict(frame[list("dcba")])
    assert "GeodeClassifier" in search.best_estimator_._repr_html_()


@pytest.fixture(scope="module")
def hidden(linear):
    return np.where(np.random.default_rng(2).random(linear[0].shape) < 0.15, np.nan, linear[0])


@pytest.mark.slow
def test_imputer(linear, hidden):
    X = linear[0]
    frame = pd.DataFrame(hidden, columns=list("abcdef")).dropna(how="all")
    imputer = geode_jax.GeodeImputer(**OPTIONS).set_output(transform="pandas").fit(frame)
    filled = imputer.transform(frame)
    assert list(filled.columns) == list(imputer.get_feature_names_out()) == list("abcdef")
    assert not filled.isna().any(axis=None)
    seen = frame.notna().to_numpy()
    np.testing.assert_array_equal(filled.to_numpy()[seen], frame.to_numpy()[seen])
    by_mean = SimpleImputer().fit_transform(frame)
    truth = X[frame.index]
    error = [np.abs(values - truth)[~seen].mean() for values in (filled.to_numpy(), by_mean)]
    assert error[0] < 0.2 * error[1]
    mean, lower, upper = imputer.impute(frame, interval=0.9)
    np.testing.assert_allclose(mean, filled, rtol=1e-5)
    assert ((lower <= truth) & (truth <= upper)).to_numpy()[~seen].mean() > 0.85
    assert (upper - lower).to_numpy()[~seen].mean() < 0.5 * np.ptp(truth, axis=0).mean()
    assert imputer.impute_draws(frame, 2).shape == (2, *frame.shape)
    pipeline = make_pipeline(geode_jax.GeodeImputer(**OPTIONS), StandardScaler())
    assert np.isfinite(pipeline.fit_transform(frame)).all()


@pytest.mark.slow
def test_features_without_a_value(hidden, tmp_path):
    """They are left out or become 0, as in scikit-learn's SimpleImputer; the indicator tells of every hole in fit."""
    rows = hidden[:60].copy()
    rows[:, :2] = rows[:, :2][::-1]
    rows[:, 4] = np.nan
    rows[:, 5] = np.nan_to_num(rows[:, 5])
    frame = pd.DataFrame(rows, columns=list("abcdef"))
    for keep, indicate in ((False, True), (True, False)):
        options = {"add_indicator": indicate, "keep_empty_features": keep}
        with pytest.warns(UserWarning, match=r"without any observed value .*\['e'\]"):
            imputer = geode_jax.GeodeImputer(**OPTIONS, **options).fit(frame)
        theirs = SimpleImputer(**options).fit(frame)
        with warnings.catch_warnings(action="ignore"):
            known = theirs.transform(frame)
        assert list(imputer.get_feature_names_out()) == list(theirs.get_feature_names_out())
        filled = imputer.transform(frame)
        assert filled.shape == known.shape
        size = frame.shape[1] - (not keep)
        same = frame[[name for name in frame if keep or name != "e"]].notna().to_numpy()
        np.testing.assert_array_equal(filled[:, :size][same], known[:, :size][same])
        np.testing.assert_array_equal(filled[:, size:], known[:, size:])
        lower = imputer.impute(frame).lower
        assert list(lower.columns) == list(imputer.get_feature_names_out())[:size]
        assert (lower.get("e", 0.0) == 0.0).all() if keep else "e" not in lower
        assert imputer.impute_draws(frame, 2).shape == (2, 60, size)
        imputer.save(tmp_path / "imputer.npz")
        loaded = geode_jax.GeodeImputer.load(tmp_path / "imputer.npz")
        np.testing.assert_array_equal(loaded.transform(frame), filled)


@pytest.mark.slow
def test_an_imputer_of_an_earlier_version(hidden, tmp_path, monkeypatch):
    """Its file says nothing of empty features: there were none."""
    imputer = geode_jax.GeodeImputer(**OPTIONS).fit(hidden)
    monkeypatch.setattr(geode_jax.GeodeImputer, "_saved", geode_jax.GeodeImputer._saved[:2])
    imputer.save(tmp_path / "old.npz")
    monkeypatch.undo()
    loaded = geode_jax.GeodeImputer.load(tmp_path / "old.npz")
    np.testing.assert_array_equal(loaded.transform(hidden), imputer.transform(hidden))


@pytest.mark.slow
def test_files_without_pickle(regressor, classifier, linear, labelled, tmp_path):
    path = tmp_path / "model.npz"
    named = geode_jax.GeodeDensity(**{**OPTIONS, "dtype": np.float32, "prior": geode_jax.Prior(noise_shape=0.6)})
    named.fit(pd.DataFrame(linear[0], columns=list("abcdef")))
    X = linear[0][:5]
    with pytest.warns(UserWarning, match="feature names"):
        scores = named.score_samples(X)
    for model, rows, method, expected in (
        (regressor, X, "predict", regressor.predict(X)),
        (classifier, labelled[0], "predict_proba", classifier.predict_proba(labelled[0])),
        (named, pd.DataFrame(X, columns=list("abcdef")), "score_samples", scores),
    ):
        model.save(path)
        loaded = type(model).load(path)
        np.testing.assert_array_equal(getattr(loaded, method)(rows), expected)
        assert {**loaded.get_params(), "dtype": "float32"} == {**model.get_params(), "dtype": "float32"}
        for twin in (pickle.loads(pickle.dumps(model)), _through_joblib(model, tmp_path)):
            np.testing.assert_array_equal(getattr(twin, method)(rows), expected)
    np.testing.assert_array_equal(loaded.novelty(rows), named.novelty(rows))
    assert loaded.feature_names_in_.tolist() == list("abcdef")
    with pytest.raises(ValueError, match=r"written by GeodeRegressor\.save, .* it holds a GeodeDensity"):
        geode_jax.GeodeRegressor.load(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"expected a file written by GeodeDensity\.save"):
        geode_jax.GeodeDensity.load(path)
    named.random_state = np.random.RandomState(0)
    with pytest.raises(TypeError, match="random_state: cannot be saved without pickle"):
        named.save(path)


def _through_joblib(model, folder):
    joblib.dump(model, folder / "model.joblib")
    return joblib.load(folder / "model.joblib")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (geode_jax.GeodeRegressor(), lambda X, y: (X, None), "requires y to be passed, but the target y is None"),
        (geode_jax.GeodeRegressor(), lambda X, y: (X, y[:9]), "inconsistent numbers of samples"),
        (geode_jax.GeodeRegressor(), lambda X, y: (X, np.where(y > 1e6, np.inf, y)), "y contains infinity"),
        (geode_jax.GeodeClassifier(), lambda X, y: (X, y), "Unknown label type: continuous"),
        (
            geode_jax.GeodeClassifier(priors=[1.0]),
            lambda X, y: (X, y > 1e6),
            "^priors: expected 2 pos",
        ),
        (geode_jax.GeodeRegressor(), lambda X, y: (X, np.stack([y, y * np.nan], 1)), "^y: .* column 1 is all NaN"),
        (
            geode_jax.GeodeRegressor(),
            lambda X, y: tuple(np.concatenate([rows, np.full_like(rows[:1], np.nan)]) for rows in (X, y * 1.0)),
            "^X, y: .* but row [0-9]+ has none",
        ),
        (
            geode_jax.GeodeClassifier(),
            lambda X, y: (X, y == y[0]),
            "^y: expected at least 2 rows .* got 1 of class True",
        ),
        (geode_jax.GeodeClassifier(cross_fit=1), lambda X, y: (X, y > 1e6), "^cross_fit: expected an integer of at"),
        (
            geode_jax.GeodeClassifier(span_rank=0),
            lambda X, y: (X, y > 1e6),
            "^span_rank: expected an integer of at least 1",
        ),
    ],
)
def test_bad_input(linear, model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.fit(*arguments(linear[0], linear[1][:, 0]))


@pytest.mark.parametrize(
    "model",
    [
        geode_jax.GeodeClassifier(feature_noise=geode_jax.FeatureNoise()),
        geode_jax.GeodeClassifier(vote="no"),
        geode_jax.GeodeClassifier(progress="no"),
    ],
    ids=["feature_noise", "vote", "progress"],
)
def test_what_is_neither_true_nor_false_is_refused(linear, model, request):
    with pytest.raises(TypeError, match=f"^{request.node.callspec.id}: expected bool"):
        model.fit(linear[0][:90], np.arange(90) % 2)


@pytest.mark.parametrize(
    "kind",
    [geode_jax.GeodeRegressor, geode_jax.GeodeImputer, pytest.param(geode_jax.GeodeClassifier, marks=pytest.mark.slow)],
)
def test_a_fit_that_ends_with_an_error_leaves_the_estimator_as_it_was(kind, linear):
    """An earlier fit's posterior beside this one's units or labels would answer wrongly."""
    X, y = linear[0][:90], np.arange(90) % 2
    model = kind(**QUICK)
    ended = mock.patch.object(GeodeEstimator, "_fit_key", side_effect=KeyboardInterrupt)
    with ended, pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X) if hasattr(model, "predict") else model.transform(X)
    before = vars(model.fit(X, y)).copy()
    with ended, pytest.raises(KeyboardInterrupt):
        model.fit(X[:, :2], 7 - 7 * y)
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())


@pytest.mark.parametrize(
    "labels",
    [
        ["a", "a", "b", None],
        np.array(["a", np.nan, "b", "b"], dtype=object),
        pd.Series(["a", "a", pd.NA, "b"], dtype="string"),
        pd.Series(["a", "a", None, "b"]),
        np.ma.masked_array([0, 0, 1, 9], [0, 0, 0, 1]),
    ],
    ids=["list", "objects", "string", "Series", "masked"],
)
def test_missing_labels(labels):
    with pytest.raises(ValueError, match=r"y: expected a label for every row, got 1 (missing|masked)"):
        geode_jax.GeodeClassifier(**OPTIONS).fit(np.arange(8.0).reshape(4, 2), labels)


def test_scores_that_are_interrupted_lose_no_posterior(linear, monkeypatch):
    """They follow the fit: its posterior is complete, and no earlier one's scores stay beside it."""
    X, model = linear[0][:90], geode_jax.GeodeDensity(**QUICK)
    scores, fitted = mock.Mock(side_effect=[np.zeros(90), KeyboardInterrupt]), [mock.Mock(), mock.Mock()]
    monkeypatch.setattr("geode_jax.estimators.density.held_out_log_density", scores)
    monkeypatch.setattr(GeodeEstimator, "_fit_forest", lambda *_: (mock.Mock(), fitted.pop()))
    model.fit(X)
    (expected,) = fitted
    with pytest.warns(RuntimeWarning, match="the posterior is complete, but novelty needs calibration rows"):
        model.fit(X)
    assert model.posterior_ is expected
    with pytest.raises(ValueError, match="no row was complete, or fit was interrupted before; pass calibration"):
        model.novelty(X)


def test_parameters_are_settings():
    """Of all estimators; other settings are those of the functional core."""
    shrinkage = geode_jax.PublishedShrinkage()
    sizes = {"num_warmup": 7, "num_samples": 5, "num_chains": 3}
    given = {"max_rank": 4, "depth": 1, "num_trees": 2, "cross_fit": 3, "feature_noise": False, "shrinkage": shrinkage}
    dictionary = geode_jax.DictionarySettings(
        max_rank=4, depth=1, num_trees=2, cross_fit=geode_jax.CrossFit(3), feature_noise=None
    )
    for kind in (geode_jax.GeodeDensity, geode_jax.GeodeImputer, geode_jax.GeodeRegressor):
        model = kind(**given, **sizes)
        assert model._dictionary_settings() == dictionary
        assert model._sampler_settings() == geode_jax.SamplerSettings(**sizes, shrinkage=shrinkage)
        assert kind()._dictionary_settings() == geode_jax.DictionarySettings()
        assert kind()._sampler_settings() == geode_jax.SamplerSettings()
        assert kind(cross_fit=None)._dictionary_settings().cross_fit is None


def test_parameters_of_a_classifier(labelled):
    """All that it hands to fit_classes."""
    X, y = labelled
    given = {
        "priors": [0.2, 0.3, 0.5],
        "span_rank": 7,
        "calibrate": False,
        "dtype": "float64",
        "prior": geode_jax.Prior(tau_rate=2.0),
    }
    more = {"num_trees": 2, "cross_fit": 3, "num_warmup": 7, "num_samples": 5, "num_chains": 3, "random_state": 0}
    with mock.patch("geode_jax.estimators.classifier.fit_classes") as fit_classes:
        model = geode_jax.GeodeClassifier(**given, **more, checkpoint="kept").fit(X, y)
        assert model.posterior_ is fit_classes.return_value
        geode_jax.GeodeClassifier(span_rank=None, random_state=0).fit(X, y)
    (_, data, labels), options = fit_classes.call_args_list[0]
    np.testing.assert_array_equal(data, X)
    np.testing.assert_array_equal(labels, np.repeat([1, 0, 2], [45, 40, 35]))
    span, folds = geode_jax.SharedSpan(7), geode_jax.CrossFit(3)
    assert options == {
        "class_probabilities": [0.2, 0.3, 0.5],
        "dictionary": geode_jax.DictionarySettings(num_trees=2, cross_fit=folds, shared_span=span),
        "prior": geode_jax.Prior(tau_rate=2.0),
        "sampler": geode_jax.SamplerSettings(num_warmup=7, num_samples=5, num_chains=3),
        "calibrate": False,
        "dtype": "float64",
        "progress": False,
        "checkpoint": "kept",
        "mesh": None,
    }
    options = fit_classes.call_args.kwargs
    assert options["dictionary"].shared_span is None
    assert (options["class_probabilities"], options["calibrate"], options["dtype"]) == (None, True, "float32")


def test_parameters_of_numpy():
    model = geode_jax.GeodeDensity(**OPTIONS, feature_noise=np.False_)
    assert model._dictionary_settings().feature_noise is None


@pytest.mark.slow
def test_what_set_output_chose_is_saved(linear, hidden, tmp_path):
    X = linear[0][:60]
    model = geode_jax.GeodeImputer(**OPTIONS).set_output(transform="pandas").fit(X)
    model.save(tmp_path / "x.npz")
    assert isinstance(geode_jax.GeodeImputer.load(tmp_path / "x.npz").transform(hidden[:5]), pd.DataFrame)
    model._sklearn_output_config = {"transform": "excel"}
    with pytest.raises(TypeError, match="set_output: expected one of default, pandas, polars to save"):
        model.save(tmp_path / "x.npz")


@pytest.mark.parametrize("kind", [list, np.asarray, pd.Series, jnp.asarray])
def test_priors_of_any_kind_are_saved(kind, classifier, tmp_path):
    model = copy.copy(classifier).set_params(priors=kind([0.2, 0.3, 0.5]))
    model.save(tmp_path / "x.npz")
    np.testing.assert_allclose(geode_jax.GeodeClassifier.load(tmp_path / "x.npz").priors, [0.2, 0.3, 0.5])


def test_a_row_that_shows_nothing(regressor, classifier, linear):
    """The response's own mean and spread, and the classes' prior probabilities."""
    mean, deviation = regressor.predict(np.full((1, 6), np.nan), return_std=True)
    own = linear[1].std(axis=0)
    assert (np.abs(mean[0] - linear[1].mean(axis=0)) < 0.5 * own).all()
    assert ((deviation > 0.5 * own) & (deviation < 3.0 * own)).all()
    found = classifier.predict_log_proba(np.full((1, 4), np.nan))
    np.testing.assert_allclose(found[0], classifier.posterior_.log_prior, atol=1e-5)


def test_bad_requests(regressor, classifier, linear):
    X = linear[0]
    with pytest.raises(ValueError, match=r"probability: expected a number in \(0, 1\), got 95"):
        regressor.predict_interval(X, 95)
    with pytest.raises(ValueError, match="n_samples: expected an integer of at least 1, got 0"):
        regressor.sample_y(X, 0)
    with pytest.raises(ValueError, match="6 features, but GeodeClassifier is expecting 4"):
        classifier.predict(X)
