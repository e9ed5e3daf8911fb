"""Do 95% intervals hold the truth in 95% of cases? Heavy tails, missing by what is seen, fewer rows than columns.

Twenty data sets of each kind, 400 rows for training (60 where they are fewer than the columns) and 200 new ones. Hidden
values of new rows are compared with their intervals; the standard error is that over the data sets. Where values are
missing by what is seen, half of the features are hidden with a probability that rises with another one, in training
too. The last two kinds are limits. Beyond a threshold: where that other feature is above its median they are never
seen, so that all is extrapolation. By the hidden value: the probability rises with one of the hidden features, which
no method can know that sees only the data.

python -m benchmarks.coverage [--quick] [--kinds "heavy tails (t, 3 degrees)"]
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy import special

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, write_result
from benchmarks.tables import load, table

NUM_SEEDS, NUM_NEW, LEVEL = 20, 200, 0.95
Sets = tuple[np.ndarray, np.ndarray, np.ndarray]


def factors(rng: np.random.Generator, num_rows: int, num_features: int, tail: float | None = None) -> np.ndarray:
    """Three factors and noise; with `tail`, each row times a factor that makes it Student's t of that many degrees."""
    loadings = np.random.default_rng(rng.integers(2**31)).normal(size=(3, num_features))
    x = rng.normal(size=(num_rows, 3)) @ loadings + 0.3 * rng.normal(size=(num_rows, num_features))
    return x if tail is None else x / np.sqrt(rng.chisquare(tail, size=(num_rows, 1)) / tail)


def at_random(rng: np.random.Generator, x: np.ndarray, num_train: int, share: float) -> Sets:
    """Training rows complete; a share of the new rows' values hidden at random."""
    new = x[num_train:]
    return x[:num_train], new, np.where(rng.random(new.shape) < share, np.nan, new)


def by(rng: np.random.Generator, x: np.ndarray, column: int, num_train: int, steepness: float) -> Sets:
    """The last half of the features is hidden with a probability that rises with a column, 1/2 at its median."""
    above = (x[:, column] - np.median(x[:, column])) / x[:, column].std()
    holes, is_hidden = x.copy(), rng.random(len(x)) < special.expit(steepness * above)
    holes[is_hidden, x.shape[1] // 2 :] = np.nan
    return holes[:num_train], x[num_train:], holes[num_train:]


KINDS: dict[str, Callable[[np.random.Generator], Sets]] = {
    "heavy tails (t, 3 degrees)": lambda rng: at_random(rng, factors(rng, 400 + NUM_NEW, 10, 3.0), 400, 0.3),
    "missing by an observed feature": lambda rng: by(rng, factors(rng, 400 + NUM_NEW, 10), 0, 400, 2.0),
    "60 rows, 100 features": lambda rng: at_random(rng, factors(rng, 60 + NUM_NEW, 100), 60, 0.5),
    "never seen beyond a threshold": lambda rng: by(rng, factors(rng, 400 + NUM_NEW, 10), 0, 400, 1e9),
    "missing by the hidden value": lambda rng: by(rng, factors(rng, 400 + NUM_NEW, 10), 9, 400, 2.0),
}


def measure(kind: str, seed: int, quick: bool) -> dict[str, Any]:
    train, truth, holes = KINDS[kind](np.random.default_rng([seed, list(KINDS).index(kind)]))
    options: dict[str, Any] = {}
    if quick:
        options["sampler"] = geode_jax.SamplerSettings(**QUICK_SWEEPS)
        options["dictionary"] = geode_jax.DictionarySettings(**QUICK_DICTIONARY)
    posterior = geode_jax.fit(jax.random.key(seed), train, **options)
    _, lower, upper = geode_jax.impute(posterior, holes, interval=LEVEL)
    hidden = np.isnan(holes)
    inside = ((lower <= truth) & (truth <= upper))[hidden]
    width = np.median((upper - lower)[hidden])
    return {"data": kind, "seed": seed, "coverage": float(inside.mean()), "median width": float(width)}


def tables() -> list[str]:
    record = load("coverage")
    lines = []
    for kind in dict.fromkeys(row["data"] for row in record["rows"]):
        found = np.array([row["coverage"] for row in record["rows"] if row["data"] == kind])
        error = found.std(ddof=1) / np.sqrt(found.size)
        lines.append([kind, str(found.size), f"{found.mean():.1%}", f"{error:.1%}", f"{found.min():.1%}"])
    return [
        "### Coverage of 95% intervals",
        "",
        "The share of hidden values of new rows that are in their intervals, over simulated data sets with three"
        " factors and noise. In the kinds that miss values half of the features are missing together, in training too."
        " *By an observed feature*: with a probability that rises with one that is seen; *beyond a threshold*: always"
        " where that one is above its median, so that all is extrapolation; *by the hidden value*: with a probability"
        " that rises with one of those missing, which no method can know:",
        "",
        *table(["", "data sets", "coverage", "standard error", "the lowest"], lines),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="only these; other results are kept")
    options = parser.parse_args(arguments)
    kinds: list[str] = options.kinds or list(KINDS)
    kept = [row for row in load("coverage")["rows"] if row["data"] not in kinds] if options.kinds else []
    rows: list[dict[str, Any]] = []
    for kind in kinds[: 1 if options.quick else None]:
        for seed in range(1 if options.quick else NUM_SEEDS):
            rows.append(measure(kind, seed, options.quick))
            print(rows[-1], flush=True)
    if not options.quick:
        write_result("coverage", {"level": LEVEL}, sorted(kept + rows, key=lambda row: list(KINDS).index(row["data"])))
    return rows


if __name__ == "__main__":
    main()
