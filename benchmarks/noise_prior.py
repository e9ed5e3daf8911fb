"""The prior of a scale's noise: three rows of typical noise alone, beside the paper's gamma prior added to them.

python -m benchmarks.noise_prior [--quick]

Small tables that scikit-learn has, with ten random splits of each, and the curved sheet of `whole_fit`, with two; 80%
of the rows are fitted. Wine is also fitted with 30% of the training values missing, four splits. Splits overlap, and
standard errors take them as independent. Both priors sample from the same forest with the same key.
Held-out nats per row, and their differences split by split. With a and b of the paper at 0.5, b adds the square of one
standard deviation of the data to the noise's sum of squares. In diabetes, values of two columns repeat; they are spread
as in `mixed_units`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks import mixed_units
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, gain_of, write_result
from benchmarks.tables import load
from benchmarks.whole_fit import curved_sheet

PRIORS = {"typical": geode_jax.Prior(), "added": geode_jax.Prior(noise_shape=0.5, noise_rate=0.5)}
TABLES: dict[str, Callable[[], np.ndarray]] = {
    name: mixed_units.TABLES[name] for name in ("iris", "wine", "diabetes, repeated values spread", "breast cancer")
} | {"curved sheet": curved_sheet}
# Share of the training values that are missing, and the number of splits; of all other tables none, and ten.
MISSING, NUM_SPLITS = {"wine": 0.3}, {"curved sheet": 2}


def measure(x: np.ndarray, seed: int, missing: float, quick: bool) -> dict[str, float]:
    """Held-out nats per row of one split under both priors."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    cut = len(x) // 5
    train, test = x[order[cut:]], x[order[:cut]]
    if missing > 0.0:
        train = np.where(rng.random(train.shape) < missing, np.nan, train)
        train = train[~np.isnan(train).all(axis=1)]
    dictionary = geode_jax.DictionarySettings(**QUICK_DICTIONARY) if quick else None
    sampler = geode_jax.SamplerSettings(**QUICK_SWEEPS) if quick else None
    forest = geode_jax.learn_forest(jax.random.key(seed), train, dictionary=dictionary)
    found = {}
    for name, prior in PRIORS.items():
        posterior = geode_jax.sample_posterior(jax.random.key(seed), forest, prior=prior, sampler=sampler)
        found[name] = float(geode_jax.log_density(posterior, test).mean())
    return found


def tables() -> list[str]:
    record = load("noise_prior")
    lines = [
        "### The prior of the noise",
        "",
        "Three rows of typical noise alone (the default), and with the paper's Gamma(1/2, 1/2), in units of the data,"
        " besides. Held-out nats per row, mean of random splits, which share rows: standard errors are too small, by a"
        " factor of about two. The default was chosen on these tables.",
        "",
        "| data | n x D | splits | typical rows alone | with the paper's besides | gain (standard error) |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['data']} | {row['n']} x {row['D']} | {row['splits']} | {row['typical']:.3f} | {row['added']:.3f}"
            f" | {row['gain']:.3f} ({row['gain_se']:.3f}) |"
        )
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="iris only, two splits, nothing written")
    options = parser.parse_args(arguments)
    runs = [(name, 0.0, NUM_SPLITS.get(name, 10)) for name in TABLES]
    runs += [(name, share, 4) for name, share in MISSING.items()]
    rows = []
    for name, missing, splits in [("iris", 0.0, 2)] if options.quick else runs:
        x = np.asarray(TABLES[name](), float)
        found = [measure(x, seed, missing, options.quick) for seed in range(splits)]
        what = f"{name}, {missing:.0%} missing" if missing else name
        row: dict[str, Any] = {"data": what, "n": len(x), "D": x.shape[1], "splits": splits}
        row |= {prior: float(np.mean([one[prior] for one in found])) for prior in PRIORS}
        row |= gain_of(*([one[prior] for one in found] for prior in PRIORS))
        rows.append(row)
        print(row, flush=True)
    if not options.quick:
        write_result("noise_prior", {"priors": {name: str(prior) for name, prior in PRIORS.items()}}, rows)
    return rows


if __name__ == "__main__":
    main()
