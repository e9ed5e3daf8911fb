"""Cuts refined in every second tree (the default), and all cuts as METIS makes them.

python -m benchmarks.refined_cuts [--quick]

Small tables that scikit-learn has, with ten random splits of each, 80% of the rows fitted. Splits overlap, and standard
errors take them as independent. Held-out nats per row, and their differences split by split; seconds are of the whole
fits, in turn, of which the first compiles. In diabetes, values of two columns repeat; they are spread as in
`mixed_units`.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks import mixed_units
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, gain_of, write_result
from benchmarks.tables import load

TABLES = "iris", "wine", "diabetes, repeated values spread", "breast cancer"
NUM_SPLITS = 10
CUTS = {"refined": True, "METIS": False}


def measure(x: np.ndarray, seed: int, quick: bool) -> dict[str, tuple[float, float]]:
    """Held-out nats per row of one split, and seconds, with both kinds of cuts."""
    order = np.random.default_rng(seed).permutation(len(x))
    cut = len(x) // 5
    train, test = x[order[cut:]], x[order[:cut]]
    sampler = geode_jax.SamplerSettings(**QUICK_SWEEPS) if quick else None
    found = {}
    for name, refines in CUTS.items():
        own = QUICK_DICTIONARY | {"num_trees": 2} if quick else {}  # of one tree no cut is refined
        dictionary = geode_jax.DictionarySettings(**own, refined_cuts=refines)
        start = time.perf_counter()
        posterior = geode_jax.fit(jax.random.key(seed), train, dictionary=dictionary, sampler=sampler)
        seconds = time.perf_counter() - start
        found[name] = (float(geode_jax.log_density(posterior, test).mean()), seconds)
    return found


def tables() -> list[str]:
    record = load("refined_cuts")
    lines = [
        "### Refined cuts",
        "",
        "In every second tree rows go over to the side of a cut whose normal describes them better"
        " (the default), and all cuts as METIS makes them. Held-out nats per row, mean of"
        " random splits, which share rows: standard errors are too small, by a factor of about two. The default was"
        " chosen on these tables, of which Columns in different units shows the comparison with rivals.",
        "",
        "| data | n x D | splits | refined | METIS | gain (standard error) |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['data']} | {row['n']} x {row['D']} | {row['splits']} | {row['refined']:.3f} | {row['METIS']:.3f}"
            f" | {row['gain']:.3f} ({row['gain_se']:.3f}) |"
        )
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="iris only, two splits, nothing written")
    options = parser.parse_args(arguments)
    rows = []
    for name in TABLES[:1] if options.quick else TABLES:
        x = np.asarray(mixed_units.TABLES[name](), float)
        splits = 2 if options.quick else NUM_SPLITS
        found = [measure(x, seed, options.quick) for seed in range(splits)]
        row: dict[str, Any] = {"data": name, "n": len(x), "D": x.shape[1], "splits": splits}
        row |= {cuts: float(np.mean([one[cuts][0] for one in found])) for cuts in CUTS}
        row |= gain_of(*([one[cuts][0] for one in found] for cuts in CUTS))
        row["seconds"] = [round(sum(one[cuts][1] for one in found), 1) for cuts in CUTS]
        rows.append(row)
        print(row, flush=True)
        if not options.quick:
            write_result("refined_cuts", {}, rows)
    return rows


if __name__ == "__main__":
    main()
