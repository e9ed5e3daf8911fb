"""Fits of rows that processes bring themselves: a core each, their parts of one file mapped into memory.

One process with all rows against several with a part each: seconds of the stages, what the processes tell each other
in stage one, how often stage one reads the rows, and memory beyond the file's. The first process learns the trees from
a sample, and choices are made by all alike; what grows with the rows is shared.

python -m benchmarks.processes [--quick] [--rows N ...] [--processes P ...]
python -m benchmarks.processes --large [--rows N]

With --large two processes fit a file of ten million rows in float64, with a limit on the memory of each
(RLIMIT_DATA) that is below the size of its half of the file.
"""

import argparse
import functools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

import geode_jax
from benchmarks.common import RESULTS, ROOT, clocked, timed, write_result
from benchmarks.memory import AnonymousPeak
from benchmarks.tables import load, table
from geode_jax._runtime.collectives import SumOverProcesses
from geode_jax.fitting import single, stages
from geode_jax.forest import trees
from geode_jax.rows.view import View

NUM_FEATURES, DIMENSION, NUM_SWEEPS = 100, 3, 40
SIZES, PROCESSES = (400_000, 1_600_000), (1, 2)
TREE_ROWS = 20_000
# Of the fit of a large file: its rows, the memory of a process as a share of its half of the file, and settings.
LARGE_ROWS, LARGE_SHARE = 10_000_000, 0.9
LARGE_LIMITS = {"max_rank": 4, "num_candidates": 4}


def write_rows(path: Path, num_rows: int, dtype: str = "float32") -> None:
    """A curved set of three dimensions in a hundred, with noise, written in parts."""
    rng = np.random.default_rng(0)
    loadings = rng.normal(size=(DIMENSION, NUM_FEATURES))
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(num_rows, NUM_FEATURES))
    for start in range(0, num_rows, 50_000):
        size = min(50_000, num_rows - start)
        signal = np.tanh(rng.normal(size=(size, DIMENSION)) @ loadings)
        file[start : start + size] = signal + 0.1 * rng.normal(size=signal.shape)
    file.flush()


class _Watch:
    """Counts of sums over processes and of rows read in one process."""

    def __init__(self) -> None:
        self.sums = self.numbers = self.read = 0

    def sum(self, original: Any) -> Any:
        """`SumOverProcesses.__call__`, counted."""

        def counted(add: SumOverProcesses, values: np.ndarray) -> np.ndarray:
            self.sums, self.numbers = self.sums + 1, self.numbers + values.size
            return original(add, values)

        return counted

    def found(self, original: Any) -> Any:
        """`View._found`, counted where it reads the file."""

        def counted(view: View, index: Any) -> np.ndarray:
            rows = original(view, index)
            self.read += len(rows) if isinstance(view._source, np.ndarray) else 0
            return rows

        return counted


def measure(
    path: str, index: int, number: int, port: int, limits: dict[str, int], core: int, bytes_allowed: int | None
) -> dict[str, float]:
    """One process's part of a fit, on a core of its own; `limits`: settings that keep the dictionary small."""
    os.sched_setaffinity(0, {core})  # before JAX starts its threads
    if bytes_allowed is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (bytes_allowed, bytes_allowed))
    if number > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes=number, process_id=index)
    rows = np.load(path, mmap_mode="r")
    own = rows[len(rows) * index // number : len(rows) * (index + 1) // number]
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    tree_rows = min(TREE_ROWS, len(rows) // 2)
    dictionary = geode_jax.DictionarySettings(num_trees=1, tree_rows=tree_rows, **limits)
    sampler = geode_jax.SamplerSettings(num_warmup=NUM_SWEEPS // 2, num_samples=NUM_SWEEPS // 2, segment_length=20)
    times: dict[str, float] = {}
    watch = _Watch()
    clock = functools.partial(clocked, times)
    with (
        mock.patch.object(trees, "neighbour_graph", clock("neighbours", trees.neighbour_graph)),
        mock.patch.object(trees, "partition_rows", clock("cuts", trees.partition_rows)),
        mock.patch.object(SumOverProcesses, "__call__", watch.sum(SumOverProcesses.__call__)),
        mock.patch.object(View, "_found", watch.found(View._found)),
        mock.patch.object(single, "grow_forest", clock("stage one", single.grow_forest)),
        mock.patch.object(stages, "run_chains", clock("sampler", stages.run_chains)),
        AnonymousPeak() as memory,
        timed(times, "fit"),
    ):
        geode_jax.fit(jax.random.key(0), own, dictionary=dictionary, sampler=sampler, mesh=mesh, process_local=True)
    times["trees"] = times.pop("neighbours", 0.0) + times.pop("cuts", 0.0)
    counts = {"sums": watch.sums, "numbers": watch.numbers, "passes": watch.read / len(own)}
    return {**times, **counts, "peak": memory.peak, "rows": len(own)}


def in_processes(path: Path, number: int, bytes_allowed: int | None = None, **limits: int) -> dict[str, float]:
    """The slowest and largest of everything, of as many processes; each may have so many bytes beside mapped files."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    alone = {"OPENBLAS_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1", "JAX_PLATFORMS": "cpu"}
    running = []
    for index in range(number):
        case = json.dumps([str(path), index, number, port, limits, cores[index % len(cores)], bytes_allowed])
        command = [sys.executable, "-m", "benchmarks.processes", "--case", case]
        environment = {**os.environ, **alone}
        running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed")
    found = [json.loads(output.splitlines()[-1]) for output in told]
    return {name: max(own[name] for own in found) for name in found[0]}


def large(num_rows: int) -> dict[str, Any]:
    """Two processes and a file of which none may hold its half in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npy"
        write_rows(path, num_rows, "float64")
        half = path.stat().st_size / 2
        # of a small file less than the programs take
        allowed = int(LARGE_SHARE * half) if num_rows >= LARGE_ROWS else None
        found = in_processes(path, 2, bytes_allowed=allowed, **LARGE_LIMITS)
    row: dict[str, Any] = {"rows": num_rows, "processes": 2, "half of the file GB": round(1e-9 * half, 2)}
    row["memory allowed GB"] = round(1e-9 * LARGE_SHARE * half, 2)
    row |= _rounded(found)
    print(row, flush=True)
    if num_rows == LARGE_ROWS:
        write_result("processes_large", {"features": NUM_FEATURES, **LARGE_LIMITS, "sweeps": NUM_SWEEPS}, [row])
    return row


def _rounded(found: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {f"{name} s": round(found[name], 1) for name in ("trees", "stage one", "sampler", "fit")}
    row |= {"sums": int(found["sums"]), "summed MB": round(8e-6 * found["numbers"], 1)}
    return row | {"passes": round(found["passes"], 1), "peak GB": round(1e-9 * found["peak"], 2)}


def tables() -> list[str]:
    record = load("processes")
    settings = record["settings"]
    lines = [
        "### Rows that processes bring themselves",
        "",
        f"{settings['features']} features, one tree learned from"
        f" {settings['tree rows']:,} rows, {settings['sweeps']} sweeps; a core each, one machine:",
        "",
    ]
    rows = [
        [
            f"{row['rows']:,}",
            str(row["processes"]),
            *(f"{row[name]:.0f}" for name in ("trees s", "stage one s", "sampler s", "fit s")),
            f"{row['sums']:,}",
            f"{row['summed MB']:.0f}",
            f"{row['passes']:.0f}",
            f"{row['peak GB']:.2f}",
        ]
        for row in record["rows"]
    ]
    head = ["rows", "processes", "trees of the sample, s", "stage one, s", "sampler, s", "fit, s"]
    lines += table([*head, "sums", "summed, MB", "rows read, times", "peak of a process, GB"], rows)
    if not (RESULTS / "processes_large.json").exists():
        return lines
    record = load("processes_large")
    (row,), limits = record["rows"], record["settings"]
    gigabytes = 2 * row["half of the file GB"]
    return [
        *lines,
        "",
        f"A file of {row['rows']:,} rows of {limits['features']} features in float64, {gigabytes:.0f} GB, and two"
        f" processes with {row['memory allowed GB']:.1f} GB each (RLIMIT_DATA; rank {limits['max_rank']},"
        f" {limits['num_candidates']} candidates): stage one {row['stage one s']:.0f} s, {limits['sweeps']} sweeps"
        f" {row['sampler s']:.0f} s,"
        f" a peak of {row['peak GB']:.1f} GB beyond the process's start, rows read {row['passes']:.0f} times,"
        f" {row['sums']} sums of {row['summed MB']:.0f} MB together (`{record['command']}`).",
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--large", action="store_true", help="a file larger than the memory that is allowed")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--processes", nargs="+", type=int, default=PROCESSES)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(measure(*json.loads(options.case))))
        return []
    if options.large:
        return [large((options.rows or [LARGE_ROWS])[0])]
    sizes, numbers = ((600,), (2,)) if options.quick else (options.rows or SIZES, options.processes)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / f"{size}.npy"
            write_rows(path, size)
            for number in numbers:
                found = in_processes(path, number)
                rows.append({"rows": size, "processes": number, **_rounded(found)})
                print(rows[-1], flush=True)
    if not options.quick:
        settings = {"features": NUM_FEATURES, "tree rows": TREE_ROWS, "sweeps": NUM_SWEEPS}
        write_result("processes", settings, rows)
    return rows


if __name__ == "__main__":
    main()
