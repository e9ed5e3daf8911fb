"""Held-out log density of scikit-learn's digits, published form against the default, nats per image.

python -m benchmarks.digits_density [--quick]

Protocol: digits + uniform(0, 1) noise (seed 0), 80/20 splits by default_rng(s).permutation, s = 0..4. Coverage: half of
the pixels of the test images hidden, share inside their central 95% intervals.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits

import geode_jax
from benchmarks.common import coverage, write_result
from geode_jax.demo.baselines import fit_gaussian_mixture, fit_probabilistic_pca


def fit_ours(train: np.ndarray, seed: int, name: str, quick: bool) -> geode_jax.Posterior:
    """One fit by configuration name."""
    sweeps = {"num_warmup": 10, "num_samples": 10} if quick else {}
    sampler = geode_jax.SamplerSettings(**sweeps)
    if name == "published":
        stage_one = geode_jax.DictionarySettings.published(max_rank=20, depth=4)
        sampler = geode_jax.SamplerSettings(shrinkage=geode_jax.PublishedShrinkage(), **sweeps)
    else:
        stage_one = geode_jax.DictionarySettings(num_trees=1) if name == "one tree" else None
    return geode_jax.fit(jax.random.key(seed), train, dictionary=stage_one, sampler=sampler)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    images = load_digits().data
    images = images + np.random.default_rng(0).random(images.shape)
    rows: list[dict[str, Any]] = []

    def record(method: str, split: int, seconds: float, density: np.ndarray, **more: float) -> None:
        found = {"nats": float(density.mean()), "seconds": round(seconds, 1), **more}
        rows.append({"method": method, "split": split, **found})
        print(f"{method:<24}{split:>3} {found}", flush=True)

    for split in range(1 if options.quick else 5):
        order = np.random.default_rng(split).permutation(len(images))
        cut = 200 if options.quick else int(0.8 * len(images))
        train, test = images[order[:cut]], images[order[cut:]]
        for name in ("published",) if options.quick else ("published", "one tree", "default, 8 trees"):
            start = time.perf_counter()
            posterior = fit_ours(train, split, name, options.quick)
            seconds = time.perf_counter() - start
            covered = coverage(posterior, test)
            record(name, split, seconds, geode_jax.log_density(posterior, test), coverage95=covered)
        sizes = (2,) if options.quick else (1, 2, 4, 8, 16, 32, 48, 64)
        for name, fit in (
            ("Gaussian mixture, BIC", lambda x, s=sizes: fit_gaussian_mixture(x, s, 0)),
            ("probabilistic PCA", lambda x: fit_probabilistic_pca(x, (8, 16, 24, 32, 40, 48))),
        ):
            start = time.perf_counter()
            mixture = fit(train)
            record(name, split, time.perf_counter() - start, mixture.log_density(test))
    for method in dict.fromkeys(row["method"] for row in rows):
        print(f"{method:<24} mean {np.mean([row['nats'] for row in rows if row['method'] == method]):>8.2f}")
    if not options.quick:
        write_result("digits_density", {"splits": 5}, rows)
    return rows


if __name__ == "__main__":
    main()
