"""Sums over processes: all that the learning of a dictionary needs from rows on other machines."""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geode_jax._runtime.jax_settings import jax_settings

# Numbers that are summed at once. With two that tell of the call they are padded to a power of two, so that a handful
# of programs serves all sizes.
LARGEST, SMALLEST = 2**20 - 2, 2**8


# What XLA says where the libraries that carry sums between processes have lost one of them.
LOST = re.compile(
    "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|FAILED_PRECONDITION|DEADLINE_EXCEEDED): "
    ".*(gloo|nccl|heartbeat|coordination|connection)",
    re.IGNORECASE | re.DOTALL,
)


@contextlib.contextmanager
def lost_processes_are_told(mesh: Mesh | None) -> Iterator[None]:
    """Context in which a failed exchange between the processes of a mesh is a RuntimeError that says what to do."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if mesh is None or not mesh.is_multi_process or not LOST.match(str(error)):
            raise
        raise RuntimeError(
            "another process of this fit died, or ended with an error of its own; start all of them again (with the"
            " same checkpoint, the fit goes on from the last segment that all have saved)"
        ) from error


class SumOverProcesses:
    """Adds up arrays of all processes of a distributed run (`jax.distributed`); every process gets the same sum.

    Every process must make the same calls in the same order, so only the thread that made this may call it. `devices`:
    one of every process; its own has part in the sum.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        mesh = Mesh(np.array(devices), ("processes",))
        self._number, self._apart = len(devices), NamedSharding(mesh, PartitionSpec("processes"))
        self._add = jax.jit(lambda parts: jnp.sum(parts, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._thread, self._calls = threading.get_ident(), 0

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The sum, (m,), of everyone's `values`, (m,), in float64."""
        assert threading.get_ident() == self._thread, "other threads call in another order in every process"
        found = np.empty(values.size)
        for start in range(0, values.size, LARGEST):
            part = values[start : start + LARGEST]
            self._calls += 1
            header = np.array([self._calls, part.size])
            padded = np.zeros((1, max(SMALLEST, 1 << (part.size + 1).bit_length())))
            padded[0, :2], padded[0, 2 : 2 + part.size] = header, part
            with jax_settings(np.float64):
                shape = self._number, padded.shape[1]
                parts = jax.make_array_from_process_local_data(self._apart, padded, shape)
                total = np.asarray(self._add(parts))
            if (total[:2] != self._number * header).any():
                raise RuntimeError(
                    "the processes have come to different trees or choices; they need the same versions of all"
                    " packages, and machines alike"
                )
            found[start : start + LARGEST] = total[2 : 2 + part.size]
        return found
