"""Sweeps and predictions on one and on two devices: cores of this machine, each a JAX device with one thread.

Sweeps: two trees of two chains, synthetic statistics. Trees and chains need no word from each other; devices that share
rows add up their node sums once a sweep. Predictions: digits, the log density of all rows and half-hidden rows filled
in. Each case runs in a process of its own, because JAX counts its devices once.

python -m benchmarks.devices [--quick] [--sizes N,DEPTH,D ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from sklearn.datasets import load_digits

import geode_jax
from benchmarks.common import ROOT, best_seconds, write_result
from benchmarks.sweep import synthetic_problem
from benchmarks.tables import load, table
from geode_jax.gibbs.run import _Run
from geode_jax.settings import SamplerSettings

NUM_TREES, NUM_CHAINS = 2, 2
SIZES = ((1500, 4, 20), (20_000, 5, 40))
MESHES: tuple[dict[str, int], ...] = ({}, {"trees": 2}, {"chains": 2}, {"rows": 2})


def measure(size: tuple[int, int, int], axes: dict[str, int], segment_length: int) -> float:
    """Seconds of a sweep of all chains, the best of three segments."""
    problem = synthetic_problem(*size)
    problems = jax.tree.map(lambda leaf: jax.numpy.stack([leaf] * NUM_TREES), problem)
    settings = SamplerSettings(num_chains=NUM_CHAINS, num_warmup=10**6, segment_length=segment_length)
    mesh = Mesh(np.array(jax.devices()).reshape(list(axes.values())), tuple(axes)) if axes else None
    run = _Run(jax.random.key(0), problems, settings, None, mesh)
    run.advance()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run.advance()
        seconds.append((time.perf_counter() - start) / segment_length)
    return min(seconds)


def measure_predictions(path: str, num_rows: int) -> tuple[float, float]:
    """Milliseconds per row, on all devices, of a log density and of filling in half of a row; the best of three."""
    posterior = geode_jax.Posterior.load(path).replicated(Mesh(np.array(jax.devices()), ("rows",)))
    rows = digits()[:num_rows]
    hidden = np.where(np.random.default_rng(0).random(rows.shape) < 0.5, np.nan, rows)
    found = []
    for predict, given in ((geode_jax.log_density, rows), (geode_jax.impute, hidden[: num_rows // 4])):
        predict(posterior, given)
        seconds = best_seconds(lambda predict=predict, given=given: predict(posterior, given))
        found.append(1000 * seconds / len(given))
    return found[0], found[1]


def digits() -> np.ndarray:
    """The 8 x 8 images with uniform noise of one grey level, so that they have a density; (1797, 64)."""
    pixels = load_digits().data
    return pixels + np.random.default_rng(0).random(pixels.shape)


def in_own_process(num_devices: int, *case: Any) -> list[float]:
    """What the case measures where JAX has so many devices."""
    flags = f"--xla_force_host_platform_device_count={num_devices} --xla_cpu_multi_thread_eigen=false"
    command = [sys.executable, "-m", "benchmarks.devices", "--case", json.dumps(case)]
    # more threads than devices, which could otherwise wait for each other in LAPACK
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "4"}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


def predictions(*, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds per row of predictions, on one device and on two."""
    settings = geode_jax.DictionarySettings(num_trees=NUM_TREES, **({"depth": 1, "max_rank": 2} if quick else {}))
    sampler = geode_jax.SamplerSettings(num_warmup=100, num_samples=100)
    num_rows = 64 if quick else 1600
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "digits.npz")
        geode_jax.fit(jax.random.key(0), digits()[:num_rows], dictionary=settings, sampler=sampler).save(path)
        for count in (2,) if quick else (1, 2):
            density, filling = in_own_process(count, "predictions", path, num_rows)
            found.append({"devices": count, "log density ms": round(density, 3), "filled in ms": round(filling, 2)})
            print(found[-1], flush=True)
    return found


def tables() -> list[str]:
    record = load("devices")
    settings = record["settings"]
    lines = [
        "### Two devices against one",
        "",
        f"{settings['trees']} trees of {settings['chains']} chains; a device is a core"
        " with one thread, and both share one bus to the memory and its caches. Speeds above 2 are of these:",
        "",
    ]
    rows = [
        [
            f"{row['rows']} x {row['nodes']} x {row['rank']}",
            row["devices"],
            f"{row['sweep ms']:.1f}",
            f"{row['speed']:.2f}",
        ]
        for row in record["rows"]
    ]
    lines += table(["rows x nodes x rank", "devices", "a sweep, ms", "speed, one device being 1"], rows)
    lines += ["", "Predictions for digits, milliseconds per row:", ""]
    rows = [
        [str(row["devices"]), f"{row['log density ms']:.2f}", f"{row['filled in ms']:.1f}"]
        for row in settings["predictions"]
    ]
    return lines + table(["devices", "log density", "half of the pixels filled in, with intervals"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--sizes", nargs="+", help="rows,depth,rank of each problem")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        kind, *rest = json.loads(options.case)
        print(*(measure_predictions(*rest) if kind == "predictions" else [measure(tuple(rest[0]), *rest[1:])]))
        return []
    sizes = [tuple(map(int, text.split(","))) for text in options.sizes or []] or list(SIZES)
    meshes, segment_length = MESHES, 50
    if options.quick:
        sizes, meshes, segment_length = [(64, 1, 3)], ({}, {"rows": 2}), 5
    rows = []
    for size in sizes:
        alone = np.nan
        for axes in meshes:
            count = int(np.prod(list(axes.values()), dtype=int))
            (seconds,) = in_own_process(count, "sweep", size, axes, segment_length)
            alone = alone if axes else seconds
            name = ", ".join(f"{count} x {axis}" for axis, count in axes.items()) or "one device"
            row = {"rows": size[0], "nodes": 2 ** (size[1] + 1) - 1, "rank": size[2], "devices": name}
            rows.append({**row, "sweep ms": round(1000 * seconds, 2), "speed": round(alone / seconds, 2)})
            print(rows[-1], flush=True)
    predicted = predictions(quick=options.quick)
    if not options.quick:
        settings = {"trees": NUM_TREES, "chains": NUM_CHAINS, "predictions": predicted}
        write_result("devices", settings, rows)
    return rows


if __name__ == "__main__":
    main()
