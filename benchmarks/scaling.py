"""What each cost grows with: time against n, D, K, d and T, as slopes on log-log axes beside the theory's.

A sweep should read n K d numbers; it knows neither D nor T. A log density of n rows should take n K (4 D d + 2 d T)
operations: two products with the basis, then one with the draws. Filling in n rows of which half is hidden, with
intervals, should take n C (3 D d^2 / 2 + T d^3 / 3) operations at the C nodes that are considered: the Gram matrices of
the observed features, a factor for every draw, and the variances of the others; to choose these nodes is left out.
Times of both are also given over their floors, as many operations in one large product, timed in the same run. Stage
one has no single theory: its parts grow with n log n to n^2 and with D.

python -m benchmarks.scaling [--parts "filling in" ...] [--quick]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import geode_jax
from benchmarks.candidates import curved_rows
from benchmarks.common import best_seconds, write_result
from benchmarks.sweep import synthetic_problem, whole_sweeps
from benchmarks.tables import load, table
from geode_jax.gibbs.chain import initial_chain
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.model.tree import tree_from_mask
from geode_jax.predict.conditional_moments import conditional_summary, tails
from geode_jax.predict.density import log_density_by_tree
from geode_jax.predict.mixture import bytes_per_row
from geode_jax.predict.nodes import Nodes
from geode_jax.predict.rows import CANDIDATES, map_partial_rows, num_wanted

SWEEP = {"n": 20_000, "K": 63, "d": 20}
DENSITY = {"n": 2000, "D": 500, "K": 63, "d": 20, "T": 100}
FILLING_IN = {"n": 256, "D": 500, "K": 63, "d": 20, "T": 8}
STAGE_ONE = {"n": 4000, "D": 100}
VARIED: dict[str, dict[str, tuple[int, ...]]] = {
    "sweep": {"n": (5000, 20_000, 80_000), "K": (15, 63, 255), "d": (10, 20, 40, 80)},
    "log density": {
        "n": (500, 2000, 8000),
        "D": (125, 500, 2000),
        "K": (15, 63, 255),
        "d": (10, 20, 40),
        "T": (25, 100, 400),
    },
    "filling in": {
        "n": (64, 256, 1024),
        "D": (125, 500, 2000),
        "K": (15, 63, 255),
        "d": (10, 20, 40, 80),
        "T": (2, 8, 32),
    },
    "stage one": {"n": (1000, 4000, 16_000), "D": (100, 400, 1600)},
}
QUICK_SIZES = {"n": 200, "K": 7, "D": 100, "d": 5, "T": 10}
QUICK: dict[str, dict[str, tuple[int, ...]]] = {
    "sweep": {"n": (200, 400)},
    "log density": {"T": (5, 10)},
    "filling in": {"n": (64, 128)},
    "stage one": {"n": (200, 300)},
}


def depth_of(num_nodes: int) -> int:
    return (num_nodes + 1).bit_length() - 2


def sweep(sizes: dict[str, int]) -> dict[str, float]:
    problem = synthetic_problem(sizes["n"], depth_of(sizes["K"]), sizes["d"])
    chain = jax.jit(initial_chain)(jax.random.key(0), problem)
    return {"seconds": best_seconds(whole_sweeps(chain, problem, 20)) / 20}


def density_flops(sizes: dict[str, int]) -> float:
    return sizes["n"] * sizes["K"] * (4 * sizes["D"] * sizes["d"] + 2 * sizes["d"] * sizes["T"])


def flops_per_second() -> float:
    """Of one large product in float32."""
    x = jnp.ones((2048, 2048), jnp.float32)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    return 2 * 2048**3 / best_seconds(lambda: multiply(x))


def filling_in_flops(sizes: dict[str, int]) -> float:
    features, rank, draws = (sizes[name] for name in ("D", "d", "T"))
    return sizes["n"] * CANDIDATES * (3 * features * rank**2 / 2 + draws * rank**3 / 3)


def synthetic_posterior(sizes: dict[str, int]) -> tuple[Dictionary, Draw]:
    """One tree that says nothing of any data."""
    rng = np.random.default_rng(0)
    nodes, features, rank, draws = (sizes[name] for name in ("K", "D", "d", "T"))
    basis = np.linalg.qr(rng.normal(size=(features, rank)))[0]
    dictionary = Dictionary(
        tree=tree_from_mask(np.ones((1, nodes), bool)),
        centres=jnp.asarray(rng.normal(size=(1, nodes, features)), jnp.float32),
        bases=jnp.asarray(np.broadcast_to(basis, (1, nodes, features, rank)), jnp.float32),
        ranks=jnp.full((1, nodes), rank, jnp.int32),
    )
    scales = depth_of(nodes) + 1
    draw = Draw(
        neg_log_u=jnp.asarray(rng.gamma(2.0, 1.0, (1, draws, nodes, rank)), jnp.float32),
        tau=jnp.ones((1, draws, nodes, rank)),
        log_sigma2=jnp.asarray(rng.normal(size=(1, draws, scales)), jnp.float32),
        log_weights=jnp.full((1, draws, nodes), -np.log(nodes), jnp.float32),
        log_stop_concentration=jnp.zeros((1, draws)),
        count=jnp.ones((1, draws, nodes), jnp.int32),
        is_active=jnp.ones((1, draws, nodes, rank), bool),
        dimension=jnp.ones((1, draws, nodes), jnp.int32),
        log_joint=jnp.zeros((1, draws)),
    )
    return dictionary, draw


def log_density(sizes: dict[str, int]) -> dict[str, float]:
    dictionary, draw = synthetic_posterior(sizes)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(sizes["n"], sizes["D"])), jnp.float32)
    seconds = best_seconds(lambda: log_density_by_tree(dictionary, draw, x))
    return {"seconds": seconds, "over its floor": seconds * flops_per_second() / density_flops(sizes)}


def filling_in(sizes: dict[str, int]) -> dict[str, float]:
    dictionary, draw = synthetic_posterior(sizes)
    rng = np.random.default_rng(1)
    is_observed = (rng.random((sizes["n"], sizes["D"])) < 0.5).astype(np.float32)
    x = rng.normal(size=is_observed.shape).astype(np.float32) * is_observed
    options = {"num_candidates": CANDIDATES, "num_wanted": num_wanted(is_observed, None)}
    shared = Nodes(dictionary, None), draw, None, jnp.asarray(tails((0.025, 0.975)), jnp.float32)
    size = bytes_per_row(dictionary, CANDIDATES, sizes["T"], 0)

    def filled() -> Any:
        given = {"bytes_per_row": size, "posterior": None, **options}
        return map_partial_rows(conditional_summary, shared, x, is_observed, **given)

    seconds = best_seconds(filled)
    return {"seconds": seconds, "over its floor": seconds * flops_per_second() / filling_in_flops(sizes)}


def stage_one(sizes: dict[str, int]) -> dict[str, float]:
    x = curved_rows(sizes["n"], sizes["D"])
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=20, depth=4)
    start = time.perf_counter()
    geode_jax.learn_forest(jax.random.key(0), x, dictionary=settings)
    return {"seconds": time.perf_counter() - start}


PARTS: dict[str, tuple[Callable[[dict[str, int]], dict[str, float]], dict[str, int]]] = {
    "sweep": (sweep, SWEEP),
    "log density": (log_density, DENSITY),
    "filling in": (filling_in, FILLING_IN),
    "stage one": (stage_one, STAGE_ONE),
}


def expected_slope(part: str, name: str, values: tuple[int, ...], sizes: dict[str, int]) -> float | None:
    """The slope of the theory's operation count over the same values; None where there is none."""
    if part == "stage one":
        return None
    if part == "sweep":
        return 1.0
    flops = density_flops if part == "log density" else filling_in_flops
    counts = [flops({**sizes, name: value}) for value in values]
    return float(np.polyfit(np.log(values), np.log(counts), 1)[0])


def tables() -> list[str]:
    record = load("scaling")
    sizes = {
        part: ", ".join(f"{name} = {size}" for name, size in base.items()) for part, base in record["settings"].items()
    }
    lines = [
        "### What each cost grows with",
        "",
        "Slopes of time on log-log axes, beside those of the operations that the theory counts (a sweep should read n"
        " K d numbers, a log density take n K (4 D d + 2 d T) operations, filling in n rows of which half is hidden,"
        f" with intervals, n C (3 D d^2 / 2 + T d^3 / 3) at the C = {CANDIDATES} nodes considered; stage one, one tree"
        " of depth 4, has no single theory). Times of both kinds of predictions are also given over their floors, as"
        " many operations in one large product, timed in the same run; to choose the nodes, most of the work with few"
        " directions, is left out of the floor."
        f" What does not vary: {'; '.join(f'{part}: {text}' for part, text in sizes.items())}."
        " On one core:",
        "",
    ]
    rows = []
    for row in record["rows"]:
        seconds = ", ".join(f"{1000 * value:.0f}" for value in row["seconds"])
        floor = ", ".join(f"{value:.1f}" for value in row.get("over its floor", []))
        expected = "" if row["expected"] is None else f"{row['expected']:.2f}"
        values = ", ".join(f"{value:,}".replace(",", " ") for value in row["values"])
        rows.append([row["part"], row["varied"], values, seconds, f"{row['slope']:.2f}", expected, floor])
    head = ["part", "varied", "values", "milliseconds", "slope", "of the theory", "over its floor"]
    return lines + table(head, rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these; other results are kept")
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    parts: list[str] = options.parts or list(PARTS)
    earlier = [] if options.quick or not options.parts else load("scaling")["rows"]
    rows = [row for row in earlier if row["part"] not in parts]
    for part in parts:
        varied, (measure, base) = (QUICK if options.quick else VARIED)[part], PARTS[part]
        if options.quick:
            base = {name: QUICK_SIZES[name] for name in base}
        measure(base)  # what is paid once: imports, compilation of what does not depend on sizes
        for name, values in varied.items():
            found = [measure({**base, name: value}) for value in values]
            seconds = [one["seconds"] for one in found]
            row: dict[str, Any] = {
                "part": part,
                "varied": name,
                "values": list(values),
                "seconds": seconds,
                "slope": float(np.polyfit(np.log(values), np.log(seconds), 1)[0]),
                "expected": expected_slope(part, name, values, base),
                "base": base,
            }
            if "over its floor" in found[0]:
                row["over its floor"] = [one["over its floor"] for one in found]
            rows.append(row)
            print(row, flush=True)
    rows.sort(key=lambda row: list(PARTS).index(row["part"]))
    if not options.quick:
        write_result("scaling", {name: base for name, (_, base) in PARTS.items()}, rows)
    return rows


if __name__ == "__main__":
    main()
