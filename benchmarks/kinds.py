"""Kinds of real data that people bring: spectra, pixels of many bands, antibodies, cells, tables that miss values.

python -m benchmarks.kinds [--quick] [--fresh]

Fermentation: 1629 spectra at 1047 wavenumbers (chemotools), every fifth stretch of 50 in time held out. Fields from the
air: pixels of 200 bands (Indian Pines, tensorly), those of training from the left part of the scene, those held out
from its right. Antibodies: 438 samples of blood (tensorly), of which some people gave several. Cells: 700 by 50
principal components of their gene expression (scanpy), learned on the training rows; most genes are 0 in most cells,
and a density of such values has no upper limit. Penguins (344, of palmerpenguins) and birth rates of countries by years
(statsmodels, without groups of countries) miss values themselves. `pip install '.[rivals]'` brings the data. A fifth of
the rows is held out where nothing else is said.

Columns have mean 0 and deviation 1 in the training rows, or are left out where they do not vary. Half of the values
known of the held-out rows are hidden and filled in. Rivals choose on training rows. Results are written one by one: a
run goes on where the last one ended.
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401  (makes the next import possible)
from sklearn.impute import IterativeImputer, SimpleImputer
from sklearn.linear_model import BayesianRidge

from benchmarks import real_data
from benchmarks.common import earlier_rows, is_installed
from benchmarks.flow import SplineFlow
from benchmarks.real_data import Rows
from benchmarks.rivals import Interpolation, SoftImpute, best_on_held_out, low_rank_mixture
from benchmarks.tables import load
from geode_jax.demo.baselines import fit_gaussian_mixture

MOST_COLUMNS = 100  # for mixtures with full covariances and for boosted trees, one for every column and round
STRETCH = 50
GROUPS_OF_COUNTRIES = "CAA", "LCN", "OED", "OSS", "PSS"


def _standardised(train: np.ndarray, test: np.ndarray) -> Rows:
    mean, deviation = np.nanmean(train, axis=0), np.nanstd(train, axis=0)
    varies = np.nanmax(train, axis=0) > np.nanmin(train, axis=0)
    return Rows(*((rows - mean)[:, varies] / deviation[varies] for rows in (train, test)))


def _split(x: np.ndarray, components: int | None = None) -> Rows:
    """A random fifth held out; principal components of the others instead of the columns, if a number is given."""
    order = np.random.default_rng(0).permutation(len(x))
    train, test = x[order[len(x) // 5 :]], x[order[: len(x) // 5]]
    if components is not None:
        axes = PCA(components, random_state=0).fit(train)
        train, test = axes.transform(train), axes.transform(test)
    return _standardised(train, test)


def fermentation() -> Rows:
    from chemotools.datasets import load_fermentation_test  # extras: what benchmarks measure beside ours, and its data

    x = load_fermentation_test()[0].to_numpy(float)
    held_out = np.arange(len(x)) // STRETCH % 5 == 2
    return _standardised(x[~held_out], x[held_out])


def fields() -> Rows:
    from tensorly.datasets import load_indian_pines

    scene = np.asarray(load_indian_pines().tensor, float)
    rng = np.random.default_rng(0)
    border = int(real_data.TRAINING_SHARE * scene.shape[1])

    def pixels(part: np.ndarray, number: int) -> np.ndarray:
        every = part.reshape(-1, scene.shape[2])
        return rng.permutation(every)[:number] + rng.random((number, scene.shape[2]))  # counts made continuous

    return _standardised(pixels(scene[:, :border], 3000), pixels(scene[:, border:], 500))


def antibodies() -> Rows:
    from tensorly.datasets import load_covid19_serology

    samples = np.asarray(load_covid19_serology().tensor, float)
    return _split(samples.reshape(len(samples), -1))


def cells() -> Rows:
    from scanpy.datasets import pbmc68k_reduced

    return _split(np.asarray(pbmc68k_reduced().X, float), components=50)


def penguins() -> Rows:
    from palmerpenguins import load_penguins_raw

    x = load_penguins_raw().iloc[:, [9, 10, 11, 12, 14, 15]].to_numpy(float)  # sizes, mass, two isotopes
    return _split(x[~np.isnan(x).all(axis=1)])


def birth_rates() -> Rows:
    from statsmodels.datasets import fertility

    table = fertility.load_pandas().data
    x = table[~table["Country Code"].isin(GROUPS_OF_COUNTRIES)].select_dtypes(float).to_numpy()
    x = x[:, ~np.isnan(x).all(axis=0)]
    return _split(x[~np.isnan(x).all(axis=1)])


DATA = {
    "chemotools": {"fermentation spectra": fermentation},
    "tensorly": {"fields, 200 bands": fields, "antibodies": antibodies},
    "scanpy": {"cells, 50 components": cells},
    "palmerpenguins": {"penguins, some values missing": penguins},
    "statsmodels": {"birth rates, some values missing": birth_rates},
}


def data_sets(quick: bool) -> dict[str, Callable[[], Rows]]:
    """Training and held-out rows by name, of the packages that are installed."""
    if quick:
        x = load_wine().data[:, :8]
        holes = np.where(np.random.default_rng(0).random(x.shape) < 0.1, np.nan, x)
        return {"wine": lambda: _split(x), "wine, some values missing": lambda: _split(holes)}
    return {name: read for package, found in DATA.items() if is_installed(package) for name, read in found.items()}


def _chained(train: np.ndarray, model: Any, num_rounds: int) -> IterativeImputer:
    """Every column by a model of the others, in rounds."""
    with warnings.catch_warnings():
        # All rounds: complete training rows change in none, and new rows get as many rounds as these got.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return IterativeImputer(model, max_iter=num_rounds, tol=0.0, random_state=0).fit(train)


def methods(train: np.ndarray, quick: bool) -> dict[str, Callable[[], Any]]:
    """Models of the training rows by name: of complete rows those of `real_data` and more."""
    num_rows, num_features = train.shape
    plain = real_data.methods(train, quick)
    boosted = HistGradientBoostingRegressor(max_iter=2 if quick else 100, random_state=0)
    chained = {
        "chained ridge": lambda: _chained(train, BayesianRidge(), 20),
        "chained boosted trees": lambda: _chained(train, boosted, 1 if quick else 5),
    }
    if np.isnan(train).any():
        others: dict[str, Callable[[], Any]] = {
            "column means": lambda: SimpleImputer().fit(train),
            "soft-impute": lambda: SoftImpute(train),
            "lines between columns": lambda: Interpolation(train),
        }
        return {name: plain[name] for name in (real_data.OURS, "KNNImputer")} | others | chained
    found = plain
    if num_features <= real_data.LARGEST_EM:
        shapes = (2, 5), (2, 20), (4, 10), (8, 5)
        sizes = [(k, d) for k, d in shapes if 4 * k * d <= num_rows and 2 * d < num_features]
        fits = [partial(low_rank_mixture, num_components=k, rank=d, seed=0, noise_per_feature=True) for k, d in sizes]
        if fits:
            found["mixture of factor analysers"] = lambda: best_on_held_out(train, fits, 0)
    if num_features <= MOST_COLUMNS:
        counts = [size for size in (1, 2, 3, 4, 6, 8) if 20 * size <= num_rows]
        found["Gaussian mixture, BIC"] = lambda: fit_gaussian_mixture(train, counts, 0)
        found |= chained
        if is_installed("flowjax"):
            layers_and_widths = ((1, 8),) if quick else ((3, 64), (5, 64))
            found["neural spline flow"] = lambda: SplineFlow(train, layers_and_widths, 0, 2 if quick else 300)
    return found


def tables() -> list[str]:
    record = load("kinds")
    spectra = [row for row in record["rows"] if row["data"].startswith("fermentation") and "lowest_nats" in row]
    lowest = " and ".join(f"{row['lowest_nats']:.0f} ({row['method']})" for row in spectra)
    return [
        "### Other kinds of real data",
        "",
        "Spectra of a fermentation, pixels of 200 bands, antibody levels, cells by"
        " components of their gene expression, and two tables whose own values are missing."
        " Columns have deviation 1; half of the known values of the rows held out are hidden and filled in.",
        "",
        *real_data.lines_of(record["rows"], digits=3),
        "",
        "Against the best rival, row by row, where both were measured in one run. Standard errors are over the rows"
        " held out, which in spectra follow each other in time and in fields lie side by side: there they are too"
        " small. Three fermentation spectra, one"
        f" spectrum three times over, are unlike all others: their {lowest} nats per feature decide the mean:",
        "",
        *real_data.pairs_of(record["rows"], digits=3),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    earlier = [] if options.quick or options.fresh else earlier_rows("kinds", {})
    return real_data.measure_all("kinds", data_sets(options.quick), methods, earlier, quick=options.quick)


if __name__ == "__main__":
    main()
