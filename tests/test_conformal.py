"""Calibrated intervals hold whatever the model says; false alarms are excluded by the seeds."""

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import ANY_NOISE_SLOW

import geode_jax
from geode_jax.predict.conformal import widening

PATTERN = np.array([False, True, False, False, True, False])  # missing
ONE_FEATURE = np.array([False, False, False, True, False, False])


def _covered(found, truth, pattern):
    return np.mean(((found.lower <= truth) & (truth <= found.upper))[:, pattern])


@ANY_NOISE_SLOW
@pytest.mark.parametrize(
    ("pattern", "log_noise", "more"),
    [(PATTERN, 0.0, 10.0), (PATTERN, 2.0, 0.0), pytest.param(ONE_FEATURE, 0.0, 10.0, marks=pytest.mark.slow)],
    ids=["too sure", "too wary", "one feature"],
)
def test_intervals_hold_for_a_model_that_is_wrong(posterior, pattern, log_noise, more):
    rows = geode_jax.sample(jax.random.key(0), posterior, 2000)
    rows += more * pattern * np.random.default_rng(0).normal(size=rows.shape).astype(rows.dtype)
    wrong = eqx.tree_at(lambda it: it.draws.log_sigma2, posterior, posterior.draws.log_sigma2 + log_noise)
    hidden = np.where(pattern, np.nan, rows[:1000])
    plain = geode_jax.impute(wrong, hidden, interval=0.9)
    calibrated = geode_jax.impute(wrong, hidden, interval=0.9, calibration=rows[1000:])
    assert abs(_covered(plain, rows[:1000], pattern) - 0.9) > 0.05
    assert abs(_covered(calibrated, rows[:1000], pattern) - 0.9) < (0.02 if pattern.sum() > 1 else 0.04)
    np.testing.assert_array_equal(calibrated.filled, plain.filled)
    assert (calibrated.lower <= calibrated.filled).all()
    assert (calibrated.filled <= calibrated.upper).all()
    np.testing.assert_array_equal(calibrated.lower[:, ~pattern], rows[:1000, ~pattern].astype(calibrated.lower.dtype))


@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_estimators_take_calibration_rows(posterior):
    rows = geode_jax.sample(jax.random.key(1), posterior, 60)
    hidden = np.where(PATTERN, np.nan, rows[:20])
    expected = geode_jax.impute(posterior, hidden, interval=0.9, calibration=rows[20:])
    density = geode_jax.GeodeDensity()
    for model in (density, geode_jax.GeodeImputer()):
        model.posterior_, model.n_features_in_, model.has_values_ = posterior, 6, np.ones(6, dtype=bool)
        found = model.impute(hidden, 0.9, calibration=rows[20:])
        for leaf, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(leaf, wanted)
    with pytest.raises(ValueError, match="interval: expected the probability of the intervals to calibrate, got None"):
        density.impute(hidden, calibration=rows)


@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_rows_that_show_nothing_spoil_no_others(posterior):
    rows = geode_jax.sample(jax.random.key(1), posterior, 60)
    hidden = np.where(PATTERN, np.nan, rows[:20])
    expected = geode_jax.impute(posterior, hidden, interval=0.9, calibration=rows[20:])
    with_empty = np.concatenate([hidden, np.full((30, hidden.shape[1]), np.nan)])
    found = geode_jax.impute(posterior, with_empty, interval=0.9, calibration=rows[20:])
    np.testing.assert_allclose(found.upper[:20], expected.upper, rtol=1e-5)
    own = geode_jax.impute(posterior, with_empty[20:21], interval=0.9)
    np.testing.assert_allclose(found.upper[20:21], own.upper, rtol=1e-5)
    alone = geode_jax.impute(posterior, with_empty[20:], interval=0.9, calibration=rows[20:])
    np.testing.assert_allclose(alone.upper[:1], own.upper, rtol=1e-5)


def _unit_intervals(x):
    """From 0 to 1 where something is missing."""
    return np.zeros(x.shape), np.where(np.isnan(x), 1.0, 0.0)


def test_widening_is_the_quantile_of_what_lies_beyond():
    rows = np.zeros((50, 2))
    rows[:, 1] = np.linspace(0.5, 2.0, 50)  # beyond the upper end by -0.5 to 1
    is_missing = np.array([[False, True], [False, False]])
    # of 50 rows and one more, 90% are not beyond the 46th
    assert widening(_unit_intervals, rows, is_missing, 0.9) == pytest.approx(rows[45, 1] - 1.0)
    assert widening(_unit_intervals, rows, ~is_missing[1:] & False, 0.9) == 0.0


def test_intervals_without_a_width_widen_no_others():
    def intervals(x):
        lower, upper = _unit_intervals(x)
        return lower, np.where(np.arange(3) == 1, lower, upper)

    rows, is_missing = np.full((50, 3), 1.5), np.array([[False, True, True]])
    assert widening(intervals, rows, is_missing, 0.9) == pytest.approx(0.5)
    assert widening(intervals, rows, is_missing & (np.arange(3) == 1), 0.9) == 0.0
    rows[3:, 2] = np.nan  # so that few rows show what has a width
    with pytest.raises(ValueError, match="calibration: expected at least 9 rows whose intervals have a width, got 3"):
        widening(intervals, rows, is_missing, 0.9)


def test_any_probability_has_a_quantile():
    assert widening(_unit_intervals, np.full((50, 2), 1.5), np.array([[False, True]]), 1e-12) == pytest.approx(0.5)


@pytest.mark.parametrize("num_patterns", [3, 1000])
def test_every_pattern_has_its_share(num_patterns):
    """Patterns are repeated, or evenly spread ones are taken: none that is at hand is left to the others."""
    asked = []

    def intervals(x):
        asked.append(np.isnan(x))
        return _unit_intervals(x)

    is_missing = np.zeros((num_patterns, 30), bool)
    is_missing[np.arange(num_patterns), np.arange(num_patterns) * 30 // num_patterns] = True
    widening(intervals, np.full((60, 30), 0.5), is_missing, 0.9)
    share = asked[0].mean(axis=0)
    np.testing.assert_allclose(share, is_missing.mean(axis=0), atol=1 / 59)


@pytest.mark.parametrize("num_rows", [50, 100, 200])
def test_order_of_rows_does_not_matter(num_rows):
    """Rows that come in turns: of either kind half of the held-out rows get the pattern, whatever theirs are like."""
    first = np.arange(3) == 0
    in_turns = np.tile([first, ~first], (50, 1))
    held_out = np.ones((num_rows, 3))
    held_out[::2] = 3.0  # these come in turns, too
    asked = []

    def intervals(x):
        asked.append(np.nan_to_num(x, nan=-1.0))
        return _unit_intervals(x)

    for some in (in_turns, in_turns[::-1], in_turns[np.argsort(in_turns[:, 0])]):
        widening(intervals, held_out, some, 0.9)
    hides_first = asked[0][:, 0] == -1.0
    assert hides_first.mean() == pytest.approx(0.5, abs=0.02)
    assert hides_first[::2].mean() == pytest.approx(0.5, abs=0.2)
    for other in asked[1:]:
        np.testing.assert_array_equal(other, asked[0])


def test_rows_that_cannot_tell_are_no_help():
    rows = np.zeros((40, 3))
    rows[10:, 1] = np.nan  # of what is missing, only ten rows show anything
    with pytest.raises(ValueError, match=r"calibration: expected at least 19 rows that show something .* got 10"):
        widening(_unit_intervals, rows, np.array([[False, True, False]]), 0.95)
    with pytest.raises(ValueError, match=r"calibration: expected at least 19 rows for intervals of probability 0.95"):
        widening(_unit_intervals, rows[:18], np.array([[False, True, False]]), 0.95)
