"""Conversion of a fit to ArviZ: `InferenceData` for ArviZ 0.x, an xarray `DataTree` for 1.x.

Imported by the user: ``from geode_jax.interop.arviz import to_arviz``.
"""

from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import xarray

from geode_jax._checks import check_data, check_instance, check_integer, check_key
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.api import log_density_draws
from geode_jax.predict.constants import with_constants
from geode_jax.predict.samples import sample_rows
from geode_jax.settings import GammaPrior


def to_arviz(
    posterior: Posterior, X: ArrayLike | None = None, key: KeyArray | None = None, *, num_replications: int = 50
) -> Any:
    """Convert a posterior to ArviZ; if rows X, (n, D), are given, with their log densities.

    Groups and their variables, all with dimensions (chain, draw, tree, ...):

    - `posterior`: `sigma`, `scale_weight` (by scale), `weight` (by node), `tau` and `signal_sd` (by node and
      dimension), and `stop_concentration` if it is learned. `signal_sd` is alpha, the standard deviation along a
      direction. Sigma and signal_sd are in the data's units, to be multiplied by a feature's relative noise scale. At a
      removed direction tau is 1 and signal_sd 0.
    - `sample_stats`: `lp` (the log joint), `active_dimensions` and `rows`, the number of rows (by node).
    - `log_likelihood`: `x` with dimensions (chain, draw, row), averaged over trees, and `observed_data`. The result has
      a number for every draw and row, and while it is computed there is one for every tree too. Not for ``arviz.loo``:
      it takes rows out of the posterior, but new rows are not in it, and training rows are in stage one too. The log
      score of new rows is :func:`geode_jax.log_density`, that of training rows :func:`geode_jax.held_out_log_density`.
    - `posterior_predictive`, if a `key` is given too: `x` with dimensions (chain, draw, row, feature), what
      ``arviz.plot_ppc`` (``plot_ppc_dist`` in ArviZ 1.x) compares X with. For each of at most `num_replications` draws,
      evenly spread over a chain, as many new rows as X has, each of a random tree. The result has chains x replications
      x n x D numbers: for large X pass some of its rows.

    Compare chains within a tree only. Nodes are numbered in heap order; those absent from every tree are left out.
    """
    check_instance(posterior, "posterior", Posterior)
    if X is None and key is not None:
        raise ValueError("X: expected rows to compare new ones with, as a key was given, got None")
    key = None if key is None else check_key(key)
    count = check_integer(num_replications, "num_replications", 1)
    groups = {"posterior": _posterior(posterior), "sample_stats": _sample_stats(posterior)}
    if X is not None:
        data = check_data(X, allow_nan=True, num_features=posterior.num_features)
        densities = log_density_draws(posterior, data)
        averaged = np.logaddexp.reduce(densities, axis=0) - np.log(densities.shape[0])
        groups["log_likelihood"] = _dataset({"x": (("chain", "draw", "row"), averaged)})
        groups["observed_data"] = xarray.Dataset({"x": (("row", "feature"), data)})
        if key is not None:
            groups["posterior_predictive"] = _replications(key, posterior, len(data), count)
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(**groups)  # type: ignore[arg-type]
    return xarray.DataTree.from_dict(groups)


def _replications(key: KeyArray, posterior: Posterior, num_rows: int, count: int) -> xarray.Dataset:
    """Rows drawn under one draw at a time: averaged over draws, data sets would look too much alike."""
    num_chains = posterior.num_chains
    number = np.unique(np.linspace(0, posterior.num_draws - 1, count).round().astype(int))
    values = np.empty((num_chains, number.size, num_rows, posterior.num_features))
    with jax_settings(posterior.dtype):
        keys = jax.random.split(key, (num_chains, number.size))
        for chain, draw in np.ndindex(*keys.shape):
            one = jax.tree.map(
                lambda leaf, at=(chain, number[draw]): jnp.asarray(np.asarray(leaf)[:, at[0], at[1], None]),
                posterior.draws,
            )
            row = np.arange(num_rows, dtype=np.int32)
            rows = sample_rows(keys[chain, draw], posterior.dictionary, one, posterior.space, row)
            values[chain, draw] = with_constants(keys[chain, draw], posterior, np.asarray(rows))
    dataset = _dataset({"x": (("chain", "draw", "row", "feature"), values)})
    return dataset.assign_coords(draw=number)


def _posterior(posterior: Posterior) -> xarray.Dataset:
    draws, kept = posterior.draws, _kept_nodes(posterior)
    sigma2 = np.exp(draws.log_sigma2)[..., posterior.dictionary.tree.scale[kept]]
    signal = posterior.unit * np.sqrt(sigma2[..., None] * np.expm1(draws.neg_log_u[..., kept, :]))
    variables: dict[str, Any] = {
        "sigma": (("scale",), posterior.sigma),
        "scale_weight": (("scale",), posterior.scale_weights),
        "weight": (("node",), np.exp(draws.log_weights[..., kept])),
        "signal_sd": (("node", "dimension"), signal),
        "tau": (("node", "dimension"), np.where(draws.is_active, draws.tau, 1.0)[..., kept, :]),
    }
    if isinstance(posterior.prior.stop_concentration, GammaPrior):
        variables["stop_concentration"] = ((), np.exp(draws.log_stop_concentration))
    return _by_tree(variables, posterior)


def _sample_stats(posterior: Posterior) -> xarray.Dataset:
    draws, kept = posterior.draws, _kept_nodes(posterior)
    variables = {
        "lp": ((), draws.log_joint),
        "active_dimensions": (("node",), np.asarray(draws.is_active).sum(axis=-1)[..., kept]),
        "rows": (("node",), draws.count[..., kept]),
    }
    return _by_tree(variables, posterior)


def _kept_nodes(posterior: Posterior) -> np.ndarray:
    return np.flatnonzero(np.asarray(posterior.dictionary.tree.is_present).any(axis=0))


def _by_tree(variables: dict[str, Any], posterior: Posterior) -> xarray.Dataset:
    """Dataset of variables with axes (F, C, T, ...) and the names of the axes after those."""
    kept = _kept_nodes(posterior)
    moved = {
        name: (("chain", "draw", "tree", *dims), np.moveaxis(np.asarray(values), 0, 2))
        for name, (dims, values) in variables.items()
    }
    dataset = _dataset(moved).assign_coords(tree=np.arange(posterior.num_trees), node=kept)
    dataset = dataset.assign_coords(scale_of_node=("node", posterior.dictionary.tree.scale[kept]))
    for name in ("scale", "dimension"):
        if name in dataset.dims:
            dataset = dataset.assign_coords({name: np.arange(dataset.sizes[name])})
    return dataset


def _dataset(variables: dict[str, Any]) -> xarray.Dataset:
    dataset = xarray.Dataset(variables, attrs={"inference_library": "geode_jax"})
    sizes = {name: np.arange(dataset.sizes[name]) for name in ("chain", "draw", "row") if name in dataset.sizes}
    return dataset.assign_coords(sizes)
