"""Time of a truncated gamma draw against `jax.random.gamma` on the same device, over shapes and rates.

python -m benchmarks.truncated_gamma [--quick]
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import write_result
from benchmarks.tables import load
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.math.truncated import draw_log_truncated_gamma

SHAPES = (0.5, 1.0, 7.0, 1e3, 1e6, 1e9, 1e12)
RATES = (1.0, 3.0, 1e2, 1e5, 1e9)
NUM_DRAWS = 1_000_000


def _seconds(function, *arguments) -> float:
    """Fastest of five calls after the first, which compiles."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def tables() -> list[str]:
    record = load("truncated_gamma")
    parts = []
    for dtype in ("float32", "float64"):
        ratios = [row["ratio"] for row in record["rows"] if row["dtype"] == dtype]
        parts.append(f"{np.median(ratios):.1f} in {dtype} (at most {max(ratios):.1f})")
    return [
        "### A truncated gamma draw",
        "",
        f"A truncated gamma draw costs, of the time of `jax.random.gamma`, {' and '.join(parts)}, over the whole range"
        " of shapes and rates.",
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few draws, nothing written")
    options = parser.parse_args(arguments)
    num_draws = 1000 if options.quick else NUM_DRAWS
    ours, rival = jax.jit(draw_log_truncated_gamma), jax.jit(jax.random.gamma)
    key, rows = jax.random.key(0), []
    for dtype in ("float32", "float64"):
        with jax_settings(dtype):
            for shape in SHAPES:
                shapes = jnp.full(num_draws, shape, dtype)
                floor = _seconds(rival, key, shapes)
                for rate in RATES:
                    seconds = _seconds(ours, key, jnp.log(shapes), jnp.full(num_draws, rate, dtype))
                    row = {"dtype": dtype, "shape": shape, "rate": rate, "seconds": seconds, "gamma_seconds": floor}
                    rows.append(row | {"ratio": seconds / floor})
        ratios = [row["ratio"] for row in rows if row["dtype"] == dtype]
        print(
            f"{dtype}: ratio to jax.random.gamma: median {np.median(ratios):.2f}, largest {max(ratios):.2f}", flush=True
        )
    if not options.quick:
        write_result("truncated_gamma", {"num_draws": num_draws}, rows)
    return rows


if __name__ == "__main__":
    main()
