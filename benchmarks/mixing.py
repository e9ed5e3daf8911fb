"""R-hat and effective draws per second: exact conditionals beside the published, direct membership beside slices.

Four chains on one tree, from over-dispersed starts. Frey faces (1000 of 1965 frames, D = 560) and a Swiss roll in
D = 200. Watched are the log joint, sigma and weight of every scale in use, and the log densities of 20 rows that were
not in the fit; not the number of active directions, which adaptation fixes for each chain. R-hat compares chains;
effective draws are those within chains, summed. Seconds are those of sampling, without stage one; the program of a long
run may be compiled in them.

Where all rows are as noisy, as on the roll, the densities of chains agree. Frey's frames are not, and the deeper scales
take up the rows of one noise level each: which scale takes which level differs between chains. A run ten times as long
shows whether that changes.

How to combine such chains: their average with equal weights beside weights by stacking (Yao, Vehtari & Gelman 2022),
from leave-one-out densities of training rows, in nats per row that was not in the fit.

Beside it how soon later directions are explored, whose delta the rows of a node hardly tell of: u and tau alone, given
the rows of 127 like nodes, of which a quarter of 100 directions are above the noise. The integrated autocorrelation
time of log delta, with and without renewing directions together.

python -m benchmarks.mixing [--quick] [--data FOLDER]
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, load_frey, write_result
from benchmarks.sweep import synthetic_problem
from benchmarks.swiss_roll import make_roll
from benchmarks.tables import load
from geode_jax import diagnostics
from geode_jax._typing import Array
from geode_jax.gibbs import shrinkage, signal
from geode_jax.gibbs.sweep import node_uniforms
from geode_jax.model.joint import sample_prior
from geode_jax.model.state import NodeSums, State
from geode_jax.model.tree import tree_from_mask
from geode_jax.predict.held_out import held_out_log_density

VARIANTS = {
    "exact": {},
    "exact, slices": {"membership": geode_jax.SliceMembership()},
    "published": {"shrinkage": geode_jax.PublishedShrinkage()},
}


def data_sets(quick: bool, folder: str | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, training rows, held-out rows)."""
    roll, _ = make_roll(170 if quick else 2500, "flat", 0)
    held_out = 50 if quick else 500
    yield "Swiss roll", roll[held_out:], roll[:held_out]
    if not quick:
        frey = load_frey(folder)[np.random.default_rng(0).permutation(1965)]
        yield "Frey faces", frey[:1000], frey[1000:]


def chains_of(posterior: geode_jax.Posterior) -> list[geode_jax.Posterior]:
    """Each chain by itself."""
    return [
        eqx.tree_at(
            lambda it: it.draws, posterior, jax.tree.map(lambda leaf, c=chain: leaf[:, c : c + 1], posterior.draws)
        )
        for chain in range(posterior.num_chains)
    ]


def stacking_weights(log_density: np.ndarray) -> np.ndarray:
    """Weights of models that give their mixture the highest mean log density of rows, from (rows, models), by EM."""
    weights = np.full(log_density.shape[1], 1.0 / log_density.shape[1])
    for _ in range(5000):
        weights = special.softmax(log_density + np.log(np.maximum(weights, 1e-300)), axis=1).mean(axis=0)
    return weights


def combined(posterior: geode_jax.Posterior, forest: geode_jax.Forest, held_out: np.ndarray) -> dict[str, float]:
    """Held-out nats per row of single chains, of their average, and of the average by stacking weights."""
    chains = chains_of(posterior)
    inside = np.stack([held_out_log_density(forest, chain) for chain in chains], axis=1)
    outside = np.stack([geode_jax.log_density(chain, held_out) for chain in chains], axis=1)
    weights = stacking_weights(inside)
    stacked = special.logsumexp(outside, axis=1, b=weights)
    equal = special.logsumexp(outside, axis=1) - np.log(len(chains))
    return {
        "nats_of_single": [float(value) for value in outside.mean(axis=0)],
        "nats_equal": float(equal.mean()),
        "nats_stacked": float(stacked.mean()),
        "gain_se": float((stacked - equal).std() / np.sqrt(len(held_out))),
        "stacking_weights": [float(value) for value in weights],
    }


def within_chains(posterior: geode_jax.Posterior, watched: np.ndarray) -> dict[str, float]:
    """Effective draws of every quantity, each chain by itself, summed over chains."""
    found: dict[str, float] = {}
    for one in chains_of(posterior):
        for entry in diagnostics.diagnose(one, watched):
            found[entry.quantity] = found.get(entry.quantity, 0.0) + min(entry.ess_bulk, entry.ess_tail)
    return found


def measure(forest: geode_jax.Forest, held_out: np.ndarray, sampler: geode_jax.SamplerSettings) -> dict[str, Any]:
    """One variant: convergence of everything watched, how chains combine, and the time of sampling."""
    watched = held_out[:20]
    key = jax.random.key(1)
    short = dataclasses.replace(sampler, num_warmup=0, num_samples=sampler.segment_length, thinning=1)
    geode_jax.sample_posterior(key, forest, sampler=short)  # compiles
    start = time.perf_counter()
    posterior = geode_jax.sample_posterior(key, forest, sampler=sampler)
    seconds = time.perf_counter() - start
    between = {entry.quantity: entry.r_hat for entry in diagnostics.diagnose(posterior, watched)}
    within = within_chains(posterior, watched)
    rows = [name for name in between if name.startswith("log density")]
    parameters = [name for name in between if name.startswith(("log sigma", "weight"))]
    return {
        "seconds": seconds,
        "r_hat_parameters": max(between[name] for name in parameters),
        "r_hat_log_joint": between["log joint"],
        "r_hat_densities": float(np.median([between[name] for name in rows])),
        "r_hat_densities_worst": max(between[name] for name in rows),
        "ess_parameters": min(within[name] for name in parameters),
        "ess_densities": float(np.median([within[name] for name in rows])),
        "ess_log_joint": within["log joint"],
        "sigma": posterior.sigma[0].mean(axis=1).tolist(),
        **combined(posterior, forest, held_out),
    }


def late_directions(num_rows: int, is_renewed: bool, rank: int, num_sweeps: int) -> dict[str, Any]:
    """Sweeps from one independent draw of log delta to the next, halfway and at the last direction."""
    tree, prior, settings = tree_from_mask(np.ones(127, bool)), geode_jax.Prior(), geode_jax.ExactShrinkage()
    ratio = np.where(np.arange(rank) < rank // 4, 1.0 + np.exp(np.linspace(3.0, 0.0, rank)), 1.0)
    shape = (127, rank)
    sums = NodeSums(
        count=jnp.full(127, float(num_rows)),
        residual=jnp.zeros(127),
        squared=jnp.broadcast_to(jnp.asarray(num_rows * ratio, jnp.float32), shape),
    )
    problem = synthetic_problem(1, tree.depth, rank)
    start = sample_prior(jax.random.key(0), problem, jnp.ones(shape, bool), 1)
    start = eqx.tree_at(lambda it: it.log_sigma2, start, jnp.zeros_like(start.log_sigma2))

    def step(state: State, key: Array) -> tuple[State, Array]:
        uniforms = node_uniforms(key, state)
        moved = signal.move(uniforms, state, sums, tree, settings)
        state = eqx.tree_at(lambda it: it.log_neg_log_u, state, moved)
        if is_renewed:
            renewed = shrinkage.renew(uniforms, state, sums, tree, prior)
            state = eqx.tree_at(lambda it: (it.log_neg_log_u, it.tau_excess), state, renewed)
        state = eqx.tree_at(lambda it: it.tau_excess, state, shrinkage.move(uniforms, state, prior))
        return state, state.log_delta[:, jnp.asarray([rank // 2 - 1, rank - 1])]

    keys = jax.random.split(jax.random.key(1), num_sweeps)
    drawn = np.asarray(jax.jit(lambda: jax.lax.scan(step, start, keys)[1])(), float)[num_sweeps // 4 :]
    halfway, last = (autocorrelation_time(drawn[:, :, place]) for place in (0, 1))
    return {"rows of the node": num_rows, "renewed": is_renewed, "halfway": halfway, "last": last}


def autocorrelation_time(chains: np.ndarray) -> float:
    """Integrated autocorrelation time of like chains, (draws, chains), summed until it is lost in the noise."""
    centred = chains - chains.mean()
    variance, total = np.mean(np.square(centred)), 1.0
    for lag in range(1, len(centred) // 2):
        correlation = np.mean(centred[lag:] * centred[:-lag]) / variance
        if correlation < 0.03:
            break
        total += 2.0 * correlation
    return float(total)


def tables() -> list[str]:
    record = load("mixing")
    lines = [
        "### Mixing",
        "",
        f"Four chains on one tree, {record['settings']['num_samples']} draws each after as many of warm-up. Effective"
        " draws are those within chains; R-hat compares chains from over-dispersed starts. On the roll the densities"
        " agree. Frey's faces are not all as noisy: the deeper scales take up the rows of one noise level each, in an"
        " order that differs between chains, see below; in a run ten times as long (as many draws, one in ten sweeps)"
        " every chain keeps its order. `diagnostics.report` says so, and predictions average over the chains.",
        "",
        "| data | conditionals | R-hat: log joint | row densities, median | row densities, worst"
        " | effective draws, row densities | per second |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['data']} | {row['variant']} | {row['r_hat_log_joint']:.2f} | {row['r_hat_densities']:.2f}"
            f" | {row['r_hat_densities_worst']:.2f} | {row['ess_densities']:.0f}"
            f" | {row['ess_densities'] / row['seconds']:.0f} |"
        )
    exact, long = (
        next(row for row in record["rows"] if row["data"] == "Frey faces" and row["variant"] == name)["sigma"]
        for name in ("exact", "exact, ten times as long")
    )
    chains = range(len(exact))
    lines += [
        "",
        "### Noise of the scales",
        "",
        "In grey levels, of each of the chains on Frey faces (exact conditionals), and in the run ten times as long.",
        "",
        "| scale | " + " | ".join([*(f"chain {c + 1}" for c in chains), *(f"{c + 1}, long" for c in chains)]) + " |",
        "|---" * (1 + 2 * len(exact)) + "|",
        *(
            f"| {scale} | " + " | ".join(f"{value:.1f}" for value in of_chains) + " |"
            for scale, of_chains in enumerate(zip(*exact, *long, strict=True))
        ),
        "",
        "### Chains combined",
        "",
        "Held-out nats per row of single chains, of their average with equal weights, and with"
        " weights by stacking, from leave-one-out densities of the training rows.",
        "",
        "| data | conditionals | single chains | average | stacked | stacked less average |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        single = row["nats_of_single"]
        gain = row["nats_stacked"] - row["nats_equal"]
        lines.append(
            f"| {row['data']} | {row['variant']} | {min(single):.1f} to {max(single):.1f} | {row['nats_equal']:.2f}"
            f" | {row['nats_stacked']:.2f} | {gain:.2f} (standard error {row['gain_se']:.2f}) |"
        )
    lines += [
        "",
        "### Later directions",
        "",
        "Sweeps from one independent draw of log delta to the next, where u and tau are moved"
        " given the rows of a node, a quarter of 100 directions above the noise.",
        "",
        "| rows of the node | renewed together | halfway | last direction |",
        "|---|---|---|---|",
    ]
    for row in record["settings"]["late_directions"]:
        renewed = "yes" if row["renewed"] else "no"
        lines.append(f"| {row['rows of the node']} | {renewed} | {row['halfway']:.0f} | {row['last']:.0f} |")
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--data", help="folder with frey_faces.npz")
    options = parser.parse_args(arguments)
    lengths = QUICK_SWEEPS if options.quick else {"num_warmup": 1000, "num_samples": 1000}
    rows = []
    titles = ("joint R-hat", "worst", "densities", "ESS worst", "densities", "per s", "average", "stacked")
    print(f"{'data':<12}{'conditionals':<26}" + "".join(f"{title:>12}" for title in titles))
    for name, train, held_out in data_sets(options.quick, options.data):
        dictionary = geode_jax.DictionarySettings(**(QUICK_DICTIONARY if options.quick else {"num_trees": 1}))
        forest = geode_jax.learn_forest(jax.random.key(0), train, dictionary=dictionary)
        variants: dict[str, dict[str, Any]] = {**VARIANTS}
        if name == "Frey faces":
            variants["exact, ten times as long"] = {"num_warmup": 10 * lengths["num_warmup"], "thinning": 10}
        for variant, settings in variants.items():
            sampler = geode_jax.SamplerSettings(**{"num_chains": 4, **lengths, **settings})
            row = {"data": name, "variant": variant, **measure(forest, held_out, sampler)}
            rows.append(row)
            print(
                f"{name:<12}{variant:<26}{row['r_hat_log_joint']:>12.2f}{row['r_hat_parameters']:>12.2f}"
                f"{row['r_hat_densities']:>12.2f}{row['ess_parameters']:>12.0f}{row['ess_densities']:>12.0f}"
                f"{row['ess_densities'] / row['seconds']:>12.1f}{row['nats_equal']:>12.2f}{row['nats_stacked']:>12.2f}",
                flush=True,
            )
    size = {"rank": 8, "num_sweeps": 40} if options.quick else {"rank": 100, "num_sweeps": 4000}
    late = [late_directions(number, is_renewed, **size) for number in (0, 10, 200) for is_renewed in (False, True)]
    for row in late:
        print(row, flush=True)
    if not options.quick:
        write_result("mixing", {"num_chains": 4, **lengths, "late_directions": late}, rows)
    return rows


if __name__ == "__main__":
    main()
