"""Small tables whose columns are in different units: held-out log density as they come, and divided by deviations.

scikit-learn's iris, wine, breast cancer and diabetes (its raw form), and statsmodels' sea surface temperatures, US
economy by quarters and Californian schools, five 70/30 splits. The rivals get standardised columns, as their users
would give them, and the Jacobian; ours gets the columns as they come, and standardised too. Nats per row, the mean over
the splits.

Diabetes has two columns with few values: sex, and the ratio of two blood measurements, of which more than half are
3.0 or 4.0. Where values repeat, a density has no upper limit, and a method wins by how narrow it lets a component
become. So the table is also taken with a uniform number within half a unit added to both columns. Columns of the others
that are mostly one of few values, or the difference of two others, are left out.

python -m benchmarks.mixed_units [--quick]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, is_installed, write_result
from benchmarks.rivals import factor_analysis, shrunk_gaussian
from benchmarks.tables import load, mean_of, table
from geode_jax.demo.baselines import fit_gaussian_mixture

TABLES = {
    "iris": lambda: load_iris().data,
    "wine": lambda: load_wine().data,
    "breast cancer": lambda: load_breast_cancer().data,
    "diabetes": lambda: load_diabetes(scaled=False).data,
    "diabetes, repeated values spread": lambda: _spread(load_diabetes(scaled=False).data, [1, 7]),
}
OURS = "GEODE"
RIVALS = "Gaussian, Ledoit-Wolf", "factor analysis", "Gaussian mixture, BIC"
STATSMODELS = {"sea surface": "elnino", "US economy": "macrodata", "schools": "star98"}
LEFT_OUT = {"elnino": [], "macrodata": ["quarter", "realint"], "star98": ["PCTCHRT", "PCTYRRND"]}


def tables_at_hand(quick: bool) -> dict[str, Callable[[], np.ndarray]]:
    """Rows (n, D) by name; those of statsmodels where it is installed."""
    if quick:
        return {"wine": TABLES["wine"]}
    if not is_installed("statsmodels"):
        return TABLES
    return TABLES | {name: partial(_of_statsmodels, data) for name, data in STATSMODELS.items()}


def _of_statsmodels(name: str) -> np.ndarray:
    from statsmodels import datasets  # an extra: what benchmarks measure beside ours

    table = getattr(datasets, name).load_pandas().data.dropna().drop(columns=LEFT_OUT[name])
    return table.to_numpy(float)


def _spread(x: np.ndarray, columns: list[int]) -> np.ndarray:
    """With a uniform number in (-0.5, 0.5) added to the values of these columns."""
    spread = x.copy()
    spread[:, columns] += np.random.default_rng(0).uniform(-0.5, 0.5, (len(x), len(columns)))
    return spread


def held_out_nats(
    train: np.ndarray, test: np.ndarray, seed: int, *, quick: bool
) -> dict[str, tuple[np.ndarray, float]]:
    """Log densities of the test rows and seconds, by method."""
    deviation = train.std(axis=0)
    jacobian = -float(np.log(deviation).sum())
    scaled, scaled_test = train / deviation, test / deviation
    sizes = dict.fromkeys(min(size, len(train) // 20) for size in (1, 2, 3, 4, 6, 8))
    ranks = range(1, train.shape[1])
    dictionary = geode_jax.DictionarySettings(**(QUICK_DICTIONARY if quick else {}))
    sampler = geode_jax.SamplerSettings(**(QUICK_SWEEPS if quick else {}))

    def ours(rows: np.ndarray, new: np.ndarray) -> np.ndarray:
        posterior = geode_jax.fit(jax.random.key(seed), rows, dictionary=dictionary, sampler=sampler)
        return geode_jax.log_density(posterior, new)

    methods = {
        OURS: lambda: ours(train, test),
        f"{OURS}, standardised": lambda: ours(scaled, scaled_test) + jacobian,
        RIVALS[0]: lambda: shrunk_gaussian(scaled).log_density(scaled_test) + jacobian,
        RIVALS[1]: lambda: factor_analysis(scaled, ranks).log_density(scaled_test) + jacobian,
        RIVALS[2]: lambda: fit_gaussian_mixture(scaled, sizes, seed).log_density(scaled_test) + jacobian,
    }
    found = {}
    for name, method in methods.items():
        start = time.perf_counter()
        found[name] = (np.asarray(method(), np.float64), round(time.perf_counter() - start, 1))
    return found


def tables() -> list[str]:
    record = load("mixed_units")
    rows = record["rows"]
    names = list(dict.fromkeys(row["data"] for row in rows))
    sizes = {row["data"]: (row["rows"], row["features"]) for row in rows}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        numbers = [mean_of([row for row in rows if row["data"] == name], method, "nats") for name in names]
        lines.append([method, *(f"{number:.2f}" for number in numbers)])
    lines.append([f"{OURS} less the best rival (standard error)", *(_lead(rows, name) for name in names)])
    return [
        "### Columns in different units",
        "",
        "Small tables of scikit-learn and statsmodels. Rivals get the columns divided by their deviations, as does"
        f" our standardised row. Held-out nats per row, mean of {record['settings']['splits']} splits. The standard"
        " error is that over the test rows of one split; splits share rows. The Gaussian mixture has up to 8 components"
        " by BIC, at least 20 training rows for each. Three of our defaults were chosen on random splits of iris, wine,"
        " breast cancer and diabetes. Columns that are mostly one of few values,"
        " or the difference of two others, are left out.",
        "",
        *table(["", *(f"{name}, {sizes[name][0]} x {sizes[name][1]}" for name in names)], lines),
    ]


def _lead(rows: list[dict[str, Any]], name: str) -> str:
    """How far ours is ahead of the rival that is best in the mean."""
    own = [row for row in rows if row["data"] == name]
    best = max(RIVALS, key=lambda method: mean_of(own, method, "nats"))
    lead = mean_of(own, OURS, "nats") - mean_of(own, best, "nats")
    return f"{lead:.2f} ({mean_of(own, best, 'error of the difference'):.2f})"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    num_splits = 1 if options.quick else 5
    rows = []
    for name, read in tables_at_hand(options.quick).items():
        x = np.asarray(read(), dtype=np.float64)
        for split in range(num_splits):
            order = np.random.default_rng(split).permutation(len(x))
            cut = int(0.7 * len(x))
            train, test = x[order[:cut]], x[order[cut:]]
            size = {"data": name, "rows": len(x), "features": x.shape[1], "split": split}
            found = held_out_nats(train, test, split, quick=options.quick)
            for method, (nats, seconds) in found.items():
                error = float((found[OURS][0] - nats).std() / np.sqrt(len(nats)))
                numbers = {"nats": float(nats.mean()), "error of the difference": error, "seconds": seconds}
                rows.append(size | {"method": method} | numbers)
                print(f"{name:<33}{split:>2} {method:<24}{nats.mean():>9.2f}{seconds:>7.1f} s", flush=True)
    if not options.quick:
        write_result("mixed_units", {"splits": num_splits}, rows)
    return rows


if __name__ == "__main__":
    main()
