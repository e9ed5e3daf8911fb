"""Draw the paper's figures, ours, into notebooks/, from the JSON files in benchmarks/results.

python -m benchmarks.figures
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from benchmarks.common import RESULTS, ROOT
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph

PICTURES = ROOT / "notebooks"


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def features_time() -> Figure:
    """Figure 1: seconds of the two stages against D, and a line of slope one."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    ax = figure.subplots()
    rows = _rows("features_time")
    features = np.array(sorted({row["features"] for row in rows}))
    for colour, method in zip(("C0", "C1"), dict.fromkeys(row["method"] for row in rows), strict=True):
        for stage, style in (("one", "o-"), ("two", "s--")):
            seconds = [row[f"stage_{stage}_s"] for row in rows if row["method"] == method]
            ax.loglog(features, seconds, style, color=colour, label=f"{method}, stage {stage}")
    ax.loglog(features, 1.2e-4 * features, color="grey", linewidth=1, label="proportional to D")
    ax.set(xlabel="features, D", ylabel="seconds", xticks=features, xticklabels=features)
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def inclusion() -> Figure:
    """Figure 3: the probability that each direction is in use, and of each intrinsic dimension."""
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    rows = _rows("inclusion")
    names = list(dict.fromkeys(row["data"] for row in rows))
    axes = figure.subplots(2, len(names), sharex=True, sharey=True)
    for column, name in zip(axes.T, names, strict=True):
        for row in rows:
            if row["data"] != name:
                continue
            style = {"default": "s-C2", "default, no span": "o-C0", "published": "o-C1"}[row["method"]]
            column[0].plot(1 + np.arange(len(row["included"])), row["included"], style, label=row["method"])
            column[1].plot(row["dimension"], style, label=row["method"])
            truth = row["truth"]
        column[0].set(title=f"{name}, dimension {truth}", xlabel="direction")
        column[1].set(xlabel="intrinsic dimension", xticks=range(0, 21, 5))
        for ax in column:
            ax.axvline(truth, color="grey", linewidth=1)
    axes[0, 0].set_ylabel("probability of use")
    axes[1, 0].set_ylabel("posterior probability")
    axes[0, 1].legend(frameon=False)
    return figure


def parabola() -> Figure:
    """The appendix' figure: the METIS tree of a noisy parabola, one scale after the other."""
    rng = np.random.default_rng(0)
    t = rng.uniform(-1.0, 1.0, 600)
    x = np.stack([t, np.square(t)], axis=1) + 0.03 * rng.normal(size=(600, 2))
    tree = partition_rows(x, neighbour_graph(x, 10, 0), 3, 20, 0)
    figure = Figure(figsize=(8.0, 2.6), layout="constrained")
    for scale, ax in enumerate(figure.subplots(1, 4, sharex=True, sharey=True)):
        for number, node in enumerate(tree.nodes_at(scale)):
            ax.plot(*x[tree.cells[node]].T, ".", markersize=2, color=f"C{number}")
        ax.set(title=f"scale {scale}", xlabel="$x_1$", aspect="equal")
        if scale == 0:
            ax.set_ylabel("$x_2$")
    return figure


def _points(
    rows: list[dict[str, Any]], value: str, seconds: tuple[str, ...], *, middle: Callable[..., Any] = np.mean
) -> dict[str, tuple[float, float]]:
    """Median seconds and the value, in the mean or the median over data sets and splits, of methods that have both."""
    rows = [row for row in rows if {value, *seconds} <= row.keys()]
    own = {method: [row for row in rows if row["method"] == method] for method in {row["method"] for row in rows}}
    return {
        method: (
            float(np.median([sum(row[part] for part in seconds) for row in found])),
            float(middle([row[value] for row in found])),
        )
        for method, found in own.items()
    }


def _behind_the_best(rows: list[dict[str, Any]], value: str, *, lowest: bool) -> list[dict[str, Any]]:
    """The rows of the methods that all data sets have, with how far the mean of each data set is `behind` the best.

    In units of the value where high ones are good; as a share of the best one where low ones are.
    """
    rows = [row for row in rows if value in row]
    sets, methods = ({row[key] for row in rows} for key in ("data", "method"))
    groups = {(data, name): [] for data in sets for name in methods}
    for row in rows:
        groups[row["data"], row["method"]].append(row[value])
    everywhere = {name for name in methods if all(groups[data, name] for data in sets)}
    mean = {key: np.mean(values) for key, values in groups.items() if key[1] in everywhere}
    best = {data: (min if lowest else max)(mean[data, name] for name in everywhere) for data in sets}
    unit = {data: best[data] if lowest else 1.0 for data in sets}
    return [
        row | {"behind": abs(mean[row["data"], row["method"]] - best[row["data"]]) / unit[row["data"]]}
        for row in rows
        if row["method"] in everywhere
    ]


def fronts() -> Figure:
    """How good methods are, and how long they take, on four kinds of data; a line joins those that none beats in both.

    Methods that are far worse than the best are beyond the frame, and named in its corner.
    """
    as_they_come = [row for row in _rows("mixed_units") if row["method"] != "GEODE, standardised"]
    tables = _behind_the_best(as_they_come, "nats", lowest=False)
    pictures = _behind_the_best(_rows("real_data"), "mae", lowest=True)
    digits = [row | {"loss": -row["nats"]} for row in _rows("digits_density")]
    both = "fit_seconds", "impute_seconds"
    panels = {
        "Small tables": (
            "nats per row behind the best, median",
            _points(tables, "behind", ("seconds",), middle=np.median),
            6.0,
        ),
        "Pictures, half hidden": (
            "error above the best, as a share, median",
            _points(pictures, "behind", both, middle=np.median),
            0.3,
        ),
        "Digits": ("loss, nats per image", _points(digits, "loss", ("seconds",)), 150.0),
        "Frey faces, half hidden": (
            "mean absolute error, grey levels",
            _points(_rows("frey_inpainting"), "mae", both),
            8.0,
        ),
    }
    figure = Figure(figsize=(11.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    named: list[tuple[Axes, dict[str, tuple[float, float]]]] = []
    for ax, (title, (what, points, most)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        front: list[tuple[float, float]] = []
        places = {name: (max(seconds, 0.1), loss) for name, (seconds, loss) in points.items()}
        for place in sorted(places.values()):
            if not front or place[1] < front[-1][1]:
                front.append(place)
        ax.step(*np.transpose(front), where="post", color="silver", linewidth=1, zorder=0)
        inside = {name: place for name, place in places.items() if place[1] <= most}
        for name, place in inside.items():
            ax.plot(*place, "o" if _is_ours(name) else "s", color="C3" if _is_ours(name) else "C0", markersize=6)
        if beyond := [name for name in places if name not in inside]:
            text = "beyond the frame:\n" + "\n".join(beyond)
            ax.text(0.98, 0.97, text, transform=ax.transAxes, ha="right", va="top", fontsize="small", color="C0")
        least = front[-1][1]
        ax.set(xscale="log", xlabel="seconds (at least 0.1)", ylabel=f"{what}\n(lower is better)")
        ax.set_title(title, loc="left")
        ax.set_ylim(least - 0.08 * (most - least), most)
        ax.set_xlim(right=8.0 * ax.get_xlim()[1])  # room for names
        named.append((ax, inside))
    figure.canvas.draw()  # as names are placed where they cover nothing
    for ax, inside in named:
        _name_points(ax, inside)
    return figure


def _is_ours(name: str) -> bool:
    return name.startswith(("GEODE", "default", "one tree", "published"))


def _name_points(ax: Axes, points: dict[str, tuple[float, float]]) -> None:
    """A name beside every point, where it covers no point and no other name if there is such a place."""
    renderer = ax.figure.canvas.get_renderer()
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in map(ax.transData.transform, points.values())]
    taken += [text.get_window_extent(renderer) for text in ax.texts]
    sides = {(7, 8): "left", (7, -8): "left", (8, 0): "left", (-8, 0): "right", (-7, 8): "right", (-7, -8): "right"}
    for name, place in sorted(points.items(), key=lambda item: item[1]):
        text = f"GEODE, {name}" if _is_ours(name) and name != "GEODE" else name
        style = {"fontsize": "small", "color": "C3" if _is_ours(name) else "black", "va": "center"}
        tried = []
        for offset, side in sides.items():
            label = ax.annotate(text, place, offset, textcoords="offset points", ha=side, **style)
            box = label.get_window_extent(renderer)
            covered = sum(box.overlaps(other) for other in taken) + (
                not ax.bbox.containsx(box.x0) or not ax.bbox.containsx(box.x1)
            )
            tried.append((covered, label, box))
            if not covered:
                break
        fewest = min(tried, key=lambda one: one[0])
        for one in tried:
            if one is not fewest:
                one[1].remove()
        taken.append(fewest[2])


FIGURES = {"features_time": features_time, "inclusion": inclusion, "parabola": parabola, "fronts": fronts}


def main() -> None:
    for name, draw in FIGURES.items():
        draw().savefig(PICTURES / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
