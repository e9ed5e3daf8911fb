"""R-hat and effective draws per second: exact conditionals beside the published, direct membership beside slices.

Four chains on one tree, from over-dispersed starts. Frey faces (1000 of 1965 frames, D = 560) and a Swiss roll in
D = 200. Watched are the log joint, sigma and weight of every scale in use, active directions, and the log densities of
20 rows that were not in the fit. R-hat compares chains; effective draws are those within chains, summed; "nats apart"
is the range of the chains' mean log densities of those rows. Seconds are those of sampling, without stage one and
compilation. With D in the hundreds a row's node is all but certain given the rest, so that chains stay in the mode
their start led to: R-hat says so, the effective draws say how well a chain explores its mode.

python -m benchmarks.mixing [--quick] [--data FOLDER]
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

import geode_jax
from benchmarks.common import load_frey, write_result
from benchmarks.swiss_roll import make_roll
from benchmarks.tables import load
from geode_jax import diagnostics

VARIANTS = {
    "exact": {},
    "exact, slices": {"membership": geode_jax.SliceMembership()},
    "published": {"shrinkage": geode_jax.PublishedShrinkage()},
}


def data_sets(quick: bool, folder: str | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, training rows, watched rows)."""
    roll, _ = make_roll(400 if quick else 2020, "flat", 0)
    yield "Swiss roll", roll[20:], roll[:20]
    if not quick:
        frey = load_frey(folder)[np.random.default_rng(0).permutation(1965)]
        yield "Frey faces", frey[:1000], frey[1000:1020]


def within_chains(posterior: geode_jax.Posterior, watched: np.ndarray) -> dict[str, float]:
    """Effective draws of every quantity, each chain by itself, summed over chains."""
    found: dict[str, float] = {}
    for chain in range(posterior.num_chains):
        one = eqx.tree_at(
            lambda it: it.draws, posterior, jax.tree.map(lambda leaf, c=chain: leaf[:, c : c + 1], posterior.draws)
        )
        for entry in diagnostics.diagnose(one, watched):
            found[entry.quantity] = found.get(entry.quantity, 0.0) + min(entry.ess_bulk, entry.ess_tail)
    return found


def measure(forest: geode_jax.Forest, watched: np.ndarray, sampler: geode_jax.SamplerSettings) -> dict[str, Any]:
    """One variant: convergence of everything watched, and the time of sampling."""
    key = jax.random.key(1)
    short = dataclasses.replace(sampler, num_warmup=0, num_samples=sampler.segment_length)
    geode_jax.sample_posterior(key, forest, sampler=short)  # compiles
    start = time.perf_counter()
    posterior = geode_jax.sample_posterior(key, forest, sampler=sampler)
    seconds = time.perf_counter() - start
    between = {entry.quantity: entry.r_hat for entry in diagnostics.diagnose(posterior, watched)}
    within = within_chains(posterior, watched)
    rows = [name for name in between if name.startswith("log density")]
    parameters = [name for name in between if "density" not in name]
    by_chain = np.logaddexp.reduce(geode_jax.log_density_draws(posterior, watched)[0], axis=1).mean(axis=1)
    return {
        "seconds": seconds,
        "r_hat_parameters": max(between[name] for name in parameters),
        "r_hat_densities": float(np.median([between[name] for name in rows])),
        "ess_parameters": min(within[name] for name in parameters),
        "ess_densities": float(np.median([within[name] for name in rows])),
        "ess_log_joint": within["log joint"],
        "nats_between_chains": float(np.ptp(by_chain)),
        "nats": float(geode_jax.log_density(posterior, watched).mean()),
    }


def tables() -> list[str]:
    record = load("mixing")
    lines = [
        f"**Mixing**, four chains on one tree, {record['settings']['num_samples']} draws each after as many of warm-up,"
        f" `{record['command']}`. Effective draws are those within chains; R-hat compares chains from over-dispersed"
        " starts. With D in the hundreds they stay in the mode that their start led to: `diagnostics.report` says so,"
        " and predictions average over the chains.",
        "",
        "| data | conditionals | R-hat, worst | R-hat, row densities | effective draws, row densities | per second |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['data']} | {row['variant']} | {row['r_hat_parameters']:.2f} | {row['r_hat_densities']:.2f}"
            f" | {row['ess_densities']:.0f} | {row['ess_densities'] / row['seconds']:.0f} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--data", help="folder with frey_faces.npz")
    options = parser.parse_args(arguments)
    lengths = {"num_warmup": 50, "num_samples": 50} if options.quick else {"num_warmup": 1000, "num_samples": 1000}
    rows = []
    titles = ("R-hat worst", "densities", "ESS worst", "densities", "per s", "nats apart", "nats")
    print(f"{'data':<12}{'conditionals':<16}" + "".join(f"{title:>12}" for title in titles))
    for name, train, watched in data_sets(options.quick, options.data):
        dictionary = geode_jax.DictionarySettings(num_trees=1, max_rank=10 if options.quick else None)
        forest = geode_jax.learn_forest(jax.random.key(0), train, dictionary=dictionary)
        for variant, settings in VARIANTS.items():
            sampler = geode_jax.SamplerSettings(num_chains=4, **lengths, **settings)
            row = {"data": name, "variant": variant, **measure(forest, watched, sampler)}
            rows.append(row)
            print(
                f"{name:<12}{variant:<16}{row['r_hat_parameters']:>12.2f}{row['r_hat_densities']:>12.2f}"
                f"{row['ess_parameters']:>12.0f}{row['ess_densities']:>12.0f}"
                f"{row['ess_densities'] / row['seconds']:>12.1f}"
                f"{row['nats_between_chains']:>12.2f}{row['nats']:>12.2f}",
                flush=True,
            )
    if not options.quick:
        write_result("mixing", {"num_chains": 4, **lengths}, rows)
    return rows


if __name__ == "__main__":
    main()
