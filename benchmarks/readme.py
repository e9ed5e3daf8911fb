"""Write the results section of README.md, and benchmarks/README.md, from the JSON files in benchmarks/results.

python -m benchmarks.readme [--check]
"""

import argparse
import json
import re
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT
from benchmarks.scenarios import SCENARIOS

SCENARIO_NAMES = {
    number: f"{kind} {', '.join(map(str, dimensions))}".strip() for number, (kind, dimensions) in SCENARIOS.items()
}
START, END = "<!-- results: python -m benchmarks.readme -->", "<!-- end of results -->"


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _mean(rows: list[dict[str, Any]], method: str, key: str) -> float:
    return float(np.mean([row[key] for row in rows if row["method"] == method]))


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return f"{machine['cores']} CPU cores, Python {machine['python']}, JAX {versions['jax']}, {record['date']}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _best_rival(rows: list[dict[str, Any]], key: str, ours: tuple[str, ...], *, lowest: bool) -> tuple[float, str]:
    """The best mean among the methods that are not `ours`, and whose it is."""
    names = {row["method"] for row in rows if key in row and not row["method"].startswith(ours)}
    sign = 1.0 if lowest else -1.0
    value, name = min((sign * _mean(rows, name, key), name) for name in names)
    return sign * value, name


def _summary() -> list[str]:
    """One line per task: the paper, the best rival, ours."""
    rows: list[list[str]] = []

    def add(
        task: str,
        paper: str,
        rival: tuple[float, str],
        ours: float,
        digits: int,
        unit: str,
        script: str,
        *,
        lowest: bool = True,
    ) -> None:
        is_best = ours < rival[0] if lowest else ours > rival[0]
        numbers = [f"{value:.{digits}f}{unit}" for value in (rival[0], ours)]
        best = [
            f"**{number}**" if first else number for number, first in zip(numbers, (not is_best, is_best), strict=True)
        ]
        rows.append([task, paper, f"{best[0]} ({rival[1]})", best[1], f"`{script}`"])

    record = _load("frey_inpainting")
    frey, paper = record["rows"], str(record["settings"]["paper_mae"])
    theirs = _best_rival(frey, "mae", ("published", "default"), lowest=True)
    ours = _mean(frey, "default", "mae")
    add("Frey faces, half hidden, mean abs. error", paper, theirs, ours, 2, "", "frey_inpainting")
    at = [row for row in _load("frey_missing")["rows"] if row["missing"] == 0.2]
    theirs = _best_rival(at, "mae", ("GEODE",), lowest=True)
    add("the same, 20% missing in training too", "", theirs, _mean(at, "GEODE", "mae"), 2, "", "frey_missing")
    digits = _load("digits_density")["rows"]
    theirs = _best_rival(digits, "nats", ("published", "one tree", "default"), lowest=False)
    ours = _mean(digits, "default, 8 trees", "nats")
    add("digits, held-out nats per image", "", theirs, ours, 1, "", "digits_density", lowest=False)
    roll = _load("swiss_roll")["rows"]
    for shape in ("flat", "bent"):
        own = [row for row in roll if row["shape"] == shape]
        theirs = _best_rival(own, "nats", ("published", "default", "oracle"), lowest=False)
        task = f"Swiss roll in D = 200, {shape}, held-out nats"
        add(task, "", theirs, _mean(own, "default", "nats"), 2, "", "swiss_roll", lowest=False)
    for name, what, paper in (("mnist", "raw", "2.32%"), ("mnist_deskewed", "deskewed", "")):
        images = _load(name)["rows"]
        theirs = _best_rival(images, "error_percent", ("GEODE", "published"), lowest=True)
        ours = float(images[0]["error_percent"])
        script = "mnist" if name == "mnist" else "mnist --deskew"
        add(f"MNIST, {what}, error (depth 6)", paper, theirs, ours, 2, "%", script)
    smooth = _load("smoothness")["rows"]
    tuned = np.mean([row["mpcr_tuned"] for row in smooth], axis=0)
    theirs = float(tuned.min()), f"MPCR at its best scale, {int(tuned.argmin())}"
    ours = float(np.mean([row["geode"] for row in smooth]))
    add("regression in D = 10000, MSE over noise", "", theirs, ours, 3, "", "smoothness")
    literal = _load("literal")["settings"]
    sweeps = [1000 * literal[f"sweep_{name}_seconds"] for name in ("literal", "ours")]
    add("a sweep, Frey faces", "", (sweeps[0], "as printed, NumPy"), sweeps[1], 1, " ms", "literal")
    head = ["task", "the paper", "best rival", "GEODE", "`python -m benchmarks.`"]
    return [*_table(head, rows), "", "[benchmarks/README.md](benchmarks/README.md) has every table behind this one."]


def _frey() -> list[str]:
    frey = _load("frey_inpainting")
    lines = [
        "**Frey faces** (the paper's section 4.1; D = 560, 1000 training frames, half of the pixels of 965 others"
        f" hidden; mean of seeds {frey['settings']['seeds']}), `{frey['command']}`:",
        "",
        "| | mean abs. error (0..255) | coverage of 95% | mean width | nats per pixel | fit | fill in 965 |",
        "|---|---|---|---|---|---|---|",
        f"| the paper | {frey['settings']['paper_mae']} | | | | | |",
    ]
    labels = {"published": "published form, here (d = 20, depth 4)", "default": "**default**"}
    for method in dict.fromkeys(row["method"] for row in frey["rows"]):
        own = [row for row in frey["rows"] if row["method"] == method]
        keys = {"mae": ".2f", "coverage95": ".1%", "width95": ".1f", "log_density_per_pixel": ".2f"}
        cells = [
            format(_mean(own, method, key), form) if all(key in row for row in own) else ""
            for key, form in keys.items()
        ]
        cells += [f"{_mean(own, method, key):.0f} s" for key in ("fit_seconds", "impute_seconds")]
        lines.append(f"| {labels.get(method, method)} | {' | '.join(cells)} |")
    return lines


def _frey_missing() -> list[str]:
    record = _load("frey_missing")
    lines = [
        "**Missing values in training too** (Frey faces as above, seeds"
        f" {record['settings']['seeds']}; where any are missing no training row is complete; timed beside other work on"
        f" the machine), `{record['command']}`:",
        "",
        "| | missing in training | mean abs. error | coverage of 95% | mean width | seconds in all |",
        "|---|---|---|---|---|---|",
    ]
    rows = record["rows"]
    for method, share in dict.fromkeys((row["method"], row["missing"]) for row in rows):
        own = [row for row in rows if (row["method"], row["missing"]) == (method, share)]
        seconds = [sum(value for key, value in row.items() if key.endswith("seconds")) for row in own]
        mae, covered, width = (
            np.mean([row[key] for row in own]) if key in own[0] else None for key in ("mae", "coverage95", "width95")
        )
        lines.append(
            f"| {'**GEODE**' if method == 'GEODE' else method} | {share:.0%} | {mae:.2f}"
            f" | {'' if covered is None else f'{covered:.1%}'} | {'' if width is None else f'{width:.1f}'}"
            f" | {np.mean(seconds):.0f} |"
        )
    return lines


def _missing_patterns() -> list[str]:
    lines = [
        "Designed patterns (the paper's figure 6) on the first 200 test frames, from complete training rows"
        " ([picture](../notebooks/frey_patterns.png)):",
        "",
        "| hidden | mean abs. error | coverage of 95% | mean width |",
        "|---|---|---|---|",
    ]
    for row in _load("frey_missing")["settings"]["patterns"]:
        lines.append(f"| {row['pattern']} | {row['mae']:.2f} | {row['coverage95']:.1%} | {row['width95']:.1f} |")
    return lines


def _missing_time() -> list[str]:
    record = _load("missing_time")
    settings = record["settings"]
    lines = [
        f"**A sweep does not know D**, `{record['command']}`: {settings['rows']} rows, none complete, one tree of depth"
        f" 2, rank {settings['rank']}, four candidate nodes per row; median of {settings['sweeps']} sweeps. Beside it"
        " the D-sized work that drawing the missing features would add at a single node.",
        "",
        "| D | missing | a sweep, ms | drawing and reducing in R^D, ms | matrices, MiB | stage one, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['features']} | {row['missing']:.0%} | {row['sweep_milliseconds']:.1f}"
            f" | {row['brute_milliseconds']:.1f} | {row['partial_rows_mebibytes']:.1f}"
            f" | {row['stage_one_seconds']:.1f} |"
        )
    return lines


def _digits() -> list[str]:
    digits = _load("digits_density")
    lines = [
        "**Digits** (D = 64, 1437 training and 360 test images, five splits; timed beside other work on the machine),"
        f" `{digits['command']}`:",
        "",
        "| | held-out nats per image | coverage of 95% | seconds to fit |",
        "|---|---|---|---|",
    ]
    splits = digits["settings"]["splits"]
    for method in dict.fromkeys(row["method"] for row in digits["rows"]):
        if sum(row["method"] == method for row in digits["rows"]) < splits:
            continue  # a run that is not finished
        bold = "**" if method.startswith("default") else ""
        seconds = float(np.median([row["seconds"] for row in digits["rows"] if row["method"] == method]))
        has_intervals = any("coverage95" in row for row in digits["rows"] if row["method"] == method)
        covered = f"{_mean(digits['rows'], method, 'coverage95'):.1%}" if has_intervals else ""
        lines.append(
            f"| {bold}{method}{bold} | {_mean(digits['rows'], method, 'nats'):.1f} | {covered} | {seconds:.1f} |"
        )
    return lines


def _scenarios() -> list[str]:
    """Means over the data sets that there are; mean squared errors in units of the noise."""
    record = _load("scenarios")
    rows, settings = record["rows"], record["settings"]
    numbers = sorted({row["scenario"] for row in rows})
    pairs = {(row["scenario"], row["replicate"]) for row in rows}
    lines = [
        f"**Nine scenarios** (the paper's figures 4 and 5, in kind; D = {settings['features']}, {settings['train']}"
        " training rows, mean squared error of the response over the noise variance; mean of the"
        f" {len(pairs)} data sets of 90 that are measured so far), `{record['command']}`. A data set's own noise"
        " moves all methods alike, by 14% from one to the next.",
        "",
    ]
    head = ["missing", "method", *(f"{number}: {SCENARIO_NAMES[number]}" for number in numbers), "coverage of 95%"]
    table = []
    for missing in sorted({row["missing"] for row in rows}):
        for method in dict.fromkeys(row["method"] for row in rows if row["missing"] == missing):
            own = [row for row in rows if row["missing"] == missing and row["method"] == method]
            cells = [f"{np.mean([row['mse'] for row in own if row['scenario'] == number]):.3f}" for number in numbers]
            covered = [row["coverage95"] for row in own if "coverage95" in row]
            name = f"**{method}**" if method == "GEODE" else method
            table.append([f"{missing:.0%}", name, *cells, f"{np.mean(covered):.1%}" if covered else ""])
    return lines + _table(head, table)


def _tree_rows() -> list[str]:
    record = _load("tree_rows")
    settings = record["settings"]
    lines = [
        f"**Trees from a part of the rows**, the others routed ({settings['train']} MNIST images,"
        f" {settings['held_out']} held out, two trees of depth 6; timed beside other work), `{record['command']}`:",
        "",
    ]
    rows = [
        [
            str(row["tree_rows"]),
            f"{row['nats']:.1f}",
            f"{row['gain']:+.1f} ± {row['standard_error']:.1f}" if row["gain"] else "",
            f"{row['seconds']:.0f}",
        ]
        for row in record["rows"]
    ]
    return lines + _table(["rows of a tree", "held-out nats", "gain over all", "seconds to fit"], rows)


def _candidates() -> list[str]:
    record = _load("candidates")
    settings = record["settings"]
    fewer = [row for row in record["rows"] if row["data"] == "MNIST"]
    more = [row for row in record["rows"] if row["data"] == "curved"]
    lines = [
        "**Candidate nodes**, `python -m benchmarks.candidates`. The same two trees of depth 7 with fewer and fewer"
        f" candidates per row ({settings['train']} MNIST images, {settings['held_out']} held out;"
        f" {settings['sweeps']} sweeps; timed on one core beside other work):",
        "",
    ]
    rows = [
        [
            "all 255" if row["candidates"] == fewer[0]["candidates"] else str(row["candidates"]),
            f"{row['nats']:.1f}",
            f"{row['gain']:+.1f} ± {row['standard error']:.1f}" if row["gain"] else "",
            f"{row['lost mass']:.2%}",
            f"{row['statistics MiB']:.0f}",
            f"{row['stage one seconds']:.0f}",
            f"{row['sampler seconds']:.0f}",
        ]
        for row in fewer
    ]
    head = [
        "candidates",
        "held-out nats",
        "gain over all",
        "lost mass",
        "statistics, MiB",
        "stage one, s",
        "sampler, s",
    ]
    lines += _table(head, rows)
    lines += [
        "",
        f"Rows near a curved set of 5 dimensions in 100, one tree, rank 20, {more[0]['candidates']} candidates,"
        f" {settings['sweeps']} sweeps. Peak memory is the process's, the data's own and JAX's included, and for the"
        " first row that of the images before it:",
        "",
    ]
    rows = [
        [
            f"{row['rows']:,}",
            str(row["depth"]),
            f"{row['nats']:.1f}",
            f"{row['one Gaussian']:.1f}",
            f"{row['lost mass']:.3%}",
            f"{row['stage one seconds']:.0f}",
            f"{row['sweep ms']:.0f}",
            f"{row['sampler seconds']:.0f}",
            f"{row['data MiB']:.0f}",
            f"{row['peak GiB']:.1f}",
        ]
        for row in more
    ]
    head = ["rows", "depth", "held-out nats", "one Gaussian", "lost mass", "stage one, s", "sweep, ms", "sampler, s"]
    return lines + _table([*head, "data, MiB", "peak, GiB"], rows)


def _scaling() -> list[str]:
    record = _load("scaling")
    sizes = {
        part: ", ".join(f"{name} = {size}" for name, size in base.items()) for part, base in record["settings"].items()
    }
    lines = [
        f"**What each cost grows with**, `{record['command']}`: slopes of time on log-log axes, beside those of the"
        " operations that the theory counts (a sweep should read n K d numbers, a log density take"
        " n K (4 D d + 2 d T) operations; stage one, one tree of depth 4, has no single theory). A log density's time"
        " is also given over its floor, as many operations in one large product, timed in the same run. What does not"
        f" vary: {'; '.join(f'{part}: {text}' for part, text in sizes.items())}. On one core:",
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
    return lines + _table(head, rows)


def _memory() -> list[str]:
    record = _load("memory")
    lines = [
        f"**Memory of stage one**, `{record['command']}`: memory-mapped float32 rows near a curved set of 5 dimensions,"
        f" one tree, rank 20. Peak of all memory that the process takes for itself, above what it had before, over"
        " the size of the data; and what it hands to the sampler:",
        "",
    ]
    rows = [
        [
            f"{row['rows']:,} x {row['features']:,}",
            str(row["depth"]),
            f"{row['data MiB']:.0f}",
            f"{row['peak over data']:.2f}",
            f"{row['kept over data']:.2f}",
            f"{row['seconds']:.0f}",
        ]
        for row in record["rows"]
    ]
    return lines + _table(["rows x D", "depth", "data, MiB", "peak over data", "kept over data", "seconds"], rows)


def _thinning() -> list[str]:
    record = _load("thinning")
    every = record["rows"][0]["all draws"]
    lines = [
        f"**How many draws a prediction needs**, `{record['command']}`: error by averaging over fewer than all {every}"
        " draws per tree, root mean square over the rows (nats), or over the hidden half of their features (in standard"
        " deviations of what is hidden, against the most draws here). By default 200 and 16:",
        "",
    ]
    rows = [
        [
            {"digits": "digits", "faces": "Frey faces"}[row["data"]],
            row["of"],
            str(row["draws"]),
            f"{row['rms']:.3f}",
            f"{row['mae']:.3f}" if "mae" in row else "",
            f"{row['ms per row']:.1f}",
        ]
        for row in record["rows"]
    ]
    return lines + _table(["data", "of", "draws per tree", "error", "mean abs. error", "milliseconds per row"], rows)


def _suite() -> list[str]:
    if not (RESULTS / "suite.json").exists():
        return []
    record = _load("suite")
    rows = [[row["experiment"], f"{row['seconds']:,}", row["date"]] for row in record["rows"]]
    total = sum(row["seconds"] for row in record["rows"])
    text = (
        "**What the suite takes**: full runs by `python -m benchmarks run NAME`, those that have been timed,"
        f" {total / 3600:.1f} hours in all."
    )
    return ["", text, "", *_table(["experiment", "seconds", "date"], rows)]


def _real_data() -> list[str]:
    record = _load("real_data")
    lines = [
        "**Real data of many features** that scikit-learn and scikit-image ship: faces, and patches of pictures, those"
        f" held out from another part of the picture than those of training, `{record['command']}`. Half of the"
        " features of the rows held out are hidden and filled in; on the scale 0..255; timed beside other work.",
        "",
    ]
    rows = []
    for row in record["rows"]:
        is_ours = row["method"] == "GEODE"
        rows.append(
            [
                f"{row['data']}, {row['rows']} rows" if is_ours else "",
                str(row["features"]) if is_ours else "",
                f"**{row['method']}**" if is_ours else row["method"],
                f"{row['nats_per_feature']:.3f}" if "nats_per_feature" in row else "",
                f"{row['mae']:.2f}",
                f"{row['coverage95']:.1%}" if "coverage95" in row else "",
                f"{row['width95']:.1f}" if "width95" in row else "",
                f"{row['fit_seconds']:.0f}",
                f"{row['impute_seconds']:.0f}",
            ]
        )
    head = ["data", "D", "method", "nats per feature", "mean abs. error", "coverage of 95%", "mean width"]
    return lines + _table([*head, "fit, s", "fill, s"], rows)


def _swiss_roll() -> list[str]:
    record = _load("swiss_roll")
    lines = [
        f"**Swiss roll** in D = 200, five splits, held-out nats, `{record['command']}`: flat in three of the"
        " dimensions, and bent through all of them.",
        "",
        "| | flat | bent | coverage of 95%, flat | bent | seconds to fit |",
        "|---|---|---|---|---|---|",
    ]
    rows = record["rows"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {shape: [r for r in rows if r["method"] == method and r["shape"] == shape] for shape in ("flat", "bent")}
        nats = [f"{_mean(own[shape], method, 'nats'):.2f}" if own[shape] else "" for shape in ("flat", "bent")]
        covered = [
            f"{_mean(own[shape], method, 'coverage95'):.1%}" if own[shape] and "coverage95" in own[shape][0] else ""
            for shape in ("flat", "bent")
        ]
        bold = "**" if method == "default" else ""
        seconds = "" if method == "oracle" else f"{np.median([row['seconds'] for row in own['flat']]):.1f}"
        lines.append(f"| {bold}{method}{bold} | {' | '.join([*nats, *covered, seconds])} |")
    return lines


def _dimension() -> list[str]:
    record = _load("dimension")
    lines = [
        f"**Intrinsic dimension** where it is known, `{record['command']}`: rows whose posterior mode is the truth, the"
        " mean posterior probability of the truth, and the coverage of 95% intervals of the hidden half of new rows."
        " Estimators of scikit-dimension have one number for all rows, and one for each from its 100 nearest"
        " neighbours, of which those that round to the truth are right.",
        "",
    ]
    rows = []
    order = dict.fromkeys((row["data"], row["dimension"], row["features"]) for row in record["rows"])
    for data, dimension, features in order:
        for row in record["rows"]:
            if (row["data"], row["dimension"], row["features"]) == (data, dimension, features):
                is_ours = row["method"] == "GEODE"
                cells = (
                    ["", f"{row['probability_of_truth']:.3f}", f"{row['coverage95']:.1%}"]
                    if is_ours
                    else ["none" if row["whole"] is None else f"{row['whole']:.1f}", "", ""]
                )
                name = f"**{row['method']}**" if is_ours else row["method"]
                right, seconds = f"{row['right']:.1%}", f"{row['seconds']:.0f}"
                rows.append([data, dimension, str(features), name, right, *cells, seconds])
    head = ["data", "truth", "D", "method", "right", "for all rows", "probability of the truth", "coverage of 95%"]
    return lines + _table([*head, "seconds"], rows)


def _stage_one(name: str, title: str) -> list[str]:
    if not (RESULTS / f"stage_one_{name}.json").exists():
        return []
    record = _load(f"stage_one_{name}")
    lines = [
        f"**What each choice of stage one is worth on {title}**: one setting changed at a time from the default with"
        f" {record['settings']['num_trees']} trees, training data only (80% fitted, 20% held out),"
        f" `{record['command']}`. Mean absolute error, coverage and width are of the hidden half of the features.",
        "",
        "| setting | value | nats per row | mean abs. error | the same, trees weighted by evidence | coverage of 95%"
        " | mean width | seconds to fit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        by_evidence = f"{row['mae_by_evidence']:.3f}" if "mae_by_evidence" in row else ""
        lines.append(
            f"| {row['setting']} | {row['value']} | {row['nats']:.1f} | {row['mae']:.3f} | {by_evidence}"
            f" | {row['coverage95']:.1%} | {row['width95']:.2f} | {row['seconds']:.0f} |"
        )
    return [*lines, ""]


def _choices() -> list[str]:
    record = _load("choices")
    lines = [
        "**Does the score that chooses the shared span predict held-out density?** Gains over no span, nats per row,"
        f" training data only, `{record['command']}`:",
        "",
        "| data | rank of the span | gain in the score | gain held out |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        held_out = f"{row['held_out_gain']:.2f} ± {row['held_out_error']:.2f}"
        lines.append(f"| {row['data']} | {row['rank']} | {row['score_gain']:.2f} | {held_out} |")
    return lines


def _proofs() -> list[str]:
    """What each proof says of the sampler, and of every bug planted in it."""
    record = _load("proofs")
    rows, summary = record["rows"], record["settings"]
    titles = ("identity", "draw", "joint", "calibration")
    lines = [
        f"**Proofs of the sampler**, `{record['command']}`. Each test was run on the sampler as it is and with one bug"
        " planted; a cross is a bug that was caught. False alarms: none possible (identity), below 1e-4 per block"
        " (draw), 1e-4 in all (joint, calibration).",
        "",
        "| planted | identity | draw | joint, largest abs. z | calibration |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = {name: "x" if row.get(name) else "" for name in titles}
        cells["joint"] = f"{'x ' if row['joint'] else ''}{row['joint_z']:.1f}"
        name = f"*{row['bug']}*" if row["bug"] == "none" else row["bug"]
        lines.append(f"| {name} | {' | '.join(cells[title] for title in titles)} |")
    grids = (summary[f"ks_{dtype}"] for dtype in ("float32", "float64"))
    worst = " and ".join(f"{grid['smallest_p']:.2g}" for grid in grids)
    nuts, seconds, points = summary["nuts"], summary["suite_seconds"], summary["ks_float32"]["points"]
    lines += [
        "",
        f"The limit of the joint test is {rows[0]['joint_limit']:.1f}. Truncated gamma, {points} shapes and rates: the"
        f" smallest Kolmogorov-Smirnov p-values are {worst} (float32, float64). NUTS on an independent NumPyro model"
        f" and the Gibbs sampler differ by at most {nuts['largest_z']:.1f} standard errors over {nuts['parameters']}"
        f" parameters. The proofs take {seconds['default']:.0f} s in the default test run and {seconds['slow']:.0f} s"
        " more behind `-m slow`, compilation included.",
    ]
    return lines


def _speed_of_draws() -> str:
    record = _load("truncated_gamma")
    parts = []
    for dtype in ("float32", "float64"):
        ratios = [row["ratio"] for row in record["rows"] if row["dtype"] == dtype]
        parts.append(f"{np.median(ratios):.1f} in {dtype} (at most {max(ratios):.1f})")
    return (
        f"A truncated gamma draw costs, of the time of `jax.random.gamma`, {' and '.join(parts)}, over the whole range"
        f" of shapes and rates (`{record['command']}`)."
    )


def _mixing() -> list[str]:
    record = _load("mixing")
    lines = [
        f"**Mixing**, four chains on one tree, {record['settings']['num_samples']} draws each after as many of warm-up,"
        f" `{record['command']}`. Effective draws are those within chains; R-hat compares chains from over-dispersed"
        " starts. With D in the hundreds they stay in the mode that their start led to: `diagnostics.report` says so,"
        " and predictions average over the chains.",
        "",
        "| data | conditionals | R-hat, worst | R-hat, row densities | effective draws, row densities | per second |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['data']} | {row['variant']} | {row['r_hat_parameters']:.2f} | {row['r_hat_densities']:.2f}"
            f" | {row['ess_densities']:.0f} | {row['ess_densities'] / row['seconds']:.0f} |"
        )
    return lines


def _proofs_in_short() -> str:
    record = _load("proofs")
    bugs = [row for row in record["rows"] if row["bug"] not in ("none", "published shrinkage")]
    caught = sum(any(row[name] for name in ("identity", "draw", "joint", "calibration")) for row in bugs)
    return (
        f"**Proofs of the sampler**: {caught} of {len(bugs)} planted bugs are caught, the largest of the joint test's z"
        f" statistics is {record['rows'][0]['joint_z']:.1f} (limit {record['rows'][0]['joint_limit']:.1f}), and NUTS on"
        f" an independent model agrees. [benchmarks/README.md](benchmarks/README.md) has the table of tests and bugs,"
        " and how chains mix."
    )


def _mnist() -> list[str]:
    record, deskewed = _load("mnist"), {row["method"]: row for row in _load("mnist_deskewed")["rows"]}
    rows = [["the paper", "2.32%", "", "", "", "", "", "90 min", "7 min", ""]]
    for row in record["rows"]:
        is_ours, upright = row["method"].startswith("GEODE"), deskewed[row["method"]]
        cells = [f"**{row['method']}**" if is_ours else row["method"]]
        cells += [f"{one['error_percent']:.2f}%" for one in (row, upright)]
        cells += [f"{one['half_error_percent']:.2f}%" if is_ours else "" for one in (row, upright)]
        cells += [f"{row['mean_filled_error_percent']:.2f}%" if is_ours else ""]
        cells += [f"{row['calibration_error']:.4f}", f"{row['fit_seconds']:.0f} s", f"{row['predict_seconds']:.0f} s"]
        rows.append([*cells, f"{row['peak_gibibytes']} GiB" if is_ours else ""])
    head = ["", "error", "deskewed", "half of the pixels hidden", "the same, deskewed", "half filled with means"]
    head += ["calibration error", "fit", "10,000 images", "memory"]
    return [
        "**MNIST** (official split; error with raw pixels and with digits sheared upright; the rest with raw pixels;"
        " GEODE timed alone on the machine, the others beside other work), `python -m benchmarks.mnist` and"
        " `python -m benchmarks.mnist --deskew`:",
        "",
        *_table(head, rows),
    ]


def _mnist_validation() -> list[str]:
    record = _load("mnist_validation")
    lines = [
        "**MNIST, where choices were made** (50,000 training images, the other 10,000 held out; timed beside other"
        f" work), `{record['command']}`:",
        "",
        "| | error | calibration error | mean -log probability | fit | 10,000 images |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        cells = [row["method"], f"{row['error_percent']:.2f}%", f"{row['calibration_error']:.4f}"]
        cells += [f"{row['negative_log_probability']:.4f}"]
        cells += [f"{row['fit_seconds']:.0f} s", f"{row['predict_seconds']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _features_time() -> list[str]:
    record = _load("features_time")
    settings = record["settings"]
    lines = [
        f"**Each stage against the number of features** (the paper's figure 1; {settings['rows']} rows, one tree, 500 +"
        f" 500 sweeps, nothing compiled), `{record['command']}`, drawn by `python -m benchmarks.figures`:",
        "",
        "![Seconds of each stage against D](../notebooks/features_time.png)",
        "",
    ]
    rows = [
        [row["method"], str(row["features"]), f"{row['stage_one_s']:.1f}", f"{row['stage_two_s']:.1f}"]
        for row in sorted(record["rows"], key=lambda row: row["method"])
    ]
    return lines + _table(["method", "D", "stage one, s", "stage two, s"], rows)


def _inclusion() -> list[str]:
    record = _load("inclusion")
    lines = [
        f"**Directions in use** (the paper's figure 3), {record['settings']['rank']} offered, `{record['command']}`."
        " The paper's removal test, and the posterior of the intrinsic dimension; on the roll the default finds a"
        " shared span of three directions, and offers no more.",
        "",
        "![Probability that each direction is in use, and of each intrinsic dimension](../notebooks/inclusion.png)",
        "",
    ]
    rows = [
        [
            row["data"],
            str(row["truth"]),
            row["method"],
            f"{row['excluded_redundant']:.1%}",
            str(int(np.argmax(row["dimension"]))),
        ]
        for row in record["rows"]
    ]
    head = ["data", "dimension", "method", "mean probability that a redundant direction is out", "posterior mode"]
    return lines + _table(head, rows)


_PARABOLA = (
    "**The METIS tree of a noisy parabola** (the paper's appendix):\n\n"
    "![Cells of a parabola at four scales](../notebooks/parabola.png)"
)


def _truncation() -> list[str]:
    record = _load("truncation")
    settings = record["settings"]
    lines = [
        "**What a finite tree and finite ranks lose, a priori** (the paper's two theorems): expected total variation"
        f" distance between a density from the prior and the same cut off, {settings['draws']} densities; bound by"
        f" `geode_jax.truncation`, `{record['command']}`:",
        "",
    ]
    rows = [
        [
            row["prior"],
            f"{row['cut']} {row['at']}",
            f"{row['bound']:.1e}",
            f"{row['measured']:.1e} ± {row['standard_error']:.0e}",
        ]
        for row in record["rows"]
    ]
    return lines + _table(["prior", "cut at", "bound", "measured"], rows)


def _literal() -> list[str]:
    record = _load("literal")
    settings = record["settings"]
    lines = [
        "**The paper's sampler as printed**, one row and node after the other in NumPy, against ours with the same"
        f" settings (Frey faces, rank {settings['rank']}, depth {settings['depth']}; means over 200 sweeps there and"
        " 1000 here, in which a scale that holds hardly a row may be taken up for a while),"
        f" `{record['command']}`: a sweep takes {1000 * settings['sweep_literal_seconds']:.0f} ms there and"
        f" {1000 * settings['sweep_ours_seconds']:.2f} ms here, **{settings['ratio']:.0f} times** less.",
        "",
        "| scale | log sigma, as printed | ours | share of the rows, as printed | ours |",
        "|---|---|---|---|---|",
    ]
    keys = ("log_sigma_literal", "log_sigma_ours", "share_literal", "share_ours")
    lines += [f"| {row['scale']} | {' | '.join(f'{row[key]:.3f}' for key in keys)} |" for row in record["rows"]]
    return lines


def _sweep() -> list[str]:
    record = _load("sweep")
    rows = record["rows"]
    columns = [name for name in rows[0] if name.endswith(" ms")]
    lines = [
        "**A sweep against its floor**, reading the squared coordinates once (float32, one tree, one chain;"
        f" milliseconds), `{record['command']}`:",
        "",
        f"| rows x nodes x rank | {' | '.join(name.removesuffix(' ms') for name in columns)} | sweep over floor |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for row in rows:
        values = " | ".join(f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {row['rows']} x {row['nodes']} x {row['rank']} | {values} | **{row['ratio']:.2f}** |")
    return lines


def _devices() -> list[str]:
    record = _load("devices")
    settings = record["settings"]
    lines = [
        f"**Two devices against one**, {settings['trees']} trees of {settings['chains']} chains; a device is a core"
        " with one thread, and both share one bus to the memory, which alone limits the larger problem,"
        f" `{record['command']}`:",
        "",
    ]
    rows = [
        [
            f"{row['rows']} x {row['nodes']} x {row['rank']}",
            row["devices"],
            f"{row['sweep ms']:.1f}",
            f"{row['speed']:.2f}",
        ]
        for row in record["rows"]
    ]
    return lines + _table(["rows x nodes x rank", "devices", "a sweep, ms", "speed, one device being 1"], rows)


def _smoothness() -> list[str]:
    record = _load("smoothness")
    rows = record["rows"]
    fixed, tuned = (np.mean([row[key] for row in rows], axis=0) for key in ("mpcr_fixed", "mpcr_tuned"))
    ours = np.array([row["geode"] for row in rows])
    scales = " | ".join(f"scale {scale}" for scale in range(fixed.size))
    error = ours.std(ddof=1) / np.sqrt(ours.size)
    return [
        f"**Regression without a scale chosen by hand** (the paper's section 4.1: three subspaces of dimension 3, 5, 7"
        f" in D = 10000, 1000 training rows, {len(rows)} replicates; mean squared error of one feature given the"
        f" others, the noise variance being 1), `{record['command']}`. GEODE: **{ours.mean():.3f}** (standard"
        f" error {error:.3f}),"
        f" {np.mean([row['coverage95'] for row in rows]):.1%} of the truth within 95% intervals,"
        f" {np.mean([row['fit_seconds'] for row in rows]):.0f} s to fit.",
        "",
        f"| multiscale principal component regression | {scales} |",
        "|---|" + "---|" * fixed.size,
        f"| {record['settings']['fixed_components']} components | {' | '.join(f'{value:.3f}' for value in fixed)} |",
        f"| as many as cross-validation says | {' | '.join(f'{value:.3f}' for value in tuned)} |",
    ]


def render_results() -> str:
    """The README's section between the two markers."""
    measured = f"Measured on {_machine(_load('frey_inpainting'))}."
    return "\n".join([START, "", *_summary(), "", _proofs_in_short(), "", measured, "", END])


def render_details() -> str:
    """The whole of benchmarks/README.md."""
    lines = [
        "# Benchmarks",
        "",
        "One script per question: `python -m benchmarks list` names them, and `python -m benchmarks run NAME"
        " [--quick]` runs one, from the root of the checkout. `--quick` is a tiny size that the tests run. Results go"
        " to `results/NAME.json` with versions, machine and settings; `python -m benchmarks.readme` writes the tables"
        " of the README and this page. Frey faces are not ours to redistribute: name their folder with `--data` or"
        " `GEODE_JAX_DATA`.",
        "",
        *_frey(),
        "",
        *_frey_missing(),
        "",
        *_missing_patterns(),
        "",
        *_missing_time(),
        "",
        *_digits(),
        "",
        *_swiss_roll(),
        "",
        *_dimension(),
        "",
        *_mnist(),
        "",
        *_mnist_validation(),
        "",
        *_real_data(),
        "",
        *_smoothness(),
        "",
        *_scenarios(),
        "",
        *_tree_rows(),
        "",
        *_candidates(),
        "",
        *_scaling(),
        "",
        *_thinning(),
        "",
        *_memory(),
        "",
        *_stage_one("digits", "digits"),
        *_stage_one("faces", "Frey faces"),
        *_choices(),
        "",
        *_proofs(),
        "",
        *_features_time(),
        "",
        *_inclusion(),
        "",
        _PARABOLA,
        "",
        *_truncation(),
        "",
        *_literal(),
        "",
        *_sweep(),
        "",
        *_devices(),
        "",
        _speed_of_draws(),
        "",
        *_mixing(),
        *_suite(),
        "",
        f"Measured on {_machine(_load('proofs'))}.",
        "",
    ]
    # every table's bold beginning is a heading too, for the contents of the page
    return re.sub(r"(?m)^\*\*(.+?)\*\*(.*)$", r"## \1\n\n\1\2", "\n".join(lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options = parser.parse_args(arguments)
    readme, details = ROOT / "README.md", ROOT / "benchmarks" / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    pages = {readme: before + render_results() + after, details: render_details()}
    if options.check:
        return int(any(not path.exists() or path.read_text() != page for path, page in pages.items()))
    for path, page in pages.items():
        path.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
