"""Time of a sweep over rows with missing features, against the number of features and the share that is missing.

python -m benchmarks.missing_time [--quick]

After stage one the sampler's work knows neither (design, section 2.4). 300 rows near a plane, none complete, one tree
of depth 2, rank 20, four candidate nodes per row: the same shapes for every D, so one compiled program serves all.
Beside it the D-sized work that a sweep in the paper's form has at one node: draw the missing features, reduce the rows.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import geode_jax
from benchmarks.common import timed, write_result
from benchmarks.tables import load
from geode_jax.gibbs.chain import initial_chain
from geode_jax.gibbs.sweep import sweep

NUM_ROWS, RANK, NUM_SWEEPS = 300, 20, 30


def problem_of(num_features: int, share: float, times: dict[str, float]) -> Any:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM_ROWS, 2)) @ rng.normal(size=(2, num_features))
    rows += 0.1 * rng.normal(size=rows.shape)
    rows[rng.random(rows.shape) < share] = np.nan
    rows[np.arange(NUM_ROWS), rng.integers(num_features, size=NUM_ROWS)] = np.nan
    settings = geode_jax.DictionarySettings(
        max_rank=RANK,
        depth=2,
        num_trees=1,
        shared_span=None,
        missing_rows=geode_jax.MissingRows(num_candidates=4, num_groups=1),
    )
    with timed(times, "stage_one_seconds"):
        forest = geode_jax.learn_forest(jax.random.key(0), rows, dictionary=settings)
    times["partial_rows_mebibytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(forest.partial)) / 2**20
    problem = forest.problem(geode_jax.Prior(), geode_jax.SamplerSettings())
    return jax.tree.map(lambda leaf: leaf[0], problem), forest


@jax.jit
def _one_sweep(key: Any, state: Any, sums: Any, problem: Any) -> Any:
    return sweep(key, state, sums, problem)


@jax.jit
def _brute_force(key: Any, centre: Any, basis: Any, x: Any, is_observed: Any) -> Any:
    """The D-sized work of one sweep in the paper's form at one node: draw what is missing, reduce the row again."""
    noise = jax.random.normal(key, x.shape, x.dtype)
    completed = jnp.where(is_observed, x, noise)
    centred = completed - centre
    coordinates = centred @ basis
    return jnp.square(centred - coordinates @ basis.T).sum(axis=1), jnp.square(coordinates)


def sweep_milliseconds(problem: Any) -> float:
    """Median over sweeps, after the first."""
    chain = initial_chain(jax.random.key(0), problem)
    state, sums = chain.state, chain.sums
    taken = []
    for number in range(NUM_SWEEPS + 1):
        start = time.perf_counter()
        state, sums = jax.block_until_ready(_one_sweep(jax.random.key(number), state, sums, problem))
        taken.append(time.perf_counter() - start)
    return 1000 * float(np.median(taken[1:]))


def brute_milliseconds(forest: Any, num_features: int, share: float) -> float:
    x = jnp.zeros((NUM_ROWS, num_features))
    mask = jax.random.uniform(jax.random.key(1), x.shape) > share
    centre, basis = forest.dictionary.centres[0, 0], forest.dictionary.bases[0, 0]
    taken = []
    for number in range(11):
        start = time.perf_counter()
        jax.block_until_ready(_brute_force(jax.random.key(number), centre, basis, x, mask))
        taken.append(time.perf_counter() - start)
    return 1000 * float(np.median(taken[1:]))


def tables() -> list[str]:
    record = load("missing_time")
    settings = record["settings"]
    lines = [
        "### The time of a sweep does not depend on D",
        "",
        f"{settings['rows']} rows, none complete, one tree of depth 2, rank {settings['rank']}, four candidate nodes"
        f" per row; median of {settings['sweeps']} sweeps. Beside it the D-sized work that drawing the missing"
        " features would add at a single node.",
        "",
        "| D | missing | a sweep, ms | drawing and reducing in R^D, ms | matrices, MiB | stage one, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['features']} | {row['missing']:.0%} | {row['sweep_milliseconds']:.1f}"
            f" | {row['brute_milliseconds']:.1f} | {row['partial_rows_mebibytes']:.1f}"
            f" | {row['stage_one_seconds']:.1f} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    quick = parser.parse_args(arguments).quick
    rows = []
    for num_features in (50, 100) if quick else (500, 5000, 15000):
        for share in (0.3,) if quick else (0.1, 0.3, 0.6):
            times: dict[str, float] = {}
            problem, forest = problem_of(num_features, share, times)
            row = {
                "features": num_features,
                "missing": share,
                "sweep_milliseconds": sweep_milliseconds(problem),
                "brute_milliseconds": brute_milliseconds(forest, num_features, share),
                **times,
            }
            rows.append(row)
            print({key: round(value, 2) for key, value in row.items()}, flush=True)
    if not quick:
        write_result("missing_time", {"rows": NUM_ROWS, "rank": RANK, "sweeps": NUM_SWEEPS}, rows)
    return rows


if __name__ == "__main__":
    main()
