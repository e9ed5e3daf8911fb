"""Features that never vary tell nothing: with or without them the same is drawn, and predicted of the others."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

import geode_jax
from geode_jax import DictionarySettings, SamplerSettings, SharedSpan
from geode_jax.interop import plots
from geode_jax.interop.numpyro import PosteriorPredictive
from geode_jax.rows import row_space
from geode_jax.rows.frame import learn_frame, to_model, view_in_model

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
    "units": (_rows(90, 6) * 10.0 ** np.arange(6), PLAIN),
    "noise covariance": (_smooth(300, 12), dataclasses.replace(PLAIN, noise_covariance=geode_jax.NoiseCovariance())),
    "row space": (_rows(20, 60), dataclasses.replace(PLAIN, feature_noise=None)),
    "span": (_rows(90, 12), dataclasses.replace(PLAIN, shared_span=SharedSpan(3))),
}


SLOW = CASES.keys() - {"complete"}


class _Fits:
    """A fit without and a fit with constants, of the same rows."""

    def __init__(self, case, folder):
        x, settings = CASES[case]
        self.case, self.rows = case, x[:15]
        padded, self.place = _with_constants(x)
        self.constant = np.setdiff1d(np.arange(padded.shape[1]), self.place)
        self.padded = padded[:15]
        told = padded
        if case == "mapped":
            np.save(folder / "rows.npy", padded)
            told = np.load(folder / "rows.npy", mmap_mode="r")
        with mock.patch.multiple(row_space, LARGE_BYTES=0, LEAST_SAVING=0):
            self.plain, self.found = (
                geode_jax.fit(jax.random.key(0), rows, dictionary=settings, sampler=SAMPLER) for rows in (x, told)
            )

    def holes(self, seed):
        """Rows with and without constants, with any features missing, of the constants too."""
        whole = self.padded.copy()
        whole[np.random.default_rng(seed).random(whole.shape) < 0.4] = np.nan
        return whole[:, self.place], whole


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.slow if case in SLOW else []) for case in CASES],
)
def fits(request, tmp_path_factory):
    return _Fits(request.param, tmp_path_factory.mktemp("rows"))


def test_the_same_is_drawn(fits):
    found, plain = fits.found, fits.plain
    jax.tree.map(np.testing.assert_array_equal, (found.draws, found.dictionary), (plain.draws, plain.dictionary))
    np.testing.assert_array_equal(found.features, fits.place)
    np.testing.assert_array_equal(found.scale[fits.place], plain.scale)
    np.testing.assert_array_equal(found.sigma, plain.sigma)
    np.testing.assert_array_equal(found.shift[fits.constant], fits.padded[0, fits.constant])
    assert found.num_features == fits.padded.shape[1]
    assert found.found.rank_limit == plain.found.rank_limit
    assert found.intrinsic_dimension == plain.intrinsic_dimension
    assert (found.noise_root is not None) == (fits.case == "noise covariance")
    assert (found.row_space is not None) == (fits.case == "row space")
    assert f"features that never vary: {fits.constant.size}" in geode_jax.diagnostics.report(found)


def test_the_others_are_predicted_as_without_them(fits):
    x, padded = fits.holes(4)
    for rows, whole in ((fits.rows, fits.padded), (x, padded)):
        for function in (geode_jax.impute_mean, lambda *given: geode_jax.condition(*given).std()):
            np.testing.assert_array_equal(function(fits.found, whole)[:, fits.place], function(fits.plain, rows))
        np.testing.assert_array_equal(
            geode_jax.intrinsic_dimension(fits.found, whole), geode_jax.intrinsic_dimension(fits.plain, rows)
        )
    expected, found = geode_jax.condition(fits.plain, x), geode_jax.condition(fits.found, padded)
    key = jax.random.key(1)
    for one, other in (
        (found.interval(0.8), expected.interval(0.8)),
        (found.sample(key, 2), expected.sample(key, 2)),
        (found.marginal(fits.place[:2]).mean(), expected.marginal([0, 1]).mean()),
    ):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(one if one.shape == other.shape else one[..., fits.place], other)
    known = fits.padded.copy()
    known[:6, fits.place[1:]] = np.nan  # where the first is hidden too, they show nothing of what varies
    padded[:, fits.place[0]] = x[:, 0] = np.nan
    calibration = {"calibration": known}, {"calibration": known[:, fits.place]}
    with_, without = (
        geode_jax.impute(posterior, rows, interval=0.8, **given)
        for posterior, rows, given in zip((fits.found, fits.plain), (padded, x), calibration, strict=True)
    )
    np.testing.assert_array_equal(with_.upper[:, fits.place], without.upper)
    alone = geode_jax.impute(fits.found, padded, interval=0.8)
    np.testing.assert_array_equal(with_.upper[:, fits.constant], alone.upper[:, fits.constant])


def test_constants_are_normal_with_a_small_deviation(fits):
    deviation, value = fits.found.scale[fits.constant], fits.padded[0, fits.constant]
    np.testing.assert_allclose(deviation, 0.05 * np.exp(np.log(fits.plain.scale).mean()))
    x, padded = fits.holes(5)
    padded[3, fits.constant[0]] += 2.0 * deviation[0]
    cost = np.nansum(stats.norm(value, deviation).logpdf(padded[:, fits.constant]), axis=1)
    found = geode_jax.log_density(fits.found, padded)
    np.testing.assert_allclose(found, geode_jax.log_density(fits.plain, x) + cost, rtol=1e-10)
    by_draw = geode_jax.log_density_draws(fits.found, padded)
    np.testing.assert_allclose(by_draw, geode_jax.log_density_draws(fits.plain, x) + cost, rtol=1e-10)

    hidden = fits.padded.copy()
    hidden[:, fits.constant] = hidden[:3, fits.place] = np.nan
    of_constants = geode_jax.condition(fits.found, hidden).marginal(fits.constant)
    np.testing.assert_array_equal(of_constants.mean(), np.broadcast_to(value, (15, value.size)))
    np.testing.assert_allclose(of_constants.std()[0], deviation)
    np.testing.assert_allclose(of_constants.quantile(0.9)[7], value + stats.norm.ppf(0.9) * deviation)
    at = value + 0.3 * deviation + np.zeros((15, 1))
    np.testing.assert_allclose(of_constants.log_prob(at), stats.norm(value, deviation).logpdf(at).sum(axis=1))
    both = geode_jax.condition(fits.found, hidden)
    whole = fits.padded.copy()
    whole[:, fits.constant] = at
    expected = geode_jax.condition(fits.plain, hidden[:, fits.place]).log_prob(fits.rows)
    np.testing.assert_allclose(both.log_prob(whole), expected + of_constants.log_prob(at))
    seen = hidden.copy()
    seen[:, fits.constant] = value
    np.testing.assert_allclose(geode_jax.condition(fits.found, seen).log_prob(whole), expected)
    of_some = geode_jax.condition(fits.found, hidden[:5]).sample(jax.random.key(2), 400)
    drawn = both.sample(jax.random.key(2), 400)[..., fits.constant]
    np.testing.assert_array_equal(of_some[..., fits.constant], drawn[:, :5])
    np.testing.assert_allclose(drawn.std(axis=(0, 1)) / deviation, 1.0, atol=0.05)
    rows = geode_jax.sample(jax.random.key(3), fits.found, 500)
    np.testing.assert_allclose(rows[:, fits.place], geode_jax.sample(jax.random.key(3), fits.plain, 500))
    np.testing.assert_allclose(rows[:, fits.constant].mean(axis=0), value, atol=0.2 * deviation.max())
    np.testing.assert_allclose(rows[:, fits.constant].std(axis=0) / deviation, 1.0, atol=0.15)


def test_the_numpyro_distribution_is_the_same(fits):
    found = PosteriorPredictive(fits.found)
    complete = ~np.isnan(fits.rows).any(axis=1)
    moved = fits.padded[complete].copy()
    moved[:, fits.constant[0]] += 5.0 * fits.found.scale[fits.constant[0]]
    for rows in (fits.padded[complete], moved):
        np.testing.assert_allclose(found.log_prob(rows), geode_jax.log_density(fits.found, rows), rtol=2e-4)
    plain = PosteriorPredictive(fits.plain)
    for one, other in ((found.mean, plain.mean), (found.variance, plain.variance)):
        np.testing.assert_allclose(one[fits.place], other, rtol=1e-5)
    np.testing.assert_allclose(found.mean[fits.constant], fits.padded[0, fits.constant], rtol=1e-6)
    np.testing.assert_allclose(found.variance[fits.constant], fits.found.scale[fits.constant] ** 2, rtol=1e-5)
    rows = found.sample(jax.random.key(3), (400,))
    deviation = fits.found.scale[fits.constant].astype(np.float32)
    spread = (rows[:, fits.constant] - fits.padded[0, fits.constant]).std(axis=0) / deviation
    np.testing.assert_allclose(spread, 1.0, atol=0.15)
    assert jnp.isfinite(jax.grad(lambda x: found.log_prob(x))(fits.padded[complete][0])).all()


def _images(ax, width):
    """Centres of two nodes, (2, width), and their directions between -1 and 1, (directions, 2, width)."""
    canvas = np.asarray(ax.images[0].get_array())[::3]
    images = np.stack([canvas[:, first : first + width] for first in range(0, canvas.shape[1], width + 1)])
    low, high = ax.images[0].get_clim()
    return images[0], (2 * images[1:] - low - high) / (high - low)


def test_pictures_are_of_the_same_nodes(fits):
    axes = Figure().subplots(1, 4)
    plots.cells(axes[0], fits.plain, fits.rows, features=(1, 3))
    plots.cells(axes[1], fits.found, fits.padded, features=tuple(fits.place[[1, 3]]))
    for one, other in zip(axes[1].lines, axes[0].lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())
    with pytest.raises(ValueError, match="features: expected features that vary"):
        plots.cells(axes[1], fits.found, features=(int(fits.place[0]), int(fits.constant[0])))
    plots.dictionary_images(axes[2], fits.plain, (1, fits.place.size), nodes=[0, 1])
    plots.dictionary_images(axes[3], fits.found, (1, fits.padded.shape[1]), nodes=[0, 1])
    (centres, directions), (padded, around) = (
        _images(axes[2], fits.place.size),
        _images(axes[3], fits.padded.shape[1]),
    )
    np.testing.assert_allclose(padded[:, fits.place], centres, rtol=1e-6)
    np.testing.assert_allclose(padded[:, fits.constant], fits.padded[[0, 0]][:, fits.constant], rtol=1e-6)
    np.testing.assert_allclose(around[..., fits.place], directions, atol=1e-5)
    np.testing.assert_allclose(around[..., fits.constant], 0.0, atol=1e-9)


def test_files_keep_them(fits, tmp_path):
    fits.found.save(tmp_path / "posterior.npz")
    jax.tree.map(np.testing.assert_array_equal, geode_jax.Posterior.load(tmp_path / "posterior.npz"), fits.found)
    header, arrays = fits.found.to_archive()
    place = fits.place
    for features in ([0, *place[1:-1], 0], place[1:], [-1, *place[1:]], [*place[:-1], 99]):
        with pytest.raises(ValueError, match=r"features|axis V"):
            geode_jax.Posterior.from_archive(header, {**arrays, "features": np.array(features, np.int64)})


@pytest.mark.parametrize("rank", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_of_classes(rank, tmp_path):
    x = np.concatenate([_rows(70, 9), _rows(70, 9, seed=2)[:, ::-1]])
    labels = np.repeat([0, 1], 70)
    padded, place = _with_constants(x)
    padded[3:9, 0] = np.nan
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
        others[:3, 0], others[3:6, 0] = 1e9, np.nan  # what never varied says nothing
        np.testing.assert_array_equal(
            geode_jax.class_log_probabilities(found, others), geode_jax.class_log_probabilities(plain, rows)
        )
    found.save(tmp_path / "classes.npz")
    back = geode_jax.ClassPosterior.load(tmp_path / "classes.npz")
    jax.tree.map(np.testing.assert_array_equal, back, found)
    header, arrays = found.to_archive()
    for features in ([0, *found.features[1:-1], 0], found.features[1:], [-1, *found.features[1:]], [*place[:-1], 99]):
        with pytest.raises(ValueError, match=r"features|axis V"):
            geode_jax.ClassPosterior.from_archive(header, {**arrays, "features": np.array(features, np.int64)})


def test_novelty_is_the_same():
    x = _rows(60, 3)
    padded = np.column_stack([x, np.full((60, 2), 0.1)])
    options = {"num_trees": 2, "max_rank": 2, "depth": 1, "num_warmup": 10, "num_samples": 10, "random_state": 0}
    plain, found = (geode_jax.GeodeDensity(**options).fit(rows) for rows in (x, padded))
    np.testing.assert_array_equal(found.novelty(padded + 0.1), plain.novelty(np.full((1, 3), 1e3)).repeat(60))
    np.testing.assert_array_equal(found.novelty(padded), plain.novelty(x))


def test_a_response_has_the_unit_that_it_has_without_them():
    x = _rows(60, 3)
    padded = np.column_stack([x, np.full((60, 9), 0.1)])
    options = {"num_trees": 2, "max_rank": 2, "depth": 1, "num_warmup": 10, "num_samples": 10, "random_state": 0}
    plain, found = (geode_jax.GeodeRegressor(**options).fit(rows, x[:, 0] + x[:, 1] ** 2) for rows in (x, padded))
    np.testing.assert_array_equal(found.y_scale_, plain.y_scale_)
    np.testing.assert_array_equal(found.predict(padded[:5]), plain.predict(x[:5]))


@pytest.mark.parametrize("value", [0.1, 5.0])
def test_a_response_that_never_varies_is_predicted_by_its_value(value):
    options = {"num_trees": 2, "max_rank": 2, "depth": 1, "num_warmup": 10, "num_samples": 10, "random_state": 0}
    x = _rows(60, 3)
    model = geode_jax.GeodeRegressor(**options).fit(x, np.full(60, value))
    assert model.y_scale_ == 1.0
    mean, deviation = model.predict(x[:4], return_std=True)
    np.testing.assert_allclose(mean, value)
    assert (deviation > 0.0).all()
    lower, upper = model.predict_interval(x[:4], 0.9)
    assert (lower < value).all()
    assert (value < upper).all()


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


def test_a_view_of_some_features_is_as_the_array_of_them():
    x, _ = _with_constants(_rows(40, 6))
    frame = learn_frame(x)
    expected, view = to_model(x, frame, np.dtype(np.float32)), view_in_model(x, frame, np.dtype(np.float32))
    rows, some = np.array([3, 1, 7]), np.array([0, 4])
    for index in (slice(3, 9), rows, np.arange(40) % 3 == 0, np.ix_(rows, some), (slice(None), some)):
        np.testing.assert_array_equal(view[index], expected[index])
    np.testing.assert_array_equal(view[rows, 1:3], expected[rows, 1:3])
    assert view[3:9].flags.c_contiguous  # sums of an array in another order are rounded otherwise
