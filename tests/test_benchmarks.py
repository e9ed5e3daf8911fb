"""Benchmarks run at their tiny size; those whose data are not at hand are skipped."""

import numpy as np
import pytest

from benchmarks import (
    choices,
    digits_density,
    dimension,
    frey_inpainting,
    frey_missing,
    missing_time,
    mixing,
    partition_calls,
    readme,
    stage_one,
    swiss_roll,
    truncated_gamma,
)
from benchmarks.common import find_data


def test_frey():
    try:
        find_data("frey_faces.npz")
    except SystemExit:
        pytest.skip("Frey faces are not ours to ship")
    rows = frey_inpainting.main(["--quick"])
    assert {row["method"] for row in rows} == {"published", "default"}
    assert all(0 < row["mae"] < 25 for row in rows)


@pytest.mark.slow
def test_frey_missing():
    try:
        find_data("frey_faces.npz")
    except SystemExit:
        pytest.skip("Frey faces are not ours to ship")
    rows = frey_missing.main(["--quick"])
    assert [row["missing"] for row in rows if row["method"] == "GEODE"] == [0.0, 0.2, 0.5]
    assert all(0 < row["mae"] < 25 for row in rows)


@pytest.mark.slow
def test_missing_time():
    rows = missing_time.main(["--quick"])
    assert len({row["partial_rows_mebibytes"] for row in rows}) == 1  # whatever the number of features


def test_missing_data_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.delenv("GEODE_JAX_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"not found in .* GEODE_JAX_DATA"):
        find_data("frey_faces.npz")


def test_partition_calls():
    rows = partition_calls.main(["--quick"])
    assert rows


def test_digits_density():
    rows = digits_density.main(["--quick"])
    assert len(rows) == 3
    assert all(-250 < row["nats"] < -90 for row in rows)


def test_swiss_roll():
    rows = swiss_roll.main(["--quick"])
    assert {row["shape"] for row in rows} == {"flat", "bent"}
    oracle = next(row["nats"] for row in rows if row["method"] == "oracle")
    assert all(row["nats"] < oracle for row in rows if row["shape"] == "flat" and row["method"] != "oracle")


def test_choices():
    rows = choices.main(["--quick"])
    assert np.isfinite([row["score_gain"] for row in rows]).all()


def test_dimension():
    (row,) = dimension.main(["--quick"])
    assert row["right"] > 0.9


def test_stage_one():
    rows = stage_one.main(["--quick"])
    assert [row["setting"] for row in rows] == ["default", "num_trees"]
    assert np.isfinite([row["nats"] for row in rows]).all()


def test_mixing():
    rows = mixing.main(["--quick"])
    assert {row["variant"] for row in rows} == {"exact", "exact, slices", "published"}


def test_truncated_gamma():
    rows = truncated_gamma.main(["--quick"])
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.slow
def test_proofs():
    """The proofs' own code on the correct sampler, with few replicates of the calibration; about a minute."""
    from benchmarks import proofs

    assert not any(proofs.main(["--quick"])[0][name] for name in proofs.TESTS)


def test_readme_shows_the_committed_results():
    assert readme.main(["--check"]) == 0
