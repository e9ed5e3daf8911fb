"""Results do not depend on the user's JAX settings, and calls that cannot work say why."""

import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DICTIONARY, QUICK, SAMPLER

import geode_jax
from geode_jax._runtime import jax_settings as module
from geode_jax._runtime.jax_settings import jax_settings

SETTINGS = {
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": True,
    "jax_transfer_guard": "disallow",
}


def _answers(data):
    data = np.insert(data, 3, 7.25, axis=1)  # and a column that never varies
    model = geode_jax.GeodeDensity(**{**QUICK, "num_trees": 2, "num_warmup": 40, "num_samples": 30})
    model.fit(data)
    hidden = data[:5].copy()
    hidden[:, [1, 3]] = np.nan
    parts = model.score_samples(data[:5]), model.sample(3), model.impute_draws(hidden, 2), *model.impute(hidden, 0.9)
    return np.concatenate([part.ravel() for part in parts])


@pytest.fixture(scope="module")
def expected(data):
    return _answers(data)


# Which of them changed the answers, if they did, is told among the longer proofs.
@pytest.mark.parametrize("names", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS)])
def test_a_seed_means_the_same(data, expected, names):
    changed = {name: SETTINGS[name] for name in SETTINGS if names in ("all", name)}
    before = {name: getattr(jax.config, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        np.testing.assert_array_equal(_answers(data), expected)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_mesh_of_the_user(data, axis_type):
    """Under `jax.set_mesh` new arrays would lie on all devices, and programs over another mesh would be refused."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    options = {"dictionary": DICTIONARY, "sampler": SAMPLER}
    key = jax.random.key(0)

    def answers():
        alone = geode_jax.fit(key, data, **options)
        spread = alone.replicated(jax.sharding.Mesh(np.array(jax.devices()), ("devices",)))
        return geode_jax.log_density(alone, data), geode_jax.log_density(spread, data), geode_jax.sample(key, spread, 5)

    expected = answers()
    with jax.set_mesh(mesh):
        for one, other in zip(answers(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def test_inside_jit_it_says_so(posterior):
    rows = jnp.zeros((2, 6))
    with pytest.raises(TypeError, match=r"X: expected an array with values, got a traced one.*outside jax\.jit"):
        jax.jit(lambda x: geode_jax.log_density(posterior, x))(rows)
    with pytest.raises(TypeError, match="key: expected an array with values"):
        jax.jit(lambda key: geode_jax.sample(key, posterior))(jax.random.key(0))
    with pytest.raises(TypeError, match="X: expected an array with values"):
        jax.vmap(lambda x: geode_jax.fit(jax.random.key(0), x, dictionary=DICTIONARY, sampler=SAMPLER))(rows[None])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_process_says_so_instead_of_hanging(monkeypatch):
    with jax_settings(np.float32):
        pass
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=r"forked.*get_context\('spawn'\)"), jax_settings(np.float32):
        pass
