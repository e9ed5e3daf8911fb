"""Moves of gamma and beta variables, on the log and the logit scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from scipy import stats

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.math.conjugate import move_log_gamma, move_logit_beta
from geode_jax.math.uniforms import Uniforms

SHAPES = (1e-2, 0.5, 1.0, 3.0, 100.0, 1e4, 1e8)
BETA_SHAPES = (1e-2, 0.5, 1.0, 5.0, 1e3, 1e6)
BETAS = [(a, b) for a in BETA_SHAPES for b in BETA_SHAPES]
NUM_DRAWS = 20_000


def _moved(move_of, dtype, parameters, start):
    """What eight moves make of a start, and the smallest share of lanes that one of them moved."""
    with jax_settings(dtype):
        columns = jnp.asarray(parameters, dtype).T[:, :, None]
        tiled = list(jnp.broadcast_to(columns, (*columns.shape[:2], NUM_DRAWS)))
        held, shares = jnp.full_like(tiled[0], start), []

        @functools.partial(jax.jit, compiler_options=small.OPTIMISED)
        def move(key, held, *tiled):
            return move_of(Uniforms(key, 3 * held.size, dtype), held, *tiled)

        for number in range(8):
            held, last = move(jax.random.key(number), held, *tiled), held
            shares.append(np.mean(np.asarray(held != last), axis=1).min())
        return np.asarray(held, np.float64), min(shares)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("start", [0.0, -300.0, 1e4])
def test_moves_follow_the_gamma_law(dtype, start):
    """From anywhere, by Kolmogorov-Smirnov; false alarm 1e-4 for all shapes. Rates of which none is 1."""
    held, share = _moved(move_log_gamma, dtype, [(shape, 7.0 * shape + 0.3) for shape in SHAPES], start)
    assert share > 0.87
    p_values = [
        stats.kstest(draws + np.log(7.0 * shape + 0.3), stats.loggamma(shape).cdf).pvalue
        for draws, shape in zip(held, SHAPES, strict=True)
    ]
    assert min(p_values) > 1e-4 / len(SHAPES), SHAPES[int(np.argmin(p_values))]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("start", [0.0, -300.0, 1e4])
def test_moves_follow_the_beta_law(dtype, start):
    """As differences of SciPy's log gamma variables do, which stay exact where B rounds to 0 or 1."""
    held, share = _moved(move_logit_beta, dtype, BETAS, start)
    assert share > 0.87
    rng = np.random.default_rng(0)
    p_values = []
    for draws, (a, b) in zip(held, BETAS, strict=True):
        first, second = (stats.loggamma.rvs(shape, size=NUM_DRAWS, random_state=rng) for shape in (a, b))
        p_values.append(stats.ks_2samp(draws, first - second).pvalue)
    assert min(p_values) > 1e-4 / len(BETAS), BETAS[int(np.argmin(p_values))]


def test_moves_show_what_is_not_finite():
    """A lane that cannot be moved is not kept as it was."""
    bad = jnp.asarray([1.0, jnp.nan, 2.0])
    for moved in (
        move_log_gamma(small.uniforms(jax.random.key(0)), jnp.zeros(3), bad, jnp.ones(3)),
        move_logit_beta(small.uniforms(jax.random.key(0)), jnp.zeros(3), bad, jnp.ones(3)),
    ):
        np.testing.assert_array_equal(np.isnan(np.asarray(moved)), [False, True, False])
