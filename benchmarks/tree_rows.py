"""What is lost where trees are learned from a part of the rows and the others are routed: held-out density and time.

10,000 MNIST images for training, 2000 others of the training set held out, pixels dequantised by uniform noise, two
trees of depth 6.

python -m benchmarks.tree_rows [--quick] [--data FOLDER]
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import load_mnist, write_result
from benchmarks.tables import load, table

NUM_TRAIN, NUM_HELD_OUT = 10_000, 2000
TREE_ROWS = (10_000, 5000, 2000, 1000)


def tables() -> list[str]:
    record = load("tree_rows")
    settings = record["settings"]
    lines = [
        "### Trees from a part of the rows",
        "",
        f"The other rows are routed: {settings['train']} MNIST images, {settings['held_out']} held out, two trees of"
        " depth 6; timed beside other work:",
        "",
    ]
    rows = [
        [
            str(row["tree_rows"]),
            f"{row['nats']:.1f}",
            f"{row['gain']:+.1f} ± {row['standard_error']:.1f}" if row["gain"] else "",
            f"{row['seconds']:.0f}",
        ]
        for row in record["rows"]
    ]
    return lines + table(["rows of a tree", "held-out nats", "gain over all", "seconds to fit"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds mnist.npz")
    options = parser.parse_args(arguments)
    num_train, num_new = (200, 50) if options.quick else (NUM_TRAIN, NUM_HELD_OUT)
    x = load_mnist(options.data, num_train + num_new)
    sampler = geode_jax.SamplerSettings(num_warmup=20, num_samples=20) if options.quick else None
    rows: list[dict[str, Any]] = []
    densities: list[np.ndarray] = []
    for number in (200, 50) if options.quick else TREE_ROWS:
        settings = geode_jax.DictionarySettings(num_trees=2, depth=2 if options.quick else 6, tree_rows=number)
        start = time.perf_counter()
        posterior = geode_jax.fit(jax.random.key(0), x[:num_train], dictionary=settings, sampler=sampler)
        seconds = time.perf_counter() - start
        density = geode_jax.log_density(posterior, x[num_train:])
        densities.append(density)
        gain = density - densities[0]
        error = float(gain.std() / np.sqrt(num_new))
        row = {"tree_rows": number, "nats": float(density.mean()), "gain": float(gain.mean()), "standard_error": error}
        rows.append({**row, "seconds": round(seconds, 1)})
        print(rows[-1], flush=True)
    if not options.quick:
        write_result("tree_rows", {"train": num_train, "held_out": num_new}, rows)
    return rows


if __name__ == "__main__":
    main()
