"""Bounds on what a finite tree and finite ranks lose, against draws from the prior."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from geode_jax import GammaPrior, Prior, truncation
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.math.truncated import draw_log_truncated_gamma

RNG_SEED = 0


@pytest.mark.parametrize("concentration", [0.5, 1.0, 4.0, GammaPrior(2.0, 1.0)])
def test_depth_error_is_the_weight_that_passes(concentration):
    rng = np.random.default_rng(RNG_SEED)
    prior = Prior(stop_concentration=concentration)
    if isinstance(concentration, GammaPrior):
        a = rng.gamma(concentration.shape, 1.0 / concentration.rate, (100_000, 1))
    else:
        a = np.full((100_000, 1), concentration)
    passed = np.cumprod(1.0 - rng.beta(1.0, a, (100_000, 6)), axis=1)
    expected = passed.mean(axis=0)
    found = [truncation.depth_error(depth, prior) for depth in range(6)]
    np.testing.assert_allclose(found, expected, atol=5 * (passed.std(axis=0) / np.sqrt(len(a))).max())


@pytest.mark.parametrize("rate", [0.05, 1.0, 5.0])
def test_rank_error_bounds_the_divergence(rate):
    """Of the directions left out, from draws of tau and u; and not by orders of magnitude."""
    rng = np.random.default_rng(RNG_SEED)
    tau = 1.0 + rng.exponential(1.0 / rate, (20_000, 12))
    log_delta = np.cumsum(np.log(tau), axis=1)
    with jax_settings("float64"):
        log_shape = jnp.logaddexp(jnp.asarray(log_delta), 0.0)
        drawn = draw_log_truncated_gamma(jax.random.key(0), log_shape, jnp.ones_like(log_shape))
    t = np.exp(np.asarray(drawn))  # -log u
    divergence = 0.5 * np.where(t < 1e-3, t**2 / 2, np.expm1(-t) + t)
    for rank in (0, 1, 3):
        expected = divergence[:, rank:].sum(axis=1)
        bound = 2.0 * truncation.rank_error(rank, Prior(tau_rate=rate)) ** 2
        if bound < 2.0:  # where it says anything
            error = expected.std() / np.sqrt(len(tau))
            assert expected.mean() <= bound + 3.0 * error
            assert expected.mean() >= 0.02 * bound


@pytest.mark.parametrize(
    "prior", [None, Prior(stop_concentration=50.0, tau_rate=3.0), Prior(stop_concentration=GammaPrior())]
)
def test_the_least_that_is_enough(prior):
    for error in (0.3, 0.01):
        depth, rank = truncation.depth_for(error, prior), truncation.rank_for(error, prior)
        assert truncation.depth_error(depth, prior) <= error
        assert depth == 0 or truncation.depth_error(depth - 1, prior) > error
        assert truncation.rank_error(rank, prior) <= error
        assert rank == 1 or truncation.rank_error(rank - 1, prior) > error


def test_extreme_rates_are_finite():
    assert truncation.rank_error(5, Prior(tau_rate=1e-9)) == pytest.approx(0.0, abs=1e-20)
    assert truncation.rank_error(5, Prior(tau_rate=1e9)) == truncation.rank_error(5, Prior(tau_rate=1e18)) == 1.0
    assert 1e17 < truncation.depth_for(0.1, Prior(stop_concentration=1e17)) < 1e18
    assert truncation.depth_for(1e-12, Prior(stop_concentration=1e6)) > 10**7


@pytest.mark.parametrize(
    ("shape", "rate", "depth"), [(2.0, 1e6, 5), (1.0, 1.0, 150), (0.01, 1e-6, 1), (0.5, 0.5, 2), (1e5, 3.0, 99)]
)
def test_depth_error_of_a_learned_concentration(shape, rate, depth):
    """Against the closed form, a confluent hypergeometric function."""
    with mpmath.workdps(30):
        k, r, power = mpmath.mpf(shape), mpmath.mpf(rate), depth + 1
        ratio = mpmath.gamma(k + power) / mpmath.gamma(k)
        expected = float(r**k * ratio * mpmath.hyperu(k + power, k + 1, r))
    prior = Prior(stop_concentration=GammaPrior(shape, rate))
    assert truncation.depth_error(depth, prior) == pytest.approx(expected, rel=1e-7)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"error: expected a number in \(0, 1\), got 1"):
        truncation.depth_for(1)
    with pytest.raises(ValueError, match="depth: expected an integer of at least 0, got -1"):
        truncation.depth_error(-1)
    with pytest.raises(TypeError, match="prior: expected Prior or None"):
        truncation.rank_for(0.1, 0.05)
