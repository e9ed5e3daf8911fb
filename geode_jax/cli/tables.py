"""Tables of numbers in .npy, .npz, .csv, .tsv and .parquet files, read and written in chunks of rows."""

import contextlib
import csv
import itertools
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from geode_jax._files.parquet import LARGEST_WHOLE, blocks_of, index_columns, pyarrow_parquet
from geode_jax._files.whole import written_whole

SUFFIXES = (".npy", ".npz", ".csv", ".tsv", ".parquet")
# Cells of a text file that mean a missing value, in lower case: those of pandas, and "?".
_MISSING = frozenset(
    ["", "?", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none"]  # and what C libraries print for NaN
).union(["1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"])

# A first line whose numbers are all so many times as large as those below it may hold names.
OTHER_SIZE = 10.0

Write = Callable[[np.ndarray], None]


class TableError(Exception):
    """A file that is not the table it should be; the message is for the user."""


class Table(NamedTuple):
    """The rows of a file: their number, the column names (None if it has none), and the chunks."""

    num_rows: int
    names: list[str] | None
    chunks: Iterator[np.ndarray]

    def whole(self) -> np.ndarray:
        """All rows, (n, D)."""
        parts = list(self.chunks)
        if not parts:
            raise TableError("expected rows, got none")
        return np.concatenate(parts)


class TextFormat(NamedTuple):
    """How a text file holds numbers; None leaves it to the file.

    `delimiter`: between cells; a tab in .tsv files and a comma in others. `decimal`: the decimal sign. `has_header`:
    whether the first line holds names. `names`: those that the table should have; a first line with all of them is one
    of names, also where they are numbers.
    """

    delimiter: str | None = None
    decimal: str = "."
    has_header: bool | None = None
    names: tuple[str, ...] | None = None


class Choice(NamedTuple):
    """Which columns of a file are the table: those of these `names`, in this order (None: all).

    `has_index`: whether an index, which numbers or names the rows, is left out: the columns that the file says are one,
    or the first.
    """

    names: tuple[str, ...] | None = None
    has_index: bool = False

    def positions(
        self, names: list[str] | None, width: int, path: Path, told_index: Sequence[str] | None = None
    ) -> list[int]:
        """Positions of the chosen columns among `width`, of these names. Raises TableError where there are none.

        `told_index`: names of the columns that the file says are an index; None if it does not say.
        """
        if self.names is not None:
            if names is None:
                raise TableError(f"{path}: expected names of columns to choose from, found none; leave out --columns")
            names = [name.strip() for name in names]
            unknown = [name for name in self.names if name not in names]
            if unknown:
                raise TableError(f"{path}: expected the columns {', '.join(self.names)}, found no {unknown[0]!r}")
            return [names.index(name) for name in self.names]
        if not self.has_index:
            if told_index:
                raise TableError(
                    f"{path}: an index, {told_index[0]!r}, beside its columns; pass --index to leave it out"
                )
            if names is not None and names[:1] == [""]:
                raise TableError(
                    f"{path}: the first column has no name of its own; pass --index if it only numbers the rows"
                )
            return list(range(width))
        if told_index is not None and not told_index:
            raise TableError(
                f"{path}: expected an index that pandas stored, found none beside the columns; leave out --index, or"
                " choose columns by --columns"
            )
        index = [names.index(name) for name in told_index] if names is not None and told_index else [0]
        if width <= len(index):
            raise TableError(f"{path}: expected columns beside the index, found none")
        return [at for at in range(width) if at not in index]


def open_table(path: Path, chunk: int, text: TextFormat | None = None, choice: Choice | None = None) -> Table:
    """The table of a file, in chunks of at most `chunk` rows. Raises TableError, also while chunks are read."""
    text, choice = text or TextFormat(), choice or Choice()
    suffix = _suffix(path)
    with _blaming(path):
        if suffix in (".csv", ".tsv"):
            delimiter = text.delimiter or ("\t" if suffix == ".tsv" else ",")
            table = _read_text(path, chunk, text._replace(delimiter=delimiter), choice)
        else:
            table = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet}[suffix](path, chunk, choice)
    if table.num_rows == 0:
        raise TableError(f"{path}: expected rows, got none")
    return table._replace(chunks=_blamed(table.chunks, path))


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn any error into one that names the file: a damaged one may fail anywhere in zipfile, NumPy and pyarrow."""
    try:
        yield
    except TableError:
        raise
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or _in_one_line(error)}") from error
    except Exception as error:
        raise TableError(f"{path}: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _blamed(chunks: Iterator[np.ndarray], path: Path) -> Iterator[np.ndarray]:
    while True:
        with _blaming(path):
            rows = next(chunks, None)
        if rows is None:
            return
        yield rows


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise TableError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    return suffix


def _read_npy(path: Path, chunk: int, choice: Choice) -> Table:
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":  # NumPy would advise to load it without a check
            raise TableError(f"{path}: expected an array as np.save writes it, found something else")
    return _array_table(np.load(path, mmap_mode="r", allow_pickle=False), path, chunk, choice)


def _read_npz(path: Path, chunk: int, choice: Choice) -> Table:
    if path.exists() and not zipfile.is_zipfile(path):
        raise TableError(f"{path}: expected arrays as np.savez writes them, found something else")
    with np.load(path, allow_pickle=False) as file:
        if "X" not in file.files and len(file.files) != 1:
            raise TableError(f"{path}: expected one array, or one called X, got {', '.join(file.files) or 'none'}")
        return _array_table(file["X" if "X" in file.files else file.files[0]], path, chunk, choice)


def _array_table(array: np.ndarray, path: Path, chunk: int, choice: Choice) -> Table:
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise TableError(f"{path}: expected numbers of shape (n, D), got {array.dtype} of shape {array.shape}")
    rows = array.shape[0]
    choice.positions(None, array.shape[1], path)
    array = array[:, int(choice.has_index) :]
    return Table(rows, None, (np.asarray(array[first : first + chunk]) for first in range(0, rows, chunk)))


def _read_text(path: Path, chunk: int, text: TextFormat, choice: Choice) -> Table:
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = _rows(_lines(file, text))
        head = list(itertools.islice(rows, 2))
        if not head:
            raise TableError(f"{path}: expected rows, got an empty file")
        num_lines, has_decimals = 0, text.delimiter != text.decimal  # if they differ it does not matter
        for row in itertools.chain(head, rows):
            num_lines += 1
            has_decimals = has_decimals or any(text.decimal in cell for cell in row)
    first, second = head[0], head[1] if len(head) > 1 else None
    has_names = _has_names(first, second, path, text)
    names = [cell.strip() for cell in first] if has_names else None
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableError(f"{path}, line 1: expected a different name for every column, got {twice!r} twice")
    chosen = choice.positions(names, len(first), path)
    if not has_decimals:
        raise TableError(f"{path}: expected another delimiter than the decimal {text.decimal!r}; pass --delimiter ';'")

    def chunks() -> Iterator[np.ndarray]:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = _lines(file, text)
            rows = _rows(lines)
            if has_names:
                next(rows)
            numbers = (_numbers(row, first, chosen, f"{path}, line {lines.line_num}", has_names, text) for row in rows)
            while part := list(itertools.islice(numbers, chunk)):
                yield np.array(part)

    return Table(num_lines - has_names, [names[at] for at in chosen] if names is not None else None, chunks())


def _rows(lines: Iterable[list[str]]) -> Iterator[list[str]]:
    """The lines that are not empty. Spaces alone are a missing value in a table of one column, else an empty line."""
    width = 0
    for cells in lines:
        width = max(width, len(cells))
        if len(cells) > 1 or (len(cells) == 1 and (width == 1 or cells[0].strip() != "")):
            yield cells


def _lines(file: Any, text: TextFormat) -> Any:
    delimiter = text.delimiter or ","
    # a space may stand between a delimiter and a quote
    return csv.reader(file, delimiter=delimiter, skipinitialspace=delimiter != " ", strict=True)


def _has_names(first: Sequence[str], second: Sequence[str] | None, path: Path, text: TextFormat) -> bool:
    """Whether the first line holds names; an error where that cannot be told."""
    if text.has_header is not None:
        return text.has_header
    if text.names and len(text.names) > 1 and set(text.names) <= {cell.strip() for cell in first}:
        return True
    numbers = [_number(cell, text.decimal) for cell in first]
    is_name = [number is None for number in numbers]
    if any(is_name) and all(named or not cell.strip() for cell, named in zip(first, is_name, strict=True)):
        _check_delimiter(first, path, text)
        return True
    if any(is_name):
        which = first[is_name.index(True)]
        _check_delimiter(first, path, text)
        raise TableError(
            f"{path}, line 1: expected names or numbers, got both ({which!r} is no number); if these are names, pass"
            " --header"
        )
    if _may_be_names(first, numbers, second, text):
        raise TableError(
            f"{path}, line 1: {', '.join(first[:3])}, ... may be names or numbers; pass --header or --no-header"
        )
    return False


def _may_be_names(
    first: Sequence[str], found: list[float | None], second: Sequence[str] | None, text: TextFormat
) -> bool:
    """Whether numbers in the first line look like names: wavelengths, years, or those that pandas gives.

    These are 0, 1, 2, ..., also after the empty cell that pandas leaves above its index; words for missing values
    alone; different whole numbers, in any order, after an empty cell above a whole number, or above a line without
    whole numbers; and numbers that rise or fall: five of them, four whole numbers, three at the same distance from each
    other, or two that are all of another size than what is below them, or after an empty cell above a whole number.
    """
    numbers = [np.nan if number is None else number for number in found]
    if np.isnan(numbers).all():
        return any(cell.strip() for cell in first)
    after_blank = numbers if first[0].strip() else numbers[1:]
    if len(first) > 1 and after_blank == [*range(len(after_blank))]:
        return True
    has_blank = not first[0].strip() and (second is None or second[0].strip().isdecimal())
    named = np.array(numbers[has_blank:])
    if len(first) < 2 or not np.isfinite(named).all():
        return False
    are_integers = bool((named == np.round(named)).all())
    is_over_fractions = second is not None and not any(cell.strip().lstrip("+-").isdecimal() for cell in second)
    if are_integers and len(set(named)) == named.size and (has_blank or (is_over_fractions and named.size > 1)):
        return True
    steps = np.diff(named)
    if steps.size == 0 or not ((steps > 0).all() or (steps < 0).all()):
        return False
    if second is not None and (has_blank or _are_of_other_size(named, second[has_blank:], text)):
        return True
    is_even = bool(np.allclose(steps, steps[0], rtol=1e-3, atol=0.0))
    # names alone would be a table without rows
    return named.size >= (3 if is_even else 4 if are_integers else 5 if second is not None else math.inf)


def _are_of_other_size(named: np.ndarray, below: Sequence[str], text: TextFormat) -> bool:
    """Whether all numbers are far larger in size than those below them, or all far smaller."""
    others = np.abs([np.nan if (number := _number(cell, text.decimal)) is None else number for cell in below])
    if others.size != named.size or not np.isfinite(others).all():
        return False
    sizes = np.abs(named)
    return bool((sizes > OTHER_SIZE * others).all() or (OTHER_SIZE * sizes < others).all())


def _check_delimiter(first: Sequence[str], path: Path, text: TextFormat) -> None:
    """An error if the cells are one, or would be numbers, with another delimiter."""
    for delimiter in ";\t|":
        parts = (text.delimiter or ",").join(first).split(delimiter)
        if delimiter == text.delimiter or len(parts) == 1:
            continue
        are_numbers = all(_number(part, ".") is not None or _number(part, ",") is not None for part in parts)
        if len(first) == 1 or are_numbers:
            raise TableError(
                f"{path}, line 1: expected cells between {text.delimiter!r}, found {delimiter!r}; pass --delimiter"
                f" {delimiter!r}, and --decimal , if numbers have commas"
            )


def _number(cell: str, decimal: str) -> float | None:
    """The number in a cell, or NaN for a missing value; None if it is neither."""
    text = cell.strip()
    if text.lower() in _MISSING:
        return np.nan
    if decimal != ".":
        if "." in text:
            return None
        text = text.replace(decimal, ".")
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def _numbers(
    row: Sequence[str], first: Sequence[str], chosen: list[int], where: str, has_names: bool, text: TextFormat
) -> list[float]:
    """The numbers in the chosen columns of a row; `first` is the first row."""
    if len(row) != len(first):
        hint = ""
        if len(first) < len(row) and first[0].lstrip().startswith("#"):
            hint = "; if line 1 is a comment, take it out"
        elif len(row) == len(first) + 1 and not row[-1].strip():
            hint = "; the line ends with a delimiter"
        raise TableError(f"{where}: expected {len(first)} cells, got {len(row)}{hint}")
    found: list[float] = []
    for column in chosen:
        value, wrong = _number(row[column], text.decimal), ""
        if value is None or math.isinf(value):
            wrong = f"expected a finite number or nothing, got {row[column]!r}"
        elif abs(value) >= LARGEST_WHOLE and _is_rounded(row[column].strip().lstrip("+-")):
            wrong = f"expected a number that a float holds, got {row[column]}, perhaps an identifier; leave it out"
        if value is None or wrong:
            which = f"column {first[column].strip()!r}" if has_names else f"column {column + 1}"
            raise TableError(f"{where}, {which}: {wrong}")
        found.append(value)
    return found


def _is_rounded(digits: str) -> bool:
    """Whether a float does not hold these digits, if they are those of an integer of at most 64 bits."""
    return digits.isdecimal() and len(digits) <= 20 and int(digits) != int(float(digits))


def _read_parquet(path: Path, chunk: int, choice: Choice) -> Table:
    file = pyarrow_parquet().ParquetFile(path)
    every = file.schema_arrow.names
    names = [every[at] for at in choice.positions(every, len(every), path, index_columns(file))]
    return Table(file.metadata.num_rows, names, blocks_of(file, names, chunk))


def check_new_table(path: Path) -> None:
    """Raise TableError if there can be no table at `path`, before the work whose results it is to hold."""
    if _suffix(path) == ".parquet":
        with _blaming(path):
            pyarrow_parquet()
    if not path.parent.is_dir():
        raise TableError(f"{path}: expected a file in a folder that exists")


@contextlib.contextmanager
def new_table(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    """A function that appends chunks of rows to a new table of `num_rows` rows; no partial file is left behind.

    .npy and .npz files have no column names. An .npz file holds one array, X.
    """
    check_new_table(path)
    suffix = _suffix(path)
    try:
        with written_whole(path) as partial:
            if suffix in (".csv", ".tsv"):
                writing = _write_text(partial, names, "\t" if suffix == ".tsv" else ",")
            else:
                writers = {".npy": _write_npy, ".npz": _write_npz, ".parquet": _write_parquet}
                writing = writers[suffix](partial, num_rows, names)
            with writing as write:
                yield write
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from error


def _begin_array(file: IO[bytes], shape: tuple[int, int]) -> None:
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)


@contextlib.contextmanager
def _write_npy(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    with open(path, "wb") as file:
        _begin_array(file, (num_rows, len(names)))
        yield lambda rows: _append(file, rows)


@contextlib.contextmanager
def _write_npz(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("X.npy", "w", force_zip64=True) as file,
    ):
        _begin_array(file, (num_rows, len(names)))
        yield lambda rows: _append(file, rows)


def _append(file: IO[bytes], rows: np.ndarray) -> None:
    file.write(np.ascontiguousarray(rows, dtype="<f8").tobytes())


@contextlib.contextmanager
def _write_text(path: Path, names: Sequence[str], delimiter: str) -> Iterator[Write]:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(names)
        yield lambda rows: writer.writerows(rows.tolist())


@contextlib.contextmanager
def _write_parquet(path: Path, num_rows: int, names: Sequence[str]) -> Iterator[Write]:
    del num_rows
    writing = pyarrow_parquet()
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    with writing.ParquetWriter(path, schema) as writer:

        def write(rows: np.ndarray) -> None:
            columns = [pyarrow.array(np.asarray(column, np.float64)) for column in rows.T]
            writer.write_table(pyarrow.table(columns, schema=schema))

        yield write
