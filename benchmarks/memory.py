"""Stage one's memory and time beside the data's size: memory-mapped input, blocked work.

Peaks are of all memory that the process takes for itself (NumPy's, JAX's, BLAS's), above what it had before, without
the file's own pages; Linux only. One tree; rows on a curved set of 5 dimensions, and noise. Every problem has a process
of its own, which before has learned from a small one of its kind: imports, compiled programs, threads and BLAS's work
space are there already. Results are written after each problem: a run goes on where the last one ended.

python -m benchmarks.memory [--quick] [--shapes N,D[,SHARE] ...] [--fresh]
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.candidates import curved_rows
from benchmarks.common import alone, earlier_rows, memory_bytes, timed, write_result
from benchmarks.tables import load, table
from geode_jax._runtime.buffers import release_free_memory
from geode_jax.fitting.memory import bytes_needed
from geode_jax.forest.learn import plan_of
from geode_jax.partition.neighbours import EXACT_MAX_FEATURES, EXACT_MAX_ROWS, uses_exact_search
from geode_jax.rows.row_space import uses_row_space

# Rows, features, and the share of rows that miss a random half of their features.
SHAPES = ((60_000, 784, 0.0), (600, 15_000, 0.0), (1_000_000, 100, 0.0), (60_000, 128, 0.1), (500, 10_000, 0.2))
NO_DRAWS = geode_jax.SamplerSettings(num_samples=1)


class AnonymousPeak:
    """The largest anonymous memory of this process while a block runs, above that at its start, in bytes."""

    def __enter__(self) -> "AnonymousPeak":
        self._start = self.peak = memory_bytes("RssAnon")
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._watcher.join()
        self.peak -= self._start

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, memory_bytes("RssAnon"))
            time.sleep(0.005)


def hide(x: np.ndarray, share: float) -> None:
    """A share of the rows loses a random half of its features, in place."""
    rng = np.random.default_rng(1)
    for row in rng.choice(len(x), round(share * len(x)), replace=False):
        x[row, rng.choice(x.shape[1], x.shape[1] // 2, replace=False)] = np.nan  # never all of few


def measure(num_rows: int, num_features: int, share: float, settings: geode_jax.DictionarySettings) -> dict[str, Any]:
    """One problem, after small ones for what is not the data's."""
    shapes = [(300, 3000) if uses_row_space(num_rows, num_features) else (2000, 200)]
    if not uses_exact_search(num_rows, num_features):
        shapes.append((EXACT_MAX_ROWS + 1000, EXACT_MAX_FEATURES + 2))
    for shape in shapes:
        small = geode_jax.DictionarySettings(num_trees=1, max_rank=shape[1] // 10, depth=2)
        first = curved_rows(*shape, np.empty(shape, np.float32))
        hide(first, share)
        geode_jax.learn_forest(jax.random.key(0), first, dictionary=small)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_rows, num_features))
        curved_rows(num_rows, num_features, rows)
        hide(rows, share)
        rows.flush()
        x = np.load(path, mmap_mode="r")
        times: dict[str, float] = {}
        release_free_memory()  # what the small ones had would else be taken again unseen
        with AnonymousPeak() as used, timed(times, "seconds"):
            forest = geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)
    kept = jax.tree.leaves((forest.dictionary, forest.statistics, forest.partial))
    return {
        "rows": num_rows,
        "features": num_features,
        "incomplete": share,
        "depth": forest.dictionary.tree.depth,
        "rank": forest.found.rank,
        "data MiB": x.nbytes / 2**20,
        "told over data": sum(bytes_needed(plan_of(x, settings), NO_DRAWS, 4, is_mapped=True).values()) / x.nbytes,
        "peak over data": used.peak / x.nbytes,
        "kept over data": sum(leaf.nbytes for leaf in kept) / x.nbytes,
        **times,
    }


def tables() -> list[str]:
    record = load("memory")
    lines = [
        "### Memory of stage one",
        "",
        "Memory-mapped float32 rows near a curved set of 5 dimensions, one tree, rank 20. All over the size of the"
        " data: what `fit` expects before it starts, when it warns of too little memory; the peak of all memory that"
        " the process takes for itself, above what it had before; and what stage one hands to the sampler. Incomplete"
        " rows miss a random half of their features:",
        "",
    ]
    rows = [
        [
            f"{row['rows']:,} x {row['features']:,}",
            f"{row['incomplete']:.0%}",
            str(row["depth"]),
            f"{row['data MiB']:.0f}",
            f"{row['told over data']:.2f}" if "told over data" in row else "",
            f"{row['peak over data']:.2f}",
            f"{row['kept over data']:.2f}",
            f"{row['seconds']:.0f}",
        ]
        for row in record["rows"]
    ]
    return lines + table(
        [
            "rows x D",
            "incomplete rows",
            "depth",
            "data, MiB",
            "expected over data",
            "peak over data",
            "handed over, over data",
            "seconds",
        ],
        rows,
    )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--shapes", nargs="+", help="rows,features of each problem, and the share of incomplete rows")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have found")
    options = parser.parse_args(arguments)
    run_settings = {"trees": 1}
    rows = [] if options.quick or options.fresh else earlier_rows("memory", run_settings)
    found = {(row["rows"], row["features"], row["incomplete"]) for row in rows}
    shapes = [_shape(text) for text in options.shapes or []] or list(SHAPES)
    missing = [shape for shape in shapes if shape not in found]
    for num_rows, num_features, share in [(2000, 60, 0.05)] if options.quick else missing:
        settings = geode_jax.DictionarySettings(num_trees=1, max_rank=20, depth=2 if options.quick else None)
        rows.append(alone(measure, num_rows, num_features, share, settings))
        print(rows[-1], flush=True)
        if not options.quick:
            write_result("memory", run_settings, rows)
    return rows


def _shape(text: str) -> tuple[int, int, float]:
    num_rows, num_features, *share = text.split(",")
    return int(num_rows), int(num_features), float(share[0]) if share else 0.0


if __name__ == "__main__":
    main()
