"""Features that never vary tell nothing: with or without them the same is drawn, and predicted of the others."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

import geode_jax
from geode_jax import DictionarySettings, SamplerSettings, SharedSpan
from geode_jax.model.found import Found
from geode_jax.rows import row_space
from geode_jax.rows.frame import learn_frame

SAMPLER = SamplerSettings(num_warmup=10, num_samples=10)
PLAIN = DictionarySettings(num_trees=2, max_rank=2, depth=1, noise_covariance=None, shared_span=None)


def _with_constants(x):
    """A third more features that never vary, and the places of the others: first, last, and between."""
    num_features = x.shape[1]
    number = num_features // 3
    where = np.linspace(0, num_features, number).astype(int)
    values = np.resize([7.25, 0.0, -1e3], number)
    place = np.flatnonzero(np.insert(np.zeros(num_features, dtype=bool), where, True) == 0)
    return np.insert(x, where, values, axis=1), place


def _rows(number, num_features, seed=1):
    """Near a bent curve, each feature with a noise of its own."""
    rng, axes = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(2, num_features))
    at = rng.normal(size=(number, 1))
    noise = np.geomspace(0.1, 0.4, num_features) * rng.normal(size=(number, num_features))
    return 5.0 + np.column_stack([at, at**2]) @ axes + noise


def _smooth(number, num_features):
    """Noise that neighbouring features share, around a line."""
    rng = np.random.default_rng(2)
    noise = np.cumsum(rng.normal(size=(number, num_features)), axis=1)
    return rng.normal(size=(number, 1)) * np.linspace(-3.0, 3.0, num_features) + 0.3 * noise


def _with_gaps(x):
    x = x.copy()
    x[np.random.default_rng(3).random(x.shape) < 0.1] = np.nan
    x[:20] = _rows(20, x.shape[1])
    return x


CASES = {
    "complete": (_rows(90, 6), dataclasses.replace(PLAIN, max_rank=None)),
    "missing": (_with_gaps(_rows(90, 6)), PLAIN),
    "mapped": (_rows(90, 6), PLAIN),
    "noise covariance": (_smooth(300, 12), dataclasses.replace(PLAIN, noise_covariance=geode_jax.NoiseCovariance())),
    "row space": (_rows(20, 60), dataclasses.replace(PLAIN, feature_noise=None)),
    "span": (_rows(90, 12), dataclasses.replace(PLAIN, shared_span=SharedSpan(3))),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in ("complete", "row space") else [pytest.mark.slow]) for case in CASES],
)
def test_the_same_is_drawn_and_predicted(case, tmp_path):
    x, settings = CASES[case]
    padded, place = _with_constants(x)
    told = padded
    if case == "mapped":
        np.save(tmp_path / "rows.npy", padded)
        told = np.load(tmp_path / "rows.npy", mmap_mode="r")
    with mock.patch.multiple(row_space, LARGE_BYTES=0, LEAST_SAVING=0):
        plain, found = (
            geode_jax.fit(jax.random.key(0), rows, dictionary=settings, sampler=SAMPLER) for rows in (x, told)
        )
    jax.tree.map(np.testing.assert_array_equal, found.draws, plain.draws)
    np.testing.assert_array_equal(found.scale[place], plain.scale)
    constant = np.setdiff1d(np.arange(padded.shape[1]), place)
    assert (found.scale[constant] <= found.scale[place].max()).all()
    assert found.found.num_constant == constant.size
    assert found.found.rank_limit == plain.found.rank_limit  # what was left open is decided by those that vary
    assert f"features that never vary: {constant.size}" in geode_jax.diagnostics.report(found)
    assert (found.noise_root is not None) == (case == "noise covariance")
    assert (found.row_space is not None) == (case == "row space")

    rows = x[:15]
    # of features that are not observed nothing is told, so they may be those that never vary
    hidden = padded[:15].copy()
    hidden[:, constant] = np.nan
    expected = geode_jax.log_density(plain, rows)
    np.testing.assert_allclose(geode_jax.log_density(found, hidden), expected, rtol=1e-4, atol=2e-3)
    filled = geode_jax.impute_mean(found, hidden)
    np.testing.assert_allclose(filled[:, constant], padded[:15, constant], atol=1e-3 * plain.scale.max())
    # as they are in training, and not as they are: they have the least noise
    assert np.isfinite(geode_jax.log_density(found, padded[:15])).all()
    moved = padded[:15] + np.isin(np.arange(padded.shape[1]), constant)
    assert (geode_jax.log_density(found, moved) < geode_jax.log_density(found, padded[:15])).all()
    if case == "missing":
        return
    hidden[:, place[0]] = rows[:, 0] = np.nan
    np.testing.assert_allclose(
        geode_jax.impute_mean(found, hidden)[:, place], geode_jax.impute_mean(plain, rows), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("rank", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_of_classes(rank, tmp_path):
    x = np.concatenate([_rows(70, 9), _rows(70, 9, seed=2)[:, ::-1]])
    labels = np.repeat([0, 1], 70)
    padded, place = _with_constants(x)
    settings = dataclasses.replace(PLAIN, shared_span=None if rank is None else SharedSpan(rank))
    plain, found = (
        geode_jax.fit_classes(jax.random.key(0), rows, labels, dictionary=settings, sampler=SAMPLER)
        for rows in (x, padded)
    )
    assert (found.reduction is None) == (rank is None)
    for one, other in zip(found.members, plain.members, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.draws, other.draws)
    np.testing.assert_array_equal(found.scale[place], plain.scale)
    assert (found.power, found.power_exponent) == (plain.power, plain.power_exponent)
    hidden, also = x[::7].copy(), padded[::7].copy()
    hidden[:, 1] = also[:, place[1]] = np.nan
    for rows, others in ((x[::7], padded[::7]), (hidden, also)):
        expected = geode_jax.class_log_densities(plain, rows)
        np.testing.assert_array_equal(geode_jax.class_log_densities(found, others), expected)
        others[:3, 0], others[3:6, 0] = 11.0, np.nan  # what never varied says nothing
        np.testing.assert_array_equal(
            geode_jax.class_log_probabilities(found, others), geode_jax.class_log_probabilities(plain, rows)
        )
    found.save(tmp_path / "classes.npz")
    back = geode_jax.ClassPosterior.load(tmp_path / "classes.npz")
    jax.tree.map(np.testing.assert_array_equal, back, found)
    header, arrays = found.to_archive()
    for features in ([0, *found.features[1:-1], 0], found.features[1:], [-1, *found.features[1:]], [*place[:-1], 99]):
        with pytest.raises(ValueError, match="features"):
            geode_jax.ClassPosterior.from_archive(header, {**arrays, "features": np.array(features, np.int64)})


def test_a_row_that_tells_nothing_is_named():
    x = np.column_stack([np.full(30, 2.0), _rows(30, 3)])
    x[7, 1:] = np.nan
    with pytest.raises(ValueError, match="features that vary, but row 7 has none"):
        geode_jax.fit(jax.random.key(0), x, dictionary=PLAIN, sampler=SAMPLER)


def test_the_frame_has_those_that_vary():
    x = np.column_stack([np.full(30, 1e9), _rows(30, 2), np.full(30, np.nan)])
    x[3, 3] = -4.0
    frame = learn_frame(x)
    np.testing.assert_array_equal(frame.features, [1, 2])
    np.testing.assert_array_equal(frame.is_left_out, [True, False, False, True])
    np.testing.assert_allclose(frame.scale, np.sqrt(x[:, 1:3].var(axis=0).mean()))
    assert learn_frame(x[:, 1:3]).features is None


def test_their_number_is_kept_in_files():
    found = Found(2, None, 3, num_constant=4)
    assert Found.from_header(found.to_header()) == found
    header = {name: value for name, value in found.to_header().items() if name != "num_constant"}
    assert Found.from_header(header).num_constant == 0
    with pytest.raises(ValueError, match="not a number of features"):
        Found.from_header({**header, "num_constant": -1})
