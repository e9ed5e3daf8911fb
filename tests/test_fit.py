"""The whole pipeline: units, seeds, types, shapes, tracing, saving."""

import dataclasses
import functools
import pickle
import warnings
import zipfile
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest
from conftest import DICTIONARY, SAMPLER
from scipy import stats

import geode_jax
from geode_jax.fitting import memory
from geode_jax.forest.plan import Plan
from geode_jax.gibbs import chain as chain_module
from geode_jax.gibbs import rank, run
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Adaptation, Draw
from geode_jax.model.found import Found
from geode_jax.model.state import NodeSums
from geode_jax.model.tree import Tree, tree_from_mask

TINY = geode_jax.SamplerSettings(num_warmup=10, num_samples=10, segment_length=10)


def _tiny(x, key=0, **settings):
    options = {"num_trees": 1, **settings}
    return geode_jax.fit(jax.random.key(key), x, dictionary=geode_jax.DictionarySettings(**options), sampler=TINY)


def _shared(x):
    """A fit that shares its compiled sampler with other tests, if `x` has 65 to 128 rows."""
    return geode_jax.fit(jax.random.key(0), x, dictionary=DICTIONARY, sampler=SAMPLER)


def _expected(x):
    """:func:`_shared`, of float32, once for equal rows."""
    return _of_bytes(x.tobytes(), x.shape)


@functools.cache
def _of_bytes(values, shape):
    return _shared(np.frombuffer(values, np.float32).reshape(shape))


@pytest.mark.slow
def test_scaling_and_moving_the_data_changes_only_the_units(data):
    """fit(c Y + t) has the same posterior in the new units: same draws, log density less D log c."""
    key = jax.random.key(3)
    options = {"dictionary": DICTIONARY, "sampler": SAMPLER, "dtype": "float64"}
    base = geode_jax.fit(key, data, **options)
    rows = data[:9] + 0.3
    # A factor of 2^k is exact. Others round, and rounding may flip the acceptance of a single draw now and then, after
    # which the chains, which share their randomness, come together again.
    for factor, offset, tolerance in ((8.0, 0.0, 1e-12), (12.5, -300.0, 1e-3)):
        moved = geode_jax.fit(key, offset + factor * data, **options)
        np.testing.assert_allclose(moved.draws.log_joint, base.draws.log_joint, rtol=10 * tolerance)
        np.testing.assert_allclose(
            moved.sigma.mean(axis=2)[..., 2], factor * base.sigma.mean(axis=2)[..., 2], rtol=10 * tolerance
        )
        np.testing.assert_allclose(
            geode_jax.log_density(moved, offset + factor * rows),
            geode_jax.log_density(base, rows) - 6 * np.log(factor),
            rtol=tolerance,
        )


def test_stages_one_by_one(data, posterior):
    """fit is learn_forest, then sample_posterior; one forest can be sampled again under another prior."""
    key_forest, key_sample = jax.random.split(jax.random.key(0))
    forest = geode_jax.learn_forest(key_forest, data, dictionary=DICTIONARY, dtype=posterior.dtype)
    assert (forest.num_trees, forest.num_rows) == (2, 90)
    again = geode_jax.sample_posterior(key_sample, forest, sampler=SAMPLER)
    assert eqx.tree_equal(again.draws, posterior.draws)
    other = geode_jax.sample_posterior(key_sample, forest, sampler=SAMPLER, prior=geode_jax.Prior(tau_rate=2.0))
    assert np.abs(other.draws.log_joint - again.draws.log_joint).max() > 1.0


@pytest.mark.slow
def test_learned_concentration_follows_the_depth_of_the_data(data):
    """Rows all at the root want a small a_S, rows all at the leaves a large one: its draws differ in that direction."""
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)
    prior = geode_jax.Prior(stop_concentration=geode_jax.GammaPrior(1.0, 0.2))
    found = geode_jax.sample_posterior(jax.random.key(1), forest, sampler=SAMPLER, prior=prior)
    assert np.ptp(found.draws.log_stop_concentration) > 0
    given = geode_jax.sample_posterior(jax.random.key(1), forest, sampler=SAMPLER)
    assert np.ptp(given.draws.log_stop_concentration) == 0
    depth = (found.scale_weights * np.arange(3)).sum(axis=-1)
    assert np.corrcoef(depth.ravel(), found.draws.log_stop_concentration.ravel())[0, 1] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
def test_given_span_of_few_rows(n):
    """Where no direction can be learned without a fold there is no span; else it has at most the rank asked for."""
    x = np.random.default_rng(0).normal(size=(n, 12))
    fitted = _tiny(x, shared_span=geode_jax.SharedSpan(3))
    assert np.isfinite(geode_jax.log_density(fitted, x)).all()
    found = fitted.found.span_rank
    assert (found is None) if n == 2 else (found <= 3)


@pytest.mark.slow
def test_slice_membership_fits(data):
    sampler = dataclasses.replace(SAMPLER, membership=geode_jax.SliceMembership())
    fitted = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=sampler)
    assert np.isfinite(geode_jax.log_density(fitted, data)).all()
    assert (fitted.draws.count.sum(axis=-1) == 90).all()


def test_same_key_same_posterior(data):
    first, second = (geode_jax.fit(jax.random.key(5), data, dictionary=DICTIONARY, sampler=SAMPLER) for _ in range(2))
    assert eqx.tree_equal(first.draws, second.draws)
    other = geode_jax.fit(jax.random.key(6), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert not np.array_equal(first.draws.log_joint, other.draws.log_joint)


@pytest.mark.slow
def test_chains_and_segments_do_not_change_a_chain(data):
    """A sweep's randomness depends on the chain's key and the sweep's number, not on how the run is cut."""
    one = geode_jax.fit(jax.random.key(5), data, dictionary=DICTIONARY, sampler=SAMPLER)
    cut = geode_jax.fit(
        jax.random.key(5), data, dictionary=DICTIONARY, sampler=dataclasses.replace(SAMPLER, segment_length=7)
    )
    np.testing.assert_allclose(one.draws.log_joint, cut.draws.log_joint, rtol=1e-5)


def test_draws_have_the_stated_shapes(posterior):
    draws, dictionary = posterior.draws, posterior.dictionary
    assert draws.log_joint.shape == (2, 2, 30)
    assert draws.neg_log_u.shape == draws.tau.shape == draws.is_active.shape == (2, 2, 30, 7, 3)
    assert draws.log_sigma2.shape == (2, 2, 30, 3)
    assert dictionary.bases.shape == (2, 7, 6, 3)
    assert draws.count.sum(axis=-1).min() == draws.count.sum(axis=-1).max() == 90
    assert posterior.scale_weights.shape == (2, 2, 30, 3)
    np.testing.assert_allclose(posterior.scale_weights.sum(axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(posterior.intrinsic_dimension_probabilities.sum(), 1.0, rtol=1e-5)
    assert posterior.inclusion_probabilities.shape == (3,)
    by_node = posterior.node_dimension_probabilities
    present = np.asarray(dictionary.tree.is_present)
    assert by_node.shape == (2, 7, 4)
    np.testing.assert_allclose(by_node[present].sum(axis=-1), 1.0, rtol=1e-5)
    assert np.isnan(by_node[~present]).all()
    assert ((posterior.inclusion_probabilities >= 0) & (posterior.inclusion_probabilities <= 1)).all()
    assert (posterior.draws.tau >= 1).all()
    assert (draws.neg_log_u[~draws.is_active] == 0).all()


def test_thinning_keeps_every_other_sweep(data):
    dense = geode_jax.fit(jax.random.key(5), data, dictionary=DICTIONARY, sampler=SAMPLER)
    sparse = geode_jax.fit(
        jax.random.key(5), data, dictionary=DICTIONARY, sampler=dataclasses.replace(SAMPLER, num_samples=15, thinning=2)
    )
    np.testing.assert_array_equal(dense.draws.log_joint[:, :, 1::2], sparse.draws.log_joint)


def test_thinned_draws_are_evenly_spaced(posterior):
    """From the first to the last of every chain."""
    numbers = 100 * np.arange(4).reshape(2, 2, 1) + np.arange(30)
    numbered = eqx.tree_at(lambda it: it.draws.log_joint, posterior, numbers)
    expected = [[0, 10, 19, 29, 100, 110, 119, 129], [200, 210, 219, 229, 300, 310, 319, 329]]
    for num_draws in (7, 8):
        thinned = numbered.thin(num_draws)
        np.testing.assert_array_equal(thinned.log_joint, expected)
        np.testing.assert_array_equal(thinned.log_sigma2[:, 1], posterior.draws.log_sigma2[:, 0, 10])
    np.testing.assert_array_equal(numbered.thin(1).log_joint, [[0, 100], [200, 300]])
    for num_draws in (None, 60, 1000):
        np.testing.assert_array_equal(numbered.thin(num_draws).log_joint, numbers.reshape(2, 60))


def test_summaries_of_draws_written_out():
    """Two trees, two chains, two draws; a node is absent, and two never hold a row."""
    is_present = jnp.array([[True, True, False], [True, True, True]])
    tree = Tree(is_present, jnp.array([[False, True, False], [False, True, True]]), depth=1)
    of_first = np.array([[[0.6, 0.4, 0.0], [0.9, 0.1, 0.0]], [[0.2, 0.8, 0.0], [0.5, 0.5, 0.0]]])
    of_second = np.array([[[0.7, 0.2, 0.1], [0.4, 0.1, 0.5]], [[1.0, 0.0, 0.0], [0.1, 0.3, 0.6]]])
    count = np.array([[[[6, 4, 0], [2, 8, 0]], [[5, 5, 0], [7, 3, 0]]], [[[10, 0, 0]] * 2] * 2])
    dimension = [[[[0, 1, 2], [1, 1, 0]], [[1, 2, 0], [0, 1, 1]]], [[[2, 0, 0], [2, 1, 0]], [[2, 1, 0], [2, 2, 0]]]]
    variance = np.array([[[4.0, 1.0], [16.0, 9.0]], [[1.0, 0.25], [4.0, 1.0]]])
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.stack([of_first, of_second]))
    directions, nothing = np.ones((2, 2, 2, 3, 2)), np.zeros((2, 2, 2))
    arrays = {
        "neg_log_u": directions,
        "tau": directions,
        "log_sigma2": np.log(np.stack([variance, 100.0 * variance])),
        "log_weights": log_weights,
        "log_stop_concentration": nothing,
        "count": count,
        "is_active": directions > 0,
        "dimension": np.array(dimension),
        "log_joint": nothing,
    }
    included = jnp.zeros((2, 2, 3, 2)).at[..., 0, 0].set(1.6).at[..., 1, 0].set(0.4).at[..., 0, 1].set(1.0)
    found = geode_jax.Posterior(
        dictionary=Dictionary(tree, jnp.zeros((2, 3, 3)), jnp.zeros((2, 3, 3, 2)), jnp.full((2, 3), 2)),
        draws=Draw(**{name: jnp.asarray(values) for name, values in arrays.items()}),
        adaptation=Adaptation(included, jnp.full((2, 2), 2.0)),
        shift=np.zeros(3),
        scale=np.array([1.0, 2.0, 4.0]),  # of geometric mean 2
        dictionary_settings=DICTIONARY,
        prior=geode_jax.Prior(),
        sampler_settings=SAMPLER,
        found=Found(2, None, 3, rank_limit=2),
    )
    sigma = np.array([[[4.0, 2.0], [8.0, 6.0]], [[2.0, 1.0], [4.0, 2.0]]])
    weights = [[[[0.6, 0.4], [0.9, 0.1]], [[0.2, 0.8], [0.5, 0.5]]], [[[0.7, 0.3], [0.4, 0.6]], [[1, 0], [0.1, 0.9]]]]
    nodes = [
        [[0.65, 0.35, 0.0], [0.0, 0.75, 0.25], [np.nan, np.nan, np.nan]],
        [[0.0, 0.0, 1.0], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]],
    ]
    for name, expected in {
        "sigma": [sigma, 10.0 * sigma],
        "scale_weights": weights,
        "node_dimension_probabilities": nodes,
        "intrinsic_dimension_probabilities": [13 / 80, 22 / 80, 45 / 80],
        "inclusion_probabilities": [1.0, 0.5],
    }.items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-6, err_msg=name)
    assert found.intrinsic_dimension is None
    assert dataclasses.replace(found, found=Found(2, None, 3, rank_limit=3)).intrinsic_dimension == 2
    is_active = found.draws.is_active.at[0, :, :, 0, 1].set(False)
    unadapted = eqx.tree_at(lambda it: (it.draws.is_active, it.adaptation.steps), found, (is_active, jnp.zeros((2, 2))))
    np.testing.assert_allclose(unadapted.inclusion_probabilities, [1.0, 0.75])


def test_rank_adaptation_stops_with_warmup(posterior):
    is_active = np.asarray(posterior.draws.is_active)
    assert (is_active == is_active[:, :, :1]).all()


def test_intrinsic_dimension_of_a_plane():
    """Two directions of signal in D = 12, one node: the posterior mode is 2, and 0 has no mass."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) @ np.linalg.qr(rng.normal(size=(12, 2)))[0].T * 5 + 0.1 * rng.normal(size=(300, 12))
    fitted = geode_jax.fit(
        jax.random.key(0),
        x,
        dictionary=geode_jax.DictionarySettings(num_trees=1, depth=0, max_rank=6),
        sampler=geode_jax.SamplerSettings(num_warmup=200, num_samples=50),
    )
    assert fitted.intrinsic_dimension == 2  # of at most six
    assert (fitted.found.rank, fitted.found.rank_limit) == (2, 6)
    assert fitted.intrinsic_dimension_probabilities[2] > 0.95
    assert fitted.inclusion_probabilities.shape == (2,)
    np.testing.assert_array_less(0.95, fitted.inclusion_probabilities)


def test_dimension_odds():
    """Against likelihood ratios row by row; 40 directions of pure noise are not taken for signal, nor is bending."""
    rng = np.random.default_rng(2)
    tree = tree_from_mask(np.ones(3, bool))
    deviation = np.array([3.0, 1.5, 1.0, 1.0, 1.0])
    z = 0.7 * deviation * rng.normal(size=(50, 5))
    sums = NodeSums(
        count=jnp.array([0.0, 50.0, 0.0]),
        residual=jnp.zeros(3),
        squared=jnp.zeros((3, 5)).at[1].set(np.square(z).sum(axis=0)),
    )
    available = jnp.ones((3, 5), bool).at[1, 4].set(False)
    found = np.asarray(rank.log_dimension_odds(sums, 2 * jnp.log(jnp.array([5.0, 0.7])), available, tree))
    np.testing.assert_array_equal(found[0], 0.0)  # no rows: the prior
    mean_square = np.square(z).mean(axis=0)
    threshold = 0.49 + 0.05 * (mean_square[:4].max() - 0.49)
    free = np.sqrt(np.maximum(mean_square, threshold))
    null = np.sqrt(threshold)
    gain = (stats.norm.logpdf(z, scale=free) - stats.norm.logpdf(z, scale=null)).sum(axis=0) - 0.5 * np.log(50)
    np.testing.assert_allclose(found[1, :5], np.concatenate([[0.0], np.cumsum(gain[:4])]), rtol=1e-4, atol=1e-4)
    assert found[1, 5] == -np.inf

    squares = rng.chisquare(200, size=(255, 42))
    squares[:, :2] *= 4.0
    many = NodeSums(count=jnp.full(255, 200.0), residual=jnp.zeros(255), squared=jnp.asarray(squares, jnp.float32))
    odds = rank.log_dimension_odds(many, jnp.zeros(8), jnp.ones((255, 42), bool), tree_from_mask(np.ones(255, bool)))
    probability = np.asarray(jax.nn.softmax(odds, axis=1))
    assert (probability.argmax(axis=1) == 2).mean() > 0.97
    assert probability[:, 2].mean() > 0.85

    # cells of a bent line, thirty noise variances long and four wide: bending is above the noise, but no dimension
    t = rng.normal(size=(255, 200))
    bent = np.stack([np.square(30 * t), np.square(4 / np.sqrt(2) * (t**2 - 1) + rng.normal(size=t.shape))], axis=2)
    sums = NodeSums(jnp.full(255, 200.0), jnp.zeros(255), jnp.asarray(bent.sum(axis=1), jnp.float32))
    odds = rank.log_dimension_odds(sums, jnp.zeros(8), jnp.ones((255, 2), bool), tree_from_mask(np.ones(255, bool)))
    assert (np.asarray(odds).argmax(axis=1) == 1).all()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
def test_an_axis_of_one_is_no_batch_axis(sizes):
    """And gives what it gives as one."""

    def function(key, chain, problem):
        return {"key": key, "sum": chain + problem["scale"] * jax.random.normal(key, chain.shape)}, problem["row"]

    keys = jax.random.split(jax.random.key(0), sizes)
    chains, problems = jnp.ones((*sizes, 4)), {"scale": jnp.arange(sizes[0]) + 2.0, "row": jnp.ones((sizes[0], 3))}
    found = run._of_all_chains(function, keys, chains, problems)
    expected = jax.vmap(jax.vmap(function, in_axes=(0, 0, None)))(keys, chains, problems)
    assert eqx.tree_equal(found, expected)
    with mock.patch.object(jax, "vmap", wraps=jax.vmap) as batched:
        run._of_all_chains(function, keys, chains, problems)
    assert batched.call_count == sum(size > 1 for size in sizes)


def test_the_sweep_is_traced_once(data, monkeypatch):
    """Whatever the number of segments and chains; and a second fit of the same shapes traces nothing."""
    traces = []
    original = chain_module.sweep

    def counted(*arguments):
        traces.append(1)
        return original(*arguments)

    monkeypatch.setattr(chain_module, "sweep", counted)
    x = data[:77]  # a shape no other test uses
    settings = dataclasses.replace(SAMPLER, num_chains=3, num_samples=33)
    geode_jax.fit(jax.random.key(0), x, dictionary=DICTIONARY, sampler=settings)
    assert len(traces) == 1
    longer = dataclasses.replace(settings, num_samples=50, num_warmup=20)
    geode_jax.fit(jax.random.key(1), x + 1.0, dictionary=DICTIONARY, sampler=longer)
    assert len(traces) == 1


def test_float64_leaves_the_global_setting_alone(data):
    before = jax.config.jax_enable_x64
    fitted = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER, dtype="float64")
    assert fitted.draws.neg_log_u.dtype == np.float64
    assert fitted.dictionary.bases.dtype == np.float64
    assert jax.config.jax_enable_x64 == before
    assert jnp.ones(2).dtype == np.float32
    assert geode_jax.log_density(fitted, data).dtype == np.float64
    loaded = pickle.loads(pickle.dumps(fitted))
    assert eqx.tree_equal(loaded, fitted)
    np.testing.assert_array_equal(geode_jax.log_density(loaded, data), geode_jax.log_density(fitted, data))
    assert geode_jax.sample(jax.random.key(0), fitted, 3).dtype == np.float64


def test_pickles_keep_float64(data, tmp_path):
    """Also of a forest and of classes, and what they then save loads."""
    options = {"dictionary": DICTIONARY, "dtype": "float64"}
    forest = geode_jax.learn_forest(jax.random.key(0), data, **options)
    classes = geode_jax.fit_classes(jax.random.key(0), data, np.arange(len(data)) % 2, sampler=SAMPLER, **options)
    for given in (forest, classes):
        loaded = pickle.loads(pickle.dumps(given))
        assert eqx.tree_equal(loaded, given)
    loaded.save(tmp_path / "classes.npz")
    assert eqx.tree_equal(geode_jax.ClassPosterior.load(tmp_path / "classes.npz"), classes)


def test_float32_and_float64_agree(data):
    """The same posterior cast to float32 predicts the same: complete, partial, imputed (rows up to 60 sd away)."""
    fine = geode_jax.fit(jax.random.key(9), data, dictionary=DICTIONARY, sampler=SAMPLER, dtype="float64")

    def cast(leaf):
        return leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf

    coarse = eqx.tree_at(lambda it: (it.dictionary, it.draws), fine, jax.tree.map(cast, (fine.dictionary, fine.draws)))
    assert coarse.dtype == np.float32
    rows = np.concatenate([data[:20], 40 + 60 * np.random.default_rng(0).normal(size=(5, 6))])
    hidden = rows.copy()
    hidden[:, 1:3] = np.nan
    for function in (geode_jax.log_density, geode_jax.impute_mean):
        for x in (rows, hidden):
            np.testing.assert_allclose(function(coarse, x), function(fine, x), rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [(6, 40), *(pytest.param(rest, marks=pytest.mark.slow) for rest in ((5, 1), (2, 3), (5, 4), (30, 2), (25, 60)))],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_odd_shapes(shape):
    """n < d, one feature, a handful of rows, D above n: fit, score, sample and impute stay finite."""
    x = np.random.default_rng(0).normal(size=shape)
    fitted = _tiny(x)
    assert np.isfinite(geode_jax.log_density(fitted, x)).all()
    assert np.isfinite(geode_jax.sample(jax.random.key(0), fitted, 5)).all()
    if shape[1] > 1:
        hidden = x.copy()
        hidden[:, 0] = np.nan
        assert np.isfinite(geode_jax.impute_mean(fitted, hidden)).all()


@pytest.mark.filterwarnings("ignore:X. row 0 is 6e.05 times as far")
@pytest.mark.parametrize(
    "case",
    [
        "constant features",
        *(
            pytest.param(rest, marks=pytest.mark.slow)
            for rest in ("outlier", "huge", "duplicates", "components", "tiny")
        ),
    ],
)
def test_odd_data(case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    if case == "duplicates":
        x = np.repeat(x[:6], 10, axis=0)
    elif case == "constant features":
        x[:, 1:4] = 3.0
    elif case == "components":
        x[:20] += 1000.0
    elif case == "outlier":
        x[0] = 1e6
    elif case == "huge":
        x *= 1e150
    elif case == "tiny":
        x *= 1e-150
    fitted = _tiny(x, depth=2, min_cell_size=4)
    assert np.isfinite(geode_jax.log_density(fitted, x)).all()
    assert np.isfinite(geode_jax.sample(jax.random.key(0), fitted, 5)).all()


@pytest.mark.slow
def test_published_settings(data):
    fitted = geode_jax.fit(
        jax.random.key(0),
        data,
        dictionary=geode_jax.DictionarySettings.published(max_rank=3, depth=2),
        sampler=dataclasses.replace(SAMPLER, shrinkage=geode_jax.PublishedShrinkage()),
    )
    assert fitted.num_trees == 1
    assert np.ptp(fitted.scale) == 0
    assert np.isfinite(geode_jax.log_density(fitted, data)).all()


def _variants(x):
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "read-only": frozen,
        "list": x.tolist(),
        "jax": jnp.asarray(x),
        "pandas": pd.DataFrame(x, columns=list("abcdef")),
        "polars": pl.DataFrame(x, schema=list("abcdef")),
        "strided": np.repeat(x, 2, axis=0)[::2],
    }


@pytest.mark.parametrize(
    "kind", [pytest.param("fortran", marks=pytest.mark.slow), "read-only", "list", "jax", "pandas", "polars", "strided"]
)
def test_kinds_of_input(data, kind):
    x = np.round(data).astype(np.float32)
    same, expected = _shared(_variants(x)[kind]), _expected(x)
    np.testing.assert_allclose(same.draws.log_joint, expected.draws.log_joint, rtol=1e-5)
    np.testing.assert_allclose(
        geode_jax.log_density(same, _variants(x)[kind]), geode_jax.log_density(expected, x), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint8, np.int64, bool])
def test_types_of_input(data, dtype):
    x = (data > 40).astype(dtype) if dtype is bool else np.round(data).astype(dtype)
    before = x.copy()
    fitted, expected = _shared(x), _expected(x.astype(np.float32))
    np.testing.assert_array_equal(fitted.draws.log_joint, expected.draws.log_joint)
    same = geode_jax.log_density(expected, x.astype(np.float32))
    np.testing.assert_array_equal(geode_jax.log_density(fitted, x), same)
    assert np.isfinite(same).all()
    np.testing.assert_array_equal(x, before)


def test_missing_values_of_pandas(posterior, data):
    frame = pd.DataFrame(data[:3]).astype("Float64")
    frame.iloc[1, 2] = pd.NA
    hidden = data[:3].copy()
    hidden[1, 2] = np.nan
    np.testing.assert_array_equal(geode_jax.impute_mean(posterior, frame), geode_jax.impute_mean(posterior, hidden))


def test_save_and_load(posterior, data, tmp_path):
    path = tmp_path / "model.npz"
    posterior.save(path)
    loaded = geode_jax.Posterior.load(path)
    assert loaded.dictionary_settings == posterior.dictionary_settings
    assert loaded.prior == posterior.prior
    assert loaded.sampler_settings == posterior.sampler_settings
    assert loaded.dtype == posterior.dtype
    np.testing.assert_array_equal(geode_jax.log_density(loaded, data), geode_jax.log_density(posterior, data))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_save_and_load_a_learned_concentration(data, tmp_path):
    fitted = geode_jax.fit(
        jax.random.key(0),
        data,
        dictionary=DICTIONARY,
        sampler=SAMPLER,
        prior=geode_jax.Prior(stop_concentration=geode_jax.GammaPrior(2.0, 3.0)),
    )
    fitted.save(tmp_path / "model.npz")
    loaded = geode_jax.Posterior.load(tmp_path / "model.npz")
    assert loaded.prior == fitted.prior
    assert eqx.tree_equal(loaded.draws, fitted.draws)


def test_damaged_files_are_refused(posterior, tmp_path):
    path = tmp_path / "model.npz"
    posterior.save(path)
    whole = path.read_bytes()
    for name, content in {"empty": b"", "half": whole[: len(whole) // 2], "text": b"not a model"}.items():
        damaged = tmp_path / name
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"path: expected a file written by Posterior\.save"):
            geode_jax.Posterior.load(damaged)
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    np.savez(tmp_path / "pickled.npz", header=np.array([{"a": 1}], dtype=object))
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as file:
        file.writestr("header.npy", "nothing")
    for name in ("other.npz", "pickled.npz", "zip.npz"):
        with pytest.raises(ValueError, match=r"path: expected a file written by Posterior\.save"):
            geode_jax.Posterior.load(tmp_path / name)


def test_non_finite_sampling_is_reported(data, monkeypatch):
    def broken(key, state, sums, *rest):
        return jnp.full_like(state.log_sigma2, jnp.nan)

    monkeypatch.setattr("geode_jax.gibbs.noise.move", broken)
    # sizes of no other test, so that the sweep is traced anew, and the broken one is never used again
    sampler = dataclasses.replace(SAMPLER, num_chains=3, segment_length=9)
    with warnings.catch_warnings(), pytest.raises(FloatingPointError, match="log joint became non-finite"):
        geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=sampler)


@pytest.mark.parametrize("shape", [(2, 1), (100, 2), (1000, 560), (100_000, 784), (100_000, 20_000)])
def test_defaults_follow_from_the_shape(shape):
    """Possible ranks and sizes at any shape, and statistics that fit in memory; what was given stays."""
    settings = geode_jax.DictionarySettings()
    found = Plan.of(settings, *shape)
    num_candidates = found.num_candidates(found.max_rank)
    assert 1 <= found.max_rank <= max(1, min(100, shape[1] - 1, shape[0] - 1))
    assert 2 <= found.tree.min_cell_size <= 10
    assert 1 <= num_candidates < 2 ** (found.tree.depth + 1)
    per_node = 4 * settings.num_trees * shape[0] * found.max_rank
    assert num_candidates == 8 or per_node * num_candidates <= 2**30
    assert 8 * per_node <= 2**32
    assert Plan.of(geode_jax.DictionarySettings(depth=7), *shape).tree.depth == 7


@pytest.mark.slow
def test_candidates_follow_from_the_rank_that_is_found(monkeypatch):
    """A plane: statistics of two directions fit at all nodes, those of 49 would not; in a smaller memory neither do."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 50)) + 0.1 * rng.normal(size=(400, 50))
    settings = geode_jax.DictionarySettings(num_trees=2, depth=4)
    for size, expected in ((2**20, 31), (2**13, 8)):
        monkeypatch.setattr("geode_jax.forest.plan.CANDIDATE_BYTES", size)
        plan = Plan.of(settings, *x.shape)
        assert plan.num_candidates(plan.max_rank) < 31
        forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)
        assert forest.dictionary.max_rank < 10
        assert forest.found.num_candidates == expected


@pytest.mark.slow
def test_two_features():
    """A spiral in the plane: a direction is left to the noise, no span is taken, and deep scales hold the rows."""
    rng = np.random.default_rng(0)
    t = 1.5 * np.pi * (1 + 2 * rng.random(1000))
    x = np.stack([t * np.cos(t), t * np.sin(t)], axis=1) / 5 + 0.1 * rng.normal(size=(1000, 2))
    sampler = geode_jax.SamplerSettings(num_warmup=100, num_samples=50)
    dictionary = geode_jax.DictionarySettings(num_trees=1)
    posterior = geode_jax.fit(jax.random.key(0), x[:800], dictionary=dictionary, sampler=sampler)
    assert posterior.dictionary.max_rank == 1
    assert posterior.found.span_rank is None
    assert geode_jax.log_density(posterior, x[800:]).mean() > -2.4  # one Gaussian: -3.4, a mixture by BIC: -2.2


def test_memory_that_will_not_suffice(data, monkeypatch):
    """Told before the fit, by the sizes of the arrays that a fit makes."""
    from_shape = memory.bytes_needed(Plan.of(DICTIONARY, *data.shape), SAMPLER, 4)
    key_forest, key_sample = jax.random.split(jax.random.key(0))
    forest = geode_jax.learn_forest(key_forest, data, dictionary=DICTIONARY)
    draws = geode_jax.sample_posterior(key_sample, forest, sampler=SAMPLER).draws
    places = forest.statistics.residual.shape[-1]  # rows are padded
    statistics = forest.statistics.squared.nbytes + forest.statistics.residual.nbytes
    assert from_shape["statistics"] == statistics * len(data) // places
    assert from_shape["dictionaries"] == 6 * (forest.dictionary.bases.nbytes + forest.dictionary.centres.nbytes)
    assert from_shape["draws"] == draws.neg_log_u.nbytes + draws.tau.nbytes + draws.is_active.nbytes
    more = memory.bytes_needed(Plan.of(DICTIONARY, *data.shape), dataclasses.replace(SAMPLER, num_chains=3), 4)
    assert more["chains"] * SAMPLER.num_chains == 3 * from_shape["chains"] > 0
    few = dataclasses.replace(DICTIONARY, num_candidates=3)
    statistics = geode_jax.learn_forest(key_forest, data, dictionary=few).statistics
    tables = (statistics.node.nbytes + statistics.position.nbytes) * len(data) // places
    found = memory.bytes_needed(Plan.of(few, *data.shape), SAMPLER, 4)
    assert found["statistics"] == 3 * from_shape["statistics"] // 7 + tables
    assert found["trees"] == 8 * len(data) * (2 * 3 + 1) + len(data) * 24 * 10
    monkeypatch.setattr(memory, "_physical_memory", lambda: 2**10)
    with pytest.warns(RuntimeWarning, match="GiB .*fewer trees") as told:
        geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert told[0].filename == __file__  # the line of the caller, not one of the package


def test_trees_from_a_part_of_the_rows(data):
    """Every tree draws its own rows; all rows are the default, and have statistics either way."""
    whole, given, part = (
        geode_jax.learn_forest(jax.random.key(0), data, dictionary=dataclasses.replace(DICTIONARY, tree_rows=tree_rows))
        for tree_rows in (None, 90, 45)
    )
    assert eqx.tree_equal(whole, dataclasses.replace(given, dictionary_settings=whole.dictionary_settings))
    assert part.num_rows == 90
    assert np.isfinite(part.statistics.residual).all()
    assert not np.allclose(part.dictionary.centres[:, 1], whole.dictionary.centres[:, 1])
    assert not np.allclose(part.dictionary.centres[0, 1], part.dictionary.centres[1, 1])
