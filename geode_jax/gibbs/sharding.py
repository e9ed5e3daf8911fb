"""Sharding of a run's arrays over several devices: trees, chains and rows along the axes of a mesh.

Trees and chains never communicate. Devices that share the rows of a tree add up their node sums once per sweep, which
is all that a sweep needs from other devices' rows. Random numbers are the same as on one device.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geode_jax._typing import Array
from geode_jax.gibbs.chain import Chain
from geode_jax.model.candidate_statistics import AnyStatistics, CandidateStatistics, reshard
from geode_jax.model.on_host import changed_on_host, on_host
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.problem import Problem
from geode_jax.model.statistics import ROW_BLOCKS, Statistics
from geode_jax.rows.processes import ALONE, Processes

TREES, CHAINS, ROWS = "trees", "chains", "rows"
BY_TREE = PartitionSpec(TREES)
BY_CHAIN = PartitionSpec(TREES, CHAINS)
# How many numbers of an array are compared between processes.
NUMBERS_COMPARED = 2**20
_Pytree = TypeVar("_Pytree")


def with_all_axes(mesh: Mesh) -> Mesh:
    """The mesh with all three axes; those that it lacks are added with size one."""
    names = (TREES, CHAINS, ROWS)
    order = [mesh.axis_names.index(name) for name in names if name in mesh.axis_names]
    sizes = [mesh.shape.get(name, 1) for name in names]
    return Mesh(np.transpose(mesh.devices, order).reshape(sizes), names)


def row_owners(mesh: Mesh) -> np.ndarray:
    """The process whose devices are at each place along the rows of a mesh, (R,).

    Raises ValueError unless a process's devices have all trees and chains of adjacent parts of the rows.
    """
    devices = np.moveaxis(with_all_axes(mesh).devices, 2, 0).reshape(mesh.shape.get(ROWS, 1), -1)
    return owners_in_order(np.vectorize(lambda device: device.process_index, otypes=[int])(devices))


def owners_in_order(owners: np.ndarray) -> np.ndarray:
    """The process at each place along the rows, (R,), where `owners`, (R, P), are those of the devices there."""
    runs = np.flatnonzero(np.diff(owners[:, 0])).size + 1
    if (owners != owners[:, :1]).any() or runs != np.unique(owners).size:
        raise ValueError(
            "mesh: expected the processes to follow each other along the axis 'rows', each with all devices of its part"
            f" of it, where processes bring their own rows; got the processes {owners.tolist()} along that axis"
        )
    return owners[:, 0]


def place_problem(problems: Problem, mesh: Mesh, sizes: tuple[int, ...] | None = None) -> Problem:
    """Shard a problem with a leading axis F on its arrays over trees and rows.

    `sizes`: how many rows each process has, in the order along the mesh, where statistics are those of this process's
    rows; None where every process has them all.
    """
    partial = problems.partial
    by_row = PartitionSpec(TREES, None, ROWS)
    if sizes is None:
        statistics = _spread(problems.statistics, problems.tree.num_nodes, mesh.shape[ROWS])
    else:
        statistics = _with_shards(problems.statistics, mesh, sizes)
    problems = eqx.tree_at(lambda it: it.statistics, problems, statistics)
    specs = jax.tree.map(lambda _: BY_TREE, problems)
    if isinstance(statistics, CandidateStatistics):
        pairs = PartitionSpec(TREES, ROWS)
        specs = eqx.tree_at(
            lambda it: (it.statistics.residual, it.statistics.squared, it.statistics.block_node), specs, (pairs,) * 3
        )
        specs = eqx.tree_at(lambda it: (it.statistics.node, it.statistics.position), specs, (by_row, by_row))
    else:
        specs = eqx.tree_at(lambda it: (it.statistics.residual, it.statistics.squared), specs, (by_row, by_row))
    if partial is not None:
        partial = _pad_partial(partial, problems.tree.num_nodes, statistics.row_blocks)
        rows = jax.tree.map(lambda _: by_row, partial)
        if partial.entry is not None:  # matrices that rows share
            rows = eqx.tree_at(lambda it: (it.entry_node, it.gram, it.root), rows, (BY_TREE, BY_TREE, BY_TREE))
        specs = eqx.tree_at(lambda it: it.partial, specs, rows)
        problems = eqx.tree_at(lambda it: it.partial, problems, partial)

    def placed(leaf: Array | np.ndarray, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(mesh, spec)
        if sizes is None or ROWS not in spec:
            return place(leaf, sharding)
        return place_own(np.asarray(leaf), sharding, _global_shape(leaf.shape, spec, mesh))

    return jax.tree.map(placed, problems, specs)


def _global_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of an array of which this process has `shape`."""
    axis, owners = tuple(spec).index(ROWS), row_owners(mesh)
    num_own = int((owners == jax.process_index()).sum())
    return (*shape[:axis], shape[axis] // num_own * owners.size, *shape[axis + 1 :])


def _with_shards(statistics: AnyStatistics, mesh: Mesh, sizes: tuple[int, ...]) -> AnyStatistics:
    """Statistics of this process's rows, with a leading axis F, that know how many rows each device of all has."""
    owners = row_owners(mesh)
    _, first, counts = np.unique(owners, return_index=True, return_counts=True)
    size = statistics.is_row.shape[-1] // int((owners == jax.process_index()).sum())
    pairs = zip(sizes, counts[np.argsort(first)].tolist(), strict=True)
    rows = [np.clip(number - size * np.arange(count), 0, size) for number, count in pairs]
    num_trees = statistics.num_rows.shape[0]
    return changed_on_host(
        statistics,
        shard_rows=np.tile(np.concatenate(rows).astype(np.int32), (num_trees, 1)),
        num_rows=np.full(num_trees, sum(sizes), np.int32),
        row_blocks=math.lcm(ROW_BLOCKS, mesh.shape[ROWS]),
    )


def _spread(statistics: AnyStatistics, num_nodes: int, num_devices: int) -> AnyStatistics:
    """Statistics with a leading axis F, in as many shards of rows as devices, and places that these can share."""
    row_blocks = math.lcm(ROW_BLOCKS, num_devices)
    num_places = statistics.is_row.shape[-1]
    more = -num_places % row_blocks
    if isinstance(statistics, CandidateStatistics) and (more or statistics.residual.shape[1] != num_devices):
        statistics = reshard(statistics, num_nodes, num_devices, num_places + more)
    padded = {}
    if more and isinstance(statistics, Statistics):
        for name in ("residual", "squared"):
            leaf = getattr(statistics, name)
            padded[name] = np.pad(leaf, [(0, more if axis == 2 else 0) for axis in range(leaf.ndim)])
    return changed_on_host(statistics, **padded, row_blocks=row_blocks)


def check_same(problems: Problem, processes: Processes = ALONE) -> None:
    """Raise ValueError unless every process has the same problem: each process learned it separately.

    Where `processes` bring their own rows, the rows' statistics are not compared. Of every array only some numbers are,
    evenly spaced. Dictionaries are learned from all rows, so that a difference in any row shows in nearly all
    statistics.
    """
    if not processes.is_alone:
        problems = eqx.tree_at(lambda it: it.statistics, problems, None)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(problems):
        flat = leaf.reshape(-1)
        digest.update(np.ascontiguousarray(flat[:: 1 + flat.size // NUMBERS_COMPARED]).data)
    own = np.frombuffer(digest.digest(), np.uint8)
    if not processes.is_alone:
        if (processes.each(own.astype(np.int64)) != own).any():
            raise ValueError(
                "mesh: expected every process to learn the same trees and dictionaries, bit for bit; that takes the"
                " same versions of all packages, and machines alike"
            )
        return
    try:
        multihost_utils.assert_equal(own)
    except AssertionError:
        raise ValueError(
            "mesh: expected every process to call with the same data, key and settings, and with the same versions of"
            " all packages; got different trees or dictionaries"
        ) from None


def chain_shardings(chains: Chain, mesh: Mesh) -> Chain:
    """The sharding of each array of chains with leading axes F and C."""
    specs = jax.tree.map(lambda _: BY_CHAIN, chains)
    specs = eqx.tree_at(lambda it: it.state.node, specs, PartitionSpec(TREES, CHAINS, ROWS))
    if chains.state.partial is not None:
        by_row = PartitionSpec(TREES, CHAINS, None, ROWS)
        partial = specs.state.partial
        rows = eqx.tree_at(lambda it: (it.node, it.residual, it.squared), partial, (by_row, by_row, by_row))
        specs = eqx.tree_at(lambda it: it.state.partial, specs, rows)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(leaf: Array | np.ndarray, sharding: NamedSharding) -> Array:
    """Place an array with the given sharding; every process must have the whole of it.

    Every process sends the shards of its own devices: device_put would first compare whole arrays between processes.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = place(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_own(leaf: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> Array:
    """Place an array of `shape` of which every process has the part of its own devices, `leaf`."""
    own = _own_part(sharding, shape)
    return jax.make_array_from_callback(shape, sharding, lambda index: leaf[_within(index or (), own)])


def fetch_own(values: _Pytree) -> _Pytree:
    """NumPy copies of the parts of arrays that are on devices of this process; :func:`place_own` undoes it."""

    def fetched(leaf: Array) -> np.ndarray:
        own = _own_part(leaf.sharding, leaf.shape)
        found = np.empty([part.stop - part.start for part in own], leaf.dtype)
        for shard in leaf.addressable_shards:
            found[_within(shard.index, own)] = np.asarray(shard.data)
        return found

    return jax.tree.map(fetched, values)


def own_shape(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of this process's part of an array of this shape."""
    return tuple(part.stop - part.start for part in _own_part(sharding, shape))


def _own_part(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of an array of this shape that the devices of this process have together."""
    parts = [part or () for part in sharding.addressable_devices_indices_map(shape).values()]
    return tuple(
        slice(min(part[axis].start or 0 for part in parts), max(part[axis].stop or end for part in parts))
        for axis, end in enumerate(shape)
    )


def _within(index: tuple[slice, ...], part: tuple[slice, ...]) -> tuple[slice, ...]:
    """The index of a block of an array, as an index into a part that has the block."""
    pairs = zip(index, part, strict=True)
    return tuple(
        slice((at.start or 0) - own.start, (own.stop if at.stop is None else at.stop) - own.start) for at, own in pairs
    )


def fetch(values: _Pytree) -> _Pytree:
    """NumPy copies of arrays, however they are sharded."""

    def fetched(leaf: Array) -> np.ndarray:
        if not leaf.is_fully_addressable:
            leaf = _everywhere(leaf)
        return np.asarray(leaf)

    return jax.tree.map(fetched, values)


def _everywhere(leaf: Array) -> Array:
    """The array replicated on every device, so that every process can read all of it."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    return _replicate(NamedSharding(sharding.mesh, PartitionSpec()))(leaf)


@cache
def _replicate(sharding: NamedSharding) -> Callable[[Array], Array]:
    """One function for each mesh, so that it is compiled once for each shape and not in every segment."""
    return jax.jit(lambda it: it, out_shardings=sharding)


def _pad_partial(partial: PartialRows, num_nodes: int, row_blocks: int) -> PartialRows:
    """Pad to a multiple of `row_blocks` places with copies of the last that hold no row; other draws do not change."""
    num_places, num_candidates = partial.node.shape[2:]
    more = -num_places % row_blocks
    if more == 0:
        return partial

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, more) if axis == 2 else (0, 0) for axis in range(leaf.ndim)], mode="edge")

    fields = {field.name: getattr(partial, field.name) for field in dataclasses.fields(partial)}
    matrices = ("entry_node", "gram", "root")
    for name, leaf in fields.items():
        if name not in matrices and leaf is not None:
            fields[name] = pad(leaf)
    if partial.entry is None:  # every row has its own
        for name in matrices:
            leaf = fields[name]
            by_place = leaf.reshape(*leaf.shape[:2], num_places, num_candidates, *leaf.shape[3:])
            fields[name] = pad(by_place).reshape(*leaf.shape[:2], -1, *leaf.shape[3:])
    fields["node"][:, :, num_places:] = num_nodes
    return on_host(PartialRows, **fields)
