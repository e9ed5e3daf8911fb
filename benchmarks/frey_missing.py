"""Missing values in training too (Frey faces), against imputers that people use, and the paper's designed patterns.

python -m benchmarks.frey_missing [--quick] [--data FOLDER] [--seeds 0] [--picture FILE] [--fresh]

(a) The paper's protocol: 1000 complete training frames, a random half of the pixels of the other 965 hidden. (b) The
same where 20% or 50% of the training pixels are missing too, at random, so that no complete row is left. Rivals learn
from the rows of the 20% case. (c) Halves and blocks hidden, as in the paper's figure 6, as a picture. Rivals
choose on training rows, soft-impute on those of the test too. A run goes on where the last one with the same seeds
ended.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sklearn.experimental import enable_iterative_imputer  # noqa: F401  (makes the next import possible)
from sklearn.impute import IterativeImputer, SimpleImputer

import geode_jax
from benchmarks.common import (
    QUICK_DICTIONARY,
    QUICK_SWEEPS,
    ROOT,
    blas_on_all_cores,
    earlier_rows,
    load_frey,
    timed,
    write_result,
)
from benchmarks.frey_inpainting import split
from benchmarks.rivals import RowProcess, SoftImpute, nearest_rows
from benchmarks.tables import load

SHARES = (0.0, 0.2, 0.5)
RIVALS_AT = 0.2
HEIGHT, WIDTH = 28, 20


def hide(rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Rows with `share` of the entries NaN, at random."""
    return np.where(np.random.default_rng([seed, 1]).random(rows.shape) < share, np.nan, rows)


def geode(train: np.ndarray, masked: np.ndarray, seed: int, quick: bool) -> tuple[Any, dict[str, float], Any]:
    times: dict[str, float] = {}
    own = geode_jax.DictionarySettings(**(QUICK_DICTIONARY if quick else {}))
    sweeps = QUICK_SWEEPS if quick else {}
    with timed(times, "stage_one_seconds"):
        forest = geode_jax.learn_forest(jax.random.key(seed), train, dictionary=own)
    with timed(times, "sampler_seconds"):
        posterior = geode_jax.sample_posterior(
            jax.random.key(seed), forest, sampler=geode_jax.SamplerSettings(**sweeps)
        )
    if forest.partial is not None:
        arrays = jax.tree.leaves(forest.partial)
        times["partial_rows_mebibytes"] = sum(leaf.nbytes for leaf in arrays) / 2**20
    with timed(times, "impute_seconds"):
        found = geode_jax.impute(posterior, masked, interval=0.95)
    return found, times, posterior


def score(found: Any, test: np.ndarray, masked: np.ndarray) -> dict[str, float]:
    hidden = np.isnan(masked)
    truth = test[hidden]
    if not isinstance(found, geode_jax.Imputation):
        return {"mae": float(np.abs(found[hidden] - truth).mean())}
    lower, upper = found.lower[hidden], found.upper[hidden]
    return {
        "mae": float(np.abs(found.filled[hidden] - truth).mean()),
        "coverage95": float(np.mean((lower <= truth) & (truth <= upper))),
        "width95": float(np.mean(upper - lower)),
    }


def rivals(train: np.ndarray, masked: np.ndarray, seed: int) -> dict[str, Any]:
    chained = IterativeImputer(n_nearest_features=100, max_iter=10, skip_complete=True, random_state=0)
    return {
        "column means": lambda: SimpleImputer().fit(train).transform(masked),
        "KNNImputer": lambda: nearest_rows(train, (1, 3, 5, 10, 20), seed).transform(masked),
        "soft-impute": lambda: SoftImpute(train).transform(masked),
        "IterativeImputer, 100 nearest features": lambda: chained.fit(train).transform(masked),
        "soft-impute, then Gaussian process from the seen pixels": lambda: geode_jax.Imputation(
            *RowProcess(SoftImpute(train).completed(), seed).impute(masked, 0.95)
        ),
    }


def designed_patterns() -> dict[str, np.ndarray]:
    """Masks of what is hidden, by name, (560,) each."""
    row, column = np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)
    return {
        "upper half": row < HEIGHT // 2,
        "lower half": row >= HEIGHT // 2,
        "left half": column < WIDTH // 2,
        "block": (row >= 7) & (row < 21) & (column >= 4) & (column < 16),
    }


def draw_patterns(posterior: geode_jax.Posterior, test: np.ndarray, picture: Path) -> list[dict[str, Any]]:
    from matplotlib.figure import Figure

    from geode_jax.interop.plots import image_rows

    shown, results, rows = test[:12], [], {"test frame": test[:12]}
    for name, mask in designed_patterns().items():
        hidden = np.where(mask, np.nan, test[:200])
        found = geode_jax.impute(posterior, hidden)
        calibrated = score(geode_jax.impute(posterior, hidden, calibration=test[200:400]), test[:200], hidden)
        results.append(
            {
                "pattern": name,
                **score(found, test[:200], hidden),
                "calibrated coverage95": calibrated["coverage95"],
                "calibrated width95": calibrated["width95"],
            }
        )
        rows[f"{name} hidden"] = np.where(mask, np.nan, shown)
        rows[f"{name} filled"] = found.filled[:12]
    figure = Figure(figsize=(6.5, 6.8), layout="constrained")
    image_rows(figure.add_subplot(), rows, (HEIGHT, WIDTH), low=0.0, high=255.0)
    figure.savefig(picture, dpi=130)
    return results


def _frey_missing() -> list[str]:
    record = load("frey_missing")
    lines = [
        "### Missing values in training too",
        "",
        f"Frey faces as above, {len(record['settings']['seeds'])} splits. Where any are missing no training row is"
        " complete. KNNImputer's neighbours and the process's kernel are chosen on training rows. Soft-impute completes"
        " training and test rows together and chooses its threshold on both; those that the process learns from are"
        " completed without the test rows:",
        "",
        "| | missing in training | mean abs. error | coverage of 95% | mean width | seconds in all |",
        "|---|---|---|---|---|---|",
    ]
    rows = [row for row in record["rows"] if "pattern" not in row]
    for method, share in dict.fromkeys((row["method"], row["missing"]) for row in rows):
        own = [row for row in rows if (row["method"], row["missing"]) == (method, share)]
        seconds = [sum(value for key, value in row.items() if key.endswith("seconds")) for row in own]
        mae, covered, width = (
            np.mean([row[key] for row in own]) if key in own[0] else None for key in ("mae", "coverage95", "width95")
        )
        lines.append(
            f"| {'**GEODE**' if method == 'GEODE' else method} | {share:.0%} | {mae:.2f}"
            f" | {'' if covered is None else f'{covered:.1%}'} | {'' if width is None else f'{width:.1f}'}"
            f" | {np.mean(seconds):.0f} |"
        )
    return lines


def _missing_patterns() -> list[str]:
    lines = [
        "### Whole parts hidden",
        "",
        "Designed patterns (the paper's figure 6) on the first 200 test frames, from complete training rows"
        " ([picture](../notebooks/frey_patterns.png)); calibrated on 200 other frames that were not in the fit:",
        "",
        "| hidden | mean abs. error | coverage of 95% | mean width | calibrated coverage | calibrated width |",
        "|---|---|---|---|---|---|",
    ]
    for row in load("frey_missing")["rows"]:
        if "pattern" not in row:
            continue
        lines.append(
            f"| {row['pattern']} | {row['mae']:.2f} | {row['coverage95']:.1%} | {row['width95']:.1f}"
            f" | {row['calibrated coverage95']:.1%} | {row['calibrated width95']:.1f} |"
        )
    return lines


def tables() -> list[str]:
    return [*_frey_missing(), "", *_missing_patterns()]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds frey_faces.npz")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--picture", type=Path, default=ROOT / "notebooks" / "frey_patterns.png")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    frames = load_frey(options.data)
    settings = {"seeds": options.seeds}
    rows = [] if options.quick or options.fresh else earlier_rows("frey_missing", settings)
    done = {(row["method"], row["missing"], row["seed"]) for row in rows if "pattern" not in row}

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        numbers = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        print(f"{row['method']:<42}{row['missing']:>5.0%}  {numbers}", flush=True)
        if not options.quick:
            write_result("frey_missing", settings, rows)

    for seed in options.seeds[:1] if options.quick else options.seeds:
        train, test, masked = split(frames, seed, 8 if options.quick else 965)
        train = train[:80] if options.quick else train
        for share in SHARES:
            if ("GEODE", share, seed) in done:
                continue
            hidden = hide(train, share, seed)
            found, times, posterior = geode(hidden, masked, seed, options.quick)
            if share == 0.0 and seed == options.seeds[0] and not options.quick:
                patterns = draw_patterns(posterior, test, options.picture)
                print(*patterns, sep="\n", flush=True)
                rows += patterns
            report({"method": "GEODE", "missing": share, "seed": seed, **score(found, test, masked), **times})
        hidden = hide(train, RIVALS_AT, seed)
        competitors = rivals(hidden, masked, seed)
        for name in list(competitors)[: 3 if options.quick else None]:
            if (name, RIVALS_AT, seed) in done:
                continue
            seconds: dict[str, float] = {}
            with timed(seconds, "seconds"), blas_on_all_cores():
                completed = competitors[name]()
            report({"method": name, "missing": RIVALS_AT, "seed": seed, **score(completed, test, masked), **seconds})
    return rows


if __name__ == "__main__":
    main()
