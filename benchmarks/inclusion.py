"""Probability that each direction is in use (the paper's figure 3), and the posterior of the intrinsic dimension.

A linear subspace of dimension 5 in D = 500, and the Swiss roll in D = 200, 20 directions offered. The paper's
inclusion probabilities count directions that pass its removal test; the intrinsic dimension counts those along which
rows vary by more than the noise. The default looks for a span that all nodes share, and offers nothing beyond it; so it
is shown without one too.

python -m benchmarks.inclusion [--quick]
"""

import argparse
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import write_result
from benchmarks.dimension import linear_rows
from benchmarks.swiss_roll import make_roll
from benchmarks.tables import load, table

RANK = 20


def tables() -> list[str]:
    record = load("inclusion")
    lines = [
        "### Directions in use",
        "",
        f"The paper's figure 3, with {record['settings']['rank']} directions offered: its removal test, and the"
        " posterior of the intrinsic dimension. By default nodes share a span of as many directions as the rows tell"
        " of, and are offered no more.",
        "",
        "![Probability that each direction is in use, and of each intrinsic dimension](../notebooks/inclusion.png)",
        "",
    ]
    rows = [
        [
            row["data"],
            str(row["truth"]),
            row["method"],
            str(len(row["included"])),
            "" if row["excluded_redundant"] is None else f"{row['excluded_redundant']:.1%}",
            str(int(np.argmax(row["dimension"]))),
        ]
        for row in record["rows"]
    ]
    head = ["data", "dimension", "method", "directions", "mean probability that a redundant one is out", "mode"]
    return lines + table(head, rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options = parser.parse_args(arguments)
    num_rows, num_features, rank = (90, 30, 6) if options.quick else (1000, 500, RANK)
    data = {"subspace": (linear_rows(np.random.default_rng(0), num_rows, num_features, 5), 5)}
    if not options.quick:
        data["Swiss roll"] = (make_roll(3000, "flat", 0)[0], 2)
    sampler = geode_jax.SamplerSettings(num_warmup=20, num_samples=20) if options.quick else None
    methods = {
        "default": (geode_jax.DictionarySettings(max_rank=rank), None, sampler),
        "default, no span": (geode_jax.DictionarySettings(max_rank=rank, shared_span=None), None, sampler),
        "published": (
            geode_jax.DictionarySettings.published(max_rank=rank),
            geode_jax.Prior.published(),
            sampler or geode_jax.SamplerSettings.published(),
        ),
    }
    rows: list[dict[str, Any]] = []
    for name, (x, truth) in data.items():
        for method, (dictionary, prior, settings) in methods.items():
            posterior = geode_jax.fit(jax.random.key(0), x, dictionary=dictionary, prior=prior, sampler=settings)
            included = posterior.inclusion_probabilities
            row = {
                "data": name,
                "truth": truth,
                "method": method,
                "included": included.round(4).tolist(),
                "excluded_redundant": float(1.0 - included[truth:].mean()) if included.size > truth else None,
                "dimension": posterior.intrinsic_dimension_probabilities.round(4).tolist(),
            }
            rows.append(row)
            print(row, flush=True)
    if not options.quick:
        write_result("inclusion", {"rank": RANK}, rows)
    return rows


if __name__ == "__main__":
    main()
