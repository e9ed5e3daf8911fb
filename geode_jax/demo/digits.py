"""The demo: density, missing pixels and new images of scikit-learn's digits."""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from geode_jax.demo.baselines import fit_gaussian_mixture, fit_probabilistic_pca
from geode_jax.estimators.density import GeodeDensity
from geode_jax.predict.api import impute

_INTERVAL = 0.95


def run(output: Path, seed: int = 0) -> None:
    """Fit, compare with two baselines in the same run, print a table, and save one picture to `output`."""
    _check_place(output)
    started = time.perf_counter()
    train, test, masked = _load(seed)
    print(f"scikit-learn digits, 8 x 8 pixels + uniform noise: {len(train)} training and {len(test)} test images")
    model = GeodeDensity(random_state=seed, progress=sys.stderr.isatty()).fit(train)
    fit_seconds = time.perf_counter() - started
    geode_intervals = tuple(impute(model.posterior_, masked, interval=_INTERVAL))

    print(f"\n{'held-out':<46}{'log density':>12}{'mean abs.':>11}{'coverage':>10}{'width':>8}")
    print(f"{'':<46}{'nats/image':>12}{'error':>11}{'of 95%':>10}{'':>8}")
    rows = [("GEODE", model.score_samples(test), geode_intervals)]
    # Their matrices are too small for a second BLAS thread to help; on a busy machine waiting for it takes 20 times as
    # long.
    with threadpool_limits(1):
        for mixture in (
            fit_gaussian_mixture(train, (1, 2, 4, 8, 16, 32, 48, 64), seed),
            fit_probabilistic_pca(train, (8, 16, 24, 32, 40, 48)),
        ):
            rows.append((mixture.name, mixture.log_density(test), mixture.impute(masked, _INTERVAL)))
    for name, density, intervals in rows:
        print(_table_line(name, density, intervals, test, np.isnan(masked)))
    print("half of each test image's pixels are hidden for the last three columns; pixel values are 0 to 17")

    print(f"\nWhat was learned\n{_findings(model)}")
    _save_picture(output, model, test, masked, geode_intervals[0])
    total = time.perf_counter() - started
    print(f"\nGEODE fitted in {fit_seconds:.0f} s; everything took {total:.0f} s")


def _check_place(output: Path) -> None:
    """Raise ValueError if the picture cannot be saved, before the work."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if output.suffix.removeprefix(".").lower() not in kinds or not output.parent.is_dir():
        raise ValueError(f"{output}: expected a picture ({', '.join(kinds)}) in a folder that exists")


def _load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = load_digits().data
    images = images + rng.random(images.shape)  # grey levels are integers: a density needs them spread out
    order = rng.permutation(len(images))
    cut = int(0.8 * len(images))
    test = images[order[cut:]]
    masked = test.copy()
    for row in masked:
        row[rng.choice(row.size, row.size // 2, replace=False)] = np.nan
    return images[order[:cut]], test, masked


def _table_line(
    name: str, density: np.ndarray, intervals: tuple[np.ndarray, ...], test: np.ndarray, hidden: np.ndarray
) -> str:
    filled, lower, upper = (part[hidden] for part in intervals)
    truth = test[hidden]
    covered = np.mean((lower <= truth) & (truth <= upper))
    error, width = np.mean(np.abs(filled - truth)), np.mean(upper - lower)
    return f"{name:<46}{density.mean():>12.1f}{error:>11.3f}{covered:>10.1%}{width:>8.2f}"


def _findings(model: GeodeDensity) -> str:
    posterior = model.posterior_
    weights = posterior.scale_weights.mean(axis=(0, 1, 2))
    sigma = np.median(posterior.sigma, axis=(0, 1, 2))
    used = ", ".join(f"{s}: {w:.0%}" for s, w in enumerate(weights) if w >= 0.005)
    noise = ", ".join(f"{s}: {sigma[s]:.2f}" for s, w in enumerate(weights) if w >= 0.005)
    chances = posterior.intrinsic_dimension_probabilities
    cumulative = np.cumsum(chances)
    low, high = (int(np.searchsorted(cumulative, level)) for level in (0.05, 0.95))
    dimension = model.intrinsic_dimension_
    found = f"none below {posterior.found.rank}" if dimension is None else str(dimension)
    return (
        f"  weight by scale (0 is the whole data set)  {used}\n"
        f"  noise sd by scale, in grey levels          {noise}\n"
        f"  intrinsic dimension                        {found} (90% of rows: {low} to {high})"
    )


def _save_picture(output: Path, model: GeodeDensity, test: np.ndarray, masked: np.ndarray, filled: np.ndarray) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print('\nNo picture: it needs matplotlib, pip install "geode-jax[plots]"')
        return
    # Imported here: matplotlib is an optional dependency.
    from matplotlib.figure import Figure

    from geode_jax.interop.plots import image_rows

    shown = slice(0, 16)
    rows = {
        "test image": test[shown],
        "half hidden": masked[shown],
        "filled in": filled[shown],
        "new samples": model.sample(16),
    }
    figure = Figure(figsize=(10.0, 2.5), layout="constrained")
    ax = figure.add_subplot()
    image_rows(ax, rows, (8, 8), low=0.0, high=17.0)
    figure.savefig(output, dpi=150)
    print(f"\nPicture: {output}")
