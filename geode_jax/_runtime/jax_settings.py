"""The JAX settings that the package's programs run under, whatever the user's own are."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The process that first ran a program of ours.
_first_process: list[int] = []


@contextlib.contextmanager
def jax_settings(dtype: Any) -> Iterator[None]:
    """Context in which arrays of `dtype` keep it, and a key means the same numbers under any global setting.

    64-bit types are on for float64 and off for float32; random bits do not depend on how arrays are sharded; strict
    promotion of ranks and types, and guards of transfers, are off; a mesh set by ``jax.set_mesh`` is not seen (unless a
    program of the user's is traced: JAX refuses to change it there). The settings are local to the thread and restored
    on exit, so the user's global JAX configuration is never touched.

    Raises RuntimeError in a process that was forked from one in which a program of ours had run.
    """
    _check_not_forked()
    with (
        jax.enable_x64(np.dtype(dtype) == np.dtype(jnp.float64)),
        jax.threefry_partitionable(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
        _no_mesh(),
    ):
        yield


def _no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Context without the user's mesh: under it arrays would lie on all of its devices, and no other could be used."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    except ValueError:  # JAX refuses while a program of the user's is traced
        return contextlib.nullcontext()


def _check_not_forked() -> None:
    process = os.getpid()
    if not _first_process:
        _first_process.append(process)
    if _first_process[0] != process:
        raise RuntimeError(
            "this process was forked from one that had already run a program of geode_jax. JAX's threads do not survive"
            " a fork, and it would hang. Start workers with multiprocessing.get_context('spawn'), or with joblib's"
            " default backend"
        )
