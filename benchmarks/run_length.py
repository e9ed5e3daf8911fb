"""How many sweeps a fit needs: held-out density, error and coverage by the length of the chains.

python -m benchmarks.run_length [--quick] [--data FOLDER]

Training rows of other benchmarks only: 80% are fitted, the others predicted, at most 100 of them with half of their
features hidden. The same forest of eight trees is sampled with each number of sweeps, as many of warm-up as are kept,
with three keys.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks import stage_one, whole_fit
from benchmarks.common import load_mnist, write_result
from benchmarks.tables import load, table

LENGTHS = (50, 100, 200, 500)
DATA = ("iris", "curved sheet", "digits", "Frey faces", "MNIST, 10,000 rows")
NUM_KEYS = 3


def training_rows(name: str, folder: str | None) -> np.ndarray:
    """Rows that their own benchmarks train on."""
    if name == "MNIST, 10,000 rows":
        return load_mnist(folder, 10_000)
    if name in ("digits", "Frey faces"):
        return stage_one.training_rows("digits" if name == "digits" else "faces", folder)
    return whole_fit.rows_of(name, folder)[0]


def measure(forest: geode_jax.Forest, test: np.ndarray, length: int, seed: int) -> dict[str, Any]:
    """Nats per row, mean absolute error and coverage of 95% intervals of one run, and its seconds."""
    sampler = geode_jax.SamplerSettings(num_warmup=length, num_samples=length, segment_length=50)
    start = time.perf_counter()
    posterior = geode_jax.sample_posterior(jax.random.key(seed), forest, sampler=sampler)
    seconds = time.perf_counter() - start
    some = test[:100]
    is_hidden = np.random.default_rng(5).random(some.shape) < 0.5
    found = geode_jax.impute(posterior, np.where(is_hidden, np.nan, some), interval=0.95)
    is_inside = (found.lower <= some) & (some <= found.upper)
    return {
        "sweeps": length,
        "seed": seed,
        "nats": float(geode_jax.log_density(posterior, test).mean()),
        "mae": float(np.abs(found.filled - some)[is_hidden].mean()),
        "coverage95": float(is_inside[is_hidden].mean()),
        "seconds": seconds,
    }


def tables() -> list[str]:
    """Lines of markdown about the last full run."""
    record = load("run_length")
    lines = [
        "### How many sweeps a fit needs",
        "",
        f"Eight trees, training rows of the first split only; mean of {NUM_KEYS} keys, and the largest difference"
        " between them; the least seconds. The paper's number is 500 + 500, the default 100 + 100:",
        "",
    ]
    rows = []
    for data in dict.fromkeys(row["data"] for row in record["rows"]):
        for length in LENGTHS:
            own = [row for row in record["rows"] if row["data"] == data and row["sweeps"] == length]
            nats, mae, cover, seconds = (
                np.array([row[name] for row in own]) for name in ("nats", "mae", "coverage95", "seconds")
            )
            rows.append(
                [
                    data,
                    f"{length} + {length}",
                    f"{nats.mean():.2f} ({np.ptp(nats):.2f})",
                    f"{mae.mean():.3f} ({np.ptp(mae):.3f})",
                    f"{100 * cover.mean():.1f}%",
                    f"{seconds.min():.1f}",
                ]
            )
    return lines + table(["data", "sweeps", "nats per row", "mean abs. error", "coverage of 95%", "seconds"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds frey_faces.npz and mnist.npz")
    options = parser.parse_args(arguments)
    dictionary = geode_jax.DictionarySettings(num_trees=1) if options.quick else None
    rows: list[dict[str, Any]] = []
    for name in ("digits",) if options.quick else DATA:
        data = training_rows(name, options.data)[: 150 if options.quick else None]
        cut = int(0.8 * len(data))
        forest = geode_jax.learn_forest(jax.random.key(0), data[:cut], dictionary=dictionary)
        for length in (50,) if options.quick else LENGTHS:
            for seed in range(1 if options.quick else NUM_KEYS):
                rows.append({"data": name, **measure(forest, data[cut:], length, seed)})
                print(rows[-1], flush=True)
    if not options.quick:
        write_result("run_length", {}, rows)
    return rows


if __name__ == "__main__":
    main()
