"""Held-out log density and interval coverage on a Swiss roll in D = 200, flat in its three dimensions and bent.

Points (t cos t, h, t sin t) / 5 with t = 1.5 pi (1 + 2U), h = 21U, n = 3000. "flat": embedded by a random orthonormal
map. "bent": by sines of random projections, so that no three linear directions hold it. Noise sd 0.1, five 80/20
splits. The oracle of the flat roll is its true density by quadrature. Coverage: half of the coordinates of 200 test
rows hidden, share inside their central 95% intervals. A run goes on where the last one ended.

python -m benchmarks.swiss_roll [--quick] [--fresh]
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy import special, stats
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, coverage, earlier_rows, write_result
from benchmarks.rivals import best_on_held_out, low_rank_mixture, mixture_on_components
from benchmarks.tables import load, mean_of
from geode_jax.demo.baselines import fit_probabilistic_pca

NUM_FEATURES, NOISE = 200, 0.1
START, STOP = 1.5 * np.pi, 4.5 * np.pi


def flat_map(rng: np.random.Generator) -> np.ndarray:
    """Orthonormal directions, (3, D)."""
    return np.linalg.qr(rng.normal(size=(NUM_FEATURES, 3)))[0].T


def make_roll(num_rows: int, shape: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, (n, D), and the map of the flat roll, (3, D)."""
    rng = np.random.default_rng(seed)
    directions = flat_map(rng)
    t, h = START + (STOP - START) * rng.random(num_rows), 21 * rng.random(num_rows)
    points = np.stack([t * np.cos(t), h, t * np.sin(t)], axis=1) / 5
    if shape == "flat":
        signal = points @ directions
    else:
        frequency, phase = 0.5 * rng.normal(size=(3, NUM_FEATURES)), rng.uniform(0, 2 * np.pi, NUM_FEATURES)
        signal = np.sin(points @ frequency + phase) / np.sqrt(2)
    return signal + NOISE * rng.normal(size=signal.shape), directions


def oracle_log_density(x: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """True log density of the flat roll: h integrates to a difference of normal CDFs, t by the midpoint rule."""
    z = x @ directions.T
    outside = np.square(x).sum(axis=1) - np.square(z).sum(axis=1)
    normal = stats.norm(scale=NOISE)
    height = np.log((normal.cdf(z[:, 1]) - normal.cdf(z[:, 1] - 4.2)) / 4.2)
    t = START + (STOP - START) * (np.arange(20_000) + 0.5) / 20_000
    distance = np.square(z[:, :1] - t * np.cos(t) / 5) + np.square(z[:, 2:] - t * np.sin(t) / 5)
    spiral = special.logsumexp(-0.5 * distance / NOISE**2, axis=1) - np.log(t.size) - np.log(2 * np.pi * NOISE**2)
    rest = NUM_FEATURES - 3
    return height + spiral - 0.5 * (rest * np.log(2 * np.pi * NOISE**2) + outside / NOISE**2)


def pca_mixture(train: np.ndarray, test: np.ndarray, rank: int, components: int) -> np.ndarray:
    """Log density of a Gaussian mixture on `rank` principal components, isotropic noise off them."""
    with threadpool_limits(1):
        pca = PCA(rank).fit(train)
        mixture = GaussianMixture(components, n_init=3, random_state=0).fit(pca.transform(train))
        residual = train - pca.inverse_transform(pca.transform(train))
        freedom = train.shape[1] - rank
        noise = np.square(residual).sum() / (len(train) * freedom)
        left = np.square(test - pca.inverse_transform(pca.transform(test))).sum(axis=1)
        outside = -0.5 * (freedom * np.log(2 * np.pi * noise) + left / noise)
        return mixture.score_samples(pca.transform(test)) + outside


def ours(train: np.ndarray, test: np.ndarray, seed: int, name: str, quick: bool) -> dict[str, Any]:
    """Fit one configuration; its nats, coverage, dimension and span."""
    sweeps = QUICK_SWEEPS if quick else {}
    settings = {
        "published": geode_jax.DictionarySettings.published(),
        "default": geode_jax.DictionarySettings(),
    }[name]
    if quick:
        settings = dataclasses.replace(settings, **QUICK_DICTIONARY)
    is_published = name == "published"
    prior = geode_jax.Prior.published() if is_published else None
    sampler = geode_jax.SamplerSettings.published() if is_published else geode_jax.SamplerSettings()
    sampler = dataclasses.replace(sampler, **sweeps)
    posterior = geode_jax.fit(jax.random.key(seed), train, dictionary=settings, prior=prior, sampler=sampler)
    return {
        "nats": float(geode_jax.log_density(posterior, test).mean()),
        "coverage95": coverage(posterior, test[:200]),
        "dimension": posterior.intrinsic_dimension,
        "span": posterior.found.span_rank,
    }


def methods(
    train: np.ndarray, test: np.ndarray, split: int, directions: np.ndarray, quick: bool
) -> dict[str, Callable[[], Any]]:
    """Log densities of the test rows by name, and of ours what :func:`ours` tells; the oracle is of the flat roll."""
    own = ("default",) if quick else ("published", "default")
    ranks, components = (2, 3, 5, 10, 20, 30, 40, 50), 4 if quick else 36
    # the rank and number of normals of these two by the density of a held-out fifth of the training rows
    axes, counts = ((3,), (4,)) if quick else ((3, 5, 10, 20, 30), (8, 16, 24, 36, 48))
    shapes = ((2, 2),) if quick else ((8, 10), (16, 10), (16, 20), (32, 5), (32, 2))
    mixtures = [partial(low_rank_mixture, num_components=k, rank=d, seed=0, noise_per_feature=False) for k, d in shapes]
    return {
        "oracle": lambda: oracle_log_density(test, directions),
        **{name: partial(ours, train, test, split, name, quick) for name in own},
        "PCA to 3, mixture of 36": lambda: pca_mixture(train, test, 3, components),
        "probabilistic PCA": lambda: fit_probabilistic_pca(train, ranks).log_density(test),
        "Gaussian mixture after PCA": lambda: mixture_on_components(train, axes, counts, 0).log_density(test),
        "mixture of probabilistic PCA": lambda: best_on_held_out(train, mixtures, 0).log_density(test),
    }


def tables() -> list[str]:
    record = load("swiss_roll")
    lines = [
        "### Swiss roll",
        "",
        "In D = 200, five splits, held-out nats: flat in three of the dimensions, and bent through all of them. PCA to"
        " 3 knows the flat roll. The numbers of components and of normals of the mixture after PCA are those with the"
        " best density of a held-out fifth of the training rows. Seconds are of the fit and the density, and of ours of"
        " filling in 200 rows besides.",
        "",
        "| | flat | bent | coverage of 95%, flat | bent | seconds, flat |",
        "|---|---|---|---|---|---|",
    ]
    rows = record["rows"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {shape: [r for r in rows if r["method"] == method and r["shape"] == shape] for shape in ("flat", "bent")}
        nats = [f"{mean_of(own[shape], method, 'nats'):.2f}" if own[shape] else "" for shape in ("flat", "bent")]
        covered = [
            f"{mean_of(own[shape], method, 'coverage95'):.1%}" if own[shape] and "coverage95" in own[shape][0] else ""
            for shape in ("flat", "bent")
        ]
        bold = "**" if method == "default" else ""
        is_timed = method != "oracle" and own["flat"]
        seconds = f"{np.median([row['seconds'] for row in own['flat']]):.1f}" if is_timed else ""
        lines.append(f"| {bold}{method}{bold} | {' | '.join([*nats, *covered, seconds])} |")
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    settings = {"splits": 5, "rows": 3000, "features": NUM_FEATURES}
    rows = [] if options.quick or options.fresh else earlier_rows("swiss_roll", settings)
    done = {(row["shape"], row["method"], row["split"]) for row in rows}
    for shape in ("flat", "bent"):
        x, directions = make_roll(160 if options.quick else 3000, shape, 0)
        for split in range(1 if options.quick else 5):
            order = np.random.default_rng(split).permutation(len(x))
            cut = int(0.8 * len(x))
            train, test = x[order[:cut]], x[order[cut:]]
            for method, measure in methods(train, test, split, directions, options.quick).items():
                if (shape, method, split) in done or (method == "oracle" and shape != "flat"):
                    continue
                start = time.perf_counter()
                found = measure()
                seconds = round(time.perf_counter() - start, 1)
                found = found if isinstance(found, dict) else {"nats": float(found.mean())}
                rows.append({"shape": shape, "method": method, "split": split, "seconds": seconds} | found)
                print(f"{shape:<6}{method:<24}{split:>3}{found['nats']:>10.2f} {found}", flush=True)
                if not options.quick:
                    write_result("swiss_roll", settings, rows)
    return rows


if __name__ == "__main__":
    main()
