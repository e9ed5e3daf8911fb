"""The same work on many small matrices, on all cores.

A BLAS that splits a small product over its threads loses more time to their meeting than it gains, and NumPy's and
SciPy's own pools wait for each other besides. So every core takes an item of its own, and BLAS one thread.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from joblib import cpu_count
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")

_here = threading.local()


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


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

    # not joblib's Parallel, which takes ten times as long to start: a fit makes hundreds of these calls
    with _controller().limit(limits=1, user_api="blas"), ThreadPoolExecutor(min(cpu_count(), len(items))) as pool:
        return list(pool.map(work, items))
