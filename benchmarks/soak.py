"""Random hostile fits and predictions for as long as asked: is every answer finite and valid, or a clear error?

Every fit is decided by one number, its seed: the kind of data, units, masks, precision, settings. Sizes come from a
short list, so that most fits compile nothing. After each fit every prediction is asked for rows near and far from the
data, up to the largest float, with any mask. What breaks the contract (notebooks/promises.md) is kept with its seed,
and `--case SEED` runs it again.

python -m benchmarks.soak [--minutes 10] [--first SEED] [--case SEED] [--quick]
"""

import argparse
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import jax
import numpy as np

import geode_jax
from benchmarks.common import write_result
from benchmarks.tables import load, table

# Features, settings of the dictionary, precision: one set of programs each, as few rows share their sizes.
SIZES: tuple[tuple[int, dict[str, Any], str], ...] = (
    (1, {"max_rank": 1, "depth": 1}, "float32"),
    (3, {"max_rank": 2, "depth": 1}, "float64"),
    (5, {"max_rank": 3, "depth": 2}, "float32"),
)
USUAL: dict[str, Any] = {"num_trees": 1, "noise_covariance": None, "shared_span": None}
NUM_ROWS = (4, 12, 48)
SAMPLER = geode_jax.SamplerSettings(num_warmup=8, num_samples=8, segment_length=8)
NEW_ROWS = 6

Rows = np.ndarray


class Case(NamedTuple):
    """A fit: its data and settings."""

    kind: str
    rows: Rows
    dictionary: geode_jax.DictionarySettings
    dtype: str
    rng: np.random.Generator


KINDS: dict[str, Callable[[np.random.Generator, int, int], Rows]] = {
    "normal": lambda rng, n, d: rng.normal(size=(n, d)),
    "heavy tails": lambda rng, n, d: rng.standard_cauchy(size=(n, d)),
    "a line": lambda rng, n, d: rng.normal(size=(n, 1)) * rng.normal(size=d),
    "few values": lambda rng, n, d: rng.integers(0, 3, size=(n, d)).astype(float),
    "repeated rows": lambda rng, n, d: rng.normal(size=(2, d))[rng.integers(2, size=n)],
    "a constant column": lambda rng, n, d: np.where(np.arange(d) == 0, 7.25, rng.normal(size=(n, d))),
    "far from zero": lambda rng, n, d: 1e8 + rng.normal(size=(n, d)),
    "two groups far apart": lambda rng, n, d: rng.normal(size=(n, d)) + 1e6 * rng.integers(2, size=(n, 1)),
    "an outlier": lambda rng, n, d: np.concatenate([rng.normal(size=(n - 1, d)), np.full((1, d), 1e9)]),
    "spreads of all sizes": lambda rng, n, d: rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-6, 6, size=d),
    "zeros but one": lambda rng, n, d: np.where(np.arange(n)[:, None] == 0, 1.0, np.zeros((n, d))),
}


def make_case(seed: int) -> Case:
    """The fit that a seed decides."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    num_features, options, dtype = SIZES[rng.integers(len(SIZES))]
    x = KINDS[kind](rng, int(rng.choice(NUM_ROWS)), num_features)
    x *= 10.0 ** rng.choice([0, 0, 0, -20, -5, 5, 20])
    if rng.random() < 0.3:
        few = rng.choice(len(x), 2 if len(x) < 12 else 4, replace=False)  # always as many: no new programs
        x[few] = np.where(rng.random((few.size, num_features)) < rng.choice([0.3, 0.6, 0.9]), np.nan, x[few])
    cross_fit = None if rng.random() < 0.2 else geode_jax.CrossFit(2)
    feature_noise = None if rng.random() < 0.2 else geode_jax.FeatureNoise()
    options = USUAL | options | {"cross_fit": cross_fit, "feature_noise": feature_noise}
    return Case(kind, x, geode_jax.DictionarySettings(**options), dtype, rng)


def predictions(posterior: geode_jax.Posterior, case: Case) -> Iterator[tuple[str, Callable[[], bool]]]:
    """What is asked of a fitted model, and whether the answer keeps the contract."""
    rng, spread = case.rng, posterior.scale
    shape = (NEW_ROWS, case.rows.shape[1])
    near = posterior.shift + spread * rng.normal(size=shape)
    far = np.clip(near * 10.0 ** rng.uniform(0, 40, size=(NEW_ROWS, 1)), -1e300, 1e300)
    largest = np.where(rng.random(shape) < 0.5, np.finfo(posterior.dtype).max, near)
    key = jax.random.key(int(rng.integers(2**31)))

    def density_of(rows: Rows) -> bool:
        found = geode_jax.log_density(posterior, rows)
        empty = np.isnan(rows).all(axis=1)
        return bool(np.isfinite(found).all() and (found[empty] == 0.0).all())

    def filled_are_valid(rows: Rows) -> bool:
        filled, lower, upper = geode_jax.impute(posterior, rows, interval=0.9)
        seen = ~np.isnan(rows)
        is_finite = all(np.isfinite(part).all() for part in (filled, lower, upper))
        return is_finite and bool((lower <= upper).all() and (filled[seen] == rows[seen]).all())

    def draws_are_finite(rows: Rows) -> bool:
        return bool(np.isfinite(geode_jax.impute_draws(key, posterior, rows, 2)).all())

    def loads_the_same() -> bool:
        with NamedTemporaryFile(suffix=".npz") as file:
            posterior.save(file.name)
            again = geode_jax.Posterior.load(file.name)
        return bool(np.array_equal(geode_jax.log_density(again, near), geode_jax.log_density(posterior, near)))

    for where, rows in (("near", near), ("far", far), ("largest", largest)):
        hidden = np.where(rng.random(shape) < rng.choice([0.2, 0.8]), np.nan, rows)
        yield f"density, {where}", lambda rows=rows: density_of(rows)  # type: ignore[misc]
        yield f"density with holes, {where}", lambda rows=hidden: density_of(rows)  # type: ignore[misc]
        yield f"impute, {where}", lambda rows=hidden: filled_are_valid(rows)  # type: ignore[misc]
    yield "impute_draws", lambda: draws_are_finite(np.where(rng.random(shape) < 0.5, np.nan, near))
    yield "sample", lambda: bool(np.isfinite(geode_jax.sample(key, posterior, 4)).all())
    yield "intrinsic_dimension", lambda: bool((geode_jax.intrinsic_dimension(posterior, near) >= 0).all())
    yield "save and load", loads_the_same


def is_clear(error: Exception) -> bool:
    """An error of ours that names the argument."""
    return isinstance(error, ValueError | TypeError) and "X: " in str(error)


def run_case(seed: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Kind of data, what became of the fit, and of every prediction: "kept", or what was wrong."""
    case = make_case(seed)
    try:
        posterior = geode_jax.fit(
            jax.random.key(seed), case.rows, dictionary=case.dictionary, sampler=SAMPLER, dtype=case.dtype
        )
    except Exception as error:
        return case.kind, "refused" if is_clear(error) else traceback.format_exc(), []
    if not np.isfinite(np.asarray(posterior.draws.log_joint)).all():
        return case.kind, "the log joint is not finite", []
    found = []
    for name, holds in predictions(posterior, case):
        try:
            found.append((name, "kept" if holds() else "broken"))
        except Exception:
            found.append((name, traceback.format_exc()))
    return case.kind, "fitted", found


def tables() -> list[str]:
    record = load("soak")
    rows = record["rows"]
    total = {key: sum(row[key] for row in rows) for key in ("fits", "refused", "predictions", "breaches")}
    lines = [
        "### Random hostile input",
        "",
        f"Small random tables, most of them extreme, one tree, random settings and calls: {total['fits']:,} fits, of"
        f" which {total['refused']:,} were refused with an error that names the argument, and {total['predictions']:,}"
        f" predictions; {total['breaches']} breaches of the [promises](../notebooks/promises.md).",
        "",
    ]
    head = ["data", "fits", "refused", "predictions", "breaches"]
    return lines + table(head, [[row["data"], *(f"{row[key]:,}" for key in head[1:])] for row in rows])


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first fit (default: 0)")
    parser.add_argument("--case", type=int, metavar="SEED", help="run this fit alone and print what became of it")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.case is not None:
        print(make_case(options.case))
        print(*run_case(options.case), sep="\n")
        return []
    rows = {
        kind: {"data": kind, "fits": 0, "refused": 0, "predictions": 0, "breaches": 0, "cases": []} for kind in KINDS
    }
    start, seed = time.perf_counter(), options.first
    while time.perf_counter() - start < 60 * options.minutes and (not options.quick or seed < options.first + 3):
        kind, fit, found = run_case(seed)
        row: dict[str, Any] = rows[kind]
        row["fits"] += 1
        row["refused"] += fit == "refused"
        row["predictions"] += len(found)
        wrong = [("fit", fit)] if fit not in ("fitted", "refused") else [it for it in found if it[1] != "kept"]
        row["breaches"] += len(wrong)
        row["cases"] += [{"seed": seed, "what": what} for what, _ in wrong]
        for what, why in wrong:
            print(f"seed {seed}, {kind}, {what}: {why}", flush=True)
        seed += 1
        if seed % 100 == 0:
            fits, asked, broken = (
                sum(row[key] for row in rows.values()) for key in ("fits", "predictions", "breaches")
            )
            print(f"{fits} fits, {asked} predictions, {broken} breaches", flush=True)
    if not options.quick:
        write_result("soak", {"minutes": options.minutes, "first": options.first}, list(rows.values()))
    return list(rows.values())


if __name__ == "__main__":
    main()
