"""Fits that are killed go on where they were, to the same draws bit for bit; those that are interrupted end early."""

import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import DICTIONARY, QUICK, SAMPLER

import geode_jax
from geode_jax._files import checkpoint
from geode_jax.fitting import classes
from geode_jax.gibbs import run

OPTIONS = {"dictionary": DICTIONARY, "sampler": SAMPLER}


class _PowerCut(BaseException):
    pass


def _stop_after(num_segments, error):
    """Raise `error` instead of segment number `num_segments`."""
    advance, count = run._Run.advance, iter(range(1000))

    def limited(self):
        if next(count) == num_segments:
            raise error
        advance(self)

    return mock.patch.object(run._Run, "advance", limited)


@pytest.mark.parametrize(
    ("num_segments", "is_partial"),
    [(2, True), (0, False), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((2, False), (5, True)))],
)
def test_resumed_fit_is_the_fit(data, tmp_path, num_segments, is_partial):
    x = data.copy()
    if is_partial:
        x[::5, 2] = np.nan
    key = jax.random.key(1)
    whole = geode_jax.fit(key, x, **OPTIONS)
    with _stop_after(num_segments, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.fit(key, x, **OPTIONS, checkpoint=tmp_path)
    with mock.patch("geode_jax.fitting.single.grow_forest", side_effect=AssertionError("stage one is kept")):
        resumed = geode_jax.fit(key, x, **OPTIONS, checkpoint=tmp_path)
        assert eqx.tree_equal(resumed, whole)
        with mock.patch.object(run, "_segment", side_effect=AssertionError("it is finished")):
            assert eqx.tree_equal(geode_jax.fit(key, x, **OPTIONS, checkpoint=tmp_path), whole)


def test_keys_of_one_seed_and_different_kinds_differ(tmp_path):
    """The numbers in them may be the same."""
    found = set()
    for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
        with checkpoint.open_checkpoint(tmp_path / kind, jax.random.key(0, impl=kind), [], []) as kept:
            found.add(kept.digest)
    assert len(found) == 3


def test_data_are_read_in_parts(tmp_path, monkeypatch):
    """Of any size, they belong to the same checkpoint, and every row counts."""

    def digest(x):
        with checkpoint.open_checkpoint(tmp_path, jax.random.key(0), [x], []) as kept:
            return kept.digest

    x = np.arange(30.0).reshape(10, 3)
    others = [np.where(np.arange(10)[:, None] == row, -1.0, x) for row in range(10)]
    whole = [digest(array) for array in (x, *others)]
    assert len(set(whole)) == 11
    monkeypatch.setattr(checkpoint, "DIGEST_BYTES", 3 * 24)
    assert [digest(array) for array in (x, *others)] == whole


def test_only_the_same_fit_goes_on(data, tmp_path):
    key = jax.random.key(1)
    geode_jax.fit(key, data, **OPTIONS, checkpoint=tmp_path / "of it")
    others = [
        (jax.random.key(2), data, OPTIONS),
        (key, data + 1.0, OPTIONS),
        (key, data, {**OPTIONS, "dtype": "float64"}),
        (key, data, {**OPTIONS, "prior": geode_jax.Prior(tau_rate=0.1)}),
        (key, data, {**OPTIONS, "dictionary": dataclasses.replace(DICTIONARY, parent_rows=2.0)}),
        (key, data, {**OPTIONS, "sampler": dataclasses.replace(SAMPLER, adaptation=None)}),
    ]
    for other_key, x, options in others:
        with pytest.raises(ValueError, match=r"^checkpoint: .*another key, other data or other settings"):
            geode_jax.fit(other_key, x, **options, checkpoint=tmp_path / "of it")
    chains = tmp_path / "of it" / "chains.npz"
    chains.write_bytes(chains.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint.*chains\.npz"):
        geode_jax.fit(key, data, **OPTIONS, checkpoint=tmp_path / "of it")
    with pytest.raises(ValueError, match="checkpoint: expected a folder, got the file"):
        geode_jax.fit(key, data, **OPTIONS, checkpoint=chains)
    with pytest.raises(TypeError, match="checkpoint: expected a path of a folder, got 3"):
        geode_jax.fit(key, data, **OPTIONS, checkpoint=3)


def test_stage_two_alone(data, tmp_path):
    key_forest, key = jax.random.split(jax.random.key(1))
    forest = geode_jax.learn_forest(key_forest, data, dictionary=DICTIONARY)
    whole = geode_jax.sample_posterior(key, forest, sampler=SAMPLER)
    with _stop_after(5, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.sample_posterior(key, forest, sampler=SAMPLER, checkpoint=tmp_path)
    assert eqx.tree_equal(geode_jax.sample_posterior(key, forest, sampler=SAMPLER, checkpoint=tmp_path), whole)


def test_stage_two_of_other_rows_of_one_feature(tmp_path):
    """Their bases and residuals are the same: 1 and 0."""
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    settings = dataclasses.replace(DICTIONARY, max_rank=None)
    one, other = (geode_jax.learn_forest(key, x, dictionary=settings) for x in rng.normal(size=(2, 60, 1)))
    np.testing.assert_array_equal(np.abs(one.dictionary.bases), np.abs(other.dictionary.bases))
    geode_jax.sample_posterior(key, one, sampler=SAMPLER, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="checkpoint"):
        geode_jax.sample_posterior(key, other, sampler=SAMPLER, checkpoint=tmp_path)


def test_interrupted(data):
    """Ctrl-C: during warm-up there is nothing to return; after it the draws so far are a posterior."""
    key = jax.random.key(1)
    whole = geode_jax.fit(key, data, **OPTIONS)
    with _stop_after(4, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        geode_jax.fit(key, data, **OPTIONS)
    with _stop_after(6, KeyboardInterrupt), pytest.warns(RuntimeWarning, match="has 20 of 30 draws per chain"):
        early = geode_jax.fit(key, data, **OPTIONS)
    assert early.num_draws == 20
    np.testing.assert_array_equal(early.draws.log_joint, whole.draws.log_joint[:, :, :20])
    assert np.isfinite(geode_jax.log_density(early, data)).all()


@pytest.mark.parametrize("leaf", [0, 3])
def test_interrupted_while_segments_are_joined(data, monkeypatch, leaf):
    """After the last sweep: all draws are there, some of them joined."""
    key = jax.random.key(1)
    whole = geode_jax.fit(key, data, **OPTIONS)
    calls, join = iter(range(1000)), np.concatenate

    def limited(arrays, axis=0, **more):
        if axis == 2 and next(calls) == leaf:
            raise KeyboardInterrupt
        return join(arrays, axis=axis, **more)

    monkeypatch.setattr(run.np, "concatenate", limited)
    with pytest.warns(RuntimeWarning, match="has 30 of 30 draws per chain"):
        found = geode_jax.fit(key, data, **OPTIONS)
    assert eqx.tree_equal(found.draws, whole.draws)


@pytest.mark.parametrize("is_partial", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_segment_is_sent_before_the_draws_of_the_last_are_copied(data, is_partial):
    """Not where its matrices would be factored outside of the limit on threads; and none is sent in vain."""
    rows = data.copy()
    rows[0, 0] = np.nan if is_partial else rows[0, 0]
    order = []
    keep, send = run._Run._keep, run._Run._send

    def recorded(name, method):
        return mock.patch.object(run._Run, name, lambda *rest: (order.append(name), method(*rest))[1])

    with recorded("_keep", keep), recorded("_send", send):
        geode_jax.fit(jax.random.key(1), rows, **OPTIONS)
    ahead = ["_send", *["_send", "_keep"] * 6, "_keep"]
    assert order == (["_send", "_keep"] * 7 if is_partial else ahead)


def test_interrupted_while_a_segment_is_sent(data, tmp_path):
    """The draws of the one before are kept, and saved."""
    key = jax.random.key(1)
    whole = geode_jax.fit(key, data, **OPTIONS)
    calls = iter(range(1000))

    def limited(*_, **__):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return mock.DEFAULT

    with (
        mock.patch.object(run, "_segment", wraps=run._segment, side_effect=limited),
        pytest.warns(RuntimeWarning, match="has 20 of 30 draws per chain"),
    ):
        early = geode_jax.fit(key, data, **OPTIONS, checkpoint=tmp_path)
    np.testing.assert_array_equal(early.draws.log_joint, whole.draws.log_joint[:, :, :20])
    assert eqx.tree_equal(geode_jax.fit(key, data, **OPTIONS, checkpoint=tmp_path).draws, whole.draws)


_KILLED = """
import sys, numpy as np, jax, geode_jax
x = np.load(sys.argv[1])
sampler = geode_jax.SamplerSettings(num_warmup=40, num_samples=100_000, num_chains=2, segment_length=10)
dictionary = geode_jax.DictionarySettings(num_trees=2, max_rank=3, depth=2, min_cell_size=10, noise_covariance=None)
geode_jax.fit(jax.random.key(1), x, dictionary=dictionary, sampler=sampler, checkpoint=sys.argv[2])
"""


@pytest.mark.slow
def test_killed_process(data, tmp_path):
    """SIGKILL, in the middle of a run that would take long."""
    np.save(tmp_path / "x.npy", data)
    folder = tmp_path / "checkpoint"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, tmp_path / "x.npy", folder])
    deadline = time.monotonic() + 300
    while not (folder / "draws 3.npz").exists() and time.monotonic() < deadline:
        assert process.poll() is None, "it ended too soon"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    sampler = geode_jax.SamplerSettings(num_warmup=40, num_samples=100_000, num_chains=2, segment_length=10)
    options = {"dictionary": DICTIONARY, "sampler": sampler}
    with _stop_after(8, KeyboardInterrupt), pytest.warns(RuntimeWarning, match="interrupted"):
        resumed = geode_jax.fit(jax.random.key(1), data, **options, checkpoint=folder)
    expected = geode_jax.SamplerSettings(num_warmup=40, num_samples=resumed.num_draws, num_chains=2, segment_length=10)
    assert resumed.num_draws >= 20 + 80  # the last draws may lie there without their chains
    whole = geode_jax.fit(jax.random.key(1), data, dictionary=DICTIONARY, sampler=expected)
    assert eqx.tree_equal(resumed.dictionary, whole.dictionary)
    assert eqx.tree_equal(resumed.draws, whole.draws)


@pytest.mark.slow
def test_interrupted_classes(data, monkeypatch):
    """As a fit of one density: the draws there are, with a warning. Not where a class would have none."""
    key, labels = jax.random.key(1), (np.arange(90) % 3 > 0).astype(int)
    options = {**OPTIONS, "calibrate": False}
    monkeypatch.setattr("geode_jax.fitting.classes.SIZE_RATIO", 9.0)
    with _stop_after(6, KeyboardInterrupt), pytest.warns(RuntimeWarning, match="has 20 of 30 draws per chain"):
        found = geode_jax.fit_classes(key, data, labels, **options)
    assert [member.num_draws for member in found.members] == [20, 20]
    monkeypatch.setattr("geode_jax.fitting.classes.SIZE_RATIO", 1.0)  # one class after the other
    with _stop_after(6, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        geode_jax.fit_classes(key, data, labels, **options)


@pytest.mark.slow
def test_interrupted_calibration(data):
    """All draws are there: the densities are returned as they are without calibration."""
    key, labels = jax.random.key(1), (np.arange(90) % 3 > 0).astype(int)
    expected = geode_jax.fit_classes(key, data, labels, **OPTIONS, calibrate=False)
    with (
        mock.patch.object(classes, "calibrated_powers", side_effect=KeyboardInterrupt),
        pytest.warns(RuntimeWarning, match="are not calibrated"),
    ):
        assert eqx.tree_equal(geode_jax.fit_classes(key, data, labels, **OPTIONS), expected)


@pytest.mark.slow
def test_classes(data, tmp_path):
    key, labels = jax.random.key(1), (np.arange(90) % 3 > 0).astype(int)
    whole = geode_jax.fit_classes(key, data, labels, **OPTIONS)
    with _stop_after(5, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.fit_classes(key, data, labels, **OPTIONS, checkpoint=tmp_path)
    assert eqx.tree_equal(geode_jax.fit_classes(key, data, labels, **OPTIONS, checkpoint=tmp_path), whole)


@pytest.mark.slow
def test_classes_in_other_coordinates_do_not_go_on(data, tmp_path, monkeypatch):
    """Another machine may turn a direction of the common span round: what was learned in it would be read wrongly."""
    key, labels = jax.random.key(0), np.arange(len(data)) % 3
    data = data * np.where(np.arange(6) == 0, 1e-6, 1.0)
    with _stop_after(3, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.fit_classes(key, data, labels, **OPTIONS, checkpoint=tmp_path)
    found = classes._common_coordinates

    def turned(*arguments):
        frame, reduction, x = found(*arguments)
        return frame._replace(scale=frame.scale * np.where(np.arange(6) == 0, 1.01, 1.0)), reduction, x

    monkeypatch.setattr(classes, "_common_coordinates", turned)
    with pytest.raises(ValueError, match=r"checkpoint: the classes in .* were learned in other coordinates"):
        geode_jax.fit_classes(key, data, labels, **OPTIONS, checkpoint=tmp_path)


@pytest.mark.slow
def test_many_classes_sampled_together(data, tmp_path):
    """Their folder has a name that file systems accept."""
    rows, sampler = np.tile(data, (2, 1))[:140], geode_jax.SamplerSettings(num_warmup=1, num_samples=1)
    dictionary = geode_jax.DictionarySettings(num_trees=1, depth=0, max_rank=1)
    options = {"dictionary": dictionary, "sampler": sampler, "calibrate": False, "checkpoint": tmp_path}
    geode_jax.fit_classes(jax.random.key(0), rows, np.arange(140) % 70, **options)
    assert (tmp_path / "classes from 0" / "chains.npz").exists()


def test_a_folder_that_processes_do_not_share(tmp_path):
    """Where every process has all rows, one folder is for all of them."""
    kept = checkpoint.Checkpoint(tmp_path, "")
    run._check_shared(kept, 100)
    with (
        mock.patch.object(run.multihost_utils, "assert_equal", side_effect=AssertionError),
        pytest.raises(ValueError, match="checkpoint: expected a folder that all processes share"),
    ):
        run._check_shared(kept, 100)


def test_estimators_hand_it_on(data, tmp_path):
    model = geode_jax.GeodeDensity(**QUICK, checkpoint=tmp_path / "fit").fit(data)
    assert (tmp_path / "fit" / "chains.npz").exists()
    model.save(tmp_path / "model.npz")
    assert geode_jax.GeodeDensity.load(tmp_path / "model.npz").checkpoint is None  # another fit is not to go on there


def _changed_header(path, change):
    """Write a file of a checkpoint anew with a changed header."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(str(arrays.pop("header")))
    change(header)
    np.savez(path, header=np.array(json.dumps(header)), **arrays)


@pytest.fixture(scope="module")
def kept(data, tmp_path_factory):
    """The folder of a fit that was stopped after its fourth segment of draws."""
    folder = tmp_path_factory.mktemp("stopped")
    with _stop_after(6, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=folder)
    assert (folder / "draws 2.npz").exists()
    return folder


@pytest.fixture
def stopped(kept, tmp_path):
    """A copy of it."""
    return shutil.copytree(kept, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "what", ["jax", "jaxlib", "geode_jax", "platform", "XLA_FLAGS", "jax_disable_most_optimizations", "mesh"]
)
def test_a_fit_does_not_go_on_where_draws_would_differ(data, stopped, what):
    _changed_header(stopped / "chains.npz", lambda header: header["made_by"].update({what: "0.1"}))
    with pytest.raises(ValueError, match=rf"made with {what} 0\.1, and this is {what}"):
        geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=stopped)


def test_swapped_draws_and_other_arrays_are_refused(data, stopped):
    first, second, aside = (stopped / f"{name}.npz" for name in ("draws 1", "draws 2", "aside"))
    for source, target in ((first, aside), (second, first), (aside, second)):
        source.rename(target)
    with pytest.raises(ValueError, match="it holds 'draws 2': files were moved or swapped"):
        geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=stopped)
    with np.load(stopped / "chains.npz") as file:
        arrays = {name: file[name] for name in file.files}
    arrays["leaf 0"] = arrays["leaf 0"][:, :, :-1]
    np.savez(stopped / "chains.npz", **arrays)
    with pytest.raises(ValueError, match="not those of the chains of this fit"):
        geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=stopped)


def test_one_fit_per_folder(data, tmp_path):
    """A second fit is refused while the first runs; neither an error nor a killed process keeps the folder."""

    def meanwhile(*_):
        with pytest.raises(ValueError, match=r"checkpoint: another fit is using the folder"):
            geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=tmp_path)
        raise _PowerCut

    with mock.patch.object(run._Run, "advance", meanwhile), pytest.raises(_PowerCut):
        geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=tmp_path)
    assert geode_jax.fit(jax.random.key(1), data, **OPTIONS, checkpoint=tmp_path).num_draws == 30


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_lock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    assert checkpoint.kept_seed(tmp_path, lambda: 3) == 3


def test_the_seed_is_kept_whole_and_by_one_fit_at_a_time(tmp_path, monkeypatch):
    with checkpoint._locked(tmp_path), pytest.raises(ValueError, match="another fit is using"):
        checkpoint.kept_seed(tmp_path, lambda: 3)

    def half(path, text):
        path.write_bytes(text.encode()[:3])
        raise _PowerCut

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(_PowerCut):
            checkpoint.kept_seed(tmp_path, lambda: 3)
    assert checkpoint.kept_seed(tmp_path, lambda: 4) == 4
    assert checkpoint.kept_seed(tmp_path, lambda: 5) == 4


@pytest.mark.slow
def test_a_fit_without_a_seed_goes_on(data, tmp_path):
    options = {"num_trees": 2, "max_rank": 3, "depth": 2, "num_warmup": 60, "num_samples": 60}
    with _stop_after(2, _PowerCut), pytest.raises(_PowerCut):
        geode_jax.GeodeDensity(**options, checkpoint=tmp_path).fit(data)
    seed = json.loads((tmp_path / "seed.json").read_text())["seed"]
    resumed = geode_jax.GeodeDensity(**options, checkpoint=tmp_path).fit(data)
    with mock.patch("geode_jax.estimators.base._drawn_seed", return_value=seed):
        whole = geode_jax.GeodeDensity(**options).fit(data)
    assert eqx.tree_equal(resumed.posterior_.draws, whole.posterior_.draws)
    (tmp_path / "seed.json").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint: expected a seed"):
        geode_jax.GeodeDensity(**options, checkpoint=tmp_path).fit(data)
