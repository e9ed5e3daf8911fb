"""The two truncation bounds against distances that are measured: between densities drawn from the prior and cut off.

Each draw is a whole model: a tree of depth 8 with directions and centres at random in D = 20, its parameters from the
prior. Its density is cut at every depth and every rank, and the total variation distance between the two estimated from
rows drawn from the whole one, ``E max(0, 1 - g / f)``.

python -m benchmarks.truncation [--quick]
"""

import argparse
import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from benchmarks.common import write_result
from benchmarks.sweep import synthetic_problem
from benchmarks.tables import load, table
from geode_jax._typing import Array, KeyArray
from geode_jax.gibbs.membership import node_scores
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.joint import sample_prior, simulate
from geode_jax.model.state import State
from geode_jax.model.statistics import Statistics, statistics_of
from geode_jax.model.tree import tree_from_mask
from geode_jax.settings import Prior
from geode_jax.truncation import depth_error, rank_error

DEPTH, RANK, NUM_FEATURES = 8, 6, 20
PRIORS = {
    "the paper's": Prior.published(),
    "a_S = 3, a = 1": dataclasses.replace(Prior.published(), stop_concentration=3.0, tau_rate=1.0),
}


def random_dictionary(key: KeyArray, depth: int, rank: int) -> Dictionary:
    """Centres of unit variance, bases without preference."""
    key_centre, key_basis = jax.random.split(key)
    num_nodes = 2 ** (depth + 1) - 1
    bases = jnp.linalg.qr(jax.random.normal(key_basis, (num_nodes, NUM_FEATURES, rank)))[0]
    centres = jax.random.normal(key_centre, (num_nodes, NUM_FEATURES))
    return Dictionary(tree_from_mask(np.ones(num_nodes, bool)), centres, bases, jnp.full(num_nodes, rank))


def log_density(state: State, dictionary: Dictionary, statistics: Statistics) -> Array:
    """Log density of the rows, (n,)."""
    return logsumexp(node_scores(state, statistics, dictionary.tree, NUM_FEATURES), axis=0)


@partial(jax.jit, static_argnames=("prior", "depth", "rank", "num_rows"))
def distances(key: KeyArray, prior: Prior, depth: int, rank: int, num_rows: int) -> tuple[Array, Array]:
    """Total variation between one density from the prior and itself cut at depths 0.. and ranks 0.. below its own."""
    key_dictionary, key_state, key_rows = jax.random.split(key, 3)
    dictionary = random_dictionary(key_dictionary, depth, rank)
    available = jnp.ones(dictionary.bases.shape[::2], bool)
    problem = dataclasses.replace(synthetic_problem(1, depth, rank), prior=prior)
    state = sample_prior(key_state, problem, available, num_rows)
    statistics = statistics_of(dictionary, simulate(key_rows, dictionary, state))
    whole = log_density(state, dictionary, statistics)

    def distance(cut: State) -> Array:
        ratio = jnp.exp(log_density(cut, dictionary, statistics) - whole)
        return jnp.maximum(0.0, 1.0 - ratio).mean()

    scale, place = jnp.asarray(dictionary.tree.scale)[:, None], jnp.arange(rank)
    by_depth = [
        distance(
            eqx.tree_at(lambda it: it.logit_stop, state, jnp.where(scale[:, 0] == last, jnp.inf, state.logit_stop))
        )
        for last in range(depth)
    ]
    by_rank = [
        distance(eqx.tree_at(lambda it: it.is_active, state, available & (place < kept))) for kept in range(rank)
    ]
    return jnp.stack(by_depth), jnp.stack(by_rank)


def tables() -> list[str]:
    record = load("truncation")
    settings = record["settings"]
    lines = [
        "### What a finite tree and finite ranks lose, a priori",
        "",
        "The paper's two theorems: expected total variation"
        f" distance between a density from the prior and the same cut off, {settings['draws']} densities; bound by"
        " `geode_jax.truncation`:",
        "",
    ]
    rows = [
        [
            row["prior"],
            f"{row['cut']} {row['at']}",
            f"{row['bound']:.1e}",
            f"{row['measured']:.1e} ± {row['standard_error']:.0e}",
        ]
        for row in record["rows"]
    ]
    return lines + table(["prior", "cut at", "bound", "measured"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    depth, rank, num_draws, num_rows = (2, 2, 3, 50) if options.quick else (DEPTH, RANK, 200, 1000)
    rows: list[dict[str, Any]] = []
    for name, prior in PRIORS.items():
        found = [distances(jax.random.key(draw), prior, depth, rank, num_rows) for draw in range(num_draws)]
        for what, bound, measured in zip(
            ("depth", "rank"), (depth_error, rank_error), map(np.array, zip(*found, strict=True)), strict=True
        ):
            for number, values in enumerate(measured.T):
                row = {"prior": name, "cut": what, "at": number, "bound": bound(number, prior)}
                error = values.std(ddof=1) / np.sqrt(num_draws)
                rows.append({**row, "measured": float(values.mean()), "standard_error": float(error)})
                print(rows[-1], flush=True)
    if not options.quick:
        write_result("truncation", {"depth": depth, "rank": rank, "draws": num_draws, "rows": num_rows}, rows)
    return rows


if __name__ == "__main__":
    main()
