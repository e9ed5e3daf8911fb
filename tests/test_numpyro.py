"""The NumPyro bridge: the kernel under every chain method, and the predictive distribution inside models."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracle
import pytest
from conftest import ANY_NOISE_SLOW, DICTIONARY, SAMPLER
from numpyro.infer import MCMC, NUTS

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.interop.numpyro import GeodeKernel, PosteriorPredictive

NUMPYRO_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def forest(data):
    return geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)


def _mcmc(kernel, **options):
    settings = {"num_warmup": 40, "num_samples": 30, "num_chains": 2, "progress_bar": False, **options}
    return MCMC(kernel, **settings)


@pytest.fixture(scope="module")
def finished(forest):
    kernel = GeodeKernel(forest)
    mcmc = _mcmc(kernel, chain_method="vectorized")
    mcmc.run(jax.random.key(1), extra_fields=("potential_energy",))
    return kernel, mcmc


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of what never varies
def test_summary_and_report_as_the_readme_has_them(finished, data, capsys):
    kernel, mcmc = finished
    mcmc.print_summary()
    assert "is_active" in capsys.readouterr().out
    assert geode_jax.diagnostics.report(kernel.posterior(mcmc), data)


def _fields(mcmc):
    return {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}


@pytest.mark.filterwarnings("ignore:There are not enough devices")
@pytest.mark.parametrize("method", ["parallel", "sequential"])
@pytest.mark.slow
def test_chain_methods_agree(forest, finished, method):
    """Every method runs the same chains: same keys, same draws up to summation order."""
    mcmc = _mcmc(GeodeKernel(forest), chain_method=method)
    mcmc.run(jax.random.key(1))
    expected, found = _fields(finished[1]), _fields(mcmc)
    assert found["neg_log_u"].shape == (2, 30, 2, 7, 3)
    # chaotic in the long run, the same in the first sweeps and at the end of the adaptation
    np.testing.assert_allclose(found["log_joint"][:, 0], expected["log_joint"][:, 0], rtol=1e-3)


@pytest.mark.slow
def test_thinning_progress_bar_and_arguments(forest, monkeypatch):
    """With the bar, thinning, a legacy key, and the problem as an argument that is not compiled in."""
    monkeypatch.delenv("CI", raising=False)
    kernel = GeodeKernel(forest)
    mcmc = _mcmc(kernel, num_chains=1, thinning=3, progress_bar=True, jit_model_args=True)
    mcmc.run(jax.random.PRNGKey(0), kernel.problem)
    assert mcmc.get_samples()["log_sigma2"].shape == (10, 2, 3)
    posterior = kernel.posterior(mcmc)
    assert (posterior.num_trees, posterior.num_chains, posterior.num_draws) == (2, 1, 10)
    text = kernel.get_diagnostics_str(mcmc.last_state)
    assert text.startswith("log joint -")
    assert text.endswith("directions per node")


@pytest.mark.slow
def test_nothing_of_the_size_of_the_data_is_collected(forest, finished):
    kernel, mcmc = finished
    assert not any(90 in values.shape for values in _fields(mcmc).values())
    assert mcmc.get_extra_fields()["potential_energy"].shape == (60,)
    np.testing.assert_allclose(
        mcmc.get_extra_fields(group_by_chain=True)["potential_energy"],
        -_fields(mcmc)["log_joint"].sum(axis=2),
        rtol=1e-5,
    )
    asked = _mcmc(kernel, num_chains=1, num_samples=5)
    asked.run(jax.random.key(3), extra_fields=("chain.state.node",))
    assert asked.get_extra_fields()["chain.state.node"].shape == (5, 2, 128)


def test_posterior_of_a_run_leaves_the_run_as_it_is(finished):
    kernel, mcmc = finished
    kernel.posterior(mcmc)
    assert mcmc.get_samples()["is_active"].dtype == np.int32


def test_posterior_of_a_run(finished, data):
    """What comes back serves every function, and adaptation stopped with warm-up."""
    kernel, mcmc = finished
    posterior = kernel.posterior(mcmc)
    assert posterior.draws.log_joint.shape == (2, 2, 30)
    assert posterior.sampler_settings == geode_jax.SamplerSettings(num_warmup=40, num_samples=30, num_chains=2)
    is_active = np.asarray(posterior.draws.is_active)
    assert (is_active == is_active[:, :, :1]).all()
    np.testing.assert_allclose(posterior.intrinsic_dimension_probabilities.sum(), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(posterior.draws.log_joint, np.moveaxis(_fields(mcmc)["log_joint"], 2, 0))
    own = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    # the same model on other trees, short chains: the densities are close, not equal
    difference = geode_jax.log_density(posterior, data) - geode_jax.log_density(own, data)
    assert abs(difference.mean()) < 0.5


@pytest.mark.slow
def test_kernel_follows_the_posterior(data):
    """Means of the log joint and of log sigma2 agree with our own run: one node, so that every chain finds one mode.

    z from the means of 8 independent chains a side; limit 6, a false alarm below 1e-3 with 14 degrees of freedom.
    """
    dictionary = geode_jax.DictionarySettings(num_trees=1, depth=0, max_rank=3)
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=dictionary)
    sampler = geode_jax.SamplerSettings(num_warmup=100, num_samples=400, num_chains=8, adaptation=None)
    kernel = GeodeKernel(forest, sampler=sampler)
    mcmc = _mcmc(kernel, num_warmup=100, num_samples=400, num_chains=8, chain_method="vectorized")
    mcmc.run(jax.random.key(5))
    own, theirs = geode_jax.sample_posterior(jax.random.key(6), forest, sampler=sampler), kernel.posterior(mcmc)
    for field in ("log_joint", "log_sigma2"):
        means = [np.asarray(getattr(it.draws, field), np.float64).mean(axis=2).ravel() for it in (own, theirs)]
        error = np.sqrt(sum(mean.var(ddof=1) / mean.size for mean in means))
        assert abs(means[0].mean() - means[1].mean()) < 6 * error


def test_bad_arguments(forest, data, finished):
    with pytest.raises(TypeError, match="forest: expected Forest, got"):
        GeodeKernel(data)
    with pytest.raises(ValueError, match="init_params: expected None"):
        _mcmc(GeodeKernel(forest), num_chains=1).run(jax.random.key(0), init_params=jnp.zeros(3))
    with pytest.raises(TypeError, match="problem: expected Problem"):
        _mcmc(GeodeKernel(forest), num_chains=1).run(jax.random.key(0), data)
    kernel = GeodeKernel(forest)
    with pytest.raises(ValueError, match="mcmc: expected a run that has finished"):
        kernel.posterior(_mcmc(kernel, num_chains=1))
    with pytest.raises(ValueError, match="mcmc: expected a run of this kernel, got one of another"):
        kernel.posterior(finished[1])
    warm = copy.copy(finished[1])
    warm._last_state = warm.last_state._replace(sweep=warm.last_state.num_warmup)  # as `warmup` leaves it
    with pytest.raises(ValueError, match="mcmc: expected a run that has drawn samples, got one that has only warmed"):
        finished[0].posterior(warm)
    fine = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY, dtype="float64")
    with pytest.raises(ValueError, match="forest: expected float32 while"):
        _mcmc(GeodeKernel(fine), num_chains=1).run(jax.random.key(0))


@pytest.mark.slow
def test_a_forest_in_float64(data):
    fine = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY, dtype="float64")
    with jax_settings(np.float64):
        mcmc = _mcmc(GeodeKernel(fine), num_chains=1, num_samples=5)
        mcmc.run(jax.random.key(0))
        assert mcmc.get_samples()["log_sigma2"].dtype == np.float64


@ANY_NOISE_SLOW
def test_predictive_is_the_log_density(posterior, data):
    predictive = PosteriorPredictive(posterior, num_draws=60)
    assert predictive.event_shape == (6,)
    assert predictive.batch_shape == ()
    expected = geode_jax.log_density(posterior, data[:12], num_draws=60).reshape(3, 4)
    # in JAX's default precision, float32 here, whatever the posterior's
    rows = jnp.asarray(data[:12].reshape(3, 4, 6), jnp.float32)
    np.testing.assert_allclose(predictive.log_prob(rows), expected, rtol=2e-4, atol=2e-3)
    np.testing.assert_allclose(jax.jit(lambda d, x: d.log_prob(x))(predictive, rows), expected, rtol=2e-4, atol=2e-3)
    for value in (0.5, rows[:, :, :1], rows[..., None]):
        with pytest.raises(ValueError, match=r"value: expected shape \(..., 6\), got"):
            predictive.log_prob(value)


@pytest.mark.parametrize("offset", [1e4, 1e7])
def test_predictive_far_from_the_origin(posterior, data, offset):
    """In float32, of rows in float64, as `log_density`; single rows have digits left where the data's unit has any."""
    moved = eqx.tree_at(lambda it: it.shift, posterior, np.asarray(posterior.shift, np.float64) + offset)
    rows = np.asarray(data[:20], np.float64) + offset
    found = PosteriorPredictive(moved).log_prob(rows)
    assert found.dtype == np.float32
    assert np.isfinite(PosteriorPredictive(moved).log_prob(np.full((1, 6), 1e39))).all()
    np.testing.assert_allclose(found, geode_jax.log_density(moved, rows), atol=2e-3)
    rounded = rows.astype(np.float32)
    np.testing.assert_allclose(
        PosteriorPredictive(moved).log_prob(jnp.asarray(rounded)),
        geode_jax.log_density(moved, rounded.astype(np.float64)),
        atol=2e-3,
    )


@pytest.mark.slow
def test_predictive_gradient(data):
    fitted = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER, dtype="float64")
    with jax_settings(np.float64):
        predictive = PosteriorPredictive(fitted)
        row = jnp.asarray(data[0])
        gradient = jax.grad(predictive.log_prob)(row)
        step = 1e-4 * np.eye(6)
        central = (predictive.log_prob(row + step) - predictive.log_prob(row - step)) / 2e-4
        np.testing.assert_allclose(gradient, central, rtol=1e-5, atol=1e-7)


@ANY_NOISE_SLOW
def test_predictive_samples_and_moments(posterior):
    predictive = PosteriorPredictive(posterior)
    components = oracle.make_oracle(posterior)
    weight = np.exp(components.log_weight)
    mean = weight @ components.mean
    second = np.diagonal(components.covariance, axis1=1, axis2=2) + np.square(components.mean - mean)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(predictive.variance, weight @ second, rtol=1e-3)
    rows = np.asarray(predictive.sample(jax.random.key(0), (100, 80)), np.float64).reshape(-1, 6)
    assert predictive.sample(jax.random.key(0)).shape == (6,)
    assert predictive.sample(jax.random.key(0), (0,)).shape == (0, 6)
    # medians: single draws of u give components so wide that sample means settle late
    below = (rows < np.median(geode_jax.sample(jax.random.key(1), posterior, 8000), axis=0)).mean(axis=0)
    np.testing.assert_allclose(below, 0.5, atol=5 * 0.5 * np.sqrt(2 / 8000))


@pytest.mark.slow
@NUMPYRO_WARNINGS
def test_predictive_inside_a_model(posterior, data):
    """A row seen through noise: NUTS on the latent row, with the fitted density as its prior, stays near the data."""
    predictive = PosteriorPredictive(posterior, num_draws=4)
    seen = jnp.asarray(data[0], jnp.float32)

    def model():
        row = numpyro.sample("row", predictive)
        numpyro.sample("seen", dist.Normal(row, 0.5).to_event(1), obs=seen)

    mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params={"row": seen})
    rows = np.asarray(mcmc.get_samples()["row"])
    assert np.isfinite(rows).all()
    assert np.abs(rows.mean(axis=0) - data[0]).max() < 2.0
    assert (rows.std(axis=0) < 0.7).all()
