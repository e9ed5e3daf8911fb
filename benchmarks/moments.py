"""Are samples like the data? Moments of 100,000 samples of default fits to whole small tables.

For every column: how far the samples' mean is off, in standard deviations of the data, and the ratio of the samples'
standard deviation to the data's. With n rows these have standard errors of 1 / sqrt(n) and at least 1 / sqrt(2 n), as
far as the data tell of the distribution that they come from. A Gaussian mixture fitted by EM has the data's moments by
construction. The last column is the share of samples with some value beyond 6 standard deviations.

python -m benchmarks.moments [--quick]
"""

import argparse
from typing import Any

import numpy as np

from benchmarks.common import write_result
from benchmarks.mixed_units import TABLES
from benchmarks.tables import load, table
from geode_jax import GeodeDensity

NUM_SAMPLES, SEEDS, FAR = 100_000, (0, 1), 6.0


def measure(name: str, seed: int, quick: bool) -> dict[str, Any]:
    x = np.asarray(TABLES[name](), dtype=np.float64)
    options: dict[str, Any] = {"num_trees": 1, "num_warmup": 10, "num_samples": 10} if quick else {}
    drawn = GeodeDensity(random_state=seed, **options).fit(x).sample(1000 if quick else NUM_SAMPLES)
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    ratio = drawn.std(axis=0) / deviation
    return {
        "data": name,
        "rows": x.shape[0],
        "features": x.shape[1],
        "seed": seed,
        "mean off": float((np.abs(drawn.mean(axis=0) - mean) / deviation).max()),
        "least ratio": float(ratio.min()),
        "median ratio": float(np.median(ratio)),
        "largest ratio": float(ratio.max()),
        "far": float((np.abs(drawn - mean) > FAR * deviation).any(axis=1).mean()),
        "far of the data": float((np.abs(x - mean) > FAR * deviation).any(axis=1).mean()),
    }


def tables() -> list[str]:
    lines = []
    for row in load("moments")["rows"]:
        ratios = (f"{row[f'{which} ratio']:.3f}" for which in ("least", "median", "largest"))
        size = f"{row['data']}, {row['rows']} x {row['features']}, seed {row['seed']}"
        far = f"{row['far']:.3%} ({row['far of the data']:.3%})"
        lines.append([size, f"{row['mean off']:.3f}", *ratios, f"{1 / np.sqrt(row['rows']):.3f}", far])
    head = ["", "mean off, worst column", "ratio of deviations, least", "median", "largest", "1 / sqrt(n)"]
    return [
        "### Samples against the data they were fitted to",
        "",
        "100,000 samples of default fits. Means are off in deviations of the column; of deviations, the ratio of those"
        " of samples to those of the data, over the columns. 1 / sqrt(n) is how far the data's own means are off. Last,"
        " how many values lie beyond 6 deviations, in samples and in the data:",
        "",
        *table([*head, "beyond 6 deviations (in the data)"], lines),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    rows = []
    for name in list(TABLES)[: 1 if options.quick else None]:
        for seed in SEEDS[: 1 if options.quick else None]:
            rows.append(measure(name, seed, options.quick))
            print(rows[-1], flush=True)
    if not options.quick:
        write_result("moments", {"samples": NUM_SAMPLES, "seeds": list(SEEDS)}, rows)
    return rows


if __name__ == "__main__":
    main()
