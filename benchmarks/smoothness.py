"""Smoothness adaptation (the paper's section 4.1): one feature predicted from the others, no scale chosen by hand.

A mixture of three Gaussians of dimension 3, 5 and 7 in D = 10000, 1000 training and 100 test rows; the response is one
more feature. The rival is multiscale principal component regression (MPCR): in every cell of one scale of a METIS tree,
least squares on the leading components of the cell's rows, a test row being routed to the nearest centre from the root
down. Its number of components is 10 at every scale, or chosen at each by cross-validation on the training rows. Mean
squared errors in units of the noise variance: 1 cannot be beaten but by chance.

python -m benchmarks.smoothness [--quick]
"""

import argparse
import time
from typing import Any

import numpy as np

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, write_result
from benchmarks.dimension import mixture_rows
from benchmarks.tables import load
from geode_jax.partition.metis import Partition, partition_rows
from geode_jax.partition.neighbours import neighbour_graph

DEPTH, MIN_CELL = 6, 8
COMPONENTS = (1, 2, 3, 5, 7, 10, 15, 20)
FIXED = 10


def principal_component_regressions(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Predictions at `new` rows by least squares on so many leading components of x, (counts, new rows)."""
    centre, mean = x.mean(axis=0), y.mean()
    centred = x - centre
    values, left = np.linalg.eigh(centred @ centred.T)
    values, left = values[::-1], left[:, ::-1]
    useful = int((values > 1e-6 * values[0]).sum())
    # coordinates of the new rows along the left vectors: no direction of R^D is formed
    across = (new - centre) @ centred.T @ left[:, :useful] / values[:useful]
    terms = across * (left[:, :useful].T @ (y - mean))
    fitted = np.cumsum(terms, axis=1)
    return np.stack([mean + fitted[:, min(count, useful) - 1] for count in COMPONENTS])


def nodes_of(x: np.ndarray, partition: Partition, new: np.ndarray) -> np.ndarray:
    """Node of every new row at every scale, (depth + 1, new rows): nearest child from the root down; leaves stay."""
    nodes = np.zeros((partition.depth + 1, new.shape[0]), dtype=int)
    for scale in range(partition.depth):
        nodes[scale + 1] = nodes[scale]
        for node in np.unique(nodes[scale]):
            if 2 * node + 2 >= len(partition.cells) or partition.cells[2 * node + 1] is None:
                continue
            here = np.flatnonzero(nodes[scale] == node)
            centres = np.stack([x[partition.cells[2 * node + side]].mean(axis=0) for side in (1, 2)])
            distance = np.square(new[here, None] - centres).sum(axis=2)
            nodes[scale + 1, here] = 2 * node + 1 + distance.argmin(axis=1)
    return nodes


def multiscale_regression(x: np.ndarray, y: np.ndarray, new: np.ndarray, partition: Partition) -> np.ndarray:
    """Predictions with every number of components at every scale, (depth + 1, counts, new rows)."""
    nodes = nodes_of(x, partition, new)
    found = np.empty((partition.depth + 1, len(COMPONENTS), new.shape[0]))
    for node in np.unique(nodes):
        rows = partition.cells[node]
        assert rows is not None
        scales, which = np.nonzero(nodes == node)
        once = np.unique(which)
        values = principal_component_regressions(x[rows], y[rows], new[once])
        found[scales, :, which] = values[:, np.searchsorted(once, which)].T
    return found


def grow(x: np.ndarray, seed: int) -> Partition:
    """One METIS tree."""
    return partition_rows(x, neighbour_graph(x, 10, seed), DEPTH, MIN_CELL, seed)


def tuned_components(x: np.ndarray, y: np.ndarray, seed: int, num_folds: int = 5) -> np.ndarray:
    """Index of the best number of components at every scale, by cross-validation, (depth + 1,)."""
    folds = np.random.default_rng(seed).permutation(np.arange(y.size) % num_folds)
    error = np.zeros((DEPTH + 1, len(COMPONENTS)))
    for fold in range(num_folds):
        inside = folds != fold
        found = multiscale_regression(x[inside], y[inside], x[~inside], grow(x[inside], seed))
        error += np.square(found - y[~inside]).sum(axis=2)
    return error.argmin(axis=1)


def tables() -> list[str]:
    record = load("smoothness")
    rows = record["rows"]
    fixed, tuned = (np.mean([row[key] for row in rows], axis=0) for key in ("mpcr_fixed", "mpcr_tuned"))
    ours = np.array([row["geode"] for row in rows])
    scales = " | ".join(f"scale {scale}" for scale in range(fixed.size))
    error = ours.std(ddof=1) / np.sqrt(ours.size)
    return [
        "### Regression without a scale chosen by hand",
        "",
        f"The paper's section 4.1: three subspaces of dimension 3, 5, 7 in D = 10000, 1000 training rows, {len(rows)}"
        " replicates; mean squared error of one feature given the others, the noise variance being 1. GEODE:"
        f" **{ours.mean():.3f}** (standard error {error:.3f}), {np.mean([row['coverage95'] for row in rows]):.1%} of"
        f" the truth within 95% intervals, {np.mean([row['fit_seconds'] for row in rows]):.0f} s to fit.",
        "",
        f"| multiscale principal component regression | {scales} |",
        "|---|" + "---|" * fixed.size,
        f"| {record['settings']['fixed_components']} components | {' | '.join(f'{value:.3f}' for value in fixed)} |",
        f"| as many as cross-validation says | {' | '.join(f'{value:.3f}' for value in tuned)} |",
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--replicates", type=int, default=20)
    options = parser.parse_args(arguments)
    num_features, num_train, num_new = (60, 120, 30) if options.quick else (10_000, 1000, 100)
    fit = QUICK_DICTIONARY | QUICK_SWEEPS if options.quick else {"num_trees": 4}
    rows = []
    for replicate in range(1 if options.quick else options.replicates):
        rng = np.random.default_rng(replicate)
        rest = mixture_rows(rng, num_train + num_new, num_features + 1, (3, 5, 7))[0]
        rest = rest.astype(np.float32)
        response, new = int(rng.integers(num_features + 1)), rest[num_train:]
        x, y = np.delete(rest[:num_train], response, axis=1), rest[:num_train, response]
        new, truth = np.delete(new, response, axis=1), new[:, response]
        start = time.perf_counter()
        model = geode_jax.GeodeRegressor(random_state=replicate, **fit).fit(x, y)
        fitted = time.perf_counter()
        mean, (lower, upper) = model.predict(new), model.predict_interval(new)
        row: dict[str, Any] = {
            "replicate": replicate,
            "geode": float(np.square(mean - truth).mean()),
            "coverage95": float(((lower <= truth) & (truth <= upper)).mean()),
            "fit_seconds": round(fitted - start, 1),
            "predict_seconds": round(time.perf_counter() - fitted, 1),
        }
        start = time.perf_counter()
        found = multiscale_regression(x, y, new, grow(x, replicate))
        error = np.square(found - truth).mean(axis=2)
        row["mpcr_fixed"] = error[:, COMPONENTS.index(FIXED)].tolist()
        row["mpcr_tuned"] = error[np.arange(DEPTH + 1), tuned_components(x, y, replicate)].tolist()
        row["mpcr_seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        print({key: np.round(value, 3).tolist() for key, value in row.items()}, flush=True)
    if not options.quick:
        write_result("smoothness", {"features": num_features, "fit": fit, "fixed_components": FIXED}, rows)
    return rows


if __name__ == "__main__":
    main()
