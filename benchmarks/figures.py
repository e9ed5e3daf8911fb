"""Draw the paper's figures, ours, into notebooks/, from the JSON files in benchmarks/results.

python -m benchmarks.figures
"""

import json
from typing import Any

import numpy as np
from matplotlib.figure import Figure

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


FIGURES = {"features_time": features_time, "inclusion": inclusion, "parabola": parabola}


def main() -> None:
    for name, draw in FIGURES.items():
        draw().savefig(PICTURES / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
