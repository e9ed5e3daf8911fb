"""One recursive METIS call for the whole tree against one call per cell: time, cut and what components cost.

python -m benchmarks.partition_calls [--quick]
"""

import argparse
import time
from typing import Any

import numpy as np
import pymetis
from scipy import sparse

from benchmarks.common import write_result
from benchmarks.tables import load, table
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph


def one_call(graph: sparse.csr_array, depth: int) -> np.ndarray:
    """Leaf label per row from a single recursive bisection."""
    adjacency = pymetis.CSRAdjacency(graph.indptr.astype(np.int64), graph.indices.astype(np.int64))
    options = pymetis.Options(seed=0)
    weights = graph.data.tolist()
    _, labels = pymetis.part_graph(2**depth, adjacency=adjacency, eweights=weights, recursive=True, options=options)
    return np.asarray(labels)


def per_cell(x: np.ndarray, graph: sparse.csr_array, depth: int) -> np.ndarray:
    """Leaf label per row from the package's partition."""
    partition = partition_rows(x, graph, depth, 2, 0)
    labels = np.empty(len(x), dtype=int)
    for node in partition.nodes_at(depth):
        labels[partition.cells[node]] = node
    return labels


def cut_share(graph: sparse.csr_array, labels: np.ndarray) -> float:
    """Share of the edge weight between different leaves."""
    edges = graph.tocoo()
    return float(edges.data[labels[edges.row] != labels[edges.col]].sum() / edges.data.sum())


def tables() -> list[str]:
    record = load("partition_calls")
    rows = [
        [
            f"{row['rows']:,}",
            row["data"],
            {"one call": "one for the tree", "per cell": "one per cell"}[row["call"]],
            f"{row['seconds']:.2f}",
            f"{row['cut']:.1%}",
            str(row["mixed_leaves"]),
        ]
        for row in record["rows"]
    ]
    return [
        "### Calls of METIS",
        "",
        f"One recursive call for a whole tree of depth {record['settings']['depth']}, and one call per cell (ours),"
        " which may put whole components of the graph on one side. Graphs of one component, and of two that hold 1/12"
        " and 11/12 of the rows: the share of the edges that leave their leaf, and leaves that hold parts of both.",
        "",
        *table(["rows", "graph", "calls", "seconds", "edges cut", "mixed leaves"], rows),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    sizes = (500,) if options.quick else (6_000, 60_000)
    rows = []
    rng = np.random.default_rng(0)
    print(f"{'data':<24}{'rows':>8}{'call':>10}{'seconds':>9}{'cut':>8}{'components cut':>16}")
    for n in sizes:
        curved = np.stack([t := rng.uniform(-3, 3, n), t**2, np.sin(3 * t)], axis=1) + 0.3 * rng.normal(size=(n, 3))
        islands = curved.copy()
        islands[: n // 12] += 100.0
        for name, x in (("one component", curved), ("components n/12, 11n/12", islands)):
            graph = neighbour_graph(x, 10, 0)
            island = np.arange(n) < n // 12
            for call in ("one call", "per cell"):
                start = time.perf_counter()
                labels = one_call(graph, 4) if call == "one call" else per_cell(x, graph, 4)
                seconds = time.perf_counter() - start
                mixed = sum(0 < island[labels == leaf].mean() < 1 for leaf in np.unique(labels))
                mixed = mixed if name != "one component" else 0
                cut = cut_share(graph, labels)
                row = {
                    "data": name,
                    "rows": n,
                    "call": call,
                    "seconds": seconds,
                    "cut": cut,
                    "mixed_leaves": int(mixed),
                }
                rows.append(row)
                print(f"{name:<24}{n:>8}{call:>10}{seconds:>9.2f}{cut:>8.3f}{mixed:>16}", flush=True)
    if not options.quick:
        write_result("partition_calls", {"depth": 4}, rows)
    return rows


if __name__ == "__main__":
    main()
