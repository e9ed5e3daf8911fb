"""The same work on many small matrices, in parallel on all cores.

A BLAS that splits a small product over threads loses more time to synchronisation than it gains, and the separate
thread pools of NumPy and SciPy also wait for each other. So every core takes one item, and BLAS uses one thread.
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
    """The thread pool of `process`; a fork has no threads of its parent, so it gets a new pool.

    The pool is kept, as a fit makes hundreds of calls. New threads in every call would also cost memory: malloc has an
    arena per thread and does not reuse that of an ended thread at once, and these arenas held several times the data.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"geode_jax-{process}")


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item], *, in_order: bool = False) -> list[Result]:
    """``[function(item) for item in items]``, each item on one thread; a call made from such a thread runs in order.

    With a single item BLAS keeps its threads. The number of threads is joblib's number of CPUs (LOKY_MAX_CPU_COUNT
    lowers it). `in_order`: one item after the other, on this thread.
    """
    items = list(items)
    if in_order or len(items) < 2 or getattr(_here, "is_worker", False):
        return [function(item) for item in items]

    def work(item: Item) -> Result:
        _here.is_worker = True
        try:
            return function(item)
        finally:
            _here.is_worker = False

    with one_blas_thread():
        return list(_pool(os.getpid(), cpu_count()).map(work, items))
