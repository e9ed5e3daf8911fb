"""Held-out log density of scikit-learn's digits: published form, default, and what people use instead, nats per image.

Results are written one by one: a run goes on where the last one ended.

python -m benchmarks.digits_density [--noise normal] [--quick]

Protocol: digits + uniform(0, 1) noise (seed 0), 80/20 splits by default_rng(s).permutation, s = 0..4. Coverage: half of
the pixels of the test images hidden, share inside their central 95% intervals. Mixtures of low-rank normals choose
components and rank on a fifth of the training images, as does the mixture after PCA, the flow its size on a tenth, the
others by BIC or five-fold cross-validation. A pixel that is always 0 gets the edges of the uniform noise, which no
normal has: with `--noise normal`, of the same variance, three methods are measured again on the first three splits.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import KernelDensity

import geode_jax
from benchmarks.common import (
    QUICK_SIZE,
    QUICK_SWEEPS,
    blas_on_all_cores,
    coverage,
    earlier_rows,
    gain_of,
    is_installed,
    write_result,
)
from benchmarks.flow import SplineFlow
from benchmarks.rivals import (
    bayesian_mixture,
    best_on_held_out,
    factor_analysis,
    kernel_density,
    low_rank_mixture,
    mixture_on_components,
    shrunk_gaussian,
)
from benchmarks.tables import finished, load, mean_of, table
from geode_jax.demo.baselines import fit_gaussian_mixture, fit_probabilistic_pca

NAMES = {"uniform": "digits_density", "normal": "digits_density_normal"}
SPLITS = {"uniform": 5, "normal": 3}


def fit_ours(train: np.ndarray, seed: int, name: str, quick: bool) -> geode_jax.Posterior:
    """One fit by configuration name."""
    sweeps = QUICK_SWEEPS if quick else {}
    sampler, prior = geode_jax.SamplerSettings(**sweeps), None
    if name == "published":
        size = QUICK_SIZE if quick else {"max_rank": 20, "depth": 4}
        stage_one = geode_jax.DictionarySettings.published(**size)
        sampler = dataclasses.replace(geode_jax.SamplerSettings.published(), **sweeps)
        prior = geode_jax.Prior.published()
    else:
        stage_one = geode_jax.DictionarySettings(num_trees=1) if name == "one tree" else None
    return geode_jax.fit(jax.random.key(seed), train, dictionary=stage_one, prior=prior, sampler=sampler)


def rivals(quick: bool) -> dict[str, Callable[[np.ndarray], Any]]:
    """Densities by name, each choosing what it has to choose on the rows it is given."""
    sizes = (2,) if quick else (1, 2, 4, 8, 16, 32, 48, 64)
    ranks = (8,) if quick else (8, 16, 24, 32, 40, 48)
    shapes = ((2, 4),) if quick else ((16, 4), (8, 8), (16, 8), (24, 8), (12, 12))

    def low_rank(noise_per_feature: bool) -> Callable[[np.ndarray], Any]:
        fits = [
            partial(low_rank_mixture, num_components=k, rank=d, seed=0, noise_per_feature=noise_per_feature)
            for k, d in shapes
        ]
        return lambda x: best_on_held_out(x, fits, 0)

    found = {
        "mixture of factor analysers": low_rank(True),
        "mixture of probabilistic PCA": low_rank(False),
        "Gaussian mixture, BIC": lambda x: fit_gaussian_mixture(x, sizes, 0),
        "Gaussian mixture after PCA": lambda x: mixture_on_components(x, ranks, sizes, 0),
        "BayesianGaussianMixture, at most 32": lambda x: bayesian_mixture(x, 2 if quick else 32, 0),
        "factor analysis": lambda x: factor_analysis(x, ranks),
        "probabilistic PCA": lambda x: fit_probabilistic_pca(x, ranks),
        "Gaussian, Ledoit-Wolf": shrunk_gaussian,
        "kernel density": kernel_density,
    }
    if is_installed("flowjax"):
        layers_and_widths = ((1, 8),) if quick else ((3, 128), (5, 64), (5, 128))
        found["neural spline flow"] = lambda x: SplineFlow(x, layers_and_widths, 0, max_epochs=2 if quick else 300)
    return found


OURS = ("published", "one tree", "default, 8 trees")
BY_NOISE = ("default, 8 trees", "mixture of factor analysers", "neural spline flow")


def _by_noise() -> list[str]:
    """The flow's lead with each noise, on the same splits."""
    ours, _, flow = BY_NOISE
    command, number = load(NAMES["normal"])["command"], SPLITS["normal"]
    lines = []
    for noise, name in NAMES.items():
        rows = [row for row in finished(load(name)["rows"], SPLITS[noise]) if row["split"] < number]
        nats = {method: [row["nats"] for row in rows if row["method"] == method] for method in BY_NOISE}
        lead = gain_of(nats[flow], nats[ours])
        means = [f"{np.mean(nats[method]):.1f}" for method in BY_NOISE]
        lines.append([noise, *means, f"{lead['gain']:.1f} ({lead['gain_se']:.1f})"])
    return [
        "### The flow's lead on digits, and the noise",
        "",
        "Grey levels become continuous by noise, and the edges of uniform"
        " noise at pixels that are always 0 fit no normal. Normal noise of the same variance has none. Held-out nats"
        f" per image, mean of the first {number} splits of both, `{command}`:",
        "",
        *table(["noise", *BY_NOISE, "the flow's lead (standard error)"], lines),
    ]


def tables() -> list[str]:
    return [*_densities(), "", *_by_noise()]


def _densities() -> list[str]:
    digits = load(NAMES["uniform"])
    lines = [
        "### Digits",
        "",
        "D = 64, 1437 training and 360 test images, five splits; timed beside other work. The last column is the"
        " quickest of our own fits that describes the test images no worse than the rival:",
        "",
        "| | held-out nats per image | coverage of 95% | seconds to fit | ours at no less density |",
        "|---|---|---|---|---|",
    ]
    rows = finished(digits["rows"], digits["settings"]["splits"])
    methods = list(dict.fromkeys(row["method"] for row in rows))
    seconds = {
        method: float(np.median([row["seconds"] for row in rows if row["method"] == method])) for method in methods
    }
    nats = {method: mean_of(rows, method, "nats") for method in methods}
    for method in methods:
        bold = "**" if method.startswith("default") else ""
        has_intervals = any("coverage95" in row for row in rows if row["method"] == method)
        covered = f"{mean_of(rows, method, 'coverage95'):.1%}" if has_intervals else ""
        no_worse = [name for name in OURS if name in nats and nats[name] >= nats[method]]
        quickest = min(no_worse, key=seconds.__getitem__, default=None)
        equal = "none" if quickest is None else f"{quickest}: {seconds[quickest]:.1f} s"
        equal = "" if method in OURS else equal
        lines.append(f"| {bold}{method}{bold} | {nats[method]:.1f} | {covered} | {seconds[method]:.1f} | {equal} |")
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    parser.add_argument("--noise", choices=NAMES, default="uniform", help="what makes grey levels continuous")
    options = parser.parse_args(arguments)
    images, rng = load_digits().data, np.random.default_rng(0)
    is_uniform = options.noise == "uniform"
    images = images + (rng.random(images.shape) if is_uniform else rng.normal(0.5, np.sqrt(1 / 12), images.shape))
    settings, name_of_result = {"splits": SPLITS[options.noise]}, NAMES[options.noise]
    rows = [] if options.quick or options.fresh else earlier_rows(name_of_result, settings)

    done = {(row["method"], row["split"]) for row in rows}

    def is_due(method: str, split: int) -> bool:
        return (is_uniform or method in BY_NOISE) and (method, split) not in done

    def record(method: str, split: int, seconds: float, density: np.ndarray, **more: float) -> None:
        found = {"nats": float(density.mean()), "seconds": round(seconds, 1), **more}
        rows.append({"method": method, "split": split, **found})
        print(f"{method:<24}{split:>3} {found}", flush=True)
        if not options.quick:
            write_result(name_of_result, settings, rows)

    for split in range(1 if options.quick else SPLITS[options.noise]):
        order = np.random.default_rng(split).permutation(len(images))
        cut = 200 if options.quick else int(0.8 * len(images))
        train, test = images[order[:cut]], images[order[cut:]]
        for name in OURS[:1] if options.quick else OURS:
            if not is_due(name, split):
                continue
            start = time.perf_counter()
            posterior = fit_ours(train, split, name, options.quick)
            seconds = time.perf_counter() - start
            covered = coverage(posterior, test)
            record(name, split, seconds, geode_jax.log_density(posterior, test), coverage95=covered)
        for name, fit in rivals(options.quick).items():
            if not is_due(name, split):
                continue
            start = time.perf_counter()
            with blas_on_all_cores():
                model = fit(train)
                seconds = time.perf_counter() - start
                density = model.score_samples(test) if isinstance(model, KernelDensity) else model.log_density(test)
            record(name, split, seconds, density)
    for method in dict.fromkeys(row["method"] for row in rows):
        print(f"{method:<24} mean {np.mean([row['nats'] for row in rows if row['method'] == method]):>8.2f}")
    return rows


if __name__ == "__main__":
    main()
