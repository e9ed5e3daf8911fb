"""A sweep on one and on two devices: cores of this machine, each a JAX device with one thread.

Two trees of two chains, synthetic statistics. Each case runs in a process of its own, because JAX counts its devices
once. Trees and chains need no word from each other; devices that share rows add up their node sums once a sweep.

python -m benchmarks.devices [--quick] [--sizes N,DEPTH,D ...]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.common import ROOT, write_result
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


def in_own_process(size: tuple[int, int, int], axes: dict[str, int], segment_length: int) -> float:
    """:func:`measure` where JAX has as many devices as the mesh."""
    count = int(np.prod(list(axes.values()), dtype=int))
    flags = f"--xla_force_host_platform_device_count={count} --xla_cpu_multi_thread_eigen=false"
    command = [sys.executable, "-m", "benchmarks.devices", "--case", json.dumps([size, axes, segment_length])]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def tables() -> list[str]:
    record = load("devices")
    settings = record["settings"]
    lines = [
        f"**Two devices against one**, {settings['trees']} trees of {settings['chains']} chains; a device is a core"
        " with one thread, and both share one bus to the memory, which alone limits the larger problem,"
        f" `{record['command']}`:",
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
    return lines + table(["rows x nodes x rank", "devices", "a sweep, ms", "speed, one device being 1"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--sizes", nargs="+", help="rows,depth,rank of each problem")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        size, axes, segment_length = json.loads(options.case)
        print(measure(tuple(size), axes, segment_length))
        return []
    sizes = [tuple(map(int, text.split(","))) for text in options.sizes or []] or list(SIZES)
    meshes, segment_length = MESHES, 50
    if options.quick:
        sizes, meshes, segment_length = [(64, 1, 3)], ({}, {"rows": 2}), 5
    rows = []
    for size in sizes:
        alone = np.nan
        for axes in meshes:
            seconds = in_own_process(size, axes, segment_length)
            alone = alone if axes else seconds
            name = ", ".join(f"{count} x {axis}" for axis, count in axes.items()) or "one device"
            row = {"rows": size[0], "nodes": 2 ** (size[1] + 1) - 1, "rank": size[2], "devices": name}
            rows.append({**row, "sweep ms": round(1000 * seconds, 2), "speed": round(alone / seconds, 2)})
            print(rows[-1], flush=True)
    if not options.quick:
        write_result("devices", {"trees": NUM_TREES, "chains": NUM_CHAINS}, rows)
    return rows


if __name__ == "__main__":
    main()
