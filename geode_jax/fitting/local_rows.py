"""Rows that each process brings itself, checked, and what the processes tell each other of them before a fit."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from geode_jax._files.archive import encode
from geode_jax._runtime.collectives import SumOverProcesses
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.fitting.row_files import checked_rows
from geode_jax.gibbs.sharding import row_owners
from geode_jax.rows.files import RowFiles
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.row_space import uses_row_space


def bring_rows(
    X: ArrayLike,
    mesh: Mesh | None,
    key: KeyArray,
    settings: list[Any],
    check: Callable[[int], object] = lambda num_rows: None,
) -> tuple[np.ndarray | RowFiles, Processes, tuple[int, ...]]:
    """The rows of this process, all processes that share rows along the mesh, and how many devices each has for them.

    `check` is called with the number of this process's rows, to check what belongs to them. Raises TypeError or
    ValueError, in every process, if any of them has rows that cannot be fitted, or another key or other settings.
    """
    if mesh is None:
        raise ValueError("mesh: expected a jax.sharding.Mesh with an axis 'rows' for process_local=True, got None")
    owners = row_owners(mesh)
    members = list(dict.fromkeys(owners.tolist()))
    if jax.process_index() not in members:
        raise ValueError(f"mesh: expected devices of this process, {jax.process_index()}, got those of {members}")
    devices = tuple(int((owners == member).sum()) for member in members)
    index = members.index(jax.process_index())
    processes = ALONE
    if len(members) > 1:
        first = {device.process_index: device for device in reversed(mesh.devices.ravel().tolist())}
        add = SumOverProcesses([first[member] for member in members])
        processes = Processes((0,) * len(members), index, add)
    data: np.ndarray | RowFiles = np.zeros((0, 0))
    error: Exception | None = None
    try:
        data = checked_rows(X, min_rows=0, allow_nan=False)
        check(len(data))
    except Exception as found:  # whatever it is, the other processes must hear of it
        error = found
    call = hashlib.sha256(json.dumps([encode(item) for item in settings]).encode())
    call.update(str(jax.random.key_impl(key)).encode())
    call.update(np.asarray(jax.random.key_data(key)).data)
    of_call = np.frombuffer(call.digest()[:8], np.uint32).astype(np.int64)
    everyones = processes.each(np.array([error is None, *data.shape, *of_call]).astype(np.int64))
    if error is not None:
        raise error
    if not everyones[:, 0].all():
        raise ValueError(
            f"X: another process, number {members[int(np.argmin(everyones[:, 0]))]}, has rows or labels that cannot be"
            " fitted; its own error says why"
        )
    if (everyones[:, 2] != data.shape[1]).any():
        raise ValueError(f"X: expected as many features in every process, got {everyones[:, 2].tolist()}")
    if (everyones[:, 3:] != of_call).any():
        raise ValueError("key: expected the same key and settings in every process, got others")
    num_rows = int(everyones[:, 1].sum())
    if num_rows < 2:
        raise ValueError(f"X: expected at least 2 rows in all processes together, got {num_rows}")
    if len(members) > 1 and uses_row_space(num_rows, data.shape[1]):
        raise ValueError(
            "process_local: expected more rows than half the number of features in all processes together, got"
            f" {num_rows} rows of {data.shape[1]} features; pass all rows in every process, without process_local"
        )
    if len(members) > 1:
        processes = Processes(tuple(everyones[:, 1].tolist()), index, processes.add)
    return data, processes, devices
