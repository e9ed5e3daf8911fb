"""Buffers that the sampler can use without a copy, and freed memory returned to the system."""

import ctypes
import functools
import sys
from collections.abc import Callable

import numpy as np


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def release_free_memory() -> None:
    """Return the memory of freed arrays that malloc keeps, up to 64 MiB per thread, before large arrays are allocated.

    With data of about that size it is as much as the data. Only glibc needs this: other allocators return it sooner.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that JAX's CPU device can use without a copy: they start at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
