"""What each choice of stage one is worth: one setting changed at a time, on training data only.

80% of a data set's training rows are fitted, 20% held out: log density, and half of the features filled in. For the
full forest also how the trees' conditionals are weighted: equally, or by the evidence of the observed part. Results are
written one by one: a run goes on where the last one ended.

python -m benchmarks.stage_one [--quick] [--fresh] [--data FOLDER] [--only digits faces]
"""

import argparse
import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
from scipy import special
from sklearn.datasets import load_digits

import geode_jax
from benchmarks.common import earlier_rows, load_frey, write_result
from benchmarks.tables import load

# Trees of the fits that vary something else.
NUM_TREES = 2


def training_rows(name: str, folder: str | None) -> np.ndarray:
    """Training rows of the first split; what other benchmarks test on is left out."""
    rng = np.random.default_rng(0)
    if name == "faces":
        return load_frey(folder)[rng.permutation(1965)[:1000]]
    images = load_digits().data
    images = images + np.random.default_rng(0).random(images.shape)
    return images[rng.permutation(len(images))[: int(0.8 * len(images))]]


def variations(name: str) -> list[dict[str, Any]]:
    """Settings that differ from the default of `NUM_TREES` trees in one place."""
    found: list[dict[str, Any]] = [{}]
    found += [{"num_trees": value} for value in (1, 4, 8, 16)]
    found += [{"max_rank": value} for value in ((10, 20, 50, 200) if name == "faces" else (10, 20, 40, 60))]
    found += [{"depth": value} for value in range(0, 8, 2 if name == "faces" else 1)]
    found += [{"min_cell_size": value} for value in (10, 20, 40)]
    found += [{"parent_rows": value} for value in (None, 1.0, 10.0)]
    found += [{"borrowed_rows": value} for value in (None, 2.0, 10.0)]
    found += [{"cross_fit": value and geode_jax.CrossFit(value)} for value in (None, 2, 10)]
    found += [{"feature_noise": None}, {"noise_covariance": None}]
    found += [{"tau_rate": value} for value in (0.05, 3.0, 10.0, 100.0)]
    return found


def describe(changed: dict[str, Any]) -> tuple[str, str]:
    """The setting's name and its value in words."""
    if not changed:
        return "default", ""
    ((setting, value),) = changed.items()
    return setting, f"{value.num_folds} folds" if isinstance(value, geode_jax.CrossFit) else str(value)


def evidence_weighted(posterior: geode_jax.Posterior, hidden: np.ndarray) -> np.ndarray:
    """Conditional means with the trees weighted by the density of the observed part."""
    by_draw = geode_jax.log_density_draws(posterior, hidden, num_draws=16)
    weight = special.softmax(special.logsumexp(by_draw, axis=(1, 2)), axis=0)
    filled = np.zeros_like(hidden)
    for tree in range(posterior.num_trees):
        one = slice(tree, tree + 1)
        parts = jax.tree.map(lambda leaf, one=one: leaf[one], (posterior.dictionary, posterior.draws))
        alone = eqx.tree_at(lambda it: (it.dictionary, it.draws), posterior, parts)
        filled += weight[tree][:, None] * geode_jax.impute_mean(alone, hidden)
    return filled


def _stage_one(name: str, title: str) -> list[str]:
    record = load(f"stage_one_{name}")
    lines = [
        f"### What each choice of stage one is worth on {title}",
        "",
        f"One setting changed at a time from the default with {record['settings']['num_trees']} trees, training data"
        " of the first split only (80% fitted, 20% held out). Mean absolute error, coverage and width are of the hidden"
        " half of the features. Without borrowed rows cells have at least 10 rows by default: compare with"
        " `min_cell_size` 10.",
        "",
        "| setting | value | nats per row | mean abs. error | the same, trees weighted by evidence | coverage of 95%"
        " | mean width |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        by_evidence = f"{row['mae_by_evidence']:.3f}" if "mae_by_evidence" in row else ""
        lines.append(
            f"| {row['setting']} | {row['value']} | {row['nats']:.1f} | {row['mae']:.3f} | {by_evidence}"
            f" | {row['coverage95']:.1%} | {row['width95']:.2f} |"
        )
    return [*lines, ""]


def tables() -> list[str]:
    return [*_stage_one("digits", "digits"), "", *_stage_one("faces", "Frey faces")]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    parser.add_argument("--data", help="folder that holds frey_faces.npz")
    parser.add_argument("--only", nargs="+", choices=("digits", "faces"), default=["digits", "faces"])
    options = parser.parse_args(arguments)
    sampler = geode_jax.SamplerSettings(num_warmup=10, num_samples=10) if options.quick else None
    for name in ["digits"] if options.quick else options.only:
        settings = {"num_trees": NUM_TREES}
        rows = [] if options.quick or options.fresh else earlier_rows(f"stage_one_{name}", settings)
        done = {(row["setting"], row["value"]) for row in rows}
        data = training_rows(name, options.data)[: 200 if options.quick else None]
        cut = int(0.8 * len(data))
        train, test = data[:cut], data[cut:]
        is_hidden = np.random.default_rng(5).random(test.shape) < 0.5
        hidden = np.where(is_hidden, np.nan, test)
        truth = test[is_hidden]
        print(f"{name:<16}{'':>12}{'nats':>10}{'MAE':>8}{'cover':>8}{'width':>8}{'by evidence':>13}")
        small = {"num_trees": 1, "max_rank": 5, "depth": 2} if options.quick else {"num_trees": NUM_TREES}
        base = geode_jax.DictionarySettings(**small)
        for changed in variations(name)[: 2 if options.quick else None]:
            setting, value = describe(changed)
            if (setting, value) in done:
                continue
            of_prior, of_dictionary = (changed, {}) if "tau_rate" in changed else ({}, changed)
            posterior = geode_jax.fit(
                jax.random.key(0),
                train,
                dictionary=dataclasses.replace(base, **of_dictionary),
                prior=geode_jax.Prior(**of_prior),
                sampler=sampler,
            )
            filled = geode_jax.impute(posterior, hidden)
            inside = (filled.lower <= test) & (test <= filled.upper)
            row = {
                "data": name,
                "setting": setting,
                "value": value,
                "nats": float(geode_jax.log_density(posterior, test).mean()),
                "mae": float(np.abs(filled.filled[is_hidden] - truth).mean()),
                "coverage95": float(inside[is_hidden].mean()),
                "width95": float((filled.upper - filled.lower)[is_hidden].mean()),
            }
            weighted = ""
            if setting == "num_trees":
                by_evidence = evidence_weighted(posterior, hidden)[is_hidden]
                row["mae_by_evidence"] = float(np.abs(by_evidence - truth).mean())
                weighted = f"{row['mae_by_evidence']:.3f}"
            rows.append(row)
            print(
                f"{setting:<16}{value:>12}{row['nats']:>10.2f}{row['mae']:>8.3f}{row['coverage95']:>8.1%}"
                f"{row['width95']:>8.2f}{weighted:>13}",
                flush=True,
            )
            if not options.quick:
                write_result(f"stage_one_{name}", settings, rows)
    return rows


if __name__ == "__main__":
    main()
