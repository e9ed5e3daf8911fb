"""The time to the first sweep: compiling the sampler at two levels of LLVM's optimisation, and reading it from a cache.

The program that `fit` runs, for a forest of 8 trees with 63 nodes and 20 directions, for one of 2 trees with 100, and
for a small table; also as it is compiled for short runs (`SHORT_OPTIONS`). A sweep's time is the best of five segments
of 50 sweeps. "From the cache": the same again in a process that has compiled nothing, with JAX's persistent cache
(`jax_compilation_cache_dir`) filled by the one before.

python -m benchmarks.compile_time [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import best_seconds, write_result
from benchmarks.sweep import synthetic_problem
from benchmarks.tables import load, table
from geode_jax._runtime.compilation import OPTIONS, SHORT_OPTIONS
from geode_jax.gibbs import run
from geode_jax.settings import RankAdaptation, SamplerSettings

LEVEL = "xla_backend_optimization_level"
SHAPES = ((8, 1000, 5, 20), (2, 1000, 5, 100), (8, 150, 3, 2))  # trees, rows, depth, rank
WAYS: dict[str, dict[str, Any]] = {"3": {LEVEL: 3}, "2": OPTIONS, "short": SHORT_OPTIONS}


def forest_problem(num_trees: int, num_rows: int, depth: int, max_rank: int) -> Any:
    one = synthetic_problem(num_rows, depth, max_rank)
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * num_trees), one)


def compiled(problem: Any, options: dict[str, Any], length: int) -> tuple[float, float]:
    """Seconds to compile a segment of `length` sweeps, and of one of its sweeps."""
    keys = jax.random.split(jax.random.key(0), (problem.statistics.residual.shape[0], 1))
    chains = run._start(keys, problem)
    segment = jax.jit(partial(run._segment.__wrapped__, options=run.SegmentOptions(length, RankAdaptation())))
    lowered = segment.lower(keys, chains, problem, np.int32(0), np.int32(10**6))
    start = time.perf_counter()
    program = lowered.compile(compiler_options=options)
    to_compile = time.perf_counter() - start
    return to_compile, best_seconds(lambda: program(keys, chains, problem, np.int32(0), np.int32(10**6))) / length


def first_sweeps(shape: tuple[int, int, int, int]) -> tuple[float, int]:
    """Of the first segment of a run: seconds, compilation and all, and programs that JAX's cache did not have."""
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    problem = forest_problem(*shape)
    settings = SamplerSettings(num_warmup=0, num_samples=10, segment_length=10)
    start = time.perf_counter()
    run.run_chains(jax.random.key(0), problem, settings)
    return time.perf_counter() - start, events.count("/jax/compilation_cache/cache_misses")


def in_new_process(shape: tuple[int, int, int, int], cache: str) -> tuple[float, int]:
    """:func:`first_sweeps` in a process of its own."""
    code = f"import json; from benchmarks.compile_time import first_sweeps; print(json.dumps(first_sweeps({shape})))"
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seconds, programs = json.loads(found.stdout.splitlines()[-1])
    return seconds, programs


def tables() -> list[str]:
    record = load("compile_time")
    lines = [
        "### The time to the first sweep",
        "",
        "On a CPU: what `fit` compiles, at LLVM's third level of optimisation (XLA's default), at the second (ours)"
        " and, *at short*, at none, as for runs that take less time than to optimise; the sweeps that come out; and the"
        " first ten sweeps of a new process, which are such a run, compiled and read from JAX's persistent cache.",
        "",
    ]
    head = [
        "trees x nodes x rank",
        *(f"compile at {way}, s" for way in WAYS),
        *(f"a sweep at {way}, ms" for way in WAYS),
    ]
    rows = [
        [
            f"{row['trees']} x {row['nodes']} x {row['rank']}",
            *(f"{row[f'compile_{way}_seconds']:.1f}" for way in WAYS),
            *(f"{1000 * row[f'sweep_{way}_seconds']:.2f}" for way in WAYS),
            *(f"{row[name]:.1f}" for name in ("first_seconds", "cached_seconds")),
        ]
        for row in record["rows"]
    ]
    return lines + table([*head, "first ten sweeps, s", "from the cache, s"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    rows = []
    for shape in ((1, 64, 1, 2),) if options.quick else SHAPES:
        problem = forest_problem(*shape)
        row: dict[str, Any] = {"trees": shape[0], "rows": shape[1], "nodes": 2 ** (shape[2] + 1) - 1, "rank": shape[3]}
        for way, chosen in WAYS.items():
            seconds = compiled(problem, chosen, 2 if options.quick else 50)
            row[f"compile_{way}_seconds"], row[f"sweep_{way}_seconds"] = seconds
        with TemporaryDirectory() as cache:
            for name in ("first", "cached"):
                row[f"{name}_seconds"], row[f"{name}_programs"] = in_new_process(shape, cache)
        rows.append(row)
        print(row, flush=True)
    if not options.quick:
        write_result("compile_time", {}, rows)
    return rows


if __name__ == "__main__":
    main()
