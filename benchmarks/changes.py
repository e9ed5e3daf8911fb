"""Which of our results have become better or worse since an earlier commit, from the results that both have.

Losses of the same method on the same data, means over the splits or replicates that both commits have. Times are not
compared: they were measured on different machines.

python -m benchmarks.changes [--since COMMIT] [--quick]
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT, gain_of, write_result
from benchmarks.tables import load, table

SINCE = "f869e08"  # of 2026-11-24
# Experiments, and what tells their rows apart beside splits.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "frey_inpainting": (),
    "frey_missing": ("missing",),
    "digits_density": (),
    "swiss_roll": ("shape",),
    "mnist": (),
    "mnist_deskewed": (),
    "real_data": ("data",),
    "mixed_units": ("data",),
    "smoothness": (),
    "scenarios": ("scenario", "missing"),
    "scenarios_10000": ("scenario", "missing"),
    "scenarios_15000": ("scenario", "missing"),
    "memory": ("rows", "features"),
}
SPLIT = ("split", "seed", "replicate")
# Our default by its name in each; rows of `smoothness` and `memory` have none.
OURS = {"GEODE", "default", "default, 8 trees", "GEODE, depth 6, 8 trees", None}
# Numbers, what they are, and whether more is better.
LOSSES = {
    "mae": ("mean abs. error", False),
    "mse": ("mean squared error", False),
    "geode": ("mean squared error", False),
    "error_percent": ("error, %", False),
    "half_error_percent": ("error with half of the pixels hidden, %", False),
    "nats": ("held-out nats", True),
    "nats_per_feature": ("held-out nats per feature", True),
    "log_density_per_pixel": ("held-out nats per pixel", True),
    "peak over data": ("most memory over the data's", False),
}
Losses = dict[tuple[str, str], dict[tuple[Any, ...], float]]


def losses(rows: list[dict[str, Any]], apart: tuple[str, ...]) -> Losses:
    """Of our default: {(number, data): {split: value}}; `apart`: what tells data apart."""
    found: Losses = {}
    for row in rows:
        if row.get("method") not in OURS or "pattern" in row:
            continue
        data = ", ".join(str(row[name]) if name == "data" else f"{name} {row[name]}" for name in apart)
        split = tuple(row[name] for name in SPLIT if name in row)
        for name in LOSSES:
            if row.get(name) is not None:
                found.setdefault((name, data), {})[split] = row[name]
    return found


def compare(
    before: list[dict[str, Any]], now: list[dict[str, Any]], apart: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """A row for every number that both have, where `gain` is positive if it has become better."""
    old, new = losses(before, apart), losses(now, apart)
    for (name, data), values in new.items():
        both = sorted(values.keys() & old.get((name, data), {}).keys())
        if not both:
            continue
        before_and_now = [[of[split] for split in both] for of in (old[name, data], values)]
        what, more_is_better = LOSSES[name]
        first, second = reversed(before_and_now) if more_is_better else before_and_now
        gain = gain_of(first, second) if len(both) > 1 else {"gain": first[0] - second[0], "gain_se": None}
        means = dict(zip(("before", "now"), map(float, np.mean(before_and_now, axis=1)), strict=True))
        yield {"data": data, "what": what, "splits": len(both), **means, **gain}


def printed(value: float) -> str:
    """With four digits, as far as tables show numbers."""
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")


def tables() -> list[str]:
    record = load("changes")
    rows = [row for row in record["rows"] if printed(row["before"]) != printed(row["now"])]
    worse = [row for row in rows if row["gain"] < 0.0]
    lines = [
        "### What has become worse",
        "",
        "Our default's losses in the tables of accuracy and of missing values, and its most memory, now and on"
        f" {record['settings']['date']} (commit {record['settings']['since']}), on the splits that both have: of"
        f" {len(record['rows'])} numbers {len(rows) - len(worse)} are better, {len(record['rows']) - len(rows)} are"
        f" equal to four digits, and {len(worse)} are worse. The error is that of the mean difference over splits,"
        " where there are several. Since then nodes borrow rows of their parents' cells, the prior of the noise is of"
        " typical rows, the smallest cells have five rows, runs are 100 + 100 sweeps long (500 + 500 before), every"
        " second tree of a small table has refined cuts, a noise covariance is tried in more cases, and missing"
        " training values are filled in until the fills settle. Which of these made a number worse was not taken"
        " apart.",
        "",
    ]
    cells = [
        [
            f"`{row['experiment']}`",
            row["data"],
            row["what"],
            printed(row["before"]),
            printed(row["now"]),
            "" if row["gain_se"] is None else f"{row['gain_se']:.1g}",
        ]
        for row in worse
    ]
    return lines + table(["experiment", "data", "number", "before", "now", "error of the difference"], cells)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default=SINCE, metavar="COMMIT", help=f"the earlier commit (default: {SINCE})")
    parser.add_argument("--quick", action="store_true", help="compare the results with themselves, nothing written")
    options = parser.parse_args(arguments)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    rows = []
    for name, apart in EXPERIMENTS.items():
        path = RESULTS / f"{name}.json"
        now = path.read_text()
        before = now if options.quick else git("show", f"{options.since}:{path.relative_to(ROOT)}")
        found = compare(*(json.loads(text)["rows"] for text in (before, now)), apart)
        rows += [{"experiment": name, **row} for row in found]
    for row in rows:
        print(f"{row['experiment']:<16} {row['data']:<40} {row['what']:<40} {row['before']:.4f} -> {row['now']:.4f}")
    if not options.quick:
        date = git("show", "--no-patch", "--format=%cs", options.since).strip()
        write_result("changes", {"since": options.since, "date": date}, rows)
    return rows


if __name__ == "__main__":
    main()
