"""Memory as the sampler takes it over, and memory that was freed, given back to the system."""

import ctypes
import functools
import sys
from collections.abc import Callable

import numpy as np


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def release_free_memory() -> None:
    """Give back what malloc keeps of freed arrays, up to 64 MiB for every thread, before large ones are made.

    With data of about that size it is as much as the data. Only glibc is asked: others give back sooner.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that a CPU's device takes over without a copy: they begin at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
