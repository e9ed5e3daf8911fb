"""What users of scikit-learn's imputers, mixtures and neighbours expect, after the tests of those modules.

Each test names the one in scikit-learn that it follows (`impute/tests`, `mixture/tests`, `neighbors/tests`). What makes
no sense here is listed, with the reason, in notebooks/guides/scikit_learn.md.
"""

import io
import pickle

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from conftest import QUICK
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import StandardScaler

from geode_jax import GeodeDensity, GeodeImputer
from geode_jax.predict.conformal import p_values

NAMES = list("abcdef")


@pytest.fixture(scope="module")
def holes(data):
    """A fifth of the entries missing; every row shows something."""
    found = np.where(np.random.default_rng(0).random(data.shape) < 0.2, np.nan, data)
    assert not np.isnan(found).all(axis=1).any()
    return found


@pytest.fixture(scope="module")
def imputer(holes):
    given = holes.copy()
    found = GeodeImputer(**QUICK).fit(given)
    np.testing.assert_array_equal(given, holes)  # test_imputation_copy
    return found


@pytest.fixture(scope="module")
def density(data):
    return GeodeDensity(**QUICK).fit(data)


# impute/tests/test_impute.py and test_common.py


def test_shape_and_observed_values(imputer, holes):  # test_imputation_shape
    filled = imputer.transform(holes)
    assert filled.shape == holes.shape
    assert not np.isnan(filled).any()
    np.testing.assert_array_equal(filled[~np.isnan(holes)], holes[~np.isnan(holes)])


@pytest.mark.slow
def test_fit_transform_is_fit_and_transform(imputer, holes):
    np.testing.assert_array_equal(GeodeImputer(**QUICK).fit_transform(holes), imputer.transform(holes))


def test_transform_has_no_chance_in_it(imputer, holes):  # test_iterative_imputer_transform_stochasticity
    np.testing.assert_array_equal(imputer.transform(holes), imputer.transform(holes))


def test_rows_are_filled_one_by_one(imputer, holes):
    """A row's fill does not depend on what else is asked for."""
    alone = np.concatenate([imputer.transform(row[None]) for row in holes[:3]])
    np.testing.assert_allclose(imputer.transform(holes)[:3], alone, rtol=1e-4)


def test_complete_rows_come_back(imputer, data):  # test_iterative_imputer_no_missing
    np.testing.assert_array_equal(imputer.transform(data), data)


def test_missing_at_transform_only(data):  # test_iterative_imputer_missing_at_transform
    fitted = GeodeImputer(**QUICK).fit(data)
    new = data[:5].copy()
    new[:, 3] = np.nan
    assert np.isfinite(fitted.transform(new)).all()
    np.testing.assert_array_equal(fitted.has_missing_, False)


def test_a_row_of_nan_gets_the_means(imputer, data):  # test_iterative_imputer_all_missing, of a row
    empty = imputer.transform(np.full((2, 6), np.nan))
    np.testing.assert_array_equal(empty[0], empty[1])
    np.testing.assert_allclose(empty[0], data.mean(axis=0), atol=0.5 * data.std(axis=0).max())


@pytest.mark.slow
def test_empty_features(data):  # test_imputation_mean_median, test_keep_empty_features
    hidden = data.copy()
    hidden[:, 2] = np.nan
    for keep in (False, True):
        with pytest.warns(UserWarning, match="features without any observed value"):
            found = GeodeImputer(keep_empty_features=keep, **QUICK).fit_transform(hidden)
        assert found.shape == (90, 6 if keep else 5)
        assert not keep or (found[:, 2] == 0.0).all()


def test_indicator(imputer, holes):  # test_imputers_add_indicator
    expected = SimpleImputer(add_indicator=True).fit_transform(holes)[:, 6:]
    marked = pickle.loads(pickle.dumps(imputer)).set_params(add_indicator=True)
    found = marked.transform(holes)
    np.testing.assert_array_equal(found[:, 6:], expected)
    assert marked.get_feature_names_out().tolist()[6:] == [f"missingindicator_x{i}" for i in range(6)]


def test_a_wrong_parameter_set_after_fit(imputer, holes, tmp_path):
    wrong = pickle.loads(pickle.dumps(imputer)).set_params(add_indicator="no")
    for call in (lambda: wrong.transform(holes), wrong.get_feature_names_out, lambda: wrong.save(tmp_path / "it.npz")):
        with pytest.raises(TypeError, match="add_indicator: expected bool, got 'no'"):
            call()


def test_sparse_input_is_refused(imputer, holes):  # test_imputers_add_indicator_sparse
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        imputer.transform(sparse.csr_matrix(np.nan_to_num(holes)))


@pytest.mark.parametrize("library", [pd, pl])
def test_set_output(imputer, holes, library):  # test_imputers_feature_names_out_pandas
    frame = library.DataFrame(holes, schema=NAMES) if library is pl else pd.DataFrame(holes, columns=NAMES)
    named = GeodeImputer(**QUICK).set_output(transform=library.__name__).fit(frame)
    found = named.transform(frame)
    assert isinstance(found, library.DataFrame)
    assert list(found.columns) == NAMES
    assert list(named.get_feature_names_out()) == NAMES
    np.testing.assert_array_equal(found.to_numpy(), imputer.transform(holes))


def test_nullable_integers(imputer, holes):  # test_imputers_pandas_na_integer_array_support
    rounded = pd.DataFrame(np.round(holes)).astype("Int64")
    np.testing.assert_array_equal(
        imputer.transform(rounded.to_numpy(float, na_value=np.nan)), imputer.transform(rounded)
    )


def test_what_is_missing_in_objects_and_under_masks(imputer, holes):
    expected, hidden = imputer.transform(holes), np.isnan(holes)
    masked = np.ma.masked_array(np.where(hidden, -999.0, holes), hidden)
    np.testing.assert_array_equal(imputer.transform(masked), expected)
    frame = pd.DataFrame(holes).astype(object).where(~hidden, pd.NA)
    given = frame.copy()
    np.testing.assert_array_equal(imputer.transform(frame), expected)
    pd.testing.assert_frame_equal(frame, given)
    np.testing.assert_array_equal(GeodeImputer(**QUICK).fit(masked).transform(holes), expected)


def test_integers_and_objects(imputer, data):  # test_imputation_constant_integer, test_imputation_constant_object
    whole = np.round(data)
    assert imputer.transform(whole.astype(int)).dtype.kind == "f"
    objects = whole.astype(object)
    objects[0, 0] = None
    assert np.isfinite(imputer.transform(objects).astype(float)).all()
    with pytest.raises((TypeError, ValueError), match=r"could not convert|expected numbers"):
        imputer.transform(np.full((2, 6), "x", dtype=object))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_type_of_the_input(imputer, holes, dtype):  # test_imputers_dtype_preservation
    assert imputer.transform(holes.astype(dtype)).dtype == dtype


def test_input_is_not_changed(imputer, holes):  # test_imputation_copy
    given = holes.copy()
    imputer.transform(given)
    np.testing.assert_array_equal(given, holes)


def test_pickle_of_an_imputer(imputer, holes):  # test_imputation_pickle
    loaded = pickle.loads(pickle.dumps(imputer))
    np.testing.assert_array_equal(loaded.transform(holes), imputer.transform(holes))


def test_features_must_be_those_of_fit(imputer, holes):  # test_imputation_error_invalid_shape
    with pytest.raises(ValueError, match="5 features, but GeodeImputer is expecting 6"):
        imputer.transform(holes[:, :5])
    with pytest.raises(ValueError, match="infinity"):
        imputer.transform(np.where(np.isnan(holes), np.inf, holes))


@pytest.mark.slow
def test_low_rank_tables_are_recovered():  # test_iterative_imputer_additive_matrix, ..._rank_one
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(90, 1)) @ rng.normal(size=(1, 6)) + rng.normal(size=6)
    hidden = np.where(rng.random(truth.shape) < 0.2, np.nan, truth)
    shown = ~np.isnan(hidden).all(axis=1)
    found = GeodeImputer(**{**QUICK, "num_warmup": 60}).fit_transform(hidden[shown])
    error = np.abs(found - truth[shown])[np.isnan(hidden[shown])]
    assert np.median(error) < 0.05 * truth.std()


@pytest.mark.slow
def test_pipeline_and_search_of_an_imputer(holes, data):  # test_imputation_pipeline_grid_search
    pipeline = make_pipeline(GeodeImputer(**QUICK), StandardScaler())
    assert np.isfinite(pipeline.fit_transform(holes)).all()
    union = make_union(GeodeImputer(**QUICK), SimpleImputer())
    assert union.fit_transform(holes).shape == (90, 12)


def test_clone_forgets_the_fit(imputer, holes):
    with pytest.raises(NotFittedError):
        clone(imputer).transform(holes)


# mixture/tests/test_gaussian_mixture.py and test_mixture.py


def test_score_is_the_mean_of_score_samples(density, data):  # test_score, test_score_samples
    assert density.score(data) == pytest.approx(density.score_samples(data).mean())
    for method in ("score", "score_samples"):
        with pytest.raises(NotFittedError):
            getattr(GeodeDensity(), method)(data)


def test_samples(density, data):  # test_gaussian_mixture_sample, test_sample
    with pytest.raises(ValueError, match="n_samples: expected an integer of at least 1"):
        density.sample(0)
    with pytest.raises(NotFittedError):
        GeodeDensity().sample(1)
    drawn = density.sample(5000)
    assert drawn.shape == (5000, 6)
    np.testing.assert_allclose(drawn.mean(axis=0), data.mean(axis=0), atol=0.15 * data.std(axis=0).max())
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.corrcoef(data.T), atol=0.2)


def test_density_of_samples_is_that_of_rows(density, data):  # test_score: the fit is to these data and no others
    broken = np.stack([np.random.default_rng(i).permutation(column) for i, column in enumerate(data.T)], axis=1)
    assert density.score(density.sample(500)) == pytest.approx(density.score(data), abs=3.0)
    assert density.score(broken) < density.score(data) - 3.0


def test_same_seed_same_fit(density, data):  # test_init, test_gaussian_mixture_fit_predict_n_init
    again = GeodeDensity(**QUICK).fit(data)
    np.testing.assert_array_equal(again.score_samples(data), density.score_samples(data))
    other = GeodeDensity(**{**QUICK, "random_state": 1}).fit(data)
    assert not np.array_equal(other.score_samples(data), density.score_samples(data))


@pytest.mark.slow
def test_fit_forgets_the_last_fit(density, data):  # test_warm_start, which is off by default
    model = GeodeDensity(**QUICK).fit(data[::-1] * 3.0)
    np.testing.assert_array_equal(model.fit(data).score_samples(data), density.score_samples(data))


def test_scaled_data(density, data):  # test_property: densities follow a change of units
    scaled = GeodeDensity(**QUICK).fit(1000.0 * data)
    assert scaled.score(1000.0 * data) == pytest.approx(density.score(data) - 6 * np.log(1000.0), abs=0.5)


def test_a_duplicated_feature(data):  # test_regularisation, test_gaussian_mixture_fit_convergence
    """A singular covariance is no error, and densities stay finite."""
    doubled = np.concatenate([data[:, :5], data[:, :1]], axis=1)
    assert np.isfinite(GeodeDensity(**QUICK).fit(doubled).score_samples(doubled)).all()


# neighbors/tests/test_kde.py and test_lof.py


@pytest.mark.slow
def test_density_has_integral_one():  # test_kernel_density
    x = np.random.default_rng(0).normal(size=(90, 1)) + 3.0
    model = GeodeDensity(**QUICK).fit(x)
    grid = np.linspace(-30.0, 36.0, 20_001)
    total = np.trapezoid(np.exp(model.score_samples(grid[:, None])), grid)
    assert total == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_pipeline_and_search_of_a_density(data):  # test_kde_pipeline_gridsearch
    search = GridSearchCV(make_pipeline(StandardScaler(), GeodeDensity(**QUICK)), {"geodedensity__max_rank": [3]}, cv=2)
    assert np.isfinite(search.fit(data).best_score_)
    assert cross_val_score(GeodeDensity(**QUICK), data, cv=2).shape == (2,)


def test_joblib_and_pickle_of_a_density(density, data):  # test_pickling
    file = io.BytesIO()
    joblib.dump(density, file)
    file.seek(0)
    np.testing.assert_array_equal(joblib.load(file).score_samples(data), density.score_samples(data))


def test_sample_weight_is_refused(data):  # test_kde_sample_weights
    with pytest.raises(TypeError, match="sample_weight"):
        GeodeDensity(**QUICK).fit(data, sample_weight=np.ones(90))


def test_a_far_row_is_the_most_novel(density, data):  # test_lof
    rows = np.concatenate([data[:20], data.mean(axis=0)[None] + 50 * data.std(axis=0)])
    assert np.argmin(density.novelty(rows)) == 20
    assert np.argmin(density.score_samples(rows)) == 20


def test_share_of_training_rows_that_are_novel(density, data):  # test_lof_values, contamination
    """P-values of the held-out scores themselves are the ranks; training rows are denser than that, if anything."""
    assert density.held_out_scores_.shape == (90,)
    assert (np.diff(density.held_out_scores_) >= 0).all()
    np.testing.assert_allclose(p_values(density.held_out_scores_, density.held_out_scores_), np.arange(2, 92) / 91)
    assert density.novelty(data).min() > 0.0
    assert (density.novelty(data) < 0.1).mean() < 0.2


def test_no_argument_is_changed(density, data):  # test_kde_copy
    rows = data.copy()
    density.score_samples(rows)
    density.novelty(rows)
    np.testing.assert_array_equal(rows, data)
