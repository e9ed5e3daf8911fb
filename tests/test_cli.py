"""The command line: every format, chunks, names, messages and exit codes."""

import csv
import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from conftest import QUICK
from jax.errors import JaxRuntimeError

import geode_jax
from geode_jax.cli.commands import _table, parser, run
from geode_jax.cli.tables import SUFFIXES, Choice, TableError, TextFormat, new_table, open_table
from geode_jax.gibbs.run import _Run

# those of `conftest.QUICK`, with which other tests share compiled programs
FIT = ["--trees", "1", "--max-rank", "3", "--depth", "2", "--warmup", "10", "--draws", "10", "--seed", "0", "--quiet"]
NAMES = ["a", "b", "c", "d", "e", "f"]


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """A folder with a model fitted to a .csv file, and new rows with holes in every format."""
    path = tmp_path_factory.mktemp("cli")
    pd.DataFrame(data, columns=NAMES).to_csv(path / "train.csv", index=False)
    assert run(["fit", str(path / "train.csv"), str(path / "model.npz"), *FIT]) == 0
    holes = data[:25].copy()
    holes[::2, 1:3] = np.nan
    _write_all(path / "holes", holes)
    _write_all(path / "whole", data[:25])
    return path


def _write_all(stem, rows):
    np.save(f"{stem}.npy", rows)
    np.savez(f"{stem}.npz", rows)
    frame = pd.DataFrame(rows, columns=NAMES)
    frame.to_csv(f"{stem}.csv", index=False)
    frame.to_csv(f"{stem}.tsv", index=False, sep="\t")
    frame.to_parquet(f"{stem}.parquet")


def _read(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".npz":
        return np.load(path)["X"]
    if path.suffix == ".parquet":
        return pd.read_parquet(path).to_numpy()
    # not by pandas, which before version 3.1 reads some floats one unit in the last place off
    return np.genfromtxt(path, delimiter="\t" if path.suffix == ".tsv" else ",", skip_header=1, ndmin=2)


def test_model_is_the_estimator(data, folder):
    model = geode_jax.GeodeDensity.load(folder / "model.npz")
    expected = geode_jax.GeodeDensity(**QUICK).fit(pd.DataFrame(data, columns=NAMES))
    np.testing.assert_allclose(model.posterior_.draws.log_joint, expected.posterior_.draws.log_joint, rtol=1e-6)
    assert model.feature_names_in_.tolist() == NAMES


SIZES = ["--trees", "2", "--chains", "3", "--warmup", "4", "--draws", "5", "--max-rank", "2", "--depth", "1"]
SIZES += ["--dtype", "float64", "--seed", "7", "--quiet"]


def test_options_of_a_fit_are_parameters(folder, tmp_path):
    def stopped(model, rows):
        fitted.append((model.get_params(), rows.shape))
        raise KeyboardInterrupt

    fitted = []
    arguments = ["fit", str(folder / "train.csv"), str(tmp_path / "none.npz")]
    with mock.patch.object(geode_jax.GeodeDensity, "fit", stopped):
        for options in ([*SIZES, "--checkpoint", str(tmp_path)], []):
            assert run([*arguments, *options]) == 130
    expected = geode_jax.GeodeDensity(
        num_trees=2,
        num_chains=3,
        num_warmup=4,
        num_samples=5,
        max_rank=2,
        depth=1,
        dtype="float64",
        checkpoint=tmp_path,
        random_state=7,
    )
    usual = geode_jax.GeodeDensity(progress=True)
    assert fitted == [(expected.get_params(), (90, 6)), (usual.get_params(), (90, 6))]


@pytest.mark.slow
def test_sizes_of_a_fit_are_as_asked_for(folder, capsys):
    model = str(folder / "sized.npz")
    assert run(["fit", str(folder / "train.csv"), model, *SIZES]) == 0
    assert run(["info", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = ("trees", "chains_per_tree", "draws_per_chain", "directions_per_node", "depth", "precision")
    assert [found[name] for name in told] == [2, 3, 5, 2, 1, "float64"]
    assert geode_jax.GeodeDensity.load(model).posterior_.sampler_settings.num_warmup == 4


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_streams(folder, suffix, data):
    """Every format in and out, in chunks that do not divide the rows, is what the estimator says of the whole."""
    model = geode_jax.GeodeDensity.load(folder / "model.npz")
    del model.feature_names_in_
    holes = np.load(folder / "holes.npy")
    source, target = str(folder / f"holes{suffix}"), folder / f"out{suffix}"
    stream = ["--chunk", "10", "--quiet"]
    assert run(["score", str(folder / "model.npz"), source, str(target), *stream]) == 0
    np.testing.assert_allclose(_read(target)[:, 0], model.score_samples(holes), rtol=1e-5)
    assert run(["impute", str(folder / "model.npz"), source, str(target), "--interval", "0.8", *stream]) == 0
    np.testing.assert_allclose(_read(target), np.concatenate(model.impute(holes, 0.8), axis=1), rtol=1e-5)
    whole = str(folder / f"whole{suffix}")
    assert run(["score", str(folder / "model.npz"), whole, str(target), "--novelty", *stream]) == 0
    np.testing.assert_allclose(_read(target)[:, 1], model.novelty(data[:25]))
    assert run(["sample", str(folder / "model.npz"), "7", str(target), "--seed", "3"]) == 0
    np.testing.assert_array_equal(_read(target), model.set_params(random_state=3).sample(7))
    with mock.patch("geode_jax.cli.commands._SAMPLE_ROWS", 3):
        assert run(["sample", str(folder / "model.npz"), "7", str(target)]) == 0
    assert np.unique(_read(target), axis=0).shape == (7, 6)


def test_calibration_rows(folder, data):
    """Novelty of rows with holes, and calibrated intervals, against a table of rows that were not in the fit."""
    model, target, known = str(folder / "model.npz"), folder / "out.csv", str(folder / "whole.parquet")
    fitted = geode_jax.GeodeDensity.load(model)
    del fitted.feature_names_in_
    holes, rows = np.load(folder / "holes.npy"), _read(folder / "whole.parquet")
    source, more = str(folder / "holes.csv"), ["--calibration", known, "--quiet"]
    assert run(["score", model, source, str(target), "--novelty", *more]) == 0
    np.testing.assert_allclose(_read(target)[:, 1], fitted.novelty(holes, rows))
    assert run(["impute", model, source, str(target), "--interval", "0.8", *more]) == 0
    np.testing.assert_allclose(_read(target), np.concatenate(fitted.impute(holes, 0.8, rows), axis=1), rtol=1e-5)


def test_columns_have_names(folder):
    model, source, target = str(folder / "model.npz"), str(folder / "holes.npy"), folder / "named.csv"
    assert run(["impute", model, source, str(target), "--interval", "0.8", "--quiet"]) == 0
    with open(target, newline="") as file:
        assert next(csv.reader(file)) == NAMES + [f"{name}_lower" for name in NAMES] + [
            f"{name}_upper" for name in NAMES
        ]
    assert run(["sample", model, "2", str(target)]) == 0
    assert pd.read_csv(target).columns.tolist() == NAMES


def test_info(folder, capsys):
    assert run(["info", str(folder / "model.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["features"], found["trees"], found["complete_training_rows"]) == (6, 1, 90)
    assert found["feature_names"] == NAMES
    assert any(choice.startswith("directions per node: ") for choice in found["choices"])
    assert run(["info", str(folder / "model.npz")]) == 0
    text = capsys.readouterr().out
    assert "intrinsic dimension" in text
    assert all(choice in text for choice in found["choices"])


def test_output_that_nobody_reads(folder, capsys, monkeypatch):
    """As `geode info model.npz | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run(["info", str(folder / "model.npz")]) == 1
    assert capsys.readouterr().err == ""


def test_info_without_an_intrinsic_dimension(folder, capsys, monkeypatch):
    monkeypatch.setattr(geode_jax.Posterior, "intrinsic_dimension", None)
    assert run(["info", str(folder / "model.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["intrinsic_dimension"] is None
    assert run(["info", str(folder / "model.npz")]) == 0
    assert f"none below {found['directions_per_node']}\n" in capsys.readouterr().out


def test_a_device_without_room_is_one_line(folder, capsys):
    with mock.patch.object(geode_jax.GeodeDensity, "fit", side_effect=JaxRuntimeError("RESOURCE_EXHAUSTED: no room")):
        assert run(["fit", str(folder / "train.csv"), str(folder / "none.npz"), *FIT]) == 1
    assert capsys.readouterr().err == "error: RESOURCE_EXHAUSTED: no room\n"


@pytest.mark.parametrize("seed", ["-1", "5000000000", "0.5"])
def test_seeds_that_are_none(seed, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        run(["sample", str(folder / "model.npz"), "7", str(folder / "none.csv"), "--seed", seed])
    assert ended.value.code == 2
    assert f"argument --seed: expected a whole number from 0 to 2**32 - 1, got {seed}" in capsys.readouterr().err


def test_failures_are_one_line(folder, capsys):
    """Exit code 1, one line that names the file and what is wrong with it, and no file left behind."""
    model, out = str(folder / "model.npz"), folder / "none.csv"
    known = ["--calibration", str(folder / "flat.npy")]

    def text(content):
        path = folder / f"bad {len(list(folder.glob('bad *')))}.csv"
        path.write_text(content)
        return str(path)

    (folder / "broken.npz").write_bytes((folder / "model.npz").read_bytes()[:5000])
    damaged = bytearray((folder / "whole.parquet").read_bytes())
    damaged[40:400] = b"\xff" * 360
    (folder / "damaged.parquet").write_bytes(damaged)
    np.save(folder / "flat.npy", np.zeros(6))
    np.save(folder / "objects.npy", np.array([[{}]]), allow_pickle=True)
    np.savez(folder / "two.npz", a=np.zeros((2, 6)), b=np.zeros((2, 6)))
    pd.DataFrame([["x"] * 6] * 2, columns=NAMES).to_parquet(folder / "words.parquet")
    (folder / "words.npy").write_text("1,2\n3,4\n")
    (folder / "words.npz").write_text("1,2\n3,4\n")
    identified = pd.DataFrame(np.zeros((2, 6)), columns=NAMES).astype({"b": "Int64"})
    identified.loc[0, "b"], identified.loc[1, "b"] = 2**53 + 1, pd.NA
    identified.to_parquet(folder / "identified.parquet")
    shuffled = pd.DataFrame(np.zeros((2, 6)), columns=NAMES[::-1]).to_csv(index=False)
    cases = [
        (["score", model, str(folder / "absent.csv"), str(out)], "absent.csv: No such file"),
        (["score", model, str(folder / "model.txt"), str(out)], "expected a file that ends in .npy, .npz"),
        (["score", model, text(""), str(out)], "got an empty file"),
        (["score", model, text("1,2,3,4,5.5\n"), str(out)], "expected 6 columns, got 5"),
        (["score", model, text("6,2,3,4,5,1\n1,2\n"), str(out)], "line 2: expected 6 cells, got 2"),
        (
            ["fit", text("# of 1999\n6,2,3,4,5,1\n"), str(folder / "none.npz")],
            "line 2: expected 1 cells, got 6; if line 1 is a comment, take it out",
        ),
        (["score", model, text("6,2,3,4,5,1\n1,2,3,4,5,6,\n"), str(out)], "got 7; the line ends with a delimiter"),
        (
            ["score", model, text(",".join(NAMES) + "\n1,2,x,4,5,6\n"), str(out)],
            "line 2, column 'c': expected a finite number",
        ),
        (["score", model, text(shuffled), str(out)], "expected the columns of the training table, got another order"),
        (["score", model, text("a,b,c,d,e,g\n1,2,3,4,5,6\n"), str(out)], "got no f but g"),
        (["score", model, text("6,2,3,inf,5,1\n"), str(out)], "line 1, column 4: expected a finite number or nothing"),
        (["score", model, text("6,2,3,4,5,1\n1,2,3,4,5,1e400\n"), str(out)], "line 2, column 6: expected a finite"),
        (
            ["score", model, text("1,2,3,4,5,6\n"), str(out), "--columns", "a\rb"],
            "--columns: expected names on one line",
        ),
        (["score", model, text("1,2,x,4,5,6\n" + "1,2,3,4,5,6\n" * 20), str(out)], "'x' is no number"),
        (["score", model, text("0,1,2,3,4,5\n1,2,3,4,5,6\n"), str(out)], "pass --header or --no-header"),
        (["score", model, text(",0,1,2,3,4,5\n0,1,2,3,4,5,6\n"), str(out)], "pass --header or --no-header"),
        *(
            (["score", model, text(f"{names}\n0,0.2,0.3,0.4,0.5,0.6\n"), str(out)], "pass --header or --no-header")
            for names in (
                "400,402,404,406,408,412",
                "6,5,4,3,2,1",
                "0.5,1,1.5,2,2.5,3",
                ",2019,2021,2022,2025,2026",
                "NA,,,,,",
                "3999.64,3997.71,3995.78,3993.85,3991.93,3990.00",  # steps differ by rounding
                "100.2,103.5,106.9,110.1,113.6,120",
            )
        ),
        *(
            (["score", model, text(content), str(out)], "pass --header or --no-header")
            for content in (
                "0.5,1.5,7\n50,60,80\n",
                "0.1,0.25,0.3,0.41,0.5\n1,2,3,4,5\n",
                ",100.2,103.5,106.9\n0,50,60,70\n",
            )
        ),
        (["score", model, text("100.2,103.5,109\n0,1.2,-0.3\n"), str(out)], "pass --header or --no-header"),
        (["score", model, text("6,2,3,4,5,9007199254740993\n"), str(out)], "perhaps an identifier"),
        (["score", model, text("6,2,3,4,5,-9007199254740993\n"), str(out)], "perhaps an identifier"),
        (["score", model, text(",1.5,2.5\n"), str(out)], "expected 6 columns, got 3"),
        (["score", text("a,b\n1,2\n"), model, str(out)], "it is no .npz file"),
        (["score", model, text(",0,1,2,3,4\n0.5,1,2,3,4,5\n"), str(out)], "pass --header or --no-header"),
        *(
            (["fit", text(content), str(folder / "none.npz")], "pass --header or --no-header")
            for content in (",2,0,1\n0,1.5,2.5,0.5\n", "2,0,1\n0.5,1.5,2.5\n", "1,2\n-0.5,1.25\n", "8,3\n0.5,\n")
        ),
        (["score", model, str(folder / "words.npy"), str(out)], "words.npy: expected an array as np.save writes it"),
        (["score", model, str(folder / "words.npz"), str(out)], "words.npz: expected arrays as np.savez writes them"),
        (["score", model, str(folder / "flat.npy"), str(out), "--columns", ""], "--columns: expected names, got ''"),
        (["score", model, text("a,b,c,d,e,f,\n1,2,3,4,5,6,7\n"), str(out)], "got also one without a name"),
        (["score", model, text("1,5\n2,5\n"), str(out), "--decimal", ","], "another delimiter than the decimal"),
        (["score", model, text("a,b,c,d,e,a\n1,2,3,4,5,6\n"), str(out)], "got 'a' twice"),
        (["score", model, text("a;b;c;d;e;f\n1;2;3;4;5;6\n"), str(out)], "pass --delimiter ';'"),
        (["score", model, text("1,5;2,5;3,5;4,5;5,5;6,5\n"), str(out)], "--decimal , if numbers have commas"),
        (["score", model, text('a,b,c,d,e,f\n1,2,3,4,5,"6\n'), str(out)], "unexpected end of data"),
        (
            ["score", model, text("1,2,3,4,5,\x00\n"), str(out)],
            r"line 1: expected names or numbers, got both ('\x00' is",
        ),
        (["score", model, text("a,b,c,d,e,f\n"), str(out)], "expected rows, got none"),
        (["score", model, text("1,2,3,4,5,6\n"), str(out), "--delimiter", "ab"], "--delimiter: expected one character"),
        (["score", model, str(folder / "damaged.parquet"), str(out)], "damaged.parquet: Couldn't deserialize"),
        (["score", model, str(folder / "flat.npy"), str(out)], "expected numbers of shape (n, D)"),
        (
            ["score", model, str(folder / "objects.npy"), str(out)],
            "objects.npy: Array can't be memory-mapped: Python objects",
        ),
        (["score", model, str(folder / "two.npz"), str(out)], "one called X, got a, b"),
        (["score", model, str(folder / "words.parquet"), str(out)], "column 'a': expected numbers"),
        (["score", model, str(folder / "identified.parquet"), str(out)], "column 'b': expected numbers that a float"),
        (["score", model, str(folder / "holes.csv"), str(out), "--novelty"], "NaN"),
        (["score", model, str(folder / "holes.csv"), str(out), *known], "--calibration: expected --novelty"),
        (["score", model, str(folder / "holes.csv"), str(out), "--novelty", *known], "flat.npy: expected"),
        (
            ["impute", model, str(folder / "holes.csv"), str(out), "--quiet", *known],
            "--calibration: expected --interval",
        ),
        (["score", model, str(folder / "holes.csv"), str(folder / "no" / "x.csv")], "expected a file in a folder that"),
        (["score", str(folder / "broken.npz"), str(folder / "holes.csv"), str(out)], "expected a file written by"),
        (["score", str(folder / "holes.npz"), str(folder / "holes.csv"), str(out)], "expected a file written by"),
        (["fit", str(folder / "train.csv"), str(folder / "no" / "m.npz")], "expected an .npz file in a folder"),
        (
            ["fit", text("1,2\n"), str(folder / "m.npz"), *FIT],
            "1 sample(s) (shape=(1, 2)) while a minimum of 2 is required",
        ),
    ]
    capsys.readouterr()
    for arguments, expected in cases:
        if arguments[0] == "score":
            arguments = [*arguments, "--quiet"]
        assert run(arguments) == 1, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: "), error
        assert expected in error, error
        assert error.count("\n") == 1, error
        assert not list(folder.glob("*.part"))
        assert not out.exists()


def test_no_command_replaces_what_it_reads(folder, capsys, tmp_path):
    """Also under another name; every file is what it was."""
    kept = {name: tmp_path / name for name in ("model.npz", "holes.csv", "train.npz", "linked.npz", "known.csv")}
    kept["model.npz"].write_bytes((folder / "model.npz").read_bytes())
    for name in ("holes.csv", "known.csv"):
        kept[name].write_bytes((folder / "holes.csv").read_bytes())
    np.savez(kept["train.npz"], X=np.random.default_rng(0).normal(size=(20, 6)))
    kept["linked.npz"].symlink_to(kept["train.npz"])
    before = {name: path.read_bytes() for name, path in kept.items()}
    model, holes, train, linked, known = (
        str(kept[name]) for name in ("model.npz", "holes.csv", "train.npz", "linked.npz", "known.csv")
    )
    for arguments in (
        ["fit", train, train, *FIT],
        ["fit", linked, train, *FIT],
        ["score", model, holes, holes],
        ["score", model, holes, model],
        ["score", model, holes, known, "--novelty", "--calibration", known],
        ["impute", model, holes, holes],
        ["sample", model, "3", model],
    ):
        assert run(arguments) == 1, arguments
        assert "which the command reads" in capsys.readouterr().err
    assert before == {name: path.read_bytes() for name, path in kept.items()}


def test_wrong_arguments(folder, capsys):
    for arguments in (
        [],
        ["guess"],
        ["fit"],
        ["sample", "m", "0", "out.npy"],
        ["fit", "a.csv", "m.npz", "--trees", "0"],
        ["fit", "a.csv", "m.npz", "--depth", "-1"],
        ["impute", "m", "a", "b", "--interval", "1.5"],
    ):
        with pytest.raises(SystemExit) as stop:
            run(arguments)
        assert stop.value.code == 2
    capsys.readouterr()
    with mock.patch("geode_jax.cli.commands.open_table", side_effect=KeyboardInterrupt):
        assert run(["score", str(folder / "model.npz"), "a.csv", "b.csv"]) == 130
    with pytest.raises(SystemExit) as stop:
        run(["--help"])
    assert stop.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_an_error_without_words_is_named(folder, capsys):
    with mock.patch("geode_jax.cli.commands.open_table", side_effect=MemoryError):
        assert run(["score", str(folder / "model.npz"), "a.csv", "b.csv"]) == 1
    assert capsys.readouterr().err == "error: MemoryError\n"


@pytest.mark.slow
def test_as_a_program():
    found = subprocess.run([sys.executable, "-m", "geode_jax", "score", "a", "b", "c"], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("error: ")


def test_tables_without_pyarrow(tmp_path):
    with mock.patch.dict(sys.modules, {"pyarrow.parquet": None, "pyarrow": None}):
        with pytest.raises(TableError, match="pip install"):
            open_table(tmp_path / "x.parquet", 10)
        with pytest.raises(TableError, match="pip install"), new_table(tmp_path / "x.parquet", 1, ["a"]):
            pass


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        ("1;2,5;NA\n4;?;6\n", ["--delimiter", ";", "--decimal", ","]),
        ("1\t2.5\tN/A\n4\tnull\t6\n", ["--delimiter", r"\t"]),
        ("\ufeff1,2.5,#N/A\n\n4,,6\n", []),
        ("7,8,9\n1,2.5,n/a\n4,<NA>,6\n", ["--header"]),
        ("1,2.5,nan\n4,None,6\n", ["--no-header"]),
        ('"1","2,5",NA\n"4",,"6"\n', ["--decimal", ",", "--no-header"]),
        ('a,b,c\n1,"2,5",NA\n"4",,"6"\n', ["--decimal", ","]),
        ("1,2.5,NA\n   \n4,,6\n   \n", ["--no-header"]),
        ('"a", "b", "c"\n1, "2.5", NA\n"4",   , 6\n', ["--columns", "a,b,c"]),
        ("1 2.5 NA\n4  6\n", ["--delimiter", " ", "--no-header"]),
    ],
)
def test_text_formats(tmp_path, content, arguments):
    (tmp_path / "x.csv").write_text(content, encoding="utf-8")
    options = parser().parse_args(["score", "model", str(tmp_path / "x.csv"), "out.csv", *arguments])
    rows = _table(options, 1).whole()
    np.testing.assert_array_equal(rows, [[1.0, 2.5, np.nan], [4.0, np.nan, 6.0]])


def test_an_interrupted_fit_says_what_it_saved(folder, capsys):
    """130 whether or not there are draws to save; with some, the model is there."""
    arguments = ["fit", str(folder / "train.csv"), str(folder / "early.npz"), *FIT, "--draws", "200"]
    advance, count = _Run.advance, iter(range(9))

    def stopped(self):
        if next(count) == 2:
            raise KeyboardInterrupt
        advance(self)

    with mock.patch.object(_Run, "advance", stopped), pytest.warns(RuntimeWarning, match="interrupted"):
        assert run(arguments) == 130
    assert f"saved a model with 90 of 200 draws per chain to {folder / 'early.npz'}" in capsys.readouterr().err
    assert geode_jax.GeodeDensity.load(folder / "early.npz").posterior_.num_draws == 90
    scores = mock.patch("geode_jax.estimators.density.held_out_log_density", side_effect=KeyboardInterrupt)
    with scores, pytest.warns(RuntimeWarning, match="interrupted"):
        assert run([*arguments[:2], str(folder / "late.npz"), *FIT]) == 130
    assert "saved the whole model, but not the densities that --novelty without" in capsys.readouterr().err
    assert run(["info", str(folder / "late.npz")]) == 0
    with mock.patch.object(_Run, "advance", side_effect=KeyboardInterrupt):
        assert run([*arguments[:2], str(folder / "none.npz"), *FIT]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not (folder / "none.npz").exists()


def test_an_interrupted_fit_with_a_checkpoint_says_where_it_goes_on(folder, capsys):
    arguments = ["fit", str(folder / "train.csv"), str(folder / "none.npz"), *FIT, "--checkpoint", str(folder / "kept")]
    with mock.patch.object(_Run, "advance", side_effect=KeyboardInterrupt):
        assert run(arguments) == 130
    assert f"goes on from {folder / 'kept'}" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_the_fit(folder, capsys, monkeypatch):
    (folder / "taken.npz").mkdir()
    arguments = ["fit", str(folder / "train.csv"), str(folder / "taken.npz"), *FIT]
    with mock.patch.object(geode_jax.GeodeDensity, "fit", side_effect=AssertionError):
        assert run(arguments) == 1
        assert "expected a regular file to replace" in capsys.readouterr().err
        monkeypatch.setattr("os.access", lambda *_: False)
        assert run([*arguments[:2], str(folder / "new.npz"), *FIT]) == 1
        assert "expected a folder that may be written to" in capsys.readouterr().err


def test_empty_lines_are_no_rows(tmp_path):
    (tmp_path / "x.csv").write_text("\n\na,b\n\n1,2\n\n3,x\n")
    table = open_table(tmp_path / "x.csv", 1)
    assert table[:2] == (2, ["a", "b"])
    np.testing.assert_array_equal(next(table.chunks), [[1, 2]])
    with pytest.raises(TableError, match="line 7, column 'b'"):
        next(table.chunks)


def test_spaces_in_a_table_of_one_column_are_a_missing_value(tmp_path):
    (tmp_path / "x.csv").write_text("a\n1\n \n\n3\n")
    np.testing.assert_array_equal(open_table(tmp_path / "x.csv", 9).whole(), [[1], [np.nan], [3]])


def test_a_decimal_comma_may_come_late(tmp_path):
    """Whole numbers come without quotes; only a file with no decimal comma at all cannot be told from other cells."""
    (tmp_path / "x.csv").write_text('a,b\n0,2\n"1,5",3\n')
    table = open_table(tmp_path / "x.csv", 9, TextFormat(decimal=","))
    np.testing.assert_array_equal(table.whole(), [[0, 2], [1.5, 3]])
    (tmp_path / "x.csv").write_text("a,b\n0,2\n1,5\n")
    with pytest.raises(TableError, match="expected another delimiter than the decimal ','"):
        open_table(tmp_path / "x.csv", 9, TextFormat(decimal=","))


def test_names_with_spaces_and_commas(tmp_path, data, capsys):
    """pandas keeps spaces after commas, which the command line leaves out."""
    model = geode_jax.GeodeDensity(num_trees=1, max_rank=3, depth=2, num_warmup=10, num_samples=10, random_state=0)
    names = ["a", " b", " c", " d,e", " f", " g"]
    frame = pd.DataFrame(data, columns=names)
    model.fit(frame).save(tmp_path / "model.npz")
    frame.to_csv(tmp_path / "x.csv", index=False)
    frame.to_parquet(tmp_path / "x.parquet")
    for suffix in (".csv", ".parquet"):
        for more in ([], ["--columns", 'a, b, c, "d,e", f, g']):
            arguments = [str(tmp_path / "model.npz"), str(tmp_path / f"x{suffix}"), str(tmp_path / "out.csv"), *more]
            assert run(["score", *arguments, "--quiet"]) == 0, capsys.readouterr().err
    np.testing.assert_allclose(_read(tmp_path / "out.csv")[:, 0], model.score_samples(frame), rtol=1e-5)


def test_no_two_columns_of_intervals_have_one_name(folder, tmp_path, capsys, data):
    names = ["a", "a_lower", "c", "d", "e", "f"]
    pd.DataFrame(data, columns=names).to_csv(tmp_path / "train.csv", index=False)
    assert run(["fit", str(tmp_path / "train.csv"), str(tmp_path / "model.npz"), *FIT]) == 0
    arguments = [str(tmp_path / name) for name in ("model.npz", "train.csv", "out.csv")]
    assert run(["impute", *arguments, "--interval", "0.9", "--quiet"]) == 1
    assert "--interval: expected no column 'a_lower', the name of a column of intervals" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
    assert run(["impute", *arguments, "--quiet"]) == 0


@pytest.mark.parametrize("place", ["nowhere/out.csv", "out.xlsx"])
def test_a_place_for_results_is_looked_at_first(folder, place, capsys):
    """Not after the table was read to its end."""
    for command in (["score"], ["impute", "--interval", "0.5"]):
        with mock.patch("geode_jax.cli.commands.open_table", side_effect=AssertionError):
            assert run([*command, str(folder / "model.npz"), str(folder / "whole.csv"), str(folder / place)]) == 1
        assert f"{place}: expected a file" in capsys.readouterr().err


def test_parquet_columns_with_nothing_or_with_yes_and_no(tmp_path):
    frame = pd.DataFrame(
        {"a": pd.array([True, None, False], "boolean"), "b": [None, None, None], "c": [1.0, None, 3.0]}
    )
    frame.to_parquet(path := tmp_path / "x.parquet")
    nan = np.nan
    np.testing.assert_array_equal(open_table(path, 2).whole(), [[1, nan, 1], [nan, nan, nan], [0, nan, 3]])


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"geode_jax {geode_jax.__version__}"


def test_some_columns_and_an_index(folder, capsys, data):
    """Tables as pandas writes them, with text beside the numbers: what is chosen is what the model knows."""
    model, out = str(folder / "model.npz"), folder / "chosen.csv"
    numbers = pd.DataFrame(data[:9], columns=NAMES)
    frame = numbers.set_index([[f"row {number}" for number in range(9)]])
    frame.insert(0, "city", "Rome")

    def score(path, *options):
        status = run(["score", model, str(path), str(out), "--quiet", *options])
        return status, capsys.readouterr().err

    expected = geode_jax.GeodeDensity.load(model).score_samples(numbers)
    for suffix, write_to in ((".csv", pd.DataFrame.to_csv), (".parquet", pd.DataFrame.to_parquet)):
        path = folder / f"frame{suffix}"
        write_to(frame, path)
        assert score(path, "--columns", ",".join(NAMES)) == (0, "")
        np.testing.assert_allclose(_read(out)[:, 0], expected, rtol=1e-5)
        found = open_table(path, 4, choice=Choice(("e", "b", "f")))
        assert found.names == ["e", "b", "f"]
        np.testing.assert_array_equal(found.whole(), numbers[["e", "b", "f"]])
        mixed = ["e", "b", "f", "a", "d", "c"]
        assert "got another order" in score(path, "--columns", ",".join(mixed))[1]
        write_to(frame[["city", *mixed]], path)
        assert score(path, "--columns", ",".join(NAMES)) == (0, "")
        np.testing.assert_allclose(_read(out)[:, 0], expected, rtol=1e-5)
        assert "expected different names" in score(path, "--columns", f"{NAMES[0]},{NAMES[0]}")[1]
        assert "found no 'village'" in score(path, "--columns", "village")[1]
        assert "pass --index" in score(path)[1]
    kept = numbers.iloc[[0, 1, 3, 6]]  # pandas puts the index of such a frame last
    kept.to_parquet(path := folder / "kept.parquet")
    assert "an index, '__index_level_0__'" in score(path)[1]
    assert score(path, "--index") == (0, "")
    np.testing.assert_array_equal(open_table(path, 4, choice=Choice(has_index=True)).whole(), kept)
    numbers.reset_index(drop=True).to_parquet(path := folder / "plain.parquet")  # a range is no column
    assert "expected an index that pandas stored, found none" in score(path, "--index")[1]
    assert score(path) == (0, "")
    numbers.to_csv(path := folder / "numbered.csv")
    assert "pass --index" in score(path)[1]
    assert score(path, "--index") == (0, "")
    np.testing.assert_array_equal(open_table(path, 4, choice=Choice(has_index=True)).whole(), numbers)
    np.save(path := folder / "numbered.npy", numbers.reset_index())
    assert score(path, "--index") == (0, "")
    assert "leave out --columns" in score(path, "--columns", "a")[1]
    np.save(path, np.arange(3.0)[:, None])
    assert "beside the index" in score(path, "--index")[1]
    np.save(path, np.empty((3, 0)))
    assert "expected 6 columns, got 0" in score(path)[1]
    (folder / "blank.csv").write_text(" , \n1,2\n")
    np.testing.assert_array_equal(open_table(folder / "blank.csv", 4).whole(), [[np.nan, np.nan], [1, 2]])


def test_whole_numbers_that_floats_hold(tmp_path):
    frame = pd.DataFrame({"a": [2**60, 10**16, -(2**53)], "b": pd.array([2**63, None, 1], "UInt64")})
    frame.to_parquet(tmp_path / "x.parquet")
    frame.to_csv(tmp_path / "x.csv", index=False)
    for suffix in ("parquet", "csv"):
        found = open_table(tmp_path / f"x.{suffix}", 9).whole()
        np.testing.assert_array_equal(found, [[2**60, 2**63], [10**16, np.nan], [-(2**53), 1]])


def test_numbers_that_are_the_models_names(tmp_path, data, capsys):
    """Columns called by numbers, as pandas calls them, are told from a row once the model has these names."""
    frame = pd.DataFrame(data)
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert run(["fit", str(tmp_path / "train.csv"), str(tmp_path / "model.npz"), "--header", *FIT]) == 0
    arguments = ["score", *(str(tmp_path / name) for name in ("model.npz", "train.csv", "out.csv")), "--quiet"]
    assert run(arguments) == 0
    assert len(_read(tmp_path / "out.csv")) == len(data)
    frame[[2, 0, 1, 3, 5, 4]].to_csv(tmp_path / "train.csv", index=False)
    assert run(arguments) == 1
    assert "expected the columns of the training table, got another order" in capsys.readouterr().err
    assert run([*arguments, "--columns", "0,1,2,3,4,5"]) == 0
    assert len(_read(tmp_path / "out.csv")) == len(data)
