"""The same work alone, beside a copy of itself, and beside a process that multiplies matrices, on the same cores.

Digits, two trees from 800 rows; every program is compiled before. Whoever works in two notebooks, searches over
settings with `n_jobs=2`, or serves a model from two workers shares cores like this. Of two copies the slower one
counts. On two cores a copy may double a time that uses both.

python -m benchmarks.contention [--quick]
"""

import argparse
import multiprocessing
import multiprocessing.synchronize
import os
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, write_result
from benchmarks.tables import load, table

TASKS = ("stage one", "fit", "fit, rows half hidden", "density", "density, rows half hidden", "impute_mean", "impute")
BESIDE = ("nothing", "a copy", "matrix products")
SPAWN = multiprocessing.get_context("spawn")


def task(name: str, *, quick: bool) -> Callable[[], Any]:
    """A call of the given task, after what it needs."""
    x = load_digits().data.astype(np.float32)
    train, test = x[: 120 if quick else 800], x[1000:1100]
    hidden = np.where(np.random.default_rng(0).random(test.shape) < 0.5, np.nan, test)
    sweeps = 10 if quick else 100
    size = QUICK_DICTIONARY if quick else {"num_trees": 2, "max_rank": 32}
    dictionary = geode_jax.DictionarySettings(**size)
    sampler = geode_jax.SamplerSettings(num_warmup=sweeps, num_samples=sweeps, segment_length=sweeps)
    key = jax.random.key(0)
    if name == "stage one":
        return lambda: geode_jax.learn_forest(key, train, dictionary=dictionary)
    if name.startswith("fit"):
        rows = train.copy()
        if "hidden" in name:  # a few: such fits take long
            rows[:20] = np.where(np.random.default_rng(1).random((20, 64)) < 0.5, np.nan, rows[:20])
        return lambda: geode_jax.fit(key, rows, dictionary=dictionary, sampler=sampler)
    posterior = geode_jax.fit(key, train, dictionary=dictionary, sampler=sampler)
    return {
        "density": lambda: geode_jax.log_density(posterior, test),
        "density, rows half hidden": lambda: geode_jax.log_density(posterior, hidden),
        "impute_mean": lambda: geode_jax.impute_mean(posterior, hidden),
        "impute": lambda: geode_jax.impute(posterior, hidden),
    }[name]


def worker(name: str, seconds: float, quick: bool, barrier: multiprocessing.synchronize.Barrier, found: Any) -> None:
    """Call the task for so many seconds, and put the median time of a call."""
    call = task(name, quick=quick)
    call()  # compiles
    barrier.wait()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    found.put(float(np.median(times)))


def multiply(barrier: multiprocessing.synchronize.Barrier) -> None:
    """Multiply matrices for ever, as NumPy does it: on all cores."""
    matrix = np.random.default_rng(0).normal(size=(1500, 1500))
    barrier.wait()
    while True:
        matrix @ matrix


def seconds_beside(name: str, beside: str, seconds: float, *, quick: bool) -> float:
    """Median seconds of a call of the task in one process, or in the slower of two copies."""
    others = {"nothing": [], "a copy": [worker], "matrix products": [multiply]}[beside]
    barrier, found = SPAWN.Barrier(1 + len(others)), SPAWN.Queue()
    arguments = (name, seconds, quick, barrier, found)
    processes = [SPAWN.Process(target=worker, args=arguments)]
    processes += [SPAWN.Process(target=it, args=arguments if it is worker else (barrier,)) for it in others]
    for process in processes:
        process.start()
    times = [found.get() for _ in range(1 + (beside == "a copy"))]
    for process in processes[1:] if beside == "matrix products" else []:
        process.terminate()
    for process in processes:
        process.join()
    return max(times)


def cross_validation_seconds(num_jobs: int) -> float:
    """Seconds of a cross-validation by scikit-learn, compilation and its processes' start included."""
    model = geode_jax.GeodeDensity(num_trees=2, num_warmup=100, num_samples=100, random_state=0)
    start = time.perf_counter()
    cross_val_score(model, load_digits().data[:1000], cv=4, n_jobs=num_jobs)
    return time.perf_counter() - start


def tables() -> list[str]:
    record = load("contention")
    lines = [
        "### Beside other processes",
        "",
        "Seconds of a call on digits (two trees from 800 rows, 100 rows to predict), alone on two cores, in the"
        " slower of two copies, and beside a process that multiplies matrices on all cores. A copy doubles what uses"
        " both cores; more than that is waiting for each other.",
        "",
    ]
    by_task = {row["task"]: row for row in record["rows"] if "task" in row}
    rows = [
        [
            name.replace("fit, rows", "fit, 20 of 800 rows"),
            *(f"{row[beside]:.2f}" for beside in BESIDE),
            *(f"{row[beside] / row['nothing']:.2f}" for beside in BESIDE[1:]),
        ]
        for name, row in by_task.items()
    ]
    head = ["", "alone", "beside a copy", "beside products", "a copy over alone", "products over alone"]
    own = next(row for row in record["rows"] if "one job" in row)
    return [
        *lines,
        *table(head, rows),
        "",
        f"`cross_val_score` of 1000 digits in four folds takes {own['one job']:.0f} s with `n_jobs=1` and"
        f" {own['two jobs']:.0f} s with `n_jobs=2`, each of whose processes compiles for itself.",
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each task is repeated")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    seconds = 0.1 if options.quick else options.seconds
    with TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"JAX_COMPILATION_CACHE_DIR": cache}):
        for name in ("impute_mean",) if options.quick else TASKS:
            situations = ("a copy",) if options.quick else BESIDE
            times = {beside: seconds_beside(name, beside, seconds, quick=options.quick) for beside in situations}
            rows.append({"task": name, **times})
            print(rows[-1], flush=True)
    if options.quick:
        return rows
    rows.append({"one job": cross_validation_seconds(1), "two jobs": cross_validation_seconds(2)})
    print(rows[-1], flush=True)
    write_result("contention", {"seconds": seconds}, rows)
    return rows


if __name__ == "__main__":
    main()
