"""Far fewer rows than features: everything is as in coordinates of all features, in a fraction of the memory."""

import dataclasses
import functools
import gc
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import geode_jax
from geode_jax import DictionarySettings, NoiseCovariance, SamplerSettings, SharedSpan
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.fitting.memory import bytes_needed
from geode_jax.forest import choices, dictionaries, trees
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import plan_of
from geode_jax.interop.numpyro import PosteriorPredictive
from geode_jax.learning import evidence, feature_noise
from geode_jax.learning.candidate_search import search_candidates
from geode_jax.learning.evidence import cross_fitted_evidence, statistics_at, statistics_at_node
from geode_jax.learning.feature_noise import NoiseOptions, learn_feature_scales
from geode_jax.learning.shared_span import learn_dictionaries, try_spans
from geode_jax.learning.subspaces import SubspaceOptions
from geode_jax.math import rows_in_space
from geode_jax.math.rows_in_space import RowsInSpace, Space, _whitened, observe_in_space
from geode_jax.math.whitening import observe_rows
from geode_jax.model.dictionary import spread_out
from geode_jax.partition.metis import Partition, partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.predict import rows as rows_module
from geode_jax.predict.conditional_moments import _told
from geode_jax.predict.distance import in_float64
from geode_jax.predict.rows import node_in_features
from geode_jax.rows import row_space
from geode_jax.rows import training as rows_of_training
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.row_space import axes_of, is_kept_in_space, principal_coordinates
from geode_jax.rows.training import Training

SAMPLER = SamplerSettings(num_warmup=20, num_samples=10, num_chains=2, segment_length=10)
NUM_ROWS, NUM_FEATURES = 40, 120


def _rows(number, seed):
    """Rows near a bent surface, in units far from 1; every `seed` gives other rows of the same surface."""
    rng, axes = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(6, NUM_FEATURES))
    at = rng.normal(size=(number, 2))
    bent = np.column_stack([at, at**2, np.sin(2.0 * at)])
    return 3.0 + 2.0 * (bent @ axes + 0.3 * rng.normal(size=(number, NUM_FEATURES)))


def _settings(span, **options):
    return DictionarySettings(
        num_trees=2, max_rank=3, depth=2, min_cell_size=5, noise_covariance=None, shared_span=span, **options
    )


@pytest.fixture(scope="module", autouse=True)
def _small_dictionaries_too():
    """Small dictionaries are kept in coordinates too."""
    with mock.patch.multiple(row_space, LARGE_BYTES=0, LEAST_SAVING=0):
        yield


def _smooth_rows(number, seed):
    """The same rows with noise that is smooth over the features."""
    lag = np.subtract.outer(np.arange(NUM_FEATURES), np.arange(NUM_FEATURES))
    root = np.linalg.cholesky(np.exp(-np.square(lag / 6.0)) + 1e-2 * np.eye(NUM_FEATURES))
    return _rows(number, seed) + np.random.default_rng(10 + seed).normal(size=(number, NUM_FEATURES)) @ root.T


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """How a wide posterior is fitted, and to which rows."""

    settings: DictionarySettings
    rows: np.ndarray


@functools.cache
def _case(name):
    if name == "noise":
        return Case(dataclasses.replace(_settings(None), noise_covariance=NoiseCovariance()), _smooth_rows(NUM_ROWS, 0))
    return Case(_settings(SharedSpan(3) if name == "span" else None), _rows(NUM_ROWS, 0))


@pytest.fixture(scope="module", params=["no span", "noise", pytest.param("span", marks=pytest.mark.slow)])
def case(request):
    return _case(request.param)


@pytest.fixture(scope="module")
def wide(case):
    """A fit in float64, of rows in their own space or in a part of it, or with a noise covariance there."""
    return _fitted(case)


@functools.cache
def _fitted(case):
    found = geode_jax.fit(jax.random.key(0), case.rows, dictionary=case.settings, sampler=SAMPLER, dtype="float64")
    assert found.row_space.shape == (NUM_FEATURES, NUM_ROWS - 1 if case.settings.shared_span is None else 3)
    assert (found.noise_deviation is None) == (case.settings.noise_covariance is None)
    return found


@pytest.fixture(scope="module")
def hidden():
    """Rows with missing features: any, all but one or few, none, all, and a pattern that many share."""
    rng = np.random.default_rng(5)
    rows = _rows(46, 1)
    rows[:34, 60:] = np.nan
    rows[34:40][rng.random((6, NUM_FEATURES)) < 0.4] = np.nan
    rows[40, 1:] = np.nan
    rows[41, 7:] = np.nan
    rows[43] = np.nan
    rows[44, 3] = np.nan
    rows[45, 80:] = np.nan
    rows[45] *= 1e3  # far from the data
    return rows


@pytest.mark.parametrize("span", [None, SharedSpan(3), SharedSpan()])
@pytest.mark.parametrize("cross_fit", [geode_jax.CrossFit(), pytest.param(None, marks=pytest.mark.slow)])
def test_stage_one_is_that_of_all_features(span, cross_fit, monkeypatch):
    rng = np.random.default_rng(0)
    x = 3.0 + rng.normal(size=(40, 4)) @ rng.normal(size=(4, 120)) + 0.1 * rng.normal(size=(40, 120))
    settings = _settings(span, cross_fit=cross_fit, num_candidates=2)

    def learn():
        return geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings, dtype="float64")

    used = mock.Mock(wraps=row_space.principal_coordinates)
    for module in (dictionaries, trees):
        monkeypatch.setattr(module, "principal_coordinates", used)
    chosen = mock.Mock(wraps=choices.try_spans)
    monkeypatch.setattr(choices, "try_spans", chosen)
    found = learn()
    assert used.call_count == 2  # for trees, and divided by the noise scales
    tried = [120] if span == SharedSpan() and cross_fit is not None else []
    assert [call.args[0].num_features for call in chosen.call_args_list] == tried  # the noise lives in R^D
    for module in (dictionaries, trees):
        monkeypatch.setattr(module, "uses_row_space", lambda *_: False)
    expected = learn()
    assert used.call_count == 2
    assert expected.row_space is None
    assert (found.found.rank, found.found.span_rank) == (expected.found.rank, expected.found.span_rank)
    with jax_settings(np.float64):
        ours = spread_out(found.dictionary, found.row_space)
    np.testing.assert_array_equal(ours.ranks, expected.dictionary.ranks)
    np.testing.assert_array_equal(found.statistics.node, expected.statistics.node)
    for mine, other in zip(jax.tree.leaves(found.borrowed), jax.tree.leaves(expected.borrowed), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
    np.testing.assert_allclose(found.statistics.residual, expected.statistics.residual, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.statistics.squared, expected.statistics.squared, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ours.centres, expected.dictionary.centres, atol=1e-10)
    bases = (np.asarray(one.bases).reshape(-1, 120, ours.max_rank) for one in (ours, expected.dictionary))
    for basis, theirs in zip(*bases, strict=True):
        np.testing.assert_allclose(np.square(basis.T @ theirs).sum(), np.square(theirs).sum(), rtol=1e-8)


def _filled(num_folds):
    """Rows of which some were filled, for every fold in another way, and a tree of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)) @ rng.normal(size=(4, 240)) + 0.3 * rng.normal(size=(40, 240))
    is_observed = np.ones(x.shape, dtype=bool)
    is_observed[rng.permutation(40)[:12]] = rng.random((12, 240)) < 0.6
    folds = assign_folds(40, num_folds, rng)
    training = Training(x, 240, folds, is_observed)
    noise = 0.2 * rng.normal(size=(num_folds, 12, 240)) * ~is_observed[training.partial]
    training = training._replace(without=list(x[training.partial] + noise) if num_folds > 2 else None)
    return training, partition_rows(x, neighbour_graph(x, 5, 0), 2, 5, 0)


@pytest.mark.parametrize("num_folds", [2, 5])
def test_filled_rows_in_their_row_space(num_folds, monkeypatch):
    """What is learned from filled rows in coordinates is what is learned from them in R^D."""
    training, partition = _filled(num_folds)
    inside, options = training.in_row_space(20), SubspaceOptions(3, 0, 2.0)
    assert inside.x.shape == (40, 39 + 12 * (num_folds - 1) * (num_folds > 2))
    ours, theirs = (learn_dictionaries(own, partition, options) for own in (inside, training))
    np.testing.assert_array_equal(ours.ranks, theirs.ranks)
    is_needed = np.zeros(ours.bases.shape[:2], dtype=bool)
    is_needed[:, [0, 2]] = True
    mapped = ours.in_features(inside.axes, is_needed)
    assert not mapped.bases[:, 1].any()
    np.testing.assert_allclose(mapped.centres[is_needed], theirs.centres[is_needed], atol=1e-10)
    for mine, other in zip(mapped.bases[is_needed], theirs.bases[is_needed], strict=True):
        np.testing.assert_allclose(mine @ mine.T, other @ other.T, atol=1e-8)
    # of some rows, at several nodes and at one, in many blocks
    monkeypatch.setattr(evidence, "RESIDUAL_NUMBERS", 3 * inside.x.shape[1] * 5)
    monkeypatch.setattr(evidence, "PRODUCT_NUMBERS", 3 * 5 * 50)
    rows, nodes = np.arange(5, 40), np.array([0, 2, 4])
    found, expected = (
        statistics_at(own, rows, subspaces, nodes) for own, subspaces in ((inside, ours), (training, theirs))
    )
    alone = statistics_at_node(inside, rows, ours, 2)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-8)
    np.testing.assert_allclose(found[1].sum(axis=2), expected[1].sum(axis=2), rtol=1e-8)
    for one, several in zip(alone, found, strict=True):
        np.testing.assert_allclose(one, several[1], rtol=1e-10)
    found, expected = (
        cross_fitted_evidence(own, partition, subspaces) for own, subspaces in ((inside, ours), (training, theirs))
    )
    np.testing.assert_allclose(found.log_likelihood(), expected.log_likelihood(), rtol=1e-8)
    found, expected = (
        search_candidates(own, training.partial, partition, subspaces, 2)
        for own, subspaces in ((inside, ours), (training, theirs))
    )
    np.testing.assert_array_equal(found, expected)
    without = np.zeros(40)
    found, expected = (try_spans(own, partition, options, without) for own in (inside, training))
    np.testing.assert_allclose(found.gain, expected.gain, rtol=1e-8)
    span = found.span.in_features(inside.axes)
    np.testing.assert_allclose(span.centres, expected.span.centres, atol=1e-10)
    for mine, other in zip(span.bases, expected.span.bases, strict=True):
        np.testing.assert_allclose(mine @ mine.T, other @ other.T, atol=1e-8)
    assert training.in_row_space(1) is training


def test_fits_of_filled_rows(monkeypatch):
    """A fit with missing values makes the same choices in coordinates and in R^D.

    What is filled in is drawn along directions whose signs may differ.
    """
    rng = np.random.default_rng(1)
    x = 3.0 + rng.normal(size=(40, 4)) @ rng.normal(size=(4, 240)) + 0.1 * rng.normal(size=(40, 240))
    x[:12][rng.random((12, 240)) < 0.4] = np.nan
    settings = dataclasses.replace(_settings(SharedSpan()), max_rank=None)

    def learn():
        return geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings, dtype="float64")

    used = mock.Mock(wraps=row_space.principal_coordinates)
    monkeypatch.setattr(rows_of_training, "principal_coordinates", used)
    found = learn()
    assert [len(call.args[0]) for call in used.call_args_list][-2:] == [40, 40 + 12 * 4]  # of fills, and of choices
    monkeypatch.setattr(rows_of_training, "uses_row_space", lambda *_: False)
    expected = learn()
    for ours, theirs in zip(found.found.decisions, expected.found.decisions, strict=True):
        assert ours.taken == theirs.taken
        np.testing.assert_allclose(ours.gain or 0.0, theirs.gain or 0.0, rtol=0.05)
    for ours, theirs in ((found.statistics, expected.statistics), (found.partial, expected.partial)):
        np.testing.assert_allclose(*(np.asarray(one.residual).mean() for one in (ours, theirs)), rtol=0.02)


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("part", [None, 3])
def test_axes_hold_the_rows_and_their_mean(mean, part):
    """Whatever the rank of the rows, and wherever their mean is."""
    rng = np.random.default_rng(0)
    x = mean + rng.normal(size=(20, 8)) @ rng.normal(size=(8, 90))
    x -= 0.0 if mean else x.mean(axis=0)
    space = principal_coordinates(x)
    assert space.coordinates.shape == (20, 8)
    turn = None if part is None else np.linalg.qr(rng.normal(size=(8, part)))[0]
    axes = axes_of(x, space, turn)
    assert axes.matrix.shape == (90, (part or 8) + (mean > 0.0))
    np.testing.assert_allclose(axes.matrix.T @ axes.matrix, np.eye(axes.matrix.shape[1]), atol=1e-12)
    np.testing.assert_allclose(axes.matrix @ axes.origin, x.mean(axis=0), atol=1e-12)
    coordinates = space.coordinates if turn is None else space.coordinates @ turn @ turn.T
    turned = axes.turned(coordinates.T)
    off = (x - x.mean(axis=0)) @ axes.matrix[:, : len(turned)]
    np.testing.assert_allclose(off, turned.T, atol=1e-10)


PREDICTIONS = {
    "log_density": lambda it, x: geode_jax.log_density(it, x),
    "log_density_draws": lambda it, x: geode_jax.log_density_draws(it, x[36:], num_draws=4),
    "impute": lambda it, x: geode_jax.impute(it, x),
    "impute_mean": lambda it, x: geode_jax.impute_mean(it, x),
    "impute_draws": lambda it, x: geode_jax.impute_draws(jax.random.key(3), it, x, 2),
    "std": lambda it, x: geode_jax.condition(it, x).std(),
    "some features": lambda it, x: geode_jax.condition(it, x).marginal([70, 3]).quantile([0.1, 0.6]),
    "log_prob": lambda it, x: geode_jax.condition(it, x[34:45]).log_prob(_rows(46, 1)[34:45]),
    "log_prob of some": lambda it, x: geode_jax.condition(it, x).marginal([70, 3]).log_prob(_rows(46, 1)[:, [70, 3]]),
    "intrinsic_dimension": lambda it, x: geode_jax.intrinsic_dimension(it, x),
    "sample": lambda it, _: geode_jax.sample(jax.random.key(4), it, 5),
}


# The others share their programs' parts with these.
_BY_DEFAULT = {"no span": ("impute", "intrinsic_dimension", "sample"), "noise": ("log_density", "log_prob")}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[] if name in _BY_DEFAULT.get(case, ()) else pytest.mark.slow)
        for case in ("no span", "noise", "span")
        for name in PREDICTIONS
    ],
    indirect=["case"],
)
def test_predictions_are_those_of_all_features(wide, hidden, name):
    dense = wide.spread_out()
    assert dense.dictionary.bases.shape[2] == NUM_FEATURES
    found, expected = (PREDICTIONS[name](one, hidden) for one in (wide, dense))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_float32_loses_no_digits(wide, hidden):
    """Errors of float32 are far below a nat, and below a hundredth of a standard deviation."""

    def cast(leaf):
        if leaf.dtype != np.float64:
            return leaf
        return jnp.asarray(leaf, np.float32) if isinstance(leaf, jax.Array) else leaf.astype(np.float32)

    parts = jax.tree.map(cast, (wide.dictionary, wide.draws, wide.adaptation, wide.row_space))
    names = "dictionary", "draws", "adaptation", "row_space"
    single = dataclasses.replace(wide, **dict(zip(names, parts, strict=True)))
    x = np.concatenate([hidden[30:45], _rows(5, 2)])
    np.testing.assert_allclose(geode_jax.log_density(single, x), geode_jax.log_density(wide, x), atol=0.01)
    ours, theirs = (geode_jax.impute(one, x) for one in (single, wide))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=0.01 * wide.scale.mean())
    assert in_float64(single).row_space.dtype == np.float64


def test_features_are_worked_on_in_parts(monkeypatch):
    """Parts that do not divide the features that are seen, of rows with different numbers of them."""
    rng = np.random.default_rng(0)
    space = np.linalg.qr(rng.normal(size=(50, 3)))[0].astype(np.float32)
    monkeypatch.setattr(rows_in_space, "NUMBERS_AT_ONCE", 7 * 3)
    for num_rows in (1, 6, 9):
        mask = (rng.random((num_rows, 50)) < 0.5).astype(np.float32)
        x = rng.normal(size=(num_rows, 50)).astype(np.float32)
        expected = np.einsum("nD,Dp,Dq->npq", mask, space, space)
        assert max(mask.sum(axis=1)) <= 40
        seen = jax.jit(lambda *rest: observe_in_space(*rest, num_seen=40))(x, mask, Space(jnp.asarray(space)))
        np.testing.assert_allclose(seen.gram, expected, atol=1e-5)


def test_files(wide, tmp_path):
    """A posterior's file, in the version that has a row space; one of another size is refused."""
    path = tmp_path / "wide.npz"
    wide.save(path)
    assert eqx.tree_equal(geode_jax.Posterior.load(path), wide)
    header, arrays = wide.to_archive()
    assert header["version"] == (2 if wide.noise_deviation is None else 4)
    assert wide.spread_out().to_archive()[0]["version"] == 1
    with pytest.raises(ValueError, match="coordinates" if wide.noise_deviation is None else "along axis p"):
        geode_jax.Posterior.from_archive(header, arrays | {"row_space": arrays["row_space"][:, 1:]})
    rest = {name: array for name, array in arrays.items() if name != "row_space"}
    with pytest.raises(ValueError, match="coordinates"):
        geode_jax.Posterior.from_archive({**header, "arrays": sorted(rest)}, rest)
    more = {**arrays, "noise_root": np.eye(NUM_FEATURES)}
    with pytest.raises(ValueError, match="'noise_root' is of all features"):
        geode_jax.Posterior.from_archive({**header, "arrays": sorted(more)}, more)
    if wide.noise_deviation is not None:
        growing = arrays | {"noise_deviation": wide.noise_deviation[::-1]}
        with pytest.raises(ValueError, match="none above the one before it"):
            geode_jax.Posterior.from_archive(header, growing)


def test_few_features_seen_in_noise_of_any_shape():
    """Fewer than the space has dimensions: what is not seen counts for nothing, also in float32."""
    rng = np.random.default_rng(0)
    axes, deviation = np.linalg.qr(rng.normal(size=(90, 20)))[0], np.append(np.geomspace(20.0, 1.06, 15), np.ones(5))
    deviation /= np.exp(np.log(deviation).sum() / 90)
    mask = (rng.random((6, 90)) < 0.1).astype(float)
    x = rng.normal(size=(6, 90))
    basis = np.append(np.linalg.qr(rng.normal(size=(20, 3)))[0], np.zeros((1, 3)), axis=0)
    found = []
    for dtype in (np.float32, np.float64):
        with jax_settings(dtype):
            own = [jnp.asarray(values, dtype) for values in (x, mask)]
            space = Space.of(jnp.asarray(axes, dtype), deviation)
            assert space.root.num_axes == 15
            seen = observe_in_space(*own, space, num_seen=30)
            found.append(
                [
                    np.asarray(leaf)
                    for leaf in (*seen.products(jnp.zeros(21, dtype), jnp.asarray(basis, dtype)), seen.log_det)
                ]
            )
    shape = deviation * np.eye(20)
    root = np.eye(90) * np.exp(-np.log(deviation).sum() / 70) @ (np.eye(90) - axes @ axes.T) + axes @ shape @ axes.T
    for row in range(6):
        some = mask[row] > 0
        covariance = (root @ root)[np.ix_(some, some)]
        along = (axes @ shape @ basis[:-1])[some]
        expected = along.T @ np.linalg.solve(covariance, along)
        np.testing.assert_allclose(found[1][0][row], expected, atol=1e-9)
        np.testing.assert_allclose(found[0][0][row], expected, atol=1e-5)
        inverse = np.linalg.solve(covariance, x[row, some])
        np.testing.assert_allclose(found[1][1][row], along.T @ inverse, atol=1e-8)
        assert found[1][2][row] == pytest.approx(x[row, some] @ inverse, abs=1e-8)
        for single, atol in ((found[1], 1e-9), (found[0], 1e-4)):
            assert single[3][row] == pytest.approx(np.linalg.slogdet(covariance)[1], abs=atol)


@pytest.mark.slow
def test_checkpoints(case, wide, tmp_path):
    """A fit goes on from the forest that was saved."""
    options = {"dictionary": wide.dictionary_settings, "sampler": SAMPLER, "dtype": "float64", "checkpoint": tmp_path}
    x, key = case.rows, jax.random.key(0)
    first = geode_jax.fit(key, x, **options)
    with mock.patch("geode_jax.fitting.single.grow_forest", side_effect=AssertionError("it was saved")):
        again = geode_jax.fit(key, x, **options)
    assert eqx.tree_equal(first, again)
    assert eqx.tree_equal(wide.draws, again.draws)
    forest = geode_jax.learn_forest(key, x, dictionary=wide.dictionary_settings)
    assert eqx.tree_equal(Forest.from_archive(*forest.to_archive()), forest)
    drawn = geode_jax.sample_posterior(key, forest, sampler=SAMPLER)
    assert drawn.row_space is not None
    held_out, of_spread = (geode_jax.held_out_log_density(forest, one) for one in (drawn, drawn.spread_out()))
    np.testing.assert_array_equal(held_out, of_spread)


@pytest.mark.parametrize(
    "case", ["no span", *(pytest.param(it, marks=pytest.mark.slow) for it in ("noise", "span"))], indirect=True
)
def test_devices_share_the_rows_of_predictions(wide, hidden):
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    several = wide.replicated(mesh)
    if jax.device_count() > 1:
        assert len(several.row_space.devices()) == 2
    x = np.concatenate([_rows(9, 2), hidden[30:]])
    np.testing.assert_allclose(geode_jax.log_density(several, x), geode_jax.log_density(wide, x), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(geode_jax.impute_mean(several, x), geode_jax.impute_mean(wide, x), rtol=1e-9)


@pytest.mark.slow
def test_numpyro_predictive(wide):
    """Also its derivative, where a row is in the space."""
    ours, theirs = (PosteriorPredictive(one) for one in (wide, wide.spread_out()))
    x = jnp.asarray(_rows(4, 2), jnp.float32)
    np.testing.assert_allclose(ours.log_prob(x), theirs.log_prob(x), rtol=1e-4)
    gradients = (jax.grad(lambda row, one=one: one.log_prob(row))(x[0]) for one in (ours, theirs))
    np.testing.assert_allclose(*gradients, atol=1e-3)
    inside = wide.shift + wide.scale * np.asarray(wide.row_space).sum(axis=1)
    assert np.isfinite(jax.grad(ours.log_prob)(jnp.asarray(inside, jnp.float32))).all()
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.variance, theirs.variance, rtol=1e-3)
    key = jax.random.key(0)
    np.testing.assert_allclose(ours.sample(key, (3,)), theirs.sample(key, (3,)), rtol=1e-4, atol=1e-3)


def test_nodes_in_features(wide):
    for features in (None, [5, 2]):
        pairs = (node_in_features(one, 1, 2, features) for one in (wide, wide.spread_out()))
        for mine, other in zip(*pairs, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("span", [None, SharedSpan(2)])
def test_classes(span, monkeypatch, tmp_path):
    """Every class has a space of its own, with its mean; within a span common to all classes none has."""
    x = np.concatenate([_rows(38, 0), 1.0 + _rows(22, 1)])
    labels = np.repeat([0, 1], [38, 22])
    sampler = SamplerSettings(num_warmup=10, num_samples=5)
    options = {"dictionary": _settings(span), "sampler": sampler, "dtype": "float64"}
    found = geode_jax.fit_classes(jax.random.key(0), x, labels, **options)
    assert (found.reduction is None) == (span is None)
    if span is not None:
        assert all(member.row_space is None for member in found.members)
        return
    assert [member.row_space.shape for member in found.members] == [(120, 38), (120, 22)]
    dense = dataclasses.replace(found, members=tuple(member.spread_out() for member in found.members))
    rows = _rows(4, 3)
    rows[2:, 50:] = np.nan
    for module in (dictionaries, trees):
        monkeypatch.setattr(module, "uses_row_space", lambda *_: False)
    apart = geode_jax.fit_classes(jax.random.key(0), x, labels, **options)
    assert all(member.row_space is None for member in apart.members)
    for density in (geode_jax.class_log_densities, geode_jax.class_log_probabilities):
        np.testing.assert_allclose(density(found, rows), density(dense, rows), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(density(found, rows), density(apart, rows), rtol=1e-5, atol=1e-5)
    found.save(tmp_path / "classes.npz")
    assert eqx.tree_equal(geode_jax.ClassPosterior.load(tmp_path / "classes.npz"), found)


@pytest.mark.slow
def test_a_tiny_class_within_a_common_span():
    """Two rows and four coordinates: the class's rows are few even there."""
    x, labels = _rows(100, 0), np.repeat([0, 1], [98, 2])
    sampler = SamplerSettings(num_warmup=5, num_samples=3)
    settings = dataclasses.replace(_settings(SharedSpan(4)), max_rank=1)
    found = geode_jax.fit_classes(jax.random.key(0), x, labels, dictionary=settings, sampler=sampler)
    assert found.reduction is not None
    assert all(member.dictionary.centres.shape[-1] == 4 for member in found.members)
    rows = _rows(3, 3)
    rows[2, 50:] = np.nan
    assert np.isfinite(geode_jax.class_log_densities(found, rows)).all()


def test_memory_that_is_told():
    """Of dictionaries, without each fold and of all rows, and of the space."""
    settings = dataclasses.replace(_settings(None), num_trees=8)
    forest = geode_jax.learn_forest(jax.random.key(0), _rows(NUM_ROWS, 0), dictionary=settings)
    needed = bytes_needed(plan_of(_rows(NUM_ROWS, 0), settings), SAMPLER, 4)["dictionaries"]
    kept = forest.dictionary.bases.nbytes + forest.dictionary.centres.nbytes
    assert needed == pytest.approx(6 * kept + forest.row_space.nbytes, rel=0.1)


def test_small_dictionaries_have_all_features():
    """Coordinates are for what would be large, and is much less in them."""
    with mock.patch.multiple(row_space, LARGE_BYTES=2**28, LEAST_SAVING=4):
        assert is_kept_in_space(100_000, 999, 1016, 60, 4)
        assert not is_kept_in_space(2000, 99, 63, 20, 4)
        assert not is_kept_in_space(20_000, 9999, 2040, 50, 4)
        x, settings = _rows(NUM_ROWS, 0), _settings(None)
        forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings, dtype="float64")
        needed = bytes_needed(plan_of(x, settings), SAMPLER, 8)["dictionaries"]
    assert forest.row_space is None
    in_space = geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings, dtype="float64")
    with jax_settings(np.float64):
        dense = spread_out(in_space.dictionary, in_space.row_space)
    for ours, theirs in zip(jax.tree.leaves(dense), jax.tree.leaves(forest.dictionary), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    kept = forest.dictionary.bases.nbytes + forest.dictionary.centres.nbytes
    assert kept < needed < 6 * kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_features", [50, 64, 200])
@pytest.mark.parametrize("noise", [1e-5, 0.3])
def test_principal_coordinates(dtype, num_features, noise):
    """Distances are preserved, however small, and the rows are left as they are, few features in one part too."""
    rng = np.random.default_rng(0)
    x = (5.0 + rng.normal(size=(20, 1)) * rng.normal(size=num_features)).astype(dtype)
    x += (noise * rng.normal(size=x.shape)).astype(dtype)
    before = x.copy()
    found = principal_coordinates(x)
    np.testing.assert_array_equal(x, before)
    assert found.coordinates.shape == (20, 19)
    centred = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    apart, ours = (np.linalg.norm(it[:, None] - it, axis=2) for it in (centred, found.coordinates.astype(np.float64)))
    np.testing.assert_allclose(ours, apart, rtol=1e-5 if dtype is np.float32 else 1e-10, atol=1e-6)
    least = np.linalg.svd(centred, compute_uv=False)[:19]
    np.testing.assert_allclose(np.linalg.norm(found.coordinates, axis=0), least, rtol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_few_directions(dtype):
    """What is left of the other directions is rounding error, which is no direction."""
    rng = np.random.default_rng(0)
    x = (rng.integers(-3, 4, size=(20, 3)) @ rng.integers(-3, 4, size=(3, 90))).astype(dtype)
    assert principal_coordinates(x).coordinates.shape == (20, 3)


@pytest.mark.parametrize(
    ("num_rows", "num_features"),
    [(20, 50), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((2, 4), (3, 6), (20, 40)))],
)
def test_few_features(num_rows, num_features):
    """As many features as twice the rows; a fit in float64 of few features is that of one part."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 1)) * rng.normal(size=num_features) + 0.1 * rng.normal(size=(num_rows, num_features))
    options = {"dictionary": _settings(None), "sampler": SamplerSettings(num_warmup=3, num_samples=2)}
    found = geode_jax.fit(jax.random.key(0), x, **options, dtype="float64")
    assert found.num_features == num_features
    with mock.patch.object(row_space, "PANEL", 3):
        again = geode_jax.fit(jax.random.key(0), x, **options, dtype="float64")
    np.testing.assert_allclose(geode_jax.log_density(again, x), geode_jax.log_density(found, x), rtol=1e-6)


def test_scales_are_judged_as_with_all_features(monkeypatch):
    """The likelihood of noise scales in coordinates is that in R^D, of all features."""
    x = _rows(NUM_ROWS, 0)
    cells = Partition(0, (np.arange(20), np.arange(20, 40)))
    options = NoiseOptions(3, 5, 0.05, 4, 0)
    found = learn_feature_scales(x, None, cells, options)
    monkeypatch.setattr(feature_noise, "uses_row_space", lambda *_: False)
    expected = learn_feature_scales(x, None, cells, options)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-10)
    np.testing.assert_allclose(found.log_density, expected.log_density, rtol=1e-8)


def test_what_is_seen_may_be_told_from_anywhere():
    """Statistics do not depend on the coordinates that they are taken about, whatever the shape of the noise."""
    rng = np.random.default_rng(0)
    deviation = np.array([4.0, 2.5, 1.5, 1.0, 1.0, 1.0])
    deviation /= np.exp(np.log(deviation).sum() / 30)
    with jax_settings(np.float64):
        axes = np.linalg.qr(rng.normal(size=(30, 6)))[0]
        x, mask = rng.normal(size=(4, 30)), (rng.random((4, 30)) < 0.6).astype(float)
        centre, basis = np.append(rng.normal(size=6), 0.0), np.linalg.qr(rng.normal(size=(7, 2)))[0]
        basis[-1] = 0.0
        axes, x, mask, centre, basis = map(jnp.asarray, (axes, x, mask, centre, basis))
        seen = jax.jit(lambda *rest: observe_in_space(*rest, num_seen=30))(x, mask, Space(axes))

        def about(own, space):
            error = mask * (x - own @ axes.T)
            return RowsInSpace(space, mask, seen.gram, own, error @ axes, jnp.sum(jnp.square(error), axis=1))

        elsewhere = seen.own + rng.normal(size=(4, 6))
        expected = observe_rows(x, mask, None, num_seen=30).statistics(axes @ centre[:-1], axes @ basis[:-1])
        for rows in (seen, about(elsewhere, Space(axes))):
            for ours, theirs in zip(rows.statistics(centre, basis), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-7)
        space = Space.of(axes, deviation)
        near, far = (_whitened(about(own, space), space.root) for own in (seen.own, elsewhere))
        assert near.given.told.shape == (4, 3, 6)
        noise = mask[1] * rng.normal(size=30)
        found, expected = (
            (rows.statistics(centre, basis), _told(rows, jnp.asarray(1), centre, basis, noise)) for rows in (far, near)
        )
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_large_signals_take_float64(wide, hidden):
    """Rows with missing features, where float32 would take rounding errors for what is seen of a direction."""
    louder = wide.draws.neg_log_u + (25.0 - wide.draws.neg_log_u.max())

    def single(leaf):
        return leaf.astype(np.float32) if leaf.dtype == np.float64 and isinstance(leaf, jax.Array) else leaf

    loud = eqx.tree_at(lambda it: it.draws.neg_log_u, wide, louder)
    in_float32 = jax.tree.map(single, loud)
    assert in_float32.dtype == np.float32
    found, expected = (geode_jax.log_density(one, hidden[:42]) for one in (in_float32, loud))
    np.testing.assert_allclose(found, expected, atol=0.02)


# Last of every case, as they drop what is compiled.


def test_nodes_ranked_by_few_directions(wide, hidden, monkeypatch, fresh_programs):
    """Rows rank the nodes by their leading directions where there are many."""
    monkeypatch.setattr("geode_jax.predict.nodes.SCREEN_RANK", 1)
    found, expected = (geode_jax.log_density(one, hidden[34:], num_candidates=2) for one in (wide, wide.spread_out()))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_the_ranking_is_kept_as_long_as_the_dictionary(wide, monkeypatch):
    """And the dictionary, which is that of all features in a space, is not copied."""
    gc.collect()
    before = len(rows_module._KEPT)
    with jax_settings(np.float64):
        own = eqx.tree_at(lambda it: it.dictionary.bases, wide, jnp.array(wide.dictionary.bases))
    assert rows_module.nodes_in_features(own).ranking is None  # few directions
    monkeypatch.setattr("geode_jax.predict.nodes.SCREEN_RANK", 1)
    found = rows_module.nodes_in_features(own)
    assert found.dictionary is own.dictionary
    assert (found.ranking is None) == (wide.noise_deviation is None)
    assert rows_module.nodes_in_features(own).ranking is found.ranking
    del own, found
    gc.collect()
    assert len(rows_module._KEPT) == before
    jax.clear_caches()  # what was traced with one direction


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-2, 1e-3])
def test_noise_of_very_different_deviations_in_float32(noise):
    """Along axes of the space the noise is some hundred times that outside: few features do not tell most of it."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=(24, 2))
    x = np.tanh(z) @ rng.normal(size=(2, 70)) + 0.3 * np.square(z) @ rng.normal(size=(2, 70))
    x += noise * (rng.normal(size=(24, 2)) @ rng.normal(size=(2, 70)) + rng.normal(size=(24, 70)))
    posterior = geode_jax.fit(
        jax.random.key(0),
        x,
        dictionary=geode_jax.DictionarySettings(num_trees=1, depth=2, max_rank=3),
        sampler=geode_jax.SamplerSettings(num_warmup=4, num_samples=4),
    )
    assert posterior.noise_deviation.max() > 100.0 * posterior.noise_deviation.min()
    rows = np.full((6, 70), np.nan)
    for row, number in zip(rows, (1, 1, 2, 3, 5, 20), strict=True):
        shown = rng.permutation(70)[:number]
        row[shown] = x[0, shown]
    found, precise = (geode_jax.log_density(one, rows) for one in (posterior, in_float64(posterior)))
    np.testing.assert_allclose(found, precise, atol=1e-3)
    (mean, deviation), (expected, width) = (
        geode_jax.condition(one, rows).mean_and_std() for one in (posterior, in_float64(posterior))
    )
    hidden = np.isnan(rows)
    np.testing.assert_allclose((mean - expected)[hidden] / width[hidden], 0.0, atol=1e-3)
    np.testing.assert_allclose(deviation[hidden], width[hidden], rtol=1e-3)
