"""Every wrong argument is answered by an error that names it, what was expected, and what came.

`python tests/test_bad_input.py` prints the table of cases and messages.
"""

import json
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import sparse

import geode_jax
from geode_jax._files.archive import encode

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 4))


def _with(value, row=2, column=1):
    changed = X.copy()
    changed[row, column] = value
    return changed


def _all_missing(row=None, column=None):
    changed = X.copy()
    changed[slice(None) if row is None else row, slice(None) if column is None else column] = np.nan
    return changed


# what is wrong -> (call, error, message)
FIT_CASES = {
    "one dimension": (X[0], ValueError, r"X: expected a 2-D array of shape \(rows, features\), got shape \(4,\)"),
    "three dimensions": (X[None], ValueError, r"X: expected a 2-D array .* got shape \(1, 8, 4\)"),
    "a number": (3.0, ValueError, r"X: expected a 2-D array .* got shape \(\)"),
    "no rows": (X[:0], ValueError, r"X: expected a non-empty array, got shape \(0, 4\)"),
    "no features": (X[:, :0], ValueError, r"X: expected a non-empty array, got shape \(8, 0\)"),
    "one row": (X[:1], ValueError, "X: expected at least 2 rows, got 1"),
    "equal rows": (X[[0, 0, 0]], ValueError, "X: expected at least two different rows, but all rows are equal"),
    "strings": (np.array([["a", "b"], ["c", "d"]]), TypeError, "X: expected numbers, got dtype <U1"),
    "objects": (np.array([[1, {}], [2, 3]], dtype=object), TypeError, "X: expected numbers, got an object array"),
    "huge": (np.array([[1, 10**400], [2, 3]], dtype=object), TypeError, "X: expected numbers, got an object array"),
    "digits": ([["1", "2"], ["3", "4"]], TypeError, "X: expected numbers, got dtype <U1"),
    "text among objects": (
        np.array([[1, "2"], [2, 3]], dtype=object),
        TypeError,
        "X: expected numbers, got text",
    ),
    "ragged": ([[1.0, 2.0], [3.0]], ValueError, "X: expected a rectangular array of numbers, got list"),
    "dates": (np.array([["2020-01-01"]] * 3, dtype="M8[D]"), TypeError, "X: expected numbers, got dtype datetime64"),
    "infinity": (_with(np.inf), ValueError, r"X: expected finite numbers, got 1 infinite values \(.*row 2, column 1\)"),
    "infinity beside NaN": (
        np.where(X[0, 0] == X, np.nan, _with(np.inf)),
        ValueError,
        r"X: expected finite numbers, got 1 infinite values \(.*row 2, column 1\)",
    ),
    "all-missing row": (
        _all_missing(row=4),
        ValueError,
        r"X: expected at least one observed value in every row, but 1 rows are all NaN \(the first is row 4\)",
    ),
    "all-missing column": (
        _all_missing(column=2),
        ValueError,
        r"X: expected at least one observed value in every column, but 1 columns are all NaN \(.*column 2\)",
    ),
    "nothing observed": (_all_missing(), ValueError, "X: expected at least one observed value in every row"),
    "equal rows but for NaN": (
        np.where(np.eye(8, 4) > 0, np.nan, np.tile(X[0], (8, 1))),
        ValueError,
        "X: expected at least two different rows, but all rows are equal",
    ),
    "complex": (X + 1j, TypeError, r"X: expected real numbers, got complex numbers \(complex128\)"),
    "masked complex": (np.ma.array(X + 1j), TypeError, r"X: expected real numbers, got complex numbers \(complex128\)"),
    "sparse": (sparse.csr_array(X), TypeError, r"X: expected a dense array, got a sparse csr_array; pass X.toarray"),
    "None": (None, ValueError, r"X: expected a 2-D array .* got shape \(\)"),
}
PREDICT_CASES = {
    "other features": (X[:, :2], ValueError, "X: expected 4 features as in fit, got 2"),
    "infinity": (_with(-np.inf), ValueError, "X: expected finite numbers, got 1 infinite"),
    "one dimension": (X[0], ValueError, r"X: expected a 2-D array .* use X.reshape\(1, -1\) for one row"),
}
SETTING_CASES = {
    "max_rank 0": (lambda: geode_jax.DictionarySettings(max_rank=0), ValueError, "max_rank: .* at least 1, got 0"),
    "max_rank 2.5": (lambda: geode_jax.DictionarySettings(max_rank=2.5), TypeError, "max_rank: .* integer, got 2.5"),
    "max_rank True": (lambda: geode_jax.DictionarySettings(max_rank=True), TypeError, "max_rank: .* got True"),
    "tree_rows 1": (lambda: geode_jax.DictionarySettings(tree_rows=1), ValueError, "tree_rows: .* at least 2, got 1"),
    "depth 25": (
        lambda: geode_jax.DictionarySettings(depth=25),
        ValueError,
        r"depth: expected an integer of at most 24, as .*, got 25",
    ),
    "depth -1": (lambda: geode_jax.DictionarySettings(depth=-1), ValueError, "depth: .* at least 0, got -1"),
    "parent_rows 0": (lambda: geode_jax.DictionarySettings(parent_rows=0), ValueError, "parent_rows: .* got 0"),
    "num_trees 0": (lambda: geode_jax.DictionarySettings(num_trees=0), ValueError, "num_trees: .* got 0"),
    "cross_fit 5": (
        lambda: geode_jax.DictionarySettings(cross_fit=5),
        TypeError,
        "cross_fit: expected CrossFit or None",
    ),
    "one fold": (lambda: geode_jax.CrossFit(1), ValueError, "num_folds: expected an integer of at least 2, got 1"),
    "negative warm-up": (lambda: geode_jax.SamplerSettings(num_warmup=-1), ValueError, "num_warmup: .* got -1"),
    "no samples": (lambda: geode_jax.SamplerSettings(num_samples=0), ValueError, "num_samples: .* got 0"),
    "no chains": (lambda: geode_jax.SamplerSettings(num_chains=0), ValueError, "num_chains: .* got 0"),
    "shrinkage text": (lambda: geode_jax.SamplerSettings(shrinkage="exact"), TypeError, "shrinkage: expected ExactSh"),
    "tau_rate 0": (
        lambda: geode_jax.Prior(tau_rate=0),
        ValueError,
        r"tau_rate: expected a number in \(0, inf\), got 0",
    ),
    "tau_rate nan": (lambda: geode_jax.Prior(tau_rate=float("nan")), ValueError, "tau_rate: .* got nan"),
    "tau_rate text": (lambda: geode_jax.Prior(tau_rate="a"), TypeError, "tau_rate: expected a number, got 'a'"),
    "tolerance 2": (lambda: geode_jax.RankAdaptation(tolerance=2.0), ValueError, r"tolerance: .* \(0, 1\), got 2"),
    "slope 1": (
        lambda: geode_jax.RankAdaptation(slope=1.0),
        ValueError,
        "slope: expected a number of at most 0, got 1",
    ),
    "slope text": (
        lambda: geode_jax.RankAdaptation(slope="a"),
        TypeError,
        "slope: expected a number, got 'a'",
    ),
    "intercept -inf": (lambda: geode_jax.RankAdaptation(intercept=-np.inf), ValueError, r"intercept: .* got -inf"),
    "no candidates": (lambda: geode_jax.MissingRows(num_candidates=0), ValueError, "num_candidates: .* least 1, got 0"),
    "groups 1.5": (
        lambda: geode_jax.MissingRows(num_groups=1.5),
        TypeError,
        "num_groups: expected an integer, got 1.5",
    ),
    "missing_rows None": (
        lambda: geode_jax.DictionarySettings(missing_rows=None),
        TypeError,
        "missing_rows: expected MissingRows, got None",
    ),
    "floor 0": (lambda: geode_jax.FeatureNoise(floor=0.0), ValueError, r"floor: .* got 0"),
    "key 0": (lambda: geode_jax.fit(0, X), TypeError, r"key: expected a JAX key such as jax.random.key\(0\), got int"),
    "key of floats": (lambda: geode_jax.fit(np.ones(2), X), TypeError, "key: expected a JAX key .* dtype float64"),
    "several keys": (lambda: geode_jax.fit(jax.random.split(KEY), X), ValueError, r"key: .* an array of \(2,\) keys"),
    "dtype float16": (lambda: geode_jax.fit(KEY, X, dtype="float16"), ValueError, "dtype: expected float32 or float64"),
    "dtype text": (lambda: geode_jax.fit(KEY, X, dtype="nonsense"), ValueError, "dtype: expected float32 or float64"),
    "progress of stage one": (
        lambda: geode_jax.learn_forest(KEY, X, progress="no"),
        TypeError,
        "progress: expected bool, got 'no'",
    ),
    "calibrate text": (
        lambda: geode_jax.fit_classes(KEY, X, np.arange(8) % 2, calibrate="no"),
        TypeError,
        "calibrate: expected bool, got 'no'",
    ),
    "probabilities of text": (
        lambda: geode_jax.fit_classes(KEY, X, np.arange(8) % 2, class_probabilities=["a", "b"]),
        ValueError,
        r"class_probabilities: expected 2 positive numbers that add up to 1, got \['a', 'b'\]",
    ),
    "settings dict": (
        lambda: geode_jax.fit(KEY, X, sampler={}),
        TypeError,
        "sampler: expected SamplerSettings or None",
    ),
}
CALL_CASES = {
    "interval 95": (lambda p: geode_jax.impute(p, X, interval=95), r"interval: expected a number in \(0, 1\), got 95"),
    "interval 0": (lambda p: geode_jax.impute(p, X, interval=0), r"interval: expected a number in \(0, 1\), got 0"),
    "calibration of other features": (
        lambda p: geode_jax.impute(p, X, calibration=X[:, :1]),
        "calibration: expected 4 features as in fit, got 1",
    ),
    "num_samples -1": (lambda p: geode_jax.sample(KEY, p, -1), "num_samples: .* at least 1, got -1"),
    "num_draws 0": (lambda p: geode_jax.log_density(p, X, num_draws=0), "num_draws: .* at least 1, got 0"),
    "num_candidates 0": (lambda p: geode_jax.impute(p, X, num_candidates=0), "num_candidates: .* at least 1, got 0"),
}


@pytest.fixture(scope="module")
def fitted():
    return geode_jax.Posterior.load(Path(__file__).parent / "files" / "posterior_1.npz")


@pytest.mark.parametrize("case", FIT_CASES)
def test_fit(case):
    argument, error, message = FIT_CASES[case]
    with pytest.raises(error, match=message):
        geode_jax.fit(KEY, argument)


@pytest.mark.parametrize("case", PREDICT_CASES)
@pytest.mark.parametrize("function", [geode_jax.log_density, geode_jax.impute, geode_jax.impute_mean])
def test_predict(fitted, function, case):
    argument, error, message = PREDICT_CASES[case]
    with pytest.raises(error, match=message):
        function(fitted, argument)


@pytest.mark.parametrize("case", SETTING_CASES)
def test_settings(case):
    call, error, message = SETTING_CASES[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("case", CALL_CASES)
def test_calls(fitted, case):
    call, message = CALL_CASES[case]
    with pytest.raises(ValueError, match=message):
        call(fitted)


def test_not_a_posterior(fitted):
    with pytest.raises(TypeError, match="forest: expected Forest, got an object of type Posterior"):
        geode_jax.held_out_log_density(fitted, fitted)
    with pytest.raises(TypeError, match=r"posterior: expected Posterior, got .* of type int"):
        geode_jax.log_density(3, X)
    with pytest.raises(TypeError, match=r"^posterior: expected Posterior, got an object of type ndarray$"):
        geode_jax.log_density(np.zeros((200, 3)), fitted)
    model = geode_jax.GeodeDensity()
    model.posterior_ = fitted
    with pytest.raises(TypeError, match=r"GeodeDensity; pass its posterior_$"):
        geode_jax.log_density(model, X)


def test_settings_keep_numbers_of_python():
    """Sums of small integers would overflow, fractions are no numbers to JAX, and 3 and 3.0 would be saved apart."""
    settings = geode_jax.SamplerSettings(num_warmup=np.int8(100), num_samples=np.int8(100))
    assert settings.num_warmup + settings.num_samples == 200
    assert isinstance(geode_jax.Prior(tau_rate=Fraction(1, 2), noise_shape=np.float32(1)).tau_rate, float)
    for given in ({"parent_rows": 3}, {"borrowed_rows": np.int64(5)}, {"refined_cuts": np.True_}):
        found = geode_jax.DictionarySettings(**given)
        assert json.dumps(encode(found)) == json.dumps(encode(geode_jax.DictionarySettings()))
    with pytest.raises(ValueError, match="tau_rate: expected a number in"):
        geode_jax.Prior(tau_rate=10**400)


def test_legacy_keys_are_welcome(fitted):
    np.testing.assert_array_equal(
        geode_jax.sample(jax.random.PRNGKey(7), fitted, 2), geode_jax.sample(jax.random.key(7), fitted, 2)
    )


def _print_table():
    cases = {f"fit: X, {name}": lambda x=x: geode_jax.fit(KEY, x) for name, (x, _, _) in FIT_CASES.items()}
    cases |= {name: call for name, (call, _, _) in SETTING_CASES.items()}
    posterior = fitted.__wrapped__() if hasattr(fitted, "__wrapped__") else fitted.__pytest_wrapped__.obj()
    cases |= {
        f"predict: X, {name}": lambda x=x: geode_jax.log_density(posterior, x)
        for name, (x, _, _) in PREDICT_CASES.items()
    }
    cases |= {name: lambda call=call: call(posterior) for name, (call, _) in CALL_CASES.items()}
    for name, call in cases.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            print(f"| {name} | {type(error).__name__} | {error} |")
        else:
            print(f"| {name} | no error | |")


if __name__ == "__main__":
    _print_table()
