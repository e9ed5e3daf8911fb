"""Write the results section of README.md, and benchmarks/README.md, from the JSON files in benchmarks/results.

python -m benchmarks.readme [--check]
"""

import argparse
import re
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks import (
    candidates,
    changes,
    choices,
    compile_time,
    contention,
    coverage,
    devices,
    digits_density,
    dimension,
    features_time,
    frey_inpainting,
    frey_missing,
    gpu,
    gpu_compile,
    inclusion,
    kinds,
    literal,
    memory,
    missing_time,
    mixed_units,
    mixing,
    mnist,
    moments,
    noise_prior,
    partition_calls,
    processes,
    proofs,
    real_data,
    refined_cuts,
    run_length,
    scaling,
    scenarios,
    smoothness,
    soak,
    stage_one,
    sweep,
    swiss_roll,
    thinning,
    tree_rows,
    truncated_gamma,
    truncation,
    whole_fit,
    wide,
)
from benchmarks.common import RESULTS, ROOT
from benchmarks.tables import finished, load, mean_of, table

NUM_TEST_IMAGES = 10_000  # of MNIST
START, END = "<!-- results: python -m benchmarks.readme -->", "<!-- end of results -->"
# What the README shows of the summary; benchmarks/README.md has all of it.
IN_README = (
    "Frey faces, half hidden, mean abs. error",
    "the same, 20% missing in training too",
    "digits, held-out nats per image",
    "Swiss roll in D = 200, bent, held-out nats",
    "MNIST, raw, error (depth 6)",
    "LFW faces, half hidden, mean abs. error",
    "flower, 80 x 80, colour, half hidden, mean abs. error",
    "breast cancer, columns as they come, held-out nats",
    "diabetes, repeated values spread, columns as they come, held-out nats",
    "iris, columns as they come, held-out nats",
)

# Experiments in the order of the page, by what they are about.
GROUPS = {
    "Accuracy against rivals": (
        frey_inpainting,
        digits_density,
        swiss_roll,
        mnist,
        real_data,
        kinds,
        mixed_units,
        smoothness,
        scenarios,
    ),
    "Missing values and intervals": (frey_missing, missing_time, coverage),
    "What a posterior tells": (dimension, inclusion, moments, mixing),
    "Correctness": (proofs, soak, literal, truncation),
    "Time and memory": (
        whole_fit,
        sweep,
        compile_time,
        contention,
        scaling,
        features_time,
        memory,
        truncated_gamma,
    ),
    "Large data, several devices": (wide, candidates, tree_rows, processes, devices, gpu, gpu_compile),
    "Choices and defaults": (
        stage_one,
        choices,
        noise_prior,
        refined_cuts,
        run_length,
        thinning,
        partition_calls,
    ),
}
EXPERIMENTS = tuple(experiment for group in GROUPS.values() for experiment in group)

_WIDE = "a noise covariance was not yet tried where features are at least twice as many as rows"
_FILLS = "training rows that miss values would be filled in slightly differently today"
# What of an experiment's results is older than the last changes to the method, printed under its tables.
OLDER = {
    "scenarios": f"When 5000 and 10,000 features were run {_WIDE}; {_FILLS} there.",
    "smoothness": f"When this was run {_WIDE}; the first replicate came out the same with it.",
    "dimension": f"When the simulated data were run {_WIDE}; all came out the same with it.",
    "wide": f"When this was run {_WIDE}.",
    "features_time": f"When this was run {_WIDE}.",
    "refined_cuts": "Diabetes would have a unit for each column in every split today.",
    "contention": f"Of rows with missing values: a noise covariance was not yet tried, and {_FILLS}.",
    "gpu": "Of iris and the curved sheet: every second tree has refined cuts today.",
}
# What was not timed alone on the machine of the other tables, or would be otherwise today; printed there too.
TIMED = {
    "digits_density": "Ours were timed on a machine about half as quick as the rivals'.",
    "swiss_roll": "Ours were timed on a machine about half as quick as the others', the flat default also beside tests,"
    " and the mixture after PCA beside other work.",
    "kinds": "Ours and the rivals compared row by row were timed on a machine about half as quick as the others', some"
    " beside tests.",
    "real_data": "Ours and the rivals compared row by row were timed on a slower machine.",
    "mnist": "`--validate`, and the rivals of the rest, were timed beside other work.",
    "smoothness": "Timed beside other work.",
    "scaling": "Filling in was timed on a machine about half as quick as that of the rest, and so was its floor, in the"
    " same minutes.",
    "scenarios": "Timed beside other work, and those with 15,000 features on a slower machine.",
    "memory": "Timed beside other work.",
    "run_length": "Timed beside other work.",
    "frey_missing": "Ours with missing values, all of the second split, KNNImputer and the Gaussian process were timed"
    " on a machine about half as quick as the other rows'; the other rivals beside other work.",
    "whole_fit": "First fits would be a little quicker today: a single chain takes JAX less time to trace. So would be"
    " filling in digits, Frey faces and the curved sheet: matrices are multiplied where LAPACK was called, and fewer"
    " nodes are looked at with all directions.",
    "compile_time": "First sweeps would be a little quicker today: a single chain takes JAX less time to trace.",
}
_FRONTS = (
    "## How good, and how long\n\nNo method that was tried on all sets of a kind is both better and quicker"
    " than one on the line, which `python -m benchmarks.figures` draws from the tables below. Seconds are medians,"
    " of fits, and of filling in where errors are shown; those of small tables were measured beside other"
    " work.\n\n![Loss"
    " against seconds, of all methods on four kinds of data](../notebooks/fronts.png)"
)
_PARABOLA = (
    "### The METIS tree of a noisy parabola\n\n"
    "As in the paper's appendix. A cell may lie in two pieces:\n\n"
    "![Cells of a parabola at four scales](../notebooks/parabola.png)"
)


def _best_rival(rows: list[dict[str, Any]], key: str, ours: tuple[str, ...], *, lowest: bool) -> tuple[float, str]:
    """The best mean among the methods that are not `ours`, and whose it is."""
    names = {row["method"] for row in rows if key in row and not row["method"].startswith(ours)}
    sign = 1.0 if lowest else -1.0
    value, name = min((sign * mean_of(rows, name, key), name) for name in names)
    return sign * value, name


_OF_FITS = ("seconds", "fit_seconds", "stage_one_seconds", "sampler_seconds")
_OF_FILLING_IN = ("impute_seconds", "predict_seconds")


def _typical_seconds(rows: list[dict[str, Any]], method: str, parts: tuple[str, ...]) -> float:
    """Median over a method's rows of the sum of these parts, of the rows that have any."""
    own = [[row[part] for part in parts if part in row] for row in rows if row["method"] == method]
    return float(np.median([sum(seconds) for seconds in own if seconds]))


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _line(
    task: str,
    script: str,
    rival: tuple[float, str, float | None],
    ours: tuple[float, float | None],
    digits: int,
    *,
    error: float = 0.0,
    unit: str = "",
    paper: str = "",
    lowest: bool = True,
) -> list[str]:
    """The cells of a task: the rival's value, name and seconds, and ours.

    The better value is bold; both are where they differ by less than two standard errors, or not in print. `error`: the
    standard error of the difference; 0 where it is not known.
    """
    texts = [f"{value:.{digits}f}{unit}" for value in (rival[0], ours[0])]
    is_tied = texts[0] == texts[1] or abs(ours[0] - rival[0]) < 2.0 * error
    is_best = ours[0] < rival[0] if lowest else ours[0] > rival[0]
    theirs, own = (
        f"**{text}**" if is_tied or first else text for text, first in zip(texts, (not is_best, is_best), strict=True)
    )
    seconds = ["" if value is None else _seconds(value) for value in (rival[2], ours[1])]
    return [task, paper, f"{theirs} ({rival[1]})", seconds[0], own, seconds[1], f"`{script}`"]


def _standard_error(rows: list[dict[str, Any]], ours: str, rival: str, key: str) -> float:
    """Of the difference between two methods: as recorded, or over splits that both had; 0 where it is not known."""
    own = [row for row in rows if row["method"] == rival and key in row]
    recorded = [row["error of the difference"] for row in own if "error of the difference" in row]
    recorded += [row["against ours"][key]["gain_se"] for row in own if key in row.get("against ours", {})]
    if recorded:
        return float(np.mean(recorded))
    places = [name for name in ("split", "seed", "scenario", "replicate") if name in rows[0]]
    if not places:
        return 0.0
    of_split = [
        {tuple(row[place] for place in places): row[key] for row in rows if row["method"] == name and key in row}
        for name in (ours, rival)
    ]
    shared = sorted(set(of_split[0]) & set(of_split[1]))
    if len(shared) < 3:
        return 0.0
    differences = np.array([of_split[0][split] - of_split[1][split] for split in shared])
    return float(differences.std(ddof=1) / np.sqrt(len(shared)))


class Comparison(NamedTuple):
    """A line of the summary, and the standard error of the difference; 0 where it is not known."""

    cells: list[str]
    error: float


def _comparisons() -> list[Comparison]:
    """One line per task: the paper, the best rival, ours."""
    lines: list[Comparison] = []

    def add(
        task: str,
        script: str,
        rows: list[dict[str, Any]],
        key: str,
        digits: int,
        *,
        ours: str = "GEODE",
        no_rivals: tuple[str, ...] = (),
        lowest: bool = True,
        **more: str,
    ) -> None:
        """The best of the methods that are neither `ours` nor `no_rivals`, and ours, by `key`."""
        value, rival = _best_rival(rows, key, (ours, *no_rivals), lowest=lowest)
        parts = (*_OF_FITS, *_OF_FILLING_IN) if lowest else _OF_FITS  # errors are of what was filled in or predicted
        theirs = value, rival, _typical_seconds(rows, rival, parts)
        own = mean_of(rows, ours, key), _typical_seconds(rows, ours, parts)
        error = _standard_error(rows, ours, rival, key)
        if key == "error_percent":  # of as many test images; that of the difference is at most this
            error = float(100 * np.sqrt((value + own[0]) / 100 / NUM_TEST_IMAGES))
        cells = _line(task, script, theirs, own, digits, error=error, lowest=lowest, **more)
        lines.append(Comparison(cells, error))

    record = load("frey_inpainting")
    frey, paper = finished(record["rows"], len(record["settings"]["seeds"])), str(record["settings"]["paper_mae"])
    task = "Frey faces, half hidden, mean abs. error"
    add(task, "frey_inpainting", frey, "mae", 2, ours="default", no_rivals=("published",), paper=paper)
    at = [row for row in load("frey_missing")["rows"] if row.get("missing") == 0.2]
    add("the same, 20% missing in training too", "frey_missing", at, "mae", 2)
    record = load("digits_density")
    images = finished(record["rows"], record["settings"]["splits"])
    own = {"ours": "default, 8 trees", "no_rivals": ("published", "one tree"), "lowest": False}
    add("digits, held-out nats per image", "digits_density", images, "nats", 1, **own)
    for shape in ("flat", "bent"):
        roll = [row for row in load("swiss_roll")["rows"] if row["shape"] == shape]
        own = {"ours": "default", "no_rivals": ("published", "oracle"), "lowest": False}
        add(f"Swiss roll in D = 200, {shape}, held-out nats", "swiss_roll", roll, "nats", 2, **own)
    for name, what, paper in (("mnist", "raw", "2.32%"), ("mnist_deskewed", "deskewed", "")):
        images = load(name)["rows"]
        script = "mnist" if name == "mnist" else "mnist --deskew"
        own = {"ours": images[0]["method"], "no_rivals": ("published",), "unit": "%", "paper": paper}
        add(f"MNIST, {what}, error (depth 6)", script, images, "error_percent", 2, **own)
    for script, digits in (("real_data", 2), ("kinds", 3)):
        real = load(script)["rows"]
        for data in dict.fromkeys(row["data"] for row in real):
            own = [row for row in real if row["data"] == data]
            add(f"{data}, half hidden, mean abs. error", script, own, "mae", digits)
            if any("nats_per_feature" in row for row in own):
                add("the same, held-out nats per feature", script, own, "nats_per_feature", 2, lowest=False)
    mixed = load("mixed_units")["rows"]
    for data in dict.fromkeys(row["data"] for row in mixed):
        own = [row for row in mixed if row["data"] == data]
        add(f"{data}, columns as they come, held-out nats", "mixed_units", own, "nats", 2, lowest=False)
    smooth = load("smoothness")["rows"]
    tuned = np.mean([row["mpcr_tuned"] for row in smooth], axis=0)
    seconds = [
        float(np.median([sum(row[part] for part in parts) for row in smooth]))
        for parts in (("mpcr_seconds",), ("fit_seconds", "predict_seconds"))
    ]
    theirs = float(tuned.min()), f"MPCR at its best scale, {int(tuned.argmin())}", seconds[0]
    ours = float(np.mean([row["geode"] for row in smooth])), seconds[1]
    differences = np.array([row["geode"] - row["mpcr_tuned"][int(tuned.argmin())] for row in smooth])
    error = float(differences.std(ddof=1) / np.sqrt(len(smooth)))
    cells = _line("regression in D = 10000, MSE over noise", "smoothness", theirs, ours, 3, error=error)
    lines.append(Comparison(cells, error))
    record = load("scenarios")
    nine = scenarios.with_ours(record["rows"])
    task = f"nine scenarios in D = {record['settings']['features']}, MSE over noise"
    # the forest has the first replicates only
    for name, share in ((task, 0.0), ("the same nine, 20% missing in training", 0.2)):
        own = [row for row in nine if row["missing"] == share]
        add(name, "scenarios", own, "mse", 3, no_rivals=("random forest",))
    return lines


def _summary(tasks: tuple[str, ...] | None = None) -> list[str]:
    """The table of all tasks, or of some of them."""
    head = ["task", "the paper", "best rival", "its seconds", "GEODE", "seconds", "`python -m benchmarks run`"]
    cells = [line.cells for line in _comparisons()]
    return table(head, [line for line in cells if tasks is None or line[0] in tasks])


def _score() -> str:
    """How many tasks there are, and in how many ours is ahead: alone in bold."""
    every = _comparisons()
    counts = []
    for lines in ([line for line in every if line.error > 0.0], [line for line in every if line.error == 0.0]):
        bold = [tuple("**" in line.cells[column] for column in (2, 4)) for line in lines]
        counts.append([bold.count(pair) for pair in ((False, True), (True, True), (True, False))])
    (ahead, level, behind), (better, equal, worse) = counts
    return (
        f"the {len(every)} comparisons of [the results page](benchmarks/README.md#in-short). Where a standard error is"
        f" known, GEODE is ahead in {ahead}, level in {level}, and behind in {behind}; in the other"
        f" {better + equal + worse} its number is better in {better}, equal in {equal}, and worse in {worse}. Most data"
        " sets count twice, by their density and by the error of filling in. Three defaults were chosen on random"
        " splits of iris, wine, breast cancer and diabetes, so results on these are a little flattering: whether cuts"
        " of trees are refined, how strong the prior of the noise is, and when columns get units of their own."
    )


def _run_times() -> list[str]:
    """How long fits take, for the README."""
    record = load("whole_fit")
    imported = record["settings"]["import seconds"]
    rows = [
        [
            row["data"],
            f"{row['rows']} x {row['features']}",
            f"{_seconds(imported + row['fit, first'])} s",
            f"{_seconds(row['stage one, again'] + row['sampler, again'])} s",
            f"{row['milliseconds a row']:.1f} ms",
        ]
        for row in record["rows"]
    ]
    most = max(load("candidates")["rows"], key=lambda row: row["rows"])
    minutes = (most["stage one seconds"] + most["sampler seconds"]) / 60
    head = ["data", "rows x columns", "first fit, with imports", "the next", "fill in a row"]
    text = (
        "With defaults on 2 CPU cores (`python -m benchmarks run whole_fit`). The first fit of a process compiles;"
        " [run time](notebooks/guides/run_time.md) says how to keep what was compiled. *Fill in a row*: half of its"
        " values are hidden; with intervals, per row of a call with 200, after compilation. *China*: patches of a"
        " photograph that scikit-learn ships; *curved sheet*: a simulated sheet of two dimensions, bent in 20. One"
        f" tree of {most['rows']:,} rows in 100 dimensions took {minutes:.0f} minutes (`candidates`; timed beside"
        " other work)."
    )
    return ["## How long it takes", "", text, "", *table(head, rows), "", _on_gpu()]


def _on_gpu() -> str:
    """What a GPU makes of it, for the README."""
    digits, (images,) = gpu.rows_of("fits", data="digits", platform="gpu")[0], gpu.rows_of("classes", platform="gpu")
    large, chosen = gpu.rows_of("sweeps")[-1], next(iter(mnist.CONFIGURATIONS))
    on_cpu = next(row for row in load("mnist_validation")["rows"] if row["method"].endswith(chosen))
    return (
        f"With an {large['device']} (`python -m benchmarks run gpu`) a sweep of {large['rows']:,} rows takes"
        f" {large['sweep ms']:.1f} ms, and {digits['milliseconds a row']:.1f} ms fill in a row of digits. Sweeps and"
        " predictions of all but small tables gain much; a first fit gained nothing on any data that were tried. MNIST"
        f" by class, {images['rows']:,} images, took {images['fit seconds']:.0f} s ({on_cpu['fit_seconds']:.0f} s on"
        f" two CPU cores, beside other work), and a first fit of digits {digits['fit, first']:.0f} s without imports,"
        f" longer than on two CPU cores. The sampler took {digits['sampler, again']:.1f} s of it; the rest was stage"
        " one, on the CPU, and compilation. Wide pictures were not tried."
    )


def _proofs_in_short() -> str:
    record = load("proofs")
    bugs = [row for row in record["rows"] if row["bug"] not in ("none", "published shrinkage")]
    caught = sum(any(row[name] for name in ("identity", "draw", "joint", "calibration")) for row in bugs)
    return (
        f"**Proofs of the sampler**: {caught} of {len(bugs)} planted bugs are caught, the largest of the joint test's z"
        f" statistics is {record['rows'][0]['joint_z']:.1f} (limit {record['rows'][0]['joint_limit']:.1f}), and NUTS on"
        f" an independent model agrees. [benchmarks/README.md](benchmarks/README.md) has the table of tests and bugs,"
        " and how chains mix."
    )


def _durations() -> dict[str, tuple[int, bool]]:
    """Seconds of every experiment that has results, and whether a whole run was timed: else what its rows add up to."""
    timed = {row["experiment"]: row["seconds"] for row in load("suite")["rows"]}
    found = {}
    for module in EXPERIMENTS:
        name = module.__name__.rpartition(".")[2]
        rows = [row for path in RESULTS.glob(f"{name}*.json") for row in load(path.stem)["rows"]]
        seconds = sum(map(_seconds_of, rows))
        if rows:
            found[name] = (timed[name], True) if name in timed else (round(seconds), False)
    return dict(sorted(found.items()))


def _seconds_of(row: dict[str, Any]) -> float:
    """All of a row's seconds where it has them, else the sum of its parts'."""
    parts = [np.sum(value) for key, value in row.items() if key.endswith("seconds")]
    return float(np.sum(row["seconds"])) if "seconds" in row else float(sum(parts))


def _suite() -> list[str]:
    rows = [
        [name, f"{seconds:,}" if is_whole else f"at least {seconds:,}" if seconds else "not timed"]
        for name, (seconds, is_whole) in _durations().items()
    ]
    text = (
        "A full run by `python -m benchmarks run NAME`, or where none was timed the seconds"
        f" that its results record. At least {_hours()} in all."
    )
    return ["", "## What the suite takes", "", text, "", *table(["experiment", "seconds"], rows)]


def _hours() -> str:
    return f"{sum(seconds for seconds, _ in _durations().values()) / 3600:.0f} hours"


def _where() -> str:
    """What the results were measured on, and from when to when."""
    records = [load(path.stem) for path in RESULTS.glob("*.json")]
    dates = sorted(record["date"] for record in records)
    where, versions = load("proofs")["machine"], load("proofs")["versions"]
    return (
        f"{where['cores']} CPU cores, Python {where['python']}, JAX {versions['jax']}, last written from {dates[0]} to"
        f" {dates[-1]}; what was measured on a GPU names its own machine"
    )


def _has_results(experiment: ModuleType) -> bool:
    return any(RESULTS.glob(f"{experiment.__name__.rpartition('.')[2]}*.json"))


def render_results() -> str:
    """The README's section between the two markers."""
    measured = f"Measured on {_where()}; the whole suite takes at least {_hours()} there."
    results = [
        "## Results",
        "",
        f"The table has {len(IN_README)} of {_score()}",
        "",
        "Lower is better for errors, higher for nats: mean log densities of new rows, to be compared within a line"
        " only. Errors of pictures are in grey levels, 0 to 255, and half hidden means pixels at random; *columns as"
        " they come* are not standardised. Both results are bold where they differ by less than two standard errors,"
        " as far as these are known."
        " Seconds are medians: of the fit, and where the score is an error of filling in or predicting too. They are"
        " rough: some were taken beside other work or on a slower machine, and the first fit of a process"
        " compiles. [Every table](benchmarks/README.md) behind this, and which of them are older"
        " than the code.",
        "",
        *_summary(IN_README),
    ]
    return "\n".join([START, "", *_run_times(), "", *results, "", _proofs_in_short(), "", measured, "", END])


def _section(experiment: ModuleType) -> list[str]:
    """An experiment's tables, and under them its commands and when their last results were written."""
    name = experiment.__name__.rpartition(".")[2]
    others = {other.__name__.rpartition(".")[2] for other in EXPERIMENTS} - {name}
    records = [load(path.stem) for path in sorted(RESULTS.glob(f"{name}*.json")) if path.stem not in others]
    commands: dict[str, str] = {}
    for record in records:
        command = _whole_command(record["command"])
        commands[command] = max(record["date"], commands.get(command, ""))
    told = "; ".join(f"`{command}`, {date}" for command, date in commands.items())
    notes = [kind[name] for kind in (OLDER, TIMED) if name in kind]
    return [*experiment.tables(), "", " ".join([f"*{told}.*", *notes]), ""]


def _whole_command(command: str) -> str:
    """A command without the options that say which part of an experiment was run last."""
    return re.sub(r" --(fresh\b|(only|parts|kinds|platforms|data)( (?!--)\S+)+)", "", command)


def _contents() -> list[str]:
    """Links to the groups and their sections."""
    lines = []
    for group, experiments in GROUPS.items():
        titles = [
            line.removeprefix("### ")
            for experiment in experiments
            if _has_results(experiment)
            for line in experiment.tables()
            if line.startswith("### ")
        ]
        lines.append(f"- [{group}](#{_anchor(group)}): " + ", ".join(f"[{it}](#{_anchor(it)})" for it in titles))
    return lines


def _anchor(title: str) -> str:
    """What GitHub and MkDocs make of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def render_details() -> str:
    """The whole of benchmarks/README.md."""
    lines = [
        "# Benchmarks",
        "",
        "One script per question: `python -m benchmarks list` names them, and `python -m benchmarks run NAME"
        " [--quick]` runs one, from the root of the checkout. `--quick` is a tiny size that the tests run. Results go"
        " to `results/NAME.json` with versions, machine and settings; `python -m benchmarks.readme` writes the tables"
        " of the README and this page. Frey faces and MNIST are not ours to redistribute: name their folder with"
        " `--data` or `GEODE_JAX_DATA`. `pip install '.[rivals]'` brings what some experiments measure beside ours.",
        "",
        "A *nat* is the unit of a natural logarithm: mean log densities of new rows are in nats per row, the higher the"
        " better, and tell methods apart on the same data only. An empty cell: the method cannot do it, or it was not"
        " tried.",
        "",
        *_contents(),
        "",
        "## In short",
        "",
        "The best rival of every task, and ours; both are bold where they differ by less than two standard errors, as"
        " far as these are known, or are equal as printed. Standard errors are over splits, or over the held-out rows"
        " of one split (`real_data`, `kinds`, `mixed_units`): those rows overlap in pictures and follow each other in"
        " spectra, and the errors are then too small. Seconds are medians: of the fit, and where the score is an error"
        " of filling in or predicting too; ours in `swiss_roll` are with both.",
        "",
        *_summary(),
        "",
        "## Which tables are older than the code",
        "",
        "Every section ends with the day when the last of its results was written; some rows may be older, as runs go"
        " on where earlier ones ended. Notes there say which results lack the last changes to the method, and what was"
        " timed beside other work or on a slower machine. Older, in part at least, are"
        f" {', '.join(f'`{name}`' for name in sorted(OLDER))}. Besides, what was fitted before 2026-11-29 has another"
        " centre in cells whose rows are all of one fold (few of the smallest cells) and, where classes have missing"
        " values, other first fills. Until the evening of 2026-11-30 tables of more than 4000 rows were judged on other"
        " samples of their rows, first fills of missing training values were chosen on other held-out values, and rows"
        " of which little is seen had too low a density and were filled in from six nodes a tree. MNIST with hidden"
        " pixels was classified by six nodes a tree only.",
        "",
        *_section(changes),
        _FRONTS,
        "",
    ]
    for group, experiments in GROUPS.items():
        lines += [f"## {group}", ""]
        lines += [line for experiment in experiments if _has_results(experiment) for line in _section(experiment)]
    lines += [_PARABOLA, *_suite(), "", f"Measured on {_where()}.", ""]
    return "\n".join(lines)


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
