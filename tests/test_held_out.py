"""Leave-one-out densities of training rows, and the novelty that is measured by them."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

import geode_jax
from geode_jax import CrossFit, DictionarySettings, SamplerSettings

SETTINGS = DictionarySettings(num_trees=2, max_rank=4, depth=2, cross_fit=CrossFit(5))
SAMPLER = SamplerSettings(num_warmup=60, num_samples=60)


def _rows(count, seed):
    """A noisy curved sheet in 12 dimensions."""
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(5, 12))
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-1, 1, (2, count))
    latent = np.stack([a, b, a**2, a * b, np.sin(3 * b)], axis=1)
    return 100.0 + 20.0 * (latent @ directions + 0.1 * rng.normal(size=(count, 12)))


@pytest.fixture(scope="module")
def fitted():
    forest = geode_jax.learn_forest(jax.random.key(0), _rows(300, 2), dictionary=SETTINGS)
    return forest, geode_jax.sample_posterior(jax.random.key(1), forest, sampler=SAMPLER)


@pytest.mark.slow
def test_it_is_the_density_of_new_rows_not_of_known_ones():
    """Mean over three fits to 150 rows: within four standard errors of that of new rows, that of known ones is not."""
    gaps, known_gaps, errors = [], [], []
    for seed in range(3):
        rows = _rows(150, 10 + seed)
        forest = geode_jax.learn_forest(jax.random.key(seed), rows, dictionary=SETTINGS)
        posterior = geode_jax.sample_posterior(jax.random.key(seed), forest, sampler=SAMPLER)
        held_out = geode_jax.held_out_log_density(forest, posterior)
        new = geode_jax.log_density(posterior, _rows(2000, 3)).mean()
        gaps.append(held_out.mean() - new)
        known_gaps.append(geode_jax.log_density(posterior, rows).mean() - new)
        errors.append(held_out.var() / held_out.size)
    limit = 4 * np.sqrt(np.sum(errors)) / 3
    assert abs(np.mean(gaps)) < limit < np.mean(known_gaps)


def test_draws_for_another_forest_are_refused(fitted, posterior):
    """`fit` learns a forest of its own; densities of one forest's rows under another's draws would mean nothing."""
    forest, draws = fitted
    other = geode_jax.learn_forest(jax.random.key(1), _rows(300, 2), dictionary=SETTINGS)
    with pytest.raises(ValueError, match="posterior: expected draws for this forest, got draws for one with other"):
        geode_jax.held_out_log_density(other, draws)
    with pytest.raises(ValueError, match=r"posterior: expected draws for this forest, got .* other settings"):
        geode_jax.held_out_log_density(forest, posterior)
    # the centres of all rows' dictionary are the same without folds, and in other units; the statistics are not
    in_sample = geode_jax.learn_forest(
        jax.random.key(0), _rows(300, 2), dictionary=dataclasses.replace(SETTINGS, cross_fit=None)
    )
    with pytest.raises(ValueError, match="got draws for one with other settings"):
        geode_jax.held_out_log_density(in_sample, draws)
    with pytest.raises(ValueError, match="got draws for one with other units"):
        geode_jax.held_out_log_density(dataclasses.replace(forest, scale=4 * forest.scale), draws)


def test_importance_ratios_are_those_of_leaving_out(fitted):
    """Where no ratio is cut, every tree's density is the harmonic mean of those under its draws; else it lies between
    that and the average over draws, which knows the row."""
    forest, posterior = fitted
    held_out = geode_jax.held_out_log_density(forest, posterior)
    by_draw = _known(forest, posterior)
    log_count = np.log(posterior.num_draws)
    harmonic = log_count - np.logaddexp.reduce(-by_draw, axis=1)
    average = np.logaddexp.reduce(by_draw, axis=1) - log_count
    lowest, highest = (np.logaddexp.reduce(by_tree, axis=0) - np.log(2) for by_tree in (harmonic, average))
    assert (held_out >= lowest - 2e-3).all()
    assert (held_out <= highest + 2e-3).all()
    assert np.median(highest - held_out) > 0.01
    is_cut = (-by_draw.min(axis=1) > log_count / 2 - harmonic).any(axis=0)
    assert (~is_cut).sum() > 100
    np.testing.assert_allclose(held_out[~is_cut], lowest[~is_cut], atol=2e-3)


def _known(forest, posterior):
    """Log density of the training rows by their own statistics, (F, T, n), written out."""
    statistics = forest.statistics
    scale = posterior.dictionary.tree.scale
    found = []
    for f in range(posterior.num_trees):
        parts = (statistics.residual, statistics.squared)
        residual, squared = (np.asarray(part, np.float64)[f][:, :300] for part in parts)
        draws = jax.tree.map(lambda leaf, f=f: np.asarray(leaf, np.float64)[f, 0], posterior.draws)
        for t in range(posterior.num_draws):
            log_sigma2 = draws.log_sigma2[t][scale]
            quadratic = residual + np.einsum("knd,kd->kn", squared, np.exp(-draws.neg_log_u[t]))
            score = -0.5 * (12 * (np.log(2 * np.pi) + log_sigma2) + draws.neg_log_u[t].sum(axis=1))
            score = score[:, None] - 0.5 * quadratic / np.exp(log_sigma2)[:, None] + draws.log_weights[t][:, None]
            found.append(np.logaddexp.reduce(score, axis=0) + posterior.log_jacobian)
    return np.array(found).reshape(posterior.num_trees, posterior.num_draws, 300)


def test_novelty_has_the_false_alarms_that_it_promises():
    """2000 new rows of the same distribution: the share below each level, within four standard deviations."""
    model = geode_jax.GeodeDensity(max_rank=4, depth=2, num_trees=2, num_warmup=60, num_samples=60, random_state=0)
    model.fit(_rows(300, 2))
    assert (np.diff(model.held_out_scores_) >= 0).all()
    p_values = model.novelty(_rows(2000, 3))
    for level in (0.05, 0.2, 0.5):
        deviation = np.sqrt(level * (1 - level) * (1 / 300 + 1 / 2000))
        assert (p_values < level).mean() == pytest.approx(level, abs=4 * deviation)
    assert p_values.min() >= 1 / 301
    assert model.novelty(_rows(20, 4) + 30.0 * np.random.default_rng(0).normal(size=(20, 12))).max() < 0.01
    with pytest.raises(ValueError, match="X: expected no missing values without calibration rows, got 1 NaN"):
        model.novelty(np.where(np.arange(24).reshape(2, 12) == 3, np.nan, _rows(2, 5)))


def test_novelty_of_rows_with_holes_holds_for_every_mask(posterior):
    """Each row against calibration rows under its own mask: uniform p-values for two masks of different density."""
    model = geode_jax.GeodeDensity()
    model.posterior_, model.n_features_in_ = posterior, 6
    rows = geode_jax.sample(jax.random.key(0), posterior, 1200)
    new, known = np.array(rows[:900]), rows[900:]
    new[:300, 0] = np.nan
    new[300:600, 1:5] = np.nan
    found = model.novelty(new, calibration=known)
    for mask in range(3):
        for level in (0.1, 0.5):
            deviation = np.sqrt(level * (1 - level) * (1 / 300 + 1 / 300))
            assert (found[300 * mask : 300 * (mask + 1)] < level).mean() == pytest.approx(level, abs=4 * deviation)
    assert found.min() >= 1 / 301
    strange = np.array(new[[0, 300, 600]])
    strange[:, 5] += 100 * posterior.scale[5]
    assert (model.novelty(strange, calibration=known) == 1 / 301).all()
    assert model.novelty(np.full((1, 6), np.nan), calibration=known)[0] == 1.0


def test_calibration_rows_must_show_what_the_row_shows(posterior):
    model = geode_jax.GeodeDensity()
    model.posterior_, model.n_features_in_ = posterior, 6
    known = np.array(geode_jax.sample(jax.random.key(0), posterior, 20))
    new = known[:3].copy()
    known[:19, 2] = np.nan
    np.testing.assert_array_equal(model.novelty(new, calibration=known[19:]), model.novelty(new, calibration=known))
    with pytest.raises(ValueError, match=r"calibration: expected rows with values in all features that X\[0\] shows"):
        model.novelty(new, calibration=known[:19])
    new[:, 2] = np.nan
    assert model.novelty(new, calibration=known[:19]).min() >= 1 / 20


def test_calibration_rows_have_the_columns_of_the_fit(posterior, data):
    model = geode_jax.GeodeDensity()
    model.posterior_, model.n_features_in_ = posterior, 6
    model.feature_names_in_ = np.array(list("abcdef"), dtype=object)
    frame = pd.DataFrame(data[:30], columns=list("abcdef"))
    assert model.novelty(frame[:3], calibration=frame[3:]).shape == (3,)
    for call in (model.novelty, lambda X, calibration: model.impute(X, 0.5, calibration)):
        with pytest.raises(ValueError, match="feature names"):
            call(frame[:3], calibration=frame[list("fedcba")])


@pytest.mark.slow
def test_novelty_needs_complete_training_rows():
    rows = _rows(60, 2)
    rows[np.arange(60), np.arange(60) % 12] = np.nan
    model = geode_jax.GeodeDensity(max_rank=3, depth=1, num_trees=1, num_warmup=5, num_samples=5, random_state=0)
    model.fit(rows)
    assert model.held_out_scores_.size == 0
    with pytest.raises(ValueError, match="densities of complete rows of fit, and there are none: no row was complete"):
        model.novelty(_rows(2, 5))
