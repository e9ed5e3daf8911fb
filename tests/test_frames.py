"""Tables of pandas and polars: columns that are no numbers are named, and tables come out as they went in."""

import datetime

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest
from conftest import QUICK

import geode_jax
from geode_jax._checks import check_columns, check_data
from geode_jax.estimators.frames import like, missing_as_nan

NUMBERS = {"length": [1.0, 2.0, None], "count": [1, 2, 3], "is new": [True, False, True]}
OTHERS = {
    "city": ["Rome", "Oslo", None],
    "day": [datetime.datetime(2026, 1, day) for day in (1, 2, 3)],
    "span": [datetime.timedelta(hours=hour) for hour in (1, 2, 3)],
}


@pytest.mark.parametrize("library", [pd, pl])
def test_columns_that_are_no_numbers_are_named(library):
    frame = library.DataFrame({**NUMBERS, **OTHERS})
    check_columns(frame[list(NUMBERS)])
    with pytest.raises(TypeError, match=r"expected columns of numbers, got 'city' .*'day' .*'span' .*leave them"):
        check_columns(frame)
    for estimator in (geode_jax.GeodeDensity, geode_jax.GeodeImputer):
        with pytest.raises(TypeError, match="'city'"):
            estimator(**QUICK).fit(frame)
    for estimator in (geode_jax.GeodeRegressor, geode_jax.GeodeClassifier):
        with pytest.raises(TypeError, match="'city'"):
            estimator(**QUICK).fit(frame, [0, 1, 1])
    with pytest.raises(TypeError, match="X: expected columns of numbers, got 'city'"):
        geode_jax.fit(jax.random.key(0), frame)


@pytest.mark.parametrize(
    "dates",
    [
        np.array(["2026-01-01", "NaT", "2026-01-03"], dtype="M8[D]"),
        pd.to_datetime(pd.Series(["2026-01-01", None, "2026-01-03"])),
        pl.Series([datetime.date(2026, 1, day) for day in (1, 2, 3)]),
        pd.DataFrame({"day": pd.to_datetime(["2026-01-01", "2026-01-02", None])}),
        pd.Series(["one", "two", "three"]),
        list(np.array(["2026-01-01", "2026-01-02", "2026-01-03"], dtype="M8[D]")),
        np.array([1.0, np.timedelta64(3, "h"), 2.0], dtype=object),
        pl.Series(["01234", "10001", None]),
        np.array(["01234", "10001", "1"], dtype=np.dtypes.StringDType()),
    ],
    ids=["NumPy", "pandas", "polars", "frame", "text", "list", "objects", "polars text", "NumPy text"],
)
def test_responses_that_are_no_numbers_are_refused(dates):
    with pytest.raises(TypeError, match="y: expected"):
        geode_jax.GeodeRegressor(**QUICK).fit(np.arange(6.0).reshape(3, 2), dates)


def test_arrays_and_labels_of_dates_are_refused():
    dates = np.array(["2026-01-01", "2026-01-02"], dtype="M8[ns]").repeat(3)
    with pytest.raises(TypeError, match="X: expected numbers, got dtype datetime64"):
        geode_jax.GeodeDensity(**QUICK).fit(dates[:, None])
    with pytest.raises(TypeError, match="y: expected labels"):
        geode_jax.GeodeClassifier(**QUICK).fit(np.arange(12.0).reshape(6, 2), dates)


def test_text_and_spans_among_objects_are_no_numbers():
    """Codes with zeros in front, and hours beside minutes, which a conversion would take for numbers."""
    spans = [np.timedelta64(3, "h"), np.timedelta64(5, "m"), None]
    for column, kind in {
        "object": (pd.Series(["01234", None, "10001"], dtype=object), "text"),
        "string": (pd.Series(["1", "2", "3"], dtype="string"), "text"),
        "category": (pd.Series(pd.Categorical(["10", "2", "30"])), "category"),
        "spans": (pd.Series(spans, dtype=object), "timedelta64"),
    }.values():
        frame = pd.DataFrame({"a": column, "b": [1.0, 2.0, 3.0]})
        with pytest.raises(TypeError, match=rf"X: expected columns of numbers, got 'a' \({kind}"):
            check_columns(frame)
    check_columns(pd.DataFrame({"a": pd.Categorical([3, 1, 3]), "b": pd.Series([None, None, 1], dtype=object)}))
    for X in (np.array([["1", "2"]] * 3), np.array([["1", 2.0]] * 3, dtype=object)):
        with pytest.raises(TypeError, match="X: expected numbers, got"):
            geode_jax.GeodeDensity(**QUICK).fit(X)


def test_missing_objects_are_nan():
    objects = np.array([[1, pd.NA], [2, 3], [None, 5]], dtype=object)
    expected = [[1.0, np.nan], [2.0, 3.0], [np.nan, 5.0]]
    frame = pd.DataFrame({"a": pd.Series([1, 2, None], dtype=object), "b": pd.Series([pd.NA, 3.0, 5.0], dtype=object)})
    for X in (objects, objects.tolist(), frame, frame.assign(b=frame.b.astype("Float64"))):
        np.testing.assert_array_equal(check_data(X, allow_nan=True), expected)
    for X in (objects, objects.tolist(), frame):
        np.testing.assert_array_equal(np.asarray(missing_as_nan(X), float), expected)


def test_numbers_in_columns_of_objects_and_of_pandas_own_types():
    frame = pd.DataFrame(NUMBERS)
    check_columns(frame.astype(object))
    check_columns(frame.astype({"length": "Float64", "count": "Int64", "is new": "boolean"}))
    check_columns(frame.astype({"count": "category"}))
    with pytest.raises(TypeError, match="'count' \\(category\\)"):
        check_columns(frame.assign(count=pd.Categorical(["a", "b", "a"])))
    many = pd.DataFrame({f"c{number}": ["x"] for number in range(9)})
    with pytest.raises(TypeError, match=r"'c4' .* and 4 more"):
        check_columns(many)


@pytest.mark.parametrize("library", [pd, pl, None])
def test_tables_come_out_as_they_went_in(library, data):
    rows = np.where(np.random.default_rng(0).random(data.shape) < 0.2, np.nan, data)
    names = list("abcdef")
    table = rows if library is None else library.DataFrame(rows, **{"columns" if library is pd else "schema": names})
    if library is pd:
        table.index = [f"row {number}" for number in range(len(rows))]
    model = geode_jax.GeodeDensity(**QUICK).fit(table)
    assert model.__sklearn_tags__().input_tags.allow_nan
    assert np.isfinite(model.score_samples(table)).all()
    for values in (model.impute(table), *model.impute(table, interval=0.9)):
        assert type(values) is type(table)
        assert values.shape == rows.shape
        np.testing.assert_array_equal(np.asarray(values)[~np.isnan(rows)], rows[~np.isnan(rows)])
        if library is not None:
            assert list(values.columns) == names
        if library is pd:
            assert list(values.index) == list(table.index)
    if library is not None:
        with pytest.raises(TypeError, match=r"^calibration: expected columns of numbers, got 'city'"):
            model.impute(table, interval=0.9, calibration=library.DataFrame({"city": ["Rome"]}))


def test_a_square_table_is_not_turned(data):
    """Values laid out by columns, as those of frames are, of as many rows as columns."""
    values = np.asfortranarray(data[:6])
    np.testing.assert_array_equal(like(pl.DataFrame(values, schema=list("abcdef")), values).to_numpy(), values)


def test_columns_of_the_same_name_are_all_looked_at():
    frame = pd.DataFrame([["Rome", 1.0]], columns=["a", "a"])
    with pytest.raises(TypeError, match="'a'"):
        check_columns(frame)


def test_some_columns():
    frame = pd.DataFrame(NUMBERS, index=[7, 8, 9])
    part = like(frame, np.zeros((3, 2)), np.array([0, 2]))
    assert list(part.columns) == ["length", "is new"]
    assert list(part.index) == [7, 8, 9]
    frame.columns = pd.MultiIndex.from_tuples([("a", "b"), ("a", "c"), ("d", "e")], names=["one", "two"])
    pd.testing.assert_index_equal(like(frame, np.zeros((3, 3))).columns, frame.columns)


def test_other_seeds_draw_other_rows(data):
    model = geode_jax.GeodeDensity(**QUICK).fit(data)
    holes = np.where(np.random.default_rng(0).random(data[:5].shape) < 0.3, np.nan, data[:5])
    for draw in (lambda **seed: model.sample(3, **seed), lambda **seed: model.impute_draws(holes, 2, **seed)):
        np.testing.assert_array_equal(draw(), draw())
        np.testing.assert_array_equal(draw(random_state=1), draw(random_state=1))
        assert not np.array_equal(draw(), draw(random_state=1))
