"""Rows however far from the data: finite answers, the same in float32 as in float64, and never a typical row."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ANY_NOISE_SLOW, QUICK

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.interop.numpyro import PosteriorPredictive
from geode_jax.learning.class_span import Reduction
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.predict import distance
from geode_jax.rows.frame import learn_frame

# up to the largest float64; 1e19 and 1e154 are where squares overflow in either type
MAGNITUDES = [1e2, 1e4, 1e10, 1e19, 1e20, 1e39, 1e153, 1e155, 1.7e308]


def _far_rows(magnitude):
    """One feature, all features, both signs, with none, one or most of the others missing; (6, 6)."""
    rows = np.full((6, 6), 40.0)
    rows[:, 0] = magnitude
    rows[1] = magnitude
    rows[2] = -magnitude
    rows[3, 1] = np.nan
    rows[4, 1:] = np.nan
    rows[5] = [magnitude, -magnitude, np.nan, 0.0, 1.0, np.nan]
    return rows


def _in_float32(posterior):
    return jax.tree.map(
        lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 and leaf.ndim > 1 else leaf, posterior
    )


@pytest.mark.slow
@ANY_NOISE_SLOW
def test_finite_rows_give_finite_answers_at_any_distance(posterior):
    for magnitude in MAGNITUDES:
        rows = _far_rows(magnitude)
        conditional = geode_jax.condition(posterior, rows)
        answers = {
            "log_density": geode_jax.log_density(posterior, rows),
            "log_density_draws": geode_jax.log_density_draws(posterior, rows, num_draws=2),
            "impute": np.stack(geode_jax.impute(posterior, rows)),
            "impute_draws": geode_jax.impute_draws(jax.random.key(0), posterior, rows, 2),
            "std": conditional.std(),
            "log_prob": conditional.log_prob(np.full((6, 6), magnitude)),
            "marginal": conditional.marginal([5, 2]).log_prob(np.full((6, 2), -magnitude)),
            "intrinsic_dimension": geode_jax.intrinsic_dimension(posterior, rows),
        }
        for name, answer in answers.items():
            assert np.isfinite(answer).all(), (name, magnitude)
        lower, upper = answers["impute"][1:]
        assert (lower <= upper).all()
        assert (answers["log_density"] < -10.0).all()


def test_densities_fall_with_the_distance(posterior):
    densities = np.array([geode_jax.log_density(posterior, _far_rows(magnitude)[:3]) for magnitude in MAGNITUDES])
    assert (np.diff(densities[:7], axis=0) < 0).all()  # those beyond the bound count as if they were there


@ANY_NOISE_SLOW
def test_widths_in_float32_are_those_in_float64(posterior):
    """The same numbers in either type to 1e-3, from the limit of float32 to a million deviations.

    Of noise that is not isotropic, and in this fit is small beside the data, to 3e-3.
    """
    rtol = 1e-3 if posterior.noise_root is None else 3e-3
    with jax_settings(np.float64):
        wide = distance.in_float64(posterior)
    narrow = _in_float32(wide)
    for deviations in (5.0, 0.95 * distance.FARTHEST_IN_FLOAT32 * np.sqrt(6), 30.0, 1e3, 1e6):
        rows = np.tile(posterior.shift, (3, 1))
        rows[:, 0] += deviations * posterior.scale[0]
        rows[1, 2] -= deviations * posterior.scale[2]
        rows[:, 4:] = np.nan
        widths = []
        for held in (wide, narrow):
            lower, upper = geode_jax.condition(held, rows).interval(0.9)
            widths.append((upper - lower)[:, 4:])
        np.testing.assert_allclose(widths[1], widths[0], rtol=rtol, err_msg=f"{deviations} deviations")


def test_only_far_rows_are_computed_in_float64(posterior):
    rows = np.tile(posterior.shift, (4, 1))
    rows[2, 1] += 2 * distance.FARTHEST_IN_FLOAT32 * np.sqrt(6) * posterior.scale[1]
    pairs = [(held.dtype.name, index.tolist()) for held, index in distance.by_distance(posterior, rows)]
    far = [("float32", [0, 1, 3]), ("float64", [2])]
    assert pairs == (far if posterior.dtype == np.float32 else [("float64", [0, 1, 2, 3])])


def _in_units(posterior, unit):
    """The same density with model coordinates `unit` times as large, as where features are divided by their noise."""
    dictionary = dataclasses.replace(posterior.dictionary, centres=unit * posterior.dictionary.centres)
    raised = posterior.draws.log_sigma2 + np.float32(2 * np.log(unit))
    draws = eqx.tree_at(lambda it: it.log_sigma2, posterior.draws, raised)
    return dataclasses.replace(posterior, dictionary=dictionary, draws=draws, scale=posterior.scale / unit)


@ANY_NOISE_SLOW
def test_far_is_beside_the_data_in_any_unit(posterior, data):
    """Ordinary rows are computed in the posterior's own type even if their model coordinates are large."""
    if posterior.dtype == np.float64:
        pytest.skip("all rows are computed in float64")
    every = np.arange(len(data))
    far = posterior.shift + 2 * distance.FARTHEST_IN_FLOAT32 * posterior.scale * np.ones((1, 6))
    for unit in (1.0, 20.0):
        held = _in_units(posterior, np.float32(unit))
        np.testing.assert_allclose(geode_jax.log_density(held, data), geode_jax.log_density(posterior, data), atol=1e-3)
        assert not distance.is_far(held, data, every).any()
        assert distance.is_far(held, far, every[:1]).all()
        for reduction in (None, Reduction(np.zeros(6), np.eye(6), np.ones(()))):
            members = (held, held)
            classes = ClassPosterior(members, reduction, held.shift, held.scale, np.log([0.5, 0.5]), 1.0, 0.0)
            if held.noise_root is None:  # members have none
                assert not distance.is_far(classes, data, every).any()
                assert distance.is_far(classes, far, every[:1]).all()


def test_numpyro_density(posterior):
    predictive = PosteriorPredictive(posterior)
    for magnitude in (1e10, 1e20, 3e38):
        assert np.isfinite(predictive.log_prob(jnp.full((2, 6), magnitude, jnp.float32))).all()


@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
@pytest.mark.parametrize("signal", [1e5, 1e8])
def test_rows_with_holes_of_data_nearly_free_of_noise(posterior, data, signal):
    """Of fewer observed features than directions: float32 resolves the first, and leaves the second to float64."""
    louder = jnp.full_like(posterior.draws.neg_log_u, np.log1p(signal))
    quieter = posterior.draws.log_sigma2 - np.log(signal)
    loud = eqx.tree_at(lambda it: (it.draws.neg_log_u, it.draws.log_sigma2), posterior, (louder, quieter))
    rows = np.where(np.arange(6) < 2, data[:9], np.nan)
    widths = [np.subtract(*geode_jax.impute(one, rows)[1:]) for one in (loud, distance.in_float64(loud))]
    np.testing.assert_allclose(*widths, rtol=0.02)


@pytest.fixture(scope="module")
def model(data):
    return geode_jax.GeodeDensity(**QUICK).fit(data)


def test_far_rows_are_novel(model, data):
    for magnitude in MAGNITUDES[:-1]:  # scikit-learn's own check of the sum warns of the largest
        assert (model.novelty(_far_rows(magnitude)[:3]) == 1.0 / (1 + len(data))).all(), magnitude


@pytest.mark.slow
def test_classes(data):
    labels = (data[:, 0] > np.median(data[:, 0])).astype(int)
    options = {"num_trees": 1, "max_rank": 2, "depth": 1, "num_warmup": 10, "num_samples": 10, "random_state": 0}
    model = geode_jax.GeodeClassifier(**options).fit(data, labels)
    for magnitude in MAGNITUDES[:-1]:
        found = model.predict_proba(_far_rows(magnitude))
        np.testing.assert_allclose(found.sum(axis=1), 1.0)


def _near_a_plane(num_rows, rng):
    return rng.normal(size=(num_rows, 2)) @ np.random.default_rng(1).normal(size=(2, 6)) + 0.3 * rng.normal(
        size=(num_rows, 6)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_far_training_row_sets_no_unit(dtype):
    """Nor do several; the unit of data without any is the root-mean-square deviation, from the mean."""
    x = _near_a_plane(300, np.random.default_rng(0)).astype(dtype)
    clean = learn_frame(x)
    np.testing.assert_allclose(clean.scale, np.sqrt(np.var(x.astype(np.float64), axis=0).mean()), rtol=1e-12)
    np.testing.assert_allclose(clean.shift, x.mean(axis=0, dtype=np.float64), rtol=1e-12)
    for value, told in ((1e9, "6e.08"), (1e30, "6e.29"), *([(1e300, "6e.299")] if dtype is np.float64 else [])):
        one = np.where(np.arange(300)[:, None] == 5, dtype(value), x)
        one[7, 2] = np.nan
        with pytest.warns(RuntimeWarning, match=f"^X: row 5 is {told} times as far from the mean as most rows"):
            frame = learn_frame(one)
        assert 0.9 < (frame.scale / clean.scale).min() <= (frame.scale / clean.scale).max() < 2.0
        np.testing.assert_allclose(frame.shift, np.nanmedian(one, axis=0), rtol=1e-6)
    some = np.where(np.arange(300)[:, None] % 30 == 5, dtype(-9999.0), x)  # none of them has most of all squares
    assert 0.9 < (learn_frame(some).scale / clean.scale).min() < 3.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_set_the_unit(dtype):
    """A ninth of them far off, one column of another unit, and rows of which most hardly differ."""
    rng = np.random.default_rng(0)
    x = _near_a_plane(300, rng).astype(dtype)
    tenth = np.where(np.arange(300)[:, None] % 9 == 5, dtype(-9999.0), x)
    wide = x * np.where(np.arange(6) == 3, 1e6, 1.0).astype(dtype)
    wider = rng.normal(size=(300, 1500)).astype(dtype) * np.where(np.arange(1500) == 700, 1e4, 1.0).astype(dtype)
    alike = np.where(np.arange(300)[:, None] % 30 == 5, x, dtype(1e-20) * x)
    for rows in (tenth, wide, wider, alike):
        expected = np.sqrt(np.var(rows.astype(np.float64), axis=0).mean())
        np.testing.assert_allclose(learn_frame(rows).scale, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:X. row 5 is .e.0. times as far")
def test_a_far_training_row_leaves_others_their_density():
    """Rows of its cells are described less well, but not as if all scales had its noise (-14 and -41 nats)."""
    rng = np.random.default_rng(0)
    x, new = _near_a_plane(300, rng), _near_a_plane(100, rng)
    found = []
    for value in (None, 1e4, 1e6):
        rows = x if value is None else np.where(np.arange(300)[:, None] == 5, value, x)
        posterior = geode_jax.fit(
            jax.random.key(0),
            rows,
            dictionary=geode_jax.DictionarySettings(num_trees=1),
            sampler=geode_jax.SamplerSettings(num_warmup=50, num_samples=50),
        )
        found.append(geode_jax.log_density(posterior, new).mean())
    assert found[0] > -5.2
    assert min(found) > found[0] - 3.0
