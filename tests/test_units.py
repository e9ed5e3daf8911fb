"""Features in different units: each is divided by its own deviation where held-out rows tell so, and only there."""

from unittest import mock

import jax
import numpy as np
import pytest
from sklearn.datasets import load_digits, load_wine

import geode_jax
from geode_jax import DictionarySettings
from geode_jax.fitting.classes import _common_coordinates
from geode_jax.fitting.stages import Request
from geode_jax.forest.feature_scales import find_units
from geode_jax.forest.plan import Plan
from geode_jax.learning import units
from geode_jax.learning.evidence import Gain
from geode_jax.learning.feature_noise import NoiseOptions, _shrunk, learn_feature_scales, price_of_unseen
from geode_jax.learning.units import _deviations, _power_sums, _relative
from geode_jax.partition.metis import Partition
from geode_jax.rows.frame import learn_frame, to_model

FACTOR = 10.0 ** np.tile([-2, 0, 1, 3], 5)


@pytest.fixture
def curve():
    """Rows near a curve in 20 dimensions, (300, 20)."""
    rng = np.random.default_rng(0)
    return np.cos(rng.uniform(0, 3, (300, 1)) + np.arange(20)) + 0.05 * rng.normal(size=(300, 20))


def units_of(x, **settings):
    rows = to_model(x, learn_frame(x), np.dtype(np.float32))
    return find_units(rows, Plan.of(DictionarySettings(**settings), *x.shape), 0)[0]


@pytest.mark.parametrize("is_partial", [False, True])
def test_columns_in_different_units_get_units_of_their_own(curve, is_partial):
    x = curve * FACTOR
    x[:, 7] = 5.0  # a constant has no unit, and takes no harm
    if is_partial:
        x[np.random.default_rng(1).random(x.shape) < 0.2] = np.nan
    found = units_of(x)
    relative = found / np.delete(FACTOR, 7)
    assert relative.max() < 3.0 * relative.min()  # as the curve's own deviations
    np.testing.assert_array_equal(units_of(x, feature_noise=None), 1.0)


def test_columns_in_one_unit_keep_it(curve):
    np.testing.assert_array_equal(units_of(curve), 1.0)
    uneven = curve * np.where(np.arange(20) < 4, 3.0, 1.0)  # deviations differ, densities hardly
    np.testing.assert_array_equal(units_of(uneven), 1.0)
    np.testing.assert_array_equal(units_of(load_digits().data), 1.0)


def test_a_pixel_that_is_rarely_lit_is_as_bright_as_the_others():
    x = np.zeros((1000, 2))
    x[::2, 0], x[1::2, 0], x[::100, 1] = -1.0, 1.0, 1.0
    np.testing.assert_allclose(_deviations(_power_sums(x))[0], np.sqrt(1 / 3), rtol=0.02)
    rng = np.random.default_rng(0)
    assert _deviations(_power_sums(rng.normal(size=(100_000, 1))))[0][0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("is_partial", [False, True])
def test_pixels_that_few_rows_light_keep_the_unit_of_all(is_partial):
    """Half of them are lit in one row of a hundred: their own deviations are not known to rows that light them."""
    rng, number = np.random.default_rng(0), 200
    is_lit = rng.random((100, number)) < np.where(np.arange(number) < number // 2, 0.01, 0.5)
    x = np.where(is_lit, 200.0 * rng.random(is_lit.shape), 0.0) + rng.random(is_lit.shape)
    if is_partial:
        x[rng.random(x.shape) < 0.1] = np.nan
    np.testing.assert_array_equal(units_of(x), 1.0)
    priced = []
    with mock.patch.object(
        units, "price_of_unseen", lambda *rest: priced.append(price_of_unseen(*rest)) or np.zeros(1)
    ):
        assert (units_of(x) != 1.0).any()
    assert priced[0].mean() > 2.0 * number


def test_units_of_many_rows_are_known_without_one_fold(curve):
    """A feature's deviation is off by a share of (2 n)^-1/2, which costs each fold's rows next to nothing."""
    priced = []
    with mock.patch.object(units, "price_of_unseen", lambda *rest: priced.append(price_of_unseen(*rest)) or priced[0]):
        units_of(curve * FACTOR)
    assert abs(priced[0].mean()) < 0.02 * 20


@pytest.mark.filterwarnings("ignore:X. row 17 is 5e.02 times as far")
@pytest.mark.parametrize("value", [1e-3, 1.0, 1e6])
def test_a_column_that_varies_in_one_row_leaves_the_others_their_units(curve, value):
    rare = np.where(np.arange(len(curve)) == 17, value, 0.0)
    found = units_of(np.column_stack([curve * FACTOR, rare]))[:-1] / FACTOR
    assert found.max() < 3.0 * found.min()


def test_a_slip_of_the_decimal_point_leaves_other_columns_their_units(curve):
    curve[17, 2] *= 1000.0
    found = np.delete(units_of(curve * FACTOR) / FACTOR, 2)
    assert found.max() < 3.0 * found.min()


def test_deviations_where_nothing_or_next_to_nothing_varies():
    """They are those of the other columns, whatever rounding leaves of differences of sums; no NaN, no warning."""
    x = np.random.default_rng(0).normal(size=(100, 4))
    x[:, 1], x[:, 2] = 0.0, 3.0
    sums = _power_sums(x)
    sums[1:, 1] = 0.0, 1e-30, 0.0, 0.0
    deviations, varies = _deviations(sums)
    np.testing.assert_array_equal(varies, [True, False, False, True])
    np.testing.assert_allclose(deviations[1:3], np.sqrt(deviations[0] * deviations[3]))
    every, _ = _deviations(_power_sums(np.ones((5, 2))))
    np.testing.assert_array_equal(every, 1.0)


def test_a_feature_that_varies_in_one_fold_is_not_judged_without_it():
    rng = np.random.default_rng(0)
    x, folds = rng.normal(size=(100, 3)), np.arange(100) % 5
    x[:, 1] = np.where(np.arange(100) == 17, 99.0, -1.0)  # of mean 0
    relative = _relative(_power_sums(x), x, folds)
    assert relative[2, 1] == 1.0
    np.testing.assert_allclose(relative[:, [0, 2]], 1.0, atol=0.2)


def test_units_leave_no_trace_in_the_forest(curve):
    """The same rows in other units: the same trees and directions."""
    forests = [
        geode_jax.learn_forest(jax.random.key(0), curve * factor, dictionary=DictionarySettings(num_trees=2))
        for factor in (FACTOR, FACTOR[::-1])
    ]
    np.testing.assert_allclose(forests[0].scale / FACTOR, forests[1].scale / FACTOR[::-1], rtol=1e-4)
    np.testing.assert_array_equal(*(forest.dictionary.tree.is_present for forest in forests))
    np.testing.assert_allclose(*(np.abs(forest.dictionary.bases[:, 0]) for forest in forests), atol=1e-3)


def test_classes_share_units():
    table = load_wine()
    rows_of = [np.flatnonzero(table.target == number) for number in range(3)]
    nothing = dict.fromkeys(("dictionary", "prior", "sampler", "checkpoint", "mesh"))
    request = Request.checked(dtype="float32", progress=False, **nothing)
    frame, _, x = _common_coordinates(table.data, rows_of, request)
    np.testing.assert_allclose(x, (table.data - frame.shift) / frame.scale, atol=1e-4)
    assert frame.scale.max() > 300 * frame.scale.min()
    assert x.std(axis=0).max() < 10 * x.std(axis=0).min()


def test_equal_noise_is_not_paid_for_by_every_feature():
    """Scales differ by a tenth of their sampling error, (2 n)^-1/2; true differences keep nine tenths of theirs."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(400, 100))
    whole = Partition(0, (np.arange(400),))
    options = NoiseOptions(num_rounds=3, num_folds=5, floor=0.05, max_rank=2, seed=0)
    equal = learn_feature_scales(noise, None, whole, options).scales
    assert np.log(equal).std() < 0.3 * 800**-0.5
    truth = np.exp(0.3 * rng.normal(size=100))
    found = np.log(learn_feature_scales(noise * truth, None, whole, options).scales)
    assert np.polyfit(np.log(truth), found, 1)[0] == pytest.approx(1.0, abs=0.1)


def test_scales_are_shrunk_as_far_as_their_errors_go():
    """Against the normal means' posterior with the spread known: 20,000 features make it so."""
    rng = np.random.default_rng(0)
    spread, error = 0.5, rng.uniform(0.2, 1.5, 20_000)
    truth = spread * rng.normal(size=error.size)
    estimate = truth + error * rng.normal(size=error.size)
    found = _shrunk(estimate, error**2)
    np.testing.assert_allclose(found, estimate * spread**2 / (spread**2 + error**2), atol=0.05 * np.abs(estimate).max())
    assert np.square(found - truth).mean() < 0.5 * np.square(estimate - truth).mean()
    np.testing.assert_array_equal(_shrunk(estimate[:3], error[:3]), estimate[:3])  # too few to tell a spread by
    np.testing.assert_array_equal(_shrunk(np.zeros(5), np.zeros(5)), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e3, 1e12])
def test_float32_gives_what_float64_gives_at_any_ratio_of_spreads(ratio):
    """Revenue in cents beside a rate: the small column is no constant, and keeps its digits."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(150, 1))
    x = (common + 0.3 * rng.normal(size=(150, 3))) * [ratio, 1.0, 30.0] + [5.0 * ratio, 0.0, 1.0]
    settings = geode_jax.DictionarySettings(num_trees=2, max_rank=1, depth=1, noise_covariance=None, shared_span=None)
    sampler = geode_jax.SamplerSettings(num_warmup=60, num_samples=60)
    hidden = x[:40].copy()
    hidden[:, 1] = np.nan
    found = {}
    for dtype in ("float32", "float64"):
        posterior = geode_jax.fit(jax.random.key(0), x, dictionary=settings, sampler=sampler, dtype=dtype)
        lower, upper = geode_jax.condition(posterior, hidden).interval(0.9)
        spread = geode_jax.condition(posterior, hidden).std()[:, 1].mean()
        found[dtype] = posterior.scale, (upper - lower)[:, 1].mean(), spread
        assert np.mean((lower[:, 1] <= x[:40, 1]) & (x[:40, 1] <= upper[:, 1])) > 0.7
    np.testing.assert_allclose(found["float32"][0], found["float64"][0], rtol=1e-4)
    np.testing.assert_allclose(found["float32"][1:], found["float64"][1:], rtol=0.15)  # other draws
    assert 0.3 < found["float32"][2] < 0.6


def test_a_column_too_small_for_float32_has_a_unit_of_its_own():
    x = np.random.default_rng(0).normal(size=(60, 3))
    small = x * [1.0, 1e-46, 1e-20]
    frame = learn_frame(small)
    np.testing.assert_allclose(frame.scale[[0, 2]], np.sqrt(x[:, 0].var() / 3), rtol=1e-6)
    found = to_model(small, frame, np.dtype(np.float32))
    centred = x[:, 1] - x[:, 1].mean()
    np.testing.assert_allclose(found[:, 1], centred / np.abs(centred).max(), rtol=1e-5)


@pytest.mark.parametrize(("value", "dtype"), [(1.7e18, np.float64), (1e7, np.float32), (-3e-30, np.float64)])
def test_a_constant_column_of_any_size_is_just_that(value, dtype):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(dtype)
    x[:, 2] = value
    frame = learn_frame(x)
    assert frame.shift[2] == x[0, 2]
    np.testing.assert_allclose(frame.scale[0] ** 2, x[:, :2].var(axis=0).mean(), rtol=1e-5)
    assert frame.features.tolist() == [0, 1]
    everything = frame._replace(features=None)
    assert (to_model(x, everything, np.dtype(np.float32))[:, 2] == 0.0).all()
    with pytest.raises(ValueError, match="all rows are equal"):
        learn_frame(x[:, 2:])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_rows_make_nothing_clear(number):
    """Both may differ by the same, as two rows are about their mean: the error would be 0."""
    assert Gain.of(np.full(number, 0.3)).is_clear == (number > 2)
