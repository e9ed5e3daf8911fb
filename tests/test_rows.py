"""Rows in other coordinates without a copy of them all, and stage one of a file that is mapped into memory."""

import decimal
import sys
import tracemalloc
from unittest import mock

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import geode_jax
from geode_jax._checks import check_training_data, is_memory_mapped
from geode_jax._files import parquet
from geode_jax.fitting import single
from geode_jax.fitting.row_files import checked_rows
from geode_jax.rows.blocks import BLOCK_NUMBERS
from geode_jax.rows.files import RowFiles
from geode_jax.rows.view import Overlay, Product, View, as_array, divide, taken

WIDE, TALL, PICTURES, CANDIDATES = "wide", "tall", "noise with a shape", "candidates"


@pytest.fixture
def data():
    """Far from the origin, in units of their own."""
    rng = np.random.default_rng(0)
    return (1e4 + rng.uniform(0.5, 30, 7) * rng.normal(size=(50, 7))).astype(np.float32)


INDICES = [
    slice(3, 9),
    np.array([4, 1, 4]),
    np.arange(50) % 3 == 0,
    (slice(None), slice(2, 5)),
    (np.array([4, 1]), slice(2, 5)),
    np.ix_(np.array([4, 1]), np.array([6, 0])),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_view_is_what_the_array_would_be(data, index):
    """To the last bit, and in the precision asked for."""
    shift, scale, noise = (
        data.mean(axis=0, dtype=np.float64),
        np.arange(1.0, 8.0) / 7.0,
        np.arange(7.0, 0.0, -1.0) / 3.0,
    )
    whole = ((data - shift) / scale).astype(np.float32) / noise.astype(np.float32)
    view = View(View(data, scale, shift, np.dtype(np.float32)), noise)
    assert (view.shape, view.dtype) == (data.shape, np.float32)
    found = view[index]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_times_matrices_are_computed_when_they_are_read(data, index):
    """One matrix for all, and one for each kind of row; rows of no kind are left unchanged."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 7, 7))
    which = rng.integers(-1, 2, 50)
    x = data.astype(np.float64)
    expected = np.where((which == 0)[:, None], x @ one, np.where((which == 1)[:, None], x @ other, x))
    np.testing.assert_allclose(Product(x, [one, other], which)[index], expected[index], rtol=1e-12)
    np.testing.assert_allclose(as_array(Product(x, [other])), x @ other, rtol=1e-12)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_with_others_in_place_of_some(data, index):
    replaced = np.array([0, 3, 7, 8, 49])
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(data.dtype)
    expected = data.copy()
    expected[replaced] = values
    given = data.copy()
    np.testing.assert_array_equal(Overlay(data, replaced, values)[index], expected[index])
    np.testing.assert_array_equal(as_array(Overlay(data, replaced, values)), expected)
    np.testing.assert_array_equal(data, given)


@pytest.mark.parametrize("index", [*INDICES, slice(None), slice(45, 99), np.arange(0)], ids=str)
def test_rows_of_files_are_what_one_array_would_be(data, index):
    files = RowFiles([data[:20], data[20:20], data[20:21], data[21:]])
    assert (files.shape, files.dtype, len(files)) == (data.shape, data.dtype, 50)
    found = files[index]
    np.testing.assert_array_equal(found, data[index])
    assert found.flags.owndata


def test_only_the_features_that_are_asked_for_are_read(data):
    class Counted(np.ndarray):
        read = 0

        def __getitem__(self, index):
            found = np.asarray(self).__getitem__(index)
            Counted.read += 0 if np.may_share_memory(found, self) else found.size  # a view reads nothing yet
            return found

    files = RowFiles([data[:20].view(Counted), data[20:]])
    for features in (slice(2), np.array([4, 1])):
        Counted.read = 0
        rows = np.array([3, 19, 7])
        np.testing.assert_array_equal(files[rows, features], data[rows][:, features])
        assert Counted.read <= 6


@pytest.mark.slow
def test_a_fit_of_files_is_that_of_their_rows(data, tmp_path):
    """With a checkpoint too, which belongs to the rows in all files."""
    paths = [tmp_path / "one.npy", tmp_path / "none.npy", tmp_path / "rest.npy"]
    for path, part in zip(paths, (data[:15], data[15:15], data[15:]), strict=True):
        np.save(path, part)
    np.save(tmp_path / "all.npy", data)
    given = {"sampler": geode_jax.SamplerSettings(num_warmup=5, num_samples=5)}
    expected = geode_jax.fit(jax.random.key(0), np.load(tmp_path / "all.npy", mmap_mode="r"), **given)
    for X in (list(map(str, paths)), tmp_path / "all.npy"):
        found = geode_jax.fit(jax.random.key(0), X, checkpoint=tmp_path / "unfinished", **given)
        assert eqx.tree_equal((found.dictionary, found.draws), (expected.dictionary, expected.draws))
        if isinstance(X, list):
            np.save(paths[2], data[15:] + 1)
            with pytest.raises(ValueError, match="it belongs to a fit with another key, other data"):
                geode_jax.fit(jax.random.key(0), X, checkpoint=tmp_path / "unfinished", **given)
            (tmp_path / "unfinished" / "forest.npz").unlink()
            (tmp_path / "unfinished" / "chains.npz").unlink()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_parquet_files(data, tmp_path, dtype):
    """In the precision of the columns, among other files, and not in memory."""
    frame = pd.DataFrame(data.astype(dtype), columns=list("abcdefg"))
    frame[:20].to_parquet(tmp_path / "one.parquet", index=False)
    frame[20:20].to_parquet(tmp_path / "none.PARQUET", index=False)
    np.save(tmp_path / "rest.npy", data[20:].astype(dtype))
    names = "one.parquet", "none.PARQUET", "rest.npy"
    rows = checked_rows([tmp_path / name for name in names], min_rows=2, allow_nan=True)
    np.testing.assert_array_equal(rows[:], data.astype(dtype))
    assert rows.dtype == dtype
    assert is_memory_mapped(rows.files[0])
    frame["h"] = np.arange(50)
    frame.to_parquet(tmp_path / "mixed.parquet", index=False)
    with mock.patch.object(parquet, "BATCH_NUMBERS", 50):  # several blocks
        mixed = checked_rows(tmp_path / "mixed.parquet", min_rows=2, allow_nan=True)
    np.testing.assert_array_equal(mixed[:], frame.to_numpy(np.float64))


def test_parquet_files_that_cannot_be_fitted(data, tmp_path):
    frame = pd.DataFrame(data, columns=list("abcdefg"))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    frame.assign(c=np.nan).to_parquet(tmp_path / "hidden.parquet", index=False)
    frame.assign(c="x").to_parquet(tmp_path / "words.parquet", index=False)
    frame.set_index(pd.Index(np.arange(50) ** 2)).to_parquet(tmp_path / "index.parquet")
    frame.set_index("a").to_parquet(tmp_path / "named.parquet")
    cases = {
        r"X: .*nowhere.parquet: expected a file, got none": ValueError,
        r"X: .*damaged.parquet: expected a .parquet file of columns of numbers": ValueError,
        r"X: .*words.parquet, column 'c': expected numbers, got (large_)?string": TypeError,
        r"X: .*index.parquet: .*got an index, '__index_level_0__'": ValueError,
        r"X: .*named.parquet: .*got an index, 'a'": ValueError,
        r"X: .*hidden.parquet: expected no missing values here, got 50 NaN": ValueError,
    }
    for message, kind in cases.items():
        name = message.split("*")[1].split(".parquet")[0] + ".parquet"
        with pytest.raises(kind, match=message):
            checked_rows(tmp_path / name, min_rows=2, allow_nan=True)
    # an index that is told of and left out, and numbers of a data base
    table = pq.read_table(tmp_path / "index.parquet", columns=list("abcdefg"))
    decimals = pa.array([decimal.Decimal(f"{value:.3f}") for value in data[:, 2]])
    pq.write_table(table.set_column(2, "c", decimals), tmp_path / "lost.parquet")
    expected = data.astype(np.float64)
    expected[:, 2] = np.round(expected[:, 2], 3)
    lost = checked_rows(tmp_path / "lost.parquet", min_rows=2, allow_nan=True)
    np.testing.assert_allclose(lost[np.arange(50)], expected)
    frame.to_parquet(tmp_path / "good.parquet", index=False)
    with (
        mock.patch.object(parquet.tempfile, "TemporaryFile", side_effect=FileNotFoundError("no folder")),
        pytest.raises(RuntimeError, match=r"temporary file, which failed: no folder; set TMPDIR"),
    ):
        checked_rows(tmp_path / "good.parquet", min_rows=2, allow_nan=True)
    with (
        mock.patch.dict(sys.modules, {"pyarrow.parquet": None, "pyarrow": None}),
        pytest.raises(ImportError, match=r"pip install .geode-jax\[parquet\]"),
    ):
        checked_rows(tmp_path / "hidden.parquet", min_rows=2, allow_nan=True)


def test_files_that_cannot_be_fitted(data, tmp_path):
    def saved(name, array):
        np.save(tmp_path / name, array)
        return str(tmp_path / name)

    good = saved("good.npy", data)
    hidden = data.copy()
    hidden[3, 2] = np.nan
    (tmp_path / "text.npy").write_text("1, 2, 3")
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "several.npz", data=data)
    cases = {
        r"X: .*nowhere.npy: expected a file, got none": (ValueError, "nowhere.npy"),
        r"X: .*text.npy: expected a .npy file of one array": (ValueError, "text.npy"),
        r"X: .*folder: expected a .npy file of one array": (ValueError, "folder"),
        r"X: .*flat.npy: expected a 2-D array of shape .rows, features., got shape .3,.$": (
            ValueError,
            saved("flat.npy", np.ones(3)),
        ),
        r"X: .*several.npz: expected a .npy file of float32 or float64 numbers, got several": (
            TypeError,
            "several.npz",
        ),
        r"X: .*whole.npy: expected a .npy file of float32 or float64 numbers, got int64": (
            TypeError,
            saved("whole.npy", np.ones((3, 7), int)),
        ),
        r"X: .*narrow.npy: expected 7 features as in the first file, got 6": (
            ValueError,
            saved("narrow.npy", data[:, 1:]),
        ),
        r"X: .*hidden.npy: expected no missing values here, got 1 NaN": (ValueError, saved("hidden.npy", hidden)),
    }
    for message, (kind, name) in cases.items():
        with pytest.raises(kind, match=message):
            geode_jax.fit(jax.random.key(0), [good, tmp_path / name])
    with pytest.raises(ValueError, match=r"X: expected at least 2 rows in the files, got 1"):
        geode_jax.fit(jax.random.key(0), [saved("one.npy", data[:1])])


def test_rows_are_divided_where_they_lie_or_as_a_view(data):
    divisors = np.arange(1.0, 8.0)
    expected = data / divisors.astype(np.float32)
    view = divide(View(data, np.ones(7)), divisors)
    assert isinstance(view, View)
    np.testing.assert_array_equal(as_array(view), expected)
    assert divide(data, divisors) is data
    np.testing.assert_array_equal(data, expected)
    assert as_array(data) is data
    assert taken(data, np.arange(50)) is data
    np.testing.assert_array_equal(taken(View(data, np.ones(7)), np.array([3, 5])), data[[3, 5]])


def test_arrays_of_a_view_are_filled_by_blocks():
    x = np.arange(BLOCK_NUMBERS + 7.0)[:, None]
    np.testing.assert_array_equal(as_array(View(x, np.full(1, 2.0))), x / 2.0)


def test_what_is_memory_mapped(data, tmp_path):
    np.save(tmp_path / "rows.npy", data)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert all(map(is_memory_mapped, (mapped, mapped[5:], np.asarray(mapped), np.asarray(mapped)[:, ::2])))
    assert not any(map(is_memory_mapped, (data, mapped + 0.0, np.array(mapped), np.load(tmp_path / "rows.npy"))))


def _curved(num_rows, num_features, seed=0):
    rng = np.random.default_rng(seed)
    place = rng.normal(size=(num_rows, 3))
    x = np.cos(place @ rng.normal(size=(3, num_features))) + 0.1 * rng.normal(size=(num_rows, num_features))
    return (100.0 + x * rng.uniform(0.5, 2.0, num_features)).astype(np.float32)


CASES = {
    WIDE: ((60, 200), {}),
    TALL: ((400, 12), {"noise_covariance": None}),
    PICTURES: ((400, 12), {}),
    CANDIDATES: ((600, 12), {"num_candidates": 3, "tree_rows": 300, "noise_covariance": None}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in CASES),
        *(pytest.param(case, "float64", marks=[pytest.mark.slow] * (case != TALL)) for case in CASES),
    ],
)
def test_a_mapped_file_is_learned_from_as_an_array_is(case, dtype, tmp_path, monkeypatch):
    """The same forest to the last bit; with a shape of the noise too, which needs the rows as an array."""
    shape, options = CASES[case]
    x = _curved(*shape)
    np.save(tmp_path / "rows.npy", x)
    if case == PICTURES:
        monkeypatch.setattr("geode_jax.forest.choices.is_worth_its_cost", lambda *rest: True)
        monkeypatch.setattr("geode_jax.forest.choices.try_spans", lambda *rest: None)
    settings = geode_jax.DictionarySettings(num_trees=2, max_rank=4, depth=2, **options)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    found, expected = (
        geode_jax.learn_forest(jax.random.key(0), rows, dictionary=settings, dtype=dtype) for rows in (mapped, x)
    )
    assert (found.noise_root is not None) == (case == PICTURES)
    assert eqx.tree_equal(found, expected)


@pytest.mark.parametrize(("is_mapped", "is_missing"), [(False, False), (True, False), (True, True)])
def test_room_for_the_rows_of_a_mapped_file(is_mapped, is_missing, tmp_path, monkeypatch):
    """Is needed only where values are missing: for two copies, and for a third of the rows, six times as filled."""
    x = _curved(60, 6)
    x[::3, 2] = np.nan if is_missing else 100.0
    np.save(tmp_path / "rows.npy", x)
    data = np.load(tmp_path / "rows.npy", mmap_mode="r" if is_mapped else None)
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=2, depth=1, noise_covariance=None)
    needed = mock.Mock(side_effect=RuntimeError)
    monkeypatch.setattr(single, "warn_if_too_large", needed)
    with pytest.raises(RuntimeError):
        geode_jax.fit(jax.random.key(0), data, dictionary=settings)
    assert needed.call_args.args[0]["rows"] == (2 + 6 / 3 if is_missing else 1 - is_mapped) * x.nbytes


def test_a_mapped_file_with_missing_values(tmp_path):
    x = _curved(60, 6)
    x[::3, 2] = np.nan
    np.save(tmp_path / "rows.npy", x)
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=2, depth=1)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    found, expected = (geode_jax.learn_forest(jax.random.key(0), rows, dictionary=settings) for rows in (mapped, x))
    assert eqx.tree_equal(found, expected)


@pytest.mark.slow
def test_a_mapped_file_is_never_copied_whole(tmp_path):
    x = _curved(60_000, 200)
    np.save(tmp_path / "rows.npy", x)
    settings = geode_jax.DictionarySettings(num_trees=1, max_rank=5, depth=3, tree_rows=4000, noise_covariance=None)
    tracemalloc.start()
    geode_jax.learn_forest(jax.random.key(0), np.load(tmp_path / "rows.npy", mmap_mode="r"), dictionary=settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes


def test_a_fit_makes_no_copy_of_a_mapped_file(data, tmp_path):
    """Not even of some columns. An array in memory that is laid out by columns is copied, to round its sums alike."""
    np.save(tmp_path / "rows.npy", data)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")[:, 1:4]
    assert np.shares_memory(check_training_data(mapped), mapped)
    assert np.shares_memory(check_training_data(data), data)
    assert check_training_data(np.asfortranarray(data)).flags.c_contiguous
