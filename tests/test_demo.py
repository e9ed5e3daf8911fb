"""The command line and the demo, at reduced size, and the baselines it compares with."""

import functools

import numpy as np
import pytest
from scipy import special, stats
from sklearn.mixture import GaussianMixture

from geode_jax.cli.commands import run
from geode_jax.demo import digits
from geode_jax.demo.baselines import NormalMixture, fit_gaussian_mixture, fit_probabilistic_pca
from geode_jax.estimators.density import GeodeDensity


@pytest.mark.slow
def test_demo(tmp_path, capsys, monkeypatch):
    small = functools.partial(GeodeDensity, num_trees=1, max_rank=5, num_warmup=10, num_samples=10)
    monkeypatch.setattr(digits, "GeodeDensity", small)
    monkeypatch.setattr(digits, "fit_gaussian_mixture", lambda x, sizes, seed: fit_gaussian_mixture(x, (2,), seed))
    assert run(["demo", "--output", str(tmp_path / "picture.png")]) == 0
    out = capsys.readouterr().out
    for word in ("GEODE", "Gaussian mixture", "Probabilistic PCA", "intrinsic dimension", "weight by scale"):
        assert word in out
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("place", ["nowhere/picture.png", "picture.foo"])
def test_a_place_for_the_picture_is_looked_at_first(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(digits, "GeodeDensity")
    assert run(["demo", "--output", str(tmp_path / place)]) == 1
    assert f"{place}: expected a picture (" in capsys.readouterr().err


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["nonsense"])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.fixture
def mixture():
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(2, 4, 4))
    covariances = roots @ roots.transpose(0, 2, 1) + np.eye(4)
    return NormalMixture("two", np.array([0.3, 0.7]), 2 * rng.normal(size=(2, 4)), covariances)


def test_mixture_density(mixture):
    x = np.random.default_rng(1).normal(size=(5, 4))
    parts = [
        np.log(w) + stats.multivariate_normal(m, c).logpdf(x)
        for w, m, c in zip(mixture.weights, mixture.means, mixture.covariances, strict=True)
    ]
    np.testing.assert_allclose(mixture.log_density(x), special.logsumexp(parts, axis=0))


def test_mixture_imputation_matches_importance_sampling(mixture):
    """Conditional mean and interval of two entries given two, by weighting 200,000 prior draws of the pair."""
    row = np.array([[0.5, np.nan, -0.2, np.nan]])
    filled, lower, upper = mixture.impute(row, 0.9)
    rng = np.random.default_rng(0)
    part = rng.choice(2, p=mixture.weights, size=400_000)
    factors = np.linalg.cholesky(mixture.covariances)
    draws = mixture.means[part] + np.einsum("nij,nj->ni", factors[part], rng.normal(size=(part.size, 4)))
    seen = [0, 2]
    weight = np.exp(-0.5 * np.square((draws[:, seen] - row[0, seen]) / 0.1).sum(axis=1))
    for column in (1, 3):
        value = draws[:, column]
        np.testing.assert_allclose(filled[0, column], np.average(value, weights=weight), atol=0.08)
        for end, level in ((lower, 0.05), (upper, 0.95)):
            below = np.average(value < end[0, column], weights=weight)
            np.testing.assert_allclose(below, level, atol=0.02)


@pytest.mark.parametrize("form", ["full", "tied", "diag"])
def test_chosen_mixture_is_scikit_learns(form, monkeypatch):
    x = np.random.default_rng(0).normal(size=(120, 3)) @ np.diag([1.0, 2.0, 3.0])
    monkeypatch.setattr(GaussianMixture, "bic", lambda self, x: (self.covariance_type != form, self.n_components))
    chosen = fit_gaussian_mixture(x, (2, 3), 0)
    expected = GaussianMixture(2, covariance_type=form, random_state=0).fit(x)
    assert chosen.name == f"Gaussian mixture (2 {form} by BIC)"
    np.testing.assert_allclose(chosen.log_density(x), expected.score_samples(x), rtol=1e-6)


def test_probabilistic_pca_finds_the_rank():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)) @ rng.normal(size=(2, 8)) * 3 + 0.1 * rng.normal(size=(200, 8))
    assert fit_probabilistic_pca(x, (1, 2, 5)).name == "Probabilistic PCA (rank 2 by cross-validation)"
