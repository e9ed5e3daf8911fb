"""Which proof of the sampler catches which planted bug, and how far the correct sampler stays below every limit.

Runs the tests' own code: the identity, draw, joint and calibration tests under every bug of tests/bugs.py, the
Kolmogorov-Smirnov grid of the truncated gamma, and NUTS against Gibbs.

python -m benchmarks.proofs [--quick] [--fresh]
"""

import argparse
import contextlib
import sys
import warnings
from typing import Any

import jax
import numpy as np

from benchmarks.common import ROOT, earlier_rows, write_result
from benchmarks.tables import load
from geode_jax.settings import DirectMembership, ExactShrinkage, PublishedShrinkage

sys.path.insert(0, str(ROOT / "tests"))

import bugs
import small
import test_sampler_calibration as calibration
import test_sampler_draws as draws
import test_sampler_identity as identity
import test_sampler_joint as joint
import test_sampler_nuts as nuts
import test_truncated as truncated

TESTS = ("identity", "draw", "joint", "calibration")


def examine(bug: str | None, published: bool, quick: bool) -> dict[str, Any]:
    """Every proof under one bug: its statistic, and whether it crossed its limit."""
    blocks = ["weights"] if quick else list(draws.CHECKS)
    num_chains, num_replicates = (1000, 64) if quick else (joint.NUM_CHAINS, 1000)
    shrinkage = PublishedShrinkage() if published else ExactShrinkage()
    membership = bugs.membership_for(bug) if bug else DirectMembership()
    row: dict[str, Any] = {"bug": bug or ("published shrinkage" if published else "none")}
    if not published:  # the settings object changes the sweep, not the blocks that these two look at
        with bugs.BUGS[bug]() if bug else contextlib.nullcontext():
            gap = max(identity.relative_gap(name) for name in [*identity.BLOCKS, "renewal", *range(small.MAX_RANK)])
            p_value = min(draws.smallest_p_value(block, np.float32) for block in blocks)
        row |= {"identity_gap": gap, "identity": gap >= identity.TOLERANCE}
        row |= {"draw_p": p_value, "draw": bool(p_value <= draws.LEVEL)}
    z, limit = joint.z_scores(shrinkage, membership, bug, num_chains)
    largest = np.nanmax(np.abs(z)) if np.isfinite(z).any() else np.inf
    row |= {"joint_z": float(largest), "joint_limit": float(limit), "joint": bool(not largest < limit)}
    ranks = calibration.p_values(shrinkage, membership, bug, num_replicates)
    p_value = float(np.nan_to_num(ranks).min() * ranks.size)
    row |= {"calibration_p": p_value, "calibration": p_value <= calibration.LEVEL}
    return row


def tables() -> list[str]:
    """What each proof says of the sampler, and of every bug planted in it."""
    record = load("proofs")
    rows, summary = record["rows"], record["settings"]
    titles = ("identity", "draw", "joint", "calibration")
    lines = [
        "### Proofs of the sampler",
        "",
        "Each test was run on the sampler as it is and with one bug planted; a cross is a bug that was caught. False"
        " alarms: none possible (identity), below 1e-4 per block (draw), 1e-4 in all (joint, calibration)."
        " *Published shrinkage* are the steps as printed in the paper, not a planted bug.",
        "",
        "| planted | identity | draw | joint, largest abs. z | calibration |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = {name: "x" if row.get(name) else "" for name in titles}
        cells["joint"] = f"{'x ' if row['joint'] else ''}{row['joint_z']:.1f}"
        name = f"*{row['bug']}*" if row["bug"] in ("none", "published shrinkage") else row["bug"]
        lines.append(f"| {name} | {' | '.join(cells[title] for title in titles)} |")
    if not summary:
        return lines
    grids = (summary[f"ks_{dtype}"] for dtype in ("float32", "float64"))
    worst = " and ".join(f"{grid['smallest_p']:.2g}" for grid in grids)
    nuts, points = summary["nuts"], summary["ks_float32"]["points"]
    lines += [
        "",
        f"The limit of the joint test is {rows[0]['joint_limit']:.1f}. Truncated gamma, {points} shapes and rates: the"
        f" smallest Kolmogorov-Smirnov p-values are {worst} (float32, float64). NUTS on an independent NumPyro model"
        f" and the Gibbs sampler differ by at most {nuts['largest_z']:.1f} standard errors over {nuts['parameters']}"
        " parameters.",
    ]
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the correct sampler only, few draws, nothing written")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run wrote that did not end")
    options = parser.parse_args(arguments)
    cases = [(None, False)] if options.quick else [(None, False), (None, True), *((bug, False) for bug in bugs.BUGS)]
    # a run that did not end has no summary, and is gone on with
    rows = [] if options.quick or options.fresh else earlier_rows("proofs", {})
    for bug, published in cases[len(rows) :]:
        row = examine(bug, published, options.quick)
        rows.append(row)
        caught = ", ".join(test for test in TESTS if row.get(test))
        print(f"{row['bug']:<24} joint |z| {row['joint_z']:>6.1f}  caught by: {caught or '-'}", flush=True)
        jax.clear_caches()
        if not options.quick:
            write_result("proofs", {}, rows)
    if options.quick:
        return rows
    summary: dict[str, Any] = {}
    for dtype in (np.float32, np.float64):
        p_values = truncated.grid_p_values(dtype)
        worst = int(np.argmin(p_values))
        summary[f"ks_{np.dtype(dtype).name}"] = {
            "points": len(p_values),
            "smallest_p": min(p_values),
            "shape": truncated.GRID[worst][0],
            "rate": truncated.GRID[worst][1],
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = nuts.compare()[:, 2]
    summary["nuts"] = {"parameters": z.size, "largest_z": float(np.abs(z).max())}
    print(summary)
    write_result("proofs", summary, rows)
    return rows


if __name__ == "__main__":
    main()
