"""How many draws a prediction needs: its Monte Carlo error and its time, by the number of draws that it averages over.

python -m benchmarks.thinning [--quick] [--data FOLDER]

Digits and Frey faces, the first splits of their own benchmarks, training rows only: 80% are fitted, the others
predicted. Errors are against all draws of the posterior; for half of the features, hidden, against the most draws here.
By default log densities average over at most 200 draws per tree, and conditionals over 8.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import write_result
from benchmarks.stage_one import training_rows
from benchmarks.tables import load, table

DENSITY_DRAWS = (10, 25, 50, 100, 200, 500)
PARTIAL_DRAWS = (2, 4, 8, 16, 32, 64)
LENGTHS = {"num_warmup": 500, "num_samples": 500}


def densities(posterior: geode_jax.Posterior, test: np.ndarray, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Per number of draws: root-mean-square and mean error of the log densities of the rows, in nats."""
    every = posterior.num_chains * posterior.num_draws
    reference = geode_jax.log_density(posterior, test, num_draws=every)
    rows = []
    for count in counts:
        geode_jax.log_density(posterior, test, num_draws=count)  # compiles
        start = time.perf_counter()
        error = geode_jax.log_density(posterior, test, num_draws=count) - reference
        seconds = time.perf_counter() - start
        rows.append(
            {
                "of": "log density",
                "draws": count,
                "rms": float(np.sqrt(np.mean(error**2))),
                "mean": float(error.mean()),
                "spread of the rows": float(reference.std()),
                "ms per row": 1000 * seconds / len(test),
            }
        )
    return rows


def conditionals(posterior: geode_jax.Posterior, test: np.ndarray, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Per number of draws: error of the conditional means in their own standard deviations, and against the truth."""
    is_hidden = np.random.default_rng(5).random(test.shape) < 0.5
    masked = np.where(is_hidden, np.nan, test)
    reference, deviation = geode_jax.condition(posterior, masked, num_draws=max(counts)).mean_and_std()
    rows = []
    for count in counts:
        asked = geode_jax.condition(posterior, masked, num_draws=count)
        asked.mean()  # compiles
        start = time.perf_counter()
        mean = asked.mean()
        seconds = time.perf_counter() - start
        error = ((mean - reference)[is_hidden]) / deviation[is_hidden]
        rows.append(
            {
                "of": "conditional mean",
                "draws": count,
                "rms": float(np.sqrt(np.mean(error**2))),
                "mae": float(np.abs(mean - test)[is_hidden].mean()),
                "ms per row": 1000 * seconds / len(test),
            }
        )
    return rows


def tables() -> list[str]:
    record = load("thinning")
    every = record["rows"][0]["all draws"]
    lines = [
        "### How many draws a prediction needs",
        "",
        f"From {every} draws per tree (a default fit has 100): error by averaging over fewer of them, root mean square"
        " over the rows (nats), or"
        " over the hidden half of their features (in standard deviations of what is hidden, against the most draws"
        " here). By default densities average over at most 200, and what is filled in over 8:",
        "",
    ]
    rows = [
        [
            {"digits": "digits", "faces": "Frey faces"}[row["data"]],
            row["of"],
            str(row["draws"]),
            f"{row['rms']:.3f}",
            f"{row['mae']:.3f}" if "mae" in row else "",
            f"{row['ms per row']:.1f}",
        ]
        for row in record["rows"]
    ]
    return lines + table(["data", "of", "draws per tree", "error", "mean abs. error", "milliseconds per row"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds frey_faces.npz")
    options = parser.parse_args(arguments)
    dictionary = geode_jax.DictionarySettings(num_trees=1) if options.quick else None
    sampler = geode_jax.SamplerSettings(**({"num_warmup": 20, "num_samples": 20} if options.quick else LENGTHS))
    rows: list[dict[str, Any]] = []
    for name in ("digits",) if options.quick else ("digits", "faces"):
        data = training_rows(name, options.data)[: 150 if options.quick else None]
        cut = int(0.8 * len(data))
        posterior = geode_jax.fit(jax.random.key(0), data[:cut], dictionary=dictionary, sampler=sampler)
        counts = ((5, 10), (2, 4)) if options.quick else (DENSITY_DRAWS, PARTIAL_DRAWS)
        found = densities(posterior, data[cut:], counts[0]) + conditionals(posterior, data[cut:], counts[1])
        rows += [{"data": name, "all draws": posterior.num_chains * posterior.num_draws} | row for row in found]
        for row in rows[-len(found) :]:
            print(row, flush=True)
    if not options.quick:
        write_result("thinning", {}, rows)
    return rows


if __name__ == "__main__":
    main()
