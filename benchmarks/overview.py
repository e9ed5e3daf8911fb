"""Draw the README's picture: faces, a spectrum and a table, with what was hidden filled in; into notebooks/.

python -m benchmarks.overview [--quick] [--output overview.png]
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import statsmodels.api as sm
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorly.datasets import load_indian_pines

from benchmarks.common import ROOT
from geode_jax import GeodeDensity, GeodeImputer
from geode_jax.interop.plots import image_rows

PICTURE = ROOT / "notebooks" / "overview.png"
INTERVAL = {"color": "tab:blue", "alpha": 0.3, "linewidth": 0.0, "label": "90% interval"}


def faces(ax: Axes, rng: np.random.Generator, options: dict[str, Any]) -> None:
    """Labelled Faces in the Wild, the hundred of 25 x 25 pixels that scikit-image ships, 92 of them for training."""
    images = skimage.data.lfw_subset()[:100].reshape(100, 625).astype(np.float64)
    order = rng.permutation(100)
    train, test = images[order[:92]], images[order[92:]]
    holes = np.where(rng.random(test.shape) < 0.5, np.nan, test)
    model = GeodeDensity(random_state=0, **options).fit(train)
    filled = model.impute(holes)
    rows = {"face": test[:5], "half hidden": holes[:5], "filled in": filled[:5]}
    image_rows(ax, rows, (25, 25), low=0.0, high=1.0)
    ax.set_title("Pictures: 92 faces of 625 pixels")


def spectrum(ax: Axes, rng: np.random.Generator, options: dict[str, Any]) -> None:
    """A pixel of the Indian Pines scene, of which the light from 1000 to 1500 nm is hidden."""
    scene = load_indian_pines()
    order = np.argsort(scene.ticks[1])
    wavelength = np.asarray(scene.ticks[1])[order]
    spectra = rng.permutation(np.asarray(scene.tensor)[:, :, order].reshape(-1, 200))
    model = GeodeDensity(random_state=0, **options).fit(spectra[:2000])
    hidden = (wavelength > 1000) & (wavelength < 1500)
    row = np.where(hidden, np.nan, spectra[2600:2601])
    filled, lower, upper = model.impute(row, interval=0.9, calibration=spectra[2000:2600])
    ax.axvspan(1000, 1500, color="0.94", linewidth=0)
    ax.plot(wavelength[~hidden], spectra[2600, ~hidden], "k.", markersize=3, label="measured")
    ax.plot(wavelength[hidden], spectra[2600, hidden], ".", color="0.5", mfc="none", markersize=6, label="hidden")
    ax.fill_between(wavelength[hidden], lower[0, hidden], upper[0, hidden], **INTERVAL)
    ax.plot(wavelength[hidden], filled[0, hidden], color="tab:blue", label="filled in")
    ax.set(title="Spectra: 2000, of 200 wavelengths each", xlabel="wavelength, nm", ylabel="reflected light")
    ax.legend(frameon=False)


def table(axes: list[Axes], options: dict[str, Any]) -> None:
    """Births per woman by country and year, World Bank; statsmodels ships the table, with its missing values."""
    fertility = sm.datasets.fertility.load_pandas().data.set_index("Country Name")
    years = fertility.loc[:, "1960":"2011"].dropna(how="all")
    filled, lower, upper = GeodeImputer(random_state=0, **options).fit(years).impute(years, interval=0.9)
    year = years.columns.astype(int)
    for ax, country in zip(axes, ("Serbia", "Greenland"), strict=True):
        ax.fill_between(year, lower.loc[country], upper.loc[country], **INTERVAL)
        ax.plot(year, filled.loc[country], color="tab:blue", label="filled in")
        ax.plot(year, years.loc[country], "k.", markersize=3, label="reported")
        ax.text(0.97, 0.92, country, transform=ax.transAxes, ha="right", va="top")
        ax.set_ylabel("births per woman")
    axes[0].set_title("Tables: 210 countries, 52 years")
    axes[1].set_xlabel("year")


def overview(options: dict[str, Any]) -> Figure:
    """The picture, of fits with these `options`."""
    rng = np.random.default_rng(0)
    figure = Figure(figsize=(12.0, 3.8), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1.5, 1.2, 1.0))
    faces(figure.add_subplot(grid[:, 0]), rng, options)
    spectrum(figure.add_subplot(grid[:, 1]), rng, options)
    upper = figure.add_subplot(grid[0, 2])
    table([upper, figure.add_subplot(grid[1, 2], sharex=upper)], options)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--output", type=Path, default=PICTURE, help="where to save the picture")
    options = parser.parse_args(arguments)
    few = {"num_trees": 1, "max_rank": 3, "depth": 1, "num_warmup": 5, "num_samples": 5}
    overview(few if options.quick else {}).savefig(options.output, dpi=130)


if __name__ == "__main__":
    main()
