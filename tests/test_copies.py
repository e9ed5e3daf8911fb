"""Equal rows that are one observation several times are held out together; rows that are equal by chance are not."""

from unittest import mock

import jax
import numpy as np
import pytest
from conftest import DICTIONARY
from sklearn.datasets import load_iris

import geode_jax
from geode_jax.forest import learn
from geode_jax.learning import feature_noise
from geode_jax.learning.feature_noise import NoiseOptions, noise_folds
from geode_jax.rows.copies import groups_of_copies
from geode_jax.rows.folds import assign_folds

ROWS = np.random.default_rng(0).normal(size=(40, 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_copies_are_found(dtype):
    x = np.concatenate([ROWS, ROWS[:10], ROWS[:5]]).astype(dtype)
    x[3, 1], x[43, 1], x[53, 1] = 0.0, -0.0, 0.0
    x[[4, 44, 54], 2] = np.nan
    group = groups_of_copies(x)
    np.testing.assert_array_equal(group[40:50], group[:10])
    np.testing.assert_array_equal(group[50:], group[:5])
    np.testing.assert_array_equal(group[:40], np.arange(40))  # whatever the values are
    filled = np.where(np.isnan(x), np.arange(len(x), dtype=dtype)[:, None], x)  # fills may differ
    np.testing.assert_array_equal(groups_of_copies(filled, ~np.isnan(x)) == group[4], group == group[4])


def test_rows_of_their_own():
    """Different rows, those of few values, a single column, many of zeros, and all of them equal."""
    rng = np.random.default_rng(0)
    answers = rng.integers(1, 6, size=(400, 5)).astype(float)
    numbers = np.round(rng.normal(size=(100, 1)), 1)
    zeros = np.where(np.arange(100)[:, None] < 30, 0.0, rng.normal(size=(100, 4)))
    for x in (ROWS, load_iris().data, answers, numbers, zeros, np.repeat(ROWS[:1], 9, axis=0)):
        assert groups_of_copies(x) is None


def test_folds_are_equal_with_groups_of_any_size():
    copies = np.concatenate([np.repeat(np.arange(9), 100), np.arange(9, 109)])
    for seed in range(5):
        folds = assign_folds(1000, 5, np.random.default_rng(seed), copies)
        assert np.bincount(folds).tolist() == [200] * 5
    assert (folds[:900] != assign_folds(1000, 5, np.random.default_rng(0), copies)[:900]).any()
    assert np.bincount(assign_folds(12, 5, np.random.default_rng(0), np.repeat(np.arange(3), 4))).tolist() == [4] * 3


def test_copies_are_in_one_fold(data):
    repeated = np.concatenate([data, data[:50], data[:20]])
    same = np.concatenate([np.arange(90), np.arange(50), np.arange(20)])
    for folds in (
        assign_folds(160, 5, np.random.default_rng(0), groups_of_copies(repeated)),
        noise_folds(repeated, None, NoiseOptions(1, 5, 0.01, 2, 0)),
    ):
        np.testing.assert_array_equal(folds, folds[:90][same])
        assert np.bincount(folds).tolist() == [32] * 5
    of_fit = mock.patch.object(learn, "assign_folds", wraps=assign_folds)
    of_noise = mock.patch.object(feature_noise, "assign_folds", wraps=assign_folds)
    with of_fit as of_fit, of_noise as of_noise:
        geode_jax.learn_forest(jax.random.key(0), repeated, dictionary=DICTIONARY)
    for call in (*of_fit.call_args_list, *of_noise.call_args_list):
        assert call.args[3].max() == 89
    assert of_fit.called
    assert of_noise.called
