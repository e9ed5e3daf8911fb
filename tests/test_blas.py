"""BLAS has one thread while a compiled program may call LAPACK, and the user's setting before and after."""

import contextlib
import threading

import jax
import numpy as np
import pytest
from conftest import DICTIONARY, SAMPLER
from threadpoolctl import threadpool_info, threadpool_limits

import geode_jax
from geode_jax._runtime import blas
from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import fill, partial_statistics
from geode_jax.gibbs import run
from geode_jax.learning import first_fill
from geode_jax.predict import classes, rows
from geode_jax.predict.row_blocks import map_row_blocks


def _threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def _three_threads():
    """A setting of the user's."""
    with threadpool_limits(3, user_api="blas"):
        assert _threads() == {3}
        yield
        assert _threads() == {3}


def test_the_setting_is_restored_after_an_error():
    @one_blas_thread()
    def fails():
        raise KeyError(_threads())

    with pytest.raises(KeyError, match=r"\{1\}"):
        fails()
    assert _threads() == {3}


@pytest.mark.parametrize("call", [0, 1])
def test_the_setting_is_restored_if_it_is_interrupted_while_it_is_made(monkeypatch, call):
    calls, set_threads = iter(range(1000)), blas._set_threads

    def interrupted(library, number):
        set_threads(library, number)
        if next(calls) == call:
            raise KeyboardInterrupt

    if len(blas._libraries()) <= call:
        pytest.skip("there are not so many BLAS libraries")
    monkeypatch.setattr(blas, "_set_threads", interrupted)
    with pytest.raises(KeyboardInterrupt), one_blas_thread():
        pass
    assert _threads() == {3}


@pytest.mark.parametrize("first_out", [0, 1])
def test_blocks_that_overlap_in_several_threads(first_out):
    """The last one to end restores the setting, whichever began first."""
    entered, leave = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def block(number):
        with one_blas_thread():
            entered[number].set()
            assert leave[number].wait(10)

    workers = [threading.Thread(target=block, args=(number,)) for number in range(2)]
    for worker, has_entered in zip(workers, entered, strict=True):
        worker.start()
        assert has_entered.wait(10)
    assert _threads() == {1}
    leave[first_out].set()
    workers[first_out].join()
    assert _threads() == {1}
    leave[1 - first_out].set()
    workers[1 - first_out].join()
    assert _threads() == {3}


@pytest.mark.parametrize("calls_lapack", [True, False])
def test_threads_take_turns_in_lapack(calls_lapack):
    """Two calls of it at once can block all threads of XLA, and nothing would ever end."""
    both = threading.Barrier(2)
    met: list = []
    entered: list = []

    def meet(x):
        entered.append(True)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5 if calls_lapack else 20.0)
            met.append(True)
        return x

    def work():
        with jax_settings("float32"):
            map_row_blocks(meet, (), np.zeros((3, 2), np.float32), bytes_per_row=8, calls_lapack=calls_lapack)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert len(entered) == 2
    assert bool(met) != calls_lapack


def _spied(monkeypatch, module, name, seen, turns=None):
    """Note BLAS's threads at every call, and in `turns` whether no other thread can be in LAPACK."""
    original = getattr(module, name)

    def spy(*args, **kwargs):
        seen.append(_threads())
        if turns is not None:
            turns.append(blas._turn._is_owned())
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)


@pytest.mark.slow
def test_a_fit_with_missing_features(data, monkeypatch):
    hidden = np.where(np.random.default_rng(0).random(data.shape) < 0.2, np.nan, data)
    places = (
        (first_fill, "_fill_low_rank"),
        (fill, "_conditional"),
        (partial_statistics, "_group_entries"),
        (run, "_start"),
        (run, "_segment"),
    )
    seen: dict = {name: [] for _, name in places}
    turns: dict = {name: [] for name in ("_conditional", "_start", "_segment")}
    for module, name in places:
        _spied(monkeypatch, module, name, seen[name], turns.get(name))
    geode_jax.fit(jax.random.key(0), hidden, dictionary=DICTIONARY, sampler=SAMPLER)
    for name, found in seen.items():
        assert found, name
        assert all(threads == {1} for threads in found), name
    assert all(all(turn) for turn in turns.values())


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (rows, "map_partial_rows", geode_jax.log_density),
        (rows, "map_partial_rows", geode_jax.impute),
        (rows, "map_partial_rows", geode_jax.impute_mean),
        (rows, "map_partial_rows", lambda *rest: geode_jax.impute_draws(jax.random.key(0), *rest)),
    ],
)
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_predictions_of_rows_with_missing_features(module, name, call, posterior, data, monkeypatch):
    seen: list = []
    _spied(monkeypatch, module, name, seen)
    call(posterior, np.where(np.arange(6) == 1, np.nan, data[:3]))
    assert seen
    assert all(threads == {1} for threads in seen)


@pytest.mark.slow
def test_classes(data, monkeypatch):
    labels = (data[:, 0] > np.median(data[:, 0])).astype(int)
    found = geode_jax.fit_classes(
        jax.random.key(0), data, labels, calibrate=False, dictionary=DICTIONARY, sampler=SAMPLER
    )
    seen: list = []
    _spied(monkeypatch, classes, "map_partial_rows", seen)
    geode_jax.class_log_densities(found, np.where(np.arange(6) == 1, np.nan, data[:3]))
    assert seen
    assert all(threads == {1} for threads in seen)
