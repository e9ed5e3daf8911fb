"""Whatever comes in, what comes out is finite or one of our errors: files, rows, masks, settings."""

import numpy as np
import pytest
from conftest import ANY_NOISE_SLOW
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import geode_jax
from geode_jax.cli.tables import TableError, open_table

ROWS = 8
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def saved(posterior, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "model.npz"
    posterior.save(path)
    return path


@FUZZ
@example(length=1.0, changes=[(0.7, 0)])  # inside the header of an array: NumPy's tokenizer fails
@given(
    length=st.just(1.0) | st.floats(0.0, 1.0),
    changes=st.lists(st.tuples(st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 255)), max_size=8),
)
def test_damaged_files(saved, tmp_path, length, changes):
    """Cut, or with some bytes replaced: an error of ours, or a posterior (a byte may not matter)."""
    whole = saved.read_bytes()
    content = bytearray(whole[: int(length * len(whole))])
    for place, value in changes if content else []:
        content[int(place * len(content))] = value
    path = tmp_path / "damaged.npz"
    path.write_bytes(bytes(content))
    try:
        loaded = geode_jax.Posterior.load(path)
    except ValueError as error:
        assert str(error).startswith("path: expected a file written by Posterior.save")  # noqa: PT017
    else:
        assert loaded.num_features == 6


@FUZZ
@given(
    mask=npst.arrays(bool, (ROWS, 6)),
    rows=npst.arrays(np.float64, (ROWS, 6), elements=st.integers(-9, 9)),
    power=st.integers(0, 307),
)
@ANY_NOISE_SLOW
def test_finite_rows_give_finite_answers(posterior, mask, rows, power):
    """Any pattern of missing values, rows as far from the data as may be; an empty row has the log density 0."""
    rows = rows * 10.0**power
    hidden = np.where(mask, np.nan, rows)
    density = geode_jax.log_density(posterior, hidden)
    assert np.isfinite(density).all()
    assert (density[mask.all(axis=1)] == 0.0).all()
    filled = geode_jax.impute(posterior, hidden, interval=0.9)
    assert all(np.isfinite(part).all() for part in filled)
    assert (filled.lower <= filled.upper).all()
    np.testing.assert_array_equal(filled.filled[~mask], rows[~mask])


@FUZZ
@given(content=st.text(alphabet="0123456789.,eE+-naNxi \"'\n\r\t;", max_size=80))
def test_any_text_is_a_table_or_an_error(tmp_path, content):
    path = tmp_path / "any.csv"
    path.write_text(content, newline="")
    try:
        table = open_table(path, 3)
        rows = table.whole()
    except TableError as error:
        assert "any.csv" in str(error) or "expected rows" in str(error)  # noqa: PT017
    else:
        assert rows.shape[0] == table.num_rows


@settings(max_examples=6, deadline=None)
@pytest.mark.slow
@given(data=st.data())
def test_any_small_fit(data):
    """Shapes down to two rows and one feature, any units, any share of missing values, any settings."""
    shape = data.draw(st.tuples(st.integers(2, 40), st.integers(1, 12)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    x = data.draw(st.sampled_from([1e-6, 1.0, 1e6])) * (
        rng.normal(size=shape) + data.draw(st.sampled_from([0.0, 100.0]))
    )
    x[rng.random(shape) < data.draw(st.sampled_from([0.0, 0.3]))] = np.nan
    options = {
        "max_rank": data.draw(st.none() | st.integers(1, 5)),
        "depth": data.draw(st.none() | st.integers(0, 3)),
        "num_trees": data.draw(st.integers(1, 2)),
        "cross_fit": data.draw(st.none() | st.integers(2, 5)),
        "feature_noise": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from(["float32", "float64"])),
    }
    model = geode_jax.GeodeDensity(**options, num_warmup=10, num_samples=10, random_state=0)
    try:
        model.fit(x)
    except ValueError as error:
        assert "X" in str(error)  # noqa: PT017
        assert np.isnan(x).all(axis=0).any() or np.isnan(x).all(axis=1).any() or len(np.unique(x, axis=0)) < 2
        return
    assert np.isfinite(model.score_samples(x)).all()
    assert np.isfinite(model.sample(3)).all()
    assert np.isfinite(model.impute(x)).all()
