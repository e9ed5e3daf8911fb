"""What a GPU makes of it: sweeps against their floor, whole fits and predictions beside the CPU cores of its machine.

Every case runs in a process of its own; with JAX_PLATFORMS=cpu, and with the GPU. Fits are those of whole_fit, and
MNIST as one density and as a classifier (GEODE_JAX_DATA names its folder). Results of parts that are not run are kept.

python -m benchmarks.gpu [--quick] [--parts NAME ...] [--sets NAME ...] [--platforms NAME ...]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

import geode_jax
from benchmarks import mnist, sweep, whole_fit
from benchmarks.common import RESULTS, ROOT, best_seconds, load_mnist, timed, write_result
from benchmarks.tables import load, machine, table
from geode_jax.forest import device_products
from geode_jax.rows.products import BY_NUMPY

SWEEPS = ((6000, 5, 20), (60_000, 5, 20), (500_000, 5, 20))
# Rows and columns whose moments NumPy and the GPU take.
PRODUCTS = ((500, 64), (1000, 256), (4000, 256), (2000, 1024), (16_000, 784), (60_000, 784))
PLATFORMS = ("gpu", "cpu")
# Parts that the CPU of the same machine is measured with too.
COMPARED = ("fits", "density", "classes")


def sweeps(data: str, quick: bool) -> list[dict[str, Any]]:
    """A sweep and its floor."""
    floor = {"floor": sweep.blocks()["floor"]}
    return [sweep.measure(*size, floor, 5 if quick else 50) for size in ([(200, 1, 3)] if quick else SWEEPS)]


def products(data: str, quick: bool) -> list[dict[str, Any]]:
    """Mean and scatter of rows in the memory of the CPU, by NumPy and by the device."""
    by_device = device_products.DeviceProducts(jax.devices()[0])
    found = []
    with mock.patch.object(device_products, "LEAST_WORK", 0):
        for shape in ((50, 4),) if quick else PRODUCTS:
            rows = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            row: dict[str, Any] = {"rows": shape[0], "features": shape[1]}
            for name, by in (("NumPy", BY_NUMPY), ("device", by_device)):
                row[f"{name} ms"] = round(1000 * best_seconds(lambda by=by, rows=rows: by.moments(rows)), 3)
            found.append(row)
    return found


def fits(data: str, quick: bool) -> list[dict[str, Any]]:
    """A whole fit, and rows filled in, as `whole_fit` measures them."""
    rows, _ = whole_fit.rows_of(data, None)
    return [{"data": data, "rows": rows.shape[0], "features": rows.shape[1], **whole_fit.ours(data, None, quick)}]


def density(data: str, quick: bool) -> list[dict[str, Any]]:
    """A density of MNIST's training images, as one set of rows."""
    rows = load_mnist(None, 300 if quick else 60_000)
    cut = rows.shape[0] * 9 // 10
    dictionary = geode_jax.DictionarySettings(depth=1, max_rank=2) if quick else None
    sampler = geode_jax.SamplerSettings(num_warmup=5, num_samples=5) if quick else None
    times: dict[str, float] = {}
    key_forest, key_sample = jax.random.split(jax.random.key(0))
    with timed(times, "stage one seconds"):
        forest = geode_jax.learn_forest(key_forest, rows[:cut], dictionary=dictionary)
    with timed(times, "sampler seconds"):
        posterior = geode_jax.sample_posterior(key_sample, forest, sampler=sampler)
    with timed(times, "density seconds"):
        nats = float(geode_jax.log_density(posterior, rows[cut:]).mean())
    return [{"rows": cut, "features": rows.shape[1], "nats": nats, **times}]


def classes(data: str, quick: bool) -> list[dict[str, Any]]:
    """MNIST by class, as `mnist --validate` has it: 50,000 training images, the other 10,000 scored."""
    images, labels, _, _ = mnist.load_mnist()
    cut, end = (1200, 1300) if quick else (50_000, 60_000)
    options: dict[str, Any] = {**next(iter(mnist.CONFIGURATIONS.values())), **mnist.SWEEPS}
    if quick:
        options = {"num_trees": 1, "depth": 1, "num_warmup": 5, "num_samples": 5}
    times: dict[str, float] = {}
    model = geode_jax.GeodeClassifier(random_state=0, **options)
    with timed(times, "fit seconds"):
        model.fit(images[:cut], labels[:cut])
    for part in ("first prediction seconds", "prediction seconds"):
        with timed(times, part):
            log_probability = model.predict_log_proba(images[cut:end])
    return [{"rows": cut, **mnist.scores(log_probability, labels[cut:end]), **times}]


PARTS: dict[str, Callable[[str, bool], list[dict[str, Any]]]] = {
    "sweeps": sweeps,
    "products": products,
    "fits": fits,
    "density": density,
    "classes": classes,
}


def measured(part: str, data: str, quick: bool) -> list[dict[str, Any]]:
    """Rows of a part, with the device of this process."""
    device = jax.devices()[0]
    name = f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind
    return [{"part": part, "platform": device.platform, "device": name, **row} for row in PARTS[part](data, quick)]


def in_own_process(part: str, data: str, platform: str) -> list[dict[str, Any]]:
    """Rows of a part, full size, from a process that has only that platform, or stops where it is not there."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", part, data]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def has_gpu() -> bool:
    """Whether a process has a GPU by default: not this one, which would keep most of its memory."""
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1] == "gpu"


def rows_of(part: str, **wanted: str) -> list[dict[str, Any]]:
    """What was measured of a part."""
    own = {"part": part, **wanted}
    return [row for row in load("gpu")["rows"] if all(row.get(key) == value for key, value in own.items())]


def tables() -> list[str]:
    record = load("gpu")
    device = rows_of("sweeps")[0]["device"]
    missing = [name for name in whole_fit.DATA if not rows_of("fits", data=name)]
    lines = [
        "### On a GPU",
        "",
        f"On a machine with an {device} and {machine(record)}. A sweep (one tree of 63 nodes, rank 20, one chain) and"
        " its floor, reading the squared coordinates once:",
        "",
    ]
    sweeps = [
        [f"{row['rows']:,}", f"{row['floor ms']:.3f}", f"{row['sweep ms']:.3f}", f"{row['ratio']:.1f}"]
        for row in rows_of("sweeps")
    ]
    lines += table(["rows", "floor, ms", "sweep, ms", "sweep over floor"], sweeps)
    lines += [
        "",
        "Mean and scatter of rows in the CPU's memory, in one product, by NumPy and, sent there, by the GPU"
        f" (stage one asks it from 2^{device_products.LEAST_WORK.bit_length() - 1} multiplications on):",
        "",
    ]
    products = [
        [
            f"{row['rows']:,} x {row['features']}",
            f"2^{np.log2(row['rows'] * row['features'] ** 2):.0f}",
            f"{row['NumPy ms']:.1f}",
            f"{row['device ms']:.1f}",
        ]
        for row in rows_of("products")
    ]
    lines += table(["rows x features", "multiplications", "NumPy, ms", "GPU, ms"], products)
    lines += ["", "Whole fits, as those of two CPU cores above (seconds; milliseconds to fill in a row):", ""]
    fits = [
        [
            row["data"],
            row["device"],
            *(f"{row[part]:.1f}" for part in ("fit, first", "stage one, again")),
            f"{row['sampler, again']:.2f}",
            f"{row['fill in, first']:.1f}",
            f"{row['milliseconds a row']:.2f}",
            f"{row['nats']:.2f}",
        ]
        for row in rows_of("fits")
    ]
    head = ["data", "device", "fit, first", "stage one, again", "sampler, again", "fill in, first", "fill in, ms a row"]
    lines += table([*head, "nats"], fits)
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    for row in rows_of("classes"):
        lines += [
            "",
            f"MNIST by class, {row['rows']:,} training images, {row['device']}: fitted in {row['fit seconds']:.0f} s,"
            f" 10,000 other images classified in {row['first prediction seconds']:.1f} s the first time and"
            f" {row['prediction seconds']:.1f} s again, error {row['error_percent']:.2f}%.",
        ]
    for row in rows_of("density"):
        lines += [
            "",
            f"MNIST as one density, {row['rows']:,} rows, {row['device']}: stage one {row['stage one seconds']:.0f} s,"
            f" sampler {row['sampler seconds']:.0f} s, density of the others {row['density seconds']:.0f} s.",
        ]
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run, in this process, on whatever device it has")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=list(PLATFORMS))
    parser.add_argument("--sets", nargs="+", choices=whole_fit.DATA, default=whole_fit.DATA, help="for fits")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        found = measured(*options.case, quick=False)
        print(json.dumps(found))
        return found
    if options.quick:
        return [row for part in options.parts for row in measured(part, "iris", quick=True)]
    if not has_gpu():
        print("left out: JAX finds no GPU here")
        return []
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU's memory to those that are measured
    path = RESULTS / "gpu.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for part in options.parts:
        for platform in options.platforms if part in COMPARED else PLATFORMS[:1]:
            for data in options.sets if part == "fits" else ("",):
                found = in_own_process(part, data, platform)
                same = (part, platform, found[0].get("data"))
                rows = [row for row in rows if (row["part"], row["platform"], row.get("data")) != same] + found
                print(*found, sep="\n", flush=True)
                write_result("gpu", {}, rows)
    return rows


if __name__ == "__main__":
    main()
