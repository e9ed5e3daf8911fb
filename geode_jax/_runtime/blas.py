"""BLAS on one thread, for work that already uses all cores.

On a CPU the Cholesky factors and triangular solves of a compiled program are calls to SciPy's BLAS, which splits each
of these small problems over its thread pool. Where other processes use the same cores, these threads wait for each
other, and the work can take many times as long (`python -m benchmarks run contention` measures it).

The threads of XLA's pool that make such a call wait for others of the pool. With as many calls at once as the pool has
threads, which on two cores are two, they deadlock (seen with jaxlib 0.10.2). So threads of the user that fit or
predict at the same time take turns: of fits by segments, of predictions by blocks.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController


@functools.cache
def _libraries() -> list[Any]:
    """All BLAS libraries of this process; cached, because finding them is slow."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _set_threads(library: Any, number: int) -> None:
    # From version 3.8 on, threadpoolctl ignores what a thread sets while another thread's setting holds. But this
    # setting is shared by the whole process, and the thread that restores it need not be the one that set it.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(number)


class _Users:
    """How many blocks hold BLAS at one thread now, and the numbers of threads before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.before: list[int] = []


_users = _Users()
_turn = threading.RLock()


@contextlib.contextmanager
def lapack_turn(platform: str) -> Iterator[None]:
    """Run a compiled program that may call LAPACK, and wait for its results, while no other thread does.

    `platform`: that of the devices; only on a CPU does LAPACK do it.
    """
    with _turn if platform == "cpu" else contextlib.nullcontext(), one_blas_thread():
        yield


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the block, and what it waits for, with BLAS at one thread; then restore the setting.

    The number of threads is a setting of the whole process. So where blocks overlap, in any threads, the first to
    begin sets it and the last to end restores it. Can also be used as a decorator.
    """
    libraries, is_counted = _libraries(), False
    try:  # Ctrl-C may come while the setting is made
        with _users.lock:
            if _users.number == 0:
                _users.before = [library.get_num_threads() for library in libraries]
            _users.number, is_counted = _users.number + 1, True
            if _users.number == 1:
                for library in libraries:
                    _set_threads(library, 1)
        yield
    finally:
        with _users.lock:
            _users.number -= is_counted
            if _users.number == 0 and is_counted:
                for library, number in zip(libraries, _users.before, strict=True):
                    _set_threads(library, number)
