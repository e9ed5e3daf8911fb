"""The ArviZ converter, on whichever of ArviZ 0.x and 1.x is installed."""

import warnings

import equinox as eqx
import jax
import numpy as np
import pytest
import xarray
from conftest import DICTIONARY, SAMPLER

import geode_jax
from geode_jax import diagnostics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # 0.23 announces 1.x when it is imported
    import arviz

    from geode_jax.interop.arviz import to_arviz

pytestmark = pytest.mark.filterwarnings("ignore:::arviz", "ignore:::arviz_stats", "ignore:::xarray")


def test_groups_and_coordinates(posterior, data):
    found = to_arviz(posterior, data[:5])
    variables = found["posterior"]
    assert dict(variables.sizes) == {"chain": 2, "draw": 30, "tree": 2, "scale": 3, "node": 7, "dimension": 3}
    assert variables["sigma"].dims == ("chain", "draw", "tree", "scale")
    assert variables["weight"].dims == ("chain", "draw", "tree", "node")
    assert variables["tau"].dims == ("chain", "draw", "tree", "node", "dimension")
    np.testing.assert_array_equal(variables["node"], np.arange(7))
    np.testing.assert_array_equal(variables["scale_of_node"], [0, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(variables["sigma"].sel(tree=1, chain=0), posterior.sigma[1, 0])
    np.testing.assert_allclose(variables["weight"].sum("node"), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(found["sample_stats"]["lp"].sel(tree=0), posterior.draws.log_joint[0])
    assert (found["sample_stats"]["rows"].sum("node") == 90).all()
    likelihood = found["log_likelihood"]["x"]
    assert likelihood.dims == ("chain", "draw", "row")
    total = np.logaddexp.reduce(likelihood.values.reshape(-1, 5), axis=0) - np.log(60)
    np.testing.assert_allclose(total, geode_jax.log_density(posterior, data[:5]), rtol=1e-4)
    np.testing.assert_array_equal(found["observed_data"]["x"], data[:5])
    masked = to_arviz(posterior, np.ma.masked_array(data[:5], np.eye(5, 6)))
    np.testing.assert_array_equal(masked["observed_data"]["x"], np.where(np.eye(5, 6), np.nan, data[:5]))


def test_signal_is_alpha_in_data_units(posterior):
    """The largest eigenvalue of a node's covariance, where noise is isotropic, is alpha squared plus sigma squared."""
    variables = to_arviz(posterior)["posterior"]
    draws, unit = posterior.draws, np.exp(np.log(posterior.scale).mean())
    alpha2 = np.exp(draws.log_sigma2[1, 0, 3, 0]) * np.expm1(draws.neg_log_u[1, 0, 3, 0])
    found = variables["signal_sd"].isel(chain=0, draw=3, tree=1, node=0)
    np.testing.assert_allclose(found, unit * np.sqrt(alpha2), rtol=1e-5)


@pytest.mark.slow
def test_replicated_data_are_what_plot_ppc_takes(posterior, data):
    found = to_arviz(posterior, data[:40], jax.random.key(0), num_replications=10)
    replications = found["posterior_predictive"]["x"]
    assert replications.dims == ("chain", "draw", "row", "feature")
    assert replications.shape == (2, 10, 40, 6)
    np.testing.assert_array_equal(replications["draw"], np.linspace(0, 29, 10).round())
    mean = geode_jax.sample(jax.random.key(1), posterior, 800).mean(axis=0)
    tolerance = 4 * data.std(axis=0).max() / np.sqrt(400)
    np.testing.assert_allclose(replications.mean(["chain", "draw", "row"]), mean, atol=tolerance)
    if arviz.__version__.startswith("0."):
        arviz.plot_ppc(found, flatten=["row"], backend_kwargs={"squeeze": True})
    with pytest.raises(ValueError, match="X: expected rows to compare new ones with"):
        to_arviz(posterior, key=jax.random.key(0))
    with pytest.raises(ValueError, match="num_replications: expected an integer of at least 1, got 0"):
        to_arviz(posterior, data, jax.random.key(0), num_replications=0)
    key = jax.random.key(0)
    with jax.threefry_partitionable(False):
        other = to_arviz(posterior, data[:40], key, num_replications=10)
    xarray.testing.assert_equal(found["posterior_predictive"]["x"], other["posterior_predictive"]["x"])


def test_replicated_data_are_of_one_draw_each(posterior, data):
    """If the noise of one draw is tiny and its nodes have no spread, its rows are centres."""
    log_sigma2, neg_log_u = np.array(posterior.draws.log_sigma2), np.array(posterior.draws.neg_log_u)
    log_sigma2[:, 0, 0], neg_log_u[:, 0, 0] = -60.0, 0.0
    changed = eqx.tree_at(lambda it: (it.draws.log_sigma2, it.draws.neg_log_u), posterior, (log_sigma2, neg_log_u))
    found = to_arviz(changed, data[:40], jax.random.key(0), num_replications=2)["posterior_predictive"]["x"].values
    distinct = [[len(np.unique(rows.round(4), axis=0)) for rows in chain] for chain in found]
    assert distinct[0][0] <= 14  # nodes of two trees
    assert distinct[0][1] == distinct[1][0] == distinct[1][1] == 40


def test_without_rows_there_is_no_likelihood(posterior):
    found = to_arviz(posterior)
    groups = set(found.groups()) if not isinstance(found, xarray.DataTree) else set(found.children)
    assert groups == {"posterior", "sample_stats"}


@pytest.mark.slow
def test_learned_concentration_and_single_tree(data):
    fitted = geode_jax.fit(
        jax.random.key(0),
        data,
        dictionary=geode_jax.DictionarySettings(num_trees=1, max_rank=3, depth=2, min_cell_size=10),
        sampler=SAMPLER,
        prior=geode_jax.Prior(stop_concentration=geode_jax.GammaPrior()),
    )
    variables = to_arviz(fitted)["posterior"]
    np.testing.assert_allclose(
        variables["stop_concentration"].squeeze("tree"), np.exp(fitted.draws.log_stop_concentration[0]), rtol=1e-6
    )
    plain = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert "stop_concentration" not in to_arviz(plain)["posterior"]


def test_removed_directions_are_neutral(posterior):
    removed = eqx.tree_at(lambda it: it.draws.is_active, posterior, np.zeros_like(posterior.draws.is_active))
    assert (to_arviz(removed)["posterior"]["tau"] == 1.0).all()


def test_arviz_takes_it(posterior, data):
    """Summary, effective sizes and leave-one-out run; R-hat agrees with the package's own diagnostics."""
    found = to_arviz(posterior, data[:5])
    summary = arviz.summary(found, var_names=["sigma", "scale_weight"])
    assert len(summary) == 12
    r_hat = arviz.rhat(found, var_names=["sigma"])
    r_hat = r_hat.get("posterior", r_hat)["sigma"].sel(tree=0, scale=0)
    own = next(
        entry
        for entry in diagnostics.diagnose(posterior)
        if (entry.tree, entry.quantity) == (0, "log sigma at scale 0")
    )
    np.testing.assert_allclose(r_hat, own.r_hat, atol=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few draws: Pareto k
        assert np.isfinite(float(getattr(arviz.loo(found), "elpd_loo", None) or arviz.loo(found).elpd))
