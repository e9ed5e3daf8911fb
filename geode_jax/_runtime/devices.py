"""Values on every device of a mesh: computations run where their values are.

Several CPU devices of one process share one pool of threads. With as many devices in LAPACK as the pool has threads,
they deadlock (`_runtime/blas.py` says why).
"""

import os
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The axis of the mesh of a process's own devices.
OWN_DEVICES = "devices"

Values = TypeVar("Values")


def replicated(values: Values, mesh: Mesh | None) -> Values:
    """Arrays copied to every device of the mesh that belongs to this process; to JAX's default device if there is none.

    To be called within the precision of the arrays: JAX would otherwise convert float64 to float32.
    """
    own = [] if mesh is None else _own_devices(mesh)
    if not own:
        return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), values)
    return jax.device_put(values, everywhere(Mesh(np.array(own), (OWN_DEVICES,))))


def everywhere(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device of the mesh has."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_of(values: object) -> Mesh | None:
    """The mesh that any of the arrays was :func:`replicated` to; None if none was."""
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated:
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


def on_one(values: Values, mesh: Mesh) -> Values:
    """Arrays on the first device of a mesh only."""
    return jax.device_put(values, mesh.devices.flat[0])


def may_call_lapack(mesh: Mesh) -> bool:
    """Whether all devices of the mesh can be in LAPACK at the same time."""
    number = sum(one.platform == "cpu" for one in _own_devices(mesh))
    return number < 2 or num_xla_threads() > number


def num_xla_threads() -> int:
    """Threads of XLA's pool on the CPU: NPROC where that is set, else one per core; at least one per device."""
    given = os.environ.get("NPROC", "")
    if given.isdecimal():
        number = int(given)
    else:
        number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(number, len(jax.local_devices(backend="cpu")))


def _own_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that belong to this process."""
    return [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
