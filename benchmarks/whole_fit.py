"""The time from a cold process to a fitted model and to filled rows, by parts, beside what one would fit instead.

Defaults, 70% of the rows, one split; JAX's persistent cache is off. Both stages are repeated in the same process: what
the first fit took longer is compilation that was not done beside stage one. Fill in: the other rows (at most 200) with
half of their features hidden, intervals included, compiled. Rivals choose on training rows, with BLAS on all cores.

python -m benchmarks.whole_fit [--quick] [--data FOLDER]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits, load_iris, load_sample_image, make_swiss_roll

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, alone, blas_on_all_cores, load_frey, timed, write_result
from benchmarks.real_data import patches
from benchmarks.tables import load, table
from geode_jax.demo.baselines import fit_gaussian_mixture, fit_probabilistic_pca

DATA = ("iris", "digits", "Frey faces", "China, 18 x 18, colour", "curved sheet")
MOST_FILLED = 200


def curved_sheet() -> np.ndarray:
    """A rolled sheet and its pairwise products, mapped to 20 features, with a little noise."""
    rng = np.random.default_rng(0)
    roll = make_swiss_roll(6700, random_state=0)[0] / 10
    products = np.concatenate([roll, roll[:, :1] * roll, roll[:, 1:2] * roll[:, 1:]], axis=1)
    return np.tanh(products @ rng.normal(size=(products.shape[1], 20))) + 0.02 * rng.normal(size=(6700, 20))


def rows_of(name: str, folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Training rows and others."""
    read: dict[str, Callable[[], np.ndarray]] = {
        "iris": lambda: load_iris().data,
        "digits": lambda: load_digits().data + np.random.default_rng(0).random((1797, 64)),
        "Frey faces": lambda: load_frey(folder)[np.random.default_rng(0).permutation(1965)[:1428]],
        "China, 18 x 18, colour": lambda: np.concatenate(patches(load_sample_image("china.jpg"), 18, 2500, 214)),
        "curved sheet": curved_sheet,
    }
    x = np.asarray(read[name](), dtype=np.float64)
    order = np.random.default_rng(0).permutation(len(x))
    cut = int(0.7 * len(x))
    return x[order[:cut]], x[order[cut:]]


def ours(name: str, folder: str | None, quick: bool) -> dict[str, Any]:
    """Seconds by part in this process, which has compiled nothing."""
    train, test = rows_of(name, folder)
    if not quick:
        jax.config.update("jax_enable_compilation_cache", False)
    dictionary = geode_jax.DictionarySettings(**(QUICK_DICTIONARY if quick else {}))
    sampler = geode_jax.SamplerSettings(**(QUICK_SWEEPS if quick else {}))
    times: dict[str, float] = {}
    with timed(times, "fit, first"):
        posterior = geode_jax.fit(jax.random.key(0), train, dictionary=dictionary, sampler=sampler)
    key_forest, key_sample = jax.random.split(jax.random.key(0))  # as `fit` does: the same forest and draws
    with timed(times, "stage one, again"):
        forest = geode_jax.learn_forest(key_forest, train, dictionary=dictionary)
    with timed(times, "sampler, again"):
        geode_jax.sample_posterior(key_sample, forest, sampler=sampler)
    few = test[:MOST_FILLED]
    hidden = np.where(np.random.default_rng(1).random(few.shape) < 0.5, np.nan, few)
    for part in ("fill in, first", "fill in"):
        with timed(times, part):
            geode_jax.impute(posterior, hidden)
    nats = float(geode_jax.log_density(posterior, test).mean())
    return {"nats": nats, "milliseconds a row": 1000 * times["fill in"] / len(few), **times}


def import_seconds() -> float:
    """Seconds to import the package in a new process."""
    program = "import time; start = time.perf_counter(); import geode_jax; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)


def rivals(name: str, folder: str | None) -> dict[str, dict[str, float]]:
    """Seconds to fit, and nats of the other rows, of a Gaussian mixture by BIC and of probabilistic PCA."""
    train, test = rows_of(name, folder)
    deviation = np.where(train.std(axis=0) > 0, train.std(axis=0), 1.0)
    train, test = train / deviation, test / deviation
    sizes = dict.fromkeys(max(1, min(size, len(train) // 20)) for size in (1, 2, 4, 8, 16))
    ranks = range(1, train.shape[1]) if train.shape[1] <= 20 else (5, 10, 20, 40)
    fits: dict[str, Callable[[], Any]] = {"probabilistic PCA": lambda: fit_probabilistic_pca(train, ranks)}
    if train.shape[1] < 100:  # full covariances of more features take minutes, and lose
        fits["Gaussian mixture, BIC"] = lambda: fit_gaussian_mixture(train, sizes, 0)
    found = {}
    with blas_on_all_cores():
        for method, fit in fits.items():
            start = time.perf_counter()
            model = fit()
            seconds = time.perf_counter() - start
            found[method] = {
                "seconds": seconds,
                "nats": float(model.log_density(test).mean() - np.log(deviation).sum()),
            }
    return found


def tables() -> list[str]:
    record = load("whole_fit")
    rows = record["rows"]
    imported = record["settings"]["import seconds"]
    lines = []
    for row in rows:
        by_rival = [row["rivals"].get(name) for name in ("Gaussian mixture, BIC", "probabilistic PCA")]
        lines.append(
            [
                f"{row['data']}, {row['rows']} x {row['features']}",
                *(f"{row[part]:.1f}" for part in ("fit, first", "stage one, again", "sampler, again")),
                f"{imported + row['fit, first']:.1f}",
                f"{row['milliseconds a row']:.1f}",
                f"{row['nats']:.2f}",
                *(f"{one['seconds']:.1f} s; {one['nats']:.2f}" if one else "" for one in by_rival),
            ]
        )
    head = [
        "training rows",
        "fit, first",
        "stage one, again",
        "sampler, again",
        "**whole**",
        "fill in, ms a row",
        "nats",
        "Gaussian mixture, BIC",
        "probabilistic PCA",
    ]
    return [
        "### A whole fit in a cold process",
        "",
        f"Seconds by part (the whole: with {imported:.1f} s"
        " of import), milliseconds to fill in a row of which half is hidden, and held-out nats; rivals with the"
        " seconds of their choices:",
        "",
        *table(head, lines),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds frey_faces.npz")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name in ("iris",) if options.quick else DATA:
        train, _ = rows_of(name, options.data)
        size = {"data": name, "rows": train.shape[0], "features": train.shape[1]}
        own = ours(name, options.data, True) if options.quick else alone(ours, name, options.data, False)
        rows.append({**size, **own, "rivals": rivals(name, options.data)})
        print(rows[-1], flush=True)
    if not options.quick:
        write_result("whole_fit", {"import seconds": import_seconds()}, rows)
    return rows


if __name__ == "__main__":
    main()
