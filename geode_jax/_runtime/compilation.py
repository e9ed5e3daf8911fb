"""How programs are compiled, and that there are not too many: XLA's time to compile is much of a first fit's."""

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

# LLVM's second level of optimisation: on a CPU a third less time to compile than its third, for sweeps that are as fast
# to within a few per cent (`python -m benchmarks.compile_time`).
OPTIONS = {"xla_backend_optimization_level": 2}

# Linux: memory mappings of this process, one per line, and how many it may have.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def make_room() -> None:
    """Drop compiled programs where this process has more than half of the memory mappings that Linux allows it.

    Every program holds some, and XLA crashes at the limit of 65,530: after about a hundred fits to data of different
    shapes, as in a search over settings. What is needed again is compiled again, or read from JAX's persistent cache.
    """
    try:
        used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    except (OSError, ValueError):  # not Linux
        return
    if used > most // 2:
        jax.clear_caches()


def quickly_compiled(function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """``jax.jit`` with `OPTIONS` on a CPU.

    Inside another program, whose options count, it is the function itself. Where `jax_disable_most_optimizations` is
    set it is ``jax.jit`` as it is, which is faster still to compile.
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
