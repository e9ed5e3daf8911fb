"""BLAS on one thread, for work that has the cores already.

On a CPU the Cholesky factors and triangular solves of a compiled program are calls of SciPy's BLAS, which splits each
of these small problems over threads of its own. Where other processes use the same cores, these threads wait for each
other, and the work can take a hundred times as long (`python -m benchmarks run contention`).
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController


@functools.cache
def _libraries() -> list[Any]:
    """All BLAS libraries of this process; looking for them takes a while."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _set_threads(library: Any, number: int) -> None:
    # Since its version 3.8 threadpoolctl ignores what a thread sets while another one has set something. But the number
    # is one for the whole process: the thread that restores it need not be the one that has set it.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(number)


class _Users:
    """How many blocks want one thread now, and how many threads there were before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.before: list[int] = []


_users = _Users()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the block, and what it waits for, with BLAS at one thread; then restore the setting.

    The number of threads is one for the whole process. So of blocks that overlap, in whatever threads, the first one
    to begin sets it and the last one to end restores it. Also a decorator.
    """
    with _users.lock:
        if _users.number == 0:
            _users.before = [library.get_num_threads() for library in _libraries()]
            for library in _libraries():
                _set_threads(library, 1)
        _users.number += 1
    try:
        yield
    finally:
        with _users.lock:
            _users.number -= 1
            if _users.number == 0:
                for library, number in zip(_libraries(), _users.before, strict=True):
                    _set_threads(library, number)
