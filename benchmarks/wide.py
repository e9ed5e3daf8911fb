"""Data of very many features: both stages, densities and filling in, with times and memory beyond the data.

A bump that moves and widens along a line of D points, seen with noise: a curved set of two dimensions that needs tens
of directions, of which there are a thousand rows in float32. By default nodes share the span of a few directions; with
``shared_span=None`` each has its own, and the space that holds all of them is that of the rows. Every fit has a process
of its own.

python -m benchmarks.wide [--quick] [--rows N] [--features D ...]
"""

import argparse
from typing import Any
from unittest import mock

import jax
import numpy as np

import geode_jax
from benchmarks.common import alone, clocked, timed, write_result
from benchmarks.memory import AnonymousPeak
from benchmarks.tables import load, table
from geode_jax.fitting import single, stages

NUM_ROWS, FEATURES = 1000, (10_000, 100_000)
NOISE = 0.3
NUM_NEW, NUM_HIDDEN = 100, 16
KINDS: dict[str, geode_jax.SharedSpan | None] = {"default": geode_jax.SharedSpan(), "no shared span": None}


def bumps(num_rows: int, num_features: int, seed: int) -> np.ndarray:
    """Rows in float32."""
    rng = np.random.default_rng(seed)
    centre, width = rng.uniform(0.1, 0.9, num_rows), rng.uniform(0.02, 0.08, num_rows)
    line = np.linspace(0.0, 1.0, num_features, dtype=np.float32)
    x = rng.standard_normal((num_rows, num_features), np.float32)
    x *= NOISE
    for row, *shape in zip(x, centre, width, strict=True):
        row += 3.0 * np.exp(-0.5 * np.square((line - shape[0]) / shape[1]))
    return x


def measure(num_rows: int, num_features: int, kind: str) -> dict[str, Any]:
    """One fit, and predictions for rows that it has not seen."""
    x, new = bumps(num_rows, num_features, 0), bumps(NUM_NEW, num_features, 1)
    settings = geode_jax.DictionarySettings(shared_span=KINDS[kind])
    times: dict[str, float] = {}
    with (
        mock.patch.object(single, "grow_forest", clocked(times, "stage one", single.grow_forest)),
        mock.patch.object(stages, "run_chains", clocked(times, "sampler", stages.run_chains)),
        AnonymousPeak() as fitting,
        timed(times, "fit"),
    ):
        posterior = geode_jax.fit(jax.random.key(0), x, dictionary=settings)
    hidden = np.random.default_rng(2).random((NUM_HIDDEN, num_features)) < 0.5
    shown = np.where(hidden, np.nan, new[:NUM_HIDDEN])
    with AnonymousPeak() as predicting:
        with timed(times, "density"):
            density = geode_jax.log_density(posterior, new)
        geode_jax.impute(posterior, shown)  # compiled
        with timed(times, "filling in"):
            filled = geode_jax.impute(posterior, shown)
    truth = new[:NUM_HIDDEN][hidden]
    error = np.sqrt(np.mean(np.square(filled.filled[hidden] - truth)))
    inside = (filled.lower[hidden] <= truth) & (truth <= filled.upper[hidden])
    dictionary = posterior.dictionary
    num_trees, num_nodes, coordinates, rank = dictionary.bases.shape
    in_space = 0 if posterior.row_space is None else posterior.row_space.nbytes
    return {
        "features": num_features,
        "kind": kind,
        "data GB": 1e-9 * x.nbytes,
        "rank": rank,
        "space": coordinates - 1,
        "fit peak GB": 1e-9 * fitting.peak,
        "prediction peak GB": 1e-9 * predicting.peak,
        "dictionaries GB": 1e-9 * (in_space + dictionary.bases.nbytes),
        "in all features GB": 4e-9 * num_trees * num_nodes * num_features * rank,
        "nats per feature": float(density.mean()) / num_features,
        "error over noise": float(error) / NOISE,
        "coverage": float(inside.mean()),
        **{f"{name} s": seconds for name, seconds in times.items()},
    }


def tables() -> list[str]:
    record = load("wide")
    settings = record["settings"]
    lines = [
        "### Data of very many features",
        "",
        f"{settings['rows']:,} rows in float32 of a bump that"
        " moves and widens along a line, default settings, and those without a shared span. Peaks are of all memory"
        f" beyond the data: of the fit, then of predictions: densities of {settings['new']} new rows, and"
        f" {settings['hidden']} rows of which half is hidden at random and filled in, with intervals; beside them what"
        " the posterior's dictionaries take, and would take with all features. The error is over that of knowing all"
        " but the noise:",
        "",
    ]
    rows = [
        [
            f"{row['features']:,}",
            row["kind"],
            f"{row['rank']} in {row['space']}",
            *(f"{row[f'{name} s']:.0f}" for name in ("stage one", "sampler", "fit")),
            *(f"{row[f'{name} GB']:.2f}" for name in ("data", "fit peak", "prediction peak", "dictionaries")),
            f"{row['in all features GB']:.1f}",
            f"{1000 * row['density s'] / settings['new']:.1f}",
            f"{row['filling in s'] / settings['hidden']:.2f}",
            f"{row['error over noise']:.3f}",
            f"{100 * row['coverage']:.1f}%",
        ]
        for row in record["rows"]
    ]
    head = ["features", "settings", "directions, in a space of", "stage one, s", "sampler, s", "fit, s", "data, GB"]
    head += ["peak of the fit, GB", "of predictions, GB", "dictionaries, GB", "with all features, GB"]
    return lines + table([*head, "density, ms a row", "filling in, s a row", "error / noise", "coverage"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--features", nargs="+", type=int, default=FEATURES)
    options = parser.parse_args(arguments)
    num_rows, sizes = (60, (1000,)) if options.quick else (options.rows, options.features)
    rows = []
    for num_features in sizes:
        for kind in list(KINDS)[:1] if options.quick else KINDS:
            rows.append(alone(measure, num_rows, num_features, kind))
            print(rows[-1], flush=True)
    if not options.quick:
        write_result("wide", {"rows": num_rows, "noise": NOISE, "new": NUM_NEW, "hidden": NUM_HIDDEN}, rows)
    return rows


if __name__ == "__main__":
    main()
