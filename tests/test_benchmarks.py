"""Benchmarks run at their tiny size; those whose data are not at hand are skipped."""

import inspect
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import jax
import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LinearRegression

import geode_jax
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
    figures,
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
    overview,
    partition_calls,
    processes,
    readme,
    real_data,
    refined_cuts,
    rivals,
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
from benchmarks.__main__ import experiments
from benchmarks.__main__ import main as entry_point
from benchmarks.common import earlier_rows, find_data
from benchmarks.tables import finished
from geode_jax import DictionarySettings, NoiseCovariance, learn_forest
from geode_jax.partition.metis import Partition
from geode_jax.settings import SliceMembership

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _one_core(monkeypatch):
    """Rivals use the core that a worker of the tests has: threads on all cores would wait for other workers."""
    monkeypatch.setattr("benchmarks.common.cpu_count", lambda: 1)


def _needs(name):
    """Skip where a data file is not at hand: it is not ours to ship."""
    try:
        find_data(name)
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_frey():
    _needs("frey_faces.npz")
    rows = frey_inpainting.main(["--quick"])
    some = {"published", "default", "KNNImputer", "normal of the nearest frames", "Gaussian mixture after PCA"}
    assert some < {row["method"] for row in rows}
    assert all(0 < row["mae"] < 25 for row in rows)


@pytest.mark.slow
def test_frey_missing():
    _needs("frey_faces.npz")
    rows = frey_missing.main(["--quick"])
    assert [row["missing"] for row in rows if row["method"] == "GEODE"] == [0.0, 0.2, 0.5]
    assert all(0 < row["mae"] < 25 for row in rows)


@pytest.mark.slow
def test_missing_time():
    rows = missing_time.main(["--quick"])
    assert len({row["partial_rows_mebibytes"] for row in rows}) == 1  # whatever the number of features


@pytest.mark.slow
def test_mnist():
    _needs("mnist.npz")
    ours, published, *rivals = mnist.main(["--quick"])
    assert ours["method"].startswith("GEODE")
    assert published["method"].startswith("published")
    assert len(rivals) == 2
    assert all(row["error_percent"] < 25 for row in (ours, *rivals))
    assert published["error_percent"] < 60  # five draws of one tree
    assert ours["half_error_percent"] < ours["mean_filled_error_percent"]


@pytest.mark.slow
def test_smoothness():
    rows = smoothness.main(["--quick"])
    assert 0.3 < rows[0]["geode"] < 4
    assert 0.3 < min(rows[0]["mpcr_tuned"]) < 4


@pytest.mark.slow
def test_scenarios():
    rows = scenarios.main(["--quick"])
    assert {row["missing"] for row in rows} == {0.0, 0.2}
    assert all(row["mse"] < 1000 for row in rows)


@pytest.mark.parametrize("number", list(scenarios.SCENARIOS))
def test_scenarios_have_noise_of_one(number):
    """All but the directions of the signal, of which none has more than 27, are noise."""
    rows = scenarios.scenario_rows(np.random.default_rng(0), number, 200, 600)
    singular = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    noise = np.sum(singular[30:] ** 2) / rows.size
    assert 0.6 < noise < 1.0  # the 30 directions removed have their share of it
    assert np.sum(singular[:30] ** 2) / rows.size > 5


def test_multiscale_regression():
    """At the root it is least squares on all components; at finer scales a cell's own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    y = x @ [1.0, 2.0, 0.0, -1.0, 0.5] + 3.0
    x[:30, 0] += 30.0
    y[:30] += 100.0
    cells = [np.arange(60), np.arange(30), np.arange(30, 60)]
    found = smoothness.multiscale_regression(x, y, x[::7], Partition(1, tuple(cells)))
    all_components = smoothness.COMPONENTS.index(5)
    design = np.column_stack([np.ones(60), x])
    expected = (design @ np.linalg.lstsq(design, y, rcond=None)[0])[::7]
    np.testing.assert_allclose(found[0, all_components], expected, rtol=1e-6)
    np.testing.assert_allclose(found[1, all_components], y[::7], rtol=1e-6)


def test_calibration_error():
    probability = np.array([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]])
    assert mnist.calibration_error(probability, np.array([0, 1, 1, 1])) == pytest.approx(0.5 * 0.4 + 0.5 * 0.3)


def test_deskewing_makes_a_slanted_line_upright():
    image = np.zeros((28, 28), np.float32)
    rows = np.arange(6, 22)
    image[rows, 9 + rows // 2] = 255.0
    upright = mnist.deskewed(image.reshape(1, -1)).reshape(28, 28)
    columns = (upright * np.arange(28)).sum(axis=1)[8:20] / upright.sum(axis=1)[8:20]
    assert np.ptp(columns) < 1.5
    assert columns.mean() == pytest.approx(13.5, abs=0.7)


def test_missing_data_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.delenv("GEODE_JAX_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"not found in .* GEODE_JAX_DATA"):
        find_data("frey_faces.npz")


def test_partition_calls():
    rows = partition_calls.main(["--quick"])
    assert rows


@pytest.mark.slow
def test_digits_density():
    rows = digits_density.main(["--quick"])
    some = {"published", "mixture of factor analysers", "Gaussian mixture after PCA", "kernel density"}
    assert some < {row["method"] for row in rows}
    assert all(-250 < row["nats"] < -90 for row in rows)


def test_low_rank_mixtures_find_their_own_kind():
    """Two noisy lines, one of the features louder: EM reaches the density of the truth, and its noise."""
    rng = np.random.default_rng(0)
    lines, noise = rng.normal(size=(2, 1, 6)), np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.5])
    side = np.arange(600) % 2
    x = 3.0 * side[:, None] + rng.normal(size=(600, 1)) * lines[side, 0] + noise * rng.normal(size=(600, 6))
    truth = rivals.NormalMixture(
        "truth",
        np.full(2, 0.5),
        np.array([np.zeros(6), np.full(6, 3.0)]),
        np.swapaxes(lines, 1, 2) * lines + np.diag(noise**2),
    )
    found = {kind: rivals.low_rank_mixture(x[:500], 2, 1, 0, noise_per_feature=kind) for kind in (True, False)}
    density = {kind: mixture.log_density(x[500:]).mean() for kind, mixture in found.items()}
    assert density[True] == pytest.approx(truth.log_density(x[500:]).mean(), abs=0.15)
    assert density[False] < density[True] - 0.3


def test_principal_normal_is_a_normal_of_low_rank():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 3)) @ rng.normal(size=(3, 8)) + rng.normal(size=(100, 8))
    found = rivals._principal_normal(x, 3)
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    noise = values[:5].mean()
    covariance = (vectors[:, 5:] * (values[5:] - noise)) @ vectors[:, 5:].T + noise * np.eye(8)
    dense = rivals.NormalMixture("dense", np.ones(1), x.mean(axis=0)[None], covariance[None])
    np.testing.assert_allclose(found.log_density(x), dense.log_density(x))
    hidden = np.where(rng.random(x.shape) < 0.5, np.nan, x)
    for ours, theirs in zip(found.impute(hidden, 0.9), dense.impute(hidden, 0.9), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_mixture_on_components_has_the_variance_of_the_rest():
    """Two clusters along a line: the mixture finds them there, and off the line one variance for all."""
    rng = np.random.default_rng(0)
    axis = np.array([0.6, 0.8, 0.0, 0.0])
    along = np.where(np.arange(400) < 200, -4.0, 4.0) + rng.normal(size=400)
    x = 5.0 + along[:, None] * axis + 0.1 * rng.normal(size=(400, 4))
    found = rivals.mixture_on_components(x, (1,), (1, 2), 0)
    assert sorted(((found.means - 5.0) @ axis).round()) == [-4.0, 4.0]
    values = np.linalg.eigvalsh(found.covariances)
    np.testing.assert_allclose(values[:, :3], 0.01, rtol=0.1)
    np.testing.assert_allclose(values[:, 3], 1.0, rtol=0.2)


@pytest.mark.parametrize("shape", [(20, 5), (12, 40)])
def test_shrinkage_by_products_of_rows(shape):
    x = np.random.default_rng(0).normal(size=shape) * np.linspace(0.5, 3.0, shape[1])
    x -= x.mean(axis=0)
    assert 0.05 < ledoit_wolf_shrinkage(x) < 0.95
    assert rivals.shrinkage_of(x) == pytest.approx(ledoit_wolf_shrinkage(x))


def test_normal_of_the_nearest_rows():
    """With all rows it is scikit-learn's shrunk normal; on a curve a few are better."""
    rng = np.random.default_rng(0)
    t = rng.uniform(-2.0, 2.0, (300, 1))
    x = np.sin(t * rng.normal(size=8) + rng.uniform(0.0, 6.0, 8)) + 0.02 * rng.normal(size=(300, 8))
    hidden = np.where(rng.random((30, 8)) < 0.5, np.nan, x[270:])
    everything = rivals.NearestNormal(x[:270], 270)
    dense = rivals.shrunk_gaussian(x[:270])
    for ours, theirs in zip(everything.impute(hidden, 0.9), dense.impute(hidden, 0.9), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    without_matrices = rivals.shrunk_low_rank(x[:270])
    np.testing.assert_allclose(without_matrices.log_density(x[270:]), dense.log_density(x[270:]), rtol=1e-6)
    local = rivals.nearest_normal(x[:270], (10, 20, 220), 0)
    error = {
        name: np.abs(model.impute(hidden, 0.9)[0] - x[270:]).mean()
        for name, model in {"local": local, "all": everything}.items()
    }
    assert local._count < 220
    assert error["local"] < 0.7 * error["all"]


def test_row_process_is_that_of_scikit_learn():
    """The kernel by one product, and one Cholesky factor a row, give what the library gives."""
    rng = np.random.default_rng(0)
    x = np.sin(rng.normal(size=(70, 2)) @ rng.normal(size=(2, 12))) + 0.1 * rng.normal(size=(70, 12)) + 3.0
    found = rivals.RowProcess(x[:60], 0, 40)
    hidden = np.where(rng.random((10, 12)) < 0.5, np.nan, x[60:])
    filled, lower, upper = found.impute(hidden, 0.9)
    for i, row in enumerate(hidden):
        seen = ~np.isnan(row)
        process = GaussianProcessRegressor(found._kernel, optimizer=None, normalize_y=True)
        process.fit(found._inputs(x[:60], seen), x[:60][:, ~seen])
        mean, deviation = process.predict(found._inputs(row[None], seen), return_std=True)
        np.testing.assert_allclose(filled[i, ~seen], mean[0], rtol=1e-6)
        np.testing.assert_allclose((upper - lower)[i, ~seen], 2 * 1.6448536 * deviation[0], rtol=1e-6)
        np.testing.assert_array_equal(filled[i, seen], row[seen])


def test_many_targets_have_the_likelihood_of_all():
    """That of thirty targets of eight rows, by eight columns."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(8, 2)), rng.normal(size=(8, 2)) @ rng.normal(size=(2, 30)) + 5.0
    kernel = ConstantKernel() * RBF(1.0) + WhiteKernel(0.5)
    few = rivals._as_few_targets(targets)
    assert few.shape == (8, 8)
    found = GaussianProcessRegressor(kernel, optimizer=None).fit(inputs, few)
    every = GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(inputs, targets)
    for theta in rng.normal(size=(3, 3)):
        likelihood = 30 / 8 * found.log_marginal_likelihood(theta)
        np.testing.assert_allclose(likelihood, every.log_marginal_likelihood(theta), rtol=1e-9)


@pytest.mark.slow
def test_real_data():
    rows = real_data.main(["--quick"])
    densities = {"GEODE", "probabilistic PCA", "Gaussian, Ledoit-Wolf", "Gaussian mixture after PCA"}
    assert {row["method"] for row in rows if "nats_per_feature" in row} == densities
    others = {"KNNImputer", "normal of the nearest rows", "Gaussian process from the seen"}
    assert {row["method"] for row in rows} == densities | others
    assert all(0 < row["mae"] < 10 for row in rows)


def test_methods_are_compared_with_ours_row_by_row():
    """Also where ours is done: it is fitted again, and has its row once."""
    rng = np.random.default_rng(0)
    data = real_data.Rows(rng.normal(size=(40, 6)), rng.normal(size=(30, 6)))
    hidden = np.random.default_rng(1).random((30, 6)) < 0.5

    def filling_with(value):
        return lambda: MagicMock(
            spec=["transform", "log_density"],
            transform=lambda masked: np.where(np.isnan(masked), value, masked),
            log_density=lambda rows: 6.0 * value + rows[:, 0],
        )

    methods = {"GEODE": filling_with(0.0), "far": filling_with(3.0), "as done": None}
    done = [{"data": "it", "method": name, "mae": 1.0, "against ours": {}} for name in ("GEODE", "as done")]
    rows = real_data.measure_all("it", {"it": lambda: data}, lambda *_: methods, done, quick=True)
    assert [row["method"] for row in rows] == ["as done", "GEODE", "far"]
    assert rows[1]["mae"] == pytest.approx(np.abs(data.test[hidden]).mean())
    assert rows[2]["mae"] == pytest.approx(np.abs(data.test[hidden] - 3.0).mean())
    error, density = (rows[2]["against ours"][name] for name in ("mae", "nats_per_feature"))
    assert error["gain"] == pytest.approx(rows[2]["mae"] - rows[1]["mae"])
    assert 0.9 < error["rows"] <= 1.0
    assert error["gain_se"] > 0.0
    assert density["gain"] == density["median"] == pytest.approx(-3.0)
    assert [density["rows"], density["gain_se"]] == pytest.approx([0.0, 0.0])
    lines = real_data.pairs_of(rows)
    assert "| it | nats per feature | far | -3.000 (0.000) | -3.000 | 0% |" in lines
    assert "against ours" not in rows[0]  # it was compared with another fit of ours
    assert real_data.measure_all("it", {"it": lambda: data}, lambda *_: methods, rows, quick=True) == rows
    again = real_data.measure_all(
        "it", {"it": lambda: data}, lambda *_: methods | {"new": methods["far"]}, rows, quick=True
    )
    assert [row.get("against ours") for row in again if row["method"] in ("far", "new")] == [
        rows[2]["against ours"]
    ] * 2
    assert real_data.pairs_of(rows[:2]) == []


def test_imputers_of_tables_that_miss_values():
    x = np.outer(np.linspace(1.0, 2.0, 30), np.linspace(1.0, 2.0, 12))
    holes = np.where(np.random.default_rng(0).random(x.shape) < 0.2, np.nan, x)
    np.testing.assert_allclose(rivals.Interpolation(x).transform(holes)[:, 1:-1], x[:, 1:-1], atol=0.3)
    lines = rivals.Interpolation(np.array([[1.0, 5.0, 6.0, np.nan], [3.0, 5.0, 6.0, 7.0]]))
    given = np.array([[1.0, np.nan, 3.0, np.nan], [np.nan] * 4])
    assert lines.transform(given).tolist() == [[1.0, 2.0, 3.0, 3.0], [2.0, 5.0, 6.0, 7.0]]
    rng = np.random.default_rng(1)
    plane = 5.0 + rng.normal(size=(90, 2)) @ rng.normal(size=(2, 12))
    holes = np.where(rng.random(plane.shape) < 0.2, np.nan, plane)
    soft = rivals.SoftImpute(holes[:60])
    for found, rows in ((soft.completed(), slice(0, 60)), (soft.transform(holes[60:]), slice(60, 90))):
        is_hidden = np.isnan(holes[rows])
        np.testing.assert_allclose(found[~is_hidden], plane[rows][~is_hidden])
        off = np.abs(found - plane[rows])[is_hidden].mean()
        assert off < 0.3 * np.abs(5.0 - plane[rows])[is_hidden].mean()


def test_chained_imputers_use_all_their_rounds():
    """Complete training rows too, from which scikit-learn's imputer would learn to fill in new rows in one round."""
    x = np.random.default_rng(0).normal(size=(60, 2)) @ np.random.default_rng(1).normal(size=(2, 6))
    assert kinds._chained(x, LinearRegression(), 7).n_iter_ == 7
    x[::7, 3] = np.nan
    assert kinds._chained(x, LinearRegression(), 7).n_iter_ == 7


@pytest.mark.slow
def test_kinds():
    """Every data set with every method; where values are missing, of ours and of rivals that allow it."""
    rows = kinds.main(["--quick"])
    of = {name: {row["method"] for row in rows if row["data"] == name} for name in {row["data"] for row in rows}}
    assert {"GEODE", "Gaussian mixture, BIC", "Gaussian process from the seen", "chained ridge"} < of["wine"]
    assert of["wine, some values missing"] > {"GEODE", "KNNImputer", "soft-impute", "chained boosted trees"}
    compared = [row["method"] for row in rows if "mae" in row.get("against ours", {})]
    assert compared == [row["method"] for row in rows if "mae" in row and row["method"] != "GEODE"]
    unfit = {"neural spline flow", "lines between columns"}  # without values filled in, or of columns in no order
    assert all(0 < row["mae"] < 1 for row in rows if row["method"] not in unfit)
    is_dense = ["nats_per_feature" in row for row in rows if row["method"] == "GEODE"]
    assert is_dense == [True, False]


def test_patches_held_out_have_no_pixels_of_training():
    picture = np.broadcast_to(np.arange(30.0)[None, :, None], (10, 30, 3))
    train, test = real_data.patches(picture, 4, 50, 20)
    assert train.shape == (50, 48)
    assert np.floor(train).max() < np.floor(test).min()


@pytest.mark.slow
def test_swiss_roll():
    rows = swiss_roll.main(["--quick"])
    assert {row["shape"] for row in rows} == {"flat", "bent"}
    oracle = next(row["nats"] for row in rows if row["method"] == "oracle")
    assert all(row["nats"] < oracle for row in rows if row["shape"] == "flat" and row["method"] != "oracle")


@pytest.mark.slow
def test_mixed_units():
    rows = mixed_units.main(["--quick"])
    nats = {row["method"]: row["nats"] for row in rows}
    assert nats["GEODE"] == pytest.approx(nats["GEODE, standardised"], abs=1.0)
    assert nats["GEODE"] > nats["Gaussian, Ledoit-Wolf"] - 1.0
    errors = [row["error of the difference"] for row in rows]
    assert errors[0] == 0.0
    assert min(errors[1:]) > 0.0


def test_repeated_values_are_spread():
    x, spread = (np.asarray(mixed_units.TABLES[f"diabetes{kind}"]()) for kind in ("", ", repeated values spread"))
    changed = (x != spread).any(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(changed), [1, 7])
    assert np.abs(x - spread).max() < 0.5
    assert min(np.unique(spread[:, column]).size for column in (1, 7)) == len(x)


@pytest.mark.slow
def test_whole_fit():
    (row,) = whole_fit.main(["--quick"])
    assert row["rows"] == 105
    assert min(row["fit, first"], row["stage one, again"], row["sampler, again"], row["milliseconds a row"]) > 0
    assert np.isfinite([row["nats"], *(rival["nats"] for rival in row["rivals"].values())]).all()


@pytest.mark.slow
def test_choices():
    rows = choices.main(["--quick"])
    assert rows
    assert np.isfinite([row["score_gain"] for row in rows]).all()


@pytest.mark.slow
def test_dimension():
    rows = dimension.main(["--quick"])
    assert rows[0]["right"] > 0.9
    assert all(row["whole"] is None or row["whole"] > 0 for row in rows[1:])
    assert {(row["data"], row["dimension"]) for row in rows} == {("linear", "2"), ("real", "iris")}


@pytest.mark.slow
def test_coverage():
    (row,) = coverage.main(["--quick"])
    assert 0.8 < row["coverage"] < 1.0


def test_who_misses_what():
    for kind, is_cut in (("missing by an observed feature", False), ("never seen beyond a threshold", True)):
        train, truth, holes = coverage.KINDS[kind](np.random.default_rng(0))
        assert not np.isnan(truth).any()
        assert 0.2 < np.isnan(train).mean() < 0.3
        hidden = np.isnan(holes).any(axis=1)
        assert truth[hidden, 0].mean() > truth[~hidden, 0].mean()
        assert (truth[hidden, 0].min() >= truth[~hidden, 0].max()) == is_cut


@pytest.mark.slow
def test_soak(capsys):
    rows = soak.main(["--quick"])
    assert sum(row["fits"] for row in rows) == 3
    assert sum(row["predictions"] for row in rows) > 20
    assert not any(row["breaches"] for row in rows), capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1075])
def test_cases_that_once_broke_the_contract(seed):
    """1075: variances beyond what float32 resolves, so that a Cholesky factor of observed features did not exist."""
    _, fit, found = soak.run_case(seed)
    assert fit == "fitted"
    assert {what for _, what in found} == {"kept"}


@pytest.mark.slow
def test_a_soak_sees_a_breach(monkeypatch, capsys):
    """An answer that is not finite is kept with its seed."""
    honest = geode_jax.log_density
    monkeypatch.setattr(geode_jax, "log_density", lambda *given, **more: honest(*given, **more) * np.nan)
    rows = soak.main(["--quick"])
    assert any({"seed": 0, "what": "density, near"} in row["cases"] for row in rows)
    assert "density, near: broken" in capsys.readouterr().out


@pytest.mark.slow
def test_stage_one():
    rows = stage_one.main(["--quick"])
    assert [row["setting"] for row in rows] == ["default", "num_trees"]
    assert np.isfinite([row["nats"] for row in rows]).all()


@pytest.mark.slow
def test_refined_cuts():
    (row,) = refined_cuts.main(["--quick"])
    assert row["gain"] == pytest.approx(row["refined"] - row["METIS"])
    assert row["gain"] != 0.0


@pytest.mark.slow
def test_noise_prior():
    (row,) = noise_prior.main(["--quick"])
    assert row["gain"] == pytest.approx(row["typical"] - row["added"])
    assert row["gain"] != 0.0


@pytest.mark.slow
def test_mixing():
    rows = mixing.main(["--quick"])
    assert {row["variant"] for row in rows} == {"exact", "exact, slices", "published"}
    for row in rows:
        assert len(row["nats_of_single"]) == len(row["stacking_weights"]) == 4
        assert row["nats_equal"] >= np.mean(row["nats_of_single"])


def test_stacking_weights_are_the_shares_of_rows_that_models_explain():
    log_density = np.full((40, 3), -300.0)
    log_density[:30, 0], log_density[30:, 1] = 2.0, -5.0
    np.testing.assert_allclose(mixing.stacking_weights(log_density), [0.75, 0.25, 0.0], atol=1e-12)


@pytest.mark.slow
def test_truncated_gamma():
    rows = truncated_gamma.main(["--quick"])
    assert all(row["ratio"] > 0 for row in rows)


def test_proofs(monkeypatch):
    """The limits of `benchmarks.proofs`, with stand-ins for the four proofs, which have test files of their own."""
    from benchmarks import proofs

    bug, planted, found, was_planted = "slice without division", MagicMock(), {}, []
    monkeypatch.setitem(proofs.bugs.BUGS, bug, lambda: planted)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests' programs

    def stand_in(module, name, value):
        stand_in = create_autospec(inspect.unwrap(getattr(module, name)), side_effect=lambda *_, **__: value())
        monkeypatch.setattr(module, name, stand_in)
        return stand_in

    def under_the_bug(name):
        was_planted.append(planted.__enter__.called and not planted.__exit__.called)
        return found[name]

    stand_in(proofs.identity, "relative_gap", lambda: under_the_bug("identity_gap"))
    stand_in(proofs.draws, "smallest_p_value", lambda: under_the_bug("draw_p"))
    joint = stand_in(proofs.joint, "z_scores", lambda: (np.array([0.0, -found["joint_z"]]), 4.5))
    ranks = stand_in(proofs.calibration, "p_values", lambda: np.full(64, found["calibration_p"] / 64))

    def caught(bug):
        planted.reset_mock()
        was_planted.clear()
        row = proofs.examine(bug, published=False, quick=True) if bug else proofs.main(["--quick"])[0]
        assert row.items() > found.items()
        assert set(was_planted) == {bug is not None}
        return [test for test in proofs.TESTS if row[test]]

    tolerance, draw, calibrated = proofs.identity.TOLERANCE, proofs.draws.LEVEL, proofs.calibration.LEVEL
    within = {"identity_gap": 0.9 * tolerance, "draw_p": 1.1 * draw, "joint_z": 4.4, "calibration_p": 1.1 * calibrated}
    beyond = {"identity_gap": tolerance, "draw_p": draw, "joint_z": 4.5, "calibration_p": 0.9 * calibrated}
    found |= within
    assert caught(None) == []
    for name, value in beyond.items():
        found |= within | {name: value}
        assert caught(bug) == [name.rpartition("_")[0]]
        assert joint.call_args.args[1:3] == ranks.call_args.args[1:3] == (SliceMembership(), bug)


def test_seconds_of_the_summary():
    """What was timed of what is shown; a row without times is none of 0 s."""
    rows = [
        {"method": "ours", "fit_seconds": 2.0, "impute_seconds": 3.0, "density_seconds": 9.0},
        {"method": "ours"},
        {"method": "rival", "seconds": 7.0},
    ]
    fits, filled = readme._OF_FITS, (*readme._OF_FITS, *readme._OF_FILLING_IN)
    assert readme._typical_seconds(rows, "ours", fits) == 2.0
    assert readme._typical_seconds(rows, "ours", filled) == 5.0
    assert readme._typical_seconds(rows, "rival", filled) == 7.0


def test_changes():
    """More density is a gain and more error is none; of splits those of both, and of methods our default."""

    def record(method, nats, mae, *splits):
        return [{"method": method, "data": "iris", "split": split, "nats": nats, "mae": mae} for split in splits]

    before, now = record("GEODE", -2.0, 0.5, 0, 1, 2), record("GEODE", -1.0, 0.75, 1, 2, 3)
    rows = changes.compare(before + record("rival", 0.0, 0.0, 1), now + record("rival", 9.0, 9.0, 1), ("data",))
    found = {row["what"]: row for row in rows}
    assert {row["data"] for row in found.values()} == {"iris"}
    assert {what: row["gain"] for what, row in found.items()} == {"held-out nats": 1.0, "mean abs. error": -0.25}
    assert {row["splits"] for row in found.values()} == {2}
    assert {row["gain_se"] for row in found.values()} == {0.0}
    rows = changes.main(["--quick"])
    assert {row["experiment"] for row in rows} == set(changes.EXPERIMENTS)
    assert {row["gain"] for row in rows} == {0.0}


def test_notes_are_of_experiments():
    names = {module.__name__.rpartition(".")[2] for module in readme.EXPERIMENTS}
    assert readme.OLDER.keys() | readme.TIMED.keys() <= names


def test_readme_shows_the_committed_results():
    assert readme.main(["--check"]) == 0


@pytest.mark.slow
def test_literal_sampler_agrees():
    """The paper's sampler as printed, one row and node after the other, and ours with the same settings."""
    for row in literal.main(["--quick"]):
        assert abs(row["log_sigma_literal"] - row["log_sigma_ours"]) < 0.1, row
        assert abs(row["share_literal"] - row["share_ours"]) < 0.25, row


@pytest.mark.slow
def test_sweep():
    (row,) = sweep.main(["--quick"])
    assert row["ratio"] > 0


@pytest.mark.slow
def test_compile_time():
    (row,) = compile_time.main(["--quick"])
    assert row["first_programs"] > 0 == row["cached_programs"]


@pytest.mark.slow
def test_contention():
    (row,) = contention.main(["--quick"])
    assert 0.0 < row["a copy"] < 60.0


@pytest.mark.slow
def test_devices():
    assert [row["devices"] for row in devices.main(["--quick"])] == ["one device", "2 x rows"]


@pytest.mark.slow
def test_wide():
    (row,) = wide.main(["--quick"])
    assert row["features"] == 1000
    assert row["dictionaries GB"] == pytest.approx(row["in all features GB"])  # small ones have all features
    assert 0.9 < row["error over noise"] < 2.0


@pytest.mark.slow
def test_processes():
    (row,) = processes.main(["--quick"])
    assert row["sums"] > 100
    assert row["passes"] > 1.0


@pytest.mark.slow
def test_features_time():
    assert all(row["stage_one_s"] > 0 and row["stage_two_s"] > 0 for row in features_time.main(["--quick"]))


@pytest.mark.slow
def test_inclusion():
    methods = [row["method"] for row in inclusion.main(["--quick"])]
    assert methods == ["default", "default, no span", "published"]


@pytest.mark.slow
def test_moments():
    (row,) = moments.main(["--quick"])
    assert row["mean off"] < 1.0
    assert 0.5 < row["median ratio"] < 2.0


@pytest.mark.slow
def test_overview(tmp_path):
    overview.main(["--quick", "--output", str(tmp_path / "overview.png")])
    assert (tmp_path / "overview.png").stat().st_size > 10_000


def test_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "PICTURES", tmp_path)
    figures.main()
    assert {path.stem for path in tmp_path.glob("*.png")} == set(figures.FIGURES)


@pytest.mark.slow
def test_tree_rows():
    _needs("mnist.npz")
    whole, part = tree_rows.main(["--quick"])
    assert np.isfinite([whole["nats"], part["nats"], part["gain"]]).all()


@pytest.mark.slow
def test_candidates():
    _needs("mnist.npz")
    rows = candidates.main(["--quick"])
    assert [row["candidates"] for row in rows] == [15, 4, 7]
    assert all(np.isfinite([row["nats"], row["lost mass"]]).all() for row in rows)


@pytest.mark.slow
def test_truncation():
    rows = truncation.main(["--quick"])
    assert {row["cut"] for row in rows} == {"depth", "rank"}
    assert all(0.0 <= row["measured"] <= 1.0 for row in rows)


HLO = """HloModule sweeps

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
}

%other (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %b = f32[4]{0} copy(%a)
}

%ends (p: f32[4]) -> pred[] {
  ROOT %b = pred[] fusion(%p), kind=kLoop, calls=%fused
}

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %c = (f32[4]{0}, s32[]) custom-call(%p), custom_call_target="cu_threefry2x32_ffi"
  %d = f32[4]{0} get-tuple-element(%c), index=0
  %e = f32[4]{0} while(%d), condition=%ends, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %g = f32[4]{0} while(%e), condition=%ends, body=%inner
  %j = (f32[4]{0}, f32[4]{0}, /*index=2*/u32[]) copy-start(%g)
  %k = f32[4]{0} copy-done(%j)
  %l = f32[4]{0} conditional(%s, %k, %k), branch_computations={%inner, %other}
  %m = f32[4]{0} conditional(%s, %l, %l), true_computation=%inner, false_computation=%other
  ROOT %f = f32[4]{0} call(%m), to_apply=%inner
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %n = f32[4]{0} while(%p), condition=%ends, body=%inner
  %h = f32[4]{0} copy(%n)
  ROOT %i = f32[4]{0} while(%h), condition=%ends, body=%body, backend_config={"known_trip_count":{"n":"50"}}
}
"""


def test_kernels_are_counted():
    """A sweep: 1 custom call, 3 rounds of a loop, 1 of one of unknown length, 1 copy, twice 2 of a branch, 1 call."""
    expected = gpu_compile.Count(kernels=1 + 50 * 11, unknown_loops=2, sweep=11, sweep_loops=1)
    assert gpu_compile.count_kernels(HLO, 50) == expected._replace(kernels=expected.kernels + 1)
    assert gpu_compile.count_kernels(HLO).sweep == gpu_compile.count_kernels(HLO).sweep_loops == 0


def test_programs_for_a_gpu_have_shapes():
    """No wheels are needed for that; what the sampler reads of 60,000 rows is 8 trees' statistics."""
    program = gpu_compile.sampler(60_000, 100, 8, 5, 20)
    assert program.bytes_read > 8 * 60_000 * 16 * 21 * 4
    chains = jax.eval_shape(program.function, *program.shapes)[0]
    assert chains.state.log_sigma2.shape[0] == 8


@pytest.mark.slow
def test_compiling_for_a_gpu():
    if gpu_compile.FOLDER not in os.environ:
        pytest.skip(f"{gpu_compile.FOLDER} does not name the folder of JAX's CUDA plugin")
    (row,) = gpu_compile.main(["--quick"])
    assert row["kernels"] > 0
    assert row["loops of unknown length"] == 0


@pytest.mark.slow
def test_gpu():
    """On whatever device there is."""
    _needs("mnist.npz")
    rows = gpu.main(["--quick"])
    assert [row["part"] for row in rows] == ["sweeps", "products", "fits", "density", "classes"]
    assert {row["platform"] for row in rows} == {jax.default_backend()}
    by_part = {row["part"]: row for row in rows}
    assert by_part["sweeps"]["sweep ms"] > 0.0
    assert min(by_part["products"][name] for name in ("NumPy ms", "device ms")) > 0.0
    assert np.isfinite(by_part["density"]["nats"])
    assert 0.0 <= by_part["classes"]["error_percent"] < 60.0


def test_gpu_parts_replace_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.RESULTS", tmp_path)
    kept, rounds = [], []

    def write(name, settings, rows):
        kept[:] = rows
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))

    def stand_in(part, data, platform):
        return [{"part": part, "platform": platform, "data": data or None, "round": rounds[-1]} for _ in range(2)]

    monkeypatch.setattr(gpu, "write_result", write)
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "in_own_process", stand_in)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    for turn in range(2):
        rounds.append(turn)
        gpu.main(["--parts", "classes", "fits", "sweeps"])
    assert len(kept) == 2 * (2 + 2 * len(whole_fit.DATA) + 1)
    assert {row["round"] for row in kept} == {1}
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert gpu.main([]) == []


def test_entry_point(capsys):
    entry_point(["list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == experiments()
    assert {"mnist", "frey_inpainting"} <= set(experiments())
    with pytest.raises(SystemExit):
        entry_point(["run", "guess"])
    assert "invalid choice" in capsys.readouterr().err
    entry_point(["run", "partition_calls", "--quick"])


def test_only_full_runs_are_timed(tmp_path, monkeypatch):
    """Those that go on where another ended take less."""
    for name in ("ROOT", "RESULTS"):
        monkeypatch.setattr(f"benchmarks.common.{name}", tmp_path)
    for module in (partition_calls, dimension):
        monkeypatch.setattr(module, "main", lambda arguments: [])
    for command in ("dimension", "partition_calls --quick", "dimension --fresh --quick"):
        entry_point(["run", *command.split()])
        assert earlier_rows("suite", {}) == []
    for command in ("partition_calls", "dimension --fresh", "partition_calls"):
        entry_point(["run", *command.split()])
    assert [row["experiment"] for row in earlier_rows("suite", {})] == ["dimension", "partition_calls"]


def test_a_method_that_is_not_finished_is_left_out():
    rows = [{"method": name} for name in ("a", "b", "a")]
    assert finished(rows, 2) == [rows[0], rows[2]]


@pytest.mark.slow
@pytest.mark.parametrize("noise_covariance", [None, NoiseCovariance()])
def test_memory(noise_covariance):
    """Stage one holds its own copy of the data, and one more, scaled or whitened; the rest is blocks."""
    x = candidates.curved_rows(60_000, 200)
    tracemalloc.start()
    settings = DictionarySettings(num_trees=1, max_rank=5, depth=3, tree_rows=4000, noise_covariance=noise_covariance)
    forest = learn_forest(jax.random.key(0), x, dictionary=settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (forest.noise_root is None) == (noise_covariance is None)
    assert peak < 3 * x.nbytes


@pytest.mark.slow
def test_memory_of_wide_data(monkeypatch):
    """Beside the dictionaries, which are larger than the data, there is never a second set; or they are coordinates."""
    x = candidates.curved_rows(300, 6000)
    settings = DictionarySettings(num_trees=16, max_rank=10, depth=3, shared_span=None, noise_covariance=None)

    def peak_and_forest():
        tracemalloc.start()
        forest = learn_forest(jax.random.key(0), x, dictionary=settings)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, forest

    peak, forest = peak_and_forest()
    kept = forest.dictionary.bases.nbytes
    assert kept > 7 * x.nbytes
    assert peak < 2 * kept
    monkeypatch.setattr("geode_jax.rows.row_space.LARGE_BYTES", 0)
    peak, forest = peak_and_forest()
    assert forest.row_space is not None
    assert peak < 6 * x.nbytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_benchmark():
    # in a process of its own: what other threads give back to the system meanwhile would hide part of it
    code = """
import time
import numpy as np
from benchmarks.memory import AnonymousPeak
with AnonymousPeak() as used:
    block = np.ones(2**24)
    time.sleep(0.1)  # it looks every few milliseconds
    del block
print(used.peak)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 0.9 * 2**27 < int(ran.stdout) < 1.5 * 2**27
    (row,) = memory.main(["--quick"])
    assert row["rows"] == 2000
    assert row["kept over data"] > 0


@pytest.mark.slow
def test_run_length():
    (row,) = run_length.main(["--quick"])
    assert row["sweeps"] == 50
    assert 0.5 < row["coverage95"] <= 1.0


@pytest.mark.slow
def test_thinning():
    rows = thinning.main(["--quick"])
    assert [row["draws"] for row in rows] == [5, 10, 2, 4]
    assert rows[-1]["rms"] < 1e-5  # against itself


@pytest.mark.slow
def test_scaling():
    rows = scaling.main(["--quick"])
    assert [row["part"] for row in rows] == ["sweep", "log density", "filling in", "stage one"]
    assert all(min(row["seconds"]) > 0 for row in rows)
