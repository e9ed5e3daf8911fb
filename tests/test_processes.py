"""Processes that each bring their own rows learn and draw what one process with all rows does.

Stage one is tested with threads in place of processes: they add up their arrays through a barrier.
"""

import threading
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_two_processes
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh

import geode_jax
from geode_jax import DictionarySettings, Prior, SamplerSettings
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.fitting import calibration
from geode_jax.fitting.classes import _common_coordinates
from geode_jax.fitting.local_rows import bring_rows
from geode_jax.fitting.stages import Request
from geode_jax.forest import choices, device_candidates, device_products, trees
from geode_jax.forest.learn import grow_forest
from geode_jax.forest.plan import Plan
from geode_jax.gibbs import sharding
from geode_jax.gibbs.chain import initial_chain, step
from geode_jax.learning import borrowing, evidence, feature_noise, moments, subspaces, units
from geode_jax.learning.shared_span import learn_whole_span, span_rank
from geode_jax.math.row_uniforms import _products, uniforms_of_rows
from geode_jax.model.statistics import Statistics
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.frame import Frame, learn_frame
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.training import Training
from geode_jax.settings import SliceMembership

NUM_ROWS = 300


class _Together:
    """Runs a function on threads that stand for processes; `index` of them has its own rows."""

    def __init__(self, sizes):
        self._sizes, self._parts = tuple(sizes), [np.zeros(0)] * len(sizes)
        self._barrier = threading.Barrier(len(sizes), timeout=60)

    def __call__(self, function):
        """``function(processes)`` of every process."""
        found, errors = [None] * len(self._sizes), []

        def add(index, values):
            self._parts[index] = values
            self._barrier.wait()
            total = sum(self._parts)
            self._barrier.wait()
            return total

        def run(index):
            try:
                found[index] = function(Processes(self._sizes, index, lambda values: add(index, values)))
            except Exception as error:  # told by the main thread, which would otherwise see broken barriers only
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(self._sizes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found


def _divided(x, sizes):
    return np.split(x, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("numbers_at_once", [2**22, 3 * 2])
def test_what_processes_tell_each_other(numbers_at_once, monkeypatch):
    monkeypatch.setattr("geode_jax.rows.processes.NUMBERS_AT_ONCE", numbers_at_once)
    rng = np.random.default_rng(0)
    sizes = (5, 0, 7, 1)
    x, counts = rng.normal(size=(13, 2)).astype(np.float32), np.array([[3, 0], [4, 0], [0, 1], [2, 2]])
    wanted = np.array([0, 4, 5, 6, 11, 12])

    def told(processes):
        own = _divided(x, sizes)[processes.index]
        before, total = processes.before_and_total(counts[processes.index])
        kinds = processes.count(own.shape[0]), processes.start, before.tolist(), total.tolist()
        rows = processes.joined(own[processes.own(wanted)]), processes.joined(own)
        sample = processes.joined(own[processes.sample(np.arange(len(own)), 4)])
        highest = processes.highest(own.max(axis=0, initial=-np.inf)), processes.lowest(own.min(axis=0, initial=np.inf))
        return kinds, rows, sample, highest, processes.own_part(x)

    for index, (kinds, rows, sample, highest, part) in enumerate(_Together(sizes)(told)):
        assert kinds == (13, sum(sizes[:index]), counts[:index].sum(axis=0).tolist(), [9, 3])
        np.testing.assert_array_equal(rows[0], x[wanted])
        np.testing.assert_array_equal(rows[1], x)
        assert rows[1].dtype == np.float32
        np.testing.assert_array_equal(sample, x[[2, 5, 8, 10]])
        np.testing.assert_array_equal(highest, [x.max(axis=0), x.min(axis=0)])
        np.testing.assert_array_equal(part, _divided(x, sizes)[index])


def test_one_process_alone_exchanges_nothing():
    values = np.arange(6.0)
    assert ALONE.total(values) is values
    assert ALONE.joined(values) is values
    assert ALONE.own(values) is values
    assert ALONE.count(6) == 6
    np.testing.assert_array_equal(ALONE.sample(values, 3), [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(ALONE.sample(values, 6), values)


def _curved(num_features, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    x = np.tanh(rng.normal(size=(NUM_ROWS, 3)) @ rng.normal(size=(3, num_features)))
    return x + noise * rng.normal(size=x.shape)


def _within_a_span():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3))
    x = np.hstack([np.sin(2 * x[:, :2]), x]) @ rng.normal(size=(5, 40))
    return x + 0.05 * rng.normal(size=x.shape)


def _smooth():
    rng = np.random.default_rng(0)
    place = np.linspace(0.0, 1.0, 20)
    covariance = np.exp(-np.square(place[:, None] - place) / 0.02) + 1e-6 * np.eye(20)
    return rng.normal(size=(NUM_ROWS, 20)) @ np.linalg.cholesky(covariance).T


_PLAIN = {"num_trees": 2, "depth": 2, "shared_span": None, "noise_covariance": None}
# data, and settings of the dictionary
_CASES = {
    "all nodes": (_curved(8), _PLAIN),
    # cells with fewer rows than features, and a tree that is deeper than the data fill
    "candidates": (_curved(24), {**_PLAIN, "depth": 5, "num_candidates": 4}),
    "routed": (_curved(8), {**_PLAIN, "depth": 3, "tree_rows": 100}),
    "in sample": (_curved(8), {**_PLAIN, "cross_fit": None}),
    "span": (_within_a_span(), {"num_trees": 2, "depth": 2, "noise_covariance": None}),
    "noise covariance": (_smooth(), {"num_trees": 2, "depth": 2, "shared_span": None}),
    "units": (_curved(8) * 10.0 ** np.arange(8), _PLAIN),
    "constant features": (np.insert(_curved(8), [0, 5, 8], 2.5, axis=1), _PLAIN),
}


def _forest(x, settings, processes=ALONE):
    own = x if processes.is_alone else _divided(x, processes.sizes)[processes.index]
    plan = Plan.of(DictionarySettings(**settings), *x.shape)
    if not processes.is_alone:
        plan = plan.among(processes.sizes, (1,) * len(processes.sizes), processes.index)
    with jax_settings(np.float64):
        return grow_forest(jax.random.key(0), own, plan, np.dtype(np.float64), lambda *_: None, None, processes)


def _row_statistics(forest):
    """(E, Z2) of every row at its nodes, in their order: (F, K or M, rows, 1 + d)."""
    statistics, num_rows = forest.statistics, int(forest.statistics.num_rows[0])
    if isinstance(statistics, Statistics):
        found = np.concatenate([statistics.residual[..., None], statistics.squared], axis=-1)
        return found[:, :, :num_rows], None
    both = np.concatenate([np.asarray(statistics.residual)[..., None], statistics.squared], axis=-1)[:, 0]
    place = np.asarray(statistics.position)[:, :, :num_rows]
    return np.stack([tree[at] for tree, at in zip(both, place, strict=True)]), statistics.node[:, :, :num_rows]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("candidates", (90, 0, 210)),
        ("routed", (200, 100)),
        ("span", (60, 0, 240)),
        ("noise covariance", (299, 1)),
        pytest.param("all nodes", (100, 0, 150, 50), marks=pytest.mark.slow),
        pytest.param("in sample", (100, 200), marks=pytest.mark.slow),
        pytest.param("units", (0, 200, 100), marks=pytest.mark.slow),
        pytest.param("constant features", (130, 0, 170), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("of_samples", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "samples"])
def test_processes_learn_the_forest_of_one(case, sizes, of_samples, monkeypatch):
    """Where choices are made by all rows, and where by samples of them."""
    x, settings = _CASES[case]
    if of_samples:
        for module, name, number in (
            (evidence, "LARGEST_SAMPLE", 150),
            (choices, "LARGEST_SAMPLE", 150),
            (evidence, "FEWEST_SAMPLED", 5),
            (units, "LARGEST_SAMPLE", 120),
            (feature_noise, "ENOUGH_ROWS", 100),
            (borrowing, "ENOUGH_ROWS", 30),
        ):
            monkeypatch.setattr(module, name, number)
    expected = _forest(x, settings)
    assert (expected.noise_root is not None) == (case == "noise covariance")
    assert (expected.found.span_rank is not None) == (case == "span")
    assert expected.found.decisions[0].taken == ("one for each feature" if case == "units" else "one for all features")
    with mock.patch.object(trees, "partition_rows", side_effect=trees.partition_rows) as cut:
        found = _Together(sizes)(lambda processes: _forest(x, settings, processes))
    assert cut.call_count == expected.num_trees  # by the first process alone
    for forest in found:
        assert forest.found.rank == expected.found.rank
        assert [str(one) for one in forest.found.decisions] == [str(one) for one in expected.found.decisions]
        for name in ("shift", "scale", "features", "noise_root", "borrowed"):
            for one, other in zip(*(jax.tree.leaves(getattr(it, name)) for it in (forest, expected)), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8, err_msg=name)
        dictionary, whole = forest.dictionary, expected.dictionary
        np.testing.assert_allclose(dictionary.centres, whole.centres, atol=1e-8)
        np.testing.assert_array_equal(dictionary.tree.is_present, whole.tree.is_present)
        np.testing.assert_array_equal(dictionary.ranks, whole.ranks)
        rows = x if forest.features is None else x[:, forest.features]
        np.testing.assert_allclose(_squared_projections(dictionary, rows), _squared_projections(whole, rows), atol=1e-6)
    if expected.probe is not None:
        for one, other in zip(jax.tree.leaves(found[0].probe), jax.tree.leaves(expected.probe), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
    statistics, nodes = _row_statistics(expected)
    own, own_nodes = zip(*(_row_statistics(forest) for forest in found), strict=True)
    np.testing.assert_allclose(np.concatenate(own, axis=2), statistics, atol=1e-6)
    if nodes is not None:
        np.testing.assert_array_equal(np.concatenate(own_nodes, axis=2), nodes)


@pytest.mark.slow
def test_processes_whose_products_are_those_of_a_device(monkeypatch):
    """As a GPU's would be, with a process without rows: what they learn is what one with that device does."""
    monkeypatch.setattr(device_products, "LEAST_WORK", 0)
    monkeypatch.setattr(device_candidates, "LEAST_WORK", 0)
    device = device_products.DeviceProducts(jax.devices()[0])
    monkeypatch.setattr(device_products, "products_here", lambda: device)
    x, settings = _CASES["candidates"]
    expected = _forest(x, settings)
    statistics, nodes = _row_statistics(expected)
    found = _Together((90, 0, 210))(lambda processes: _row_statistics(_forest(x, settings, processes)))
    own, own_nodes = zip(*found, strict=True)
    np.testing.assert_array_equal(np.concatenate(own_nodes, axis=2), nodes)
    np.testing.assert_allclose(np.concatenate(own, axis=2), statistics, atol=1e-6)


def _squared_projections(dictionary, x):
    """Of some rows along every direction, which are known up to their sign."""
    return np.square(np.einsum("fkdm,nd->fknm", np.asarray(dictionary.bases), x[:20]))


def test_moments_of_processes_far_apart_lose_no_digits():
    rng = np.random.default_rng(0)
    x = np.concatenate([1e8 + rng.normal(size=(50, 3)), 1e8 + 1e-3 * rng.normal(size=(30, 3)), np.zeros((0, 3))])
    whole = moments.moments_of(x, np.arange(80))

    def learn(processes):
        own = _divided(x, processes.sizes)[processes.index]
        return moments.over_processes([moments.moments_of(own, np.arange(len(own)))], processes)[0]

    for found in _Together((50, 30, 0))(learn):
        np.testing.assert_allclose(found.mean, whole.mean, rtol=1e-15)
        np.testing.assert_allclose(found.scatter, whole.scatter, rtol=1e-6)
        assert found.largest == whole.largest


def test_the_rank_of_a_span_is_that_of_all_rows():
    """The rows of the first process have one direction, those of the second four, of a third of the size."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 1)) @ rng.normal(size=(1, 12)), rng.normal(size=(60, 4)) @ rng.normal(size=(4, 12)) / 3
    x = np.concatenate(x) + 0.01 * rng.normal(size=(210, 12))
    folds = assign_folds(210, 3, rng)

    def rank(processes):
        own, own_folds = (processes.own_part(table) for table in (x, folds))
        training = Training(own, 12, own_folds, processes=processes)
        return span_rank(training, learn_whole_span(training, 0))

    alone = Training(x, 12, folds)
    expected = span_rank(alone, learn_whole_span(alone, 0))
    assert expected > 1
    assert _Together((150, 60))(rank) == [expected, expected]


@pytest.mark.parametrize("parent_rows", [0.0, 5.0])
def test_large_cells_are_learned_from_products_with_few_vectors(monkeypatch, parent_rows):
    """Beyond `EXACT_MAX_SIDE` rows and features no matrix of D x D is made; here the rest is too small to matter."""
    monkeypatch.setattr(subspaces, "EXACT_MAX_SIDE", 25)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)) * 2.0 ** -np.arange(6.0) @ rng.normal(size=(6, 40)) + 1e-7 * rng.normal(
        size=(200, 40)
    )
    options, folds = subspaces.SubspaceOptions(5, 0, parent_rows), np.arange(200) % 3
    cells = (np.arange(200), np.arange(120), np.arange(120, 200))
    expected = subspaces.learn_subspaces(x, Partition(1, cells), options, folds)

    def learn(processes):
        start = processes.start
        own = [rows[(rows >= start) & (rows < start + processes.sizes[processes.index])] - start for rows in cells]
        tree = Partition.among(processes, 1, tuple(own))
        return subspaces.learn_subspaces(processes.own_part(x), tree, options, processes.own_part(folds))

    for found in _Together((130, 70))(learn):
        np.testing.assert_allclose(found.centres, expected.centres, atol=1e-12)
        np.testing.assert_array_equal(found.ranks, expected.ranks)
        for bases in zip(found.bases.reshape(-1, 40, 5), expected.bases.reshape(-1, 40, 5), strict=True):
            np.testing.assert_allclose(*(basis @ basis.T for basis in bases), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uniforms_of_rows_are_those_of_jax(dtype):
    with jax_settings(dtype):
        key, row = jax.random.key(5), jnp.asarray([7, 3, 999, 0, 500])
        for width in (1, 7):
            expected = jax.random.uniform(key, (1000, width), dtype)[row]
            np.testing.assert_array_equal(uniforms_of_rows(key, row, width, dtype), expected)
        other = uniforms_of_rows(jax.random.key(0, impl="rbg"), row, 3, dtype)
        assert other.shape == (5, 3)
        assert np.unique(other).size == 15
    row = np.array([2**31 - 1, 1_300_000_000, 613_566_756, 613_566_757])  # times 7, on both sides of 2**32
    counts = row[:, None] * 7 + np.arange(7)
    halves = jnp.asarray(np.concatenate([(counts >> 32).ravel(), (counts & 0xFFFFFFFF).ravel()]), jnp.uint32)
    with jax_settings(np.float32):
        first, second = np.split(np.asarray(threefry_2x32(jax.random.key_data(jax.random.key(5)), halves)), 2)
        expected = ((first ^ second) >> 9).reshape(4, 7) / 2**23
        found = uniforms_of_rows(jax.random.key(5), jnp.asarray(row, jnp.int32), 7, np.float32)
        np.testing.assert_array_equal(found, expected.astype(np.float32))
    number = np.array([0, 1, 65535, 77_777_777, 2**31 + 5, 2**32 - 1])
    high, low = (np.asarray(part).astype(object) for part in _products(jnp.asarray(number, jnp.uint32), 1000))
    assert (high * 2**32 + low == number.astype(object) * 1000).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "membership",
    [None, SliceMembership()],
    ids=["direct", "slices"],
)
def test_rows_are_drawn_alike_wherever_they_are_stored(membership):
    """Three shards of 128 places with 80, 0 and 120 rows, against 200 rows in the first 256 places."""
    x, settings = _CASES["all nodes"]
    sampler = SamplerSettings() if membership is None else SamplerSettings(membership=membership)
    with jax_settings(np.float64):
        forest = _forest(x[:200], settings)
        whole = jax.tree.map(lambda leaf: leaf[0], forest.problem(Prior(), sampler))
        place = np.r_[np.arange(80), 256 + np.arange(120)]
        shards = {"shard_rows": jnp.asarray([80, 0, 120], jnp.int32), "row_blocks": 48}
        own = whole.statistics
        residual = jnp.zeros((own.residual.shape[0], 384)).at[:, place].set(own.residual[:, :200])
        squared = jnp.zeros((own.residual.shape[0], 384, own.squared.shape[2])).at[:, place].set(own.squared[:, :200])
        apart = Statistics(residual, squared, own.num_rows, **shards)
        divided = eqx.tree_at(lambda it: it.statistics, whole, apart)

        def draw(problem):
            chain = initial_chain(jax.random.key(1), problem)
            starts = chain.state.node
            for index in range(3):
                warmup = jnp.asarray(2, jnp.int32)
                chain = step(jax.random.key(index), problem, warmup, None, chain, jnp.asarray(index, jnp.int32))
            return starts, chain

        (starts, expected), (own_starts, found) = jax.jit(draw)(whole), jax.jit(draw)(divided)
        np.testing.assert_array_equal(own_starts[place], starts[:200])
        np.testing.assert_array_equal(found.state.node[place], expected.state.node[:200])
        assert (np.delete(np.asarray(found.state.node), place) == whole.tree.num_nodes).all()
        np.testing.assert_allclose(found.state.log_sigma2, expected.state.log_sigma2, rtol=1e-9)
        np.testing.assert_array_equal(found.sums.count, expected.sums.count)


@pytest.mark.slow
def test_one_process_may_call_its_rows_its_own():
    x, settings = _CASES["all nodes"]
    given = {"dictionary": DictionarySettings(**settings), "sampler": SamplerSettings(num_warmup=5, num_samples=5)}
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    found = geode_jax.fit(jax.random.key(0), x, mesh=mesh, process_local=True, **given)
    expected = geode_jax.fit(jax.random.key(0), x, mesh=mesh, **given)
    assert eqx.tree_equal(found.draws, expected.draws)


def test_errors():
    x, mesh = _curved(8), Mesh(np.array(jax.devices()[:1]), ("rows",))
    with pytest.raises(ValueError, match=r"mesh: expected a jax.sharding.Mesh with an axis 'rows'.*got None"):
        geode_jax.fit(jax.random.key(0), x, process_local=True)
    with pytest.raises(TypeError, match=r"process_local: expected bool, got 1"):
        geode_jax.fit(jax.random.key(0), x, mesh=mesh, process_local=1)
    hidden = x.copy()
    hidden[3, 2] = np.nan
    with pytest.raises(ValueError, match=r"X: expected no missing values here, got 1 NaN"):
        geode_jax.fit(jax.random.key(0), hidden, mesh=mesh, process_local=True)
    with pytest.raises(ValueError, match=r"X: expected at least 2 rows in all processes together, got 1"):
        bring_rows(x[:1], mesh, jax.random.key(0), [])


@pytest.mark.parametrize("owners", [[[0], [1], [0]], [[0, 1], [1, 0]]], ids=["not adjacent", "trees apart"])
def test_a_mesh_on_which_processes_do_not_follow_each_other(owners):
    with pytest.raises(ValueError, match="mesh: expected the processes to follow each other along the axis 'rows'"):
        sharding.owners_in_order(np.array(owners))
    np.testing.assert_array_equal(sharding.owners_in_order(np.array([[3, 3], [3, 3], [1, 1]])), [3, 3, 1])


_PROCESS = """
import os, pathlib, sys, time
import jax, numpy as np
port, number, kind, folder = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number), heartbeat_timeout_seconds=20)
import geode_jax
from geode_jax import DictionarySettings, SamplerSettings
from geode_jax._files.checkpoint import Checkpoint
x = np.load(f"{folder}/x {number}.npy", mmap_mode="r")
from geode_jax.gibbs.run import _Run
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "chains"))
if kind == "die":
    write = Checkpoint.write
    saved = [pathlib.Path(folder, "unfinished", name) for name in ("process 0/chains 1.npz", "process 1/chains 0.npz")]
    def die(self, name, header, arrays):
        if number == "1" and header.get("done") == 30:
            while saved[0].stat().st_mtime_ns < saved[1].stat().st_mtime_ns:  # until the other has saved 30
                time.sleep(0.01)
            os._exit(1)
        write(self, name, header, arrays)
    Checkpoint.write = die
else:
    latest = _Run._latest
    def told(self):
        found = latest(self)
        print("goes on from", 0 if found is None else found[0]["done"])
        return found
    _Run._latest = told
    wrong = np.array(x)
    if number == "1":
        wrong[3, 2] = np.nan
    others = {"key": jax.random.key(int(number)), "X": x}, {"key": jax.random.key(0), "X": x[:, : 4 + int(number)]}
    for call in ({"key": jax.random.key(0), "X": wrong}, *others):
        try:
            geode_jax.fit(**call, mesh=mesh, process_local=True, sampler=SamplerSettings(num_chains=2))
        except ValueError as error:
            print(error)
    two_chains = SamplerSettings(num_chains=2)
    try:
        geode_jax.fit(jax.random.key(0), np.array(x[:2]), mesh=mesh, process_local=True, sampler=two_chains)
    except ValueError as error:
        print(error)
posterior = geode_jax.fit(
    jax.random.key(0), x, dtype="float64", mesh=mesh, process_local=True, checkpoint=f"{folder}/unfinished",
    dictionary=DictionarySettings(num_trees=2, depth=5, num_candidates=4, shared_span=None, noise_covariance=None),
    sampler=SamplerSettings(num_warmup=20, num_samples=20, num_chains=2, segment_length=10),
)
posterior.save(f"{folder}/posterior {number}.npz")
print("log density", geode_jax.log_density(posterior, np.array(x[:5])).sum())
"""


@pytest.mark.slow
def test_two_processes_with_their_own_rows_draw_what_one_does(tmp_path):
    """From files; one process dies on the way, and a new run of both goes on from the last segment that both saved."""
    x, settings = _CASES["candidates"]
    for number, own in enumerate(_divided(x, (70, 230))):
        np.save(tmp_path / f"x {number}.npy", own)
    dead = run_two_processes(_PROCESS, "die", tmp_path)
    assert dead[0][0] != 0
    assert "RuntimeError: another process of this fit died" in dead[0][2]
    assert not (tmp_path / "posterior 0.npz").exists()
    kept = [tmp_path / "unfinished" / f"process {number}" / "forest.npz" for number in range(2)]
    written = [path.stat().st_mtime_ns for path in kept]
    first, second = run_two_processes(_PROCESS, "finish", tmp_path)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert [path.stat().st_mtime_ns for path in kept] == written  # neither learned nor saved again
    assert "X: another process, number 1, has rows or labels that cannot be fitted; its own error says why" in first[1]
    assert "X: expected no missing values here, got 1 NaN (the first in row 3, column 2)" in second[1]
    for output in (first[1], second[1]):
        assert "goes on from 20" in output
        assert "key: expected the same key and settings in every process, got others" in output
        assert "X: expected as many features in every process, got [4, 5]" in output
        assert "process_local: expected more rows than half the number of features" in output
        assert "log density" in output
    posteriors = [geode_jax.Posterior.load(tmp_path / f"posterior {number}.npz") for number in range(2)]
    assert eqx.tree_equal(*posteriors)
    sampler = SamplerSettings(num_warmup=20, num_samples=20, num_chains=2, segment_length=10)
    one = geode_jax.fit(
        jax.random.key(0), x, dtype="float64", dictionary=DictionarySettings(**settings), sampler=sampler
    )
    found, expected = posteriors[0], one
    assert (found.draws.count == expected.draws.count).all()
    for name in ("neg_log_u", "tau", "log_sigma2", "log_weights", "log_joint"):
        pair = getattr(found.draws, name), getattr(expected.draws, name)
        np.testing.assert_allclose(*pair, rtol=1e-6, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.lost_mass, expected.lost_mass, rtol=1e-6)


# Two classes of such sizes that one process samples them one after the other too.
_CLASS_SIZES = 150, 90


def _classes():
    """Rows and labels, in the order of two processes with 100 and 140 rows: the first has no row of class 1."""
    rng = np.random.default_rng(3)
    labels = np.concatenate([np.zeros(100, int), rng.permutation(np.repeat([0, 1], [50, 90]))])
    assert tuple(np.bincount(labels)) == _CLASS_SIZES
    latent = rng.normal(size=(labels.size, 3)) * [1.0, 0.6, 0.4] + 1.5 * np.eye(3)[labels]
    return latent @ rng.normal(size=(3, 8)) + 0.1 * rng.normal(size=(labels.size, 8)), labels


_CLASSES = """
import os, sys
import jax, numpy as np
port, number, folder = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number), heartbeat_timeout_seconds=20)
import geode_jax
from geode_jax import DictionarySettings, SamplerSettings, SharedSpan
x, labels = np.load(f"{folder}/x {number}.npy"), np.load(f"{folder}/labels {number}.npy")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
given = {"mesh": mesh, "process_local": True, "dtype": "float64"}
for bad in (-labels, labels[:, None], np.where(np.cumsum(labels) > 2, 0, labels)):
    try:
        geode_jax.fit_classes(jax.random.key(0), x, bad, **given)
    except ValueError as error:
        print(error)
given["dictionary"] = DictionarySettings(num_trees=1, depth=2, shared_span=SharedSpan(3))
given["sampler"] = SamplerSettings(num_warmup=20, num_samples=20, segment_length=20)
for name in ("classes", "again"):  # from the checkpoint, where one process has lost the forest of class 1
    found = geode_jax.fit_classes(
        jax.random.key(0), x, labels.astype(np.uint8), **given, checkpoint=f"{folder}/unfinished"
    )
    found.save(f"{folder}/{name} {number}.npz")
    if name == "classes" and number == "1":
        os.remove(f"{folder}/unfinished/process 1/class 1/forest.npz")
print(geode_jax.class_log_probabilities(found, x[:5]).shape)
"""


@pytest.mark.slow
def test_two_processes_with_rows_of_some_classes_fit_what_one_does(tmp_path):
    """In common coordinates, and calibrated; the first process has no row of class 1."""
    x, labels = _classes()
    for number, (rows, own) in enumerate(zip(_divided(x, (100, 140)), _divided(labels, (100, 140)), strict=True)):
        np.save(tmp_path / f"x {number}.npy", rows)
        np.save(tmp_path / f"labels {number}.npy", own)
    first, second = run_two_processes(_CLASSES, tmp_path)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "X: another process, number 1, has rows or labels that cannot be fitted" in first[1]
    assert "labels: expected integers from 0, got -1" in second[1]
    assert "labels: expected 100 integers, got int64 of shape (100, 1)" in first[1]
    for output in (first[1], second[1]):
        assert "process_local: expected more than 4 rows of every class in all processes together, got 2" in output
        assert "(5, 2)" in output
    sampler = SamplerSettings(num_warmup=20, num_samples=20, segment_length=20)
    names = ("classes 0", "classes 1", "again 0", "again 1")
    found, *others = (geode_jax.ClassPosterior.load(tmp_path / f"{name}.npz") for name in names)
    assert all(eqx.tree_equal(found, other) for other in others)
    settings = DictionarySettings(num_trees=1, depth=2, shared_span=geode_jax.SharedSpan(3))
    expected = geode_jax.fit_classes(
        jax.random.key(0), x, labels, dtype="float64", dictionary=settings, sampler=sampler
    )
    assert expected.reduction is not None
    for one, whole, size in zip(found.members, expected.members, _CLASS_SIZES, strict=True):
        assert (one.draws.count.sum(axis=-1) == size).all()
        np.testing.assert_array_equal(one.draws.count, whole.draws.count)
        np.testing.assert_allclose(one.draws.log_joint, whole.draws.log_joint, rtol=1e-6)
    assert 0.0 < expected.power < 1.0
    np.testing.assert_allclose(found.power, expected.power, rtol=1e-3)
    np.testing.assert_allclose(found.power_exponent, expected.power_exponent, rtol=1e-3, atol=1e-3)
    pair = (geode_jax.class_log_probabilities(own, x) for own in (found, expected))
    np.testing.assert_allclose(*pair, atol=1e-4)


_REQUEST = {**dict.fromkeys(["prior", "sampler", "checkpoint", "mesh"]), "dtype": "float64", "progress": False}


@pytest.mark.parametrize("span", [geode_jax.SharedSpan(3), None], ids=["span", "no span"])
def test_common_coordinates_of_classes(span):
    """Units, a span or noise scales, from the rows of all processes."""
    x, labels = _classes()
    x = x * 10.0 ** np.arange(8)
    request = Request.checked(**_REQUEST, dictionary=DictionarySettings(shared_span=span))

    def coordinates(x, labels, processes):
        with jax_settings(np.float64):
            return _common_coordinates(x, [np.flatnonzero(labels == number) for number in range(2)], request, processes)

    frame, reduction, whole = coordinates(x, labels, ALONE)
    assert (reduction is None) == (span is None)
    found = _Together((100, 140))(lambda it: coordinates(it.own_part(x), it.own_part(labels), it))
    for own, own_reduction, _ in found:
        np.testing.assert_allclose(own.scale, frame.scale, rtol=1e-6)
        np.testing.assert_allclose(own.shift, frame.shift, rtol=1e-6)
        if span is not None:
            np.testing.assert_allclose(own_reduction.noise, reduction.noise, rtol=1e-6)
    rows = np.concatenate([own for *_, own in found])
    np.testing.assert_allclose(np.square(rows), np.square(whole), rtol=1e-5, atol=1e-6)


def test_rows_for_calibration_are_those_of_one_process(monkeypatch):
    """Every third of each class, and a quarter of these for the exponent: in the same order, with what is theirs."""
    monkeypatch.setattr(calibration, "CALIBRATION_ROWS", 80)
    monkeypatch.setattr(calibration, "PARTIAL_CALIBRATION_ROWS", 20)
    monkeypatch.setattr(calibration, "_best_exponent", lambda posterior, power, rows, own, *rest: (rows, own, *rest))
    monkeypatch.setattr(calibration, "class_log_densities", lambda posterior, rows: rows[:, :2])
    monkeypatch.setattr(calibration, "mean_over_draws", lambda densities: densities.copy())
    monkeypatch.setattr(calibration, "to_model", lambda rows, *_: rows)
    x, labels = _classes()
    frame = Frame(np.zeros(8), np.ones(8))
    posterior = mock.Mock(
        num_classes=2, log_prior=np.zeros(2), frame=frame, dtype=x.dtype, varying_features=slice(None)
    )
    posterior.log_density_outside = lambda rows: np.zeros(len(rows))

    def chosen(x, labels, processes):
        held_out = [x[labels == number, 2] for number in range(2)]
        power, values = calibration.calibrated_powers(posterior, x, labels, held_out, processes)
        return power, *values

    expected = chosen(x, labels, ALONE)
    np.testing.assert_array_equal(expected[1], x[np.argsort(labels, kind="stable")][::12])
    np.testing.assert_array_equal(expected[2], np.sort(labels)[::12])
    np.testing.assert_allclose(expected[3], expected[1][np.arange(20), expected[2]] - expected[1][:, 2])
    np.testing.assert_allclose(expected[4], 240 / np.bincount(labels)[expected[2]])
    for found in _Together((100, 140))(lambda it: chosen(it.own_part(x), it.own_part(labels), it)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other)


def test_a_far_row_sets_no_unit():
    """Processes, one of them without rows, find what one process does; a column that never varies keeps its value."""
    x = np.column_stack([np.random.default_rng(0).normal(size=(300, 6)), np.full(300, 7.0)])
    x[205, :6] = 1e6
    with pytest.warns(RuntimeWarning, match="^X: row 205 is"):
        whole = learn_frame(x)
    assert whole.shift[6] == 7.0
    with pytest.warns(RuntimeWarning, match="^X: row 205 is"):
        found = _Together((0, 180, 120))(lambda it: learn_frame(it.own_part(x), it))
    for one in found:
        np.testing.assert_allclose(one.scale, whole.scale)
        np.testing.assert_allclose(one.shift, whole.shift)
