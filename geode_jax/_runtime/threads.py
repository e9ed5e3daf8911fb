"""The same work on many small matrices, on all cores.

A BLAS that splits a small product over its threads loses more time to their meeting than it gains, and NumPy's and
SciPy's own pools wait for each other besides. So every core takes an item of its own, and BLAS one thread.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from joblib import cpu_count

from geode_jax._runtime.blas import one_blas_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

_here = threading.local()


@functools.cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """The threads of this process, which a fork of it has not.

    They stay, as a fit makes hundreds of calls. And malloc has an arena for every thread, and until one that ended has
    given its own back, a new one for the next: with new threads in every call these held several times the data.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"geode_jax-{process}")


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``[function(item) for item in items]``, each on one thread; the innermost of nested calls runs in order.

    A single item keeps BLAS's threads. There are as many threads as joblib counts CPUs (LOKY_MAX_CPU_COUNT lowers it).
    """
    items = list(items)
    if len(items) < 2 or getattr(_here, "is_worker", False):
        return [function(item) for item in items]

    def work(item: Item) -> Result:
        _here.is_worker = True
        try:
            return function(item)
        finally:
            _here.is_worker = False

    with one_blas_thread():
        return list(_pool(os.getpid(), cpu_count()).map(work, items))
