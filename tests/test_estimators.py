"""GeodeDensity as scikit-learn's users know it."""

import copy
import pickle

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import DICTIONARY, QUICK, SAMPLER
from jax.sharding import Mesh
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, ShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import geode_jax


@pytest.fixture(scope="module")
def model(data):
    return geode_jax.GeodeDensity(**QUICK).fit(data)


def test_it_is_the_functional_core(model, data):
    np.testing.assert_array_equal(model.score_samples(data), geode_jax.log_density(model.posterior_, data))
    assert model.score(data) == pytest.approx(model.score_samples(data).mean())
    assert model.intrinsic_dimension_ == model.posterior_.intrinsic_dimension
    assert model.n_features_in_ == 6


def test_impute(model, data):
    hidden = data[:5].copy()
    hidden[:, 1:3] = np.nan
    filled = model.impute(hidden)
    again, lower, upper = found = model.impute(hidden, interval=0.95)
    assert found.upper is upper
    np.testing.assert_allclose(filled, again, rtol=1e-5)
    assert (lower <= again).all()
    assert (again <= upper).all()
    np.testing.assert_array_equal(model.score_samples(hidden), geode_jax.log_density(model.posterior_, hidden))


def test_a_wrong_parameter_is_not_saved(model, tmp_path):
    """The file could not be loaded."""
    changed = copy.copy(model).set_params(num_trees=0)
    with pytest.raises(ValueError, match="num_trees: expected an integer of at least 1, got 0"):
        changed.save(tmp_path / "model.npz")
    assert not list(tmp_path.iterdir())


def test_columns_of_pandas_sparse_type(model, data):
    sparse = pd.DataFrame(data).astype(pd.SparseDtype(float, 0.0))
    np.testing.assert_array_equal(model.score_samples(sparse), model.score_samples(data))


def test_multiple_imputation(model, data):
    hidden = data[:4].copy()
    hidden[:, 2] = np.nan
    draws = model.impute_draws(hidden, n_imputations=3)
    assert draws.shape == (3, 4, 6)
    np.testing.assert_array_equal(
        draws[:, :, [0, 1, 3, 4, 5]], np.broadcast_to(data[:4], (3, 4, 6))[:, :, [0, 1, 3, 4, 5]]
    )
    assert np.ptp(draws[:, :, 2], axis=0).min() > 0
    with pytest.raises(ValueError, match="n_imputations: expected an integer of at least 1, got 0"):
        model.impute_draws(hidden, n_imputations=0)


def test_random_state(model, data):
    again = geode_jax.GeodeDensity(**QUICK).fit(data)
    np.testing.assert_array_equal(again.sample(3), model.sample(3))
    generator = geode_jax.GeodeDensity(**{**QUICK, "random_state": np.random.RandomState(0)}).fit(data)
    assert not np.array_equal(generator.sample(3), generator.sample(3))


def test_clone_pickle_and_pipeline(model, data):
    assert clone(model).get_params() == model.get_params()
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.score_samples(data), model.score_samples(data))
    pipeline = make_pipeline(StandardScaler(), geode_jax.GeodeDensity(**QUICK)).fit(data)
    assert np.isfinite(pipeline.score_samples(data)).all()


def test_a_clone_shares_the_devices():
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    model = geode_jax.GeodeDensity(**QUICK, mesh=mesh)
    assert clone(model).mesh is mesh
    assert clone(model).get_params() == model.get_params()


@pytest.mark.slow
def test_fits_on_a_mesh(model, data):
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    found = geode_jax.GeodeDensity(**QUICK, mesh=mesh).fit(data)
    np.testing.assert_allclose(found.score_samples(data), model.score_samples(data), rtol=1e-4)


@pytest.mark.slow
def test_grid_search(data):
    splits = ShuffleSplit(2, test_size=0.2, random_state=0)
    search = GridSearchCV(geode_jax.GeodeDensity(**QUICK), {"max_rank": [3]}, cv=splits).fit(data)
    assert np.isfinite(search.best_score_)


def test_integers_beyond_float64_are_named(model):
    rows = np.array([[10**400, *range(5)]] * 3, dtype=object)
    for call in (geode_jax.GeodeDensity(**QUICK).fit, model.score_samples):
        with pytest.raises(TypeError, match="X: expected numbers, got one that is no float"):
            call(rows)
    with pytest.raises(TypeError, match="y: expected numbers, got one that is no float"):
        geode_jax.GeodeRegressor(**QUICK).fit(np.eye(3), rows[:, 0])


def test_feature_names(data):
    frame = pd.DataFrame(data, columns=list("abcdef"))
    fitted = geode_jax.GeodeDensity(**QUICK).fit(frame)
    assert list(fitted.feature_names_in_) == list("abcdef")
    with pytest.raises(ValueError, match="feature names"):
        fitted.score_samples(frame[list("fedcba")])


_PREDICTIONS = {
    geode_jax.GeodeDensity: ("score_samples", "score", "novelty", "impute", "impute_draws", "sample"),
    geode_jax.GeodeImputer: ("transform", "impute", "impute_draws"),
    geode_jax.GeodeRegressor: ("predict", "predict_interval", "sample_y", "score"),
    geode_jax.GeodeClassifier: ("predict", "predict_proba", "predict_log_proba", "score"),
}


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, method) for kind, methods in _PREDICTIONS.items() for method in methods]
)
def test_unfitted(kind, method, data):
    labels = [np.zeros(len(data))] if method == "score" and kind is not geode_jax.GeodeDensity else []
    given = [3] if method == "sample" else [data, *labels]
    with pytest.raises(NotFittedError):
        getattr(kind(), method)(*given)


def test_errors(model, data):
    with pytest.raises(ValueError, match="infinity"):
        geode_jax.GeodeDensity(**QUICK).fit(np.where(data > 60, np.inf, data))
    with pytest.raises(ValueError, match="5 features, but GeodeDensity is expecting 6"):
        model.score_samples(data[:, :5])
    with pytest.raises(ValueError, match=r"^calibration: calibration has 5 features, but GeodeDensity is expecting 6"):
        model.novelty(data, calibration=data[:, :5])
    with pytest.raises(ValueError, match=r"^calibration: Input calibration contains infinity"):
        model.impute(data, interval=0.9, calibration=np.where(data > 60, np.inf, data))
    with pytest.raises(ValueError, match="max_rank: expected an integer of at least 1, got 0"):
        geode_jax.GeodeDensity(max_rank=0).fit(data)
    with pytest.raises(ValueError, match="n_samples: expected an integer of at least 1, got 0"):
        model.sample(0)


def test_progress_goes_to_standard_error(data, capsys):
    geode_jax.GeodeDensity(**QUICK, progress=True).fit(data)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sweep 20 of 20" in captured.err
    assert "100%" in captured.err
    geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert capsys.readouterr().err == ""
