"""The commands of ``python -m geode_jax``: fit a density to a file, and apply it to others in chunks of rows."""

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.errors import JaxRuntimeError
from tqdm import tqdm

from geode_jax._files.whole import mode_of_replaced
from geode_jax._version import __version__
from geode_jax.cli.tables import Choice, Table, TableError, TextFormat, check_new_table, new_table, open_table
from geode_jax.demo import digits
from geode_jax.estimators.density import GeodeDensity

OK, FAILED, INTERRUPTED = 0, 1, 130
_SAMPLE_ROWS = 1000  # drawn at a time

_DESCRIPTION = """\
Bayesian multiscale density estimation (GEODE) of tables of numbers.

Tables are .npy, .npz (one array, or one called X), .csv and .tsv (with or without a line of names) and .parquet files,
a row per observation. NaN, an empty cell, NA, N/A, null, none and ? are missing values, in training and afterwards.
"""

_EXAMPLES = """\
examples:
  python -m geode_jax fit train.csv model.npz --seed 0
  python -m geode_jax info model.npz
  python -m geode_jax score model.npz new.csv scores.csv --novelty
  python -m geode_jax impute model.npz holes.parquet filled.parquet --interval 0.9
  python -m geode_jax sample model.npz 1000 drawn.npy

In Python the model is geode_jax.GeodeDensity.load("model.npz").

exit codes: 0 done, 1 a file could not be read or written, or does not fit the options, 2 unknown or malformed
arguments, 130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    found = argparse.ArgumentParser(
        prog="python -m geode_jax",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"geode_jax {__version__}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_fit(commands)
    _add_score(commands)
    _add_impute(commands)
    _add_sample(commands)
    _add_info(commands)
    _add_demo(commands)
    return found


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Failures are one line on standard error."""
    options = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int | None] = options.run
    try:
        code = command(options) or OK
        sys.stdout.flush()  # here, as what fails when Python ends cannot be caught
        return code
    except BrokenPipeError:  # whoever read the output, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return FAILED
    except (TableError, ValueError, TypeError, FloatingPointError, MemoryError, OSError, JaxRuntimeError) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        checkpoint = getattr(options, "checkpoint", None)
        kept = "nothing was written" if checkpoint is None else f"the same command goes on from {checkpoint}"
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> Any:
    found = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    found.set_defaults(run=run)
    return found


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text}")
        return value

    return number


_positive = _at_least(1)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:  # NumPy's limit
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32 - 1, got {text}")
    return int(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text}")
    return value


def _add_fit(commands: Any) -> None:
    command = _command(commands, "fit", _fit, "fit a density to a table and save the model")
    command.add_argument("data", type=Path, help="table of training rows")
    _add_table_format(command)
    command.add_argument("model", type=Path, help="where to save the model, an .npz file without pickle")
    command.add_argument("--seed", type=_seed, default=None, help="seed of everything random (default: new each time)")
    defaults = GeodeDensity().get_params()
    for option, name, text in (
        ("--trees", "num_trees", "trees that are averaged"),
        ("--chains", "num_chains", "chains per tree"),
        ("--warmup", "num_warmup", "sweeps before the draws that are kept"),
        ("--draws", "num_samples", "draws that are kept per chain"),
        ("--max-rank", "max_rank", "directions per node"),
        ("--depth", "depth", "scales of a tree below the root"),
    ):
        default = defaults[name]
        by_default = {"max_rank": "by held-out rows", "depth": "by the data's shape"}
        said = by_default[name] if default is None else default
        command.add_argument(
            option,
            dest=name,
            type=_at_least(0) if name == "depth" else _positive,
            default=default,
            metavar="N",
            help=f"{text} (default: {said})",
        )
    command.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="precision of the fit")
    command.add_argument(
        "--checkpoint", type=Path, help="folder for the unfinished fit; the same command goes on there"
    )
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _fit(options: argparse.Namespace) -> int:
    _check_place(options.model)
    _check_kept(options.model, options.data)
    table = _table(options, 2**14)
    names = ("num_trees", "num_chains", "num_warmup", "num_samples", "max_rank", "depth", "dtype", "checkpoint")
    model = GeodeDensity(
        **{name: getattr(options, name) for name in names}, progress=not options.quiet, random_state=options.seed
    )
    rows = table.whole()
    model.fit(rows)
    if table.names is not None:
        model.feature_names_in_ = np.asarray(table.names, dtype=object)
    model.set_params(progress=False)
    model.save(options.model)
    num_draws = model.posterior_.num_draws
    if num_draws < options.num_samples:
        what = f"a model with {num_draws} of {options.num_samples} draws per chain"
    elif model.held_out_scores_.size == 0 and _has_complete_rows(rows, model):
        what = "the whole model, but not the densities that --novelty without --calibration compares with,"
    else:
        return OK
    print(f"interrupted: saved {what} to {options.model}", file=sys.stderr)
    return INTERRUPTED


def _has_complete_rows(rows: np.ndarray, model: GeodeDensity) -> bool:
    """Whether any row shows all features that vary."""
    features = model.posterior_.features
    return not np.isnan(rows if features is None else rows[:, features]).any(axis=1).all()


def _add_table_format(command: Any) -> None:
    """Arguments that say which columns of a file are the table, and how a text file holds numbers."""
    command.add_argument(
        "--columns",
        metavar="A,B,...",
        help="names of the columns to use, in order; in quotes if they have commas (default: all)",
    )
    command.add_argument(
        "--index",
        action="store_true",
        help="leave out the index: in a .parquet file of pandas what it stored as one, else the first column",
    )
    command.add_argument("--delimiter", metavar="C", help="between cells (default: a tab in .tsv files, else a comma)")
    command.add_argument("--decimal", default=".", metavar="C", help="decimal sign in text files (default: a point)")
    command.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="whether the first line of a text file holds names (default: if it holds no numbers)",
    )


def _table(
    options: argparse.Namespace, chunk: int, path: Path | None = None, names: Sequence[str] | None = None
) -> Table:
    """The table at `path`, that of the rows if None, in the format that the options state.

    `names`: those of the model's features, which the table should have if no columns are chosen by name.
    """
    delimiter = "\t" if options.delimiter == r"\t" else options.delimiter
    for name, given in (("delimiter", "," if delimiter is None else delimiter), ("decimal", options.decimal)):
        if len(given) != 1:
            raise TableError(f"--{name}: expected one character, got {given!r}")
    columns = None
    if options.columns is not None:  # in quotes where a name has a comma
        try:
            chosen = next(csv.reader([options.columns], skipinitialspace=True), [""])
        except csv.Error as error:
            raise TableError(f"--columns: expected names on one line, got {options.columns!r} ({error})") from None
        columns = tuple(name.strip() for name in chosen)
    if columns is not None and len(set(columns)) < len(columns):
        raise TableError(f"--columns: expected different names, got {options.columns!r}")
    if columns is not None and not any(columns):
        raise TableError(f"--columns: expected names, got {options.columns!r}")
    choice = Choice(columns, options.index)
    known = columns or tuple(name.strip() for name in names or [])
    text = TextFormat(delimiter, options.decimal, options.header, known)
    return open_table(path or options.data, chunk, text, choice)


def _check_kept(output: Path, *inputs: Path | None) -> None:
    """Check that a command does not replace a file that it reads: what was in it would be lost."""
    for path in inputs:
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise TableError(f"{output}: expected another file than {path}, which the command reads")


def _check_place(path: Path) -> None:
    """Check that the model can be saved, before a long fit."""
    if path.suffix.lower() != ".npz" or not path.parent.is_dir():
        raise TableError(f"{path}: expected an .npz file in a folder that exists")
    mode_of_replaced(path)
    if not os.access(path.parent, os.W_OK):
        raise TableError(f"{path}: expected a folder that may be written to")


def _load(path: Path) -> tuple[GeodeDensity, list[str] | None]:
    """The model, and the names of its features if it has them; they are removed from it, as rows come as arrays."""
    model = GeodeDensity.load(path)
    names = getattr(model, "feature_names_in_", None)
    if names is None:
        return model, None
    del model.feature_names_in_
    return model, list(names)


def _chunks(
    table: Table, path: Path, model: GeodeDensity, names: list[str] | None, text: str, quiet: bool
) -> Iterator[np.ndarray]:
    """Chunks of a table, checked to have the model's features, with a progress bar."""
    _check_names(table, path, names)
    with tqdm(total=table.num_rows, disable=quiet, unit="row", desc=text) as bar:
        for rows in table.chunks:
            yield _with_features(rows, path, model)
            bar.update(rows.shape[0])


def _check_names(table: Table, path: Path, names: list[str] | None) -> None:
    if names is None or table.names is None:
        return
    names, found = ([name.strip() for name in both] for both in (names, table.names))  # pandas keeps spaces
    if names == found:
        return
    wanted = ", ".join(sorted(set(names) - set(found))[:5])
    more = ", ".join(name or "one without a name" for name in sorted(set(found) - set(names))[:5])
    told = f"no {wanted} but {more or 'fewer columns'}" if wanted else f"also {more}" if more else "another order"
    raise TableError(f"{path}: expected the columns of the training table, got {told}")


def _with_features(rows: np.ndarray, path: Path, model: GeodeDensity) -> np.ndarray:
    if rows.shape[1] != model.n_features_in_:
        raise TableError(f"{path}: expected {model.n_features_in_} columns, got {rows.shape[1]}")
    return rows


def _add_calibration(command: Any, text: str) -> None:
    command.add_argument("--calibration", type=Path, metavar="TABLE", help=f"rows that were not in the fit: {text}")


def _calibration(options: argparse.Namespace, model: GeodeDensity, names: list[str] | None) -> np.ndarray | None:
    """All rows of the table of calibration rows, None if there is none."""
    path = options.calibration
    if path is None:
        return None
    table = _table(options, 2**14, path, names)
    _check_names(table, path, names)
    return _with_features(table.whole(), path, model)


def _add_stream(command: Any, data: str, output: str) -> None:
    """Arguments of a command that reads a table and writes another; `data` and `output` are their help texts."""
    command.add_argument("model", type=Path, help="a model saved by fit")
    command.add_argument("data", type=Path, help=data)
    command.add_argument("output", type=Path, help=output)
    _add_table_format(command)
    command.add_argument("--chunk", type=_positive, default=1000, metavar="ROWS", help="rows at a time (default: 1000)")
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_score(commands: Any) -> None:
    command = _command(commands, "score", _score, "log density of every row, in nats, under a saved model")
    data = "table of rows; of a row with missing values the others count"
    _add_stream(command, data, "table to write, with the column log_density")
    command.add_argument(
        "--novelty",
        action="store_true",
        help="also a column novelty: the share of training rows that are as unlikely; without --calibration, no row may"
        " have missing values",
    )
    _add_calibration(command, "novelty compares with these, not with training rows")


def _score(options: argparse.Namespace) -> None:
    if options.calibration is not None and not options.novelty:
        raise TableError("--calibration: expected --novelty with it")
    check_new_table(options.output)
    _check_kept(options.output, options.model, options.data, options.calibration)
    model, names = _load(options.model)
    table = _table(options, options.chunk, names=names)
    known = _calibration(options, model, names)
    columns = ["log_density", "novelty"] if options.novelty else ["log_density"]
    with new_table(options.output, table.num_rows, columns) as write:
        for rows in _chunks(table, options.data, model, names, "scoring", options.quiet):
            found = [model.score_samples(rows)]
            if options.novelty:
                found.append(model.novelty(rows, known))
            write(np.stack(found, axis=1))


def _add_impute(commands: Any) -> None:
    command = _command(commands, "impute", _impute, "fill missing values by their conditional means")
    _add_stream(command, "table with missing values", "table to write, with the same columns")
    command.add_argument(
        "--interval",
        type=_share,
        metavar="P",
        help="also columns NAME_lower and NAME_upper: central intervals of this probability; observed values are both",
    )
    _add_calibration(command, "intervals are calibrated on these, for every chunk by what its rows miss")


def _impute(options: argparse.Namespace) -> None:
    if options.calibration is not None and options.interval is None:
        raise TableError("--calibration: expected --interval with it")
    check_new_table(options.output)
    _check_kept(options.output, options.model, options.data, options.calibration)
    model, names = _load(options.model)
    table = _table(options, options.chunk, names=names)
    known = _calibration(options, model, names)
    names_out = table.names or names or _numbered(model)
    columns = list(names_out)
    if options.interval is not None:
        columns += [f"{name}_lower" for name in names_out] + [f"{name}_upper" for name in names_out]
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise TableError(f"--interval: expected no column {twice[0]!r}, the name of a column of intervals")
    with new_table(options.output, table.num_rows, columns) as write:
        for rows in _chunks(table, options.data, model, names, "imputing", options.quiet):
            found = model.impute(rows, options.interval, known)
            write(found if isinstance(found, np.ndarray) else np.concatenate(found, axis=1))


def _numbered(model: GeodeDensity) -> list[str]:
    return [f"x{number}" for number in range(model.n_features_in_)]


def _add_sample(commands: Any) -> None:
    command = _command(commands, "sample", _sample, "draw new rows from a saved model")
    command.add_argument("model", type=Path, help="a model saved by fit")
    command.add_argument("rows", type=_positive, help="number of rows to draw")
    command.add_argument("output", type=Path, help="table to write")
    command.add_argument("--seed", type=_seed, default=None, help="seed of the draws (default: new each time)")


def _sample(options: argparse.Namespace) -> None:
    check_new_table(options.output)
    _check_kept(options.output, options.model)
    model, names = _load(options.model)
    generator = np.random.RandomState(options.seed)
    model.set_params(random_state=generator)  # its state carries over from chunk to chunk
    with new_table(options.output, options.rows, names or _numbered(model)) as write:
        for start in range(0, options.rows, _SAMPLE_ROWS):
            write(model.sample(min(_SAMPLE_ROWS, options.rows - start)))


def _add_info(commands: Any) -> None:
    command = _command(commands, "info", _info, "what a saved model is and what it found")
    command.add_argument("model", type=Path, help="a model saved by fit")
    command.add_argument("--json", action="store_true", help="print as JSON")


def _info(options: argparse.Namespace) -> None:
    model, names = _load(options.model)
    posterior = model.posterior_
    found = {
        "features": model.n_features_in_,
        "feature_names": names,
        "complete_training_rows": int(model.held_out_scores_.size),
        "trees": posterior.num_trees,
        "depth": posterior.dictionary.tree.depth,
        "directions_per_node": posterior.dictionary.max_rank,
        "chains_per_tree": posterior.num_chains,
        "draws_per_chain": posterior.num_draws,
        "precision": posterior.dtype.name,
        "intrinsic_dimension": posterior.intrinsic_dimension,
        "weight_of_scales": posterior.scale_weights.mean(axis=(0, 1, 2)).round(4).tolist(),
        "noise_of_scales": posterior.sigma.mean(axis=(0, 1, 2)).tolist(),
        "lost_mass": None if posterior.lost_mass is None else float(posterior.lost_mass.mean()),
        "choices": [str(decision) for decision in posterior.found.decisions],
        "held_out_log_density": float(model.held_out_scores_.mean()) if model.held_out_scores_.size else None,
    }
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if name == "intrinsic_dimension" and value is None:
            value = f"none below {posterior.found.rank}"
        elif name == "choices":  # sentences: a line each
            value = f"\n{'':<24}".join(value) if value else None
        elif isinstance(value, list):
            shown = [f"{item:.4g}" if isinstance(item, float) else str(item) for item in value]
            value = ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")
        elif isinstance(value, float):
            value = f"{value:.4g}"
        if value is not None:
            print(f"{name.replace('_', ' '):<24}{value}")


def _add_demo(commands: Any) -> None:
    command = _command(
        commands,
        "demo",
        lambda options: digits.run(options.output, options.seed),
        "fit scikit-learn's digits and compare with a Gaussian mixture and probabilistic PCA (about a minute)",
    )
    command.add_argument("--output", type=Path, default=Path("geode_demo.png"), help="where to save the picture")
    command.add_argument("--seed", type=_seed, default=0, help="seed of the split, the mask and the sampler")
