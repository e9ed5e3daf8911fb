"""The intrinsic dimension where it is known: linear Gaussian data, and a mixture of subspaces of different dimension.

Linear: n = 600, p directions with standard deviations between 0.5 and 1.5 times sqrt(D) / 2, noise of sd 1, for p = 5,
10, 50 and D = 500, 5000. Mixture: 1000 rows in D = 10000, a third each in dimension 3, 5 and 7, about centres sqrt(D)
apart. Reported for 100 new rows: the share whose posterior mode is the truth, and how often half of their features lie
in their 95% intervals given the other half. Estimators of scikit-dimension (`pip install '.[rivals]'`) say one
number for all rows, and one for every row from its 100 nearest neighbours; right is what rounds to the truth. Results
are written one by one: a run goes on where the last one ended.

python -m benchmarks.dimension [--quick]
"""

import argparse
import importlib
import time
import warnings
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import earlier_rows, is_installed, write_result
from benchmarks.tables import load, table

# Classes of skdim.id: linear, by nearest neighbours' distances, and by how well rows separate.
RIVALS = {
    "local PCA": "lPCA",
    "Levina-Bickel": "MLE",
    "two nearest neighbours": "TwoNN",
    "Fisher separability": "FisherS",
}


def linear_rows(rng: np.random.Generator, num_rows: int, num_features: int, dimension: int) -> np.ndarray:
    """Rows, (n, D), of a Gaussian with `dimension` directions above noise of sd 1."""
    directions = np.linalg.qr(rng.normal(size=(num_features, dimension)))[0].T
    deviation = 0.5 * np.sqrt(num_features) * rng.uniform(0.5, 1.5, dimension)
    signal = (deviation * rng.normal(size=(num_rows, dimension))) @ directions
    return signal + rng.normal(size=(num_rows, num_features))


def mixture_rows(
    rng: np.random.Generator, num_rows: int, num_features: int, dimensions: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows, (n, D), and the dimension of each, (n,)."""
    truth = np.resize(dimensions, num_rows)
    x = np.empty((num_rows, num_features))
    for dimension in dimensions:
        inside = truth == dimension
        x[inside] = rng.normal(size=num_features) + linear_rows(rng, int(inside.sum()), num_features, dimension)
    return x, truth


def measure(x: np.ndarray, truth: np.ndarray, num_train: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit the first `num_train` rows; the dimensions of the rest, and the coverage on them."""
    start = time.perf_counter()
    posterior = geode_jax.fit(jax.random.key(0), x[:num_train], **options)
    seconds = time.perf_counter() - start
    test, expected = x[num_train:], truth[num_train:]
    chances = geode_jax.intrinsic_dimension(posterior, test)  # in sample, rows seem to belong to the smallest cells
    hidden = np.random.default_rng(1).random(test.shape) < 0.5
    filled = geode_jax.impute(posterior, np.where(hidden, np.nan, test))
    return {
        "right": float(np.mean(chances.argmax(axis=1) == expected)),
        "probability_of_truth": float(chances[np.arange(len(test)), expected].mean()),
        "coverage95": float(np.mean(((filled.lower <= test) & (test <= filled.upper))[hidden])),
        "scale_weights": posterior.scale_weights.mean(axis=(0, 1, 2)).round(3).tolist(),
        "seconds": round(seconds, 1),
    }


def measure_rival(name: str, x: np.ndarray, truth: np.ndarray, num_neighbors: int) -> dict[str, Any]:
    """One estimate for all rows, and one for each."""
    estimator = getattr(importlib.import_module("skdim.id"), RIVALS[name])()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = float(estimator.fit(x).dimension_)
        by_row = estimator.fit_transform_pw(x, n_neighbors=num_neighbors)
    seconds = time.perf_counter() - start
    return {
        "right": float(np.mean(np.round(by_row) == truth)),
        "whole": whole if np.isfinite(whole) else None,  # some find none where rows are too few for the dimension
        "seconds": round(seconds, 1),
    }


def tables() -> list[str]:
    record = load("dimension")
    lines = [
        f"**Intrinsic dimension** where it is known, `{record['command']}`: rows whose posterior mode is the truth, the"
        " mean posterior probability of the truth, and the coverage of 95% intervals of the hidden half of new rows."
        " Estimators of scikit-dimension have one number for all rows, and one for each from its 100 nearest"
        " neighbours, of which those that round to the truth are right.",
        "",
    ]
    rows = []
    order = dict.fromkeys((row["data"], row["dimension"], row["features"]) for row in record["rows"])
    for data, dimension, features in order:
        for row in record["rows"]:
            if (row["data"], row["dimension"], row["features"]) == (data, dimension, features):
                is_ours = row["method"] == "GEODE"
                cells = (
                    ["", f"{row['probability_of_truth']:.3f}", f"{row['coverage95']:.1%}"]
                    if is_ours
                    else ["none" if row["whole"] is None else f"{row['whole']:.1f}", "", ""]
                )
                name = f"**{row['method']}**" if is_ours else row["method"]
                right, seconds = f"{row['right']:.1%}", f"{row['seconds']:.0f}"
                rows.append([data, dimension, str(features), name, right, *cells, seconds])
    head = ["data", "truth", "D", "method", "right", "for all rows", "probability of the truth", "coverage of 95%"]
    return lines + table([*head, "seconds"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    rows = [] if options.quick or options.fresh else earlier_rows("dimension", {})
    done = {(row["method"], row["data"], row["dimension"], row["features"]) for row in rows}
    new = 20 if options.quick else 100
    methods = ["GEODE", *(RIVALS if is_installed("skdim") else ())]

    def record(data: str, dimension: str, x: np.ndarray, truth: np.ndarray, fit: dict[str, Any]) -> None:
        num_train = len(x) - new
        for method in methods:
            about = {"method": method, "data": data, "dimension": dimension, "features": x.shape[1]}
            if tuple(about.values()) in done:
                continue
            if method == "GEODE":
                found = measure(x, truth, num_train, fit)
            else:
                found = measure_rival(method, x[:num_train], truth[:num_train], 20 if options.quick else 100)
            rows.append(about | found)
            print(rows[-1], flush=True)
            if not options.quick:
                write_result("dimension", {}, rows)

    quick_fit = {
        "dictionary": geode_jax.DictionarySettings(num_trees=1),
        "sampler": geode_jax.SamplerSettings(num_warmup=150, num_samples=50),
    }
    for num_features in (100,) if options.quick else (500, 5000):
        for dimension in (2,) if options.quick else (5, 10, 50):
            x = linear_rows(rng, 520 if options.quick else 600 + new, num_features, dimension)
            record("linear", str(dimension), x, np.full(len(x), dimension), quick_fit if options.quick else {})
    if not options.quick:
        record("mixture", "3, 5, 7", *mixture_rows(rng, 1000 + new, 10_000, (3, 5, 7)), {})
    return rows


if __name__ == "__main__":
    main()
