"""The truncated gamma, by draws and by moves, and its normaliser, against mpmath."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import small
from scipy import stats

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.math.truncated import draw_log_truncated_gamma, log_lower_gamma_at_one, move_log_truncated_gamma
from geode_jax.math.uniforms import Uniforms

SHAPES = (0.5, 1.0, 7.0, 1e3, 1e6, 1e9, 1e12)
RATES = (1.0, 3.0, 1e2, 1e5, 1e9)
NUM_DRAWS = 20_000


def _cdf(shape, rate):
    """CDF of t = -log u on a fine grid of its own density, independent of the code under test.

    The potential is written about its minimum with a Taylor series near it, in float64.
    """
    offset = max(0.0, np.log(rate / shape))
    slope, curvature = max(shape - rate, 0.0), min(shape, rate)
    width = 2.0 / (slope + np.hypot(slope, np.sqrt(2 * curvature)))
    low = -min(offset, 40 * width)
    high = (45 if slope or shape < 50 else 12) * max(width, 1.0 / shape)
    y = np.linspace(low, high, 400_001)
    small = np.where(np.abs(y) < 1e-2, y, 0.0)
    series = small**2 * (1 / 2 - small * (1 / 6 - small * (1 / 24 - small * (1 / 120 - small / 720))))
    potential = slope * y + curvature * np.where(np.abs(y) < 1e-2, series, np.expm1(-y) + y)
    density = np.exp(-potential)
    total = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    return lambda t: np.interp(t - offset, y, total / total[-1])


GRID = [(shape, rate) for shape in SHAPES for rate in RATES]


def grid_p_values(dtype):
    """Kolmogorov-Smirnov p-value at every point of the grid."""
    with jax_settings(dtype):
        draw = jax.jit(jax.vmap(draw_log_truncated_gamma))
        log_shape = jnp.log(jnp.asarray([shape for shape, _ in GRID], dtype))
        rate = jnp.asarray([rate for _, rate in GRID], dtype)
        tiled = (jnp.tile(log_shape[:, None], (1, NUM_DRAWS)), jnp.tile(rate[:, None], (1, NUM_DRAWS)))
        log_t = np.asarray(draw(jax.random.split(jax.random.key(7), len(GRID)), *tiled), np.float64)
    assert np.isfinite(log_t).all()
    return [stats.kstest(np.exp(draws), _cdf(*point)).pvalue for draws, point in zip(log_t, GRID, strict=True)]


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_truncated_gamma_draws(dtype):
    """Kolmogorov-Smirnov over a 35-point grid; false alarm at most 1e-4 for the whole grid (Bonferroni)."""
    p_values = grid_p_values(dtype)
    assert min(p_values) > 1e-4 / len(GRID), GRID[int(np.argmin(p_values))]


def test_reference_cdf_agrees_with_mpmath():
    for shape, rate in ((0.5, 1.0), (7.0, 3.0), (7.0, 1e2), (1e3, 1e3)):
        cdf = _cdf(shape, rate)
        t = max(np.log(rate / shape), 0.0) + np.array([0.2, 0.7, 2.0]) / np.sqrt(shape)
        exact = [float(mpmath.gammainc(shape, rate * np.exp(-v), rate) / mpmath.gammainc(shape, 0, rate)) for v in t]
        np.testing.assert_allclose(cdf(t), exact, atol=2e-5)


def test_truncated_gamma_beyond_float32():
    """Shapes that overflow float32 are exponential on the log scale: shape * t ~ Exp(1)."""
    log_shape = jnp.full(20_000, 250.0, jnp.float32)
    log_t = draw_log_truncated_gamma(jax.random.key(0), log_shape, jnp.ones_like(log_shape))
    assert stats.kstest(np.exp(np.asarray(log_t, np.float64) + 250.0), "expon").pvalue > 1e-4


def test_few_rounds_over_the_whole_range(monkeypatch):
    """Bad tangent points never make a wrong draw, only a slow one: 20,000 lanes must all end within 12 rounds."""
    rounds = []
    original = jax.lax.while_loop

    def counted(condition, body, start):
        result, count = original(
            lambda carry: condition(carry[0]), lambda carry: (body(carry[0]), carry[1] + 1), (start, 0)
        )
        rounds.append(count)
        return result

    monkeypatch.setattr(jax.lax, "while_loop", counted)

    @jax.jit
    def draw(key, log_shape, rate):
        draw_log_truncated_gamma(key, jnp.full(20_000, log_shape), jnp.full(20_000, rate))
        return rounds.pop()

    worst = max(int(draw(jax.random.key(1), np.float32(np.log(a)), np.float32(b))) for a in SHAPES for b in RATES)
    assert worst <= 12


def test_lower_gamma_normaliser():
    delta = np.array([1.0, 1.3, 4.0, 60.0, 1e3, 1e4])
    exact = [float(mpmath.log(mpmath.gammainc(value + 1, 0, 1))) for value in delta]
    with jax_settings(np.float64):
        np.testing.assert_allclose(log_lower_gamma_at_one(jnp.log(jnp.asarray(delta))), exact, rtol=1e-13)
    found = log_lower_gamma_at_one(jnp.log(jnp.asarray(delta, jnp.float32)))
    np.testing.assert_allclose(found, exact, rtol=3e-7)
    # -1 - log(delta) to within rounding for delta of any size
    np.testing.assert_allclose(log_lower_gamma_at_one(jnp.asarray([200.0], jnp.float32)), [-201.0], rtol=1e-6)


@pytest.mark.slow
def test_moves_keep_the_truncated_gamma():
    """From draws, and from anywhere: a Metropolis step that takes nine in ten proposals, and never one that is not."""
    points = jnp.asarray([(np.log(shape), rate) for shape, rate in GRID], jnp.float32)
    tiled = tuple(jnp.tile(points[:, i : i + 1], (1, NUM_DRAWS)) for i in (0, 1))

    @functools.partial(jax.jit, compiler_options=small.OPTIMISED)
    def moved(log_t, number):
        uniforms = Uniforms(jax.random.key(number), 2 * log_t.size, np.float32).take(2, *log_t.shape)
        return move_log_truncated_gamma(uniforms, log_t, *tiled)

    draw = jax.jit(draw_log_truncated_gamma, compiler_options=small.OPTIMISED)
    for start in (draw(jax.random.key(0), *tiled), jnp.full_like(tiled[0], -70.0), 0 * tiled[0]):
        log_t = start
        for number in range(8):
            log_t, last = moved(log_t, number + 1), log_t
        assert np.mean(np.asarray(log_t != last), axis=1).min() > 0.88
        p_values = [
            stats.kstest(np.exp(np.asarray(draws, np.float64)), _cdf(*point)).pvalue
            for draws, point in zip(log_t, GRID, strict=True)
        ]
        assert min(p_values) > 1e-4 / len(GRID), GRID[int(np.argmin(p_values))]


def test_moves_show_what_is_not_finite():
    """A lane that cannot be drawn is not kept as it was."""
    uniforms = Uniforms(jax.random.key(0), 6, np.float32).take(2, 3)
    moved = move_log_truncated_gamma(uniforms, jnp.zeros(3), jnp.asarray([1.0, jnp.nan, 1.0]), jnp.ones(3))
    assert np.isfinite(np.asarray(moved)[[0, 2]]).all()
    assert np.isnan(np.asarray(moved)[1])
