"""How programs are compiled, and a limit on their number: compilation is much of the time of a first fit."""

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

# LLVM's optimisation level 2: on a CPU it takes a third less time to compile than level 3, and sweeps are as fast to
# within a few per cent (`python -m benchmarks.compile_time`).
OPTIONS = {"xla_backend_optimization_level": 2}

# Linux: memory mappings of this process, one per line, and how many it may have.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def drop_programs_if_many() -> None:
    """Drop compiled programs if this process has more than half of the memory mappings that Linux allows.

    Every program holds some, and XLA crashes at the limit of 65,530: after about a hundred fits to data of different
    shapes, as in a search over settings. A dropped program that is needed again is recompiled, or read from JAX's
    persistent cache.
    """
    try:
        used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    except (OSError, ValueError):  # not Linux
        return
    if used > most // 2:
        jax.clear_caches()


def quickly_compiled(function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """``jax.jit`` with `OPTIONS` on a CPU, and without them on other devices.

    Called with tracers, it calls `function` directly: the options of the enclosing program apply. Where
    `jax_disable_most_optimizations` is set it is plain ``jax.jit``, which compiles faster still.
    """

    @cache
    def program(is_plain: bool) -> Callable[..., Result]:
        return jax.jit(function, compiler_options=None if is_plain else OPTIONS, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return function(*args, **kwargs)
        is_plain = jax.config.read("jax_disable_most_optimizations") or jax.default_backend() != "cpu"
        return program(is_plain)(*args, **kwargs)

    return call
