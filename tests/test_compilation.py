"""Programs that are compiled with options of their own, as users compile them, and inside other programs."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import DICTIONARY, SAMPLER

import geode_jax
from geode_jax import MissingRows
from geode_jax._runtime import compilation
from geode_jax._runtime.compilation import OPTIONS, SHORT_OPTIONS, quickly_compiled
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.fitting import stages
from geode_jax.forest.learn import grow_forest, plan_of
from geode_jax.gibbs import run
from geode_jax.predict import conditional_moments


@pytest.fixture
def as_users_compile():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    # What was compiled so rounds otherwise than in the processes that other tests start, and JAX would go on using it.
    jax.clear_caches()


@pytest.fixture
def mappings(tmp_path, monkeypatch):
    """Says that so many of 100 mappings that the system allows are in use."""
    (tmp_path / "most").write_text("100\n")
    monkeypatch.setattr(compilation, "MAPPINGS", tmp_path / "mappings")
    monkeypatch.setattr(compilation, "MOST_MAPPINGS", tmp_path / "most")
    monkeypatch.setattr(compilation, "_left", [0])
    return lambda used: (tmp_path / "mappings").write_text("mapping\n" * used)


@pytest.mark.parametrize(("used", "drops"), [(51, 2), (49, 0)])
def test_fits_make_room_before_there_are_too_many_programs(mappings, monkeypatch, data, used, drops):
    """At the start of both stages."""
    mappings(used)
    many = compilation._num_mappings()
    # dropping programs leaves few mappings, of which there are many again at the next stage
    monkeypatch.setattr(compilation, "_num_mappings", mock.Mock(side_effect=[many, 10, many, 10]))
    with mock.patch.object(jax, "clear_caches") as clear:
        geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert clear.call_count == drops


def test_what_others_map_is_not_dropped_for_ever(mappings):
    """Programs are dropped once, and again when there are many more mappings."""
    counts = []
    for used in (60, 60, 70, 73, 73):
        mappings(used)
        with mock.patch.object(jax, "clear_caches") as clear:
            compilation.drop_programs_if_many()
        counts.append(clear.call_count)
    assert counts == [1, 0, 0, 1, 0]


def test_predictions_make_room_too(posterior, data, mappings, monkeypatch):
    """But count no mappings where they counted a moment ago."""
    mappings(51)
    monkeypatch.setattr(compilation, "SECONDS_BETWEEN_LOOKS", 1e6)
    monkeypatch.setattr(compilation, "_last_look", [-np.inf])
    with mock.patch.object(jax, "clear_caches") as clear:
        geode_jax.log_density(posterior, data)
        geode_jax.log_density(posterior, data)
    assert clear.call_count == 1


def test_another_level_needs_no_other_program(posterior, data):
    hidden = np.where(np.arange(6) < 2, np.nan, data)
    geode_jax.impute(posterior, hidden, interval=0.9)
    program = conditional_moments.conditional_summary._chosen(False)
    count = program._cache_size()
    lower, upper = geode_jax.condition(posterior, hidden).quantile([0.3, 0.99])[:, :, 0]
    assert program._cache_size() == count > 0
    assert (lower < upper).all()


def test_other_systems_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "MAPPINGS", tmp_path / "none")
    with mock.patch.object(jax, "clear_caches") as clear:
        compilation.drop_programs_if_many()
    assert clear.call_count == 0


def _named(forest):
    """Shapes and types of what the sampler takes of a forest."""
    problem = jax.eval_shape(lambda it: it.problem(geode_jax.Prior(), geode_jax.SamplerSettings()), forest)
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), problem)


def _foreseen(x, settings, dtype):
    """The forest, and the forests of shapes that were foreseen."""
    foreseen = []
    with jax_settings(dtype):
        plan = plan_of(x, dataclasses.replace(DICTIONARY, **settings))
        forest = grow_forest(jax.random.key(0), x, plan, np.dtype(dtype), lambda share, text: None, foreseen.append)
        return _named(forest), [_named(one) for one in foreseen]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_candidates": 3}, {"num_trees": 1, "depth": 0}, {"cross_fit": None}], ids=str
)
def test_shapes_are_known_before_dictionaries(data, dtype, settings):
    forest, foreseen = _foreseen(data, settings, dtype)
    assert foreseen == [forest]


def _with_own_patterns(data, num_complete):
    is_hidden = np.random.default_rng(0).random(data.shape) < 0.5
    row = np.arange(len(data))
    is_hidden[row, row % 6], is_hidden[row, (row + 1) % 6] = True, False
    is_hidden[:num_complete] = False
    return np.where(is_hidden, np.nan, data)


@pytest.mark.parametrize("num_complete", [30, 0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"missing_rows": MissingRows(num_groups=3)},
        pytest.param({"num_candidates": 3}, marks=pytest.mark.slow),
        pytest.param({"cross_fit": None}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shapes_are_known_where_rows_miss_features_of_their_own(data, settings, num_complete):
    for dtype in ("float32", "float64"):
        forest, foreseen = _foreseen(_with_own_patterns(data, num_complete), settings, dtype)
        assert foreseen == [forest]


def test_nothing_is_foreseen_where_rows_share_matrices(data):
    """How many they share depends on their candidates."""
    hidden = data.copy()
    hidden[::3, 1:3] = np.nan
    assert _foreseen(hidden, {}, "float32")[1] == []


@quickly_compiled
def double(x):
    return 2 * x


@pytest.mark.usefixtures("as_users_compile")
def test_inside_other_programs():
    """JAX takes options of compilation of the outermost program only."""
    assert jax.eval_shape(double, np.ones(3)).shape == (3,)
    np.testing.assert_array_equal(jax.jit(double)(np.ones(3)), 2.0)
    np.testing.assert_array_equal(double(np.ones(3)), 2.0)


@pytest.mark.usefixtures("as_users_compile")
def test_options_are_used_unless_optimisations_are_off():
    used = []
    with mock.patch.object(jax, "jit", lambda function, compiler_options: used.append(compiler_options) or function):
        triple = quickly_compiled(lambda x: 3 * x)
        triple(1.0)
        triple(1.0, is_short=True)
        jax.config.update("jax_disable_most_optimizations", True)
        triple(1.0)
        triple(1.0, is_short=True)
    assert used == [OPTIONS, SHORT_OPTIONS, None]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("generator", "is_partial", "short_run"),
    [
        ("threefry2x32", False, run.SHORT_RUN),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)  # every two of them together
            for rest in (("threefry2x32", True, 0), ("rbg", False, 0), ("rbg", True, run.SHORT_RUN))
        ),
    ],
)
def test_programs_are_compiled_ahead_and_once(data, caplog, monkeypatch, generator, is_partial, short_run):
    """In a thread of their own; the sampler then finds them."""
    monkeypatch.setattr(run, "SHORT_RUN", short_run)
    x = _with_own_patterns(data, 30) if is_partial else data
    # shapes of their own: programs that differ in their options alone are lowered once
    dictionary = dataclasses.replace(DICTIONARY, num_trees=3 if short_run else 4)
    sampler = dataclasses.replace(SAMPLER, segment_length=7)
    jax.config.update("jax_log_compiles", True)
    try:
        geode_jax.fit(jax.random.key(0, impl=generator), x, dictionary=dictionary, sampler=sampler)
    finally:
        jax.config.update("jax_log_compiles", False)
    for step in ("Compiling", "Finished XLA compilation of"):
        for name in ("_start", "_segment"):
            records = [record for record in caplog.records if f"{step} jit({name})" in record.getMessage()]
            assert [record.threadName.startswith("geode_jax-compile") for record in records] == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_compile")
def test_long_runs_are_optimised(data, monkeypatch):
    """By what all sweeps of all chains read together."""
    chosen = []
    monkeypatch.setattr(run._start, "_chosen", lambda is_short: chosen.append(is_short) or run._start.__wrapped__)
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(forest.problem(geode_jax.Prior(), SAMPLER)))
    for limit in (numbers * 70 * 2, numbers * 70 * 2 - 1):
        monkeypatch.setattr(run, "SHORT_RUN", limit)
        run._Run(jax.random.key(0), forest.problem(geode_jax.Prior(), SAMPLER), SAMPLER, None, None)
    assert chosen == [True, False]


@pytest.mark.slow
def test_a_fit_does_not_depend_on_what_was_compiled_ahead(data, caplog):
    fits = [geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)]
    caplog.set_level("DEBUG", stages.__name__)
    with mock.patch.object(stages, "compile_ahead", side_effect=RuntimeError("planted")):
        fits.append(geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER))
    assert "not compiled ahead" in caplog.text
    np.testing.assert_array_equal(fits[0].draws.log_joint, fits[1].draws.log_joint)
