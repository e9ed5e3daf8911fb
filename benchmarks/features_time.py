"""Seconds of each stage against the number of features (the paper's figure 1): stage one linear, stage two flat.

600 rows with 5 directions above the noise, one tree, 500 + 500 sweeps; the second of two identical calls, so that
nothing is compiled in it.

python -m benchmarks.features_time [--quick]
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import write_result
from benchmarks.dimension import linear_rows
from benchmarks.tables import load, table

NUM_ROWS, DIMENSION = 600, 5
FEATURES = (1000, 2000, 4000, 8000, 16_000)


def stages(x: np.ndarray, dictionary: geode_jax.DictionarySettings, sampler: geode_jax.SamplerSettings) -> list[float]:
    """Seconds of stage one and stage two."""
    for _ in range(2):
        start = time.perf_counter()
        forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=dictionary)
        jax.block_until_ready(forest.statistics)
        between = time.perf_counter()
        geode_jax.sample_posterior(jax.random.key(1), forest, sampler=sampler)
    return [between - start, time.perf_counter() - between]


def tables() -> list[str]:
    record = load("features_time")
    settings = record["settings"]
    lines = [
        "### Each stage against the number of features",
        "",
        f"The paper's figure 1: {settings['rows']} rows, one tree, 500 + 500 sweeps, nothing compiled. With"
        " fewer features than twice the rows, a noise covariance is fitted too; its time grows with their number:",
        "",
        "![Seconds of each stage against D](../notebooks/features_time.png)",
        "",
    ]
    rows = [
        [row["method"], str(row["features"]), f"{row['stage_one_s']:.1f}", f"{row['stage_two_s']:.1f}"]
        for row in sorted(record["rows"], key=lambda row: row["method"])
    ]
    return lines + table(["method", "D", "stage one, s", "stage two, s"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    sampler = geode_jax.SamplerSettings(**dict.fromkeys(("num_warmup", "num_samples"), 10 if options.quick else 500))
    methods = {
        "default, one tree": geode_jax.DictionarySettings(num_trees=1),
        "published": geode_jax.DictionarySettings.published(max_rank=20),
    }
    rows: list[dict[str, Any]] = []
    for num_features in (30,) if options.quick else FEATURES:
        x = linear_rows(np.random.default_rng(0), 80 if options.quick else NUM_ROWS, num_features, DIMENSION)
        for method, dictionary in methods.items():
            one, two = stages(x.astype(np.float32), dictionary, sampler)
            rows.append({"features": num_features, "method": method, "stage_one_s": one, "stage_two_s": two})
            print(rows[-1], flush=True)
    if not options.quick:
        write_result("features_time", {"rows": NUM_ROWS, "dimension": DIMENSION}, rows)
    return rows


if __name__ == "__main__":
    main()
