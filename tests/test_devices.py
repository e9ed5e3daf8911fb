"""Several devices draw what one does."""

import dataclasses
import re
from functools import partial
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DICTIONARY, run_two_processes
from jax.sharding import Mesh

import geode_jax
from geode_jax import Prior, SamplerSettings
from geode_jax._runtime import devices
from geode_jax.forest import freeze
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import grow_forest, plan_of
from geode_jax.gibbs import membership, run, sharding
from geode_jax.predict import density, row_blocks

SAMPLER = SamplerSettings(num_warmup=10, num_samples=10, num_chains=2, segment_length=10)
needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs XLA_FLAGS as conftest.py gives to workers")


def _mesh(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(list(sizes.values())), tuple(sizes))


def _with_missing(data, kind):
    x = data.copy()
    if kind == "own patterns":
        x[np.random.default_rng(3).random(x.shape) < 0.15] = np.nan
        x[np.isnan(x).all(axis=1), 0] = 1.0
    elif kind == "one pattern":
        x[::3, 1:3] = np.nan
    elif kind == "no complete row":
        x[np.arange(len(x)), np.random.default_rng(3).integers(x.shape[1], size=len(x))] = np.nan
    return x


def assert_close(found, expected):
    """Draws of float64 chains that differ by the order of sums; short enough for no difference to grow."""
    assert (found.count == expected.count).all()
    for name in ("neg_log_u", "tau", "log_sigma2", "log_weights", "log_joint"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-9, err_msg=name)


@needs_devices
@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"trees": 2, "chains": 2}, "complete"),
        pytest.param({"rows": 3}, "candidates", marks=pytest.mark.slow),
        pytest.param({"rows": 3}, "complete", marks=pytest.mark.slow),
        pytest.param({"rows": 2, "trees": 2}, "candidates", marks=pytest.mark.slow),
        pytest.param({"rows": 3}, "own patterns", marks=pytest.mark.slow),
        pytest.param({"rows": 2, "trees": 2}, "own patterns", marks=pytest.mark.slow),
        pytest.param({"chains": 2, "rows": 2}, "one pattern", marks=pytest.mark.slow),
        pytest.param({"rows": 2}, "no complete row", marks=pytest.mark.slow),
    ],
)
def test_draws_are_those_of_one_device(data, sizes, kind):
    settings = dataclasses.replace(DICTIONARY, num_candidates=4 if kind == "candidates" else None)
    options = {"dictionary": settings, "sampler": SAMPLER, "dtype": "float64"}
    x = _with_missing(data, kind)
    one = geode_jax.fit(jax.random.key(0), x, **options)
    several = geode_jax.fit(jax.random.key(0), x, **options, mesh=_mesh(**sizes))
    assert_close(several.draws, one.draws)
    np.testing.assert_allclose(several.adaptation.included, one.adaptation.included, rtol=1e-6, atol=1e-9)
    num_devices = np.prod(list(sizes.values()))
    assert all(len(leaf.devices()) == num_devices for leaf in jax.tree.leaves(several.dictionary))
    expected = geode_jax.log_density(one, x[:9])
    np.testing.assert_allclose(geode_jax.log_density(several, x[:9]), expected, rtol=1e-4)


@needs_devices
@pytest.mark.parametrize(
    ("num_candidates", "num_devices"),
    [(4, 3), pytest.param(None, 3, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_statistics_go_from_the_host_to_each_device(data, posterior, num_candidates, num_devices, monkeypatch):
    """No device ever holds those of all rows, after a fit that is resumed neither."""
    settings = dataclasses.replace(DICTIONARY, num_candidates=num_candidates)
    plan = plan_of(data, settings).on_mesh(num_devices)
    show = lambda share, text: None  # noqa: E731
    made = []
    original = freeze.zero_statistics
    monkeypatch.setattr(freeze, "zero_statistics", lambda shape, *rest: made.append(shape) or original(shape, *rest))
    forest = grow_forest(jax.random.key(0), data, plan, np.dtype("float32"), show)
    if num_candidates is None:
        assert set(made) == {(1, 7, plan.num_places // num_devices, 3)}  # a part of the rows of one tree
    for one in (forest, Forest.from_archive(*forest.to_archive(), on_device=False)):
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(one.statistics))
        placed = sharding.place_problem(one.problem(Prior(), SAMPLER), sharding.with_all_axes(_mesh(rows=num_devices)))
        squared = placed.statistics.squared
        shards = [shard.data.size for shard in squared.addressable_shards]
        assert shards == [squared.size // num_devices] * num_devices
        np.testing.assert_array_equal(squared, forest.statistics.squared)  # laid out for these devices from the start
    on_device = eqx.tree_at(lambda it: it.statistics, forest, jax.device_put(forest.statistics))
    names = "dictionary", "dictionary_settings", "shift", "scale"
    own = {name: getattr(forest, name) for name in names}
    posterior = dataclasses.replace(posterior, **own)  # as if its draws were for this forest
    expected = geode_jax.held_out_log_density(on_device, posterior)
    np.testing.assert_allclose(geode_jax.held_out_log_density(forest, posterior), expected, rtol=1e-5)


_ONE, _TWO, _EIGHT = membership.CHUNK_BITS, 6, 4  # chunks
_NODES, _BLOCKS = membership.FEW_NODES, 0  # node by node, and by blocks


@pytest.mark.slow
@needs_devices
@pytest.mark.parametrize(
    ("sizes", "few_nodes", "chunk_bits"),  # every two of them together
    [
        ({"trees": 2, "rows": 2}, _NODES, _ONE),
        ({"trees": 2, "rows": 2}, _BLOCKS, _TWO),
        ({"trees": 2, "rows": 2}, _NODES, _EIGHT),
        ({"rows": 3}, _BLOCKS, _ONE),
        ({"rows": 3}, _NODES, _TWO),
        ({"rows": 3}, _BLOCKS, _EIGHT),
    ],
)
def test_devices_exchange_node_sums_only(data, sizes, few_nodes, chunk_bits, monkeypatch):
    """Once a sweep; neither statistics nor anything else of the rows' size leaves its device."""
    monkeypatch.setattr(membership, "FEW_NODES", few_nodes)
    monkeypatch.setattr(membership, "CHUNK_BITS", chunk_bits)
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)
    mesh = sharding.with_all_axes(_mesh(**sizes))
    problems = sharding.place_problem(forest.problem(Prior(), SAMPLER), mesh)
    num_trees, num_nodes, num_places, rank = problems.statistics.squared.shape
    shard = problems.statistics.squared.sharding.shard_shape(problems.statistics.squared.shape)
    assert shard == (num_trees // sizes.get("trees", 1), num_nodes, num_places // sizes["rows"], rank)

    keys = jax.random.split(jax.random.key(1), (num_trees, SAMPLER.num_chains))
    keys = sharding.place(keys, jax.NamedSharding(mesh, sharding.BY_CHAIN))
    chains = run._start(keys, problems, mesh)
    segment = partial(run._segment.__wrapped__, options=run.SegmentOptions(10, SAMPLER.adaptation, mesh))
    program = jax.jit(segment).lower(keys, chains, problems, np.int32(0), np.int32(10)).compile().as_text()
    exchanged = [
        line for line in program.splitlines() if re.search(r" (all-\w+|collective-\w+|reduce-scatter)\(", line)
    ]
    in_sweep = [line for line in exchanged if "/while/body" in line]
    assert len(in_sweep) == 1
    assert " all-reduce(" in in_sweep[0]
    sizes = [[int(n) for n in shape.split(",") if n] for shape in re.findall(r"[fs]32\[([\d,]*)\]", in_sweep[0])]
    assert max(np.prod(shape) for shape in sizes) == shard[0] * SAMPLER.num_chains * num_nodes * rank


@needs_devices
@pytest.mark.slow
def test_resumed_run_on_a_mesh_is_the_run(data, tmp_path):
    forest = geode_jax.learn_forest(jax.random.key(0), _with_missing(data, "own patterns"), dictionary=DICTIONARY)
    options = {"sampler": SAMPLER, "mesh": _mesh(rows=2, trees=2)}
    whole = geode_jax.sample_posterior(jax.random.key(1), forest, **options)
    advance = run._Run.advance

    def once(self):
        if self.done:
            raise SystemError("power cut")
        advance(self)

    with mock.patch.object(run._Run, "advance", once), pytest.raises(SystemError):
        geode_jax.sample_posterior(jax.random.key(1), forest, **options, checkpoint=tmp_path)
    resumed = geode_jax.sample_posterior(jax.random.key(1), forest, **options, checkpoint=tmp_path)
    assert eqx.tree_equal(resumed, whole)


def _predictions(posterior, rows, key):
    """What every prediction gives for the rows, complete and with missing features."""
    given = geode_jax.condition(posterior, rows)
    return {
        "density": geode_jax.log_density(posterior, rows),
        "density by draw": geode_jax.log_density_draws(posterior, rows, num_draws=2),
        "dimension": geode_jax.intrinsic_dimension(posterior, rows),
        "sample": geode_jax.sample(key, posterior, 30),
        "impute": np.stack(geode_jax.impute(posterior, rows)),
        "draws": geode_jax.impute_draws(key, posterior, rows, 2),
        "marginal": given.marginal([1]).quantile(0.3),
        "values": given.log_prob(np.zeros_like(rows)),
    }


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["shaped", "float64"], indirect=True)  # in float32, and with isotropic noise
def test_rows_of_predictions_are_spread(posterior, data, monkeypatch):
    """Over all devices of the mesh, 40 rows of one pattern and 30 of others, with the results of one device.

    Blocks of four rows, so that there are several for every device.
    """
    monkeypatch.setattr(row_blocks, "ON_CPU", row_blocks.ON_CPU._replace(rows=4))
    rows = data[:110].copy()
    rows[:40, [1, 4]] = np.nan
    rows[np.arange(40, 70), np.arange(40, 70) % 6] = np.nan
    rows[60:65] += 100.0  # computed in float64
    spread = posterior.replicated(_mesh(trees=2, rows=2))
    assert all(len(leaf.devices()) == 4 for leaf in jax.tree.leaves(spread.dictionary))
    key = jax.random.key(1)
    expected, found = _predictions(posterior, rows, key), _predictions(spread, rows, key)
    tolerance = 1e-3 if posterior.dtype == np.float32 else 1e-7
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
    again = spread.replicated(None)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(again.dictionary))
    assert again.dtype == posterior.dtype


@needs_devices
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_a_device_has_its_own_rows_only(posterior):
    """A program for all devices exchanges nothing, and none of them sees more than its own block."""
    mesh = devices.mesh_of(devices.replicated(jnp.zeros(3), _mesh(rows=4)))
    shared = jax.device_put((posterior.dictionary, posterior.thin(4)), devices.everywhere(mesh))
    program = row_blocks._on_all_devices(density.log_density_by_tree, mesh, ())
    rows = jax.device_put(jnp.zeros((8, 6)), jax.NamedSharding(mesh, jax.P(devices.OWN_DEVICES)))
    text = program.lower(shared, rows).compile().as_text()
    assert not re.search(r" (all-\w+|collective-\w+|reduce-scatter)\(", text)
    assert "f32[2,6]" in text
    assert "f32[8,6]" not in text


@needs_devices
def test_a_fit_is_not_resumed_on_another_mesh(data, tmp_path):
    """Devices add up rows of their own first, so that it would not go on to the same draws."""
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=DICTIONARY)

    def run(**mesh):
        options = {"sampler": SAMPLER, "checkpoint": tmp_path}
        return geode_jax.sample_posterior(jax.random.key(1), forest, **options, mesh=_mesh(**mesh) if mesh else None)

    first = run(rows=2)
    np.testing.assert_array_equal(run(trees=1, rows=2).draws.log_joint, first.draws.log_joint)
    for mesh, words in (({}, "none"), ({"rows": 3}, "3 rows"), ({"trees": 2}, "2 trees"), ({"rows": 1}, "one device")):
        with pytest.raises(ValueError, match=rf"made with mesh 2 rows \(cpu\), and this is mesh {words}"):
            run(**mesh)


@needs_devices
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_a_mesh_of_one_device_is_where_predictions_run(posterior, data):
    other = posterior.replicated(Mesh(np.array(jax.devices()[1:2]), ("rows",)))
    assert {device for leaf in jax.tree.leaves(other.dictionary) for device in leaf.devices()} == {jax.devices()[1]}
    key = jax.device_put(jax.random.key(1), jax.devices()[0])
    np.testing.assert_allclose(
        geode_jax.sample(key, other, 5), geode_jax.sample(key, posterior, 5), rtol=1e-5, atol=1e-5
    )


@needs_devices
@pytest.mark.slow
def test_class_densities_and_estimators_take_a_mesh(data, tmp_path):
    labels = (data[:, 0] > np.median(data[:, 0])).astype(int)
    options = {"depth": 1, "max_rank": 2, "num_trees": 2, "num_warmup": 10, "num_samples": 10, "random_state": 0}
    one = geode_jax.GeodeClassifier(**options).fit(data, labels)
    model = geode_jax.GeodeClassifier(**options, mesh=_mesh(trees=2, rows=2)).fit(data, labels)
    np.testing.assert_allclose(model.predict_proba(data), one.predict_proba(data), atol=0.05)
    members = model.posterior_.members
    assert all(len(leaf.devices()) == 4 for member in members for leaf in jax.tree.leaves(member.dictionary))
    spread = one.posterior_.replicated(_mesh(rows=4))
    hidden = np.where(np.random.default_rng(0).random(data.shape) < 0.3, np.nan, data)
    for rows in (data, hidden):
        expected = geode_jax.class_log_densities(one.posterior_, rows)
        np.testing.assert_allclose(geode_jax.class_log_densities(spread, rows), expected, rtol=1e-3, atol=1e-3)
    model.save(tmp_path / "model.npz")
    assert geode_jax.GeodeClassifier.load(tmp_path / "model.npz").mesh is None


@needs_devices
def test_a_mesh_that_does_not_fit_is_an_error(data):
    def fit(mesh):
        geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER, mesh=mesh)

    with pytest.raises(TypeError, match="mesh: expected Mesh or None, got 4"):
        fit(4)
    with pytest.raises(ValueError, match="mesh: expected axes among 'trees', 'chains', 'rows', got 'batch'"):
        fit(_mesh(batch=2))
    with pytest.raises(ValueError, match="mesh: expected a size of the axis 'trees' that divides 2, got 4"):
        fit(_mesh(trees=4))


@needs_devices
@pytest.mark.parametrize("posterior", ["float32"], indirect=True)
def test_devices_do_not_wait_for_each_other_in_lapack(posterior, data, monkeypatch):
    """With as many CPU devices as threads, one of them fills in, and a fit with missing values is an error."""
    hidden = np.where(np.arange(6) < 2, np.nan, data[:9])
    spread = posterior.replicated(_mesh(rows=4))
    monkeypatch.setattr(row_blocks, "_on_all_devices", None)
    monkeypatch.setenv("NPROC", "3")  # one per device at least
    np.testing.assert_array_equal(geode_jax.impute_mean(spread, hidden), geode_jax.impute_mean(posterior, hidden))
    with pytest.raises(TypeError):
        geode_jax.log_density(spread, data[:9])
    with pytest.raises(ValueError, match=r"mesh: with missing values XLA needs more threads .* got 4 threads"):
        geode_jax.fit(jax.random.key(0), _with_missing(data, "own patterns"), mesh=_mesh(trees=4))
    monkeypatch.setenv("NPROC", "5")
    with pytest.raises(TypeError):
        geode_jax.impute_mean(spread, hidden)


_PROCESS = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import geode_jax
from geode_jax import DictionarySettings, SamplerSettings
with np.load(sys.argv[3]) as file:
    x = file["x"]
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "trees"))  # a process has half of the rows
posterior = geode_jax.fit(
    jax.random.key(0), x, dtype="float64", mesh=mesh, checkpoint=sys.argv[4] + " unfinished",
    dictionary=DictionarySettings(num_trees=2, max_rank=3, depth=2, min_cell_size=10),
    sampler=SamplerSettings(num_warmup=10, num_samples=10, num_chains=2, segment_length=10),
)
posterior.save(sys.argv[4] + f" {sys.argv[2]}.npz")
another = jax.random.key(int(sys.argv[2]))
forest = geode_jax.learn_forest(another, x, dictionary=DictionarySettings(num_trees=2, depth=1))
try:
    geode_jax.sample_posterior(jax.random.key(0), forest, mesh=mesh)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_processes_draw_what_one_does(data, tmp_path):
    x = _with_missing(data, "own patterns")
    np.savez(tmp_path / "x.npz", x=x)
    for code, output, errors in run_two_processes(_PROCESS, tmp_path / "x.npz", tmp_path / "posterior"):
        assert code == 0, errors
        assert "mesh: expected every process to call with the same data" in output
    one = geode_jax.fit(jax.random.key(0), x, dtype="float64", dictionary=DICTIONARY, sampler=SAMPLER)
    found = [geode_jax.Posterior.load(tmp_path / f"posterior {number}.npz") for number in range(2)]
    assert eqx.tree_equal(*found)
    assert_close(found[0].draws, one.draws)
