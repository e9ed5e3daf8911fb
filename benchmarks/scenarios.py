"""Out-of-sample prediction in nine scenarios, with and without missing training data, against the usual regressions.

The paper's appendix with its nine scenarios is not at hand. These are three of each of its kinds, in the manner of the
author's published demonstration (loadings 5 N(0, 1), one noise level): one subspace of dimension 5, 10, 20; mixtures of
subspaces of dimensions (5, 5), (3, 5, 7), (2, 4, 6, 8); and curved sheets, a Swiss roll, a sphere and a torus, bent
into R^D by random loadings of their coordinates' sines and cosines. 500 training and 100 test rows. The response is
one more feature. With missing data, 20% of the training rows miss a random half of their features (the response too).

Elastic net and principal component regression choose by cross-validation, the forest splits by the best of a random
third of the features, as is usual in regression; where rows have missing features the rivals get them filled with
column means, and once more only the complete rows, as GEODE does in "rows dropped". The forest, which is far behind, is
fitted to the first replicate only, and without rows dropped. Mean squared errors are in units of the noise variance: 1
cannot be beaten but by chance.

A data set takes minutes, and results are written after each: a run goes on where the last one ended, with the methods
that are missing.

python -m benchmarks.scenarios [--features D] [--replicates R] [--scenarios 1 2 ...] [--fresh] [--quick]
"""

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ElasticNetCV, LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, RESULTS, blas_on_all_cores, earlier_rows, write_result
from benchmarks.tables import load, table

NUM_TRAIN, NUM_NEW = 500, 100
SCENARIOS: dict[int, tuple[str, tuple[int, ...]]] = {
    1: ("subspace", (5,)),
    2: ("subspace", (10,)),
    3: ("subspace", (20,)),
    4: ("subspace", (5, 5)),
    5: ("subspace", (3, 5, 7)),
    6: ("subspace", (2, 4, 6, 8)),
    7: ("Swiss roll", ()),
    8: ("sphere", ()),
    9: ("torus", ()),
}


def sheet(rng: np.random.Generator, kind: str, num_rows: int) -> np.ndarray:
    """Points of a curved sheet in three dimensions, of deviation about 1, (n, 3)."""
    first, second = rng.uniform(size=(2, num_rows))
    if kind == "Swiss roll":
        angle = 1.5 * np.pi * (1 + 2 * first)
        points = np.stack([angle * np.cos(angle), 21 * second, angle * np.sin(angle)], axis=1) / 7.0
    elif kind == "sphere":
        points = rng.normal(size=(num_rows, 3))
        points *= np.sqrt(3) / np.linalg.norm(points, axis=1, keepdims=True)
    else:
        around, through = 2 * np.pi * first, 2 * np.pi * second
        radius = 1.5 + 0.6 * np.cos(through)
        points = np.stack([radius * np.cos(around), radius * np.sin(around), 1.5 * np.sin(through)], axis=1)
    return points


def scenario_rows(rng: np.random.Generator, number: int, num_rows: int, num_features: int) -> np.ndarray:
    """Rows of a scenario with noise of sd 1, (n, D)."""
    kind, dimensions = SCENARIOS[number]
    if kind != "subspace":
        points = sheet(rng, kind, num_rows)
        turned = points @ rng.normal(size=(3, 12))
        points = np.concatenate([points, np.sin(turned), np.cos(turned)], axis=1)
        return points @ (2.0 * rng.normal(size=(points.shape[1], num_features))) + rng.normal(
            size=(num_rows, num_features)
        )
    rows = rng.normal(size=(num_rows, num_features))
    which = rng.integers(len(dimensions), size=num_rows)
    for part, dimension in enumerate(dimensions):
        inside = which == part
        loadings = 5.0 * rng.normal(size=(dimension, num_features))
        centre = 5.0 * rng.normal(size=num_features) if len(dimensions) > 1 else 0.0
        rows[inside] += centre + rng.normal(size=(int(inside.sum()), dimension)) @ loadings
    return rows


MISSING = (0.0, 0.2)  # shares of the training rows that are incomplete
DROPPED = ", rows dropped"
NUM_COMPONENTS = (2, 5, 10, 15, 20, 30, 40)


def leading(coordinates: np.ndarray, number: int) -> np.ndarray:
    return coordinates[:, :number]


def principal_components() -> Any:
    """Regression on as many principal components as cross-validation says."""
    steps = [
        ("components", PCA(max(NUM_COMPONENTS), svd_solver="full")),
        ("leading", FunctionTransformer(leading)),
        ("regression", LinearRegression()),
    ]
    choices = {"leading__kw_args": [{"number": number} for number in NUM_COMPONENTS]}
    # components are found once per fold, and kept in a folder that goes with the process
    return GridSearchCV(Pipeline(steps, memory=_folder().name), choices, cv=5)


@cache
def _folder() -> TemporaryDirectory:
    return TemporaryDirectory()


RIVALS: dict[str, Callable[[], Any]] = {
    "elastic net": lambda: ElasticNetCV(l1_ratio=[0.1, 0.5, 0.9], alphas=20, cv=5, max_iter=2000),
    "principal component regression": principal_components,
    "random forest": lambda: RandomForestRegressor(max_features=1 / 3, random_state=0, n_jobs=2),
}


def hide(rng: np.random.Generator, joint: np.ndarray, share: float) -> np.ndarray:
    """A share of the rows loses a random half of its features."""
    hidden = joint.copy()
    rows = rng.choice(joint.shape[0], int(share * joint.shape[0]), replace=False)
    hidden[rows] = np.where(rng.random((rows.size, joint.shape[1])) < 0.5, np.nan, hidden[rows])
    return hidden


SCENARIO_NAMES = {
    number: f"{kind} {', '.join(map(str, dimensions))}".strip() for number, (kind, dimensions) in SCENARIOS.items()
}


def tables() -> list[str]:
    """Means over the data sets that there are; mean squared errors in units of the noise."""
    lines = [
        "### Nine scenarios",
        "",
        f"The paper's figures 4 and 5, in kind: {NUM_TRAIN} training rows, mean squared error of the response over the"
        " noise variance. A data set's own noise moves all methods alike, by 14% from one to the"
        " next: the last column compares data set by data set (mean and standard error of how far a method's error is"
        " above GEODE's). The random forest has the first replicates only.",
    ]
    for name in sorted((path.stem for path in RESULTS.glob("scenarios*.json")), key=lambda name: (len(name), name)):
        record = load(name)
        rows = with_ours(record["rows"])
        pairs = {(row["scenario"], row["replicate"]) for row in rows}
        about = f"D = {record['settings']['features']}, {len(pairs)} data sets, `{record['command']}`:"
        lines += ["", about, "", *_table_of(rows), "", _loss_of(rows)]
    return lines


def with_ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the data sets on which GEODE has been measured: those of rivals stay in the file when ours are redone."""
    ours = {(row["scenario"], row["replicate"]) for row in rows if row["method"] == f"GEODE{DROPPED}"}
    return [row for row in rows if (row["scenario"], row["replicate"]) in ours]


def _loss_of(rows: list[dict[str, Any]]) -> str:
    """What missing training data cost, scenario by scenario."""
    pairs = {
        (row["scenario"], row["replicate"], row["missing"]): row["mse"] for row in rows if row["method"] == "GEODE"
    }
    losses: dict[int, list[float]] = {}
    for number, replicate, missing in pairs:
        if missing and (number, replicate, 0.0) in pairs:
            loss = pairs[number, replicate, missing] / pairs[number, replicate, 0.0] - 1.0
            losses.setdefault(number, []).append(loss)
    means = [float(np.mean(values)) for values in losses.values()]
    grows = f"{np.mean(means):.1%} on average, {max(means):.1%} in the worst scenario"
    return f"With values missing GEODE's error grows by {grows}."


def _table_of(rows: list[dict[str, Any]]) -> list[str]:
    numbers = sorted({row["scenario"] for row in rows})
    names = [f"{number}: {SCENARIO_NAMES[number]}" for number in numbers]
    head = ["missing", "method", *names, "coverage of 95%", "above GEODE"]
    cells_of = []
    for missing in sorted({row["missing"] for row in rows}):
        ours = {(row["scenario"], row["replicate"]): row["mse"] for row in rows if _is(row, missing, "GEODE")}
        for method in dict.fromkeys(row["method"] for row in rows if row["missing"] == missing):
            own = [row for row in rows if _is(row, missing, method)]
            cells = [_mean([row["mse"] for row in own if row["scenario"] == number]) for number in numbers]
            covered = [row["coverage95"] for row in own if "coverage95" in row]
            name = f"**{method}**" if method == "GEODE" else method
            above = np.array([row["mse"] - ours[row["scenario"], row["replicate"]] for row in own])
            compared = f"{above.mean():+.3f} ± {above.std() / np.sqrt(above.size):.3f}" if method != "GEODE" else ""
            cells_of.append([f"{missing:.0%}", name, *cells, f"{np.mean(covered):.1%}" if covered else "", compared])
    return table(head, cells_of)


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else ""


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--features", type=int, default=5000)
    parser.add_argument("--replicates", type=int, default=10)
    parser.add_argument("--scenarios", type=int, nargs="*", default=list(SCENARIOS))
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    num_features, num_train = (40, 120) if options.quick else (options.features, NUM_TRAIN)
    fit = QUICK_DICTIONARY | QUICK_SWEEPS if options.quick else {"num_trees": 2}
    suffix = "" if num_features == 5000 else f"_{num_features}"
    settings = {"features": num_features, "train": num_train, "fit": fit}
    rows = [] if options.quick or options.fresh else earlier_rows(f"scenarios{suffix}", settings)
    for replicate in range(1 if options.quick else options.replicates):
        for number in (5,) if options.quick else options.scenarios:
            done = {(row["missing"], row["method"]) for row in rows if _of(row, number, replicate)}
            if done >= set(itertools.chain.from_iterable(_wanted(missing, replicate) for missing in MISSING)):
                continue
            rng = np.random.default_rng([number, replicate])
            drawn = scenario_rows(rng, number, num_train + NUM_NEW, num_features + 1).astype(np.float32)
            train, new, truth = drawn[:num_train], drawn[num_train:, :-1], drawn[num_train:, -1]
            for missing in MISSING:
                joint = hide(rng, train, missing) if missing else train
                methods = [method for case, method in _wanted(missing, replicate) if (case, method) not in done]
                rows = rows + measure(number, replicate, missing, joint, new, truth, fit, methods)
            if not options.quick:
                write_result(f"scenarios{suffix}", settings, rows)
    return rows


def _is(row: dict[str, Any], missing: float, method: str) -> bool:
    return bool(row["missing"] == missing and row["method"] == method)


def _of(row: dict[str, Any], number: int, replicate: int) -> bool:
    return bool(row["scenario"] == number and row["replicate"] == replicate)


def _wanted(missing: float, replicate: int) -> list[tuple[float, str]]:
    """Methods that are measured on a data set, each with the share of incomplete rows."""
    methods = ["GEODE", *(name for name in RIVALS if name != "random forest" or replicate == 0)]
    dropped = [f"{name}{DROPPED}" for name in methods if name != "random forest"] if missing else []
    return [(missing, method) for method in methods + dropped]


def measure(
    number: int,
    replicate: int,
    missing: float,
    joint: np.ndarray,
    new: np.ndarray,
    truth: np.ndarray,
    options: dict[str, Any],
    methods: list[str],
) -> list[dict[str, Any]]:
    """Methods on one data set, the response being the last feature."""
    is_complete = ~np.isnan(joint).any(axis=1)
    means = np.nanmean(joint[:, :-1], axis=0)
    rows = []
    for method in methods:
        name = method.removesuffix(DROPPED)
        used = joint[is_complete] if method != name else joint
        x, y = used[:, :-1], used[:, -1]
        more = {}
        start = time.perf_counter()
        if name == "GEODE":
            model = geode_jax.GeodeRegressor(random_state=replicate, **options).fit(x, y)
            lower, upper = model.predict_interval(new)
            more["coverage95"] = float(((lower <= truth) & (truth <= upper)).mean())
            mean = model.predict(new)
        else:
            has_response = ~np.isnan(y)
            filled = np.where(np.isnan(x), means, x)[has_response]
            with blas_on_all_cores(), warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                mean = RIVALS[name]().fit(filled, y[has_response]).predict(new)
        found = {"mse": float(np.square(mean - truth).mean()), "seconds": round(time.perf_counter() - start, 1), **more}
        rows.append({"scenario": number, "replicate": replicate, "missing": missing, "method": method, **found})
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    return rows


if __name__ == "__main__":
    main()
